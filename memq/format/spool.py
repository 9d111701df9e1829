"""A segment of the spool: a head, then entries, each a header and one block as it was received.

Bytes <-> values.
A segment is only ever appended to, so a crash cuts its end; the cut bytes were never acked. All other unreadable bytes
are damage. The entry after damage is found by its header, which has its own checksum, seeded by its segment. So bytes
of a block, or bytes that an old file left on the disk, do not pass for a header.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, MemqError, UnsupportedFormatError
from memq.format.blocks.header import BlockHeader, check_block, scope_of
from memq.limits import BLOCK_BYTES_MAX, BLOCK_HEADER_BYTES, FORMAT_VERSION, FORMAT_VERSIONS

MAGIC = b"mqS1"
ENTRY_MAGIC = b"mqE1"
HEAD = struct.Struct("<4sIB3xIq")  # magic, checksum | version, zero, seed | created
ENTRY = struct.Struct("<4sI16sIIQq")  # magic, checksum | topic id, partition, length | queue offset, appended
CHECKED_FROM = 8  # both checksums cover what follows them in their header


@dataclass(frozen=True, slots=True)
class SpoolEntry:
    """One block in a segment; below `queue_offset` the queue did not hold it when it was appended.

    `start` and `end` are the byte offsets of the block in the segment. `appended_ms` is its time of receipt, Unix ms.
    """

    topic_id: str
    partition: int
    queue_offset: int
    appended_ms: int
    start: int
    end: int
    header: BlockHeader

    @property
    def span(self) -> tuple[int, int]:
        """Byte offsets of the whole entry, with its header."""
        return self.start - ENTRY.size, self.end


@dataclass(frozen=True, slots=True)
class SegmentDamage:
    """Bytes of a segment that can't be read, and why."""

    start: int
    end: int
    cause: str


@dataclass(frozen=True, slots=True)
class SpoolContent:
    """The content of a segment.

    `torn_bytes` is the size of an incomplete entry at its end, which a crash interrupted.
    """

    entries: list[SpoolEntry]
    damages: list[SegmentDamage]
    torn_bytes: int


def encode_head(seed: int, created_ms: int) -> bytes:
    """Return the first bytes of a segment."""
    rest = HEAD.pack(MAGIC, 0, FORMAT_VERSION, seed, created_ms)[CHECKED_FROM:]
    return _with_checksum(MAGIC, crc32c(rest), rest)


def encode_entry(
    seed: int, topic_id: bytes, partition: int, queue_offset: int, appended_ms: int, block_bytes: int
) -> bytes:
    """Return the header of an entry whose block has `block_bytes` bytes."""
    rest = ENTRY.pack(ENTRY_MAGIC, 0, topic_id, partition, block_bytes, queue_offset, appended_ms)[CHECKED_FROM:]
    return _with_checksum(ENTRY_MAGIC, crc32c(rest, seed), rest)


def _with_checksum(magic: bytes, checksum: int, rest: bytes) -> bytes:
    return magic + checksum.to_bytes(4, "little") + rest


def decode_segment(data: bytes) -> SpoolContent:
    """Return the entries of a segment, and its damage.

    Raises: CorruptDataError when its head is damaged, UnsupportedFormatError when a newer memq wrote it.
    """
    entries: list[SpoolEntry] = []
    damages: list[SegmentDamage] = []
    if _is_torn(data, HEAD.size):
        return SpoolContent(entries, damages, len(data))
    seed, view, at = _decode_head(data), memoryview(data), HEAD.size
    while at < len(data):
        found = _read_header(view, at, seed)
        if found is None:
            next_ = _find_entry(data, at + 1, seed)
            if next_ < 0 and _is_torn(data[at:], ENTRY.size):
                return SpoolContent(entries, damages, len(data) - at)
            damages.append(SegmentDamage(at, next_ if next_ >= 0 else len(data), "no header of an entry"))
            at = damages[-1].end
        elif found.end > len(data):
            return SpoolContent(entries, damages, len(data) - at)
        else:
            try:
                header = check_block(view[found.start : found.end], scope_of(found.topic_id, found.partition))
            except MemqError as error:
                damages.append(SegmentDamage(at, found.end, f"topic id {found.topic_id.hex()}: {error}"))
            else:
                head = (found.topic_id.hex(), found.partition, found.queue_offset, found.appended_ms)
                entries.append(SpoolEntry(*head, found.start, found.end, header))
            at = found.end
    return SpoolContent(entries, damages, 0)


def copied_entries(data: bytes, start: int, end: int, seed: int) -> Iterator[tuple[bytes, memoryview]]:
    """Yield header and block of the entries from `start` to `end`, for a segment with another `seed`.

    Each block is checked: the original is deleted after the copy, and a bit may have changed in the read from disk.
    Raises: CorruptDataError for anything but sound entries.
    """
    old_seed, view, at = _decode_head(data), memoryview(data), start
    while at < end:
        found = _read_header(view, at, old_seed)
        if found is None or found.end > end:
            raise CorruptDataError(f"byte {at} of the segment begins no entry")
        try:
            check_block(view[found.start : found.end], scope_of(found.topic_id, found.partition))
        except MemqError as error:
            raise CorruptDataError(f"byte {at} of the segment begins an entry without its block: {error}") from error
        length = found.end - found.start
        header = encode_entry(seed, found.topic_id, found.partition, found.queue_offset, found.appended_ms, length)
        yield header, view[found.start : found.end]
        at = found.end


def _is_torn(rest: bytes, least: int) -> bool:
    """Whether a crash left these bytes at a segment's end: too few, or zeros after an extension."""
    return len(rest) < least or not rest.strip(b"\0")


def _decode_head(data: bytes) -> int:
    if len(data) < HEAD.size:
        raise CorruptDataError(f"segment has {len(data)} bytes, its head alone has {HEAD.size}")
    magic, checksum, version, seed, _ = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise CorruptDataError(f"segment starts with {magic!r}, not with {MAGIC!r}")
    if crc32c(data[CHECKED_FROM : HEAD.size]) != checksum:
        raise CorruptDataError("the head of the segment does not match its checksum")
    if version not in FORMAT_VERSIONS:
        raise UnsupportedFormatError(f"segment has version {version}, known are {list(FORMAT_VERSIONS)}")
    return int(seed)


class _Header(NamedTuple):
    """An entry's header, which is sound; its block is not checked."""

    topic_id: bytes
    partition: int
    queue_offset: int
    appended_ms: int
    start: int
    end: int


def _read_header(view: memoryview, at: int, seed: int) -> _Header | None:
    """Return the header of the entry that begins at `at`; None when there is none."""
    if at + ENTRY.size > len(view):
        return None
    magic, checksum, topic_id, partition, length, queue_offset, appended_ms = ENTRY.unpack_from(view, at)
    if magic != ENTRY_MAGIC or not BLOCK_HEADER_BYTES <= length <= BLOCK_BYTES_MAX:
        return None
    if crc32c(view[at + CHECKED_FROM : at + ENTRY.size], seed) != checksum:
        return None
    start = at + ENTRY.size
    return _Header(topic_id, partition, queue_offset, appended_ms, start, start + length)


def _find_entry(data: bytes, at: int, seed: int) -> int:
    """Return where the next entry begins, -1 when there is none."""
    view = memoryview(data)
    at = data.find(ENTRY_MAGIC, at)
    while at >= 0 and _read_header(view, at, seed) is None:
        at = data.find(ENTRY_MAGIC, at + 1)
    return at
