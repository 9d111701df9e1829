"""The pointer: one JSON document in the queue with the location and summary of a committed batch.

Ids, sequences and bit sets are 16 hex digits on the wire and integers in Python. Every other integer is below
2^53, so that any JSON reader keeps it exact. The schema is docs/pointer.schema.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from awscrt.checksums import crc32c
from msgspec import Meta

from memq.errors import (
    CorruptDataError,
    InvalidNameError,
    InvalidRequestError,
    MemqError,
    TooLargeError,
    UnsupportedFormatError,
)
from memq.format.blocks.latency import Bucket
from memq.format.ranges import Range
from memq.limits import (
    FORMAT_VERSION,
    FORMAT_VERSIONS,
    OBJECT_BLOCKS_MAX,
    POINTER_BYTES_MAX,
    POINTER_RANGES_MAX,
    PRODUCER_ID_END,
    SEQUENCE_END,
    SLOTS,
)
from memq.topic import Totals, check_name, check_resource_name

KINDS = ("data", "opened", "closed", "ended")
INTEGER_END = 1 << 53

Number = Annotated[int, Meta(ge=0, lt=INTEGER_END)]
Time = Annotated[int, Meta(gt=-INTEGER_END, lt=INTEGER_END)]
U32 = Annotated[int, Meta(ge=0, lt=1 << 32)]
Slot = Annotated[int, Meta(ge=0, lt=SLOTS)]
BlockNumber = Annotated[int, Meta(ge=0, lt=OBJECT_BLOCKS_MAX)]
Text = Annotated[str, Meta(max_length=1_024)]
TopicId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
Block = TypeVar("Block")
Hex = Annotated[str, Meta(pattern="^[0-9a-f]{16}$", max_length=16)]
_HexRange = tuple[Hex, Hex]
_NO_BITS = "0" * 16


class Location(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The location of one copy of the batch.

    `store` is a name in the cluster's settings; `offset` and `length` are in bytes.
    `index` is the offset of the object's index; 0 if the index begins at the end of the batch.
    """

    store: str
    key: Text
    offset: Number
    length: Number
    index: Number = 0

    @property
    def index_offset(self) -> int:
        """The offset of the object's index."""
        return self.index or self.offset + self.length


class Adopted(msgspec.Struct, frozen=True, kw_only=True):
    """A late pointer at `offset` of the queue; the owner counts it from this pointer on.

    The last entry of a full list may stand for several: it has `offset`, `epoch` and `batch_sequence` of the first one.
    """

    offset: Number
    epoch: U32
    batch_sequence: Number
    records: Number
    bytes: Number


class ProducerRanges(msgspec.Struct, frozen=True):
    """The sequences of one producer in the batch: ascending half-open ranges."""

    producer: int
    ranges: tuple[Range, ...]


class ProducerEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A producer's statement at its end: the next sequence, and the sequences it gave up.

    `acks` is the producer's ack level; None if the owner did not record it.
    """

    producer: int
    next_sequence: int
    burned: tuple[Range, ...] = ()
    acks: int | None = None


class NamedProducer(msgspec.Struct, frozen=True, kw_only=True):
    """State of a producer that may replay after hours, kept beyond the dedup window.

    All its sequences below `last_sequence` are committed; `epoch` is the epoch of its newest instance. `last_seen_ms`
    is the queue time of its last activity; 0 means the queue time of this pointer.
    For a writer that stages, `batch_id` (decimal) is its last batch, and `manifest` is the crc32c of the batch's
    manifest. The manifest has `pieces` pieces for the partition; `last_sequence` of them are in the queue.
    For a shard of held records, `epoch` is 0, and `last_sequence` is the number of its last unit in the partition.
    `records` counts the records that it has released for the partition up to this unit; 0: unknown.
    """

    producer: int
    epoch: U32
    last_sequence: int = 0
    batch_id: Text = ""
    last_seen_ms: Time = 0
    manifest: U32 = 0
    pieces: Number = 0
    records: Number = 0

    @property
    def is_shard(self) -> bool:
        """Whether this is a shard of held records: a producer has an epoch, and a writer a batch."""
        return not self.epoch and not self.batch_id


class _WireProducerRanges(msgspec.Struct, frozen=True):
    producer: Hex
    ranges: tuple[_HexRange, ...]


class _WireProducerEnd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    producer: Hex
    next_sequence: Hex
    burned: tuple[_HexRange, ...] = ()
    acks: Number | None = None


class _WireNamedProducer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    producer: Hex
    epoch: U32
    last_sequence: Hex
    batch_id: Text = ""
    last_seen_ms: Time = 0
    manifest: U32 = 0
    pieces: Number = 0
    records: Number = 0


class _Fields(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The fields that have the same types on the wire and in Python."""

    kind: str
    cluster: str
    topic: str
    topic_id: TopicId
    partition: U32
    epoch: U32
    batch_sequence: Number = 0
    locations: tuple[Location, ...] = ()
    records: Number = 0
    raw_bytes: Number = 0
    stored_bytes: Number = 0
    least_ms: Time = 0
    greatest_ms: Time = 0
    totals: Totals = Totals()
    adopted: tuple[Adopted, ...] = ()
    skip: tuple[BlockNumber, ...] = ()
    producers_complete: bool = True
    slots: tuple[Slot, Slot] = (0, SLOTS - 1)
    checksum: U32 = 0
    broker: str = ""
    sealed_ms: Time = 0
    latency: tuple[tuple[Bucket, Number], ...] = ()
    named_ms: Time = 0
    requires: tuple[Text, ...] = ()


