"""The object: batches of blocks, then an index that finds them, then a trailer that finds the index."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from awscrt.checksums import combine_crc32c, crc32c

from memq.errors import CorruptDataError, UnsupportedFormatError
from memq.format.blocks.header import CHECKED_FROM, CODEC_NONE, BlockHeader, Buffer
from memq.format.blocks.header import MAGIC as BLOCK_MAGIC
from memq.format.pointer import Time
from memq.limits import (
    BATCH_ENTRY_BYTES,
    BLOCK_ENTRY_BYTES,
    BLOCK_HEADER_BYTES,
    FORMAT_VERSION,
    FORMAT_VERSIONS,
    INDEX_HEAD_BYTES,
    OBJECT_BATCHES_MAX,
    OBJECT_BLOCKS_MAX,
    OBJECT_META_BYTES_MAX,
    TRAILER_BYTES,
)

INDEX_MAGIC = b"mqI1"
TRAILER_MAGIC = b"mqT1"
# magic, version, codec, 0 | meta length, batches, blocks | sizes of a batch entry and a block entry
INDEX_HEAD = struct.Struct("<4sBBH III HH")
_ENTRY_BYTES_MIN = 64
_ENTRY_BYTES_MAX = 1 << 10  # later versions may append fields
# offset, length, append time, batch sequence, records | first block, blocks, partition, epoch | topic, 0
BATCH_ENTRY = struct.Struct("<QQqQQ IIII H6x")
# offset, producer id, first sequence, least, greatest | length, count, checksum | slots | tag bits
BLOCK_ENTRY = struct.Struct("<QQQqq III HH Q")
# index offset, object length, index length, version, 0 | checksum of the index and of the trailer so far | magic
TRAILER = struct.Struct("<QQIB3x I4s")
_TRAILER_CHECKED = 24
_new = tuple.__new__  # half the cost of NamedTuple's own constructor, and there is one entry for each block
assert (INDEX_HEAD.size, TRAILER.size) == (INDEX_HEAD_BYTES, TRAILER_BYTES)
assert (BATCH_ENTRY.size, BLOCK_ENTRY.size) == (BATCH_ENTRY_BYTES, BLOCK_ENTRY_BYTES)


class BatchEntry(NamedTuple):
    """One batch in the index.

    `offset` and `length` are bytes of the object; `topic` is an index into `ObjectMeta.topics`.
    """

    offset: int
    length: int
    appended_ms: int
    batch_sequence: int
    records: int
    first_block: int
    blocks: int
    partition: int
    epoch: int
    topic: int = 0


class BlockEntry(NamedTuple):
    """One block in the index; `offset` counts from the start of the object."""

    offset: int
    producer_id: int
    first_sequence: int
    least_ms: int
    greatest_ms: int
    length: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which no entry needs
    checksum: int
    slot_first: int
    slot_last: int
    tag_bits: int

    @classmethod
    def from_header(cls, header: BlockHeader, offset: int) -> BlockEntry:
        """Return the entry of a block that lies at `offset`."""
        # fmt: off
        return _new(cls, (
            offset, header.producer_id, header.first_sequence, header.base_ms, header.greatest_ms,
            BLOCK_HEADER_BYTES + header.payload_length, header.count, header.checksum,
            header.slot_first, header.slot_last, header.tag_bits,
        ))
        # fmt: on

    @property
    def next_sequence(self) -> int:
        """The sequence after the block's last record."""
        return self.first_sequence + self.count


class ObjectTopic(msgspec.Struct, frozen=True):
    """A topic that has batches in the object; `id` has 32 hex digits."""

    name: str
    id: str


class ObjectMeta(msgspec.Struct, frozen=True, kw_only=True):
    """The writer of an object, and the topics of its batches.

    Readers skip unknown fields, but refuse an object whose `requires` is not empty.
    """

    format: int = FORMAT_VERSION
    cluster: str
    broker: str
    topics: tuple[ObjectTopic, ...]
    created_ms: Time
    requires: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ObjectIndex:
    """The content of an object: batches in order, and all their blocks."""

    meta: ObjectMeta
    batches: tuple[BatchEntry, ...]
    blocks: tuple[BlockEntry, ...]

    def blocks_of(self, batch: BatchEntry) -> tuple[BlockEntry, ...]:
        """Return the blocks of one batch, in order."""
        return self.blocks[batch.first_block : batch.first_block + batch.blocks]

    def blocks_in(self, offset: int, length: int) -> tuple[BlockEntry, ...]:
        """Return the blocks that lie in a byte range, in order: those of the batch that a pointer names."""
        return tuple(block for block in self.blocks if offset <= block.offset < offset + length)


class Trailer(NamedTuple):
    """The last 32 bytes of an object; `checked` are those that the checksum covers with the index."""

    index_offset: int
    object_length: int
    index_length: int
    checksum: int
    checked: bytes


