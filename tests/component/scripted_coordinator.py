"""A coordinator whose answers a test writes, behind the partitions of a real broker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from memq.broker.broker import Broker
from memq.errors import (
    MemqError,
)
from memq.governor import Assignment, BrokerEntry
from memq.topic import Topic, TopicSettings, equal_slots, read_partitions

MINE, NEAR = "this-one", "near:1"


class ScriptedCoordinator:
    """A coordinator with scripted answers to one broker, which records the broker's requests."""

    def __init__(self, broker: Broker, partitions: int = 1, settings: TopicSettings | None = None) -> None:
        self.services, self.partitions = broker.services, broker.partitions
        self.id, self.session = broker.services.settings.broker_id, broker.services.session
        slots = equal_slots(partitions)
        settings = settings or TopicSettings()
        self.topic = Topic(name="clicks", id="a" * 32, created_ms=1, settings=settings, partitions=slots)
        self.topics_, self.current = [self.topic], self.topic
        self.brokers_ = [
            BrokerEntry(id=self.id, session=self.session, address="here:1"),
            BrokerEntry(id="near", session="near-session", address=NEAR, zone="z"),
        ]
        self.owners = dict.fromkeys(range(partitions), (self.id, ""))
        self.written: list[tuple[str, int, str, str]] = []
        self.fails: list[MemqError] = []
        self.epoch = 4
        self.looks = 0  # how often the test had it asked for all topics
        for name in ("topics", "brokers", "assignments", "assignment", "set_assignment", "current_topic"):
            setattr(broker.services.coordinator, name, getattr(self, f"say_{name}"))
        broker.governor = None

    @classmethod
    async def to(
        cls, broker: Broker, partitions: int = 1, settings: TopicSettings | None = None
    ) -> ScriptedCoordinator:
        """Take the place of a broker's coordinator; the queue has the logs of its topic."""
        said = cls(broker, partitions, settings)
        await broker.services.queue.create(read_partitions(said.topic), said.topic.settings.stale_publish_ms)
        return said

    def entry(self, partition: int) -> Assignment:
        owner, session = self.owners[partition]
        return Assignment(topic_id=self.topic.id, partition=partition, broker=owner, session=session, epoch=self.epoch)

    def leaving(self) -> int:
        """Return how many partitions were let go of and are still at work."""
        return len(self.partitions.at_work()) - len(self.partitions.processors)

    async def say_topics(self) -> list[Topic]:
        task = asyncio.current_task()
        self.looks += task is not None and task.get_name() != "follow coordinator"  # which reads now and then
        return list(self.topics_)

    async def say_brokers(self) -> list[BrokerEntry]:
        return list(self.brokers_)

    async def say_assignments(self) -> Sequence[Assignment]:
        return [self.entry(partition) for partition in self.owners]

    async def say_assignment(self, topic_id: str, partition: int) -> Assignment:
        return self.entry(partition)

    async def say_set_assignment(self, entry: Assignment) -> Assignment:
        if self.fails:
            raise self.fails.pop(0)
        self.written.append((entry.topic_id, entry.partition, entry.broker, entry.session))
        self.owners[entry.partition], self.epoch = (entry.broker, entry.session), entry.epoch
        return entry

    async def say_current_topic(self, name: str) -> Topic | None:
        return self.current

    async def opened(self, partition: int = 0) -> Any:
        """Open a partition and return its processor."""
        await self.partitions.refresh()
        processor = self.partitions.processor(self.topic, partition)
        await processor.ready()
        return processor


def owned_by(said: ScriptedCoordinator, partition: int, owner: str, session: str = "") -> None:
    said.owners[partition] = (owner, session)
