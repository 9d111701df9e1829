"""The queue items of one service partition at its owner: enqueued, granted, acked (Q1 to Q5).

Blocks of items that arrive together are stored in one object, and added by one decision. Every other request is a
decision of its own; decisions that wait share the next entry of the log. The keeper answers a request when its entry
counts (S4).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from memq.errors import (
    MemqError,
    NotReadyError,
    QueueFullError,
    ThrottledError,
)
from memq.format.held_object import HeldLane
from memq.holds.storing import ArrivingBlocks, NewHold
from memq.limits import MIB
from memq.queues.block import QueueBlock
from memq.queues.decisions import (
    QUEUES_MACHINE,
    AckDecision,
    CancelDecision,
    EndDecision,
    EnqueueDecision,
    ExtendDecision,
    FirstBlock,
    GrantDecision,
    GrantedBlock,
    ItemDecision,
    ItemOutcome,
    ItemRanges,
    LeasedItems,
    NackDecision,
    NackKind,
    Outcomes,
    PurgeDecision,
    QueueDecision,
    RedriveDecision,
    encode_decision,
    terms_of,
    with_outcomes,
)
from memq.queues.grants.grant_payloads import GrantPayloads
from memq.queues.grants.repeats import Delivered, RepeatedGrants
from memq.queues.meter import QueueCounters, QueueCounts, QueueMeter, origins_of, sum_of
from memq.queues.payloads import PayloadReader, RecentPayloads, StreamPlaces
from memq.queues.pop.keeper import PopKeeper, ShardCalls
from memq.queues.runs.keeper import BlockRuns, BlockRunsParts
from memq.queues.scheduler import Bounds, Item, ItemScheduler, Moment
from memq.queues.views import SeenItem, SeenItems, counts_of, dead_after, seen_items, views_of
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.state_log import Answer, known_outcome
from memq.state_log.state_log import StateLog
from memq.storage_handlers import StorageHandler

BLOCKS_MAX = 250_000  # with items that have not ended, in a service partition: about 600 bytes of memory each
WAITING_MAX = 1_000_000  # the same with those in runs: about 80 bytes of memory each
ENDED_BLOCKS_MAX = 250_000  # ends in memory; beyond it they are forgotten at once
DEDUPE_KEYS_MAX = 250_000  # whose windows are not over, in a service partition: about 300 bytes of memory each
ENDED_KNOWN_MS = 600_000  # a request that is repeated later than this may get the answer "unknown"
ANSWER_BYTES_MAX = 2 * MIB  # of the blocks in one answer
WHOLE_ANSWER = Bounds(ANSWER_BYTES_MAX)
STORE_GAP_S = 0.005  # between objects of few items: about the time of a put on files
TIMER_S_MAX = 5.0  # between two reads of the clock: it may be set forward, or its machine may sleep
FAILED_PAUSE_S = 1.0
READY_CHECK_S = 1.0  # between two checks of a waiting dequeue: a closed keeper does not wake it
LIFE_BITS = 62  # of the random life of a pop group
NO_BLOCK = 0  # no producer of blocks has this id
EPOCH_GRANTS = 1 << 24  # grants of epoch e begin at e times this, so that a restore of an older state repeats none


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueParts:
    """The parts that a keeper uses.

    `key_valid_s` is the time after its first put in which an object may be named (ADR 6). Keepers of one broker share
    `recent`. `begin` starts `run`: a shard without items has no task. `number` is that of the service partition.
    `places` finds the blocks of pop groups. `run_key` returns the key of a run's object, by its number of 64 bits.
    `shard` is 0, because the name of a queue determines its shard.
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
    run_key: Callable[[int], str]
    places: StreamPlaces | None = None
    shard: int = 0


