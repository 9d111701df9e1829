"""Records by minute, side and outcome, as counts that can be added, for all audits. Pure.

A row is a difference: its store adds the rows of one minute, in any order. So a minute may be an hour old when a slow
group reports it, and need not be in memory until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from memq.audit.account import Balance, TailKnowledge
from memq.format.pointer import INTEGER_END
from memq.format.ranges import Range
from memq.topic import Position, TopicSettings

MINUTE_MS = 60_000
COUNT_MAX = INTEGER_END - 1
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
COUNTS = ("sent", "delivered", "copies", *WORDS)  # of a row of the table
QUEUE = ""  # the side of producers and queue; each group has one of its own name
OK, IN_FLIGHT, UNKNOWN = "ok", WORDS["in_flight"], WORDS["unknown"]
_GRAVITY = {word: gravity for gravity, word in enumerate((*WORDS.values(), OK))}  # the gravest has 0
QUANTILES = (0.5, 0.9, 0.99)
Stream = tuple[int, int]  # write partition, producer


def gravest(words: Iterable[str]) -> str:
    """Return the gravest of some words: of sides, minutes, findings."""
    return min(words, key=_GRAVITY.__getitem__)


def active_ms(settings: TopicSettings) -> int:
    """Return the ms after a queue time in which its producer may send, and a late pointer may land."""
    return settings.delivery_timeout_ms + settings.late_ms


def watermark_ms(settings: TopicSettings, now_ms: int) -> int:
    """Return the queue time (Unix ms) up to which the result is final: no record can arrive there."""
    return now_ms - active_ms(settings)


def _bounded(count: int) -> int:
    """Return a count that can be stored: reports may claim any number of records."""
    return max(-COUNT_MAX, min(count, COUNT_MAX))


@dataclass(slots=True)
class CountSide:
    """Counts of records by name, and a histogram for each stage: records by bucket, as reports have them.

    Names on the queue's side: sent, acked, gave-up, cancelled, rolled-back, unsure, committed, copies, and `WORDS`; on
    a group's side: fetched, dropped, passed, processed, and `WORDS`. `silent` counts clients without a report for the
    minute. In the table of `Minutes`, `sent` counts all records that are known to be sent: delivered ones, and those of
    a missing kind.
    """

    counts: dict[str, int] = field(default_factory=dict)
    latency: dict[str, dict[int, int]] = field(default_factory=dict)

    def count(self, name: str, records: int) -> None:
        """Add to one count."""
        if records:
            self.counts[name] = _bounded(self.counts.get(name, 0) + records)

    def time(self, stage: str, buckets: Iterable[tuple[int, int]]) -> None:
        """Add to the histogram of a stage."""
        found = self.latency.setdefault(stage, {})
        for bucket, records in buckets:
            found[bucket] = _bounded(found.get(bucket, 0) + records)

    def __getitem__(self, name: str) -> int:
        return self.counts.get(name, 0)


@dataclass(slots=True)
class MinuteRow:
    """One minute of a write partition, or of one producer there: the sides of queue and groups."""

    sides: dict[str, CountSide] = field(default_factory=dict)

    def side(self, name: str) -> CountSide:
        """Return a side; create it if it is new."""
        return self.sides.setdefault(name, CountSide())

    def add(self, other: MinuteRow) -> None:
        """Add another row of the same minute."""
        for name, theirs in other.sides.items():
            mine = self.side(name)
            for count, records in theirs.counts.items():
                mine.count(count, records)
            for stage, buckets in theirs.latency.items():
                mine.time(stage, buckets.items())

    def in_flight(self, name: str) -> int:
        """Return the records that a side awaits: sent and not queued, or queued and not processed."""
        queue = self.side(QUEUE)
        if name == QUEUE:
            over = queue["gave-up"] + queue["cancelled"] + queue["lost"] + queue["unknown"]
            return max(queue["sent"] - queue["committed"] - over, 0)
        mine = self.side(name)
        over = mine["processed"] + mine["passed"] + mine["lost"] + mine["unknown"] + queue["corrupt"]
        return max(queue["committed"] - over, 0)

    def word(self, name: str = QUEUE) -> str:
        """Return the state: ok, in flight, late, lost, doubled, corrupt or unknown.

        It is the graver state of the queue's side and the group's. If the report of a client is missing, it is unknown
        and never ok.
        """
        sides = [self.side(QUEUE)] if name == QUEUE else [self.side(QUEUE), self.side(name)]
        for column, word in WORDS.items():
            if any(side[column] > 0 for side in sides):
                return word
            if column == "unknown" and any(side["silent"] > 0 for side in sides):
                return word
            if column == "in_flight" and self.in_flight(name):
                return word
        return OK


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """A block in the order of a reader: producer, sequences, queue time (Unix ms), first position.

    It is `late` if a pointer of a higher epoch is before it.
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
    """The table of an audit: each producer's records by minute of queue time (Unix ms of its start).

    Owners prove that time, and no producer's clock changes it. Missing records have no time of their own; they get that
    of the pointer that showed the hole. `committed` has the positions of all groups by read partition, or None. Memory:
    one row for each stream and minute since `take_rows`, and one entry for each hole and each bad block.
    """

    def __init__(self, committed: Mapping[int, Mapping[str, Position | None]] | None = None) -> None:
        self._committed = committed or {}
        self._rows: dict[tuple[Stream, int], MinuteRow] = {}
        self._missing: dict[Stream, _Missing] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def deliver(self, met: ReadBlock, *, new: int, doubled: int) -> None:
        """Add a sound block: readers deliver `new` records for the first, `doubled` for a second time."""
        self._missing_of(met.stream).meet(met.first, met.next, _minute(met.time_ms))
        row = self._row(met.stream, met.time_ms)
        counts = {"sent": new, "delivered": new, "doubled": doubled, "late": new if met.late else 0}
        for name, records in counts.items():
            row.side(QUEUE).count(name, records)
        for group, position in self._committed.get(met.position.read_partition, {}).items():
            row.side(group).count("processed", min(new, _before(met, position)))

    def copy(self, met: ReadBlock) -> None:
        """Add a block that readers drop."""
        self._row(met.stream, met.time_ms).side(QUEUE).count("copies", met.next - met.first)

    def held(self, met: ReadBlock, kind: str, records: int) -> None:
        """Add records of a block that was held: all of a write partition have one row, with the producer 0."""
        side = self._row((met.stream[0], 0), met.time_ms).side(QUEUE)
        for name in (kind,) if kind in ("copies", "doubled") else ("sent", kind):
            side.count(name, records)
        if kind == "delivered":
            side.count("late", records if met.late else 0)
            for group, position in self._committed.get(met.position.read_partition, {}).items():
                self._row((met.stream[0], 0), met.time_ms).side(group).count(
                    "processed", min(records, _before(met, position))
                )

    def lose(self, partition: int, time_ms: int, records: int) -> None:
        """Add held records that are missing in a pointer of this queue time."""
        side = self._row((partition, 0), time_ms).side(QUEUE)
        side.count("sent", records)
        side.count("lost", records)

    def miss(self, met: ReadBlock) -> None:
        """Add a block that readers do not get.

        `settle` reports its records that are missing at the end.
        """
        missing = self._missing_of(met.stream)
        missing.meet(met.first, met.next, _minute(met.time_ms))
        missing.dated.append((met.first, met.next, _minute(met.time_ms)))

    def end(self, stream: Stream, next_: int, time_ms: int) -> None:
        """Add the end that a producer stated."""
        self._missing_of(stream).meet(next_, next_, _minute(time_ms))

    def take_rows(self) -> dict[tuple[Stream, int], MinuteRow]:
        """Return the rows so far by stream and minute, in order, and remove them."""
        rows = {key: self._rows[key] for key in sorted(self._rows)}
        self._rows.clear()
        return rows

    def settle(self, balances: Sequence[Balance]) -> dict[tuple[Stream, int], MinuteRow]:
        """Date the missing records, and return the remaining rows.

        The table is empty afterwards.
        """
        for balance in balances:
            open_kind = "in_flight" if balance.tail is TailKnowledge.IN_FLIGHT else "unknown"
            kinds = {"lost": balance.lost, "corrupt": balance.corrupt, "unread": balance.unread}
            for kind, ranges in (*kinds.items(), ("in_flight", balance.held), (open_kind, balance.unproven)):
                self._date((balance.partition, balance.producer), kind, ranges)
        self._missing.clear()
        return self.take_rows()

    # ---- inside ------------------------------------------------------------------------------------

    def _date(self, stream: Stream, kind: str, ranges: Sequence[Range]) -> None:
        for minute_ms, count in _dated(ranges, sorted(self._missing_of(stream).dated)):
            for name in ("sent", kind):
                self._row(stream, minute_ms).side(QUEUE).count(name, count)

    def _missing_of(self, stream: Stream) -> _Missing:
        return self._missing.setdefault(stream, _Missing())

    def _row(self, stream: Stream, time_ms: int) -> MinuteRow:
        return self._rows.setdefault((stream, _minute(time_ms)), MinuteRow())


def percentile_name(part: float) -> str:
    """Return the name of a quantile: p50, p90, p99."""
    return f"p{100 * part:g}"


def quantile_ms(buckets: dict[int, int], part: float) -> float:
    """Return the latency in ms below which the fraction `part` of the records is; 0 without records.

    Bucket b has 2^(b-1) up to 2^b ms, bucket 0 less than 1 ms. Within a bucket an even distribution is assumed, so the
    result is wrong by at most a factor of two.
    """
    total = sum(buckets.values())
    before, wanted = 0, part * total
    for bucket in sorted(buckets):
        here = buckets[bucket]
        if here and before + here >= wanted:
            low = 0.0 if bucket == 0 else 2.0 ** (bucket - 1)
            return low + (2.0**bucket - low) * (wanted - before) / here
        before += here
    return 0.0


def _minute(time_ms: int) -> int:
    return time_ms - time_ms % MINUTE_MS


def _before(met: ReadBlock, position: Position | None) -> int:
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
