"""The states of items that only their owner has: leases, decisions on their way, ends. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from memq.queues.range_map import RangeMap

Place = tuple[str, str]  # queue and key


class LocalState(NamedTuple):
    """State of an item.

    `busy` counts the decisions on their way, and `until_s` is when the present lease ends. `in_flight`: it was chosen
    or leased, and its lease is not over. `dies`: it is to end, and whether it is dead then.
    """

    busy: int = 0
    until_s: float | None = None
    in_flight: bool = False
    dies: bool | None = None


NONE = LocalState()  # of an item that is not known here


class _BlockStates:
    __slots__ = ("place", "states")

    def __init__(self) -> None:
        self.place: Place | None = None
        self.states = RangeMap(NONE)


class LocalStates:
    """The states of all items of a shard. A block goes with its last item that has a state."""

    def __init__(self) -> None:
        self.flights: Counter[Place] = Counter()  # how many items of each key are in flight
        self.leased = 0  # items with a lease
        self.ending: dict[int, int] = {}  # how many items of each block are to end
        self._blocks: dict[int, _BlockStates] = {}

    @property
    def entries(self) -> int:
        """How many entries it has in memory."""
        return sum(len(each.states) for each in self._blocks.values()) + len(self.flights) + len(self.ending)

    def get(self, block: int, number: int) -> LocalState:
        """Return the state of an item."""
        known = self._blocks.get(block)
        return known.states.get(number) if known is not None else NONE

    def ranges(self, block: int, begin: int, end: int) -> Iterator[tuple[int, int, LocalState]]:
        """Yield begin, end and state of the items of a block in a row, as they are at the call."""
        known = self._blocks.get(block)
        return known.states.ranges(begin, end) if known is not None else iter(((begin, end, NONE),))

    def change(
        self,
        block: int,
        begin: int,
        end: int,
        change: Callable[[LocalState], LocalState],
        place: Place | None = None,
    ) -> None:
        """Change the states of items in a row. Items that come into flight need the `place` of their block."""
        known = self._blocks.get(block)
        if known is None:
            if change(NONE) == NONE:
                return
            known = self._blocks[block] = _BlockStates()
        if place is not None:
            known.place = place
        for first, last, state in known.states.ranges(begin, end):
            changed = change(state)
            if changed != state:
                known.states.put(first, last, changed)
                self._count(block, known.place, last - first, state, changed)
        if len(known.states) == 1:  # the last range has no end, and no states
            del self._blocks[block]

    def forget_ends(self, block: int) -> None:
        """Let no item of a block end."""
        known = self._blocks[block].states
        self.change(block, 0, known.end, lambda state: state._replace(dies=None))

    def _count(self, block: int, place: Place | None, count: int, former: LocalState, state: LocalState) -> None:
        self.leased += count * ((state.until_s is not None) - (former.until_s is not None))
        if state.in_flight is not former.in_flight:
            assert place is not None, "given with the first item in flight"
            self.flights[place] += count if state.in_flight else -count
            if not self.flights[place]:
                del self.flights[place]
        if (state.dies is None) is not (former.dies is None):
            left = self.ending.get(block, 0) + (count if state.dies is not None else -count)
            if left:
                self.ending[block] = left
            else:
                del self.ending[block]
