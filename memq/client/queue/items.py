"""Items of queues as clients have them: their terms, their blocks and their ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from memq.client.arguments import check_number, check_seconds, check_switch
from memq.client.producer.fields import BytesLike, HeadersLike, RecordFields, as_bytes, check_fields
from memq.errors import (
    AlreadyAckedError,
    CorruptDataError,
    InvalidRequestError,
    InvalidSettingError,
    ItemEndedError,
    LeaseLostError,
    MemqError,
    NotFoundError,
    ProtocolError,
    TooLargeError,
)
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.columns import RecordHeaders, RecordTuple, open_block
from memq.format.blocks.header import check_block
from memq.limits import (
    HOLD_BYTES_MAX,
    KIB,
    MIB,
    PRODUCER_ID_END,
    QUEUE_ATTEMPTS_MAX,
    QUEUE_DEDUPE_MS_MAX,
    QUEUE_DEDUPE_MS_MIN,
    QUEUE_DELAY_MS_MAX,
    QUEUE_ITEMS_PER_REQUEST_MAX,
    QUEUE_KEY_CHARS_MAX,
    QUEUE_KNOWN_BLOCKS_MAX,
    QUEUE_LEASE_MS_MAX,
    QUEUE_LEASE_MS_MIN,
    QUEUE_METADATA_BYTES_MAX,
    QUEUE_NOTE_BYTES_MAX,
    QUEUE_PRIORITY_MAX,
    QUEUES_PER_REQUEST_MAX,
)
from memq.protocol.queue_messages import NackItems, QueueAnswer, WireGrant, WireLeasedItems, WireQueueBlock
from memq.queues.decisions import ItemOutcome, NackKind, queue_scope
from memq.queues.pop.groups import check_queue, is_pop_queue, topic_of
from memq.runtime.runtime import Runtime
from memq.topic import Position

BLOCK_RAW_BYTES = 64 * KIB  # a block takes no further item from this size on: each of its workers gets all of it
ITEM_BYTES_MAX = HOLD_BYTES_MAX - 4 * KIB
DEDUPE_WINDOW_S = 300.0
NUMBER_DIGITS_MAX = 7  # of an item in its block
RECENT_BYTES_MAX = 4 * MIB  # of payloads of recent blocks at a worker

Listed = TypeVar("Listed")


class ItemLease(NamedTuple):
    """An item, by block and number, and the number of the grant under which its worker has it."""

    block_id: str
    number: int
    grant: int


@dataclass(slots=True)
class QueueItem:
    """An item that this worker has leased.

    The lease ends at `until_s` of `time.monotonic()`; then another worker may get the item. `attempt` counts the leases
    of the item, including this one. `note` is the metadata of the last nack. `lease_s` is the length of a lease; with 0
    the item is delivered at most once, and needs no ack. A `memq.Worker` sets `lost` when the lease ends while the
    handler runs: another worker may have the item.

    An item of a pop group is a record: `payload` is its value, `metadata` are its headers, and `key`, `tag`,
    `timestamp_ms`, `topic` and `position` are those of the record.
    """

    id: str
    queue: str
    payload: bytes
    metadata: RecordHeaders
    attempt: int
    note: bytes
    until_s: float
    lease: ItemLease
    lease_s: float = 0.0
    lost: bool = False
    key: bytes | None = None
    tag: str | None = None
    timestamp_ms: int = 0
    position: Position | None = None

    @property
    def topic(self) -> str:
        """The topic of a record of a pop group; "" for an item of a queue."""
        return topic_of(self.queue) if is_pop_queue(self.queue) else ""


class EnqueueTerms(NamedTuple):
    """The checked settings of an `enqueue`; times in ms."""

    priority: int
    after_ms: int
    life_ms: int
    lease_ms: int
    attempts_max: int
    key: str = ""
    ordered: bool = False
    dedupe_key: str = ""
    dedupe_ms: int = 0

    def wire(self, block: bytes) -> WireQueueBlock:
        """Return the description of a block with these settings for a request."""
        return WireQueueBlock(length=len(block), **self._asdict())


def checked_terms(
    priority: int, deliver_after: float, ttl: float | None, lease: float, attempts_max: int, at_most_once: bool
) -> EnqueueTerms:
    """Return the checked settings of items. Raises: InvalidSettingError, TypeError."""
    check_number("priority", priority, 0, QUEUE_PRIORITY_MAX, int)
    check_seconds("deliver_after", deliver_after, 0, QUEUE_DELAY_MS_MAX / 1_000)
    check_number("attempts_max", attempts_max, 0, QUEUE_ATTEMPTS_MAX, int)
    check_switch("at_most_once", at_most_once)
    if ttl is not None:
        check_seconds("ttl", ttl, 0.001, QUEUE_DELAY_MS_MAX / 1_000)
    lease_ms = 0 if at_most_once else checked_lease_ms(lease)
    life_ms = 0 if ttl is None else max(1, round(ttl * 1_000))
    return EnqueueTerms(priority, round(deliver_after * 1_000), life_ms, lease_ms, attempts_max)


def with_keys(
    terms: EnqueueTerms,
    key: str | None,
    *,
    ordered: bool,
    dedupe_key: str | None = None,
    dedupe_window: float | None = None,
) -> EnqueueTerms:
    """Return settings with key and dedupe key added. Raises: InvalidSettingError, TypeError."""
    _check_key("key", key)
    _check_key("dedupe_key", dedupe_key)
    check_switch("ordered", ordered)
    if ordered and (key is None or not terms.lease_ms or terms.after_ms):
        hint = "leave out deliver_after and at_most_once" if key is not None else "give them a key"
        raise InvalidSettingError("ordered items need a key and a lease, and have no delay", hint=hint)
    if dedupe_window is not None and dedupe_key is None:
        hint = "give a dedupe_key, too, or leave it out"
        raise InvalidSettingError(f"dedupe_window = {dedupe_window!r} has no effect without a dedupe_key", hint=hint)
    window_s = DEDUPE_WINDOW_S if dedupe_window is None else dedupe_window
    check_seconds("dedupe_window", window_s, QUEUE_DEDUPE_MS_MIN / 1_000, QUEUE_DEDUPE_MS_MAX / 1_000)
    dedupe_ms = round(window_s * 1_000) if dedupe_key is not None else 0
    return terms._replace(key=key or "", ordered=ordered, dedupe_key=dedupe_key or "", dedupe_ms=dedupe_ms)


def terms_of_items(
    terms: EnqueueTerms,
    count: int,
    key: str | None,
    *,
    ordered: bool,
    keys: Sequence[str | None] | None,
    dedupe_keys: Sequence[str | None] | None,
    dedupe_window: float | None,
) -> list[EnqueueTerms]:
    """Return the settings of each item: all have the key, or each has its own.

    Raises: InvalidSettingError, InvalidRequestError, TypeError.
    """
    if key is not None and keys is not None:
        raise InvalidSettingError("key is for all items, and keys has one for each", hint="leave one of them out")
    if dedupe_keys is None and dedupe_window is not None:
        with_keys(terms, key, ordered=ordered, dedupe_window=dedupe_window)  # says what to do
    every = [key] * count if keys is None else listed("keys", keys, "str or None")
    others = [None] * count if dedupe_keys is None else listed("dedupe_keys", dedupe_keys, "str or None")
    for name, values in (("keys", every), ("dedupe_keys", others)):
        if len(values) != count:
            raise InvalidRequestError(f"{count} payloads and {len(values)} {name}")
    made: dict[tuple[str | None, str | None], EnqueueTerms] = {}
    for pair in dict.fromkeys(zip(every, others, strict=True)):
        window = dedupe_window if pair[1] is not None else None
        made[pair] = with_keys(terms, pair[0], ordered=ordered, dedupe_key=pair[1], dedupe_window=window)
    return [made[pair] for pair in zip(every, others, strict=True)]


def _check_key(what: str, key: str | None) -> None:
    if key is None:
        return
    if not isinstance(key, str):
        raise TypeError(f"{what} must be str, not {type(key).__name__}")
    if not 0 < len(key) <= QUEUE_KEY_CHARS_MAX:
        raise InvalidSettingError(f"{what} has {len(key)} characters, 1 to {QUEUE_KEY_CHARS_MAX} are allowed")
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise InvalidSettingError(f"{what} {key[:60]!a} can't be written as UTF-8") from error


def checked_lease_ms(lease: float) -> int:
    """Return a lease in ms. Raises: InvalidSettingError."""
    check_seconds("lease", lease, QUEUE_LEASE_MS_MIN / 1_000, QUEUE_LEASE_MS_MAX / 1_000)
    return round(lease * 1_000)


def checked_fields(payload: BytesLike | None, metadata: HeadersLike | None) -> RecordFields:
    """Return an item as a block holds it. Raises: TooLargeError; as `check_fields`."""
    item = check_fields(payload, None, metadata)
    if item.headers:
        size = sum(len(name) + len(value or b"") for name, value in item.headers)
        if size > QUEUE_METADATA_BYTES_MAX:
            raise TooLargeError(f"metadata of {size} bytes, {QUEUE_METADATA_BYTES_MAX} are allowed")
    if item.size > ITEM_BYTES_MAX:
        raise TooLargeError(f"item of {item.size} bytes, {ITEM_BYTES_MAX} are allowed")
    return item


def blocks_of(queue: str, items: Iterable[RecordFields], runtime: Runtime) -> Iterator[tuple[bytes, list[str]]]:
    """Yield blocks of items, and the ids of the items of each."""
    builder = BlockBuilder()
    for item in items:
        if builder.count and (
            builder.raw_bytes + item.size > BLOCK_RAW_BYTES or builder.count == QUEUE_ITEMS_PER_REQUEST_MAX
        ):
            yield _sealed(queue, builder, runtime)
            builder = BlockBuilder()
        builder.append(*item)
    if builder.count:
        yield _sealed(queue, builder, runtime)


def _sealed(queue: str, builder: BlockBuilder, runtime: Runtime) -> tuple[bytes, list[str]]:
    id_ = runtime.random.randrange(1, PRODUCER_ID_END)
    count = builder.count
    sealed = builder.seal(producer_id=id_, first_sequence=0, scope=queue_scope(queue), now_ms=runtime.clock.wall_ms())
    return bytes(sealed.data), [f"{queue}:{id_:016x}:{number}" for number in range(count)]


class RecentBlocks:
    """A cache of the items of recent blocks: the next grant of items of such a block needs no payload."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[str, tuple[int, list[RecordTuple]]] = OrderedDict()
        self._bytes = 0

    def known(self) -> dict[str, list[RecordTuple]]:
        """Return the blocks in the cache."""
        return {id_: records for id_, (_, records) in self._blocks.items()}

    def opened(self, id_: str, data: memoryview, taken: int) -> list[RecordTuple]:
        """Return the items of a block; keep them if fewer than all are `taken`. Raises: CorruptDataError.

        At the bound, the oldest blocks are dropped.
        """
        records = list(open_block(data).records())
        if taken >= len(records):
            return records
        size = sum(len(value or b"") for value, *_ in records)
        self._bytes += size - self._blocks.pop(id_, (0, []))[0]
        self._blocks[id_] = size, records
        while len(self._blocks) > QUEUE_KNOWN_BLOCKS_MAX or self._bytes > RECENT_BYTES_MAX:
            self._bytes -= self._blocks.popitem(last=False)[1][0]
        return records


