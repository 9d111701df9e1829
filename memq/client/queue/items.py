"""Items of queues as clients have them: their terms, their blocks and their ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memq.client.arguments import check_number, check_switch
from memq.client.producer.fields import RecordFields
from memq.errors import (
    AlreadyAckedError,
    InvalidRequestError,
    ItemEndedError,
    LeaseLostError,
    MemqError,
    NotFoundError,
    TooLargeError,
)
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.columns import RecordHeaders, open_block
from memq.limits import (
    HOLD_BYTES_MAX,
    KIB,
    PRODUCER_ID_END,
    QUEUE_ATTEMPTS_MAX,
    QUEUE_DELAY_MS_MAX,
    QUEUE_ITEMS_PER_REQUEST_MAX,
    QUEUE_LEASE_MS_MAX,
    QUEUE_LEASE_MS_MIN,
    QUEUE_METADATA_BYTES_MAX,
    QUEUE_PRIORITY_MAX,
)
from memq.protocol.queue_messages import WireGrant, WireLeasedItem, WireQueueBlock
from memq.queues.decisions import ItemOutcome, queue_scope
from memq.runtime.runtime import Runtime

BLOCK_RAW_BYTES = 64 * KIB  # a block takes no further item from this size on: each of its workers gets all of it
ITEM_BYTES_MAX = HOLD_BYTES_MAX - 4 * KIB


@dataclass(slots=True)
class QueueItem:
    """An item that this worker holds until `until_s` of `time.monotonic()`; then another one may get it.

    `attempt` counts the leases that the item has had, with this one. `note` is the metadata of the last nack. The lease
    is for `lease_s` at a time; with 0 the item comes at most once, and needs no ack. A `memq.Worker` sets `lost` when
    the lease is over while the handler runs: another worker may have the item.
    """

    id: str
    queue: str
    payload: bytes
    metadata: RecordHeaders
    attempt: int
    note: bytes
    until_s: float
    lease: WireLeasedItem
    lease_s: float = 0.0
    lost: bool = False


class EnqueueTerms(NamedTuple):
    """The terms of an `enqueue`, checked; times in ms."""

    priority: int
    after_ms: int
    life_ms: int
    lease_ms: int
    attempts_max: int

    def wire(self, block: bytes) -> WireQueueBlock:
        """Return a block with these terms as a request has it."""
        return WireQueueBlock(block=block, **self._asdict())


def checked_terms(
    priority: int, deliver_after: float, ttl: float | None, lease: float, attempts_max: int, at_most_once: bool
) -> EnqueueTerms:
    """Return the terms. Raises: InvalidSettingError, TypeError."""
    check_number("priority", priority, 0, QUEUE_PRIORITY_MAX, int)
    check_number("deliver_after", deliver_after, 0, QUEUE_DELAY_MS_MAX / 1_000)
    check_number("attempts_max", attempts_max, 0, QUEUE_ATTEMPTS_MAX, int)
    check_switch("at_most_once", at_most_once)
    if ttl is not None:
        check_number("ttl", ttl, 0.001, QUEUE_DELAY_MS_MAX / 1_000)
    lease_ms = 0 if at_most_once else checked_lease_ms(lease)
    life_ms = 0 if ttl is None else max(1, round(ttl * 1_000))
    return EnqueueTerms(priority, round(deliver_after * 1_000), life_ms, lease_ms, attempts_max)


def checked_lease_ms(lease: float) -> int:
    """Return a lease in ms. Raises: InvalidSettingError."""
    check_number("lease", lease, QUEUE_LEASE_MS_MIN / 1_000, QUEUE_LEASE_MS_MAX / 1_000)
    return round(lease * 1_000)


def blocks_of(
    queue: str, items: Sequence[RecordFields], terms: EnqueueTerms, runtime: Runtime
) -> Iterator[tuple[WireQueueBlock, list[str]]]:
    """Yield blocks of items, and the ids of the items of each. Raises: TooLargeError."""
    builder = BlockBuilder()
    for item in items:
        metadata = sum(len(name) + len(value or b"") for name, value in item.headers or ())
        if metadata > QUEUE_METADATA_BYTES_MAX:
            raise TooLargeError(f"metadata of {metadata} bytes, {QUEUE_METADATA_BYTES_MAX} are allowed")
        if item.size > ITEM_BYTES_MAX:
            raise TooLargeError(f"item of {item.size} bytes, {ITEM_BYTES_MAX} are allowed")
        if builder.count and (
            builder.raw_bytes + item.size > BLOCK_RAW_BYTES or builder.count == QUEUE_ITEMS_PER_REQUEST_MAX
        ):
            yield _sealed(queue, builder, terms, runtime)
            builder = BlockBuilder()
        builder.append(*item)
    if builder.count:
        yield _sealed(queue, builder, terms, runtime)


def _sealed(
    queue: str, builder: BlockBuilder, terms: EnqueueTerms, runtime: Runtime
) -> tuple[WireQueueBlock, list[str]]:
    id_ = runtime.random.randrange(1, PRODUCER_ID_END)
    count = builder.count
    sealed = builder.seal(producer_id=id_, first_sequence=0, scope=queue_scope(queue), now_ms=runtime.clock.wall_ms())
    return terms.wire(bytes(sealed.data)), [f"{queue}:{id_:016x}:{number}" for number in range(count)]


def items_of(grant: WireGrant, asked_s: float) -> list[QueueItem]:
    """Return the items of a grant that was asked for at `asked_s` (Q3). Raises: CorruptDataError."""
    records = list(open_block(grant.block).records())
    until_s = asked_s + (grant.waited_ms + grant.lease_ms) / 1_000
    return [
        QueueItem(
            id=f"{grant.queue}:{grant.block_id}:{each.number}",
            queue=grant.queue,
            payload=records[each.number][0] or b"",
            metadata=records[each.number][2],
            attempt=each.attempt,
            note=each.note,
            until_s=until_s,
            lease=WireLeasedItem(block_id=grant.block_id, number=each.number, grant=grant.grant),
            lease_s=grant.lease_ms / 1_000,
        )
        for each in grant.items
    ]


def parsed_id(id_: str) -> tuple[str, WireLeasedItem]:
    """Return the queue and the place of an item. Raises: InvalidRequestError, TypeError."""
    if not isinstance(id_, str):
        raise TypeError(f"id must be str, not {type(id_).__name__}")
    queue, _, rest = id_.partition(":")
    block, _, number = rest.partition(":")
    if len(block) != 16 or set(block) - set("0123456789abcdef") or not number.isdecimal() or len(number) > 4:
        raise InvalidRequestError(f"{id_[:300]!a} is no id of a queue item", hint="take the id that enqueue returns")
    return queue, WireLeasedItem(block_id=block, number=int(number), grant=0)


def error_of(item: str, outcome: ItemOutcome) -> MemqError | None:
    """Return the error of an outcome; None if the request has done what it asks for."""
    match outcome:
        case ItemOutcome.ACKED | ItemOutcome.RETURNED | ItemOutcome.EXTENDED:
            return None
        case ItemOutcome.ALREADY_ACKED:
            return AlreadyAckedError(f"item '{item}' was acked before")
        case ItemOutcome.LEASE_LOST | ItemOutcome.LEASED:
            return LeaseLostError(f"the lease of item '{item}' is over: another grant, or the queue, has it now")
        case ItemOutcome.UNKNOWN:
            return NotFoundError(f"no queue knows item '{item}'", hint="it may have ended more than 10 minutes ago")
    return ItemEndedError(f"item '{item}' is {outcome}")
