"""The held blocks of a service partition that are due late, as its state has them: in runs (H6). Pure.

A block that is due late is in memory at first. A *mark* is a decision: all holds that are due at or after a time and
are in memory now will move. Their owner stores them as a run, an object of the store, and a second decision names it.
Then they leave the memory. Holds that leave the marked ones meanwhile are known, so that the run's copies of them are
dead. Before its holds come due, decisions *bring* them back: they have the whole holds, so no fold reads a run.

For each run the state has a place: all holds up to it were brought. It has the holds beyond that were dropped, too. A
merge replaces runs by others without dead copies. It names how many of the dropped holds it leaves out.

The ids of holds that moved are known for as long as a block may come again (H1), in 16 bytes each.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from operator import attrgetter

import msgspec

from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.state_log.held_run import place_of
from memq.format.state_log.run import BEFORE_ALL, NamedRun, RunPlace

_producer_of, _first_of = attrgetter("producer"), attrgetter("first")
RECENT_SET_MAX = 32_768  # ids in one set: to sort them takes 20 ms


class MarkDecision(msgspec.Struct, frozen=True, tag="mark"):
    """The holds in memory that are due at or after `from_ms` will move into a run."""

    from_ms: int


class RunDecision(msgspec.Struct, frozen=True, tag="run"):
    """The holds of mark number `mark` are in the objects `runs`, in their order."""

    mark: int
    runs: tuple[NamedRun, ...]
    now_ms: int


class ReplacedRun(msgspec.Struct, frozen=True, array_like=True):
    """A run that a merge replaces: its key, and the place up to which it was brought.

    The new runs leave out the first `dropped` of its dropped holds.
    """

    key: str
    at: RunPlace
    dropped: int


class MergeDecision(msgspec.Struct, frozen=True, tag="merge"):
    """The live holds of some runs are in the objects `runs`, in their order."""

    replaced: tuple[ReplacedRun, ...]
    runs: tuple[NamedRun, ...]


class BringDecision(msgspec.Struct, frozen=True, tag="bring"):
    """The holds of a run beyond `before` and up to `to` come back into memory: key of object, and lanes."""

    run: str
    before: RunPlace
    to: RunPlace
    objects: tuple[tuple[str, tuple[HeldLane, ...]], ...]


class SpilledPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a hold lies that is to be dropped: key of the run, due time, target.

    `records` are as `HeldBlock.counted`.
    """

    run: str
    due_ms: int
    target: Target
    records: int


class RunState(msgspec.Struct):
    """A run's object in the state: all up to `at` were brought. `dropped` has dead holds with due times."""

    run: NamedRun
    at: RunPlace = BEFORE_ALL
    dropped: dict[HoldId, int] = {}

    def has(self, place: RunPlace) -> bool:
        """Whether a hold at this place would be in the run, and was not brought."""
        return self.run.first <= place <= self.run.last and place > self.at


class SavedRuns(msgspec.Struct, frozen=True, array_like=True):
    """The runs of a state in its snapshot.

    An id in `recent` has 8 bytes of its producer, and 8 of its sequence.
    """

    mark: int
    marked: list[HoldId]
    unmarked: list[tuple[HoldId, int]]
    runs: list[tuple[NamedRun, RunPlace, list[tuple[HoldId, int]]]]
    recent: list[tuple[int, bytes, bytes]]


class RecentIds:
    """Ids of holds that moved into a run at `moved_ms` or before, in the order of their producers."""

    def __init__(self, moved_ms: int, ids: Iterable[HoldId]) -> None:
        self.moved_ms = moved_ms
        found = sorted(ids, key=_producer_of)  # faster than by both
        self.producers = array("Q", map(_producer_of, found))
        self.firsts = array("Q", map(_first_of, found))

    def __len__(self) -> int:
        return len(self.producers)

    def __contains__(self, hold: HoldId) -> bool:
        at = bisect_left(self.producers, hold.producer)
        while at < len(self.producers) and self.producers[at] == hold.producer:
            if self.firsts[at] == hold.first:
                return True
            at += 1
        return False

    def __iter__(self) -> Iterator[HoldId]:
        return map(HoldId, self.producers, self.firsts)

    def with_(self, other: RecentIds) -> RecentIds:
        """Return the ids of both, which moved when the later ones did."""
        found = RecentIds(max(self.moved_ms, other.moved_ms), ())
        producers, firsts = self.producers + other.producers, self.firsts + other.firsts
        order = sorted(range(len(producers)), key=producers.__getitem__)
        found.producers = array("Q", map(producers.__getitem__, order))
        found.firsts = array("Q", map(firsts.__getitem__, order))
        return found


