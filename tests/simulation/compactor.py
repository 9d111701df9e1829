"""A process that compacts a topic repeatedly; a kill leaves nothing to clean up."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

from memq.compaction.compaction import BatchCopier, compact, leave_queue
from memq.compaction.reader import ManifestFiles
from memq.errors import MemqError
from memq.runtime.runtime import Runtime
from memq.simulation.cluster import CLUSTER
from memq.simulation.ports.cloud import Doors
from memq.simulation.world.node import SimNode
from tests.simulation.checked_cluster import CheckedCluster

COMPACTOR = "compactor"
STORE = "main"
PAUSE_S_MAX = 10.0


async def run_compactor(node: SimNode, runtime: Runtime, cluster: CheckedCluster, doors: Doors) -> None:
    """Compact all read partitions in turn; retry after errors, as a job that runs every night does."""
    rule = cluster.shape.compaction
    assert rule is not None
    copier = BatchCopier(CLUSTER, doors.queue, {STORE: doors.store}.__getitem__, (STORE, doors.store), runtime)
    files = ManifestFiles(CLUSTER, doors.store)
    while True:
        await asyncio.sleep(node.random.uniform(0.0, PAUSE_S_MAX))
        for partition in cluster.read_partitions:
            with suppress(MemqError):
                async for _ in compact(
                    doors.queue,
                    files,
                    copier,
                    partition,
                    cluster.topic.settings,
                    rule,
                    runtime.clock,
                    partial(leave_queue, doors.queue, files, partition),
                    named_within_ms=cluster.shape.sweep_age_ms // 2,
                ):
                    pass
