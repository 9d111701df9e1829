"""The messages about queue items: to enqueue, lease, end and count them.

The bytes of blocks follow the message of a frame, one after the other, in the order in which the message names them.
"""

from __future__ import annotations

import msgspec

from memq.protocol.wire_types import Bits64, Int64, ServiceQuestion


class WireQueueBlock(msgspec.Struct, kw_only=True):
    """A block of `length` bytes; all its items have the same terms. Times are in ms.

    0: no delay, no life, no limit of attempts. `lease_ms` 0: each item comes at most once.
    """

    length: Int64
    priority: Int64
    after_ms: Int64
    life_ms: Int64
    lease_ms: Int64
    attempts_max: Int64


class EnqueueItems(msgspec.Struct, tag_field="op", tag="enqueue-items", kw_only=True):
    """Put blocks of items into a queue. A block that comes again changes nothing."""

    queue: str
    blocks: list[WireQueueBlock]


class DequeueItems(msgspec.Struct, tag_field="op", tag="dequeue-items", kw_only=True):
    """Lease items of queues, at most as many of each; wait up to `wait_ms` for the first one.

    The client has the blocks `known`, so the answer names them without their bytes.
    """

    queues: dict[str, Int64]
    wait_ms: Int64
    known: list[Bits64] = []


class AwaitItems(msgspec.Struct, tag_field="op", tag="await-items", kw_only=True):
    """Wait up to `wait_ms` until a queue of this broker has a ready item. Another broker asks so."""

    queues: list[str]
    wait_ms: Int64


class WireGrantedItems(msgspec.Struct, frozen=True, array_like=True):
    """Leased items of a block, from `begin` to `end` (exclusive).

    Each has had `attempt` grants, and `note` with its last nack.
    """

    begin: Int64
    end: Int64
    attempt: Int64
    note: bytes = b""


class WireGrant(msgspec.Struct, kw_only=True):
    """Leased items of one block. `grant` is the fencing token.

    The lease has run for the worker since it sent the request, and `waited_ms` after that. The block has `length`
    bytes, 0 for one that the client has.
    """

    queue: str
    block_id: Bits64
    grant: Int64
    lease_ms: Int64
    waited_ms: Int64
    items: list[WireGrantedItems]
    length: Int64


class WireLeasedItems(msgspec.Struct, frozen=True, array_like=True):
    """Items of a block, and the number of the grant under which their worker has them.

    `ranges` has begin and end (exclusive) of each range of their numbers, in order.
    """

    block_id: Bits64
    grant: Int64
    ranges: list[Int64]


class AckItems(msgspec.Struct, tag_field="op", tag="ack-items", kw_only=True):
    """End items that are done."""

    queue: str
    items: list[WireLeasedItems]


class NackItems(msgspec.Struct, tag_field="op", tag="nack-items", kw_only=True):
    """Give items back. They come again after `after_ms`, with the note."""

    queue: str
    items: list[WireLeasedItems]
    after_ms: Int64
    note: bytes


class ExtendItems(msgspec.Struct, tag_field="op", tag="extend-items", kw_only=True):
    """Let leases last `lease_ms` from now on."""

    queue: str
    items: list[WireLeasedItems]
    lease_ms: Int64


class CancelItems(msgspec.Struct, tag_field="op", tag="cancel-items", kw_only=True):
    """End items that no worker has."""

    queue: str
    items: list[WireLeasedItems]


class ListQueues(ServiceQuestion, tag_field="op", tag="list-queues", kw_only=True):
    """Show the queues that have items, and how many."""


class WireQueue(msgspec.Struct, kw_only=True):
    """How many items of a queue are in each state. The oldest ready one was due at `oldest_ms` (Unix ms)."""

    queue: str
    ready: Int64
    leased: Int64
    delayed: Int64
    dead: Int64
    oldest_ms: Int64


class QueueAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer to a request about queues.

    `grants` are leased items, `ready` is whether a queue has some. `outcomes` has the ends of the items of a request in
    their order, each with the number of items that have it. `queues` are those that have items.
    """

    grants: list[WireGrant] = []
    ready: bool = False
    outcomes: list[tuple[str, Int64]] = []
    queues: list[WireQueue] = []
