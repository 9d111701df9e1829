"""Decides which requests are sent: circuit breaker, and hedges of slow requests. Pure.

Theory: each batch is tried again for ever, and so is each read. While a store is down that is many requests a second
that can't succeed, and at the moment when it heals they all come at once. The breaker lets one through at a time.

Theory: a store that answers 95 of 100 requests in 30 ms and some in seconds makes the tail of every ack. A second
request to another of its machines mostly comes back first. It must stay rare, or a store that is slow under load
gets more of it: so each request earns a small part of a hedge, and a hedge costs a whole one.
"""

from __future__ import annotations

import random
from collections import deque
from enum import Enum

from memq.runtime.clock import backoff_s

SAMPLES_MAX = 128
SAMPLES_MIN = 20  # below it a p95 means nothing
HEDGES_BURST_MAX = 10.0
DELAY_S_MIN = 0.005  # faster than that is luck, not a promise


class BreakerState(Enum):
    """CLOSED → OPEN by failures in a row; OPEN → TRYING by the next that asks after the pause.

    TRYING → either.
    """

    CLOSED = 0
    TRYING = 1
    OPEN = 2


class CircuitBreaker:
    """Return 0, and the caller must report its result; or the seconds to wait before asking again."""

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
        """Whether all requests go."""
        return self.state is BreakerState.CLOSED

    def ask(self, now_s: float, lease_s: float) -> float:
        """Return 0 when a request may go.

        One that tries and is not heard of for `lease_s` holds nobody up longer.
        """
        if self.state is BreakerState.CLOSED:
            return 0.0
        if now_s < self._until_s:
            return self._until_s - now_s
        self.state = BreakerState.TRYING
        self._until_s = now_s + lease_s
        return 0.0

    def succeeded(self) -> None:
        """The target has answered, if only with a refusal."""
        self.state = BreakerState.CLOSED
        self._failures = 0

    def failed(self, now_s: float) -> None:
        """The target has not answered, or says that it can't."""
        self._failures += 1
        if self._failures < self._failures_max:
            return
        if self.state is BreakerState.CLOSED:
            self.opened += 1
        self.state = BreakerState.OPEN
        over = self._failures - self._failures_max
        pause_s = backoff_s(self._chance, over, base_s=self._pause_s_base, most_s=self._pause_s_max)
        self._until_s = now_s + pause_s

    def left(self, now_s: float) -> None:
        """A request was cancelled and says nothing: the next one may try at once."""
        if self.state is BreakerState.TRYING:
            self._until_s = now_s


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
