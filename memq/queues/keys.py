"""The keys of queue items in the state of a queue machine: ordered keys, and dedupe keys. Pure.

*Ordered*: at most one item of a key is leased, and the next item is the first in the order of arrival. An item that is
given back, or whose lease is over, stays the first. The machine refuses a grant of any other item of the key.

*Dedupe*: a queue accepts one item with a dedupe key within a window. All times are in the decisions (S3): an enqueue
has its arrival and the end of its window. The next enqueue removes the keys whose windows are over.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import NamedTuple

from memq.queues.block import QueueBlock
from memq.queues.decisions import Dedupe, ItemState, SavedFirst


class _OrderedKey:
    __slots__ = ("blocks", "is_sorted", "leased")

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, QueueBlock] = OrderedDict()  # by arrival; some item is ready or leased
        self.is_sorted = True
        self.leased: tuple[QueueBlock, int] | None = None


class OrderedKeys:
    """The ordered keys of all queues of a machine. A key exists while one of its items is ready or leased."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str, str], _OrderedKey] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def note(self, block: QueueBlock, begin: int, end: int, state: ItemState) -> None:
        """Note the state of a range of items of an ordered block. A leased range has one item."""
        place = block.topic, block.terms.key
        found = self._keys.get(place) or self._keys.setdefault(place, _OrderedKey())
        if state is ItemState.LEASED:
            found.leased = block, begin
        elif found.leased is not None and found.leased[0] is block and begin <= found.leased[1] < end:
            found.leased = None
        if block.left == block.dead:
            found.blocks.pop(block.arrival, None)
        elif block.arrival not in found.blocks:
            if found.blocks and next(reversed(found.blocks)) > block.arrival:  # it was dead, and was sent back
                found.is_sorted = False
            found.blocks[block.arrival] = block
        if not found.blocks:
            del self._keys[place]

    def next_of(self, queue: str, key: str) -> tuple[QueueBlock, int] | None:
        """Return the only item of a key that may be granted: the leased one, else the first one that is ready."""
        found = self._keys.get((queue, key))
        if found is None or found.leased is not None:
            return found.leased if found is not None else None
        if not found.is_sorted:  # once for all that were sent back together
            found.blocks, found.is_sorted = OrderedDict(sorted(found.blocks.items())), True
        block = next(iter(found.blocks.values()))
        return block, next(block.numbers_in(ItemState.READY))

    def grantable(self, block: QueueBlock, begin: int, end: int) -> tuple[int, int]:
        """Return begin and end of the items that may be granted; for an ordered key, of its next item at most."""
        if not block.terms.ordered:
            return begin, end
        found = self.next_of(block.topic, block.terms.key)
        if found is None or found[0] is not block or not begin <= found[1] < end:
            return begin, begin
        return found[1], found[1] + 1


class _First(NamedTuple):
    block: int
    until_ms: int


class DedupeKeys:
    """The first block with each dedupe key, while the window of the key lasts."""

    def __init__(self) -> None:
        self._known: dict[bytes, _First] = {}
        self._ends: list[tuple[int, bytes]] = []  # a heap; one entry for each known key

    def __len__(self) -> int:
        return len(self._known)

    def find(self, dedupe: Dedupe) -> int | None:
        """Return the first block with a key; None if there is none in the window."""
        known = self._known.get(dedupe.digest)
        return known.block if known is not None and known.until_ms > dedupe.since_ms else None

    def add(self, dedupe: Dedupe, block: int) -> None:
        """Note that a block is the first with its key."""
        self.forget(dedupe.since_ms)  # also an earlier one under the same key
        self._known[dedupe.digest] = _First(block, dedupe.until_ms)
        heapq.heappush(self._ends, (dedupe.until_ms, dedupe.digest))

    def forget(self, now_ms: int) -> None:
        """Forget the keys whose windows are over."""
        while self._ends and self._ends[0][0] <= now_ms:
            del self._known[heapq.heappop(self._ends)[1]]

    def count(self, now_ms: int) -> int:
        """Return how many keys an enqueue at `now_ms` would leave; reads each key that it would remove."""
        over, places = 0, [0]
        while places:
            place = places.pop()
            if place < len(self._ends) and self._ends[place][0] <= now_ms:
                over += 1
                places += 2 * place + 1, 2 * place + 2  # the children of an entry of a heap end later
        return len(self._known) - over

    def saved(self) -> list[SavedFirst]:
        """Return the keys for a snapshot."""
        return [SavedFirst(digest, *known) for digest, known in self._known.items()]

    def restore(self, saved: list[SavedFirst]) -> None:
        """Set the keys to those of a snapshot."""
        self._known = {each.digest: _First(each.block, each.until_ms) for each in saved}
        self._ends = [(each.until_ms, each.digest) for each in saved]
        heapq.heapify(self._ends)
