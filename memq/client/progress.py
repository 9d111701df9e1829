"""How many records and bytes lie before a place in a read partition, from the totals in its pointers. Pure.

Each pointer states what its write partition had committed before it. Late pointers (a lower epoch after a
higher one was opened, or a repeated batch) are in no total until the owner adopts them in a later pointer,
so until then they are counted here. The same fold over pointers gives both ends of a lag, which is
therefore exact: records stored, before dedup, filter and damage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from memq.format.pointer import Pointer
from memq.topic import Totals


@dataclass(slots=True)
class _WritePartition:
    epoch: int
    batch: int = -1
    totals: Totals = field(default_factory=Totals)
    late: dict[int, Totals] = field(default_factory=dict)  # by offset, until adopted


class Progress:
    """Folds the pointers of one read partition, in order of offset, into totals."""

    def __init__(self) -> None:
        self._parts: dict[int, _WritePartition] = {}

    def pass_over(self, offset: int, pointer: Pointer) -> None:
        """Count the pointer at `offset` as lying before this place."""
        part = self._parts.setdefault(pointer.partition, _WritePartition(pointer.epoch))
        is_data = pointer.kind == "data"
        behind = pointer.epoch < part.epoch or (
            is_data and pointer.epoch == part.epoch and pointer.batch_sequence <= part.batch
        )
        if behind:
            if is_data:
                part.late[offset] = Totals(pointer.records, pointer.stored_bytes)
            return
        if pointer.epoch > part.epoch:
            part.epoch, part.batch = pointer.epoch, -1
        if is_data:
            part.batch = pointer.batch_sequence
        for adopted in pointer.adopted:
            part.late.pop(adopted.offset, None)
        part.totals = Totals(pointer.totals.records, pointer.totals.bytes).plus(pointer.records, pointer.stored_bytes)

    def start_at(self, pointer: Pointer) -> None:
        """Take the totals before `pointer` where nothing of its write partition was folded yet."""
        if pointer.partition not in self._parts:
            part = self._parts[pointer.partition] = _WritePartition(pointer.epoch)
            part.totals = Totals(pointer.totals.records, pointer.totals.bytes)

    def expect_epoch(self, partition: int, epoch: int) -> None:
        """Note that `epoch` was opened before the first pointer that is folded: lower ones are late."""
        part = self._parts.setdefault(partition, _WritePartition(epoch))
        part.epoch = max(part.epoch, epoch)

    @property
    def totals(self) -> Totals:
        """What lies before this place, of all write partitions together."""
        total = Totals()
        for part in self._parts.values():
            for piece in (part.totals, *part.late.values()):
                total = total.plus(piece.records, piece.bytes)
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
