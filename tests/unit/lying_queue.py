"""Queues in memory that answer wrongly without an error, fail, or hang, as real ones do after an outage."""

from __future__ import annotations

import asyncio

from memq.errors import MemqError
from memq.notification import Entries, Span
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.topic import ReadPartition
from tests.contract.manual_clock import ManualClock

ALL_BYTES = 1 << 30


class LyingQueue(MemoryQueue):
    """Shows the logs of another queue in pages of one entry, and lies of one read partition, if one is named.

    `over_at`: reads from this offset on are empty. `omits`: offsets that are left out. `repeats`: the offset whose
    entry each later read shows. `says`: the span that it says.
    """

    def __init__(self, queue: MemoryQueue, of: ReadPartition | None = None) -> None:
        super().__init__(SystemClock())
        self.logs = queue.logs
        self._of = of
        self.over_at: int | None = None
        self.omits: frozenset[int] = frozenset()
        self.repeats: int | None = None
        self.says: Span | None = None

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`."""
        if self._of not in (None, partition):
            return await super().read(partition, offset, bytes_max)
        if self.over_at is not None and offset >= self.over_at:
            return Entries((), offset)
        if self.repeats is not None and offset > self.repeats:
            offset = self.repeats
        found = await super().read(partition, offset, ALL_BYTES)
        left = [entry for entry in found if entry.offset not in self.omits][:1]
        return Entries(left, left[-1].offset + 1 if left else found.next)

    async def span(self, partition: ReadPartition) -> Span:
        """See `PointerReader.span`."""
        if self.says is not None and self._of in (None, partition):
            return self.says
        return await super().span(partition)


class FailingQueue(MemoryQueue):
    """A queue in memory whose logs fail (`failing`), or hang in reads (`slow`) and in spans (`silent`), by number."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.failing: dict[int, MemqError] = {}
        self.slow: set[int] = set()
        self.silent: set[int] = set()
        self.reads: list[int] = []
        self.spans = 0

    async def span(self, partition: ReadPartition) -> Span:
        self.spans += 1
        if partition.partition in self.silent:
            await asyncio.get_running_loop().create_future()  # for ever
        if partition.partition in self.failing:
            raise self.failing[partition.partition]
        return await super().span(partition)

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        if partition.partition in self.silent:
            await asyncio.get_running_loop().create_future()  # for ever
        return await super().seek_time(partition, time_ms)

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        self.reads.append(partition.partition)
        if partition.partition in self.slow:
            await asyncio.get_running_loop().create_future()  # for ever
        return await super().read(partition, offset, bytes_max)
