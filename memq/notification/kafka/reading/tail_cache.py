"""The newest pointers of each partition within a byte budget, for consumers at the tail. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from memq.notification import Entry
from memq.topic import ReadPartition

ENTRY_BYTES = 200  # memory of an entry in addition to its body


@dataclass(slots=True)
class CachedRun:
    """Entries of one partition with the offsets `first`, `first` + 1, … up to `next` (exclusive)."""

    first: int
    next: int
    entries: deque[Entry] = field(default_factory=deque)


class TailCache:
    """The newest run of entries of each partition. Entries change only if Kafka cuts a log.

    All entries are ones that Kafka has shown: the offset in a delivery report may be wrong.
    It does not know the end of a log. When the budget is used up, the entries that were added first are removed.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0
        self._bytes_max = bytes_max
        self._runs: dict[ReadPartition, CachedRun] = {}
        self._order: deque[tuple[ReadPartition, int]] = (
            deque()
        )  # entries in order of `add`, also some that are removed by now
        self._count = 0

    def add(self, partition: ReadPartition, entry: Entry) -> None:
        """Add an entry.

        An entry that does not follow the last one begins a new run, because the entries of the gap are unknown. So does
        another entry at a known offset: the log was cut, and grows again. Below the run, a younger entry than
        the last one shows that.
        """
        run = self._runs.get(partition)
        if run is not None and entry.offset < run.next:
            if entry.offset < run.first:
                known = not run.entries or entry.time_ms <= run.entries[-1].time_ms
            else:
                known = run.entries[entry.offset - run.first].body == entry.body
            if known:
                return
            run = None
        if run is None or entry.offset != run.next:
            self.drop(partition)
            run = self._runs[partition] = CachedRun(entry.offset, entry.offset)
        run.entries.append(entry)
        run.next = entry.offset + 1
        self.bytes += _size(entry)
        self._count += 1
        self._order.append((partition, entry.offset))
        while self.bytes > self._bytes_max:
            self._evict()
        if len(self._order) > 2 * self._count + 1_000:
            self._order = deque(item for item in self._order if self._is_here(*item))

    def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Sequence[Entry]:
        """Return entries from `offset` on within `bytes_max`, at least one; none if they are not cached."""
        run = self._runs.get(partition)
        if run is None or not run.first <= offset < run.next:
            return ()
        found: list[Entry] = []
        size = 0
        for index in range(offset - run.first, len(run.entries)):
            entry = run.entries[index]
            size += len(entry.body)
            if found and size > bytes_max:
                break
            found.append(entry)
        return found

    def trim(self, partition: ReadPartition, before: int) -> None:
        """Remove the entries below `before`."""
        run = self._runs.get(partition)
        if run is not None and before > run.first:
            while run.entries and run.entries[0].offset < before:
                self._take(run)
            run.first = before
            run.next = max(run.next, before)

    def drop(self, partition: ReadPartition) -> None:
        """Remove all entries of a partition."""
        run = self._runs.pop(partition, None)
        while run is not None and run.entries:
            self._take(run)

    def _evict(self) -> None:
        partition, offset = self._order.popleft()
        if self._is_here(partition, offset):
            run = self._runs[partition]
            run.first = run.entries[0].offset + 1
            self._take(run)

    def _is_here(self, partition: ReadPartition, offset: int) -> bool:
        run = self._runs.get(partition)
        return run is not None and bool(run.entries) and run.entries[0].offset <= offset < run.next

    def _take(self, run: CachedRun) -> None:
        self.bytes -= _size(run.entries.popleft())
        self._count -= 1


def _size(entry: Entry) -> int:
    return len(entry.body) + ENTRY_BYTES
