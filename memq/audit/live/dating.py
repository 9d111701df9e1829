"""Which minute of event time a record belongs to: as its block's header has it, told by whoever reports it. Pure.

The queue's pointers know the times of a batch, not those of its blocks. So what they show waits a little for a report
that names its minute, and is counted in the batch's own when none comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memq.audit.account import common
from memq.audit.live.books import Stream
from memq.audit.live.rows import QUEUE, Row
from memq.format.ranges import Range, RangeSet

WAIT_MS = 60_000  # for a report that names the minute of what the queue shows
MINUTES_KEPT = 15  # of one producer: as long as anything of them may be found missing
PIECES_MAX = 4_096  # that wait for their minute


class Dating:
    """Dates the sequences of one stream."""

    __slots__ = ("_stream",)

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def wait(self, pieces: Sequence[Range], minute: int, time_ms: int, *, late: bool) -> None:
        """Let pieces that the queue showed at `time_ms` wait for their minute; `minute` is what it is else."""
        waiting, due_ms = self._stream.unplaced, time_ms + WAIT_MS
        for first, next_ in pieces:
            if waiting and waiting[-1][2:] == (first, minute, late):
                waiting[-1] = (due_ms, waiting[-1][1], next_, minute, late)
            else:
                waiting.append((due_ms, first, next_, minute, late))

    def place(self, row: Callable[[int], Row], now_ms: int) -> None:
        """Count what waits and can be dated, or has waited long enough."""
        left: list[tuple[int, int, int, int, bool]] = []
        room = len(self._stream.unplaced) - PIECES_MAX
        for due_ms, first, next_, fallback, late in self._stream.unplaced:
            dated = self.dated([(first, next_)], -1)
            for minute, low, high in dated:
                if minute < 0 and due_ms > now_ms and room <= 0:
                    left.append((due_ms, low, high, fallback, late))
                    continue
                side = row(minute if minute >= 0 else fallback).side(QUEUE)
                side.count("committed", high - low)
                side.count("late", high - low if late else 0)
            room -= 1
        self._stream.unplaced[:] = left
        self._forget_minutes()

    def dated(self, pieces: Sequence[Range], fallback: int) -> list[tuple[int, int, int]]:
        """Return minute, first and next of all of `pieces`; `fallback` where no minute is known."""
        found: list[tuple[int, int, int]] = []
        known = RangeSet()
        if pieces:
            for minute, ranges in self._stream.minutes.items():
                for first, next_ in common(pieces, ranges):
                    found += [(minute, *hole) for hole in known.holes(first, next_)]
                    known.add(first, next_)
        return found + [(fallback, *hole) for piece in pieces for hole in known.holes(*piece)]

    def minute_of(self, sequence: int, fallback: int) -> int:
        """Return the minute of one sequence."""
        return self.dated([(sequence, sequence + 1)], fallback)[0][0]

    def _forget_minutes(self) -> None:
        minutes = self._stream.minutes
        newest = max(minutes, default=0)
        for minute in [each for each in minutes if each <= newest - MINUTES_KEPT]:
            del minutes[minute]
