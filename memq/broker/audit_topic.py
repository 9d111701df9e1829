"""The topic that clients report to, made by the first broker of a cluster that audits."""

from __future__ import annotations

from memq.broker.partitions import Partitions
from memq.format.report import AUDIT_TOPIC
from memq.settings import BrokerSettings
from memq.topic import TopicSettings


def audit_topic_settings(retention_ms: int) -> TopicSettings:
    """Return the settings of `_memq_audit`: reports are small and many, and nobody waits for their acks.

    So their batches wait for each other, and share objects: a few PUTs a second for any number of clients.
    """
    return TopicSettings(retention_ms=retention_ms, shared_objects=True, seal_when_idle=False)


async def make_audit_topic(partitions: Partitions, settings: BrokerSettings) -> None:
    """Make `_memq_audit` unless it is there; then it stays as it is. Raises: what stands in the way."""
    if partitions.find(AUDIT_TOPIC) is None:
        topic = audit_topic_settings(settings.audit_retention_ms)
        await partitions.create(AUDIT_TOPIC, settings.audit_partitions, topic, exist_ok=True, internal=True)
