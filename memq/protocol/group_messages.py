"""The messages about groups: members, their positions, and what operators ask."""

from __future__ import annotations

import msgspec

from memq.protocol.messages import PartitionRef
from memq.protocol.wire_types import Int64, ServiceQuestion


class WireCommitted(msgspec.Struct, kw_only=True):
    """A committed position of a group, with totals, mark, covered batches and tried records (`Committed`)."""

    partition: PartitionRef
    pointer_offset: Int64
    record_index: Int64
    records: Int64 = 0
    bytes: Int64 = 0
    mark: Int64 = 0
    covered: tuple[tuple[Int64, Int64, tuple[Int64, ...]], ...] = ()
    tried: tuple[tuple[Int64, Int64], ...] = ()


class CommitRequest(msgspec.Struct, kw_only=True):
    """Store positions (all or none); with `fetch`, return those of these partitions instead.

    `number` counts the commits of the member from 1; 0: the member does not count. With `force`, a commit from outside
    the group removes its members first.
    """

    group: str
    member: str = ""
    generation: Int64 = -1
    number: Int64 = 0
    force: bool = False
    positions: list[WireCommitted] = []
    fetch: list[PartitionRef] = []


class CommitAnswer(msgspec.Struct, kw_only=True):
    """The requested committed positions."""

    positions: list[WireCommitted] = []


class WireRanges(msgspec.Struct, kw_only=True):
    """Read partitions of one topic: `bounds` has begin and end (exclusive) of each range, in order."""

    topic: str
    topic_id: str
    bounds: tuple[Int64, ...]


class JoinRequest(msgspec.Struct, kw_only=True):
    """Join a group with the read partitions to share; with `leave`, leave it.

    The partitions are a list, or `ranges` in order of topics. Then the session is `session_ms`, and
    `session_timeout_ms` is 0: a broker that does not know ranges refuses that (InvalidRequestError), and the member
    joins with a list.
    """

    group: str
    member: str
    partitions: list[PartitionRef] = []
    session_timeout_ms: Int64 = 10_000
    leave: bool = False
    ranges: list[WireRanges] = []
    session_ms: Int64 = 0


class HeartbeatRequest(msgspec.Struct, kw_only=True):
    """Report that the member is alive, and the partitions that it released.

    Without these, the owner of the group may answer after up to `wait_ms`, or when the member's assignment changes.
    With `leave` the member leaves, unless it has joined after `generation`. A broker of an earlier release takes that
    for a heartbeat: the member then leaves by its session time-out.
    """

    group: str
    member: str
    generation: Int64
    released: list[PartitionRef] = []
    wait_ms: Int64 = 0
    leave: bool = False


class MembershipAnswer(msgspec.Struct, kw_only=True):
    """Answer to JOIN and HEARTBEAT, as `Membership`: `positions` are of partitions that are new there.

    `unchanged`: the assignment is that of the generation in the request, and the other fields say nothing; only for
    requests with `wait_ms`. `owner` is the address of the group's owner. Heartbeats that it gets directly may wait, and
    `waits` says so; other brokers forward them without a wait. `session_ms` is the member's session time-out, 0 if the
    broker is of an earlier release.
    """

    generation: Int64
    assigned: list[PartitionRef] = []
    revoking: list[PartitionRef] = []
    positions: list[WireCommitted] = []
    unchanged: bool = False
    waits: bool = False
    owner: str = ""
    session_ms: Int64 = 0


class ListGroups(ServiceQuestion, tag_field="op", tag="list-groups", kw_only=True):
    """List all groups. Without `proven`, coordinators write no proof into their logs."""

    proven: bool = True


class DescribeGroup(msgspec.Struct, tag_field="op", tag="describe-group", kw_only=True):
    """Show a group's members and positions. Without `proven`, its log gets no proof."""

    group: str
    proven: bool = True


class DeleteGroup(msgspec.Struct, tag_field="op", tag="delete-group", kw_only=True):
    """Delete a group that has no members."""

    group: str


class ListFormerGroups(msgspec.Struct, tag_field="op", tag="list-former-groups", kw_only=True):
    """List the groups that an earlier release kept in the queue."""


class MoveGroup(msgspec.Struct, tag_field="op", tag="move-group", kw_only=True):
    """Move a group from the queue to its state log; with `dry_run`, only show it as it is in the queue."""

    group: str
    dry_run: bool = False


class WireMember(msgspec.Struct, kw_only=True):
    """A member of a group and its partitions."""

    member: str
    assigned: list[PartitionRef] = []


class WireGroup(msgspec.Struct, kw_only=True):
    """A group, for operators."""

    group: str
    generation: Int64 = 0
    members: list[WireMember] = []
    positions: list[WireCommitted] = []
