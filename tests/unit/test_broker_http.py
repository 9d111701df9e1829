"""The HTTP port under clients of every kind: garbage, incomplete requests, large heads, too many at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from memq.broker import http
from memq.broker.http import CONNECTIONS_MAX, REQUEST_BYTES_MAX, REQUEST_TIMEOUT_S, HttpPort
from memq.broker.metrics import CounterCollector, Counters
from memq.errors import StoreError, UnreachableError
from memq.protocol.link import connect_link
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.network import Address, SocketNetwork, format_address
from memq.runtime.runtime import Runtime
from tests.brokers import log_lines, run
from tests.memory_network import Client, memory_runtime
from tests.skipping_loop import run_skipping, skip

GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"


async def sound() -> None:
    """Nothing is in the way."""


@asynccontextmanager
async def http_port(check: Callable[[], Awaitable[None]] = sound) -> AsyncIterator[Address]:
    registry = CollectorRegistry()
    registry.register(CounterCollector(Counters(acks=7), {"open_connections": lambda: 3}))
    port = HttpPort(SocketNetwork(), check, registry, EventLog(SystemClock()))
    address = await port.start("127.0.0.1", 0)
    try:
        yield address
    finally:
        await port.stop()


async def ask(address: Address, data: bytes, *, pieces: int = 1, eof: bool = False) -> bytes:
    """Send bytes, return all that comes back until the port closes."""
    reader, writer = await asyncio.open_connection(*address)  # noqa: TID251 - a bare peer
    try:
        for at in range(0, len(data), -(-len(data) // pieces) or 1):
            writer.write(data[at : at + -(-len(data) // pieces)])
            await writer.drain()
        if eof:
            writer.write_eof()
        return await reader.read(-1)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("request_", "status", "body"),
    [
        (GET, 200, b"alive\n"),
        (b"GET /healthz?x=1 HTTP/1.0\r\n\r\n", 200, b"alive\n"),
        (b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n", 200, b"ready\n"),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 200, b"memq_broker_acks_total 7.0"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", 404, b"/healthz"),
        (b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n", 404, b"/healthz"),
        (b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello", 405, b"only GET and HEAD"),
        (b"DELETE /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 405, b"only GET and HEAD"),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400, b"bad request"),
        (b"memqP1\r\n\r\n\r\n", 400, b"bad request"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, b"bad request"),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 2 * REQUEST_BYTES_MAX + b"\r\n\r\n", 400, b"bad request"),
        (b"GET /" + b"z" * 2 * REQUEST_BYTES_MAX, 400, b"bad request"),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n", 200, b"alive\n"),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nfffffff\r\n", 200, b"alive\n"),
        (GET + GET + b"garbage", 200, b"alive\n"),
    ],
)
@pytest.mark.parametrize("pieces", [1, 7])
def test_every_request_gets_its_status(request_: bytes, status: int, body: bytes, pieces: int) -> None:
    async def work() -> None:
        async with http_port() as address:
            answer = await ask(address, request_, pieces=pieces)
            assert answer.startswith(b"HTTP/1.1 %d " % status) or (status == 400 and not answer), answer[:200]
            if answer:
                assert body in answer
                head, _, sent = answer.partition(b"\r\n\r\n")
                assert b"Content-Length: %d\r\n" % len(sent) in head
                assert b"Connection: close" in head

    run(work())


def test_head_has_the_length_and_no_body() -> None:
    async def work() -> None:
        async with http_port() as address:
            answer = await ask(address, GET.replace(b"GET", b"HEAD"))
            assert b"Content-Length: 6\r\n" in answer
            assert answer.endswith(b"\r\n\r\n")

    run(work())


def test_readyz_names_the_cause_and_healthz_stays_alive() -> None:
    async def broken() -> None:
        raise StoreError("object 'x' not stored: no space left on device")

    async def work() -> None:
        async with http_port(broken) as address:
            answer = await ask(address, GET.replace(b"healthz", b"readyz"))
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert b"no space left on device" in answer
            assert b"alive" in await ask(address, GET)

    run(work())


def test_a_check_that_hangs_is_not_ready_and_the_next_one_finds_what_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert http.READY_S < 2, "a broker that lost store or queue says so within 2 s"
    monkeypatch.setattr(http, "READY_S", 0.05)
    back, checks = asyncio.Event(), []

    async def hanging() -> None:
        checks.append("")
        await back.wait()

    async def work() -> None:
        ask_ready = GET.replace(b"healthz", b"readyz")
        async with http_port(hanging) as address:
            for _ in range(3):
                answer = await ask(address, ask_ready)
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"did not answer within" in answer
                assert b"alive" in await ask(address, GET)
            assert len(checks) == 1, "what hangs is not asked again"
            back.set()
            while not (await ask(address, ask_ready)).startswith(b"HTTP/1.1 200 "):
                pass

    run(work())


def test_half_a_request_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "REQUEST_TIMEOUT_S", 0.05)

    async def work() -> None:
        async with http_port() as address:
            assert await ask(address, b"GET /hea") == b""
            assert await ask(address, b"") == b""
            assert await ask(address, b"GET /hea", eof=True) == b""
            assert b"alive" in await ask(address, GET)

    run(work())


def test_half_requests_do_not_keep_a_health_check_out() -> None:
    async def work() -> None:
        async with http_port() as address:
            opened = [await half_request(address) for _ in range(CONNECTIONS_MAX)]
            for oldest in range(3):
                assert b"alive" in await ask(address, GET)
                assert await opened[oldest][0].read() == b"", "it made room"
                opened.append(await half_request(address))
            reader, writer = opened[-1]
            writer.write(GET[9:])
            assert b"alive" in await reader.read(), "as many as that are let in"
            for _, writer in opened:
                writer.close()
                await writer.wait_closed()

    run(work())


async def half_request(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect, and send the beginning of a request."""
    reader, writer = await asyncio.open_connection(*address)  # noqa: TID251 - a bare peer
    writer.write(GET[:9])
    await writer.drain()
    return reader, writer


