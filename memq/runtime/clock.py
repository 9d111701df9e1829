"""The one door to time. Ages are monotonic; the wall clock only stamps what people read."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Time as the rest of the package sees it.

    Promises: `monotonic` never goes back and counts seconds; `wall_ms` is Unix time in ms.
    Non-promises: the wall clock may jump; the two need not run at the same rate.
    """

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; only differences mean something."""
        ...

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        ...


class SystemClock:
    """The clock of the operating system."""

    def monotonic(self) -> float:
        """See `Clock.monotonic`."""
        return time.monotonic()

    def wall_ms(self) -> int:
        """See `Clock.wall_ms`."""
        return time.time_ns() // 1_000_000
