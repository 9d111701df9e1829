"""The youngest pointers that this broker has published: POLL is answered from memory. Pure.

Theory: a consumer at the end of a log waits in a POLL. When the owner has published a pointer, it knows offset, time
and bytes of the entry, and the blocks are in memory (`RecentBatchCache`). To read the entry from the queue again would
cost the consumer two reads of the log.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from memq.format.pointer import Location
from memq.limits import MIB
from memq.notification import Entry, Span
from memq.topic import ReadPartition

BYTES_MAX = 2 * MIB  # of pointers: about 6,000


class RecentPointer(NamedTuple):
    """An entry of the queue, the location of its batch, None without one, and the tag bits of its records."""

    entry: Entry
    location: Location | None
    tag_bits: int = 0


class RecentPointerCache:
    """The youngest published pointers by read partition and offset; the oldest go first."""

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._pointers: OrderedDict[tuple[ReadPartition, int], RecentPointer] = OrderedDict()
        self._ends: dict[ReadPartition, int] = {}  # of the partitions that have pointers here

    def add(self, partition: ReadPartition, pointer: RecentPointer) -> None:
        """Keep a published pointer. An offset below the last one shows that the log was cut: drop the others."""
        offset = pointer.entry.offset
        if offset < self._ends.get(partition, 0):
            self.forget(partition)
        self._pointers[partition, offset] = pointer
        self._ends[partition] = offset + 1
        self._bytes += len(pointer.entry.body)
        while self._bytes > self._bytes_max:
            self._drop(next(iter(self._pointers)))

    def find(self, partition: ReadPartition, offset: int) -> RecentPointer | None:
        """Return the pointer at an offset; None when it is not here."""
        return self._pointers.get((partition, offset))

    def run(self, partition: ReadPartition, offset: int, bytes_max: int) -> list[RecentPointer]:
        """Return pointers that follow on each other from `offset` on; at least one if it is here."""
        found: list[RecentPointer] = []
        size = 0
        while (pointer := self.find(partition, offset + len(found))) is not None:
            size += len(pointer.entry.body)
            if found and size > bytes_max:
                break
            found.append(pointer)
        return found

    def span(self, partition: ReadPartition, offset: int) -> Span | None:
        """Return `offset` and the end of a log whose pointer at `offset` is here; else None."""
        return Span(offset, self._ends[partition]) if (partition, offset) in self._pointers else None

    def compare(self, partition: ReadPartition, entries: Iterable[Entry]) -> None:
        """Drop the pointers of a partition if the log has another one at the offset of any.

        Kafka may have answered a wrong offset, or cut the log. A reader that finds out reads the log there again.
        """
        known = ((entry, self.find(partition, entry.offset)) for entry in entries)
        if any(pointer is not None and pointer.entry.body != entry.body for entry, pointer in known):
            self.forget(partition)

    def forget(self, partition: ReadPartition) -> None:
        """Drop the pointers of a partition, which another owner may continue."""
        if partition in self._ends:
            for key in [key for key in self._pointers if key[0] == partition]:
                self._drop(key)

    def _drop(self, key: tuple[ReadPartition, int]) -> None:
        self._bytes -= len(self._pointers.pop(key).entry.body)
        if key[1] + 1 == self._ends.get(key[0]):
            del self._ends[key[0]]
