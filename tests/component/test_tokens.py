"""Signed tokens of clients: principals, refusals, tokens that end while a client is connected, new keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jwt
import pytest

import memq
from memq.broker.identity.tokens import LEEWAY_S, tokens_of
from memq.errors import DeniedError, InvalidSettingError
from memq.limits import NAME_CHARS_MAX
from memq.runtime.tls import TOKEN_CHARS_MAX, Tls
from tests.component.token_rig import AUDIENCE, CLOCK, EVENTS, ISSUER, Issuer, Rig, bounded, followed, send_one


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return followed(tmp_path, monkeypatch)


def test_a_token_names_the_principal(rig: Rig) -> None:
    async def work() -> None:
        async with rig.broker(required=True) as broker:
            await send_one(broker, rig.tls(rig.issuer.token("alice")))
            with pytest.raises(DeniedError, match="wants a token or a certificate of each client"):
                await send_one(broker, rig.tls(None))
        async with rig.broker(claim="email") as broker:
            await send_one(broker, rig.tls(rig.issuer.token("alice", email="alice@example.com")))
            await send_one(broker, rig.tls(None))

    bounded(work)
    assert rig.names == ["alice", "anonymous", "alice@example.com", "anonymous"]


@pytest.mark.parametrize(
    ("claims", "text"),
    [
        ({"exp": 1_000}, "Signature has expired"),
        ({"iss": "https://other.example"}, "issuer"),
        ({"aud": "other"}, "[Aa]udience"),
        ({"sub": ""}, "names no principal"),
    ],
)
def test_a_token_that_does_not_fit_is_refused(rig: Rig, claims: dict[str, Any], text: str) -> None:
    async def work() -> None:
        token = rig.issuer.token("alice", **claims)
        async with rig.broker() as broker:
            with pytest.raises(DeniedError, match=text) as raised:
                await send_one(broker, rig.tls(token))
            assert token not in str(raised.value)

    bounded(work)


def test_a_forged_token_is_refused(rig: Rig, tmp_path: Path) -> None:
    async def work() -> None:
        (tmp_path / "other").mkdir()
        forged = Issuer(tmp_path / "other").token("alice")
        unsigned = jwt.encode({"sub": "alice", "iss": ISSUER, "aud": AUDIENCE, "exp": 9e9}, "", algorithm="none")
        secret = jwt.encode(
            {"sub": "alice", "iss": ISSUER, "aud": AUDIENCE, "exp": 9e9},
            "a secret of thirty-two bytes, or more",
            algorithm="HS256",
            headers={"kid": "one"},
        )
        async with rig.broker() as broker:
            for token in (forged, unsigned, secret, "no token", "a.b.c"):
                with pytest.raises(DeniedError):
                    await send_one(broker, rig.tls(token))

    bounded(work)


@pytest.mark.parametrize("missing", ["sub", "iss", "aud", "exp"])
def test_a_token_without_a_claim_is_refused(rig: Rig, missing: str) -> None:
    tokens = tokens_of(rig.section(), CLOCK, EVENTS)
    assert tokens is not None
    with pytest.raises(DeniedError, match=missing):
        tokens.bearer(rig.issuer.token("alice", without=missing))


def test_a_token_counts_until_its_end_and_the_difference_of_the_clocks(rig: Rig) -> None:
    tokens = tokens_of(rig.section(), CLOCK, EVENTS)
    assert tokens is not None
    ends_s = CLOCK.wall_ms() // 1_000 - LEEWAY_S + 5
    assert tokens.bearer(rig.issuer.token("alice", exp=ends_s)).ends_s == ends_s + LEEWAY_S
    with pytest.raises(DeniedError, match="expired"):
        tokens.bearer(rig.issuer.token("alice", exp=ends_s - 10))


def test_a_token_whose_key_is_not_the_only_one_of_its_id_is_refused(rig: Rig) -> None:
    token = rig.issuer.token("alice")
    (key,) = json.loads(rig.issuer.file.read_text())["keys"]
    rig.issuer.renew("two")
    rig.issuer.file.write_text(json.dumps({"keys": [key, *json.loads(rig.issuer.file.read_text())["keys"]]}))
    tokens = tokens_of(rig.section(), CLOCK, EVENTS)
    assert tokens is not None
    assert tokens.bearer(token).principal.name == "alice"
    rig.issuer.file.write_text(json.dumps({"keys": [key, key]}))
    with pytest.raises(DeniedError, match="knows 2 of this id"):
        tokens.bearer(token)


def test_the_longest_token_is_taken_and_a_longer_one_is_a_typed_error(rig: Rig) -> None:
    async def work() -> None:
        spare = TOKEN_CHARS_MAX - len(rig.issuer.token("alice", pad=""))
        async with rig.broker() as broker:
            pads = (rig.issuer.token("alice", pad="x" * pad) for pad in range(spare, 0, -1))
            token = next(each for each in pads if len(each) <= TOKEN_CHARS_MAX)
            client_id = "c" * NAME_CHARS_MAX
            async with memq.aio.Producer(broker.address, client_id=client_id, tls=rig.tls(token)) as producer:
                await (await producer.send("clicks", b"v"))
            with pytest.raises(InvalidSettingError, match="is longer than 3500 characters"):
                await send_one(broker, rig.tls(rig.issuer.token("alice", pad="x" * spare)))

    bounded(work)


def test_a_client_whose_token_ends_connects_again_with_the_new_one_and_loses_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memq.broker.identity.tokens.LEEWAY_S", 0)

    async def work() -> None:
        async with rig.broker(required=True) as broker:
            tls = rig.tls(rig.issuer.token("alice", lasts_s=3))
            async with memq.aio.Producer(broker.address, tls=tls) as producer:
                await (await producer.send("clicks", b"0"))
                rig.tls(rig.issuer.token("alice-2"))
                sent = 1
                while not rig.names or sent < 10:  # until the broker has closed the first connection
                    await (await producer.send("clicks", b"%d" % sent))
                    sent += 1
                await (await producer.send("clicks", b"%d" % sent))
            async with memq.aio.Consumer(broker.address, "clicks", end="end", tls=tls) as consumer:
                assert [value async for batch in consumer for value in batch.values()] == [
                    b"%d" % number for number in range(sent + 1)
                ]

    bounded(work)
    assert rig.names[:2] == ["alice", "alice-2"]


def test_new_keys_of_the_issuer_count_without_a_restart(rig: Rig) -> None:
    async def work() -> None:
        async with rig.broker() as broker:
            former = rig.issuer.token("alice")
            await send_one(broker, rig.tls(former))
            keys = rig.issuer.file.read_text()
            rig.issuer.file.write_text("{")
            await send_one(broker, rig.tls(former))  # half a file changes nothing
            rig.issuer.file.write_text(keys)
            rig.issuer.renew("two")
            await send_one(broker, rig.tls(rig.issuer.token("bob")))
            with pytest.raises(DeniedError, match="key 'one'"):
                await send_one(broker, rig.tls(former))

    bounded(work)


def test_settings_and_files_have_errors_that_say_what_to_do(rig: Rig, tmp_path: Path) -> None:
    def refused(text: str, **more: object) -> None:
        with pytest.raises(InvalidSettingError, match=text):
            tokens_of(rig.section(**more), CLOCK, EVENTS)

    assert tokens_of({}, CLOCK, EVENTS) is None
    refused("no issuer and no audience", issuer="", audience="")
    refused("neither jwks_file nor jwks_url", jwks_file="")
    refused("both jwks_file and jwks_url", jwks_url="https://id.example/keys")
    for url in (
        "http://id.example/keys",
        "https://",
        "https://a:b@id.example/",
        "https://id.example:x/",
        "https://a/ b",
    ):
        refused("jwks_url is no URL of HTTPS", jwks_file="", jwks_url=url)
    refused("can't read the authorities", jwks_file="", jwks_url="https://id.example/", jwks_ca_file="/no/such")
    refused("can't read jwks_file '/no/such'", jwks_file="/no/such")
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({"keys": [{"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0", "alg": "HS256"}]}))
    refused("has a secret key", jwks_file=str(secret))
    missing = Tls(ca_file=rig.certificates.trusted.ca_file, token_file="/no/such")

    async def work() -> None:
        async with rig.broker() as broker:
            with pytest.raises(InvalidSettingError, match="can't read token_file '/no/such'"):
                await send_one(broker, missing)

    bounded(work)
