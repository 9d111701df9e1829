"""Leases keep their promises in every schedule; with one rule left out some schedule breaks one."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.model.lease_bugs import ALL_BUGS, first_found, planted
from tests.model.leases import rules_of, run
from tests.soak import repetitions, report

FOUND_BY = {  # a seed whose schedule fails
    "Q2: a grant is handed out before it counts": 65,
    "S4: an ack is answered before it counts": 0,
    "Q3: a worker counts its lease from the answer": 119,
    "Q5: an at-most-once item is handed out before its grant counts": 15,
    "Q2: a new owner does not begin the leases again": 92,
    "Q4: an item with a decision on its way is granted": 0,
    "Q4: the end of a lease is not expected": 0,
    "Q4: a late nack or ack counts for another grant": 160,
    "Q4: an extension makes a lease shorter": 58,
    "an item that is given back comes at once": 1,
    "Q1: a block that has ended is forgotten at once": 7,
    "S7: a snapshot without the last acks": 0,
    "S7: a snapshot without the blocks that have ended": 7,
    "S7: a snapshot without the times of items that were given back": 1,
    "Q5: the grant of an at-most-once item is no ack": 10,
    "an item has more attempts than it may have": 22,
    "an item that is given back is lost": 1,
    "the last priority is first": 0,
    "an item comes before it is due": 0,
    "the end of a life is ignored": 2,
    "an item whose life is over never ends": 2,
    "a block is trimmed with an item that is not over": 0,
    "two items of an ordered key are leased": 4,
    "the last item of an ordered key is first": 4,
    "an ordered key is forgotten by a snapshot": 5,
    "a second item under a dedupe key is taken": 34,
    "the window of a dedupe key never ends": 139,
    "dedupe keys are forgotten by a snapshot": 34,
    "an item that was sent back has its former end": 6007,
    "an item that was sent back keeps its attempts": 22,
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
    *("acked", "returned", "extended", "lease-lost", "dead", "redriven", "same"),
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