class Pointer(_Fields, frozen=True, kw_only=True):
    """One committed batch (kind `data`), or a statement of an owner or producer between batches.

    - `data`: `locations` has the copies of the batch. `records`, `raw_bytes`, `stored_bytes`, times in Unix ms,
      `slots`, `tag_bits`, `producers` and `checksum` (crc32c of its bytes) describe its content. `totals` and `adopted`
      count the records and bytes before it in the write partition. `skip` has the numbers of its blocks that the queue
      held already. `latency` has the ages of its records when the owner handed the pointer to the queue
      (`format/blocks/latency.py`). `producers` has at most POINTER_RANGES_MAX ranges. If `producers_complete` is
      false, only the object's index has all of them.
    - `opened`: a new epoch, or a repetition for the same epoch, with `totals` and all remembered `named` producers.
    - `closed`: the end of an epoch.
    - `ended`: the last reports of producers that closed, in `ended`.

    Kinds other than `opened` have only their own producers in `named`. Their `named_ms` is the queue time of the last
    `opened`; 0 if that named no producer. `extra` has the fields that a newer writer added.
    """

    version: int = FORMAT_VERSION
    producers: tuple[ProducerRanges, ...] = ()
    ended: tuple[ProducerEnd, ...] = ()
    named: tuple[NamedProducer, ...] = ()
    tag_bits: int = 0
    extra: dict[str, Any] = {}  # a Struct copies the default


class _WirePointer(_Fields, frozen=True, kw_only=True, omit_defaults=True):
    version: int
    producers: tuple[_WireProducerRanges, ...] = ()
    ended: tuple[_WireProducerEnd, ...] = ()
    named: tuple[_WireNamedProducer, ...] = ()
    tag_bits: Hex = _NO_BITS


class _PointerNeeds(msgspec.Struct):
    """The fields that decide whether the rest can be read."""

    version: int
    kind: str
    requires: tuple[str, ...] = ()


_SAME = _Fields.__struct_fields__
_KNOWN = frozenset(_WirePointer.__struct_fields__)
_decode_needs = msgspec.json.Decoder(_PointerNeeds).decode
_decode_wire = msgspec.json.Decoder(_WirePointer).decode
_decode_names = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


def encode_pointer(pointer: Pointer) -> bytes:
    """Return the pointer's JSON.

    Raises: TooLargeError over POINTER_BYTES_MAX; the caller then cuts the producers with `bounded_ranges`.
    InvalidRequestError for a pointer that `decode_pointer` would refuse: no reader could ever read the batch.
    """
    try:
        _check(pointer)
    except ValueError as error:
        raise InvalidRequestError(f"pointer of batch {pointer.batch_sequence}: {error}") from error
    body = _encode(_to_wire(pointer))
    if pointer.extra:
        body = _encode({**msgspec.json.decode(body), **pointer.extra})
    if len(body) > POINTER_BYTES_MAX:
        raise TooLargeError(
            f"pointer of batch {pointer.batch_sequence} of topic '{pointer.topic}' has {len(body)} bytes, "
            f"{POINTER_BYTES_MAX} are allowed"
        )
    return body


def decode_pointer(body: bytes | bytearray | memoryview) -> Pointer:
    """Read a pointer.

    Raises: CorruptDataError; UnsupportedFormatError for a newer version or kind, or if `requires` is not empty.
    """
    if not body:
        raise CorruptDataError("the queue has lost the pointer: its row is missing or damaged")
    if len(body) > POINTER_BYTES_MAX:
        raise CorruptDataError(f"pointer has {len(body)} bytes, {POINTER_BYTES_MAX} are allowed")
    try:
        return parse_pointer(body)
    except (ValueError, RecursionError, InvalidNameError) as error:  # ValueError: msgspec's errors, and bad UTF-8
        raise CorruptDataError(f"pointer of {len(body)} bytes can't be read: {error}") from error


