"""Pop groups in the machine of queues: a position and its blocks move together, and a block comes once."""

from __future__ import annotations

import pytest

from memq.errors import CorruptDataError, InvalidNameError
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.queues.decisions import (
    AckDecision,
    EndPopDecision,
    GrantDecision,
    ItemOutcome,
    ItemRanges,
    ItemState,
    ItemTerms,
    LeasedItems,
    encode_decision,
)
from memq.queues.machine import RETAINED, QueueMachine
from memq.queues.pop.groups import (
    BeginPopDecision,
    PopPlace,
    PopPosition,
    ReadPopDecision,
    RemovePopDecision,
    block_id,
    check_queue,
    is_place,
    place_of,
    topic_of,
)
from tests.unit.queue_shard import each_outcome

QUEUE, ID, NEW_ID = "orders@billing", "0a" * 16, "0b" * 16
LANE = ItemTerms(5, 10_000, 0, 0).lane()


def begin(machine: QueueMachine, topic_id: str = ID, replaced: str = "", partitions: int = 1) -> object:
    positions = tuple(PopPosition(number, 0) for number in range(partitions))
    return machine.apply(encode_decision(BeginPopDecision(QUEUE, topic_id, 10_000, 0, positions, replaced)))


def read(
    machine: QueueMachine,
    offset: int,
    *blocks: int,
    life: int | None = None,
    items: int = 2,
    lost: int = 0,
    mark: int = 7,
) -> object:
    """Read the pointer at an offset; its blocks have these ids."""
    life = machine.pops.groups[QUEUE].life if life is None else life
    held = tuple(HeldBlock(HoldId(id_, 10), 10 + items, 1_000, 0, 100) for id_ in blocks)
    lanes = (HeldLane(Target(QUEUE, ID, 3), LANE, held),)
    place = str(PopPlace(life, 0, offset, 7))
    decision = ReadPopDecision(QUEUE, life, 0, PopPosition(0, offset), PopPosition(0, offset + 1), place, lanes, lost)
    return machine.apply(encode_decision(decision))


def leased(id_: int, grant: int, *numbers: int) -> LeasedItems:
    return LeasedItems(ItemRanges(id_, tuple(end for number in numbers for end in (number, number + 1))), grant)


def grant(machine: QueueMachine, number: int, id_: int, begin: int, end: int) -> None:
    machine.apply(encode_decision(GrantDecision(number, 2_000, (ItemRanges(id_, (begin, end)),))))


def end(machine: QueueMachine, *leases: LeasedItems, removed: bool = False) -> object:
    return each_outcome(machine.apply(encode_decision(EndPopDecision(3_000, removed, leases))))


def test_a_read_counts_only_from_the_position_of_the_group() -> None:
    machine = QueueMachine()
    assert begin(machine) is True
    assert read(machine, 0, 1) == (True,)
    assert read(machine, 0, 2) is None, "another read has moved the position"
    assert read(machine, 1, 2, life=machine.pops.groups[QUEUE].life + 1) is None
    assert read(machine, 2, 2) is None, "nothing is passed over"
    assert read(machine, 1, 2) == (True,)
    assert list(machine.pops.blocks[QUEUE]) == [1, 2]
    assert machine.pops.groups[QUEUE].positions == (PopPosition(0, 2),)
    assert not machine.objects, "a block of a topic names no object"


def test_a_copy_meets_the_same_items_also_after_their_end() -> None:
    machine = QueueMachine()
    begin(machine)
    read(machine, 0, 1)
    grant(machine, 1, 1, 0, 1)
    acked = machine.apply(encode_decision(AckDecision(2_000, (leased(1, 1, 0),))))
    assert each_outcome(acked) == (ItemOutcome.ACKED,)
    assert read(machine, 1, 1) == (False,)
    block = machine.blocks[1]
    assert [block.state(number) for number in range(2)] == [ItemState.ACKED, ItemState.READY]
    assert place_of(block.key).offset == 1, "the copy may be all that is left of a lost log"
    grant(machine, 2, 1, 1, 2)
    machine.apply(encode_decision(AckDecision(2_000, (leased(1, 2, 1),))))
    assert read(machine, 2, 1) == (False,)
    assert (dict(machine.blocks), dict(machine.pops.blocks)) == ({}, {})


