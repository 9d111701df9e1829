"""Ranges of equal values, compared with a plain list."""

from __future__ import annotations

from itertools import groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st

from memq.queues.range_map import RangeMap, cut, merged

COUNT = 12
RANGE = st.tuples(st.integers(0, COUNT), st.integers(0, COUNT))


@given(st.lists(st.tuples(RANGE, st.integers(0, 2)), max_size=12), RANGE)
def test_a_range_map_has_the_values_of_a_list_in_as_few_ranges_as_possible(
    changes: list[tuple[tuple[int, int], int]], asked: tuple[int, int]
) -> None:
    found, wanted = RangeMap(0), [0] * (COUNT + 1)
    for (begin, end), value in changes:
        found.put(begin, end, value)
        wanted[begin:end] = [value] * max(0, end - begin)
        del wanted[COUNT + 1 :]
    assert [found.get(number) for number in range(COUNT + 1)] == wanted
    assert len(found) == len(list(groupby(wanted)))
    begin, end = asked
    parts = list(found.ranges(begin, end))
    assert [value for first, last, value in parts for _ in range(first, last)] == wanted[begin:end]
    assert all(first < last for first, last, _ in parts)
    assert all(former[1] == later[0] and former[2] != later[2] for former, later in pairwise(parts))


@given(st.lists(RANGE, max_size=6), RANGE)
def test_ranges_are_merged_and_cut(ranges: list[tuple[int, int]], whole: tuple[int, int]) -> None:
    ranges = [each for each in ranges if each[0] < each[1]]
    inside = {number for begin, end in ranges for number in range(begin, end)}
    found = merged(ranges)
    assert sorted(inside) == [number for begin, end in found for number in range(begin, end)]
    assert all(former[1] < later[0] for former, later in pairwise(found))
    parts = list(cut(*whole, found))
    assert [number for begin, end, _ in parts for number in range(begin, end)] == list(range(*whole))
    assert all((number in inside) is is_inside for begin, end, is_inside in parts for number in range(begin, end))
