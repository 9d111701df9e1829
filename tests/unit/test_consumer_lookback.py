"""Dedup by look-back: what was seen is dropped once and for all of the window, and memory stays bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.client.consumer.fetch.lookback import SLICES, Lookback, Novelty

WINDOW_MS = 1_000
blocks = st.tuples(st.integers(1, 3), st.integers(0, 8), st.integers(0, 40))  # producer, block number, ms passed


@given(st.lists(blocks, max_size=60))
def test_a_block_is_new_once_within_the_window(arrivals: list[tuple[int, int, int]]) -> None:
    lookback = Lookback(WINDOW_MS)
    last_seen: dict[tuple[int, int], int] = {}
    now = 0
    for producer, number, passed in arrivals:
        now += passed
        lookback.advance(now)
        verdict = lookback.judge(0, producer, 10 * number, 10 * number + 10)
        seen = last_seen.get((producer, number))
        if seen is None:
            assert verdict is Novelty.NEW
        elif now - seen < WINDOW_MS:
            assert verdict is Novelty.SEEN
        last_seen[producer, number] = now


def test_a_hole_that_is_filled_late_is_new() -> None:
    lookback = Lookback(WINDOW_MS)
    assert lookback.judge(0, 1, 0, 10) is Novelty.NEW
    assert lookback.judge(0, 1, 20, 30) is Novelty.NEW
    assert lookback.gaps == 10
    assert lookback.judge(0, 1, 10, 20) is Novelty.NEW
    assert lookback.judge(0, 1, 10, 20) is Novelty.SEEN


def test_a_partial_overlap_is_told() -> None:
    lookback = Lookback(WINDOW_MS)
    lookback.note(0, 1, 0, 10)
    assert lookback.judge(0, 1, 5, 15) is Novelty.PARTLY
    assert lookback.judge(0, 1, 0, 15) is Novelty.SEEN


def test_an_overlap_is_put_together_from_several_slices() -> None:
    lookback = Lookback(WINDOW_MS)
    for number in range(SLICES):
        lookback.advance(1 + number * (WINDOW_MS // SLICES))
        lookback.judge(0, 1, number, number + 1)
    assert lookback.judge(0, 1, 0, SLICES) is Novelty.SEEN


def test_write_partitions_have_sequences_of_their_own() -> None:
    lookback = Lookback(WINDOW_MS)
    assert lookback.judge(0, 1, 0, 10) is Novelty.NEW
    assert lookback.judge(1, 1, 0, 10) is Novelty.NEW


def test_producers_are_forgotten_after_the_window_and_not_before() -> None:
    lookback = Lookback(WINDOW_MS)
    for producer in range(1, 101):
        lookback.advance(producer)
        lookback.judge(0, producer, 0, 10)
    lookback.advance(WINDOW_MS)
    assert lookback.producers == 100
    lookback.advance(2 * WINDOW_MS)
    lookback.advance(4 * WINDOW_MS)
    lookback.judge(0, 101, 0, 10)
    assert lookback.producers == 1


def test_queue_time_never_goes_back() -> None:
    lookback = Lookback(WINDOW_MS)
    lookback.advance(5_000)
    lookback.judge(0, 1, 0, 10)
    lookback.advance(10)
    assert lookback.judge(0, 1, 0, 10) is Novelty.SEEN


@pytest.mark.parametrize(("later_ms", "verdict"), [(WINDOW_MS - 1, Novelty.SEEN), (WINDOW_MS * 5 // 4, Novelty.NEW)])
def test_what_is_older_than_the_window_and_a_slice_of_it_is_new_again(later_ms: int, verdict: Novelty) -> None:
    lookback = Lookback(WINDOW_MS)
    lookback.advance(10_000)
    lookback.judge(0, 1, 0, 10)
    for passed in range(0, later_ms + 1, WINDOW_MS // SLICES):
        lookback.advance(10_000 + passed)
    lookback.advance(10_000 + later_ms)
    assert lookback.judge(0, 1, 0, 10) is verdict
    assert lookback.gaps == 0


def test_what_was_seen_is_said_without_being_noted() -> None:
    lookback = Lookback(WINDOW_MS)
    lookback.note(0, 1, 0, 10)
    lookback.note(0, 1, 20, 30)
    assert lookback.seen(0, 1, 5, 25) == [(5, 10), (20, 25)]
    assert lookback.seen(0, 1, 10, 20) == []
    assert lookback.seen(0, 1, 29, 31) == [(29, 30)]
    assert lookback.seen(0, 1, 30, 40) == []
    assert (lookback.seen(0, 2, 0, 10), lookback.seen(1, 1, 0, 10)) == ([], [])
    assert lookback.judge(0, 1, 10, 20) is Novelty.NEW
    assert lookback.judge(0, 1, 10, 20) is Novelty.SEEN
    assert lookback.judge(0, 1, 30, 35) is Novelty.NEW
    assert lookback.gaps == 0


def test_a_gap_is_counted_from_the_greatest_sequence_on() -> None:
    lookback = Lookback(WINDOW_MS)
    lookback.judge(0, 1, 20, 30)
    lookback.note(0, 1, 0, 10)
    lookback.judge(0, 1, 35, 40)
    assert lookback.gaps == 5
    assert lookback.producers == 1
