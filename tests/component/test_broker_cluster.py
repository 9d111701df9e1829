"""Several brokers in one process on shared parts: hand-over, redirects with the address, one governor, one per id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec
import pytest

from memq.broker.broker import HAND_OVER_S, Broker
from memq.broker.ingest.connection import Connection
from memq.broker.metrics import Traffic
from memq.errors import FencedError, InvalidRequestError, UnreachableError
from memq.governor import Assignment, BrokerEntry, Load
from memq.governor.balance import balanced
from memq.governor.governor import CHANGES_AT_ONCE_MAX, Governor, Planner
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.governor.planning import AssignmentPlan, ClusterView
from memq.protocol.frames import AckLevel, Api, Frame
from memq.protocol.messages import Redirect, decode_message
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.topic import Topic, TopicSettings, equal_slots
from tests.brokers import BareClient, block_of, write_frame
from tests.component.cluster_rig import Rig, rig


async def until(rig: Rig, holds: Callable[[], bool]) -> None:
    """Wait until something holds, looking after each change at the coordinator."""
    changed = asyncio.Event()

    async def notice() -> None:
        changed.set()

    door = MemoryCoordinator(rig.shared)
    door.watch(notice)
    while not holds():
        await changed.wait()
        changed.clear()
    await door.close()


def test_a_broker_that_hands_over_redirects_to_the_next_owner_once_it_has_drained() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            topic = await one.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            client = await BareClient.connect(one)
            assert (await client.open(topic, acks=AckLevel.ALL)).epoch == 1
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            assert (await client.frame()).api == Api.ACK
            two = await cluster.start("two")
            await one.hand_over()
            assert cluster.owner(topic).broker == "two"
            assert cluster.owner(topic).session == "", "given back after the drain"
            frame = await client.frame()
            assert frame.api == Api.REDIRECT
            assert decode_message(frame.body, Redirect).address == two.address
            there = await BareClient.connect(two)
            assert (await there.open(topic, acks=AckLevel.ALL, sequence=1)).epoch == 2
            assert cluster.owner(topic).session == two.services.session
            await client.close()
            await there.close()

    asyncio.run(work())


@pytest.mark.parametrize("leaves", [True, False])
def test_each_moved_partition_restarts_the_limit_only_for_a_broker_that_leaves(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[float] = []

    class Noted:
        def __init__(self, limit: asyncio.Timeout) -> None:
            self.limit = limit

        async def __aenter__(self) -> Self:
            await self.limit.__aenter__()
            return self

        async def __aexit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            await self.limit.__aexit__(kind, error, trace)

        def reschedule(self, when: float) -> None:
            moved.append(when)
            self.limit.reschedule(when)

    timeout = asyncio.timeout

    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            topic = await one.partitions.create("clicks", 3, TopicSettings(), exist_ok=False)
            for partition in range(3):
                await one.partitions.processor(topic, partition).ready()
            await cluster.start("two")
            await one.partitions.refresh()
            ours = len(one.partitions.held())
            began_s = asyncio.get_running_loop().time()
            monkeypatch.setattr("memq.broker.broker.asyncio.timeout", lambda delay_s: Noted(timeout(delay_s)))
            await one.hand_over(leaves=leaves)
            monkeypatch.undo()
            assert ours >= 1
            assert [cluster.owner(topic, partition).broker for partition in range(3)] == ["two"] * 3
            if leaves:
                assert moved
                assert all(when >= began_s + HAND_OVER_S for when in moved)
            else:
                assert moved == []

    asyncio.run(work())


def test_the_next_owner_waits_until_the_last_one_has_let_go() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            topic = await one.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            client = await BareClient.connect(one)
            await client.open(topic)
            gate = asyncio.Event()
            put = cluster.store.put

            async def slow(*arguments: object) -> None:
                await gate.wait()
                await put(*arguments)  # type: ignore[arg-type]  # whatever the broker says

            cluster.store.put = slow  # type: ignore[method-assign, assignment]  # a store that takes its time
            client.write(write_frame(block_of(topic, 0, [b"v"])))
            two = await cluster.start("two")
            moving = asyncio.create_task(one.hand_over())
            await until(cluster, lambda: cluster.owner(topic).broker == "two")
            there = await BareClient.connect(two)
            there.send_open(topic, sequence=1)
            assert cluster.owner(topic).session == one.services.session
            gate.set()
            frames = [(await client.frame()).api, (await client.frame()).api]
            assert frames == [Api.ACK, Api.REDIRECT]
            await moving
            assert (await there.frame()).api == Api.OPEN
            assert cluster.owner(topic).epoch == 2
            await client.close()
            await there.close()

    asyncio.run(work())


def test_a_broker_that_is_alone_says_that_nobody_takes_its_partitions() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            topic = await one.partitions.create("clicks", 2, TopicSettings(), exist_ok=False)
            held = len(one.partitions.held())  # its two, and those of the reports
            with pytest.raises(InvalidRequestError, match=f"has taken the {held} partitions of broker 'one'"):
                await one.hand_over()
            assert not cluster.shared.registry.brokers()[0].draining, "else no topic that is made now had an owner"
            assert cluster.owner(topic).broker == "one"

    asyncio.run(work())


async def entry_of(broker: Broker) -> BrokerEntry:
    """Return a broker's entry in the membership."""
    brokers = await broker.services.coordinator.brokers()
    return next(entry for entry in brokers if entry.session == broker.services.session)