class UnreadableItems(NamedTuple):
    """Leased items of a block that can't be read. `kind` is how they are given back.

    With a right checksum, the block came so from its producer: no worker can ever read it. Else another try may help.
    """

    queue: str
    leases: list[WireLeasedItems]
    kind: NackKind
    cause: str


def _unreadable(grant: WireGrant, data: memoryview, error: CorruptDataError) -> UnreadableItems:
    """Return the items of a grant whose block can't be read."""
    ranges = [bound for run in grant.items for bound in (run.begin, run.end)]
    try:
        producer, kind = f"of producer {check_block(data).producer_id:016x}", NackKind.DEAD
    except CorruptDataError:
        producer, kind = "of an unknown producer", NackKind.FAILED
    leases = [WireLeasedItems(grant.block_id, grant.grant, ranges)]
    return UnreadableItems(grant.queue, leases, kind, f"block {grant.block_id} {producer}: {error}")


def items_of(
    grants: Sequence[WireGrant],
    blocks: memoryview,
    known: Mapping[str, list[RecordTuple]],
    recent: RecentBlocks,
    asked_s: float,
) -> tuple[list[QueueItem], list[UnreadableItems]]:
    """Return the items of grants that were asked for at `asked_s` (Q3), and those that can't be read.

    `known` has the cached blocks that the request named; these come without payload.
    Raises: ProtocolError, UnsupportedFormatError.
    """
    found: list[QueueItem] = []
    unreadable: list[UnreadableItems] = []
    at = 0
    for grant in grants:
        data = blocks[at : at + grant.length]
        at += grant.length
        taken = sum(run.end - run.begin for run in grant.items)
        try:
            records = recent.opened(grant.block_id, data, taken) if grant.length else known.get(grant.block_id)
        except CorruptDataError as error:
            unreadable.append(_unreadable(grant, data, error))
            continue
        if records is None or any(not 0 <= run.begin < run.end <= len(records) for run in grant.items):
            raise ProtocolError(f"a grant of items of block {grant.block_id} comes without these items")
        until_s = asked_s + (grant.waited_ms + grant.lease_ms) / 1_000
        for run in grant.items:
            for number in range(run.begin, run.end):
                value, key, headers, timestamp_ms, tag = records[number]
                id_, lease = f"{grant.queue}:{grant.block_id}:{number}", ItemLease(grant.block_id, number, grant.grant)
                terms = run.attempt, run.note, until_s, lease, grant.lease_ms / 1_000
                item = QueueItem(id_, grant.queue, value or b"", headers, *terms)
                if grant.at is not None:
                    partition, offset, first = grant.at
                    item.key, item.tag, item.timestamp_ms = key, tag, timestamp_ms
                    item.position = Position(partition, offset, first + number)
                found.append(item)
    return found, unreadable


