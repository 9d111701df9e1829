"""Series of the pages: minutes, lags and rates of topics, folded into columns. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from memq.audit.dashboard.view import SPARK_MINUTES, History
from memq.audit.live.view import Minute
from memq.audit.minutes import MINUTE_MS, QUANTILES, QUEUE, CountSide, gravest, quantile_ms
from memq.topic import Totals

SPANS = {60: 1, 360: 5, 1440: 15}  # minutes shown: minutes in one column
QUEUE_COUNTS = ("sent", "acked", "committed", "lost", "doubled", "corrupt", "unknown")
GROUP_COUNTS = ("fetched", "passed", "processed")
GROUP_VERDICTS = ("lost", "doubled", "unknown")
GRAVE = ("lost", "corrupt", "doubled")
MINUTES = 24 * 60
SERIES_MAX = 1_000  # groups times topics, 11.5 KB each; of more than that the ones that came first have a history
_NOT_KNOWN = -1
TOPICS_MAX = 20_000
NONE = Totals(0, 0)


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
                self.marks[partition] = gravest((grave, self.marks.get(partition, grave)))
        self.word = gravest((word, self.word or word))


def first_minute(now_minute: int, span: int) -> int:
    """Return the minute at which the columns begin that show `span` minutes and end with the one of now."""
    width = SPANS[span]
    return now_minute // width * width - span + width


class MinuteColumns:
    """The columns of `span` minutes from `first` on, of the queue's side and of one group's."""

    def __init__(self, first: int, span: int, group: str) -> None:
        self._first = first
        self._width = SPANS[span]
        self._names = {QUEUE, group}
        self._columns = [_Column() for _ in range(span // self._width)]

    def take(self, minute: Minute) -> None:
        """Add a minute to its column; one outside the span changes nothing."""
        at = (minute.minute - self._first) // self._width
        for name in self._names & minute.row.sides.keys() if 0 <= at < len(self._columns) else ():
            self._columns[at].take(minute, name)

    def history(self, partitions: Sequence[int]) -> History:
        """Return the columns of what was taken."""
        columns = self._columns
        stages = dict.fromkeys(stage for column in columns for stage in column.times.latency)
        return History(
            first=self._first,
            minutes=self._width,
            counts={name: tuple(each.counts.get(name) for each in columns) for name in (*QUEUE_COUNTS, *GROUP_COUNTS)},
            latency_ms={
                stage: tuple(_quantiles(each.times.latency.get(stage)) for each in columns) for stage in stages
            },
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


class LagHistory:
    """Takes lags, in records or in ms, and returns the greatest of each column of minutes."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], array[int]] = {}
        self._last: dict[tuple[str, str], int] = {}

    def take(self, topic: str, group: str, minute: int, lag: int) -> None:
        """Add the lag that was read in a Unix minute; minutes never go back."""
        key = (topic, group)
        series = self._series.get(key)
        if series is None:
            if len(self._series) >= SERIES_MAX:
                return
            series = self._series[key] = array("q", [_NOT_KNOWN] * MINUTES)
            self._last[key] = minute
        for skipped in range(max(self._last[key] + 1, minute - MINUTES + 1), minute + 1):
            series[skipped % MINUTES] = _NOT_KNOWN
        self._last[key] = max(minute, self._last[key])
        series[minute % MINUTES] = max(series[minute % MINUTES], lag)

    def keep(self, keys: dict[tuple[str, str], None]) -> None:
        """Forget all other pairs of topic and group."""
        for gone in [key for key in self._series if key not in keys]:
            del self._series[gone], self._last[gone]

    def columns(self, topic: str, group: str, first: int, span: int, width: int) -> tuple[int | None, ...]:
        """Return the greatest lag of each `width` minutes, for `span` minutes from `first` on.

        None: not read.
        """
        series, last = self._series.get((topic, group)), self._last.get((topic, group), 0)
        found: list[int | None] = []
        for begin in range(first, first + span, width):
            minutes = range(max(begin, last - MINUTES + 1), min(begin + width, last + 1))
            most = (
                max((series[minute % MINUTES] for minute in minutes), default=_NOT_KNOWN) if series is not None else -1
            )
            found.append(most if most != _NOT_KNOWN else None)
        return tuple(found)


@dataclass(slots=True)
class _Sampled:
    """The last two samples of a topic: id, time (ms, monotonic), Unix minute, totals of its partitions."""

    topic_id: str
    at_ms: int
    minute: int
    records_s: float | None = None
    bytes_s: float | None = None
    begun: int = 0  # the minute of the first look: what came before is not known
    minutes: dict[int, dict[int, int | None]] = field(default_factory=dict)  # partition: minute: records
    partitions: dict[int, Totals] = field(default_factory=dict)
    unknown: frozenset[int] = frozenset()  # partitions without totals at the last look
    spark: tuple[int, tuple[int | None, ...]] | None = None  # of which minute; None when records came since


