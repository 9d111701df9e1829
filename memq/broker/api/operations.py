"""The table of operations: each request with the resources that it touches and its handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic

from memq.broker.api import Answer, Ask, Call, Reply
from memq.broker.api.cluster_requests import ClusterRequests
from memq.broker.api.group_requests import GroupRequests
from memq.broker.api.hold_requests import HoldRequests
from memq.broker.api.pop_requests import PopRequests
from memq.broker.api.queue_requests import QueueRequests
from memq.broker.api.reader_requests import ReaderRequests, poll_blocks_bytes, poll_bytes, read_bytes
from memq.broker.api.stream_requests import StreamRequests
from memq.broker.api.topic_requests import TopicRequests
from memq.broker.api.transaction_requests import TransactionRequests
from memq.broker.permissions import resources as on
from memq.broker.permissions.namespace_requests import NamespaceRequests
from memq.broker.permissions.permission_requests import PermissionRequests
from memq.broker.permissions.quota_requests import QuotaRequests
from memq.broker.permissions.shown import (
    shown_delayed,
    shown_group,
    shown_groups,
    shown_metadata,
    shown_namespaces,
    shown_plan,
    shown_pops,
    shown_queues,
    shown_transactions,
)
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
from memq.protocol.namespace_messages import ChangeNamespaces, ListNamespaces
from memq.protocol.permission_messages import (
    ChangePermissions,
    ChangeUsers,
    CheckPermission,
    ListPermissions,
    ListUsers,
)
from memq.protocol.pop_messages import BeginPop, ListPops, RemovePop
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
from memq.protocol.quota_messages import ChangeQuotas, DescribeQuota, ListQuotas, ShareQuotas
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
    recheck: bool = False  # the answer may come much later: a change of rules may refuse it meanwhile

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
    """Return the permission on one resource.

    A transaction that writes reads its group, and the topics in which it moves positions. A topic to which a request
    writes is named by its partitions.
    """
    moves = kind in (ResourceKind.GROUP, ResourceKind.TOPIC) and permission is Permission.WRITE
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
    pops: PopRequests,
    permissions: PermissionRequests,
    quotas: QuotaRequests,
    namespaces: NamespaceRequests,
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
            *_quota_operations(quotas),
            *_namespace_operations(namespaces),
            *_pop_operations(pops),
        ]
    )


def _topic_operations(streams: StreamRequests, topics: TopicRequests) -> list[Operation[Any]]:
    return [
        Operation("open", Api.OPEN, Open, Permission.WRITE, on.partition, streams.open),
        Operation("close", Api.CLOSE, Close, Permission.WRITE, on.partition_of_stream, streams.close),
        Operation("forward", Api.FORWARD, Forward, Permission.PEER, on.partition, streams.forward),
        Operation("begin-producer", Api.ADMIN, BeginProducer, Permission.WRITE, on.partition, streams.begin_producer),
        Operation("publish-staged", Api.ADMIN, PublishStaged, Permission.WRITE, on.partition, streams.publish_staged),
        Operation(
            "metadata",
            Api.METADATA,
            MetadataRequest,
            Permission.DESCRIBE,
            on.asked_topics,
            topics.metadata,
            shown=shown_metadata,
            listing=True,
        ),
        Operation("create-topic", Api.ADMIN, CreateTopic, Permission.CREATE, on.named_topic, topics.create),
        Operation("alter-topic", Api.ADMIN, AlterTopic, Permission.ALTER, on.named_topic, topics.alter),
        Operation("delete-topic", Api.ADMIN, DeleteTopic, Permission.DELETE, on.named_topic, topics.delete),
        Operation("truncate-topic", Api.ADMIN, TruncateTopic, Permission.DELETE, on.named_topic, topics.truncate),
        Operation("seal-topic", Api.ADMIN, SealTopic, Permission.ALTER, on.named_topic, topics.seal),
        Operation("trim-cold", Api.ADMIN, TrimCompacted, Permission.DELETE, on.topic, topics.trim_compacted),
    ]


def _reader_operations(readers: ReaderRequests) -> list[Operation[Any]]:
    return [
        Operation(
            "read",
            Api.READ,
            ReadRequest,
            Permission.READ,
            on.stored_object,
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
            on.polled_partitions,
            readers.poll_entries,
            prepare=readers.prepare_poll,
            answer_bytes=poll_bytes,
            spare_bytes=poll_blocks_bytes,
            recheck=True,
        ),
        Operation("poll-time", Api.POLL, PollTime, Permission.DESCRIBE, on.timed_partition, readers.poll_time),
        Operation("poll-spans", Api.POLL, PollSpans, Permission.DESCRIBE, on.spanned_partitions, readers.poll_spans),
    ]


def _group_operations(groups: GroupRequests) -> list[Operation[Any]]:
    return [
        Operation("commit", Api.COMMIT, CommitRequest, Permission.READ, on.committed, groups.commit),
        Operation("join", Api.JOIN, JoinRequest, Permission.READ, on.joined, groups.join),
        Operation(
            "heartbeat", Api.HEARTBEAT, HeartbeatRequest, Permission.READ, on.group, groups.heartbeat, keep=groups.keep
        ),
        Operation(
            "list-groups",
            Api.ADMIN,
            ListGroups,
            Permission.DESCRIBE,
            on.cluster,
            groups.list_groups,
            shown=shown_groups,
            listing=True,
        ),
        Operation(
            "list-former-groups", Api.ADMIN, ListFormerGroups, Permission.OPERATE, on.cluster, groups.list_former
        ),
        Operation("move-group", Api.ADMIN, MoveGroup, Permission.ALTER, on.group, groups.move),
        Operation(
            "describe-group",
            Api.ADMIN,
            DescribeGroup,
            Permission.DESCRIBE,
            on.group,
            groups.describe,
            shown=shown_group,
        ),
        Operation("delete-group", Api.ADMIN, DeleteGroup, Permission.DELETE, on.group, groups.delete),
    ]


def _cluster_operations(cluster: ClusterRequests) -> list[Operation[Any]]:
    return [
        Operation(
            "describe-cluster",
            Api.ADMIN,
            DescribeCluster,
            Permission.DESCRIBE,
            on.cluster,
            cluster.describe,
            shown=shown_plan,
        ),
        Operation(
            "describe-clients", Api.ADMIN, DescribeClients, Permission.DESCRIBE, on.cluster, cluster.describe_clients
        ),
        Operation("describe-load", Api.ADMIN, DescribeLoad, Permission.DESCRIBE, on.cluster, cluster.describe_load),
        Operation("describe-held", Api.ADMIN, DescribeHeld, Permission.DESCRIBE, on.topic, cluster.describe_held),
        Operation("settle-topic", Api.ADMIN, SettleTopic, Permission.PEER, on.topic, cluster.settle_topic),
        Operation("drain-broker", Api.ADMIN, DrainBroker, Permission.OPERATE, on.cluster, cluster.drain),
        Operation(
            "report-suspicion", Api.ADMIN, ReportSuspicion, Permission.DESCRIBE, on.cluster, cluster.report_suspicion
        ),
    ]


def _hold_operations(holds: HoldRequests) -> list[Operation[Any]]:
    return [
        Operation("hold-records", Api.ADMIN, HoldRecords, Permission.WRITE, on.partition, holds.hold),
        Operation("cancel-holds", Api.ADMIN, CancelHolds, Permission.WRITE, on.partition, holds.cancel),
        Operation("describe-holds", Api.ADMIN, DescribeHolds, Permission.DESCRIBE, on.topic, holds.describe),
        Operation(
            "list-delayed",
            Api.ADMIN,
            ListDelayed,
            Permission.DESCRIBE,
            on.cluster,
            holds.list_delayed,
            shown=shown_delayed,
            listing=True,
        ),
        Operation("release-unit", Api.ADMIN, ReleaseUnit, Permission.PEER, on.partition, holds.release),
        Operation(
            "release-staged-unit", Api.ADMIN, ReleaseStagedUnit, Permission.PEER, on.partition, holds.release_staged
        ),
    ]


def _permission_operations(permissions: PermissionRequests) -> list[Operation[Any]]:
    return [
        Operation(
            "list-permissions", Api.ADMIN, ListPermissions, Permission.OPERATE, on.cluster, permissions.list_rules
        ),
        Operation("change-permissions", Api.ADMIN, ChangePermissions, Permission.ALTER, on.cluster, permissions.change),
        Operation("test-permission", Api.ADMIN, CheckPermission, Permission.OPERATE, on.cluster, permissions.test),
        Operation("list-users", Api.ADMIN, ListUsers, Permission.OPERATE, on.cluster, permissions.list_users),
        Operation("change-users", Api.ADMIN, ChangeUsers, Permission.ALTER, on.cluster, permissions.change_users),
    ]


def _quota_operations(quotas: QuotaRequests) -> list[Operation[Any]]:
    return [
        Operation("list-quotas", Api.ADMIN, ListQuotas, Permission.OPERATE, on.cluster, quotas.list_quotas),
        Operation("change-quotas", Api.ADMIN, ChangeQuotas, Permission.ALTER, on.cluster, quotas.change),
        Operation("describe-quota", Api.ADMIN, DescribeQuota, Permission.OPERATE, on.cluster, quotas.describe),
        Operation("share-quotas", Api.ADMIN, ShareQuotas, Permission.PEER, on.cluster, quotas.share),
    ]


def _namespace_operations(namespaces: NamespaceRequests) -> list[Operation[Any]]:
    return [
        Operation(
            "list-namespaces",
            Api.ADMIN,
            ListNamespaces,
            Permission.DESCRIBE,
            on.cluster,
            namespaces.list_namespaces,
            shown=shown_namespaces,
            listing=True,
        ),
        Operation("change-namespaces", Api.ADMIN, ChangeNamespaces, Permission.ALTER, on.cluster, namespaces.change),
    ]


def _transaction_operations(transactions: TransactionRequests) -> list[Operation[Any]]:
    return [
        Operation(
            "begin-transactions", Api.ADMIN, BeginTransactions, Permission.WRITE, on.transactional, transactions.begin
        ),
        Operation("hold-transaction", Api.ADMIN, HoldTransaction, Permission.WRITE, on.held_blocks, transactions.hold),
        Operation(
            "hold-staged-parts", Api.ADMIN, HoldStagedParts, Permission.WRITE, on.held_parts, transactions.hold_staged
        ),
        Operation("end-transaction", Api.ADMIN, EndTransaction, Permission.WRITE, on.ended, transactions.end),
        Operation(
            "prepare-transaction", Api.ADMIN, PrepareTransaction, Permission.WRITE, on.prepared, transactions.prepare
        ),
        Operation("ask-undecided", Api.ADMIN, AskUndecided, Permission.WRITE, on.producer_group, transactions.ask),
        Operation(
            "answer-undecided", Api.ADMIN, AnswerUndecided, Permission.WRITE, on.producer_group, transactions.answer
        ),
        Operation(
            "await-transaction", Api.ADMIN, AwaitTransaction, Permission.WRITE, on.awaited, transactions.until_visible
        ),
        Operation(
            "list-transactions",
            Api.ADMIN,
            ListTransactions,
            Permission.DESCRIBE,
            on.cluster,
            transactions.list_open,
            shown=shown_transactions,
            listing=True,
        ),
        Operation(
            "settle-transaction", Api.ADMIN, SettleTransaction, Permission.ALTER, on.transactional, transactions.settle
        ),
    ]


def _pop_operations(pops: PopRequests) -> list[Operation[Any]]:
    return [
        Operation("begin-pop", Api.ADMIN, BeginPop, Permission.READ, on.popped, pops.begin),
        Operation("remove-pop", Api.ADMIN, RemovePop, Permission.DELETE, on.queue, pops.remove),
        Operation(
            "list-pops",
            Api.ADMIN,
            ListPops,
            Permission.DESCRIBE,
            on.cluster,
            pops.list_groups,
            shown=shown_pops,
            listing=True,
        ),
    ]


def _queue_operations(queues: QueueRequests) -> list[Operation[Any]]:
    return [
        Operation(
            "enqueue-items", Api.ADMIN, EnqueueItems, Permission.WRITE, on.queue, queues.enqueue, takes_blocks=True
        ),
        Operation(
            "dequeue-items", Api.ADMIN, DequeueItems, Permission.READ, on.leased_queues, queues.dequeue, recheck=True
        ),
        Operation("await-items", Api.ADMIN, AwaitItems, Permission.READ, on.read_queues, queues.wait, recheck=True),
        Operation("ack-items", Api.ADMIN, AckItems, Permission.READ, on.queue, queues.ack),
        Operation("nack-items", Api.ADMIN, NackItems, Permission.READ, on.queue, queues.nack),
        Operation("extend-items", Api.ADMIN, ExtendItems, Permission.READ, on.queue, queues.extend),
        Operation("cancel-items", Api.ADMIN, CancelItems, Permission.WRITE, on.queue, queues.cancel),
        Operation("redrive-items", Api.ADMIN, RedriveItems, Permission.ALTER, on.queue, queues.redrive),
        Operation("purge-items", Api.ADMIN, PurgeItems, Permission.DELETE, on.queue, queues.purge),
        Operation("get-items", Api.ADMIN, GetItems, Permission.READ, on.read_queue, queues.get),
        Operation("peek-items", Api.ADMIN, PeekItems, Permission.READ, on.read_queue, queues.peek),
        Operation("list-dead-items", Api.ADMIN, ListDeadItems, Permission.READ, on.queue, queues.list_dead),
        Operation("count-ends", Api.ADMIN, CountEnds, Permission.DESCRIBE, on.cluster, queues.count_ends),
        Operation(
            "list-queues",
            Api.ADMIN,
            ListQueues,
            Permission.DESCRIBE,
            on.cluster,
            queues.list_queues,
            shown=shown_queues,
            listing=True,
        ),
    ]
