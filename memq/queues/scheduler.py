"""The times of queue items at their owner: the next one, and the ends of leases and lives. Pure.

The state (`machine.py`) has no times of leases. Its owner counts them from its decision on (Q3), and a new owner
begins them again when it opens the log (Q2). An item with a decision on its way is `busy`: no grant takes it until that
counts. So a late `extend` never meets another grant, and a worker whose `ack` is on its way loses nothing.

Ready items lie in `ReadyItems` of their queue, as spans of a block: a block takes one entry until its items differ.
Of an ordered key, only the next item is there; each decision on an item of the key brings the next one. Of the queues
of a request, the one that was served longest ago is first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from memq.queues.agenda import SPARE, Agenda
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
from memq.queues.ready import ReadyItems, ReadySpan

ENDS_AT_ONCE_MAX = 1_000  # items in one decision that ends them


class Moment(NamedTuple):
    """Now: the wall clock (Unix ms), and the monotonic clock in seconds."""

    wall_ms: int
    steady_s: float


class _Later(NamedTuple):
    due_ms: int
    place: Place
    span: ReadySpan


Item = tuple[int, int]  # block and number
Place = tuple[str, str]  # queue and key


class ItemScheduler:
    """Chooses the items of a shard that are granted next. `now` is when the owner has opened its log."""

    def __init__(self, machine: QueueMachine, now: Moment) -> None:
        self._machine = machine
        self._wall_ms = now.wall_ms  # when time last passed
        self._ready: dict[str, ReadyItems] = {}
        self._later = Agenda[_Later](lambda entry: self._is_live(entry.span))
        self._until_s: dict[Item, float] = {}  # when the present leases end
        self._leases = Agenda[tuple[float, int, int]](lambda entry: self._until_s.get(entry[1:]) == entry[0])
        self._lives = Agenda[tuple[int, int]](lambda entry: entry[1] in machine.blocks)  # blocks that expire, Unix ms
        self._turn = 0  # of the queue that was served last
        self._in_flight: dict[Item, Place] = {}  # chosen or leased, and the lease is not over
        self._flights: Counter[Place] = Counter()  # how many items of each key are
        self._ordered: dict[int, Place] = {}  # blocks with ordered keys
        self._busy: Counter[Item] = Counter()
        self._ending: dict[Item, bool] = {}  # items that are to end, and whether they are dead
        for block in machine.blocks.values():
            self._add(block, now)

    @property
    def entries(self) -> int:
        """How many entries it has in memory, stale ones too."""
        agendas = len(self._later) + len(self._leases) + len(self._lives)
        items = len(self._until_s) + len(self._busy) + len(self._ending) + len(self._in_flight) + len(self._ordered)
        return agendas + items + len(self._flights) + sum(1 + ready.entries for ready in self._ready.values())

    # ---- new items -------------------------------------------------------------------------------

    def enqueued(self, block: int, now: Moment) -> None:
        """Take the items of a block that is new in the state."""
        made = self._machine.blocks.get(block)
        if made is not None:
            self._add(made, now)

    def _add(self, block: QueueBlock, now: Moment) -> None:
        if block.terms.ordered:
            self._ordered[block.block.id.producer] = place_of(block)
        for number in block.numbers_in(ItemState.LEASED):
            self._lease(block, number, now.steady_s)
        if block.terms.ordered or not block.is_touched:
            self._push(block, 0, block.count, block.block.due_ms)
            return
        for number in block.numbers_in(ItemState.READY):
            self._push(block, number, number + 1, block.due_of(number))

    def _push(self, block: QueueBlock, begin: int, end: int, due_ms: int) -> None:
        """Expect items of a block when they are due; of an ordered key, the next item."""
        if block.terms.ordered:
            self._push_next(place_of(block))
        else:
            span = ReadySpan(block.terms.priority, due_ms, block.arrival, begin, end, block.block.id.producer)
            self._later.push(_Later(due_ms, place_of(block), span))
        if block.terms.expires_ms:  # pushed again: a life that is over is taken once
            self._lives.push((block.terms.expires_ms, block.block.id.producer))

    def _push_next(self, place: Place) -> None:
        found = self._machine.ordered.next_of(*place)
        if found is not None:
            block, number = found
            order = block.terms.priority, block.due_of(number), block.arrival
            span = ReadySpan(*order, number, number + 1, block.block.id.producer)
            self._later.push(_Later(span.due_ms, place, span))

    def _lease(self, block: QueueBlock, number: int, from_s: float) -> None:
        """Begin the lease that the state has for an item."""
        item = block.block.id.producer, number
        self._until_s[item] = until_s = from_s + block.lease_of(number) / 1_000
        self._leases.push((until_s, *item))
        self._depart(item, block)

    def _depart(self, item: Item, block: QueueBlock) -> None:
        """Count an item as in flight."""
        if item not in self._in_flight:
            place = self._in_flight[item] = place_of(block)
            self._flights[place] += 1

    def _land(self, item: Item) -> None:
        """Count an item as no longer in flight."""
        place = self._in_flight.pop(item, None)
        if place is not None:
            self._flights[place] -= 1
            if not self._flights[place]:
                del self._flights[place]

    # ---- grants ----------------------------------------------------------------------------------

    def take(self, wanted: Mapping[str, int], bytes_max: int, now: Moment) -> list[ItemRanges]:
        """Choose items of each queue, at most as many as are wanted.

        They are busy until `granted` or `released`. `bytes_max` bounds the bytes of their blocks, but for the first.
        """
        self.pass_time(now)
        is_free, room, chosen = partial(self._is_free, now), bytes_max, dict[int, list[int]]()
        for topic in sorted(wanted, key=self._served):
            ready, left = self._ready.get(topic), wanted[topic]
            while ready is not None and left > 0:
                span = ready.first(is_free)
                if span is None:
                    break
                block = self._machine.blocks[span.block]
                if span.block not in chosen:
                    room -= block.block.length
                    if chosen and room < 0:
                        return self._chosen(chosen)
                numbers = ready.take(left, lambda key, topic=topic: self._flights[topic, key], is_free)  # type: ignore[misc]
                for number in numbers:
                    self._busy[span.block, number] += 1
                    self._depart((span.block, number), block)
                chosen.setdefault(span.block, []).extend(numbers)
                left -= len(numbers)
                self._turn += 1
                ready.served = self._turn
            if ready is not None and not ready:
                del self._ready[topic]
        return self._chosen(chosen)

    def _served(self, topic: str) -> int:
        """Return when a queue was served last; one without ready items gets nothing."""
        ready = self._ready.get(topic)
        return ready.served if ready is not None else 0

    def _chosen(self, chosen: Mapping[int, list[int]]) -> list[ItemRanges]:
        return [ranges_of(block, numbers) for block, numbers in chosen.items()]

    def peek(self, topic: str, count: int, now: Moment) -> list[Item]:
        """Return the items of a queue that `take` would choose next, in this order. They stay."""
        self.pass_time(now)
        known, seen = self._ready.get(topic), dict[Item, None]()
        ready = known.copy() if known is not None else ReadyItems(self._is_live)
        flights = Counter[str]()

        def is_free(id_: int, number: int) -> bool:
            return (id_, number) not in seen and self._is_free(now, id_, number)

        while len(seen) < count:
            span = ready.first(is_free)
            if span is None:
                break
            key = self._machine.blocks[span.block].terms.key
            numbers = ready.take(count - len(seen), lambda key: self._flights[topic, key] + flights[key], is_free)
            seen.update(dict.fromkeys((span.block, number) for number in numbers))
            flights[key] += len(numbers)
        return list(seen)

    def _has_ready(self, topic: str, now: Moment) -> bool:
        ready = self._ready.get(topic)
        if ready is not None and ready.first(partial(self._is_free, now)) is None:
            del self._ready[topic]
            ready = None
        return ready is not None

    def _is_free(self, now: Moment, id_: int, number: int) -> bool:
        """Whether an item may be granted now."""
        block = self._machine.blocks.get(id_)
        if block is None or self._busy[id_, number] or (id_, number) in self._ending:
            return False
        if block.terms.expires_ms and block.terms.expires_ms <= now.wall_ms:
            return False
        if block.terms.ordered and not self._machine.ordered.may_grant(block, number):
            return False
        state = block.state(number)
        if state is ItemState.LEASED:
            return not self.is_leased(block, number, now)
        return state is ItemState.READY and block.due_of(number) <= now.wall_ms

    def is_leased(self, block: QueueBlock, number: int, now: Moment) -> bool:
        """Whether a worker has an item now."""
        until_s = self._until_s.get((block.block.id.producer, number), math.inf)
        return block.state(number) is ItemState.LEASED and until_s > now.steady_s

    def _is_idle(self, block: QueueBlock, number: int, now: Moment) -> bool:
        """Whether an item may come again, and no worker has it now."""
        return block.state(number) in (ItemState.READY, ItemState.LEASED) and not self.is_leased(block, number, now)

    def left_s(self, item: Item, now: Moment) -> float:
        """Return how long a worker has an item; 0 if no worker has it."""
        block = self._machine.blocks.get(item[0])
        if block is None or not self.is_leased(block, item[1], now):
            return 0.0
        return self._until_s.get(item, now.steady_s + block.lease_of(item[1]) / 1_000) - now.steady_s

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
        self._ending.pop(item, None)  # its end is noticed again, if it is one still: it may have been sent back
        if state is not ItemState.LEASED:
            self._until_s.pop(item, None)
            self._land(item)
        if item[0] in self._ordered:
            self._push_next(self._ordered[item[0]])
        if block is None or state is None:
            self._ordered.pop(item[0], None)
            return
        if state is ItemState.READY:
            self._push(block, item[1], item[1] + 1, block.due_of(item[1]))
        elif state is ItemState.LEASED:
            self._leases.push((self._until_s.setdefault(item, 0.0), *item))

    # ---- time ------------------------------------------------------------------------------------

    def pass_time(self, now: Moment) -> None:
        """Let items become due, and leases and lives end. `ends` has the items that do not come again."""
        self._trim()
        if now.wall_ms < self._wall_ms:  # the clock was set back
            for topic, ready in self._ready.items():
                for key, span in ready.take_later(now.wall_ms):
                    self._later.push(_Later(span.due_ms, (topic, key), span))
        self._wall_ms = now.wall_ms
        for until_s, *item in self._leases.until(now.steady_s):
            self._end_lease((item[0], item[1]), until_s, now)
        for _, id_ in self._lives.until(now.wall_ms):
            block = self._machine.blocks.get(id_)
            for number in range(block.count) if block is not None else ():
                if block is not None and self._is_idle(block, number, now):
                    self._ending[id_, number] = False
        for _, (topic, key), span in self._later.until(now.wall_ms):
            self._ready_of(topic).push(key, span, self._flights[topic, key])

    def _trim(self) -> None:
        """Drop what is stale: leases of 12 hours may be acked at once, and delayed items cancelled."""
        self._leases.trim(len(self._until_s))
        self._lives.trim(len(self._machine.blocks))
        self._later.trim(self._machine.items)
        topics = self._machine.topics
        if len(self._ready) > 2 * len(topics) + SPARE:
            self._ready = {topic: found for topic, found in self._ready.items() if topic in topics}

    def _is_live(self, span: ReadySpan) -> bool:
        return span.block in self._machine.blocks

    def _ready_of(self, topic: str) -> ReadyItems:
        """Return the ready items of a queue, to add some."""
        known = self._ready.get(topic)
        if known is None:
            known = self._ready[topic] = ReadyItems(self._is_live, self._turn)
        return known

    def _end_lease(self, item: Item, until_s: float, now: Moment) -> None:
        block = self._machine.blocks.get(item[0])
        if block is None or block.state(item[1]) is not ItemState.LEASED or self._until_s.get(item) != until_s:
            return
        self._land(item)
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
            if block is None or not self._is_idle(block, item[1], now):
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
        return any(self._has_ready(topic, now) for topic in topics)

    def has_ends(self) -> bool:
        """Whether some items are to end."""
        return bool(self._ending)

    def wait_s(self, now: Moment) -> float:
        """Return in how many seconds the next item changes by time alone."""
        wall_ms = min(self._later.next, self._lives.next) - now.wall_ms
        return max(0.0, min(wall_ms / 1_000, self._leases.next - now.steady_s))


def place_of(block: QueueBlock) -> Place:
    """Return queue and key of a block."""
    return block.topic, block.terms.key
