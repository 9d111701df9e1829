"""Rates of topics from totals sampled at intervals: for a topic's line and its last hour. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from memq.audit.dashboard.view import SPARK_MINUTES
from memq.audit.minutes import MINUTE_MS
from memq.topic import Totals

TOPICS_MAX = 20_000


@dataclass(slots=True)
class _Sampled:
    """The last two samples of a topic: time (ms, monotonic) and the sum of its partitions' totals."""

    at_ms: int
    totals: Totals
    records_s: float | None = None
    bytes_s: float | None = None
    begun: int = 0  # the minute of the first look: what came before is not known
    minutes: dict[int, dict[int, int]] = field(default_factory=dict)  # partition: minute: records
    partitions: dict[int, Totals] = field(default_factory=dict)
    spark: tuple[int, tuple[int | None, ...]] | None = None  # of which minute; None when records came since


class TopicRates:
    """Growth of each topic, computed from its totals. A topic with a single sample has no rate."""

    def __init__(self) -> None:
        self._topics: dict[str, _Sampled] = {}

    def take(self, topic: str, partitions: dict[int, Totals], at_ms: int, wall_ms: int) -> None:
        """Take the totals of all read partitions of a topic, with monotonic time and wall clock."""
        total = Totals(
            sum(each.records for each in partitions.values()), sum(each.bytes for each in partitions.values())
        )
        minute = wall_ms // MINUTE_MS
        known = self._topics.get(topic)
        if known is None or total.records < known.totals.records:  # new, or made anew under its name
            self._topics.pop(topic, None)
            while len(self._topics) >= TOPICS_MAX:
                del self._topics[next(iter(self._topics))]
            self._topics[topic] = _Sampled(at_ms, total, begun=minute, partitions=dict(partitions))
            return
        passed_s = (at_ms - known.at_ms) / 1000
        if passed_s <= 0:
            return
        known.records_s = (total.records - known.totals.records) / passed_s
        known.bytes_s = max(total.bytes - known.totals.bytes, 0) / passed_s
        for partition, totals in partitions.items():
            before = known.partitions.get(partition, Totals(0, 0))
            counted = known.minutes.setdefault(partition, {})
            if totals.records > before.records:
                counted[minute] = counted.get(minute, 0) + totals.records - before.records
            for old in [each for each in counted if each < minute - SPARK_MINUTES]:
                del counted[old]
        if total.records > known.totals.records:
            known.spark = None
        known.at_ms, known.totals, known.partitions = at_ms, total, dict(partitions)

    def stand(self, topic: str, at_ms: int, wall_ms: int) -> None:
        """Note that a topic has at this time what it had at the last look."""
        known = self._topics.get(topic)
        if known is not None:
            self.take(topic, known.partitions, at_ms, wall_ms)

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
        """Return how many records a partition held at the last look."""
        known = self._topics.get(topic)
        totals = known.partitions.get(partition) if known is not None else None
        return totals.records if totals is not None else None

    def minutes(self, topic: str, first: int, count: int) -> dict[int, list[int | None]]:
        """Return records by partition in `count` minutes from `first` on; None before the first look."""
        known = self._topics.get(topic)
        if known is None:
            return {}
        return {
            partition: [
                known.minutes.get(partition, {}).get(minute, 0) if minute >= known.begun else None
                for minute in range(first, first + count)
            ]
            for partition in known.partitions
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
