"""A commit that returned is stored; a consumer that closes releases everything, also after a failed commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

import memq.aio
from memq.broker.broker import Broker
from memq.client.consumer.batch import Batch, TopicPartition
from memq.client.consumer.group import session
from memq.errors import DeniedError, GenerationFencedError, QueueError
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.groups.coordinator import GroupCoordinator
from memq.notification.memory import MemoryQueue
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import Committed, ReadPartition
from tests.brokers import coordinator_of
from tests.stepped_time import SteppedLoop, step

WAIT_S = 60.0


class DenyingGroups(GroupCoordinator):
    """Denies what a group asks for at its end, after `denies` is set."""

    denies = False
    failing: Callable[[], Awaitable[None]] | None = None  # called by the next commit, which fails

    async def commit(
        self, group: str, member: str, generation: int, positions: Mapping[ReadPartition, Committed], number: int = 0
    ) -> None:
        """See `Groups.commit`."""
        if self.denies:
            raise DeniedError("no right to commit")
        failing, self.failing = self.failing, None
        if failing is not None:
            await failing()
            raise QueueError("the answer is lost")
        await super().commit(group, member, generation, positions, number)

    async def leave(self, group: str, member: str, generation: int | None = None) -> None:
        """See `Groups.leave`."""
        if self.denies:
            raise DeniedError("no right to leave")
        await super().leave(group, member, generation)


@asynccontextmanager
async def one_record() -> AsyncIterator[tuple[DenyingGroups, str]]:
    """Run a broker with one record in topic 'clicks'; yield the coordinator of group 'g' and its address."""
    runtime = Runtime()
    queue = MemoryQueue(runtime.clock)
    store, coordinator = MemoryHandler(runtime.clock), MemoryCoordinator(MemoryCluster())
    settings = BrokerSettings(port=0, http_port=-1, audit=False)
    broker = Broker(settings, runtime, {"main": store}, queue, coordinator)
    broker.hosts.make_coordinator = DenyingGroups
    await broker.start()
    async with memq.aio.Producer(broker.address) as producer:
        await (await producer.send("clicks", b"1"))
    async with asyncio.timeout(WAIT_S):
        groups = await coordinator_of(broker, "g")
    assert isinstance(groups, DenyingGroups)
    yield groups, broker.address
    await broker.close()


def test_a_commit_whose_partition_goes_between_two_tries_does_not_return_as_if_it_were_stored() -> None:
    async def work() -> None:
        async with one_record() as (groups, address):
            consumer = memq.aio.Consumer(address, "clicks", group="g", auto_commit=False)
            batch = await consumer.poll(WAIT_S)
            assert batch is not None

            groups.failing = lambda: consumer.seek("clicks", 0, "beginning")
            with pytest.raises(GenerationFencedError, match="delivered before its partition was released"):
                await consumer.commit(batch)
            await consumer.close()

    asyncio.run(work())


def test_a_commit_of_a_batch_stores_nothing_behind_it() -> None:
    async def work() -> None:
        async with one_record() as (_, address):
            async with memq.aio.Admin(address) as admin:
                await admin.create_topic("views", partitions=2, settings={"batch_blocks_max": 1})
            async with memq.aio.Producer(address) as producer:
                for number in range(12):
                    await (await producer.send("views", b"%d" % number, partition=number % 2))
            async with memq.aio.Consumer(address, "views", group="g", auto_commit=False) as consumer:
                batches = [batch async for batch in several(consumer, 12)]
                first, second, third = [batch for batch in batches if batch.partition == 0][:3]
                await consumer.commit(second)
                assert await consumer.committed() == {TopicPartition("views", 0): second.next}
                await consumer.commit(first)
                assert await consumer.committed() == {TopicPartition("views", 0): second.next}, "it never goes back"
                await consumer.commit(third)
                assert await consumer.committed() == {TopicPartition("views", 0): third.next}
            async with memq.aio.Consumer(address, "views", group="g", auto_commit=False) as later:
                again = [batch async for batch in several(later, 9)]
                assert len([batch for batch in again if batch.partition == 1]) == 6
                await later.commit()
                assert len(await later.committed()) == 2

    asyncio.run(work())


async def several(consumer: memq.aio.Consumer, count: int) -> AsyncIterator[Batch]:
    """Ask for so many batches, without a word that they are done."""
    for _ in range(count):
        batch = await consumer.poll(WAIT_S)
        assert batch is not None
        yield batch


def test_processed_records_are_committed_while_the_consumer_lives() -> None:
    async def work() -> None:
        async with one_record() as (groups, address):
            stored = asyncio.Event()
            commit = groups.commit

            async def noted(*arguments: Any) -> None:
                await commit(*arguments)
                stored.set()

            groups.commit = noted  # type: ignore[method-assign, assignment]  # it is waited for
            consumer = memq.aio.Consumer(address, "clicks", group="g", auto_commit_interval_ms=10)
            assert await consumer.poll(WAIT_S) is not None
            assert await consumer.poll(0.01) is None  # done is what was handed out before
            async with asyncio.timeout(WAIT_S):
                await stored.wait()
            await consumer.close()

    asyncio.run(work())


def test_a_close_whose_commit_is_denied_leaves_no_member_that_reads_nothing() -> None:
    async def work() -> None:
        async with one_record() as (groups, address):
            consumer = memq.aio.Consumer(address, "clicks", group="g", auto_commit_interval_ms=60_000)
            assert await consumer.poll(WAIT_S) is not None
            assert await consumer.poll(0.01) is None  # done is what was handed out before
            groups.denies = True
            await consumer.close()  # with a warning in the log
            left = [task.get_name() for task in asyncio.all_tasks()]
            assert not [name for name in left if name.startswith("consumer")]

    asyncio.run(work())


def test_released_partitions_are_free_before_the_next_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat_s = 100_000.0
    monkeypatch.setattr(session, "HEARTBEAT_S_MAX", heartbeat_s)

    async def held(groups: GroupCoordinator) -> list[int]:
        return sorted(len(partitions) for partitions in (await groups.describe("g")).members.values())

    async def work() -> None:
        async with one_record() as (groups, address):
            async with memq.aio.Admin(address) as admin:
                await admin.create_topic("views", partitions=2)
            first, second = (
                memq.aio.Consumer(address, "views", group="g", session_timeout_ms=3_600_000) for _ in range(2)
            )
            while len(first.position()) < 2:
                await first.poll(0.01)
            while len((await groups.describe("g")).members) < 2:
                await second.poll(0.01)
            assert await held(groups) == [0, 2]
            step(heartbeat_s)  # by which the first one hears of the second one; the next one is as far away
            async with asyncio.timeout(WAIT_S):
                while await held(groups) == [0, 2]:
                    await first.poll(0.01)
            await first.close()
            await second.close()

    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        runner.run(work())
