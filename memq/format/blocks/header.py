"""The block's 72-byte header: its fields, its checks, and the checksum of the rest.

A block is records of one producer for one topic partition. The same bytes go over the wire and into the
object: the broker checks every block in place, and the reader checks it again.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any, NamedTuple

from awscrt.checksums import combine_crc32c, crc32c

from memq.errors import CorruptDataError, MemqError, UnsupportedFormatError
from memq.limits import (
    BLOCK_HEADER_BYTES,
    BLOCK_RAW_BYTES_MAX,
    BLOCK_RECORDS_MAX,
    FORMAT_VERSION,
    FORMAT_VERSIONS,
    PRODUCER_ID_END,
    SEQUENCE_END,
    TIME_MS_END,
)

Buffer = bytes | bytearray | memoryview

MAGIC = b"mqB1"
# magic, checksum | version, codec, flags | payload, raw, count | producer epoch, scope |
# producer id, first sequence | base, max delta | first slot, last slot | tag bits
HEADER = struct.Struct("<4sI BBH III II QQ qI HH Q")
assert HEADER.size == BLOCK_HEADER_BYTES
CHECKED_FROM = 8  # the checksum covers the block from here to its end
_unpack = HEADER.unpack_from
_new = tuple.__new__  # half the cost of NamedTuple's own constructor
BASE_AT = 48
_BASE = struct.Struct("<q")
UNPREFIXED = struct.Struct("<BBH III II QQ qI HH Q")  # the header without magic and checksum

CODEC_NONE, CODEC_ZSTD, CODEC_LZ4 = 0, 1, 2
CODECS = {"none": CODEC_NONE, "zstd": CODEC_ZSTD, "lz4": CODEC_LZ4}
ENVELOPE = 16  # the payload is an envelope of `memq.format.blocks.envelope`: only clients with its key read it

KEY, TIMESTAMP, HEADERS, TAG, NULL_KEYS, NULL_VALUES, EXTENSIONS = 1, 2, 4, 8, 16, 32, 64
FLAGS_KNOWN = 127

DELTA_SATURATED = 0xFFFF_FFFF  # "at least that": the greatest timestamp is not known


def base_ms_of(block: Buffer) -> int:
    """Return the least timestamp of a sound block (Unix ms), at a seventh of the cost of the header."""
    (base_ms,) = _BASE.unpack_from(block, BASE_AT)
    return int(base_ms)


class StoredBlock(NamedTuple):
    """Facts of a stored block without its bytes; enough to distinguish a copy from other content."""

    producer_id: int
    first_sequence: int
    next_sequence: int
    checksum: int
    least_ms: int

    def is_copied_by(self, header: BlockHeader) -> bool:
        """Whether a sound block with this header holds the same records under the same sequences.

        Records without their own timestamp have the time at which their block was sealed. A producer that seals the
        same records again makes a block that differs only in this time: it is a copy.
        """
        if (header.producer_id, header.first_sequence, header.next_sequence) != self[:3]:
            return False
        if header.checksum == self.checksum or header.flags & TIMESTAMP:
            return header.checksum == self.checksum
        return header.checksum_at(self.least_ms) == self.checksum


class BlockHeader(NamedTuple):
    """The fields of a block's header, without magic and version.

    A named tuple, not a dataclass, because the broker makes one for every block. At 4 KiB, a frozen
    dataclass of 16 fields would cost more than the checksum of the block.
    """

    checksum: int
    codec: int
    flags: int
    payload_length: int
    raw_length: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which no header needs
    producer_epoch: int
    scope: int
    producer_id: int
    first_sequence: int
    base_ms: int
    max_delta_ms: int
    slot_first: int
    slot_last: int
    tag_bits: int

    @property
    def length(self) -> int:
        """Bytes of the whole block, header and payload."""
        return BLOCK_HEADER_BYTES + self.payload_length

    @property
    def next_sequence(self) -> int:
        """The sequence after the block's last record."""
        return self.first_sequence + self.count

    @property
    def least_ms(self) -> int:
        """The least timestamp, Unix ms."""
        return self.base_ms

    @property
    def greatest_ms(self) -> int:
        """The greatest timestamp, Unix ms, or an upper bound of it; always below 2^53."""
        if self.max_delta_ms == DELTA_SATURATED:
            return TIME_MS_END - 1
        return min(self.base_ms + self.max_delta_ms, TIME_MS_END - 1)

    def checksum_at(self, base_ms: int) -> int:
        """Return the checksum that the block would have with another base timestamp; needs no payload.

        The crc of two pieces is the crc of the first, carried over the length of the second, xor the second's crc.
        """
        behind = BLOCK_HEADER_BYTES - BASE_AT - _BASE.size + self.payload_length
        return self.checksum ^ self._carried(self.base_ms, behind) ^ self._carried(base_ms, behind)

    def _carried(self, base_ms: int, behind: int) -> int:
        """Return the crc of the header up to a base timestamp, carried over the `behind` bytes after it."""
        tail = UNPREFIXED.pack(FORMAT_VERSION, *self._replace(base_ms=base_ms)[1:])
        carried: int = combine_crc32c(crc32c(tail[: BASE_AT + _BASE.size - CHECKED_FROM]), 0, behind)
        return carried

    def describe(self) -> str:
        """Name the block in messages: producer and sequences."""
        return f"block {self.producer_id:016x}:{self.first_sequence}+{self.count}"


