"""Folds the minutes of a topic into the columns that its page draws, fewer the longer the time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from memq.audit.dashboard.sources import PartitionMinute
from memq.audit.dashboard.view import History
from memq.audit.minutes import OK, QUANTILES, QUEUE, WORDS, quantile_ms

SPANS = {60: 1, 360: 5, 1440: 15}  # minutes shown: minutes in one column
QUEUE_COUNTS = ("sent", "acked", "committed", "lost", "doubled", "corrupt", "unknown")
GROUP_COUNTS = ("fetched", "processed")
GROUP_VERDICTS = ("lost", "doubled", "unknown")
GRAVE = ("lost", "corrupt", "doubled")  # in the order of their gravity
_GRAVITY = {word: gravity for gravity, word in enumerate((*WORDS.values(), OK))}


@dataclass(slots=True)
class _Column:
    """One column: counts, None while nothing is known; states in order of arrival."""

    counts: dict[str, int] = field(default_factory=dict)
    latency: dict[str, dict[int, int]] = field(default_factory=dict)
    heat: dict[int, int] = field(default_factory=dict)
    marks: dict[int, str] = field(default_factory=dict)
    word: str | None = None

    def take(self, row: PartitionMinute) -> None:
        names = QUEUE_COUNTS if row.side == QUEUE else (*GROUP_COUNTS, *GROUP_VERDICTS)
        for name in names:
            self.counts[name] = self.counts.get(name, 0) + row.counts.get(name, 0)
        for stage, buckets in row.latency.items():
            mine = self.latency.setdefault(stage, {})
            for bucket, records in buckets.items():
                mine[bucket] = mine.get(bucket, 0) + records
        if row.side == QUEUE:
            self.heat[row.partition] = self.heat.get(row.partition, 0) + row.counts.get("committed", 0)
        for grave in GRAVE:
            if row.counts.get(grave, 0) > 0:
                self.marks[row.partition] = min(grave, self.marks.get(row.partition, grave), key=GRAVE.index)
        if self.word is None or _GRAVITY.get(row.word, 0) < _GRAVITY.get(self.word, 0):
            self.word = row.word


def first_minute(now_minute: int, span: int) -> int:
    """Return the minute at which the columns begin that show `span` minutes and end with the one of now."""
    width = SPANS[span]
    return now_minute // width * width - span + width


def fold(rows: Iterable[PartitionMinute], first: int, span: int, group: str, partitions: Sequence[int]) -> History:
    """Return the columns of `span` minutes from `first` on, of the queue's side and of one group's."""
    width = SPANS[span]
    columns = [_Column() for _ in range(span // width)]
    for row in rows:
        if row.side in (QUEUE, group) and first <= row.minute < first + span:
            columns[(row.minute - first) // width].take(row)
    stages = dict.fromkeys(stage for column in columns for stage in column.latency)
    return History(
        first=first,
        minutes=width,
        counts={name: tuple(each.counts.get(name) for each in columns) for name in (*QUEUE_COUNTS, *GROUP_COUNTS)},
        latency_ms={stage: tuple(_quantiles(each.latency.get(stage)) for each in columns) for stage in stages},
        heat={number: tuple(each.heat.get(number) for each in columns) for number in partitions},
        words=tuple(each.word for each in columns),
        marks=_marks(columns),
    )


def sampled(minutes: Mapping[int, Sequence[int | None]], first: int, span: int) -> History:
    """Return the columns without an audit: the queue's totals by partition, from minute `first` on."""
    width = SPANS[span]
    heat = {number: tuple(_sums(counts, width, span // width)) for number, counts in minutes.items()}
    committed = tuple(None if None in each else sum(filter(None, each)) for each in zip(*heat.values(), strict=True))
    return History(
        first=first,
        minutes=width,
        counts={"committed": committed} if heat else {},
        latency_ms={},
        heat=heat,
        words=(None,) * (span // width),
    )


def _marks(columns: Sequence[_Column]) -> dict[int, dict[int, str]]:
    """Return what is wrong by partition and number of the column."""
    found: dict[int, dict[int, str]] = {}
    for at, column in enumerate(columns):
        for partition, grave in column.marks.items():
            found.setdefault(partition, {})[at] = grave
    return found


def _sums(counts: Sequence[int | None], width: int, columns: int) -> Iterable[int | None]:
    for at in range(0, columns * width, width):
        known = [count for count in counts[at : at + width] if count is not None]
        yield sum(known) if known else None


def _quantiles(buckets: dict[int, int] | None) -> tuple[float, float, float] | None:
    if not buckets:
        return None
    p50, p90, p99 = (round(quantile_ms(buckets, part), 1) for part in QUANTILES)
    return p50, p90, p99
