"""Memory of incomplete frames: it follows the received bytes, not the declared length.

A frame up to one slab gets all of its memory at once, because its rest is nearly always on its way. So does one of up
to WHOLE_SLABS_MAX slabs while an eighth of the budget is left. After a second it is parked: its received bytes move to
memory of its own. A frame up to a slab is parked as soon as others need the memory. Memory of its own has at most
GROWTH times the received bytes and grows with them. So a byte that was not sent reserves nothing for long.

All frames with memory of their own share `own_bytes_max`. So honest producers keep the rest of the budget as their
floor, whatever strangers send. At that bound, slow frames of the host that holds most make room, the oldest first.
One frame at a time, the favoured one, may exceed the bound. Else frames that each hold a part wait for each other.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from memq.broker.ingest.slabs import Slab, SlabPool
from memq.errors import MemqError, ThrottledError
from memq.limits import BLOCK_BYTES_MAX, KIB

WHOLE_SLABS_MAX = 4
GROWTH = 4  # copying costs a third of the received bytes at most
OWN_BYTES_MIN = 4 * KIB
PARKED_BYTES_MAX = 16 * KIB  # received: to park more takes longer than the frame, unless it is slow
PARKED_SHARE = 8
SLOW_FRAME_S = 1.0  # a block of 512 KiB takes that long at 4 Mbit/s


class Region:
    """The memory of an incomplete frame: `start` to `end` in a slab, filled up to `filled`.

    The frame has `need` bytes. `own`: no other frame lies in the slab, and it may be smaller than the frame.
    """

    __slots__ = ("end", "filled", "need", "own", "slab", "start")

    def __init__(self, slab: Slab, start: int, filled: int, end: int, need: int, *, own: bool = False) -> None:
        self.slab = slab
        self.start = start
        self.filled = filled
        self.end = end
        self.need = need
        self.own = own


class SlabReader(Protocol):
    """A connection, as the intake sees it."""

    half_since_s: float | None
    host: str

    def pause(self) -> None:
        """Stop reading."""
        ...

    def resume(self) -> None:
        """Read again."""
        ...

    def take_region(self) -> bool:
        """Get a region for the waiting frame and resume reading; False when memory is still short."""
        ...

    def refuse(self, error: MemqError) -> None:
        """Send the client an error that concerns the whole connection, and close it."""
        ...

    @property
    def reads_on(self) -> bool:
        """Whether it may read while memory is short: its frame has a region, or it sends no blocks."""
        ...


class PartialFrames:
    """The regions of all incomplete frames, and the bound on those with memory of their own."""

    def __init__(self, pool: SlabPool) -> None:
        self._pool = pool
        usable = pool.budget_bytes - 2 * pool.slab_bytes  # the current slab, and the one for parked frames
        self.frame_bytes_max = usable * GROWTH // (GROWTH + 1)  # the last growth holds a quarter of the frame twice
        largest = min(BLOCK_BYTES_MAX, self.frame_bytes_max)
        self.own_bytes_max = max(0, min(pool.budget_bytes // 4, usable - largest - largest // GROWTH))
        self.own_bytes = 0
        self.growing: dict[SlabReader, None] = {}  # their frames wait for the bound
        self._regions: dict[SlabReader, Region] = {}
        self._favoured: SlabReader | None = None

    def add(self, reader: SlabReader, region: Region) -> Region:
        """Note the region of a connection's incomplete frame, and return it."""
        self._regions[reader] = region
        if region.own:
            self.own_bytes += region.slab.size
        return region

    def take(self, reader: SlabReader) -> Region | None:
        """Take out a connection's region, because its frame is complete, or moves; return it."""
        region = self._regions.pop(reader, None)
        if region is not None and region.own:
            self.own_bytes -= region.slab.size
        return region

    def forget(self, reader: SlabReader) -> None:
        """Forget a connection's frame, because it is complete, or the connection ends."""
        self.take(reader)
        self.growing.pop(reader, None)
        if self._favoured is reader:
            self._favoured = None
        if self.growing:
            self._pool.freed()

    def grow(self, reader: SlabReader, slab: Slab, start: int, filled: int, need: int) -> Region | None:
        """Copy a frame's received bytes into a larger region of its own; None when it must wait for memory."""
        size = _own_bytes(filled - start, need)
        if self._favoured is None and self.own_bytes + size > self.own_bytes_max:
            self._favoured = reader
        if self._favoured is not reader and self.own_bytes + size > self.own_bytes_max:
            self.growing[reader] = None
            return None
        own = self._pool.lease(size, leave_bytes=self._pool.slab_bytes, exact=True)
        if own is None:
            return None
        self.growing.pop(reader, None)
        own.view[: filled - start] = slab.view[start:filled]
        return self.add(reader, Region(own, 0, filled - start, size, need, own=True))

    def whole(self, reader: SlabReader, slab: Slab, start: int, filled: int, need: int) -> Region | None:
        """Give a frame of a few slabs all of its memory, while an eighth of the budget is left."""
        large = self._pool.lease(need, leave_bytes=self._pool.budget_bytes // 8, exact=True)
        if large is None:
            return None
        self.growing.pop(reader, None)
        large.view[: filled - start] = slab.view[start:filled]
        return self.add(reader, Region(large, 0, filled - start, need, need))

    def park(self) -> bool:
        """Give up memory that is reserved for bytes which have not come; return whether there was any."""
        return self._park(
            [
                region
                for region in self._regions.values()
                if not region.own
                and region.need <= self._pool.slab_bytes
                and region.filled - region.start < max(PARKED_BYTES_MAX, region.need // PARKED_SHARE)
            ]
        )

    def park_slow(self, now_s: float) -> None:
        """Park the frames that are incomplete for over SLOW_FRAME_S: each keeps a whole slab in use."""
        self._park([each for reader, each in self._regions.items() if not each.own and _is_slow(reader, now_s)])

    def _park(self, regions: list[Region]) -> bool:
        for region in regions:
            received = region.filled - region.start
            if region.need > self._pool.slab_bytes and GROWTH * received >= region.need:  # it may have its memory
                region.own = True
                self.own_bytes += region.slab.size
                continue
            own = self._pool.lease(min(region.need, received + OWN_BYTES_MIN), exact=True)
            if own is None:
                return region is not regions[0]
            own.view[:received] = region.slab.view[region.start : region.filled]
            self._pool.release(region.slab)
            region.slab, region.start, region.filled, region.end, region.own = own, 0, received, own.size, True
            self.own_bytes += own.size
        return bool(regions)

    def feed(self) -> None:
        """Let frames grow that wait for the bound, in order."""
        for reader in list(self.growing):
            if not reader.take_region():
                return

    def shed(self, now_s: float) -> int:
        """Close slow frames while others wait for their memory; return how many were closed."""
        closed = 0
        while self.growing or self.own_bytes > self.own_bytes_max:
            slow = [
                reader
                for reader, region in self._regions.items()
                if region.own and reader not in self.growing and _is_slow(reader, now_s)
            ] or [reader for reader in self.growing if _is_slow(reader, now_s)]
            if not slow:
                return closed
            held = Counter[str]()
            for reader, region in self._regions.items():
                held[reader.host] += region.slab.size if region.own else 0
            victim = max(slow, key=lambda each: held[each.host])  # the oldest of several
            self.forget(victim)
            victim.refuse(ThrottledError("memory for incomplete frames is short, and this frame is slow"))
            closed += 1
            self.feed()
        return closed


def _own_bytes(received: int, need: int) -> int:
    """Return the size of the next region: `need` divided by a power of GROWTH.

    So a frame is never twice in memory with nearly all of its bytes.
    """
    size = need
    while -(-size // GROWTH) > max(received, OWN_BYTES_MIN):
        size = -(-size // GROWTH)
    return size


def _is_slow(reader: SlabReader, now_s: float) -> bool:
    return reader.half_since_s is not None and now_s - reader.half_since_s > SLOW_FRAME_S
