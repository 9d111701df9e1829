"""The opening of a state log (S2): the last snapshot that counts, then the fold. Pure.

**The last snapshot that counts** is found before any state is known, because the log may begin in the middle of an
epoch. Any entry proves the `opened` of its epoch. An owner publishes a number only when the one before it counts. So a
snapshot entry counts when no entry before it has a higher epoch, nor the same epoch and an equal or higher number. A
log is trimmed only below the offset of a snapshot whose entry counts. This entry is above that offset, so it is left.

**A hole** of offsets in a log is a trim, or a loss. Entries before it say nothing about the state after it: the last
entries of an epoch may be in the hole, and nothing shows that they are missing. So the log begins after the last hole.
A damaged entry is a hole, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from memq.errors import EpochFencedError, LogLostError
from memq.format.state_log.entry import OpenedState, StateEntry, StateSnapshot
from memq.format.state_log.snapshot import SavedState
from memq.limits import KIB
from memq.notification import Entry
from memq.state_log import Machines
from memq.state_log.fold import Judgement, StateFold

SLICE_BYTES = 64 * KIB  # of entries, applied at once


class LogScan:
    """The entries of a log from its begin, added in order, as far as the state needs them."""

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.end = begin
        self.highest_epoch = 0
        self.snapshot: StateSnapshot | None = None  # the last one that counts
        self._number = -1  # the highest one of the highest epoch; -1: only its `opened`, or nothing
        self._entries: list[tuple[int, StateEntry, int]] = []  # offset, entry, bytes

    def add(self, entry: Entry, decoded: StateEntry) -> None:
        """Take the next entry of the log, and its content."""
        if entry.offset < self.end:
            return
        if entry.offset > self.end:
            self.pass_over(entry.offset)
        self.end = entry.offset + 1
        self._entries.append((entry.offset, decoded, len(entry.body)))
        number = -1 if isinstance(decoded.content, OpenedState) else decoded.number
        if (decoded.epoch, number) <= (self.highest_epoch, self._number):
            return
        self.highest_epoch, self._number = decoded.epoch, number
        if isinstance(decoded.content, StateSnapshot):
            self.snapshot = decoded.content
            self._entries = [each for each in self._entries if each[0] >= self.snapshot.offset]

    def pass_over(self, next_: int) -> None:
        """Begin the log at `next_`: entries before it are missing, or damaged."""
        self.begin = self.end = next_
        self._entries = []

    def fold(self, machines: Machines, saved: SavedState | None) -> StateFold:
        """Return the fold of what counts; `saved` is the content of `snapshot`, if there is one.

        Raises: LogLostError when the log lacks entries that the state needs; UnsupportedFormatError.
        """
        return next(each for each in self.begin_fold(machines, saved) if each is not None)

    def begin_fold(self, machines: Machines, saved: SavedState | None) -> Iterator[StateFold | None]:
        """Return the steps of the same; the last one is the fold, the others are None."""
        assert (saved is None) == (self.snapshot is None), "the last snapshot that counts is the base of the fold"
        fold = StateFold(machines())
        if saved is not None:
            for _ in fold.begin_restore(saved):
                yield None
        if self.begin > fold.offset:
            raise LogLostError(f"the state log begins at {self.begin}, and its state is known below {fold.offset}")
        done = 0
        for offset, entry, size in self._entries:
            done += size
            if done > SLICE_BYTES:
                done = size
                yield None
            if offset >= fold.offset and fold.meet(offset, entry).judgement is Judgement.GAP:
                raise LogLostError(f"the state log lacks an entry before offset {offset}")
        if fold.snapshot != self.snapshot:
            raise LogLostError("the state log names a snapshot by an entry that does not count")
        yield fold

    def uncovered_bytes(self) -> int:
        """Return the bytes of the entries that no snapshot covers."""
        return sum(size for _, _, size in self._entries)


def check_opened(fold: StateFold, epoch: int, nonce: int) -> None:
    """Check that the own `opened` is the last one that counts. Raises: EpochFencedError: start over."""
    if (fold.epoch, fold.nonce) != (epoch, nonce):
        raise EpochFencedError(f"'opened' of epoch {epoch} does not count: the state log has epoch {fold.epoch}")
