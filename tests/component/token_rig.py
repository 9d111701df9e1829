"""A broker that checks tokens of clients, and an issuer of them."""

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
from memq.broker.identity.networks import broker_networks
from memq.broker.identity.tokens import tokens_of
from memq.broker.ingest.connection import Connection
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tls import Tls
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
        self.content = ""
        self.renew("one")

    def renew(self, name: str) -> None:
        """Replace the key."""
        self._keys = {name: ec.generate_private_key(ec.SECP256R1())}
        public = [
            json.loads(ECAlgorithm.to_jwk(key.public_key())) | {"kid": name, "use": "sig", "alg": "ES256"}
            for name, key in self._keys.items()
        ]
        self.content = json.dumps({"keys": public})
        self.file.write_text(self.content)

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
        tokens = tokens_of(self.section(**more), CLOCK, EVENTS)
        broker = Broker(settings, runtime, stores, queue, MemoryCoordinator(MemoryCluster()), tokens=tokens)
        await broker.start()
        try:
            yield broker
        finally:
            await broker.close()


def followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Return a rig that notes the principal of each connection at its end."""
    found = Rig(folder)
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
