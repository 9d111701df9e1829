"""The queue items of one service partition as a state machine (rules Q2, Q4 and Q5). Pure.

docs/queues.md explains the rules. Blocks of items are in objects below `<cluster>/held/`. A grant leases items to one
worker. Its number is a fencing token: ack, nack and extend count for the latest grant of an item only. The end of a
lease is no decision: the next grant is. All times are in the decisions (S3): the fold reads no clock, and the owner
counts when leases end (`scheduler.py`).

A range of items with the same status changes in one step (`block.py`). When all items of a block have ended, its
object is no longer needed (H5). Ends are kept until `before_ms` of an enqueue passes them, so that a repeated request
gets the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from weakref import WeakSet

import msgspec

from memq.format.held_object import HeldBlock, HeldLane, Target
from memq.queues.block import QueueBlock, lane_of, may_move
from memq.queues.decisions import (
    RUNS_VERSION,
    STATE_VERSION,
    AckDecision,
    CancelDecision,
    EndDecision,
    EndedBlock,
    EndPopDecision,
    EnqueueDecision,
    ExtendDecision,
    FirstBlock,
    GrantDecision,
    GrantedBlock,
    GrantedItems,
    ItemDecision,
    ItemOutcome,
    ItemRanges,
    ItemState,
    ItemStatus,
    LeasedItems,
    NackDecision,
    NackKind,
    Outcomes,
    PopDecision,
    PurgeDecision,
    RedriveDecision,
    RunsDecision,
    SavedReturn,
    decode_decision,
    outcomes_of,
)
from memq.queues.keys import DedupeKeys, OrderedKeys
from memq.queues.pop.groups import BeginPopDecision, PopGroups, ReadPopDecision, RemovePopDecision, is_place
from memq.queues.recent import RecentGrants, RecentReturns
from memq.queues.runs.spilled import BringBlocksDecision, SpillBlocksDecision, SpilledBlocks, ids_in
from memq.queues.snapshots import EncodedQueues, QueueSnapshot, blocks_in, decode_state, ended_in, firsts_in
from memq.state_log import Answer

REDRIVEN = "redriven"  # names of totals
RETAINED = "taken-by-retention"  # records of pop groups, before they were items or as items
_ENDS = {
    ItemState.ACKED: ItemOutcome.LEASE_LOST,  # to another grant than the one that was acked
    ItemState.EXPIRED: ItemOutcome.EXPIRED,
    ItemState.CANCELLED: ItemOutcome.CANCELLED,
    ItemState.DEAD: ItemOutcome.DEAD,
}
Run = tuple[ItemOutcome, int]  # an outcome, and how many items in a row have it
Change = Callable[[QueueBlock, ItemStatus], tuple[ItemOutcome, ItemStatus]]


class QueueMachine:
    """All queue items of a service partition. See `memq.state_log.StateMachine`.

    The answer to an enqueue has an entry for each block: whether it is new, or the first block with its dedupe key. The
    answer to a grant has the leased items. All others have `Outcomes` of the items, in their order.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, QueueBlock] = {}
        self.spilled = SpilledBlocks()  # the others
        self.objects: dict[str, int] = {}  # how many blocks of each object the state names (H5)
        self.topics: dict[str, int] = {}  # number of items of each queue that have not ended, those in runs included
        self.items = 0  # number of items of all queues that have not ended
        self.dead: dict[str, dict[int, None]] = {}  # blocks with dead items, by queue
        self.ordered = OrderedKeys()
        self.firsts = DedupeKeys()
        self.pops = PopGroups()
        self.grants = RecentGrants()
        self._returns = RecentReturns()
        self.totals: dict[str, int] = {}  # number of items that have ended, by outcome, and that were redriven
        self.last_grant = 0
        self._arrivals = 0
        self._ended: dict[int, EndedBlock] = {}  # by block, the oldest first
        self._snapshots: WeakSet[QueueSnapshot] = WeakSet()  # that are being encoded

    @property
    def ended_blocks(self) -> int:
        """Number of ended blocks in memory."""
        return len(self._ended)

    def apply(self, body: bytes) -> Answer:
        """Apply a decision. Raises: CorruptDataError."""
        decision = decode_decision(body)
        for snapshot in self._snapshots:
            snapshot.before_decision(decision)
        match decision:
            case EnqueueDecision():
                return self._enqueue(decision)
            case GrantDecision():
                return self._grant(decision)
            case AckDecision():
                return self._change(decision.leases, self._ack, decision.now_ms)
            case NackDecision():
                return outcomes_of(run for lease in decision.leases for run in self._returned(decision, lease))
            case ExtendDecision():
                return self._change(decision.leases, partial(self._extend, decision.lease_ms), 0)
            case EndDecision():
                return outcomes_of(run for lease in decision.leases for run in self._end(decision, lease))
            case BeginPopDecision() | ReadPopDecision() | RemovePopDecision():
                return self._pop(decision)
            case EndPopDecision():
                return outcomes_of(run for lease in decision.leases for run in self._end_pops(decision, lease))
            case SpillBlocksDecision() | BringBlocksDecision():
                return self._move(decision)
            case CancelDecision() | RedriveDecision() | PurgeDecision():
                return outcomes_of(run for items in decision.items for run in self._settle(decision, items))

    def is_known(self, block: int) -> bool:
        """Whether the state has a block, or its end."""
        return block in self.blocks or block in self._ended or self.spilled.run_of(block) is not None

    def queue_of(self, block: int) -> str | None:
        """Return the queue of a block in memory or in a run; None for an unknown or ended block."""
        known = self.blocks.get(block)
        if known is not None:
            return known.topic
        run = self.spilled.run_of(block)
        return run.lane.queue if run is not None else None

    def state_of(self, block: int, number: int) -> ItemState | None:
        """Return the state of an item; None for an unknown item, and for one in a run."""
        known = self.blocks.get(block)
        if known is not None:
            return known.state(number) if 0 <= number < known.count else None
        ended = self._ended.get(block)
        return next((status.state for *_, status in ended.ranges(number, number + 1)), None) if ended else None

    # ---- decisions -------------------------------------------------------------------------------

    def _enqueue(self, decision: EnqueueDecision) -> tuple[bool | FirstBlock, ...]:
        self._forget(decision.before_ms)
        self.firsts.forget(decision.before_ms)
        return tuple(self._take(decision.key, lane, block) for lane in decision.lanes for block in lane.blocks)

    def _pop(self, decision: PopDecision) -> Answer:
        if isinstance(decision, ReadPopDecision):
            return self._read(decision)
        if isinstance(decision, RemovePopDecision):
            return self.pops.remove(decision)
        self._arrivals += 1
        return self.pops.begin(decision, self._arrivals)

    def _read(self, decision: ReadPopDecision) -> tuple[bool | FirstBlock, ...] | None:
        """Add blocks that a pop group has read. Return None if the group is at another position (Q1)."""
        self._forget(decision.before_ms)
        if not self.pops.move(decision):
            return None
        if decision.lost:
            self._count(RETAINED, decision.lost)
        return tuple(self._take(decision.place, lane, block) for lane in decision.lanes for block in lane.blocks)

    def _end_pops(self, decision: EndPopDecision, lease: LeasedItems) -> Iterator[Run]:
        """End items of pop groups whose records retention took, or whose group was removed."""
        state = ItemState.CANCELLED if decision.removed else ItemState.EXPIRED
        for block, begin, end, status in self._parts(lease.items):
            over = block is None or status is None or status.state.is_over
            if block is None or status is None or over or not block.is_stream or status.grant != lease.grant:
                yield ItemOutcome.UNKNOWN, end - begin
                continue
            self._put(block, begin, end, block.over(status, state), status)
            self._over(block, end - begin, _ENDS[state], decision.now_ms)
            if not decision.removed:
                self._count(RETAINED, end - begin)
            yield _ENDS[state], end - begin

    def _take(self, key: str, lane: HeldLane, block: HeldBlock) -> bool | FirstBlock:
        known = self.blocks.get(block.id.producer)
        if known is not None:
            self._unname(known.key)
            self._name(key)
            known.touch()
            known.key = key  # due time and terms stay as they were
            known.block = msgspec.structs.replace(block, due_ms=known.block.due_ms)
            return False
        if self.spilled.run_of(block.id.producer) is not None:
            return False  # its run names the object that it has
        made = QueueBlock(self._arrivals + 1, key, lane.target, lane.lane, block)
        dedupe = made.terms.dedupe
        first = self.firsts.find(dedupe) if dedupe is not None else None
        if dedupe is not None and first is not None and first != block.id.producer:
            # Without this entry, a restore that finds its object after the window of the first block would add it.
            self._ended[block.id.producer] = EndedBlock(dedupe.since_ms, ((ItemState.CANCELLED, 0, made.count),))
            return FirstBlock(first)
        if first is not None or block.id.producer in self._ended:
            return False
        if dedupe is not None:
            self.firsts.add(dedupe, block.id.producer)
        self._arrivals += 1
        self._count_new(made.topic, made.left)
        self._insert(made)
        return True

    def _count_new(self, topic: str, items: int) -> None:
        self.topics[topic] = self.topics.get(topic, 0) + items
        self.items += items

    def _insert(self, made: QueueBlock) -> None:
        """Put a block into memory. Its items are counted already."""
        self.blocks[made.block.id.producer] = made
        self._name(made.key)
        self.pops.note(made)
        self._note(made)
        if made.terms.ordered:
            leased = next(made.numbers_in(ItemState.LEASED), None)
            if leased is not None:
                self.ordered.note(made, leased, leased + 1, ItemState.LEASED)
            elif made.left > made.dead:
                self.ordered.note(made, 0, made.count, ItemState.READY)

    def _move(self, decision: RunsDecision) -> bool:
        return self._spill(decision) if isinstance(decision, SpillBlocksDecision) else self._bring(decision)

    def _spill(self, decision: SpillBlocksDecision) -> bool:
        """Take blocks out of memory that are in a run, and are as they arrived. Whether there were any."""
        known = (self.blocks.get(id_) for id_ in ids_in(decision.ids))
        moved = [block for block in known if block is not None and may_move(block) and lane_of(block) == decision.lane]
        if not moved or decision.run.key in self.spilled.runs:
            return False
        for block in moved:
            del self.blocks[block.number]
            self._unname(block.key)
        places = {block.number: (block.block.due_ms, block.arrival, block.number) for block in moved}
        self.spilled.spill(decision, places, sum(block.left for block in moved))
        return True

    def _bring(self, decision: BringBlocksDecision) -> bool:
        """Take blocks of a run back into memory; False if the run is at another place."""
        run = self.spilled.find(decision)
        if run is None:
            return False
        for each in decision.blocks:
            made = QueueBlock(each.arrival, each.key, Target(run.lane.queue, "", 0), each.lane, each.block)
            if run.take(made.number, made.left):
                self._insert(made)
        self.spilled.brought(run, decision)
        return True

    def _grant(self, decision: GrantDecision) -> tuple[GrantedBlock, ...]:
        """Lease items that are ready, or whose lease has ended by the owner's clock (Q4)."""
        if decision.number <= self.last_grant:
            return ()
        self.last_grant = decision.number
        found: list[GrantedBlock] = []
        for each in decision.items:
            block = self.blocks.get(each.block)
            granted = self._granted(block, each, decision) if block is not None else ()
            if block is not None and granted:
                found.append(GrantedBlock(block.topic, block.block, block.key, block.terms.lease_ms, granted))
        if decision.request and found:
            self.grants.add(decision.request, decision.number, [each.block.id.producer for each in found])
        return tuple(found)

    def _granted(self, block: QueueBlock, items: ItemRanges, decision: GrantDecision) -> tuple[GrantedItems, ...]:
        found: list[GrantedItems] = []
        for begin, end, status in chain.from_iterable(block.ranges(*each) for each in items.pairs()):
            if status.state not in (ItemState.READY, ItemState.LEASED):
                continue
            if status.state is ItemState.READY and status.due_ms > decision.now_ms:
                continue  # it was given back while the grant was on its way
            first, last = self.ordered.grantable(block, begin, end)
            if first >= last:
                continue
            leased = block.granted(status, decision.number)
            self._put(block, first, last, leased, status)
            if leased.state is ItemState.ACKED:  # at most once (Q5)
                self._over(block, last - first, ItemOutcome.ACKED, decision.now_ms)
            if found and found[-1] == (found[-1].begin, first, leased.attempts, leased.note):
                first = found.pop().begin
            found.append(GrantedItems(first, last, leased.attempts, leased.note))
        return tuple(found)

    def _change(self, leases: tuple[LeasedItems, ...], change: Change, now_ms: int) -> Outcomes:
        """Change items that are leased under the grants that the decision names (Q4)."""
        return outcomes_of(run for lease in leases for run in self._changed(lease, change, now_ms))

    def _changed(self, lease: LeasedItems, change: Change, now_ms: int) -> Iterator[Run]:
        for block, begin, end, status in self._parts(lease.items):
            if block is None:
                yield _refusal(status, lease.grant), end - begin
            elif status is not None and status.state is ItemState.LEASED and status.grant == lease.grant:
                outcome, changed = change(block, status)
                self._put(block, begin, end, changed, status)
                if outcome is ItemOutcome.ACKED:
                    self._over(block, end - begin, outcome, now_ms)
                yield outcome, end - begin
            else:
                yield _refusal(status, lease.grant), end - begin

    def _ack(self, block: QueueBlock, status: ItemStatus) -> tuple[ItemOutcome, ItemStatus]:
        return ItemOutcome.ACKED, block.over(status, ItemState.ACKED)

    def _returned(self, decision: NackDecision, lease: LeasedItems) -> Iterator[Run]:
        """Give items back. A nack that comes again under the same grant has the outcome of the first one."""
        id_, grant, change = lease.items.block, lease.grant, partial(self._nack, decision)
        for begin, end, outcome in self._returns.split(lease.items, grant):
            if outcome is not None:
                yield outcome, end - begin
                continue
            at = begin
            for run in self._changed(LeasedItems(ItemRanges(id_, (begin, end)), grant), change, 0):
                if run[0] in (ItemOutcome.RETURNED, ItemOutcome.DEAD):
                    self._returns.add(SavedReturn(id_, grant, at, at + run[1], run[0]))
                yield run
                at += run[1]

    def _nack(self, decision: NackDecision, block: QueueBlock, status: ItemStatus) -> tuple[ItemOutcome, ItemStatus]:
        kind, note = decision.kind, decision.note or status.note
        attempts = status.attempts - (kind is NackKind.UNUSED)
        if kind is NackKind.DEAD or (kind is NackKind.FAILED and 0 < block.terms.attempts_max <= attempts):
            return ItemOutcome.DEAD, status._replace(state=ItemState.DEAD, note=note)
        returned = ItemStatus(ItemState.READY, status.grant, attempts, decision.due_ms, block.terms.lease_ms, note)
        return ItemOutcome.RETURNED, returned

    def _extend(self, lease_ms: int, block: QueueBlock, status: ItemStatus) -> tuple[ItemOutcome, ItemStatus]:
        # A worker that gets no answer still works under its former, longer lease; a new owner must wait for it, too.
        return ItemOutcome.EXTENDED, status._replace(lease_ms=max(status.lease_ms, lease_ms))

    def _end(self, decision: EndDecision, lease: LeasedItems) -> Iterator[Run]:
        """End items that have no worker: their `ttl` is over, or they have used all their attempts."""
        for block, begin, end, status in self._parts(lease.items):
            idle = status is not None and status.state in (ItemState.READY, ItemState.LEASED)
            if block is None or status is None or not idle or status.grant != lease.grant:
                yield ItemOutcome.UNKNOWN, end - begin
            elif decision.dead:
                self._put(block, begin, end, status._replace(state=ItemState.DEAD), status)
                yield ItemOutcome.DEAD, end - begin
            else:
                self._put(block, begin, end, block.over(status, ItemState.EXPIRED), status)
                self._over(block, end - begin, ItemOutcome.EXPIRED, decision.now_ms)
                yield ItemOutcome.EXPIRED, end - begin

    def _settle(self, decision: ItemDecision, items: ItemRanges) -> Iterator[Run]:
        """Cancel, redrive or purge items that no worker has; other items stay as they are."""
        for block, begin, end, status in self._parts(items):
            if block is None or status is None or status.state.is_over:
                yield _refusal(status), end - begin
            elif status.state is ItemState.LEASED:
                yield ItemOutcome.LEASED, end - begin
            elif isinstance(decision, RedriveDecision):
                yield self._redrive(block, begin, end, status, decision.now_ms), end - begin
            elif isinstance(decision, PurgeDecision) and status.state is not ItemState.DEAD:
                yield ItemOutcome.RETURNED, end - begin
            else:
                self._put(block, begin, end, block.over(status, ItemState.CANCELLED), status)
                self._over(block, end - begin, ItemOutcome.CANCELLED, decision.now_ms)
                yield ItemOutcome.CANCELLED, end - begin

    def _redrive(self, block: QueueBlock, begin: int, end: int, status: ItemStatus, now_ms: int) -> ItemOutcome:
        if status.state is ItemState.READY:
            return ItemOutcome.RETURNED  # by an earlier request, or it was never dead
        if block.terms.expires_ms and block.terms.expires_ms <= now_ms:
            return ItemOutcome.EXPIRED  # it stays dead: an end here would lose it without the operator's notice
        self._put(block, begin, end, block.redriven(status, now_ms), status)
        self._count(REDRIVEN, end - begin)
        return ItemOutcome.RETURNED

    def _parts(self, items: ItemRanges) -> Iterator[tuple[QueueBlock | None, int, int, ItemStatus | None]]:
        """Yield block, begin, end and status of each range of items with the same status.

        The block is None if all its items have ended; the status is None if the items are unknown.
        """
        for begin, end in items.pairs():
            block, ended = self.blocks.get(items.block), self._ended.get(items.block)
            known = block.ranges(begin, end) if block is not None else ()
            if block is None and ended is not None:
                known = ended.ranges(begin, end)
            at = begin
            for first, last, status in known:
                yield block, first, last, status
                at = last
            if at < end:
                yield None, at, end, None

    def _put(self, block: QueueBlock, begin: int, end: int, status: ItemStatus, former: ItemStatus) -> None:
        """Set the status of a range of items, all of which have the status `former`."""
        block.put(begin, end, status, former)
        if status.state is ItemState.DEAD:
            self._count(ItemOutcome.DEAD, end - begin)
        if block.dead or self.dead:
            self._note(block)
        if block.terms.ordered:
            self.ordered.note(block, begin, end, status.state)

    def _note(self, block: QueueBlock) -> None:
        id_ = block.block.id.producer
        if block.dead:
            self.dead.setdefault(block.topic, {})[id_] = None
        elif block.topic in self.dead:
            self.dead[block.topic].pop(id_, None)
            if not self.dead[block.topic]:
                del self.dead[block.topic]

    # ---- ends ------------------------------------------------------------------------------------

    def _over(self, block: QueueBlock, count: int, outcome: ItemOutcome, now_ms: int) -> None:
        """Note that items have ended. With the last one, their block leaves the state."""
        self._count(outcome, count)
        self.items -= count
        self.topics[block.topic] -= count
        if not self.topics[block.topic]:
            del self.topics[block.topic]
        if not block.left:
            del self.blocks[block.block.id.producer]
            self._unname(block.key)
            self.pops.drop(block)
            self._ended[block.block.id.producer] = block.ended(now_ms)

    def _count(self, outcome: str, count: int) -> None:
        self.totals[outcome] = self.totals.get(outcome, 0) + count

    def _forget(self, before_ms: int) -> None:
        """Forget what ended before `before_ms`, up to the first block that ended later."""
        while self._ended:
            block, ended = next(iter(self._ended.items()))
            if ended.ended_ms >= before_ms:
                return
            del self._ended[block]

    def _name(self, key: str) -> None:
        if is_place(key):
            return  # a block of a topic: its pointer names the object
        self.objects[key] = self.objects.get(key, 0) + 1

    def _unname(self, key: str) -> None:
        if is_place(key):
            return
        self.objects[key] -= 1
        if not self.objects[key]:
            del self.objects[key]

    # ---- snapshots -------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Return the whole state as bytes; empty if the log never had a decision about queues."""
        return b"".join(self.begin_snapshot())

    def begin_snapshot(self) -> Iterator[bytes]:
        """See `memq.state_log.SlicedMachine`."""
        if not self._arrivals and not self.last_grant:
            return iter(())
        ended, firsts = list(self._ended.items()), self.firsts.saved()
        pops = list(self.pops.groups.values())
        runs = [each.saved() for each in self.spilled.runs.values()]
        numbers = RUNS_VERSION if runs else STATE_VERSION, self.last_grant, self._arrivals
        saved = EncodedQueues(*numbers, [], [], dict(self.totals), pops=pops, runs=runs)
        saved.grants, saved.returns = self.grants.saved(), self._returns.saved()
        snapshot = QueueSnapshot(saved, self.blocks, ended, firsts)
        self._snapshots.add(snapshot)
        return snapshot.pieces()

    def restore(self, state: bytes) -> None:
        """Take the state of a snapshot. Raises: UnsupportedFormatError for a newer one; CorruptDataError."""
        for _ in self.begin_restore(state):
            pass

    def begin_restore(self, state: bytes) -> Iterator[None]:
        """See `memq.state_log.SlicedOpening`."""
        if not state:
            return
        saved = decode_state(state)
        self.last_grant, self._arrivals = saved.last_grant, saved.arrivals
        for block in blocks_in(saved):
            if block is None:
                yield
            else:
                self._count_new(block.topic, block.left)
                self._insert(block)
        for run in saved.runs:
            self.spilled.add(run)
            self._count_new(run.lane.queue, run.items)
            yield
        for ended in ended_in(saved):
            if ended is None:
                yield
            else:
                self._ended[ended[0]] = ended[1]
        self.firsts.restore(firsts_in(saved))
        self.pops.restore(saved.pops)
        self.grants.restore(saved.grants)
        self._returns.restore(saved.returns)
        self.totals = dict(saved.totals)


def _refusal(status: ItemStatus | None, grant: int | None = None) -> ItemOutcome:
    """Return the outcome of items that a request about `grant` does not change."""
    if status is None:
        return ItemOutcome.UNKNOWN
    if status.state is ItemState.ACKED and grant in (None, status.grant):
        return ItemOutcome.ALREADY_ACKED
    return _ENDS.get(status.state, ItemOutcome.LEASE_LOST)
