"""The account of one producer: lost, doubled, given up, expired and unproven records."""

from __future__ import annotations

import pytest

from memq.audit.account import (
    BURNED_RANGES_CUT,
    Account,
    Balance,
    Evidence,
    Fate,
    RecentRanges,
    TailKnowledge,
    apart,
    common,
)
from memq.audit.auditor import Contents
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import BlockHeader
from memq.format.pointer import ProducerEnd
from memq.format.ranges import RangeSet

WINDOW_MS = 1_000


def account() -> Account:
    return Account(RecentRanges(WINDOW_MS))


def ended(next_sequence: int, *burned: tuple[int, int]) -> ProducerEnd:
    return ProducerEnd(producer=5, next_sequence=next_sequence, burned=burned, acks=2)


def settled(books: Account, evidence: Evidence | None = None) -> Balance:
    return books.settle(0, 5, evidence or Evidence())


def test_all_that_was_sent_is_there() -> None:
    books = account()
    assert books.deliver(0, 10, 1) is Fate.NEW
    assert books.deliver(10, 12, 2) is Fate.NEW
    books.close(ended(12), 3)
    assert settled(books).clean
    assert settled(books).delivered == 12


def test_a_hole_below_the_proven_end_is_lost_unless_it_was_burned() -> None:
    books = account()
    books.deliver(0, 10, 1)
    books.deliver(20, 30, 1)
    books.close(ended(40, (12, 15)), 2)
    found = settled(books)
    assert found.lost == ((10, 12), (15, 20), (30, 40))
    assert (found.burned, found.tail, found.clean) == (3, TailKnowledge.PROVEN, False)


def test_a_hole_without_a_proven_end_is_not_called_lost() -> None:
    books = account()
    books.deliver(5, 10, 1)
    found = settled(books, Evidence(active_since_ms=2))
    assert (found.lost, found.unproven, found.tail, found.next_sequence) == ((), ((0, 5),), TailKnowledge.UNKNOWN, 10)
    assert settled(books, Evidence(active_since_ms=1)).tail is TailKnowledge.IN_FLIGHT


def test_records_behind_the_end_reopen_the_tail() -> None:
    books = account()
    books.close(ended(5), 1)
    books.deliver(8, 10, 2)
    found = settled(books, Evidence(active_since_ms=2))
    assert (found.lost, found.unproven, found.tail) == (((0, 5),), ((5, 8),), TailKnowledge.IN_FLIGHT)


def test_the_higher_of_two_ends_holds() -> None:
    books = account()
    books.close(ended(5), 1)
    books.close(ended(3), 2)
    assert settled(books).lost == ((0, 5),)


def test_records_that_retention_removed_are_not_lost() -> None:
    books = account()
    books.deliver(100, 110, 1)
    books.close(ended(112), 1)
    found = settled(books, Evidence(expired=True))
    assert (found.expired, found.lost) == (100, ((110, 112),))
    silent = account()
    silent.close(ended(7), 1)
    assert settled(silent, Evidence(expired=True)).expired == 7
    assert settled(silent).lost == ((0, 7),)


@pytest.mark.parametrize("cause", ["unread", "burned"])
def test_nothing_is_lost_for_sure_while_something_is_unread_or_burned_ranges_were_cut(cause: str) -> None:
    books = account()
    if cause == "burned":
        burned = [(100 + 2 * number, 101 + 2 * number) for number in range(BURNED_RANGES_CUT)]
        books.close(ended(100 + 2 * BURNED_RANGES_CUT, *burned), 1)
    else:
        books.close(ended(10), 1)
    found = settled(books, Evidence(unread=cause == "unread"))
    assert not found.lost
    assert found.unproven[0][0] == 0


def test_burned_ranges_that_were_cut_once_may_hold_what_a_later_end_does_not_name() -> None:
    books = account()
    books.close(ended(600, *[(100 + 2 * number, 101 + 2 * number) for number in range(BURNED_RANGES_CUT)]), 1)
    books.close(ended(700), 2)
    assert not settled(books).lost


def test_a_damaged_block_is_missing_only_where_no_sound_one_has_its_records() -> None:
    books = account()
    books.corrupt.add(0, 10)
    books.deliver(0, 6, 1)
    books.unread.add(8, 12)
    books.close(ended(14), 1)
    found = settled(books)
    assert (found.corrupt, found.unread, found.lost) == (((6, 10),), ((10, 12),), ((12, 14),))


def test_a_copy_is_dropped_within_the_window_and_doubled_behind_it() -> None:
    books = account()
    books.deliver(0, 10, 0)
    assert books.deliver(0, 10, WINDOW_MS) is Fate.COPY
    assert books.deliver(0, 10, 4 * WINDOW_MS) is Fate.DOUBLED
    found = settled(books)
    assert (found.copies, found.doubled, found.delivered) == (10, ((0, 10),), 10)


def test_a_partial_overlap_is_doubled_where_it_overlaps() -> None:
    books = account()
    books.deliver(0, 10, 0)
    books.deliver(10, 20, 0)
    assert books.deliver(5, 15, 1) is Fate.COPY, "two blocks cover it: readers drop it"
    assert books.deliver(15, 25, 1) is Fate.DOUBLED
    assert settled(books).doubled == ((15, 20),)


def test_recent_ranges_keep_a_bounded_number_ofslices() -> None:
    recent = RecentRanges(WINDOW_MS)
    for time_ms in range(0, 50 * WINDOW_MS, 7):
        recent.add(time_ms, time_ms + 7, time_ms)
        assert recent.holds(max(0, time_ms - WINDOW_MS), time_ms, time_ms)
        assert len(recent.slices) <= 11
    assert not recent.holds(0, 7, 50 * WINDOW_MS)


def test_common_and_apart_share_the_pieces() -> None:
    ranges = RangeSet([(2, 4), (6, 8)])
    assert common([(0, 7), (7, 9)], ranges) == [(2, 4), (6, 7), (7, 8)]
    assert apart([(0, 7), (7, 9)], ranges) == [(0, 2), (4, 6), (8, 9)]


# ---- contents ------------------------------------------------------------------------------------


def sealed(values: list[bytes], now_ms: int = 1, first: int = 0) -> BlockHeader:
    builder = BlockBuilder()
    builder.append_many(list(values))
    return builder.seal(producer_id=7, first_sequence=first, scope=0, now_ms=now_ms, codec="none").header


def test_a_block_differs_from_the_first_of_its_sequences_or_not() -> None:
    contents = Contents()
    for header in (sealed([b"a", b"b"]), sealed([b"x", b"y"])):
        contents.add(0, header)
    assert not contents.differs(0, sealed([b"a", b"b"], now_ms=9))  # sealed once more
    assert contents.differs(0, sealed([b"x", b"y"]))
    assert contents.differs(0, sealed([b"a"]))
    assert contents.differs(0, sealed([b"b"], first=1))
    assert contents.differs(1, sealed([b"a", b"b"]))  # of another partition nothing was met


def test_forgotten_blocks_are_compared_by_sequences_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memq.audit.auditor.BLOCKS_MAX", 2)
    contents = Contents()
    for first in range(3):
        contents.add(0, sealed([b"a"], first=first))
    assert not contents.differs(0, sealed([b"other"], first=0))
    assert contents.differs(0, sealed([b"other"], first=2))
