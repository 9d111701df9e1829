"""The audit's own fold of queue items: equal to the machine in random schedules, and each planted fault named."""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec
import pytest

from memq.audit.items.fold import ItemFold, decode_saved
from memq.audit.items.report import ItemFault, ItemFinding
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.queues.decisions import (
    FORMAT,
    AckDecision,
    CancelDecision,
    Dedupe,
    EndDecision,
    EnqueueDecision,
    FormerBlock,
    GrantDecision,
    ItemRanges,
    ItemState,
    ItemTerms,
    LeasedItems,
    NackDecision,
    NackKind,
    PurgeDecision,
    QueueDecision,
    RedriveDecision,
    SavedQueues,
    dedupe_digest,
    ranges_of,
)
from memq.queues.machine import QueueMachine

PLAIN = ItemTerms(5, 4_000, 0, 0)
BLOCK = 7


def enqueue(block: int, count: int = 2, terms: ItemTerms = PLAIN, due_ms: int = 100) -> EnqueueDecision:
    held = HeldBlock(HoldId(block, 0), count, due_ms, 0, 100)
    return EnqueueDecision(f"key-{block}", 0, (HeldLane(Target("jobs", "", 0), terms.lane(), (held,)),))


def grant(number: int, *numbers: int, now_ms: int = 200, block: int = BLOCK) -> GrantDecision:
    return GrantDecision(number, now_ms, (ranges_of(block, numbers),))


def ack(number: int, *numbers: int, now_ms: int = 300) -> AckDecision:
    return AckDecision(now_ms, (LeasedItems(ranges_of(BLOCK, numbers), number),))


def folded(*decisions: QueueDecision) -> ItemFold:
    fold = ItemFold(0)
    for each in decisions:
        fold.apply(FORMAT.encode_decision(each))
    return fold


def saved(*decisions: QueueDecision) -> SavedQueues:
    """Return the snapshot of the machine after decisions."""
    machine = QueueMachine()
    for each in decisions:
        machine.apply(FORMAT.encode_decision(each))
    found = decode_saved(machine.snapshot())
    assert found is not None
    return found


def faults(found: Iterable[ItemFinding]) -> list[tuple[ItemFault, str]]:
    return [(each.fault, each.item) for each in found]


