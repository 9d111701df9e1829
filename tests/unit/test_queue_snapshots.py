"""Snapshots of a queue machine in slices: each has the state of the moment at which it began."""

from __future__ import annotations

import gc
import random

import msgspec
import pytest

from memq.errors import CorruptDataError
from memq.queues import scheduler, snapshots
from memq.queues.decisions import (
    AckDecision,
    CancelDecision,
    Dedupe,
    ExtendDecision,
    ItemRanges,
    ItemTerms,
    LeasedItems,
    NackDecision,
    QueueDecision,
    dedupe_digest,
    ranges_of,
)
from memq.queues.machine import QueueMachine
from memq.queues.scheduler import Bounds, ItemScheduler, Moment
from tests.unit.queue_shard import Shard

BLOCKS, COUNT = 12, 3


def step(shard: Shard, dice: random.Random, number: int) -> None:
    """Let something happen to random items."""
    if dice.random() < 0.3:
        dedupe = Dedupe(dedupe_digest("jobs", str(dice.randrange(4))), shard.now.wall_ms, shard.now.wall_ms + 50)
        terms = ItemTerms(5, 4_000, 3, 0, dedupe=dedupe if dice.random() < 0.5 else None)
        shard.enqueue(BLOCKS + number, count=1, terms=terms)
    shard.wait(dice.random())
    shard.dequeue(dice.randrange(1, 6))
    for id_ in dice.sample(sorted(shard.machine.blocks), min(3, len(shard.machine.blocks))):
        block = shard.machine.blocks[id_]
        numbers = dice.sample(range(block.count), dice.randrange(1, block.count + 1))
        leases = tuple(LeasedItems(ranges_of(id_, (each,)), block.status(each).grant) for each in sorted(numbers))
        now_ms = shard.now.wall_ms
        decisions: list[QueueDecision] = [
            AckDecision(now_ms, leases),
            NackDecision(now_ms + dice.randrange(3_000), b"note", leases),
            ExtendDecision(9_000, leases),
            CancelDecision(now_ms, (ranges_of(id_, numbers),)),
        ]
        decision = dice.choice(decisions)
        if isinstance(decision, CancelDecision):
            shard.settle(decision)
        else:
            assert isinstance(decision, AckDecision | NackDecision | ExtendDecision)
            shard.change(decision)


@pytest.mark.parametrize("seed", range(20))
def test_decisions_between_slices_do_not_change_a_snapshot(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SLICE_BLOCKS", 2)
    dice, shard = random.Random(seed), Shard()
    for block in range(1, BLOCKS):
        shard.enqueue(block, count=COUNT, terms=ItemTerms(dice.randrange(3), 4_000, 3, 0))
    for number in range(5):
        step(shard, dice, number)
    wanted = shard.machine.snapshot()
    begun = [shard.machine.begin_snapshot() for _ in range(2)]
    step(shard, dice, 5)
    found: list[list[bytes]] = []
    for number, pieces in enumerate(begun):
        found.append([])
        for piece in pieces:
            found[-1].append(piece)
            step(shard, dice, 10 + 100 * number + len(found[-1]))
    assert [b"".join(each) for each in found] == [wanted, wanted]
    assert min(map(len, found)) >= 3, "it has several slices"
    assert shard.machine.snapshot() != wanted
    again = QueueMachine()
    again.restore(wanted)
    assert again.snapshot() == wanted


def test_a_snapshot_that_nobody_wants_any_more_costs_nothing() -> None:
    shard = Shard()
    shard.enqueue(1, count=COUNT)
    pieces = shard.machine.begin_snapshot()
    assert _snapshots() == 1
    del pieces
    assert _snapshots() == 0


def _snapshots() -> int:
    """Return how many snapshots are in memory."""
    gc.collect()
    return sum(type(each) is snapshots.QueueSnapshot for each in gc.get_objects())


def test_ranges_of_items_make_slices_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SLICE_RANGES", 1)
    shard = Shard()
    for block in range(1, 5):
        shard.enqueue(block, count=COUNT)
    assert len(list(shard.machine.begin_snapshot())) == 1
    shard.dequeue(2 * COUNT)
    assert len(list(shard.machine.begin_snapshot())) == 3


def grown(blocks: int) -> Shard:
    """Return a shard with so many blocks, of which some were leased, given back and acked."""
    dice, shard = random.Random(7), Shard()
    for block in range(1, blocks):
        shard.enqueue(block, count=COUNT, terms=ItemTerms(dice.randrange(3), 4_000, 3, 0))
    for number in range(20):
        step(shard, dice, number + blocks)
    return shard


def test_a_snapshot_is_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SLICE_BLOCKS", 4)
    shard = grown(40)
    state, again = shard.machine.snapshot(), QueueMachine()
    sizes = [len(again.blocks) for _ in again.begin_restore(state)]
    assert sizes[:3] == [4, 8, 12]
    assert sizes.count(len(again.blocks)) >= 1, "the ended ones follow"
    assert again.snapshot() == state
    assert again.items == shard.machine.items


@pytest.mark.parametrize("items", ["ranged", "ended", "firsts"])
def test_a_damaged_item_of_a_snapshot_is_damage(items: str) -> None:
    saved = msgspec.msgpack.decode(grown(12).machine.snapshot())
    saved[items][-1] = 7
    with pytest.raises(CorruptDataError, match="snapshot of queues can't be read"):
        QueueMachine().restore(msgspec.msgpack.encode(saved))


def test_a_scheduler_that_is_made_in_slices_gives_the_same_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SLICE_BLOCKS", 4)
    shard = grown(40)
    state, found = shard.machine.snapshot(), list[list[ItemRanges]]()
    later = Moment(shard.now.wall_ms + 10_000, shard.now.steady_s + 10)
    for sliced in (False, True):
        machine = QueueMachine()
        machine.restore(state)
        steps = list(ItemScheduler.in_slices(machine, shard.now)) if sliced else [ItemScheduler(machine, shard.now)]
        made = steps[-1]
        assert made is not None
        assert steps[:-1] == [None] * (len(machine.blocks) // 4 if sliced else 0)
        assert not sliced or len(steps) > 5
        taken = list[ItemRanges]()
        while part := made.take({"jobs": 7}, Bounds(1 << 30), later):
            taken += part
        found.append(taken)
    assert found[0] == found[1]
    assert sum(map(len, found[0])) > COUNT * 20
