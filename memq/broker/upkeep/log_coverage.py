"""The past of a write partition in its log: which unnamed objects the log accounts for. Pure.

Theory. An owner publishes `opened` before it puts any object of its epoch, and the batches of an epoch in the order of
their numbers, from 0 and without a hole. Retention takes pointers from the front and leaves the last ones. So an object
of epoch e that no pointer names was let go only where the log shows e, or began before e and was cut behind it, and
where its number is not missing between those that the log shows. Else the log itself lost what named it:

- a log that shows nothing, or nothing as high as e, has lost its end, or all of it;
- one that was never cut begins with `opened` of the first epoch that there was: what is older was lost before;
- one that was never cut and begins behind records was lost under an owner, who continued;
- one that shows the batches 4 and 6 of an epoch has lost batch 5; what it shows of batch 5 names the object that holds,
  and another object of that number is an upload that was repeated under another key;
- one whose read partition has holes between its offsets (`lose`) may have lost anything that it does not show;
- one that begins with the first batch there was is what a restore has made: it went through all objects in the order of
  epoch and batch sequence, and left out what it found to be copies, up to the last one that it named.
"""

from __future__ import annotations

from memq.format.pointer import Pointer
from memq.format.ranges import RangeSet
from memq.topic import Totals


class LogCoverage:
    """Takes all pointers of one write partition, in order; then it says which objects they account for."""

    def __init__(self) -> None:
        self._shows = False
        self._holed = False
        self._restored = False  # so far: a restore has made all pointers up to here
        self._restored_to = (0, -1)  # epoch and batch sequence up to which a restore has left out copies
        self._cut_in = 0  # the epoch in which retention has cut the log, 0 when it has not
        self._begun_in = 0  # the epoch in which the log was lost under its owner
        self._numbers: dict[int, RangeSet] = {}  # by epoch: the batches that are shown
        self._whole: dict[int, None] = {}  # epochs that retention has not cut: their batches begin with 0

    def take(self, pointer: Pointer, *, cut: bool) -> None:
        """Take the next pointer.

        `cut`: the log, with those of all its write partitions, does not begin at offset 0.
        """
        if not self._shows:
            self._begin(pointer, cut=cut)
        data = pointer.kind == "data"
        self._restored = self._restored and data
        if self._restored:
            self._restored_to = max(self._restored_to, (pointer.epoch, pointer.batch_sequence))
            return
        if pointer.epoch not in self._numbers:
            self._numbers[pointer.epoch] = RangeSet()
            # `opened` comes before the first batch, but it is repeated: in a log that was cut it may be the later one.
            if not self._cut_in or (not data and pointer.epoch > self._cut_in):
                self._whole[pointer.epoch] = None
        if data:
            self._numbers[pointer.epoch].add(pointer.batch_sequence, pointer.batch_sequence + 1)

    def lose(self) -> None:
        """Note that the read partition does not show all entries that it has."""
        self._holed = True

    def _begin(self, pointer: Pointer, *, cut: bool) -> None:
        self._shows = True
        if cut:
            self._cut_in = pointer.epoch
        elif pointer.totals != Totals():
            self._begun_in = pointer.epoch
        else:
            self._restored = pointer.kind == "data"

    @property
    def lost(self) -> bool:
        """Whether it has lost pointers that it had, or all of them."""
        return not self._shows or self._holed or self._begun_in > 0 or any(map(self._has_gap, self._numbers))

    def accounts_for(self, epoch: int, batch_sequence: int) -> bool:
        """Whether an object of this place may go when no pointer names it."""
        numbers = self._numbers.get(epoch)
        if epoch <= self._begun_in:
            return False
        if numbers is not None and batch_sequence in numbers:
            return True
        if self._holed:
            return False
        if (epoch, batch_sequence) <= self._restored_to:
            return True
        if numbers is None:
            return epoch < self._cut_in
        if not numbers or batch_sequence >= numbers.next:
            return True
        return epoch not in self._whole and batch_sequence < numbers.least

    def _has_gap(self, epoch: int) -> bool:
        numbers = self._numbers[epoch]
        return len(numbers) > 1 or (len(numbers) == 1 and epoch in self._whole and numbers.least > 0)