class SpilledHolds:
    """The runs of one service partition."""

    def __init__(self) -> None:
        self.mark = 0  # number of the last mark
        self.marked: dict[HoldId, None] = {}
        self.runs: dict[str, RunState] = {}  # by key
        self._unmarked: dict[HoldId, int] = {}  # holds that left the marked ones, with their due times
        self._recent: list[RecentIds] = []  # the oldest first

    @property
    def empty(self) -> bool:
        """Whether no hold ever moved, as far as the state knows."""
        return not self.mark

    def is_recent(self, hold: HoldId) -> bool:
        """Whether a hold moved into a run a short time ago."""
        return any(hold in ids for ids in self._recent)

    # ---- into runs -------------------------------------------------------------------------------

    def begin(self, holds: Iterable[HoldId]) -> int:
        """Mark holds; return the number of the mark. An earlier mark ends."""
        self.mark += 1
        self.marked, self._unmarked = dict.fromkeys(holds), {}
        return self.mark

    def left(self, block: HeldBlock) -> None:
        """Note that a hold in memory was released, dropped or replaced."""
        if block.id in self.marked:
            del self.marked[block.id]
            self._unmarked[block.id] = block.due_ms

    def take(self, decision: RunDecision) -> list[HoldId]:
        """Return the holds that are in runs now; none for another mark."""
        moved = list(self.marked) if decision.mark == self.mark else []
        if not moved:
            return []
        self._add(decision.runs, self._unmarked)
        self._remember(RecentIds(decision.now_ms, moved))
        self.marked, self._unmarked = {}, {}
        return moved

    def _add(self, runs: Iterable[NamedRun], dropped: dict[HoldId, int]) -> None:
        for run in runs:
            state = self.runs[run.key] = RunState(run)
            for hold, due_ms in dropped.items():
                if state.has((due_ms, hold.producer, hold.first)):
                    state.dropped[hold] = due_ms

    def _remember(self, ids: RecentIds) -> None:
        """Add a set of ids; sets of about the same size become one."""
        while self._recent and len(self._recent[-1]) <= len(ids) and len(self._recent[-1]) + len(ids) <= RECENT_SET_MAX:
            ids = self._recent.pop().with_(ids)
        self._recent.append(ids)

    def forget(self, before_ms: int) -> None:
        """Forget the ids of holds that moved before `before_ms`."""
        while self._recent and self._recent[0].moved_ms < before_ms:
            del self._recent[0]

    # ---- out of runs -----------------------------------------------------------------------------

    def bring(self, decision: BringDecision) -> RunState | None:
        """Note that holds are brought; return their run, None if it changed meanwhile."""
        state = self.runs.get(decision.run)
        if state is None or state.at != decision.before:
            return None
        state.at = decision.to
        if state.at >= state.run.last:
            del self.runs[decision.run]
        return state

    def drop(self, hold: HoldId, place: SpilledPlace) -> bool | None:
        """Drop a hold that lies in a run; whether it was live there, None if the state does not name this run."""
        state = self.runs.get(place.run)
        if state is None:
            return None
        if hold in state.dropped or not state.has((place.due_ms, hold.producer, hold.first)):
            return False
        state.dropped[hold] = place.due_ms
        return True

    def replace(self, block: HeldBlock) -> None:
        """Note that a hold in a run is in memory again, with another object, or has ended."""
        place = place_of(block)
        for state in self.runs.values():
            if state.has(place):
                state.dropped[block.id] = block.due_ms

    def merge(self, decision: MergeDecision) -> bool:
        """Replace runs; False if one of them changed meanwhile."""
        states = [self.runs.get(each.key) for each in decision.replaced]
        dropped: dict[HoldId, int] = {}
        for each, state in zip(decision.replaced, states, strict=True):
            if state is None or state.at != each.at:
                return False
            dropped |= dict(list(state.dropped.items())[each.dropped :])
        for each in decision.replaced:
            del self.runs[each.key]
        self._add(decision.runs, dropped)
        return True

    # ---- snapshots -------------------------------------------------------------------------------

    def save(self) -> SavedRuns:
        """Return the state."""
        runs = [(state.run, state.at, list(state.dropped.items())) for state in self.runs.values()]
        recent = [(ids.moved_ms, _bytes_of(ids.producers), _bytes_of(ids.firsts)) for ids in self._recent]
        return SavedRuns(self.mark, list(self.marked), list(self._unmarked.items()), runs, recent)

    def restore(self, saved: SavedRuns) -> None:
        """Take a saved state. Raises: ValueError for ids of a wrong length."""
        self.mark = saved.mark
        self.marked, self._unmarked = dict.fromkeys(saved.marked), dict(saved.unmarked)
        self.runs = {run.key: RunState(run, at, dict(dropped)) for run, at, dropped in saved.runs}
        for moved_ms, producers, firsts in saved.recent:
            ids = RecentIds(moved_ms, ())
            ids.producers, ids.firsts = _array_of(producers), _array_of(firsts)
            if len(ids.firsts) != len(ids.producers):
                raise ValueError(f"{len(ids.producers)} ids have {len(ids.firsts)} sequences")
            self._recent.append(ids)


def _bytes_of(numbers: array[int]) -> bytes:
    if sys.byteorder == "big":
        numbers = array("Q", numbers)
        numbers.byteswap()
    return numbers.tobytes()


def _array_of(data: bytes) -> array[int]:
    numbers = array("Q")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
