"""The requests in an ADMIN frame: of operators, of staged commits, of brokers; and their answer."""

from __future__ import annotations

import msgspec

from memq.protocol.group_messages import (
    DeleteGroup,
    DescribeGroup,
    ListFormerGroups,
    ListGroups,
    MoveGroup,
    WireGroup,
)
from memq.protocol.hold_messages import (
    CancelHolds,
    DescribeHolds,
    HoldRecords,
    ListDelayed,
    ReleaseStagedUnit,
    ReleaseUnit,
    WireDelayedTopic,
    WireWaiting,
)
from memq.protocol.namespace_messages import ChangeNamespaces, ListNamespaces, NamespaceAnswer
from memq.protocol.permission_messages import (
    ChangePermissions,
    ChangeUsers,
    CheckPermission,
    ListPermissions,
    ListUsers,
    PermissionAnswer,
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
    QueueAnswer,
    RedriveItems,
)
from memq.protocol.quota_messages import ChangeQuotas, DescribeQuota, ListQuotas, QuotaAnswer, ShareQuotas
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
    WireOpenTransaction,
    WireQuestion,
)
from memq.protocol.wire_types import Int64, WireBroker, WireChange, WireClient, WireLoad
from memq.topic import Topic


class CreateTopic(msgspec.Struct, tag_field="op", tag="create-topic", kw_only=True):
    """Create a topic; with `exist_ok`, an existing one is returned unchanged."""

    name: str
    partitions: Int64 = 1
    settings: dict[str, Int64 | bool | str] = {}
    exist_ok: bool = False


class AlterTopic(msgspec.Struct, tag_field="op", tag="alter-topic", kw_only=True):
    """Change settings of a topic; with `topic_id` only of that one, not of a later one of its name."""

    name: str
    topic_id: str = ""
    settings: dict[str, Int64 | bool | str] = {}


class DeleteTopic(msgspec.Struct, tag_field="op", tag="delete-topic", kw_only=True):
    """Delete a topic with its pointers; the sweep deletes its objects.

    With `topic_id` only the topic with this id: a late request may find another topic under its name.
    """

    name: str
    topic_id: str = ""


class TruncateTopic(msgspec.Struct, tag_field="op", tag="truncate-topic", kw_only=True):
    """Order retention to remove the pointers of a topic below an offset, by read partition."""

    name: str
    topic_id: str
    before: dict[Int64, Int64]


class SealTopic(msgspec.Struct, tag_field="op", tag="seal-topic", kw_only=True):
    """Let a topic take no more records; with `sealed` false, let it take records again."""

    name: str
    topic_id: str
    sealed: bool = True


class SettleTopic(msgspec.Struct, tag_field="op", tag="settle-topic", kw_only=True):
    """Ask the broker of this id which partitions of a sealed topic it owns and has brought to their end."""

    broker: str
    topic: str
    topic_id: str


class DescribeCluster(msgspec.Struct, tag_field="op", tag="describe-cluster", kw_only=True):
    """Show the live brokers, and the changes that the governor would make now."""


class DrainBroker(msgspec.Struct, tag_field="op", tag="drain-broker", kw_only=True):
    """Ask the receiving broker to hand over all partitions that it owns; `broker` is its id."""

    broker: str


class BeginProducer(msgspec.Struct, tag_field="op", tag="begin-producer", kw_only=True):
    """Begin a new instance of a named producer in a partition of the receiving broker.

    The new instance fences the older ones.
    """

    topic: str
    topic_id: str
    partition: Int64
    producer: str  # 16 hex digits


class DescribeClients(msgspec.Struct, tag_field="op", tag="describe-clients", kw_only=True):
    """Ask the broker of this id for the limits of its clients."""

    broker: str


class DescribeLoad(msgspec.Struct, tag_field="op", tag="describe-load", kw_only=True):
    """Ask the broker of this id for its load."""

    broker: str


class WireRecords(msgspec.Struct, kw_only=True):
    """Records of one producer in one write partition: half-open ranges of sequences."""

    partition: Int64
    producer: str  # 16 hex digits
    ranges: list[tuple[int, int]]


class DescribeHeld(msgspec.Struct, tag_field="op", tag="describe-held", kw_only=True):
    """Ask the broker of this id which of some records of a topic it holds."""

    broker: str
    topic: str
    topic_id: str
    sought: list[WireRecords]


class WirePiece(msgspec.Struct, kw_only=True):
    """Blocks of one partition in a staged object: the batch at `offset`, with facts for its pointer."""

    key: str
    object_bytes: Int64
    index_offset: Int64
    offset: Int64
    length: Int64
    raw_bytes: Int64


class PublishStaged(msgspec.Struct, tag_field="op", tag="publish-staged", kw_only=True):
    """Ask an owner to publish the missing pieces of a writer's batch where they are stored.

    `pieces` begins with number `first` of the `pieces_total` that the manifest has for the partition. `manifest` is the
    crc32c of the manifest, and `created_ms` its time, Unix ms. Without `remember`, only the dedup window detects a
    repetition of the batch. With `any_manifest` a batch that was published from another manifest counts as this one.
    With `only_check` nothing is published: the answer is how many pieces are, or the refusal.
    """

    topic: str
    topic_id: str
    partition: Int64
    writer: str
    batch_id: Int64
    store: str
    manifest: Int64
    pieces_total: Int64
    first: Int64
    pieces: list[WirePiece]
    remember: bool = True
    any_manifest: bool = True
    only_check: bool = False
    created_ms: Int64 = 0


