"""When to send a slow request a second time: above the running p95, within a budget. Pure.

Theory: a store that answers 95 of 100 requests in 30 ms and some in seconds makes the tail of every ack. A second
request to another of its machines mostly comes back first. It must stay rare, or a store that is slow under load
gets more of it: so each request earns a small part of a hedge, and a hedge costs a whole one.
"""

from __future__ import annotations

from collections import deque

SAMPLES_MAX = 128
SAMPLES_MIN = 20  # below it a p95 means nothing
HEDGES_BURST_MAX = 10.0
DELAY_S_MIN = 0.005  # faster than that is luck, not a promise


class Latencies:
    """The last durations of one kind of request, and the value below which 95 of 100 of them lie."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._sorted: list[float] = []

    def add(self, seconds: float) -> None:
        """Note how long a request took."""
        self._samples.append(seconds)
        self._sorted = []

    def p95_s(self) -> float | None:
        """Return the p95; None while too little is known."""
        if len(self._samples) < SAMPLES_MIN:
            return None
        if not self._sorted:
            self._sorted = sorted(self._samples)
        return self._sorted[len(self._sorted) * 95 // 100]


class Hedger:
    """One budget for all requests to a target, and a running p95 for each kind and size of them."""

    def __init__(self, permille: int) -> None:
        self._earned = permille / 1000
        self._budget = 0.0
        self._latencies: dict[tuple[str, int], Latencies] = {}

    def delay_s(self, kind: str, size: int) -> float | None:
        """Count a request that goes out, and return after how long it is worth a second one; None for never."""
        self._budget = min(self._budget + self._earned, HEDGES_BURST_MAX)
        known = self._latencies.get((kind, _size_class(size)))
        p95_s = known.p95_s() if known is not None and self._earned else None
        return None if p95_s is None else max(p95_s, DELAY_S_MIN)

    def spend(self) -> bool:
        """Take a hedge out of the budget; False when there is none."""
        if self._budget < 1.0:
            return False
        self._budget -= 1.0
        return True

    def took(self, kind: str, size: int, seconds: float) -> None:
        """Note how long a request took that succeeded."""
        self._latencies.setdefault((kind, _size_class(size)), Latencies()).add(seconds)


def _size_class(size: int) -> int:
    """Return a number for sizes within a factor of four: a large object is not slow by itself."""
    return size.bit_length() // 2