def read_pointer(body: bytes | bytearray | memoryview, *, newer: Literal["raise", "return"]) -> Pointer | MemqError:
    """Read a pointer, or return why it can't be read.

    A pointer of a newer version is not damaged. Callers that report or skip it set `newer` to "return". Callers that
    would treat it as naming no batch set it to "raise". Raises: UnsupportedFormatError with "raise".
    """
    try:
        return decode_pointer(body)
    except CorruptDataError as error:
        return error
    except UnsupportedFormatError as error:
        if newer == "raise":
            raise
        return error


def parse_pointer(body: bytes | bytearray | memoryview) -> Pointer:
    """Read a pointer whose size is checked. Raises: UnsupportedFormatError, and the errors of the decoder."""
    needs = _decode_needs(body)
    if needs.version not in FORMAT_VERSIONS or needs.kind not in KINDS or needs.requires:
        raise UnsupportedFormatError(
            f"pointer has version {needs.version}, kind {needs.kind[:60]!a} and requires {list(needs.requires)[:8]}"
        )
    pointer = _from_wire(_decode_wire(body), _extra(body))
    _check(pointer)
    return pointer


def _to_wire(pointer: Pointer) -> _WirePointer:
    return _WirePointer(
        **{name: getattr(pointer, name) for name in _SAME},
        version=pointer.version,
        producers=tuple(_WireProducerRanges(_hex(p.producer), _hex_ranges(p.ranges)) for p in pointer.producers),
        ended=tuple(
            _WireProducerEnd(
                producer=_hex(end.producer),
                next_sequence=_hex(end.next_sequence),
                burned=_hex_ranges(end.burned),
                acks=end.acks,
            )
            for end in pointer.ended
        ),
        named=tuple(
            _WireNamedProducer(
                producer=_hex(named.producer),
                epoch=named.epoch,
                last_sequence=_hex(named.last_sequence),
                batch_id=named.batch_id,
                last_seen_ms=named.last_seen_ms,
                manifest=named.manifest,
                pieces=named.pieces,
                records=named.records,
            )
            for named in pointer.named
        ),
        tag_bits=_hex(pointer.tag_bits) if pointer.tag_bits else _NO_BITS,
    )


