"""A queue that answers wrongly without an error, as real ones do after a broken connection."""

from __future__ import annotations

from memq.notification import Entries, Span
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.topic import ReadPartition

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
