"""Replays decisions about queue items by its own rules, and compares snapshots with them. Pure.

This fold shares the bytes of decisions with `memq/queues/machine.py`, and no rule: the same fault in both would not be
found. It keeps the end of every item, so it finds items that are delivered after their end. After a fault it continues
with the state of the log.

The owner chooses items before it publishes their grant, and an ack of their former lease may come between the two. The
machine skips such an item. So a grant of an acked item is a fault in two cases: the owner chose it after the ack, by
its own clock, or a worker names that lease later. A worker can know the number of a grant only from its answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from memq.audit.items.report import ItemFault, ItemFinding
from memq.audit.items.runs import AuditedRuns
from memq.format.held_object import HeldBlock, HeldLane
from memq.format.state_log.queue_run import QueueRunEntry
from memq.queues.decisions import (
    FORMAT,
    AckDecision,
    CancelDecision,
    Dedupe,
    EndDecision,
    EndPopDecision,
    EnqueueDecision,
    ExtendDecision,
    FormerBlock,
    GrantDecision,
    ItemState,
    ItemTerms,
    LeasedItems,
    NackDecision,
    NackKind,
    PopDecision,
    PurgeDecision,
    RedriveDecision,
    RunsDecision,
    SavedBlock,
    SavedQueues,
    decode_decision,
    terms_of,
)
from memq.queues.pop.groups import BeginPopDecision, ReadPopDecision, RemovePopDecision
from memq.queues.runs.spilled import SpillBlocksDecision, ids_in

PopPlaces = dict[int, tuple[int, int]]  # by read partition: pointer offset and record index
LIVE = (ItemState.READY, ItemState.LEASED)
OVER = (ItemState.ACKED, ItemState.EXPIRED, ItemState.CANCELLED)
ATTEMPTS_MAX = (1 << 16) - 1
WORDS = {
    ItemState.READY: "waiting",
    ItemState.LEASED: "leased",
    ItemState.ACKED: "acked",
    ItemState.EXPIRED: "expired",
    ItemState.CANCELLED: "cancelled",
    ItemState.DEAD: "dead",
}


@dataclass(slots=True)
class Item:
    """The state of one item. With `due_ms` 0 it has the due time of its block.

    `skipped` has the grants that named the item after its end. `refused` is the grant of the last ack under a former
    lease.
    """

    state: ItemState = ItemState.READY
    grant: int = 0
    attempts: int = 0
    due_ms: int = 0
    ended_ms: int = 0
    skipped: tuple[int, ...] = ()
    refused: int = 0


@dataclass(slots=True)
class Block:
    """A block of items, by its random id. A block that ended before the base has no queue, and no place."""

    id: int
    arrival: int
    queue: str
    key: str
    terms: ItemTerms
    place: HeldBlock | None
    count: int
    items: dict[int, Item] = field(default_factory=dict)  # by number; only those that a decision has named
    is_stream: bool = False  # its records lie in a topic, where a pop group has read them
    came_again: bool = False

    def item(self, number: int) -> Item:
        """Return an item, to be changed."""
        return self.items.get(number) or self.items.setdefault(number, Item())

    def peek(self, number: int) -> Item:
        """Return an item as it is."""
        return self.items.get(number) or UNTOUCHED

    def numbers(self, *states: ItemState) -> Iterator[int]:
        """Yield the items in one of these states, in order."""
        return (number for number in range(self.count) if self.peek(number).state in states)

    @property
    def may_move(self) -> bool:
        """Whether the block may leave the memory of its owner: its items are as they arrived."""
        bound = self.terms.ordered or self.terms.dedupe is not None or self.terms.expires_ms or self.is_stream
        changed = any(each.grant or each.due_ms or each.state is not ItemState.READY for each in self.items.values())
        return self.place is not None and not (bound or changed or self.came_again)

    @property
    def is_needed(self) -> bool:
        """Whether an item needs its payload."""
        return next(self.numbers(*LIVE, ItemState.DEAD), None) is not None

    def id_of(self, number: int) -> str:
        """Return the id of an item, as users have it."""
        return f"{self.queue}:{self.id:016x}:{number}"


UNTOUCHED = Item()
NO_TERMS = ItemTerms(0, 0, 0, 0)


class ItemFold:
    """The items of one shard, by its decisions from the snapshot `base` on.

    `in_runs` has the blocks of the runs that this snapshot names. `take_findings` returns the faults since its last
    call.
    """

    def __init__(
        self, shard: int, base: SavedQueues | None = None, in_runs: Mapping[int, QueueRunEntry] | None = None
    ) -> None:
        self.blocks: dict[int, Block] = {}
        self.runs = AuditedRuns()
        self.former = 0
        self._shard = shard
        self._last_grant = 0
        self._ends: dict[str, int] = {}
        self._arrivals = 0
        self._firsts: dict[bytes, tuple[int, int]] = {}  # block, and the end of the window
        self._windows: list[tuple[int, bytes]] = []
        self._ordered: dict[tuple[str, str], dict[int, Block]] = {}  # by arrival, in this order
        self._holders: dict[tuple[str, str], tuple[Block, int]] = {}  # the last item of each key that was granted
        self._found: list[ItemFinding] = []
        self._pops: dict[str, tuple[str, int, PopPlaces]] = {}  # pop groups by queue: topic id, life, positions
        if base is not None:
            self._begin(base, in_runs or {})

    def _begin(self, base: SavedQueues, in_runs: Mapping[int, QueueRunEntry]) -> None:
        self._last_grant, self._arrivals, self._ends = base.last_grant, base.arrivals, dict(base.totals)
        for group in base.pops:
            places = {each.partition: (each.offset, each.index) for each in group.positions}
            self._pops[group.queue] = group.topic_id, group.life, places
        for run in base.runs:
            self.runs.begin(run)
            missing = [id_ for id_ in ids_in(run.ids) if id_ not in in_runs]
            if missing:
                text = f"run '{run.run.key}' lacks {len(missing)} blocks of the snapshot that names it"
                self._note(ItemFault.LOST, text, items=len(missing))
        stored = map(_block_in_run, in_runs.values())
        for saved in sorted((*_blocks_of(base), *stored), key=lambda each: each.arrival):
            self._insert(saved)
        for id_, ended in base.ended:
            block = Block(id_, 0, "", "", NO_TERMS, None, sum(count for _, _, count in ended.runs))
            for number, (state, grant) in enumerate(_ends_of(ended.runs)):
                block.items[number] = Item(state, grant, ended_ms=ended.ended_ms)
            self.blocks[id_] = block
        for digest, first, until_ms in base.firsts:
            self._first(digest, first, until_ms)
        over = sum(1 for block in self.blocks.values() for _ in block.numbers(*OVER))
        self.former = max(0, sum(self._ends.get(WORDS[state], 0) for state in OVER) - over)

    def take_findings(self) -> list[ItemFinding]:
        """Return the findings since the last call."""
        found, self._found = self._found, []
        return found

    def apply(self, body: bytes) -> None:
        """Fold a decision that counts. Raises: CorruptDataError."""
        decision = decode_decision(body)
        match decision:
            case EnqueueDecision():
                for lane in decision.lanes:
                    for place in lane.blocks:
                        self._enqueue(decision.key, lane, place)
            case GrantDecision():
                self._grant(decision)
            case AckDecision() | NackDecision() | ExtendDecision():
                for lease in decision.leases:
                    self._leased(decision, lease)
            case EndDecision():
                self._end(decision)
            case CancelDecision() | PurgeDecision() | RedriveDecision():
                self._settle(decision)
            case BeginPopDecision() | ReadPopDecision() | RemovePopDecision() | EndPopDecision():
                self._pop(decision)
            case _:
                self._move(decision)

    # ---- decisions -------------------------------------------------------------------------------

    def _enqueue(self, key: str, lane: HeldLane, place: HeldBlock) -> None:
        known = self.blocks.get(place.id.producer)
        if known is not None:
            if known.place is not None and known.is_needed:
                known.came_again = known.came_again or known.id not in self.runs
                if known.id in self.runs:
                    return  # its run names the object
                known.key = key  # it is due when it was
                known.place = msgspec.structs.replace(place, due_ms=known.place.due_ms)
            return
        terms = terms_of(lane.lane)
        count = place.next - place.id.first
        block = Block(place.id.producer, self._arrivals + 1, lane.target.topic, key, terms, place, count)
        block.is_stream = bool(lane.target.topic_id)
        if terms.dedupe is not None and not self._is_first(terms.dedupe, block.id):
            block.items = {number: Item(ItemState.CANCELLED, ended_ms=terms.dedupe.since_ms) for number in range(count)}
            block.queue, block.place = "", None  # it was never an item: `former` and the account leave it out
            self.blocks[block.id] = block
            return
        self._arrivals += 1
        self._insert(block)

    def _insert(self, block: Block) -> None:
        self.blocks[block.id] = block
        if block.terms.ordered:
            key = block.queue, block.terms.key
            self._ordered.setdefault(key, {})[block.arrival] = block
            for number in block.numbers(ItemState.LEASED):
                self._holders[key] = block, number

    def _is_first(self, dedupe: Dedupe, block: int) -> bool:
        first = self._firsts.get(dedupe.digest)
        if first is not None and first[1] > dedupe.since_ms:
            return first[0] == block
        while self._windows and self._windows[0][0] <= dedupe.since_ms:
            until_ms, digest = heapq.heappop(self._windows)
            if self._firsts.get(digest, (0, 0))[1] == until_ms:
                del self._firsts[digest]
        self._first(dedupe.digest, block, dedupe.until_ms)
        return True

    def _first(self, digest: bytes, block: int, until_ms: int) -> None:
        self._firsts[digest] = block, until_ms
        heapq.heappush(self._windows, (until_ms, digest))

    def _grant(self, decision: GrantDecision) -> None:
        if decision.number <= self._last_grant:
            text = f"number {decision.number} is granted after number {self._last_grant}"
            self._note(ItemFault.NUMBER, text, *self._first_of(decision))
            return
        self._last_grant = decision.number
        for each in decision.items:
            block = self.blocks.get(each.block)
            if block is None:
                text = f"grant {decision.number} names block {each.block:016x}, which no enqueue in the log has"
                self._note(ItemFault.LOST, text, items=len(each))
                continue
            for number in each if block.id not in self.runs else ():
                if 0 <= number < block.count:
                    self._granted(block, number, decision)

    def _granted(self, block: Block, number: int, decision: GrantDecision) -> None:
        item = block.item(number)
        if item.state not in LIVE:
            if decision.now_ms > item.ended_ms:
                fault = ItemFault.AGAIN if item.state is ItemState.ACKED else ItemFault.FAULT
                self._note(
                    fault, f"grant {decision.number} names it after its end ({WORDS[item.state]})", block, number
                )
            item.skipped += (decision.number,)
        elif item.state is ItemState.READY and (item.due_ms or _due_of(block)) > decision.now_ms:
            return  # it was given back after the owner chose it
        elif self._may_grant(block, number):
            item.state = ItemState.LEASED
            item.grant, item.attempts = decision.number, min(item.attempts + 1, ATTEMPTS_MAX)
            if not block.terms.lease_ms:
                self._over(block, item, ItemState.ACKED, decision.now_ms)

    def _may_grant(self, block: Block, number: int) -> bool:
        """Whether an item is the next one of its ordered key, if it has one."""
        if not block.terms.ordered:
            return True
        key = block.queue, block.terms.key
        holder = self._holders.get(key)
        if holder is not None and holder[0].peek(holder[1]).state is ItemState.LEASED:
            return (holder[0].id, holder[1]) == (block.id, number)
        ready = ((each.id, first) for each in self._ordered[key].values() for first in each.numbers(ItemState.READY))
        if next(ready, None) != (block.id, number):
            return False
        self._holders[key] = block, number
        return True

    def _leased(self, decision: AckDecision | NackDecision | ExtendDecision, lease: LeasedItems) -> None:
        """Fold a decision of workers about items of one block and grant."""
        block = self.blocks.get(lease.items.block)
        if block is None:
            return  # it ended before the log begins
        for number in lease.items:
            if not 0 <= number < block.count:
                continue
            item = block.peek(number)
            if lease.grant in item.skipped:
                fault = ItemFault.AGAIN if item.state is ItemState.ACKED else ItemFault.FAULT
                self._note(fault, f"a worker has it by grant {lease.grant}, after its end", block, number)
            if isinstance(decision, AckDecision):
                self._ack(block, number, lease.grant, decision.now_ms)
            elif isinstance(decision, NackDecision):
                self._nack(block, number, lease.grant, decision)

    def _ack(self, block: Block, number: int, grant: int, now_ms: int) -> None:
        item = block.item(number)
        if item.state is ItemState.LEASED and item.grant == grant:
            self._over(block, item, ItemState.ACKED, now_ms)
        elif item.state not in OVER:
            item.refused = grant

    def _nack(self, block: Block, number: int, grant: int, decision: NackDecision) -> None:
        item = block.item(number)
        if item.state is not ItemState.LEASED or item.grant != grant:
            return
        is_dead = decision.kind is NackKind.DEAD
        if decision.kind is NackKind.UNUSED:
            item.attempts -= 1
        elif block.terms.attempts_max and item.attempts >= block.terms.attempts_max:
            is_dead = True
        if is_dead:
            self._over(block, item, ItemState.DEAD, decision.due_ms)
        else:
            item.state, item.due_ms = ItemState.READY, decision.due_ms

    def _end(self, decision: EndDecision) -> None:
        for lease in decision.leases:
            block = self.blocks.get(lease.items.block)
            for number in lease.items if block is not None and block.id not in self.runs else ():
                assert block is not None, "there are numbers"
                item = block.item(number)
                if number < block.count and item.state in LIVE and item.grant == lease.grant:
                    self._over(block, item, ItemState.DEAD if decision.dead else ItemState.EXPIRED, decision.now_ms)

    def _settle(self, decision: CancelDecision | PurgeDecision | RedriveDecision) -> None:
        for each in decision.items:
            block = self.blocks.get(each.block)
            for number in each if block is not None and block.id not in self.runs else ():
                assert block is not None, "there are numbers"
                if not 0 <= number < block.count:
                    continue
                item = block.item(number)
                if isinstance(decision, RedriveDecision):
                    is_late = 0 < block.terms.expires_ms <= decision.now_ms
                    if item.state is ItemState.DEAD and not is_late:
                        item.state, item.attempts, item.due_ms = ItemState.READY, 0, decision.now_ms
                        self._ends["redriven"] = self._ends.get("redriven", 0) + 1
                elif item.state is ItemState.DEAD or (
                    item.state is ItemState.READY and isinstance(decision, CancelDecision)
                ):
                    self._over(block, item, ItemState.CANCELLED, decision.now_ms)

    def _move(self, decision: RunsDecision) -> None:
        """Fold a decision that moves blocks into a run, or back."""
        if isinstance(decision, SpillBlocksDecision):
            moved = set[int]()
            for id_ in ids_in(decision.ids):
                block = self.blocks.get(id_)
                if block is None:
                    text = f"run '{decision.run.key}' has block {id_:016x}, which no enqueue in the log has"
                    self._note(ItemFault.LOST, text)
                elif (block.queue, block.terms.key, block.terms.priority) == decision.lane and block.may_move:
                    moved.add(id_)
            self.runs.spill(decision, moved - {id_ for id_ in moved if id_ in self.runs})
            return
        brought = set(self.runs.bring(decision))
        for each in decision.blocks:
            block = self.blocks.get(each.block.id.producer)
            if block is None or block.id not in brought:
                continue
            theirs = each.arrival, each.key, terms_of(each.lane), each.block
            if theirs != (block.arrival, block.key, block.terms, block.place):
                self._note(
                    ItemFault.FAULT, f"run '{decision.run}' has another block with its id", block, 0, block.count
                )

    def _pop(self, decision: PopDecision | EndPopDecision) -> None:
        """Fold a decision about a pop group."""
        match decision:
            case BeginPopDecision():
                self._begin_pop(decision)
            case ReadPopDecision():
                self._read_pop(decision)
            case RemovePopDecision():
                self._remove_pop(decision)
            case EndPopDecision():
                self._end_pop(decision)

    def _begin_pop(self, decision: BeginPopDecision) -> None:
        self._arrivals += 1
        places = {each.partition: (each.offset, each.index) for each in decision.positions}
        known = self._pops.get(decision.queue)
        if known is None or (decision.replaced and known[0] == decision.replaced):
            self._pops[decision.queue] = decision.topic_id, decision.life or self._arrivals, places
        elif known[0] == decision.topic_id:
            self._pops[decision.queue] = *known[:2], places | known[2]

    def _read_pop(self, decision: ReadPopDecision) -> None:
        """Take the blocks between two positions of a pop group, if it is at the first one."""
        _, life, places = self._pops.get(decision.queue, ("", 0, PopPlaces()))
        begin, end = decision.begin, decision.end
        if life != decision.life or places.get(begin.partition) != (begin.offset, begin.index):
            return
        if end.partition == begin.partition:
            places[end.partition] = end.offset, end.index
            for lane in decision.lanes:
                for place in lane.blocks:
                    self._enqueue(decision.place, lane, place)

    def _remove_pop(self, decision: RemovePopDecision) -> None:
        if decision.queue in self._pops and decision.life in (0, self._pops[decision.queue][1]):
            del self._pops[decision.queue]

    def _end_pop(self, decision: EndPopDecision) -> None:
        """End records that retention took, or whose group was removed; a dead one, too."""
        for lease in decision.leases:
            block = self.blocks.get(lease.items.block)
            if block is None or not block.is_stream:
                continue
            for number in lease.items:
                item = block.item(number)
                if 0 <= number < block.count and item.state not in OVER and item.grant == lease.grant:
                    state = ItemState.CANCELLED if decision.removed else ItemState.EXPIRED
                    self._over(block, item, state, decision.now_ms)

    def _over(self, block: Block, item: Item, state: ItemState, now_ms: int) -> None:
        item.state, item.ended_ms = state, now_ms
        self._ends[WORDS[state]] = self._ends.get(WORDS[state], 0) + 1
        if block.terms.ordered and state is not ItemState.DEAD and not block.is_needed:
            self._ordered[block.queue, block.terms.key].pop(block.arrival, None)

    # ---- snapshots -------------------------------------------------------------------------------

    def compare(self, saved: SavedQueues, offset: int) -> None:
        """Compare a snapshot of the state below `offset`, where this fold is now."""
        text = f"the snapshot at offset {offset}"
        theirs = {each.id: each for each in _blocks_of(saved)}
        ended = dict(saved.ended)
        self._compare_runs(saved, theirs, text)
        for id_, other in theirs.items():
            mine = self.blocks.get(id_)
            if mine is None:
                self._note(ItemFault.FAULT, f"{text} has it, and no enqueue in the log", other, 0, other.count)
            else:
                self._compare_items(mine, other, text)
        for id_, mine in self.blocks.items():
            if id_ in theirs or mine.place is None:
                continue
            if id_ in ended:
                other = Block(id_, 0, mine.queue, "", mine.terms, None, mine.count)
                other.items = dict(enumerate(Item(state, grant) for state, grant in _ends_of(ended[id_].runs)))
                self._compare_items(mine, other, text)
            elif mine.is_needed:
                left = list(mine.numbers(*LIVE, ItemState.DEAD))
                self._note(
                    ItemFault.LOST, f"{text} does not have it, and no decision ended it", mine, left[0], len(left)
                )
        if saved.last_grant != self._last_grant:
            grants = f"{text} has grant {saved.last_grant} as the last one, and the log {self._last_grant}"
            self._note(ItemFault.FAULT, grants)

    def _compare_runs(self, saved: SavedQueues, theirs: dict[int, Block], text: str) -> None:
        """Add the blocks in runs to those of a snapshot: no decision has named their items."""
        for run in saved.runs:
            for id_ in ids_in(run.ids):
                mine = self.blocks.get(id_)
                if id_ in theirs or (mine is not None and id_ not in self.runs):
                    self._note(ItemFault.FAULT, f"{text} has it in run '{run.run.key}', and in memory", mine)
                queue, terms = run.lane.queue, mine.terms if mine is not None else NO_TERMS
                theirs[id_] = Block(id_, 0, queue, "", terms, None, mine.count if mine is not None else 1)

    def _compare_items(self, mine: Block, other: Block, text: str) -> None:
        for number in range(mine.count):
            ours, theirs = mine.peek(number), other.peek(number)
            if (ours.state, ours.grant) == (theirs.state, theirs.grant):
                if ours.attempts != theirs.attempts and ours.state not in OVER:
                    cause = f"{text} has {theirs.attempts} attempts of it, and the log {ours.attempts}"
                    self._note(ItemFault.FAULT, cause, mine, number)
                continue
            cause = f"{text} has it as {WORDS[theirs.state]} under grant {theirs.grant}"
            cause += f", and the log as {WORDS[ours.state]} under grant {ours.grant}"
            if ours.state is ItemState.ACKED and theirs.state not in OVER:
                self._note(ItemFault.AGAIN, cause, mine, number)
            elif theirs.state is ItemState.ACKED and ours.state not in OVER and ours.refused:
                cause += f"; an ack named grant {ours.refused}"
                self._note(ItemFault.FORMER, cause, mine, number)
            elif theirs.state in OVER and ours.state not in OVER:
                self._note(ItemFault.LOST, cause, mine, number)
            else:
                self._note(ItemFault.FAULT, cause, mine, number)

    # ---- inside ----------------------------------------------------------------------------------

    def _first_of(self, decision: GrantDecision) -> tuple[Block | None, int]:
        for each in decision.items:
            for number in each:
                return self.blocks.get(each.block), number
        return None, 0

    def _note(self, fault: ItemFault, cause: str, block: Block | None = None, number: int = 0, items: int = 1) -> None:
        queue, item = (block.queue, block.id_of(number)) if block is not None else ("", "")
        self._found.append(ItemFinding(fault, self._shard, cause, queue, item, items))


def _due_of(block: Block) -> int:
    return block.place.due_ms if block.place is not None else 0


def _blocks_of(saved: SavedQueues) -> Iterator[Block]:
    """Yield the blocks of a snapshot of any version."""
    for former in saved.blocks:
        block = _untouched(former)
        for number, each in enumerate(zip(former.states, former.grants, former.attempts, strict=True)):
            state, grant, attempts = each
            block.items[number] = Item(ItemState(state), grant, attempts, former.due_ms.get(number, 0))
        yield block
    for ranged in saved.ranged:
        block, number = _untouched(ranged), 0
        block.came_again = bool(ranged.items)
        for count, status in ranged.items:
            for _ in range(count):
                block.items[number] = Item(status.state, status.grant, status.attempts, status.due_ms)
                number += 1
        yield block


def _block_in_run(entry: QueueRunEntry) -> Block:
    place, count = entry.block, entry.block.next - entry.block.id.first
    return Block(place.id.producer, entry.arrival, entry.target.topic, entry.key, terms_of(entry.lane), place, count)


def _untouched(saved: SavedBlock | FormerBlock) -> Block:
    (place,) = saved.lane.blocks
    terms, count = terms_of(saved.lane.lane), place.next - place.id.first
    target = saved.lane.target
    block = Block(place.id.producer, saved.arrival, target.topic, saved.key, terms, place, count)
    block.is_stream = bool(target.topic_id)
    return block


def _ends_of(runs: Iterable[tuple[int, int, int]]) -> Iterator[tuple[ItemState, int]]:
    for state, grant, count in runs:
        for _ in range(count):
            yield ItemState(state), grant


def decode_saved(state: bytes) -> SavedQueues | None:
    """Return the queues of a snapshot, None if it has none."""
    return FORMAT.decode_state(state) if state else None
