"""Leases keep their promises in every schedule; with one rule left out some schedule breaks one."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.model.lease_bugs import ALL_BUGS, first_found, planted
from tests.model.leases import rules_of, run
from tests.soak import repetitions, report

FOUND_BY = {  # a seed whose schedule fails
    "Q2: a grant is handed out before it counts": 11,
    "S4: an ack is answered before it counts": 0,
    "Q3: a worker counts its lease from the answer": 19,
    "Q5: an at-most-once item is handed out before its grant counts": 17,
    "Q2: a new owner does not begin the leases again": 11,
    "Q4: an item with a decision on its way is granted": 101,
    "Q4: the end of a lease is not expected": 0,
    "Q4: a late nack or ack counts for another grant": 119,
    "Q4: an extension makes a lease shorter": 1060,
    "an item that is given back comes at once": 0,
    "Q1: a block that has ended is forgotten at once": 3,
    "S7: a snapshot without the last acks": 0,
    "S7: a snapshot without the blocks that have ended": 3,
    "S7: a snapshot without the times of items that were given back": 0,
    "Q5: the grant of an at-most-once item is no ack": 3,
    "an item has more attempts than it may have": 61,
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
        "answer lost",
        "too late",
        "ends",
        "left",
    ),
    *("acked", "returned", "extended", "lease-lost", "dead"),
}


@pytest.mark.soak
def test_leases_keep_all_promises() -> None:
    schedules = repetitions(400, 100_000)
    assert first_found(range(schedules)) is None
    report(f"{schedules} schedules of leases without a finding")


def test_the_schedules_of_leases_reach_what_matters() -> None:
    """A model in which nothing happens would break no promise."""
    met: Counter[str] = Counter()
    for seed in range(1_000):
        met.update(run(seed, rules_of(seed)))
    assert met.keys() >= EVENTS
    assert met["acked"] > 200


@pytest.mark.parametrize("name", ALL_BUGS)
def test_leases_need_each_rule(name: str) -> None:
    seeds = range(FOUND_BY[name], FOUND_BY[name] + 1)
    with planted(name) as rules:
        assert first_found(seeds, rules), "no promise is broken"
    assert first_found(seeds) is None
