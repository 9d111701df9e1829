"""The machine of held records: states of holds, forgotten ends, snapshots of other versions."""

from __future__ import annotations

import msgspec
import pytest

from memq.errors import CorruptDataError, UnsupportedFormatError
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.held_sequences import delayed_sequence
from memq.holds.decisions import (
    DoneDecision,
    DropDecision,
    HoldDecision,
    HoldsDecision,
    HoldState,
    ReleaseDecision,
    Unit,
    decode_decision,
    encode_decision,
)
from memq.holds.machine import HoldMachine, UnitCount

TARGET = Target("clicks", "ab" * 16, 0)
ONE, TWO, THREE, FOUR = (HoldId(producer, 0) for producer in (1, 2, 3, 4))


def decide(machine: HoldMachine, decision: HoldsDecision) -> object:
    return machine.apply(encode_decision(decision))


def hold(machine: HoldMachine, *holds: HoldId, lane: str = "", key: str = "object", before_ms: int = 0) -> object:
    blocks = tuple(HeldBlock(each, 1, 0 if lane else 50, 0, 4) for each in holds)
    return decide(machine, HoldDecision(key, before_ms, (HeldLane(TARGET, lane, blocks),)))


def test_a_hold_has_its_state_from_its_decision_until_its_end_is_forgotten() -> None:
    machine = HoldMachine()
    assert machine.state_of(ONE) is None
    assert hold(machine, ONE, TWO) == (HoldState.HELD, HoldState.HELD)
    assert machine.state_of(ONE) is HoldState.HELD
    assert decide(machine, ReleaseDecision((Unit(TARGET, 1, (ONE,)),))) == (True,)
    assert machine.state_of(ONE) is HoldState.RELEASED
    assert decide(machine, DropDecision(70, (TWO,))) == (HoldState.DROPPED,)
    decide(machine, DoneDecision(80, ((TARGET, 1),)))
    hold(machine, before_ms=70)
    assert (machine.state_of(ONE), machine.state_of(TWO)) == (HoldState.RELEASED, HoldState.DROPPED)
    hold(machine, before_ms=71)
    assert (machine.state_of(ONE), machine.state_of(TWO)) == (HoldState.RELEASED, None)
    hold(machine, before_ms=81)
    assert machine.state_of(ONE) is None


def test_a_block_that_comes_again_in_another_object_leaves_the_first_one() -> None:
    machine = HoldMachine()
    hold(machine, ONE, TWO)
    hold(machine, ONE, key="another")
    assert machine.objects == {"object": 1, "another": 1}
    assert machine.waiting == {TARGET: 2}


def test_a_state_keeps_no_text_of_objects_and_lanes_that_are_gone() -> None:
    """Else the memory of an owner grows with each object."""
    machine = HoldMachine()
    hold(machine, ONE, key="object-a")
    hold(machine, TWO, lane="1.1", key="object-b")
    gone = [*texts_of(machine, ONE), *texts_of(machine, TWO)]
    decide(machine, DropDecision(1, (ONE,)))
    machine.release_lane("1.1")
    decide(machine, DoneDecision(2, ((TARGET, 1),)))
    assert (machine.objects, machine.lanes, machine.waiting, machine.units) == ({}, {}, {}, {})
    hold(machine, THREE, key="object-a")
    hold(machine, FOUR, lane="1.1", key="object-b")
    again = [*texts_of(machine, THREE), *texts_of(machine, FOUR)]
    assert again == gone
    assert not any(new is old for new, old in zip(again, gone, strict=True) if old), "it had kept the first strings"


def texts_of(machine: HoldMachine, id_: HoldId) -> tuple[str, str]:
    """Return key and lane of an open hold."""
    return machine.open[id_].key, machine.open[id_].lane


def test_a_machine_alone_takes_blocks_of_each_lane() -> None:
    machine = HoldMachine()
    assert hold(machine, ONE, lane="1.1") == (HoldState.HELD,)
    machine.enter = lambda lane: lane == "1.2"
    assert hold(machine, ONE, TWO, lane="1.1") == (HoldState.HELD, HoldState.REFUSED), "one that is held stays so"
    assert hold(machine, THREE, lane="1.2") == (HoldState.HELD,)


