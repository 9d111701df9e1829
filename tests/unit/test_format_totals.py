"""The fold over a write partition's pointers: what is counted, what is late, and what an owner adopts."""

from __future__ import annotations

from memq.format.pointer import Adopted, Pointer
from memq.format.totals import TotalsFold, adopted_of
from memq.topic import Totals


def pointer(
    kind: str, epoch: int, batch: int = 0, records: int = 0, before: int = 0, adopted: tuple[Adopted, ...] = ()
) -> Pointer:
    """A pointer with `records` of ten bytes each, and `before` records before it."""
    return Pointer(
        kind=kind,
        cluster="c",
        topic="t",
        topic_id="0" * 32,
        partition=0,
        epoch=epoch,
        batch_sequence=batch,
        records=records,
        stored_bytes=10 * records,
        totals=Totals(before, 10 * before),
        adopted=adopted,
    )


def fold(*pointers: Pointer) -> TotalsFold:
    """Fold pointers at offsets from 0 on."""
    found = TotalsFold()
    for offset, each in enumerate(pointers):
        found.add(offset, each)
    return found


def test_pointers_in_order_add_up() -> None:
    found = fold(pointer("opened", 1), pointer("data", 1, 0, 5), pointer("data", 1, 1, 7, before=5))
    assert (found.totals, found.late) == (Totals(12, 120), {})


def test_a_batch_that_landed_twice_is_late_until_it_is_adopted_by_whichever_offset() -> None:
    first, again = pointer("data", 1, 0, 5), pointer("data", 1, 0, 5)
    assert list(fold(first, again).late) == [1]
    counted = pointer("data", 1, 1, 2, before=10, adopted=(adopted_of(0, first),))  # the owner met the other copy
    found = fold(first, again, counted)
    assert (found.totals, found.late) == (Totals(12, 120), {})


def test_what_landed_before_an_opened_that_did_not_count_it_is_late() -> None:
    found = fold(pointer("data", 1, 0, 5), pointer("data", 1, 1, 7, before=5), pointer("opened", 2, before=5))
    assert found.totals == Totals(5, 50)
    assert [entry.records for entry in found.late.values()] == [7]
    late = tuple(found.late.values())
    found.add(3, pointer("opened", 3, before=12, adopted=late))  # the next owner adopts it, though 2 never did
    assert (found.totals, found.late) == (Totals(12, 120), {})
