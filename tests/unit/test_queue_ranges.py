"""Items of a block in a row change in one step: that does what a step for each of them does."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from memq.queues.decisions import (
    AckDecision,
    CancelDecision,
    ExtendDecision,
    ItemRanges,
    ItemTerms,
    LeasedItems,
    NackDecision,
    NackKind,
    PurgeDecision,
    RedriveDecision,
    ranges_of,
)
from memq.queues.machine import QueueMachine
from memq.queues.scheduler import ItemScheduler, Moment
from memq.queues.views import view_of
from tests.unit.queue_shard import Shard, ended

COUNT = 7  # items of a block
Item = tuple[int, int]
PLAIN = (
    ItemTerms(5, 4_000, 0, 0),
    ItemTerms(1, 4_000, 2, 0),
    ItemTerms(5, 4_000, 0, 16_000),
    ItemTerms(5, 0, 0, 0),
)
ORDERED = tuple(each._replace(key="k", ordered=True) for each in PLAIN if each.lease_ms)
KINDS = (PLAIN, PLAIN, ORDERED)  # of one key: turns depend on the blocks


class Pair:
    """Two shards with the same items: in blocks of COUNT items, and each in a block of its own."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.whole, self.single = Shard(), Shard()
        self.blocks = 0
        self.terms = KINDS[seed % len(KINDS)]

    def enqueue(self) -> None:
        self.blocks += 1
        terms = self.draw.choice(self.terms)
        after_ms = 0 if terms.ordered else self.draw.choice([0, 0, 1_500])
        self.whole.enqueue(self.blocks, count=COUNT, terms=terms, after_ms=after_ms)
        for number in range(COUNT):
            self.single.enqueue(alone((self.blocks, number)), terms=terms, after_ms=after_ms)

    def wait(self) -> None:
        for shard in (self.whole, self.single):
            shard.wait(0)
        seconds = self.draw.choice([0.0, 0.5, 1.5, 4.0, -1.0])
        for shard in (self.whole, self.single):
            shard.now = Moment(shard.now.wall_ms + round(seconds * 1_000), shard.now.steady_s + abs(seconds))

    def dequeue(self) -> None:
        count = self.draw.choice([1, 2, 5, 20])
        peeked = self.whole.scheduler.peek("jobs", count, self.whole.now)
        assert [alone(each) for each in peeked] == [
            id_ for id_, _ in self.single.scheduler.peek("jobs", count, self.single.now)
        ]
        found = self.whole.dequeue(count)
        assert sorted(map(alone, found)) == sorted(id_ for id_, _ in self.single.dequeue(count))
        assert set(found) == set(peeked)

    def items(self) -> list[Item]:
        """Draw items of one or two blocks, some of them unknown."""
        blocks = sorted(self.draw.choices(range(1, self.blocks + 1), k=2)) if self.blocks else []
        numbers = range(COUNT + 1)
        return [
            (block, number)
            for block in dict.fromkeys(blocks)
            for number in sorted(self.draw.sample(numbers, self.draw.randrange(1, COUNT + 1)))
        ]

    def change(self) -> None:
        """Ack, nack or extend items, mostly under their latest grants."""
        items, now_ms = self.items(), self.whole.now.wall_ms
        kind = self.draw.choice(["ack", "ack", "nack", "extend"])
        due_ms, note = now_ms + self.draw.choice([0, 900]), self.draw.choice([b"", b"note"])
        reason = self.draw.choice([*NackKind, NackKind.FAILED])
        granted = [(*item, self.grant_of(item)) for item in items]
        outcomes = []
        for shard, named in (
            (self.whole, granted),
            (self.single, [(alone((block, number)), 0, grant) for block, number, grant in granted]),
        ):
            leases = leases_of(named)
            decision: AckDecision | NackDecision | ExtendDecision = AckDecision(now_ms, leases)
            if kind == "nack":
                decision = NackDecision(due_ms, note, leases, reason)
            elif kind == "extend":
                decision = ExtendDecision(6_000, leases)
            outcomes.append(shard.change(decision))
        assert outcomes[0] == outcomes[1]

    def grant_of(self, item: Item) -> int:
        """Return the latest grant of an item, seldom another one."""
        known = self.whole.machine.blocks.get(item[0])
        grant = known.status(item[1]).grant if known is not None and item[1] < known.count else 0
        return grant - (grant > 0 and self.draw.random() < 0.1)

    def settle(self) -> None:
        items, now_ms = self.items(), self.whole.now.wall_ms
        kinds: tuple[type[CancelDecision | RedriveDecision | PurgeDecision], ...]
        kinds = CancelDecision, RedriveDecision, RedriveDecision, PurgeDecision
        kind = self.draw.choice(kinds)
        by_block = {block: [number for each, number in items if each == block] for block, _ in items}
        together = tuple(ranges_of(block, numbers) for block, numbers in by_block.items())
        apart = tuple(ItemRanges(alone(item), (0, 1)) for item in items)
        assert self.whole.settle(kind(now_ms, together)) == self.single.settle(kind(now_ms, apart))

    def end(self) -> None:
        counts = []
        for shard in (self.whole, self.single):
            shard.scheduler.pass_time(shard.now)
            counts.append(sorted(ended(shard)))
        assert [alone(each) for each in counts[0]] == [id_ for id_, _ in counts[1]]

    def take_over(self) -> None:
        for shard in (self.whole, self.single):
            state, shard.machine = shard.machine.snapshot(), QueueMachine()
            shard.machine.restore(state)
            shard.scheduler = ItemScheduler(shard.machine, shard.now)

    def check(self) -> None:
        whole, single = self.whole, self.single
        assert whole.machine.totals == single.machine.totals
        assert (whole.machine.items, whole.machine.topics) == (single.machine.items, single.machine.topics)
        assert whole.scheduler.has_ends() == single.scheduler.has_ends()
        for item in [(block, number) for block in range(1, self.blocks + 1) for number in range(COUNT)]:
            assert whole.machine.state_of(*item) == single.machine.state_of(alone(item), 0)
            if item[0] in whole.machine.blocks and alone(item) in single.machine.blocks:
                view = view_of(whole.machine, whole.scheduler, item, whole.now)
                other = view_of(single.machine, single.scheduler, (alone(item), 0), single.now)
                assert view is not None
                assert other == view._replace(item=(alone(item), 0))


