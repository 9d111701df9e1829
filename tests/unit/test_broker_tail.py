"""Counts of an opening: each batch of the tail once, and by name those that no owner had counted."""

from __future__ import annotations

import pytest

from memq.broker.partition.ownership import QueueTail
from memq.format.pointer import Pointer
from memq.format.totals import adopted_of
from memq.topic import Totals
from tests.unit.pointer_examples import HISTORIES, LATE, pointer

OWN = pointer("data", 2, 0, 5)


def tail(*pointers: Pointer) -> QueueTail:
    found = QueueTail()
    for offset, each in enumerate(pointers):
        found.add(offset, 1_000 + offset, each)
    return found


@pytest.mark.parametrize("name", HISTORIES)
def test_counted_and_late_records_are_all_records(name: str) -> None:
    found = tail(*HISTORIES[name])
    late = sum(entry.records for entry in found.uncounted())
    assert found.counted().records + late == sum(each.records for each in HISTORIES[name])


@pytest.mark.parametrize(
    ("pointers", "late"),
    [
        ((OWN, pointer("data", 2, 1, 3, before=5)), []),  # the last batch of the last owner is not late
        ((OWN, OWN), [1]),
        ((OWN, LATE), [1]),
        ((OWN, LATE, pointer("data", 2, 1, 3, before=9, adopted=(adopted_of(1, LATE),))), []),
        ((OWN, LATE, pointer("data", 2, 1, 3, before=5)), [1]),  # landed after its owner's last reading
        ((OWN, pointer("opened", 3, before=5), LATE), [2]),
        ((OWN, pointer("data", 2, 1, 3, before=5), pointer("opened", 3, before=5)), [1]),
    ],
)
def test_late_is_what_no_statement_counts(pointers: tuple[Pointer, ...], late: list[int]) -> None:
    assert [entry.offset for entry in tail(*pointers).uncounted()] == late


def test_a_tail_that_begins_in_the_middle_takes_what_is_stated() -> None:
    found = tail(pointer("data", 2, 7, 2, before=40), LATE, pointer("data", 2, 8, 1, before=50))
    assert (found.counted(), found.uncounted()) == (Totals(51, 510), [])
    assert found.last_ms == 1_002
