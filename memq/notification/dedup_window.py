"""A reader's memory of each producer within the dedup window, and its verdict on a block. Pure.

A block that was sent again is the same block: same producer, same sequences. The queue may hold it twice
for as long as the window W (docs/ownership.md, rule 9), so a reader that remembers W of sequences drops every copy.
Memory is bounded by forgetting in slices of W: a slice is dropped whole when all of it is older than W.
What is older than the window counts as not seen: forgetting never loses a record that arrives late.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto

from memq.format.ranges import Range, RangeSet

SLICES = 4  # the window is forgotten in quarters: at most W + W/4 is remembered
Source = tuple[int, int]  # write partition, producer id: sequences are dense per both


class Novelty(Enum):
    """NEW is delivered, SEEN is dropped, PARTLY is delivered and counted: a finding for the audit."""

    NEW = auto()
    SEEN = auto()
    PARTLY = auto()


class DedupWindow:
    """The sequences that were seen in the last `window_ms` of queue time of one read partition.

    `gaps` counts sequences that were passed over between blocks: given up by their producer, or still to come.
    """

    def __init__(self, window_ms: int) -> None:
        assert window_ms > 0, f"window of {window_ms} ms"
        self.gaps = 0
        self._window_ms = window_ms
        self._slices: deque[tuple[int, dict[Source, RangeSet]]] = deque([(0, {})])  # begin (ms), seen sequences
        self._next: dict[Source, int] = {}  # one above the greatest sequence seen, within the window
        self._now_ms = 0

    def advance(self, time_ms: int) -> None:
        """Note the queue time of the next entry, which never decreases; forget records older than the window."""
        if time_ms <= self._now_ms:
            return
        self._now_ms = time_ms
        if time_ms < self._slices[-1][0] + self._window_ms // SLICES:
            return
        self._slices.append((time_ms, {}))
        # A slice ends where its successor starts: drop it when that moment is a window ago.
        dropped = False
        while len(self._slices) > 1 and self._slices[1][0] <= time_ms - self._window_ms:
            self._slices.popleft()
            dropped = True
        if dropped:
            kept = {source for _, seen in self._slices for source in seen}
            self._next = {source: next_ for source, next_ in self._next.items() if source in kept}

    def note(self, partition: int, producer: int, first: int, next_: int) -> None:
        """Remember sequences that lie before the start, or were judged elsewhere."""
        source = (partition, producer)
        seen = self._slices[-1][1].get(source)
        if seen is None:
            seen = self._slices[-1][1][source] = RangeSet()
        seen.add(first, next_)
        self._next[source] = max(self._next.get(source, 0), next_)

    def judge(self, partition: int, producer: int, first: int, next_: int) -> Novelty:
        """Return whether a block of these sequences is new, and remember them."""
        source = (partition, producer)
        expected = self._next.get(source)
        verdict = Novelty.NEW
        if expected is not None:
            if first > expected:
                self.gaps += first - expected
            elif first < expected:  # else no seen sequence can be in it: the common case costs one look-up
                verdict = self._compare(source, first, next_)
        self.note(partition, producer, first, next_)
        return verdict

    def seen(self, partition: int, producer: int, first: int, next_: int) -> list[Range]:
        """Return those of these sequences that were seen; do not remember them."""
        source = (partition, producer)
        if first >= self._next.get(source, 0):
            return []
        unseen = RangeSet(self._unseen(source, first, next_))
        return unseen.holes(first, next_)

    @property
    def producers(self) -> int:
        """Number of remembered pairs of write partition and producer id."""
        return len(self._next)

    def _compare(self, source: Source, first: int, next_: int) -> Novelty:
        unseen = self._unseen(source, first, next_)
        if not unseen:
            return Novelty.SEEN
        return Novelty.NEW if unseen == [(first, next_)] else Novelty.PARTLY

    def _unseen(self, source: Source, first: int, next_: int) -> list[Range]:
        unseen = [(first, next_)]
        for _, seen in self._slices:
            ranges = seen.get(source)
            if ranges is not None:
                unseen = [hole for piece in unseen for hole in ranges.holes(*piece)]
        return unseen
