"""The messages about queue items: to enqueue, lease, end and count them."""

from __future__ import annotations

import msgspec

from memq.protocol.wire_types import Bits64, Int64, ServiceQuestion


class WireQueueBlock(msgspec.Struct, kw_only=True):
    """A block of items with the same terms; times in ms. 0: no delay, no life, no limit of attempts.

    `lease_ms` 0: each item comes at most once.
    """

    block: bytes
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
    """Lease items of queues, at most as many of each; wait up to `wait_ms` for the first one."""

    queues: dict[str, Int64]
    wait_ms: Int64


class AwaitItems(msgspec.Struct, tag_field="op", tag="await-items", kw_only=True):
    """Wait up to `wait_ms` until a queue of this broker has a ready item. Another broker asks so."""

    queues: list[str]
    wait_ms: Int64


class WireGrantedItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A leased item: its number in its block, how many grants it has had, and the note of the last nack."""

    number: Int64
    attempt: Int64
    note: bytes = b""


class WireGrant(msgspec.Struct, kw_only=True):
    """Leased items of one block. `grant` is the fencing token.

    The lease has run for the worker since it sent the request, and `waited_ms` after that.
    """

    queue: str
    block_id: Bits64
    grant: Int64
    lease_ms: Int64
    waited_ms: Int64
    items: list[WireGrantedItem]
    block: bytes


class WireLeasedItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item, by block and number, and the number of the grant under which its worker has it."""

    block_id: Bits64
    number: Int64
    grant: Int64


class AckItems(msgspec.Struct, tag_field="op", tag="ack-items", kw_only=True):
    """End items that are done."""

    queue: str
    items: list[WireLeasedItem]


class NackItems(msgspec.Struct, tag_field="op", tag="nack-items", kw_only=True):
    """Give items back. They come again after `after_ms`, with the note. `kind` is one of `NackKind`."""

    queue: str
    items: list[WireLeasedItem]
    after_ms: Int64
    note: bytes
    kind: str = "failed"


class ExtendItems(msgspec.Struct, tag_field="op", tag="extend-items", kw_only=True):
    """Let leases last `lease_ms` from now on."""

    queue: str
    items: list[WireLeasedItem]
    lease_ms: Int64


class CancelItems(msgspec.Struct, tag_field="op", tag="cancel-items", kw_only=True):
    """End items that no worker has."""

    queue: str
    items: list[WireLeasedItem]


class ListQueues(ServiceQuestion, tag_field="op", tag="list-queues", kw_only=True):
    """Show the queues that have items, and how many. Without `proven`, their owners prove nothing first."""

    proven: bool = True


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

    `grants` are leased items, `ready` is whether a queue has some. `outcomes` has the end of each item of a request.
    `queues` are those that have items.
    """

    grants: list[WireGrant] = []
    ready: bool = False
    outcomes: list[str] = []
    queues: list[WireQueue] = []
