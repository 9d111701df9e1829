"""A store that refuses, loses answers and stalls under load, and one with slow uploads."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import memq
from memq.broker.broker import Broker
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers.s3.handler import S3Handler
from tests.s3_faults import Fault, FaultyS3, faulty_s3, passing, place_of
from tests.soak import SOAKING, repetitions, report, seconds

pytestmark = pytest.mark.soak

HANG_S = 900 if SOAKING else 120
MEMORY_BYTES = 32 << 20
SICK = {
    "503": Fault("answer", 503, "SlowDown"),
    "lost answers": Fault("lost"),
    "stalls": Fault("stall"),
}


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let consumers read the objects themselves."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "memq")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "memq-secret")


@asynccontextmanager
async def broker_on(server: FaultyS3) -> AsyncIterator[tuple[Broker, S3Handler]]:
    """Run a broker whose store is the server."""
    runtime, store = Runtime(), place_of(server, request_timeout_ms=1_000, deadline_ms=2_000).open("f")
    settings = BrokerSettings(port=0, memory_bytes_max=MEMORY_BYTES)
    coordinator = MemoryCoordinator(MemoryCluster())
    broker = Broker(settings, runtime, {"main": store}, MemoryQueue(runtime.clock), coordinator)
    await broker.start()
    try:
        yield broker, store
    finally:
        await broker.close()
        await store.close()


class Sending:
    """Numbered records, sent until it is asked to end; `acked` counts those of acks that have come."""

    def __init__(self, producer: memq.aio.Producer) -> None:
        self.sent = self.acked = 0
        self.acked_more = asyncio.Event()
        self._producer = producer
        self._end = False

    async def run(self) -> None:
        """Send in small groups until the end; the producer waits when its buffer is full."""
        async with asyncio.TaskGroup() as group:
            while not self._end:
                group.create_task(self._count([await self._send() for _ in range(10)]))
                await passing(0.002)

    async def _send(self) -> memq.aio.Delivery:
        self.sent += 1
        return await self._producer.send("clicks", b"%d" % (self.sent - 1))

    async def _count(self, deliveries: list[memq.aio.Delivery]) -> None:
        for delivery in deliveries:
            await delivery
        self.acked += len(deliveries)
        self.acked_more.set()

    async def more(self, records: int) -> None:
        """Wait until so many more are acked."""
        wanted = self.acked + records
        while self.acked < wanted:
            self.acked_more.clear()
            await self.acked_more.wait()

    def end(self) -> None:
        """Send nothing more."""
        self._end = True


def test_a_store_that_is_sick_for_a_while_costs_nothing_but_time() -> None:
    asyncio.run(asyncio.wait_for(_sick_for_a_while(), HANG_S))


async def _sick_for_a_while() -> None:
    loop = asyncio.get_running_loop()
    async with faulty_s3() as server, broker_on(server) as (broker, store):
        async with memq.aio.Producer(broker.address, linger_ms=2) as producer:
            sending = Sending(producer)
            task = asyncio.create_task(sending.run())
            await sending.more(100)
            for name, fault in SICK.items():
                server.always["PUT"] = fault
                until_s, met = loop.time() + seconds(few=1, many=60), server.count("PUT")
                while loop.time() < until_s or server.count("PUT") < met + 3:
                    server.came.clear()
                    await server.came.wait()
                    assert broker.services.pool.leased_bytes <= MEMORY_BYTES
                server.always.clear()
                healed_s = loop.time()
                await sending.more(100)  # what waited, and what comes now
                report(f"{name}: {loop.time() - healed_s:.2f} s from its end to 100 acks")
                await sending.more(sending.sent - sending.acked)  # two outages in a row would be one of twice the time
            stored, asked = broker.services.counters.stored_objects, store.counters.put_requests
            await sending.more(1_000)
            stored = broker.services.counters.stored_objects - stored
            assert store.counters.put_requests - asked <= 1.2 * stored + 4, "those under way at either end"
            sending.end()
            await task
            await producer.flush()
        assert await _read(broker) == list(range(sending.sent))


async def _read(broker: Broker) -> list[int]:
    async with memq.aio.Consumer(broker.address, ["clicks"], end="end", read="direct") as consumer:
        return [int(value or b"") async for batch in consumer for value in batch.values()]


def test_uploads_that_end_in_any_order_are_read_in_theirs() -> None:
    asyncio.run(asyncio.wait_for(_uploads_in_any_order(), HANG_S))


async def _uploads_in_any_order() -> None:
    draw, records = random.Random(7), repetitions(few=300, many=5_000)
    async with faulty_s3() as server, broker_on(server) as (broker, _):
        server.delay = lambda method: draw.uniform(0.0, 0.02) if method == "PUT" else 0.0
        async with memq.aio.Admin(broker.address) as admin:
            settings = {"batch_blocks_max": 1, "uploads_in_flight_max": 4}
            await admin.create_topic("clicks", partitions=1, settings=settings)
        consumer = memq.aio.Consumer(broker.address, ["clicks"], start="beginning", read="direct")
        async with consumer, memq.aio.Producer(broker.address, linger_ms=0) as producer:
            reading = asyncio.create_task(_read_some(consumer, records))
            for number in range(records):
                await producer.send("clicks", b"%d" % number)
                await passing(0.001)  # a block for each record
            await producer.flush()
            assert await reading == list(range(records)), "a batch came before the one before it, or is missing"
        assert server.puts_under_way_most > 1, "uploads ran in parallel"


async def _read_some(consumer: memq.aio.Consumer, count: int) -> list[int]:
    values: list[int] = []
    async for batch in consumer:
        values += [int(value or b"") for value in batch.values()]
        if len(values) >= count:
            return values
    return values
