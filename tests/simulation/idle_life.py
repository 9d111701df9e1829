"""Topics that expire when they are idle: not before, and in the end always."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from memq.client.admin import AsyncAdmin
from memq.client.producer.delivery import Ack
from memq.client.producer.producer import AsyncProducer
from memq.errors import MemqError
from memq.topic import Topic
from tests.simulation.topic_churn import TopicChurn

IDLE = 1  # topic of one life
PHASES = 3  # of sending, with rests between them
BLOCKS_MAX = 4  # of one phase
REST_MAX = 0.7  # of the time of the setting: a rest after which the topic must be there
POLL_S = 0.2


def too_early(gone_s: float, used_s: float, idle_ms: int, clock_error_ms: int) -> bool:
    """Whether a topic with records of `used_s`, or younger ones, is gone too early.

    Two brokers may take the two times that the product compares.
    """
    return gone_s - used_s < (idle_ms - 2 * clock_error_ms) / 1000


class IdleLife(TopicChurn):
    """One life of the process. The brokers delete its topics, and it learns that from the coordinator's own state."""

    names = ("resting", "rested")
    _used_s = 0.0  # when the last acked block was sent, at the latest
    _began_s = 0.0  # of the phase of sending

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
        for _ in range(PHASES):
            self._began_s = self._cluster.world.now
            await self._write(producer, topic, self._draw.randint(1, BLOCKS_MAX))
            await asyncio.sleep(self._draw.uniform(0, REST_MAX) * idle_ms / 1000)
        await watching
        with suppress(MemqError):  # what failed was counted by its delivery
            await producer.close()

    async def _watch(self, topic: Topic, idle_ms: int) -> None:
        """Return when the topic is gone; it must not be gone too early."""
        world, registry = self._cluster.world, self._cluster.cloud.cluster.registry
        while any(each.id == topic.id for each in registry.topics()):  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(POLL_S)
        self._leaving[topic.id] = None
        if self._used_s and too_early(world.now, self._used_s, idle_ms, self._cluster.shape.clock_error_ms):
            age_s = world.now - self._used_s
            world.fail(f"topic {topic.name} is deleted {age_s:.1f} s after a record, and may be idle for {idle_ms} ms")

    def acked(self, topic: Topic, value: bytes, ack: Ack) -> None:
        self._used_s = max(self._used_s, self._began_s)
        super().acked(topic, value, ack)