async def enter_draining(broker: Broker) -> None:
    """Say in the membership that a broker takes no partitions any more; it hands none over yet."""
    await broker.services.coordinator.register(msgspec.structs.replace(await entry_of(broker), draining=True))


def test_brokers_that_all_leave_hand_nothing_to_each_other() -> None:
    async def work() -> None:
        async with rig() as cluster:
            brokers = [await cluster.start(name) for name in ("one", "two")]
            topic = await brokers[0].partitions.create("clicks", 4, TopicSettings(), exist_ok=False)
            for broker in brokers:
                await enter_draining(broker)
                await broker.partitions.refresh()
            held = [cluster.owner(topic, number).broker for number in range(4)]
            with pytest.raises(InvalidRequestError, match="no other broker has taken"):
                await brokers[0].hand_over(leaves=True)
            assert all(entry.draining for entry in cluster.shared.registry.brokers()), "else it got those of the other"
            await asyncio.gather(*(broker.drain() for broker in brokers))
            assert [cluster.owner(topic, number).broker for number in range(4)] == held

    asyncio.run(work())


def test_a_broker_that_drains_takes_nothing_again_though_its_heir_leaves_meanwhile() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one, two = [await cluster.start(name) for name in ("one", "two")]
            await one.partitions.create("clicks", 4, TopicSettings(), exist_ok=False)
            await one.partitions.refresh()
            await enter_draining(two)
            assert one.partitions.heirs, "it has not seen it"
            await one.drain()
            assert all(entry.draining for entry in cluster.shared.registry.brokers())

    asyncio.run(work())


def test_broker_stops_when_another_takes_its_id() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            again = await cluster.start("one")
            await one.failed.wait()
            assert isinstance(one.failure, FencedError)
            assert str(one.failure) == f"another broker at {again.address} runs under the id 'one'"
            await one.close()
            assert [entry.session for entry in cluster.shared.registry.brokers()] == [again.services.session]
            assert again.failure is None

    asyncio.run(work())


class CountingTransport(asyncio.Transport):
    """A transport that goes nowhere, and counts how often it was aborted."""

    def __init__(self) -> None:
        super().__init__()
        self.aborts = 0

    def abort(self) -> None:
        """Count it."""
        self.aborts += 1

    def close(self) -> None:
        """Nothing is left to send."""


@pytest.mark.parametrize("api", [Api.HELLO, Api.METADATA, Api.FORWARD])
def test_a_connection_that_is_made_after_its_broker_closed_is_aborted(api: Api) -> None:
    """A socket is accepted some callbacks before its protocol begins: the broker's close can't see it in between."""

    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            accepted = Connection(one.services, one.intake, one.requests)
            await one.close()
            transport, tasks = CountingTransport(), asyncio.all_tasks()
            accepted.connection_made(transport)
            if api == Api.FORWARD:
                slab = one.services.pool.lease(10)
                assert slab is not None
                one.requests.forward(accepted, 1, slab, 0, 10)
            else:
                one.requests.request(accepted, Frame(api, 0, 0, 1, memoryview(b"")))
            assert transport.aborts == 1
            assert asyncio.all_tasks() <= tasks, "nothing was begun"

    asyncio.run(work())


def test_a_peer_that_leaves_right_behind_its_block_leaves_no_coroutine() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            peer = Connection(one.services, one.intake, one.requests)
            peer.connection_made(CountingTransport())
            slab = one.services.pool.lease(10)
            assert slab is not None
            one.requests.forward(peer, 1, slab, 0, 10)
            one.requests.disconnected(peer)
            await one.requests.stop()
            assert slab.references == 1, "that of the lease"

    asyncio.run(work())


def test_when_the_governor_dies_another_one_moves_its_partitions() -> None:
    async def work() -> None:
        async with rig() as cluster:
            one, two = await cluster.start("one"), await cluster.start("two")
            topic = await two.partitions.create("clicks", 4, TopicSettings(), exist_ok=False)
            await until(cluster, lambda: sum(bool(cluster.owner(topic, n).broker) for n in range(4)) == 4)
            assert (one.governs, two.governs) == (True, False)
            cluster.shared.expire(await entry_of(one))
            await one.close()
            await until(cluster, lambda: {cluster.owner(topic, n).broker for n in range(4)} == {"two"})
            while not two.governs:  # noqa: ASYNC110 - it learns so a moment after its first change
                await asyncio.sleep(0)

    asyncio.run(work())


