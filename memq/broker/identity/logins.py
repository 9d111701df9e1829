"""Logins of clients by SCRAM-SHA-256: the users are stored with the rules of permissions."""

from __future__ import annotations

import random
from collections.abc import Callable

from memq.errors import DeniedError
from memq.patterns import matches
from memq.permissions import RuleSet
from memq.runtime.logs import EventLog
from memq.scram import NONCE_BYTES, Credential, ScramServer, decoy_credential, user_of


class Logins:
    """Checks passwords.

    `known` returns the stored users, and raises NotReadyError before the first read. `reserved` are names of brokers,
    which have no password.
    """

    def __init__(
        self,
        known: Callable[[], RuleSet],
        reserved: list[str],
        chance: random.Random,
        events: EventLog,
        *,
        encrypted: bool,
    ) -> None:
        self._known = known
        self._reserved = reserved
        self._chance = chance
        self._events = events
        self._encrypted = encrypted

    def begin(self, first: str) -> ScramServer:
        """Return the exchange that a client's first message begins. An unknown user gets one that must fail.

        Raises: DeniedError without TLS; ProtocolError, NotReadyError.
        """
        if not self._encrypted:
            raise DeniedError("this broker takes passwords over TLS only", hint="give the broker certificates in [tls]")
        stored = self._known()
        user = user_of(first)
        reserved = any(matches(pattern, user) for pattern in self._reserved)
        found = None if reserved else _found(stored, user)
        decoy = decoy_credential(bytes.fromhex(stored.decoys), user)
        return ScramServer(first, found or decoy, self._chance.randbytes(NONCE_BYTES).hex())

    def end(self, exchange: ScramServer, final: str, peer: str) -> str:
        """Return the verdict on a client's proof. Raises: DeniedError, with an event; ProtocolError."""
        verdict = exchange.verdict(final)
        if verdict is None or not self.holds(exchange.credential):
            user = exchange.credential.user
            self._events.warning("login-refused", f"{peer}: no user '{user[:60]}' with this password")
            raise DeniedError("user or password is wrong", hint="memq users list shows the users")
        return verdict

    def holds(self, credential: Credential) -> bool:
        """Whether a user has this credential still."""
        return _found(self._known(), credential.user) == credential


def _found(stored: RuleSet, user: str) -> Credential | None:
    return next((each for each in stored.users if each.user == user), None)