def wire_leases(leases: Iterable[ItemLease]) -> list[WireLeasedItems]:
    """Return items as a request names them, in the same order."""
    found: list[WireLeasedItems] = []
    for block_id, number, grant in leases:
        last = found[-1] if found else None
        if last is None or (last.block_id, last.grant) != (block_id, grant) or last.ranges[-1] > number:
            found.append(WireLeasedItems(block_id, grant, [number, number + 1]))
        elif last.ranges[-1] == number:
            last.ranges[-1] += 1
        else:
            last.ranges.extend((number, number + 1))
    return found


def outcomes_of(answer: QueueAnswer) -> list[ItemOutcome]:
    """Return the outcome of each item of a request."""
    return [outcome for word, count in answer.outcomes for outcome in (ItemOutcome(word),) * count]


def listed(name: str, values: Iterable[Listed], of: str) -> list[Listed]:
    """Return values as a list. Raises: TypeError, also for a text, whose letters would be the values."""
    if isinstance(values, str | bytes | bytearray | memoryview) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a list of {of}, not {type(values).__name__}")
    return list(values)


def parsed_id(id_: str) -> tuple[str, ItemLease]:
    """Return the queue of an item id, and its block and number.

    Raises: InvalidRequestError, TypeError.
    """
    if not isinstance(id_, str):
        raise TypeError(f"id must be str, not {type(id_).__name__}")
    queue, _, rest = id_.partition(":")
    block, _, number = rest.partition(":")
    is_block = len(block) == 16 and not set(block) - set("0123456789abcdef") and 0 < int(block, 16) < PRODUCER_ID_END
    if not is_block or not number.isdecimal() or len(number) > NUMBER_DIGITS_MAX:
        raise InvalidRequestError(f"{id_[:300]!a} is no id of a queue item", hint="take the id that enqueue returns")
    return queue, ItemLease(block, int(number), 0)


