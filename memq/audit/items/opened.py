"""Audits the queue items of a cluster: logs by a broker, objects and snapshots from the store."""

from __future__ import annotations

from memq.audit.items.auditor import ItemAuditor
from memq.audit.items.report import ItemVerdict
from memq.audit.opened_topic import opened_topic
from memq.runtime.runtime import Runtime
from memq.topic import STATE_TOPIC, read_partitions


async def audit_items(brokers: str, queue: str = "") -> ItemVerdict:
    """Return the verdict on the items of a queue, of all queues if it is empty.

    Raises: UnreachableError; DeniedError if the store does not open here; as `ItemAuditor.audit`.
    """
    runtime = Runtime()
    async with opened_topic(brokers, STATE_TOPIC, runtime, direct=True) as opened:
        store = next(iter(opened.stores.values()))  # that of new objects
        auditor = ItemAuditor(opened.cluster, store, opened.queue, runtime.clock.wall_ms())
        return await auditor.audit(read_partitions(opened.topic), queue)
