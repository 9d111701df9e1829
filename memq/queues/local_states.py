"""States of items that only the memory of their owner has: leases, pending decisions, ends. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from memq.queues.range_map import RangeMap, cut

Place = tuple[str, str]  # queue and key


class LocalState(NamedTuple):
    """State of an item at its owner.

    `busy` counts decisions about the item that are not in the log yet. `until_s` is the end of the present lease
    (monotonic). `in_flight`: the item was chosen or leased, and its lease is not over. `dies`: None, or the item must
    end: as dead (True), or as expired (False).
    """

    busy: int = 0
    until_s: float | None = None
    in_flight: bool = False
    dies: bool | None = None


NONE = LocalState()  # of an item without an entry


class _BlockStates:
    """The states of the items of a block.

    While `states` is None, items from `begin` to `end` have `state`, and others NONE. Then `states` has all.
    """

    __slots__ = ("begin", "end", "place", "state", "states")

    def __init__(self, begin: int, end: int, state: LocalState, place: Place | None) -> None:
        self.begin, self.end, self.state = begin, end, state
        self.place = place
        self.states: RangeMap[LocalState] | None = None

    def ranges(self, begin: int, end: int) -> Iterable[tuple[int, int, LocalState]]:
        """Return begin, end and state of ranges of items."""
        if self.states is not None:
            return self.states.ranges(begin, end)
        if (begin, end) == (self.begin, self.end):
            return ((begin, end, self.state),)
        parts = cut(begin, end, ((self.begin, self.end),))
        return ((first, last, self.state if is_inside else NONE) for first, last, is_inside in parts)

    def put(self, begin: int, end: int, state: LocalState) -> None:
        """Set the state of a range of items."""
        if self.states is None:
            self.states = RangeMap(NONE)
            self.states.put(self.begin, self.end, self.state)
        self.states.put(begin, end, state)

    @property
    def entries(self) -> int:
        """Number of ranges with a state. The last range of `states` has no end, and no state."""
        return len(self.states) - 1 if self.states is not None else 1


class LocalStates:
    """The states of all items of a shard. A block has an entry while one of its items has a state."""

    def __init__(self) -> None:
        self.flights: Counter[Place] = Counter()  # how many items of each key are in flight
        self.leased = 0  # items with a lease
        self.ending: dict[int, int] = {}  # number of items of each block that must end
        self._blocks: dict[int, _BlockStates] = {}

    @property
    def entries(self) -> int:
        """Number of entries in memory."""
        return sum(each.entries for each in self._blocks.values()) + len(self.flights) + len(self.ending)

    def ranges(self, block: int, begin: int, end: int) -> Iterable[tuple[int, int, LocalState]]:
        """Return begin, end and state of ranges of items of a block, as they are at the call."""
        known = self._blocks.get(block)
        return known.ranges(begin, end) if known is not None else ((begin, end, NONE),)

    def change(
        self,
        block: int,
        begin: int,
        end: int,
        change: Callable[[LocalState], LocalState],
        place: Place | None = None,
    ) -> None:
        """Change the states of a range of items. Items that become in flight need the `place` of their block."""
        known = self._blocks.get(block)
        if known is None:
            made = change(NONE)
            if made != NONE:
                self._blocks[block] = _BlockStates(begin, end, made, place)
                self._count(block, place, end - begin, NONE, made)
            return
        place = known.place = place or known.place
        if known.states is None and known.begin == begin and known.end == end:
            former, known.state = known.state, change(known.state)
            self._count(block, place, end - begin, former, known.state)
            if known.state == NONE:
                del self._blocks[block]
            return
        for first, last, state in list(known.ranges(begin, end)):
            changed = change(state)
            if changed != state:
                known.put(first, last, changed)
                self._count(block, place, last - first, state, changed)
        if not known.entries:
            del self._blocks[block]

    def forget_ends(self, block: int) -> None:
        """Forget that items of a block must end."""
        known = self._blocks[block]
        end = known.states.end if known.states is not None else known.end
        self.change(block, 0, end, lambda state: state._replace(dies=None))

    def _count(self, block: int, place: Place | None, items: int, former: LocalState, state: LocalState) -> None:
        if (state.until_s is None) is not (former.until_s is None):
            self.leased += items if state.until_s is not None else -items
        if state.in_flight is not former.in_flight:
            assert place is not None, "given with the first item in flight"
            self.flights[place] += items if state.in_flight else -items
            if not self.flights[place]:
                del self.flights[place]
        if (state.dies is None) is not (former.dies is None):
            left = self.ending.get(block, 0) + (items if state.dies is not None else -items)
            if left:
                self.ending[block] = left
            else:
                del self.ending[block]
