"""The machine of held records: states of holds, forgotten ends, snapshots of other versions."""

from __future__ import annotations

import pytest

from memq.errors import CorruptDataError, UnsupportedFormatError
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.holds.machine import (
    DoneDecision,
    DropDecision,
    HoldDecision,
    HoldMachine,
    HoldsDecision,
    HoldState,
    ReleaseDecision,
    Unit,
    decode_decision,
    encode_decision,
)

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
    newer = state.replace(b"version\x01", b"version\x02")
    assert newer != state
    with pytest.raises(UnsupportedFormatError, match="version 2, not 1"):
        HoldMachine().restore(newer)
    with pytest.raises(CorruptDataError, match="snapshot of held records can't be read"):
        HoldMachine().restore(b"\xc1")
    with pytest.raises(CorruptDataError, match="decision about held records can't be read"):
        decode_decision(b"\xc1")
