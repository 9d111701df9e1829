"""The JSON bodies of control frames as typed structs, and how they are read and written.

A changed bit that TCP's 16-bit checksum misses can leave valid JSON with another offset, key or position. So each body
ends with a checksum. Peers of earlier releases ignore it, and send none.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from memq.errors import (
    CorruptDataError,
    DamagedMessageError,
    MemqError,
    MovedError,
    ProtocolError,
    error_from_wire,
    kind_of,
)
from memq.format.sealed_json import check_seal, seal
from memq.protocol.wire_types import NO_BITS, Bits64, Int64
from memq.topic import Topic

_EMPTY = b"{}"
_encoder = msgspec.json.Encoder()
_decoders: dict[object, msgspec.json.Decoder[object]] = {}
Message = TypeVar("Message", bound=msgspec.Struct)


def encode_message(message: msgspec.Struct, start: bytes = b"") -> bytes:
    """Return `start` (white space) and the message as JSON, with its checksum unless it is empty."""
    body = start + _encoder.encode(message)
    return seal(body) if body != _EMPTY else body


def decode_message(
    body: bytes | bytearray | memoryview, kind: type[Message], *, checksum_wanted: bool = False
) -> Message:
    """Read a message; unknown fields are ignored.

    `checksum_wanted` is true when the peer sends a checksum with each message.
    Raises: DamagedMessageError for a wrong checksum, or a missing one that is wanted; ProtocolError for wrong content.
    """
    try:
        if not check_seal(body, f"{kind.__name__} message") and checksum_wanted and body != _EMPTY:
            raise DamagedMessageError(f"damaged on its way: {kind.__name__} message without its checksum")
    except CorruptDataError as error:
        raise DamagedMessageError(f"damaged on its way: {error}") from error
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return decoder.decode(body)  # type: ignore[return-value]  # the table maps each type to its decoder
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"bad {kind.__name__} message: {error}") from error


class Hello(msgspec.Struct, kw_only=True):
    """First frame of a client: the protocol versions that it speaks.

    `client` is its software, `client_id` its name. `frame_checksums`: this side sends and checks them (see
    `memq.protocol.frames`), if the other side does. `token` is a signed token (JWT) that names the client.
    `scram` begins the login of a user by SCRAM-SHA-256 (RFC 7677).
    """

    least_version: Int64
    greatest_version: Int64
    client: str = ""
    client_id: str = ""
    frame_checksums: bool = False
    token: str = ""
    scram: str = ""


class HelloAnswer(msgspec.Struct, kw_only=True):
    """First frame of a broker; it starts the connection's clock.

    The broker's clock starts when it writes this frame, the client's when it has read it. `audit_ms` is the interval
    at which clients send audit reports; 0 means none.
    """

    version: Int64
    broker: str
    cluster: str
    memq: str = ""
    audit_ms: Int64 = 0
    frame_checksums: bool = False
    scram: str = ""  # the last message of a login: the broker knows the user, too


class Authenticate(msgspec.Struct, kw_only=True):
    """A message of a login by SCRAM-SHA-256: the broker's challenge, and then the client's proof."""

    scram: str


class Open(msgspec.Struct, kw_only=True):
    """Bind the frame's stream to a partition for one producer, from its oldest live sequence on.

    `acks` is an `AckLevel`; `map_version` is the partition map that the producer knows. `producer_epoch` is the epoch
    of a named producer, from the answer to `BeginProducer`; 0 without a name. `positions` requests positions in ACKs.
    `secret` is the text from which the id of a producer without a name follows; "" for ids with another origin.
    """

    topic: str
    topic_id: str
    partition: Int64
    producer: str  # 16 hex digits
    acks: Int64
    sequence: Int64
    producer_epoch: Int64 = 0
    map_version: Int64 = 0
    positions: bool = False
    secret: str = ""


class OpenAnswer(msgspec.Struct, kw_only=True):
    """The stream is open: WRITE from `sequence` on. `epoch` is the owner's."""

    epoch: Int64
    sequence: Int64


class Close(msgspec.Struct, kw_only=True):
    """The producer's end of a stream: its sequences, and those it gave up (half-open ranges)."""

    next_sequence: int
    burned: list[tuple[int, int]] = []


class Done(msgspec.Struct, kw_only=True):
    """An answer without content."""


class Forward(msgspec.Struct, kw_only=True):
    """The head of a forwarded block: acked with 1 by another broker, which cannot publish it.

    The owner answers `Done` when the block's pointer is in the queue. `absent_ms` is the time, on the connection's
    clock, at which the queue did not have the block. `request` repeats the request id of the prefix.
    """

    topic: str
    topic_id: str
    partition: Int64
    absent_ms: Int64
    request: Int64 = 0  # 0: a peer of an earlier release does not repeat it


class Nack(msgspec.Struct, kw_only=True):
    """A block was refused, or a request failed: `code` and `kind` as in memq.errors."""

    code: str
    kind: str
    text: str
    hint: str = ""
    retry_after_ms: Int64 = 0
    address: str = ""


class Throttle(msgspec.Struct, kw_only=True):
    """Over capacity: the stream is closed; open it again after `retry_after_ms`."""

    retry_after_ms: Int64
    text: str = ""
    hint: str = ""


