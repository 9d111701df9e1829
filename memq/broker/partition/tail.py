"""The queue's tail at an opening: totals behind it, and batches no owner has counted. Pure."""

from __future__ import annotations

from memq.format.pointer import Adopted, Pointer, named_since_ms
from memq.format.totals import TotalsFold, adopted_of
from memq.topic import Totals


class QueueTail:
    """The pointers of one write partition, added in order of offset.

    `last_ms` is the latest queue time of them.
    `named_ms` is from when on they must be read for what they say of named producers, 0: they say nothing.
    """

    def __init__(self) -> None:
        self.last_ms = 0
        self.named_ms = 0
        self._fold = TotalsFold()
        self._newest = (0, -1)  # epoch and number of the last owner's last batch
        self._uncounted: list[tuple[int, Adopted]] = []  # with the records before each, in no stated totals so far

    def add(self, offset: int, time_ms: int, pointer: Pointer) -> None:
        """Take the next pointer.

        Totals that are stated count all that lies below some offset (`memq.format.totals`, 1), so a batch is counted
        when they are more than what lies before it.
        """
        stated = pointer.totals.records
        self._uncounted = [(before, entry) for before, entry in self._uncounted if before >= stated]
        self._fold.reach(pointer.totals)
        before = self._fold.totals.records
        self._fold.add(pointer)
        self.last_ms = max(self.last_ms, time_ms)
        if pointer.epoch > self._newest[0]:
            self._newest = (pointer.epoch, -1)
        if pointer.epoch == self._newest[0]:
            self.named_ms = named_since_ms(pointer, time_ms)
        if pointer.kind == "data":
            self._uncounted.append((before, adopted_of(offset, pointer)))
            self._newest = max(self._newest, (pointer.epoch, pointer.batch_sequence))

    def uncounted(self) -> list[Adopted]:
        """Return the batches that came late to all owners so far; the last owner's last batch is none of them."""
        late = [entry for _, entry in self._uncounted]
        last = next((entry for entry in late if (entry.epoch, entry.batch_sequence) == self._newest), None)
        return [entry for entry in late if entry is not last]

    def counted(self) -> Totals:
        """Return the totals behind the tail without the uncounted ones."""
        totals = self._fold.totals
        for entry in self.uncounted():
            totals = totals.plus(-entry.records, -entry.bytes)
        return totals
