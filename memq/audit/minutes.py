"""Outcomes of each producer's records by minute of queue time, in sums of the verdict. Pure.

Minutes are those of the queue: owners prove them, and no producer's clock moves them. What is missing has no time of
its own; it is dated by the pointer that showed it missing. Rows of one key may come several times, and are added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memq.audit.account import Balance, TailKnowledge
from memq.format.ranges import Range
from memq.topic import CLOCK_ERROR_MS, Position, TopicSettings

MINUTE_MS = 60_000
# Columns of the table in the order of their gravity, with the word for a row that has any of it; without any it is ok.
WORDS = {
    "lost": "lost",
    "corrupt": "corrupt",
    "doubled": "doubled",
    "unread": "unknown",
    "unknown": "unknown",
    "in_flight": "in flight",
    "late": "late",
}
COUNTS = ("sent", "delivered", "copies", *WORDS)
Stream = tuple[int, int]  # write partition, producer


def late_ms(settings: TopicSettings) -> int:
    """Return how long after its queue time a pointer may still land."""
    return settings.stale_publish_ms + CLOCK_ERROR_MS


def window_ms(settings: TopicSettings) -> int:
    """Return for how much queue time readers are taken to remember what they have seen, at least."""
    return settings.dedup_window_ms + late_ms(settings)


def active_ms(settings: TopicSettings) -> int:
    """Return how long after a queue time its producer may still be sending, and a late pointer come."""
    return settings.delivery_timeout_ms + late_ms(settings)


def watermark_ms(settings: TopicSettings, now_ms: int) -> int:
    """Return the queue time up to which the present result is final: no record can arrive there."""
    return now_ms - active_ms(settings)


@dataclass(slots=True)
class MinuteRow:
    """Records of one producer in one write partition and minute (Unix ms of its start).

    `sent` are all that are known to have been sent: delivered, or in one of the kinds that are missing. Of those
    delivered, `late` came by a pointer of an older epoch. `committed` has for each group how many it has processed.
    """

    partition: int
    producer: int
    minute_ms: int
    sent: int = 0
    delivered: int = 0
    copies: int = 0
    lost: int = 0
    corrupt: int = 0
    doubled: int = 0
    unread: int = 0
    unknown: int = 0
    in_flight: int = 0
    late: int = 0
    committed: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Met:
    """A block as a reader meets it: producer, sequences, queue time (Unix ms), place of its first record.

    It is `late` when a higher epoch was met before it.
    """

    stream: Stream
    first: int
    next: int
    time_ms: int
    position: Position
    late: bool = False


@dataclass(slots=True)
class _Missing:
    """Missing sequences of a stream in order of arrival, each with the minute of its detection."""

    reach: int = 0
    dated: list[tuple[int, int, int]] = field(default_factory=list)

    def meet(self, first: int, next_: int, minute_ms: int) -> None:
        """Take the sequences of a block, or up to an end: those between the last and these are missing."""
        if first > self.reach:
            self.dated.append((self.reach, first, minute_ms))
        self.reach = max(self.reach, next_)


class Minutes:
    """Counts by minute.

    `committed` has by read partition the positions of all groups, None where there is none.
    Memory: one row for each stream and minute since `take_rows`, and one entry for each hole and each bad block.
    """

    def __init__(self, committed: Mapping[int, Sequence[Position | None]] | None = None) -> None:
        self._committed = committed or {}
        self._rows: dict[tuple[Stream, int], MinuteRow] = {}
        self._missing: dict[Stream, _Missing] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def deliver(self, met: Met, *, new: int, doubled: int) -> None:
        """Take a sound block, of whose records `new` were not delivered before and `doubled` a second time."""
        self._missing_of(met.stream).meet(met.first, met.next, _minute(met.time_ms))
        row = self._row(met.stream, met.time_ms)
        row.sent += new
        row.delivered += new
        row.doubled += doubled
        row.late += new if met.late else 0
        groups = self._committed.get(met.position.read_partition, ())
        row.committed = [
            count + min(new, _before(met, position))
            for count, position in zip(row.committed or [0] * len(groups), groups, strict=True)
        ]

    def copy(self, met: Met) -> None:
        """Take a block that readers drop."""
        self._row(met.stream, met.time_ms).copies += met.next - met.first

    def miss(self, met: Met) -> None:
        """Take a block that readers don't get.

        `settle` reports the part that is missing in the end.
        """
        missing = self._missing_of(met.stream)
        missing.meet(met.first, met.next, _minute(met.time_ms))
        missing.dated.append((met.first, met.next, _minute(met.time_ms)))

    def end(self, stream: Stream, next_: int, time_ms: int) -> None:
        """Take the end that a producer named."""
        self._missing_of(stream).meet(next_, next_, _minute(time_ms))

    def take_rows(self) -> list[MinuteRow]:
        """Return the rows so far, in order, and forget them."""
        rows = [self._rows[key] for key in sorted(self._rows)]
        self._rows.clear()
        return rows

    def settle(self, balances: Sequence[Balance]) -> list[MinuteRow]:
        """Date what is missing in the end, and return the rows that are left.

        What was met before is forgotten.
        """
        for balance in balances:
            open_kind = "in_flight" if balance.tail is TailKnowledge.IN_FLIGHT else "unknown"
            kinds = {"lost": balance.lost, "corrupt": balance.corrupt, "unread": balance.unread}
            for kind, ranges in (*kinds.items(), (open_kind, balance.unproven)):
                self._date((balance.partition, balance.producer), kind, ranges)
        self._missing.clear()
        return self.take_rows()

    # ---- inside ------------------------------------------------------------------------------------

    def _date(self, stream: Stream, kind: str, ranges: Sequence[Range]) -> None:
        for minute_ms, count in _dated(ranges, sorted(self._missing_of(stream).dated)):
            row = self._row(stream, minute_ms)
            row.sent += count
            setattr(row, kind, getattr(row, kind) + count)

    def _missing_of(self, stream: Stream) -> _Missing:
        return self._missing.setdefault(stream, _Missing())

    def _row(self, stream: Stream, time_ms: int) -> MinuteRow:
        key = (stream, _minute(time_ms))
        if key not in self._rows:
            self._rows[key] = MinuteRow(*stream, key[1])
        return self._rows[key]


def _minute(time_ms: int) -> int:
    return time_ms - time_ms % MINUTE_MS


def _before(met: Met, position: Position | None) -> int:
    """Return how many records of a block lie before a group's position."""
    here = met.position
    if position is None or position.pointer_offset < here.pointer_offset:
        return 0
    if position.pointer_offset > here.pointer_offset:
        return met.next - met.first
    return min(max(position.record_index - here.record_index, 0), met.next - met.first)


def _dated(ranges: Sequence[Range], dated: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
    """Yield minute and count for pieces of ascending `ranges` that lie in `dated`, sorted by start."""
    at = 0
    for start, next_ in ranges:
        first = start
        while first < next_ and at < len(dated):
            _, high, minute_ms = dated[at]
            if high <= first:
                at += 1
            else:
                yield minute_ms, min(high, next_) - first
                first = min(high, next_)