def test_a_broker_takes_no_blocks_before_its_start_is_done() -> None:
    """Until then the start may fail, and what was acked with 1 would go with it."""

    async def work() -> None:
        async with rig() as cluster:
            topic = await made_topic(cluster.shared, 1)
            one = cluster.made("one")
            gate, topics = asyncio.Event(), one.services.coordinator.topics
            asked = asyncio.Event()

            async def slow() -> object:
                if one.address:  # it listens
                    asked.set()
                    await gate.wait()
                return await topics()

            one.services.coordinator.topics = slow  # type: ignore[method-assign, assignment]  # one that is far away
            starting = asyncio.create_task(one.start())
            await asked.wait()
            client = await BareClient.connect(one)
            one.services.coordinator.topics = topics  # type: ignore[method-assign]
            client.send_open(topic, acks=AckLevel.ONE)
            error = await client.error()
            assert (error.code, error.text) == ("not-ready", "broker 'one' is starting")
            gate.set()
            await starting
            assert (await client.open(topic, acks=AckLevel.ONE)).epoch == 1
            await client.close()

    asyncio.run(work())


# ---- the governor's shell --------------------------------------------------------------------


def entry(name: str) -> BrokerEntry:
    return BrokerEntry(id=name, session=f"s-{name}", address="127.0.0.1:1")


async def made_topic(shared: MemoryCluster, partitions: int) -> Topic:
    runtime = Runtime()
    topic = Topic(
        name="clicks", id=f"{runtime.random.getrandbits(128):032x}", created_ms=0, partitions=equal_slots(partitions)
    )
    await MemoryCoordinator(shared).create_topic(topic)
    return topic


def test_a_governor_that_was_replaced_in_the_middle_of_its_plan_stops() -> None:
    async def work() -> None:
        shared = MemoryCluster()
        await made_topic(shared, CHANGES_AT_ONCE_MAX + 4)
        one, two = MemoryCoordinator(shared), MemoryCoordinator(shared)
        await one.register(entry("one"))
        governor = Governor(one, Planner(balanced), EventLog(SystemClock()), SystemClock())
        sets = one.set_assignment
        done = 0

        async def interrupted(assignment: Assignment, *, term: int = 0) -> Assignment:
            nonlocal done
            done += 1
            if done == 3:
                shared.expire(entry("one"))
                await two.register(entry("two"))
                assert await two.govern(entry("two")) == 2
            return await sets(assignment, term=term)

        one.set_assignment = interrupted  # type: ignore[method-assign]  # the world changes while it acts
        assert await governor.act(entry("one")) == 2
        assert (done, governor.term) == (CHANGES_AT_ONCE_MAX, 0), "the rest of the plan is left"
        assert await governor.act(entry("one")) == 0

    asyncio.run(work())


def test_governor_refreshes_between_many_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memq.governor.governor.CHANGES_UNSEEN_MAX", 2 * CHANGES_AT_ONCE_MAX)
    partitions = 5 * CHANGES_AT_ONCE_MAX
    seen: list[int] = []

    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one")
            assert one.governor is not None
            assert one.governor.refresh == one.partitions.refresh

            async def look() -> None:
                await one.partitions.refresh()
                seen.append(len(one.partitions.held()) - before)

            before = len(one.partitions.held())  # those of reports
            one.governor.refresh = look
            await one.partitions.create("clicks", partitions, TopicSettings(), exist_ok=False)
            assert len(one.partitions.held()) == before + partitions

    asyncio.run(work())
    assert seen == [2 * CHANGES_AT_ONCE_MAX, 4 * CHANGES_AT_ONCE_MAX]


def test_governor_skips_an_assignment_that_changed_and_applies_the_others() -> None:
    async def work() -> None:
        shared = MemoryCluster()
        topic = await made_topic(shared, 4)
        door = MemoryCoordinator(shared)
        await door.register(entry("one"))
        other = MemoryCoordinator(shared)

        def with_a_race(view: ClusterView) -> AssignmentPlan:
            plan = balanced(view)
            first = view.assignments[0]
            if not first.version:
                shared.apply(shared.registry.set_assignment(first))
            return plan

        governor = Governor(door, Planner(with_a_race), EventLog(SystemClock()), SystemClock())
        assert await governor.act(entry("one")) == 3
        assert (await other.assignment(topic.id, 0)).broker == ""
        assert await governor.act(entry("one")) == 1
        assert await governor.act(entry("one")) == 0

    asyncio.run(work())


def test_a_coordinator_that_goes_away_ends_the_act() -> None:
    async def work() -> None:
        shared = MemoryCluster()
        await made_topic(shared, 2)
        door = MemoryCoordinator(shared)
        await door.register(entry("one"))

        async def away(assignment: Assignment, *, term: int = 0) -> Assignment:
            raise UnreachableError("gone")

        door.set_assignment = away  # type: ignore[method-assign]  # as a suspended session does
        with pytest.raises(UnreachableError):
            await Governor(door, Planner(balanced), EventLog(SystemClock()), SystemClock()).act(entry("one"))

    asyncio.run(work())


def test_traffic_is_what_was_committed_between_two_looks() -> None:
    traffic = Traffic()
    assert traffic.sample({("t", 0): 1_000, ("t", 1): 5_000}, 10.0) == []
    assert traffic.sample({("t", 0): 1_001_234, ("t", 1): 5_000, ("t", 2): 9}, 20.0) == [
        Load(topic_id="t", partition=0, bytes_s=100_000)
    ]
    assert traffic.sample({}, 20.0) == []
