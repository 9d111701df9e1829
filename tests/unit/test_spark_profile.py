"""Sizes and estimates add up: the sum over parts equals the whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.spark.pipelines.topic_profile import Guess, Sizes, ddl_of, guess_of, guess_value, joined

lengths = st.lists(st.integers(0, (1 << 31) - 1) | st.integers(0, 40), max_size=60)
fields = st.sampled_from(["a", "b", "c`d"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 40), 1 << 40) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(fields, inner, max_size=3),
    max_leaves=8,
)


@given(lengths, lengths)
def test_sizes_of_parts_are_those_of_the_whole(one: list[int], other: list[int]) -> None:
    parts, whole = Sizes(), Sizes()
    for given_lengths in (one, other):
        part = Sizes()
        part.take(given_lengths)
        parts.add(part)
    whole.take(one + other)
    assert parts == whole
    if one + other:
        assert (whole.total, whole.least, whole.greatest) == (sum(one + other), min(one + other), max(one + other))


@given(lengths.filter(bool), st.sampled_from([0.5, 0.9, 0.99]))
def test_percentiles_are_at_most_an_eighth_too_much(given_lengths: list[int], share: float) -> None:
    sizes = Sizes()
    sizes.take(given_lengths)
    ordered = sorted(given_lengths)
    exact = next(length for at, length in enumerate(ordered, 1) if at >= share * len(ordered))
    assert exact <= sizes.percentile(share) <= exact * 9 / 8


@given(values, values, values)
def test_guesses_can_be_joined_in_any_grouping(one: object, two: object, three: object) -> None:
    guesses: list[Guess] = [guess_of(value) for value in (one, two, three)]
    left = joined(joined(guesses[0], guesses[1]), guesses[2])
    assert joined(left, left) == left
    for guess in guesses:
        assert joined(left, guess) == left


@pytest.mark.parametrize(
    ("given_values", "ddl"),
    [
        ([{"a": 1, "b": "x"}, {"a": 2.5, "c": None}], "`a` DOUBLE, `b` STRING, `c` STRING"),
        ([{"a": {"x": True}}, {"a": {"y": [1, None]}}], "`a` STRUCT<`x`: BOOLEAN, `y`: ARRAY<BIGINT>>"),
        ([{"a": 1}, {"a": "one"}], "`a` STRING"),
        ([{"a": [1]}, {"a": {}}], "`a` STRING"),
        ([{"a`b": 1 << 70}], "`a``b` DOUBLE"),
        ([], ""),
    ],
)
def test_ddl(given_values: list[object], ddl: str) -> None:
    guess: Guess = None
    for value in given_values:
        guess = joined(guess, guess_value(json.dumps(value).encode()))
    assert ddl_of(guess) == ddl


@pytest.mark.parametrize("value", [b"", b"{", b"\xff", b"[1]", b"3", b"null", b"{}", b"[" * 100_000])
def test_value_that_is_no_object_is_not_guessed(value: bytes) -> None:
    assert guess_value(value) is None
