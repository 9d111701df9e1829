"""Groups on state logs in a cluster of brokers: any broker takes requests, and a new owner knows what was answered."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from awscrt.checksums import crc32c

from memq.broker.api.group_requests import shown_member
from memq.broker.broker import Broker
from memq.broker.service_partitions import hosts
from memq.broker.services import BROKER_PROGRAM
from memq.broker.upkeep.deleted_topics import DeletedTopics
from memq.broker.upkeep.retention import run_upkeep
from memq.client.admin import AsyncAdmin
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.producer import AsyncProducer
from memq.errors import (
    GenerationFencedError,
    InvalidNameError,
    LogLostError,
    MovedError,
    NotFoundError,
    RetryableError,
)
from memq.format.key import state_prefix
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.groups import Membership
from memq.groups.coordinator import GroupCoordinator
from memq.groups.remote import RemoteGroups
from memq.protocol.link import connect_link
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.state_log.state_log import StateLog, StateLogSettings
from memq.topic import STATE_TOPIC, Committed, Position, ReadPartition, Totals, read_partitions
from tests.brokers import run
from tests.component.cluster_rig import Rig, rig

SESSION_MS = 6_000


@asynccontextmanager
async def three_brokers(**settings: Any) -> AsyncIterator[tuple[Rig, list[Broker]]]:
    async with rig() as cluster:
        brokers = [await cluster.start(name, **settings) for name in ("a", "b", "c")]
        for broker in brokers:
            await broker.partitions.refresh()
        yield cluster, brokers


def owner_of(cluster: Rig, brokers: list[Broker], group: str = "report") -> tuple[Broker, ReadPartition]:
    """Return the broker that has a group, and the log of the group's service partition."""
    (topic,) = (each for each in cluster.shared.registry.topics() if each.name == STATE_TOPIC)
    number = zlib.crc32(group.encode()) % len(topic.partitions)
    (owner,) = (broker for broker in brokers if (topic.id, number) in broker.hosts.held())
    return owner, ReadPartition(STATE_TOPIC, topic.id, number)


async def filled(broker: Broker, values: int = 20, partitions: int = 4) -> list[ReadPartition]:
    """Send numbers to a topic of several partitions."""
    async with AsyncAdmin(broker.address) as admin:
        topic = await admin.create_topic("clicks", partitions=partitions)
    async with AsyncProducer(broker.address) as producer:
        for number in range(values):
            await producer.send("clicks", b"%d" % number, partition=number % partitions)
        await producer.flush()
    return read_partitions(topic)


async def read_of(broker: Broker, group: str) -> list[int]:
    async with AsyncConsumer(broker.address, ["clicks"], group=group, end="end") as consumer:
        return sorted([int(value or b"") async for batch in consumer for value in batch.values()])


def test_members_at_different_brokers_share_a_topic() -> None:
    async def work() -> None:
        async with three_brokers() as (_, brokers):
            await filled(brokers[0])
            found = await asyncio.gather(*(read_of(broker, "report") for broker in brokers))
            assert sorted(number for numbers in found for number in numbers) == list(range(20))
            assert await read_of(brokers[1], "report") == []
            assert await read_of(brokers[1], "other") == list(range(20))
            for broker in brokers:
                async with AsyncAdmin(broker.address) as admin:
                    assert await admin.groups() == ["other", "report"]
                    described = await admin.group("report")
                    assert sum(each.measured.records for each in described.partitions) == 0  # type: ignore[union-attr, misc]
            async with AsyncAdmin(brokers[2].address) as admin:
                await admin.delete_group("other")
                with pytest.raises(NotFoundError, match="'other'"):
                    await admin.delete_group("other")
                assert await admin.groups() == ["report"]

    run(work())


@pytest.mark.parametrize("drains", [True, False])
def test_a_new_owner_of_a_group_knows_its_positions_and_members(*, drains: bool) -> None:
    async def work() -> None:
        async with three_brokers() as (cluster, brokers):
            logs = await filled(brokers[0])
            member = await member_at(brokers[0])
            known = await member.join("report", "m", logs, SESSION_MS)
            assert known.assigned == tuple(logs)
            at = {logs[0]: committed(2, 5)}
            await member.commit("report", "m", known.generation, at, 1)
            owner, _ = owner_of(cluster, brokers)
            if drains:
                await owner.hand_over()
            await owner.close()
            member = await member_at(next(broker for broker in brokers if broker is not owner))
            again = await retried(lambda: member.heartbeat("report", "m", known.generation))
            assert again == known
            assert await member.committed("report", logs) == at
            with pytest.raises(GenerationFencedError):
                await member.commit("report", "m", known.generation - 1, {logs[0]: committed(9, 9)}, 2)
            await member.commit("report", "m", known.generation, {logs[1]: committed(1, 1, partition=1)}, 2)
            with pytest.raises(GenerationFencedError):  # a late one
                await member.commit("report", "m", known.generation, {logs[0]: committed(1, 1)}, 1)
            assert await member.committed("report", logs) == at | {logs[1]: committed(1, 1, partition=1)}
            topic = next(each for each in cluster.shared.registry.topics() if each.name == STATE_TOPIC)
            epochs = [cluster.owner(topic, number).epoch for number in range(len(topic.partitions))]
            assert max(epochs) == 2

    run(work())


