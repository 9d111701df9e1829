"""The topic that clients report to, made by the first broker of a cluster that audits."""

from __future__ import annotations

import asyncio

from memq.broker.partitions import Partitions
from memq.broker.services import Services
from memq.errors import MemqError
from memq.format.report import AUDIT_TOPIC
from memq.topic import TopicSettings

RETRY_S = 1.0


def audit_topic_settings(retention_ms: int) -> TopicSettings:
    """Return the settings of `_memq_audit`: reports are small and many, and nobody waits for their acks.

    So their batches wait for each other, and share objects: a few PUTs a second for any number of clients.
    """
    return TopicSettings(retention_ms=retention_ms, shared_objects=True, seal_when_idle=False)


async def make_audit_topic(services: Services, partitions: Partitions) -> None:
    """Make `_memq_audit`, however often it takes; where it is there already, it stays as it is.

    No broker serves later for this: until the topic is there, clients keep what they have to report. It is tried until
    an answer says that all of it is done: a topic that is known may lack its place in the queue.
    """
    settings, failing = services.settings, services.events.outage("audit-topic-failed", "audit-topic-made")
    topic = audit_topic_settings(settings.audit_retention_ms)
    while True:
        try:
            await partitions.create(AUDIT_TOPIC, settings.audit_partitions, topic, exist_ok=True, internal=True)
        except MemqError as error:
            failing.failed(str(error))
            await asyncio.sleep(RETRY_S)
        else:
            failing.passed()
            return
