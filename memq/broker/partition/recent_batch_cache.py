"""Cache of recently published batches: READ is answered from memory, without the store."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from memq.broker.ingest.slabs import Slab

UNREAD_BOUNDS = 4
UNREAD_SHARE = 16


@dataclass(frozen=True, slots=True)
class RecentBatch:
    """The blocks of one published batch: views of leased slabs, `offset` bytes into its object."""

    key: str
    offset: int
    views: list[memoryview]
    slabs: list[Slab]
    length: int


class RecentBatchCache:
    """The youngest published batches, by key, within a byte bound; released first when memory is short.

    Without READ requests, the cache uses only a sixteenth of the bound. The reason: receiving into memory that has left
    the CPU caches costs up to a fifth of the broker's CPU. Consumers that open the store themselves send no READ. The
    cache shrinks after batches of four times the bound were published without a READ. The next READ ends this.
    """

    def __init__(self, bytes_max: int, release: Callable[[Slab], None]) -> None:
        self.bytes_max = bytes_max
        self.pinned_bytes = 0
        self._unread_bytes = 0  # published since the last READ
        self._release = release
        self._batches: OrderedDict[tuple[str, int], RecentBatch] = OrderedDict()  # by key and offset
        self._offsets: dict[str, list[int]] = {}  # of the batches of each object, ascending

    def add(self, batch: RecentBatch) -> None:
        """Take over the batch's references on its slabs."""
        location = (batch.key, batch.offset)
        if location in self._batches:
            self._drop(location)
        self._batches[location] = batch
        insort(self._offsets.setdefault(batch.key, []), batch.offset)
        self.pinned_bytes += _pinned(batch)
        self._unread_bytes += batch.length
        unread = self._unread_bytes > UNREAD_BOUNDS * self.bytes_max
        bound = self.bytes_max // UNREAD_SHARE if unread else self.bytes_max
        while self.pinned_bytes > bound and self._batches:
            self._drop(next(iter(self._batches)))

    def read(self, key: str, offset: int, length: int) -> bytes | None:
        """Return a copy of a range of an object, or None when no cached batch contains the range.

        A view would pin its slab until the socket has sent the range; the copy does not.
        """
        self._unread_bytes = 0
        offsets = self._offsets.get(key, ())
        number = bisect_right(offsets, offset)
        if not number:
            return None
        batch = self._batches[key, offsets[number - 1]]
        offset -= batch.offset
        if offset + length > batch.length:
            return None
        pieces, at = [], 0
        for view in batch.views:
            low, high = max(offset - at, 0), min(offset + length - at, len(view))
            if low < high:
                pieces.append(view[low:high])
            at += len(view)
            if at >= offset + length:
                break
        return b"".join(pieces)

    def reclaim(self, count: int) -> None:
        """Drop the oldest batches until about `count` bytes of slabs are released, or no batch is left."""
        target = self.pinned_bytes - count
        while self._batches and self.pinned_bytes > max(target, 0):
            self._drop(next(iter(self._batches)))

    def clear(self) -> None:
        """Release all batches."""
        self.reclaim(self.pinned_bytes)

    def _drop(self, location: tuple[str, int]) -> None:
        batch = self._batches.pop(location)
        offsets = self._offsets[batch.key]
        offsets.remove(batch.offset)
        if not offsets:
            del self._offsets[batch.key]
        self.pinned_bytes -= _pinned(batch)
        for slab in batch.slabs:
            self._release(slab)


def _pinned(batch: RecentBatch) -> int:
    return sum(slab.size for slab in batch.slabs)
