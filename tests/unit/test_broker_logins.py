"""Logins at a broker: whose password counts, and when."""

from __future__ import annotations

import random

import pytest

from memq.broker.identity.logins import Logins
from memq.errors import DeniedError
from memq.permissions import RuleSet
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.scram import Credential, ScramClient, credential_of

HOST, PEER = "192.0.2.1", "192.0.2.1:5000"
SALT = b"0123456789abcdef"
ANN = credential_of("ann", "pencil", SALT, 4_096)
BROKER = credential_of("broker-1", "pencil", SALT, 4_096)
ANEW = credential_of("ann", "brush", SALT, 4_096)


class Stored:
    """The users as the broker knows them."""

    def __init__(self, *users: Credential) -> None:
        self.rules = RuleSet(version=1, users=users, decoys="00ff")

    def logins(self, *, encrypted: bool = True, reserved: tuple[str, ...] = ("broker-*",)) -> Logins:
        events = EventLog(SystemClock())
        return Logins(lambda: self.rules, list(reserved), random.Random(1), events, encrypted=encrypted)


def log_in(logins: Logins, user: str, password: str = "pencil") -> None:
    client = ScramClient(user, password, "abc")
    exchange, _ = logins.begin(client.first(), HOST)
    client.check(logins.end(exchange, client.final(exchange.challenge), HOST, PEER))


def test_a_password_is_never_taken_without_tls() -> None:
    log_in(Stored(ANN).logins(), "ann")
    with pytest.raises(DeniedError, match="over TLS only"):
        log_in(Stored(ANN).logins(encrypted=False), "ann")


def test_a_name_of_brokers_has_no_password_although_one_is_stored() -> None:
    stored = Stored(ANN, BROKER)
    log_in(stored.logins(reserved=()), "broker-1")
    with pytest.raises(DeniedError, match="user or password is wrong"):
        log_in(stored.logins(), "broker-1")


@pytest.mark.parametrize("users", [(), (ANEW,)])
def test_a_login_that_began_before_the_user_changed_is_refused(users: tuple[Credential, ...]) -> None:
    stored = Stored(ANN)
    logins, client = stored.logins(), ScramClient("ann", "pencil", "abc")
    exchange, _ = logins.begin(client.first(), HOST)
    assert logins.holds(exchange.credential)
    stored.rules = RuleSet(version=2, users=users, decoys="00ff")
    assert not logins.holds(exchange.credential)
    with pytest.raises(DeniedError, match="user or password is wrong"):
        logins.end(exchange, client.final(exchange.challenge), HOST, PEER)


def test_an_unknown_user_is_refused_as_a_wrong_password_is(caplog: pytest.LogCaptureFixture) -> None:
    logins = Stored(ANN).logins()
    texts = set()
    for user, password in (("bob", "pencil"), ("ann", "brush")):
        with pytest.raises(DeniedError) as refused:
            log_in(logins, user, password)
        texts.add(str(refused.value))
        assert f"{PEER}: no user '{user}' with this password" in caplog.text
    assert len(texts) == 1


def test_a_challenge_for_an_unknown_user_has_the_same_salt_each_time_and_a_new_nonce() -> None:
    logins = Stored(ANN).logins()
    first, second = (logins.begin("n,,n=bob,r=abc", HOST)[0].challenge.split(",") for _ in range(2))
    assert first[1:] == second[1:]
    assert first[0] != second[0]
