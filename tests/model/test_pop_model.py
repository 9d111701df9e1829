"""Pop groups keep their promises in every schedule; with one rule left out some schedule breaks one."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.model.pop_bugs import ALL_BUGS, first_found, planted
from tests.model.pops import run
from tests.soak import repetitions, report

FOUND_BY = {  # a seed whose schedule fails
    "Q1: the reader does not know the blocks before its position": 39,
    "Q1: the reader keeps what it judged for a read that failed": 5,
    "Q2: a grant of a record is handed out before it counts": 10,
    "S4: an ack of a record is answered before it counts": 12,
    "Q1: a read moves no position": 0,
    "Q1: a read moves the position and takes no blocks": 0,
    "S7: a snapshot without the positions of pop groups": 0,
    "Q4: the end of a record counts for another grant": 0,
    "an item of a record that retention took comes again": 0,
}
EVENTS = {
    *("opened", "crash", "fenced", "snapshot", "started", "answer lost", "left", "acked", "returned", "extended"),
    *("copy", "gave up", "refused", "throttled", "taken", "taken in"),
}


@pytest.mark.soak
def test_pop_groups_keep_all_promises() -> None:
    schedules = repetitions(200, 50_000)
    assert first_found(range(schedules)) is None
    report(f"{schedules} schedules of pop groups without a finding")


def test_the_schedules_of_pop_groups_reach_what_matters() -> None:
    """A model in which nothing happens would break no promise."""
    met: Counter[str] = Counter()
    for seed in range(300):
        met.update(run(seed))
    assert met.keys() >= EVENTS
    assert met["acked"] > 50


@pytest.mark.parametrize("name", ALL_BUGS)
def test_pop_groups_need_each_rule(name: str) -> None:
    seeds = range(FOUND_BY[name], FOUND_BY[name] + 1)
    with planted(name) as rules:
        assert first_found(seeds, rules), "no promise is broken"
    assert first_found(seeds) is None
