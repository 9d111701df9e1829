"""The rules of transactions, by the logs alone: all or nothing, never after a roll-back, never without a decision.

The state logs say what was decided: `StateLogs` folds them as their entries land.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memq.format.held_object import HoldId
from memq.holds.machine import HoldState
from tests.simulation.reader import Delivered


@dataclass(slots=True)
class SentTransaction:
    """A transaction: the partition of each record, where records landed, and what its producer did and learned."""

    name: str
    partitions: dict[bytes, int] = field(default_factory=dict)
    offsets: dict[int, int] = field(default_factory=dict)  # by partition: of the pointer that has its records
    landed: set[bytes] = field(default_factory=set)
    committing: bool = False  # the commit was asked for
    committed: bool | None = None  # as the producer learned


class TransactionRules:
    """`fail` gets each finding."""

    def __init__(self, state_of: Callable[[HoldId], HoldState | None], fail: Callable[[str], None]) -> None:
        self.transactions: list[SentTransaction] = []
        self._state_of = state_of
        self._fail = fail
        self._by_value: dict[bytes, SentTransaction] = {}

    def begin(self, name: str) -> SentTransaction:
        """A producer begins a transaction."""
        made = SentTransaction(name)
        self.transactions.append(made)
        return made

    def sent(self, transaction: SentTransaction, value: bytes, partition: int) -> None:
        """A producer is about to send a record."""
        transaction.partitions[value] = partition
        self._by_value[value] = transaction

    def answered(self, transaction: SentTransaction, *, committed: bool) -> None:
        """A producer was notified of the end of a transaction."""
        transaction.committed = committed
        if not committed and transaction.landed:
            self._fail(f"transaction {transaction.name} is rolled back, and its records were delivered")

    def landed(self, found: Delivered) -> None:
        """A record is in the log of its partition."""
        transaction = self._by_value.get(found.value)
        if transaction is None:
            return
        name, partition = transaction.name, transaction.partitions[found.value]
        transaction.landed.add(found.value)
        if transaction.committed is False:
            self._fail(f"transaction {name} was rolled back, and a record of it is delivered")
        if not transaction.committing:
            self._fail(f"transaction {name} was never committed, and a record of it is delivered")
        if transaction.offsets.setdefault(partition, found.offset) != found.offset:
            self._fail(f"transaction {name} lies in two pointers of partition {partition}")
        state = self._state_of(HoldId(found.source[1], found.sequence))
        if state not in (HoldState.RELEASED, None):  # a block is known by its first record
            self._fail(f"transaction {name} is delivered, and the state of a block is {state}")

    def missing(self) -> list[bytes]:
        """Return the records of committed transactions, and of visible ones, that are not in the log."""
        return [
            value
            for each in self.transactions
            if each.committed or each.landed
            for value in each.partitions
            if value not in each.landed
        ]