def parse_header(buffer: Buffer, at: int = 0) -> BlockHeader:
    """Read the header at byte `at` of `buffer`, and check all its bounds.

    The payload may be missing, and the checksum is not checked.
    Raises: CorruptDataError; UnsupportedFormatError for a newer version, codec or flag.
    """
    try:
        fields = _unpack(buffer, at)
    except struct.error:
        there = max(len(buffer) - at, 0)
        raise CorruptDataError(f"block is cut: {there} bytes, its header alone has {BLOCK_HEADER_BYTES}") from None
    # fmt: off
    (magic, checksum, version, codec, flags, payload, raw, count,
     epoch, scope, producer, first, base, delta, low, high, tag_bits) = fields
    # fmt: on
    if (
        magic == MAGIC
        and version in FORMAT_VERSIONS
        and (codec <= CODEC_LZ4 or codec == ENVELOPE)
        and flags <= FLAGS_KNOWN
        and (flags & (NULL_KEYS | KEY)) != NULL_KEYS
        and payload <= raw <= BLOCK_RAW_BYTES_MAX
        and (codec or payload == raw)
        and 1 <= count <= BLOCK_RECORDS_MAX
        and 4 * count <= raw
        and 0 < producer < PRODUCER_ID_END
        and first + count <= SEQUENCE_END
        and -TIME_MS_END < base < TIME_MS_END
        and low <= high
    ):
        # fmt: off
        return _new(BlockHeader, (
            checksum, codec, flags, payload, raw, count, epoch, scope, producer, first, base, delta, low, high, tag_bits
        ))
        # fmt: on
    raise _header_error(fields)


def _header_error(fields: tuple[Any, ...]) -> MemqError:
    """Return the error of a header; a newer version comes first: a newer block is not called damaged."""
    magic, _, version, codec, flags, payload, raw, count, _, _, producer, first, base, _, low, high, _ = fields
    if magic != MAGIC:
        return CorruptDataError(f"block starts with {magic!r}, not with {MAGIC!r}")
    if version not in FORMAT_VERSIONS:
        return UnsupportedFormatError(f"block has version {version}, known are {list(FORMAT_VERSIONS)}")
    if codec > CODEC_LZ4 and codec != ENVELOPE:
        return UnsupportedFormatError(f"block has codec {codec}, known are {CODECS} and the envelope {ENVELOPE}")
    if flags > FLAGS_KNOWN:
        return UnsupportedFormatError(f"block has flags {flags:#x}, known are {FLAGS_KNOWN:#x}")
    reasons = {
        f"flags {flags:#x} have null keys without keys": flags & (NULL_KEYS | KEY) == NULL_KEYS,
        f"raw length {raw} is over {BLOCK_RAW_BYTES_MAX}": raw > BLOCK_RAW_BYTES_MAX,
        f"payload length {payload} does not fit raw length {raw}": payload > raw or not (codec or payload == raw),
        f"record count {count} is outside 1 to {BLOCK_RECORDS_MAX}": not 1 <= count <= BLOCK_RECORDS_MAX,
        f"{count} records can't lie in {raw} bytes": 4 * count > raw,
        f"producer id {producer:#x} is outside 1 to 2^63-1": not 0 < producer < PRODUCER_ID_END,
        f"sequence {first} + {count} is over 2^63": first + count > SEQUENCE_END,
        f"timestamp {base} is outside -2^53 to 2^53": not -TIME_MS_END < base < TIME_MS_END,
        f"slots {low} to {high} are no range": low > high,
    }
    return CorruptDataError("block header: " + "; ".join(text for text, broken in reasons.items() if broken))


def check_block(buffer: Buffer, scope: int | None = None) -> BlockHeader:
    """Check that `buffer` is one whole block (header, length, checksum) that belongs to `scope`.

    Raises: CorruptDataError; UnsupportedFormatError for a whole block of a newer version.
    """
    try:
        header = parse_header(buffer)
    except UnsupportedFormatError:
        # The checksum has the same offset in every version, so damage is not mistaken for a newer version.
        _check_checksum(buffer, int.from_bytes(buffer[4:8], "little"), "block")
        raise
    if len(buffer) != BLOCK_HEADER_BYTES + header.payload_length:
        raise CorruptDataError(f"{header.describe()} has {len(buffer)} bytes, its header says {header.length}")
    view = buffer if type(buffer) is memoryview else memoryview(buffer)
    if crc32c(view[CHECKED_FROM:]) != header.checksum:
        _check_checksum(buffer, header.checksum, header.describe())
    if scope is not None and header.scope != scope:
        raise CorruptDataError(f"{header.describe()} belongs to scope {header.scope:08x}, not to {scope:08x}")
    return header


def is_sound(data: Buffer) -> bool:
    """Whether a block is as its producer made it. Its records may be unreadable then, too."""
    try:
        check_block(data)
    except MemqError:
        return False
    return True


def _check_checksum(buffer: Buffer, stated: int, name: str) -> None:
    """Raise CorruptDataError when the checksum over `buffer` is not the one stated."""
    found = crc32c(memoryview(buffer)[CHECKED_FROM:])
    if found != stated:
        raise CorruptDataError(f"{name} has checksum {found:08x}, its header says {stated:08x}")


def scope_of(topic_id: bytes, partition: int) -> int:
    """Return the scope of a topic partition: crc32c of topic id (16 bytes) and partition u32."""
    assert len(topic_id) == 16, f"topic id of {len(topic_id)} bytes"
    scope: int = crc32c(topic_id + partition.to_bytes(4, "little"))
    return scope


def tag_bit(tag: str) -> int:
    """Return the bit of a tag in the header's tag bits."""
    return 1 << (zlib.crc32(tag.encode()) & 63)