def test_a_silent_member_keeps_its_partitions_until_its_session_ends() -> None:
    async def work() -> None:
        async with three_brokers() as (_, brokers):
            logs = await filled(brokers[0])
            member, other = await member_at(brokers[0]), await member_at(brokers[1])
            await member.join("report", "silent", logs, 800)
            before_s = asyncio.get_running_loop().time()
            joined = await other.join("report", "other", logs, SESSION_MS)
            while len(joined.assigned) < len(logs):
                joined = await other.heartbeat("report", "other", joined.generation)
            assert 0.7 < asyncio.get_running_loop().time() - before_s < 10

    run(work())


def test_a_request_that_a_broker_forwarded_is_not_forwarded_again() -> None:
    async def work() -> None:
        async with three_brokers() as (cluster, brokers):
            logs = await filled(brokers[0])
            await (await member_at(brokers[0])).join("report", "m", logs, SESSION_MS)
            owner, _ = owner_of(cluster, brokers)
            for broker in brokers:
                forwarded = await member_at(broker, program=BROKER_PROGRAM)
                if broker is owner:
                    assert await forwarded.groups() == ["report"]
                else:
                    assert await forwarded.groups() == []
                    with pytest.raises(MovedError):
                        await forwarded.describe("report")

    run(work())


def test_a_new_owner_opens_its_state_logs_without_a_request() -> None:
    """It expires members, and releases what is due."""

    async def work() -> None:
        async with three_brokers() as (cluster, brokers):
            await (await member_at(brokers[0])).groups()
            owner, log = owner_of(cluster, brokers)
            await owner.close()
            left = [broker for broker in brokers if broker is not owner]
            key = (log.topic_id, log.partition)
            for _ in range(1_000_000):
                if any(key in broker.hosts.held() for broker in left):
                    return
                await asyncio.sleep(0)
            raise AssertionError("no broker has opened the log")

    run(work())


def test_the_sweep_and_retention_of_a_cluster_pass_over_state_logs() -> None:
    async def work() -> None:
        async with three_brokers(sweep_age_ms=1_000) as (cluster, brokers):
            await filled(brokers[0])
            assert await read_of(brokers[1], "report") == list(range(20))
            for broker in brokers:
                await run_upkeep(broker.services, broker.partitions)
                assert broker.services.counters.damaged_pointers == 0
            names = {partition.topic for partition in cluster.queue.logs}
            assert names >= {STATE_TOPIC, "clicks"}
            assert await read_of(brokers[2], "new") == list(range(20))

    run(work())


def test_a_broker_forwards_the_requests_of_many_members_at_once() -> None:
    async def work() -> None:
        async with three_brokers() as (cluster, brokers):
            logs = await filled(brokers[0])
            await (await member_at(brokers[0])).join("report", "m", logs, SESSION_MS)
            owner, _ = owner_of(cluster, brokers)
            other = next(broker for broker in brokers if broker is not owner)
            members = [await member_at(other) for _ in range(5)]
            asked = [member.committed("report", logs) for member in members for _ in range(50)]
            assert await asyncio.gather(*asked) == [{}] * 250

    run(work())


def test_an_operator_can_not_delete_the_topic_with_all_groups() -> None:
    async def work() -> None:
        async with three_brokers(audit=False) as (_, brokers):
            await filled(brokers[0])
            assert await read_of(brokers[0], "report") == list(range(20))
            async with AsyncAdmin(brokers[0].address) as admin:
                with pytest.raises(InvalidNameError, match="has the consumer groups"):
                    await admin.delete_topic(STATE_TOPIC)
                assert await admin.groups() == ["report"]

    run(work())


def test_an_owner_names_a_snapshot_within_half_the_age_of_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[StateLogSettings] = []

    class Noted(StateLog):
        def __init__(self, *parts: Any) -> None:
            super().__init__(*parts)
            found.append(parts[5])

    monkeypatch.setattr(hosts, "StateLog", Noted)

    async def work() -> None:
        async with three_brokers(sweep_age_ms=500_000) as (_, brokers):
            await filled(brokers[0])
            assert await read_of(brokers[0], "report") == list(range(20))

    run(work())
    assert {each.key_valid_s for each in found} == {250.0}


