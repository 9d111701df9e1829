"""A broker that is not started, with its services, in a cluster in memory; on virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import msgspec
import pytest

from memq.broker.broker import Broker
from memq.errors import (
    MemqError,
    UnreachableError,
)
from memq.format.state_log.entry import OpenedState, StateEntry, encode_state_entry
from memq.governor import Assignment, BrokerEntry
from memq.groups.coordinator import GroupCoordinator
from memq.notification import Publication, Span
from memq.protocol.link import Link
from memq.topic import (
    STATE_TOPIC,
    ReadPartition,
    Topic,
    TopicSettings,
    equal_slots,
    read_partitions,
)
from tests.component.cluster_rig import Rig
from tests.skipping_loop import run_skipping, skip, skipping_runtime

STATE = Topic(name=STATE_TOPIC, id="ef" * 16, created_ms=0, settings=TopicSettings(), partitions=equal_slots(2))
OTHER = BrokerEntry(id="b", session="session of b", address="b:1", state_logs=True)


class Unreachable:
    """A network on which each connection fails."""

    encrypted = False

    def __init__(self) -> None:
        self.error: Exception = UnreachableError("no route")
        self.delay_s = 0.0
        self.attempts = 0

    async def connect(self, *arguments: Any, **options: Any) -> Any:
        self.attempts += 1
        await skip(self.delay_s)
        raise self.error


class StillLink(Link):
    """A link that is open until it is aborted."""

    ended = False

    @property
    def open(self) -> bool:
        return not self.ended

    def abort(self, error: MemqError) -> None:
        self.ended = True


class Hosted:
    """Broker `a`, which is not started, in a cluster with another broker `b`; `a` owns partition 0 of two."""

    def __init__(self) -> None:
        self.network = Unreachable()
        self.rig = Rig(replace(skipping_runtime(), network=cast(Any, self.network)))
        self.broker: Broker = self.rig.made("a", governs=False, memory_bytes_max=16 << 20)
        self.services, self.partitions = self.broker.services, self.broker.partitions
        self.hosts = self.broker.hosts
        self.groups: list[GroupCoordinator] = []
        self.tasks: list[Any] = []  # of the open logs, in order
        self.hosts.make_coordinator = self._make_groups
        self.asked = 0
        self.failures: list[MemqError] = []  # of the next questions to the queue for the span of a log
        self.created: list[int] = []

    def _make_groups(self, *parts: Any) -> GroupCoordinator:
        self.groups.append(GroupCoordinator(*parts))
        self.tasks.append(parts[3])
        return self.groups[-1]

    async def begin(self) -> None:
        coordinator, session = self.services.coordinator, self.services.session
        await coordinator.register(BrokerEntry(id="a", session=session, address="a:1", state_logs=True))
        await coordinator.register(OTHER)
        await coordinator.create_topic(STATE)
        await self.rig.queue.create(read_partitions(STATE), 30_000)
        self.partitions.serving = True
        queue, span, create = self.rig.queue, self.rig.queue.span, self.rig.queue.create

        async def failing_span(partition: ReadPartition) -> Span:
            self.asked += 1
            if self.failures:
                raise self.failures.pop(0)
            return await span(partition)

        async def noted_create(partitions: list[ReadPartition], stale_publish_ms: int) -> None:
            self.created.append(len(partitions))
            await create(partitions, stale_publish_ms)

        queue.span, queue.create = failing_span, noted_create  # type: ignore[method-assign, assignment]
        await self.assign(0, "a")
        await self.assign(1, "b")

    async def assign(self, partition: int, broker: str, **changes: Any) -> None:
        """Assign a partition, and let the broker learn it."""
        await self.change(partition, broker=broker, **changes)
        await self.partitions.refresh()

    async def change(self, partition: int = 0, **changes: Any) -> None:
        """Change an assignment without the broker's knowledge."""
        current = await self.assignment(partition)
        await self.services.coordinator.set_assignment(msgspec.structs.replace(current, **changes))

    async def closed(self) -> None:
        """Let the broker give partition 0 up, and get it back; it does not open it by itself."""
        self.partitions.serving = False
        await self.assign(0, "b")
        await self.left()
        await self.assign(0, "a")
        self.partitions.serving = True

    async def assignment(self, partition: int = 0) -> Assignment:
        return await self.services.coordinator.assignment(STATE.id, partition)

    async def publish_opened(self, epoch: int) -> None:
        """Put the `opened` of another owner into the log of partition 0."""
        opened = encode_state_entry(StateEntry(epoch, 0, OpenedState(7, "b")))
        await self.rig.queue.publish(Publication(read_partitions(STATE)[0], 0, epoch, 0, opened))

    async def service(self, partition: int = 0) -> GroupCoordinator | str:
        return await self.hosts.service_in(self.hosts.groups, STATE, partition)

    async def opened(self) -> GroupCoordinator:
        """Return the service of partition 0, which is here."""
        found = await self.service()
        assert isinstance(found, GroupCoordinator)
        return found

    async def left(self) -> None:
        """Wait until the broker has given up its logs, also one that it was opening; it refreshes as ever."""
        for _ in range(10):
            if not self.hosts.held():
                return
            await skip(1)
            await self.partitions.refresh()
        raise AssertionError("the broker keeps its logs")


def hosting(work: Callable[[Hosted], Awaitable[None]]) -> None:
    async def run() -> None:
        hosted = Hosted()
        await hosted.begin()
        try:
            await work(hosted)
        finally:
            await hosted.broker.close()
        assert hosted.broker.failure is None

    run_skipping(run())


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if getattr(record, "event", "") == name]
