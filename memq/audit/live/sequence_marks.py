"""Marks: the highest sequence of each producer at a pointer, to convert a group's position to records.

Pure.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

MARKS_MAX = 512


@dataclass(slots=True)
class Marks:
    """One producer's highest sequence plus one after each pointer with a block of it.

    At MARKS_MAX every second mark of the older half is dropped. Up to `thinned`, an offset may then be between two
    marks; an answer uses the mark that proves less.
    """

    offsets: list[int] = field(default_factory=list)
    reaches: list[int] = field(default_factory=list)
    behind: list[tuple[int, int, int]] = field(default_factory=list)  # offset, first, next: came out of order
    thinned: int = -1

    def add(self, offset: int, first: int, next_: int) -> None:
        """Take a new block of the pointer at `offset`; offsets never go back."""
        reach = self.reaches[-1] if self.reaches else 0
        if first < reach:
            self.behind.append((offset, first, min(next_, reach)))
            del self.behind[:-MARKS_MAX]
        if next_ <= reach:
            return
        if self.offsets and self.offsets[-1] == offset:
            self.reaches[-1] = next_
            return
        self.offsets.append(offset)
        self.reaches.append(next_)
        if len(self.offsets) > MARKS_MAX:
            self._thin()

    def cut(self, offset: int) -> None:
        """Forget all pointers from `offset` on: the queue has lost them."""
        at = bisect_left(self.offsets, offset)
        del self.offsets[at:], self.reaches[at:]
        self.behind[:] = [each for each in self.behind if each[0] < offset]
        self.thinned = min(self.thinned, offset - 1)

    def reach(self, offset: int, *, sure: bool) -> int:
        """Return the reach after all pointers below `offset`.

        Between dropped marks the result may be too low; with `sure` it may be too high instead, so that all records
        from it on are certainly at or after `offset`.
        """
        at = bisect_left(self.offsets, offset)
        if sure and offset <= self.thinned and at < len(self.reaches):
            return self.reaches[at]
        return self.reaches[at - 1] if at else 0

    def offset_of(self, sequence: int) -> int:
        """Return the offset of the pointer with a sequence, or of a later one; -1 if none is known."""
        for offset, first, next_ in self.behind:
            if first <= sequence < next_:
                return offset
        at = bisect_right(self.reaches, sequence)
        return self.offsets[at] if at < len(self.offsets) else -1

    def _thin(self) -> None:
        half = MARKS_MAX // 2
        self.thinned = self.offsets[half - 1]
        self.offsets[:half] = self.offsets[1:half:2]
        self.reaches[:half] = self.reaches[1:half:2]
