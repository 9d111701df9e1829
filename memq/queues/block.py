"""A block of queue items in the state of a queue machine. Pure.

A block uses no memory for its items before the first grant. Then each range of items with equal status has one entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from sys import intern

from memq.format.held_object import HeldBlock, HeldLane, Target
from memq.queues.decisions import (
    EndedBlock,
    FormerBlock,
    ItemState,
    ItemStatus,
    ItemTerms,
    SavedBlock,
    SavedItems,
    terms_of,
)
from memq.queues.range_map import RangeMap
from memq.queues.runs.spilled import QueueLane

ATTEMPTS_END = 1 << 16


class QueueBlock:
    """A block with items that have not ended. `arrival` is its number in the order of arrival."""

    __slots__ = (
        "_items",
        "_same",
        "arrival",
        "block",
        "count",
        "dead",
        "key",
        "lane",
        "left",
        "partition",
        "terms",
        "topic",
        "topic_id",
    )

    def __init__(self, arrival: int, key: str, target: Target, lane: str, block: HeldBlock) -> None:
        self.arrival = arrival
        self.key = key
        self.topic = intern(target.topic)  # its queue; one string for many blocks, as the lane
        self.topic_id = intern(target.topic_id)  # of a plain topic, which a pop group reads; "" for a queue
        self.partition = target.partition
        self.lane = intern(lane)
        self.block = block
        self.terms: ItemTerms = terms_of(lane)
        self.count = block.next - block.id.first  # items
        self.left = self.count  # items that have not ended
        self.dead = 0  # of these, items that are dead
        self._same: ItemStatus | None = None  # the status of all items, from the first grant or end on
        self._items: RangeMap[ItemStatus] | None = None  # while they differ

    @property
    def number(self) -> int:
        """The id of the block."""
        return self.block.id.producer

    @property
    def target(self) -> Target:
        """The queue of the block; for a pop group also the topic id and the write partition."""
        return Target(self.topic, self.topic_id, self.partition)

    @property
    def is_stream(self) -> bool:
        """Whether the block is one of a plain topic, which a pop group has read."""
        return bool(self.topic_id)

    @property
    def is_touched(self) -> bool:
        """Whether an item was granted or has ended, or the block came again. If not, all items are ready."""
        return self._same is not None or self._items is not None

    @property
    def range_count(self) -> int:
        """Number of ranges of items in memory."""
        return len(self._items) if self._items is not None else int(self.is_touched)

    def untouched(self) -> ItemStatus:
        """Return the status of an item before its first grant."""
        return ItemStatus(ItemState.READY, 0, 0, self.block.due_ms, self.terms.lease_ms)

    # ---- questions -------------------------------------------------------------------------------

    def status(self, number: int) -> ItemStatus:
        """Return the status of an item."""
        if self._items is not None:
            return self._items.get(number)
        return self._same or self.untouched()

    def ranges(self, begin: int = 0, end: int | None = None) -> Iterable[tuple[int, int, ItemStatus]]:
        """Return begin, end and status of ranges of items, as they are at the call."""
        count = self.count
        begin, end = max(begin, 0), count if end is None or end > count else end
        if self._items is not None:
            return self._items.ranges(begin, end)
        return ((begin, end, self._same or self.untouched()),) if begin < end else ()

    def state(self, number: int) -> ItemState:
        """Return the state of an item."""
        return self.status(number).state

    def numbers_in(self, state: ItemState) -> Iterator[int]:
        """Yield the items in a state, in order."""
        return (number for begin, end, status in self.ranges() if status.state is state for number in range(begin, end))

    # ---- changes ---------------------------------------------------------------------------------

    def put(self, begin: int, end: int, status: ItemStatus, former: ItemStatus) -> None:
        """Set the status of a range of items, all of which have the status `former`."""
        items = end - begin
        if former.state is not status.state:
            self.left += items * (former.state.is_over - status.state.is_over)
            self.dead += items * ((status.state is ItemState.DEAD) - (former.state is ItemState.DEAD))
        if items == self.count:
            self._same, self._items = status, None
            return
        if self._items is None:
            self._items, self._same = RangeMap(self._same or self.untouched()), None
        self._items.put(begin, end, status)

    def touch(self) -> None:
        """Note that the block came again: its copy in a run that is being written names a former object."""
        if not self.is_touched:
            self._same = self.untouched()

    def granted(self, former: ItemStatus, grant: int) -> ItemStatus:
        """Return the status of an item after another grant."""
        state = ItemState.ACKED if not self.terms.lease_ms else ItemState.LEASED
        attempts = min(former.attempts + 1, ATTEMPTS_END - 1)
        return ItemStatus(state, grant, attempts, former.due_ms, self.terms.lease_ms, former.note)

    def redriven(self, former: ItemStatus, due_ms: int) -> ItemStatus:
        """Return the status of a dead item that is redriven: ready at `due_ms`, with no attempts."""
        return former._replace(state=ItemState.READY, attempts=0, due_ms=due_ms)

    def over(self, former: ItemStatus, state: ItemState) -> ItemStatus:
        """Return the status of an item that has ended, without its own due time, lease and note."""
        return ItemStatus(state, former.grant, former.attempts, self.block.due_ms, self.terms.lease_ms)

    # ---- snapshots -------------------------------------------------------------------------------

    def ended(self, now_ms: int) -> EndedBlock:
        """Return the entry that replaces the block when all its items have ended."""
        if self._same is not None:
            return EndedBlock(now_ms, ((self._same.state, self._same.grant, self.count),))
        found = groupby(self.ranges(), lambda each: (each[2].state, each[2].grant))
        return EndedBlock(now_ms, tuple((*end, sum(last - first for first, last, _ in same)) for end, same in found))

    def saved(self) -> SavedBlock:
        """Return the block for a snapshot."""
        lane = HeldLane(self.target, self.lane, (self.block,))
        if not self.is_touched:
            return SavedBlock(self.arrival, lane, self.key)
        items = tuple(SavedItems(end - begin, status) for begin, end, status in self.ranges())
        return SavedBlock(self.arrival, lane, self.key, items)

    @classmethod
    def restored(cls, saved: SavedBlock) -> QueueBlock:
        """Return the block of a snapshot."""
        made = cls(saved.arrival, saved.key, saved.lane.target, saved.lane.lane, saved.lane.blocks[0])
        begin = 0
        for count, status in saved.items:
            made.put(begin, begin + count, status, made.untouched())
            begin += count
        return made

    @classmethod
    def of_former(cls, saved: FormerBlock) -> QueueBlock:
        """Return the block of a snapshot of versions 1 and 2."""
        made = cls(saved.arrival, saved.key, saved.lane.target, saved.lane.lane, saved.lane.blocks[0])
        for number, (state, grant, attempts) in enumerate(
            zip(saved.states, saved.grants, saved.attempts, strict=True) if saved.states else ()
        ):
            due_ms = saved.due_ms.get(number, made.block.due_ms)
            lease_ms = saved.lease_ms.get(number, made.terms.lease_ms)
            status = ItemStatus(ItemState(state), grant, attempts, due_ms, lease_ms, saved.notes.get(number, b""))
            made.put(number, number + 1, status, made.untouched())
        return made


def may_move(block: QueueBlock) -> bool:
    """Whether a block may leave the memory: its items are as they arrived, and nothing binds it."""
    terms = block.terms
    bound = terms.ordered or terms.dedupe is not None or terms.expires_ms or block.is_stream
    return not block.is_touched and not bound


def lane_of(block: QueueBlock) -> QueueLane:
    """Return the lane of a block in runs."""
    return QueueLane(block.topic, block.terms.key, block.terms.priority)