def _extra(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Return the fields that a newer writer added.

    There is nearly always none, so one comparison of the names comes first.
    """
    raw = _decode_names(body)
    if _KNOWN.issuperset(raw):
        return {}
    return {name: msgspec.json.decode(value) for name, value in raw.items() if name not in _KNOWN}


def _from_wire(wire: _WirePointer, extra: dict[str, Any]) -> Pointer:
    fields = msgspec.structs.asdict(wire)
    fields.update(
        producers=tuple(ProducerRanges(_producer(p.producer), _ranges(p.ranges)) for p in wire.producers),
        ended=tuple(
            ProducerEnd(
                producer=_producer(end.producer),
                next_sequence=_sequence(end.next_sequence),
                burned=_ranges(end.burned),
                acks=end.acks,
            )
            for end in wire.ended
        ),
        named=tuple(
            NamedProducer(
                producer=_producer(named.producer),
                epoch=named.epoch,
                last_sequence=_sequence(named.last_sequence),
                batch_id=named.batch_id,
                last_seen_ms=named.last_seen_ms,
                manifest=named.manifest,
                pieces=named.pieces,
                records=named.records,
            )
            for named in wire.named
        ),
        tag_bits=int(wire.tag_bits, 16),
        extra=extra,
    )
    return Pointer(**fields)


def _hex(number: int) -> str:
    return f"{number:016x}"


def _hex_ranges(ranges: Sequence[Range]) -> tuple[_HexRange, ...]:
    return tuple((_hex(first), _hex(following)) for first, following in ranges)


def _producer(text: str) -> int:
    number = int(text, 16)
    if not 0 < number < PRODUCER_ID_END:
        raise ValueError(f"producer id {text} is outside 1 to 2^63-1")
    return number


def _sequence(text: str) -> int:
    number = int(text, 16)
    if number > SEQUENCE_END:
        raise ValueError(f"sequence {text} is over 2^63")
    return number


def _ranges(ranges: Sequence[_HexRange]) -> tuple[Range, ...]:
    """Read ranges, which ascend and do not touch."""
    read = tuple((_sequence(first), _sequence(following)) for first, following in ranges)
    at = -1
    for first, following in read:
        if not at < first < following:
            raise ValueError(f"range {first} to {following} is empty or does not follow on {at}")
        at = following
    return read


def _check(pointer: Pointer) -> None:
    """Check the rules that types do not express. Raises: ValueError, InvalidNameError."""
    check_name(pointer.cluster, "cluster", internal=True)
    check_resource_name(pointer.topic, internal=True)
    if pointer.broker:
        check_name(pointer.broker, "broker", internal=True)
    for location in pointer.locations:
        check_name(location.store, "store", internal=True)
        if "\0" in location.key or any(part in ("", ".", "..") for part in location.key.split("/")):
            raise ValueError(f"key {location.key[:120]!a} is not allowed")
    if not (0 <= pointer.totals.records < INTEGER_END and 0 <= pointer.totals.bytes < INTEGER_END):
        raise ValueError(f"totals {pointer.totals} are outside 0 to 2^53-1")
    if pointer.least_ms > pointer.greatest_ms or pointer.slots[0] > pointer.slots[1]:
        raise ValueError(f"times {pointer.least_ms} to {pointer.greatest_ms} or slots {pointer.slots} are no range")
    if any(first >= following for first, following in pairwise(pointer.skip)):
        raise ValueError("numbers of blocks to skip do not ascend")
    if pointer.kind == "data" and not (pointer.locations and pointer.records):
        raise ValueError(f"batch has {len(pointer.locations)} locations and {pointer.records} records")


def pointer_mark(pointer: Pointer) -> int:
    """Return a number that identifies a pointer in its log, wherever its batch is by now; never 0.

    Two logs with the same mark at an offset are the same log up to there. Totals do not prove that: a log that was cut
    and has grown again may have as many records and bytes before an offset.
    """
    batch = f"{pointer.partition} {pointer.epoch} {pointer.kind} {pointer.batch_sequence} {pointer.sealed_ms}"
    totals = f"{pointer.totals.records} {pointer.totals.bytes} {pointer.records} {pointer.stored_bytes}"
    return crc32c(f"{batch} {totals}".encode()) or 1


def named_since_ms(pointer: Pointer, time_ms: int) -> int:
    """Return the queue time from which pointers must be read to know all named producers; 0 for none.

    `pointer` is the last one of the highest epoch; `time_ms` is its own queue time.
    """
    if pointer.kind == "opened":
        return time_ms if pointer.named else 0
    return pointer.named_ms


def bounded_ranges(
    producers: Sequence[ProducerRanges], ranges_max: int = POINTER_RANGES_MAX
) -> tuple[tuple[ProducerRanges, ...], bool]:
    """Return `producers` cut to `ranges_max` ranges, and whether these are all of them."""
    kept: list[ProducerRanges] = []
    room = ranges_max
    for producer in producers:
        if len(producer.ranges) > room:
            if room:
                kept.append(ProducerRanges(producer.producer, producer.ranges[:room]))
            return tuple(kept), False
        kept.append(producer)
        room -= len(producer.ranges)
    return tuple(kept), True


class SequencedBlock(Protocol):
    """The identity of a block: its header, or its entry in an index."""

    @property
    def producer_id(self) -> int:
        """Its producer."""
        ...

    @property
    def first_sequence(self) -> int:
        """The sequence of its first record."""
        ...

    @property
    def next_sequence(self) -> int:
        """The sequence after its last record."""
        ...


def named_ranges(pointer: Pointer) -> Mapping[int, Sequence[Range]] | None:
    """Return the sequences that the pointer names, by producer; None when it has no room for all of them."""
    return {each.producer: each.ranges for each in pointer.producers} if pointer.producers_complete else None


def unskipped(pointer: Pointer, blocks: Iterable[Block]) -> list[Block]:
    """Return those blocks of a batch that readers do not skip.

    Skipped blocks prove nothing about the log: a cut may have taken their first copies.
    """
    return [block for number, block in enumerate(blocks) if number not in pointer.skip]


def is_named(ranges: Mapping[int, Sequence[Range]] | None, header: SequencedBlock) -> bool:
    """Whether the sequences of a block are in `ranges` of a pointer; true when `ranges` is None.

    Blocks that the pointer skips are not in its ranges.
    This check detects a store that returns bytes of another object: those blocks are sound, and of the same topic.
    """
    if ranges is None:
        return True
    first, next_ = header.first_sequence, header.next_sequence
    return any(low <= first and next_ <= high for low, high in ranges.get(header.producer_id, ()))
