"""Memory of received bytes: connections fill slabs, and stop reading when memory is short.

Reads are synchronous, so one current slab serves all connections: each read starts at the cursor, and a
frame that is only half there keeps its place (a region) until the rest comes. While a region is the last
thing in the current slab its connection reads on behind it; otherwise it reads up to the frame's end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from memq.broker.ingest.slabs import READ_BYTES_MIN, Slab, SlabPool
from memq.limits import KIB

ASIDE_BYTES = 64 * KIB
MOVED_BYTES_MAX = 64 * KIB  # a frame up to this size moves to where its connection reads on


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
