"""A block of queue items in the state of a queue machine. Pure.

It takes no memory for an item before its first grant. Delays, extended leases and notes are kept for the few items that
have them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import groupby

from memq.format.held_object import HeldBlock, HeldLane, Target
from memq.queues.decisions import EndedBlock, ItemState, ItemTerms, SavedBlock, terms_of

ATTEMPTS_END = 1 << 16
_STATES = tuple(ItemState)  # by number: a lookup takes 8 ns, a call of the class 330 ns


class QueueBlock:
    """A block with an item that is not over. `arrival` is its place among the blocks of the machine."""

    __slots__ = (
        "arrival",
        "attempts",
        "block",
        "dead",
        "due_ms",
        "grants",
        "key",
        "lane",
        "lease_ms",
        "left",
        "notes",
        "states",
        "target",
        "terms",
        "topic",
    )

    def __init__(self, arrival: int, key: str, target: Target, lane: str, block: HeldBlock) -> None:
        self.arrival = arrival
        self.key = key
        self.target = target
        self.topic = target.topic
        self.lane = lane
        self.block = block
        self.terms: ItemTerms = terms_of(lane)
        self.left = self.count  # items that are not over
        self.dead = 0  # of these, items that are dead
        self.states: bytes | bytearray = b""  # of all items, from the first grant or end on; so the next two
        self.grants: array[int] | tuple[int, ...] = ()
        self.attempts: array[int] | tuple[int, ...] = ()
        self.due_ms: dict[int, int] = {}
        self.lease_ms: dict[int, int] = {}
        self.notes: dict[int, bytes] = {}

    @property
    def number(self) -> int:
        """Its id."""
        return self.block.id.producer

    @property
    def is_stream(self) -> bool:
        """Whether it is a block of a plain topic, which a pop group has read."""
        return bool(self.target.topic_id)

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
        return _STATES[self.states[number]] if self.states else ItemState.READY

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
        former = self.state(number)
        self.left += former.is_over - state.is_over
        if state is ItemState.DEAD or former is ItemState.DEAD:
            self.dead += (state is ItemState.DEAD) - (former is ItemState.DEAD)
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

    def redrive(self, number: int, due_ms: int) -> None:
        """Make a dead item ready again at `due_ms`; its attempts begin again."""
        self.set_state(number, ItemState.READY)
        assert isinstance(self.attempts, array), "set with the first state"
        self.attempts[number] = 0
        self.due_ms[number] = due_ms

    def numbers_in(self, state: ItemState) -> Iterator[int]:
        """Yield the items in a state, in order."""
        if not self.states:
            yield from range(self.count if state is ItemState.READY else 0)
        at = self.states.find(state) if self.states else -1
        while at >= 0:
            yield at
            at = self.states.find(state, at + 1)

    def ended(self, now_ms: int) -> EndedBlock:
        """Return what is to be known of it when all its items are over."""
        runs = groupby(zip(self.states, self.grants, strict=True))
        return EndedBlock(now_ms, tuple((*end, sum(1 for _ in same)) for end, same in runs))

    def saved(self) -> SavedBlock:
        """Return it for a snapshot."""
        lane = HeldLane(self.target, self.lane, (self.block,))
        touched = bytes(self.states), tuple(self.grants), tuple(self.attempts)
        return SavedBlock(
            self.arrival, lane, self.key, *touched, dict(self.due_ms), dict(self.lease_ms), dict(self.notes)
        )

    @classmethod
    def restored(cls, saved: SavedBlock) -> QueueBlock:
        """Return the block of a snapshot."""
        made = cls(saved.arrival, saved.key, saved.lane.target, saved.lane.lane, saved.lane.blocks[0])
        if saved.states:
            made.states = bytearray(saved.states)
            made.grants, made.attempts = array("Q", saved.grants), array("H", saved.attempts)
            made.left = sum(not ItemState(state).is_over for state in saved.states)
            made.dead = saved.states.count(ItemState.DEAD)
        made.due_ms, made.lease_ms, made.notes = dict(saved.due_ms), dict(saved.lease_ms), dict(saved.notes)
        return made
