"""`/readyz` of a broker that loses its store or queue: 503 meanwhile, 200 after; `/healthz` stays 200."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from memq.broker.broker import Broker
from memq.broker.http import HttpPort
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification import NotificationQueue
from memq.notification.memory import MemoryQueue
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.network import Address
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.memory import MemoryHandler
from memq_localstack.servers import Server
from tests.integration.kafka import kafka_queue
from tests.s3_faults import Fault, faulty_s3, place_of
from tests.soak import SOAKING

TIMEOUT_S = 180.0


async def status(address: Address, path: str) -> int:
    """Ask the port, and return the status."""
    reader, writer = await asyncio.open_connection(*address)  # noqa: TID251 - a bare peer
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()


@asynccontextmanager
async def ready_broker(store: StorageHandler, queue: NotificationQueue) -> AsyncIterator[Address]:
    """Run a broker on these parts, ready; yields its HTTP port."""
    settings = BrokerSettings(port=0, cluster="ready")
    broker = Broker(settings, Runtime(), {"main": store}, queue, MemoryCoordinator(MemoryCluster()))
    port = HttpPort(broker.services.runtime.network, broker.check, CollectorRegistry(), broker.services.events)
    async with asyncio.timeout(TIMEOUT_S):
        await broker.start()
        address = await port.start("127.0.0.1", 0)
        try:
            while await status(address, "/readyz") != 200:
                pass  # a slow machine may take longer for the first proof of all rights
            yield address
        finally:
            await port.stop()
            await broker.close()


async def red_and_green(
    address: Address,
    lose: Callable[[], Awaitable[object]],
    mend: Callable[[], Awaitable[object]],
    log: pytest.LogCaptureFixture,
) -> None:
    """Lose a part and bring it back. An answer waits for `READY_S` at most: what is asked after the loss is red.

    But a process that is asked to stop may answer for some more milliseconds.
    """
    await lose()
    while await status(address, "/readyz") != 503:
        assert await status(address, "/healthz") == 200
    for _ in range(2):
        assert await status(address, "/readyz") == 503
        assert await status(address, "/healthz") == 200
    await mend()
    while await status(address, "/readyz") != 200:
        assert await status(address, "/healthz") == 200
    events = [getattr(record, "event", "") for record in log.records]
    assert "ready-again" in events[events.index("not-ready") :]


@pytest.mark.parametrize(
    "fault", [Fault("answer", 503, "SlowDown"), Fault("stall"), Fault("close")], ids=lambda f: f.kind
)
def test_a_store_that_refuses_or_hangs(fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memq")

    async def run() -> None:
        async with faulty_s3() as server:
            runtime = Runtime()
            store = place_of(server, request_timeout_ms=2_000, deadline_ms=3_000).open("f")

            async def lose() -> None:
                server.always = dict.fromkeys(("GET", "PUT", "HEAD", "LIST", "DELETE"), fault)

            async def mend() -> None:
                server.always = {}

            try:
                async with ready_broker(store, MemoryQueue(runtime.clock)) as address:
                    await red_and_green(address, lose, mend, caplog)
            finally:
                await store.close()

    asyncio.run(run())


def test_a_queue_that_somebody_has_locked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memq")

    async def run() -> None:
        runtime = Runtime()
        queue = SqliteQueue(tmp_path / "queue.sqlite", runtime.clock)
        other = sqlite3.connect(tmp_path / "queue.sqlite", isolation_level=None)

        async def lose() -> None:
            other.execute("BEGIN EXCLUSIVE")

        async def mend() -> None:
            other.execute("ROLLBACK")

        try:
            async with ready_broker(MemoryHandler(runtime.clock), queue) as address:
                await red_and_green(address, lose, mend, caplog)
        finally:
            other.close()
            await queue.close()

    asyncio.run(run())


PAUSED = pytest.param(Server.pause, Server.resume, id="paused")
KILLED = pytest.param(Server.kill, Server.start, id="killed")  # its start takes as long as all the rest


@pytest.mark.soak
@pytest.mark.parametrize(("trouble", "mend"), [PAUSED, KILLED] if SOAKING else [PAUSED])
def test_kafka_away(
    kafka: Server,
    trouble: Callable[[Server], object],
    mend: Callable[[Server], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "memq")

    async def run() -> None:
        queue = kafka_queue(kafka.address)
        try:
            async with ready_broker(MemoryHandler(Runtime().clock), queue) as address:
                await red_and_green(
                    address, lambda: asyncio.to_thread(trouble, kafka), lambda: asyncio.to_thread(mend, kafka), caplog
                )
        finally:
            await queue.close()

    asyncio.run(run())
