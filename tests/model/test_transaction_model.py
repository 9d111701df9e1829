"""Transactions keep their promises in every schedule; with one rule left out some schedule breaks one."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.model.transaction_bugs import BUGS, first_found, planted
from tests.model.transactions import run
from tests.soak import repetitions, report

FOUND_BY = {  # a seed whose schedule fails
    "T1: positions move before the records are judged": 3,
    "T1: records are released, and positions do not move": 5,
    "T2: what an older instance has open stays": 0,
    "T2: an older instance commits": 14,
    "T2: a late request of an older instance begins again": 1,
    "T2: the same instance begins twice": 0,
    "T3: the held blocks are not counted": 0,
    "T3: former positions are not compared": 252,
    "T3: any member moves positions": 9,
    "T3: a settled number is settled again": 5,
    "T3: a lower number gets the last answer": 128,
    "T3: a refused number is not burned": 62,
    "T4: a transaction that was rolled back takes blocks": 8,
    "T3: the blocks of a prepared transaction are not counted": 0,
    "T4: a prepared transaction is still open": 5,
    "T4: a late time-out rolls back what is prepared": 11,
    "T4: a new instance rolls back what the former one has prepared": 14,
    "T4: an answer about a finished transaction gets what it says": 2,
    "T4: a stranger's group decides": 13,
    "T4: the number of questions is lost with a snapshot": 6,
    "T4: a snapshot has no prepared transactions": 5,
    "T5: more than one pointer's blocks for a partition": 6,
    "H2: a decision releases a part of a lane": 84,
}
EVENTS = {
    *("begins", "begins again", "begin refused", "block held", "block refused", "block dropped", "block released"),
    *("answer: committed", "answer: rolled back", "refused", "times out", "operator commits", "unit done", "snapshot"),
    *("prepared", "not prepared", "asked", "parked", "answers", "operator decides"),
}


@pytest.mark.soak
def test_transactions_keep_all_promises() -> None:
    schedules = repetitions(100, 30_000)
    assert first_found(range(schedules)) is None
    report(f"{schedules} schedules of transactions without a finding")


def test_the_schedules_of_transactions_reach_what_matters() -> None:
    """A model in which nothing happens would break no promise."""
    met: Counter[str] = Counter()
    for seed in range(60):
        met.update(run(seed).met)
    assert set(met) == EVENTS
    assert met["answer: committed"] > 50


@pytest.mark.parametrize("name", list(BUGS))
def test_transactions_need_each_rule(name: str) -> None:
    with planted(name):
        assert first_found(range(FOUND_BY[name], FOUND_BY[name] + 1)), "no promise is broken"
    assert first_found(range(FOUND_BY[name], FOUND_BY[name] + 1)) is None


def test_a_schedule_of_transactions_repeats() -> None:
    assert run(7).steps == run(7).steps
