"""A cluster in memory for component tests: brokers of this process on shared parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from memq.broker.broker import Broker
from memq.broker.ingest.quotas import NO_CLIENT_LIMITS, ClientLimits
from memq.broker.spool import SpoolDisk
from memq.client.consumer.consumer import AsyncConsumer
from memq.governor import Assignment
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import Position, Topic

TIMEOUT_S = 60.0


class Rig:
    """One cluster in memory, and brokers on it."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.shared = MemoryCluster()
        self.queue = MemoryQueue(self.runtime.clock)
        self.store = MemoryHandler(self.runtime.clock)
        self.brokers: list[Broker] = []

    async def start(
        self, name: str, zone: str = "", port: int = 0, spool: SpoolDisk | None = None, **settings: Any
    ) -> Broker:
        """Start one more broker."""
        broker = self.made(name, zone, port, spool, **settings)
        await broker.start()
        return broker

    def made(
        self,
        name: str,
        zone: str = "",
        port: int = 0,
        spool: SpoolDisk | None = None,
        governs: bool = True,
        client_limits: ClientLimits | None = None,
        **settings: Any,
    ) -> Broker:
        """Return one more broker, before its start."""
        sizes = {"memory_bytes_max": 32 << 20, "spool_bytes_max": 16 << 20}
        given = BrokerSettings(port=port, broker_id=name, zone=zone, **{**sizes, **settings})
        broker = Broker(
            given,
            self.runtime,
            {"main": self.store},
            self.queue,
            MemoryCoordinator(self.shared),
            governs=governs,
            client_limits=client_limits or NO_CLIENT_LIMITS,
            spool_disk=spool,
            slab_bytes=256 << 10,
        )
        self.brokers.append(broker)
        return broker

    def owner(self, topic: Topic, partition: int = 0) -> Assignment:
        """Return an assignment as it is now."""
        return self.shared.registry.assignment(topic.id, partition)


@asynccontextmanager
async def rig(runtime: Runtime | None = None, timeout_s: float = TIMEOUT_S) -> AsyncIterator[Rig]:
    """Yield a cluster without brokers; close its brokers afterwards."""
    made = Rig(runtime or Runtime())
    try:
        async with asyncio.timeout(timeout_s):
            yield made
    finally:
        for broker in made.brokers:
            await broker.close()


async def read_from(broker: Broker, position: Position) -> list[bytes | None]:
    """Return the values from a position on."""
    async with AsyncConsumer(broker.address, ["clicks"], start={("clicks", 0): position}, end="end") as consumer:
        return [record.value async for batch in consumer for record in batch]
