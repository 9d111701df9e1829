"""The rules of transactions, by the logs alone: all or nothing, never after a roll-back, never without a decision.

The state logs say what was decided: `StateLogs` folds them as their entries land. A prepared transaction ends as its
database says, and no other way; the questions about it are counted one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from memq.format.held_object import HoldId
from memq.holds.decisions import HoldState
from memq.simulation.ports.groups import StateLogs
from memq.state_log import Answer
from memq.transactions.machine import (
    BeginDecision,
    CheckDecision,
    PrepareDecision,
    PreparedTransaction,
    SettledTransaction,
    TransactionDecision,
    lane_of,
)
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
    in_database: bool | None = None  # of a prepared one: whether its database has committed it
    visible: bool = False  # its commit waits until all records are visible
    never_known: bool = False  # its checker never knows


class TransactionRules:
    """`fail` gets each finding. `staged`: staged parts replace blocks, whose own holds are dropped then."""

    def __init__(self, states: StateLogs, fail: Callable[[str], None], *, staged: bool = False) -> None:
        self._staged = staged
        states.on_transaction = self.decided
        self.transactions: list[SentTransaction] = []
        self._states = states
        self._fail = fail
        self._by_value: dict[bytes, SentTransaction] = {}
        self._prepared: dict[str, SentTransaction] = {}  # undecided ones, by lane
        self._parked: set[str] = set()  # their lanes

    def begin(self, name: str) -> SentTransaction:
        """A producer begins a transaction."""
        made = SentTransaction(name)
        self.transactions.append(made)
        return made

    def named(self, name: str) -> SentTransaction | None:
        """Return the transaction of a name."""
        return next((each for each in self.transactions if each.name == name), None)

    def stranger_asked(self, name: str) -> None:
        """A checker of another producer group is asked."""
        self._fail(f"transaction {name} is asked of another producer group")

    def decided(self, decision: TransactionDecision, answer: Answer) -> None:
        """A decision is in a state log, with the answer of its machine (T4)."""
        if isinstance(decision, BeginDecision):
            return
        lane = lane_of(decision.instance, decision.number)
        if isinstance(decision, PrepareDecision):
            found = self.named(decision.note.decode())
            if isinstance(answer, PreparedTransaction) and found is not None:
                self._prepared.setdefault(lane, found)
        elif isinstance(decision, CheckDecision):
            if not answer and lane in self._prepared:
                self._fail(f"question {decision.tries} about transaction {lane} is asked again")
            if answer and decision.parked:
                self._parked.add(lane)
        elif isinstance(answer, SettledTransaction) and lane in self._prepared:
            self._ended(self._prepared.pop(lane), committed=answer.committed)
            self._parked.discard(lane)

    def _ended(self, transaction: SentTransaction, *, committed: bool) -> None:
        name = transaction.name
        if transaction.never_known:
            self._fail(f"transaction {name} has ended, and its database does not know how")
        elif committed is not bool(transaction.in_database):
            how = "committed" if committed else "rolled back"
            self._fail(f"prepared transaction {name} is {how}, and its database says otherwise")

    def sent(self, transaction: SentTransaction, value: bytes, partition: int) -> None:
        """A producer is about to send a record."""
        transaction.partitions[value] = partition
        self._by_value[value] = transaction

    def answered(self, transaction: SentTransaction, *, committed: bool) -> None:
        """A producer was notified of the end of a transaction."""
        transaction.committed = committed
        if not committed and transaction.landed:
            self._fail(f"transaction {transaction.name} is rolled back, and its records were delivered")

    def check_visible(self, transaction: SentTransaction) -> None:
        """A commit has succeeded: all records are visible if it waits for that (T5)."""
        missing = transaction.partitions.keys() - transaction.landed
        if transaction.visible and missing:
            self._fail(f"the commit of transaction {transaction.name} waited, and {len(missing)} records are missing")

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
        state = self._states.state_of(HoldId(found.source[1], found.sequence))
        replaced = self._staged and state is HoldState.DROPPED
        if state not in (HoldState.RELEASED, None) and not replaced:  # a block is known by its first record
            self._fail(f"transaction {name} is delivered, and the state of a block is {state}")

    def missing(self) -> list[bytes]:
        """Return the records of committed transactions, and of visible ones, that are not in the log.

        Those that a database has committed are missing, too, unless they are parked.
        """
        for lane, prepared in self._prepared.items():
            if not self._states.is_prepared(lane):
                self._fail(f"prepared transaction {prepared.name} has ended without a decision about it")
        parked = [self._prepared[lane].name for lane in self._parked]
        return [
            value
            for each in self.transactions
            if each.committed or each.landed or (each.in_database and each.name not in parked)
            for value in each.partitions
            if value not in each.landed
        ]
