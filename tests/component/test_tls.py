"""TLS between clients and brokers on sockets: certificates, refusals, files that are replaced."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

import memq
from memq.broker.broker import Broker
from memq.broker.identity.networks import broker_networks
from memq.broker.ingest.connection import Connection
from memq.errors import UnreachableError
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.protocol.link import connect_link
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.network import client_network, parse_address
from memq.runtime.runtime import Runtime
from memq.runtime.tls import Tls
from memq.settings import BrokerSettings, Section
from memq.storage_handlers.memory import MemoryHandler
from tests.certificates import Certificates
from tests.memq_process import BrokerServer

HANG_S = 60
TLS_1_2 = "tlsv1 alert protocol version"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certs"))


def section(tls: Tls | None, **more: object) -> Section:
    """Return the section `[tls]` of a broker."""
    if tls is None:
        return {}
    files = {"ca_file": tls.ca_file, "cert_file": tls.cert_file, "key_file": tls.key_file}
    return {name: (value, "test") for name, value in {**files, **more}.items()}


@asynccontextmanager
async def brokers(*sections: Section) -> AsyncIterator[list[Broker]]:
    """Run a broker for each section, as one cluster on sockets."""
    cluster, events = MemoryCluster(), EventLog(SystemClock())
    queue, store = MemoryQueue(SystemClock()), MemoryHandler(SystemClock())
    started: list[Broker] = []
    try:
        for number, each in enumerate(sections):
            runtime = Runtime(network=broker_networks(each, events).data)
            settings = BrokerSettings(port=0, http_port=-1, broker_id=f"b{number}", audit=False)
            broker = Broker(settings, runtime, {"main": store}, queue, MemoryCoordinator(cluster))
            started.append(broker)
            await broker.start()
        yield started
    finally:
        for broker in started:
            await broker.close()


def bounded(work: Callable[[], Awaitable[None]]) -> None:
    """Run a test on asyncio's loop, within a time limit."""

    async def inside() -> None:
        async with asyncio.timeout(HANG_S):
            await work()

    asyncio.run(inside())


def content(file: str, new: bytes | None = None) -> bytes:
    """Return the bytes of a file, after it got new ones."""
    if new is not None:
        Path(file).write_bytes(new)
    return Path(file).read_bytes()


async def send_one(address: str, tls: Tls | None, **options: Any) -> memq.Ack:
    """Send a record with ack=all."""
    async with memq.aio.Producer(address, tls=tls, connect_timeout_ms=1_000, **options) as producer:
        return await (await producer.send("clicks", b"v"))


def test_all_clients_work_over_tls(authority: Certificates) -> None:
    async def work() -> None:
        async with brokers(section(authority.issue("b0", "127.0.0.1", again=True))) as (broker,):
            tls, address = authority.trusted, broker.address
            assert (await send_one(address, tls)).topic == "clicks"
            async with memq.aio.Consumer(address, "clicks", end="end", tls=tls) as consumer:
                assert [value async for batch in consumer for value in batch.values()] == [b"v"]
            async with memq.aio.Queue(address, tls=tls) as queue:
                await queue.enqueue("jobs", b"job")
                assert [item.payload for item in await queue.dequeue("jobs")] == [b"job"]
            async with memq.aio.Admin(address, tls=tls) as admin:
                assert [topic.name for topic in await admin.topics()] == ["clicks"]

    bounded(work)


def test_large_records_and_many_connections_pass_over_tls(authority: Certificates) -> None:
    async def work() -> None:
        async with brokers(section(authority.issue("b0", "127.0.0.1", again=True))) as (broker,):
            values = [bytes([number]) * 700_000 for number in range(20)]

            async def client(number: int) -> None:
                topic = f"t{number}"
                async with memq.aio.Producer(broker.address, tls=authority.trusted, codec="none") as producer:
                    for delivery in [await producer.send(topic, value) for value in values]:
                        await delivery
                async with memq.aio.Consumer(
                    broker.address, topic, end="end", tls=authority.trusted, read="broker"
                ) as consumer:
                    assert [value async for batch in consumer for value in batch.values()] == values

            await asyncio.gather(*(client(number) for number in range(5)))

    bounded(work)


