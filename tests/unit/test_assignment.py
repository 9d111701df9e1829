"""Which broker gets which partition: every one a live owner, nothing moved without need."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from memq.governor import Assignment, BrokerEntry
from memq.governor.assignment import plan
from memq.governor.registry import Registry
from memq.topic import Topic, equal_slots


def topic(name: str, number: int, partitions: int) -> Topic:
    return Topic(name=name, id=f"{number:032x}", created_ms=0, partitions=equal_slots(partitions))


def broker(name: str) -> BrokerEntry:
    return BrokerEntry(id=name, session=f"session-{name}", address="127.0.0.1:1")


TOPICS = [topic("clicks", 1, 5), topic("views", 2, 3)]
EVERYTHING = [(each.id, part.partition) for each in TOPICS for part in each.partitions]


def assignments(owners: list[str]) -> list[Assignment]:
    return [
        Assignment(
            topic_id=topic_id, partition=partition, broker=owner, session="s" if owner else "", epoch=4, version=7
        )
        for (topic_id, partition), owner in zip(EVERYTHING, owners, strict=True)
    ]


owner_lists = st.lists(st.sampled_from(["", "a", "b", "c", "dead"]), min_size=len(EVERYTHING), max_size=len(EVERYTHING))


@given(owner_lists, st.sets(st.sampled_from("abc")))
def test_a_plan_gives_every_partition_a_live_owner_and_moves_no_other(owners: list[str], live: set[str]) -> None:
    before = assignments(owners)
    registry = Registry(TOPICS, before)
    changes = plan(TOPICS, [broker(name) for name in live], reversed(before))
    for change in changes:
        assert (change.epoch, change.session) == (4, "")
        registry.apply(registry.set_assignment(change))
    after = registry.assignments()
    for old, new in zip(before, after, strict=True):
        if old.broker in live or (not live and not old.broker):
            assert new == old
        else:
            assert new.broker in (live or {""})
    assert list(plan(TOPICS, [broker(name) for name in live], after)) == []


@given(st.lists(st.sampled_from(["", "dead"]), min_size=8, max_size=8), st.integers(1, 4))
def test_what_nobody_has_is_spread_evenly(owners: list[str], count: int) -> None:
    names = "abcd"[:count]
    given_to = [change.broker for change in plan(TOPICS, [broker(name) for name in names], assignments(owners))]
    loads = [given_to.count(name) for name in names]
    assert sum(loads) == 8
    assert max(loads) - min(loads) <= 1


def test_partitions_of_topics_that_are_no_more_are_left_alone() -> None:
    gone = Assignment(topic_id="ff" * 16, partition=0)
    assert list(plan([], [broker("a")], [*assignments([""] * 8), gone])) == []


def test_a_broker_that_came_back_with_a_new_session_keeps_what_it_had() -> None:
    assert list(plan(TOPICS, [broker("a"), broker("b")], assignments(["a"] * 8))) == []