def error_of(item: str, outcome: ItemOutcome) -> MemqError | None:
    """Return the error of an outcome; None if the request succeeded."""
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


def nack_request(
    queue: str, leases: list[WireLeasedItems], after: float, metadata: BytesLike, kind: NackKind | str
) -> NackItems:
    """Return a request that gives items back. Raises: InvalidSettingError, TooLargeError, TypeError."""
    note = as_bytes(metadata, "metadata") or b""
    check_seconds("after", after, 0, QUEUE_DELAY_MS_MAX / 1_000)
    if len(note) > QUEUE_NOTE_BYTES_MAX:
        raise TooLargeError(f"metadata of {len(note)} bytes, {QUEUE_NOTE_BYTES_MAX} are allowed")
    if kind not in set(NackKind):
        raise InvalidSettingError(f"kind = {kind!r} is not one of {', '.join(NackKind)}")
    return NackItems(queue=queue, items=leases, after_ms=round(after * 1_000), note=note, kind=str(kind))


class WantedItems(NamedTuple):
    """The checked bounds of a dequeue: of each queue, of all, and of at-most-once items."""

    queues: dict[str, int]
    items_max: int
    once_max: int


def wanted_items(
    queues: str | Mapping[str, int], max_items: int | None = None, max_at_most_once: int | None = None
) -> WantedItems:
    """Return the bounds of a dequeue. Raises: TypeError, InvalidRequestError."""
    if not isinstance(queues, str | Mapping):
        raise TypeError(f"queues must be the name of one, or {{name: items}}, not {type(queues).__name__}")
    wanted = {queues: 1 if max_items is None else max_items} if isinstance(queues, str) else dict(queues)
    if not 0 < len(wanted) <= QUEUES_PER_REQUEST_MAX:
        raise InvalidRequestError(f"{len(wanted)} queues, 1 to {QUEUES_PER_REQUEST_MAX} are allowed in one call")
    for bound, least in ((max_items, 1), (max_at_most_once, 0)):
        if bound is not None:
            name = "max_items" if least else "max_at_most_once"
            check_number(name, bound, least, QUEUE_ITEMS_PER_REQUEST_MAX, int)
    for queue, items in wanted.items():
        check_queue(queue)
        check_number(f"items of queue '{queue}'", items, 1, QUEUE_ITEMS_PER_REQUEST_MAX, int)
    once_max = QUEUE_ITEMS_PER_REQUEST_MAX if max_at_most_once is None else max_at_most_once
    return WantedItems(wanted, max_items or 0, once_max)


def checked_item(item: QueueItem) -> QueueItem:
    """Return an item. Raises: TypeError."""
    if not isinstance(item, QueueItem):
        raise TypeError(f"item must be a memq.QueueItem, not {type(item).__name__}")
    return item
