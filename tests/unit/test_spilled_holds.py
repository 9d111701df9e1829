"""Holds that are due late in the state of held records: they move into runs, are merged, dropped and brought (H6)."""

from __future__ import annotations

from typing import Any

import pytest

from memq.errors import CorruptDataError
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.held_sequences import delayed_sequence
from memq.format.state_log.held_run import HELD_ROWS, RunEntry
from memq.format.state_log.run import NamedRun, RunWriter
from memq.holds.decisions import (
    DoneDecision,
    DropDecision,
    HoldDecision,
    HoldsDecision,
    HoldState,
    ReleaseDecision,
    Unit,
    encode_decision,
)
from memq.holds.machine import HoldMachine
from memq.holds.spilled_holds import (
    BringDecision,
    MarkDecision,
    MergeDecision,
    RecentIds,
    ReplacedRun,
    RunDecision,
    SpilledPlace,
)

A, B = Target("clicks", "ab" * 16, 0), Target("orders", "cd" * 16, 1)
ONE, TWO, THREE, FOUR = (HoldId(producer, delayed_sequence(100 * producer)) for producer in (1, 2, 3, 4))


def decide(machine: HoldMachine, decision: HoldsDecision) -> Any:
    return machine.apply(encode_decision(decision))


def block(hold: HoldId) -> HeldBlock:
    return HeldBlock(hold, hold.first + 1, 100 * hold.producer, 0, 1)


def entry(hold: HoldId, target: Target = A) -> RunEntry:
    return RunEntry(block(hold), target, f"object {hold.producer}")


def hold(machine: HoldMachine, *holds: HoldId, target: Target = A, key: str = "", before_ms: int = 0) -> None:
    for each in holds:
        lane = HeldLane(target, "", (block(each),))
        assert decide(machine, HoldDecision(key or f"object {each.producer}", before_ms, (lane,))) == (HoldState.HELD,)


def run_of(key: str, *holds: HoldId, level: int = 0, group: int = 1) -> NamedRun:
    writer = RunWriter(HELD_ROWS)
    writer.add([entry(each) for each in holds])
    return writer.finish(key, level, group)[0]


def moved(machine: HoldMachine, key: str, *holds: HoldId, now_ms: int = 50) -> None:
    """Let holds be held, and move them into a run; the first is due before all others."""
    hold(machine, *holds)
    mark = decide(machine, MarkDecision(100 * holds[0].producer))
    assert decide(machine, RunDecision(mark, (run_of(key, *holds, group=mark),), now_ms)) is True


def drop(machine: HoldMachine, hold: HoldId, run: str = "", target: Target = A) -> HoldState | None:
    place = SpilledPlace(run, 100 * hold.producer, target, 1) if run else None
    (state,) = decide(machine, DropDecision(7, (hold,), (place,)))
    return state  # type: ignore[no-any-return]


def bring(machine: HoldMachine, run: str, *holds: HoldId, before: int = 0, to: HoldId | None = None) -> bool:
    objects = tuple((f"object {each.producer}", (HeldLane(A, "", (block(each),)),)) for each in holds)
    last = to or holds[-1]
    at = (100 * before, before, delayed_sequence(100 * before)) if before else (0, 0, 0)
    answer = decide(machine, BringDecision(run, at, (100 * last.producer, last.producer, last.first), objects))
    assert isinstance(answer, bool)
    return answer


def copy_of(machine: HoldMachine) -> HoldMachine:
    copied = HoldMachine()
    copied.restore(machine.snapshot())
    assert copied.snapshot() == machine.snapshot()
    return copied


def test_holds_that_move_into_a_run_leave_the_memory_and_are_counted() -> None:
    machine = HoldMachine()
    moved(machine, "run", TWO, THREE)
    hold(machine, ONE)
    assert (list(machine.open), machine.objects) == ([ONE], {"object 1": 1})
    assert (machine.waiting, machine.waiting_count) == ({A: 3}, 3)
    assert (machine.state_of(TWO), machine.state_in_memory(TWO)) == (HoldState.HELD, None)
    restored = copy_of(machine)
    assert (restored.waiting, restored.waiting_count, restored.undelivered()) == ({A: 3}, 3, {A})
    assert restored.spilled.runs == machine.spilled.runs


def test_a_state_without_runs_has_the_version_that_earlier_brokers_read() -> None:
    machine = HoldMachine()
    hold(machine, ONE)
    assert b"version\x01" in machine.snapshot()
    decide(machine, MarkDecision(100))
    assert b"version\x02" in machine.snapshot()