class Schedule:
    """Random decisions about a few blocks, also such as have no effect."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.machine, self.fold = QueueMachine(), ItemFold(0)
        self.now_ms = 1_000
        self.grants = 0
        self.made = 0
        self.last: EnqueueDecision | None = None

    def step(self) -> bytes:
        """Return the next decision, which machine and fold have applied."""
        self.now_ms += self.dice.randrange(400)
        choices = [self._enqueue, self._grant, self._grant, self._ack, self._nack, self._end, self._settle]
        body = FORMAT.encode_decision(self.dice.choice(choices)())
        self.machine.apply(body)
        self.fold.apply(body)
        self.fold.take_findings()  # random grants name items that are over
        return body

    def _enqueue(self) -> QueueDecision:
        if self.last is not None and self.dice.random() < 0.1:
            return EnqueueDecision("stored again", self.now_ms - 60_000, self.last.lanes)
        self.made += 1
        kind = self.dice.randrange(5)
        attempts, expires_ms = self.dice.choice([0, 2]), self.dice.choice([0, self.now_ms + 3_000])
        terms = ItemTerms(5, self.dice.choice([0, 4_000]), attempts, expires_ms)
        if kind == 0:
            terms = terms._replace(key="k", ordered=True, lease_ms=4_000)
        elif kind == 1:
            digest = dedupe_digest("jobs", str(self.dice.randrange(3)))
            terms = terms._replace(dedupe=Dedupe(digest, self.now_ms, self.now_ms + 900))
        count = 1 if kind == 1 else self.dice.randrange(1, 5)
        decision = enqueue(self.made, count, terms, self.now_ms + self.dice.choice([0, 700]))
        self.last = EnqueueDecision(decision.key, self.now_ms - 60_000, decision.lanes)
        return self.last

    def _some(self) -> ItemRanges:
        id_ = self.dice.randrange(1, self.made + 2)
        return ranges_of(id_, self.dice.sample(range(5), self.dice.randrange(1, 5)))

    def _grant(self) -> QueueDecision:
        self.grants += 1
        return GrantDecision(self.grants, self.now_ms, tuple(self._some() for _ in range(3)))

    def _leases(self) -> tuple[LeasedItems, ...]:
        found = []
        for number in (number for ranges in [self._some(), self._some(), self._some()] for number in ranges):
            id_ = self.dice.randrange(1, self.made + 2)
            block = self.fold.blocks.get(id_)
            known = block.peek(number).grant if block is not None else 1
            latest = known if self.dice.random() < 0.8 else max(0, known - 1)
            found.append(LeasedItems(ranges_of(id_, [number]), latest))
        return tuple(found)

    def _ack(self) -> QueueDecision:
        return AckDecision(self.now_ms, self._leases())

    def _nack(self) -> QueueDecision:
        kind = self.dice.choice(list(NackKind))
        return NackDecision(self.now_ms + self.dice.choice([0, 500]), b"", self._leases(), kind)

    def _end(self) -> QueueDecision:
        return EndDecision(self.now_ms, self.dice.random() < 0.5, self._leases()[:2])

    def _settle(self) -> QueueDecision:
        items = (self._some(),)
        settled = (
            CancelDecision(self.now_ms, items),
            RedriveDecision(self.now_ms, items),
            PurgeDecision(self.now_ms, items),
        )
        return self.dice.choice(settled)


@pytest.mark.parametrize("seed", range(40))
def test_the_fold_has_the_state_of_the_machine_after_each_schedule(seed: int) -> None:
    schedule, seen = Schedule(seed), set[ItemState]()
    fold = schedule.fold
    for number in range(150):
        schedule.step()
        if number % 10 == 9:
            state = decode_saved(schedule.machine.snapshot())
            assert state is not None
            fold.compare(state, number)
            assert fold.take_findings() == []
        seen.update(item.state for block in fold.blocks.values() for item in block.items.values())
    assert len(seen) >= 5, "the schedule has reached few states"


@pytest.mark.parametrize("seed", range(10))
def test_a_fold_that_begins_with_a_snapshot_continues_as_one_from_the_begin(seed: int) -> None:
    schedule = Schedule(seed)
    for _ in range(60):
        schedule.step()
    fold = ItemFold(0, decode_saved(schedule.machine.snapshot()))
    for _ in range(60):
        fold.apply(schedule.step())
    fold.take_findings()
    state = decode_saved(schedule.machine.snapshot())
    assert state is not None
    fold.compare(state, 120)
    assert fold.take_findings() == []


def test_an_acked_item_that_is_granted_again_is_named() -> None:
    fold = folded(enqueue(BLOCK), grant(1, 0), ack(1, 0, now_ms=300), grant(2, 0, 1, now_ms=301))
    assert faults(fold.take_findings()) == [(ItemFault.AGAIN, f"jobs:{BLOCK:016x}:0")]


def test_a_grant_that_was_chosen_before_the_ack_is_no_fault_unless_a_worker_has_it() -> None:
    late = enqueue(BLOCK), grant(1, 0), ack(1, 0, now_ms=300), grant(2, 0, now_ms=299)
    assert folded(*late).take_findings() == []
    fold = folded(*late, ack(2, 0, now_ms=400))
    assert faults(fold.take_findings()) == [(ItemFault.AGAIN, f"jobs:{BLOCK:016x}:0")]


def test_a_grant_number_that_is_used_twice_is_named() -> None:
    fold = folded(enqueue(BLOCK), grant(5, 0), grant(5, 1))
    assert faults(fold.take_findings()) == [(ItemFault.NUMBER, f"jobs:{BLOCK:016x}:1")]


def test_a_grant_of_a_block_without_an_enqueue_is_a_loss() -> None:
    fold = folded(enqueue(BLOCK), grant(1, 0, 1, block=8))
    (found,) = fold.take_findings()
    assert (found.fault, found.items) == (ItemFault.LOST, 2)
    assert "which no enqueue in the log has" in found.cause


def test_a_snapshot_without_the_last_acks_is_named() -> None:
    begun = enqueue(BLOCK), grant(1, 0, 1)
    fold = folded(*begun, ack(1, 0))
    fold.compare(saved(*begun), 3)
    assert faults(fold.take_findings()) == [(ItemFault.AGAIN, f"jobs:{BLOCK:016x}:0")]


def test_a_snapshot_without_a_block_is_a_loss_of_its_items() -> None:
    fold = folded(enqueue(BLOCK, 3), enqueue(9, 1))
    fold.compare(saved(enqueue(9, 1)), 2)
    (found,) = fold.take_findings()
    assert (found.fault, found.item, found.items) == (ItemFault.LOST, f"jobs:{BLOCK:016x}:0", 3)


@pytest.mark.parametrize("count", [1, 2])
def test_an_ack_for_a_former_lease_that_counted_is_named(count: int) -> None:
    begun = enqueue(BLOCK, count), grant(1, 0), grant(2, 0)
    fold = folded(*begun, ack(1, 0))
    assert fold.take_findings() == []
    fold.compare(saved(*begun, ack(2, 0)), 4)
    (found,) = fold.take_findings()
    assert (found.fault, found.item) == (ItemFault.FORMER, f"jobs:{BLOCK:016x}:0")
    assert "an ack named grant 1" in found.cause


def test_an_item_that_ended_without_a_decision_is_a_loss() -> None:
    fold = folded(enqueue(BLOCK), grant(1, 0))
    fold.compare(saved(enqueue(BLOCK), grant(1, 0), ack(1, 0)), 2)
    assert faults(fold.take_findings()) == [(ItemFault.LOST, f"jobs:{BLOCK:016x}:0")]


def test_another_last_grant_in_a_snapshot_is_a_contradiction() -> None:
    fold = folded(enqueue(BLOCK), grant(3, 0))
    state = msgspec.structs.replace(saved(enqueue(BLOCK), grant(3, 0)), last_grant=2)
    fold.compare(state, 2)
    (found,) = fold.take_findings()
    assert (found.fault, found.cause) == (
        ItemFault.FAULT,
        "the snapshot at offset 2 has grant 2 as the last one, and the log 3",
    )


def test_a_snapshot_of_an_earlier_version_is_compared() -> None:
    begun = enqueue(BLOCK), grant(1, 0), ack(1, 0)
    (lane,) = enqueue(BLOCK).lanes
    acked, ready = bytes([ItemState.ACKED, ItemState.READY]), bytes([ItemState.READY, ItemState.READY])
    former = FormerBlock(1, lane, f"key-{BLOCK}", acked, (1, 0), (1, 0))
    state = SavedQueues(2, 1, 1, [former], [], {"acked": 1})
    fold = folded(*begun)
    fold.compare(state, 3)
    assert fold.take_findings() == []
    assert ItemFold(0, state).blocks[BLOCK].peek(0).state is ItemState.ACKED
    fold.compare(msgspec.structs.replace(state, blocks=[msgspec.structs.replace(former, states=ready)]), 3)
    assert faults(fold.take_findings()) == [(ItemFault.AGAIN, f"jobs:{BLOCK:016x}:0")]
