"""The rules of transactions, by the logs alone: all or nothing, never after a roll-back, never without a decision.

The state logs say what was decided: `StateLogs` folds them as their entries land. A prepared transaction ends as its
database says, and no other way; the questions about it are counted one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from memq.format.held_object import HoldId
from memq.groups.machine import unpack_positions
from memq.holds.decisions import HoldState
from memq.simulation.ports.groups import StateLogs
from memq.state_log import Answer
from memq.topic import Position, ReadPartition
from memq.transactions.machine import (
    BeginDecision,
    CheckDecision,
    CommitTransactionDecision,
    PrepareDecision,
    PreparedTransaction,
    SettledTransaction,
    TransactionDecision,
    lane_of,
)
from tests.simulation.read_log import ReadLog
from tests.simulation.reader import Delivered

Place = tuple[int, int, int]  # read partition, offset, index in the batch


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
    inputs: set[Place] = field(default_factory=set)  # the records that it has read: its positions move behind them


class TransactionRules:
    """`fail` gets each finding. `staged`: staged parts replace blocks, whose own holds are dropped then."""

    def __init__(
        self,
        states: StateLogs,
        fail: Callable[[str], None],
        logs: Mapping[ReadPartition, ReadLog],
        *,
        staged: bool = False,
    ) -> None:
        self._logs = logs
        self._read: dict[Place, SentTransaction] = {}  # records that transactions have read whose records landed
        self._moved: dict[ReadPartition, Position] = {}  # where decisions have put the group
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
        if isinstance(decision, CommitTransactionDecision) and isinstance(answer, SettledTransaction):
            self._check_moves(decision, answer)
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

    def _check_moves(self, decision: CommitTransactionDecision, answer: SettledTransaction) -> None:
        """Positions move from where the last decision has put them, over records that a transaction has read."""
        moves = decision.moves
        if moves is None or not (answer.committed and answer.moved):
            return
        before = unpack_positions(moves.before)
        for partition, committed in unpack_positions(moves.after).items():
            new, log = committed.position, self._logs[partition]
            old = self._moved.get(partition, Position(partition.partition, 0))
            if old == new:
                continue  # the answer to a decision that counted before
            if partition in before and before[partition].position != old:
                self._fail(f"a transaction moves a group from {before[partition].position}, and it is at {old}")
            self._moved[partition] = new
            first = max(log.index_of(old.pointer_offset, old.record_index), log.begin_index)
            passed = log.stream[first : log.index_of(new.pointer_offset, new.record_index)]
            read = {
                place
                for each in self.transactions
                if each.committing and each.committed is not False
                for place in each.inputs
            }
            left = [each for each in passed if (partition.partition, each.offset, each.record_index) not in read]
            if left:
                text = f"{len(left)} records, the first is {left[0].value[:40]!r}"
                self._fail(f"a transaction moves a group from {old} to {new}, and no transaction has read {text}")

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
        if not transaction.landed:
            self._note_read(transaction)
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

    def _note_read(self, transaction: SentTransaction) -> None:
        """The records that a committed transaction has read are read by no other one (T3)."""
        for place in transaction.inputs:
            other = self._read.setdefault(place, transaction)
            if other is not transaction:
                self._fail(
                    f"transactions {other.name} and {transaction.name} are committed, and both have read {place}"
                )

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
