"""The result of a row: figures with their bound, as a table for people and as JSON for machines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Options:
    """How long a row may take: `rounds` of each side in turn, sizes scaled down when `quick`."""

    quick: bool
    say: Callable[[str], None]

    @property
    def rounds(self) -> int:
        """How often each side is measured; the median counts."""
        return 3 if self.quick else 5


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value; `bound` is what the speed table asks for, None when it only reports."""

    row: str
    case: str
    value: float
    unit: str
    bound: float | None = None
    better: Literal["lower", "higher"] = "lower"
    detail: dict[str, float | str] = field(default_factory=dict)

    @property
    def holds(self) -> bool | None:
        """Whether the bound holds; None when there is none."""
        if self.bound is None:
            return None
        return self.value <= self.bound if self.better == "lower" else self.value >= self.bound

    def line(self) -> str:
        """The figure as one line of the table."""
        sign = "≤" if self.better == "lower" else "≥"
        bound = f"{sign} {self.bound:g}" if self.bound is not None else ""
        mark = {True: "ok", False: "MISSED", None: ""}[self.holds]
        detail = ", ".join(f"{name} {_short(value)}" for name, value in self.detail.items())
        return f"{self.row:12} {self.case:34} {self.value:9.4g} {self.unit:8} {bound:9} {mark:7} {detail}".rstrip()

    def as_json(self) -> dict[str, object]:
        """The figure as JSON's values."""
        return {**asdict(self), "holds": self.holds}


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def median(values: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` (0 to 1) of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
