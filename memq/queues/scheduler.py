"""The times of queue items at their owner: the next one, and the ends of leases and lives. Pure.

The state (`machine.py`) has no times of leases. Its owner counts them from its decision on (Q3), and a new owner
begins them again when it opens the log (Q2). An item with a decision on its way is `busy`: no grant takes it until that
counts. So a late `extend` never meets another grant, and a worker whose `ack` is on its way loses nothing.

Ready items lie in a heap for each queue: priority first, then due time, then arrival. A heap has spans of a block, so
a block takes one entry until its items differ. An entry may be stale: an item is checked when it is taken.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from memq.queues.block import QueueBlock
from memq.queues.decisions import (
    EndDecision,
    GrantedBlock,
    ItemOutcome,
    ItemRanges,
    ItemState,
    LeasedItems,
    ranges_of,
)
from memq.queues.machine import QueueMachine

ENDS_AT_ONCE_MAX = 1_000  # items in one decision that ends them


class Moment(NamedTuple):
    """Now: the wall clock (Unix ms), and the monotonic clock in seconds."""

    wall_ms: int
    steady_s: float


class _Ready(NamedTuple):
    priority: int
    due_ms: int
    arrival: int
    begin: int
    end: int
    block: int


class _Later(NamedTuple):
    due_ms: int
    topic: str
    ready: _Ready


Item = tuple[int, int]  # block and number


class ItemScheduler:
    """See the module. `now` is the moment at which the owner has opened its log."""

    def __init__(self, machine: QueueMachine, now: Moment) -> None:
        self._machine = machine
        self._ready: dict[str, list[_Ready]] = {}
        self._later: list[_Later] = []
        self._until_s: dict[Item, float] = {}  # when the present leases end
        self._leases: list[tuple[float, int, int]] = []  # a heap of the same; some entries are stale
        self._lives: list[tuple[int, int]] = []  # a heap of blocks that expire, by Unix ms
        self._busy: Counter[Item] = Counter()
        self._ending: dict[Item, bool] = {}  # items that are to end, and whether they are dead
        for block in machine.blocks.values():
            self._add(block, now)

    # ---- new items -------------------------------------------------------------------------------

    def enqueued(self, block: int, now: Moment) -> None:
        """Take the items of a block that is new in the state."""
        made = self._machine.blocks.get(block)
        if made is not None:
            self._add(made, now)

    def _add(self, block: QueueBlock, now: Moment) -> None:
        if block.terms.expires_ms:
            heapq.heappush(self._lives, (block.terms.expires_ms, block.block.id.producer))
        if not block.is_touched:
            self._push(block, 0, block.count, block.block.due_ms)
            return
        for number in range(block.count):
            if block.state(number) is ItemState.LEASED:
                self._lease(block, number, now.steady_s)
            elif block.state(number) is ItemState.READY:
                self._push(block, number, number + 1, block.due_of(number))

    def _push(self, block: QueueBlock, begin: int, end: int, due_ms: int) -> None:
        entry = _Ready(block.terms.priority, due_ms, block.arrival, begin, end, block.block.id.producer)
        heapq.heappush(self._later, _Later(due_ms, block.topic, entry))

    def _lease(self, block: QueueBlock, number: int, from_s: float) -> None:
        """Begin the lease that the state has for an item."""
        item = block.block.id.producer, number
        self._until_s[item] = until_s = from_s + block.lease_of(number) / 1_000
        heapq.heappush(self._leases, (until_s, *item))

    # ---- grants ----------------------------------------------------------------------------------

    def take(self, wanted: Mapping[str, int], bytes_max: int, now: Moment) -> list[ItemRanges]:
        """Choose items of each queue, first those of the first one.

        They are busy until `granted` or `released`. `bytes_max` bounds the bytes of their blocks, but for the first.
        """
        self.pass_time(now)
        chosen: dict[int, set[int]] = {}
        room = bytes_max
        for topic, count in wanted.items():
            left = count
            while left > 0:
                entry = self._first(topic, now)
                if entry is None:
                    break
                block = self._machine.blocks[entry.block]
                if entry.block not in chosen:
                    room -= block.block.length
                    if chosen and room < 0:
                        return self._held(chosen)
                left -= self._take_from(entry, left, chosen, now)
        return self._held(chosen)

    def _held(self, chosen: Mapping[int, set[int]]) -> list[ItemRanges]:
        items = [ranges_of(block, numbers) for block, numbers in chosen.items()]
        self.hold(items)
        return items

    def _take_from(self, entry: _Ready, left: int, chosen: dict[int, set[int]], now: Moment) -> int:
        """Take items of the first entry of a heap; put the rest of it back. Return how many were taken."""
        heap = self._ready[self._machine.blocks[entry.block].topic]  # which `_first` has left
        heapq.heappop(heap)
        taken = 0
        for number in range(entry.begin, entry.end):
            if taken == left:
                heapq.heappush(heap, entry._replace(begin=number))
                break
            if self._is_free(entry.block, number, now) and number not in chosen.get(entry.block, ()):
                chosen.setdefault(entry.block, set()).add(number)
                taken += 1
        return taken

    def _first(self, topic: str, now: Moment) -> _Ready | None:
        """Return the first entry of a queue that has a free item now; it stays in the heap."""
        heap = self._ready.get(topic, [])
        while heap:
            entry = heap[0]
            free = next((each for each in range(entry.begin, entry.end) if self._is_free(entry.block, each, now)), None)
            if free == entry.begin:
                return entry
            heapq.heappop(heap)
            if free is not None:
                heapq.heappush(heap, entry._replace(begin=free))
        self._ready.pop(topic, None)
        return None

    def _is_free(self, id_: int, number: int, now: Moment) -> bool:
        """Whether an item may be granted now."""
        block = self._machine.blocks.get(id_)
        if block is None or self._busy[id_, number] or (id_, number) in self._ending:
            return False
        if block.terms.expires_ms and block.terms.expires_ms <= now.wall_ms:
            return False
        state = block.state(number)
        if state is ItemState.LEASED:
            return not self.is_leased(block, number, now)
        return state is ItemState.READY and block.due_of(number) <= now.wall_ms

    def is_leased(self, block: QueueBlock, number: int, now: Moment) -> bool:
        """Whether a worker has an item now."""
        until_s = self._until_s.get((block.block.id.producer, number), math.inf)
        return block.state(number) is ItemState.LEASED and until_s > now.steady_s

    def hold(self, items: Iterable[ItemRanges]) -> None:
        """Note that a decision about items is on its way."""
        for each in items:
            for number in each:
                self._busy[each.block, number] += 1

    def granted(self, items: Iterable[ItemRanges], blocks: Iterable[GrantedBlock], decided_s: float) -> None:
        """Note that a grant of items counts for those in `blocks`: the leases have run since `decided_s`."""
        leased = {(each.block.id.producer, item.number) for each in blocks for item in each.items}
        for item in self._freed(items):
            block = self._machine.blocks.get(item[0])
            if item in leased and block is not None and block.state(item[1]) is ItemState.LEASED:
                self._lease(block, item[1], decided_s)
            else:
                self._again(item)

    def released(
        self, items: Iterable[ItemRanges], outcomes: Iterable[ItemOutcome] = (), decided_s: float = 0.0
    ) -> None:
        """Note that a decision about items counts, with an outcome for each, or that it has failed.

        Leases that it extends have run since `decided_s`.
        """
        left = iter(outcomes)
        for item in self._freed(items):
            block, outcome = self._machine.blocks.get(item[0]), next(left, None)
            if outcome is ItemOutcome.EXTENDED and block is not None and block.state(item[1]) is ItemState.LEASED:
                self._lease(block, item[1], decided_s)
            else:
                self._again(item)

    def _freed(self, items: Iterable[ItemRanges]) -> Iterator[Item]:
        for each in items:
            for number in each:
                item = each.block, number
                self._busy[item] -= 1
                if self._busy[item] <= 0:
                    del self._busy[item]
                yield item

    def _again(self, item: Item) -> None:
        """Expect an item again, as the state has it now."""
        block = self._machine.blocks.get(item[0])
        state = block.state(item[1]) if block is not None and 0 <= item[1] < block.count else None
        if state is not ItemState.LEASED:
            self._until_s.pop(item, None)
        if block is None or state is None:
            return
        if state is ItemState.READY:
            self._push(block, item[1], item[1] + 1, block.due_of(item[1]))
            if block.terms.expires_ms:  # perhaps over by now
                heapq.heappush(self._lives, (block.terms.expires_ms, item[0]))
        elif state is ItemState.LEASED:
            heapq.heappush(self._leases, (self._until_s.get(item, 0.0), *item))

    # ---- time ------------------------------------------------------------------------------------

    def pass_time(self, now: Moment) -> None:
        """Let items become due, and leases and lives end. `ends` has the items that do not come again."""
        while self._leases and self._leases[0][0] <= now.steady_s:
            until_s, *item = heapq.heappop(self._leases)
            self._end_lease((item[0], item[1]), until_s, now)
        while self._lives and self._lives[0][0] <= now.wall_ms:
            _, id_ = heapq.heappop(self._lives)
            block = self._machine.blocks.get(id_)
            for number in range(block.count) if block is not None else ():
                if block is not None and block.state(number) is ItemState.READY:
                    self._ending[id_, number] = False
        while self._later and self._later[0].due_ms <= now.wall_ms:
            _, topic, entry = heapq.heappop(self._later)
            heapq.heappush(self._ready.setdefault(topic, []), entry)

    def _end_lease(self, item: Item, until_s: float, now: Moment) -> None:
        block = self._machine.blocks.get(item[0])
        if block is None or block.state(item[1]) is not ItemState.LEASED or self._until_s.get(item) != until_s:
            return
        if block.terms.expires_ms and block.terms.expires_ms <= now.wall_ms:
            self._ending[item] = False
        elif block.terms.attempts_max and block.attempt(item[1]) >= block.terms.attempts_max:
            self._ending[item] = True
        else:
            self._push(block, item[1], item[1] + 1, block.due_of(item[1]))

    def ends(self, now: Moment) -> list[EndDecision]:
        """Return decisions for items that are over, and busy until `ended`."""
        found: dict[bool, dict[tuple[int, int], list[int]]] = {}
        count = 0
        for item, dead in list(self._ending.items()):
            block = self._machine.blocks.get(item[0])
            state = block.state(item[1]) if block is not None else ItemState.ACKED
            is_leased = block is not None and self.is_leased(block, item[1], now)
            if block is None or is_leased or state not in (ItemState.READY, ItemState.LEASED):
                del self._ending[item]
            elif not self._busy[item] and count < ENDS_AT_ONCE_MAX:
                found.setdefault(dead, {}).setdefault((item[0], block.grant(item[1])), []).append(item[1])
                count += 1
        decisions: list[EndDecision] = []
        for dead, leases in found.items():
            items = tuple(LeasedItems(ranges_of(id_, numbers), grant) for (id_, grant), numbers in leases.items())
            self.hold(each.items for each in items)
            decisions.append(EndDecision(now.wall_ms, dead, items))
        return decisions

    def ended(self, decision: EndDecision) -> None:
        """Note that a decision about ends has its answer, or has failed."""
        for lease in decision.leases:
            for number in lease.items:
                self._ending.pop((lease.items.block, number), None)
        self.released(each.items for each in decision.leases)

    def is_ready(self, topics: Iterable[str], now: Moment) -> bool:
        """Whether a queue has an item that may be granted now."""
        self.pass_time(now)
        return any(self._first(topic, now) is not None for topic in topics)

    def has_ends(self) -> bool:
        """Whether some items are to end."""
        return bool(self._ending)

    def wait_s(self, now: Moment) -> float:
        """Return in how many seconds the next item changes by time alone."""
        moments = [(self._later[0].due_ms - now.wall_ms) / 1_000] if self._later else []
        moments += [self._leases[0][0] - now.steady_s] if self._leases else []
        moments += [(self._lives[0][0] - now.wall_ms) / 1_000] if self._lives else []
        return max(0.0, min(moments, default=math.inf))
