"""The functions of `memq.kernel.blocks` in Python; see there for what each one promises.

A batch of 4 KiB blocks has thousands of headers. A named tuple for each cost 5 µs per block, more than the rest of
the broker. So the columns are strided copies in C. A header is 18 words of 32 bits or 9 of 64, an index entry 16 or 8,
and no field straddles a word.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import add, or_
from typing import Any

from awscrt.checksums import combine_crc32c, crc32c

from memq.format.blocks.header import (
    CHECKED_FROM,
    CODEC_LZ4,
    DELTA_SATURATED,
    FLAGS_KNOWN,
    KEY,
    MAGIC,
    NULL_KEYS,
    Buffer,
)
from memq.format.blocks.latency import Latency, latency_of
from memq.limits import (
    BLOCK_ENTRY_BYTES,
    BLOCK_HEADER_BYTES,
    BLOCK_RAW_BYTES_MAX,
    BLOCK_RECORDS_MAX,
    FORMAT_VERSIONS,
    FRAME_PREFIX_BYTES,
    KIB,
    TIME_MS_END,
)

COMBINED_BYTES_MIN = 16 * KIB
# A WRITE's prefix: length | api, flags, stream as one | first sent. The header: magic, checksum | version, codec, flags
# as one | payload, raw, count | producer epoch, scope | producer, first sequence, base | (delta) slots | (tag bits)
_HEAD = struct.Struct("<IIq II I III II QQq 4xHH 8x")
_HEAD_BYTES = FRAME_PREFIX_BYTES + BLOCK_HEADER_BYTES

assert _HEAD.size == _HEAD_BYTES
_unpack = _HEAD.unpack_from
_BODY_FROM = FRAME_PREFIX_BYTES + CHECKED_FROM
_MAGIC = int.from_bytes(MAGIC, "little")
_CODEC = 0xFF00  # the codec in the word below
# version, codec and flags of every valid block, as one word
_KINDS = frozenset(
    version | codec << 8 | flags << 16
    for version in FORMAT_VERSIONS
    for codec in range(CODEC_LZ4 + 1)
    for flags in range(FLAGS_KNOWN + 1)
    if flags & (NULL_KEYS | KEY) != NULL_KEYS
)
_START = struct.Struct(f"{CHECKED_FROM}s{BLOCK_HEADER_BYTES - CHECKED_FROM}x")

assert sys.byteorder == "little", "memoryview.cast and array read words in the machine's order"
assert (array("I").itemsize, array("Q").itemsize) == (4, 8)


def scan_blocks(
    slab: Any,
    view: memoryview,
    at: int,
    end: int,
    kind: int,
    producer_id: int,
    producer_epoch: int,
    scope: int,
    first: int,
    oldest_ms: int,
    blocks_max: int,
    bytes_max: int,
) -> tuple[list[tuple[Any, int, int]], int]:
    """Check each block in one step of the loop.

    A block of 4 KiB costs half a microsecond here, so each operation counts. One `unpack` reads prefix and header.
    """
    if end > len(view):
        raise ValueError(f"the frames end at {end}, outside of {len(view)} bytes")
    extents: list[tuple[Any, int, int]] = []
    next_ = first
    last = min(end - _HEAD_BYTES, at + bytes_max - 1)
    for _ in range(blocks_max):
        if at > last:
            break
        # fmt: off
        (length, frame_kind, sent_ms, magic, checksum, block_kind, payload, raw, count, epoch, block_scope,
         producer, sequence, base_ms, slot_first, slot_last) = _unpack(view, at)
        # fmt: on
        stop = at + FRAME_PREFIX_BYTES + length
        if not (
            frame_kind == kind
            and stop <= end
            and sequence == next_
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
    return extents, next_


def lay_out(extents: list[tuple[Any, int, int]]) -> tuple[list[memoryview], tuple[Any, ...]]:
    """Copy the headers, and read each of their columns at once."""
    views = [slab.view[start:end] for slab, start, end in extents]
    lengths = list(map(len, views))
    if min(lengths, default=0) < BLOCK_HEADER_BYTES:
        raise ValueError("a batch has blocks, and each block its header")
    headers = b"".join([slab.view[start : start + BLOCK_HEADER_BYTES] for slab, start, _ in extents])
    view = memoryview(headers)
    by_16, by_32, by_64, signed = view.cast("H"), view.cast("I"), view.cast("Q"), view.cast("q")
    leasts = signed[6::9].tolist()
    greatest = _greatest_ms(leasts, by_32[14::18].tolist())
    checksums = by_32[1::18].tolist()
    fields = (
        headers,
        _entries(lengths, by_32, by_64, greatest),
        _checksum(views, headers, checksums, max(lengths)),
        sum(by_32[4::18].tolist()),
        sum(by_32[5::18].tolist()),
        min(leasts),
        max(greatest),
        (min(by_16[30::36].tolist()), max(by_16[31::36].tolist())),
        reduce(or_, by_64[8::9].tolist()),
    )
    return views, fields


def _greatest_ms(leasts: list[int], deltas: list[int]) -> list[int]:
    """Return `BlockHeader.greatest_ms` of each block."""
    greatest = list(map(add, leasts, deltas))
    if DELTA_SATURATED in deltas or max(greatest) >= TIME_MS_END:
        last = TIME_MS_END - 1
        return [
            last if delta == DELTA_SATURATED else min(found, last)
            for found, delta in zip(greatest, deltas, strict=True)
        ]
    return greatest


def _entries(lengths: list[int], headers_32: memoryview, headers_64: memoryview, greatest: list[int]) -> bytearray:
    """Return the index's block entries, packed, for blocks that lie one after another."""
    packed = bytearray(len(lengths) * BLOCK_ENTRY_BYTES)
    entries = memoryview(packed)
    by_32, by_64 = entries.cast("I"), entries.cast("Q")
    by_64[0::8] = memoryview(array("Q", accumulate(lengths, initial=0)))[:-1]
    by_64[1::8] = headers_64[4::9]  # producer id
    by_64[2::8] = headers_64[5::9]  # first sequence
    by_64[3::8] = headers_64[6::9]  # least timestamp
    entries.cast("q")[4::8] = memoryview(array("q", greatest))
    by_32[10::16] = memoryview(array("I", lengths))
    by_32[11::16] = headers_32[5::18]  # count
    by_32[12::16] = headers_32[1::18]  # checksum
    by_32[13::16] = headers_32[15::18]  # both slots
    by_64[7::8] = headers_64[8::9]  # tag bits
    return packed


