"""Items in runs keep all promises of leases in every schedule; with one rule left out some schedule breaks one."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.model.spilled_bugs import ALL_BUGS, first_found, planted
from tests.model.spilled_leases import run
from tests.soak import repetitions, report

FOUND_BY = {  # a seed whose schedule fails
    "an item in a run is cancelled in vain": 11,
    "an item is granted before the first place in runs": 26,
    "an item is granted before a lower priority number in a run": 20,
    "an item waits for a block in a run that is not due": 4,
    "the first place stays where it was": 889,
    "a dead copy is the first place of a run": 142,
    "a block is brought twice": 3,
    "a bring counts for a run at another place": 190,
    "a run goes with blocks that were not brought": 26,
    "a block that was granted moves": 8,
    "a block that came again moves with its former object": 4,
    "a block in a run that comes again is new": 4,
    "a brought block has another arrival": 743,
    "a snapshot without runs": 4,
    "a snapshot with blocks that have left their run": 26,
    "items in runs are not counted by a snapshot": 4,
}
EVENTS = {
    *(
        "opened",
        "crash",
        "fenced",
        "enqueued",
        "known",
        "snapshot",
        "started",
        "left",
        "acked",
        "returned",
        "lease-lost",
    ),
    *("spilled", "brought", "at another place", "picked", "chosen with runs", "cancel: cancelled", "cancel: unknown"),
}


@pytest.mark.soak
def test_items_in_runs_keep_all_promises() -> None:
    schedules = repetitions(300, 100_000)
    assert first_found(range(schedules)) is None
    report(f"{schedules} schedules of items in runs without a finding")


def test_the_schedules_of_items_in_runs_reach_what_matters() -> None:
    met: Counter[str] = Counter()
    for seed in range(400):
        met.update(run(seed))
    assert met.keys() >= EVENTS
    assert met["chosen with runs"] > 100


@pytest.mark.parametrize("name", ALL_BUGS)
def test_items_in_runs_need_each_rule(name: str) -> None:
    seeds = range(FOUND_BY[name], FOUND_BY[name] + 1)
    with planted(name) as picks:
        assert first_found(seeds, picks), "no promise is broken"
    assert first_found(seeds) is None
