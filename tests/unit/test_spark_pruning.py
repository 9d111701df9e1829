"""Filters skip only what can't match, checked against every record of small batches."""

from __future__ import annotations

import operator
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from memq.format.blocks.header import tag_bit
from memq.format.pointer import Location, Pointer
from memq.spark.options import COLUMNS, DEFAULT_COLUMNS
from memq.spark.read.pruning import ReadFilter, take_filters

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
COMPARED: dict[type[Any], Callable[[Any, Any], bool]] = {
    EqualTo: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
}


def batch_of(times: list[int], tags: list[str]) -> Pointer:
    bits = 0
    for tag in tags:
        bits |= tag_bit(tag)
    return Pointer(
        kind="data", cluster="c", topic="t", topic_id="0" * 32, partition=0, epoch=1, records=len(times),
        locations=(Location(store="s", key="k", offset=0, length=1),),
        least_ms=min(times), greatest_ms=max(times), tag_bits=bits,
    )  # fmt: skip


@given(
    st.lists(st.integers(0, 6), min_size=1),
    st.lists(st.tuples(st.sampled_from(sorted(COMPARED, key=str)), st.integers(-1_000, 7_000)), max_size=3),
)
def test_times_in_microseconds_leave_in_all_that_match(times: list[int], bounds: list[tuple[type[Any], int]]) -> None:
    filters = [kind(("timestamp",), EPOCH + timedelta(microseconds=bound)) for kind, bound in bounds]
    wanted, left = take_filters(filters, DEFAULT_COLUMNS)
    assert left == filters, "Spark applies them to each record"
    matching = [time for time in times if all(COMPARED[kind](time * 1_000, bound) for kind, bound in bounds)]
    for time in matching:
        assert wanted.may_match(batch_of([time], []))
    assert wanted.may_match(batch_of(times, [])) or not matching
    if len(bounds) == 1:  # and leave out every single record that does not match
        for time in set(times) - set(matching):
            assert not wanted.may_match(batch_of([time], []))
    if wanted.surely_matches(batch_of(times, [])):
        assert wanted.may_match(batch_of(times, []))


def test_a_batch_up_to_the_bounds_surely_matches_and_its_index_is_not_read() -> None:
    wanted = ReadFilter(least_ms=3, greatest_ms=5)
    assert wanted.surely_matches(batch_of([3, 5], []))
    assert not wanted.surely_matches(batch_of([2, 5], []))
    assert not wanted.surely_matches(batch_of([3, 6], []))


def test_tags_are_compared_by_their_bits() -> None:
    wanted, left = take_filters([EqualTo(("tag",), "red")], DEFAULT_COLUMNS)
    assert len(left) == 1
    assert wanted.may_match(batch_of([0], ["red", "green"]))
    assert not wanted.surely_matches(batch_of([0], ["red", "green"]))
    assert wanted.surely_matches(batch_of([0], ["red"]))
    assert not wanted.may_match(batch_of([0], ["green"]))
    assert not wanted.may_match(batch_of([0], []))
    either, _ = take_filters([In(("tag",), ("red", "green"))], DEFAULT_COLUMNS)
    assert either.may_match(batch_of([0], ["green"]))


@pytest.mark.parametrize(
    ("filters", "there"),
    [
        ([EqualTo(("partition",), 2)], [2]),
        ([In(("partition",), (1, 3))], [1, 3]),
        ([GreaterThan(("partition",), 1), LessThanOrEqual(("partition",), 3)], [2, 3]),
        ([GreaterThanOrEqual(("partition",), 1), LessThan(("partition",), 3), EqualTo(("partition",), 2)], [2]),
        ([In(("partition",), (1, 2)), In(("partition",), (2, 3))], [2]),
        ([EqualTo(("topic",), "other")], []),
        ([EqualTo(("topic",), "clicks"), In(("topic",), ("clicks", "other"))], [0, 1, 2, 3, 4]),
        ([EqualTo(("topic",), "clicks"), EqualTo(("topic",), "other"), EqualTo(("topic",), "clicks")], []),
    ],
)
def test_partitions_and_topics_are_settled(filters: list[Filter], there: list[int]) -> None:
    wanted, left = take_filters(filters, DEFAULT_COLUMNS)
    assert left == []
    assert [number for number in range(5) if wanted.has("clicks", number)] == there


def test_unsupported_filters_are_left_to_spark() -> None:
    filters: list[Filter] = [StringStartsWith(("tag",), "r"), EqualTo(("key",), b"k"), GreaterThan(("tag",), "a")]
    wanted, left = take_filters(filters, DEFAULT_COLUMNS)
    assert left == filters
    assert wanted.may_match(batch_of([0], []))


@pytest.mark.parametrize(
    "one",
    [
        IsNull(("topic",)),
        In(("topic",), ()),
        In(("tag",), (None,)),
        EqualTo(("topic",), None),
        EqualNullSafe(("partition",), None),
        LessThan(("topic",), "m"),
        StringStartsWith(("partition",), "1"),
        GreaterThan(("partition",), "x"),
        GreaterThan(("partition",), 1.5),
        LessThan(("partition",), None),
        StringStartsWith(("timestamp",), "2026"),
        GreaterThan(("timestamp",), "2026-01-01"),
        LessThanOrEqual(("timestamp",), None),
        LessThan(("timestamp",), datetime(2026, 1, 1)),  # noqa: DTZ001 - without a zone it is no moment
        In(("timestamp",), (datetime(2026, 1, 1, tzinfo=UTC), "noon")),
        EqualTo(("offset",), 5),
        EqualTo((), 5),
    ],
    ids=repr,
)
def test_a_filter_that_proves_nothing_prunes_nothing(one: Filter) -> None:
    assert take_filters([one], tuple(COLUMNS)) == (ReadFilter(), [one])
    known = EqualTo(("partition",), 3)
    wanted, left = take_filters([known, one, known], tuple(COLUMNS))
    assert left == [one]
    assert (wanted.has("clicks", 3), wanted.has("clicks", 4)) == (True, False)


def test_a_field_of_the_values_prunes_nothing_by_its_name() -> None:
    filters = [EqualTo(("tag",), "red"), EqualTo(("partition",), 5), EqualTo(("topic",), "x"), EqualTo(("a", "b"), 1)]
    assert take_filters(filters, ("value", "object")) == (ReadFilter(), filters)
