"""The messages about pop groups: queues that have the records of a plain topic as items."""

from __future__ import annotations

import msgspec

from memq.protocol.wire_types import Int64, ServiceQuestion


class WirePopPosition(msgspec.Struct, frozen=True, array_like=True):
    """The next record of a pop group in a read partition.

    `mark` is that of the pointer before it; 0 if it is unknown.
    """

    partition: Int64
    offset: Int64
    index: Int64 = 0
    mark: Int64 = 0


class BeginPop(msgspec.Struct, tag_field="op", tag="begin-pop", kw_only=True):
    """Begin a pop group; `queue` is `topic@group`.

    One that exists keeps its positions, and gets these terms.
    """

    queue: str
    topic_id: str
    lease_ms: Int64
    attempts_max: Int64
    positions: list[WirePopPosition]


class RemovePop(msgspec.Struct, tag_field="op", tag="remove-pop", kw_only=True):
    """Remove a pop group with its items and positions."""

    queue: str


class ListPops(ServiceQuestion, tag_field="op", tag="list-pops", kw_only=True):
    """Show the pop groups. Without `proven`, their owners prove nothing first."""

    proven: bool = True


class WirePop(msgspec.Struct, kw_only=True):
    """A pop group. `items` of it are read and not over; dead ones do not count."""

    queue: str
    topic_id: str
    lease_ms: Int64
    attempts_max: Int64
    items: Int64
    positions: list[WirePopPosition]
