"""Records of one write partition and minute of event time, as counts that can be added. Pure.

A row is a difference: who keeps rows adds those of one minute together, in any order. So a minute may be an hour old
when a slow group reports it, and nobody has to hold it in memory until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from memq.audit.minutes import WORDS

QUEUE = ""  # the side of producers and queue; each group has one of its own name
OK, IN_FLIGHT = "ok", WORDS["in_flight"]
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(slots=True)
class CountSide:
    """Counts of records by name, and a histogram for each stage: records by bucket, as reports have them.

    Names on the queue's side: sent, acked, gave-up, committed, copies, and `WORDS`; on a group's side: fetched,
    dropped, processed, and `WORDS`. `silent` counts clients whose word is missing for the minute.
    """

    counts: dict[str, int] = field(default_factory=dict)
    latency: dict[str, dict[int, int]] = field(default_factory=dict)

    def count(self, name: str, records: int) -> None:
        """Add to one count."""
        if records:
            self.counts[name] = self.counts.get(name, 0) + records

    def time(self, stage: str, buckets: Iterable[tuple[int, int]]) -> None:
        """Add to the histogram of a stage."""
        found = self.latency.setdefault(stage, {})
        for bucket, records in buckets:
            found[bucket] = found.get(bucket, 0) + records

    def __getitem__(self, name: str) -> int:
        return self.counts.get(name, 0)


@dataclass(slots=True)
class MinuteCounts:
    """One minute: the sides of the queue and of each group."""

    sides: dict[str, CountSide] = field(default_factory=dict)

    def side(self, name: str) -> CountSide:
        """Return a side, made when it is new."""
        return self.sides.setdefault(name, CountSide())

    def add(self, other: MinuteCounts) -> None:
        """Add another row of the same minute."""
        for name, theirs in other.sides.items():
            mine = self.side(name)
            for count, records in theirs.counts.items():
                mine.count(count, records)
            for stage, buckets in theirs.latency.items():
                mine.time(stage, buckets.items())

    def in_flight(self, name: str) -> int:
        """Return how many records a side is known to await: sent and not queued, or queued and not processed."""
        queue = self.side(QUEUE)
        if name == QUEUE:
            return max(queue["sent"] - queue["committed"] - queue["gave-up"] - queue["lost"] - queue["unknown"], 0)
        mine = self.side(name)
        over = mine["processed"] + mine["lost"] + mine["unknown"] + queue["corrupt"]
        return max(queue["committed"] - over, 0)

    def word(self, name: str) -> str:
        """Return the state of the minute: the gravest of the queue's side and the group's.

        Without the word of a client that may have had more to say it is unknown, never ok.
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


def percentile_name(part: float) -> str:
    """Return what a quantile is called: p50, p90, p99."""
    return f"p{100 * part:g}"


def quantile_ms(buckets: dict[int, int], part: float) -> float:
    """Return the latency in ms below which `part` of the records are, 0 without any.

    Bucket b holds 2^(b-1) up to 2^b ms, bucket 0 less than 1 ms; within a bucket records are taken as evenly spread,
    so the result is at most a factor of two off.
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
