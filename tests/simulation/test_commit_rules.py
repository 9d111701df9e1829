"""The rules of stored positions: a step back of a member, and a late call, are different."""

from __future__ import annotations

import pytest

from memq.groups import Membership
from memq.topic import Position, ReadPartition
from tests.simulation.commit_rules import CommitRules

PARTITION = ReadPartition("t", "ab" * 16, 0)


@pytest.fixture
def found() -> list[str]:
    return []


@pytest.fixture
def rules(found: list[str]) -> CommitRules:
    """A member that joined in generation 4, asked for offset 72, was fenced, joined in generation 6, asked for 77."""
    rules = CommitRules(found.append)
    for number, generation, offset in ((1, 4, 72), (3, 6, 77)):
        rules.granted("g", "a", Membership(generation, (PARTITION,)), joined=True)
        rules.asked("g", "a", generation, number, [(PARTITION, Position(0, offset, 0))])
    return rules


def test_a_member_that_asks_for_less_goes_back(rules: CommitRules, found: list[str]) -> None:
    rules.asked("g", "a", 6, 4, [(PARTITION, Position(0, 76, 0))])
    assert len(found) == 1
    assert "after 0:77:0" in found[0]


def test_a_late_call_from_before_the_member_joined_again_is_no_step_back(rules: CommitRules, found: list[str]) -> None:
    rules.asked("g", "a", 4, 2, [(PARTITION, Position(0, 72, 0))])
    rules.asked("g", "a", 6, 4, [(PARTITION, Position(0, 77, 0))])
    assert found == []


def test_a_late_call_of_an_earlier_commit_is_no_step_back(rules: CommitRules, found: list[str]) -> None:
    rules.asked("g", "a", 6, 2, [(PARTITION, Position(0, 75, 0))])
    assert found == []


def test_an_earlier_commit_that_is_stored_after_a_later_one_is_found(rules: CommitRules, found: list[str]) -> None:
    rules.stored("g", "a", 6, 3, [(PARTITION, Position(0, 77, 0))])
    assert found == []
    rules.stored("g", "a", 6, 2, [(PARTITION, Position(0, 75, 0))])
    assert found == ["commit 2 of member 'a' of group g is stored after its commit 3"]


def test_a_late_call_that_is_stored_is_found(rules: CommitRules, found: list[str]) -> None:
    rules.stored("g", "a", 4, 4, [(PARTITION, Position(0, 72, 0))])
    assert len(found) == 1
    assert "holds it since generation 6" in found[0]


@pytest.mark.parametrize(("group", "found_count"), [("g", 1), ("_memq_broadcast-b", 0)])
def test_only_a_broadcast_consumer_that_joins_again_may_count_from_less(
    rules: CommitRules, found: list[str], group: str, found_count: int
) -> None:
    for number in (9, 3):
        rules.granted(group, "b", Membership(1, (PARTITION,)), joined=True)
        rules.stored(group, "b", 1, number, [(PARTITION, Position(0, 80, 0))])
    assert len(found) == found_count