def test_a_hold_that_leaves_marked_ones_is_dead_in_the_run() -> None:
    machine = HoldMachine()
    hold(machine, ONE, TWO, THREE)
    mark = decide(machine, MarkDecision(100))
    assert drop(machine, ONE) is HoldState.DROPPED
    decide(machine, ReleaseDecision((Unit(A, 1, (TWO,)),)))
    machine = copy_of(machine)
    run = run_of("run", ONE, TWO, THREE)
    assert decide(machine, RunDecision(mark, (run,), 50)) is True
    assert list(machine.spilled.runs["run"].dropped) == [ONE, TWO]
    assert machine.waiting == {A: 1}
    assert bring(machine, "run", ONE, TWO, THREE)
    assert list(machine.open) == [THREE]
    assert (machine.state_of(ONE), machine.state_of(TWO)) == (HoldState.DROPPED, HoldState.RELEASED)


def test_only_the_run_of_the_last_mark_counts() -> None:
    machine = HoldMachine()
    hold(machine, ONE, TWO)
    first = decide(machine, MarkDecision(100))
    second = decide(machine, MarkDecision(200))
    assert decide(machine, RunDecision(first, (run_of("early", ONE, TWO),), 50)) is False
    assert decide(machine, RunDecision(second, (run_of("late", TWO),), 50)) is True
    assert decide(machine, RunDecision(second, (run_of("again", TWO),), 50)) is False
    assert (list(machine.open), list(machine.spilled.runs)) == ([ONE], ["late"])


def test_a_hold_in_a_run_is_dropped_once() -> None:
    machine = HoldMachine()
    moved(machine, "run", ONE, TWO)
    assert drop(machine, ONE, "other") is HoldState.HELD, "find it again"
    assert drop(machine, ONE, "run") is HoldState.DROPPED
    assert machine.waiting == {A: 1}
    machine = copy_of(machine)
    assert drop(machine, ONE, "run") is HoldState.DROPPED
    assert machine.waiting == {A: 1}
    hold(machine, THREE, before_ms=8)
    assert drop(machine, ONE, "run") is None, "its end is forgotten"
    assert machine.waiting == {A: 2}
    assert bring(machine, "run", ONE, TWO)
    assert (list(machine.open), list(machine.spilled.runs)) == ([THREE, TWO], [])


def test_a_hold_that_was_brought_is_dropped_in_memory() -> None:
    machine = HoldMachine()
    moved(machine, "run", ONE, TWO)
    assert bring(machine, "run", ONE)
    assert machine.objects == {"object 1": 1}
    assert drop(machine, ONE, "run") is HoldState.DROPPED
    assert (machine.spilled.runs["run"].dropped, machine.waiting, machine.objects) == ({}, {A: 1}, {})


def test_holds_of_a_run_are_brought_once() -> None:
    machine = HoldMachine()
    moved(machine, "run", ONE, TWO)
    assert bring(machine, "run", ONE)
    assert not bring(machine, "run", ONE), "its place is another one now"
    assert machine.waiting == {A: 2}
    assert bring(machine, "run", TWO, before=1)
    assert (list(machine.open), machine.waiting, machine.spilled.runs) == ([ONE, TWO], {A: 2}, {})
    assert not bring(machine, "run", TWO, before=1)


def test_a_merge_keeps_what_was_dropped_meanwhile() -> None:
    machine = HoldMachine()
    moved(machine, "even", TWO, FOUR)
    moved(machine, "odd", ONE, THREE)
    drop(machine, TWO, "even")
    replaced = (ReplacedRun("even", (0, 0, 0), 1), ReplacedRun("odd", (0, 0, 0), 0))
    drop(machine, THREE, "odd")
    merge = MergeDecision(replaced, (run_of("low", ONE, level=1), run_of("high", THREE, FOUR, level=1)))
    assert decide(machine, merge) is True
    assert {key: list(state.dropped) for key, state in machine.spilled.runs.items()} == {"low": [], "high": [THREE]}
    assert decide(machine, merge) is False
    assert drop(machine, TWO, "even") is HoldState.DROPPED, "its end is known"
    assert drop(machine, FOUR, "even") is HoldState.HELD


def test_a_merge_of_a_run_that_was_brought_meanwhile_does_not_count() -> None:
    machine = HoldMachine()
    moved(machine, "run", ONE, TWO)
    merge = MergeDecision((ReplacedRun("run", (0, 0, 0), 0),), (run_of("merged", ONE, TWO),))
    bring(machine, "run", ONE)
    assert decide(machine, merge) is False
    assert list(machine.spilled.runs) == ["run"]


