"""Back-off before a retry: random, below a bound that doubles with each try."""

from __future__ import annotations

import random

_DOUBLINGS_MAX = 16  # what is tried for ever must not end in an overflow after a thousand tries


def backoff_s(chance: random.Random, tries: int, *, base_s: float, most_s: float) -> float:
    """Return the seconds to wait after `tries` failures: up to twice `base_s`, later at most `most_s`.

    Theory: those that failed together must not come again together, so the whole time is drawn ("full jitter").
    """
    return chance.uniform(0.0, min(most_s, base_s * 2.0 ** min(tries, _DOUBLINGS_MAX)))
