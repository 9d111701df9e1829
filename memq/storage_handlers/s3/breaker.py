"""The circuit breaker of one target: after repeated failures one request at a time tries. Pure.

Theory: each batch is tried again for ever, and so is each read. While a store is down that is many requests a second
that can't succeed, and at the moment when it heals they all come at once. The breaker lets one through at a time.
"""

from __future__ import annotations

import random
from enum import Enum

from memq.runtime.clock import backoff_s


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