def test_a_snapshot_has_the_life_and_is_read_in_its_version_alone() -> None:
    machine = HoldMachine()
    hold(machine, ONE)
    assert machine.life == 0, "targets know the first life by this number"
    decide(machine, ReleaseDecision((Unit(TARGET, 1, (ONE,)),)))
    decide(machine, DropDecision(3, (TWO,)))
    machine.life = 5
    state = machine.snapshot()
    restored = HoldMachine()
    restored.restore(state)
    assert (restored.snapshot(), restored.life) == (state, 5)
    assert restored.state_of(ONE) is HoldState.RELEASED
    newer = state.replace(b"version\x01", b"version\x04")
    assert newer != state
    with pytest.raises(UnsupportedFormatError, match="version 4, above 3"):
        HoldMachine().restore(newer)
    with pytest.raises(CorruptDataError, match="snapshot of held records can't be read"):
        HoldMachine().restore(b"\xc1")
    with pytest.raises(CorruptDataError, match="decision about held records can't be read"):
        decode_decision(b"\xc1")
    text = b"\x82\xa4type\xa1\xff\xa1a\x01"  # a text that is no UTF-8, for which msgspec has another error
    with pytest.raises(CorruptDataError, match="decision about held records can't be read"):
        decode_decision(text)


# ---- counts for the audit ------------------------------------------------------------------------


def held_ids(*producers: int) -> tuple[HoldId, ...]:
    return tuple(HoldId(producer, delayed_sequence(50)) for producer in producers)


def hold_records(machine: HoldMachine, *holds: HoldId, records: int = 1, lane: str = "") -> None:
    blocks = tuple(HeldBlock(each, each.first + records, 0 if lane else 50, 0, 4) for each in holds)
    decide(machine, HoldDecision("object", 0, (HeldLane(TARGET, lane, blocks),)))


def test_a_shard_counts_the_records_of_its_units_and_those_that_are_done() -> None:
    machine = HoldMachine()
    assert machine.count_of(TARGET) == UnitCount(0, 0, 0, 0)
    one, two, three, four = held_ids(1, 2, 3, 4)
    hold_records(machine, one, two, three)
    hold_records(machine, four, records=5, lane="1.1")
    decide(machine, ReleaseDecision((Unit(TARGET, 1, (one, two)),)))
    machine.release_lane("1.1")
    assert [each.total for each in machine.units[TARGET].values()] == [2, 7]
    assert machine.count_of(TARGET) == UnitCount(2, 7, 0, 0)
    decide(machine, DropDecision(60, (three, three, one)))
    decide(machine, DoneDecision(70, ((TARGET, 1),)))
    assert machine.count_of(TARGET) == UnitCount(2, 7, 1, 2, dropped=1)
    restored = HoldMachine()
    restored.restore(machine.snapshot())
    assert restored.count_of(TARGET) == machine.count_of(TARGET)
    assert [each.total for each in restored.units[TARGET].values()] == [7]
    restored.renew(9)
    assert restored.count_of(TARGET) == UnitCount(1, 5, 0, 0, dropped=1)
    assert [(number, each.total) for number, each in restored.units[TARGET].items()] == [(1, 5)]
    decide(restored, DoneDecision(80, ((TARGET, 1),)))
    assert restored.count_of(TARGET) == UnitCount(1, 5, 1, 5, dropped=1)


def test_a_shard_does_not_count_records_of_an_earlier_release_and_rolled_back_ones() -> None:
    machine = HoldMachine()
    hold(machine, ONE, TWO)
    hold_records(machine, *held_ids(5), lane="1.1")
    decide(machine, ReleaseDecision((Unit(TARGET, 1, (ONE,)),)))
    decide(machine, DropDecision(60, (TWO,)))
    machine.drop_lane("1.1", 60)
    assert machine.count_of(TARGET) == UnitCount(1, 0, 0, 0)


def test_a_snapshot_of_an_earlier_release_has_no_counts() -> None:
    machine = HoldMachine()
    for number in (1, 2, 3):
        hold_records(machine, *held_ids(number), records=number)
        decide(machine, ReleaseDecision((Unit(TARGET, number, held_ids(number)),)))
    decide(machine, DoneDecision(70, ((TARGET, 1),)))
    saved = msgspec.msgpack.decode(machine.snapshot())
    del saved["totals"]
    restored = HoldMachine()
    restored.restore(msgspec.msgpack.encode(saved))
    assert [each.total for each in restored.units[TARGET].values()] == [2, 5], "they count from the oldest one left"
    assert restored.count_of(TARGET) == UnitCount(3, 5, 1, 0)
