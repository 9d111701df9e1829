"""Shared parts of the judge's rules: findings and counts, numbers that were read, and acked records."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field

FINDINGS_MAX = 1_000
SenderPartition = tuple[str, int, str]  # topic, partition, producer id or worker


@dataclass
class Verdict:
    """What the judge found, and how much it has seen."""

    findings: list[str] = field(default_factory=list)
    counts: collections.Counter[str] = field(default_factory=collections.Counter)

    def find(self, text: str) -> None:
        """Note a broken promise."""
        self.counts["findings"] += 1
        if len(self.findings) < FINDINGS_MAX:
            self.findings.append(text)


class Sequences:
    """Which numbers of one producer in one partition were seen, and whether the last one came in order."""

    def __init__(self) -> None:
        self._seen = bytearray()
        self.greatest = -1

    def add(self, number: int) -> bool:
        """Note a number; False when it was there before."""
        if number >= len(self._seen):
            self._seen.extend(bytes(number + 1 - len(self._seen)))
        new = not self._seen[number]
        self._seen[number] = 1
        return new

    def missing(self, first: int, end: int) -> list[int]:
        """Return the numbers from `first` up to, not with, `end` that were not seen."""
        known = len(self._seen)
        return [number for number in range(first, end) if number >= known or not self._seen[number]]


class Acks:
    """What producers were promised: ranges of sequences by topic, partition and producer, and who they are."""

    def __init__(self) -> None:
        self.ranges: dict[SenderPartition, list[tuple[int, int]]] = collections.defaultdict(list)
        self.workers: dict[str, str] = {}  # by producer id
        self.staged: dict[tuple[str, str], list[tuple[int, int]]] = collections.defaultdict(list)
        self.ended: set[str] = set()
        self.unordered: set[str] = set()  # workers with acks=1: their order is not promised

    def covers(self, place: SenderPartition, number: int) -> bool:
        """Whether a sequence was acked. Only for findings: it is slow."""
        return any(first <= number < end for first, end in self.ranges[place])
