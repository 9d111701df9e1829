"""An operator of the lasting topic: truncates its logs now and then, at any position."""

from __future__ import annotations

import asyncio

from memq.client.admin import AsyncAdmin
from memq.errors import MemqError
from memq.runtime.runtime import Runtime
from memq.simulation.cluster import PORT
from memq.simulation.world.node import SimNode
from memq.topic import Position, read_partitions
from tests.simulation.checked_cluster import CheckedCluster

ORDERS = 12  # of one life
PACE_S_MAX = 8.0
INDEX_MAX = 3  # of the record in its batch, which stays


class OperatorLife:
    """One life of the process. The rules of retention learn of each order before the brokers do."""

    def __init__(self, node: SimNode, runtime: Runtime, cluster: CheckedCluster) -> None:
        self._draw = node.random
        self._runtime = runtime
        self._cluster = cluster
        self._brokers = [f"{host}:{PORT}" for host, _port in cluster.addresses()]

    async def run(self) -> None:
        """Truncate, and return after the last order."""
        async with AsyncAdmin(self._brokers, runtime=self._runtime) as admin:
            for _ in range(ORDERS):
                await asyncio.sleep(self._draw.uniform(0, PACE_S_MAX))
                await self._truncate(admin)

    async def _truncate(self, admin: AsyncAdmin) -> None:
        cluster, checker = self._cluster, self._cluster.checker
        partition = self._draw.choice(read_partitions(cluster.topic))
        log = checker.logs.get(partition)
        if log is None or log.begin == len(log.entries):
            return
        before = self._draw.randint(log.begin, len(log.entries))
        at = Position(partition.partition, before, self._draw.randint(0, INDEX_MAX) if before < len(log.entries) else 0)
        assert checker.retention is not None, "the plan has retention"
        checker.retention.order(partition, before)
        try:
            await admin.truncate_topic(cluster.topic.name, at)
        except MemqError:
            return  # it may have landed
