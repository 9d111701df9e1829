"""The opening of a state log with a large state: it is read in slices, and other work runs between them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from memq.errors import CorruptDataError
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.key import state_snapshot_key
from memq.format.state_log.entry import OpenedState, StateDecision, StateDecisions
from memq.format.state_log.snapshot import SavedState
from memq.holds.decisions import (
    HOLDS_MACHINE,
    DoneDecision,
    DropDecision,
    HoldDecision,
    HoldsDecision,
    ReleaseDecision,
    Unit,
    encode_decision,
)
from memq.holds.machine import HoldMachine
from memq.holds.snapshots import SLICE_HOLDS
from memq.state_log import StateMachine
from memq.state_log.opening import SLICE_BYTES
from memq.state_log.snapshot_store import SnapshotStore
from tests.unit.state_log_rig import LOG, Rig, on_rig

TARGET = Target("clicks", "ab" * 16, 0)
IN_OBJECT = 100


def decide(machine: HoldMachine, decision: HoldsDecision) -> None:
    machine.apply(encode_decision(decision))


def held(machine: HoldMachine, ids: list[HoldId]) -> None:
    """Let holds be held, IN_OBJECT of them in each object."""
    for at in range(0, len(ids), IN_OBJECT):
        decide(machine, hold_decision(ids[at : at + IN_OBJECT]))


def hold_decision(ids: list[HoldId]) -> HoldDecision:
    blocks = tuple(HeldBlock(each, each.first + 1, each.producer, 0, 1) for each in ids)
    return HoldDecision(f"object {ids[0].producer}", 0, (HeldLane(TARGET, "", blocks),))


def large_machine(slices: int) -> HoldMachine:
    """Return a machine with this many slices of open holds, of units, of dropped holds and of done ones."""
    machine = HoldMachine()
    for number in range(4):
        ids = [HoldId(number * 1_000_000 + each, 0) for each in range(slices * SLICE_HOLDS)]
        held(machine, ids)
        if number == 1:
            decide(machine, DropDecision(50, tuple(ids)))
        if number > 1:
            for at in range(0, len(ids), IN_OBJECT):
                unit = Unit(TARGET, machine.next_number(TARGET), tuple(ids[at : at + IN_OBJECT]))
                decide(machine, ReleaseDecision((unit,)))
                if number == 2:
                    decide(machine, DoneDecision(60, ((TARGET, unit.r),)))
    return machine


def test_a_large_state_is_read_in_slices() -> None:
    state = large_machine(2).snapshot()
    again = HoldMachine()
    sizes = [len(again.objects) for _ in again.begin_restore(state)]
    assert len(sizes) == 8, "open holds, units, and ended holds twice"
    assert sizes[:4] == [10, 20, 30, 40]
    assert again.snapshot() == state


def test_a_state_without_a_full_slice_is_read_at_once() -> None:
    machine = HoldMachine()
    held(machine, [HoldId(each, 0) for each in range(SLICE_HOLDS - 1)])
    assert list(HoldMachine().begin_restore(machine.snapshot())) == []


@pytest.mark.parametrize("items", ["objects", "units", "ended"])
def test_a_damaged_item_of_a_state_is_damage(items: str) -> None:
    saved = msgspec.msgpack.decode(large_machine(1).snapshot())
    saved[items][-1] = 7
    with pytest.raises(CorruptDataError, match="snapshot of held records can't be read"):
        HoldMachine().restore(msgspec.msgpack.encode(saved))


def machines() -> dict[str, StateMachine]:
    return {HOLDS_MACHINE: HoldMachine()}


async def turns_of_opening(rig: Rig, epoch: int) -> int:
    """Return how often another task runs while a log is opened."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await rig.opened(epoch, machines)
    counting.cancel()
    return turns


async def name_snapshot(rig: Rig, epoch: int, machine: HoldMachine) -> None:
    """Let a snapshot of a machine be the last one of the log."""
    await rig.put(epoch, 0, OpenedState(1, "b2"))
    offset = rig.queue.logs[LOG].end
    key = state_snapshot_key("memq", LOG.topic, LOG.topic_id, LOG.partition, epoch, offset)
    saved = SavedState(offset, epoch, 0, {HOLDS_MACHINE: machine.snapshot()})
    await rig.put(epoch, 0, await SnapshotStore(rig.store).put(saved, key))


def test_other_work_runs_while_a_log_with_a_large_snapshot_is_opened() -> None:
    async def work(rig: Rig) -> None:
        await name_snapshot(rig, 1, HoldMachine())
        few = await turns_of_opening(rig, 2)
        await name_snapshot(rig, 3, large_machine(2))
        assert await turns_of_opening(rig, 4) == few + 8

    on_rig(work)


def test_other_work_runs_while_a_log_with_many_decisions_is_opened() -> None:
    async def work(rig: Rig) -> None:
        few = await turns_of_opening(rig, 1)
        await rig.put(2, 0, OpenedState(1, "b2"))
        for number in range(40):
            decision = hold_decision([HoldId(number * 1_000 + each, 0) for each in range(1_000)])
            body = StateDecisions((StateDecision(HOLDS_MACHINE, encode_decision(decision)),))
            await rig.put(2, number, body)
        size = sum(len(entry.body) for entry in rig.queue.logs[LOG].entries)
        assert size > 4 * SLICE_BYTES
        assert await turns_of_opening(rig, 3) >= few + size // SLICE_BYTES

    on_rig(work)
