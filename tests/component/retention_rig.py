"""A topic of a real broker whose batches age, for tests of retention and sweep."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from memq.broker.broker import Broker
from memq.format.pointer import Pointer, decode_pointer
from memq.notification import Entry
from memq.runtime.clock import SystemClock
from memq.storage_handlers import ObjectEntry
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import Topic, read_partitions
from tests.brokers import BareClient, block_of, write_frame

HOUR_MS = 3_600_000


class SlowStore(MemoryHandler):
    """A memory store whose clock the test turns, and that calls the test in the middle of a listing or a delete."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.listed: Callable[[], Awaitable[None]] = nothing
        self.deleting: Callable[[str], Awaitable[None]] = nothing_of
        self.gate: asyncio.Event | None = None
        self.reached = asyncio.Event()

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectEntry]:
        async for entry in super().list(prefix):
            yield entry
        await self.listed()

    async def put(self, key: str, buffers: Any, checksum: int) -> None:
        await super().put(key, buffers, checksum)
        if self.gate is not None:
            self.reached.set()
            await self.gate.wait()  # stored, but the broker does not know yet

    async def delete(self, key: str) -> None:
        await self.deleting(key)
        await super().delete(key)


async def nothing() -> None: ...


async def nothing_of(key: str) -> None: ...


@dataclass
class Rig:
    """A broker with a topic, a client that writes one batch after another, and a store with hooks."""

    broker: Broker
    store: SlowStore
    client: BareClient
    topic: Topic
    sequence: int = 0

    @classmethod
    async def make(cls, broker: Broker) -> Rig:
        store = broker.services.stores["main"] = SlowStore()
        client = await BareClient.connect(broker)
        topic = await client.topic()
        await client.open(topic)
        return cls(broker, store, client, topic)

    def send(self) -> None:
        self.client.write(write_frame(block_of(self.topic, self.sequence, [b"%d" % self.sequence])))
        self.sequence += 1

    async def batch(self) -> str:
        """Write one batch and return the key of its object."""
        self.send()
        assert (await self.client.frame()).argument == self.sequence
        return next(reversed(self.store.objects))

    async def pointers(self) -> list[Pointer]:
        (partition,) = read_partitions(self.topic)
        return [decode_pointer(entry.body) for entry in await self.broker.services.queue.read(partition, 0, 1 << 20)]

    async def age(self, by_ms: int) -> None:
        """Let everything that is there grow older."""
        (partition,) = read_partitions(self.topic)
        log = self.broker.services.queue.log(partition)  # type: ignore[attr-defined]  # the memory queue
        log.entries[:] = [Entry(entry.offset, entry.time_ms - by_ms, entry.body) for entry in log.entries]
        self.age_objects(by_ms)

    def age_objects(self, by_ms: int) -> None:
        for key in self.store.objects:
            self.store.modified_ms[key] -= by_ms
