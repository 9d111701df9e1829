"""The queue items of one service partition at its owner: enqueued, granted, acked (Q1 to Q5).

Blocks of items that arrive together go into one object, and become one decision. Each request is a decision of its own;
those that wait share the next entry of the log. A grant is handed out, and an ack is answered, when its entry counts.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from memq.errors import (
    CorruptDataError,
    MemqError,
    NotFoundError,
    NotReadyError,
    QueueFullError,
    RetryableError,
    ThrottledError,
)
from memq.format.blocks.header import check_block
from memq.format.held_object import HeldBlock, HeldLane
from memq.holds.storing import ArrivingBlocks, NewHold
from memq.limits import MIB
from memq.queues.decisions import (
    QUEUES_MACHINE,
    AckDecision,
    CancelDecision,
    EndDecision,
    EnqueueDecision,
    ExtendDecision,
    GrantDecision,
    GrantedBlock,
    ItemOutcome,
    ItemRanges,
    ItemState,
    LeasedItems,
    NackDecision,
    NackKind,
    QueueDecision,
    encode_decision,
)
from memq.queues.machine import QueueMachine
from memq.queues.meter import QueueCounters, QueueCounts, QueueMeter, dues_of, sum_of
from memq.queues.scheduler import ItemScheduler, Moment
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.state_log import Answer, known_outcome
from memq.state_log.state_log import StateLog
from memq.storage_handlers import StorageHandler

BLOCKS_MAX = 250_000  # of items that are not over, in a service partition: about 600 bytes of memory each
ENDED_BLOCKS_MAX = 250_000  # that are known
ENDED_KNOWN_MS = 600_000  # a request that comes again later than this may get the answer "unknown"
RECENT_BYTES_MAX = 32 * MIB  # of recent blocks
ANSWER_BYTES_MAX = 2 * MIB  # of the blocks in one answer
READ_TIMEOUT_S = 20.0
TIMER_S_MAX = 5.0  # a wall clock may be set forward, or its machine may sleep
FAILED_PAUSE_S = 1.0
COUNTED_AT_ONCE = 2_000  # blocks
READY_CHECK_S = 1.0  # a keeper that is closed wakes nobody
EPOCH_GRANTS = 1 << 24  # grants of an epoch begin here: a restore of an older state gives none of them again


Result = TypeVar("Result")


class Delivered(NamedTuple):
    """Granted items of one block, the number of the grant, and the bytes of the block."""

    grant: int
    found: GrantedBlock
    data: bytes


class RecentPayloads:
    """The bytes of recent blocks, so that most items are never read from the store."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0

    def get(self, block: int) -> bytes | None:
        """Return the bytes of a block, None if they are not here."""
        return self._blocks.get(block)

    def keep(self, block: int, data: bytes) -> None:
        """Keep a block; the oldest ones go at the bound."""
        self.drop(block)
        self._blocks[block] = data
        self._bytes += len(data)
        while self._bytes > RECENT_BYTES_MAX:
            self.drop(next(iter(self._blocks)))

    def drop(self, block: int) -> None:
        """Forget a block."""
        self._bytes -= len(self._blocks.pop(block, b""))


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueParts:
    """The parts that a keeper uses.

    `key_valid_s`: how long after its first put an object may be named (ADR 6). Keepers of one broker share `recent`.
    `begin` lets `run` work: a shard without items has no task. Indexes of objects state no `shard`: the name of a queue
    gives it. `number` is that of the service partition.
    """

    cluster: str
    store: StorageHandler
    runtime: Runtime
    events: EventLog
    key_valid_s: float
    recent: RecentPayloads
    begin: Callable[[], None]
    counters: QueueCounters
    number: int
    shard: int = 0


