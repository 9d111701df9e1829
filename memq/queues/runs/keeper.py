"""Moves blocks of queue items into runs, and back, at the owner of their shard.

Memory has the first items of each lane. Two tasks do the rest. One *spills* the blocks behind the first KEEP_ITEMS of a
long lane: RUN_BLOCKS of them are a run. The other one *brings* blocks: those that requests name first, then those of a
run that was named late, then the next ones of lanes with less than AHEAD_ITEMS ahead.

A run that can't be read is asked for again and again. Other items do not wait for its items meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

from memq.errors import CorruptDataError, MemqError, NotReadyError
from memq.format.held_object import HoldId
from memq.format.state_log.queue_run import QUEUE_ROWS, QueueRunEntry
from memq.format.state_log.run import RunPlace
from memq.queues.block import QueueBlock, lane_of, may_move
from memq.queues.decisions import RunsDecision
from memq.queues.runs.spilled import (
    BringBlocksDecision,
    BroughtBlock,
    QueueLane,
    RunHead,
    SpillBlocksDecision,
    SpilledRun,
    bytes_of,
)
from memq.queues.scheduler import ItemScheduler, Moment
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.state_log import Answer
from memq.state_log.run_store import RunOutput, RunReader
from memq.storage_handlers import StorageHandler

KEEP_ITEMS = 4_096  # the first ones of a lane stay in memory
RUN_BLOCKS = 4_096  # of one run; fewer are not worth a PUT
AHEAD_ITEMS = 1_024  # while fewer of a lane are ahead, more are brought
BRING_ITEMS = 4_096  # at once
BRING_BYTES = 40 * 1_024  # of a decision: an entry of the log has 64 KiB
BLOCK_COST = 64  # bytes of a block in a decision, without its strings
PICKED_AT_ONCE = 128  # blocks of one decision
NEAR_S = 60.0  # blocks that are due later are not brought
SCANNED_AT_ONCE = 1_000  # blocks
DUE_S = 5.0  # a dequeue that finds nothing else waits for a run at most so long
PAUSE_S = 0.02  # between two checks of the lanes
RETRY_S_MAX = 30.0
TIMER_S_MAX = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPace:
    """When blocks move: see the constants."""

    keep_items: int = field(default_factory=lambda: KEEP_ITEMS)
    run_blocks: int = field(default_factory=lambda: RUN_BLOCKS)
    ahead_items: int = field(default_factory=lambda: AHEAD_ITEMS)
    bring_items: int = field(default_factory=lambda: BRING_ITEMS)
    near_ms: int = field(default_factory=lambda: int(NEAR_S * 1_000))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRunsParts:
    """The parts that `BlockRuns` uses.

    `propose` puts a decision into the log. `is_pending` returns whether a block is being stored. `brought` is called
    when blocks are in memory again. `new_key` returns the key of another run.
    """

    scheduler: ItemScheduler
    store: StorageHandler
    runtime: Runtime
    events: EventLog
    key_valid_s: float
    propose: Callable[[RunsDecision], Awaitable[Answer]]
    is_pending: Callable[[HoldId], bool]
    brought: Callable[[], None]
    new_key: Callable[[], str]


@dataclass(slots=True)
class _BlockRequest:
    """Blocks that a request names, or queues whose due blocks it needs; `done` has its end."""

    blocks: Collection[int]
    queues: Collection[str]
    done: asyncio.Future[None]


@dataclass(slots=True)
class _Failures:
    """A run or a kind of work that failed `tries` times, and waits until `at_s`."""

    tries: int = 0
    at_s: float = 0.0


class BlockRuns:
    """See the module. `bring` and `spill` run until they are cancelled, or the log has ended."""

    def __init__(self, parts: BlockRunsParts, pace: BlockPace | None = None) -> None:
        self._parts = parts
        self._scheduler = parts.scheduler
        self._machine = parts.scheduler.machine
        self._spilled = self._machine.spilled
        self._pace = pace or BlockPace()
        self._reader = RunReader(parts.store, QUEUE_ROWS, parts.events)
        self._changed = asyncio.Event()
        self._grown = asyncio.Event()
        self._asked = asyncio.Event()
        self._requests: list[_BlockRequest] = []
        self._is_closed = False
        self._ahead: dict[QueueLane, dict[int, None]] = {}  # blocks that were brought, or kept, in their order
        self._kept = 0  # blocks in memory after the last scan
        self._failures: dict[str, _Failures] = {}  # by key of a run, or kind of work
        self._late: set[str] = set()  # runs that were named so late that the sweep may have taken them
        self._unsure: set[int] = set()  # blocks of decisions without an answer, which may count

    def wake(self) -> None:
        """Note that items came into memory, or left it."""
        if self._spilled.runs:
            self._changed.set()
        if len(self._machine.blocks) >= self._kept + self._pace.run_blocks:
            self._grown.set()

    # ---- requests --------------------------------------------------------------------------------

    async def pick(self, blocks: Iterable[int]) -> None:
        """Bring blocks that a request names. Raises: NotReadyError if their run can't be read now."""
        if self._spilled.runs and (wanted := {id_ for id_ in blocks if self._spilled.run_of(id_) is not None}):
            await self._ask(wanted, ())

    async def bring_due(self, queues: Iterable[str], now: Moment) -> bool:
        """Bring the first due blocks of queues; whether that took no longer than DUE_S, and there were any.

        A run that can't be read is passed over.
        Raises: NotReadyError.
        """
        wanted = [queue for queue in queues if self._scheduler.due_heads(queue, now)] if self._spilled.runs else []
        if not wanted:
            return False
        with suppress(TimeoutError):
            async with asyncio.timeout(DUE_S):
                await self._ask((), wanted)
                return True
        return False

    async def _ask(self, blocks: Collection[int], queues: Collection[str]) -> None:
        if self._is_closed:
            raise NotReadyError("the service partition of this queue moves")
        request = _BlockRequest(blocks, queues, asyncio.get_running_loop().create_future())
        self._requests.append(request)
        self._asked.set()
        self._changed.set()
        await request.done

    async def _serve(self) -> bool:
        """Answer the first request; whether there was one."""
        if not self._requests:
            return False
        request = self._requests[0]
        try:
            await self._pick(request.blocks)
            for queue in request.queues:
                for head in self._first_heads(self._spilled.heads(queue)):
                    if head.due_ms <= self._now_ms():
                        await self._bring_next(self._spilled.runs[head.run])
        except MemqError as error:
            _refuse(request, f"a run of queue items can't be read now: {error}")
        if not request.done.done():
            request.done.set_result(None)
        self._requests.remove(request)
        return True

    async def _pick(self, blocks: Iterable[int]) -> None:
        """Bring blocks out of the order of their runs. Raises: as `RunReader`, and as the log."""
        for id_ in blocks:
            state = self._spilled.run_of(id_)
            if state is None:
                continue
            wanted = state.ids.intersection(blocks)
            found = [each async for some in self._reader.blocks(state.run, state.at) for each in some]
            chosen = [each for each in found if each.block.id.producer in wanted]
            if len(chosen) < len(wanted):
                raise CorruptDataError(f"run '{state.run.key}' lacks block {id_:016x}, which its state names")
            for at in range(0, len(chosen), PICKED_AT_ONCE):
                some = chosen[at : at + PICKED_AT_ONCE]
                left = (each.place for each in found if each.block.id.producer in state.ids and each not in some)
                await self._propose(state, state.at, next(left, state.run.last), some)

    # ---- out of runs -----------------------------------------------------------------------------

    async def bring(self) -> None:
        """Bring blocks."""
        self._is_closed = False
        try:
            while True:
                self._changed.clear()
                self._asked.clear()
                self._note_unsure()
                if await self._serve() or await self._bring_ahead():
                    continue
                await self._until(self._asked, PAUSE_S)
                if not self._requests:
                    await self._until(self._changed, self._idle_s())
        finally:
            self._is_closed = True
            for request in self._requests:
                _refuse(request, "the service partition of this queue moves")
            self._requests.clear()

    async def _bring_ahead(self) -> bool:
        """Bring the next blocks of a lane that has few ahead; whether there was one."""
        for key in self._late & self._spilled.runs.keys():
            if self._may_try(key):
                return await self._bring_next(self._spilled.runs[key])
        until_ms = self._now_ms() + self._pace.near_ms
        heads = (RunHead(each.lane, each.head, each.run.key) for each in self._spilled.runs.values())
        for head in self._first_heads(heads):
            if head.due_ms <= until_ms and self._items_ahead(head) < self._pace.ahead_items:
                return await self._bring_next(self._spilled.runs[head.run])
        return False

    def _first_heads(self, heads: Iterable[RunHead]) -> list[RunHead]:
        """Return the first head of each lane, of runs that may be read now."""
        found: dict[QueueLane, RunHead] = {}
        for head in heads:
            known = found.get(head.lane)
            if (known is None or head.place < known.place) and self._may_try(head.run):
                found[head.lane] = head
        return sorted(found.values(), key=lambda head: head.place)

    def _items_ahead(self, head: RunHead) -> int:
        """Return how many items are in memory before a place in runs, counted up to `ahead_items`."""
        known, items, gone = self._ahead.get(head.lane, {}), 0, list[int]()
        for id_ in known:
            block = self._machine.blocks.get(id_)
            if block is None or block.is_touched:
                gone.append(id_)
            elif (block.block.due_ms, block.arrival) < head.place[:2]:
                items += block.left
                if items >= self._pace.ahead_items:
                    break
        for id_ in gone:
            del known[id_]
        return items

    async def _bring_next(self, state: SpilledRun) -> bool:
        """Bring the next blocks of a run. While it can't be read, other items do not wait for it."""
        try:
            chosen, to, head = await self._next_of(state)
        except MemqError as error:
            self._scheduler.unread.add(state.run.key)
            self._failed(state.run.key, f"run '{state.run.key}' can't be read", error)
            self._parts.brought()
            return True
        self._failures.pop(state.run.key, None)
        self._scheduler.unread.discard(state.run.key)
        await self._propose(state, to, head, chosen)
        self._ahead.setdefault(state.lane, {}).update(dict.fromkeys(each.block.id.producer for each in chosen))
        if state.run.key not in self._spilled.runs:
            self._late.discard(state.run.key)
            if all(each.lane != state.lane for each in self._spilled.of_queue(state.lane.queue)):
                self._ahead.pop(state.lane, None)
        return True

    async def _next_of(self, state: SpilledRun) -> tuple[list[QueueRunEntry], RunPlace, RunPlace]:
        """Return the next blocks of a run, the last place of these, and the place of the block behind them.

        Raises: as `RunReader`; CorruptDataError.
        """
        chosen: list[QueueRunEntry] = []
        items = size = 0
        async for entries in self._reader.blocks(state.run, state.at):
            for each in entries:
                if each.block.id.producer not in state.ids:
                    continue
                size += BLOCK_COST + len(each.key) + len(each.lane.encode())
                if chosen and (items >= self._pace.bring_items or size > BRING_BYTES):
                    return chosen, chosen[-1].place, each.place
                chosen.append(each)
                items += each.block.next - each.block.id.first
        if len(chosen) < len(state.ids):
            raise CorruptDataError(f"run '{state.run.key}' has {len(chosen)} of {len(state.ids)} blocks")
        return chosen, state.run.last, state.run.last

    async def _propose(self, state: SpilledRun, to: RunPlace, head: RunPlace, chosen: Sequence[QueueRunEntry]) -> None:
        """Bring blocks of a run. Raises: as the log."""
        blocks = tuple(BroughtBlock(each.arrival, each.key, each.lane, each.block) for each in chosen)
        ids = [each.block.id.producer for each in blocks]
        self._unsure.update(ids)
        await self._parts.propose(BringBlocksDecision(state.run.key, state.at, to, head, blocks))
        self._note_unsure()
        self._unsure.difference_update(ids)

    def _note_unsure(self) -> None:
        """Schedule blocks that are in memory again, also those of a decision whose answer was lost."""
        found = [id_ for id_ in self._unsure if id_ in self._machine.blocks]
        now = self._now()
        for id_ in found:
            self._scheduler.enqueued(id_, now)
        self._unsure.difference_update(found)
        if found:
            self._parts.brought()

    # ---- into runs -------------------------------------------------------------------------------

    async def spill(self) -> None:
        """Spill blocks."""
        while True:
            self._grown.clear()
            if len(self._machine.blocks) >= self._kept + self._pace.run_blocks and self._may_try("spill"):
                await self._spill_lanes()
            await self._until(self._grown, RETRY_S_MAX if "spill" not in self._failures else 1.0)
            await asyncio.sleep(PAUSE_S)

    async def _spill_lanes(self) -> None:
        lanes: dict[QueueLane, list[QueueBlock]] = {}
        for number, block in enumerate(list(self._machine.blocks.values()), 1):
            if may_move(block) and not self._parts.is_pending(block.block.id):
                lanes.setdefault(lane_of(block), []).append(block)
            if number % SCANNED_AT_ONCE == 0:
                await asyncio.sleep(0)  # let the event loop do other work
        for lane, blocks in lanes.items():
            if len(blocks) > self._pace.run_blocks and not await self._spill_lane(lane, blocks):
                return
        self._kept = len(self._machine.blocks)

    async def _spill_lane(self, lane: QueueLane, blocks: list[QueueBlock]) -> bool:
        """Spill the blocks of a lane that are not among the first ones, in whole runs; whether that worked."""
        blocks.sort(key=lambda block: (block.block.due_ms, block.arrival))
        at = items = 0
        while at < len(blocks) and items < self._pace.keep_items:
            items += blocks[at].count
            at += 1
        self._ahead.setdefault(lane, {}).update(dict.fromkeys(block.number for block in blocks[:at]))
        while at + self._pace.run_blocks <= len(blocks):
            if not await self._spill(lane, blocks[at : at + self._pace.run_blocks]):
                return False
            at += self._pace.run_blocks
        return True

    async def _spill(self, lane: QueueLane, blocks: Sequence[QueueBlock]) -> bool:
        entries = [
            QueueRunEntry(block.block, block.target, block.key, block.lane, block.arrival)
            for block in blocks
            if self._machine.blocks.get(block.number) is block and may_move(block)
        ]
        if not entries:
            return True
        output, began_s = RunOutput(self._parts.store, QUEUE_ROWS, self._parts.new_key), self._now_s()
        try:
            await output.add(entries)
            stored = await output.finish()
            if self._now_s() - began_s > self._parts.key_valid_s:
                raise NotReadyError(f"the store took over {self._parts.key_valid_s:g} s for it")
        except MemqError as error:
            self._failed("spill", "blocks of queue items stay in memory", error)
            return False
        self._failures.pop("spill", None)
        try:
            ids = iter([each.block.id.producer for each in entries])
            for run in stored:
                await self._parts.propose(SpillBlocksDecision(run, lane, bytes_of(islice(ids, run.count))))
        finally:
            self._scheduler.spilled(lane.queue)
            if self._now_s() - began_s > self._parts.key_valid_s:  # the sweep may take the runs (ADR 6)
                self._late.update(run.key for run in stored)
                self._parts.events.warning("queue-run-late", f"'{stored[0].key}' was named late, and is brought back")
            self._changed.set()
        return True

    # ---- inside ----------------------------------------------------------------------------------

    async def _until(self, event: asyncio.Event, within_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await event.wait()

    def _may_try(self, what: str) -> bool:
        failures = self._failures.get(what)
        return failures is None or failures.at_s <= self._now_s()

    def _failed(self, what: str, text: str, error: MemqError) -> None:
        failures = self._failures.setdefault(what, _Failures())
        failures.tries += 1
        failures.at_s = self._now_s() + backoff_s(
            self._parts.runtime.random, failures.tries, base_s=0.5, most_s=RETRY_S_MAX
        )
        self._parts.events.warning("queue-run-retry", f"{text}, try {failures.tries}: {error}")

    def _idle_s(self) -> float:
        """Return for how long there is nothing to do without a change; a wall clock may jump, so not for long."""
        waits = [each.at_s - self._now_s() for each in self._failures.values()]
        now_ms = self._now_ms()
        waits += [(each.head[0] - self._pace.near_ms - now_ms) / 1_000 for each in self._spilled.runs.values()]
        return min([TIMER_S_MAX, *(wait for wait in waits if wait > 0)])

    def _now(self) -> Moment:
        return Moment(self._now_ms(), self._now_s())

    def _now_s(self) -> float:
        return self._parts.runtime.clock.monotonic()

    def _now_ms(self) -> int:
        return self._parts.runtime.clock.wall_ms()


def _refuse(request: _BlockRequest, text: str) -> None:
    if not request.done.done():
        request.done.set_exception(NotReadyError(text))
        request.done.exception()  # its caller may have been cancelled
