"""Which batches of one partition were handed out and are done: what may be committed. Pure.

A commit is always a contiguous prefix: the position behind the last batch before which all are done. What
was passed over without being handed out (control pointers, copies, damage) is done as it is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from memq.topic import Committed, Position


@dataclass(slots=True)
class _Mark:
    behind: Committed
    done: bool


class CommitLedger:
    """The batches of one partition that were handed out, in order, until they are done."""

    def __init__(self) -> None:
        self._marks: deque[_Mark] = deque()
        self._prefix: Committed | None = None
        self._stored: Committed | None = None

    def __len__(self) -> int:
        """How many places are kept: those of batches that are not done, and what follows on them."""
        return len(self._marks)

    def hand(self, behind: Committed) -> None:
        """Note a batch that was handed out; `behind` is the place behind it."""
        self._marks.append(_Mark(behind, done=False))

    def passed(self, behind: Committed) -> None:
        """Note that all before `behind` was passed over, without a batch."""
        self._marks.append(_Mark(behind, done=True))
        self._take_done()

    def knows(self, position: Position) -> bool:
        """Whether a batch that ends at `position` was handed out, or all up to there is done."""
        if self._prefix is not None and position <= self._prefix.position:
            return True
        return any(mark.behind.position == position for mark in self._marks)

    def finish(self, position: Position) -> None:
        """Note that all before `position` is done."""
        for mark in self._marks:
            if mark.behind.position > position:
                break
            mark.done = True
        self._take_done()

    @property
    def prefix(self) -> Committed | None:
        """The place before which all is done; None when nothing is."""
        return self._prefix

    @property
    def due(self) -> Committed | None:
        """The position to commit; None when it is already stored."""
        return None if self._prefix == self._stored else self._prefix

    @property
    def pending(self) -> bool:
        """Whether a batch that was handed out is not done."""
        return any(not mark.done for mark in self._marks)

    def is_stored(self, position: Position) -> bool:
        """Whether it is known that a place at or behind `position` was stored."""
        return self._stored is not None and self._stored.position >= position

    def stored(self, committed: Committed) -> None:
        """Note that `committed` was stored."""
        self._stored = committed

    def _take_done(self) -> None:
        """Move the prefix: only batches that are not done, and what follows on them, are kept."""
        while self._marks and self._marks[0].done:
            self._prefix = self._marks.popleft().behind
