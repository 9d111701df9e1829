"""How many records and bytes lie before a place in a read partition, from the totals in its pointers. Pure.

Late pointers are in no total until their owner adopts them in a later pointer, so until then they are counted here.
The same fold over pointers gives both ends of a lag: records stored, before dedup, filter and damage.
"""

from __future__ import annotations

from collections.abc import Iterable

from memq.format.pointer import Pointer
from memq.format.totals import TotalsFold
from memq.topic import Totals


class Progress:
    """Folds the pointers of one read partition, in order of offset, into totals."""

    def __init__(self) -> None:
        self._parts: dict[int, TotalsFold] = {}

    def pass_over(self, offset: int, pointer: Pointer) -> None:
        """Count the pointer at `offset` as lying before this place."""
        self._parts.setdefault(pointer.partition, TotalsFold(pointer.epoch)).add(offset, pointer)

    def start_at(self, pointer: Pointer) -> None:
        """Take the totals before `pointer` where nothing of its write partition was folded yet."""
        if pointer.partition not in self._parts:
            part = self._parts[pointer.partition] = TotalsFold(pointer.epoch)
            part.totals = pointer.totals

    def expect_epoch(self, partition: int, epoch: int) -> None:
        """Note that `epoch` was opened before the first pointer that is folded: lower ones are late."""
        part = self._parts.setdefault(partition, TotalsFold(epoch))
        part.epoch = max(part.epoch, epoch)

    @property
    def totals(self) -> Totals:
        """What lies before this place, of all write partitions together."""
        total = Totals()
        for part in self._parts.values():
            total = total.plus(part.totals.records, part.totals.bytes)
            for late in part.late.values():
                total = total.plus(late.records, late.bytes)
        return total

    def knows(self, partitions: Iterable[int]) -> bool:
        """Whether each of these write partitions was met."""
        return all(partition in self._parts for partition in partitions)


def end_progress(tail: list[tuple[int, Pointer]]) -> Progress:
    """Fold the last pointers of a read partition, given in order, into the totals at its end.

    An epoch whose `opened` is not in the tail was opened before it, so pointers of lower epochs in the tail are late.
    """
    opened = {(pointer.partition, pointer.epoch) for _, pointer in tail if pointer.kind == "opened"}
    progress = Progress()
    for _, pointer in tail:
        if (pointer.partition, pointer.epoch) not in opened:
            progress.expect_epoch(pointer.partition, pointer.epoch)
    for offset, pointer in tail:
        progress.pass_over(offset, pointer)
    return progress
