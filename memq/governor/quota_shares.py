"""The governor's book of quota shares: which part of each limited rate each broker may give out. Pure.

Each broker reports once a second which part of a rate its clients used, and whether they had to wait. It gets a part
until a time. The parts of all brokers never exceed the whole: a broker gets only what no other one holds, and what
another broker must give up is free after its next report, or when its part ends.

A broker whose clients did not wait gets what they used, and a little more. One whose clients waited gets up to a third
more than they used. All get a small part, with which new traffic begins, and equal parts of the rest.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)

REPORT_INTERVAL_S = 1.0
LEASE_S = 4.0  # a part lives so long without another report
SPARE = 1.05  # of the use of a broker whose clients did not wait
GROWTH = 1.3  # of the use of a broker whose clients waited
DECAY = 0.8  # of the part of a broker whose clients wait and use nothing: a large block is paid for
BEGINNING = 0.02  # of the rate, for all brokers together: so that new traffic begins at once


class ShareUse(NamedTuple):
    """The use of a rate at one broker, each in parts of the whole rate.

    `part` is what the broker may give out now; `held`: clients had to wait for more.
    """

    used: float
    part: float
    held: bool

    @property
    def wanted(self) -> float:
        """The part that the broker needs next."""
        return max(GROWTH * self.used, DECAY * self.part) if self.held else SPARE * self.used


@dataclass(slots=True)
class _Grant:
    part: float
    wanted: float
    until_s: float


class QuotaShares(Generic[Key]):
    """Gives out parts. One broker has it, while it governs.

    After a change of the governor the parts that the last one gave out are not known. Until they have ended, no broker
    gets more than it has.
    """

    def __init__(self) -> None:
        self._granted: dict[Key, dict[str, _Grant]] = {}
        self._since_s = 0.0
        self._asked_s = float("-inf")

    def grant(self, broker: str, uses: Mapping[Key, ShareUse], brokers: int, now_s: float) -> dict[Key, float]:
        """Take the report of one of so many brokers; return its parts, which end LEASE_S later."""
        if now_s - self._asked_s > LEASE_S:  # nobody has asked this broker for as long: another one may have governed
            self._since_s = now_s
        self._asked_s = now_s
        learning = now_s - self._since_s < LEASE_S
        return {key: self._grant(broker, key, use, brokers, now_s, learning=learning) for key, use in uses.items()}

    def forget_ended(self, now_s: float) -> None:
        """Forget parts that have ended."""
        for key, granted in list(self._granted.items()):
            if all(each.until_s < now_s for each in granted.values()):
                del self._granted[key]

    def _grant(self, broker: str, key: Key, use: ShareUse, brokers: int, now_s: float, *, learning: bool) -> float:
        granted = self._granted.setdefault(key, {})
        others = [each for name, each in granted.items() if name != broker and each.until_s >= now_s]
        idle = max(0, brokers - 1 - len(others))
        target = fair_parts([use.wanted, *(each.wanted for each in others), *[0.0] * idle])[0]
        free = 1.0 - sum(each.part for each in others) - idle * beginning_part(brokers)
        part = max(0.0, min(target, free, use.part if learning else target))
        granted[broker] = _Grant(part, use.wanted, now_s + LEASE_S)
        return part


def beginning_part(brokers: int) -> float:
    """Return the part of a broker without use."""
    return BEGINNING / brokers


def fair_parts(wanted: Sequence[float]) -> list[float]:
    """Divide the whole: each gets what it wants, if that is possible, and an equal part of the rest.

    If not, those that want the least get it, and the others equal parts. BEGINNING is divided equally before.
    """
    beginning = beginning_part(len(wanted))
    left, parts = 1.0 - BEGINNING, [0.0] * len(wanted)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    for place, number in enumerate(order):
        parts[number] = min(wanted[number], left / (len(wanted) - place))
        left -= parts[number]
    return [part + beginning + left / len(wanted) for part in parts]
