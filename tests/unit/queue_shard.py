"""A machine of queues and its scheduler, in which each decision counts at once."""

from __future__ import annotations

from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.queues.decisions import (
    AckDecision,
    EnqueueDecision,
    ExtendDecision,
    GrantDecision,
    GrantedBlock,
    ItemDecision,
    ItemOutcome,
    ItemRanges,
    ItemTerms,
    LeasedItems,
    NackDecision,
    encode_decision,
)
from memq.queues.machine import QueueMachine
from memq.queues.scheduler import Bounds, ItemScheduler, Moment

PLAIN = ItemTerms(5, 4_000, 0, 0)


class Shard:
    """See the module."""

    def __init__(self) -> None:
        self.machine = QueueMachine()
        self.now = Moment(10_000, 10.0)
        self.scheduler = ItemScheduler(self.machine, self.now)
        self.grants = 0

    def wait(self, seconds: float) -> None:
        self.now = Moment(self.now.wall_ms + round(seconds * 1_000), self.now.steady_s + seconds)

    def enqueue(
        self,
        block: int,
        *,
        topic: str = "jobs",
        count: int = 1,
        terms: ItemTerms = PLAIN,
        after_ms: int = 0,
    ) -> None:
        held = HeldBlock(HoldId(block, 0), count, self.now.wall_ms + after_ms, 0, 100)
        lane = HeldLane(Target(topic, "", 0), terms.lane(), (held,))
        self.machine.apply(encode_decision(EnqueueDecision("key", 0, (lane,))))
        self.scheduler.enqueued(block, self.now)

    def dequeue(self, count: int = 100, topic: str = "jobs", bytes_max: int = 10_000) -> list[tuple[int, int]]:
        return self.dequeue_many({topic: count}, bytes_max)

    def dequeue_many(self, wanted: dict[str, int], bytes_max: int = 1_000_000) -> list[tuple[int, int]]:
        """Lease items of queues."""
        items = self.scheduler.take(wanted, Bounds(bytes_max, sum(wanted.values())), self.now)
        if not items:
            return []
        blocks = self._granted(*items)
        self.scheduler.granted(items, blocks, self.now.steady_s)
        leased = set(_items_of(blocks))
        chosen = [(each.block, number) for each in items for number in each]
        assert leased == set(chosen), "the machine refuses nothing that the scheduler has chosen"
        return chosen

    def grant(self, *items: ItemRanges) -> list[tuple[int, int]]:
        """Grant items that the scheduler has not chosen; return those that are leased."""
        return _items_of(self._granted(*items))

    def _granted(self, *items: ItemRanges) -> tuple[GrantedBlock, ...]:
        self.grants += 1
        decision = GrantDecision(self.grants, self.now.wall_ms, items)
        return self.machine.apply(encode_decision(decision))  # type: ignore[return-value]  # as the machine says

    def settle(self, decision: ItemDecision) -> tuple[ItemOutcome, ...]:
        """Cancel, redrive or purge items."""
        self.scheduler.hold(decision.items)
        outcomes = self.machine.apply(encode_decision(decision))
        self.scheduler.released(decision.items)
        return each_outcome(outcomes)

    def change(self, decision: AckDecision | NackDecision | ExtendDecision) -> object:
        items = [each.items for each in decision.leases]
        self.scheduler.hold(items)
        outcomes = self.machine.apply(encode_decision(decision))
        self.scheduler.released(items, outcomes, self.now.steady_s)  # type: ignore[arg-type]  # as the machine says
        return each_outcome(outcomes)

    def lease(self, block: int, number: int = 0) -> tuple[LeasedItems, ...]:
        return (LeasedItems(ItemRanges(block, (number, number + 1)), self.machine.blocks[block].status(number).grant),)


def ended(shard: Shard) -> list[tuple[int, int]]:
    """Let the items end that are to end; return them."""
    found = list[tuple[int, int]]()
    for decision in shard.scheduler.ends(shard.now):
        found += [(lease.items.block, number) for lease in decision.leases for number in lease.items]
        shard.machine.apply(encode_decision(decision))
        shard.scheduler.ended(decision)
    return found


def each_outcome(outcomes: object) -> tuple[ItemOutcome, ...]:
    """Return the outcome of each item."""
    assert isinstance(outcomes, tuple)
    return tuple(outcome for outcome, items in outcomes for _ in range(items))


def _items_of(blocks: tuple[GrantedBlock, ...]) -> list[tuple[int, int]]:
    return [
        (each.block.id.producer, number)
        for each in blocks
        for run in each.items
        for number in range(run.begin, run.end)
    ]
