"""The dedup window of a reader: a seen block is dropped for the whole window, and memory is bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.notification.dedup_window import SLICES, DedupWindow, Novelty

WINDOW_MS = 1_000
blocks = st.tuples(st.integers(1, 3), st.integers(0, 8), st.integers(0, 40))  # producer, block number, ms passed


@given(st.lists(blocks, max_size=60))
def test_a_block_is_new_once_within_the_window(arrivals: list[tuple[int, int, int]]) -> None:
    dedup_window = DedupWindow(WINDOW_MS)
    last_seen: dict[tuple[int, int], int] = {}
    now = 0
    for producer, number, passed in arrivals:
        now += passed
        dedup_window.advance(now)
        verdict = dedup_window.judge(0, producer, 10 * number, 10 * number + 10)
        seen = last_seen.get((producer, number))
        if seen is None:
            assert verdict is Novelty.NEW
        elif now - seen < WINDOW_MS:
            assert verdict is Novelty.SEEN
        last_seen[producer, number] = now


def test_a_hole_that_is_filled_late_is_new() -> None:
    dedup_window = DedupWindow(WINDOW_MS)
    assert dedup_window.judge(0, 1, 0, 10) is Novelty.NEW
    assert dedup_window.judge(0, 1, 20, 30) is Novelty.NEW
    assert dedup_window.gaps == 10
    assert dedup_window.judge(0, 1, 10, 20) is Novelty.NEW
    assert dedup_window.judge(0, 1, 10, 20) is Novelty.SEEN


def test_a_partial_overlap_is_reported() -> None:
    dedup_window = DedupWindow(WINDOW_MS)
    dedup_window.note(0, 1, 0, 10)
    assert dedup_window.judge(0, 1, 5, 15) is Novelty.PARTLY
    assert dedup_window.judge(0, 1, 0, 15) is Novelty.SEEN


def test_an_overlap_is_put_together_from_several_slices() -> None:
    dedup_window = DedupWindow(WINDOW_MS)
    for number in range(SLICES):
        dedup_window.advance(1 + number * (WINDOW_MS // SLICES))
        dedup_window.judge(0, 1, number, number + 1)
    assert dedup_window.judge(0, 1, 0, SLICES) is Novelty.SEEN


def test_write_partitions_have_sequences_of_their_own() -> None:
    dedup_window = DedupWindow(WINDOW_MS)
    assert dedup_window.judge(0, 1, 0, 10) is Novelty.NEW
    assert dedup_window.judge(1, 1, 0, 10) is Novelty.NEW


def test_producers_are_forgotten_after_the_window_and_not_before() -> None:
    dedup_window = DedupWindow(WINDOW_MS)
    for producer in range(1, 101):
        dedup_window.advance(producer)
        dedup_window.judge(0, producer, 0, 10)
    dedup_window.advance(WINDOW_MS)
    assert dedup_window.producers == 100
    dedup_window.advance(2 * WINDOW_MS)
    dedup_window.advance(4 * WINDOW_MS)
    dedup_window.judge(0, 101, 0, 10)
    assert dedup_window.producers == 1


def test_queue_time_never_goes_back() -> None:
    dedup_window = DedupWindow(WINDOW_MS)
    dedup_window.advance(5_000)
    dedup_window.judge(0, 1, 0, 10)
    dedup_window.advance(10)
    assert dedup_window.judge(0, 1, 0, 10) is Novelty.SEEN


@pytest.mark.parametrize(("later_ms", "verdict"), [(WINDOW_MS - 1, Novelty.SEEN), (WINDOW_MS * 5 // 4, Novelty.NEW)])
def test_sequences_older_than_the_window_and_a_slice_are_new_again(later_ms: int, verdict: Novelty) -> None:
    dedup_window = DedupWindow(WINDOW_MS)
    dedup_window.advance(10_000)
    dedup_window.judge(0, 1, 0, 10)
    for passed in range(0, later_ms + 1, WINDOW_MS // SLICES):
        dedup_window.advance(10_000 + passed)
    dedup_window.advance(10_000 + later_ms)
    assert dedup_window.judge(0, 1, 0, 10) is verdict
    assert dedup_window.gaps == 0


def test_seen_ranges_are_returned_without_a_note() -> None:
    dedup_window = DedupWindow(WINDOW_MS)
    dedup_window.note(0, 1, 0, 10)
    dedup_window.note(0, 1, 20, 30)
    assert dedup_window.seen(0, 1, 5, 25) == [(5, 10), (20, 25)]
    assert dedup_window.seen(0, 1, 10, 20) == []
    assert dedup_window.seen(0, 1, 29, 31) == [(29, 30)]
    assert dedup_window.seen(0, 1, 30, 40) == []
    assert (dedup_window.seen(0, 2, 0, 10), dedup_window.seen(1, 1, 0, 10)) == ([], [])
    assert dedup_window.judge(0, 1, 10, 20) is Novelty.NEW
    assert dedup_window.judge(0, 1, 10, 20) is Novelty.SEEN
    assert dedup_window.judge(0, 1, 30, 35) is Novelty.NEW
    assert dedup_window.gaps == 0


def test_a_gap_is_counted_from_the_greatest_sequence_on() -> None:
    dedup_window = DedupWindow(WINDOW_MS)
    dedup_window.judge(0, 1, 20, 30)
    dedup_window.note(0, 1, 0, 10)
    dedup_window.judge(0, 1, 35, 40)
    assert dedup_window.gaps == 5
    assert dedup_window.producers == 1
