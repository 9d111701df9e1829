"""The messages about held records: to hold, cancel, release and count them."""

from __future__ import annotations

import msgspec

from memq.protocol.wire_types import Int64, ServiceQuestion


class WireHold(msgspec.Struct, kw_only=True):
    """A block that is to be held until `due_ms` (Unix ms)."""

    block: bytes
    due_ms: Int64


class HoldRecords(msgspec.Struct, tag_field="op", tag="hold-records", kw_only=True):
    """Hold blocks for a write partition. They were first sent at `sent_ms`, on the connection's clock."""

    topic: str
    topic_id: str
    partition: Int64
    sent_ms: Int64
    holds: list[WireHold]


class WireHoldId(msgspec.Struct, frozen=True, kw_only=True):
    """A hold: its producer (16 hex digits), and the sequence of its first record."""

    producer: str
    first: Int64


class CancelHolds(msgspec.Struct, tag_field="op", tag="cancel-holds", kw_only=True):
    """Drop held blocks of a write partition that are not released yet."""

    topic: str
    topic_id: str
    partition: Int64
    holds: list[WireHoldId]


class DescribeHolds(ServiceQuestion, tag_field="op", tag="describe-holds", kw_only=True):
    """Show how many delayed blocks of a topic wait.

    With `undelivered`, the answer also has partitions with other blocks: those of transactions, and released ones that
    are not known to be in the log. With `units`, it has the units of all partitions. With `hold`, the answer has the
    state of that hold alone, if a service partition knows it. With `of_topic`, it has none for a hold of another topic,
    and none for one that has ended. The broker of the client sets that if the client may not describe all topics.
    """

    topic: str
    topic_id: str
    undelivered: bool = False
    units: bool = False
    hold: WireHoldId | None = None
    of_topic: bool = False


class WireUnits(msgspec.Struct, kw_only=True):
    """The units of a shard (16 hex digits) for a partition.

    These are the last number and the records of all units, and of those that are done. Done is a unit that is known to
    be in the log of the partition. All units below a done one are done. `dropped` counts the delayed records that were
    cancelled.
    """

    shard: str
    released: Int64
    released_records: Int64
    done: Int64
    done_records: Int64
    dropped: Int64 = 0


class WireWaiting(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How many held blocks of a partition wait, and when the next one is due (Unix ms).

    `units` has those of the shard that answers, if the request asks for them.
    """

    partition: Int64
    blocks: Int64
    next_ms: Int64
    units: WireUnits | None = None


class ListDelayed(ServiceQuestion, tag_field="op", tag="list-delayed", kw_only=True):
    """Show how many blocks are held of each topic; without `proven`, as their owners know them now."""

    proven: bool = False


class WireDelayedTopic(msgspec.Struct, kw_only=True):
    """How many held blocks of a topic wait, and when the next one is due (Unix ms)."""

    topic: str
    topic_id: str
    blocks: Int64
    next_ms: Int64


class WireUnitBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block of a unit: its object, its bytes there, and its identity.

    `hold` is None from a broker of an earlier release, which does not say the identity.
    """

    key: str
    offset: Int64
    length: Int64
    hold: WireHoldId | None = None


class ReleaseUnit(msgspec.Struct, tag_field="op", tag="release-unit", kw_only=True):
    """Take unit `number` of a shard into the log of a partition.

    The request is of the broker that has the shard. `shard` has 16 hex digits. The log had all units up to number
    `behind` once. `records` counts those of all units of the partition up to this one; 0: unknown.
    """

    topic: str
    topic_id: str
    partition: Int64
    shard: str
    number: Int64
    behind: Int64
    blocks: list[WireUnitBlock]
    records: Int64 = 0


class ReleaseStagedUnit(msgspec.Struct, tag_field="op", tag="release-staged-unit", kw_only=True):
    """Publish the pieces of a manifest for a partition, as unit `number` of a shard.

    See `ReleaseUnit`.
    """

    topic: str
    topic_id: str
    partition: Int64
    shard: str
    number: Int64
    behind: Int64
    manifest: str
    records: Int64 = 0
