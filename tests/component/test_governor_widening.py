"""The write partitions of a topic follow its traffic, within bounds; each slot always has a partition."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memq.broker.api import Call
from memq.broker.api.cluster_requests import ClusterRequests
from memq.governor import BrokerEntry, Load
from memq.governor.balance import balanced
from memq.governor.governor import Governor, Planner
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.governor.planning import JOIN_REST_MS, SPLIT_REST_MS, ClusterView, join, neighbours, reshapes, split
from memq.governor.registry import check_topic
from memq.limits import SLOTS
from memq.protocol.admin_messages import AdminAnswer, DescribeCluster
from memq.protocol.connection import ANONYMOUS
from memq.runtime.logs import EventLog
from memq.topic import Topic, TopicSettings, equal_slots
from tests.access import EVERYTHING
from tests.component.cluster_rig import rig
from tests.contract.manual_clock import ManualClock

MOST = 1_000_000
Loads = dict[int, int]


def topic_of(partitions: int, most: int = 8) -> Topic:
    settings = TopicSettings(write_partitions_max=most, partition_bytes_s_max=MOST)
    return Topic(name="clicks", id="ab" * 16, created_ms=0, settings=settings, partitions=equal_slots(partitions))


def view_of(topic: Topic, loads: Loads, now_ms: int) -> ClusterView:
    found = [Load(topic_id=topic.id, partition=number, bytes_s=count) for number, count in loads.items()]
    return ClusterView(topics=[topic], brokers=[], assignments=[], loads=found, now_ms=now_ms)


def reshaped(topic: Topic, loads: Loads, now_ms: int) -> Topic:
    changes = reshapes(view_of(topic, loads, now_ms))
    return changes[0].topic if changes else topic


def slots_by_read_partition(topic: Topic) -> dict[int, int]:
    found: dict[int, int] = {}
    for part in topic.taking:
        found[part.read_partition] = found.get(part.read_partition, 0) + part.slot_last - part.slot_first + 1
    return found


@given(
    st.integers(1, 5),
    st.integers(0, 12),
    st.lists(st.tuples(st.dictionaries(st.integers(0, 12), st.integers(0, 3 * MOST)), st.integers(0, 20)), max_size=30),
)
def test_whatever_the_traffic_every_slot_has_a_home_and_readers_see_nothing(
    partitions: int, most: int, steps: list[tuple[Loads, int]]
) -> None:
    topic, now_ms = topic_of(partitions, most), 0
    before = slots_by_read_partition(topic)
    for loads, minutes in steps:
        now_ms += minutes * 60_000
        after = reshaped(topic, loads, now_ms)
        check_topic(after)
        assert slots_by_read_partition(after) == before, "a slot stays in its read partition, else its order was lost"
        assert [part.partition for part in after.partitions] == list(range(len(after.partitions)))
        assert len(after.partitions) >= len(topic.partitions), "numbers are never used twice"
        assert partitions <= len(after.taking) <= max(partitions, most)
        assert abs(len(after.taking) - len(topic.taking)) <= 1
        assert all(part.takes_records for part in after.partitions[:partitions]), "those it was made with stay"
        if after is not topic:
            assert after.map_version == topic.map_version + 1
            assert after.map_changed_ms == now_ms
            assert reshaped(after, loads, now_ms) is after, "it rests"
        topic = after


@given(st.integers(1, 4), st.integers(0, 12 * MOST))
def test_steady_traffic_comes_to_rest(partitions: int, total: int) -> None:
    """Keys are even, so a write partition takes as much as it has slots: after some changes there are no more."""
    topic, now_ms = topic_of(partitions, 32), 0
    for _ in range(64):
        now_ms += JOIN_REST_MS
        shares = {part.partition: (part.slot_last - part.slot_first + 1) / SLOTS for part in topic.taking}
        after = reshaped(topic, {number: int(total * share) for number, share in shares.items()}, now_ms)
        if after is topic:
            break
        topic = after
    else:
        raise AssertionError("it goes on for ever")
    assert all(total * share <= MOST for share in shares.values()) or len(topic.taking) == 32


def test_a_topic_widens_with_its_traffic_and_narrows_again() -> None:
    topic = topic_of(1)
    assert reshaped(topic, {0: MOST}, SPLIT_REST_MS) is topic, "not over its bound"
    (change,) = reshapes(view_of(topic, {0: 3 * MOST}, SPLIT_REST_MS))
    assert change.reason == "partition 0 takes 3000000 bytes/s, over partition_bytes_s_max = 1000000"
    two = change.topic
    assert [(part.slot_first, part.slot_last, part.read_partition) for part in two.partitions] == [
        (0, 32_767, 0),
        (32_768, 65_535, 0),
    ]
    three = reshaped(two, {0: MOST, 1: 2 * MOST}, 2 * SPLIT_REST_MS)
    assert len(three.taking) == 3
    low = {0: 1_000, 1: 1_000, 2: 1_000}
    now_ms = 2 * SPLIT_REST_MS + JOIN_REST_MS
    assert reshaped(three, low, now_ms - 1) is three, "it rests"
    narrower = reshaped(three, low, now_ms)
    assert [part.takes_records for part in narrower.partitions] == [True, True, False]
    again = reshaped(narrower, {1: 9 * MOST}, 2 * now_ms)
    assert len(again.partitions) == 3, "the one without slots is taken before a new one is made"
    one = narrower
    for turn in range(2, 5):
        one = reshaped(one, {}, turn * now_ms)
    assert [part.partition for part in one.taking] == [0]


def test_without_leave_nothing_is_split_and_a_lower_bound_joins_at_once() -> None:
    assert reshapes(view_of(topic_of(2, 0), {0: 99 * MOST}, JOIN_REST_MS)) == []
    wide = split(split(topic_of(1), 0, 0), 1, 0)
    bound = replace(wide, settings=replace(wide.settings, write_partitions_max=2))
    (change,) = reshapes(view_of(bound, {0: 99 * MOST, 1: 99 * MOST}, 1))
    assert len(change.topic.taking) == 2
    assert change.reason.endswith("write_partitions_max is 2")


def test_partitions_of_different_read_partitions_are_never_joined() -> None:
    topic = topic_of(3)
    assert list(neighbours(topic)) == []
    wide = split(topic, 1, 0)
    assert list(neighbours(wide)) == [(1, 3)]
    assert join(wide, 3, 1, 0).taking == topic.taking


def test_the_governor_widens_and_gives_the_new_partition_an_owner() -> None:
    async def scenario() -> None:
        clock, shared = ManualClock(), MemoryCluster()
        door = MemoryCoordinator(shared)
        broker = BrokerEntry(id="one", session="s", address="127.0.0.1:1")
        topic = topic_of(1)
        await door.create_topic(topic)
        await door.register(broker)
        await door.report(broker, [Load(topic_id=topic.id, partition=0, bytes_s=5 * MOST)])
        governor = Governor(door, Planner(balanced), EventLog(clock), clock)
        assert await governor.act(broker) == 3, "a new map, and two owners"
        assert [entry.broker for entry in await door.assignments()] == ["one", "one"]
        assert len((await door.topics())[0].taking) == 2
        assert await governor.act(broker) == 0, "it rests"

    asyncio.run(scenario())


def test_the_plan_says_what_would_be_split_and_changes_nothing() -> None:
    async def scenario() -> None:
        async with rig() as cluster:
            door, one = MemoryCoordinator(cluster.shared), BrokerEntry(id="one", session="s", address="127.0.0.1:1")
            topic = topic_of(1)
            await door.create_topic(topic)
            await door.register(one)
            await door.report(one, [Load(topic_id=topic.id, partition=0, bytes_s=5 * MOST)])
            two = cluster.made("two")
            cluster_requests = ClusterRequests(two.services, two.partitions, nobody_hands_over, cast(Any, None))
            answer = await cluster_requests.describe(
                Call(cast(Any, None), ANONYMOUS, 0, DescribeCluster(), access=EVERYTHING)
            )
            assert isinstance(answer, AdminAnswer)
            reason = "partition 0 takes 5000000 bytes/s, over partition_bytes_s_max = 1000000"
            assert answer.notes == [f"topic 'clicks': {reason}"]
            assert list(await door.topics()) == [topic]

    asyncio.run(scenario())


async def nobody_hands_over() -> None:
    """What a broker does that is drained."""
