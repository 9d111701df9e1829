"""RangeSet against a plain set of integers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from memq.format.ranges import RangeSet

SPAN = 60
ranges = st.tuples(st.integers(0, SPAN), st.integers(0, SPAN)).map(lambda pair: (min(pair), max(pair)))


class RangesBesideSet(RuleBasedStateMachine):
    """Every change and every question, on both."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges = RangeSet()
        self.model: set[int] = set()

    @rule(pair=ranges)
    def add(self, pair: tuple[int, int]) -> None:
        wanted = set(range(*pair))
        assert self.ranges.add(*pair) == len(wanted - self.model)
        self.model |= wanted

    @rule(length=st.integers(1, 5))
    def append(self, length: int) -> None:
        first = max(self.model, default=-1) + 1
        assert self.ranges.add(first, first + length) == length
        self.model |= set(range(first, first + length))

    @rule(pair=ranges)
    def ask(self, pair: tuple[int, int]) -> None:
        wanted = set(range(*pair))
        assert self.ranges.covers(*pair) == (wanted <= self.model)
        assert self.ranges.overlaps(*pair) == bool(wanted & self.model)
        holes = [number for hole in self.ranges.holes(*pair) for number in range(*hole)]
        assert holes == sorted(wanted - self.model)

    @invariant()
    def holds_the_same(self) -> None:
        pairs = list(self.ranges)
        assert [number for pair in pairs for number in range(*pair)] == sorted(self.model)
        assert all(left[1] < right[0] for left, right in pairwise(pairs)), "ranges touch"
        assert self.ranges.total == len(self.model)
        assert len(self.ranges) == len(pairs)
        assert [number for number in range(SPAN + 5) if number in self.ranges] == sorted(
            number for number in self.model if number < SPAN + 5
        )
        if self.model:
            assert (self.ranges.least, self.ranges.next) == (min(self.model), max(self.model) + 1)


TestRangesBesideSet = RangesBesideSet.TestCase
TestRangesBesideSet.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(ranges))
def test_the_order_of_adding_does_not_matter(pairs: list[tuple[int, int]]) -> None:
    assert RangeSet(pairs) == RangeSet(reversed(pairs))


def test_a_range_that_runs_backwards_is_refused() -> None:
    with pytest.raises(AssertionError, match="backwards"):
        RangeSet().add(3, 2)


def test_records_in_order_stay_one_range() -> None:
    known = RangeSet()
    for first in range(0, 10_000, 10):
        known.add(first, first + 10)
    assert list(known) == [(0, 10_000)]


def test_it_says_what_it_holds() -> None:
    assert repr(RangeSet([(1, 3), (5, 6)])) == "RangeSet([(1, 3), (5, 6)])"
    assert RangeSet() != 3


@given(st.lists(ranges))
def test_a_flat_list_gives_the_set_again(pairs: list[tuple[int, int]]) -> None:
    found = RangeSet(pairs)
    again = RangeSet.from_flat(found.flat())
    assert (again, again.total) == (found, found.total)


@pytest.mark.parametrize("numbers", [[1], [1, 1], [2, 1], [1, 3, 3, 4], [4, 5, 1, 2]])
def test_a_flat_list_that_is_no_set_is_refused(numbers: list[int]) -> None:
    with pytest.raises(ValueError, match="ranges touch"):
        RangeSet.from_flat(numbers)