class QueueKeeper:
    """Answers for the queue items of one service partition, while `log` is open in `epoch`.

    `scheduler` has the state of the log.
    `tasks` run until it is closed.
    Raises: as `StateLog.propose`, but NotReadyError for an unknown outcome: each request may be repeated.
    """

    def __init__(
        self, log: StateLog, scheduler: ItemScheduler, parts: QueueParts, tasks: TaskOwner, epoch: int
    ) -> None:
        self._log = log
        self._scheduler = scheduler
        self._machine = machine = scheduler.machine
        self._parts = parts
        self._tasks = tasks
        self.meter = QueueMeter(parts.counters, parts.runtime.clock, parts.number)
        self._last_grant = max(machine.last_grant, epoch * EPOCH_GRANTS)
        self._arriving = ArrivingBlocks(parts, tasks, self._decide_enqueue, self._enqueued, STORE_GAP_S)
        self._arrived_ms: dict[tuple[str, str], int] = {}  # the last blocks of ordered keys, by queue and key
        self._changed = asyncio.Event()  # an item may be ready earlier than expected
        self._some_ready = asyncio.Event()  # replaced each time
        self._reader = PayloadReader(parts.store, parts.events, parts.recent, parts.places)
        self._repeats = RepeatedGrants(scheduler, self._reader, lambda: known_outcome(log.fresh()), self._now)
        self._payloads = GrantPayloads(
            scheduler, self._reader, parts.events, parts.runtime.clock, tasks, self._end, self._wake
        )
        calls = ShardCalls(
            propose=self._propose,
            fresh=lambda: known_outcome(log.fresh()),
            arrived=self._arrived,
            settled=self._settled,
            now=self._now,
            before_ms=self._before_ms,
            new_life=lambda: 1 + parts.runtime.random.getrandbits(LIFE_BITS),
        )
        self.pop = PopKeeper(machine, self._scheduler, calls)
        self._runs = BlockRuns(
            BlockRunsParts(
                scheduler=scheduler,
                store=parts.store,
                runtime=parts.runtime,
                events=parts.events,
                key_valid_s=parts.key_valid_s,
                propose=self._propose,
                is_pending=lambda hold: self._arriving.pending(hold) is not None,
                brought=self._wake,
                new_key=lambda: parts.run_key(parts.runtime.random.getrandbits(64)),
            )
        )
        self._keeps_runs = False
        self._has_begun = bool(machine.items)
        if self._has_begun:
            parts.begin()

    # ---- enqueue ---------------------------------------------------------------------------------

    async def enqueue(self, blocks: Sequence[NewHold]) -> list[int]:
        """Put blocks of items into their queues; return when the decision counts.

        A known block changes nothing. The result has an id for each block: its own, or that of the first block with its
        dedupe key. Blocks of an ordered key are stored one after the other, to arrive in this order.

        Raises: as above; QueueFullError, ThrottledError.
        """
        if len(blocks) > 1 and any(terms_of(new.lane).ordered for new in blocks):
            return [first for new in blocks for first in await self.enqueue([new])]
        blocks = [self._in_order(new) for new in blocks]
        firsts = [self._known_as(new) for new in blocks]
        try:
            waiting = [
                self._arriving.pending(new.id) or self._take(new)
                for new, first in zip(blocks, firsts, strict=True)
                if first is None
            ]
        finally:
            self._arriving.store()
        if not waiting:
            await known_outcome(self._log.fresh())
        answers = iter([await asyncio.shield(each) for each in waiting])
        found = zip(blocks, firsts, strict=True)
        return [_first_of(new, next(answers)) if first is None else first for new, first in found]

    def _take(self, new: NewHold) -> asyncio.Future[Answer]:
        """Begin to store a block. Raises: ThrottledError; as `ArrivingBlocks.take`."""
        size, recent = len(new.data), self._parts.recent
        recent.reserve(size)
        try:
            future = self._arriving.take(new, partial(self._check_room, new))
        except BaseException:
            recent.release(size)
            raise
        future.add_done_callback(lambda _: recent.release(size))
        return future

    def _in_order(self, new: NewHold) -> NewHold:
        """Give each block of an ordered key a different due time: a restore orders by due time."""
        terms = terms_of(new.lane)
        if not terms.ordered:
            return new
        if new.due_ms > max(self._arrived_ms.values(), default=0):
            self._arrived_ms.clear()
        place = new.target.topic, terms.key
        due_ms = self._arrived_ms[place] = max(new.due_ms, self._arrived_ms.get(place, 0) + 1)
        return replace(new, due_ms=due_ms)

    def _known_as(self, new: NewHold) -> int | None:
        """Return the block in the state that has the items of a new one; None if there is none."""
        dedupe = terms_of(new.lane).dedupe
        first = self._machine.firsts.find(dedupe) if dedupe is not None else None
        return new.id.producer if first is None and self._machine.is_known(new.id.producer) else first

    def _check_room(self, new: NewHold) -> None:
        near = len(self._machine.blocks) + len(self._arriving)
        for waiting, most, where in (
            (near, BLOCKS_MAX, " in memory"),
            (near + len(self._machine.spilled), WAITING_MAX, ""),
        ):
            if waiting >= most:
                raise QueueFullError(
                    f"the queues of this shard have {waiting} blocks of items{where}, {most} are allowed"
                )
        if terms_of(new.lane).dedupe is not None:
            known = self._machine.firsts.count(self._now().wall_ms) + len(self._arriving)
            if known >= DEDUPE_KEYS_MAX:
                raise QueueFullError(f"this shard knows {known} dedupe keys, {DEDUPE_KEYS_MAX} are allowed")

    async def _decide_enqueue(self, key: str, lanes: Sequence[HeldLane]) -> Sequence[Answer]:
        return await self._propose(EnqueueDecision(key, self._before_ms(), tuple(lanes)))  # type: ignore[return-value]

    def _before_ms(self) -> int:
        """Return the time before which ends may be forgotten."""
        return self._now().wall_ms - (0 if self._machine.ended_blocks > ENDED_BLOCKS_MAX else ENDED_KNOWN_MS)

    def _enqueued(self, new: NewHold, answer: Answer) -> None:
        if isinstance(answer, FirstBlock):
            return
        self._arrived(new.id.producer, new.next - new.id.first if answer else 0, new.data)

    def _arrived(self, block: int, items: int, data: bytes | None) -> None:
        """Schedule a block that is in the state: `items` are new, `data` has its bytes if they are known."""
        if items:
            self._scheduler.enqueued(block, self._now())
        if made := self._machine.blocks.get(block):
            self.meter.enqueued(made.topic, items)
        if data is not None:
            self._parts.recent.keep(block, data)
        if not self._has_begun:
            self._has_begun = True
            self._parts.begin()
        self._wake()

    # ---- dequeue ---------------------------------------------------------------------------------

    async def dequeue_again(self, request: int, known: Collection[int] = ()) -> list[Delivered]:
        """Return the items that an earlier `dequeue` of this request has leased. Raises: as above; StoreError."""
        return await self._repeats.find(request, known)

    async def dequeue(
        self,
        wanted: Mapping[str, int],
        known: Collection[int] = (),
        bounds: Bounds = WHOLE_ANSWER,
        request: int = 0,
        *,
        reads_runs: bool = True,
    ) -> list[Delivered]:
        """Lease ready items of queues to one worker, at most the `wanted` number of each queue.

        The answer has no bytes of the blocks `known`, which the worker has. `bounds` are those of all queues. Without
        `reads_runs`, it does not wait for items in runs.
        Raises: as above; StoreError if the payload of an item can't be read now.
        """
        await self.pop.check(wanted)
        if self._repeats.is_closed(request):
            return []
        now = self._now()
        items = self._scheduler.take(wanted, bounds, now)
        if not items and reads_runs and await self._runs.bring_due(self._scheduler.in_runs(wanted, now), now):
            if self._repeats.is_closed(request):
                return []  # it came again meanwhile, and got no items
            now = self._now()
            items = self._scheduler.take(wanted, bounds, now)
        strays = [each for each in items if self.pop.is_stray(self._machine.blocks[each.block])]
        if strays:
            self._scheduler.released(strays)
            items = [each for each in items if each not in strays]
            blocks = [self._machine.blocks[each.block] for each in strays]
            self._tasks.start(self._end_strays(blocks), "end items of former pop groups")
        if not items:
            return []
        self._repeats.begin(request)
        return await self._to_its_end(self._grant(items, known, now, request))

    async def _grant(
        self, items: Sequence[ItemRanges], known: Collection[int], now: Moment, request: int
    ) -> list[Delivered]:
        blocks: tuple[GrantedBlock, ...] = ()
        try:
            data = await self._payloads.of([each for each in items if each.block not in known])
            self._last_grant += 1
            readable = tuple(each for each in items if each.block in data or each.block in known)
            decision = GrantDecision(self._last_grant, now.wall_ms, readable, request)
            blocks = await self._propose(decision)  # type: ignore[assignment]  # as the machine says
            self.meter.granted(blocks)
        finally:
            self._scheduler.granted(items, blocks, now.steady_s)
            self._repeats.end(request)
            self._wake()
        return [Delivered(decision.number, each, data.get(each.block.id.producer, b"")) for each in blocks]

    async def _end_strays(self, blocks: Sequence[QueueBlock]) -> None:
        """End items of removed pop groups; after an error, the readers of pop groups do it later."""
        with suppress(MemqError):
            await self.pop.end(blocks, removed=True)

    async def until_ready(self, topics: Iterable[str], within_s: float, *, once: bool = True) -> bool:
        """Wait at most `within_s` until `is_ready` of the scheduler; return whether. Raises: NotReadyError."""
        wanted = tuple(topics)
        await self.pop.check(wanted)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not self._scheduler.is_ready(wanted, self._now(), once=once):
                    if not self._log.is_owner or self._tasks.stopped:
                        raise NotReadyError("the service partition of this queue moves")
                    with suppress(TimeoutError):
                        async with asyncio.timeout(READY_CHECK_S):
                            await self._some_ready.wait()
                return True
        return False

    # ---- ends ------------------------------------------------------------------------------------

    def of_queue(self, queue: str, leases: Iterable[LeasedItems]) -> list[LeasedItems]:
        """Return leases with no block in place of one that another queue has: `queue` does not know its items."""
        return [
            each
            if self._machine.queue_of(each.items.block) in (queue, None)
            else LeasedItems(ItemRanges(NO_BLOCK, each.items.ranges), each.grant)
            for each in leases
        ]

    async def ack(self, leases: Sequence[LeasedItems]) -> Outcomes:
        """Ack items; return the outcomes when the decision counts."""
        return await self._change(AckDecision(self._now().wall_ms, tuple(leases)))

    async def nack(
        self, leases: Sequence[LeasedItems], after_ms: int, note: bytes, kind: NackKind = NackKind.FAILED
    ) -> Outcomes:
        """Make items ready again after `after_ms`; return the outcomes when the decision counts."""
        return await self._change(NackDecision(self._now().wall_ms + after_ms, note, tuple(leases), kind))

    async def extend(self, leases: Sequence[LeasedItems], lease_ms: int) -> Outcomes:
        """Extend leases to `lease_ms` from now on; return the outcomes when the decision counts."""
        return await self._change(ExtendDecision(lease_ms, tuple(leases)))

    async def _change(self, decision: AckDecision | NackDecision | ExtendDecision) -> Outcomes:
        return await self._to_its_end(self._decide(decision))

    async def _decide(self, decision: AckDecision | NackDecision | ExtendDecision) -> Outcomes:
        items = [each.items for each in decision.leases]
        now, outcomes = self._now(), Outcomes()
        origins = origins_of(self._machine.blocks, decision.leases)
        self._scheduler.hold(items)
        try:
            outcomes = await self._propose(decision)  # type: ignore[assignment]  # as the machine says
            self.meter.changed(decision.leases, outcomes, origins)
        finally:
            self._scheduler.released(items, outcomes, now.steady_s)
            self._forget_payloads(each.items.block for each in decision.leases)
            self._wake()
        return outcomes

    async def cancel(self, items: Sequence[ItemRanges]) -> Outcomes:
        """Cancel items that no worker has; return the outcomes when the decision counts."""
        return await self._to_its_end(self._settle(CancelDecision(self._now().wall_ms, tuple(items))))

    async def redrive(self, items: Sequence[ItemRanges]) -> Outcomes:
        """Make dead items ready again; return the outcomes when the decision counts."""
        return await self._to_its_end(self._settle(RedriveDecision(self._now().wall_ms, tuple(items))))

    async def purge(self, items: Sequence[ItemRanges]) -> Outcomes:
        """End dead items; return the outcomes when the decision counts."""
        return await self._to_its_end(self._settle(PurgeDecision(self._now().wall_ms, tuple(items))))

    async def _settle(self, decision: ItemDecision) -> Outcomes:
        """Decide about items, those in runs included: their blocks are brought first.

        A block may move into a run, and perhaps back, while the decision is on its way. Then it is decided again: a
        repeated decision has the same outcomes for items that it has changed.
        """
        while True:
            await self._runs.pick(each.block for each in decision.items)
            answer = await self._settle_in_memory(decision)
            if not any(self._was_away(*each) for each in with_outcomes(decision.items, answer)):
                self.meter.cancelled(answer)
                return answer

    def _was_away(self, block: int, begin: int, end: int, outcome: ItemOutcome) -> bool:
        """Whether a decision did not find items that exist: their block was in a run."""
        known = self._machine.blocks.get(block)
        exists = begin < min(end, known.count) if known else self._machine.spilled.run_of(block) is not None
        return outcome is ItemOutcome.UNKNOWN and exists

    async def _settle_in_memory(self, decision: ItemDecision) -> Outcomes:
        self._scheduler.hold(decision.items)
        try:
            answer = await self._propose(decision)
        finally:
            self._scheduler.released(decision.items)
            self._settled(decision.items)
        return answer  # type: ignore[return-value]  # as the machine says

    def _settled(self, items: Iterable[ItemRanges]) -> None:
        self._forget_payloads(each.block for each in items)
        self._wake()

    def _forget_payloads(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block not in self._machine.blocks:
                self._parts.recent.drop(block)

    # ---- questions -------------------------------------------------------------------------------

    async def counts(self, prefix: str = "", *, proven: bool = True) -> dict[str, QueueCounts]:
        """Return the counts of all queues that have items here, and whose names begin with `prefix`.

        Without `proven`, nothing is written into the log, and a former owner may give an old answer.
        """
        if proven:
            await known_outcome(self._log.fresh())
        return await counts_of(self._machine, self._scheduler, self._now(), prefix)

    async def totals(self) -> dict[str, int]:
        """Return how many items of this shard have ended so far, by outcome, and were redriven."""
        await known_outcome(self._log.fresh())
        return dict(self._machine.totals)

    async def get(self, items: Iterable[Item]) -> SeenItems:
        """Return known items with their present states, and the payloads that exist."""
        items = list(items)
        await known_outcome(self._log.fresh())
        await self._runs.pick(block for block, _ in items)
        return await self._seen(items)

    async def peek(self, queue: str, count: int) -> SeenItems:
        """Return the items that a dequeue would lease now, in this order, with their payloads.

        ANSWER_BYTES_MAX bounds the payloads, except the first one.
        """
        await known_outcome(self._log.fresh())
        items = self._scheduler.peek(queue, count, self._now())
        if len(items) < count and await self._runs.bring_due([queue], self._now()):
            items = self._scheduler.peek(queue, count, self._now())
        return await self._seen(items)

    async def dead(self, queue: str, count: int, after: Item) -> list[SeenItem]:
        """Return at most `count` dead items of a queue after `after`, in the order of their ids."""
        await known_outcome(self._log.fresh())
        items = islice(dead_after(self._machine, queue, after), count)
        return views_of(self._machine, self._scheduler, items, self._now())

    async def _seen(self, items: Iterable[Item]) -> SeenItems:
        views = views_of(self._machine, self._scheduler, items, self._now())
        return await seen_items(self._machine, self._reader, views, ANSWER_BYTES_MAX)

    # ---- time ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """End items whose time is over, and wake waiting requests, until cancelled.

        Raises: MemqError when the log has ended.
        """
        if not self._keeps_runs:
            self._keeps_runs = True
            self._tasks.start(self._keep(self._runs.bring), "bring queue items")
            self._tasks.start(self._keep(self._runs.spill), "spill queue items")
        while True:
            now = self._now()
            self._scheduler.pass_time(now)
            self._notify()
            decisions = self._scheduler.ends(now)
            try:
                for decision in decisions:
                    await self._end(decision)
            except ThrottledError:
                await asyncio.sleep(FAILED_PAUSE_S)
            finally:
                for decision in decisions:
                    self._scheduler.ended(decision)
            if self.meter.is_due:
                counts = await counts_of(self._machine, self._scheduler, now)
                self.meter.take(sum_of(counts), self._now().steady_s - now.steady_s)
            if not decisions:  # else there may be more ends than one decision has
                await self._wait()

    async def _keep(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do work on runs until the log has ended: the next owner continues."""
        while self._log.is_owner:
            with suppress(MemqError):
                await work()
            await asyncio.sleep(FAILED_PAUSE_S)

    async def _end(self, decision: EndDecision) -> None:
        origins = origins_of(self._machine.blocks, decision.leases)
        outcomes = await self._propose(decision)
        self.meter.changed(decision.leases, outcomes, origins)  # type: ignore[arg-type]  # as the machine says

    async def _wait(self) -> None:
        wait_s = min(self._scheduler.wait_s(self._now()), TIMER_S_MAX)
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._runs.wake()
        self.pop.moved()
        self._notify()

    def _notify(self) -> None:
        """Wake all requests that wait for an item; each one checks its queues."""
        self._some_ready.set()
        self._some_ready = asyncio.Event()

    # ---- inside ----------------------------------------------------------------------------------

    async def _to_its_end(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of work about items. The work runs to its end also if this call is cancelled.

        The connection of a worker may break before a decision has its answer. The decision may count, and the scheduler
        must note that: without the end of its lease, an item would never be ready again.
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


def _first_of(new: NewHold, answer: Answer) -> int:
    """Return the block that has the items of a new one."""
    return answer.block if isinstance(answer, FirstBlock) else new.id.producer
