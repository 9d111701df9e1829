"""SCRAM-SHA-256: the example of RFC 7677, and messages that lie."""

from __future__ import annotations

import base64
import hashlib
import hmac
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memq.errors import DeniedError, InvalidRequestError, ProtocolError
from memq.scram import (
    ITERATIONS_MAX,
    ITERATIONS_MIN,
    PASSWORD_CHARS_MAX,
    ScramClient,
    ScramServer,
    check_credential,
    credential_of,
    decoy_credential,
    prepared,
    user_of,
)

# RFC 7677, section 3.
CLIENT_NONCE = "rOprNGfwEbeRWgbNEkqO"
SERVER_NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
FIRST = f"n,,n=user,r={CLIENT_NONCE}"
CHALLENGE = f"r={CLIENT_NONCE}{SERVER_NONCE},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
FINAL = f"c=biws,r={CLIENT_NONCE}{SERVER_NONCE},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
VERDICT = "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
CREDENTIAL = credential_of("user", "pencil", SALT, 4_096)


def test_the_example_of_the_rfc() -> None:
    client = ScramClient("user", "pencil", CLIENT_NONCE)
    assert client.first() == FIRST
    assert user_of(FIRST) == "user"
    server = ScramServer(FIRST, CREDENTIAL, SERVER_NONCE)
    assert server.challenge == CHALLENGE
    assert client.final(CHALLENGE) == FINAL
    assert server.verdict(FINAL) == VERDICT
    client.check(VERDICT)


def test_passwords_are_prepared_as_the_rfc_of_saslprep_says() -> None:
    assert prepared("I\u00adX") == b"IX"
    assert prepared("\u00aa") == b"a"
    assert prepared("\u2168") == b"IX"
    assert prepared("a\u00a0b") == b"a b"
    assert len(prepared("a" * PASSWORD_CHARS_MAX)) == PASSWORD_CHARS_MAX
    for bad in ("", "a\x07", "\u00ad", "a" * (PASSWORD_CHARS_MAX + 1)):
        with pytest.raises(InvalidRequestError):
            prepared(bad)


@given(user=st.text("ab,=é", min_size=1, max_size=9), password=st.text("ab ,=ü", min_size=1, max_size=9))
def test_the_right_password_fits_and_another_one_does_not(user: str, password: str) -> None:
    credential = credential_of(user, password, b"salt", 4_096)
    for given_password, fits in ((password, True), (password + "x", False)):
        client = ScramClient(user, given_password, "abc")
        assert user_of(client.first()) == user
        server = ScramServer(client.first(), credential, "def")
        verdict = server.verdict(client.final(server.challenge))
        assert (verdict is not None) is fits
        if verdict is not None:
            client.check(verdict)


def test_a_decoy_is_stable_and_fits_no_password() -> None:
    decoy = decoy_credential(b"secret", "user")
    assert decoy == decoy_credential(b"secret", "user")
    assert decoy.salt != decoy_credential(b"secret", "other").salt
    client = ScramClient("user", "pencil", CLIENT_NONCE)
    server = ScramServer(client.first(), decoy, SERVER_NONCE)
    assert server.verdict(client.final(server.challenge)) is None


@pytest.mark.parametrize(
    "challenge",
    [
        "",
        CHALLENGE.replace("i=4096", "i=1"),
        CHALLENGE.replace("i=4096", "i=999999999"),
        CHALLENGE.replace("i=4096", "i=x"),
        CHALLENGE.replace("r=r", "r=x"),
        f"r={CLIENT_NONCE},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
        CHALLENGE.replace("W22", "%%%"),
        "m=ext," + CHALLENGE,
    ],
)
def test_a_false_challenge_is_refused(challenge: str) -> None:
    with pytest.raises(ProtocolError):
        ScramClient("user", "pencil", CLIENT_NONCE).final(challenge)


def test_a_broker_without_the_credential_is_refused() -> None:
    client = ScramClient("user", "pencil", CLIENT_NONCE)
    with pytest.raises(DeniedError):
        client.check("v=")
    client.final(CHALLENGE)
    with pytest.raises(DeniedError):
        client.check(VERDICT.replace("6rr", "7rr"))


@pytest.mark.parametrize(
    "final", ["", FINAL[:-20], FINAL.replace("biws", "eSws"), FINAL.replace("p=d", "x=d"), "p=,c=,r="]
)
def test_a_false_proof_is_refused(final: str) -> None:
    server = ScramServer(FIRST, CREDENTIAL, SERVER_NONCE)
    with suppress(ProtocolError):
        assert server.verdict(final) is None


def test_a_proof_with_another_nonce_or_binding_is_refused_although_the_password_is_right() -> None:
    salted = hashlib.pbkdf2_hmac("sha256", b"pencil", SALT, 4_096)
    client_key = hmac.digest(salted, b"Client Key", "sha256")
    for bare in (f"c=biws,r={CLIENT_NONCE}{SERVER_NONCE}x", f"c=eSws,r={CLIENT_NONCE}{SERVER_NONCE}"):
        signed = f"n=user,r={CLIENT_NONCE},{CHALLENGE},{bare}".encode()
        mask = hmac.digest(hashlib.sha256(client_key).digest(), signed, "sha256")
        proof = bytes(a ^ b for a, b in zip(client_key, mask, strict=True))
        with pytest.raises(ProtocolError):
            ScramServer(FIRST, CREDENTIAL, SERVER_NONCE).verdict(f"{bare},p={base64.b64encode(proof).decode()}")


@pytest.mark.parametrize(
    "first",
    ["", f"n,,n={'u' * 201},r=a", "n,,", "y,,n=user,r=abc", "p=tls-exporter,,n=user,r=a", "n,,n=,r=a", "n,,n=a,r="],
)
def test_a_false_first_message_is_refused(first: str) -> None:
    assert user_of(f"n,,n={'u' * 200},r=a") == "u" * 200
    with pytest.raises(ProtocolError):
        user_of(first)


def test_a_credential_shows_no_secret() -> None:
    assert CREDENTIAL.stored_key not in repr(CREDENTIAL)
    assert CREDENTIAL.server_key not in str(CREDENTIAL)


def encoded(size: int) -> str:
    return base64.b64encode(bytes(size)).decode()


@pytest.mark.parametrize(
    "changed",
    [
        {"salt": encoded(7)},
        {"salt": encoded(65)},
        {"salt": "%"},
        {"stored_key": encoded(31)},
        {"stored_key": encoded(33)},
        {"server_key": encoded(31)},
        {"server_key": encoded(33)},
        {"iterations": ITERATIONS_MIN - 1},
        {"iterations": ITERATIONS_MAX + 1},
        {"user": ""},
        {"user": "u" * 201},
        {"user": "a*"},
        {"user": "a\n"},
    ],
)
def test_a_credential_that_is_not_sound_is_refused(changed: dict[str, Any]) -> None:
    for sound in ({"salt": encoded(8)}, {"salt": encoded(64)}, {"user": "u" * 200}):
        check_credential(replace(CREDENTIAL, **sound))
    for iterations in (ITERATIONS_MIN, ITERATIONS_MAX):
        check_credential(replace(CREDENTIAL, iterations=iterations))
    with pytest.raises(InvalidRequestError):
        check_credential(replace(CREDENTIAL, **changed))
