"""Signed tokens of clients: principals, refusals, tokens that end while a client is connected, new keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

import memq
from memq.broker.broker import Broker
from memq.broker.identity import LEEWAY_S, broker_networks, tokens_of
from memq.broker.ingest.connection import Connection
from memq.errors import DeniedError, InvalidSettingError
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.limits import NAME_CHARS_MAX
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tls import TOKEN_CHARS_MAX, Tls
from memq.settings import BrokerSettings, Section
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.memory import MemoryHandler
from tests.certificates import Certificates

HANG_S = 60
CLOCK = SystemClock()
EVENTS = EventLog(CLOCK)
ISSUER, AUDIENCE = "https://id.example", "memq"


class Issuer:
    """Signs tokens, and writes its public keys to a file."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "keys.json"
        self._keys: dict[str, ec.EllipticCurvePrivateKey] = {}
        self.renew("one")

    def renew(self, name: str) -> None:
        """Replace the key."""
        self._keys = {name: ec.generate_private_key(ec.SECP256R1())}
        public = [
            json.loads(ECAlgorithm.to_jwk(key.public_key())) | {"kid": name, "use": "sig", "alg": "ES256"}
            for name, key in self._keys.items()
        ]
        self.file.write_text(json.dumps({"keys": public}))

    def token(self, subject: str, lasts_s: float = 600, without: str = "", **claims: Any) -> str:
        """Return a token; `without` names a claim that it lacks."""
        (name,) = self._keys
        ends_s = CLOCK.wall_ms() / 1_000 + lasts_s
        content = {"sub": subject, "iss": ISSUER, "aud": AUDIENCE, "exp": ends_s} | claims
        content.pop(without, None)
        return jwt.encode(content, self._keys[name], algorithm="ES256", headers={"kid": name})


class Rig:
    """A broker with TLS and tokens, and what clients need."""

    def __init__(self, folder: Path) -> None:
        self.certificates = Certificates(folder / "certs")
        self.issuer = Issuer(folder)
        self.token_file = folder / "token"
        self.names: list[str] = []

    def section(self, **more: object) -> Section:
        """Return the section `[tokens]`."""
        values: dict[str, object] = {"jwks_file": str(self.issuer.file), "issuer": ISSUER, "audience": AUDIENCE} | more
        return {name: (value, "test") for name, value in values.items()}

    def tls(self, token: str | None) -> Tls:
        """Return the certificates of a client, with a token."""
        if token is not None:
            self.token_file.write_text(token + "\n")
        ca_file = self.certificates.trusted.ca_file
        return Tls(ca_file=ca_file, token_file=str(self.token_file) if token is not None else "")

    @asynccontextmanager
    async def broker(self, **more: object) -> Any:
        """Run a broker."""
        own = self.certificates.issue("b0", "127.0.0.1", again=True)
        files = {"ca_file": own.ca_file, "cert_file": own.cert_file, "key_file": own.key_file}
        tls = {name: (value, "test") for name, value in files.items()}
        runtime = Runtime(network=broker_networks(tls, EVENTS).data)
        settings = BrokerSettings(port=0, http_port=-1, audit=False)
        queue, stores = MemoryQueue(CLOCK), dict[str, StorageHandler](main=MemoryHandler(CLOCK))
        tokens = tokens_of(self.section(**more), EVENTS)
        broker = Broker(settings, runtime, stores, queue, MemoryCoordinator(MemoryCluster()), tokens=tokens)
        await broker.start()
        try:
            yield broker
        finally:
            await broker.close()


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    found = Rig(tmp_path)
    close = Connection.connection_lost

    def lost(connection: Connection, exc: Exception | None) -> None:
        found.names.append(connection.principal.name)
        close(connection, exc)

    monkeypatch.setattr(Connection, "connection_lost", lost)
    return found


def bounded(work: Callable[[], Any]) -> None:
    """Run a test within a time limit."""

    async def inside() -> None:
        async with asyncio.timeout(HANG_S):
            await work()

    asyncio.run(inside())


async def send_one(broker: Broker, tls: Tls) -> memq.Ack:
    """Send a record."""
    async with memq.aio.Producer(broker.address, tls=tls) as producer:
        return await (await producer.send("clicks", b"v"))


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
    tokens = tokens_of(rig.section(), EVENTS)
    assert tokens is not None
    with pytest.raises(DeniedError, match=missing):
        tokens.bearer(rig.issuer.token("alice", without=missing))


def test_a_token_counts_until_its_end_and_the_difference_of_the_clocks(rig: Rig) -> None:
    tokens = tokens_of(rig.section(), EVENTS)
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
    tokens = tokens_of(rig.section(), EVENTS)
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
    monkeypatch.setattr("memq.broker.identity.LEEWAY_S", 0)

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
            tokens_of(rig.section(**more), EVENTS)

    assert tokens_of({}, EVENTS) is None
    refused("no issuer and no audience", issuer="", audience="")
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
