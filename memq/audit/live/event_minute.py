"""The event minute of a record: from its block's header, as reporters state it. Pure.

A pointer has the times of a batch, not those of its blocks. So the records of a pointer wait a little for a report that
names their minute. Until then they count in the batch's own minute.

Two instances of a named producer, or two tries of a Spark task, can use a sequence for different records, and the
queue has one of them. So reports on one sequence may name different minutes. They have different weights:

1. A reader names the minute of the record that it got. This is final; the first reader counts.
2. An ack with `all` proves that the queue has the sequence, but the record may be the other one. The last ack counts
   until a reader names the minute.
3. A record that was sent, or acked with less than `all`, gives a sequence its minute only while no other report does.

When the minute of a sequence changes, all its counts move. The minute of a counted sequence is a guess until a reader
has named it. So the counts do not depend on the order of the reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from memq.audit.account import apart, common
from memq.audit.live.partition_state import AuditedProducer
from memq.audit.minutes import QUEUE, MinuteRow
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
        """Let pieces that the queue showed at `time_ms` wait for their minute.

        `minute` is the minute of the pointer, which counts if no report names one.
        """
        waiting, due_ms = self._stream.unplaced, time_ms + WAIT_MS
        for first, next_ in pieces:
            if waiting and waiting[-1][2:] == (first, minute, late):
                waiting[-1] = (due_ms, waiting[-1][1], next_, minute, late)
            else:
                waiting.append((due_ms, first, next_, minute, late))

    def take_report(
        self, minute: int, pieces: Sequence[Range], row: Callable[[int], MinuteRow], *, sure: bool, read: bool
    ) -> None:
        """Take the records that a report assigns to a minute.

        `read`: a reader reported it. `sure`: a reader or an ack with `all` reported it. Then records that were counted
        in another minute move to this one, unless a reader has named the other minute.
        """
        if sure:
            known = common(pieces, self._stream.read)
            reported = RangeSet([*apart(pieces, self._stream.read), *self._with_minute(known)[1]])
            self._move(minute, reported, row)
        else:
            reported = RangeSet(self._with_minute(pieces)[1])
        for piece in pieces if read else ():
            self._stream.read.add(*piece)
        if reported:
            self._count_guessed(minute, reported, row, read=read)
        known_here = self._stream.minutes.setdefault(minute, RangeSet())
        for piece in reported:
            known_here.add(*piece)

    def count_waiting(self, row: Callable[[int], MinuteRow], now_ms: int) -> None:
        """Count the waiting records with a reported minute, and those that have waited long enough."""
        left: list[tuple[int, int, int, int, bool]] = []
        room = len(self._stream.unplaced) - PIECES_MAX
        for due_ms, first, next_, guess, late in self._stream.unplaced:
            reported, unknown = self._with_minute([(first, next_)])
            for minute, low, high in reported:
                _count(row(minute), (low, high), 1, late=late)
                for piece in apart([(low, high)], self._stream.read):  # an ack may be of another
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
        reported, left = self._with_minute(pieces)
        if not left:
            return reported
        wanted = RangeSet(left)
        guessed = ((minute, first, next_) for first, next_, minute, _ in self._stream.guessed)
        waiting = ((minute, first, next_) for _, first, next_, minute, _ in self._stream.unplaced)
        here = [each for each in (*guessed, *waiting) if wanted.overlaps(*each[1:])]
        shown, left = _dated_by([(minute, RangeSet([(first, next_)])) for minute, first, next_ in here], left)
        return [*reported, *shown, *((fallback, *piece) for piece in left)]

    def minute_of(self, sequence: int, fallback: int) -> int:
        """Return the minute of one sequence."""
        return self.dated([(sequence, sequence + 1)], fallback)[0][0]

    def _with_minute(self, pieces: Sequence[Range]) -> tuple[list[Dated], list[Range]]:
        """Return the parts of `pieces` with a known minute, and the rest."""
        return _dated_by(self._stream.minutes.items(), pieces)

    def _move(self, minute: int, reported: RangeSet, row: Callable[[int], MinuteRow]) -> None:
        """Move the reported ranges of a minute from all other minutes, with their sent and acked records."""
        for other, ranges in list(self._stream.minutes.items()):
            moved = common(reported, ranges) if other != minute else []
            if moved:
                self._stream.minutes[other] = RangeSet(apart(ranges, reported))
                for name, known in (("sent", self._stream.sent), ("acked", self._stream.acked)):
                    records = sum(next_ - first for first, next_ in common(moved, known))
                    row(other).side(QUEUE).count(name, -records)
                    row(minute).side(QUEUE).count(name, records)

    def _count_guessed(self, minute: int, reported: RangeSet, row: Callable[[int], MinuteRow], *, read: bool) -> None:
        """Move the counts of reported ranges from their guessed minutes to `minute`.

        Ranges that a reader reported (`read`) are no longer guessed.
        """
        guessed, low, high = self._stream.guessed, reported.least, reported.next
        touched = (at for at, (first, next_, _, _) in enumerate(guessed) if first < high and low < next_)
        begin = next(touched, len(guessed))  # most reports are about the newest: what lies before is left as it is
        rest = guessed[begin:]
        del guessed[begin:]
        for first, next_, guess, late in rest:
            here = common([(first, next_)], reported) if reported.overlaps(first, next_) else []
            for piece in here if guess != minute else ():
                _count(row(guess), piece, -1, late=late)
                _count(row(minute), piece, 1, late=late)
            left = (
                [(piece, guess) for piece in apart([(first, next_)], reported)] if here else [((first, next_), guess)]
            )
            left += [] if read else [(piece, minute) for piece in here]
            for piece, its in sorted(left):  # in order, neighbours of one minute become one
                self._guess(piece, its, late=late)

    def _guess(self, piece: Range, minute: int, *, late: bool) -> None:
        guessed = self._stream.guessed
        if guessed and guessed[-1][1:] == (piece[0], minute, late):
            guessed[-1] = (guessed[-1][0], piece[1], minute, late)
        else:
            guessed.append((*piece, minute, late))
        del guessed[:-PIECES_MAX]

    def _forget_minutes(self) -> None:
        """Forget old minutes, except some with missing or guessed records, which a report may still change."""
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


def _count(row: MinuteRow, piece: Range, times: int, *, late: bool) -> None:
    """Add a piece to the committed records of a minute, or with `times` = -1 subtract it."""
    records = times * (piece[1] - piece[0])
    row.side(QUEUE).count("committed", records)
    row.side(QUEUE).count("late", records if late else 0)


def _dated_by(minutes: Iterable[tuple[int, RangeSet]], pieces: Sequence[Range]) -> tuple[list[Dated], list[Range]]:
    """Split `pieces` into parts with the first minute whose ranges have them, and the rest."""
    found: list[Dated] = []
    left = list(pieces)
    for minute, ranges in minutes if left else ():
        found += [(minute, *piece) for piece in common(left, ranges)]
        left = apart(left, ranges)
    return found, left
