"""The held records of one service partition at its owner: held, released and dropped (H1 to H3, H6).

Blocks that arrive together are stored in one object below `<cluster>/held/`, and held by one decision. The keeper
answers when the decision counts (S4). Due holds of a target become a unit. The keeper sends the units of a target in
the order of their numbers, each until the target has it (H3). Then the state forgets the unit.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from memq.errors import MemqError, ThrottledError
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.state_log.held_run import RunEntry
from memq.holds.cancels import CancelledHolds
from memq.holds.decisions import (
    HOLDS_MACHINE,
    DoneDecision,
    DropDecision,
    HoldDecision,
    HoldsDecision,
    HoldStagedDecision,
    HoldState,
    ReleaseDecision,
    ReleasedUnit,
    Unit,
    encode_decision,
)
from memq.holds.machine import HoldMachine, UnitCount
from memq.holds.run_keeper import RunKeeper, RunKeeperParts
from memq.holds.spilled_holds import SpilledPlace
from memq.holds.storing import DECISION_BYTES, PLACE_COST, ArrivingBlocks, NewHold
from memq.limits import MIB
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.state_log import Answer, known_outcome
from memq.state_log.state_log import StateLog
from memq.storage_handlers import StorageHandler

WAITING_MAX = 10_000_000  # in memory and in runs
HOLDS_MAX = 250_000  # in memory, 400 bytes each
HOLD_COST = 24  # bytes of a decision for a hold
UNIT_BLOCKS_MAX = 512  # as many as a pointer has ranges
UNIT_BYTES_MAX = 4 * MIB
TIMER_S_MAX = 5.0  # a wall clock may be set forward, or its machine may sleep: the due time is checked again
BACKOFF_S_MAX = 2.0
THROTTLE_RETRY_S = 0.1

Append = Callable[[ReleasedUnit], Awaitable[None]]  # returns when the log of the target has the unit, or is deleted


class Durations(Protocol):
    """Counts of durations."""

    def observe(self, seconds: float, count: int = 1, /) -> None:
        """Count a duration, `count` times."""
        ...


class DelayCounters(Protocol):
    """Counters of the delayed records of a broker.

    A new owner may count a unit a second time.
    """

    delayed_records: int
    delayed_delivered_records: int
    delayed_cancelled_records: int

    @property
    def delayed_late_seconds(self) -> Durations:
        """Durations in seconds from the due time of a record until its target has it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperParts:
    """The parts that a keeper uses.

    `key_valid_s` is the time after its first put in which an object may be named (ADR 6). `window_ms` returns the time
    in which a block may be sent again after its end. `shard` is the id of the service partition at the targets.
    `run_key` returns the key of a run's object, by its number of 64 bits. Keepers of one broker share `merging`.
    """

    cluster: str
    store: StorageHandler
    runtime: Runtime
    events: EventLog
    key_valid_s: float
    window_ms: Callable[[], int]
    append: Append
    counters: DelayCounters
    run_key: Callable[[int], str]
    shard: int = 0
    merging: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))