def alone(item: Item) -> int:
    """Return the block that has an item alone."""
    return item[0] * 100 + item[1]


def leases_of(granted: Sequence[tuple[int, int, int]]) -> tuple[LeasedItems, ...]:
    """Return leases of items, by block, number and grant: those in a row with the same grant are one range."""
    found: list[LeasedItems] = []
    for block, number, grant in granted:
        last = found[-1] if found else None
        if last is not None and (last.items.block, last.items.ranges[-1], last.grant) == (block, number, grant):
            found[-1] = LeasedItems(ItemRanges(block, (*last.items.ranges[:-1], number + 1)), grant)
        else:
            found.append(LeasedItems(ItemRanges(block, (number, number + 1)), grant))
    return tuple(found)


@pytest.mark.parametrize("part", range(10))
def test_items_in_ranges_change_as_items_in_blocks_of_their_own(part: int) -> None:
    acked = 0
    for seed in range(9 * part, 9 * part + 9):
        pair = Pair(seed)
        for _ in range(80):
            steps = [pair.enqueue, pair.wait, pair.dequeue, pair.change, pair.settle, pair.end, pair.take_over]
            pair.draw.choices(steps, [2, 4, 6, 6, 1, 2, 0.3])[0]()
            pair.check()
        acked += pair.whole.machine.totals.get("acked", 0)
    assert acked > 100


def test_a_thousand_items_take_the_memory_of_their_ranges() -> None:
    shard = Shard()
    shard.enqueue(1, count=1_000)
    shard.enqueue(2, count=1_000)
    assert [len(shard.dequeue(count)) for count in (1_000, 500)] == [1_000, 500]
    assert [shard.machine.blocks[id_].range_count for id_ in (1, 2)] == [1, 2]
    entries = shard.scheduler.entries
    assert entries < 20
    shard.change(AckDecision(5, (LeasedItems(ItemRanges(1, (0, 1_000)), 1),)))
    assert shard.scheduler.entries < entries