class TrimCompacted(msgspec.Struct, tag_field="op", tag="trim-cold", kw_only=True):
    """Remove from the queue those pointers of a topic that its compaction manifests have."""

    topic: str
    topic_id: str


class ReportSuspicion(msgspec.Struct, tag_field="op", tag="report-suspicion", kw_only=True):
    """Report that a connection to a broker was refused. The governor asks its port before it acts."""

    address: str  # as METADATA names it


class AdminRequest(msgspec.Struct, kw_only=True):
    """One administrative request."""

    ask: (
        CreateTopic
        | AlterTopic
        | DeleteTopic
        | TruncateTopic
        | SealTopic
        | SettleTopic
        | ListGroups
        | DescribeGroup
        | DeleteGroup
        | ListFormerGroups
        | MoveGroup
        | DescribeCluster
        | DrainBroker
        | DescribeClients
        | DescribeLoad
        | DescribeHeld
        | BeginProducer
        | PublishStaged
        | TrimCompacted
        | ReportSuspicion
        | HoldRecords
        | CancelHolds
        | DescribeHolds
        | ListDelayed
        | ReleaseUnit
        | ReleaseStagedUnit
        | BeginTransactions
        | HoldTransaction
        | HoldStagedParts
        | EndTransaction
        | PrepareTransaction
        | AskUndecided
        | AnswerUndecided
        | AwaitTransaction
        | ListTransactions
        | SettleTransaction
        | EnqueueItems
        | DequeueItems
        | AwaitItems
        | AckItems
        | NackItems
        | ExtendItems
        | CancelItems
        | RedriveItems
        | PurgeItems
        | GetItems
        | PeekItems
        | ListDeadItems
        | CountEnds
        | ListQueues
        | BeginPop
        | RemovePop
        | ListPops
        | ListPermissions
        | ChangePermissions
        | CheckPermission
        | ListQuotas
        | ChangeQuotas
        | DescribeQuota
        | ListUsers
        | ChangeUsers
        | ShareQuotas
        | ListNamespaces
        | ChangeNamespaces
    )


class WireInstance(msgspec.Struct, kw_only=True):
    """An instance of a named producer in a partition: epoch, and sequence after the last committed."""

    epoch: Int64
    next_sequence: Int64


class AdminAnswer(msgspec.Struct, kw_only=True):
    """Answer to an AdminRequest: a topic, groups, the cluster, or an instance that began.

    `published` is the number of pieces of a batch in the queue. `sweep_age_ms` is the age at which the sweep may delete
    an object that no pointer names. `held` has the sought records that the broker holds, `unread` why it may hold more.
    `settled` are partitions of a sealed topic; for the others `unread` has the reasons. `former` are brokers that have
    lost epochs of these without `closed`.
    `holds` has the state of each asked held block, `waiting` those that wait by partition,
    `delayed` by topic.
    `transactional` is the instance of a transactional producer that began. `transactions` are the open ones.
    `covered` are the service partitions that the answer to a `ServiceQuestion` covers, of those that it names.
    `committed` is whether the transaction that a request ends is committed. `questions` are the transactions that a
    producer group is to decide; it asks for more after `ask_again_ms`. `visible` is whether all records of a committed
    transaction are in their logs. `queue` answers requests about queues, and others do not have it; so do
    `permissions`, `quotas` and `namespaces`.
    """

    topic: Topic | None = None
    groups: list[str] = []
    group: WireGroup | None = None
    brokers: list[WireBroker] = []
    changes: list[WireChange] = []
    notes: list[str] = []
    instance: WireInstance | None = None
    clients: list[WireClient] = []
    load: WireLoad | None = None
    held: list[WireRecords] | None = None
    unread: list[str] = []
    settled: list[Int64] = []
    former: list[str] = []
    published: Int64 = 0
    sweep_age_ms: Int64 = 0
    holds: list[str] = []
    waiting: list[WireWaiting] = []
    delayed: list[WireDelayedTopic] = []
    transactional: Int64 = 0
    transactions: list[WireOpenTransaction] = []
    committed: bool = False
    covered: list[Int64] | None = None
    questions: list[WireQuestion] = []
    ask_again_ms: Int64 = 0
    visible: bool = False
    queue: QueueAnswer | msgspec.UnsetType = msgspec.UNSET
    permissions: PermissionAnswer | msgspec.UnsetType = msgspec.UNSET
    quotas: QuotaAnswer | msgspec.UnsetType = msgspec.UNSET
    namespaces: NamespaceAnswer | msgspec.UnsetType = msgspec.UNSET

    @property
    def about_queues(self) -> QueueAnswer:
        """The answer to a request about queues; to another one without content."""
        return QueueAnswer() if isinstance(self.queue, msgspec.UnsetType) else self.queue
