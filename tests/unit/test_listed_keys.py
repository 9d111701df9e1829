"""Listings of a store that repeat or leave out pages."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from memq.storage_handlers import ListedKeys, ObjectEntry


def listed(pages: Sequence[Sequence[str]]) -> list[str]:
    keys = ListedKeys()
    return [entry.key for page in pages for entry in keys.new([ObjectEntry(key, 1, 0) for key in page])]


@given(st.lists(st.lists(st.text("ab/", min_size=1, max_size=4), max_size=5), max_size=6), st.integers(0, 5))
def test_a_page_that_comes_again_is_dropped(pages: list[list[str]], again: int) -> None:
    ordered = sorted({key for page in pages for key in page})
    size = 3
    cut = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    if cut:
        cut.insert(again % len(cut), cut[again % len(cut)])
    assert listed(cut) == ordered


def test_a_key_that_comes_twice_in_a_page_is_dropped() -> None:
    assert listed([["a", "b", "b", "a"], ["b", "c"]]) == ["a", "b", "c"]


def test_a_page_that_comes_again_behind_the_next_one_is_dropped() -> None:
    assert listed([["a", "b"], ["c"], ["a", "b"], ["d"]]) == ["a", "b", "c", "d"]


def test_servers_that_list_folder_by_folder_are_believed() -> None:
    assert listed([["a/y/2", "a/y.z"], ["a/y.z", "b"]]) == ["a/y/2", "a/y.z", "b"]
