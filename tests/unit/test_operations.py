"""The table of operations: a row for each request, its resources, and requests without a row."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, cast, get_args, get_type_hints

import msgspec
import pytest

from memq.broker.api import Call
from memq.broker.api.cluster_requests import ClusterRequests
from memq.broker.api.group_requests import GroupRequests
from memq.broker.api.hold_requests import HoldRequests
from memq.broker.api.operations import Operation, Operations, operations_of
from memq.broker.api.pop_requests import PopRequests
from memq.broker.api.queue_requests import QueueRequests
from memq.broker.api.reader_requests import ReaderRequests
from memq.broker.api.requests import LIMITED
from memq.broker.api.stream_requests import StreamRequests
from memq.broker.api.topic_requests import TopicRequests
from memq.broker.api.transaction_requests import TransactionRequests
from memq.broker.partition.recent_pointer_cache import RecentPointerCache
from memq.broker.permissions.namespace_requests import NamespaceRequests
from memq.broker.permissions.permission_requests import PermissionRequests
from memq.broker.permissions.quota_requests import QuotaRequests
from memq.errors import ProtocolError
from memq.limits import POLL_BYTES_MAX, READ_BYTES_MAX
from memq.protocol import (
    admin_messages,
    group_messages,
    hold_messages,
    messages,
    namespace_messages,
    permission_messages,
    pop_messages,
    queue_messages,
    quota_messages,
    transaction_messages,
)
from memq.protocol.admin_messages import (
    AdminAnswer,
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
    WireRecords,
)
from memq.protocol.connection import ALLOWED, ANONYMOUS, ConnectionState, Side
from memq.protocol.frames import HAS_BLOCKS, Api, Frame
from memq.protocol.group_messages import (
    CommitAnswer,
    CommitRequest,
    DeleteGroup,
    DescribeGroup,
    HeartbeatRequest,
    JoinRequest,
    ListFormerGroups,
    ListGroups,
    MembershipAnswer,
    MoveGroup,
    WireCommitted,
    WireRanges,
)
from memq.protocol.hold_messages import (
    CancelHolds,
    DescribeHolds,
    HoldRecords,
    ListDelayed,
    ReleaseStagedUnit,
    ReleaseUnit,
    WireHold,
    WireHoldId,
    WireUnitBlock,
)
from memq.protocol.messages import (
    Authenticate,
    Close,
    Done,
    Draining,
    Forward,
    Hello,
    HelloAnswer,
    Metadata,
    MetadataRequest,
    Nack,
    Open,
    OpenAnswer,
    PartitionRef,
    PollAnswer,
    PollEntries,
    PollFrom,
    PollRequest,
    PollSpans,
    PollTime,
    ReadRequest,
    Redirect,
    Throttle,
    encode_message,
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
    WireLeasedItems,
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
    WireStagedPart,
    WireTransaction,
    WireTransactionBlock,
)
from tests.access import EVERYTHING

# What is no operation: the greeting, which makes the principal, and what only brokers say.
GREETING = {Hello, Authenticate}
SAID_BY_BROKERS = {HelloAnswer, OpenAnswer, Done, Metadata, PollAnswer, CommitAnswer, MembershipAnswer, AdminAnswer} | {
    Nack,
    Throttle,
    Redirect,
    Draining,
}
MODULES = (
    messages,
    group_messages,
    admin_messages,
    hold_messages,
    transaction_messages,
    queue_messages,
    pop_messages,
    namespace_messages,
    permission_messages,
    quota_messages,
)
ID = "0a" * 16


def table() -> Operations:
    services = cast(Any, SimpleNamespace(queue=None, pointers=None, recent_pointers=RecentPointerCache()))
    given = services, cast(Any, None)
    return operations_of(
        StreamRequests(*given),
        TopicRequests(*given),
        ReaderRequests(*given),
        GroupRequests(cast(Any, None), cast(Any, None), cast(Any, None)),
        ClusterRequests(*given, cast(Any, None), cast(Any, None)),
        HoldRequests(*given, cast(Any, None)),
        TransactionRequests(*given, cast(Any, None)),
        QueueRequests(*given),
        PopRequests(services, cast(Any, None), cast(Any, None)),
        PermissionRequests(services),
        QuotaRequests(services),
        NamespaceRequests(services),
    )


def call_of(ask: Any, connection: Any = None, stream: int = 0) -> Call[Any]:
    return Call(connection, ANONYMOUS, stream, ask, access=EVERYTHING)


def structs_of(hint: Any) -> set[type]:
    """Return the messages that a type of a field names."""
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return {hint}
    return {found for each in get_args(hint) for found in structs_of(each)}


def parts_of(message: type) -> set[type]:
    """Return a message with the messages that its fields contain."""
    parts = {message}
    for hint in get_type_hints(message).values():
        for part in structs_of(hint):
            parts |= parts_of(part)
    return parts


def test_each_message_of_the_protocol_is_an_operation_an_answer_or_a_part_of_one() -> None:
    asks = [row.message for row in table().rows]
    assert len(set(asks)) == len(asks), "one row for each"
    assert len({row.name for row in table().rows}) == len(asks)
    whole: set[type] = {*asks, AdminRequest, PollRequest, *GREETING, *SAID_BY_BROKERS}
    inside = {part for message in whole for part in parts_of(message) - {message}}
    assert not inside & SAID_BY_BROKERS - {Nack}, "an answer inside another"
    assert not inside & GREETING
    in_envelopes = structs_of(get_type_hints(AdminRequest)["ask"]) | structs_of(get_type_hints(PollRequest)["ask"])
    assert inside & set(asks) == in_envelopes, "a request inside of something else than its envelope"
    every = {
        each
        for module in MODULES
        for _, each in inspect.getmembers(module, inspect.isclass)
        if issubclass(each, msgspec.Struct) and each.__module__ == module.__name__
    }
    assert every - whole - inside == set(), "neither a row of the table nor an answer"
    assert {*asks} <= every


def test_each_message_in_an_envelope_has_a_row_with_the_api_of_the_envelope() -> None:
    for api, envelope in ((Api.ADMIN, AdminRequest), (Api.POLL, PollRequest)):
        hint = get_type_hints(envelope)["ask"]
        assert {row.message for row in table().rows if row.api == api} == structs_of(hint)


def test_each_frame_that_a_client_may_say_has_rows() -> None:
    """HELLO has none, and a WRITE belongs to the stream that an OPEN was let in for."""
    said = ALLOWED[ConnectionState.READY][Side.CLIENT]
    assert {row.api for row in table().rows} == said - {Api.WRITE}
    assert {row.api for row in table().rows} >= LIMITED


@pytest.mark.parametrize("row", table().rows, ids=lambda row: row.name)
def test_each_row_is_found_by_a_frame_of_its_message(row: Operation[Any]) -> None:
    ask = EXAMPLES[row.message][0]
    body: msgspec.Struct = ask
    if row.api in (Api.ADMIN, Api.POLL):
        body = AdminRequest(ask=ask) if row.api == Api.ADMIN else PollRequest(ask=ask)
    found, read, blocks = table().find(Frame(row.api, 0, 0, 7, encode_message(body)))
    assert (found.name, read, bytes(blocks)) == (row.name, ask, b"")
    message = encode_message(body)
    with_blocks = len(message).to_bytes(4, "little") + message + b"block"
    frame = Frame(row.api, HAS_BLOCKS, 0, 7, with_blocks)
    if row.takes_blocks:
        assert bytes(table().find(frame)[2]) == b"block"
    else:
        with pytest.raises(ProtocolError, match="5 bytes follow a request"):
            table().find(frame)
    assert inspect.iscoroutinefunction(row.handler)


REF = PartitionRef(topic="clicks", topic_id=ID, partition=3)
OTHER = PartitionRef(topic="views", topic_id=ID, partition=0)
LEFT, REACHED = (WireCommitted(partition=each, pointer_offset=1, record_index=0) for each in (REF, OTHER))
RANGES = WireRanges(topic="views", topic_id=ID, bounds=(0, 2))
SOUGHT = WireRecords(partition=3, producer="0" * 15 + "5", ranges=[(0, 3)])
OF_PARTITION: dict[str, Any] = {"topic": "clicks", "topic_id": ID, "partition": 3}
STAGED_PART = WireStagedPart(**OF_PARTITION, hold=WireHoldId(producer="1" * 16, first=0), records=1)
UNIT_BLOCK = WireUnitBlock(key="memq/held/k", offset=0, length=1)
STAGED: dict[str, Any] = {"writer": "w", "batch_id": 1, "store": "main", "manifest": 1, "pieces_total": 1, "first": 0}
CLUSTER, TOPIC, PARTITION, GROUP = (
    [("cluster", "")],
    [("topic", "clicks")],
    [("partition", "clicks/3")],
    [("group", "g")],
)
VIEWS = [("topic", "views")]
PAY = [("transactional-id", "pay"), *GROUP]
SHOP = [("producer-group", "shop")]
QUEUE = [("queue", "jobs")]
POP = [("queue", "clicks@jobs"), ("topic", "clicks")]
ITEMS = [WireLeasedItems("1" * 16, 1, [0, 1])]
TRANSACTION = WireTransaction(name="pay", group="g", instance=7, number=1)
EXAMPLES: dict[type, tuple[Any, list[tuple[str, str]]]] = {
    Open: (Open(**OF_PARTITION, producer="1" * 16, acks=2, sequence=0), PARTITION),
    Close: (Close(next_sequence=0), PARTITION),
    Forward: (Forward(**OF_PARTITION, absent_ms=0), PARTITION),
    BeginProducer: (BeginProducer(**OF_PARTITION, producer="1" * 16), PARTITION),
    PublishStaged: (PublishStaged(**OF_PARTITION, **STAGED, pieces=[]), PARTITION),
    MetadataRequest: (MetadataRequest(topics=["clicks", "views"]), [*TOPIC, *VIEWS]),
    ReadRequest: (ReadRequest(store="main", key="a/b", offset=0, length=1), [("object", "main/a/b")]),
    CreateTopic: (CreateTopic(name="clicks"), TOPIC),
    AlterTopic: (AlterTopic(name="clicks"), TOPIC),
    DeleteTopic: (DeleteTopic(name="clicks"), TOPIC),
    TruncateTopic: (TruncateTopic(name="clicks", topic_id=ID, before={3: 1}), TOPIC),
    SealTopic: (SealTopic(name="clicks", topic_id=ID), TOPIC),
    SettleTopic: (SettleTopic(broker="b", topic="clicks", topic_id=ID), TOPIC),
    TrimCompacted: (TrimCompacted(topic="clicks", topic_id=ID), TOPIC),
    PollEntries: (PollEntries(partitions=[PollFrom(partition=REF, offset=0)] * 2), PARTITION * 2),
    PollTime: (PollTime(partition=REF, time_ms=0), PARTITION),
    PollSpans: (PollSpans(partitions=[REF]), PARTITION),
    CommitRequest: (CommitRequest(group="g", positions=[LEFT], fetch=[OTHER]), [*GROUP, *TOPIC, *VIEWS]),
    JoinRequest: (
        JoinRequest(group="g", member="m", partitions=[REF] * 2, ranges=[RANGES]),
        [*GROUP, *TOPIC, *VIEWS],
    ),
    HeartbeatRequest: (HeartbeatRequest(group="g", member="m", generation=1), GROUP),
    ListGroups: (ListGroups(), CLUSTER),
    ListFormerGroups: (ListFormerGroups(), CLUSTER),
    MoveGroup: (MoveGroup(group="g"), GROUP),
    DescribeGroup: (DescribeGroup(group="g"), GROUP),
    DeleteGroup: (DeleteGroup(group="g"), GROUP),
    DescribeCluster: (DescribeCluster(), CLUSTER),
    DescribeClients: (DescribeClients(broker="b"), CLUSTER),
    DescribeLoad: (DescribeLoad(broker="b"), CLUSTER),
    DescribeHeld: (DescribeHeld(broker="b", topic="clicks", topic_id=ID, sought=[SOUGHT] * 2), TOPIC),
    DrainBroker: (DrainBroker(broker="b"), CLUSTER),
    ReportSuspicion: (ReportSuspicion(address="h:1"), CLUSTER),
    BeginTransactions: (BeginTransactions(name="pay", group="g", token="1" * 16, timeout_ms=60_000), PAY),
    HoldTransaction: (
        HoldTransaction(transaction=TRANSACTION, blocks=[WireTransactionBlock(**OF_PARTITION, block=b"b")]),
        [*PAY, *PARTITION],
    ),
    HoldStagedParts: (
        HoldStagedParts(transaction=TRANSACTION, writer="w", batch_id=1, parts=[STAGED_PART] * 2),
        [*PAY, *PARTITION],
    ),
    EndTransaction: (
        EndTransaction(transaction=TRANSACTION, commit=True, blocks=1, before=[LEFT], after=[REACHED] * 2),
        [*PAY, *TOPIC, *VIEWS],
    ),
    PrepareTransaction: (
        PrepareTransaction(transaction=TRANSACTION, blocks=1, producer_group="shop", note=b"", began_ms=1),
        [*PAY, *SHOP],
    ),
    AskUndecided: (AskUndecided(producer_group="shop"), SHOP),
    AnswerUndecided: (AnswerUndecided(transaction=TRANSACTION, producer_group="shop", commit=True), SHOP),
    AwaitTransaction: (AwaitTransaction(transaction=TRANSACTION), PAY),
    ListTransactions: (ListTransactions(), CLUSTER),
    SettleTransaction: (SettleTransaction(name="pay", group="g", commit=False), PAY),
    HoldRecords: (HoldRecords(**OF_PARTITION, sent_ms=0, holds=[WireHold(block=b"b", due_ms=1)]), PARTITION),
    CancelHolds: (CancelHolds(**OF_PARTITION, holds=[WireHoldId(producer="1" * 16, first=0)]), PARTITION),
    DescribeHolds: (DescribeHolds(topic="clicks", topic_id=ID), TOPIC),
    ListDelayed: (ListDelayed(), CLUSTER),
    EnqueueItems: (EnqueueItems(queue="jobs", blocks=[]), QUEUE),
    DequeueItems: (
        DequeueItems(queues={"jobs": 1, "clicks@jobs": 2}, wait_ms=0, acks={"jobs": ITEMS, "mails": ITEMS}),
        [*QUEUE, *POP, ("queue", "mails")],
    ),
    AwaitItems: (AwaitItems(queues=["jobs", "clicks@jobs"], wait_ms=0), [*QUEUE, *POP]),
    AckItems: (AckItems(queue="jobs", items=ITEMS), QUEUE),
    NackItems: (NackItems(queue="jobs", items=ITEMS, after_ms=0, note=b""), QUEUE),
    ExtendItems: (ExtendItems(queue="jobs", items=ITEMS, lease_ms=1_000), QUEUE),
    CancelItems: (CancelItems(queue="jobs", items=ITEMS), QUEUE),
    RedriveItems: (RedriveItems(queue="jobs", items=ITEMS), QUEUE),
    PurgeItems: (PurgeItems(queue="jobs", items=ITEMS), QUEUE),
    GetItems: (GetItems(queue="clicks@jobs", items=ITEMS), POP),
    PeekItems: (PeekItems(queue="clicks@jobs", count=1), POP),
    ListDeadItems: (ListDeadItems(queue="jobs", count=1), QUEUE),
    CountEnds: (CountEnds(), CLUSTER),
    ListQueues: (ListQueues(), CLUSTER),
    BeginPop: (
        BeginPop(queue="clicks@jobs", topic_id=ID, lease_ms=1_000, attempts_max=0, positions=[]),
        POP,
    ),
    RemovePop: (RemovePop(queue="jobs"), QUEUE),
    ListPops: (ListPops(), CLUSTER),
    ListPermissions: (ListPermissions(), CLUSTER),
    ChangePermissions: (ChangePermissions(), CLUSTER),
    ListQuotas: (ListQuotas(), CLUSTER),
    ChangeQuotas: (ChangeQuotas(), CLUSTER),
    ShareQuotas: (ShareQuotas(broker="b"), CLUSTER),
    DescribeQuota: (DescribeQuota(broker="b", kind="principal", name="ann"), CLUSTER),
    CheckPermission: (CheckPermission(principal="ann", permission="read", kind="topic", name="clicks"), CLUSTER),
    ListUsers: (ListUsers(), CLUSTER),
    ListNamespaces: (ListNamespaces(), CLUSTER),
    ChangeNamespaces: (ChangeNamespaces(), CLUSTER),
    ChangeUsers: (ChangeUsers(), CLUSTER),
    ReleaseUnit: (
        ReleaseUnit(**OF_PARTITION, shard="1" * 16, number=1, behind=0, blocks=[UNIT_BLOCK]),
        PARTITION,
    ),
    ReleaseStagedUnit: (
        ReleaseStagedUnit(**OF_PARTITION, shard="1" * 16, number=1, behind=0, manifest="c/staged/w/commits/1"),
        PARTITION,
    ),
}


@pytest.mark.parametrize("row", table().rows, ids=lambda row: row.name)
def test_each_row_names_its_resources(row: Operation[Any]) -> None:
    ask, resources = EXAMPLES[row.message]
    stream = SimpleNamespace(target=SimpleNamespace(topic=SimpleNamespace(name="clicks"), partition=3))
    call = call_of(ask, SimpleNamespace(streams={5: stream}), 5)
    assert [(each.kind.value, each.name) for each in row.resources(call)] == resources


def test_metadata_of_all_topics_asks_the_cluster_and_a_stream_that_is_not_open_is_no_resource() -> None:
    everything = table().of(MetadataRequest).resources(call_of(MetadataRequest()))
    assert [(each.kind.value, each.name) for each in everything] == CLUSTER
    nothing = call_of(Close(next_sequence=0), SimpleNamespace(streams={}), 5)
    assert table().of(Close).resources(nothing) == []


def test_an_unknown_operation_is_refused() -> None:
    for api in (Api.WRITE, Api.HELLO, Api.ACK, 99):
        with pytest.raises(ProtocolError, match="is no operation"):
            table().find(Frame(api, 0, 0, 1, b"{}"))
    with pytest.raises(ProtocolError, match="bad AdminRequest message"):
        table().find(Frame(Api.ADMIN, 0, 0, 1, b'{"ask": {"op": "grow-wings"}}'))
    without_drain = Operations(row for row in table().rows if row.message is not DrainBroker)
    with pytest.raises(ProtocolError, match="DrainBroker is no operation"):
        without_drain.find(Frame(Api.ADMIN, 0, 0, 1, encode_message(AdminRequest(ask=DrainBroker(broker="b")))))


def test_only_a_poll_for_entries_waits() -> None:
    assert [row.name for row in table().rows if row.prepare is not None] == ["poll-entries"]


@pytest.mark.parametrize(
    ("ask", "size"),
    [
        (ReadRequest(store="main", key="k", offset=5, length=700), 700),
        (ReadRequest(store="main", key="k", offset=5, length=1 << 40), READ_BYTES_MAX),
        (ReadRequest(store="main", key="k", offset=5, length=0), 0),
        (ReadRequest(store="main", key="k", offset=5, length=-3), 0),
        (PollEntries(partitions=[], bytes_max=900), 900),
        (PollEntries(partitions=[], bytes_max=1 << 40), POLL_BYTES_MAX),
        (PollEntries(partitions=[], bytes_max=-1), 0),
        (PollSpans(partitions=[]), 0),
        (PollTime(partition=REF, time_ms=0), 0),
    ],
)
def test_an_answer_is_lent_the_memory_that_it_may_need_and_a_refusal_none(ask: msgspec.Struct, size: int) -> None:
    assert table().of(type(ask)).answer_bytes(ask) == size
