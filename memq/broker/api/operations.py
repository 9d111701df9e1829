"""The table of operations: each request with the resources that it touches and its handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic

from memq.broker.api import Answer, Ask, Call, Reply
from memq.broker.api.cluster_requests import ClusterRequests
from memq.broker.api.group_requests import GroupRequests
from memq.broker.api.hold_requests import HoldRequests
from memq.broker.api.queue_requests import QueueRequests
from memq.broker.api.reader_requests import ReaderRequests
from memq.broker.api.stream_requests import StreamRequests
from memq.broker.api.topic_requests import TopicRequests
from memq.broker.api.transaction_requests import TransactionRequests
from memq.errors import ProtocolError
from memq.limits import POLL_BLOCKS_BYTES_MAX, POLL_BYTES_MAX, READ_BYTES_MAX
from memq.permissions import Resource, ResourceKind
from memq.protocol.admin_messages import (
    AdminRequest,
    AlterTopic,
    BeginProducer,
    CreateTopic,
    DeleteTopic,
    DescribeClients,
    DescribeCluster,
    DescribeHeld,
    DescribeLoad,
    DrainBroker,
    PublishStaged,
    ReportSuspicion,
    SealTopic,
    SettleTopic,
    TrimCompacted,
    TruncateTopic,
)
from memq.protocol.frames import Api, Frame, split_blocks
from memq.protocol.group_messages import (
    CommitRequest,
    DeleteGroup,
    DescribeGroup,
    HeartbeatRequest,
    JoinRequest,
    ListFormerGroups,
    ListGroups,
    MoveGroup,
)
from memq.protocol.hold_messages import (
    CancelHolds,
    DescribeHolds,
    HoldRecords,
    ListDelayed,
    ReleaseStagedUnit,
    ReleaseUnit,
)
from memq.protocol.messages import (
    Close,
    Forward,
    MetadataRequest,
    Open,
    PollEntries,
    PollRequest,
    PollSpans,
    PollTime,
    ReadRequest,
    decode_message,
)
from memq.protocol.queue_messages import (
    AckItems,
    AwaitItems,
    CancelItems,
    CountEnds,
    DequeueItems,
    EnqueueItems,
    ExtendItems,
    GetItems,
    ListDeadItems,
    ListQueues,
    NackItems,
    PeekItems,
    PurgeItems,
    RedriveItems,
)
from memq.protocol.transaction_messages import (
    AnswerUndecided,
    AskUndecided,
    AwaitTransaction,
    BeginTransactions,
    EndTransaction,
    HoldStagedParts,
    HoldTransaction,
    ListTransactions,
    PrepareTransaction,
    SettleTransaction,
)

_ENVELOPES: dict[int, type[AdminRequest | PollRequest]] = {Api.ADMIN: AdminRequest, Api.POLL: PollRequest}


@dataclass(frozen=True, slots=True)
class Operation(Generic[Ask]):
    """One row of the table."""

    name: str
    api: Api
    message: type[Ask]
    resources: Callable[[Call[Ask]], list[Resource]]
    handler: Callable[[Call[Ask]], Awaitable[Answer]]
    prepare: Callable[[Ask], Awaitable[Any]] | None = None  # for long waits, before an answer needs memory
    answer_bytes: Callable[[Ask], int] = lambda ask: 0  # at most, of READ or POLL; 0 for a refusal
    keep: Callable[[Call[Ask], Reply], bool] | None = None  # without a task, for an answer that may come much later
    spare_bytes: Callable[[Ask], int] = lambda ask: 0  # at most, in addition, while memory is free
    takes_blocks: bool = False  # behind the request


class Operations:
    """Finds the row of a request. Each type of message has one row."""

    def __init__(self, rows: Iterable[Operation[Any]]) -> None:
        self.rows = list(rows)
        self._by_message = {row.message: row for row in self.rows}
        self.kept = frozenset(row.api for row in self.rows if row.keep is not None)
        self._messages: dict[int, type[Any]] = {row.api: row.message for row in self.rows} | _ENVELOPES

    def find(self, frame: Frame, *, checksum_wanted: bool = False) -> tuple[Operation[Any], Any, memoryview]:
        """Return the operation of a frame, its message and its blocks.

        Raises: ProtocolError; as `decode_message`.
        """
        kind = self._messages.get(frame.api)
        if kind is None:
            raise ProtocolError(f"api {frame.api} is no operation")
        body, blocks = split_blocks(frame)
        message = decode_message(body, kind, checksum_wanted=checksum_wanted)
        ask = message.ask if frame.api in _ENVELOPES else message
        operation = self.of(type(ask))
        if blocks and not operation.takes_blocks:
            raise ProtocolError(f"{len(blocks)} bytes follow a request '{operation.name}', which has no blocks")
        return operation, ask, blocks

    def of(self, message: type[Any]) -> Operation[Any]:
        """Return the row of a type of message. Raises: ProtocolError."""
        row = self._by_message.get(message)
        if row is None:
            raise ProtocolError(f"{message.__name__} is no operation")
        return row


def operations_of(
    streams: StreamRequests,
    topics: TopicRequests,
    readers: ReaderRequests,
    groups: GroupRequests,
    cluster: ClusterRequests,
    holds: HoldRequests,
    transactions: TransactionRequests,
    queues: QueueRequests,
) -> Operations:
    """Return the table."""
    return Operations(
        [
            Operation("open", Api.OPEN, Open, _partition, streams.open),
            Operation("close", Api.CLOSE, Close, _partition_of_stream, streams.close),
            Operation("forward", Api.FORWARD, Forward, _partition, streams.forward),
            Operation("begin-producer", Api.ADMIN, BeginProducer, _partition, streams.begin_producer),
            Operation("publish-staged", Api.ADMIN, PublishStaged, _partition, streams.publish_staged),
            Operation("metadata", Api.METADATA, MetadataRequest, _asked_topics, topics.metadata),
            Operation("read", Api.READ, ReadRequest, _object, readers.read, answer_bytes=_read_bytes),
            Operation("create-topic", Api.ADMIN, CreateTopic, _named_topic, topics.create),
            Operation("alter-topic", Api.ADMIN, AlterTopic, _named_topic, topics.alter),
            Operation("delete-topic", Api.ADMIN, DeleteTopic, _named_topic, topics.delete),
            Operation("truncate-topic", Api.ADMIN, TruncateTopic, _named_topic, topics.truncate),
            Operation("seal-topic", Api.ADMIN, SealTopic, _named_topic, topics.seal),
            Operation("trim-cold", Api.ADMIN, TrimCompacted, _trimmed_topic, topics.trim_compacted),
            Operation(
                "poll-entries",
                Api.POLL,
                PollEntries,
                _polled_partitions,
                readers.poll_entries,
                prepare=readers.prepare_poll,
                answer_bytes=_poll_bytes,
                spare_bytes=_poll_blocks_bytes,
            ),
            Operation("poll-time", Api.POLL, PollTime, _timed_partition, readers.poll_time),
            Operation("poll-spans", Api.POLL, PollSpans, _spanned_partitions, readers.poll_spans),
            Operation("commit", Api.COMMIT, CommitRequest, _group, groups.commit),
            Operation("join", Api.JOIN, JoinRequest, _group, groups.join),
            Operation("heartbeat", Api.HEARTBEAT, HeartbeatRequest, _group, groups.heartbeat, keep=groups.keep),
            Operation("list-groups", Api.ADMIN, ListGroups, _cluster, groups.list_groups),
            Operation("list-former-groups", Api.ADMIN, ListFormerGroups, _cluster, groups.list_former),
            Operation("move-group", Api.ADMIN, MoveGroup, _group, groups.move),
            Operation("describe-group", Api.ADMIN, DescribeGroup, _group, groups.describe),
            Operation("delete-group", Api.ADMIN, DeleteGroup, _group, groups.delete),
            Operation("describe-cluster", Api.ADMIN, DescribeCluster, _cluster, cluster.describe),
            Operation("describe-clients", Api.ADMIN, DescribeClients, _cluster, cluster.describe_clients),
            Operation("describe-load", Api.ADMIN, DescribeLoad, _cluster, cluster.describe_load),
            Operation("describe-held", Api.ADMIN, DescribeHeld, _sought_partitions, cluster.describe_held),
            Operation("settle-topic", Api.ADMIN, SettleTopic, _settled_topic, cluster.settle_topic),
            Operation("drain-broker", Api.ADMIN, DrainBroker, _cluster, cluster.drain),
            Operation("report-suspicion", Api.ADMIN, ReportSuspicion, _cluster, cluster.report_suspicion),
            Operation("hold-records", Api.ADMIN, HoldRecords, _partition, holds.hold),
            Operation("cancel-holds", Api.ADMIN, CancelHolds, _partition, holds.cancel),
            Operation("describe-holds", Api.ADMIN, DescribeHolds, _held_topic, holds.describe),
            Operation("list-delayed", Api.ADMIN, ListDelayed, _cluster, holds.list_delayed),
            Operation("release-unit", Api.ADMIN, ReleaseUnit, _partition, holds.release),
            Operation("release-staged-unit", Api.ADMIN, ReleaseStagedUnit, _partition, holds.release_staged),
            *_transaction_operations(transactions),
            *_queue_operations(queues),
        ]
    )


def _transaction_operations(transactions: TransactionRequests) -> list[Operation[Any]]:
    return [
        Operation("begin-transactions", Api.ADMIN, BeginTransactions, _transactional, transactions.begin),
        Operation("hold-transaction", Api.ADMIN, HoldTransaction, _held_blocks, transactions.hold),
        Operation("hold-staged-parts", Api.ADMIN, HoldStagedParts, _held_parts, transactions.hold_staged),
        Operation("end-transaction", Api.ADMIN, EndTransaction, _ended, transactions.end),
        Operation("prepare-transaction", Api.ADMIN, PrepareTransaction, _prepared, transactions.prepare),
        Operation("ask-undecided", Api.ADMIN, AskUndecided, _producer_group, transactions.ask),
        Operation("answer-undecided", Api.ADMIN, AnswerUndecided, _producer_group, transactions.answer),
        Operation("await-transaction", Api.ADMIN, AwaitTransaction, _ended, transactions.until_visible),
        Operation("list-transactions", Api.ADMIN, ListTransactions, _cluster, transactions.list_open),
        Operation("settle-transaction", Api.ADMIN, SettleTransaction, _transactional, transactions.settle),
    ]


def _queue_operations(queues: QueueRequests) -> list[Operation[Any]]:
    return [
        Operation("enqueue-items", Api.ADMIN, EnqueueItems, _queue, queues.enqueue, takes_blocks=True),
        Operation("dequeue-items", Api.ADMIN, DequeueItems, _queues, queues.dequeue),
        Operation("await-items", Api.ADMIN, AwaitItems, _queues, queues.wait),
        Operation("ack-items", Api.ADMIN, AckItems, _queue, queues.ack),
        Operation("nack-items", Api.ADMIN, NackItems, _queue, queues.nack),
        Operation("extend-items", Api.ADMIN, ExtendItems, _queue, queues.extend),
        Operation("cancel-items", Api.ADMIN, CancelItems, _queue, queues.cancel),
        Operation("redrive-items", Api.ADMIN, RedriveItems, _queue, queues.redrive),
        Operation("purge-items", Api.ADMIN, PurgeItems, _queue, queues.purge),
        Operation("get-items", Api.ADMIN, GetItems, _queue, queues.get),
        Operation("peek-items", Api.ADMIN, PeekItems, _queue, queues.peek),
        Operation("list-dead-items", Api.ADMIN, ListDeadItems, _queue, queues.list_dead),
        Operation("count-ends", Api.ADMIN, CountEnds, _cluster, queues.count_ends),
        Operation("list-queues", Api.ADMIN, ListQueues, _cluster, queues.list_queues),
    ]


# ---- resources -------------------------------------------------------------------------------------


def _cluster(call: Call[Any]) -> list[Resource]:
    return [Resource(ResourceKind.CLUSTER)]


def _one_topic(name: str) -> list[Resource]:
    return [Resource(ResourceKind.TOPIC, name)]


def _one_partition(topic: str, partition: int) -> Resource:
    return Resource(ResourceKind.PARTITION, f"{topic}/{partition}")


def _named_topic(
    call: Call[CreateTopic] | Call[AlterTopic] | Call[DeleteTopic] | Call[TruncateTopic] | Call[SealTopic],
) -> list[Resource]:
    return _one_topic(call.ask.name)


def _settled_topic(call: Call[SettleTopic]) -> list[Resource]:
    return _one_topic(call.ask.topic)


def _trimmed_topic(call: Call[TrimCompacted]) -> list[Resource]:
    return _one_topic(call.ask.topic)


def _held_topic(call: Call[DescribeHolds]) -> list[Resource]:
    return _one_topic(call.ask.topic)


def _asked_topics(call: Call[MetadataRequest]) -> list[Resource]:
    """Return the named topics; a request for all topics is about the cluster."""
    names = call.ask.topics
    return _cluster(call) if names is None else [Resource(ResourceKind.TOPIC, name) for name in names]


def _partition(
    call: Call[Open]
    | Call[Forward]
    | Call[BeginProducer]
    | Call[PublishStaged]
    | Call[HoldRecords]
    | Call[CancelHolds]
    | Call[ReleaseUnit]
    | Call[ReleaseStagedUnit],
) -> list[Resource]:
    return [_one_partition(call.ask.topic, call.ask.partition)]


def _partition_of_stream(call: Call[Close]) -> list[Resource]:
    """Return none when the stream is not open: the handler refuses that."""
    stream = call.connection.streams.get(call.stream)
    return [] if stream is None else [_one_partition(stream.target.topic.name, stream.target.partition)]


def _polled_partitions(call: Call[PollEntries]) -> list[Resource]:
    return [_one_partition(each.partition.topic, each.partition.partition) for each in call.ask.partitions]


def _timed_partition(call: Call[PollTime]) -> list[Resource]:
    return [_one_partition(call.ask.partition.topic, call.ask.partition.partition)]


def _spanned_partitions(call: Call[PollSpans]) -> list[Resource]:
    return [_one_partition(each.topic, each.partition) for each in call.ask.partitions]


def _sought_partitions(call: Call[DescribeHeld]) -> list[Resource]:
    partitions = dict.fromkeys(each.partition for each in call.ask.sought)
    return [_one_partition(call.ask.topic, partition) for partition in partitions]


def _object(call: Call[ReadRequest]) -> list[Resource]:
    return [Resource(ResourceKind.OBJECT, f"{call.ask.store}/{call.ask.key}")]


def _group(
    call: Call[CommitRequest]
    | Call[JoinRequest]
    | Call[HeartbeatRequest]
    | Call[DescribeGroup]
    | Call[DeleteGroup]
    | Call[MoveGroup],
) -> list[Resource]:
    return [Resource(ResourceKind.GROUP, call.ask.group)]


def _producer_of(name: str, group: str) -> list[Resource]:
    return [Resource(ResourceKind.TRANSACTIONAL_ID, name), *([Resource(ResourceKind.GROUP, group)] if group else [])]


def _transactional(call: Call[BeginTransactions] | Call[SettleTransaction]) -> list[Resource]:
    return _producer_of(call.ask.name, call.ask.group)


def _ended(call: Call[EndTransaction] | Call[AwaitTransaction]) -> list[Resource]:
    return _producer_of(call.ask.transaction.name, call.ask.transaction.group)


def _producer_group(call: Call[AskUndecided] | Call[AnswerUndecided]) -> list[Resource]:
    """Return the group alone: its members decide for each other."""
    return [Resource(ResourceKind.PRODUCER_GROUP, call.ask.producer_group)]


def _prepared(call: Call[PrepareTransaction]) -> list[Resource]:
    named = call.ask.transaction
    group = Resource(ResourceKind.PRODUCER_GROUP, call.ask.producer_group)
    return [*_producer_of(named.name, named.group), group]


def _held_blocks(call: Call[HoldTransaction]) -> list[Resource]:
    places = dict.fromkeys((each.topic, each.partition) for each in call.ask.blocks)
    named = call.ask.transaction
    return [*_producer_of(named.name, named.group), *(_one_partition(*place) for place in places)]


def _held_parts(call: Call[HoldStagedParts]) -> list[Resource]:
    places = dict.fromkeys((each.topic, each.partition) for each in call.ask.parts)
    named = call.ask.transaction
    return [*_producer_of(named.name, named.group), *(_one_partition(*place) for place in places)]


def _queue(call: Call[Any]) -> list[Resource]:
    return [Resource(ResourceKind.QUEUE, call.ask.queue)]


def _queues(call: Call[DequeueItems] | Call[AwaitItems]) -> list[Resource]:
    return [Resource(ResourceKind.QUEUE, queue) for queue in call.ask.queues]


# ---- bytes of answers ------------------------------------------------------------------------------


def _read_bytes(ask: ReadRequest) -> int:
    return max(0, min(ask.length, READ_BYTES_MAX))


def _poll_bytes(ask: PollEntries) -> int:
    return max(0, min(ask.bytes_max, POLL_BYTES_MAX))


def _poll_blocks_bytes(ask: PollEntries) -> int:
    return max(0, min(ask.blocks_bytes_max, POLL_BLOCKS_BYTES_MAX))
