"""The product's consumer as a process: reads for its group for ever, begins anew after an error, tells the checker."""

from __future__ import annotations

import asyncio

from memq.client.aio_consumer import AsyncConsumer
from memq.client.batch import Batch
from memq.client.record import TopicPartition
from memq.errors import MemqError
from memq.network import Runtime
from memq.topic import ReadPartition
from tests.simulation.cluster import PORT, SimCluster
from tests.simulation.node import Node


async def run_consumer(node: Node, runtime: Runtime, cluster: SimCluster, group: str) -> None:
    """Consume until the process dies."""
    life = 0
    while True:
        life += 1
        reader = Reader(f"{node.name}#{node.index}.{life}", group, node, cluster)
        try:
            await reader.run(runtime)
        except MemqError as error:
            cluster.world.trace.event(cluster.world.now, "consumer failed", reader.name, type(error).__name__)
            await asyncio.sleep(node.random.uniform(0.05, 0.5))


class Reader:
    """One life of a consumer."""

    def __init__(self, name: str, group: str, node: Node, cluster: SimCluster) -> None:
        self.name = name
        self._group = group
        self._draw = node.random
        self._cluster = cluster
        self._checker = cluster.checker

    async def run(self, runtime: Runtime) -> None:
        """Read for ever. Raises: MemqError."""
        draw = self._draw
        auto_commit = draw.random() < 0.5
        consumer = AsyncConsumer(
            [f"{host}:{PORT}" for host, _port in self._cluster.addresses()],
            self._cluster.topic.name,
            group=self._group,
            auto_commit=auto_commit,
            auto_commit_interval_ms=draw.choice([10, 500]),
            session_timeout_ms=draw.choice([1_000, 3_000]),
            prefetch_bytes_max=draw.choice([8 << 10, 64 << 10, 1 << 20]),
            on_assigned=self._assigned,
            runtime=runtime,
        )
        async with consumer:
            while True:
                batch = await consumer.poll(timeout=draw.uniform(0.1, 2.0))
                if batch is not None:
                    self._take(batch)
                    if not auto_commit and draw.random() < 0.5:
                        await consumer.commit(batch)
                    await asyncio.sleep(draw.choice([0, 0, 0.001, 0.05]))

    def _partition(self, number: int) -> ReadPartition:
        return self._cluster.read_partitions[number]

    def _assigned(self, places: list[TopicPartition]) -> None:
        for place in places:
            self._checker.assign(self.name, self._partition(place.partition))

    def _take(self, batch: Batch) -> None:
        partition = self._partition(batch.partition)
        for record in batch:
            at = record.position
            value = record.value or b""
            self._checker.consume(self.name, self._group, partition, (at.pointer_offset, at.record_index), value)
