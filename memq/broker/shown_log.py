"""What the log of one write partition shows of its own past: which objects it can have named, and let go again. Pure.

Theory. An owner publishes `opened` before it puts any object of its epoch, and retention takes pointers from the front
and leaves the last ones. So an object of epoch e that no pointer names was let go only where the log shows e, or began
before e and was cut behind it. Else the log itself lost what named it:

- a log that shows nothing, or nothing as high as e, has lost its end, or all of it;
- one that was never cut begins with `opened` of the first epoch that there was: what is older was lost before;
- one that was never cut and begins behind records was lost under an owner, who went on;
- one that begins with the first batch there was is what a restore has made: it went through all objects in the order of
  epoch and batch sequence, and left out what it found to be copies, up to the last one that it named.
"""

from __future__ import annotations

from memq.format.pointer import Pointer
from memq.topic import Totals


class ShownLog:
    """Takes all pointers of one write partition, in order; then it says which objects they account for."""

    def __init__(self) -> None:
        self._shows = False
        self._restored = False  # so far: a restore has made all pointers up to here
        self._settled = (0, 0)  # epoch and batch sequence up to which all that is not named may go
        self._epochs: set[int] = set()
        self._begun_in = 0  # the epoch in which the log was lost under its owner

    def take(self, pointer: Pointer, *, cut: bool) -> None:
        """Take the next pointer; `cut`: the log, with those of all its write partitions, does not begin at offset 0."""
        if not self._shows:
            self._begin(pointer, cut=cut)
        self._restored = self._restored and pointer.kind == "data"
        if self._restored:
            self._settled = max(self._settled, (pointer.epoch, pointer.batch_sequence))
        else:
            self._epochs.add(pointer.epoch)

    def _begin(self, pointer: Pointer, *, cut: bool) -> None:
        self._shows = True
        if cut:
            self._settled = (pointer.epoch, -1)
        elif pointer.totals != Totals():
            self._begun_in = pointer.epoch
        else:
            self._restored = pointer.kind == "data"

    @property
    def lost(self) -> bool:
        """Whether nothing of its past is there, if it had one."""
        return not self._shows or self._begun_in > 0

    def accounts_for(self, epoch: int, batch_sequence: int) -> bool:
        """Whether an object of this place may go when no pointer names it."""
        if (epoch, batch_sequence) <= self._settled:
            return True
        return epoch > self._begun_in and epoch in self._epochs
