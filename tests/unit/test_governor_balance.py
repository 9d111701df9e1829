"""Assignment of partitions: each has a live owner, the busiest is relieved, no move without need."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memq.governor import Assignment, BrokerEntry, Load
from memq.governor.balance import BUSY_MIN, CAPACITY_BYTES_S, GAIN_MIN, STRATEGIES, balanced
from memq.governor.planning import AssignmentPlan, ClusterView
from memq.governor.registry import Registry
from tests.unit.governor_views import broker, topic

TOPICS = [topic("clicks", 1, 5), topic("views", 2, 3)]
EVERYTHING = [(each.id, part.partition) for each in TOPICS for part in each.partitions]


def view(
    owners: Sequence[str], brokers: Sequence[BrokerEntry], traffic: Sequence[int] = (), *, opened: bool = True
) -> ClusterView:
    """A cluster with the partitions of TOPICS at these owners, with this traffic."""
    entries = [
        Assignment(
            topic_id=place[0],
            partition=place[1],
            broker=owner,
            session=f"session-{owner}" if owner and opened else "",
            epoch=4,
            version=7,
        )
        for place, owner in zip(EVERYTHING, owners, strict=True)
    ]
    loads = [
        Load(topic_id=place[0], partition=place[1], bytes_s=count)
        for place, count in zip(EVERYTHING, traffic, strict=False)
    ]
    return ClusterView(topics=TOPICS, brokers=brokers, assignments=entries, loads=loads)


def applied(before: ClusterView, plan: AssignmentPlan) -> ClusterView:
    """The cluster with the plan carried out, through the rules of the registry."""
    registry = Registry(before.topics, before.assignments)
    for change in plan.changes:
        registry.apply(registry.set_assignment(change.assignment))
    return ClusterView(
        topics=before.topics, brokers=before.brokers, assignments=registry.assignments(), loads=before.loads
    )


def settled(seen: ClusterView) -> ClusterView:
    """The cluster once the old owners have let go and the new ones have opened."""
    opened = [replace(each, session=f"session-{each.broker}" if each.broker else "") for each in seen.assignments]
    return ClusterView(topics=seen.topics, brokers=seen.brokers, assignments=opened, loads=seen.loads)


def used(seen: ClusterView) -> dict[str, int]:
    """What each broker takes in, with a little for each partition."""
    traffic = {(load.topic_id, load.partition): load.bytes_s for load in seen.loads}
    found = {each.id: 0 for each in seen.brokers}
    for entry in seen.assignments:
        found[entry.broker] = found.get(entry.broker, 0) + 1_000 + traffic.get((entry.topic_id, entry.partition), 0)
    return found


owner_lists = st.lists(st.sampled_from(["", "a", "b", "c", "dead"]), min_size=8, max_size=8)
traffic_lists = st.lists(st.integers(0, 10_000_000), max_size=8)
broker_lists = st.lists(
    st.builds(
        broker,
        st.sampled_from("abc"),
        zone=st.sampled_from(["", "x", "y"]),
        capacity=st.sampled_from([0, 1, 1_000_000, 100_000_000]),
        draining=st.booleans(),
    ),
    max_size=3,
    unique_by=lambda entry: entry.id,
)


@pytest.mark.parametrize("name", list(STRATEGIES))
@given(owner_lists, broker_lists, traffic_lists, st.booleans())
def test_every_partition_gets_a_live_owner_and_a_carried_out_plan_leaves_nothing_to_plan(
    name: str, owners: list[str], brokers: list[BrokerEntry], traffic: list[int], opened: bool
) -> None:
    strategy = STRATEGIES[name]
    before = view(owners, brokers, traffic, opened=opened)
    plan = strategy(before)
    after = applied(before, plan)
    live = {entry.id: entry for entry in brokers}
    takers = {entry.id for entry in brokers if not entry.draining}
    for old, new in zip(before.assignments, after.assignments, strict=True):
        assert new.epoch == old.epoch
        if takers:
            assert new.broker in takers
        else:
            assert new.broker == (old.broker if old.broker in live else "")
        if old.session and old.broker in live:
            assert new.session == old.session, "an open partition is drained by its owner first"
        elif new != old:
            assert new.session == ""
    assert all(change.reason for change in plan.changes)
    assert strategy(after).changes == ()
    assert strategy(settled(after)).changes == ()


def test_a_partition_that_goes_back_to_its_new_owner_keeps_the_reason_for_that() -> None:
    brokers = [broker("a", capacity=1_000_000), broker("b", capacity=100_000_000)]
    plan = balanced(view(["a", "dead", *"aaaa", "", "a"], brokers, [0, 8_400_000, 7_100_000]))
    reasons = {change.before: change.reason for change in plan.changes}
    assert (reasons["dead"], reasons[""]) == ("'dead' is gone", "it has no owner")


@given(owner_lists, broker_lists, traffic_lists)
def test_sticky_moves_nothing_from_a_broker_that_stays(
    owners: list[str], brokers: list[BrokerEntry], traffic: list[int]
) -> None:
    staying = {entry.id for entry in brokers if not entry.draining}
    assert not [
        change for change in STRATEGIES["sticky"](view(owners, brokers, traffic)).changes if change.before in staying
    ]


@given(st.lists(st.sampled_from("abc"), min_size=8, max_size=8), traffic_lists)
def test_balancing_relieves_the_busiest_and_burdens_nobody_more(owners: list[str], traffic: list[int]) -> None:
    before = view(owners, [broker(name) for name in "abc"], traffic)
    plan = balanced(before)
    most = max(used(before).values())
    assert max(used(applied(before, plan)).values()) <= most
    given = dict.fromkeys("abc", 0)
    weights = {(load.topic_id, load.partition): load.bytes_s for load in before.loads}
    for change in plan.changes:
        place = (change.assignment.topic_id, change.assignment.partition)
        given[change.before] += 1_000 + weights.get(place, 0)
    for name, weight in given.items():
        assert not weight or weight >= GAIN_MIN * used(before)[name]
        assert not weight or used(before)[name] >= BUSY_MIN * CAPACITY_BYTES_S, "an idle broker gains nothing"
    receivers = {change.assignment.broker for change in plan.changes}
    assert not receivers & {change.before for change in plan.changes}, "who gives gets nothing: moves are the least"


@given(owner_lists, broker_lists, st.lists(st.integers(0, 100_000), max_size=8))
def test_nothing_moves_between_brokers_that_have_nothing_to_gain(
    owners: list[str], brokers: list[BrokerEntry], traffic: list[int]
) -> None:
    plenty = [replace(each, capacity_bytes_s=100_000_000) for each in brokers]
    plan = balanced(view(owners, plenty, traffic))
    staying = {entry.id for entry in brokers if not entry.draining}
    assert not [change for change in plan.changes if change.before in staying]


def test_a_broker_that_comes_back_to_an_idle_cluster_moves_nothing() -> None:
    assert balanced(view(["a"] * 4 + ["b"] * 4, [broker(name) for name in "abc"], [90_000] * 8)) == AssignmentPlan()


def test_between_brokers_that_all_drain_nothing_moves() -> None:
    brokers = [broker("a", draining=True), broker("b", draining=True)]
    assert balanced(view(["a"] * 5 + ["b"] * 3, brokers, [9_000_000] * 8)) == AssignmentPlan()


def test_a_hot_partition_does_not_drive_the_idle_ones_away() -> None:
    before = view(["a"] * 5 + ["b"] * 3, [broker("a"), broker("b")], [50_000_000])
    assert balanced(before).changes == ()


@given(st.lists(st.sampled_from(["", "dead"]), min_size=8, max_size=8), st.integers(1, 4))
def test_partitions_without_owner_are_spread_evenly(owners: list[str], count: int) -> None:
    names = "abcd"[:count]
    plan = balanced(view(owners, [broker(name) for name in names]))
    given_to = [change.assignment.broker for change in plan.changes]
    loads = [given_to.count(name) for name in names]
    assert sum(loads) == 8
    assert max(loads) - min(loads) <= 1


def test_a_broker_that_joins_gets_its_share_and_nothing_else_moves() -> None:
    many = [topic(f"t{number}", number, 100) for number in range(10)]
    entries = [
        Assignment(topic_id=each.id, partition=number, broker="ab"[number % 2], session=f"session-{'ab'[number % 2]}")
        for each in many
        for number in range(100)
    ]
    loads = [Load(topic_id=each.id, partition=number, bytes_s=20_000) for each in many for number in range(100)]
    brokers = [broker(name) for name in "abc"]
    plan = balanced(ClusterView(topics=many, brokers=brokers, assignments=entries, loads=loads))
    assert {change.assignment.broker for change in plan.changes} == {"c"}
    assert 270 <= len(plan.changes) <= 334


def test_the_dead_owners_partitions_are_spread_and_the_rest_stays() -> None:
    plan = balanced(view(["a", "a", "a", "b", "b", "b", "dead", "dead"], [broker("a"), broker("b")]))
    assert [(change.before, change.assignment.broker) for change in plan.changes] == [("dead", "a"), ("dead", "b")]
    assert [change.assignment.session for change in plan.changes] == ["", ""]


def test_traffic_counts_and_capacity_counts() -> None:
    hot = [8_000_000, 0, 0, 0, 0, 0, 0, 8_000_000]
    plan = balanced(view(["a"] * 8, [broker("a"), broker("b")], hot))
    after = used(applied(view(["a"] * 8, [broker("a"), broker("b")], hot), plan))
    assert max(after.values()) < 8_500_000
    small = [broker("a", capacity=30_000_000), broker("b", capacity=10_000_000)]
    shares = used(applied(view([""] * 8, small, [1_000_000] * 8), balanced(view([""] * 8, small, [1_000_000] * 8))))
    assert shares["a"] == 3 * shares["b"]


def test_too_little_capacity_is_said_and_drops_nothing() -> None:
    tiny = [broker("a", capacity=1_000), broker("b", capacity=1_000)]
    plan = balanced(view([""] * 8, tiny, [5_000_000] * 8))
    assert len(plan.changes) == 8
    assert [note.split(":")[0] for note in plan.notes] == [
        "broker 'a' is over its capacity",
        "broker 'b' is over its capacity",
    ]


def test_without_a_broker_the_dead_ones_partitions_are_released_and_it_is_said() -> None:
    plan = balanced(view(["dead"] * 5 + [""] * 3, []))
    assert [change.assignment.broker for change in plan.changes] == [""] * 5
    assert plan.notes == ("8 partitions have no owner: no broker takes any; start one that does not drain",)


def test_a_topic_is_spread_over_the_zones() -> None:
    brokers = [broker("a", zone="x"), broker("b", zone="x"), broker("c", zone="y")]
    before = view([""] * 8, brokers)
    zone = {entry.id: entry.zone for entry in brokers}
    after = applied(before, balanced(before))
    for each in TOPICS:
        zones = [zone[entry.broker] for entry in after.assignments if entry.topic_id == each.id]
        assert abs(zones.count("x") - zones.count("y")) <= 1


def test_an_overloaded_broker_is_relieved_though_the_zones_were_even() -> None:
    brokers = [broker("a", zone="x", capacity=1_000_000), broker("b", zone="y", capacity=100_000_000)]
    before = view(list("abababab"), brokers, [4_000_000] * 8)
    after = applied(before, balanced(before))
    assert {entry.broker for entry in after.assignments} == {"b"}
    assert not balanced(settled(after)).changes


def test_a_draining_broker_is_emptied_and_gets_nothing() -> None:
    plan = balanced(view(["a"] * 4 + ["b"] * 3 + ["dead"], [broker("a", draining=True), broker("b"), broker("c")]))
    moved = [change for change in plan.changes if change.before == "a"]
    assert len(moved) == 4
    assert {change.assignment.session for change in moved} == {"session-a"}
    assert "a" not in {change.assignment.broker for change in plan.changes}
    assert next(change.before for change in plan.changes) == "dead", "what has no owner comes first"
    alone = balanced(view(["a"] * 8, [broker("a", draining=True)]))
    assert alone == AssignmentPlan(), "nobody is there to take it"


def test_a_partition_on_its_way_is_not_sent_elsewhere() -> None:
    entries = [
        Assignment(topic_id=place[0], partition=place[1], broker="b", session="session-a") for place in EVERYTHING
    ]
    brokers = [broker(name) for name in "abc"]
    assert balanced(ClusterView(topics=TOPICS, brokers=brokers, assignments=entries)).changes == ()
    without_b = [broker("a"), broker("c")]
    changes = balanced(ClusterView(topics=TOPICS, brokers=without_b, assignments=entries)).changes
    assert len(changes) == 8
    assert {change.assignment.session for change in changes} == {"session-a"}, "its holder still drains it"


def test_partitions_of_topics_that_are_no_more_are_left_alone() -> None:
    gone = Assignment(topic_id="ff" * 16, partition=0)
    assert balanced(ClusterView(topics=[], brokers=[broker("a")], assignments=[gone])).changes == ()


def test_a_broker_that_came_back_with_a_new_session_keeps_what_it_had() -> None:
    before = [Assignment(topic_id=place[0], partition=place[1], broker="a", session="older") for place in EVERYTHING]
    brokers = [broker("a"), broker("b", capacity=1)]
    assert STRATEGIES["sticky"](ClusterView(topics=TOPICS, brokers=brokers, assignments=before)).changes == ()