def encode_index(
    meta: ObjectMeta, batches: Sequence[BatchEntry], blocks: Sequence[BlockEntry], index_offset: int
) -> bytes:
    """Return index and trailer, which follow on the `index_offset` bytes of the batches.

    The caller has the duties of `encode_packed_index`.
    """
    return encode_packed_index(meta, batches, b"".join(BLOCK_ENTRY.pack(*entry) for entry in blocks), index_offset)


def encode_packed_index(
    meta: ObjectMeta, batches: Sequence[BatchEntry], block_entries: bytes | bytearray, index_offset: int
) -> bytes:
    """Return index and trailer, from block entries that are packed already: 64 bytes each.

    The caller keeps to OBJECT_BATCHES_MAX and OBJECT_BLOCKS_MAX, and passes entries that `parse_index` accepts.
    Only the number of entries is checked here, because the broker calls this function for every batch.
    """
    blocks, rest = divmod(len(block_entries), BLOCK_ENTRY_BYTES)
    assert not rest, f"{len(block_entries)} bytes of block entries"
    assert len(batches) <= OBJECT_BATCHES_MAX, f"{len(batches)} batches"
    assert blocks <= OBJECT_BLOCKS_MAX, f"{blocks} blocks"
    encoded = msgspec.json.encode(meta)
    head = INDEX_HEAD.pack(
        *(INDEX_MAGIC, FORMAT_VERSION, CODEC_NONE, 0, len(encoded), len(batches), blocks),
        *(BATCH_ENTRY_BYTES, BLOCK_ENTRY_BYTES),
    )
    index = b"".join((head, encoded, *(BATCH_ENTRY.pack(*batch) for batch in batches), block_entries))
    length = index_offset + len(index) + TRAILER_BYTES
    start = TRAILER.pack(index_offset, length, len(index), FORMAT_VERSION, 0, TRAILER_MAGIC)[:_TRAILER_CHECKED]
    checksum: int = crc32c(start, crc32c(index))
    return b"".join((index, start, checksum.to_bytes(4, "little"), TRAILER_MAGIC))


def parse_trailer(buffer: Buffer, object_length: int) -> Trailer:
    """Read the last 32 bytes of an object that has `object_length` bytes.

    Raises: CorruptDataError, UnsupportedFormatError.
    """
    least = INDEX_HEAD_BYTES + TRAILER_BYTES
    if object_length < least:
        raise CorruptDataError(f"object of {object_length} bytes is cut: the smallest object has {least}")
    if len(buffer) != TRAILER_BYTES:
        raise CorruptDataError(f"object of {object_length} bytes is cut: {len(buffer)} bytes where its trailer has 32")
    index_offset, length, index_length, version, checksum, magic = TRAILER.unpack(buffer)
    if magic != TRAILER_MAGIC:
        raise CorruptDataError(f"object of {object_length} bytes ends with {magic!r}, not with {TRAILER_MAGIC!r}")
    if version not in FORMAT_VERSIONS:
        raise UnsupportedFormatError(f"object has version {version}, known are {list(FORMAT_VERSIONS)}")
    if length != object_length or index_offset + index_length + TRAILER_BYTES != length:
        raise CorruptDataError(
            f"object has {object_length} bytes, its trailer says {length} with an index of {index_length} "
            f"at {index_offset}"
        )
    return Trailer(index_offset, length, index_length, checksum, bytes(buffer[:_TRAILER_CHECKED]))


def parse_index(buffer: Buffer, trailer: Trailer) -> ObjectIndex:
    """Read the index that the trailer names: check the checksum, then every bound, then make entries.

    Raises: CorruptDataError, UnsupportedFormatError.
    """
    found = crc32c(trailer.checked, crc32c(buffer))
    if len(buffer) != trailer.index_length or found != trailer.checksum:
        raise CorruptDataError(
            f"index of {len(buffer)} bytes has checksum {found:08x}, "
            f"the trailer says {trailer.index_length} bytes and {trailer.checksum:08x}"
        )
    meta_length, batches, blocks, batch_size, block_size = _parse_index_head(buffer)
    batches_at = INDEX_HEAD_BYTES + meta_length
    blocks_at = batches_at + batches * batch_size
    meta = _parse_meta(bytes(buffer[INDEX_HEAD_BYTES:batches_at]))
    index = ObjectIndex(
        meta,
        tuple(BatchEntry._make(BATCH_ENTRY.unpack_from(buffer, batches_at + n * batch_size)) for n in range(batches)),
        tuple(BlockEntry._make(BLOCK_ENTRY.unpack_from(buffer, blocks_at + n * block_size)) for n in range(blocks)),
    )
    _check_entries(index, trailer.index_offset)
    return index


def index_bytes(head: Buffer) -> int:
    """Return the length of the index that begins with `head`, unchecked.

    Raises: CorruptDataError if `head` is shorter than INDEX_HEAD_BYTES, or one of its sizes is out of bounds.
    """
    meta_length, batches, blocks, batch_size, block_size = _index_sizes(head)
    return INDEX_HEAD_BYTES + meta_length + batches * batch_size + blocks * block_size


