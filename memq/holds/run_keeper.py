"""Keeps the holds that are due late in runs, at the owner of their service partition (H6).

Memory has the holds of the next hour (NEAR_S). One task does three things, the most urgent first:

- It *brings* the holds of runs that come due in that time. With very many of them it brings as many as are released
  next.
- It *moves* the holds in memory that are due later into a run, when they are SPILL_HOLDS. Fewer are not worth a PUT.
- It *merges* runs: FANOUT of a level become one of the next level. So a hold is written once for each level, and n
  holds cost O(n log n) bytes. A run with many dropped holds is written again without them.

A run that can't be read is asked for again and again. Its holds wait, and those of other runs do not.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from memq.errors import MemqError, NotReadyError, ThrottledError
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.held_sequences import due_time_of
from memq.format.state_log.held_run import HELD_ROWS, RunEntry
from memq.format.state_log.run import NamedRun, RunPlace
from memq.holds.decisions import HoldsDecision
from memq.holds.machine import HoldMachine
from memq.holds.spilled_holds import (
    BringDecision,
    MarkDecision,
    MergeDecision,
    ReplacedRun,
    RunDecision,
    RunState,
    SpilledPlace,
)
from memq.holds.storing import BLOCK_COST, DECISION_BYTES, PLACE_COST
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.state_log import Answer
from memq.state_log.run_store import RunOutput, RunReader
from memq.storage_handlers import StorageHandler

NEAR_S = 3_600.0  # holds that are due within this time are in memory
TURN_S = 0.5  # until a merge asks again whether it is its turn
SPILL_HOLDS = 6_144  # that are due later, and in memory: 2 MB
AHEAD_HOLDS = 16_384  # no more are brought while so many in memory are due before
FANOUT = 8  # runs of one level that become one
LEVEL_MAX = 4
DROPPED_MAX = 16_384  # dropped holds in runs: 150 bytes of memory each
RETRY_S_MAX = 30.0
TIMER_S_MAX = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPace:
    """When holds move: see the constants."""

    near_ms: int = field(default_factory=lambda: int(NEAR_S * 1_000))
    spill_holds: int = field(default_factory=lambda: SPILL_HOLDS)
    fanout: int = field(default_factory=lambda: FANOUT)
    dropped_max: int = field(default_factory=lambda: DROPPED_MAX)

    @property
    def spill_ms(self) -> int:
        """Holds that are due so late move; those of a run are brought up to this time at once."""
        return self.near_ms + self.near_ms // 4


@dataclass(slots=True)
class _Retry:
    """A run, or a kind of work, that failed `tries` times, and waits until `at_s`."""

    tries: int = 0
    at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKeeperParts:
    """The parts that a `RunKeeper` uses.

    `merging` is a turn that all service partitions of a broker share. `propose` puts a decision into the log.
    `brought` gets holds that are in memory again, `moved` is called when some have left it. `new_key` returns the key
    of another object of a run.
    """

    machine: HoldMachine
    store: StorageHandler
    runtime: Runtime
    events: EventLog
    key_valid_s: float
    merging: asyncio.Semaphore
    propose: Callable[[HoldsDecision], Awaitable[Answer]]
    brought: Callable[[Iterable[RunEntry]], None]
    moved: Callable[[], None]
    new_key: Callable[[], str]


class RunKeeper:
    """See the module. Raises: MemqError when the log has ended."""

    def __init__(self, parts: RunKeeperParts, pace: RunPace | None = None) -> None:
        self._parts = parts
        self._machine = parts.machine
        self._spilled = parts.machine.spilled
        self._pace = pace or RunPace()
        self._reader = RunReader(parts.store, HELD_ROWS, parts.events)
        self._changed = asyncio.Event()
        self._near_count = 0  # holds in memory that are due soon, when they were counted last
        self._next: dict[str, int] = {}  # when the next hold of a run is due, by key
        self._retries: dict[str, _Retry] = {}  # by key of a run, or kind of work
        self._late: set[str] = set()  # runs that were named so late that the sweep may have taken them

    def wake(self) -> None:
        """Note that holds came into memory, or left it."""
        self._changed.set()

    async def run(self) -> None:
        """Bring, move and merge until cancelled."""
        while True:
            self._changed.clear()
            try:
                if await self._bring() or await self._move() or await self._merge():
                    continue
            except ThrottledError:
                await asyncio.sleep(0.1)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self._idle_s()):
                    await self._changed.wait()

    # ---- out of runs -----------------------------------------------------------------------------

    async def _bring(self) -> bool:
        """Bring some holds of the first run that comes due and can be read; whether there was one."""
        now_ms = self._now_ms()
        for due_ms, state in sorted(((self._due_ms(each), each) for each in self._runs()), key=lambda each: each[0]):
            if due_ms > now_ms + self._pace.near_ms or self._ahead(due_ms) >= AHEAD_HOLDS:
                return False
            if not self._may_try(state.run.key):
                continue
            try:
                decision, holds = await self._next_holds(state, now_ms + self._pace.spill_ms)
            except MemqError as error:
                self._failed(state.run.key, f"run '{state.run.key}' can't be read", error)
                continue
            self._retries.pop(state.run.key, None)
            if decision is not None and await self._parts.propose(decision):
                self._parts.brought(holds)
                if state.run.key not in self._spilled.runs:
                    self._next.pop(state.run.key, None)
            return True
        return False

    async def _next_holds(self, state: RunState, until_ms: int) -> tuple[BringDecision | None, list[RunEntry]]:
        """Return the decision that brings the next holds of a run, and the holds; none if they are due later."""
        before = state.at
        async for found in self._reader.blocks(state.run, before):
            live = [each for each in found if each.block.id not in state.dropped]
            if not live:
                continue
            self._next[state.run.key] = live[0].block.due_ms
            chosen = _fitting(each for each in live if each.block.due_ms <= until_ms)
            if not chosen:
                return None, []
            if len(chosen) < len(live):
                self._next[state.run.key] = live[len(chosen)].block.due_ms
            return BringDecision(state.run.key, before, chosen[-1].place, _objects(chosen)), chosen
        return BringDecision(state.run.key, before, state.run.last, ()), []  # the others were dropped

    def _ahead(self, due_ms: int) -> int:
        """Return how many holds in memory are due before: they are released first."""
        if len(self._machine.open) < AHEAD_HOLDS:
            return 0
        return sum(0 < hold.block.due_ms <= due_ms for hold in self._machine.open.values())

    def _runs(self) -> list[RunState]:
        return list(self._spilled.runs.values())

    def _due_ms(self, state: RunState) -> int:
        """Return when the next hold of a run is due, or a time before."""
        return self._next.get(state.run.key) or max(state.run.first[0], state.at[0])

    def overdue_ms(self) -> int | None:
        """Return when the first hold was due that is still in a run; None if there is none."""
        now_ms = self._now_ms()
        known = (self._due_ms(each) for each in self._runs() if each.run.key in {*self._next, *self._retries})
        return min((due_ms for due_ms in known if due_ms <= now_ms), default=None)

    # ---- into runs -------------------------------------------------------------------------------

    async def _move(self) -> bool:
        """Move the holds that are due late out of the memory, if there are many; whether it did."""
        pace, machine = self._pace, self._machine
        if len(machine.open) - self._near_count < pace.spill_holds or not self._may_try("move"):
            return False
        from_ms = self._now_ms() + pace.spill_ms
        late = sum(hold.is_due_at(from_ms) for hold in machine.open.values())
        self._near_count = len(machine.open) - late
        if late < pace.spill_holds:
            return False
        mark = await self._parts.propose(MarkDecision(from_ms))
        if mark != self._spilled.mark:
            return False
        marked = [machine.open[each] for each in self._spilled.marked]
        holds = sorted((RunEntry(hold.block, hold.target, hold.key) for hold in marked), key=place_in_run)
        output, began_s = (
            RunOutput(self._parts.store, HELD_ROWS, self._parts.new_key, 0, self._spilled.mark),
            self._now_s(),
        )
        try:
            await output.add(holds)
            runs = await output.finish()
        except MemqError as error:
            self._failed("move", "holds that are due late stay in memory", error)
            return False
        if (slow := self._too_late(began_s)) is not None:
            self._failed("move", "holds that are due late stay in memory", slow)
            return False
        self._retries.pop("move", None)
        if runs and await self._parts.propose(RunDecision(self._spilled.mark, runs, self._now_ms())):
            self._parts.moved()
            self._note_late(began_s, runs)
        return True

    def _too_late(self, began_s: float) -> NotReadyError | None:
        """Return why runs that were stored since `began_s` may not be named: the sweep may take them (ADR 6)."""
        if self._now_s() - began_s <= self._parts.key_valid_s:
            return None
        return NotReadyError(f"the store took over {self._parts.key_valid_s:g} s for them")

    def _note_late(self, began_s: float, runs: Iterable[NamedRun]) -> None:
        """If runs were named too late (ADR 6), write them again."""
        if self._now_s() - began_s > self._parts.key_valid_s:
            for run in runs:
                self._late.add(run.key)
                self._parts.events.warning("held-run-late", f"run '{run.key}' was named late, and is written again")

    # ---- merges ----------------------------------------------------------------------------------

    async def _merge(self) -> bool:
        """Write some runs again as one; whether there were any.

        The service partitions of a broker merge in turn, because a merge has a few MB in memory.
        """
        chosen = self._chosen() if self._may_try("merge") else None
        if chosen is None:
            return False
        if self._parts.merging.locked():
            self._retries.setdefault("merge", _Retry()).at_s = self._now_s() + TURN_S
            return False
        async with self._parts.merging:
            return await self._merge_runs(*chosen)

    async def _merge_runs(self, states: list[RunState], level: int, group: int) -> bool:
        replaced = tuple(ReplacedRun(each.run.key, each.at, len(each.dropped)) for each in states)
        output, began_s = RunOutput(self._parts.store, HELD_ROWS, self._parts.new_key, level, group), self._now_s()
        try:
            async for holds in merged(self._reader, states):
                await output.add(holds)
            runs = await output.finish()
        except MemqError as error:
            self._failed("merge", f"{len(states)} runs can't be merged", error)
            return False
        if (slow := self._too_late(began_s)) is not None:
            self._failed("merge", f"{len(states)} runs can't be merged", slow)  # each try costs PUTs
            return False
        self._retries.pop("merge", None)
        await self._parts.propose(MergeDecision(replaced, runs))
        for state in states:
            self._next.pop(state.run.key, None)
            self._retries.pop(state.run.key, None)
            self._late.discard(state.run.key)
        self._note_late(began_s, runs)
        return True

    def _chosen(self) -> tuple[list[RunState], int, int] | None:
        """Return the runs that are merged next, with level and group of the new run."""
        runs = self._runs()
        for state in runs:
            if state.run.key in self._late:
                return [state], state.run.level, state.run.group
        levels: dict[int, dict[int, list[RunState]]] = {}
        for state in runs:
            levels.setdefault(state.run.level, {}).setdefault(state.run.group, []).append(state)
        for level, groups in sorted(levels.items()):
            if len(groups) >= self._pace.fanout and level < LEVEL_MAX:
                some = sorted(groups)[: self._pace.fanout]  # so the greatest is in no other run of the next level
                return [state for group in some for state in groups[group]], level + 1, some[-1]
        if sum(len(state.dropped) for state in runs) >= self._pace.dropped_max:
            most = max(runs, key=lambda state: len(state.dropped))
            return [most], most.run.level, most.run.group
        return None

    # ---- questions -------------------------------------------------------------------------------

    async def find(self, hold: HoldId) -> SpilledPlace | None:
        """Return where a hold lies that was not brought. Raises: NotReadyError when a run can't be read."""
        for state in self._runs():
            try:
                if (place := await find_in_run(self._reader, state, hold)) is not None:
                    return place
            except MemqError as error:
                raise NotReadyError(f"run '{state.run.key}' can't be read now: {error}") from error
        return None

    async def first_due(self, target: Target, before_ms: int | None) -> int | None:
        """Return when the first hold of a target in a run is due, if that is before `before_ms`.

        Raises: NotReadyError when a run can't be read.
        """
        best = before_ms
        for state in sorted(self._runs(), key=self._due_ms):
            if best is not None and self._due_ms(state) >= best:
                break
            try:
                found = await self._first_in(state, target)
            except MemqError as error:
                raise NotReadyError(f"run '{state.run.key}' can't be read now: {error}") from error
            if found is not None and (best is None or found < best):
                best = found
        return best if best != before_ms else None

    async def _first_in(self, state: RunState, target: Target) -> int | None:
        index = await self._reader.index(state.run)
        known = next((each for each in index.targets if each.target == target), None)
        if known is None:
            return None
        due_ms, producer, first = known.first
        if known.first > state.at and HoldId(producer, first) not in state.dropped:
            return due_ms
        async for found in self._reader.blocks(state.run, state.at):
            for each in found:
                if each.target == target and each.block.id not in state.dropped:
                    return each.block.due_ms
        return None

    # ---- inside ----------------------------------------------------------------------------------

    def _may_try(self, what: str) -> bool:
        retry = self._retries.get(what)
        return retry is None or retry.at_s <= self._now_s()

    def _failed(self, what: str, text: str, error: MemqError) -> None:
        retry = self._retries.setdefault(what, _Retry())
        retry.tries += 1
        retry.at_s = self._now_s() + backoff_s(self._parts.runtime.random, retry.tries, base_s=0.5, most_s=RETRY_S_MAX)
        self._parts.events.warning("held-run-retry", f"{text}, try {retry.tries}: {error}")

    def _idle_s(self) -> float | None:
        """Return for how long there is nothing to do; a wall clock may jump, so not for long with runs."""
        if not self._spilled.runs and not self._retries:
            return None
        waits = [each.at_s - self._now_s() for each in self._retries.values()]
        now_ms = self._now_ms()
        waits += [(self._due_ms(each) - self._pace.near_ms - now_ms) / 1_000 for each in self._runs()]
        return min([TIMER_S_MAX, *(wait for wait in waits if wait > 0)])

    def _now_s(self) -> float:
        return self._parts.runtime.clock.monotonic()

    def _now_ms(self) -> int:
        return self._parts.runtime.clock.wall_ms()


