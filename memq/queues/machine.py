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

from array import array
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby

import msgspec

from memq.format.held_object import HeldBlock, HeldLane, Target
from memq.queues.decisions import (
    FORMAT,
    STATE_VERSION,
    AckDecision,
    CancelDecision,
    EndDecision,
    EndedBlock,
    EnqueueDecision,
    ExtendDecision,
    GrantDecision,
    GrantedBlock,
    GrantedItem,
    ItemOutcome,
    ItemRanges,
    ItemState,
    ItemTerms,
    LeasedItems,
    NackDecision,
    NackKind,
    SavedBlock,
    SavedQueues,
    decode_decision,
    terms_of,
)
from memq.state_log import Answer

ATTEMPTS_END = 1 << 16
_ENDS = {
    ItemState.ACKED: ItemOutcome.LEASE_LOST,  # to another grant than the one that was acked
    ItemState.EXPIRED: ItemOutcome.EXPIRED,
    ItemState.CANCELLED: ItemOutcome.CANCELLED,
    ItemState.DEAD: ItemOutcome.DEAD,
}
Change = Callable[["QueueBlock", int], ItemOutcome]


class QueueBlock:
    """A block with an item that is not over. `arrival` is its place among the blocks of the machine."""

    __slots__ = (
        "arrival",
        "attempts",
        "block",
        "due_ms",
        "grants",
        "key",
        "lane",
        "lease_ms",
        "left",
        "notes",
        "states",
        "terms",
        "topic",
    )

    def __init__(self, arrival: int, key: str, target: Target, lane: str, block: HeldBlock) -> None:
        self.arrival = arrival
        self.key = key
        self.topic = target.topic
        self.lane = lane
        self.block = block
        self.terms: ItemTerms = terms_of(lane)
        self.left = self.count
        self.states: bytes | bytearray = b""  # of all items, from the first grant or end on; so the next two
        self.grants: array[int] | tuple[int, ...] = ()
        self.attempts: array[int] | tuple[int, ...] = ()
        self.due_ms: dict[int, int] = {}
        self.lease_ms: dict[int, int] = {}
        self.notes: dict[int, bytes] = {}

    @property
    def count(self) -> int:
        """How many items it has."""
        return self.block.next - self.block.id.first

    @property
    def is_touched(self) -> bool:
        """Whether an item was granted or has ended: before, all are ready."""
        return bool(self.states)

    def state(self, number: int) -> ItemState:
        """Return the state of an item."""
        return ItemState(self.states[number]) if self.states else ItemState.READY

    def grant(self, number: int) -> int:
        """Return the number of the latest grant of an item, 0 if it has none."""
        return self.grants[number] if self.grants else 0

    def attempt(self, number: int) -> int:
        """Return how many grants an item has had."""
        return self.attempts[number] if self.attempts else 0

    def due_of(self, number: int) -> int:
        """Return when an item is due (Unix ms)."""
        return self.due_ms.get(number, self.block.due_ms)

    def lease_of(self, number: int) -> int:
        """Return how long the present lease of an item lasts."""
        return self.lease_ms.get(number, self.terms.lease_ms)

    def set_state(self, number: int, state: ItemState) -> None:
        """Set the state of an item."""
        if not isinstance(self.states, bytearray):
            self.states = bytearray(self.count)
            self.grants, self.attempts = array("Q", bytes(8 * self.count)), array("H", bytes(2 * self.count))
        self.left += self.state(number).is_over - state.is_over
        self.states[number] = state

    def set_grant(self, number: int, grant: int) -> None:
        """Grant an item, for one attempt more."""
        self.set_state(number, ItemState.ACKED if not self.terms.lease_ms else ItemState.LEASED)
        assert isinstance(self.grants, array), "set with the first state"
        assert isinstance(self.attempts, array), "set with the first state"
        self.grants[number] = grant
        self.attempts[number] = min(self.attempts[number] + 1, ATTEMPTS_END - 1)
        self.lease_ms.pop(number, None)

    def take_attempt_back(self, number: int) -> None:
        """Do not count the latest grant of an item as an attempt."""
        assert isinstance(self.attempts, array), "set with the first grant"
        self.attempts[number] -= 1

    def ended(self, now_ms: int) -> EndedBlock:
        """Return what is to be known of it when all its items are over."""
        runs = groupby(zip(self.states, self.grants, strict=True))
        return EndedBlock(now_ms, tuple((*end, sum(1 for _ in same)) for end, same in runs))

    def saved(self) -> SavedBlock:
        """Return it for a snapshot."""
        lane = HeldLane(Target(self.topic, "", 0), self.lane, (self.block,))
        touched = bytes(self.states), tuple(self.grants), tuple(self.attempts)
        return SavedBlock(
            self.arrival, lane, self.key, *touched, dict(self.due_ms), dict(self.lease_ms), dict(self.notes)
        )


