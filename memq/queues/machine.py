"""The queue items of one service partition as a state machine (rules Q2, Q4 and Q5). Pure.

docs/queues.md explains the rules. Items come in blocks, which lie in objects below `<cluster>/held/`. A grant leases
items to one worker. Its number is a fencing token: ack, nack and extend count for the latest grant of an item only.
The end of a lease is no decision: the next grant is. All times are in the decisions (S3): the fold reads no clock, and
the owner knows when leases end (`scheduler.py`).

A block takes no memory for an item before its first grant. When all items of a block are over, its object is needed no
more (H5). What has ended is known until `before_ms` of a later enqueue passes it, so that a request that comes again
gets the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from weakref import WeakSet

import msgspec

from memq.format.held_object import HeldBlock, HeldLane
from memq.queues.block import QueueBlock
from memq.queues.decisions import (
    FORMAT,
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
    GrantedItem,
    ItemDecision,
    ItemOutcome,
    ItemRanges,
    ItemState,
    LeasedItems,
    NackDecision,
    NackKind,
    PopDecision,
    PurgeDecision,
    RedriveDecision,
    decode_decision,
)
from memq.queues.keys import DedupeKeys, OrderedKeys
from memq.queues.pop import BeginPopDecision, PopGroups, ReadPopDecision, RemovePopDecision, is_place
from memq.queues.snapshots import EncodedQueues, QueueSnapshot
from memq.state_log import Answer

REDRIVEN = "redriven"  # names of totals
RETAINED = "taken-by-retention"  # records of pop groups, before they were items or as items
_ENDS = {
    ItemState.ACKED: ItemOutcome.LEASE_LOST,  # to another grant than the one that was acked
    ItemState.EXPIRED: ItemOutcome.EXPIRED,
    ItemState.CANCELLED: ItemOutcome.CANCELLED,
    ItemState.DEAD: ItemOutcome.DEAD,
}
Change = Callable[[QueueBlock, int], ItemOutcome]


class QueueMachine:
    """All queue items of a service partition. See `memq.state_log.StateMachine`.

    The answer to an enqueue says for each block whether it is new, or which one came first under its dedupe key. The
    answer to a grant has the items that it leases.
    All others have an `ItemOutcome` for each item, in order.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, QueueBlock] = {}
        self.objects: dict[str, int] = {}  # how many blocks of each object the state names (H5)
        self.topics: dict[str, int] = {}  # items of each queue that are not over
        self.items = 0  # of all queues, that are not over
        self.dead: dict[str, dict[int, None]] = {}  # blocks with dead items, by queue
        self.ordered = OrderedKeys()
        self.firsts = DedupeKeys()
        self.pops = PopGroups()
        self.totals: dict[str, int] = {}  # how many items have ended, by outcome; and were sent back
        self.last_grant = 0
        self._arrivals = 0
        self._ended: dict[int, EndedBlock] = {}  # by block, the oldest first
        self._snapshots: WeakSet[QueueSnapshot] = WeakSet()  # that have begun, and whose pieces are wanted

    @property
    def ended_blocks(self) -> int:
        """How many blocks are known that have ended."""
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
                return self._change(decision.leases, partial(self._nack, decision), 0)
            case ExtendDecision():
                return self._change(decision.leases, partial(self._extend, decision.lease_ms), 0)
            case EndDecision():
                return self._end(decision)
            case BeginPopDecision() | ReadPopDecision() | RemovePopDecision():
                return self._pop(decision)
            case EndPopDecision():
                return self._end_pops(decision)
            case CancelDecision() | RedriveDecision() | PurgeDecision():
                return tuple(self._settle(decision, each.block, number) for each in decision.items for number in each)

    def is_known(self, block: int) -> bool:
        """Whether a block is in the state, or was."""
        return block in self.blocks or block in self._ended

    def state_of(self, block: int, number: int) -> ItemState | None:
        """Return the state of an item; None for one that is not known."""
        known = self.blocks.get(block)
        if known is not None:
            return known.state(number) if 0 <= number < known.count else None
        end = self._end_of(block, number)
        return None if end is None else end[0]

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
        """Take blocks that a pop group reads from its position on. Return None if it has another one (Q1)."""
        self._forget(decision.before_ms)
        if not self.pops.move(decision):
            return None
        if decision.lost:
            self.totals[RETAINED] = self.totals.get(RETAINED, 0) + decision.lost
        return tuple(self._take(decision.place, lane, block) for lane in decision.lanes for block in lane.blocks)

    def _end_pops(self, decision: EndPopDecision) -> tuple[ItemOutcome, ...]:
        state = ItemState.CANCELLED if decision.removed else ItemState.EXPIRED
        answers: list[ItemOutcome] = []
        for lease in decision.leases:
            for number in lease.items:
                block = self.blocks.get(lease.items.block)
                known = block is not None and block.is_stream and 0 <= number < block.count
                if block is None or not known or block.grant(number) != lease.grant or block.state(number).is_over:
                    answers.append(ItemOutcome.UNKNOWN)
                    continue
                self._set(block, number, state)
                self._over(block, number, _ENDS[state], decision.now_ms)
                if not decision.removed:
                    self.totals[RETAINED] = self.totals.get(RETAINED, 0) + 1
                answers.append(_ENDS[state])
        return tuple(answers)

    def _take(self, key: str, lane: HeldLane, block: HeldBlock) -> bool | FirstBlock:
        known = self.blocks.get(block.id.producer)
        if known is not None:
            self._unname(known.key)
            self._name(key)
            known.key = key  # due time and terms stay as they were
            known.block = msgspec.structs.replace(block, due_ms=known.block.due_ms)
            return False
        made = QueueBlock(self._arrivals + 1, key, lane.target, lane.lane, block)
        dedupe = made.terms.dedupe
        first = self.firsts.find(dedupe) if dedupe is not None else None
        if dedupe is not None and first is not None and first != block.id.producer:
            # Else a restore that finds its object would take it, if the window of the first one was over.
            self._ended[block.id.producer] = EndedBlock(dedupe.since_ms, ((ItemState.CANCELLED, 0, made.count),))
            return FirstBlock(first)
        if first is not None or block.id.producer in self._ended:
            return False
        if dedupe is not None:
            self.firsts.add(dedupe, block.id.producer)
        self._arrivals += 1
        self._insert(made)
        return True

    def _insert(self, made: QueueBlock) -> None:
        self.blocks[made.block.id.producer] = made
        self._name(made.key)
        self.topics[made.topic] = self.topics.get(made.topic, 0) + made.left
        self.items += made.left
        self.pops.note(made)
        self._note(made)
        if made.terms.ordered:
            leased = next(made.numbers_in(ItemState.LEASED), None)
            if leased is not None:
                self.ordered.note(made, leased, ItemState.LEASED)
            elif made.left > made.dead:
                self.ordered.note(made, 0, made.state(0))

    def _grant(self, decision: GrantDecision) -> tuple[GrantedBlock, ...]:
        """Lease the items that wait, or whose lease the owner found over (Q4)."""
        if decision.number <= self.last_grant:
            return ()
        self.last_grant = decision.number
        found: list[GrantedBlock] = []
        for each in decision.items:
            block = self.blocks.get(each.block)
            granted = tuple(self._granted(block, each, decision)) if block is not None else ()
            if block is not None and granted:
                found.append(GrantedBlock(block.topic, block.block, block.key, block.terms.lease_ms, granted))
        return tuple(found)

    def _granted(self, block: QueueBlock, items: ItemRanges, decision: GrantDecision) -> Iterator[GrantedItem]:
        for number in items:
            if not 0 <= number < block.count or block.state(number) not in (ItemState.READY, ItemState.LEASED):
                continue
            if block.state(number) is ItemState.READY and block.due_of(number) > decision.now_ms:
                continue  # it was given back while the grant was on its way
            if not self.ordered.may_grant(block, number):
                continue
            block.set_grant(number, decision.number)
            if block.terms.ordered:
                self.ordered.note(block, number, block.state(number))
            yield GrantedItem(number, block.attempt(number), block.notes.get(number, b""))
            if block.state(number) is ItemState.ACKED:  # at most once (Q5)
                self._over(block, number, ItemOutcome.ACKED, decision.now_ms)

    def _change(self, leases: tuple[LeasedItems, ...], change: Change, now_ms: int) -> tuple[ItemOutcome, ...]:
        """Change items that are leased under the grants that the decision names (Q4)."""
        answers: list[ItemOutcome] = []
        for lease in leases:
            for number in lease.items:
                block = self.blocks.get(lease.items.block)
                if block is None or not 0 <= number < block.count:
                    answers.append(self._former(lease, number))
                elif block.state(number) is ItemState.LEASED and block.grant(number) == lease.grant:
                    answers.append(change(block, number))
                    if answers[-1] is ItemOutcome.ACKED:
                        self._over(block, number, ItemOutcome.ACKED, now_ms)
                else:
                    answers.append(_refusal(block.state(number), is_latest=block.grant(number) == lease.grant))
        return tuple(answers)

    def _ack(self, block: QueueBlock, number: int) -> ItemOutcome:
        self._set(block, number, ItemState.ACKED)
        return ItemOutcome.ACKED

    def _nack(self, decision: NackDecision, block: QueueBlock, number: int) -> ItemOutcome:
        if decision.note:
            block.notes[number] = decision.note
        if decision.kind is NackKind.UNUSED:
            block.take_attempt_back(number)
        elif decision.kind is NackKind.DEAD or 0 < block.terms.attempts_max <= block.attempt(number):
            return self._bury(block, number)
        self._set(block, number, ItemState.READY)
        block.due_ms[number] = decision.due_ms
        return ItemOutcome.RETURNED

    def _extend(self, lease_ms: int, block: QueueBlock, number: int) -> ItemOutcome:
        # A worker whose answer is lost counts on its former lease, also with a new owner.
        block.lease_ms[number] = max(block.lease_of(number), lease_ms)
        return ItemOutcome.EXTENDED

    def _end(self, decision: EndDecision) -> tuple[ItemOutcome, ...]:
        answers: list[ItemOutcome] = []
        for lease in decision.leases:
            for number in lease.items:
                block = self.blocks.get(lease.items.block)
                known = block is not None and 0 <= number < block.count and block.grant(number) == lease.grant
                if block is None or not known or block.state(number) not in (ItemState.READY, ItemState.LEASED):
                    answers.append(ItemOutcome.UNKNOWN)
                elif decision.dead:
                    answers.append(self._bury(block, number))
                else:
                    self._set(block, number, ItemState.EXPIRED)
                    self._over(block, number, ItemOutcome.EXPIRED, decision.now_ms)
                    answers.append(ItemOutcome.EXPIRED)
        return tuple(answers)

    def _bury(self, block: QueueBlock, number: int) -> ItemOutcome:
        self._set(block, number, ItemState.DEAD)
        self._count(ItemOutcome.DEAD)
        return ItemOutcome.DEAD

    def _settle(self, decision: ItemDecision, id_: int, number: int) -> ItemOutcome:
        """Cancel, redrive or purge an item that no worker has; other items stay as they are."""
        block = self.blocks.get(id_)
        if block is None or not 0 <= number < block.count:
            end = self._end_of(id_, number)
            return ItemOutcome.UNKNOWN if end is None else _refusal(end[0], is_latest=True)
        state = block.state(number)
        if state is ItemState.LEASED:
            return ItemOutcome.LEASED
        if state.is_over:
            return _refusal(state, is_latest=True)
        if isinstance(decision, RedriveDecision):
            return self._redrive(block, number, decision.now_ms)
        if isinstance(decision, PurgeDecision) and state is not ItemState.DEAD:
            return ItemOutcome.RETURNED
        self._set(block, number, ItemState.CANCELLED)
        self._over(block, number, ItemOutcome.CANCELLED, decision.now_ms)
        return ItemOutcome.CANCELLED

    def _redrive(self, block: QueueBlock, number: int, now_ms: int) -> ItemOutcome:
        if block.state(number) is ItemState.READY:
            return ItemOutcome.RETURNED  # by an earlier request, or it was never dead
        if block.terms.expires_ms and block.terms.expires_ms <= now_ms:
            return ItemOutcome.EXPIRED  # it stays dead, so that it is not lost without a word
        block.redrive(number, now_ms)
        self._noted(block, number, ItemState.READY)
        self.totals[REDRIVEN] = self.totals.get(REDRIVEN, 0) + 1
        return ItemOutcome.RETURNED

    def _former(self, lease: LeasedItems, number: int) -> ItemOutcome:
        """Return the outcome of an item whose block has ended."""
        end = self._end_of(lease.items.block, number)
        return ItemOutcome.UNKNOWN if end is None else _refusal(end[0], is_latest=end[1] == lease.grant)

    def _end_of(self, block: int, number: int) -> tuple[ItemState, int] | None:
        ended = self._ended.get(block)
        return None if ended is None else ended.end_of(number)

    def _set(self, block: QueueBlock, number: int, state: ItemState) -> None:
        block.set_state(number, state)
        self._noted(block, number, state)

    def _noted(self, block: QueueBlock, number: int, state: ItemState) -> None:
        if block.dead or self.dead:
            self._note(block)
        if block.terms.ordered:
            self.ordered.note(block, number, state)

    def _note(self, block: QueueBlock) -> None:
        id_ = block.block.id.producer
        if block.dead:
            self.dead.setdefault(block.topic, {})[id_] = None
        elif block.topic in self.dead:
            self.dead[block.topic].pop(id_, None)
            if not self.dead[block.topic]:
                del self.dead[block.topic]

    # ---- ends ------------------------------------------------------------------------------------

    def _over(self, block: QueueBlock, number: int, outcome: ItemOutcome, now_ms: int) -> None:
        """Note that an item is over; with the last one of its block, its object is needed no more."""
        for noted in (block.due_ms, block.lease_ms, block.notes):
            noted.pop(number, None)
        self._count(outcome)
        self.items -= 1
        self.topics[block.topic] -= 1
        if not self.topics[block.topic]:
            del self.topics[block.topic]
        if not block.left:
            del self.blocks[block.block.id.producer]
            self._unname(block.key)
            self.pops.drop(block)
            self._ended[block.block.id.producer] = block.ended(now_ms)

    def _count(self, outcome: ItemOutcome) -> None:
        self.totals[outcome] = self.totals.get(outcome, 0) + 1

    def _forget(self, before_ms: int) -> None:
        """Forget what ended before `before_ms`, up to the first block that ended later."""
        while self._ended:
            block, ended = next(iter(self._ended.items()))
            if ended.ended_ms >= before_ms:
                return
            del self._ended[block]

    def _name(self, key: str) -> None:
        if is_place(key):
            return  # of a topic: its pointer names the object
        self.objects[key] = self.objects.get(key, 0) + 1

    def _unname(self, key: str) -> None:
        if is_place(key):
            return
        self.objects[key] -= 1
        if not self.objects[key]:
            del self.objects[key]

    # ---- snapshots -------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Return the whole state as bytes; none if the log never had a decision about queues."""
        return b"".join(self.begin_snapshot())

    def begin_snapshot(self) -> Iterator[bytes]:
        """See `memq.state_log.SlicedMachine`."""
        if not self._arrivals and not self.last_grant:
            return iter(())
        ended, firsts = list(self._ended.items()), self.firsts.saved()
        pops = list(self.pops.groups.values())
        version = STATE_VERSION if pops or self.pops.blocks else 2 if firsts else 1  # which earlier releases can read
        saved = EncodedQueues(version, self.last_grant, self._arrivals, [], [], dict(self.totals), pops=pops)
        snapshot = QueueSnapshot(saved, self.blocks, ended, firsts)
        self._snapshots.add(snapshot)
        return snapshot.pieces()

    def restore(self, state: bytes) -> None:
        """Take the state of a snapshot. Raises: UnsupportedFormatError for a newer one; CorruptDataError."""
        if not state:
            return
        saved = FORMAT.decode_state(state)
        self.last_grant, self._arrivals = saved.last_grant, saved.arrivals
        for each in saved.blocks:
            self._insert(QueueBlock.restored(each))
        self._ended = dict(saved.ended)
        self.firsts.restore(saved.firsts)
        self.pops.restore(saved.pops)
        self.totals = dict(saved.totals)


def _refusal(state: ItemState, *, is_latest: bool) -> ItemOutcome:
    """Return the outcome of a request about an item in `state`, whether or not it names the latest grant."""
    if state is ItemState.ACKED and is_latest:
        return ItemOutcome.ALREADY_ACKED
    return _ENDS.get(state, ItemOutcome.LEASE_LOST)
