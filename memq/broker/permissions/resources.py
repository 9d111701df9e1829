"""Returns the resources of each request, on which it needs its permission."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from memq.broker.api import Call
from memq.format.key import topic_of_folder
from memq.permissions import Resource, ResourceKind, permission_subject, topic_resource
from memq.protocol.admin_messages import (
    AlterTopic,
    BeginProducer,
    CreateTopic,
    DeleteTopic,
    DescribeHeld,
    PublishStaged,
    SealTopic,
    SettleTopic,
    TrimCompacted,
    TruncateTopic,
)
from memq.protocol.group_messages import (
    CommitRequest,
    DeleteGroup,
    DescribeGroup,
    HeartbeatRequest,
    JoinRequest,
    MoveGroup,
)
from memq.protocol.hold_messages import (
    CancelHolds,
    DescribeHolds,
    HoldRecords,
    ReleaseStagedUnit,
    ReleaseUnit,
)
from memq.protocol.messages import (
    Close,
    Forward,
    MetadataRequest,
    Open,
    PollEntries,
    PollSpans,
    PollTime,
    ReadRequest,
)
from memq.protocol.pop_messages import BeginPop
from memq.protocol.queue_messages import (
    AwaitItems,
    DequeueItems,
    GetItems,
    PeekItems,
)
from memq.protocol.transaction_messages import (
    AnswerUndecided,
    AskUndecided,
    AwaitTransaction,
    BeginTransactions,
    EndTransaction,
    HoldStagedParts,
    HoldTransaction,
    PrepareTransaction,
    SettleTransaction,
)
from memq.queues.pop.groups import is_pop_queue, topic_of
from memq.topic import namespace_of


def namespace_of_resource(resource: Resource) -> str:
    """Return the namespace of a resource; "" without one. An object of several topics has none."""
    kind, name = permission_subject(resource)
    if kind is ResourceKind.OBJECT:
        found = topic_of_folder(name.partition("/")[2])
        return namespace_of(found[1]) if found else ""
    return namespace_of(topic_of(name) if kind is ResourceKind.QUEUE else name)


def cluster(call: Call[Any]) -> list[Resource]:
    """Return the cluster."""
    return [Resource(ResourceKind.CLUSTER)]


def one_topic(name: str) -> list[Resource]:
    """Return a topic."""
    return [Resource(ResourceKind.TOPIC, name)]


def one_partition(topic: str, partition: int) -> Resource:
    """Return a partition."""
    return Resource(ResourceKind.PARTITION, f"{topic}/{partition}")


def named_topic(
    call: Call[CreateTopic] | Call[AlterTopic] | Call[DeleteTopic] | Call[TruncateTopic] | Call[SealTopic],
) -> list[Resource]:
    """Return the topic that the request creates, changes or deletes."""
    return one_topic(call.ask.name)


def topic(call: Call[SettleTopic] | Call[TrimCompacted] | Call[DescribeHolds] | Call[DescribeHeld]) -> list[Resource]:
    """Return the topic of the request."""
    return one_topic(call.ask.topic)


def asked_topics(call: Call[MetadataRequest]) -> list[Resource]:
    """Return the named topics; a request for all topics is about the cluster."""
    names = call.ask.topics
    return cluster(call) if names is None else [Resource(ResourceKind.TOPIC, name) for name in names]


def partition(
    call: Call[Open]
    | Call[Forward]
    | Call[BeginProducer]
    | Call[PublishStaged]
    | Call[HoldRecords]
    | Call[CancelHolds]
    | Call[ReleaseUnit]
    | Call[ReleaseStagedUnit],
) -> list[Resource]:
    """Return the partition."""
    return [one_partition(call.ask.topic, call.ask.partition)]


def partition_of_stream(call: Call[Close]) -> list[Resource]:
    """Return the partition of the stream; none if the stream is not open, which the handler refuses."""
    stream = call.connection.streams.get(call.stream)
    return [] if stream is None else [one_partition(stream.target.topic.name, stream.target.partition)]


def polled_partitions(call: Call[PollEntries]) -> list[Resource]:
    """Return the partitions that are polled."""
    return [one_partition(each.partition.topic, each.partition.partition) for each in call.ask.partitions]


def timed_partition(call: Call[PollTime]) -> list[Resource]:
    """Return the partition in which a time is looked up."""
    return [one_partition(call.ask.partition.topic, call.ask.partition.partition)]


def spanned_partitions(call: Call[PollSpans]) -> list[Resource]:
    """Return the partitions whose ends are wanted."""
    return [one_partition(each.topic, each.partition) for each in call.ask.partitions]


def stored_object(call: Call[ReadRequest]) -> list[Resource]:
    """Return the object of a store."""
    return [Resource(ResourceKind.OBJECT, f"{call.ask.store}/{call.ask.key}")]


def group_with_topics(group: str, topics: Iterable[str]) -> list[Resource]:
    """Return the group, and the topics of its answer."""
    return [
        Resource(ResourceKind.GROUP, group),
        *(each for topic in dict.fromkeys(topics) for each in one_topic(topic)),
    ]


def committed(call: Call[CommitRequest]) -> list[Resource]:
    """Return the group of a commit, and its topics."""
    stored = (each.partition.topic for each in call.ask.positions)
    return group_with_topics(call.ask.group, (*stored, *(each.topic for each in call.ask.fetch)))


def joined(call: Call[JoinRequest]) -> list[Resource]:
    """Return the group of a join, and its topics."""
    named = [each.topic for each in call.ask.partitions]
    return group_with_topics(call.ask.group, (*named, *(each.topic for each in call.ask.ranges)))


def group(
    call: Call[HeartbeatRequest] | Call[DescribeGroup] | Call[DeleteGroup] | Call[MoveGroup],
) -> list[Resource]:
    """Return the group."""
    return [Resource(ResourceKind.GROUP, call.ask.group)]


def producer_of(name: str, group: str) -> list[Resource]:
    """Return the transactional id, and its group."""
    return [Resource(ResourceKind.TRANSACTIONAL_ID, name), *([Resource(ResourceKind.GROUP, group)] if group else [])]


def transactional(call: Call[BeginTransactions] | Call[SettleTransaction]) -> list[Resource]:
    """Return the transactional id of the request, and its group."""
    return producer_of(call.ask.name, call.ask.group)


def ended(call: Call[EndTransaction]) -> list[Resource]:
    """Return id and group of a transaction that ends, and the topics in which it moves positions."""
    named, moved = call.ask.transaction, (*call.ask.before, *call.ask.after)
    topics = dict.fromkeys(each.partition.topic for each in moved)
    return [*producer_of(named.name, named.group), *map(topic_resource, topics)]


def awaited(call: Call[AwaitTransaction]) -> list[Resource]:
    """Return transactional id and group of a transaction that has ended."""
    return producer_of(call.ask.transaction.name, call.ask.transaction.group)


def producer_group(call: Call[AskUndecided] | Call[AnswerUndecided]) -> list[Resource]:
    """Return the group alone: its members decide for each other."""
    return [Resource(ResourceKind.PRODUCER_GROUP, call.ask.producer_group)]


def prepared(call: Call[PrepareTransaction]) -> list[Resource]:
    """Return transactional id and producer group of a prepared transaction."""
    named = call.ask.transaction
    group = Resource(ResourceKind.PRODUCER_GROUP, call.ask.producer_group)
    return [*producer_of(named.name, named.group), group]


def held_blocks(call: Call[HoldTransaction]) -> list[Resource]:
    """Return transactional id and partitions of held blocks."""
    places = dict.fromkeys((each.topic, each.partition) for each in call.ask.blocks)
    named = call.ask.transaction
    return [*producer_of(named.name, named.group), *(one_partition(*place) for place in places)]


def held_parts(call: Call[HoldStagedParts]) -> list[Resource]:
    """Return transactional id and partitions of staged parts."""
    places = dict.fromkeys((each.topic, each.partition) for each in call.ask.parts)
    named = call.ask.transaction
    return [*producer_of(named.name, named.group), *(one_partition(*place) for place in places)]


def queue(call: Call[Any]) -> list[Resource]:
    """Return the queue."""
    return [Resource(ResourceKind.QUEUE, call.ask.queue)]


def popped(call: Call[BeginPop]) -> list[Resource]:
    """Return the queue and the topic of a pop group."""
    return [*queue(call), *one_topic(topic_of(call.ask.queue))]


def read_queue(call: Call[GetItems] | Call[PeekItems]) -> list[Resource]:
    """Return the queue, and the topic whose records a pop group has."""
    return _with_topics([call.ask.queue])


def read_queues(call: Call[AwaitItems]) -> list[Resource]:
    """Return the queues, and the topics whose records pop groups have."""
    return _with_topics(call.ask.queues)


def leased_queues(call: Call[DequeueItems]) -> list[Resource]:
    """Return the queues, the topics whose records pop groups have, and queues with acks alone."""
    acked = [each for each in call.ask.acks if each not in call.ask.queues]
    return [*_with_topics(call.ask.queues), *(Resource(ResourceKind.QUEUE, each) for each in acked)]


def _with_topics(queues: Iterable[str]) -> list[Resource]:
    topics = dict.fromkeys(topic_of(each) for each in queues if is_pop_queue(each))
    return [*(Resource(ResourceKind.QUEUE, each) for each in queues), *map(topic_resource, topics)]