def test_the_host_with_most_connections_makes_room_half_requests_first() -> None:
    async def work() -> None:
        port = HttpPort(SocketNetwork(), sound, CollectorRegistry(), EventLog(SystemClock()))
        asked, first = peer(port, "10.0.0.1"), peer(port, "10.0.0.2")
        asked.receive(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
        crowd = [peer(port, "10.0.0.3") for _ in range(CONNECTIONS_MAX - 2)]
        for each in crowd[:5]:
            assert not each.closed
            peer(port, "10.0.0.2")
            assert each.closed
        assert not asked.closed
        assert not first.closed
        await port.stop()

    run(work())


class Peer(asyncio.Transport):
    """The transport of a connection from a host, which notes whether it was closed."""

    def __init__(self, host: str) -> None:
        super().__init__({"peername": (host, 5)})
        self.closed = False
        self.protocol: asyncio.BufferedProtocol | None = None

    def receive(self, data: bytes) -> None:
        """Let the connection receive bytes."""
        assert self.protocol is not None
        memoryview(self.protocol.get_buffer(len(data)))[: len(data)] = data
        self.protocol.buffer_updated(len(data))

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Drop what is sent."""

    def close(self) -> None:
        self.closed = True

    abort = close


def peer(port: HttpPort, host: str) -> Peer:
    """Connect from a host."""
    transport = Peer(host)
    transport.protocol = port.connection()
    transport.protocol.connection_made(transport)
    return transport


@settings(max_examples=40)
@given(data=st.binary(min_size=1, max_size=400), start=st.sampled_from([b"", b"GET ", b"GET / HTTP/1.1\r\n", GET[:-2]]))
def test_any_garbage_is_answered_or_closed(data: bytes, start: bytes) -> None:
    async def work() -> None:
        async with http_port() as address:
            _, writer = await asyncio.open_connection(*address)  # noqa: TID251 - a bare peer
            writer.write(start + data)
            await writer.drain()
            writer.close()
            assert b"alive" in await ask(address, GET)

    run(work())


# ---- on virtual time ---------------------------------------------------------------------------------


READY = GET.replace(b"healthz", b"readyz")


class Probe:
    """A port whose check hangs until its gate is open, and then fails as often as it is asked to."""

    def __init__(self) -> None:
        self.runtime, self.network = memory_runtime()
        self.gate = asyncio.Event()
        self.fails = self.begun = self.ended = 0
        self.port = HttpPort(self.network, self.check, CollectorRegistry(), EventLog(self.runtime.clock))
        self.address = ""

    async def check(self) -> None:
        self.begun += 1
        try:
            await self.gate.wait()
        finally:
            self.ended += 1
        if self.fails:
            self.fails -= 1
            raise StoreError("the store is away")

    def call(self, data: bytes) -> Client:
        client = self.network.call(self.address)
        client.say(data)
        return client


def probed(work: Callable[[Probe], Awaitable[None]]) -> None:
    async def inside() -> None:
        probe = Probe()
        probe.address = format_address(await probe.port.start("127.0.0.1", 0))
        try:
            await work(probe)
        finally:
            await probe.port.stop()

    run_skipping(inside())


def status_of(client: Client) -> int:
    """Return the status of the only answer, 0 without one."""
    answer = bytes(client.wire.taken)
    assert answer.count(b"HTTP/1.1 ") <= 1
    return int(answer.split()[1]) if answer else 0


@pytest.mark.parametrize("data", [b"", b"GET /hea"])
def test_a_client_has_twenty_seconds_for_its_request(data: bytes) -> None:
    async def work(probe: Probe) -> None:
        client = probe.call(data)
        await skip(2 * REQUEST_TIMEOUT_S - 0.5)
        assert not client.is_gone()
        await skip(1)
        assert client.is_gone()
        assert status_of(client) == 0

    probed(work)


def test_a_connection_that_has_ended_is_left_alone() -> None:
    async def work(probe: Probe) -> None:
        client = probe.call(GET)
        await skip(1)
        assert (status_of(client), client.is_gone()) == (200, True)
        await skip(3 * REQUEST_TIMEOUT_S)
        assert not client.is_aborted()

    probed(work)


@pytest.mark.parametrize("header", [b"", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 100\r\n"])
def test_a_client_gets_one_answer_whatever_it_sends_behind_its_request(header: bytes) -> None:
    async def work(probe: Probe) -> None:
        client = probe.call(READY[:-2] + header + READY[-2:])
        client.say(b"\x00garbage\r\n\r\n", GET)
        await skip(0.5)
        assert status_of(client) == 0
        probe.gate.set()
        await skip(0.5)
        assert status_of(client) == 200

    probed(work)


def test_the_answer_to_a_client_that_has_left_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def work(probe: Probe) -> None:
        client = probe.call(READY)
        await skip(0.5)
        client.wire.abort()
        probe.gate.set()
        await skip(5)
        assert status_of(client) == 0

    probed(work)
    assert log_lines(caplog) == []


def test_a_stop_ends_the_port_its_connections_and_what_they_wait_for() -> None:
    async def work(probe: Probe) -> None:
        client = probe.call(READY)
        await skip(0.5)
        await probe.port.stop()
        assert probe.network.listeners == {}
        assert client.is_aborted()
        assert (probe.begun, probe.ended) == (1, 1)

    probed(work)


def test_a_broker_that_is_not_ready_says_so_once_and_when_it_is_again(caplog: pytest.LogCaptureFixture) -> None:
    async def work(probe: Probe) -> None:
        found = []
        for gate, fails in ((False, 0), (False, 0), (True, 0), (True, 1), (True, 1), (True, 0), (True, 0)):
            if gate:
                probe.gate.set()
            probe.fails = fails
            client = probe.call(READY)
            await skip(2)
            found.append(status_of(client))
        assert found == [503, 503, 200, 503, 503, 200, 200]
        assert probe.begun == 6, "what hung was asked once"

    with caplog.at_level(logging.INFO, "memq"):
        probed(work)
    assert [line.partition(" after")[0] for line in log_lines(caplog, logging.INFO)] == [
        "not-ready: store or queue did not answer within 1.5 s",
        "ready-again: it works again",
        "not-ready: the store is away",
        "ready-again: it works again",
    ]


def test_a_client_of_the_broker_learns_at_once_that_this_is_the_http_port() -> None:
    async def work() -> None:
        async with http_port() as address:
            with pytest.raises(UnreachableError, match="its answer is HTTP") as refused:
                await connect_link(Runtime(), None, address)
            assert refused.value.foreign

    run(work())