def test_a_client_refuses_a_broker_that_it_does_not_trust(authority: Certificates, tmp_path: Path) -> None:
    async def work() -> None:
        other = Certificates(tmp_path / "other")
        async with brokers(
            section(authority.issue("b0", "127.0.0.1", again=True)), section(authority.issue("b1", "elsewhere"))
        ) as (sound, misnamed):
            for address, tls, text in (
                (sound.address, other.trusted, "certificate .* is refused: self-signed certificate"),
                (misnamed.address, authority.trusted, "certificate .* is refused: .*not valid for '127.0.0.1'"),
                (sound.address, None, "check that a broker runs there; one with TLS needs ca_file"),
            ):
                with pytest.raises(UnreachableError, match=text) as raised:
                    await send_one(address, tls)
                assert raised.value.hint or "hint" in str(raised.value)
            unchecked = Tls(ca_file=authority.trusted.ca_file, check_host=False)
            runtime = Runtime(network=client_network(unchecked))
            link = await connect_link(runtime, None, parse_address(misnamed.address))
            link.close()

    bounded(work)


def test_a_client_with_tls_names_a_broker_without_it(authority: Certificates) -> None:
    async def work() -> None:
        async with brokers({}) as (broker,):
            with pytest.raises(UnreachableError, match="does not speak TLS"):
                await send_one(broker.address, authority.trusted)
            assert (await send_one(broker.address, None)).topic == "clicks"

    bounded(work)


@pytest.mark.parametrize("clients", ["anonymous", "optional", "required"])
def test_certificates_of_clients(authority: Certificates, tmp_path: Path, clients: str) -> None:
    async def work() -> None:
        own = authority.issue("b0", "127.0.0.1", again=True)
        alice = authority.issue("alice", again=True)
        stranger = Certificates(tmp_path / "other").issue("mallory")
        forged = Tls(ca_file=own.ca_file, cert_file=stranger.cert_file, key_file=stranger.key_file)
        async with brokers(section(own, clients=clients)) as (broker,):
            for tls, fits in (
                (alice, True),
                (authority.trusted, clients != "required"),
                (forged, clients == "anonymous"),
            ):
                if fits:
                    await send_one(broker.address, tls)
                else:
                    with pytest.raises(UnreachableError):
                        await send_one(broker.address, tls)

    bounded(work)


