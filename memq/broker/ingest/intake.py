"""Receives bytes into slabs and finds runs of sound blocks, checked in place.

Reads are synchronous, so one current slab serves all connections. Each read starts at the cursor. An incomplete frame
keeps its region until the rest arrives. A connection whose region is the last one in the current slab may
read beyond its frame. Other connections read up to the end of their frame.

A declared length reserves memory only for a short time. A frame larger than a slab, and one that is slow, has memory of
its own, at most GROWTH times its received bytes (`memq.broker.ingest.partial_frames`).

`sound_run` accepts only blocks without any doubt. Any other block (damaged, too old, out of sequence, repeated, of
another stream, incomplete) ends the run. The connection then checks that block alone and in full. Values that are the
same for all blocks of a stream are read once for the run. The ring gets the run, not each block.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from memq.broker.ingest.partial_frames import WHOLE_SLABS_MAX, PartialFrames, Region, SlabReader
from memq.broker.ingest.slabs import READ_BYTES_MIN, Slab, SlabPool
from memq.broker.partition.append import BlockRun, Stream
from memq.kernel.blocks import scan_blocks
from memq.limits import BLOCK_RECORDS_MAX, FRAME_PREFIX_BYTES, KIB, SEQUENCE_END
from memq.protocol.frames import Api

ASIDE_BYTES = 64 * KIB
MOVED_BYTES_MAX = 64 * KIB  # an incomplete frame up to this size may be moved to the cursor
# A run of at most 65,536 blocks (the greatest `batch_blocks_max`) that starts below this ends below SEQUENCE_END.
_FIRST_END = SEQUENCE_END - 65_536 * BLOCK_RECORDS_MAX


class Intake:
    """The current slab of a broker and the connections that fill it.

    An eighth of the budget is reserved for incomplete frames, so that they can be completed. When the rest is used up,
    the intake is starved: it pauses connections that send blocks until memory is released. Then incomplete frames
    without a region get one first, in order. Connections without blocks (polls, heartbeats) continue in the slab
    `aside`, from which complete frames are copied. Before the intake is starved, slow frames give up reserved memory.
    """

    def __init__(self, pool: SlabPool) -> None:
        self.pool = pool
        self.starved = False
        self.readers: dict[SlabReader, None] = {}
        self.waiting: dict[SlabReader, None] = {}  # with an incomplete frame that got no region
        self.aside = Slab(ASIDE_BYTES)
        self.starving: Callable[[], None] = lambda: None  # called when memory has become short
        self.partial = PartialFrames(pool)
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

    def follow(self, reader: SlabReader, region: Region) -> Region:
        """Move the start of a small frame to the cursor, so that the next read follows it, or leave it.

        In its old region, only the rest of the frame can be read. With many connections that send small blocks, every
        second read would get some hundred bytes, at the cost of a read of 100 KiB.
        """
        need, length = region.need, region.filled - region.start
        fits = self.slab.size - self.cursor >= need + READ_BYTES_MIN
        if need > MOVED_BYTES_MAX or not fits or self.starved or region.own or self.at_cursor(region):
            return region
        at = self.cursor
        self.slab.view[at : at + length] = region.slab.view[region.start : region.filled]
        self.cursor += need
        self.slab.references += 1
        self.pool.release(region.slab)
        return self.partial.add(reader, Region(self.slab, at, at + length, at + need, need))

    def at_cursor(self, region: Region | None) -> bool:
        """Whether `buffer` returned the end of the current slab for this region."""
        return not self.starved and (region is None or (region.slab is self.slab and region.end == self.cursor))

    def begin(self, reader: SlabReader) -> tuple[Slab, int]:
        """Return slab and start of the bytes that were just read without a region."""
        if not self.starved:
            return self.slab, self.cursor
        assert reader.reads_on, "read on without memory"
        return self.aside, 0

    def reserve(self, reader: SlabReader, slab: Slab, start: int, filled: int, need: int) -> Region | None:
        """Give memory to the frame of `need` bytes that begins at `start`; None when memory is short.

        A frame up to a slab gets all of it: it stays where it is if its rest fits there, else its beginning is copied
        to a free range. The region has a reference on its slab.
        """
        held = self.partial.take(reader)
        if need > self.pool.slab_bytes or (held is not None and held.own):
            few = need <= WHOLE_SLABS_MAX * self.pool.slab_bytes and (held is None or not held.own)
            take = self.partial.whole if few else self.partial.grow
            region = take(reader, slab, start, filled, need)
            if region is None and held is not None and held.own:
                self.partial.add(reader, held)
            return region
        if slab is self.slab and filled == self.cursor and start + need <= slab.size:
            self.cursor = max(self.cursor, start + need)
            slab.references += 1
        else:
            free = self._allocate(need)
            if free is None:
                return None
            length = filled - start
            free[0].view[free[1] : free[1] + length] = slab.view[start:filled]
            (slab, start), filled = free, free[1] + length
        return self.partial.add(reader, Region(slab, start, filled, start + need, need))

    def _allocate(self, need: int) -> tuple[Slab, int] | None:
        """Allocate up to a slab, in the current slab or a new one; leave a slab for parked frames."""
        if self.cursor + need > self.slab.size and not self._renew(self.pool.slab_bytes):
            return None
        at = self.cursor
        self.cursor += need
        self.slab.references += 1
        return self.slab, at

    def _renew(self, leave_bytes: int) -> bool:
        slab = self.pool.lease(self.pool.slab_bytes, leave_bytes=leave_bytes)
        if slab is None and self.partial.park():
            slab = self.pool.lease(self.pool.slab_bytes, leave_bytes=leave_bytes)
        if slab is None:
            return False
        self.pool.release(self.slab)
        self.slab, self.cursor = slab, 0
        return True

    def after_read(self, reader: SlabReader) -> None:
        """Make room for the next read; without memory, pause connections that would begin new frames."""
        if self.starved:
            if not reader.reads_on:
                reader.pause()
        elif self.slab.size - self.cursor < READ_BYTES_MIN and not self._renew(self._leave_bytes):
            self._starve()

    def wait(self, reader: SlabReader) -> None:
        """Let an incomplete frame wait for memory; it gets a region before any new frame.

        A frame that waits for the bound on frames with memory of their own stops no other connection.
        """
        reader.pause()
        if reader in self.partial.growing:
            return
        self.waiting[reader] = None
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
        """Give released memory to waiting frames first; then all connections read again."""
        self.partial.feed()
        for reader in list(self.waiting):
            if not reader.take_region():
                return
            del self.waiting[reader]
        if self.starved and self._renew(self._leave_bytes):
            self.starved = False
            for reader in list(self.readers):
                reader.resume()

    def forget(self, reader: SlabReader) -> None:
        """Forget a closed connection; the next waiting one may get its memory."""
        self.readers.pop(reader, None)
        self.partial.forget(reader)
        if reader in self.waiting:
            del self.waiting[reader]
            self.feed()


def sound_run(
    stream: Stream, slab: Slab, at: int, end: int, *, oldest_ms: float, blocks_max: int, bytes_max: int
) -> BlockRun:
    """Check the frames from `at` on; return the sound ones up to the first that is not.

    `oldest_ms` is the least first-sent time to accept. The run has at most `blocks_max` blocks, and ends with the block
    that reaches `bytes_max`, which includes frame prefixes.
    """
    first, target = stream.expected, stream.target
    if first < stream.producer.next or first >= _FIRST_END:
        return BlockRun([], first, first, 0)  # perhaps copies, or too close to SEQUENCE_END
    kind = Api.WRITE | stream.number << 16
    extents, next_ = scan_blocks(
        slab,
        slab.view,
        at,
        end,
        kind,
        stream.producer_id,
        stream.producer_epoch,
        target.scope,
        first,
        math.ceil(oldest_ms),
        blocks_max,
        bytes_max,
    )
    size = extents[-1][2] - at - FRAME_PREFIX_BYTES * len(extents) if extents else 0
    return BlockRun(extents, first, next_, size)
