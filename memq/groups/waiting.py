"""Heartbeats that wait at the owner of their group, until something changes for their members. Pure.

Each member has at most one. A new one takes the place of the one before it, whose connection may be dead. So the number
of members bounds the memory, and no task or timer belongs to one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from memq.errors import MemqError
from memq.groups import Membership

TICK_MS = 250  # heartbeats that end in the same tick are answered together, with one proof

AnswerHeartbeat = Callable[[Membership | MemqError | None], None]  # None: nothing has changed for the member


class WaitingHeartbeat(NamedTuple):
    """A heartbeat that waits until `until_ms` (monotonic).

    `generation` is the one that the member knows. `fresh_ms` is F, the greatest age of a proof at the answer (G4).
    """

    group: str
    member: str
    generation: int
    until_ms: int
    fresh_ms: int
    answer: AnswerHeartbeat


class WaitingHeartbeats:
    """The waiting heartbeats of a coordinator, by member and by the tick in which they end."""

    def __init__(self) -> None:
        self._ticks: dict[int, dict[tuple[str, str], WaitingHeartbeat]] = {}
        self._tick_of: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        return len(self._tick_of)

    def add(self, beat: WaitingHeartbeat) -> WaitingHeartbeat | None:
        """Add a heartbeat; return the former one of its member, which waits no longer."""
        former = self.take(beat.group, beat.member)
        tick = -(-beat.until_ms // TICK_MS)
        self._ticks.setdefault(tick, {})[beat.group, beat.member] = beat
        self._tick_of[beat.group, beat.member] = tick
        return former

    def take(self, group: str, member: str) -> WaitingHeartbeat | None:
        """Remove the heartbeat of a member, and return it; None without one."""
        tick = self._tick_of.pop((group, member), None)
        if tick is None:
            return None
        beats = self._ticks[tick]
        beat = beats.pop((group, member))
        if not beats:
            del self._ticks[tick]
        return beat

    def take_members(self, group: str, members: Iterable[str]) -> list[WaitingHeartbeat]:
        """Remove the heartbeats of some members of a group, and return them."""
        found = (self.take(group, member) for member in members)
        return [beat for beat in found if beat is not None]

    def take_due(self, now_ms: int) -> list[WaitingHeartbeat]:
        """Remove the heartbeats that have waited long enough, and return them in the order of their ends."""
        ticks = sorted(tick for tick in self._ticks if tick * TICK_MS <= now_ms)
        return [beat for tick in ticks for beat in self._taken(tick)]

    def take_all(self) -> list[WaitingHeartbeat]:
        """Remove all heartbeats, and return them in the order of their ends."""
        return [beat for tick in sorted(self._ticks) for beat in self._taken(tick)]

    def _taken(self, tick: int) -> list[WaitingHeartbeat]:
        beats = self._ticks.pop(tick)
        for key in beats:
            del self._tick_of[key]
        return list(beats.values())
