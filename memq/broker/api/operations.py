"""The table of operations: each request with the resources that it touches and its handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic

from memq.broker.api import Answer, Ask, Call, Reply
from memq.broker.api.cluster_requests import ClusterRequests
from memq.broker.api.group_requests import GroupRequests
from memq.broker.api.hold_requests import HoldRequests
from memq.broker.api.permissions.permission_requests import PermissionRequests
from memq.broker.api.permissions.shown import (
    shown_delayed,
    shown_group,
    shown_groups,
    shown_metadata,
    shown_plan,
    shown_queues,
    shown_transactions,
)
from memq.broker.api.queue_requests import QueueRequests
from memq.broker.api.reader_requests import ReaderRequests, poll_blocks_bytes, poll_bytes, read_bytes
from memq.broker.api.stream_requests import StreamRequests
from memq.broker.api.topic_requests import TopicRequests
from memq.broker.api.transaction_requests import TransactionRequests
from memq.errors import ProtocolError
from memq.permissions import Permission, Resource, ResourceKind
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
from memq.protocol.permission_messages import ChangePermissions, CheckPermission, ListPermissions
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
    permission: Permission  # on each of its resources
    resources: Callable[[Call[Ask]], list[Resource]]
    handler: Callable[[Call[Ask]], Awaitable[Answer]]
    prepare: Callable[[Ask], Awaitable[Any]] | None = None  # for long waits, before an answer needs memory
    answer_bytes: Callable[[Ask], int] = lambda ask: 0  # at most, of READ or POLL; 0 for a refusal
    keep: Callable[[Call[Ask], Reply], bool] | None = None  # without a task, for an answer that may come much later
    spare_bytes: Callable[[Ask], int] = lambda ask: 0  # at most, in addition, while memory is free
    takes_blocks: bool = False  # behind the request
    shown: Callable[[Call[Ask], Answer], Answer] | None = None  # the part that the principal may describe
    listing: bool = False  # nobody is refused, and `shown` leaves out what the principal may not describe
    located: Callable[[Call[Ask]], Awaitable[list[Resource]]] | None = None  # instead of `resources`, by the store
    recheck: bool = False  # the answer may come much later, with records: the rules may have changed

    def __post_init__(self) -> None:
        if self.listing and self.shown is None:
            raise ValueError(f"operation '{self.name}' is a listing and leaves nothing out")

    def needs(self, call: Call[Ask]) -> list[tuple[Permission, Resource]]:
        """Return the permissions that a call needs, each with its resource."""
        if self.listing:
            return []
        return self.needs_on(self.resources(call))

    def needs_on(self, resources: Iterable[Resource]) -> list[tuple[Permission, Resource]]:
        """Return the permissions that this operation needs on resources."""
        return [(_permission_on(each.kind, self.permission), each) for each in resources]


def _permission_on(kind: ResourceKind, permission: Permission) -> Permission:
    """Return the permission on one resource; a transaction reads its group, whose positions move."""
    moves = kind is ResourceKind.GROUP and permission is Permission.WRITE
    return Permission.READ if moves else permission


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
    permissions: PermissionRequests,
) -> Operations:
    """Return the table."""
    return Operations(
        [
            *_topic_operations(streams, topics),
            *_reader_operations(readers),
            *_group_operations(groups),
            *_cluster_operations(cluster),
            *_hold_operations(holds),
            *_transaction_operations(transactions),
            *_queue_operations(queues),
            *_permission_operations(permissions),
        ]
    )


def _topic_operations(streams: StreamRequests, topics: TopicRequests) -> list[Operation[Any]]:
    return [
        Operation("open", Api.OPEN, Open, Permission.WRITE, _partition, streams.open),
        Operation("close", Api.CLOSE, Close, Permission.WRITE, _partition_of_stream, streams.close),
        Operation("forward", Api.FORWARD, Forward, Permission.PEER, _partition, streams.forward),
        Operation("begin-producer", Api.ADMIN, BeginProducer, Permission.WRITE, _partition, streams.begin_producer),
        Operation("publish-staged", Api.ADMIN, PublishStaged, Permission.WRITE, _partition, streams.publish_staged),
        Operation(
            "metadata",
            Api.METADATA,
            MetadataRequest,
            Permission.DESCRIBE,
            _asked_topics,
            topics.metadata,
            shown=shown_metadata,
            listing=True,
        ),
        Operation("create-topic", Api.ADMIN, CreateTopic, Permission.CREATE, _named_topic, topics.create),
        Operation("alter-topic", Api.ADMIN, AlterTopic, Permission.ALTER, _named_topic, topics.alter),
        Operation("delete-topic", Api.ADMIN, DeleteTopic, Permission.DELETE, _named_topic, topics.delete),
        Operation("truncate-topic", Api.ADMIN, TruncateTopic, Permission.DELETE, _named_topic, topics.truncate),
        Operation("seal-topic", Api.ADMIN, SealTopic, Permission.ALTER, _named_topic, topics.seal),
        Operation("trim-cold", Api.ADMIN, TrimCompacted, Permission.DELETE, _topic, topics.trim_compacted),
    ]


def _reader_operations(readers: ReaderRequests) -> list[Operation[Any]]:
    return [
        Operation(
            "read",
            Api.READ,
            ReadRequest,
            Permission.READ,
            _object,
            readers.read,
            located=readers.read_resources,
            answer_bytes=read_bytes,
            recheck=True,
        ),
        Operation(
            "poll-entries",
            Api.POLL,
            PollEntries,
            Permission.READ,
            _polled_partitions,
            readers.poll_entries,
            prepare=readers.prepare_poll,
            answer_bytes=poll_bytes,
            spare_bytes=poll_blocks_bytes,
            recheck=True,
        ),
        Operation("poll-time", Api.POLL, PollTime, Permission.DESCRIBE, _timed_partition, readers.poll_time),
        Operation("poll-spans", Api.POLL, PollSpans, Permission.DESCRIBE, _spanned_partitions, readers.poll_spans),
    ]


def _group_operations(groups: GroupRequests) -> list[Operation[Any]]:
    return [
        Operation("commit", Api.COMMIT, CommitRequest, Permission.READ, _committed, groups.commit),
        Operation("join", Api.JOIN, JoinRequest, Permission.READ, _joined, groups.join),
        Operation(
            "heartbeat",
            Api.HEARTBEAT,
            HeartbeatRequest,
            Permission.READ,
            _group,
            groups.heartbeat,
            keep=groups.keep,
        ),
        Operation(
            "list-groups",
            Api.ADMIN,
            ListGroups,
            Permission.DESCRIBE,
            _cluster,
            groups.list_groups,
            shown=shown_groups,
            listing=True,
        ),
        Operation("list-former-groups", Api.ADMIN, ListFormerGroups, Permission.OPERATE, _cluster, groups.list_former),
        Operation("move-group", Api.ADMIN, MoveGroup, Permission.ALTER, _group, groups.move),
        Operation(
            "describe-group", Api.ADMIN, DescribeGroup, Permission.DESCRIBE, _group, groups.describe, shown=shown_group
        ),
        Operation("delete-group", Api.ADMIN, DeleteGroup, Permission.DELETE, _group, groups.delete),
    ]


def _cluster_operations(cluster: ClusterRequests) -> list[Operation[Any]]:
    return [
        Operation(
            "describe-cluster",
            Api.ADMIN,
            DescribeCluster,
            Permission.DESCRIBE,
            _cluster,
            cluster.describe,
            shown=shown_plan,
        ),
        Operation(
            "describe-clients", Api.ADMIN, DescribeClients, Permission.DESCRIBE, _cluster, cluster.describe_clients
        ),
        Operation("describe-load", Api.ADMIN, DescribeLoad, Permission.DESCRIBE, _cluster, cluster.describe_load),
        Operation(
            "describe-held", Api.ADMIN, DescribeHeld, Permission.DESCRIBE, _sought_partitions, cluster.describe_held
        ),
        Operation("settle-topic", Api.ADMIN, SettleTopic, Permission.PEER, _topic, cluster.settle_topic),
        Operation("drain-broker", Api.ADMIN, DrainBroker, Permission.OPERATE, _cluster, cluster.drain),
        Operation(
            "report-suspicion", Api.ADMIN, ReportSuspicion, Permission.DESCRIBE, _cluster, cluster.report_suspicion
        ),
    ]


def _hold_operations(holds: HoldRequests) -> list[Operation[Any]]:
    return [
        Operation("hold-records", Api.ADMIN, HoldRecords, Permission.WRITE, _partition, holds.hold),
        Operation("cancel-holds", Api.ADMIN, CancelHolds, Permission.WRITE, _partition, holds.cancel),
        Operation("describe-holds", Api.ADMIN, DescribeHolds, Permission.DESCRIBE, _topic, holds.describe),
        Operation(
            "list-delayed",
            Api.ADMIN,
            ListDelayed,
            Permission.DESCRIBE,
            _cluster,
            holds.list_delayed,
            shown=shown_delayed,
            listing=True,
        ),
        Operation("release-unit", Api.ADMIN, ReleaseUnit, Permission.PEER, _partition, holds.release),
        Operation(
            "release-staged-unit", Api.ADMIN, ReleaseStagedUnit, Permission.PEER, _partition, holds.release_staged
        ),
    ]


def _permission_operations(permissions: PermissionRequests) -> list[Operation[Any]]:
    return [
        Operation(
            "list-permissions",
            Api.ADMIN,
            ListPermissions,
            Permission.OPERATE,
            _cluster,
            permissions.list_rules,
        ),
        Operation("change-permissions", Api.ADMIN, ChangePermissions, Permission.ALTER, _cluster, permissions.change),
        Operation("test-permission", Api.ADMIN, CheckPermission, Permission.OPERATE, _cluster, permissions.test),
    ]


def _transaction_operations(transactions: TransactionRequests) -> list[Operation[Any]]:
    return [
        Operation(
            "begin-transactions",
            Api.ADMIN,
            BeginTransactions,
            Permission.WRITE,
            _transactional,
            transactions.begin,
        ),
        Operation(
            "hold-transaction",
            Api.ADMIN,
            HoldTransaction,
            Permission.WRITE,
            _held_blocks,
            transactions.hold,
        ),
        Operation(
            "hold-staged-parts",
            Api.ADMIN,
            HoldStagedParts,
            Permission.WRITE,
            _held_parts,
            transactions.hold_staged,
        ),
        Operation(
            "end-transaction",
            Api.ADMIN,
            EndTransaction,
            Permission.WRITE,
            _ended,
            transactions.end,
        ),
        Operation(
            "prepare-transaction",
            Api.ADMIN,
            PrepareTransaction,
            Permission.WRITE,
            _prepared,
            transactions.prepare,
        ),
        Operation("ask-undecided", Api.ADMIN, AskUndecided, Permission.WRITE, _producer_group, transactions.ask),
        Operation(
            "answer-undecided", Api.ADMIN, AnswerUndecided, Permission.WRITE, _producer_group, transactions.answer
        ),
        Operation(
            "await-transaction",
            Api.ADMIN,
            AwaitTransaction,
            Permission.WRITE,
            _ended,
            transactions.until_visible,
        ),
        Operation(
            "list-transactions",
            Api.ADMIN,
            ListTransactions,
            Permission.DESCRIBE,
            _cluster,
            transactions.list_open,
            shown=shown_transactions,
            listing=True,
        ),
        Operation(
            "settle-transaction", Api.ADMIN, SettleTransaction, Permission.ALTER, _transactional, transactions.settle
        ),
    ]


def _queue_operations(queues: QueueRequests) -> list[Operation[Any]]:
    return [
        Operation(
            "enqueue-items", Api.ADMIN, EnqueueItems, Permission.WRITE, _queue, queues.enqueue, takes_blocks=True
        ),
        Operation("dequeue-items", Api.ADMIN, DequeueItems, Permission.READ, _queues, queues.dequeue, recheck=True),
        Operation("await-items", Api.ADMIN, AwaitItems, Permission.READ, _queues, queues.wait),
        Operation("ack-items", Api.ADMIN, AckItems, Permission.READ, _queue, queues.ack),
        Operation("nack-items", Api.ADMIN, NackItems, Permission.READ, _queue, queues.nack),
        Operation("extend-items", Api.ADMIN, ExtendItems, Permission.READ, _queue, queues.extend),
        Operation("cancel-items", Api.ADMIN, CancelItems, Permission.WRITE, _queue, queues.cancel),
        Operation("redrive-items", Api.ADMIN, RedriveItems, Permission.ALTER, _queue, queues.redrive),
        Operation("purge-items", Api.ADMIN, PurgeItems, Permission.DELETE, _queue, queues.purge),
        Operation("get-items", Api.ADMIN, GetItems, Permission.READ, _queue, queues.get),
        Operation("peek-items", Api.ADMIN, PeekItems, Permission.READ, _queue, queues.peek),
        Operation("list-dead-items", Api.ADMIN, ListDeadItems, Permission.READ, _queue, queues.list_dead),
        Operation("count-ends", Api.ADMIN, CountEnds, Permission.DESCRIBE, _cluster, queues.count_ends),
        Operation(
            "list-queues",
            Api.ADMIN,
            ListQueues,
            Permission.DESCRIBE,
            _cluster,
            queues.list_queues,
            shown=shown_queues,
            listing=True,
        ),
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


def _topic(call: Call[SettleTopic] | Call[TrimCompacted] | Call[DescribeHolds]) -> list[Resource]:
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


def _group_with_topics(group: str, topics: Iterable[str]) -> list[Resource]:
    return [
        Resource(ResourceKind.GROUP, group),
        *(each for topic in dict.fromkeys(topics) for each in _one_topic(topic)),
    ]


def _committed(call: Call[CommitRequest]) -> list[Resource]:
    stored = (each.partition.topic for each in call.ask.positions)
    return _group_with_topics(call.ask.group, (*stored, *(each.topic for each in call.ask.fetch)))


def _joined(call: Call[JoinRequest]) -> list[Resource]:
    named = [each.topic for each in call.ask.partitions]
    return _group_with_topics(call.ask.group, (*named, *(each.topic for each in call.ask.ranges)))


def _group(
    call: Call[HeartbeatRequest] | Call[DescribeGroup] | Call[DeleteGroup] | Call[MoveGroup],
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
