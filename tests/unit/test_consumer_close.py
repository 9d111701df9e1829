"""A consumer that closes lets go of everything, whatever its last commit and its leave meet."""

from __future__ import annotations

import asyncio

import pytest

import memq.aio
from memq.broker.broker import Broker
from memq.errors import DeniedError
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.network import Runtime
from memq.notification.memory import MemoryQueue
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import Committed, ReadPartition

WAIT_S = 60.0


class DenyingQueue(MemoryQueue):
    """Denies what a group asks for at its end, after `denies` is set."""

    denies = False

    async def commit(self, group: str, member: str, generation: int, positions: dict[ReadPartition, Committed]) -> None:
        """See `Groups.commit`."""
        if self.denies:
            raise DeniedError("no right to commit")
        await super().commit(group, member, generation, positions)

    async def leave(self, group: str, member: str) -> None:
        """See `Groups.leave`."""
        if self.denies:
            raise DeniedError("no right to leave")
        await super().leave(group, member)


def test_a_close_whose_commit_is_denied_leaves_no_member_that_reads_nothing() -> None:
    async def work() -> None:
        runtime = Runtime()
        queue = DenyingQueue(runtime.clock)
        store, coordinator = MemoryHandler(runtime.clock), MemoryCoordinator(MemoryCluster())
        settings = BrokerSettings(port=0, http_port=-1, audit=False)
        broker = Broker(settings, runtime, {"main": store}, queue, coordinator)
        await broker.start()
        async with memq.aio.Producer(broker.address) as producer:
            await (await producer.send("clicks", b"1"))
        consumer = memq.aio.Consumer(broker.address, "clicks", group="g", auto_commit_interval_ms=60_000)
        assert await consumer.poll(WAIT_S) is not None
        assert await consumer.poll(0.01) is None  # done is what was handed out before
        queue.denies = True
        with pytest.raises(DeniedError):
            await consumer.close()
        assert len(consumer._core._tasks) == 0
        await broker.close()

    asyncio.run(work())