def test_a_certificate_gives_a_connection_its_principal(
    authority: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    made = Connection.connection_made

    def noted(connection: Connection, transport: asyncio.BaseTransport) -> None:
        made(connection, transport)
        names.append(connection.principal.name)

    monkeypatch.setattr(Connection, "connection_made", noted)

    async def work() -> None:
        own = authority.issue("b0", "127.0.0.1", again=True)
        async with brokers(section(own, clients="optional")) as (broker,):
            for tls in (authority.issue("alice", again=True), authority.trusted):
                link = await connect_link(Runtime(network=client_network(tls)), None, parse_address(broker.address))
                link.close()
            assert names == ["alice", "anonymous"]

    bounded(work)


def test_brokers_of_a_cluster_connect_to_each_other_over_tls(authority: Certificates) -> None:
    async def work() -> None:
        own = section(authority.issue("b0", "127.0.0.1", again=True), clients="required")
        async with brokers(own, own) as (one, other):
            alice = authority.issue("alice", again=True)
            for broker in (one, other):  # each answers about both
                async with memq.aio.Admin(broker.address, tls=alice) as admin:
                    assert [each.partitions for each in await admin.brokers()] != []
                    assert {client.client for client in await admin.clients("b0")}
                    assert {client.client for client in await admin.clients("b1")}

    bounded(work)


def test_certificates_that_are_replaced_count_for_later_connections(authority: Certificates) -> None:
    async def serial(address: str) -> object:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(authority.trusted.ca_file)
        host, port = parse_address(address)
        _, writer = await asyncio.open_connection(host, port, ssl=context)  # noqa: TID251 - TLS alone
        found = writer.get_extra_info("peercert")["serialNumber"]
        writer.close()
        return found

    async def work() -> None:
        own = authority.issue("b0", "127.0.0.1", again=True)
        sound = content(own.key_file)
        async with (
            brokers(section(own)) as (broker,),
            memq.aio.Producer(broker.address, tls=authority.trusted) as producer,
        ):
            await (await producer.send("clicks", b"before"))
            before = await serial(broker.address)
            content(own.key_file, b"half of a key")
            assert await serial(broker.address) == before, "a file that can't be loaded changes nothing"
            content(own.key_file, sound)
            assert await serial(broker.address) == before
            authority.issue("b0", "127.0.0.1", again=True)
            assert await serial(broker.address) != before
            await (await producer.send("clicks", b"after"))  # on the connection from before

    bounded(work)


def test_older_versions_of_tls_are_refused(authority: Certificates) -> None:
    async def work() -> None:
        async with brokers(section(authority.issue("b0", "127.0.0.1", again=True))) as (broker,):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(authority.trusted.ca_file)
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            host, port = parse_address(broker.address)
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await asyncio.open_connection(host, port, ssl=context)  # noqa: TID251 - TLS alone

    bounded(work)


@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_refused_handshakes_are_logged_once_for_each_reason_of_an_address(
    authority: Certificates, caplog: pytest.LogCaptureFixture, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def work() -> None:
        async with asyncio.timeout(HANG_S):
            own = authority.issue("b0", "127.0.0.1", again=True)
            async with brokers(section(own, clients="required")) as (broker,):
                for _ in range(3):
                    for tls in (None, authority.trusted):
                        admin = memq.aio.Admin(broker.address, tls=tls, connect_timeout_ms=200)
                        with pytest.raises(UnreachableError):
                            await admin.topics()
                        await admin.close()
                await send_one(broker.address, authority.issue("alice", again=True))

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(work())
    lines = [record.getMessage() for record in caplog.records if "handshake-refused" in record.getMessage()]
    assert len(lines) == 2
    assert re.search(r"127.0.0.1:\d+: no TLS: (wrong version number|http request)", lines[0])
    assert re.search(r"127.0.0.1:\d+: no TLS: peer did not return a certificate", lines[1])


class DevProcess(BrokerServer):
    """`memq dev` with a file of settings."""

    def __init__(self, folder: Path, text: str) -> None:
        super().__init__(folder / "log")
        self.config = folder / "memq.toml"
        self.config.write_text(
            f'data = "{folder}/data"\nport = {self.port}\nhttp_port = 0\ndashboard_port = -1\n{text}'
        )

    def command(self) -> list[str]:
        """See `MemqProcess.command`."""
        return ["-m", "memq", "dev", "--config", str(self.config)]


def test_a_process_with_tls_serves_commands_and_its_own_auditor(authority: Certificates, tmp_path: Path) -> None:
    own = authority.issue("b0", "127.0.0.1", again=True)
    files = f'cert_file = "{own.cert_file}"\nkey_file = "{own.key_file}"\nca_file = "{own.ca_file}"\n'
    process = DevProcess(tmp_path, f"[tls]\n{files}")
    process.start()
    try:
        with memq.Producer(process.address, tls=authority.trusted) as producer:
            producer.send("clicks", b"v").result(HANG_S)
        with memq.Consumer(process.address, "clicks", end="end", tls=authority.trusted) as consumer:
            assert [value for batch in consumer for value in batch.values()] == [b"v"]
        assert process.stop() == 0
    finally:
        process.close()
    log = process.log.read_text()
    assert "http-ready: https://" in log, log
    assert "audit.stopped" not in log, log
