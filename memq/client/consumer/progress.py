"""How many records and bytes lie before a place in a read partition, from the totals in its pointers.

Pure.
One fold per write partition (`memq.format.totals`, with the theory) gives both ends of a lag: records stored, before
dedup, filter and damage.
"""

from __future__ import annotations

from collections.abc import Iterable

from memq.format.pointer import Pointer
from memq.format.totals import TotalsFold
from memq.topic import Totals


class ReadProgress:
    """Folds the pointers of one read partition, in order of offset, into totals."""

    def __init__(self) -> None:
        self._parts: dict[int, TotalsFold] = {}

    def pass_over(self, pointer: Pointer) -> None:
        """Count a pointer as lying before this place."""
        self._part(pointer.partition).add(pointer)

    def start_at(self, pointer: Pointer) -> None:
        """Take the totals that `pointer`, the first of its write partition here or later, states."""
        self._part(pointer.partition).reach(pointer.totals)

    def join(self, other: ReadProgress) -> None:
        """Take what `other` found before the same place, where it is more."""
        for partition, part in other._parts.items():
            self._part(partition).reach(part.totals)

    def _part(self, partition: int) -> TotalsFold:
        found = self._parts.get(partition)
        if found is None:
            found = self._parts[partition] = TotalsFold()
        return found

    @property
    def totals(self) -> Totals:
        """The totals before this place, over all write partitions."""
        total = Totals()
        for part in self._parts.values():
            total = total.plus(part.totals.records, part.totals.bytes)
        return total

    def knows(self, partitions: Iterable[int]) -> bool:
        """Whether each of these write partitions was met."""
        return all(partition in self._parts for partition in partitions)

    def is_settled(self, partition: int) -> bool:
        """Whether the pointers of a write partition alone show that its totals are exact."""
        found = self._parts.get(partition)
        return found is not None and found.settled
