"""Heartbeats that wait, over real sockets: members learn of changes at once, and of an owner that goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from memq.broker.broker import Broker
from memq.client.broker_router import BrokerRouter
from memq.client.consumer.group.owner import GroupOwner
from memq.client.consumer.group.session import GroupSession
from memq.client.link_pool import LinkPool
from memq.errors import GenerationFencedError
from memq.groups.remote import RemoteGroups
from memq.protocol.frames import Api
from memq.protocol.group_messages import CommitAnswer, CommitRequest, HeartbeatRequest, MembershipAnswer
from memq.protocol.link import connect_link
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.topic import ReadPartition
from tests.brokers import run
from tests.component.test_service_hosts import filled, owner_of, three_brokers

SESSION_MS = 30_000  # a heartbeat waits for 10 s: without an answer at once the tests take longer than their limits
SOON_S = 2.0


class Member:
    """A session that releases at once what is revoked; `held` are its partitions."""

    def __init__(self, brokers: Sequence[Broker], logs: list[ReadPartition], session_ms: int) -> None:
        runtime = Runtime()
        self.pool = LinkPool(runtime, [parse_address(broker.address) for broker in brokers])
        self.owner = GroupOwner(self.pool, BrokerRouter(self.pool), runtime.clock)
        self.session = GroupSession(runtime, RemoteGroups(self.owner), "report", session_ms, self._changed)
        self.session.share(logs)
        self.lost = 0

    @property
    def held(self) -> set[ReadPartition]:
        return set(self.session.state.granted)

    def _changed(self) -> None:
        state, changes = self.session.state, self.session.state.changes()
        self.lost += len(changes.lost)
        for partition in changes.lost:
            state.confirm_lost(partition)
        for partition in changes.revoked:
            state.confirm_revoked(partition)
        for partition in changes.assigned:
            state.confirm_assigned(partition)

    async def until(self, found: Callable[[], bool], timeout_s: float = SOON_S) -> None:
        """Wait until `found` is true."""
        async with asyncio.timeout(timeout_s):
            while not found():  # noqa: ASYNC110  # it may be about other members
                await asyncio.sleep(0)


@asynccontextmanager
async def member_of(
    brokers: Sequence[Broker], logs: list[ReadPartition], session_ms: int = SESSION_MS
) -> AsyncIterator[Member]:
    """Run a member until the end of the block."""
    member = Member(brokers, logs, session_ms)
    task = asyncio.create_task(member.session.run())
    try:
        yield member
    finally:
        task.cancel()
        await asyncio.wait([task])
        await member.owner.close()
        await member.pool.close()


async def waiting_at(broker: Broker, count: int, timeout_s: float = SOON_S) -> None:
    """Wait until heartbeats of so many members wait at a broker."""
    async with asyncio.timeout(timeout_s):
        while broker.hosts.service_here(broker.hosts.groups, "report") is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
        groups = broker.hosts.service_here(broker.hosts.groups, "report")
        assert groups is not None
        while groups.waiting < count:  # noqa: ASYNC110
            await asyncio.sleep(0)


def test_members_at_all_brokers_learn_of_each_other_at_once() -> None:
    async def work() -> None:
        async with three_brokers() as (cluster, brokers):
            logs = await filled(brokers[0])
            async with member_of(brokers[:1], logs) as first:
                await first.until(lambda: len(first.held) == 4)
                owner, _ = owner_of(cluster, brokers)
                await waiting_at(owner, 1)
                async with member_of(brokers[1:2], logs) as second, member_of(brokers[2:], logs) as third:
                    members = [first, second, third]

                    def shared() -> bool:
                        sizes = sorted(len(each.held) for each in members)
                        return sizes == [1, 1, 2] and set().union(*(each.held for each in members)) == set(logs)

                    for each in members:
                        await each.until(shared)
                    await waiting_at(owner, 3)
                    began_s = asyncio.get_running_loop().time()
                    await third.session.leave(SOON_S)
                    await first.until(lambda: len(first.held) == 2)
                    await second.until(lambda: len(second.held) == 2)
                    assert asyncio.get_running_loop().time() - began_s < 1.0

    run(work())


def test_a_waiting_heartbeat_delays_no_other_request_of_its_connection() -> None:
    async def work() -> None:
        async with three_brokers() as (cluster, brokers):
            logs = await filled(brokers[0])
            joiner = await connect_link(Runtime(), None, parse_address(brokers[0].address))
            known = await RemoteGroups(joiner.request).join("report", "m", logs, SESSION_MS)
            owner, _ = owner_of(cluster, brokers)
            other = next(broker for broker in brokers if broker is not owner)
            ask = HeartbeatRequest(group="report", member="m", generation=known.generation, wait_ms=SESSION_MS // 3)
            link = await connect_link(Runtime(), None, parse_address(owner.address))
            waits = asyncio.create_task(link.request(Api.HEARTBEAT, ask, MembershipAnswer))
            async with asyncio.timeout(SOON_S):
                for _ in range(20):
                    await link.request(Api.COMMIT, CommitRequest(group="report"), CommitAnswer)
                assert not waits.done()
                forwarder = await connect_link(Runtime(), None, parse_address(other.address))
                answer = await forwarder.request(Api.HEARTBEAT, ask, MembershipAnswer)
                assert (answer.waits, answer.unchanged, answer.owner) == (False, False, owner.address)
            waits.cancel()
            for each in (joiner, link, forwarder):
                each.close()

    run(work())


@pytest.mark.parametrize("ends", ["kill", "drain"])
def test_a_member_that_waits_stays_in_its_group_when_the_owner_goes(ends: str) -> None:
    async def work() -> None:
        async with three_brokers() as (cluster, brokers):
            logs = await filled(brokers[0])
            async with member_of(brokers, logs) as member:
                await member.until(lambda: len(member.held) == 4)
                owner, _ = owner_of(cluster, brokers)
                await waiting_at(owner, 1)
                generation = member.session.state.generation
                if ends == "drain":
                    await owner.hand_over()
                    await owner.close()
                else:
                    await owner.close()
                left = [broker for broker in brokers if broker is not owner]
                async with asyncio.timeout(20):
                    while not any(owns(broker) for broker in left):  # noqa: ASYNC110
                        await asyncio.sleep(0)
                (heir,) = (broker for broker in left if owns(broker))
                await waiting_at(heir, 1, 8.0)  # after an answer without a wait, a member pauses for up to 3 s
                assert (member.session.state.generation, member.lost) == (generation, 0)
                async with member_of([heir], logs) as other:
                    await other.until(lambda: len(other.held) == 2)

    run(work())


def owns(broker: Broker) -> bool:
    return broker.hosts.service_here(broker.hosts.groups, "report") is not None


def test_a_member_whose_connection_dies_while_it_waits_loses_its_session_in_time() -> None:
    async def work() -> None:
        async with three_brokers() as (cluster, brokers):
            logs = await filled(brokers[0])
            loop = asyncio.get_running_loop()
            async with member_of(brokers, logs, 4_000) as silent:
                await silent.until(lambda: len(silent.held) == 4)
                owner, _ = owner_of(cluster, brokers)
                await waiting_at(owner, 1)
            began_s = loop.time()  # it is gone without a word; its heartbeat still waits
            async with member_of(brokers, logs) as other:
                await other.until(lambda: len(other.held) == 4, 10)
                assert loop.time() - began_s < 4.0 + SOON_S

    run(work())


def test_a_member_that_was_dropped_while_it_waits_joins_again_at_once() -> None:
    async def work() -> None:
        async with three_brokers() as (cluster, brokers):
            logs = await filled(brokers[0])
            async with member_of(brokers, logs) as member:
                await member.until(lambda: len(member.held) == 4)
                owner, _ = owner_of(cluster, brokers)
                await waiting_at(owner, 1)
                generation = member.session.state.generation
                link = await connect_link(Runtime(), None, parse_address(owner.address))
                await RemoteGroups(link.request).leave("report", member.session.member)
                await member.until(lambda: member.session.state.generation > generation)
                await member.until(lambda: len(member.held) == 4)
                assert member.lost == 4
                with pytest.raises(GenerationFencedError):
                    await RemoteGroups(link.request).heartbeat("report", member.session.member, generation)
                link.close()

    run(work())
