"""The wall clock of work that deletes: one that was set forward is believed after a day.

Retention and sweep delete by age. A clock that jumps a week forward would make a whole topic too old, and nothing
brings the records back. The monotonic clock is the second witness: wall time passes no faster than it. It does not know
whether the clock was right at the start, but the coordinator's clock shows that.
"""

from __future__ import annotations

from memq.runtime.clock import Clock
from memq.runtime.logs import EventLog
from memq.topic import CLOCK_ERROR_MS

DRIFT = 1_000  # the clocks may differ by one part in so many


class SteadyClock:
    """A `Clock` whose wall time is not far ahead of what the monotonic clock has counted.

    A wall clock that was set forward counts after it was so for `confirm_ms`; one that was set back counts at once. A
    machine that was suspended looks the same, because its monotonic clock did not count.
    """

    def __init__(self, clock: Clock, events: EventLog, confirm_ms: int) -> None:
        self._clock = clock
        self._events = events
        self._confirm_ms = confirm_ms
        self._base_ms = clock.wall_ms() - int(clock.monotonic() * 1000)  # wall time at the monotonic clock's start
        self._counted_s = clock.monotonic()
        self._ahead: tuple[int, float] | None = None  # a wall clock that is ahead: by how much, and since when

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return self._clock.monotonic()

    def wall_ms(self) -> int:
        """Return the wall time (Unix ms); the counted time while the wall clock is too far ahead of it."""
        now_ms, now_s = self._clock.wall_ms(), self._clock.monotonic()
        counted_ms = self._base_ms + int(now_s * 1000)
        ahead_ms = now_ms - counted_ms
        if ahead_ms <= 0:
            self._believe(now_ms, now_s)
            return now_ms
        if ahead_ms <= CLOCK_ERROR_MS + (now_s - self._counted_s) * 1000 / DRIFT:
            self._ahead = None
            return now_ms
        if self._ahead is None or abs(ahead_ms - self._ahead[0]) > CLOCK_ERROR_MS:
            self._ahead = (ahead_ms, now_s)
            self._events.error(
                "clock-jumped",
                f"the wall clock went forward by {ahead_ms / 1000:.0f} s more than time has passed: retention and sweep"
                f" believe it in {self._confirm_ms / 1000:.0f} s; set the clock if it is wrong",
            )
        if (now_s - self._ahead[1]) * 1000 < self._confirm_ms:
            return counted_ms
        self._believe(now_ms, now_s)
        return now_ms

    def compare(self, other_ms: int, asked_ms: int, machine: str) -> None:
        """Compare the wall clock with that of another machine.

        The other one showed `other_ms` after this one had shown `asked_ms` (Unix ms).
        A wall clock that is ahead of it counts after `confirm_ms`, as one that was set forward.
        """
        ahead_ms = asked_ms - other_ms
        if ahead_ms <= CLOCK_ERROR_MS or (self._ahead and abs(ahead_ms - self._ahead[0]) <= CLOCK_ERROR_MS):
            return
        now_s = self._clock.monotonic()
        self._base_ms, self._counted_s, self._ahead = other_ms - int(now_s * 1000), now_s, (ahead_ms, now_s)
        self._events.error(
            "clock-jumped",
            f"the wall clock is {ahead_ms / 1000:.0f} s ahead of that of {machine}: retention and sweep believe it in"
            f" {self._confirm_ms / 1000:.0f} s; set the clock that is wrong",
        )

    def _believe(self, now_ms: int, now_s: float) -> None:
        self._base_ms, self._counted_s, self._ahead = now_ms - int(now_s * 1000), now_s, None
