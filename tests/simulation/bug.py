"""What a planted bug is: one place in the product's source, what is there instead, and the runs that show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Planted:
    """One bug: in `target`, a dotted path after the module's name, `old` becomes `new`.

    `level` is the weather that it takes, and `aspects` what the runs must have in addition to the usual.
    """

    name: str
    module: str
    target: str
    old: str
    new: str
    level: str = "stormy"
    quick_failover: bool = False
    seed: int = 1_000  # the first to try
    producers: tuple[str, ...] = ("plain", "product")
    aspects: tuple[str, ...] = ()