def test_a_group_that_exists_keeps_its_positions_and_takes_new_partitions() -> None:
    machine = QueueMachine()
    begin(machine)
    read(machine, 0, 1)
    life = machine.pops.groups[QUEUE].life
    assert begin(machine, partitions=2) is True
    group = machine.pops.groups[QUEUE]
    assert (group.life, group.positions) == (life, (PopPosition(0, 1), PopPosition(1, 0)))
    assert begin(machine, NEW_ID) is False, "another topic takes its place only if that is meant"
    assert begin(machine, NEW_ID, replaced=NEW_ID) is False
    assert begin(machine, NEW_ID, replaced=ID) is True
    group = machine.pops.groups[QUEUE]
    assert (group.topic_id, group.positions) == (NEW_ID, (PopPosition(0, 0),))
    assert group.life > life
    assert machine.state_of(1, 0) is ItemState.READY, "its items end by decisions of their own"


def test_a_group_that_was_removed_reads_nothing_and_begins_in_another_life() -> None:
    machine = QueueMachine()
    begin(machine)
    life = machine.pops.groups[QUEUE].life
    assert machine.apply(encode_decision(RemovePopDecision(QUEUE, life + 1))) is False
    assert machine.apply(encode_decision(RemovePopDecision(QUEUE))) is True
    assert machine.apply(encode_decision(RemovePopDecision(QUEUE))) is False
    assert read(machine, 0, 1, life=life) is None
    begin(machine)
    assert machine.pops.groups[QUEUE].life > life


def test_ends_count_for_the_grant_that_they_name_and_for_dead_items() -> None:
    machine = QueueMachine()
    begin(machine)
    read(machine, 0, 1, items=3, lost=4)
    grant(machine, 1, 1, 0, 2)
    assert end(machine, leased(1, 0, 0, 2)) == (ItemOutcome.UNKNOWN, ItemOutcome.EXPIRED)
    assert machine.totals[RETAINED] == 5
    assert end(machine, leased(1, 1, 0), removed=True) == (ItemOutcome.CANCELLED,)
    assert end(machine, leased(1, 1, 0, 1, 7), leased(9, 0, 0)) == (
        ItemOutcome.UNKNOWN,
        ItemOutcome.EXPIRED,
        ItemOutcome.UNKNOWN,
        ItemOutcome.UNKNOWN,
    )
    assert (machine.totals[RETAINED], machine.items, dict(machine.topics)) == (6, 0, {})


def test_a_snapshot_has_groups_and_places_and_only_then_the_new_version() -> None:
    machine = QueueMachine()
    begin(machine, partitions=2)
    read(machine, 0, 1)
    pieces = machine.begin_snapshot()
    grant(machine, 1, 1, 0, 1)
    read(machine, 1, 2)
    again = QueueMachine()
    again.restore(b"".join(pieces))
    assert again.pops.groups[QUEUE].positions == (PopPosition(0, 1), PopPosition(1, 0))
    assert (list(again.blocks), list(again.pops.blocks[QUEUE])) == ([1], [1])
    assert again.blocks[1].target == Target(QUEUE, ID, 3)
    assert read(again, 1, 2) == (True,)
    grant(again, 1, 1, 0, 1)
    assert again.snapshot() == machine.snapshot()
    assert b"version\x03" in machine.snapshot()


def test_names_places_and_ids() -> None:
    assert check_queue(QUEUE) == QUEUE
    assert topic_of(QUEUE) == "orders"
    for wrong in ("@", "a@", "@a", "a@b@c", "a b@c", "_memq@a"):
        with pytest.raises(InvalidNameError):
            check_queue(wrong)
    place = PopPlace(1, 2, 3, 4)
    assert is_place(str(place))
    assert place_of(str(place)) == place
    for text in (":1:2:3", ":1:2:3:x", "held/key"):
        with pytest.raises(CorruptDataError):
            place_of(text)
    target = Target(QUEUE, ID, 3)
    ids = {
        block_id(1, target, 5, 0, 9),
        block_id(2, target, 5, 0, 9),
        block_id(1, target, 5, 0, 10),
        block_id(1, target, 5, 0, 9, 77),
        block_id(1, Target(QUEUE, NEW_ID, 3), 5, 0, 9),
    }
    assert len(ids) == 5
    assert all(0 < each < 1 << 63 for each in ids)