def _checksum(views: list[memoryview], headers: bytes, checksums: list[int], greatest_bytes: int) -> int:
    """Return the crc32c of all blocks.

    For large blocks, it is combined from the block checksums that the broker verified at arrival.
    Theory: the crc of two pieces follows from their crcs and the length of the second one. So only the 8 bytes that a
    block's own checksum does not cover are read. At 64 KiB this saves a second pass over memory that has left the CPU
    cache, a fifth of all CPU. It also detects bytes that changed in memory after arrival, because the store compares
    the checksum. Small blocks are read again: 4 KiB take 0.3 µs, a combination of two checksums 0.8 µs.
    """
    value = 0
    if greatest_bytes < COMBINED_BYTES_MIN:
        for view in views:
            value = crc32c(view, value)
        return value
    for view, (start,), checksum in zip(views, _START.iter_unpack(headers), checksums, strict=True):
        length = len(view)
        if length < COMBINED_BYTES_MIN:
            value = crc32c(view, value)
        else:
            value = combine_crc32c(crc32c(start, value), checksum, length - CHECKED_FROM)
    return value


def latencies(headers: bytes, now_ms: int, skip: Sequence[int]) -> Latency:
    """Read the columns of times and counts."""
    view = memoryview(headers)
    leasts, counts = view.cast("q")[6::9].tolist(), view.cast("I")[5::18].tolist()
    for number in reversed(skip):
        del leasts[number], counts[number]
    return latency_of(leasts, counts, now_ms)


def fill(memory: memoryview, buffers: Sequence[Buffer], number: int, at: int) -> tuple[int, int, int]:
    """Copy buffer by buffer, by slices."""
    filled, room = 0, len(memory)
    while number < len(buffers):
        view = memoryview(buffers[number]).cast("B")
        if at > len(view):
            raise ValueError(f"byte {at} of a buffer of {len(view)} bytes")
        piece = view[at : at + room - filled]
        memory[filled : filled + len(piece)] = piece
        filled, at = filled + len(piece), at + len(piece)
        if at < len(view):
            break
        number, at = number + 1, 0
    return filled, number, at
