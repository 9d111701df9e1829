"""Rates of topics from totals sampled at intervals: for a topic's line and its last hour. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memq.audit.dashboard.view import SPARK_MINUTES
from memq.audit.minutes import MINUTE_MS
from memq.topic import Totals

TOPICS_MAX = 20_000
NONE = Totals(0, 0)


@dataclass(slots=True)
class _Sampled:
    """The last two samples of a topic: time (ms, monotonic), Unix minute, totals of its partitions."""

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
        partitions: Mapping[int, Totals],
        at_ms: int,
        wall_ms: int,
        unknown: frozenset[int] = frozenset(),
    ) -> None:
        """Take the totals of read partitions of a topic, with monotonic time and wall clock.

        `unknown` are the other partitions: their logs did not answer. The topic has no rate then, and the minutes
        from before the failure to the next answer are unknown for these partitions.
        """
        minute = wall_ms // MINUTE_MS
        known = self._topics.get(topic)
        if known is None or any(
            totals.records < known.partitions.get(partition, NONE).records for partition, totals in partitions.items()
        ):  # new, or made again under its name
            self._topics.pop(topic, None)
            while len(self._topics) >= TOPICS_MAX:
                del self._topics[next(iter(self._topics))]
            self._topics[topic] = _Sampled(at_ms, minute, begun=minute, partitions=dict(partitions), unknown=unknown)
            return
        passed_s = (at_ms - known.at_ms) / 1000
        if passed_s <= 0:
            return
        doubtful = unknown | known.unknown
        for partition in doubtful:  # what came meanwhile belongs to no minute for sure
            since = range(max(known.minute, minute - SPARK_MINUTES), minute + 1)
            known.minutes.setdefault(partition, {}).update(dict.fromkeys(since))
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

    def stand(self, topic: str, at_ms: int, wall_ms: int) -> None:
        """Note that a topic has at this time what it had at the last look."""
        known = self._topics.get(topic)
        if known is not None:
            answered = {each: known.partitions[each] for each in known.partitions if each not in known.unknown}
            self.take(topic, answered, at_ms, wall_ms, known.unknown)

    def keep(self, topics: dict[str, None]) -> None:
        """Forget all other topics."""
        for gone in [name for name in self._topics if name not in topics]:
            del self._topics[gone]

    def records_s(self, topic: str) -> float | None:
        """Return records per s between the last two looks, None when there were no two."""
        known = self._topics.get(topic)
        return known.records_s if known is not None else None

    def bytes_s(self, topic: str) -> float | None:
        """Return stored bytes per s between the last two looks, None when there were no two."""
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
