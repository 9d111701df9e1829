"""The broker's hot path: runs of sound blocks of one stream, checked in place, taken at once.

Only what is plainly right passes here. The first block that is anything else (damaged, too old, out of sequence,
sent before, of another stream, only half there) ends the run, and the connection judges it alone and in full.

Theory: at 4 KiB a block costs the kernel half a microsecond, so each operation in the loop shows. One `unpack`
reads frame prefix and header; what is the same for all blocks of a stream is looked up once for the run; the
ring is notified of the run, not of each block.
"""

from __future__ import annotations

import struct

from awscrt.checksums import crc32c

from memq.broker.ingest.slabs import Extent, Slab
from memq.broker.partition.append import BlockRun, Stream
from memq.format.blocks.header import CHECKED_FROM, CODEC_LZ4, FLAGS_KNOWN, KEY, MAGIC, NULL_KEYS
from memq.limits import (
    BLOCK_HEADER_BYTES,
    BLOCK_RAW_BYTES_MAX,
    BLOCK_RECORDS_MAX,
    FORMAT_VERSIONS,
    FRAME_PREFIX_BYTES,
    SEQUENCE_END,
    TIME_MS_END,
)
from memq.protocol.frames import Api

# A WRITE's prefix: length | api, flags, stream as one | first sent. The header: magic, checksum | version, codec, flags
# as one | payload, raw, count | producer epoch, scope | producer, first sequence, base | (delta) slots | (tag bits)
_HEAD = struct.Struct("<IIq II I III II QQq 4xHH 8x")
_HEAD_BYTES = FRAME_PREFIX_BYTES + BLOCK_HEADER_BYTES
assert _HEAD.size == _HEAD_BYTES
_unpack = _HEAD.unpack_from
_BODY_FROM = FRAME_PREFIX_BYTES + CHECKED_FROM
_MAGIC = int.from_bytes(MAGIC, "little")
_CODEC = 0xFF00  # the codec in the word below
# version, codec and flags of every block that can be sound, as the word that they form
_KINDS = frozenset(
    version | codec << 8 | flags << 16
    for version in FORMAT_VERSIONS
    for codec in range(CODEC_LZ4 + 1)
    for flags in range(FLAGS_KNOWN + 1)
    if flags & (NULL_KEYS | KEY) != NULL_KEYS
)
# A run of at most 65,536 blocks (the greatest `batch_blocks_max`) that starts below this ends below SEQUENCE_END.
_FIRST_END = SEQUENCE_END - 65_536 * BLOCK_RECORDS_MAX


def sound_run(
    stream: Stream, slab: Slab, at: int, end: int, *, oldest_ms: float, blocks_max: int, bytes_max: int
) -> BlockRun:
    """Check the frames from `at` on; return the sound ones up to the first that is not.

    `oldest_ms` is the least first-sent time that is taken. At most `blocks_max` blocks; the run ends with the
    block that reaches `bytes_max`, frame prefixes counted.
    """
    extents: list[Extent] = []
    begin, expected = at, stream.expected
    next_ = expected
    if next_ < stream.producer.next or next_ >= _FIRST_END:
        return BlockRun(extents, next_, next_, 0)  # it may hold duplicates, or the last sequences of all
    view, producer_id, scope = slab.view, stream.producer_id, stream.home.scope
    kind, producer_epoch = Api.WRITE | stream.number << 16, stream.producer_epoch
    last = min(end - _HEAD_BYTES, at + bytes_max - 1)
    for _ in range(blocks_max):
        if at > last:
            break
        # fmt: off
        (length, frame_kind, sent_ms, magic, checksum, block_kind, payload, raw, count, epoch, block_scope,
         producer, first, base_ms, slot_first, slot_last) = _unpack(view, at)
        # fmt: on
        stop = at + FRAME_PREFIX_BYTES + length
        if not (
            frame_kind == kind
            and stop <= end
            and first == next_
            and producer == producer_id
            and epoch == producer_epoch
            and block_scope == scope
            and magic == _MAGIC
            and block_kind in _KINDS
            and payload + BLOCK_HEADER_BYTES == length
            and (payload == raw or (payload < raw and block_kind & _CODEC))
            and 0 < count <= BLOCK_RECORDS_MAX
            and 4 * count <= raw <= BLOCK_RAW_BYTES_MAX
            and -TIME_MS_END < base_ms < TIME_MS_END
            and slot_first <= slot_last
            and sent_ms >= oldest_ms
            and crc32c(view[at + _BODY_FROM : stop]) == checksum
        ):
            break
        extents.append((slab, at + FRAME_PREFIX_BYTES, stop))
        next_ += count
        at = stop
    return BlockRun(extents, expected, next_, at - begin - FRAME_PREFIX_BYTES * len(extents))
