"""Folds the minutes of a topic into the columns that its page draws, fewer the longer the time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from memq.audit.dashboard.view import History
from memq.audit.live.view import Minute
from memq.audit.minutes import GRAVITY, QUANTILES, QUEUE, CountSide, quantile_ms

SPANS = {60: 1, 360: 5, 1440: 15}  # minutes shown: minutes in one column
QUEUE_COUNTS = ("sent", "acked", "committed", "lost", "doubled", "corrupt", "unknown")
GROUP_COUNTS = ("fetched", "processed")
GROUP_VERDICTS = ("lost", "doubled", "unknown")
GRAVE = ("lost", "corrupt", "doubled")  # in the order of their gravity


@dataclass(slots=True)
class _Column:
    """One column: counts, None while nothing is known; states in order of arrival."""

    counts: dict[str, int] = field(default_factory=dict)
    times: CountSide = field(default_factory=CountSide)
    heat: dict[int, int] = field(default_factory=dict)
    marks: dict[int, str] = field(default_factory=dict)
    word: str | None = None

    def take(self, minute: Minute, name: str) -> None:
        side, partition, word = minute.row.side(name), minute.partition, minute.row.word(name)
        for count in QUEUE_COUNTS if name == QUEUE else (*GROUP_COUNTS, *GROUP_VERDICTS):
            self.counts[count] = self.counts.get(count, 0) + side[count]
        for stage, buckets in side.latency.items():
            self.times.time(stage, buckets.items())
        if name == QUEUE:
            self.heat[partition] = self.heat.get(partition, 0) + side["committed"]
        for grave in GRAVE:
            if side[grave] > 0:
                self.marks[partition] = min(grave, self.marks.get(partition, grave), key=GRAVE.index)
        if self.word is None or GRAVITY[word] < GRAVITY[self.word]:
            self.word = word


def first_minute(now_minute: int, span: int) -> int:
    """Return the minute at which the columns begin that show `span` minutes and end with the one of now."""
    width = SPANS[span]
    return now_minute // width * width - span + width


def fold(rows: Iterable[Minute], first: int, span: int, group: str, partitions: Sequence[int]) -> History:
    """Return the columns of `span` minutes from `first` on, of the queue's side and of one group's."""
    width = SPANS[span]
    columns = [_Column() for _ in range(span // width)]
    for row in rows:
        for name in {QUEUE, group} & row.row.sides.keys() if first <= row.minute < first + span else ():
            columns[(row.minute - first) // width].take(row, name)
    stages = dict.fromkeys(stage for column in columns for stage in column.times.latency)
    return History(
        first=first,
        minutes=width,
        counts={name: tuple(each.counts.get(name) for each in columns) for name in (*QUEUE_COUNTS, *GROUP_COUNTS)},
        latency_ms={stage: tuple(_quantiles(each.times.latency.get(stage)) for each in columns) for stage in stages},
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
