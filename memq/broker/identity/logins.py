"""Logins of clients by SCRAM-SHA-256: the users are stored with the rules of permissions."""

from __future__ import annotations

import random
from collections.abc import Callable

from memq.broker.identity.guesses import Guesses
from memq.errors import DeniedError, ThrottledError
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
        self._guesses = Guesses()

    def begin(self, first: str, host: str) -> tuple[ScramServer, float]:
        """Return the exchange that a client's first message begins, and the delay of its challenge in seconds.

        An unknown user gets one that must fail.
        Raises: DeniedError without TLS; ThrottledError after too many failures; ProtocolError, NotReadyError.
        """
        if not self._encrypted:
            raise DeniedError("this broker takes passwords over TLS only", hint="give the broker certificates in [tls]")
        stored = self._known()
        user = user_of(first)
        self._check_guesses(user, host)
        reserved = any(matches(pattern, user) for pattern in self._reserved)
        found = None if reserved else _found(stored, user)
        decoy = decoy_credential(bytes.fromhex(stored.decoys), user)
        exchange = ScramServer(first, found or decoy, self._chance.randbytes(NONCE_BYTES).hex())
        return exchange, self._guesses.delay_s(user, host, self._events.now_s())

    def end(self, exchange: ScramServer, final: str, host: str, peer: str) -> str:
        """Return the verdict on a client's proof.

        Raises: DeniedError, with an event; ThrottledError if others have failed meanwhile; ProtocolError.
        """
        user = exchange.credential.user
        self._check_guesses(user, host)
        verdict = exchange.verdict(final)
        if verdict is None or not self.holds(exchange.credential):
            self._guesses.failed(user, host, self._events.now_s())
            text = f"{peer}: no user '{user[:60]}' with this password"
            self._events.warning("login-refused", text, source=host)
            raise DeniedError("user or password is wrong", hint="memq users list shows the users")
        self._guesses.passed(user, host)
        return verdict

    def _check_guesses(self, user: str, host: str) -> None:
        try:
            self._guesses.check(user, host, self._events.now_s())
        except ThrottledError as error:
            self._events.warning("login-slowed", f"user '{user[:60]}': {error}", source=host)
            raise

    def holds(self, credential: Credential) -> bool:
        """Whether a user has this credential still."""
        return _found(self._known(), credential.user) == credential


def _found(stored: RuleSet, user: str) -> Credential | None:
    return next((each for each in stored.users if each.user == user), None)