def test_an_owner_forgets_the_positions_in_a_topic_whose_deletion_two_rounds_have_proven() -> None:
    async def work() -> None:
        async with three_brokers() as (cluster, brokers):
            (kept,) = await filled(brokers[0], partitions=1)
            async with AsyncAdmin(brokers[0].address) as admin:
                gone = read_partitions(await admin.create_topic("views", partitions=3))
                member = await member_at(brokers[0])
                known = await member.join("report", "m", [kept, *gone], SESSION_MS)
                at = {each: committed(1, 1, each.partition) for each in (kept, *gone)}
                await member.commit("report", "m", known.generation, at, 1)
                owner, _ = owner_of(cluster, brokers)
                groups = await owner.hosts.service_or_address(owner.hosts.groups, "report")
                assert isinstance(groups, GroupCoordinator)
                search = DeletedTopics(owner.services, owner.partitions, groups)
                await search.search()
                await admin.delete_topic("views")
            await owner.partitions.refresh()
            lost = MemoryCoordinator(MemoryCluster())  # it has never known the topic
            unsure = DeletedTopics(replace(owner.services, coordinator=lost), owner.partitions, groups)
            for _ in range(3):
                await unsure.search()
            await search.search()
            assert (await member.describe("report")).committed.keys() == {kept, *gone}  # proven once
            await search.search()
            state = await member.describe("report")
            assert (state.committed, state.members) == ({kept: committed(1, 1)}, {shown_member("m"): (kept,)})
            await search.search()
            assert (await member.describe("report")).generation == state.generation

    run(work())


def test_an_owner_creates_the_log_that_the_queue_does_not_have_yet() -> None:
    """The broker that created the topic may have died before it created its logs."""

    async def work() -> None:
        async with three_brokers() as (cluster, brokers):
            logs = await filled(brokers[0])
            await (await member_at(brokers[0])).groups()  # creates the topic, and opens its logs
            (topic,) = (each for each in cluster.shared.registry.topics() if each.name == STATE_TOPIC)
            for broker in brokers:
                await broker.hosts.drain()
            await cluster.queue.drop(read_partitions(topic))
            for broker in brokers:
                member = await member_at(broker)
                joined = await retried(lambda member=member: member.join("report", "m", logs, SESSION_MS))  # type: ignore[misc]
                assert joined.assigned == tuple(logs)

    run(work())


def test_a_first_request_about_groups_waits_for_the_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The topic is known before its logs are made, and the broker opens them at once."""

    async def work() -> None:
        async with rig() as cluster:
            broker = await cluster.start("a")
            create, calls, opened = cluster.queue.create, list[int](), asyncio.Event()

            async def create_slowly(partitions: Sequence[ReadPartition], stale_publish_ms: int) -> None:
                """Let the request wait for the first opening, whose own call takes longer."""
                calls.append(len(partitions))
                if len(calls) == 1:
                    await opened.wait()
                else:
                    opened.set()
                    for _ in range(1_000):
                        await asyncio.sleep(0)
                await create(partitions, stale_publish_ms)

            monkeypatch.setattr(cluster.queue, "create", create_slowly)
            assert await (await member_at(broker)).groups() == []

    run(work())


def test_an_owner_takes_no_lost_log_for_a_new_one(caplog: pytest.LogCaptureFixture) -> None:
    """Else members would begin as those of a new group, at `start`."""

    async def work() -> None:
        async with three_brokers() as (cluster, brokers):
            logs = await filled(brokers[0])
            member = await member_at(brokers[0])
            await member.join("report", "m", logs, SESSION_MS)
            owner, log = owner_of(cluster, brokers)
            await owner.hosts.drain()
            prefix = state_prefix("memq", STATE_TOPIC, log.topic_id, log.partition)
            await cluster.store.put(f"{prefix}0000000001-0000000000000003/0000", [b"s"], crc32c(b"s"))
            await cluster.queue.drop([log])
            await cluster.queue.create([log], 30_000)
            with pytest.raises(LogLostError, match="the queue has lost the log of service partition"):
                await member.committed("report", logs)

    run(work())
    assert any(getattr(record, "event", "") == "state-log-lost" for record in caplog.records)


# ---- inside ----------------------------------------------------------------------------------------


async def member_at(broker: Broker, program: str = "test") -> RemoteGroups:
    """Return the queue as a client of one broker sees it."""
    link = await connect_link(Runtime(), None, parse_address(broker.address), client=program)
    return RemoteGroups(link.request)


async def retried(ask: Callable[[], Awaitable[Membership]]) -> Membership:
    """Ask until the answer is no retryable error."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await ask()
            except RetryableError:
                await asyncio.sleep(0)


def committed(offset: int, records: int, partition: int = 0) -> Committed:
    return Committed(Position(partition, offset), Totals(records, 10 * records))
