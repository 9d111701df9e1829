"""Progress of a long drain, written to the log."""

from __future__ import annotations

from memq.runtime.clock import Clock
from memq.runtime.logs import EventLog

INTERVAL_S = 5.0


class DrainProgress:
    """Number of drained partitions out of `total`. A drain of a few seconds logs nothing."""

    def __init__(self, clock: Clock, events: EventLog, total: int, done_text: str) -> None:
        """`done_text`: what is said behind "3000 of 10000 "."""
        self.done = 0
        self.total = total
        self._clock = clock
        self._events = events
        self._done_text = done_text
        self._told_s = clock.monotonic()

    def reached(self, done: int) -> None:
        """Note how many are done by now."""
        self.done = done
        now_s = self._clock.monotonic()
        if now_s - self._told_s >= INTERVAL_S:
            self._told_s = now_s
            self._events.info("draining-progress", f"{done} of {self.total} {self._done_text}")
