"""Lengths: exact sums, and percentiles within an eighth, for any count in 2 KiB. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy

_EXACT = 16  # lengths below it have buckets of their own; above it each power of two has eight
BUCKETS = _EXACT + 8 * 28  # lengths of 32 bits


@dataclass(slots=True)
class Sizes:
    """Lengths in bytes, as a histogram that can be added up."""

    count: int = 0
    total: int = 0
    least: int = 0
    greatest: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def take(self, lengths: Sequence[int]) -> None:
        """Take some lengths."""
        given = numpy.asarray(lengths, dtype=numpy.int64)
        if not len(given):
            return
        counts = numpy.bincount(_buckets_of(given), minlength=BUCKETS).tolist()
        self.add(Sizes(len(given), int(given.sum()), int(given.min()), int(given.max()), counts))

    def add(self, other: Sizes) -> None:
        """Take what another has seen."""
        if not other.count:
            return
        self.least = min(self.least, other.least) if self.count else other.least
        self.greatest = max(self.greatest, other.greatest)
        self.count += other.count
        self.total += other.total
        self.buckets = [here + there for here, there in zip(self.buckets, other.buckets, strict=True)]

    def percentile(self, share: float) -> int:
        """Return the length that a share (0 to 1) of all do not exceed; at most an eighth too much."""
        wanted = share * self.count
        seen = 0
        for bucket, count in enumerate(self.buckets):
            seen += count
            if count and seen >= wanted:
                return min(_last_of(bucket), self.greatest)
        return self.greatest

    def to_json(self) -> dict[str, int]:
        """Return what people ask for."""
        shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
        figures = {"bytes": self.total, "least": self.least, "greatest": self.greatest}
        return figures | {name: self.percentile(share) for name, share in shares.items()}


def _buckets_of(lengths: numpy.ndarray) -> numpy.ndarray:
    power = numpy.floor(numpy.log2(numpy.maximum(lengths, _EXACT))).astype(numpy.int64)
    eighth = (lengths >> (power - 3)) & 7
    return numpy.where(lengths < _EXACT, lengths, _EXACT + (power - 4) * 8 + eighth)


def _last_of(bucket: int) -> int:
    if bucket < _EXACT:
        return bucket
    power, eighth = divmod(bucket - _EXACT, 8)
    return ((9 + eighth) << (power + 1)) - 1
