"""The rules of queue items: a register for each item, by what workers do and the state logs say (Q2 to Q5).

No item is held by two workers, each by its own lease. An ack that was answered is in the log, and the item does not
come again. `StateLogs` folds the logs as their entries land.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memq.client.queue.items import QueueItem
from memq.queues.decisions import ItemState
from memq.simulation.ports.groups import StateLogs


@dataclass(slots=True)
class Register:
    """One item, by its payload. `holders` has until when each worker holds it, in true seconds."""

    stored: bool = False  # its producer knows
    acked: bool = False  # a worker knows
    holders: dict[object, float] = field(default_factory=dict)
    place: tuple[int, int] | None = None  # block and number


class QueueRules:
    """`fail` gets each finding, and `now` is the true time."""

    def __init__(self, queue: str, states: StateLogs, fail: Callable[[str], None], now: Callable[[], float]) -> None:
        self.queue = queue
        self.registers: dict[bytes, Register] = {}
        self._states = states
        self._fail = fail
        self._now = now

    def sending(self, payload: bytes) -> None:
        """A producer is about to enqueue an item."""
        self.registers[payload] = Register()

    def stored(self, payload: bytes) -> None:
        """A producer knows that the item is in the queue."""
        self.registers[payload].stored = True

    def given(self, worker: object, item: QueueItem, left_s: float) -> None:
        """A worker got an item, and has it for `left_s`; it does not begin if that is over."""
        register = self.registers.get(item.payload)
        if register is None:
            self._fail(f"item {item.id} was never enqueued")
            return
        block, _, number = item.id.partition(":")[2].partition(":")
        register.place = int(block, 16), int(number)
        if left_s <= 0:
            return
        if register.acked:
            self._fail(f"item {item.id} was acked, and comes again")
        if self.is_held(register):
            self._fail(f"item {item.id} is held by two workers")
        register.holders[worker] = self._now() + left_s

    def extended(self, worker: object, item: QueueItem, left_s: float) -> None:
        """A worker knows that its lease lasts `left_s` from now on."""
        self.leaves(worker, item)
        register = self.registers[item.payload]
        if left_s > 0:
            if self.is_held(register):
                self._fail(f"the lease of item {item.id} was extended, and another worker holds it")
            register.holders[worker] = self._now() + left_s

    def is_held(self, register: Register) -> bool:
        """Whether a worker holds an item now."""
        return any(until_s > self._now() for until_s in register.holders.values())

    def leaves(self, worker: object, item: QueueItem) -> None:
        """A worker stops to work on an item: before its ack or nack, or at its end."""
        self.registers[item.payload].holders.pop(worker, None)

    def acked(self, item: QueueItem) -> None:
        """A worker knows that its ack counts."""
        register = self.registers[item.payload]
        if self.is_held(register):
            self._fail(f"item {item.id} was acked by a worker without a lease, and another one holds it")
        if self._state_of(register) is not ItemState.ACKED:
            self._fail(f"the ack of item {item.id} was answered, and no log has it")
        register.acked = True

    def open(self) -> list[bytes]:
        """Return the items that are stored, and have no ack in a log."""
        return [
            payload
            for payload, each in self.registers.items()
            if (each.stored or each.place) and not each.acked and self._state_of(each) is not ItemState.ACKED
        ]

    def _state_of(self, register: Register) -> ItemState | None:
        """Return the state of an item in the logs, None if no worker ever had it, or its end is forgotten."""
        if register.place is None:
            return None
        found = (machine.state_of(*register.place) for machine in self._states.queues.values())
        return next((state for state in found if state is not None), None)
