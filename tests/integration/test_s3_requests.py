"""Requests to the store on the whole path, counted at a proxy: one PUT and one GET per batch."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

import memq
from memq.broker.broker import Broker
from memq.cli.store.audit import audit_by_brokers
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from tests.s3_faults import Asked, FaultyS3, faulty_s3, place_of

HANG_S = 60
BATCHES = 12


def test_each_batch_is_put_once_and_read_once_by_consumer_and_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "memq")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "memq-secret")
    asyncio.run(_count_requests())


async def _count_requests() -> None:
    async with faulty_s3() as server, asyncio.timeout(HANG_S):
        runtime, store = Runtime(), place_of(server).open("f")
        coordinator = MemoryCoordinator(MemoryCluster())
        settings = BrokerSettings(port=0, audit=False)  # reports are put, too, now and then: here each PUT is counted
        broker = Broker(settings, runtime, {"main": store}, MemoryQueue(runtime.clock), coordinator)
        await broker.start()
        try:
            async with memq.aio.Producer(broker.address) as producer:
                for number in range(BATCHES):
                    await producer.send("clicks", b"%d" % number)
                    await producer.flush()
            assert _asked(server) == {"PUT": BATCHES}
            async with memq.aio.Consumer(broker.address, ["clicks"], end="end", read="direct") as consumer:
                values = [int(value or b"") async for batch in consumer for value in batch.values()]
            assert values == list(range(BATCHES))
            assert _asked(server) == {"GET": BATCHES}
            verdict = await audit_by_brokers(broker.address, "clicks", [0])
            assert verdict.passed
            assert _asked(server) == {"LIST": 1, "GET": BATCHES}
        finally:
            await broker.close()
            await store.close()


def _asked(server: FaultyS3) -> Counter[str]:
    """Return how many requests of each kind came since the last time."""
    asked, server.asked = server.asked, list[Asked]()
    return Counter(each.method for each in asked)