class _LiveHolds:
    """The live holds of the objects of one run, in their order."""

    def __init__(self, reader: RunReader[RunEntry], states: list[RunState]) -> None:
        self.holds: list[RunEntry] = []
        self._blocks = self._read(reader, sorted(states, key=lambda state: state.run.first))

    async def _read(self, reader: RunReader[RunEntry], states: list[RunState]) -> AsyncIterator[list[RunEntry]]:
        for state in states:
            async for found in reader.blocks(state.run, state.at):
                yield [each for each in found if each.block.id not in state.dropped]

    async def fill(self) -> bool:
        """Read until there is a hold; false at the end."""
        while not self.holds:
            found = await anext(self._blocks, None)
            if found is None:
                return False
            self.holds = found
        return True

    def take(self, bound: RunPlace) -> list[RunEntry]:
        """Take the holds up to a place."""
        count = bisect_right(self.holds, bound, key=place_in_run)
        taken, self.holds = self.holds[:count], self.holds[count:]
        return taken


async def merged(reader: RunReader[RunEntry], states: Iterable[RunState]) -> AsyncIterator[list[RunEntry]]:
    """Yield the live holds of runs in their order."""
    groups: dict[tuple[int, int], list[RunState]] = {}
    for state in states:
        groups.setdefault((state.run.level, state.run.group), []).append(state)
    sources = [_LiveHolds(reader, some) for some in groups.values()]
    while sources := [each for each in sources if await each.fill()]:
        bound = min(each.holds[-1].place for each in sources)
        taken = [hold for each in sources for hold in each.take(bound)]
        yield sorted(taken, key=place_in_run)


