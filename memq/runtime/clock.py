"""The only access to time: monotonic for ages, wall clock for dates; back-off of retries."""

from __future__ import annotations

import random
import time
from typing import Protocol

_DOUBLINGS_MAX = 16  # an endless retry would overflow a float after about a thousand tries


class Clock(Protocol):
    """Time as the rest of the package sees it.

    Promises: `monotonic` counts seconds and never decreases; `wall_ms` is Unix time in ms.
    Non-promises: the wall clock may jump; the two clocks may run at different rates.
    """

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; only differences have a meaning."""
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


def backoff_s(chance: random.Random, tries: int, *, base_s: float, most_s: float) -> float:
    """Return the seconds to wait after `tries` failures: up to twice `base_s`, later at most `most_s`.

    The whole time is random ("full jitter"), because callers that fail together must not retry together.
    """
    return chance.uniform(0.0, min(most_s, base_s * 2.0 ** min(tries, _DOUBLINGS_MAX)))