class QueueMachine:
    """All queue items of a service partition. See `memq.state_log.StateMachine`.

    The answer to an enqueue says for each block whether it is new. The answer to a grant has the items that it leases.
    All others have an `ItemOutcome` for each item, in order.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, QueueBlock] = {}
        self.objects: dict[str, int] = {}  # how many blocks of each object the state names (H5)
        self.topics: dict[str, int] = {}  # items of each queue that are not over
        self.totals: dict[str, int] = {}  # how many items have ended, by outcome
        self.last_grant = 0
        self._arrivals = 0
        self._ended: dict[int, EndedBlock] = {}  # by block, the oldest first

    @property
    def items(self) -> int:
        """How many items are not over."""
        return sum(self.topics.values())

    @property
    def ended_blocks(self) -> int:
        """How many blocks are known that have ended."""
        return len(self._ended)

    def apply(self, body: bytes) -> Answer:
        """Apply a decision. Raises: CorruptDataError."""
        decision = decode_decision(body)
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
            case CancelDecision():
                return tuple(
                    self._cancel(each.block, number, decision.now_ms) for each in decision.items for number in each
                )

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

    def _enqueue(self, decision: EnqueueDecision) -> tuple[bool, ...]:
        self._forget(decision.before_ms)
        return tuple(self._take(decision.key, lane, block) for lane in decision.lanes for block in lane.blocks)

    def _take(self, key: str, lane: HeldLane, block: HeldBlock) -> bool:
        known = self.blocks.get(block.id.producer)
        if known is not None:
            self._unname(known.key)
            self._name(key)
            known.key = key  # due time and terms stay as they were
            known.block = msgspec.structs.replace(block, due_ms=known.block.due_ms)
            return False
        if block.id.producer in self._ended:
            return False
        self._arrivals += 1
        self._insert(QueueBlock(self._arrivals, key, lane.target, lane.lane, block))
        return True

    def _insert(self, made: QueueBlock) -> None:
        self.blocks[made.block.id.producer] = made
        self._name(made.key)
        self.topics[made.topic] = self.topics.get(made.topic, 0) + made.left

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
            block.set_grant(number, decision.number)
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
        block.set_state(number, ItemState.ACKED)
        return ItemOutcome.ACKED

    def _nack(self, decision: NackDecision, block: QueueBlock, number: int) -> ItemOutcome:
        if decision.note:
            block.notes[number] = decision.note
        if decision.kind is NackKind.UNUSED:
            block.take_attempt_back(number)
        elif decision.kind is NackKind.DEAD or 0 < block.terms.attempts_max <= block.attempt(number):
            return self._bury(block, number)
        block.set_state(number, ItemState.READY)
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
                    block.set_state(number, ItemState.EXPIRED)
                    self._over(block, number, ItemOutcome.EXPIRED, decision.now_ms)
                    answers.append(ItemOutcome.EXPIRED)
        return tuple(answers)

    def _bury(self, block: QueueBlock, number: int) -> ItemOutcome:
        block.set_state(number, ItemState.DEAD)
        self._count(ItemOutcome.DEAD)
        return ItemOutcome.DEAD

    def _cancel(self, id_: int, number: int, now_ms: int) -> ItemOutcome:
        block = self.blocks.get(id_)
        if block is None or not 0 <= number < block.count:
            end = self._end_of(id_, number)
            return ItemOutcome.UNKNOWN if end is None else _refusal(end[0], is_latest=True)
        state = block.state(number)
        if state is ItemState.LEASED:
            return ItemOutcome.LEASED
        if state in (ItemState.READY, ItemState.DEAD):
            block.set_state(number, ItemState.CANCELLED)
            self._over(block, number, ItemOutcome.CANCELLED, now_ms)
            return ItemOutcome.CANCELLED
        return _refusal(state, is_latest=True)

    def _former(self, lease: LeasedItems, number: int) -> ItemOutcome:
        """Return the outcome of an item whose block has ended."""
        end = self._end_of(lease.items.block, number)
        return ItemOutcome.UNKNOWN if end is None else _refusal(end[0], is_latest=end[1] == lease.grant)

    def _end_of(self, block: int, number: int) -> tuple[ItemState, int] | None:
        ended = self._ended.get(block)
        return None if ended is None else ended.end_of(number)

    # ---- ends ------------------------------------------------------------------------------------

    def _over(self, block: QueueBlock, number: int, outcome: ItemOutcome, now_ms: int) -> None:
        """Note that an item is over; with the last one of its block, its object is needed no more."""
        for noted in (block.due_ms, block.lease_ms, block.notes):
            noted.pop(number, None)
        self._count(outcome)
        self.topics[block.topic] -= 1
        if not self.topics[block.topic]:
            del self.topics[block.topic]
        if not block.left:
            del self.blocks[block.block.id.producer]
            self._unname(block.key)
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
        self.objects[key] = self.objects.get(key, 0) + 1

    def _unname(self, key: str) -> None:
        self.objects[key] -= 1
        if not self.objects[key]:
            del self.objects[key]

    # ---- snapshots -------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Return the whole state as bytes; none if the log never had a decision about queues."""
        if not self._arrivals and not self.last_grant:
            return b""
        blocks = [block.saved() for block in self.blocks.values()]
        ended = list(self._ended.items())
        return FORMAT.encode_state(
            SavedQueues(STATE_VERSION, self.last_grant, self._arrivals, blocks, ended, self.totals)
        )

    def restore(self, state: bytes) -> None:
        """Take the state of a snapshot. Raises: UnsupportedFormatError for a newer one; CorruptDataError."""
        if not state:
            return
        saved = FORMAT.decode_state(state)
        self.last_grant, self._arrivals = saved.last_grant, saved.arrivals
        for each in saved.blocks:
            made = QueueBlock(each.arrival, each.key, each.lane.target, each.lane.lane, each.lane.blocks[0])
            if each.states:
                made.states = bytearray(each.states)
                made.grants, made.attempts = array("Q", each.grants), array("H", each.attempts)
                made.left = sum(not ItemState(state).is_over for state in each.states)
            made.due_ms, made.lease_ms, made.notes = dict(each.due_ms), dict(each.lease_ms), dict(each.notes)
            self._insert(made)
        self._ended = dict(saved.ended)
        self.totals = dict(saved.totals)


def _refusal(state: ItemState, *, is_latest: bool) -> ItemOutcome:
    """Return the outcome of a request about an item in `state`, whether or not it names the latest grant."""
    if state is ItemState.ACKED and is_latest:
        return ItemOutcome.ALREADY_ACKED
    return _ENDS.get(state, ItemOutcome.LEASE_LOST)
