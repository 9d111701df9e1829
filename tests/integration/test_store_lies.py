"""Consumers, audit and verify on a store with wrong answers: no stored byte is called damaged."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import pytest

import memq
from memq.audit.collector import audit
from memq.audit.opened_topic import opened_topic
from memq.broker.broker import Broker
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from tests.s3_proxy import FaultProxy, PlannedFault, harming_proxy
from tests.s3_servers import S3Place, seaweedfs
from tests.soak import repetitions

BATCHES = 60
HANG_S = 120
SHARE = 0.3  # of all GETs that are spoilt
SPOILT = [
    *(PlannedFault("body", harm) for harm in ("changed", "short", "cut")),
    PlannedFault("before", "answer", 404, "NoSuchKey"),
    PlannedFault("before", "answer", 400),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Place]:
    with seaweedfs(tmp_path_factory.mktemp("s3")) as real:
        yield real


@dataclass
class Weather:
    """What GETs meet: nothing, or one of `SPOILT` at random, and how many were met."""

    dice: random.Random
    bad: bool = False
    met: list[PlannedFault] = field(default_factory=list)

    def choose(self, method: str, ranged: bool) -> PlannedFault | None:
        """Say what a request meets."""
        if not self.bad or method != "GET" or self.dice.random() >= SHARE:
            return None
        self.met.append(self.dice.choice(SPOILT))
        return self.met[-1]


@asynccontextmanager
async def stored_batches(place: S3Place, proxy: FaultProxy) -> AsyncIterator[tuple[str, dict[str, object]]]:
    """Run a broker on the store behind the proxy, with batches in it; yield its address and the keys of the store."""
    keys: dict[str, object] = {"access_key_id": place.access_key_id, "secret_access_key": place.secret_access_key}
    runtime, store = Runtime(), replace(place, endpoint=proxy.endpoint).open()
    settings = BrokerSettings(port=0, http_port=-1, partitions=1, audit=False)
    broker = Broker(settings, runtime, {"main": store}, MemoryQueue(runtime.clock), MemoryCoordinator(MemoryCluster()))
    await broker.start()
    try:
        async with memq.aio.Producer(broker.address) as producer:
            for number in range(BATCHES):
                await (await producer.send("clicks", b"%d" % number))
        broker.services.recent_batches.clear()  # READ must ask the store
        yield broker.address, {**keys, "trusted_endpoints": proxy.endpoint}
    finally:
        await broker.close()
        await store.close()


@pytest.mark.soak
@pytest.mark.parametrize("read", ["direct", "broker", "auto"])
def test_a_group_that_skips_damage_gets_every_record(read: Literal["direct", "broker", "auto"], place: S3Place) -> None:
    async def scenario(seed: int) -> None:
        weather = Weather(random.Random(seed))
        async with harming_proxy(place.endpoint) as proxy, stored_batches(place, proxy) as (address, s3):
            proxy.choose = weather.choose
            weather.bad = True
            async with memq.aio.Consumer(
                address, "clicks", group="g", end="end", on_damaged="skip", read=read, s3=s3
            ) as consumer:
                values = [value async for batch in consumer for value in batch.values()]
                stats = consumer.stats()
            assert values == [b"%d" % number for number in range(BATCHES)]
            assert (stats.counts.damaged_blocks, stats.counts.damaged_records) == (0, 0)
            harmed = [met for met in weather.met if met.harm == "changed"]
            assert bool(harmed) == bool(stats.transit_errors), f"{len(harmed)} were changed"

    async def bounded(seed: int) -> None:
        async with asyncio.timeout(HANG_S):
            await scenario(seed)

    for seed in range(repetitions(few=1, many=20)):
        asyncio.run(bounded(seed))


def test_the_audit_calls_nothing_corrupt_that_came_spoilt(place: S3Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        weather = Weather(random.Random(1))
        async with harming_proxy(place.endpoint) as proxy, stored_batches(place, proxy) as (address, s3):
            for name, value in s3.items():
                monkeypatch.setenv(f"MEMQ_S3_{name.upper()}", str(value))
            proxy.choose = weather.choose
            weather.bad = True
            async with opened_topic(address, "clicks") as opened:
                verdict = await audit(opened.topic, opened.queue, opened.read, SystemClock().wall_ms())
            assert verdict.passed, verdict.findings
            assert any(met.harm == "changed" for met in weather.met)

    async def bounded() -> None:
        async with asyncio.timeout(HANG_S):
            await scenario()

    asyncio.run(bounded())
