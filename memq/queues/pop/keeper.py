"""The pop groups of one service partition at its owner: begun, read, removed.

The reader of the topics (`memq.broker.service_partitions.pop_readers`) calls it. `memq.queues.keeper` grants and ends
the items, as for all queues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from memq.errors import NotFoundError
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.queues.block import QueueBlock
from memq.queues.decisions import (
    EndPopDecision,
    ItemOutcome,
    ItemRanges,
    ItemTerms,
    LeasedItems,
    Outcomes,
    QueueDecision,
    merged_ranges,
)
from memq.queues.machine import QueueMachine
from memq.queues.pop.groups import (
    BeginPopDecision,
    PopGroup,
    PopPlace,
    PopPosition,
    ReadPopDecision,
    RemovePopDecision,
    is_pop_queue,
    place_of,
)
from memq.queues.range_map import Range
from memq.queues.scheduler import ItemScheduler, Moment
from memq.state_log import Answer

AHEAD_ITEMS = 10_000  # a group reads no further while so many of its items have not ended; dead ones do not count
AHEAD_BLOCKS = 2_000  # the same for blocks, including those of dead items
ENDS_AT_ONCE = 1_000  # items in one decision
BLOCKS_AT_ONCE = 500  # in one decision to read: an entry of the log has 64 KiB
PRIORITY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCalls:
    """The calls of a `QueueKeeper` that its pop groups use.

    `propose` returns the answer when a decision counts. `fresh` returns when the state has all earlier answers.
    `arrived` takes a block, the number of its new items, and its bytes if they are known. `settled` notes ends of
    items, `before_ms` is the time before which ends may be forgotten, and `new_life` returns the life of a new group.
    """

    propose: Callable[[QueueDecision], Awaitable[Answer]]
    fresh: Callable[[], Awaitable[object]]
    arrived: Callable[[int, int, bytes | None], None]
    settled: Callable[[Iterable[ItemRanges]], None]
    now: Callable[[], Moment]
    before_ms: Callable[[], int]
    new_life: Callable[[], int]


@dataclass(frozen=True, slots=True)
class PopBlock:
    """A block of a batch: its id in the group, its records by their indexes, and its bytes."""

    id: int
    first: int
    records: int
    offset: int
    length: int
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class PopBatch:
    """A batch that a pop group has read, and the position after it; published at `time_ms` (Unix ms)."""

    place: PopPlace
    partition: int  # write partition
    time_ms: int
    blocks: Sequence[PopBlock]
    end: PopPosition


class PopKeeper:
    """Answers for the pop groups of one service partition. Raises: as `QueueKeeper`."""

    def __init__(self, machine: QueueMachine, scheduler: ItemScheduler, shard: ShardCalls) -> None:
        self._machine = machine
        self._scheduler = scheduler
        self._shard = shard
        self.changed = asyncio.Event()  # a group was begun or removed
        self._moved = asyncio.Event()  # replaced each time: an item may have ended

    @property
    def groups(self) -> Mapping[str, PopGroup]:
        """The groups, by the names of their queues."""
        return self._machine.pops.groups

    def group(self, queue: str, life: int) -> PopGroup | None:
        """Return a group in this life; None if it was removed, or begun again."""
        known = self.groups.get(queue)
        return known if known is not None and known.life == life else None

    async def check(self, queues: Iterable[str]) -> None:
        """Refuse pop groups that do not exist. Raises: NotFoundError; as above."""
        if all(each in self.groups for each in queues if is_pop_queue(each)):
            return
        await self._shard.fresh()
        for each in queues:
            if is_pop_queue(each) and each not in self.groups:
                raise NotFoundError(
                    f"pop group '{each}' does not exist", hint="begin it: Queue.begin_pop(topic, group)"
                )

    async def prove(self) -> None:
        """Wait until the state has all decisions that an owner answered before this call."""
        await self._shard.fresh()

    async def begin(self, decision: BeginPopDecision) -> bool:
        """Begin a group, or change its settings; return whether it reads the topic id of the decision."""
        new = msgspec.structs.replace(decision, life=self._shard.new_life())
        found = bool(await self._shard.propose(new))
        self.changed.set()
        return found

    async def remove(self, queue: str, life: int = 0) -> bool:
        """Remove a group; return whether it existed. Its items end soon after."""
        found = bool(await self._shard.propose(RemovePopDecision(queue, life)))
        self.changed.set()
        return found

    # ---- reading ---------------------------------------------------------------------------------

    def has_room(self, queue: str) -> bool:
        """Whether a group may read more records (`AHEAD_ITEMS`)."""
        return len(self._machine.pops.blocks.get(queue, ())) < AHEAD_BLOCKS and self.left(queue) < AHEAD_ITEMS

    def left(self, queue: str) -> int:
        """Return how many items of a group have not ended, without dead ones."""
        dead = sum(self._machine.blocks[each].dead for each in self._machine.dead.get(queue, ()))
        return self._machine.topics.get(queue, 0) - dead

    async def until_moved(self, within_s: float) -> None:
        """Wait until items may have ended, at most `within_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._moved.wait()

    def moved(self) -> None:
        """Wake readers that wait for room."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def read(self, group: PopGroup, begin: PopPosition, batch: PopBatch, lost: int) -> PopPosition | None:
        """Add the new blocks of a batch; return the new position, None if the group is not at `begin`.

        Large batches are several decisions, each of which moves the position. Without room for all, the new position
        is within the batch.
        """
        terms = ItemTerms(PRIORITY, group.lease_ms, group.attempts_max, 0).lane()
        target = Target(group.queue, group.topic_id, batch.partition)
        due_ms = min(batch.time_ms, self._shard.now().wall_ms)
        for at in range(0, max(1, len(batch.blocks)), BLOCKS_AT_ONCE):
            some, rest = batch.blocks[at : at + BLOCKS_AT_ONCE], batch.blocks[at + BLOCKS_AT_ONCE :]
            end = (
                PopPosition(begin.partition, batch.place.offset, rest[0].first, 0, begin.records) if rest else batch.end
            )
            lane = HeldLane(target, terms, tuple(_held(each, due_ms) for each in some))
            found = await self._shard.propose(
                ReadPopDecision(
                    queue=group.queue,
                    life=group.life,
                    before_ms=self._shard.before_ms(),
                    begin=begin,
                    end=end,
                    place=str(batch.place),
                    lanes=(lane,) if some else (),
                    lost=lost,
                )
            )
            if found is None:
                return None
            for each, is_new in zip(some, found, strict=True):  # type: ignore[call-overload]  # as the machine says
                self._shard.arrived(each.id, each.records if is_new else 0, each.data)
            begin, lost = end, 0
            if rest and not self.has_room(group.queue):
                break
        return begin

    async def move(self, group: PopGroup, begin: PopPosition, end: PopPosition) -> bool:
        """Move a group over a part of the log that has no records for it; return whether it was at `begin`."""
        decision = ReadPopDecision(group.queue, group.life, self._shard.before_ms(), begin, end)
        return await self._shard.propose(decision) is not None

    # ---- ends ------------------------------------------------------------------------------------

    def blocks_of(self, queue: str) -> list[QueueBlock]:
        """Return the blocks of a group, the oldest first."""
        return [self._machine.blocks[each] for each in self._machine.pops.blocks.get(queue, ())]

    def strays(self) -> list[QueueBlock]:
        """Return blocks whose group was removed, or begun again."""
        return [
            block
            for queue in list(self._machine.pops.blocks)
            for block in self.blocks_of(queue)
            if self.is_stray(block)
        ]

    def is_stray(self, block: QueueBlock) -> bool:
        """Whether the group of a block was removed, or begun again: its items end, and no worker gets them."""
        return block.is_stream and self.group(block.topic, place_of(block.key).life) is None

    async def end(self, blocks: Iterable[QueueBlock], *, removed: bool) -> int:
        """End the items of blocks that no worker has; return how many have ended.

        A grant that is not in the log yet wins: the decision names the latest grant of each item.
        """
        ended, now, some = 0, self._shard.now(), list[LeasedItems]()
        for block in list(blocks):
            by_grant: dict[int, list[Range]] = {}
            for begin, end, status, left_s in self._scheduler.seen(block, now):
                if not status.state.is_over and not left_s:
                    for at in range(begin, end, ENDS_AT_ONCE):
                        by_grant.setdefault(status.grant, []).append((at, min(end, at + ENDS_AT_ONCE)))
            for grant, ranges in by_grant.items():
                for each in ranges:
                    some.append(LeasedItems(merged_ranges(block.number, [each]), grant))
                    if sum(len(found.items) for found in some) >= ENDS_AT_ONCE:
                        ended += await self._end(some, removed=removed)
                        some = []
        return ended + (await self._end(some, removed=removed) if some else 0)

    async def _end(self, leases: Sequence[LeasedItems], *, removed: bool) -> int:
        items = [each.items for each in leases]
        outcomes: Outcomes = ()
        self._scheduler.hold(items)
        try:
            decision = EndPopDecision(self._shard.now().wall_ms, removed, tuple(leases))
            outcomes = await self._shard.propose(decision)  # type: ignore[assignment]  # as the machine says
        finally:
            self._scheduler.released(items)
            self._shard.settled(items)
        return sum(run.items for run in outcomes if run.outcome is not ItemOutcome.UNKNOWN)


def _held(block: PopBlock, due_ms: int) -> HeldBlock:
    return HeldBlock(HoldId(block.id, block.first), block.first + block.records, due_ms, block.offset, block.length)
