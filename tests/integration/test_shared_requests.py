"""Small topics that share objects, counted at a proxy: saved PUTs, and bytes that readers fetch."""

from __future__ import annotations

import asyncio

import pytest

import memq
from memq.broker.broker import Broker
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from tests.s3_faults import FaultyS3, faulty_s3, place_of
from tests.soak import repetitions, report

pytestmark = pytest.mark.soak

HANG_S = repetitions(few=300, many=1_800)
TOPICS = repetitions(few=60, many=1_000)
ROUNDS = repetitions(few=3, many=10)  # each sends one record to each topic
PUTS_SAVED = 20
FETCHED_RATIO_MAX = 1.2
VALUE = b"a record of a topic that is hardly used " * 3


def test_topics_with_a_record_a_second_share_puts_and_readers_fetch_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "memq")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "memq-secret")
    asyncio.run(_compare())


async def _compare() -> None:
    async with faulty_s3() as server, asyncio.timeout(HANG_S):
        runtime, store = Runtime(), place_of(server).open("f")
        coordinator = MemoryCoordinator(MemoryCluster())
        # Wider than the default: what a slow machine takes to send a round must not pass for many objects.
        # No reports, which share objects, too: each PUT is counted, and each byte that is read.
        settings = BrokerSettings(port=0, shared_age_ms_max=1_000, audit=False)
        broker = Broker(settings, runtime, {"main": store}, MemoryQueue(runtime.clock), coordinator)
        await broker.start()
        try:
            alone = await _send(broker, server, "alone", shared=False)
            shared = await _send(broker, server, "small", shared=True)
            report(f"{TOPICS} topics, {ROUNDS} rounds: {alone} PUTs unshared, {shared} shared")
            assert alone >= PUTS_SAVED * shared
            for number in range(0, TOPICS, TOPICS // 10):
                await _read(broker, server, f"small-{number}")
        finally:
            await broker.close()
            await store.close()


async def _send(broker: Broker, server: FaultyS3, name: str, *, shared: bool) -> int:
    """Send the rounds to topics of that name; return how many PUTs came."""
    names = [f"{name}-{number}" for number in range(TOPICS)]
    async with memq.aio.Admin(broker.address) as admin:
        for each in names:
            await admin.create_topic(each, settings={"shared_objects": shared})
    before = server.count("PUT")
    async with memq.aio.Producer(broker.address, linger_ms=0) as producer:
        for _ in range(ROUNDS):
            sent = [await producer.send(each, VALUE) for each in names]
            await asyncio.gather(*sent)
    return server.count("PUT") - before


async def _read(broker: Broker, server: FaultyS3, name: str) -> None:
    """Read a topic to its end, and hold what was asked of the store against what is the topic's own."""
    before = len(server.asked)
    async with memq.aio.Consumer(broker.address, [name], end="end", read="direct") as consumer:
        values = [value async for batch in consumer for value in batch.values()]
    assert values == [VALUE] * ROUNDS
    own = broker.partitions.processor(broker.partitions.topic(name), 0).own
    assert own is not None
    ranges = [each.headers["range"].removeprefix("bytes=").split("-") for each in server.asked[before:]]
    fetched = sum(int(last) - int(first) + 1 for first, last in ranges)
    assert fetched <= FETCHED_RATIO_MAX * own.totals.bytes
