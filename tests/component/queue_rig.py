"""A cluster of brokers in one process, with a client of leased queues."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from memq.broker.broker import Broker
from memq.client.queue.items import QueueItem
from memq.client.queue.queue import AsyncQueue
from memq.runtime.clock import SystemClock
from memq.topic import STATE_TOPIC
from tests.component.cluster_rig import Rig, rig

CLOCK = SystemClock()


@asynccontextmanager
async def queueing(count: int = 3, **settings: Any) -> AsyncIterator[tuple[Rig, list[Broker], AsyncQueue]]:
    """Yield a cluster, and a client of all its brokers."""
    async with rig() as cluster:
        brokers = [await cluster.start(name, **settings) for name in "abc"[:count]]
        for broker in brokers:
            await broker.partitions.refresh()
        async with AsyncQueue([broker.address for broker in brokers]) as queue:
            yield cluster, brokers, queue


def owner_of(cluster: Rig, queue: str) -> str:
    """Return the id of the broker that has the shard of a queue."""
    (topic,) = (each for each in cluster.shared.registry.topics() if each.name == STATE_TOPIC)
    return cluster.owner(topic, zlib.crc32(queue.encode()) % len(topic.partitions)).broker


def payloads(items: list[QueueItem]) -> list[bytes]:
    return [item.payload for item in items]
