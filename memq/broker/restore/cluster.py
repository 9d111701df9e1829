"""Mends the queue of a cluster, where it lies: in Kafka, say. All brokers are stopped meanwhile."""

from __future__ import annotations

from collections.abc import Callable

from memq.broker.assembly import open_coordinator, open_queue, open_store
from memq.broker.process import STORE_NAME
from memq.broker.restore.restore import Restored, Restorer
from memq.errors import InvalidRequestError
from memq.runtime.network import Runtime
from memq.settings import PartSettings


async def restore_cluster(
    cluster: str,
    parts: PartSettings,
    *,
    dry_run: bool = False,
    moved: Callable[[int], None] = lambda count: None,
    runtime: Runtime | None = None,
) -> list[Restored]:
    """Restore the queue for all topics that the coordinator knows; return the results of each.

    What the queue holds already stays, and what is intact is left alone; called again after it was interrupted, it
    continues where it was. `moved` gets the number of objects that are done.
    Raises: InvalidRequestError while brokers run; MemqError of the parts.
    """
    runtime = runtime or Runtime()
    coordinator = open_coordinator(parts, runtime, cluster)
    try:
        running = [broker.id for broker in await coordinator.brokers()]
        if running:
            raise InvalidRequestError(
                f"brokers run: {', '.join(running)}",
                hint="stop them; a killed one disappears after its session timeout",
            )
        store = open_store(parts, runtime, cluster)
        queue = open_queue(parts, runtime, cluster)
        restorer = Restorer(cluster, STORE_NAME, store, queue, runtime.clock, dry_run=dry_run, moved=moved)
        try:
            return [await restorer.restore(topic) for topic in await coordinator.topics()]
        finally:
            await queue.close()
            await store.close()
    finally:
        await coordinator.close()
