"""The only access to time: monotonic for ages, wall clock for dates; back-off of retries."""

from __future__ import annotations

import random
import time
from typing import Protocol

_DOUBLINGS_MAX = 16  # what is tried for ever must not end in an overflow after a thousand tries


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


def backoff_s(chance: random.Random, tries: int, *, base_s: float, most_s: float) -> float:
    """Return the seconds to wait after `tries` failures: up to twice `base_s`, later at most `most_s`.

    Theory: those that failed together must not come again together, so the whole time is drawn ("full jitter").
    """
    return chance.uniform(0.0, min(most_s, base_s * 2.0 ** min(tries, _DOUBLINGS_MAX)))
