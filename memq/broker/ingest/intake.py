"""Receives bytes into slabs and finds runs of sound blocks, checked in place.

Reads are synchronous, so one current slab serves all connections: each read starts at the cursor, and a
frame that is only half there keeps its place (a region) until the rest comes. While a region is the last
thing in the current slab its connection reads on behind it; otherwise it reads up to the frame's end.

`sound_run` passes only what is plainly right. The first block that is anything else (damaged, too old, out of
sequence, sent before, of another stream, only half there) ends the run, and the connection judges it alone and in full.
At 4 KiB a block costs the kernel half a microsecond, so each operation of its loop shows. One `unpack` reads frame
prefix and header; what is the same for all blocks of a stream is looked up once for the run; the ring is notified of
the run, not of each block.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Protocol

from awscrt.checksums import crc32c

from memq.broker.ingest.slabs import READ_BYTES_MIN, Extent, Slab, SlabPool
from memq.broker.partition.append import BlockRun, Stream
from memq.format.blocks.header import CHECKED_FROM, CODEC_LZ4, FLAGS_KNOWN, KEY, MAGIC, NULL_KEYS
from memq.limits import (
    BLOCK_HEADER_BYTES,
    BLOCK_RAW_BYTES_MAX,
    BLOCK_RECORDS_MAX,
    FORMAT_VERSIONS,
    FRAME_PREFIX_BYTES,
    KIB,
    SEQUENCE_END,
    TIME_MS_END,
)
from memq.protocol.frames import Api

ASIDE_BYTES = 64 * KIB
MOVED_BYTES_MAX = 64 * KIB  # a frame up to this size moves to where its connection reads on
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


class Region:
    """The place of a frame that is half there: `start` to `end` in a slab, bytes up to `filled`."""

    __slots__ = ("end", "filled", "slab", "start")

    def __init__(self, slab: Slab, start: int, filled: int, end: int) -> None:
        self.slab = slab
        self.start = start
        self.filled = filled
        self.end = end


class SlabReader(Protocol):
    """A connection, as the intake sees it."""

    def pause(self) -> None:
        """Stop reading."""
        ...

    def resume(self) -> None:
        """Read again."""
        ...

    def take_place(self) -> bool:
        """Give the frame that waits its place and read on; False when there is still none."""
        ...

    @property
    def reads_on(self) -> bool:
        """Whether it may read while memory is short: its frame has a place already, or it sends no blocks."""
        ...


class Intake:
    """The current slab of a broker and the connections that fill it.

    An eighth of the budget is left for frames that have begun, so that they can end. When the rest is used up the
    intake is starved: who sends blocks is not read until memory came back, and then frames that have begun and
    found no place get theirs first, in order, before anything new begins. Requests of others (polls, heartbeats)
    are read on, `aside`: a frame of theirs is copied as soon as it is whole.
    """

    def __init__(self, pool: SlabPool) -> None:
        self.pool = pool
        self.starved = False
        self.readers: dict[SlabReader, None] = {}
        self.waiting: dict[SlabReader, None] = {}  # with a frame that has begun and found no place
        self.aside = Slab(ASIDE_BYTES)
        self.starving: Callable[[], None] = lambda: None  # called when memory has become short
        self._leave_bytes = max(pool.budget_bytes // 8, 2 * pool.slab_bytes)
        slab = pool.lease(pool.slab_bytes)
        assert slab is not None, "budget below one slab"
        self.slab: Slab = slab
        self.cursor = 0

    def buffer(self, region: Region | None) -> memoryview:
        """Return where the next bytes of a connection go; never empty."""
        if region is None:
            return self.aside.view if self.starved else self.slab.view[self.cursor :]
        if region.slab is self.slab and region.end == self.cursor and not self.starved:
            return self.slab.view[region.filled :]
        return region.slab.view[region.filled : region.end]

    def follow(self, region: Region) -> Region:
        """Move the start of a small frame to the cursor, so that the next read follows it, or leave it.

        In place only the frame's rest can be read: with many connections that send small blocks, every second
        read would be of some hundred bytes, for the price of one of 100 KiB.
        """
        need, length = region.end - region.start, region.filled - region.start
        fits = self.slab.size - self.cursor >= need + READ_BYTES_MIN
        if need > MOVED_BYTES_MAX or not fits or self.starved or self.at_cursor(region):
            return region
        at = self.cursor
        self.slab.view[at : at + length] = region.slab.view[region.start : region.filled]
        self.cursor += need
        self.slab.references += 1
        self.pool.release(region.slab)
        return Region(self.slab, at, at + length, at + need)

    def at_cursor(self, region: Region | None) -> bool:
        """Whether `buffer` returned the end of the current slab for this region."""
        return not self.starved and (region is None or (region.slab is self.slab and region.end == self.cursor))

    def begin(self, reader: SlabReader) -> tuple[Slab, int]:
        """Return where the bytes are that were read without a region."""
        if not self.starved:
            return self.slab, self.cursor
        assert reader.reads_on, "read on without memory"
        return self.aside, 0

    def reserve(self, slab: Slab, start: int, filled: int, need: int) -> Region | None:
        """Give the frame that begins at `start` of `slab` a place of `need` bytes; None when memory is short.

        The place is where it is when it fits behind it, else a copy of its beginning in another slab. The
        region has a reference of its own.
        """
        if slab is self.slab and filled == self.cursor and start + need <= slab.size:
            self.cursor = max(self.cursor, start + need)
            slab.references += 1
            return Region(slab, start, filled, start + need)
        place = self.place(need)
        if place is None:
            return None
        other, at = place
        length = filled - start
        other.view[at : at + length] = slab.view[start:filled]
        return Region(other, at, at + length, at + need)

    def place(self, need: int) -> tuple[Slab, int] | None:
        """Find `need` bytes: in the current slab, a fresh one, or a slab of its own for a large frame."""
        if need <= self.pool.slab_bytes:
            if self.cursor + need > self.slab.size and not self._renew(0):
                return None
            at = self.cursor
            self.cursor += need
            self.slab.references += 1
            return self.slab, at
        slab = self.pool.lease(need)
        return None if slab is None else (slab, 0)

    def _renew(self, leave_bytes: int) -> bool:
        slab = self.pool.lease(self.pool.slab_bytes, leave_bytes=leave_bytes)
        if slab is None:
            return False
        self.pool.release(self.slab)
        self.slab, self.cursor = slab, 0
        return True

    def after_read(self, reader: SlabReader) -> None:
        """See that there is room for the next read; stop all reading that would begin something new if not."""
        if self.starved:
            if not reader.reads_on:
                reader.pause()
        elif self.slab.size - self.cursor < READ_BYTES_MIN and not self._renew(self._leave_bytes):
            self._starve()

    def wait(self, reader: SlabReader) -> None:
        """A frame has begun and finds no place: it gets one before anything new begins."""
        self.waiting[reader] = None
        reader.pause()
        self._starve()

    def _starve(self) -> None:
        if self.starved:
            return
        self.starved = True
        for reader in list(self.readers):
            if not reader.reads_on:
                reader.pause()
        self.starving()

    def feed(self) -> None:
        """Memory came back: frames that wait get their places, then all connections read again."""
        for reader in list(self.waiting):
            if not reader.take_place():
                return
            del self.waiting[reader]
        if self.starved and self._renew(self._leave_bytes):
            self.starved = False
            for reader in list(self.readers):
                reader.resume()

    def leave(self, reader: SlabReader) -> None:
        """Forget a connection that is closed; what it waited for may go to the next."""
        self.readers.pop(reader, None)
        if reader in self.waiting:
            del self.waiting[reader]
            self.feed()


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
