"""Public keys of an issuer of tokens: a JWK set (RFC 7517) in a file, or at a URL of the operator.

Theory: a token is checked without a request, by the keys in memory. The keys of a file are read again when it has
changed. Those of a URL are fetched each `jwks_refresh_ms`, and at once for a token of an unknown key: an issuer signs
with a new key soon after it publishes it. Each FETCH_INTERVAL_S has one such fetch at most, since strangers cause it.
A set that can't be fetched, or is not sound, leaves the keys before it in use.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any, Protocol

from memq.errors import CorruptDataError, InvalidSettingError, MemqError, NotReadyError
from memq.limits import KIB
from memq.runtime.clock import Clock
from memq.runtime.https import https_context, https_get, https_url
from memq.runtime.logs import EventLog
from memq.runtime.tls import FollowedFiles

SET_BYTES_MAX = 256 * KIB
FETCH_S_MAX = 10.0  # from the connection to the last byte
FETCH_INTERVAL_S = 10.0  # between fetches at least, and after one that failed
NOT_READY_MS = 500


class KeySource(Protocol):
    """The public keys of an issuer."""

    def current(self) -> list[Any]:
        """Return the keys as they are known now. Raises: NotReadyError before they were read."""
        ...

    def renew(self) -> bool:
        """Whether the keys are read again at once, because one is missing."""
        ...

    async def follow(self) -> None:
        """Keep the keys new, without end if there is anything to do."""
        ...


class KeyFile:
    """See `KeySource`. Raises: InvalidSettingError for a file that has no keys at first."""

    def __init__(self, file: str, events: EventLog) -> None:
        def load() -> list[Any]:
            try:
                with open(file, "rb") as opened:
                    return keys_in(opened.read(SET_BYTES_MAX + 1))
            except (OSError, CorruptDataError) as error:
                raise InvalidSettingError(
                    f"can't read jwks_file '{file}': {error}", hint="it is a JWK set of public keys, in JSON"
                ) from error

        def failed(error: InvalidSettingError) -> None:
            events.error("keys-not-reloaded", f"{error}; the keys that were loaded before count")

        self._followed = FollowedFiles((file,), load, failed)

    def current(self) -> list[Any]:
        """See `KeySource.current`."""
        return self._followed.content

    def renew(self) -> bool:
        """See `KeySource.renew`: the file is as new as it can be."""
        return False

    async def follow(self) -> None:
        """See `KeySource.follow`."""


class KeyUrl:
    """See `KeySource`. `follow` must run. Raises: InvalidSettingError."""

    def __init__(self, url: str, ca_file: str, refresh_ms: int, clock: Clock, events: EventLog) -> None:
        self._url = https_url("jwks_url", url)
        self._where = f"https://{self._url.netloc}{self._url.path}"
        self._refresh_s = max(refresh_ms / 1_000, FETCH_INTERVAL_S)

        def failed(error: InvalidSettingError) -> None:
            events.error("keys-not-reloaded", f"{error}; the authorities that were loaded before count")

        self._authorities = FollowedFiles((ca_file,), lambda: https_context(ca_file), failed)
        self._clock = clock
        self._events = events
        self._unfetched = events.outage("keys-not-fetched", "keys-fetched")
        self._keys: list[Any] | None = None
        self._began_s = 0.0
        self._fetching = False
        self._wanted = asyncio.Event()

    def current(self) -> list[Any]:
        """See `KeySource.current`."""
        if self._keys is None:
            raise NotReadyError("the broker has not fetched the keys of tokens yet", retry_after_ms=NOT_READY_MS)
        return self._keys

    def renew(self) -> bool:
        """See `KeySource.renew`."""
        if self._fetching:  # no second fetch after it: strangers could cause one after another
            return True
        if self._clock.monotonic() - self._began_s < FETCH_INTERVAL_S:
            return False
        self._wanted.set()
        return True

    async def follow(self) -> None:
        """Fetch the keys again and again, without end."""
        while True:
            self._wanted.clear()
            self._began_s, self._fetching = self._clock.monotonic(), True
            try:
                found = await self._fetch()
            except MemqError as error:
                pause_s = FETCH_INTERVAL_S
                kept = f"the {len(self._keys)} keys before count" if self._keys else "no token can be checked"
                self._unfetched.failed(f"{self._where}: {error}; {kept}")
            else:
                pause_s = self._refresh_s
                self._unfetched.passed()
                self._note(found)
            finally:
                self._fetching = False
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wanted.wait()

    async def _fetch(self) -> list[Any]:
        """Return the keys at the URL. Raises: as `https_get`, `keys_in`."""
        return keys_in(
            await https_get(
                self._url, lambda: self._authorities.content, bytes_max=SET_BYTES_MAX, timeout_s=FETCH_S_MAX
            )
        )

    def _note(self, found: list[Any]) -> None:
        """Take the keys, and log which ones are new or gone."""
        before, after = (sorted(str(key.key_id)[:60] for key in keys) for keys in (self._keys or [], found))
        if before != after:
            self._events.info("keys-changed", f"{self._where}: keys {', '.join(after)}")
        self._keys = found


def keys_in(data: bytes) -> list[Any]:
    """Return the public keys in a JWK set.

    Raises: CorruptDataError; InvalidSettingError without the package pyjwt.
    """
    try:
        import jwt
    except ImportError as error:
        raise InvalidSettingError("[tokens] needs the package pyjwt", hint="pip install 'memq[tokens]'") from error
    if len(data) > SET_BYTES_MAX:
        raise CorruptDataError(f"the key set has more than {SET_BYTES_MAX} bytes")
    try:
        keys = jwt.PyJWKSet.from_dict(json.loads(data)).keys
    except (ValueError, TypeError, AttributeError, RecursionError, jwt.PyJWTError) as error:
        raise CorruptDataError(f"no JWK set with a usable key: {str(error)[:200]}") from error
    if any(key.key_type == "oct" for key in keys):  # who can check such a token can also make one
        raise CorruptDataError("the key set has a secret key; public keys are wanted: RS256, ES256, EdDSA")
    return list(keys)
