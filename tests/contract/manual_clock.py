"""A clock that moves only when a test moves it."""

from __future__ import annotations


class ManualClock:
    """Starts at some wall time, or at `wall_ms`; `advance` moves the wall clock and the monotonic clock alike."""

    def __init__(self, wall_ms: int = 1_760_001_000_000) -> None:
        self._now_ms = 1_000_000
        self._start_wall_ms = wall_ms - self._now_ms

    def advance(self, milliseconds: int) -> None:
        self._now_ms += milliseconds

    def monotonic(self) -> float:
        return self._now_ms / 1_000

    def wall_ms(self) -> int:
        return self._start_wall_ms + self._now_ms
