"""The fold over a write partition's pointers: their totals are a lower bound, until a pointer settles them."""

from __future__ import annotations

import pytest

from memq.format.pointer import Pointer
from memq.format.totals import TotalsFold, adopted_of
from memq.topic import Totals
from tests.unit.pointer_examples import FIRST, HISTORIES, LATE, pointer


def fold(*pointers: Pointer) -> TotalsFold:
    found = TotalsFold()
    for each in pointers:
        found.add(each)
    return found


@pytest.mark.parametrize("name", HISTORIES)
def test_from_the_beginning_the_fold_is_the_sum(name: str) -> None:
    history = HISTORIES[name]
    assert fold(*history).totals == Totals(
        sum(each.records for each in history), sum(each.stored_bytes for each in history)
    )


def test_a_fold_that_starts_anywhere_is_exact_from_the_first_tight_pointer_on() -> None:
    late = adopted_of(1, LATE)
    history = (FIRST, LATE, pointer("data", 2, 0, 3, before=5), pointer("data", 2, 1, 1, before=12, adopted=(late,)))
    assert fold(*history[2:3]).totals == Totals(8, 80)  # its owner had not met the late one: too low
    assert fold(*history[1:3]).totals == Totals(8, 80)
    assert fold(*history[2:]).totals == fold(*history).totals == Totals(13, 130)


def test_three_batches_that_follow_on_each_other_settle_a_fold() -> None:
    run = [pointer("data", 3, batch, 2, before=2 * batch) for batch in range(4, 7)]
    assert [fold(*run[:count]).settled for count in range(4)] == [False, False, False, True]
    assert fold(run[0], pointer("ended", 3, before=10), *run[1:]).settled  # it holds no records


@pytest.mark.parametrize(
    "changed",
    [
        pointer("data", 3, 6, 2, before=11),  # counts what did not show
        pointer("data", 3, 6, 2, before=11, adopted=(adopted_of(1, LATE),)),
        pointer("data", 3, 7, 2, before=12),  # a hole
        pointer("data", 4, 6, 2, before=12),  # another owner
        pointer("data", 3, 5, 2, before=10),  # a copy: what lies next to it may be unknown to its owner
    ],
)
def test_pointer_that_does_not_follow_settles_nothing(changed: Pointer) -> None:
    assert not fold(pointer("data", 3, 4, 2, before=8), pointer("data", 3, 5, 2, before=10), changed).settled


def test_a_copy_whose_first_lies_before_the_tail_does_not_settle_it() -> None:
    copy = pointer("data", 3, 4, 2, before=8)  # landed behind the pointer that its owner published on
    after = pointer("data", 3, 5, 2, before=10)
    counts_it = pointer("data", 3, 6, 2, before=14, adopted=(adopted_of(7, copy),))
    assert not fold(copy, after).settled
    found = fold(copy, after, counts_it)
    assert (found.totals, found.settled) == (Totals(16, 160), False)
