"""The machine of held records keeps its promises in every schedule; with a rule left out some schedule breaks one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from memq.format.held_object import HeldBlock, HeldLane, HoldId
from memq.holds.decisions import DoneDecision, HoldDecision, ReleaseDecision, Unit, encode_decision
from memq.holds.machine import HoldMachine
from tests.model.holds import TARGETS, BrokenHoldError, Schedule
from tests.simulation.bug import Change, Planted, after, body, omit, swap
from tests.simulation.planted_bugs import plant
from tests.soak import repetitions

MACHINE, SPILLED = "memq.holds.machine", "memq.holds.spilled_holds"
BUGS: dict[str, tuple[str, Change]] = {
    "H1: a block that has ended is held again": (
        "HoldMachine._take",
        swap("state in (None, HoldState.HELD)", "True"),
    ),
    "H1: an end is forgotten at once": ("HoldMachine._forget", body("self._ended.clear()")),
    "H1: a snapshot without the ends": ("HoldMachine.begin_snapshot", swap("self._ended.items()", "()")),
    "H2: a number is given twice": ("HoldMachine._release", swap("unit.r != self.next_number(unit.target)", "False")),
    "H2: a snapshot without the numbers": (
        "HoldMachine.begin_snapshot",
        swap("(self.numbers, self.totals, self.dropped)", "({}, self.totals, self.dropped)"),
    ),
    "H2: a cancel tells that it dropped what is released": (
        "HoldMachine.state_in_memory",
        swap("HoldState.RELEASED", "HoldState.DROPPED"),
    ),
    "H2: a unit takes holds of another target": (
        "HoldMachine._release",
        swap("hold is not None and hold.target == unit.target", "hold is not None"),
    ),
    "H5: an object is not named until its unit is done": (
        "HoldMachine._release",
        after("self._released.add", "self.objects.pop(hold.key, None)"),
    ),
    "H5: the object of a dropped hold is named for ever": ("HoldMachine._drop", omit("self._unname")),
    "H5: a snapshot without units on their way": ("HoldMachine.begin_snapshot", swap("self._all_units()", "()")),
    "H6: a hold that left the marked ones is live in the run": ("SpilledHolds.left", body("pass")),
    "H6: a run of an earlier mark counts": ("SpilledHolds.take", swap("decision.mark == self.mark", "True")),
    "H6: holds move, and stay in memory": ("HoldMachine._move", swap("self.open.pop(hold)", "self.open[hold]")),
    "H6: the ids of moved holds are forgotten at once": ("SpilledHolds.forget", body("self._recent.clear()")),
    "H6: a block in a run that comes again is live twice": ("SpilledHolds.replace", body("pass")),
    "H6: a dropped hold of a run is brought": ("HoldMachine._bring", swap("block.id not in run.dropped", "True")),
    "H6: holds of a run are brought twice": ("SpilledHolds.bring", swap("state.at != decision.before", "False")),
    "H6: a merge forgets what was dropped meanwhile": (
        "SpilledHolds.merge",
        swap("list(state.dropped.items())[each.dropped:]", "()"),
    ),
    "H6: a merge of a run that was brought meanwhile counts": (
        "SpilledHolds.merge",
        swap("state.at != each.at", "False"),
    ),
    "H6: a snapshot without the runs": ("SpilledHolds.save", swap("self.runs.values()", "()")),
    "H6: a snapshot without the marked holds": ("SpilledHolds.save", swap("list(self.marked)", "[]")),
    "H6: a snapshot without the holds that left the marked ones": (
        "SpilledHolds.save",
        swap("list(self._unmarked.items())", "[]"),
    ),
}


def first_found(seeds: Iterable[int]) -> str | None:
    """Return the promise that the first of these schedules breaks; None for none."""
    for seed in seeds:
        try:
            Schedule(seed).run()
        except (BrokenHoldError, KeyError, AssertionError) as error:
            return f"{seed}: {error!r}"
    return None


@pytest.mark.soak
def test_an_owner_of_held_records_keeps_all_promises() -> None:
    assert first_found(range(repetitions(300, 20_000))) is None


def test_the_schedules_of_held_records_reach_what_matters() -> None:
    """A model in which nothing happens would break no promise."""
    met: Counter[str] = Counter()
    for seed in range(100):
        met.update(Schedule(seed).run())
    needed = {
        *("held: <HoldState.HELD: 1>", "held: <HoldState.RELEASED: 2>", "held: <HoldState.DROPPED: 3>"),
        *("cancelled: <HoldState.DROPPED: 3>", "cancelled: <HoldState.RELEASED: 2>"),
        *("released", "old number", "done", "restored"),
        *("marked", "moved", "old mark", "brought", "brought before", "merged", "old merge"),
    }
    assert needed <= set(met)
    assert min(met[each] for each in needed) > 10


@pytest.mark.parametrize("name", list(BUGS))
def test_held_records_need_each_rule(name: str) -> None:
    target, change = BUGS[name]
    with plant(Planted(name, SPILLED if target.startswith("SpilledHolds") else MACHINE, target, change)):
        assert first_found(range(300)), "no promise is broken"


def test_a_state_in_another_life_counts_its_units_from_one() -> None:
    """Its targets know other units under the numbers that were given after the snapshot."""
    machine = HoldMachine()
    lane = HeldLane(TARGETS[0], "", tuple(HeldBlock(HoldId(number, 0), 1, 5, 0, 1) for number in (1, 2, 3)))
    machine.apply(encode_decision(HoldDecision("object", 0, (lane,))))
    units = tuple(Unit(TARGETS[0], r, (HoldId(r, 0),)) for r in (1, 2, 3))
    machine.apply(encode_decision(ReleaseDecision(units)))
    machine.apply(encode_decision(DoneDecision(9, ((TARGETS[0], 1),))))
    machine.renew(7)
    restored = HoldMachine()
    restored.restore(machine.snapshot())
    assert (restored.life, restored.next_number(TARGETS[0])) == (7, 3)
    assert {r: each.holds[0].block.id.producer for r, each in restored.units[TARGETS[0]].items()} == {1: 2, 2: 3}
    machine.apply(encode_decision(DoneDecision(9, ((TARGETS[0], 1), (TARGETS[0], 2)))))
    assert not machine.objects
    machine.renew(8)
    assert machine.next_number(TARGETS[0]) == 1