class HoldKeeper:
    """Answers for the held records of one service partition, while `log` is open.

    `tasks` run until it is closed.
    Raises: as `StateLog.propose`, but NotReadyError for an unknown outcome: each request may be repeated.
    """

    def __init__(self, log: StateLog, machine: HoldMachine, parts: KeeperParts, tasks: TaskOwner) -> None:
        self._log = log
        self._machine = machine
        self._parts = parts
        self._tasks = tasks
        self._arriving = ArrivingBlocks(parts, tasks, self._decide, self._held)
        self._cancelled = CancelledHolds(parts, tasks)
        self._due: dict[Target, list[tuple[int, int, int]]] = {}  # heaps of due time, producer and first sequence
        self._changed = asyncio.Event()  # a hold may be due earlier than all others
        self._sent: dict[Target, int] = {}  # the last number that each target has
        self._senders: dict[Target, asyncio.Task[None]] = {}
        self._finished: list[tuple[Target, int]] = []
        self._some_finished = asyncio.Event()
        self._some_done = asyncio.Event()  # replaced each time
        self._cancelling: set[HoldId] = set()
        self._deciding: Sequence[Unit] = ()  # units of a decision that does not count yet: their holds are in no heap
        self._expect_all()
        runs = RunKeeperParts(
            machine=machine,
            store=parts.store,
            runtime=parts.runtime,
            events=parts.events,
            key_valid_s=parts.key_valid_s,
            merging=parts.merging,
            propose=self._propose,
            brought=self._brought,
            moved=self._expect_all,
            new_key=lambda: parts.run_key(parts.runtime.random.getrandbits(64)),
        )
        self._runs = RunKeeper(runs)

    # ---- requests --------------------------------------------------------------------------------

    async def hold(self, holds: Sequence[NewHold]) -> list[HoldState]:
        """Hold blocks; return the state of each when the decision counts.

        A known block is not held again. Raises: as above; ThrottledError.
        """
        try:
            found = [self._machine.state_of(new.id) or self._state_of_arriving(new) for new in holds]
        finally:
            self._arriving.store()  # also if there is room for some only: else these would wait for the next request
        return [each if isinstance(each, HoldState) else await _state_of(each) for each in found]

    def _state_of_arriving(self, new: NewHold) -> asyncio.Future[Answer]:
        return self._arriving.pending(new.id) or self._arriving.take(new, self._check_room)

    async def hold_staged(self, key: str, lanes: Sequence[HeldLane]) -> Sequence[HoldState]:
        """Hold parts in the staged objects of manifest `key`; return the states when the decision counts.

        Raises: as above; ThrottledError.
        """
        self._check_room()
        now_ms = self._now_ms()
        decision = HoldStagedDecision(key, now_ms - self._parts.window_ms(), now_ms, tuple(lanes))
        answers: Sequence[HoldState] = await self._propose(decision)  # type: ignore[assignment]  # as the machine says
        return answers

    async def until_done(self, lane: str, within_s: float) -> bool:
        """Wait at most `within_s` until all targets have the released units of a lane; return whether."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self._machine.is_on_its_way(lane):
                    await self._some_done.wait()
        return not self._machine.is_on_its_way(lane)

    async def cancel(self, holds: Sequence[HoldId], target: Target) -> list[HoldState | None]:
        """Drop delayed holds of a target; return the state of each after that (H2).

        It is None for those that are not known, and for those of other targets and of transactions: permissions are for
        the target of the request. The store has those that are dropped, too: a restore does not bring them again (S9).
        """
        states: dict[HoldId, HoldState | None] = {}
        left = dict.fromkeys(holds)
        while left:
            known = {each for each in left if each in self._machine.open}  # one may move while others are searched for
            places = {each: await self._place(each) for each in left}
            known |= {each for each in left if each in self._machine.open}
            for each in [each for each, place in places.items() if self._is_foreign(each, place, target)]:
                states[each] = None
                del left[each], places[each]
            if places:
                states |= await self._drop(places)
            for each in list(left):
                missed = states[each] is None and each in known  # it moved into a run meanwhile
                if not missed and states[each] is not HoldState.HELD:  # a merge has replaced its run
                    del left[each]
        dropped = [each for each, state in states.items() if state is HoldState.DROPPED]
        if dropped:  # also those of an earlier cancel: its object may not have been stored
            await self._cancelled.store(dropped)
        return [states[each] for each in holds]

    def _is_foreign(self, hold: HoldId, place: SpilledPlace | None, target: Target) -> bool:
        """Whether a waiting hold is of another target or of a transaction. Targets never change."""
        known = self._machine.open.get(hold)
        if known is not None:
            return known.target != target or bool(known.lane)
        return place is not None and place.target != target

    async def _place(self, hold: HoldId) -> SpilledPlace | None:
        """Return the place of a hold in a run, None if it is in no run. Its id has its due time (H6)."""
        return None if self._machine.state_in_memory(hold) else await self._runs.find(hold)

    async def _drop(self, places: Mapping[HoldId, SpilledPlace | None]) -> dict[HoldId, HoldState | None]:
        """Propose to drop holds, and return their states."""
        found = tuple(places.values()) if any(places.values()) else ()
        decision = DropDecision(self._now_ms(), tuple(places), found)
        fresh = {each for each, place in places.items() if place or each in self._machine.open} - self._cancelling
        self._cancelling |= fresh
        try:
            answers = await self._propose(decision)
        finally:
            self._cancelling -= fresh
        states = dict(zip(places, answers, strict=True))  # type: ignore[call-overload]  # the machine answers with states
        self._parts.counters.delayed_cancelled_records += sum(states[each] is HoldState.DROPPED for each in fresh)
        self._runs.wake()
        return states

    @property
    def waiting_count(self) -> int:
        """Number of delayed records that wait."""
        return self._machine.waiting_count

    def overdue_s(self) -> float:
        """Return the age in seconds of the oldest due record that its target does not have yet; or 0."""
        units = [each for found in self._machine.units.values() for each in found.values() if each.holds]
        left = (each for each in units if each.unit.r > self._sent.get(each.unit.target, 0))
        released = (each.holds[0].block.due_ms for each in left)  # those of a unit are in the order of their due times
        waiting = (self._first_due(target) for target in list(self._machine.waiting))
        due_ms = min((each for each in (*released, *waiting, self._runs.overdue_ms()) if each), default=None)
        return 0.0 if due_ms is None else max(0.0, (self._now_ms() - due_ms) / 1_000)

    async def prove(self) -> None:
        """Wait for a proof (S6). Read the counts at once then, before the next await."""
        await known_outcome(self._log.fresh())

    async def all_waiting(self) -> dict[Target, tuple[int, int]]:
        """Return the same as `waiting` for all topics, without a proof: a former owner may answer."""
        found: dict[Target, tuple[int, int]] = {}
        for target, count in list(self._machine.waiting.items()):
            due_ms = self._first_due(target)
            found[target] = count, await self._runs.first_due(target, due_ms) or due_ms or 0
        return found

    async def waiting(self, topic_id: str, *, undelivered: bool = False) -> dict[Target, tuple[int, int]]:
        """Return the number of waiting holds of each partition of a topic, and the next due time.

        The due time is in Unix ms; 0 for none. With `undelivered`, partitions with a hold that is not done are in the
        answer, too, with the count 0.
        """
        await known_outcome(self._log.fresh())
        others = dict.fromkeys(self._machine.undelivered() if undelivered else (), (0, 0))
        found = others | await self.all_waiting()
        return {target: each for target, each in found.items() if target.topic_id == topic_id}

    @property
    def shard(self) -> int:
        """The id of the service partition at the targets."""
        return self._parts.shard

    async def state_of(self, hold: HoldId, topic_id: str = "") -> HoldState | None:
        """Return the state of a hold, None for an unknown one.

        With `topic_id`, it is None for holds of other topics, and for those that have ended: their topic is not known.
        Raises: as `RunKeeper.find`.
        """
        await known_outcome(self._log.fresh())
        known, target = self._machine.state_of(hold), self._machine.target_of(hold)
        ended = known is not None and known is not HoldState.HELD
        if target is None and not ended and (known is None or topic_id):
            dropped = any(hold in state.dropped for state in self._machine.spilled.runs.values())
            place = None if dropped else await self._runs.find(hold)
            known, target = (known, None) if place is None else (HoldState.HELD, place.target)
        if topic_id and (target is None or target.topic_id != topic_id):
            return None
        return known

    async def units(self, topic_id: str) -> dict[Target, UnitCount]:
        """Return the units of each partition of a topic."""
        await known_outcome(self._log.fresh())
        known = {**self._machine.numbers, **self._machine.dropped}
        return {target: self._machine.count_of(target) for target in known if target.topic_id == topic_id}

    # ---- holding ---------------------------------------------------------------------------------

    def _check_room(self) -> None:
        """Raises: ThrottledError when too many records wait."""
        near, waiting = len(self._machine.open) + len(self._arriving), self.waiting_count + len(self._arriving)
        for held, most, which in ((waiting, WAITING_MAX, "wait"), (near, HOLDS_MAX, "are due soon")):
            if held >= most:
                raise ThrottledError(
                    f"{held} delayed records of this service partition {which}, {most} are allowed",
                    hint="spread them over more partitions of the topic, or send them later",
                )

    def _held(self, new: NewHold, state: Answer) -> None:
        """Schedule the release of a block that is held now."""
        if state is HoldState.HELD:
            self._expect(new.target, new.id, new.due_ms)
            self._parts.counters.delayed_records += bool(new.due_ms)
            self._runs.wake()

    async def _decide(self, key: str, lanes: Sequence[HeldLane]) -> Sequence[Answer]:
        """Propose to hold the blocks of an object."""
        decision = HoldDecision(key, self._now_ms() - self._parts.window_ms(), tuple(lanes))
        return await self._propose(decision)  # type: ignore[return-value]  # the machine answers with states

    # ---- releasing -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Release due holds until cancelled. Raises: MemqError when the log has ended."""
        self._tasks.start(self._finish(), "finish units")
        self._tasks.start(self._keep_runs(), "runs of held records")
        for target in self._machine.units:
            self._send_to(target)
        while True:
            self._deciding = units = self._due_units()
            if not units:
                await self._wait_until_due()
                continue
            pause_s = 0.0
            try:
                await self._propose(ReleaseDecision(tuple(units)))
            except ThrottledError:
                pause_s = THROTTLE_RETRY_S
            for unit in units:  # a commit may have taken the number of a unit meanwhile, which then changes nothing
                self._expect_again(unit)
            self._deciding = ()
            self._runs.wake()
            for target in dict.fromkeys(unit.target for unit in units):
                self._send_to(target)
            if pause_s:
                await asyncio.sleep(pause_s)

    def carry_out(self) -> None:
        """Send all released units to their targets. A decision about transactions may have released some."""
        if not self._tasks.stopped:
            for target in self._machine.units:
                self._send_to(target)

    def _expect(self, target: Target, hold: HoldId, due_ms: int) -> None:
        if due_ms:
            heapq.heappush(self._due.setdefault(target, []), (due_ms, hold.producer, hold.first))
            self._changed.set()

    def _expect_all(self) -> None:
        """Schedule the release of all holds in memory, and of no others."""
        self._due.clear()
        for hold in self._machine.open.values():
            if hold.block.due_ms:
                self._due.setdefault(hold.target, []).append((hold.block.due_ms, *_id_of(hold.block)))
        for heap in self._due.values():
            heapq.heapify(heap)

    def _brought(self, holds: Iterable[RunEntry]) -> None:
        """Schedule the release of holds that were brought from a run."""
        for block, target, _ in holds:
            if block.id in self._machine.open:
                self._expect(target, block.id, block.due_ms)

    async def _keep_runs(self) -> None:
        with suppress(MemqError):  # the log has ended: the next owner continues
            await self._runs.run()

    def _expect_again(self, unit: Unit) -> None:
        """Expect the holds of a unit that are not released."""
        for hold in unit.holds:
            known = self._machine.open.get(hold)
            if known is not None:
                self._expect(unit.target, hold, known.block.due_ms)

    def _first_due(self, target: Target) -> int | None:
        """Return when the next hold of a target is or was due that is not released."""
        deciding = (hold for unit in self._deciding if unit.target == target for hold in unit.holds)
        known = next((found for hold in deciding if (found := self._machine.open.get(hold)) is not None), None)
        return known.block.due_ms if known is not None else self._next_due(target)

    def _next_due(self, target: Target) -> int | None:
        """Return when the next hold of a target is due; forget those that were dropped."""
        heap = self._due.get(target)
        while heap:
            due_ms, producer, first = heap[0]
            known = self._machine.open.get(HoldId(producer, first))
            if known is not None and known.block.due_ms == due_ms:
                return due_ms
            heapq.heappop(heap)
        self._due.pop(target, None)
        return None

    def _due_units(self) -> list[Unit]:
        """Take what is due now out of the heaps, as units of one decision."""
        now_ms, room, units = self._now_ms(), DECISION_BYTES, list[Unit]()
        for target in list(self._due):
            due_ms = self._next_due(target)
            number = self._machine.next_number(target)
            while due_ms is not None and due_ms <= now_ms and room > 0:
                holds, size = list[HoldId](), 0
                while due_ms is not None and due_ms <= now_ms and len(holds) < UNIT_BLOCKS_MAX and room > 0:
                    _, producer, first = self._due[target][0]
                    hold = HoldId(producer, first)
                    size += self._machine.open[hold].block.length
                    if holds and size > UNIT_BYTES_MAX:
                        break
                    heapq.heappop(self._due[target])
                    if hold not in holds[-1:]:  # a hold whose object was replaced is expected twice
                        holds.append(hold)
                        room -= HOLD_COST
                    due_ms = self._next_due(target)
                units.append(Unit(target, number, tuple(holds)))
                number += 1
                room -= PLACE_COST + len(target.topic) + len(target.topic_id)
        return units

    async def _wait_until_due(self) -> None:
        """Wait until the next hold is due, or another one may be due earlier."""
        self._changed.clear()
        known = [due_ms for target in list(self._due) if (due_ms := self._next_due(target)) is not None]
        wait_s = min(max(min(known) - self._now_ms(), 0) / 1_000, TIMER_S_MAX) if known else TIMER_S_MAX
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._changed.wait()

    # ---- carrying out ----------------------------------------------------------------------------

    def _send_to(self, target: Target) -> None:
        """Carry out the units of a target, unless a task does so already."""
        if target in self._machine.units and target not in self._senders:
            task = self._tasks.start(self._send(target), f"release to {target.topic}/{target.partition}")
            self._senders[target] = task
            task.add_done_callback(lambda task: self._senders.pop(target, None))

    async def _send(self, target: Target) -> None:
        """Bring the units of a target into its log, in the order of their numbers (H3)."""
        while (released := self._next_unit(target)) is not None:
            await self._append(released)
            self._count_delivered(released)
            self._sent[target] = released.unit.r
            self._finished.append((target, released.unit.r))
            self._some_finished.set()

    def _next_unit(self, target: Target) -> ReleasedUnit | None:
        sent = self._sent.get(target, 0)
        units: Mapping[int, ReleasedUnit] = self._machine.units.get(target, {})
        number = min((r for r in units if r > sent), default=0)
        return units.get(number)

    async def _append(self, released: ReleasedUnit) -> None:
        """Append a unit at its target; try again without limit."""
        tries, unit = 0, released.unit
        while True:
            try:
                await self._parts.append(released)
            except (MemqError, TimeoutError) as error:
                tries += 1
                text = f"unit {unit.r} of topic '{unit.target.topic}' partition {unit.target.partition}"
                self._parts.events.warning("release-retry", f"{text}, try {tries}: {error!r}")
                delay_s = backoff_s(self._parts.runtime.random, tries, base_s=0.05, most_s=BACKOFF_S_MAX)
                await asyncio.sleep(delay_s)
            else:
                return

    def _count_delivered(self, released: ReleasedUnit) -> None:
        now_ms, counters = self._now_ms(), self._parts.counters
        for hold in released.holds:
            if hold.block.due_ms:
                counters.delayed_delivered_records += 1
                counters.delayed_late_seconds.observe(max(0, now_ms - hold.block.due_ms) / 1_000)

    async def _finish(self) -> None:
        """Decide that units are done, many at once."""
        while True:
            self._some_finished.clear()
            finished, self._finished = self._finished[:UNIT_BLOCKS_MAX], self._finished[UNIT_BLOCKS_MAX:]
            if not finished:
                await self._some_finished.wait()
                continue
            try:
                await self._propose(DoneDecision(self._now_ms(), tuple(finished)))
            except ThrottledError:
                self._finished[:0] = finished  # in order: the counts of a target are those up to a number
                await asyncio.sleep(THROTTLE_RETRY_S)
            except MemqError:
                return  # the log has ended: the next owner asks the targets again
            self._some_done.set()
            self._some_done = asyncio.Event()
            for target in dict.fromkeys(target for target, _ in finished):
                if target not in self._machine.units:
                    self._sent.pop(target, None)

    # ---- inside ----------------------------------------------------------------------------------

    async def _propose(self, decision: HoldsDecision) -> Answer:
        return await known_outcome(self._log.propose(HOLDS_MACHINE, encode_decision(decision)))

    def _now_ms(self) -> int:
        return self._parts.runtime.clock.wall_ms()


async def _state_of(arriving: asyncio.Future[Answer]) -> HoldState:
    state = await asyncio.shield(arriving)
    assert isinstance(state, HoldState), "the machine answers with states"
    return state


def _id_of(block: HeldBlock) -> tuple[int, int]:
    return block.id.producer, block.id.first