def test_a_block_that_comes_again_under_another_object_leaves_its_run() -> None:
    machine = HoldMachine()
    moved(machine, "run", ONE, TWO)
    hold(machine, ONE, key="again")
    assert (machine.objects, machine.waiting) == ({"again": 1}, {A: 2})
    assert bring(machine, "run", ONE, TWO)
    assert (machine.open[ONE].key, machine.waiting) == ("again", {A: 2})


def test_a_block_that_came_again_and_was_released_is_not_brought_from_its_run() -> None:
    machine = HoldMachine()
    moved(machine, "run", ONE, TWO)
    hold(machine, ONE, key="again")
    assert decide(machine, ReleaseDecision((Unit(A, 1, (ONE,)),))) == (True,)
    assert bring(machine, "run", ONE, TWO)
    assert (list(machine.open), machine.waiting) == ([TWO], {A: 1})


def test_a_cancel_with_an_old_place_of_a_hold_that_was_brought_and_forgotten_changes_nothing() -> None:
    machine = HoldMachine()
    moved(machine, "run", ONE, TWO)
    assert bring(machine, "run", ONE)
    assert decide(machine, ReleaseDecision((Unit(A, 1, (ONE,)),))) == (True,)
    decide(machine, DoneDecision(5, ((A, 1),)))
    hold(machine, THREE, before_ms=60)
    assert drop(machine, ONE, "run") is None
    assert (machine.waiting, machine.spilled.runs["run"].dropped, machine.dropped) == ({A: 2}, {}, {})


def test_the_ids_of_moved_holds_are_known_for_a_time() -> None:
    machine = HoldMachine()
    moved(machine, "run", ONE, TWO, now_ms=50)
    hold(machine, THREE, before_ms=50)
    assert machine.state_of(ONE) is HoldState.HELD
    machine = copy_of(machine)
    assert machine.state_of(ONE) is HoldState.HELD
    hold(machine, FOUR, before_ms=51)
    assert machine.state_of(ONE) is None


def test_ids_with_sequences_are_distinguished() -> None:
    ids = RecentIds(1, [HoldId(5, 7), HoldId(5, 0), HoldId(2, 1)])
    assert [HoldId(*each) in ids for each in ((5, 7), (5, 0), (2, 1), (5, 1), (2, 0), (9, 0))] == [True] * 3 + [
        False
    ] * 3
    both = RecentIds(9, [HoldId(3, 0)]).with_(ids)
    assert (both.moved_ms, sorted(both, key=lambda hold: (hold.producer, hold.first))) == (
        9,
        [HoldId(2, 1), HoldId(3, 0), HoldId(5, 0), HoldId(5, 7)],
    )
    assert all(each in both for each in (*ids, HoldId(3, 0)))


def test_holds_whose_ids_do_not_say_when_they_are_due_stay_in_memory() -> None:
    machine = HoldMachine()
    early = HoldId(7, 0)  # of an earlier release
    hold(machine, early, ONE)
    decide(machine, MarkDecision(0))
    assert list(machine.spilled.marked) == [ONE]


def test_a_drop_in_a_run_counts_its_records() -> None:
    machine = HoldMachine()
    moved(machine, "run", ONE, TWO)
    drop(machine, ONE, "run")
    drop(machine, ONE, "run")
    assert copy_of(machine).count_of(A).dropped == 1


def test_sets_of_ids_become_larger_ones() -> None:
    machine = HoldMachine()
    for producer in range(1, 9):
        moved(machine, f"run {producer}", HoldId(producer, delayed_sequence(100 * producer)), now_ms=producer)
    assert len(machine.spilled.save().recent) == 1
    ids = (HoldId(producer, delayed_sequence(100 * producer)) for producer in range(1, 9))
    assert all(machine.spilled.is_recent(each) for each in ids)


def test_a_state_with_broken_ids_is_damage() -> None:
    machine = HoldMachine()
    moved(machine, "run", ONE)
    state = machine.snapshot()
    for producers in (b"\xc4\x08" + bytes([1, *[0] * 7]),):
        broken = state.replace(producers, b"\xc4\x07" + producers[2:9])
        assert broken != state
        with pytest.raises(CorruptDataError, match="snapshot of held records can't be read"):
            HoldMachine().restore(broken)
