"""The event minute of a record: from its block's header, as reporters state it. Pure.

The queue's pointers know the times of a batch, not those of its blocks. So what they show waits a little for a report
that names its minute, and is counted in the batch's own until one comes.

Instances of a named producer use a sequence again that did not arrive, for another record. So what was sent, or acked
with less than `all`, dates a sequence only until a reader, or an ack with `all`, says which minute the record in the
queue has; then all counts of it move there. So each sequence is counted in one minute, whatever was heard first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from memq.audit.account import apart, common
from memq.audit.live.partition_state import AuditedProducer
from memq.audit.minutes import QUEUE
from memq.audit.minutes import MinuteRow as MinuteCounts
from memq.format.ranges import Range, RangeSet

WAIT_MS = 60_000  # for a report that names the minute of what the queue shows
MINUTES_KEPT = 15  # of one producer: as long as anything of them may be found missing
PIECES_MAX = 4_096  # that wait for their minute
Dated = tuple[int, int, int]  # minute, first, next


class EventMinutes:
    """Dates the sequences of one stream."""

    __slots__ = ("_stream",)

    def __init__(self, stream: AuditedProducer) -> None:
        self._stream = stream

    def wait(self, pieces: Sequence[Range], minute: int, time_ms: int, *, late: bool) -> None:
        """Let pieces that the queue showed at `time_ms` wait for their minute; `minute` is what it is else."""
        waiting, due_ms = self._stream.unplaced, time_ms + WAIT_MS
        for first, next_ in pieces:
            if waiting and waiting[-1][2:] == (first, minute, late):
                waiting[-1] = (due_ms, waiting[-1][1], next_, minute, late)
            else:
                waiting.append((due_ms, first, next_, minute, late))

    def tell(self, minute: int, pieces: Sequence[Range], row: Callable[[int], MinuteCounts], *, sure: bool) -> None:
        """Take a report on a minute; `sure` when its minutes are those of the stored records.

        Records that were counted in another minute then move to this one.
        """
        told = RangeSet(pieces if sure else self._told(pieces)[1])
        if sure:
            self._move(minute, told, row)
        left: list[tuple[int, int, int, bool]] = []
        for first, next_, guess, late in self._stream.guessed if told else ():
            here = common([(first, next_)], told)
            for piece in here if guess != minute else ():
                _count(row(guess), piece, -1, late=late)
                _count(row(minute), piece, 1, late=late)
            left += [(*piece, minute, late) for piece in ([] if sure else here)]
            left += [(*piece, guess, late) for piece in apart([(first, next_)], told)]
        if told:
            self._stream.guessed[:] = left
        known = self._stream.minutes.setdefault(minute, RangeSet())
        for piece in told:
            known.add(*piece)

    def place(self, row: Callable[[int], MinuteCounts], now_ms: int) -> None:
        """Count what waits and can be dated, or has waited long enough."""
        left: list[tuple[int, int, int, int, bool]] = []
        room = len(self._stream.unplaced) - PIECES_MAX
        for due_ms, first, next_, guess, late in self._stream.unplaced:
            told, unknown = self._told([(first, next_)])
            for minute, low, high in told:
                _count(row(minute), (low, high), 1, late=late)
                for piece in apart([(low, high)], self._stream.acked):  # its report may be of another instance's
                    self._guess(piece, minute, late=late)
            for hole in unknown:
                if due_ms > now_ms and room <= 0:
                    left.append((due_ms, *hole, guess, late))
                else:
                    _count(row(guess), hole, 1, late=late)
                    self._guess(hole, guess, late=late)
            room -= 1
        self._stream.unplaced[:] = left
        self._forget_minutes()

    def dated(self, pieces: Sequence[Range], fallback: int) -> list[Dated]:
        """Return minute, first and next of all `pieces`: as reported, else by their pointer, else `fallback`."""
        told, left = self._told(pieces)
        waiting = [(minute, RangeSet([(first, next_)])) for _, first, next_, minute, _ in self._stream.unplaced]
        guessed = [(minute, RangeSet([(first, next_)])) for first, next_, minute, _ in self._stream.guessed]
        shown, left = _dated_by([*guessed, *waiting] if left else [], left)
        return [*told, *shown, *((fallback, *piece) for piece in left)]

    def minute_of(self, sequence: int, fallback: int) -> int:
        """Return the minute of one sequence."""
        return self.dated([(sequence, sequence + 1)], fallback)[0][0]

    def _told(self, pieces: Sequence[Range]) -> tuple[list[Dated], list[Range]]:
        """Return what of `pieces` has a minute that is known, and what is left."""
        return _dated_by(self._stream.minutes.items(), pieces)

    def _move(self, minute: int, told: RangeSet, row: Callable[[int], MinuteCounts]) -> None:
        """Move the reported ranges of a minute out of all other minutes, with their counts of sent records."""
        for other, ranges in list(self._stream.minutes.items()):
            moved = common(told, ranges) if other != minute else []
            if moved:
                self._stream.minutes[other] = RangeSet(apart(ranges, told))
                sent = sum(next_ - first for first, next_ in common(moved, self._stream.sent))
                row(other).side(QUEUE).count("sent", -sent)
                row(minute).side(QUEUE).count("sent", sent)

    def _guess(self, piece: Range, minute: int, *, late: bool) -> None:
        guessed = self._stream.guessed
        if guessed and guessed[-1][1:] == (piece[0], minute, late):
            guessed[-1] = (guessed[-1][0], piece[1], minute, late)
        else:
            guessed.append((*piece, minute, late))
        del guessed[:-PIECES_MAX]

    def _forget_minutes(self) -> None:
        """Forget old minutes, except a few that are still awaited or guessed: a later instance may use them."""
        minutes, guessed = self._stream.minutes, self._stream.guessed
        newest = max(minutes, default=0)
        old = sorted((minute for minute in minutes if minute <= newest - MINUTES_KEPT), reverse=True)
        if guessed:
            newest = max(newest, guessed[-1][2])
            recent = len(guessed) - MINUTES_KEPT
            guessed[:] = [each for at, each in enumerate(guessed) if each[2] > newest - MINUTES_KEPT or at >= recent]
        unsure = RangeSet((first, next_) for first, next_, _, _ in guessed) if old else RangeSet()
        left = MINUTES_KEPT
        for minute in old:
            ranges = minutes.pop(minute)
            kept = RangeSet([*apart(ranges, self._stream.account.delivered), *common(ranges, unsure)])
            if kept and left:
                minutes[minute] = kept
                left -= 1


def _count(row: MinuteCounts, piece: Range, times: int, *, late: bool) -> None:
    """Count what the queue has, or take it back with -1 for `times`."""
    records = times * (piece[1] - piece[0])
    row.side(QUEUE).count("committed", records)
    row.side(QUEUE).count("late", records if late else 0)


def _dated_by(minutes: Iterable[tuple[int, RangeSet]], pieces: Sequence[Range]) -> tuple[list[Dated], list[Range]]:
    """Split `pieces`: the part in the ranges of a minute (the first that has it), and the rest."""
    found: list[Dated] = []
    left = list(pieces)
    for minute, ranges in minutes if left else ():
        found += [(minute, *piece) for piece in common(left, ranges)]
        left = apart(left, ranges)
    return found, left