class Redirect(msgspec.Struct, kw_only=True):
    """The partition has another owner, and the stream is closed. Without `address`, request metadata."""

    address: str = ""
    epoch: Int64 = 0


class Draining(msgspec.Struct, kw_only=True):
    """The broker drains: it acks the blocks that it holds, and takes no new ones."""

    retry_after_ms: Int64 = 0


class MetadataRequest(msgspec.Struct, kw_only=True):
    """Request topics by name, None for all. With `create`, a broker that may do so creates missing ones.

    `known` maps the names of topics that the client knows to their ids. A broker that has another id first reads the
    topic from the coordinator: the broker may have missed that it was deleted and created again.
    """

    topics: list[str] | None = None
    create: bool = False
    known: dict[str, str] = {}


class Owner(msgspec.Struct, kw_only=True):
    """The owner of a write partition; `address` is empty while it has none."""

    partition: Int64
    epoch: Int64 = 0
    broker: str = ""
    address: str = ""


class TopicMetadata(msgspec.Struct, kw_only=True):
    """A topic with the owners of its write partitions."""

    topic: Topic
    owners: list[Owner] = []


class StoreMetadata(msgspec.Struct, kw_only=True):
    """A store of the cluster: its name in pointers, and the URL by which a client may open it."""

    name: str
    url: str


class Metadata(msgspec.Struct, kw_only=True):
    """The cluster for a client: `missing` topics do not exist; `zones` has the zone of each broker.

    The coordinator did not confirm the `unconfirmed` topics: another broker may have newer data. `waits` names the
    store or queue for which the broker itself waits, and the reason; acks are late meanwhile.
    """

    cluster: str
    brokers: list[str] = []
    zones: list[str] = []
    topics: list[TopicMetadata] = []
    missing: list[str] = []
    unconfirmed: list[str] = []
    stores: list[StoreMetadata] = []
    waits: str = ""


class ReadRequest(msgspec.Struct, kw_only=True):
    """Ask for a range of an object; the answer's body is the raw bytes."""

    store: str
    key: str
    offset: Int64
    length: Int64
    stored: bool = False  # the broker reads the store, even if it has the bytes in memory


class PartitionRef(msgspec.Struct, frozen=True, kw_only=True):
    """A read partition on the wire."""

    topic: str
    topic_id: str
    partition: Int64


class PollFrom(msgspec.Struct, kw_only=True):
    """Read one partition from an offset."""

    partition: PartitionRef
    offset: Int64


class PollEntries(msgspec.Struct, tag_field="op", tag="entries", kw_only=True):
    """Ask for pointers of several partitions; wait up to `wait_ms` when there are none.

    `blocks_bytes_max` bounds the bytes of blocks that follow new pointers in the answer (ADR 30). Batches without
    any of the `tag_bits` come without blocks; no bits: each batch is wanted.
    """

    partitions: list[PollFrom]
    wait_ms: Int64 = 0
    bytes_max: Int64 = 1 << 20
    blocks_bytes_max: Int64 = 0
    tag_bits: Bits64 = NO_BITS


class PollTime(msgspec.Struct, tag_field="op", tag="time", kw_only=True):
    """Ask for the least offset with a queue time of at least `time_ms`."""

    partition: PartitionRef
    time_ms: Int64


class PollSpans(msgspec.Struct, tag_field="op", tag="spans", kw_only=True):
    """Ask for begin and end of partitions; only the owner of write partition `writer` answers, if named."""

    partitions: list[PartitionRef]
    writer: int | None = None


class PollRequest(msgspec.Struct, kw_only=True):
    """One request to the queue."""

    ask: PollEntries | PollTime | PollSpans


class WireEntry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One pointer with its offset and queue time; the pointer is JSON inside JSON.

    When damage leaves no JSON, `pointer` is null, and `damaged` has its bytes. `blocks_bytes` is how many bytes of its
    batch follow the message.
    """

    offset: Int64
    time_ms: Int64
    pointer: msgspec.Raw
    damaged: bytes | None = None
    blocks_bytes: Int64 = 0


class PartitionEntries(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Entries of one partition, with its begin and end at the time of the answer.

    `next` is the offset from which reading continues: between the requested offset and `next`, the queue has only
    `entries`. Brokers before 0.6 leave it out. `error` is set when this partition has no answer while others have one;
    then `begin` and `end` are -1. `ended`: the topic is sealed and has ended, as the metadata says.
    """

    partition: PartitionRef
    begin: Int64
    end: Int64
    entries: list[WireEntry] = []
    next: Int64 = -1
    error: Nack | None = None
    ended: bool = False


class PollAnswer(msgspec.Struct, kw_only=True):
    """Answer to every PollRequest: entries or spans by partition, or one offset (`offset` for PollTime)."""

    partitions: list[PartitionEntries] = []
    offset: Int64 = 0


def nack_of(error: MemqError) -> Nack:
    """Return the wire form of an error."""
    return Nack(
        code=error.code,
        kind=kind_of(type(error)).code,
        text=str(error),
        hint=error.hint,
        retry_after_ms=error.retry_after_ms,
        address=error.address if isinstance(error, MovedError) else "",
    )


def error_of(nack: Nack) -> MemqError:
    """Return the error that a peer named."""
    error = error_from_wire(nack.code, nack.kind, nack.text, nack.retry_after_ms, nack.hint)
    if isinstance(error, MovedError):
        error.address = nack.address
    return error