class QueueKeeper:
    """Answers for the queue items of one service partition, while `log` is open in `epoch`.

    `tasks` run until it is closed.
    Raises: as `StateLog.propose`, but NotReadyError for an unknown outcome: each request may be repeated.
    """

    def __init__(self, log: StateLog, machine: QueueMachine, parts: QueueParts, tasks: TaskOwner, epoch: int) -> None:
        self._log = log
        self._machine = machine
        self._parts = parts
        self._tasks = tasks
        self.meter = QueueMeter(parts.counters, parts.runtime.clock, parts.number)
        self._last_grant = max(machine.last_grant, epoch * EPOCH_GRANTS)
        self._scheduler = ItemScheduler(machine, self._now())
        self._arriving = ArrivingBlocks(parts, tasks, self._decide_enqueue, self._enqueued)
        self._changed = asyncio.Event()  # an item may be ready earlier than expected
        self._some_ready = asyncio.Event()  # replaced each time
        self._has_begun = bool(machine.blocks)
        if self._has_begun:
            parts.begin()

    # ---- enqueue ---------------------------------------------------------------------------------

    async def enqueue(self, blocks: Sequence[NewHold]) -> None:
        """Put blocks of items into their queues; return when that counts.

        A block that comes again changes nothing.

        Raises: as above; QueueFullError, ThrottledError.
        """
        try:
            waiting = [
                self._arriving.pending(new.id) or self._arriving.take(new, self._check_room)
                for new in blocks
                if not self._machine.is_known(new.id.producer)
            ]
        finally:
            self._arriving.store()
        if not waiting:
            await known_outcome(self._log.fresh())
        for each in waiting:
            await asyncio.shield(each)

    def _check_room(self) -> None:
        waiting = len(self._machine.blocks) + len(self._arriving)
        if waiting >= BLOCKS_MAX:
            raise QueueFullError(f"the queues of this shard have {waiting} blocks of items, {BLOCKS_MAX} are allowed")

    async def _decide_enqueue(self, key: str, lanes: Sequence[HeldLane]) -> Sequence[Answer]:
        before_ms = self._now().wall_ms - (0 if self._machine.ended_blocks > ENDED_BLOCKS_MAX else ENDED_KNOWN_MS)
        return await self._propose(EnqueueDecision(key, before_ms, tuple(lanes)))  # type: ignore[return-value]

    def _enqueued(self, new: NewHold, answer: Answer) -> None:
        self._scheduler.enqueued(new.id.producer, self._now())
        self.meter.enqueued(new.next - new.id.first if answer else 0)
        self._parts.recent.keep(new.id.producer, new.data)
        if not self._has_begun:
            self._has_begun = True
            self._parts.begin()
        self._wake()

    # ---- dequeue ---------------------------------------------------------------------------------

    async def dequeue(self, wanted: Mapping[str, int]) -> list[Delivered]:
        """Lease ready items of queues to one worker, at most as many of each as `wanted` says.

        Raises: as above; StoreError if the payload of an item can't be read now.
        """
        now = self._now()
        items = self._scheduler.take(wanted, ANSWER_BYTES_MAX, now)
        return await self._to_its_end(self._grant(items, now)) if items else []

    async def _grant(self, items: Sequence[ItemRanges], now: Moment) -> list[Delivered]:
        blocks: tuple[GrantedBlock, ...] = ()
        try:
            data = await self._payloads(items)
            self._last_grant += 1
            decision = GrantDecision(self._last_grant, now.wall_ms, tuple(items))
            blocks = await self._propose(decision)  # type: ignore[assignment]  # as the machine says
            self.meter.granted(blocks)
        finally:
            self._scheduler.granted(items, blocks, now.steady_s)
            self._wake()
        return [Delivered(decision.number, each, data[each.block.id.producer]) for each in blocks]

    async def until_ready(self, topics: Iterable[str], within_s: float) -> bool:
        """Wait until a queue has a ready item; return whether that is so in this time. Raises: NotReadyError."""
        wanted = tuple(topics)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self._scheduler.is_ready(wanted, self._now()):
                    if not self._log.is_owner or self._tasks.stopped:
                        raise NotReadyError("the service partition of this queue moves")
                    with suppress(TimeoutError):
                        async with asyncio.timeout(READY_CHECK_S):
                            await self._some_ready.wait()
                return True
        return False

    async def _payloads(self, items: Sequence[ItemRanges]) -> dict[int, bytes]:
        """Return the bytes of the blocks of items, from memory or from the store."""
        blocks = [self._machine.blocks[each.block] for each in items]
        data = await asyncio.gather(
            *(self._payload(block.key, block.block) for block in blocks), return_exceptions=True
        )
        lost = [each for each, found in zip(items, data, strict=True) if isinstance(found, _LOST)]
        if lost:
            await self._bury(lost, next(found for found in data if isinstance(found, _LOST)))
        for found in data:
            if isinstance(found, BaseException):
                raise found
        return {each.block: bytes(found) for each, found in zip(items, data, strict=True)}  # type: ignore[arg-type]

    async def _payload(self, key: str, block: HeldBlock) -> bytes:
        known = self._parts.recent.get(block.id.producer)
        if known is not None:
            return known
        for last in (False, True):  # one answer proves neither damage nor absence
            try:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    data = await self._parts.store.get_range(key, block.offset, block.length)
                check_block(data)
            except TimeoutError as error:
                raise NotReadyError(f"the store does not answer for object '{key}'") from error
            except _LOST:
                if last:
                    raise
            else:
                self._parts.recent.keep(block.id.producer, data)
                return data
        raise AssertionError("returned or raised")

    async def _bury(self, items: Sequence[ItemRanges], error: BaseException) -> None:
        """Let items whose payload can't be read be dead: their state and their object stay."""
        self._parts.events.error("queue-block-lost", f"the payload of queue items can't be read: {error}")
        leases = [self._latest(each.block, number) for each in items for number in each]
        with suppress(RetryableError):
            await self._end(EndDecision(self._now().wall_ms, dead=True, leases=tuple(leases)))

    def _latest(self, block: int, number: int) -> LeasedItems:
        known = self._machine.blocks.get(block)
        return LeasedItems(ItemRanges(block, (number, number + 1)), known.grant(number) if known is not None else 0)

    # ---- ends ------------------------------------------------------------------------------------

    async def ack(self, leases: Sequence[LeasedItems]) -> Sequence[ItemOutcome]:
        """End items; return the outcome of each when it counts."""
        return await self._change(AckDecision(self._now().wall_ms, tuple(leases)))

    async def nack(
        self, leases: Sequence[LeasedItems], after_ms: int, note: bytes, kind: NackKind = NackKind.FAILED
    ) -> Sequence[ItemOutcome]:
        """Give items back for `after_ms`; return the outcome of each when it counts."""
        return await self._change(NackDecision(self._now().wall_ms + after_ms, note, tuple(leases), kind))

    async def extend(self, leases: Sequence[LeasedItems], lease_ms: int) -> Sequence[ItemOutcome]:
        """Let leases last `lease_ms` from now on; return the outcome of each when it counts."""
        return await self._change(ExtendDecision(lease_ms, tuple(leases)))

    async def _change(self, decision: AckDecision | NackDecision | ExtendDecision) -> Sequence[ItemOutcome]:
        return await self._to_its_end(self._decide(decision))

    async def _decide(self, decision: AckDecision | NackDecision | ExtendDecision) -> Sequence[ItemOutcome]:
        items = [each.items for each in decision.leases]
        now, outcomes = self._now(), tuple[ItemOutcome, ...]()
        due_ms = dues_of(self._machine.blocks, decision.leases)
        self._scheduler.hold(items)
        try:
            outcomes = await self._propose(decision)  # type: ignore[assignment]  # as the machine says
            self.meter.changed(decision.leases, outcomes, due_ms)
        finally:
            self._scheduler.released(items, outcomes, now.steady_s)
            self._forget_payloads(each.items.block for each in decision.leases)
            self._wake()
        return outcomes

    async def cancel(self, items: Sequence[ItemRanges]) -> Sequence[ItemOutcome]:
        """End items that no worker has; return the outcome of each when it counts."""
        return await self._to_its_end(self._cancel(items))

    async def _cancel(self, items: Sequence[ItemRanges]) -> Sequence[ItemOutcome]:
        self._scheduler.hold(items)
        try:
            answer = await self._propose(CancelDecision(self._now().wall_ms, tuple(items)))
            self.meter.cancelled(answer)  # type: ignore[arg-type]  # as the machine says
        finally:
            self._scheduler.released(items)
            self._forget_payloads(each.block for each in items)
        return answer  # type: ignore[return-value]  # as the machine says

    def _forget_payloads(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block not in self._machine.blocks:
                self._parts.recent.drop(block)

    # ---- questions -------------------------------------------------------------------------------

    async def counts(self, *, proven: bool = True) -> dict[str, QueueCounts]:
        """Return the counts of all queues that have items here.

        Without `proven`, nothing is written into the log, and the answer may be old after a takeover.
        """
        if proven:
            await known_outcome(self._log.fresh())
        return await self._counted()

    async def _counted(self) -> dict[str, QueueCounts]:
        now, found = self._now(), dict[str, list[int]]()
        for index, block in enumerate(list(self._machine.blocks.values()), start=1):
            if not index % COUNTED_AT_ONCE:
                await asyncio.sleep(0)  # let the event loop do other work
            counts = found.setdefault(block.topic, [0] * len(QueueCounts._fields))
            if not block.is_touched:
                _count_waiting(counts, block.block.due_ms, block.count, now)
                continue
            for number in range(block.count):
                state = block.state(number)
                if state is ItemState.DEAD:
                    counts[3] += 1
                elif self._scheduler.is_leased(block, number, now):
                    counts[1] += 1
                elif not state.is_over:
                    _count_waiting(counts, block.due_of(number), 1, now)
        return {topic: QueueCounts(*counts) for topic, counts in found.items()}

    # ---- time ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """End items that are over, and wake requests that wait, until cancelled.

        Raises: MemqError when the log has ended.
        """
        while True:
            now = self._now()
            self._scheduler.pass_time(now)
            self._notify()
            try:
                for decision in self._scheduler.ends(now):
                    try:
                        await self._end(decision)
                    finally:
                        self._scheduler.ended(decision)
            except ThrottledError:
                await asyncio.sleep(FAILED_PAUSE_S)
            if self.meter.is_due:
                counts = await self._counted()
                self.meter.take(sum_of(counts), self._now().steady_s - now.steady_s)
            await self._wait()

    async def _end(self, decision: EndDecision) -> None:
        outcomes = await self._propose(decision)
        self.meter.changed(decision.leases, outcomes, {})  # type: ignore[arg-type]  # as the machine says

    async def _wait(self) -> None:
        wait_s = min(self._scheduler.wait_s(self._now()), TIMER_S_MAX)
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._notify()

    def _notify(self) -> None:
        """Wake those that wait for an item; each one checks its queues."""
        self._some_ready.set()
        self._some_ready = asyncio.Event()

    # ---- inside ----------------------------------------------------------------------------------

    async def _to_its_end(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of work about items, which goes to its end also if this call is cancelled.

        The connection of a worker may break while a decision is on its way. It may count, and the scheduler must learn
        that: an item with a lease that nobody expects to end would never come again.
        """
        if self._tasks.stopped:
            work.close()
            raise NotReadyError("the service partition of this queue is closed")

        async def kept() -> Result | MemqError:
            try:
                return await work
            except MemqError as error:
                return error

        task = self._tasks.start(kept(), "decide on queue items")
        await asyncio.wait([task])
        if task.cancelled():
            raise NotReadyError("the service partition of this queue was closed")
        found: Result | MemqError = task.result()
        if isinstance(found, MemqError):
            raise found
        return found

    async def _propose(self, decision: QueueDecision) -> Answer:
        return await known_outcome(self._log.propose(QUEUES_MACHINE, encode_decision(decision)))

    def _now(self) -> Moment:
        clock = self._parts.runtime.clock
        return Moment(clock.wall_ms(), clock.monotonic())


_LOST = (NotFoundError, CorruptDataError)


def _count_waiting(counts: list[int], due_ms: int, items: int, now: Moment) -> None:
    """Count items without a worker in the fields of `QueueCounts`."""
    if due_ms > now.wall_ms:
        counts[2] += items
        return
    counts[0] += items
    counts[4] = min(counts[4] or due_ms, due_ms)
