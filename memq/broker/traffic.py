"""The load of a broker's partitions from their published totals, for the governor. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from memq.governor import Load

LOADS_MAX = 1_000  # that are reported, the busiest first: one node of the coordinator holds them
_DIGITS = 2

Place = tuple[str, int]


@dataclass(slots=True)
class Traffic:
    """Rates between two samples. A partition that was not open at both of them has none yet."""

    _last: dict[Place, int] = field(default_factory=dict)
    _last_s: float = 0.0

    def look(self, stored_bytes: Mapping[Place, int], now_s: float) -> list[Load]:
        """Return the rates since the last look, rounded so that a steady rate is reported once.

        Idle ones are left out.
        `stored_bytes`: what each partition committed since its creation.
        """
        last, span_s = self._last, now_s - self._last_s
        self._last, self._last_s = dict(stored_bytes), now_s
        if span_s <= 0:
            return []
        rates = {place: (count - last[place]) / span_s for place, count in stored_bytes.items() if place in last}
        busy = sorted(((-_rounded(rate), place) for place, rate in rates.items() if rate >= 1))[:LOADS_MAX]
        return [Load(topic_id=place[0], partition=place[1], bytes_s=-rate) for rate, place in sorted(busy, key=_place)]


def _place(entry: tuple[int, Place]) -> Place:
    return entry[1]


def _rounded(rate: float) -> int:
    """Return a rate with two digits that count: 123456 is 120000."""
    return int(float(f"{rate:.{_DIGITS}g}"))