def _parse_index_head(buffer: Buffer) -> tuple[int, int, int, int, int]:
    """Return meta length, batches, blocks and the sizes of their entries, which together fill the index."""
    _check_head(buffer)
    magic, version, codec, *_ = INDEX_HEAD.unpack_from(buffer)
    if magic != INDEX_MAGIC:
        raise CorruptDataError(f"index starts with {magic!r}, not with {INDEX_MAGIC!r}")
    if version not in FORMAT_VERSIONS or codec != CODEC_NONE:
        raise UnsupportedFormatError(
            f"index has version {version} and codec {codec}, known are {list(FORMAT_VERSIONS)} and {CODEC_NONE}"
        )
    if index_bytes(buffer) != len(buffer):
        raise CorruptDataError(f"index has {len(buffer)} bytes, its head says {index_bytes(buffer)}")
    return _index_sizes(buffer)


def _check_head(buffer: Buffer) -> None:
    if len(buffer) < INDEX_HEAD_BYTES:
        raise CorruptDataError(f"index has {len(buffer)} bytes, its head alone has {INDEX_HEAD_BYTES}")


def _index_sizes(head: Buffer) -> tuple[int, int, int, int, int]:
    _check_head(head)
    _, _, _, _, meta_length, batches, blocks, batch_size, block_size = INDEX_HEAD.unpack_from(head)
    if meta_length > OBJECT_META_BYTES_MAX or batches > OBJECT_BATCHES_MAX or blocks > OBJECT_BLOCKS_MAX:
        raise CorruptDataError(f"index has {meta_length} bytes of meta, {batches} batches and {blocks} blocks")
    if not _ENTRY_BYTES_MIN <= min(batch_size, block_size) <= max(batch_size, block_size) <= _ENTRY_BYTES_MAX:
        raise CorruptDataError(
            f"index has entries of {batch_size} and {block_size} bytes, not {_ENTRY_BYTES_MIN} to {_ENTRY_BYTES_MAX}"
        )
    return meta_length, batches, blocks, batch_size, block_size


class _MetaNeeds(msgspec.Struct):
    """The fields of the meta that decide whether the rest can be read."""

    format: int
    requires: tuple[str, ...] = ()


def _parse_meta(encoded: bytes) -> ObjectMeta:
    try:
        needs = msgspec.json.decode(encoded, type=_MetaNeeds)
        if needs.format not in FORMAT_VERSIONS or needs.requires:
            raise UnsupportedFormatError(f"object of format {needs.format} requires {list(needs.requires)!a}")
        return msgspec.json.decode(encoded, type=ObjectMeta)
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"meta of the object can't be read: {error}") from error


def _check_entries(index: ObjectIndex, index_offset: int) -> None:
    """Check that batches before the index, and blocks in their batches, are in order and do not overlap."""
    at = first_block = 0
    for number, batch in enumerate(index.batches):
        if batch.topic >= len(index.meta.topics):
            raise CorruptDataError(f"batch {number} has topic {batch.topic} of {len(index.meta.topics)}")
        if batch.offset < at or batch.offset + batch.length > index_offset or batch.first_block != first_block:
            raise CorruptDataError(f"batch {number} at {batch.offset}+{batch.length} does not follow on {at}")
        at, records = batch.offset, 0
        for block in index.blocks_of(batch):
            if block.offset < at or not block.count:
                raise CorruptDataError(f"block at {block.offset} of batch {number} does not follow on {at}")
            at = block.offset + block.length
            records += block.count
        first_block += batch.blocks
        if first_block > len(index.blocks) or at > batch.offset + batch.length or records != batch.records:
            raise CorruptDataError(f"blocks of batch {number} do not fit it: {records} records up to {at}")
        at = batch.offset + batch.length
    if first_block != len(index.blocks):
        raise CorruptDataError(f"batches have {first_block} blocks, the index has {len(index.blocks)}")


def open_object(buffer: Buffer) -> ObjectIndex:
    """Read the index of a whole object in memory.

    Raises: CorruptDataError, UnsupportedFormatError.
    """
    view = memoryview(buffer)
    trailer = parse_trailer(view[-TRAILER_BYTES:], len(view))
    return parse_index(view[trailer.index_offset : trailer.index_offset + trailer.index_length], trailer)


def batch_checksum(blocks: tuple[BlockEntry, ...]) -> int:
    """Return the crc32c of a batch's bytes as they were written, from the checksums of its blocks."""
    value = 0
    for block in blocks:
        start = BLOCK_MAGIC + block.checksum.to_bytes(CHECKED_FROM - len(BLOCK_MAGIC), "little")
        value = combine_crc32c(crc32c(start, value), block.checksum, block.length - CHECKED_FROM)
    return value
