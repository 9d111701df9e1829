"""The share of a topic's bytes that a consumer reads from the store for a tag in 5 of 100 batches, or blocks.

The broker keeps no batch in memory, so each GET is counted. The reader of all records reads every byte once.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import memq
from benchmarks.results import Figure, Options
from memq.broker.broker import Broker
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.limits import KIB, MIB
from memq.notification.memory import MemoryQueue
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler

NAME = "filters"
SHARE_BOUND = 15.0  # percent
BATCHES = 100
RECORD_BYTES = 1_000
BLOCK_BYTES = 10_000
OTHER_TAG = "x"
Fill = Callable[[str, Options], Awaitable[int]]


class CountedStore(MemoryHandler):
    """Counts the bytes that are read."""

    read_bytes = 0

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `ObjectReader.get_range`."""
        self.read_bytes += length
        return await super().get_range(key, offset, length)


def run(options: Options) -> list[Figure]:
    """Measure both."""
    figures = []
    for case, fill in (("tag in 5 of 100 batches", fill_batches), ("tag in 5 of 100 blocks of 1 MiB", fill_blocks)):
        figures.append(asyncio.run(measured(case, fill, options)))
        options.say(figures[-1].line())
    return figures


@asynccontextmanager
async def counting_broker() -> AsyncIterator[tuple[Broker, CountedStore]]:
    """Run a broker that keeps no batch in memory."""
    runtime = Runtime()
    store, coordinator = CountedStore(runtime.clock), MemoryCoordinator(MemoryCluster())
    settings = BrokerSettings(port=0, http_port=-1, audit=False)
    broker = Broker(settings, runtime, {"main": store}, MemoryQueue(runtime.clock), coordinator)
    broker.services.recent_batches.bytes_max = 0
    await broker.start()
    try:
        yield broker, store
    finally:
        await broker.close()


async def fill_batches(address: str, options: Options) -> int:
    """Send batches of one tag each; return how many records have the tag T."""
    records = 20 if options.quick else 100
    async with memq.aio.Producer(address, codec="none", linger_ms=60_000, audit=False) as producer:
        for number in range(BATCHES):
            tag = "T" if number % 20 == 3 else OTHER_TAG
            await producer.send_many("tagged", [b"v" * RECORD_BYTES] * records, tag=tag)
            await producer.flush(60)
    return records * BATCHES // 20


async def fill_blocks(address: str, options: Options) -> int:
    """Send batches of about 100 blocks with one tag each; return how many records have the tag T."""
    dice, batches = random.Random(1), 4 if options.quick else 16
    async with memq.aio.Admin(address) as admin:
        settings = {"seal_when_idle": False, "batch_bytes_max": MIB, "batch_age_ms_max": 5_000}
        await admin.create_topic("tagged", settings=settings)
    async with memq.aio.Producer(address, codec="none", linger_ms=60_000, block_bytes=8 * KIB, audit=False) as producer:
        for _ in range(batches):
            tagged = dice.sample(range(100), 5)
            for number in range(100):
                tag = "T" if number in tagged else OTHER_TAG
                await producer.send("tagged", dice.randbytes(BLOCK_BYTES), tag=tag)
        await producer.flush(60)
    return 5 * batches


async def measured(case: str, fill: Fill, options: Options) -> Figure:
    """Read all records, then those with the tag; return the share of bytes."""
    sizes, seconds, counts = dict[str, int](), dict[str, float](), dict[str, int]()
    async with counting_broker() as (broker, store):
        wanted = await fill(broker.address, options)
        for tags in ("*", "T"):
            store.read_bytes, counts[tags], began_s = 0, 0, time.perf_counter()
            async with memq.aio.Consumer(broker.address, "tagged", end="end", tags=tags, audit=False) as consumer:
                async for batch in consumer:
                    counts[tags] += len(batch)
            sizes[tags], seconds[tags] = store.read_bytes, time.perf_counter() - began_s
    assert counts["T"] == wanted, f"{counts['T']} records of the tag, {wanted} were sent"
    detail: dict[str, float | str] = {
        "MB in all": sizes["*"] / 1e6,
        "records": counts["T"],
        "of": counts["*"],
        "time": f"{seconds['T'] / seconds['*']:.2f} of that for all",
    }
    return Figure(NAME, case, 100 * sizes["T"] / sizes["*"], "%", SHARE_BOUND, detail=detail)
