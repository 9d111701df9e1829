"""The messages about transactions: of their producers, and of operators."""

from __future__ import annotations

import msgspec

from memq.protocol.group_messages import WireCommitted
from memq.protocol.hold_messages import WireHoldId
from memq.protocol.wire_types import Bits64, Int64, ServiceQuestion


class BeginTransactions(msgspec.Struct, tag_field="op", tag="begin-transactions", kw_only=True):
    """Begin a new instance of a transactional producer: earlier ones are fenced.

    `group` has the positions that it moves; "": none. The same `token` begins once.
    """

    name: str
    group: str
    token: Bits64
    timeout_ms: Int64


class WireTransaction(msgspec.Struct, frozen=True, kw_only=True):
    """Transaction `number` of an instance of a transactional producer."""

    name: str
    group: str
    instance: Int64
    number: Int64


class WireTransactionBlock(msgspec.Struct, kw_only=True):
    """A block of a transaction for a write partition."""

    topic: str
    topic_id: str
    partition: Int64
    block: bytes


class HoldTransaction(msgspec.Struct, tag_field="op", tag="hold-transaction", kw_only=True):
    """Hold blocks until their transaction ends."""

    transaction: WireTransaction
    blocks: list[WireTransactionBlock]


class WireStagedPart(msgspec.Struct, kw_only=True):
    """The part of a transaction for a write partition: its pieces in a manifest, with so many records.

    `hold` identifies the part: a repeated request holds it once.
    """

    topic: str
    topic_id: str
    partition: Int64
    hold: WireHoldId
    records: Int64


class HoldStagedParts(msgspec.Struct, tag_field="op", tag="hold-staged-parts", kw_only=True):
    """Hold parts of a transaction that lie in staged objects, until it ends.

    Batch `batch_id` of `writer` has them. A staged part replaces the blocks that are held for its partition.
    """

    transaction: WireTransaction
    writer: str
    batch_id: Int64
    parts: list[WireStagedPart]


class PrepareTransaction(msgspec.Struct, tag_field="op", tag="prepare-transaction", kw_only=True):
    """All `blocks` blocks of a transaction are held: from now on only a decision ends it.

    `producer_group` is asked for it after the time-out. `note` and `began_ms` (of the producer's clock) are for the one
    that answers.
    """

    transaction: WireTransaction
    blocks: Int64
    producer_group: str
    note: bytes
    began_ms: Int64


class AskUndecided(msgspec.Struct, tag_field="op", tag="ask-undecided", kw_only=True):
    """Return the transactions that a producer group is to decide now. Each question is given once.

    `transactional_id` is that of the member: it is the first one that is asked about its own transactions.
    """

    producer_group: str
    transactional_id: str = ""


class AnswerUndecided(msgspec.Struct, tag_field="op", tag="answer-undecided", kw_only=True):
    """A producer group commits a transaction, or rolls it back."""

    transaction: WireTransaction
    producer_group: str
    commit: bool


class WireQuestion(msgspec.Struct, kw_only=True):
    """A transaction that a producer group is to decide; it is asked for the `tries`-th time."""

    transaction: WireTransaction
    topics: list[str]
    note: bytes
    began_ms: Int64
    tries: Int64


class EndTransaction(msgspec.Struct, tag_field="op", tag="end-transaction", kw_only=True):
    """Commit a transaction of `blocks` blocks, or roll it back.

    A commit may move positions of the group from `before` to `after`, as a member of a generation.
    """

    transaction: WireTransaction
    commit: bool
    blocks: Int64 = 0
    member: str = ""
    generation: Int64 = -1
    before: list[WireCommitted] = []
    after: list[WireCommitted] = []


class AwaitTransaction(msgspec.Struct, tag_field="op", tag="await-transaction", kw_only=True):
    """Wait until all records of a committed transaction are in their logs.

    The answer comes after a few seconds, also if that is not so yet.
    """

    transaction: WireTransaction


class ListTransactions(ServiceQuestion, tag_field="op", tag="list-transactions", kw_only=True):
    """List the open transactions; without `proven`, as their owners know them now."""

    proven: bool = True


class SettleTransaction(msgspec.Struct, tag_field="op", tag="settle-transaction", kw_only=True):
    """Commit the open transaction of a producer as it is, or roll it back: for operators.

    `transaction`, the instance and number with a dot, names one of several.
    """

    name: str
    group: str
    commit: bool
    transaction: str = ""


class WireOpenTransaction(msgspec.Struct, kw_only=True):
    """An open transaction: its blocks by topic, and for how long the present owner knows it.

    A prepared one has a `producer_group`, which was asked `tries` times.
    """

    name: str
    group: str
    instance: Int64
    number: Int64
    open_ms: Int64
    timeout_ms: Int64
    blocks: dict[str, Int64]
    producer_group: str = ""
    tries: Int64 = 0
    parked: bool = False
