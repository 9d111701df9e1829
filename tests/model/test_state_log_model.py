"""The owner of a state log keeps its promises in every schedule; with one rule left out some schedule breaks one."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.model.state_log import run
from tests.model.state_log_bugs import BUGS, first_found, planted
from tests.soak import repetitions, report

FOUND_BY = {  # a seed whose schedule fails
    "S1: late entries of a former owner are applied": 2,
    "S1: a copy is applied again": 1,
    "S1: an `opened` of the same epoch counts": 0,
    "S2: the own `opened` is not checked": 9,
    "S2: two openers of one epoch own it": 41,
    "S2: the entries just before the own `opened` are not read": 0,
    "S4: an answer goes out at any offset": 0,
    "S4: an answer goes out before its entry counts": 1,
    "S5: a timeout is answered as failed": 0,
    "S5: an owner that is refused is fenced without a read": 3,
    "S5: an owner that has lost track says that nothing was done": 33,
    "S5: other bytes under the same number": 13,
    "S6: a read is answered at once": 0,
    "S6: the proof was handed over before the read came in": 373,
    "S7: the log is trimmed before the snapshot's entry counts": 1,
    "S7: the log is trimmed up to its end": 0,
    "S7: the last snapshot is deleted before the next one counts": 0,
    "S7: a snapshot has what is on its way": 0,
    "S7: a snapshot without epoch and number": 0,
    "S7: a snapshot is believed by a void entry": 0,
}
EVENTS = {
    *("lands", "lands twice", "lost", "refused", "refused but landed", "times out", "offset jumps", "trims", "deletes"),
    *("opens", "epoch again", "opening fenced", "owns", "opens from a snapshot", "crashes", "ends", "stores"),
    *("claims", "publishes", "reads", "told counts", "told void", "told unknown"),
}


@pytest.mark.soak
def test_an_owner_keeps_all_promises() -> None:
    schedules = repetitions(100, 30_000)
    assert first_found(range(schedules)) is None
    report(f"{schedules} schedules of the state log without a finding")


def test_the_schedules_of_the_state_log_reach_what_matters() -> None:
    """A model in which nothing happens would break no promise."""
    met: Counter[str] = Counter()
    for seed in range(60):
        met.update(run(seed).met)
    assert set(met) - {"scans again"} == EVENTS
    assert met["told counts"] > 15
    assert met["opens from a snapshot"] > 8


@pytest.mark.parametrize("name", list(BUGS))
def test_the_state_log_needs_each_rule(name: str) -> None:
    with planted(name):
        assert first_found(range(FOUND_BY[name], FOUND_BY[name] + 1)), "no promise is broken"
    assert first_found(range(FOUND_BY[name], FOUND_BY[name] + 1)) is None


@pytest.mark.soak
@pytest.mark.thorough
def test_the_state_log_needs_each_rule_from_other_seeds() -> None:
    for name in list(BUGS)[: repetitions(2, len(BUGS))]:
        with planted(name):
            found = first_found(range(1_000_000, 1_005_000))
        report(f"{name}: {found}")
        assert found, name


def test_a_schedule_of_the_state_log_repeats() -> None:
    assert run(7).steps == run(7).steps
