"""The rules of queue items: a register for each item, by what workers do and the state logs say (Q2 to Q5).

No item is held by two workers, each by its own lease. An ack that was answered is in the log, and the item does not
come again. No two items of an ordered key are held at once, and an item comes when all that were stored before it
have ended. Under a dedupe key there is one item, and every call returns its id. No item has more attempts than it
may. `StateLogs` folds the logs as their entries land.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from memq.client.queue.items import QueueItem
from memq.queues.decisions import ItemState
from memq.queues.machine import QueueMachine
from memq.simulation.ports.groups import StateLogs

ATTEMPTS_MAX = 3


class QueueKind(StrEnum):
    """The items of a queue: they have no keys, an ordered key, a dedupe key, or few attempts."""

    PLAIN = "plain"
    ORDERED = "ordered"
    DEDUPED = "deduped"
    DYING = "dying"


@dataclass(slots=True)
class Register:
    """One item, by its payload. `holders` has until when each worker holds it, in true seconds."""

    stored: bool = False  # its producer knows
    acked: bool = False  # a worker knows
    holders: dict[object, float] = field(default_factory=dict)
    place: tuple[int, int] | None = None  # block and number
    key: str = ""  # its ordered key, or its dedupe key
    before: tuple[bytes, ...] = ()  # items of the same ordered key that were stored before it was sent


class QueueRules:
    """`fail` gets each finding, and `now` is the true time. `kind` says which keys the items have."""

    def __init__(
        self, queue: str, kind: QueueKind, states: StateLogs, fail: Callable[[str], None], now: Callable[[], float]
    ) -> None:
        self.queue = queue
        self.kind = kind
        self._firsts: dict[str, tuple[int, int]] = {}  # the item of each dedupe key
        self.registers: dict[bytes, Register] = {}
        self._states = states
        self._fail = fail
        self._now = now

    def key_of(self, item: QueueItem) -> bytes:
        """Return the key of an item's register."""
        return item.payload

    def sending(self, payload: bytes, key: str = "") -> None:
        """A producer is about to enqueue an item."""
        before = [each for each, known in self.registers.items() if known.stored and known.key == key]
        self.registers[payload] = Register(key=key, before=tuple(before) if self.kind is QueueKind.ORDERED else ())

    def stored(self, payload: bytes, id_: str) -> None:
        """A producer knows that the item is in the queue, or another one under its dedupe key."""
        register = self.registers[payload]
        if self.kind is QueueKind.DEDUPED:
            self._is_first(register.key, _place_of(id_))
        else:
            register.stored = True

    def _is_first(self, key: str, place: tuple[int, int]) -> None:
        first = self._firsts.setdefault(key, place)
        if first != place:
            self._fail(f"queue '{self.queue}' has two items under dedupe key '{key}': {first} and {place}")

    def given(self, worker: object, item: QueueItem, left_s: float) -> None:
        """A worker got an item, and has it for `left_s`; it does not begin if that is over."""
        register = self.registers.get(self.key_of(item))
        if register is None:
            self._fail(f"item {item.id} was never enqueued")
            return
        register.place = _place_of(item.id)
        if self.kind is QueueKind.DEDUPED:
            self._is_first(register.key, register.place)
        if self.kind is QueueKind.DYING and item.attempt > ATTEMPTS_MAX:
            self._fail(f"item {item.id} has attempt {item.attempt} of {ATTEMPTS_MAX}")
        if self.kind is QueueKind.ORDERED:
            self._check_order(item, register, left_s)
        if left_s <= 0:
            return
        if register.acked:
            self._fail(f"item {item.id} was acked, and comes again")
        if self.is_held(register):
            self._fail(f"item {item.id} is held by two workers")
        register.holders[worker] = self._now() + left_s

    def _check_order(self, item: QueueItem, register: Register, left_s: float) -> None:
        """An item comes when all that were stored before it have ended, and none of its key is held."""
        for payload in register.before:
            state = self._state_of(self.registers[payload])
            if state is not ItemState.ACKED and not self.registers[payload].acked:
                self._fail(f"item {item.id} comes before item {payload!r} of its ordered key, which is {state}")
        held = [each for each, other in self.registers.items() if other.key == register.key and self.is_held(other)]
        if left_s > 0 and held:
            self._fail(f"item {item.id} comes while {held} of its ordered key are held")

    def extended(self, worker: object, item: QueueItem, left_s: float) -> None:
        """A worker knows that its lease lasts `left_s` from now on."""
        self.leaves(worker, item)
        register = self.registers[self.key_of(item)]
        if left_s > 0:
            if self.is_held(register):
                self._fail(f"the lease of item {item.id} was extended, and another worker holds it")
            register.holders[worker] = self._now() + left_s

    def is_held(self, register: Register) -> bool:
        """Whether a worker holds an item now."""
        return any(until_s > self._now() for until_s in register.holders.values())

    def leaves(self, worker: object, item: QueueItem) -> None:
        """A worker stops to work on an item: before its ack or nack, or at its end."""
        self.registers[self.key_of(item)].holders.pop(worker, None)

    def acked(self, item: QueueItem) -> None:
        """A worker knows that its ack counts."""
        register = self.registers[self.key_of(item)]
        if self.is_held(register):
            self._fail(f"item {item.id} was acked by a worker without a lease, and another one holds it")
        if self._state_of(register) is not ItemState.ACKED:
            self._fail(f"the ack of item {item.id} was answered, and no log has it")
        register.acked = True

    def refused(self, item: QueueItem, outcome: str, left_s: float) -> None:
        """A worker knows that its ack or nack does not count. That is wrong while its lease runs."""
        if left_s > 0:
            self._fail(f"item {item.id} is {outcome} for a worker whose lease lasts {left_s:.3f} s more")

    def open(self) -> list[object]:
        """Return the items that are stored, and have no ack in a log."""
        return [
            *(
                payload
                for payload, each in self.registers.items()
                if (each.stored or each.place) and not each.acked and self._state_of(each) is not ItemState.ACKED
            ),
            *(place for place in self._firsts.values() if self._state_at(place) is not ItemState.ACKED),
        ]

    def _state_of(self, register: Register) -> ItemState | None:
        """Return the state of an item in the logs, None if no worker ever had it, or its end is forgotten."""
        return None if register.place is None else self._state_at(register.place)

    def _state_at(self, place: tuple[int, int]) -> ItemState | None:
        found = (machine.state_of(*place) for machine in self._states.queues.values() if self._is_home(machine))
        return next((state for state in found if state is not None), None)

    def _is_home(self, machine: QueueMachine) -> bool:
        """Whether a shard may have the queue: ids of its blocks are random numbers."""
        return True


def _place_of(id_: str) -> tuple[int, int]:
    block, _, number = id_.partition(":")[2].partition(":")
    return int(block, 16), int(number)