class TopicRates:
    """Growth of each topic, computed from its totals. A topic with a single sample has no rate."""

    def __init__(self) -> None:
        self._topics: dict[str, _Sampled] = {}

    def take(
        self,
        topic: str,
        topic_id: str,
        partitions: Mapping[int, Totals],
        at_ms: int,
        wall_ms: int,
        unknown: frozenset[int] = frozenset(),
    ) -> None:
        """Take the totals of read partitions of a topic, with monotonic time and wall clock.

        `unknown` are the other partitions: their logs did not answer. The topic has no rate then, and the minutes
        from before the failure to the next answer are unknown for these partitions.
        A replica that lags shows lower totals for a moment: then the last ones hold.
        """
        minute = wall_ms // MINUTE_MS
        known = self._topics.get(topic)
        if known is None or known.topic_id != topic_id:  # new, or created again under its name
            self._topics.pop(topic, None)
            while len(self._topics) >= TOPICS_MAX:
                del self._topics[next(iter(self._topics))]
            self._topics[topic] = _Sampled(
                topic_id, at_ms, minute, begun=minute, partitions=dict(partitions), unknown=unknown
            )
            return
        passed_s = max(at_ms - known.at_ms, 1) / 1000  # two samples within 1 ms may differ, too
        doubtful = unknown | known.unknown
        for partition in doubtful:  # what came meanwhile belongs to no minute for sure
            since = range(max(known.minute, minute - SPARK_MINUTES), minute + 1)
            known.minutes.setdefault(partition, {}).update(dict.fromkeys(since))
        partitions = {
            each: max(known.partitions.get(each, NONE), totals, key=lambda found: found.records)
            for each, totals in partitions.items()
        }
        grown = {each: _growth(known.partitions.get(each, NONE), totals) for each, totals in partitions.items()}
        known.records_s = sum(each.records for each in grown.values()) / passed_s if not doubtful else None
        known.bytes_s = sum(each.bytes for each in grown.values()) / passed_s if not doubtful else None
        for partition, growth in grown.items():
            counted = known.minutes.setdefault(partition, {})
            now = counted.get(minute, 0)
            if growth.records and now is not None:
                counted[minute] = now + growth.records
            for old in [each for each in counted if each < minute - SPARK_MINUTES]:
                del counted[old]
        if doubtful or any(each.records for each in grown.values()):
            known.spark = None
        known.at_ms, known.minute, known.unknown = at_ms, minute, unknown
        known.partitions |= partitions

    def repeat_last(self, topic: str, at_ms: int, wall_ms: int) -> None:
        """Add the last totals of a topic again, at this time."""
        known = self._topics.get(topic)
        if known is not None:
            answered = {each: known.partitions[each] for each in known.partitions if each not in known.unknown}
            self.take(topic, known.topic_id, answered, at_ms, wall_ms, known.unknown)

    def keep(self, topics: dict[str, None]) -> None:
        """Forget all other topics."""
        for gone in [name for name in self._topics if name not in topics]:
            del self._topics[gone]

    def records_s(self, topic: str) -> float | None:
        """Return records per s between the last two samples, None when there were no two."""
        known = self._topics.get(topic)
        return known.records_s if known is not None else None

    def bytes_s(self, topic: str) -> float | None:
        """Return stored bytes per s between the last two samples, None when there were no two."""
        known = self._topics.get(topic)
        return known.bytes_s if known is not None else None

    def total(self, topic: str, partition: int) -> int | None:
        """Return how many records a partition held at the last look, None when its log did not answer."""
        known = self._topics.get(topic)
        totals = known.partitions.get(partition) if known is not None and partition not in known.unknown else None
        return totals.records if totals is not None else None

    def minutes(self, topic: str, first: int, count: int) -> dict[int, list[int | None]]:
        """Return records by partition in `count` minutes from `first` on; None where they are unknown."""
        known = self._topics.get(topic)
        if known is None:
            return {}
        return {
            partition: [
                known.minutes.get(partition, {}).get(minute, 0) if minute >= known.begun else None
                for minute in range(first, first + count)
            ]
            for partition in (*known.partitions, *(each for each in known.unknown if each not in known.partitions))
        }

    def spark(self, topic: str, minute: int) -> tuple[int | None, ...]:
        """Return the records of the SPARK_MINUTES up to a minute and with it, None before the first look."""
        known = self._topics.get(topic)
        if known is None:
            return ()
        if known.spark is None or known.spark[0] != minute:
            columns = self.minutes(topic, minute - SPARK_MINUTES + 1, SPARK_MINUTES).values()
            known.spark = minute, tuple(None if None in each else sum(each) for each in zip(*columns, strict=True))
        return known.spark[1]


def _growth(before: Totals, now: Totals) -> Totals:
    return Totals(now.records - before.records, max(now.bytes - before.bytes, 0))