def place_in_run(hold: RunEntry) -> RunPlace:
    """Return the place of a hold in the order of a run."""
    return hold.place


def _fitting(holds: Iterable[RunEntry]) -> list[RunEntry]:
    """Return the first holds that fit into a decision; at least one if there is any."""
    chosen: list[RunEntry] = []
    places: set[tuple[str, Target]] = set()
    cost = 0
    for each in holds:
        cost += BLOCK_COST
        if (each.key, each.target) not in places:
            places.add((each.key, each.target))
            cost += PLACE_COST + len(each.key) + len(each.target.topic) + len(each.target.topic_id)
        if chosen and cost > DECISION_BYTES:
            break
        chosen.append(each)
    return chosen


def _objects(holds: Iterable[RunEntry]) -> tuple[tuple[str, tuple[HeldLane, ...]], ...]:
    found: dict[str, dict[Target, list[HeldBlock]]] = {}
    for block, target, key in holds:
        found.setdefault(key, {}).setdefault(target, []).append(block)
    return tuple(
        (key, tuple(HeldLane(target, "", tuple(blocks)) for target, blocks in lanes.items()))
        for key, lanes in found.items()
    )


async def find_in_run(reader: RunReader[RunEntry], state: RunState, hold: HoldId) -> SpilledPlace | None:
    """Return where a hold lies in a run if it was not brought. Raises: as `RunReader`."""
    due_ms = due_time_of(hold.first)
    place = (due_ms, hold.producer, hold.first)
    if state.has(place):
        async for found in reader.blocks(state.run, (due_ms, hold.producer, hold.first - 1)):
            if found[0].place == place and place > state.at:
                return SpilledPlace(state.run.key, due_ms, found[0].target, found[0].block.counted)
            break
    return None
