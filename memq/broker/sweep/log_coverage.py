"""The past of a write partition in its log: which unnamed objects the log accounts for. Pure.

Theory. An owner publishes `opened` before it puts any object of its epoch. It publishes the batches of an epoch in the
order of their numbers, from 0 and without a hole. Retention removes pointers from the front and leaves the last ones.
A try to publish may land again after later batches; retention removes all pointers of a batch at once.
So an object of epoch e without a pointer may be deleted if the log shows e, or begins with a later epoch after a trim.
Its number must not be missing between the numbers that the log shows. Otherwise the log itself has lost the pointer:

- A log that shows nothing, or no epoch as high as e, was cut, or lost completely.
- A log that was never trimmed begins with `opened` of the first epoch; pointers of older epochs were lost before.
- A log that was never trimmed, but begins after records, was lost while an owner continued.
- A log that shows batches 4 and 6 of an epoch has lost batch 5. If it shows batch 5, that pointer names the valid
  object; another object of this number is a repeated upload under another key.
- A log whose read partition has holes between its offsets may have lost any pointer that it does not show
  (`note_holes`).
- A log that ends an epoch at batch 4 may have lost batch 5, or its owner died before it published batch 5. The
  numbers do not show which (`memq.broker.sweep.unproven_objects`).
- A log that begins with the first batch was made by a restore. The restore read all objects in the order of epoch and
  batch sequence, and left out copies, up to the last batch that it named.
"""

from __future__ import annotations

from memq.format.pointer import Pointer
from memq.format.ranges import RangeSet
from memq.topic import CLOCK_ERROR_MS, Totals


class LogCoverage:
    """Takes all pointers of one write partition, in order; then decides which objects they account for."""

    def __init__(self) -> None:
        self._shows = False
        self._holed = False
        self._restored = False  # whether a restore has made all pointers so far
        self._restored_to = (0, -1)  # epoch and batch sequence up to which a restore has left out copies
        self._trimmed_in = 0  # the epoch of the first pointer that retention left; 0 if the log was not trimmed
        self._trimmed_ms = 0  # queue time of that pointer (Unix ms); 0 if the log was not trimmed
        self._begun_in = 0  # the epoch in which the log was lost while an owner continued
        self._numbers: dict[int, RangeSet] = {}  # by epoch: the batches that the log shows
        self._whole: dict[int, None] = {}  # epochs that were not trimmed: their batches begin with 0

    def take(self, pointer: Pointer, *, trimmed: bool, time_ms: int = 0) -> None:
        """Take the next pointer.

        `trimmed`: the read partition does not begin at offset 0. `time_ms`: the queue time of the pointer (Unix ms).
        """
        if not self._shows:
            self._begin(pointer, trimmed=trimmed)
            self._trimmed_ms = time_ms if trimmed else 0
        data = pointer.kind == "data"
        self._restored = self._restored and data
        if self._restored:
            self._restored_to = max(self._restored_to, (pointer.epoch, pointer.batch_sequence))
            return
        if pointer.epoch not in self._numbers:
            self._numbers[pointer.epoch] = RangeSet()
            # `opened` precedes the first batch, but is also repeated: a trimmed log may begin with a repetition.
            if not self._trimmed_in or (not data and pointer.epoch > self._trimmed_in):
                self._whole[pointer.epoch] = None
        if data:
            self._numbers[pointer.epoch].add(pointer.batch_sequence, pointer.batch_sequence + 1)

    def note_holes(self) -> None:
        """Note that the read partition does not show all its entries."""
        self._holed = True

    def _begin(self, pointer: Pointer, *, trimmed: bool) -> None:
        self._shows = True
        if trimmed:
            self._trimmed_in = pointer.epoch
        elif pointer.totals != Totals():
            self._begun_in = pointer.epoch
        else:
            self._restored = pointer.kind == "data"

    @property
    def lost(self) -> bool:
        """Whether the log has lost some or all of its pointers."""
        return not self._shows or self._holed or self._begun_in > 0 or any(map(self._has_gap, self._numbers))

    def accounts_for(self, epoch: int, batch_sequence: int) -> bool:
        """Whether the object of a batch may be deleted if no pointer names it."""
        numbers = self._numbers.get(epoch)
        if epoch <= self._begun_in:
            return False
        if numbers is not None and batch_sequence in numbers:
            return True
        if self._holed:
            return False
        if self.is_restored(epoch, batch_sequence):
            return True
        if numbers is None:
            return epoch < self._trimmed_in
        if not numbers or batch_sequence >= numbers.next:
            return True
        return epoch not in self._whole and batch_sequence < numbers.least

    def is_after_end(self, epoch: int, batch_sequence: int, modified_ms: int) -> bool:
        """Whether the batch of an object follows on the last one that the log shows of its epoch.

        The log accounts for it only if no owner acked it before the log was cut. `modified_ms` (Unix ms) is when
        the object was written. If the log shows no batch of the epoch, retention may have taken it: it has if the
        object is older than the first pointer left. An earlier batch that is left proves that it has not: during an
        outage of the queue, an object may wait for hours until it gets its pointer.
        """
        numbers = self._numbers.get(epoch)
        if numbers is None:
            return False
        return batch_sequence >= numbers.next if numbers else modified_ms + CLOCK_ERROR_MS >= self._trimmed_ms

    def reaches_back_to(self, time_ms: int) -> bool:
        """Whether retention has left the pointers from a queue time (Unix ms) on."""
        return self._trimmed_ms <= time_ms + CLOCK_ERROR_MS

    def is_restored(self, epoch: int, batch_sequence: int) -> bool:
        """Whether a restore left out the batch, if no pointer names it: as a copy, or as unreadable."""
        return (epoch, batch_sequence) <= self._restored_to

    def _has_gap(self, epoch: int) -> bool:
        numbers = self._numbers[epoch]
        return len(numbers) > 1 or (len(numbers) == 1 and epoch in self._whole and numbers.least > 0)
