"""Consumer groups by Kafka's own protocol, through the port, on a real Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from memq.errors import GenerationFencedError, InvalidRequestError, NotFoundError
from memq.notification import Membership
from memq.notification.kafka.queue import KafkaQueue
from memq.topic import Committed, Position, Totals
from memq_localstack.servers import Server
from tests.contract.queues import HANG_S, STALE_MS, committed, part
from tests.integration.kafka import kafka_queue

SESSION_MS = 6_000
LONG_SESSION_MS = 60_000  # a member that the test lets be silent stays a member on a slow machine
FOUR = [part(number) for number in range(4)]
Members = dict[str, Membership]
PROTOCOLS = pytest.mark.parametrize("protocol", ["classic", "consumer"])


def over_kafka(kafka: Server, work: Callable[[KafkaQueue], Awaitable[None]], **section: Any) -> None:
    async def run() -> None:
        queue = kafka_queue(kafka.address, **section)
        try:
            async with asyncio.timeout(HANG_S):
                await queue.create(FOUR, STALE_MS)
                await work(queue)
        finally:
            await queue.close()

    asyncio.run(run())


async def join(queue: KafkaQueue, name: str, session_ms: int = SESSION_MS) -> Membership:
    return await queue.join("report", name, FOUR, session_ms)


async def beat_until(
    queue: KafkaQueue, known: Members, done: Callable[[Members], bool], *, release: bool = True
) -> None:
    """Let all members say that they live, and give back what is wanted back, until `done`."""
    while not done(known):
        for name, membership in known.items():
            released = membership.revoking if release else ()
            known[name] = await queue.heartbeat("report", name, membership.generation, released)
        await queue.wait({}, 0.01)


def shares(known: Members) -> list[int]:
    return sorted(len(membership.assigned) for membership in known.values())


def is_shared(*expected: int) -> Callable[[Members], bool]:
    return lambda known: shares(known) == list(expected) and not any(part.revoking for part in known.values())


async def two_members(queue: KafkaQueue, session_ms: int = SESSION_MS) -> Members:
    known = {"a": await join(queue, "a", session_ms)}
    await beat_until(queue, known, is_shared(4))
    known["b"] = await join(queue, "b", session_ms)
    await beat_until(queue, known, is_shared(2, 2))
    return known


@PROTOCOLS
def test_a_partition_moves_only_after_it_was_released(kafka: Server, protocol: str) -> None:
    async def work(queue: KafkaQueue) -> None:
        known = {"a": await join(queue, "a", LONG_SESSION_MS)}
        await beat_until(queue, known, is_shared(4))
        known["b"] = await join(queue, "b", LONG_SESSION_MS)
        await beat_until(queue, known, lambda now: bool(now["a"].revoking), release=False)
        a = known["a"]
        assert (len(a.assigned), len(a.revoking), set(a.assigned + a.revoking)) == (2, 2, set(FOUR))
        last = a.revoking[0]
        await queue.commit("report", "a", a.generation, {last: committed(9, partition=last.partition)})
        for _ in range(20):
            known["b"] = await queue.heartbeat("report", "b", known["b"].generation)
            assert known["b"].assigned == ()
            await queue.wait({}, 0.01)
        given = await queue.heartbeat("report", "a", a.generation, (last,))
        assert given.revoking == a.revoking[1:]
        with pytest.raises(GenerationFencedError, match="does not hold"):
            await queue.commit("report", "a", given.generation, {last: committed(10, partition=last.partition)})
        known["a"] = given
        await beat_until(queue, known, is_shared(2, 2))
        assert set(known["b"].assigned) == set(a.revoking)
        assert await queue.committed("report", FOUR) == {last: committed(9, partition=last.partition)}

    over_kafka(kafka, work, group_protocol=protocol)


@PROTOCOLS
def test_member_that_leaves_or_is_silent_loses_all_partitions(kafka: Server, protocol: str) -> None:
    async def work(queue: KafkaQueue) -> None:
        known = await two_members(queue)
        await queue.leave("report", "a")
        await queue.leave("report", "a")
        await queue.leave("unheard-of", "a")
        with pytest.raises(GenerationFencedError):
            await queue.heartbeat("report", "a", known["a"].generation)
        with pytest.raises(GenerationFencedError):
            await queue.commit("report", "a", known["a"].generation, {})
        del known["a"]
        await beat_until(queue, known, is_shared(4))
        await queue.join("report", "silent", FOUR, 1_000)
        await beat_until(queue, known, is_shared(2))
        await beat_until(queue, known, is_shared(4))
        with pytest.raises(GenerationFencedError):
            await queue.heartbeat("report", "silent", 1)

    over_kafka(kafka, work, group_protocol=protocol)


def test_a_static_member_that_comes_back_in_time_finds_its_partitions_and_disturbs_nobody(kafka: Server) -> None:
    async def work(queue: KafkaQueue) -> None:
        known = await two_members(queue, 60_000)
        before = dict(known)
        await queue.leave("report", "a")
        assert set((await queue.describe("report")).members) == {"a", "b"}, "its place is kept"
        known["a"] = await join(queue, "a", 60_000)
        await beat_until(queue, known, is_shared(2, 2))
        assert set(known["a"].assigned) == set(before["a"].assigned)
        assert known["b"] == before["b"]

    over_kafka(kafka, work, static_members=True)


@PROTOCOLS
def test_positions_keep_index_totals_and_mark_and_outlive_members(kafka: Server, protocol: str) -> None:
    async def work(queue: KafkaQueue) -> None:
        known = {"a": await join(queue, "a")}
        await beat_until(queue, known, is_shared(4))
        stored = {
            part(0): Committed(Position(0, 17, 3), Totals(1_000, 123_456)),
            part(2): Committed(
                Position(2, (1 << 39) - 1, (1 << 24) - 1), Totals((1 << 63) - 1, (1 << 63) - 1), (1 << 32) - 1
            ),
        }
        await queue.commit("report", "a", known["a"].generation, stored)
        for offset in (9, 3):  # a member that seeks back stores a lower position
            await queue.commit("report", "a", known["a"].generation, {part(1): committed(offset, partition=1)})
        stored[part(1)] = committed(3, partition=1)
        state = await queue.describe("report")
        assert (state.members, state.committed) == ({"a": tuple(FOUR)}, stored)
        with pytest.raises(InvalidRequestError, match="1 active members"):
            await queue.commit("report", "", -1, {part(0): committed(8)})
        with pytest.raises(InvalidRequestError, match="1 active members"):
            await queue.delete_group("report")
        await queue.leave("report", "a")
        assert await queue.committed("report", [part(2), part(3)]) == {part(2): stored[part(2)]}
        await queue.commit("report", "", -1, {part(0): committed(8, index=2)})
        assert await queue.committed("report", FOUR) == stored | {part(0): committed(8, index=2)}
        assert await queue.groups() == ["report"]
        await queue.delete_group("report")
        assert (await queue.groups(), await queue.committed("report", FOUR)) == ([], {})
        for call in (queue.delete_group("report"), queue.describe("report")):
            with pytest.raises(NotFoundError, match="report"):
                await call

    over_kafka(kafka, work, group_protocol=protocol)


def test_an_older_generation_is_void_after_a_new_join(kafka: Server) -> None:
    async def work(queue: KafkaQueue) -> None:
        known = {"a": await join(queue, "a")}
        await beat_until(queue, known, is_shared(4))
        old = known["a"]
        new = await join(queue, "a")
        assert new.assigned == old.assigned
        with pytest.raises(GenerationFencedError):
            await queue.heartbeat("report", "a", old.generation)
        for generation in (old.generation, new.generation + 1):
            with pytest.raises(GenerationFencedError):
                await queue.commit("report", "a", generation, {part(0): committed(1)})
        await queue.commit("report", "a", new.generation, {part(0): committed(1)})

    over_kafka(kafka, work)


def test_a_member_that_changes_its_broker_is_fenced_at_the_old_one(kafka: Server) -> None:
    """Two queues on the same prefix are two brokers; a static member takes its place with it."""

    async def work(queue: KafkaQueue) -> None:
        known = {"a": await join(queue, "a")}
        await beat_until(queue, known, is_shared(4))
        other = kafka_queue(kafka.address, prefix="moves.", static_members=True)
        try:
            with pytest.raises(GenerationFencedError, match="not hosted here"):
                await other.heartbeat("report", "a", known["a"].generation)
            moved = {"a": await join(other, "a")}
            await beat_until(other, moved, is_shared(4))
            with pytest.raises(GenerationFencedError):
                await beat_until(queue, known, lambda _: False)
            with pytest.raises(GenerationFencedError):
                await queue.commit("report", "a", known["a"].generation, {part(0): committed(1)})
            await other.commit("report", "a", moved["a"].generation, {part(0): committed(2)})
        finally:
            await other.close()

    over_kafka(kafka, work, prefix="moves.", static_members=True)


def test_groups_of_others_are_not_seen(kafka: Server) -> None:
    async def work(queue: KafkaQueue) -> None:
        await queue.commit("mine", "", -1, {part(0): committed(1)})
        other = kafka_queue(kafka.address)
        try:
            assert (await queue.groups(), await other.groups()) == (["mine"], [])
            assert (list(await queue.committed("mine", FOUR)), await other.committed("mine", FOUR)) == ([part(0)], {})
        finally:
            await other.close()

    over_kafka(kafka, work)
