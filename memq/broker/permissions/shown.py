"""Removes from answers what the principal may not describe; see `Operation.shown`."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from memq.broker.api import Answer, Call
from memq.broker.permissions.checks import PrincipalAccess
from memq.permissions import Permission, Resource, ResourceKind, topic_resource
from memq.protocol.admin_messages import AdminAnswer
from memq.protocol.messages import Metadata, MetadataRequest, PartitionRef
from memq.protocol.namespace_messages import NamespaceAnswer
from memq.protocol.queue_messages import QueueAnswer


def _describes(access: PrincipalAccess, kind: ResourceKind, name: str) -> bool:
    return access.may(Permission.DESCRIBE, Resource(kind, name))


def shown_metadata(call: Call[Any], answer: Answer) -> Answer:
    """Remove hidden topics; one that the request named is listed as missing, like an absent topic."""
    ask, metadata = cast(MetadataRequest, call.ask), cast(Metadata, answer)

    def seen(topic: str) -> bool:
        return call.access.may(Permission.DESCRIBE, topic_resource(topic))

    hidden = [each.topic.name for each in metadata.topics if not seen(each.topic.name)]
    if not hidden and all(map(seen, metadata.unconfirmed)):
        return metadata
    if ask.topics is not None:
        call.access.hidden(map(topic_resource, hidden or metadata.unconfirmed), call.connection.peer)
    return msgspec.structs.replace(
        metadata,
        topics=[each for each in metadata.topics if seen(each.topic.name)],
        missing=metadata.missing + hidden if ask.topics is not None else [],
        unconfirmed=[name for name in metadata.unconfirmed if seen(name)],
    )


def shown_groups(call: Call[Any], answer: Answer) -> Answer:
    """Remove hidden groups."""
    found = cast(AdminAnswer, answer)
    found.groups = [name for name in found.groups if _describes(call.access, ResourceKind.GROUP, name)]
    return found


def shown_group(call: Call[Any], answer: Answer) -> Answer:
    """Remove the partitions of hidden topics from positions and assignments."""
    found = cast(AdminAnswer, answer)

    def seen(partition: PartitionRef) -> bool:
        return _describes(call.access, ResourceKind.TOPIC, partition.topic)

    if found.group is not None:
        found.group.positions = [each for each in found.group.positions if seen(each.partition)]
        for member in found.group.members:
            member.assigned = [each for each in member.assigned if seen(each)]
    return found


def shown_plan(call: Call[Any], answer: Answer) -> Answer:
    """Remove changes of hidden topics; also the notes, which may name any topic, if one is hidden."""
    found = cast(AdminAnswer, answer)
    found.changes = [each for each in found.changes if _describes(call.access, ResourceKind.TOPIC, each.topic)]
    if not call.access.may_on_all(Permission.DESCRIBE, ResourceKind.TOPIC):
        found.notes = []
    return found


def shown_delayed(call: Call[Any], answer: Answer) -> Answer:
    """Remove hidden topics with delayed records."""
    found = cast(AdminAnswer, answer)
    found.delayed = [each for each in found.delayed if _describes(call.access, ResourceKind.TOPIC, each.topic)]
    return found


def shown_transactions(call: Call[Any], answer: Answer) -> Answer:
    """Remove transactions of hidden transactional ids, and hidden topics of the others."""
    found, kept = cast(AdminAnswer, answer), []
    for each in found.transactions:
        if _describes(call.access, ResourceKind.TRANSACTIONAL_ID, each.name):
            blocks = {name: n for name, n in each.blocks.items() if _describes(call.access, ResourceKind.TOPIC, name)}
            kept.append(msgspec.structs.replace(each, blocks=blocks))
    found.transactions = kept
    return found


def shown_queues(call: Call[Any], answer: Answer) -> Answer:
    """Remove hidden queues."""
    found = cast(AdminAnswer, answer)
    queues = [each for each in found.about_queues.queues if _describes(call.access, ResourceKind.QUEUE, each.queue)]
    found.queue = QueueAnswer(queues=queues)
    return found


def shown_namespaces(call: Call[Any], answer: Answer) -> Answer:
    """Remove hidden namespaces: those in which the principal has no permission."""
    found = cast(AdminAnswer, answer)
    assert isinstance(found.namespaces, NamespaceAnswer), "the handler fills it"
    uses = [each for each in found.namespaces.uses if call.access.sees(each.namespace.name)]
    found.namespaces = NamespaceAnswer(uses=uses)
    return found


def shown_pops(call: Call[Any], answer: Answer) -> Answer:
    """Remove hidden pop groups."""
    found = cast(AdminAnswer, answer)
    pops = [each for each in found.about_queues.pops if _describes(call.access, ResourceKind.QUEUE, each.queue)]
    found.queue = QueueAnswer(pops=pops)
    return found
