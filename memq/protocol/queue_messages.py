"""The messages about queue items: to enqueue, lease, end and count them.

The bytes of blocks follow the message of a frame, one after the other, in the order in which the message names them.
"""

from __future__ import annotations

import msgspec

from memq.limits import QUEUE_ITEMS_PER_REQUEST_MAX
from memq.protocol.pop_messages import WirePop
from memq.protocol.wire_types import Bits64, Int64, ServiceQuestion


class WireQueueBlock(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A block of `length` bytes; all its items have the same terms. Times are in ms.

    0: no delay, no life, no limit of attempts. `lease_ms` 0: each item comes at most once. `ordered`: one item of `key`
    is leased at a time. A block with `dedupe_key` has one item.
    """

    length: Int64
    priority: Int64
    after_ms: Int64
    life_ms: Int64
    lease_ms: Int64
    attempts_max: Int64
    key: str = ""
    ordered: bool = False
    dedupe_key: str = ""
    dedupe_ms: Int64 = 0


class EnqueueItems(msgspec.Struct, tag_field="op", tag="enqueue-items", kw_only=True):
    """Put blocks of items into a queue. A block that comes again changes nothing."""

    queue: str
    blocks: list[WireQueueBlock]


class AwaitItems(msgspec.Struct, tag_field="op", tag="await-items", kw_only=True):
    """Wait up to `wait_ms` until a queue of this broker has a ready item. Another broker asks so.

    Without `once`, an item that is delivered at most once does not count.
    """

    queues: list[str]
    wait_ms: Int64
    once: bool = True


class WireGrantedItems(msgspec.Struct, frozen=True, array_like=True):
    """Leased items of a block, from `begin` to `end` (exclusive).

    Each has had `attempt` grants, and `note` with its last nack.
    """

    begin: Int64
    end: Int64
    attempt: Int64
    note: bytes = b""


class WireGrant(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Leased items of one block. `grant` is the fencing token.

    The lease has run for the worker since `waited_ms` after it sent the request. That is negative for a lease of an
    earlier request. The block has `length` bytes, 0 for one that the client has. A block of a pop group has been read
    `at` a read partition, a pointer offset and the record index of its first record.
    """

    queue: str
    block_id: Bits64
    grant: Int64
    lease_ms: Int64
    waited_ms: Int64
    items: list[WireGrantedItems]
    length: Int64
    at: tuple[Int64, Int64, Int64] | None = None


class WireLeasedItems(msgspec.Struct, frozen=True, array_like=True):
    """Items of a block, and the number of the grant under which their worker has them.

    `ranges` has begin and end (exclusive) of each range of their numbers, in order.
    """

    block_id: Bits64
    grant: Int64
    ranges: list[Int64]


class DequeueItems(msgspec.Struct, tag_field="op", tag="dequeue-items", kw_only=True, omit_defaults=True):
    """Lease items of queues, at most as many of each; wait up to `wait_ms` for the first one.

    The client has the blocks `known`, so the answer names them without their bytes. The first block counts in any
    case; with `bytes_max` the others come as long as all have so many bytes. 0: as many as the broker allows.
    All queues together give at most `items_max` items, 0 for as many as each may, and at most `once_max` items that are
    delivered at most once.

    `acks` has items that are done, by queue. The answer has their outcomes in this order. It comes when they count,
    also if no item is ready. `request` is the identity of the request, 0 for none. If its answer was lost, it comes
    `again`: it then gets the items that it has leased, and that are leased still, and no others, without a wait.
    """

    queues: dict[str, Int64]
    wait_ms: Int64
    known: list[Bits64] = []
    bytes_max: Int64 = 0
    acks: dict[str, list[WireLeasedItems]] = {}
    items_max: Int64 = 0
    once_max: Int64 = QUEUE_ITEMS_PER_REQUEST_MAX
    request: Int64 = 0
    again: bool = False


class AckItems(msgspec.Struct, tag_field="op", tag="ack-items", kw_only=True):
    """End items that are done."""

    queue: str
    items: list[WireLeasedItems]


class NackItems(msgspec.Struct, tag_field="op", tag="nack-items", kw_only=True):
    """Give items back. They come again after `after_ms`, with the note. `kind` is one of `NackKind`."""

    queue: str
    items: list[WireLeasedItems]
    after_ms: Int64
    note: bytes
    kind: str = "failed"


class ExtendItems(msgspec.Struct, tag_field="op", tag="extend-items", kw_only=True):
    """Let leases last `lease_ms` from now on."""

    queue: str
    items: list[WireLeasedItems]
    lease_ms: Int64


class CancelItems(msgspec.Struct, tag_field="op", tag="cancel-items", kw_only=True):
    """End items that no worker has."""

    queue: str
    items: list[WireLeasedItems]


class RedriveItems(msgspec.Struct, tag_field="op", tag="redrive-items", kw_only=True):
    """Let dead items be ready again. Their attempts begin again."""

    queue: str
    items: list[WireLeasedItems]


class PurgeItems(msgspec.Struct, tag_field="op", tag="purge-items", kw_only=True):
    """End dead items, and no others."""

    queue: str
    items: list[WireLeasedItems]


class GetItems(msgspec.Struct, tag_field="op", tag="get-items", kw_only=True):
    """Show items with their payloads."""

    queue: str
    items: list[WireLeasedItems]


class PeekItems(msgspec.Struct, tag_field="op", tag="peek-items", kw_only=True):
    """Show the items that a dequeue would lease now, in its order, with their payloads."""

    queue: str
    count: Int64


class ListDeadItems(msgspec.Struct, tag_field="op", tag="list-dead-items", kw_only=True):
    """Show dead items of a queue behind `after`, a block and a number, in the order of their ids."""

    queue: str
    count: Int64
    after: tuple[Bits64, Int64] | None = None


class WireItem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item now: see `memq.queues.views.SeenItem`."""

    block_id: Bits64
    number: Int64
    state: str
    attempts: Int64 = 0
    note: bytes = b""
    due_ms: Int64 = 0
    left_ms: Int64 = 0
    priority: Int64 = 0
    expires_ms: Int64 = 0
    key: str = ""


class CountEnds(ServiceQuestion, tag_field="op", tag="count-ends", kw_only=True):
    """Show how many items have ended, by outcome."""


class ListQueues(ServiceQuestion, tag_field="op", tag="list-queues", kw_only=True):
    """Show the queues that have items, and how many. Their names begin with `prefix`.

    Without `proven`, their owners prove nothing first.
    """

    prefix: str = ""
    proven: bool = True


class WireQueue(msgspec.Struct, kw_only=True):
    """How many items of a queue are in each state. The oldest ready one was due at `oldest_ms` (Unix ms).

    `rates` has items per second by event (`memq.queues.meter.QueueEvents`) of queues that were used lately.
    """

    queue: str
    ready: Int64
    leased: Int64
    delayed: Int64
    dead: Int64
    oldest_ms: Int64
    rates: dict[str, float] = {}


class QueueAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The answer to a request about queues.

    `grants` are leased items, `ready` is whether a queue has some. `outcomes` has the ends of the items of a request in
    their order, each with the number of items that have it. `queues` are those that have items. `firsts` has for each
    block of an enqueue the id of the one that has its items, if some dedupe key has been there. `items` are shown, with
    `blocks` by their ids. `totals` counts ends by outcome. `pops` are the pop groups.
    """

    grants: list[WireGrant] = []
    ready: bool = False
    outcomes: list[tuple[str, Int64]] = []
    queues: list[WireQueue] = []
    firsts: list[Bits64] = []
    items: list[WireItem] = []
    blocks: dict[str, bytes] = {}
    totals: dict[str, Int64] = {}
    pops: list[WirePop] = []
