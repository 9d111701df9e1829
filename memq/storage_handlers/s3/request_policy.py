"""Decides which requests are sent: circuit breaker, and hedges of slow requests. Pure.

Theory: each batch and each read is retried without end. While a store is down, that makes many useless requests per
second, and when the store recovers, all of them arrive together. The breaker lets one request through at a time.

Theory: a store that answers 95 of 100 requests in 30 ms, but some in seconds, determines the slowest acks. A second
request usually reaches another of its machines, and is answered first. Hedges must be rare, because they increase the
load of a store that is slow under load. So each request earns a small part of a hedge, and a hedge costs a whole one.
"""

from __future__ import annotations

import random
from collections import deque
from enum import Enum

from memq.runtime.clock import backoff_s

SAMPLES_MAX = 128
SAMPLES_MIN = 20  # fewer give no useful p95
HEDGES_BURST_MAX = 10.0
DELAY_S_MIN = 0.005  # a shorter p95 would cause hedges of normal requests


class BreakerState(Enum):
    """CLOSED → OPEN by failures in a row; OPEN → TRYING by the first request after the pause.

    TRYING → CLOSED by a success, → OPEN by a failure.
    """

    CLOSED = 0
    TRYING = 1
    OPEN = 2


class CircuitBreaker:
    """Limits requests to a failing target. The caller reports the result of each allowed request."""

    def __init__(
        self, chance: random.Random, *, failures_max: int = 5, pause_s_base: float = 0.1, pause_s_max: float = 1.0
    ) -> None:
        self.state = BreakerState.CLOSED
        self.opened = 0  # how often it opened
        self._chance = chance
        self._failures_max = failures_max
        self._pause_s_base = pause_s_base
        self._pause_s_max = pause_s_max
        self._failures = 0
        self._until_s = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether all requests are allowed."""
        return self.state is BreakerState.CLOSED

    def ask(self, now_s: float, lease_s: float) -> float:
        """Return 0 when a request may be sent, else the seconds to wait before the next call.

        A trying request without a result prevents others for `lease_s` at most.
        """
        if self.state is BreakerState.CLOSED:
            return 0.0
        if now_s < self._until_s:
            return self._until_s - now_s
        self.state = BreakerState.TRYING
        self._until_s = now_s + lease_s
        return 0.0

    def succeeded(self) -> None:
        """The target has answered, possibly with a refusal."""
        self.state = BreakerState.CLOSED
        self._failures = 0

    def failed(self, now_s: float) -> None:
        """The target has not answered, or has answered that it can't serve the request."""
        self._failures += 1
        if self._failures < self._failures_max:
            return
        if self.state is BreakerState.CLOSED:
            self.opened += 1
        self.state = BreakerState.OPEN
        over = self._failures - self._failures_max
        pause_s = backoff_s(self._chance, over, base_s=self._pause_s_base, most_s=self._pause_s_max)
        self._until_s = now_s + pause_s

    def cancelled(self, now_s: float) -> None:
        """A request was cancelled without a result: the next one may try at once."""
        if self.state is BreakerState.TRYING:
            self._until_s = now_s


class Latencies:
    """The last durations of one kind of request, and their 95th percentile (p95)."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES_MAX)
        self._sorted: list[float] = []

    def add(self, seconds: float) -> None:
        """Record the duration of a request."""
        self._samples.append(seconds)
        self._sorted = []

    def p95_s(self) -> float | None:
        """Return the p95 in seconds; None with fewer than SAMPLES_MIN durations."""
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
        """Count a request, and return the delay (s) after which it deserves a hedge; None for never."""
        self._budget = min(self._budget + self._earned, HEDGES_BURST_MAX)
        known = self._latencies.get((kind, _size_class(size)))
        p95_s = known.p95_s() if known is not None and self._earned else None
        return None if p95_s is None else max(p95_s, DELAY_S_MIN)

    def spend(self) -> bool:
        """Take a hedge from the budget; False when there is none."""
        if self._budget < 1.0:
            return False
        self._budget -= 1.0
        return True

    def took(self, kind: str, size: int, seconds: float) -> None:
        """Record the duration of a successful request."""
        self._latencies.setdefault((kind, _size_class(size)), Latencies()).add(seconds)


def _size_class(size: int) -> int:
    """Return one number for sizes within a factor of four, because larger objects take longer."""
    return size.bit_length() // 2
