"""A commit is a contiguous prefix of the finished records."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memq.client.consumer.progress import CommitLedger
from memq.topic import Committed, Position, Totals


def behind(offset: int) -> Committed:
    return Committed(Position(0, offset), Totals(10 * offset, 100 * offset))


@given(st.lists(st.tuples(st.sampled_from(["hand", "pass", "finish", "store"]), st.integers(0, 20)), max_size=40))
def test_the_prefix_is_contiguous_and_never_goes_back(steps: list[tuple[str, int]]) -> None:
    ledger = CommitLedger()
    offset, stored, before = 0, None, -1
    undone: list[int] = []
    for step, pick in steps:
        if step in ("hand", "pass"):
            offset += 1
            if step == "hand":
                ledger.hand(behind(offset))
                undone.append(offset)
            else:
                ledger.passed(behind(offset))
        elif step == "finish" and undone:
            chosen = undone[pick % len(undone)]
            assert ledger.knows(Position(0, chosen))
            ledger.finish(Position(0, chosen))
            undone = [number for number in undone if number > chosen]
        elif step == "store" and ledger.due is not None:
            stored = ledger.due
            ledger.stored(stored)
        prefix = ledger.prefix.position.pointer_offset if ledger.prefix is not None else 0
        assert prefix >= before
        before = prefix
        assert all(number > prefix for number in undone)
        assert prefix == (undone[0] - 1 if undone else offset)  # all before the first that is not done
        assert ledger.pending == bool(undone)
        assert (ledger.due is None) == (ledger.prefix == stored)


def test_a_batch_that_was_not_handed_out_here_is_not_known() -> None:
    ledger = CommitLedger()
    ledger.hand(behind(5))
    assert not ledger.knows(Position(0, 7))
    assert not ledger.knows(Position(0, 3))
    ledger.finish(Position(0, 5))
    assert ledger.knows(Position(0, 3))  # before the prefix all is done


def test_a_place_is_stored_when_it_or_a_later_one_was() -> None:
    ledger = CommitLedger()
    assert not ledger.is_stored(Position(0, 0))
    ledger.stored(behind(5))
    assert [ledger.is_stored(Position(0, offset)) for offset in (4, 5, 6)] == [True, True, False]


def test_a_place_within_a_batch_finishes_only_what_lies_before_it() -> None:
    ledger = CommitLedger()
    for offset in (3, 6):
        ledger.hand(behind(offset))
    ledger.finish(Position(0, 5))
    assert ledger.prefix == ledger.due == behind(3)
    assert ledger.knows(Position(0, 3))
    assert not ledger.knows(Position(0, 4))
    assert ledger.knows(Position(0, 6))
    ledger.finish(Position(0, 6))
    assert (ledger.prefix, ledger.pending) == (behind(6), False)


def test_ledger_keeps_no_finished_batches() -> None:
    ledger = CommitLedger()
    for offset in range(1, 1_000):
        ledger.hand(behind(offset))
        ledger.finish(Position(0, offset))
    assert len(ledger) == 0
