"""Topics that expire when they are idle: not before, not with a reader, and in the end always."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from memq.client.admin import AsyncAdmin
from memq.client.consumer.batch import TopicPartition
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.delivery import Ack
from memq.client.producer.producer import AsyncProducer
from memq.errors import MemqError
from memq.topic import Topic
from tests.simulation.topic_churn import TopicChurn

GROUP = "readers-of-idle-topics"
IDLE = 1  # topic of one life
PHASES = 3  # of sending, with rests between them
BLOCKS_MAX = 4  # of one phase
READ_PHASES = 2  # before a reader comes
REST_MAX = 0.6  # of the time of the setting: a rest after which the topic must be there
POLL_S = 0.2
READ_RATE = 0.5  # of the topics that have a reader after the last record
READS_FOR = 1.3  # of the time of the setting


def too_early(gone_s: float, used_s: float, idle_ms: int, clock_error_ms: int) -> bool:
    """Whether a topic with records of `used_s`, or younger ones, is gone too early.

    Two brokers may take the two times that the product compares.
    """
    return gone_s - used_s < (idle_ms - 2 * clock_error_ms) / 1000


def read_throughout(gone_s: float, held_s: float, idle_ms: int) -> bool:
    """Whether a topic that is gone had a reader for most of its time; `held_s`: since when, 0 without one.

    A check that began before the reader came may end late, and so may a reader that the group has dropped.
    """
    return held_s > 0 and gone_s - held_s >= 0.8 * idle_ms / 1000


class IdleLife(TopicChurn):
    """One life of the process. The brokers delete its topics, and it learns that from the coordinator's own state."""

    names = ("resting", "rested")
    _used_s = 0.0  # when the last acked block was sent, at the latest
    _began_s = 0.0  # of the phase of sending
    _held_s = 0.0  # since when a reader has partitions; 0: none has

    async def _live(self, admin: AsyncAdmin, name: str) -> None:
        self._topics += 1
        idle_ms = self._cluster.shape.settings.dedup_window_ms
        topic = await self._made(admin, name, {"expire_idle_ms": idle_ms})
        self._used_s = 0.0
        watching = asyncio.create_task(self._watch(topic, idle_ms), name="watch")
        producer = AsyncProducer(
            self._brokers,
            linger_ms=self._draw.choice([0, 5, 100]),
            delivery_timeout_ms=topic.settings.delivery_timeout_ms,
            runtime=self._runtime,
        )
        reads = self._draw.random() < READ_RATE
        phases = READ_PHASES if reads else PHASES
        for phase in range(1, phases + 1):
            self._began_s = self._cluster.world.now
            await self._write(producer, topic, self._draw.randint(1, BLOCKS_MAX))
            if not reads or phase < phases:
                await asyncio.sleep(self._draw.uniform(0, REST_MAX) * idle_ms / 1000)
        if reads:
            await self._read_for(topic, READS_FOR * idle_ms / 1000)
        await watching
        with suppress(MemqError):  # what failed was counted by its delivery
            await producer.close()

    async def _watch(self, topic: Topic, idle_ms: int) -> None:
        """Return when the topic is gone; it must not be gone too early."""
        world, registry = self._cluster.world, self._cluster.cloud.cluster.registry
        while any(each.id == topic.id for each in registry.topics()):  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(POLL_S)
        self._leaving[topic.id] = None
        if read_throughout(world.now, self._held_s, idle_ms):
            world.fail(f"topic {topic.name} is deleted, and has had a reader for {world.now - self._held_s:.1f} s")
        if self._used_s and too_early(world.now, self._used_s, idle_ms, self._cluster.shape.clock_error_ms):
            age_s = world.now - self._used_s
            world.fail(f"topic {topic.name} is deleted {age_s:.1f} s after a record, and may be idle for {idle_ms} ms")

    async def _read_for(self, topic: Topic, seconds: float) -> None:
        """Let a member of a group have the partitions for so long, or until the topic is gone."""
        world = self._cluster.world
        until_s = world.now + seconds
        while world.now < until_s and topic.id not in self._leaving:
            with suppress(MemqError):
                async with AsyncConsumer(
                    self._brokers,
                    topic.name,
                    group=GROUP,
                    auto_commit=False,
                    on_assigned=self._assigned,
                    on_revoked=self._taken,
                    on_lost=self._taken,
                    runtime=self._runtime,
                ) as consumer:
                    await self._hold(consumer, topic, until_s)
            await self._rest()

    async def _hold(self, consumer: AsyncConsumer, topic: Topic, until_s: float) -> None:
        world = self._cluster.world
        try:
            while world.now < until_s and topic.id not in self._leaving:
                await consumer.poll(POLL_S)
                await asyncio.sleep(POLL_S)  # `poll` does not wait in a sealed topic
        finally:
            self._held_s = 0.0

    def _assigned(self, _partitions: list[TopicPartition]) -> None:
        self._held_s = self._held_s or self._cluster.world.now

    def _taken(self, _partitions: list[TopicPartition]) -> None:
        self._held_s = 0.0

    def acked(self, topic: Topic, value: bytes, ack: Ack) -> None:
        self._used_s = max(self._used_s, self._began_s)
        super().acked(topic, value, ack)
