"""How much a write partition committed, folded from its pointers in order. Pure, the same for owner and reader.

A pointer states what lay before it. Late pointers (a lower epoch behind a higher one, a batch that landed again, or
one that landed between an opener's tail read and its `opened`) are in no total until an owner adopts them.
"""

from __future__ import annotations

from collections import deque

from memq.format.pointer import Adopted, Pointer
from memq.topic import Totals

COUNTED_MAX = 256  # pointers that may land between an opener's tail read and its `opened`


class TotalsFold:
    """The totals of one write partition behind the last pointer added; `late` is by offset, not yet adopted."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch
        self.batch = -1
        self.totals = Totals()
        self.late: dict[int, Adopted] = {}
        self._counted: deque[tuple[int, Adopted]] = deque(maxlen=COUNTED_MAX)  # records before it, of this epoch

    def add(self, offset: int, pointer: Pointer) -> None:
        """Count the pointer at `offset`."""
        data = pointer.kind == "data"
        entry = adopted_of(offset, pointer)
        again = data and pointer.epoch == self.epoch and pointer.batch_sequence <= self.batch
        if pointer.epoch < self.epoch or again:
            if data:
                self.late[offset] = entry
            return
        if pointer.epoch > self.epoch:
            self._begin(pointer)
        for adopted in pointer.adopted:
            self._adopt(adopted)
        if data:
            self.batch = pointer.batch_sequence
            self._counted.append((pointer.totals.records, entry))
        self.totals = behind(pointer)

    def _begin(self, pointer: Pointer) -> None:
        """Begin an epoch: what its first pointer did not count when it was made is late."""
        known = pointer.totals.records - sum(adopted.records for adopted in pointer.adopted)
        for before, entry in self._counted:
            if before >= known:
                self.late[entry.offset] = entry
        self._counted.clear()
        self.epoch, self.batch = pointer.epoch, -1

    def _adopt(self, adopted: Adopted) -> None:
        """Take an adopted pointer out of the late ones: by offset, else the other copy of the same batch."""
        if self.late.pop(adopted.offset, None) is None:
            same = (adopted.epoch, adopted.batch_sequence)
            for offset, entry in self.late.items():
                if (entry.epoch, entry.batch_sequence) == same:
                    del self.late[offset]
                    return


def behind(pointer: Pointer) -> Totals:
    """Return the totals behind a pointer."""
    return pointer.totals.plus(pointer.records, pointer.stored_bytes)


def adopted_of(offset: int, pointer: Pointer) -> Adopted:
    """Return how an owner names a late pointer."""
    return Adopted(
        offset=offset,
        epoch=pointer.epoch,
        batch_sequence=pointer.batch_sequence,
        records=pointer.records,
        bytes=pointer.stored_bytes,
    )
