"""Chooses the next items to grant, and measures leases and lives of items at their owner. Pure.

The state (`machine.py`) has no times of leases. Its owner measures them from its decision on (Q3), and a new owner
begins them again when it opens the log (Q2). An item with a decision that is not in the log yet is `busy`: it is not
granted. So a late `extend` never meets another grant, and a worker keeps an item while its `ack` is being written.

Each step handles a range of items with the same status and the same local state as one. `ReadyItems` of a queue has
spans of blocks: a block takes one entry until its items differ. Of an ordered key, only the next item has an entry;
each decision about an item of the key adds the next one. The queues of a request take turns: the one that was served
longest ago is first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from memq.limits import QUEUE_ITEMS_PER_REQUEST_MAX
from memq.queues.agenda import SPARE, Agenda
from memq.queues.block import QueueBlock
from memq.queues.decisions import (
    EndDecision,
    GrantedBlock,
    ItemOutcome,
    ItemRanges,
    ItemState,
    ItemStatus,
    LeasedItems,
    Outcomes,
    merged_ranges,
    with_outcomes,
)
from memq.queues.local_states import LocalState, LocalStates, Place
from memq.queues.machine import QueueMachine
from memq.queues.range_map import Range, cut
from memq.queues.ready import ReadyItems, ReadySpan
from memq.queues.runs.spilled import RunHead

_FREE = (ItemState.READY, ItemState.LEASED)  # states of items that may be granted, if no lease runs
SLICE_BLOCKS = 1_000  # taken at once when a log is opened: about 5 ms
ENDS_AT_ONCE_MAX = 1_000  # items in one decision that ends them


class Moment(NamedTuple):
    """Now: the wall clock (Unix ms), and the monotonic clock in seconds."""

    wall_ms: int
    steady_s: float


class _Later(NamedTuple):
    """A `ReadySpan` that is not due yet; orders by due time."""

    due_ms: int
    priority: int
    arrival: int
    begin: int
    end: int
    block: int


class _Lease(NamedTuple):
    until_s: float
    block: int
    begin: int
    end: int


class Bounds(NamedTuple):
    """Bounds of a grant over all its queues: bytes of blocks, items, and at-most-once items.

    The first block counts in any case.
    """

    bytes_max: int
    items_max: int = QUEUE_ITEMS_PER_REQUEST_MAX
    once_max: int = QUEUE_ITEMS_PER_REQUEST_MAX


class _ChosenItems:
    """Items that are chosen, by block, and the rest of the bounds."""

    __slots__ = ("items", "once", "ranges", "room")

    def __init__(self, bytes_max: int, items_max: int, once_max: int) -> None:
        self.ranges: dict[int, list[Range]] = {}
        self.room, self.items, self.once = bytes_max, items_max, once_max

    def has_room(self, block: QueueBlock) -> bool:
        """Whether items of a block may be added."""
        is_new = bool(self.ranges) and block.number not in self.ranges
        if is_new and block.block.length > self.room:
            self.items = 0
        return self.items > 0 and (self.once > 0 or bool(block.terms.lease_ms))

    def add(self, block: QueueBlock, ranges: list[Range]) -> int:
        """Add items of a block; return how many."""
        count = sum(end - begin for begin, end in ranges)
        if block.number not in self.ranges:
            self.room -= block.block.length
        self.ranges.setdefault(block.number, []).extend(ranges)
        self.items -= count
        self.once -= 0 if block.terms.lease_ms else count
        return count


class SeenRange(NamedTuple):
    """A range of items of a block. `left_s` is the time left of their lease, 0 if no worker has them."""

    begin: int
    end: int
    status: ItemStatus
    left_s: float


Item = tuple[int, int]  # block and number


class ItemScheduler:
    """Chooses the items of a shard that are granted next. `now`: when the owner opened the log."""

    def __init__(self, machine: QueueMachine, now: Moment) -> None:
        for _ in self._begin(machine, now):
            pass

    @classmethod
    def in_slices(cls, machine: QueueMachine, now: Moment) -> Iterator[ItemScheduler | None]:
        """Return the steps to a scheduler; the last one is it, the others are None.

        No decision is applied before the end.
        """
        made = cls.__new__(cls)
        yield from made._begin(machine, now)
        yield made

    def _begin(self, machine: QueueMachine, now: Moment) -> Iterator[None]:
        self._machine = machine
        self._wall_ms = now.wall_ms  # when time last passed
        self._ready: dict[str, ReadyItems] = {}
        self._later = Agenda[_Later](lambda entry: entry.block in machine.blocks)
        self._local = LocalStates()
        self._leases = Agenda[_Lease](lambda entry: any(self._leased_until(entry)))
        self._lives = Agenda[tuple[int, int]](lambda entry: entry[1] in machine.blocks)  # blocks that expire, Unix ms
        self._turn = 0  # of the queue that was served last
        self.unread: set[str] = set()  # runs that can't be read now: other items do not wait for theirs
        self._ordered: dict[int, Place] = {}  # blocks with ordered keys
        for number, block in enumerate(machine.blocks.values(), 1):
            self._add(block, now)
            if number % SLICE_BLOCKS == 0:
                yield

    @property
    def machine(self) -> QueueMachine:
        """The state that it schedules."""
        return self._machine

    @property
    def entries(self) -> int:
        """Number of entries in memory, also stale ones."""
        agendas = len(self._later) + len(self._leases) + len(self._lives)
        ready = sum(1 + each.entries for each in self._ready.values())
        return agendas + self._local.entries + len(self._ordered) + ready

    # ---- new items -------------------------------------------------------------------------------

    def enqueued(self, block: int, now: Moment) -> None:
        """Add the items of a block that is new in the state."""
        made = self._machine.blocks.get(block)
        if made is not None:
            self._add(made, now)

    def spilled(self, queue: str) -> None:
        """Drop the entries of blocks of a queue that have left the memory."""
        if queue in self._ready:
            self._ready[queue].trim()
        self._later.drop_stale()

    def _add(self, block: QueueBlock, now: Moment) -> None:
        if block.terms.ordered:
            self._ordered[block.block.id.producer] = place_of(block)
            self._push(block, 0, block.count, 0)
        for begin, end, status in block.ranges():
            if status.state is ItemState.LEASED:
                self._lease(block, begin, end, status, now.steady_s)
            elif status.state is ItemState.READY and not block.terms.ordered:
                self._push(block, begin, end, status.due_ms)

    def _push(self, block: QueueBlock, begin: int, end: int, due_ms: int) -> None:
        """Add items of a block to the ready or later ones; of an ordered key, the next item."""
        if block.terms.ordered:
            self._push_next(place_of(block))
        else:
            span = ReadySpan(block.terms.priority, due_ms, block.arrival, begin, end, block.block.id.producer)
            self._await(place_of(block), span)
        if block.terms.expires_ms:  # on each push: the entry was removed when it was due
            self._lives.push((block.terms.expires_ms, block.block.id.producer))

    def _push_next(self, place: Place) -> None:
        found = self._machine.ordered.next_of(*place)
        if found is not None:
            block, number = found
            order = block.terms.priority, block.status(number).due_ms, block.arrival
            span = ReadySpan(*order, number, number + 1, block.block.id.producer)
            self._await(place, span)

    def _await(self, place: Place, span: ReadySpan) -> None:
        """Add a span to the ready ones, or to the later ones if it is not due yet."""
        if span.due_ms <= self._wall_ms:
            self._ready_of(place[0]).push(place[1], span, self._local.flights[place])
        else:
            self._later.push(_later(span))

    def _lease(
        self, block: QueueBlock, begin: int, end: int, status: ItemStatus, from_s: float, decisions: int = 0
    ) -> None:
        """Begin the lease of a range of items at `from_s`; `decisions` of their decisions have their answers."""
        until_s, id_ = from_s + status.lease_ms / 1_000, block.block.id.producer
        self._leases.push(_Lease(until_s, id_, begin, end))
        self._local.change(
            id_, begin, end, lambda state: LocalState(max(0, state.busy - decisions), until_s, True), place_of(block)
        )

    # ---- grants ----------------------------------------------------------------------------------

    def take(self, wanted: Mapping[str, int], bounds: Bounds, now: Moment) -> list[ItemRanges]:
        """Choose items of each queue, at most the wanted number, and at most as the bounds of all queues say.

        Queues with many items share the bound; the one that was served longest ago is first. The chosen items are busy
        until `granted` or `released`.
        """
        self.pass_time(now)
        choice = _ChosenItems(*bounds)
        left, waiting = dict(wanted), sorted(wanted, key=self._served)
        while waiting and choice.items > 0:
            share, rest = max(1, choice.items // len(waiting)), list[str]()
            for topic in waiting:
                count = min(left[topic], share, choice.items)
                taken = self._take_of(topic, count, choice, now)
                left[topic] -= taken
                if 0 < taken == count and left[topic]:
                    rest.append(topic)
            waiting = rest
        return [merged_ranges(block, ranges) for block, ranges in choice.ranges.items()]

    def _take_of(self, topic: str, count: int, choice: _ChosenItems, now: Moment) -> int:
        """Choose at most `count` items of a queue; return how many."""
        first_free, ready, left = partial(self._first_free, now), self._ready.get(topic), count
        heads = self.due_heads(topic, now)
        while ready is not None and left > 0:
            span = ready.first(first_free)
            if span is None or self._is_behind(heads, span):
                break
            block = self._machine.blocks[span.block]
            if not choice.has_room(block):
                break
            most = left if block.terms.lease_ms else min(left, choice.once)
            taken = ready.take(most, lambda key: self._local.flights[topic, key], first_free)
            for begin, end in taken:
                self._local.change(span.block, begin, end, _chosen_state, place_of(block))
            left -= choice.add(block, taken)
            self._turn += 1
            ready.served = self._turn
        if ready is not None and not ready:
            del self._ready[topic]
        return count - left

    def _served(self, topic: str) -> int:
        """Return the turn in which a queue was served last; 0 for a queue without ready items."""
        ready = self._ready.get(topic)
        return ready.served if ready is not None else 0

    def peek(self, topic: str, count: int, now: Moment) -> list[Item]:
        """Return the items of a queue that `take` would choose next, in this order. They are not taken."""
        self.pass_time(now)
        known, seen = self._ready.get(topic), dict[Item, None]()
        ready = known.copy() if known is not None else ReadyItems(self._is_live)
        flights, heads = Counter[str](), self.due_heads(topic, now)

        def first_free(span: ReadySpan) -> Range | None:
            found = self._first_free(now, span)
            for number in range(*found) if found is not None else ():
                if (span.block, number) not in seen:
                    return number, number + 1
            return first_free(span._replace(begin=found[1])) if found is not None and found[1] < span.end else None

        while len(seen) < count:
            span = ready.first(first_free)
            if span is None or self._is_behind(heads, span):
                break
            key = self._machine.blocks[span.block].terms.key
            taken = ready.take(
                count - len(seen), lambda key: self._local.flights[topic, key] + flights[key], first_free
            )
            numbers = [number for begin, end in taken for number in range(begin, end)]
            seen.update(dict.fromkeys((span.block, number) for number in numbers))
            flights[key] += len(numbers)
        return list(seen)

    def _has_ready(self, topic: str, now: Moment, *, once: bool) -> bool:
        span = self._first_span(topic, now)
        if span is None or self._is_behind(self.due_heads(topic, now), span):
            return False
        return once or bool(self._machine.blocks[span.block].terms.lease_ms)

    def _first_span(self, topic: str, now: Moment) -> ReadySpan | None:
        """Return the first span in memory of a queue; None without one."""
        ready = self._ready.get(topic)
        span = ready.first(partial(self._first_free, now)) if ready is not None else None
        if ready is not None and span is None:
            del self._ready[topic]
        return span

    def in_runs(self, topics: Iterable[str], now: Moment) -> list[str]:
        """Return the queues whose next due item lies in a run."""
        return [topic for topic in topics if self._is_in_run(topic, now)]

    def _is_in_run(self, topic: str, now: Moment) -> bool:
        heads = self.due_heads(topic, now)
        span = self._first_span(topic, now) if heads else None
        return bool(heads) and (span is None or self._is_behind(heads, span))

    def due_heads(self, queue: str, now: Moment) -> list[RunHead]:
        """Return the heads of the runs of a queue that are due now, of those that can be read."""
        heads = self._machine.spilled.heads(queue)
        return [each for each in heads if each.due_ms <= now.wall_ms and each.run not in self.unread]

    def _is_behind(self, heads: list[RunHead], span: ReadySpan) -> bool:
        """Whether a due block in a run comes before a span: of the same lane, or of a lower priority number."""
        key = self._machine.blocks[span.block].terms.key if heads else ""
        return any(
            each.lane.priority < span.priority
            or (each.lane[1:] == (key, span.priority) and each.place[:2] < (span.due_ms, span.arrival))
            for each in heads
        )

    def _first_free(self, now: Moment, span: ReadySpan) -> Range | None:
        """Return the first range of a span that may be granted now.

        Items with another due time belong to another span.
        """
        block = self._machine.blocks.get(span.block)
        if block is None or 0 < block.terms.expires_ms <= now.wall_ms or span.due_ms > now.wall_ms:
            return None
        begin, end = self._machine.ordered.grantable(block, span.begin, span.end)
        for first, last, status in block.ranges(begin, end):
            if status.due_ms != span.due_ms or status.state not in _FREE:
                continue
            for one, other, local in self._local.ranges(span.block, first, last):
                if not local.busy and local.dies is None and not is_leased(status, local, now):
                    return one, other
        return None

    def _states(
        self, block: QueueBlock, begin: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, int, ItemStatus, LocalState]]:
        """Yield ranges of items of a block with the same status and local state."""
        for first, last, status in block.ranges(begin, end):
            for each in self._local.ranges(block.block.id.producer, first, last):
                yield each[0], each[1], status, each[2]

    def seen(self, block: QueueBlock, now: Moment, begin: int = 0, end: int | None = None) -> Iterator[SeenRange]:
        """Yield ranges of items of a block with their present status and lease."""
        for first, last, status, local in self._states(block, begin, end):
            until_s = local.until_s if local.until_s is not None else now.steady_s + status.lease_ms / 1_000
            yield SeenRange(first, last, status, until_s - now.steady_s if is_leased(status, local, now) else 0.0)

    def hold(self, items: Iterable[ItemRanges]) -> None:
        """Note that a decision about items is proposed: they are busy until `released` or `granted`."""
        for each in items:
            for begin, end in each.pairs():
                self._local.change(each.block, begin, end, _held)

    def granted(self, items: Iterable[ItemRanges], blocks: Iterable[GrantedBlock], decided_s: float) -> None:
        """Note that a grant counts for the items in `blocks`. Their leases have run since `decided_s`."""
        leased = {each.block.id.producer: [run[:2] for run in each.items] for each in blocks}
        for each in items:
            granted = leased.get(each.block, ())
            for whole in each.pairs():
                for begin, end, is_granted in cut(*whole, granted):
                    self._settled(each.block, begin, end, decided_s if is_granted else None)

    def released(self, items: Iterable[ItemRanges], outcomes: Outcomes = (), decided_s: float = 0.0) -> None:
        """Note that a decision about items counts, with its outcomes, or has failed.

        Leases that the decision extends have run since `decided_s`.
        """
        if outcomes:
            for block, begin, end, outcome in with_outcomes(items, outcomes):
                self._settled(block, begin, end, decided_s if outcome is ItemOutcome.EXTENDED else None)
            return
        for each in items:
            for begin, end in each.pairs():
                self._settled(each.block, begin, end, None)

    def _settled(self, id_: int, begin: int, end: int, decided_s: float | None) -> None:
        """Note that a decision about items has its answer, and add them again with their state now.

        Leased items have a lease that runs since `decided_s`; None leaves their leases as they are.
        """
        block = self._machine.blocks.get(id_)
        if id_ in self._ordered:
            self._push_next(self._ordered[id_])
        if block is None:
            self._local.change(id_, begin, end, _landed)
            self._ordered.pop(id_, None)
            return
        at = begin
        for first, last, status in block.ranges(begin, end):
            at = last
            if status.state is not ItemState.LEASED:
                self._local.change(id_, first, last, _landed)
                if status.state is ItemState.READY:
                    self._push(block, first, last, status.due_ms)
                continue
            if decided_s is not None:
                self._lease(block, first, last, status, decided_s, decisions=1)
            else:
                self._expect(id_, first, last)
        if at < end:  # items that the block does not have
            self._local.change(id_, at, end, _landed)

    def _expect(self, id_: int, begin: int, end: int) -> None:
        """Add the ends of leases again after a decision. A lease without a known end is over."""
        self._local.change(id_, begin, end, _answered)
        for first, last, local in self._local.ranges(id_, begin, end):
            if local.until_s is not None:
                self._leases.push(_Lease(local.until_s, id_, first, last))

    # ---- time ------------------------------------------------------------------------------------

    def pass_time(self, now: Moment) -> None:
        """Handle all times up to now: due items, ends of leases and lives. Items that must end are in `ends`."""
        self._trim()
        if now.wall_ms < self._wall_ms:  # the clock was set back
            for ready in self._ready.values():
                for span in ready.take_later(now.wall_ms):
                    self._later.push(_later(span))
        self._wall_ms = now.wall_ms
        for lease in self._leases.until(now.steady_s):
            for begin, end in self._leased_until(lease):
                self._end_lease(lease.block, begin, end, now)
        for _, id_ in self._lives.until(now.wall_ms):
            block = self._machine.blocks.get(id_)
            for first, last, status, local in self._states(block) if block is not None else ():
                if _is_idle(status, local, now):
                    self._local.change(id_, first, last, lambda state: state._replace(dies=False))
        for due_ms, priority, *rest in self._later.until(now.wall_ms):
            span = ReadySpan(priority, due_ms, *rest)
            if self._is_live(span):
                self._await(place_of(self._machine.blocks[span.block]), span)

    def _trim(self) -> None:
        """Drop stale entries: an item with a lease of 12 h may be acked at once, a delayed one cancelled."""
        self._leases.trim(self._local.leased)
        self._lives.trim(len(self._machine.blocks))
        self._later.trim(self._machine.items)
        topics = self._machine.topics
        if len(self._ready) > 2 * len(topics) + SPARE:
            self._ready = {topic: found for topic, found in self._ready.items() if topic in topics}

    def _is_live(self, span: ReadySpan) -> bool:
        return span.block in self._machine.blocks

    def _leased_until(self, lease: _Lease) -> Iterator[Range]:
        """Yield the items that still have this lease, and not a longer one."""
        for begin, end, local in self._local.ranges(lease.block, lease.begin, lease.end):
            if local.until_s == lease.until_s:
                yield begin, end

    def _ready_of(self, topic: str) -> ReadyItems:
        """Return the ready items of a queue, new ones if it has none."""
        known = self._ready.get(topic)
        if known is None:
            known = self._ready[topic] = ReadyItems(self._is_live, self._turn)
        return known

    def _end_lease(self, id_: int, begin: int, end: int, now: Moment) -> None:
        block = self._machine.blocks.get(id_)
        for first, last, status in block.ranges(begin, end) if block is not None else ():
            if block is None or status.state is not ItemState.LEASED:
                continue
            self._local.change(id_, first, last, lambda state: state._replace(in_flight=False))
            if block.terms.expires_ms and block.terms.expires_ms <= now.wall_ms:
                self._local.change(id_, first, last, lambda state: state._replace(dies=False))
            elif block.terms.attempts_max and status.attempts >= block.terms.attempts_max:
                self._local.change(id_, first, last, lambda state: state._replace(dies=True))
            else:
                self._push(block, first, last, status.due_ms)

    def ends(self, now: Moment) -> list[EndDecision]:
        """Return decisions that end items. These are busy until `ended`."""
        found: dict[bool, dict[tuple[int, int], list[Range]]] = {}
        left = ENDS_AT_ONCE_MAX
        for id_ in list(self._local.ending):
            for first, last, status, local in list(self._ending_items(id_, now)):
                if not local.busy and left and local.dies is not None:
                    end = min(last, first + left)
                    found.setdefault(local.dies, {}).setdefault((id_, status.grant), []).append((first, end))
                    left -= end - first
        decisions: list[EndDecision] = []
        for dead, leases in found.items():
            items = tuple(LeasedItems(merged_ranges(id_, ranges), grant) for (id_, grant), ranges in leases.items())
            self.hold(each.items for each in items)
            decisions.append(EndDecision(now.wall_ms, dead, items))
        return decisions

    def _ending_items(self, id_: int, now: Moment) -> Iterator[tuple[int, int, ItemStatus, LocalState]]:
        """Yield the items of a block that must end. Forget the end of items that a worker got meanwhile."""
        block = self._machine.blocks.get(id_)
        if block is None:
            self._local.forget_ends(id_)
            return
        for first, last, status, local in self._states(block):
            if local.dies is not None and _is_idle(status, local, now):
                yield first, last, status, local
            elif local.dies is not None:
                self._local.change(id_, first, last, lambda state: state._replace(dies=None))

    def ended(self, decision: EndDecision) -> None:
        """Note that a decision about ends has its answer, or has failed."""
        self.released(each.items for each in decision.leases)

    def is_ready(self, topics: Iterable[str], now: Moment, *, once: bool = True) -> bool:
        """Whether a queue has an item that may be granted now.

        Without `once`, an item that is delivered at most once does not count.
        """
        self.pass_time(now)
        return any(self._has_ready(topic, now, once=once) for topic in topics)

    def has_ends(self) -> bool:
        """Whether some items must end."""
        return bool(self._local.ending)

    def wait_s(self, now: Moment) -> float:
        """Return the seconds until the next change by time alone."""
        wall_ms = min(self._later.next, self._lives.next) - now.wall_ms
        return max(0.0, min(wall_ms / 1_000, self._leases.next - now.steady_s))


def place_of(block: QueueBlock) -> Place:
    """Return queue and key of a block."""
    return block.topic, block.terms.key


def _later(span: ReadySpan) -> _Later:
    return _Later(span.due_ms, span.priority, *span[2:])


def is_leased(status: ItemStatus, local: LocalState, now: Moment) -> bool:
    """Whether a worker has an item now. A lease without a known end is running."""
    return status.state is ItemState.LEASED and (local.until_s is None or local.until_s > now.steady_s)


def _is_idle(status: ItemStatus, local: LocalState, now: Moment) -> bool:
    """Whether an item has not ended, and no worker has it now."""
    return status.state in _FREE and not is_leased(status, local, now)


def _chosen_state(state: LocalState) -> LocalState:
    return LocalState(state.busy + 1, state.until_s, True, state.dies)


def _answered(state: LocalState) -> LocalState:
    return LocalState(max(0, state.busy - 1), state.until_s or 0.0, state.in_flight)


def _held(state: LocalState) -> LocalState:
    return LocalState(state.busy + 1, *state[1:])


def _landed(state: LocalState) -> LocalState:
    # `dies` is reset: the item may have been redriven. Time sets it again if the item must still end.
    return LocalState(max(0, state.busy - 1))
