"""The transactions of one service partition as a state machine (rules T1 to T5). Pure.

docs/transactions.md explains the rules. The records of a transaction are held blocks of one lane. A transactional id
has one present *instance*: the producer that began last (T2). Instance and number n name a transaction, and its lane.
The first decision about n that counts settles it (T4, H2): later ones get the same answer. A commit releases the lane
and moves the positions of the id's group; it is one entry (T1). If it is refused, it rolls the transaction back, and n
is burned (T3).

A *prepared* transaction has all of its blocks, and its commit can't be refused any more. Neither a time-out nor a later
instance ends it: its producer decides, or its producer group when the owner asks it, or an operator (T4). Its instance
may open another transaction meanwhile.

The machine changes the groups and holds of the same log. All times are in the decisions (S3).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from memq.errors import (
    GenerationFencedError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    OutcomeUnknownError,
    ProducerFencedError,
    TooLargeError,
    TransactionAbortedError,
    TransactionCommittedError,
    error_from_wire,
    kind_of,
)
from memq.groups.group import Group
from memq.groups.machine import (
    GroupMachine,
    PackedPositions,
    StoredGroup,
    pack_positions,
    unpack_positions,
)
from memq.holds.machine import HoldMachine
from memq.limits import POINTER_RANGES_MAX, TRANSACTION_TARGET_BYTES_MAX
from memq.state_log import Answer
from memq.state_log.machine_format import MachineFormat
from memq.topic import Committed, Position, ReadPartition

TRANSACTIONS_MACHINE = "transactions"  # its name in the log
STATE_VERSION = 1
TARGET_BLOCKS_MAX = POINTER_RANGES_MAX  # T5: the records for one target lie in one batch, which one pointer names
FORMER_INSTANCES_MAX = 16  # earlier instances of an id that the state keeps
ENDED_PREPARED_MAX = 1_024  # ends of prepared transactions that the state keeps
ANY_BLOCKS = -1  # in place of the number of blocks: an operator decides


class TransactionalId(msgspec.Struct, frozen=True, array_like=True):
    """The name of a transactional producer, with the group whose positions it moves ("": none)."""

    name: str
    group: str


class PositionMoves(msgspec.Struct, frozen=True):
    """Positions of a group that a commit moves from `before`, which must be stored (T3)."""

    member: str
    generation: int
    before: tuple[PackedPositions, ...]
    after: tuple[PackedPositions, ...]


class BeginDecision(msgspec.Struct, frozen=True, tag="begin"):
    """Begin a new instance (T2). `token` identifies the request.

    Ids that were not used since `before_ms` are forgotten.
    """

    id: TransactionalId
    token: int
    timeout_ms: int
    now_ms: int
    before_ms: int


class CommitTransactionDecision(msgspec.Struct, frozen=True, tag="commit"):
    """Commit transaction `number` of an instance if it has `blocks` held blocks."""

    id: TransactionalId
    instance: int
    number: int
    now_ms: int
    blocks: int
    moves: PositionMoves | None = None


class AbortDecision(msgspec.Struct, frozen=True, tag="abort"):
    """Roll back transaction `number` of an instance.

    `expired`: because of its time-out, which does not end prepared transactions.
    """

    id: TransactionalId
    instance: int
    number: int
    now_ms: int
    reason: str
    expired: bool = False


class PrepareDecision(msgspec.Struct, frozen=True, tag="prepare"):
    """Prepare transaction `number` of an instance if it has `blocks` held blocks.

    `producer_group` decides about the transaction; the program gave the `note` for this. The producer began the
    transaction at `began_ms` (Unix ms).
    """

    id: TransactionalId
    instance: int
    number: int
    now_ms: int
    blocks: int
    producer_group: str
    note: bytes
    began_ms: int


class CheckDecision(msgspec.Struct, frozen=True, tag="check"):
    """Ask a producer group about a prepared transaction, for the `tries`-th time.

    With `parked`, park the transaction instead: it is not asked about again.
    """

    instance: int
    number: int
    tries: int
    parked: bool


class AnswerDecision(msgspec.Struct, frozen=True, tag="answer"):
    """Commit or roll back a prepared transaction, as its producer group answers."""

    id: TransactionalId
    instance: int
    number: int
    now_ms: int
    producer_group: str
    commit: bool


EndDecision = CommitTransactionDecision | AbortDecision
TransactionDecision = BeginDecision | EndDecision | PrepareDecision | CheckDecision | AnswerDecision


class SettledTransaction(msgspec.Struct, frozen=True, array_like=True):
    """The end of a transaction: committed, or rolled back with an error.

    `moved` is false if an operator or a restore committed it without its positions.
    """

    number: int
    committed: bool
    code: str = ""
    kind: str = ""
    text: str = ""
    moved: bool = True  # snapshots of earlier releases lack it

    @property
    def error(self) -> MemqError:
        """The error for which the transaction was rolled back."""
        return error_from_wire(self.code, self.kind, self.text)


class FormerInstance(msgspec.Struct, frozen=True, array_like=True):
    """An instance that a later one has replaced, and its last settled transaction."""

    instance: int
    token: int
    settled: SettledTransaction


class PresentInstance(msgspec.Struct):
    """The present instance of a transactional id.

    `open` is the number of its open transaction (0: none), `settled` the last settled one. `used_ms` is a Unix time.
    """

    instance: int
    token: int
    timeout_ms: int
    used_ms: int
    former: tuple[FormerInstance, ...] = ()
    open: int = 0
    settled: SettledTransaction = SettledTransaction(0, False)


class PreparedTransaction(msgspec.Struct, array_like=True):
    """A prepared transaction. Its producer group was asked `tries` times; `parked`: it is not asked again."""

    id: TransactionalId
    instance: int
    number: int
    blocks: int
    timeout_ms: int
    producer_group: str
    note: bytes
    began_ms: int
    tries: int = 0
    parked: bool = False

    @property
    def lane(self) -> str:
        """The lane of the transaction's blocks."""
        return lane_of(self.instance, self.number)


class _SavedTransactions(msgspec.Struct, frozen=True, omit_defaults=True):
    version: int
    last: int
    ids: list[tuple[TransactionalId, PresentInstance]]
    prepared: list[PreparedTransaction] = []
    ended: list[tuple[str, SettledTransaction]] = []


_FORMAT: MachineFormat[TransactionDecision, _SavedTransactions] = MachineFormat(
    TransactionDecision,
    _SavedTransactions,
    STATE_VERSION,
    decision="decision about a transaction",
    snapshot="snapshot of transactions",
)
encode_decision = _FORMAT.encode_decision
decode_decision = _FORMAT.decode_decision


def lane_of(instance: int, number: int) -> str:
    """Return the lane of a transaction's blocks."""
    return f"{instance}.{number}"


def moves_of(
    member: str, generation: int, before: Mapping[ReadPartition, Committed], after: Mapping[ReadPartition, Committed]
) -> PositionMoves:
    """Return the moves of a member's positions."""
    return PositionMoves(member, generation, pack_positions(before), pack_positions(after))


class TransactionMachine:
    """All transactions of a service partition. See `memq.state_log.StateMachine`.

    `apply` returns the instance for a begin, a `SettledTransaction` for an end, a `PreparedTransaction` for a prepare,
    and for a check whether it counts. In place of each it may return the error for the caller.
    """

    def __init__(self, groups: GroupMachine, holds: HoldMachine) -> None:
        self.ids: dict[TransactionalId, PresentInstance] = {}  # the least recently used first
        self.prepared: dict[str, PreparedTransaction] = {}  # by lane
        self._ended: dict[str, SettledTransaction] = {}  # prepared ones by lane, the oldest end first
        self._instances: dict[int, TransactionalId] = {}
        self._last = 0  # the highest number of an instance so far
        self._groups = groups
        self._holds = holds
        holds.enter = self._enter

    def apply(self, body: bytes) -> Answer:
        """Apply a decision. Raises: CorruptDataError."""
        decision = decode_decision(body)
        if isinstance(decision, BeginDecision):
            return self._begin(decision)
        if isinstance(decision, CheckDecision):
            return self._check(decision)
        lane = lane_of(decision.instance, decision.number)
        if lane in self.prepared:
            return self._decide(decision, self.prepared[lane])
        if lane in self._ended:
            return self._ended[lane]
        if isinstance(decision, AnswerDecision):
            return NotFoundError(f"transaction {lane} of {_text(decision.id)} is not prepared, or ended long ago")
        known = self._present(decision)
        if known is None:
            return _answer(decision, self._settled_before(decision)) or self._unknown_or_fenced(decision)
        if decision.number < known.settled.number:
            return InvalidRequestError(f"transaction {decision.number} of {_text(decision.id)} was settled long ago")
        if decision.number > known.settled.number:
            if isinstance(decision, PrepareDecision):
                return self._prepare(decision, known)
            self._settle(decision, known)
        return _answer(decision, known.settled)

    def refusal_of(self, id_: TransactionalId, instance: int, number: int) -> MemqError:
        """Return why a transaction takes no block."""
        if lane_of(instance, number) in self.prepared:
            return InvalidRequestError(f"transaction {number} of {_text(id_)} is prepared: it takes no more records")
        known = self.ids.get(id_)
        if known is None or known.instance != instance:
            return _fenced(id_)
        if number == known.settled.number and not known.settled.committed:
            return known.settled.error
        if number <= known.settled.number:
            return InvalidRequestError(f"transaction {number} of {_text(id_)} has ended")
        return InvalidRequestError(f"transaction {known.open} of {_text(id_)} is open: end it first")

    # ---- decisions -------------------------------------------------------------------------------

    def _begin(self, decision: BeginDecision) -> int | MemqError:
        known = self.ids.get(decision.id)
        former: tuple[FormerInstance, ...] = ()
        if known is not None:
            if decision.token == known.token:
                return known.instance
            if any(each.token == decision.token for each in known.former):
                return _fenced(decision.id)
            if known.open:  # T2
                self._holds.drop_lane(lane_of(known.instance, known.open), decision.now_ms)
                known.settled = _aborted(known.open, _fenced(decision.id))
            former = (*known.former, FormerInstance(known.instance, known.token, known.settled))[-FORMER_INSTANCES_MAX:]
            self._forget(decision.id)
        self._last = max(self._last + 1, decision.now_ms)  # by time: new also after a restore
        self.ids[decision.id] = PresentInstance(
            self._last, decision.token, decision.timeout_ms, decision.now_ms, former
        )
        self._instances[self._last] = decision.id
        self._forget_unused(decision.before_ms)
        return self._last

    def _settled_before(self, decision: EndDecision | PrepareDecision) -> SettledTransaction | None:
        """Return the end of the last transaction of a former instance, if the decision is about it."""
        known = self.ids.get(decision.id)
        for each in known.former if known is not None else ():
            if each.instance == decision.instance and each.settled.number == decision.number:
                return each.settled
        return None

    def _unknown_or_fenced(self, decision: EndDecision | PrepareDecision) -> MemqError:
        """Return the error for a former instance; the state does not keep the last end of very old ones."""
        known = self.ids.get(decision.id)
        if (
            known is not None
            and len(known.former) == FORMER_INSTANCES_MAX
            and decision.instance < known.former[0].instance
        ):
            text = f"{_text(decision.id)} has had over {FORMER_INSTANCES_MAX} newer instances"
            return OutcomeUnknownError(f"{text}: whether transaction {decision.number} was committed is not known")
        return _fenced(decision.id)

    def _present(self, decision: EndDecision | PrepareDecision) -> PresentInstance | None:
        known = self.ids.get(decision.id)
        if known is None or known.instance != decision.instance:
            return None
        known.used_ms = max(known.used_ms, decision.now_ms)
        self.ids[decision.id] = self.ids.pop(decision.id)
        return known

    def _settle(self, decision: EndDecision, known: PresentInstance) -> None:
        """Settle a transaction, and roll back an earlier one that is still open (T3, T4)."""
        lane = lane_of(known.instance, decision.number)
        error: MemqError | None
        if isinstance(decision, AbortDecision):
            error = TransactionAbortedError(f"transaction {decision.number} of {_text(decision.id)} {decision.reason}")
        else:
            error = self._refusal(decision, lane) or self._move(decision)
        if error is None:
            self._holds.release_lane(lane)
            by_operator = isinstance(decision, CommitTransactionDecision) and decision.blocks == ANY_BLOCKS
            known.settled = SettledTransaction(decision.number, True, moved=not by_operator)
        else:
            self._holds.drop_lane(lane, decision.now_ms)
            known.settled = _aborted(decision.number, error)
        if known.open != decision.number:
            self._holds.drop_lane(lane_of(known.instance, known.open), decision.now_ms)
        known.open = 0

    def _refusal(self, decision: CommitTransactionDecision | PrepareDecision, lane: str) -> MemqError | None:
        """Return why the blocks of a transaction can't be released."""
        name = f"transaction {decision.number} of {_text(decision.id)}"
        targets = self._holds.by_target(lane)
        count = sum(len(holds) for holds in targets.values())
        if decision.blocks not in (ANY_BLOCKS, count):
            return TransactionAbortedError(f"{name} has {count} of its {decision.blocks} blocks of records")
        for target, holds in targets.items():
            if any(hold.is_staged for hold in holds):
                if len(holds) > 1:  # a late block, which no commit counts
                    return TransactionAbortedError(f"{name} has {len(holds)} parts in topic '{target.topic}'")
                continue
            size = sum(hold.block.length for hold in holds)
            if len(holds) > TARGET_BLOCKS_MAX or size > TRANSACTION_TARGET_BYTES_MAX:  # T5
                place = f"topic '{target.topic}' partition {target.partition}"
                return TooLargeError(
                    f"{name} has {len(holds)} blocks with {size} bytes in {place}: {TARGET_BLOCKS_MAX} blocks and "
                    f"{TRANSACTION_TARGET_BYTES_MAX} bytes are allowed"
                )
        return None

    def _move(self, decision: CommitTransactionDecision) -> MemqError | None:
        """Move all positions of the group, or none; return the error that prevents it (T3)."""
        moves = decision.moves
        if moves is None:
            return None
        group, before = decision.id.group, unpack_positions(moves.before)
        stored = self._groups.groups.get(group) or StoredGroup(Group(self._groups.floor), {})
        after = unpack_positions(moves.after)
        try:
            stored.membership.check_commit(moves.member, moves.generation, after)
        except GenerationFencedError as error:
            return error
        except InvalidRequestError as error:
            return TransactionAbortedError(f"positions of group '{group}' can't move: {error}")
        for partition, committed in after.items():
            found, expected = _at(stored.positions.get(partition)), _at(before.get(partition))
            if found != expected or (expected is not None and committed.position < expected):
                return TransactionAbortedError(
                    f"group '{group}' has position {found} in partition {partition.partition} of topic "
                    f"'{partition.topic}', and the transaction moves it from {expected} to {committed.position}"
                )
        stored.positions |= after
        self._groups.groups[group] = stored
        return None

    def _enter(self, lane: str) -> bool:
        """Whether a transaction accepts a block.

        An instance has one open transaction at a time (T2). Prepared and settled ones accept no block (T3).
        """
        instance, _, number = lane.partition(".")
        id_ = self._instances.get(int(instance))
        if id_ is None or lane in self.prepared:
            return False
        known = self.ids[id_]
        if int(number) <= known.settled.number or known.open not in (0, int(number)):
            return False
        known.open = int(number)
        return True

    # ---- prepared transactions -------------------------------------------------------------------

    def _prepare(self, decision: PrepareDecision, known: PresentInstance) -> PreparedTransaction | SettledTransaction:
        """Prepare a transaction, or roll it back if its commit would be refused (T3, T4)."""
        lane = lane_of(known.instance, decision.number)
        error = self._refusal(decision, lane)
        if known.open != decision.number:
            self._holds.drop_lane(lane_of(known.instance, known.open), decision.now_ms)
        known.open = 0
        if error is not None:
            self._holds.drop_lane(lane, decision.now_ms)
            known.settled = _aborted(decision.number, error)
            return known.settled
        made = self.prepared[lane] = PreparedTransaction(
            decision.id,
            decision.instance,
            decision.number,
            decision.blocks,
            known.timeout_ms,
            decision.producer_group,
            decision.note,
            decision.began_ms,
        )
        return made

    def _check(self, decision: CheckDecision) -> bool:
        """Count a question to the producer group, or park the transaction; return whether that counts (T4)."""
        found = self.prepared.get(lane_of(decision.instance, decision.number))
        if found is None or found.parked or decision.tries != found.tries + (not decision.parked):
            return False
        found.tries, found.parked = decision.tries, decision.parked
        return True

    def _decide(
        self, decision: EndDecision | PrepareDecision | AnswerDecision, found: PreparedTransaction
    ) -> PreparedTransaction | SettledTransaction | InvalidRequestError:
        """End a prepared transaction by its first decision (T4)."""
        name = f"transaction {found.number} of {_text(found.id)}"
        if isinstance(decision, PrepareDecision):
            return found
        if isinstance(decision, AnswerDecision) and decision.producer_group != found.producer_group:
            return InvalidRequestError(f"{name} is not of producer group '{decision.producer_group}'")
        if isinstance(decision, CommitTransactionDecision) and decision.moves is not None:
            return InvalidRequestError(f"{name} is prepared: it moves no positions")
        if isinstance(decision, AbortDecision) and decision.expired:  # it was prepared meanwhile
            return InvalidRequestError(f"{name} is prepared: no time-out ends it")
        if isinstance(decision, AbortDecision):
            return self._end(found, decision.now_ms, TransactionAbortedError(f"{name} {decision.reason}"))
        if isinstance(decision, AnswerDecision) and not decision.commit:
            error = TransactionAbortedError(f"{name} was rolled back by its producer group")
            return self._end(found, decision.now_ms, error)
        return self._end(found, decision.now_ms, None)

    def _end(self, found: PreparedTransaction, now_ms: int, error: MemqError | None) -> SettledTransaction:
        """End a prepared transaction: committed, or rolled back with an error; keep the end."""
        del self.prepared[found.lane]
        if error is None:
            self._holds.release_lane(found.lane)
            ended = SettledTransaction(found.number, True)
        else:
            self._holds.drop_lane(found.lane, now_ms)
            ended = _aborted(found.number, error)
        self._ended[found.lane] = ended
        if len(self._ended) > ENDED_PREPARED_MAX:
            del self._ended[next(iter(self._ended))]
        known = self.ids.get(found.id)
        if known is not None and known.instance == found.instance and known.settled.number < found.number:
            known.settled = ended
        return ended

    def end_committed(self, lane: str, now_ms: int) -> None:
        """Commit a transaction of a restored older state whose targets have some of its blocks (S9).

        The other blocks are released. Its positions are unknown, so those of this state remain.
        """
        if lane in self.prepared:
            self._end(self.prepared[lane], now_ms, None)
            return
        instance, number = (int(part) for part in lane.split("."))
        id_ = self._instances.get(instance)  # None: it began after this state
        known = self.ids[id_] if id_ is not None else None
        if known is not None and known.settled.number < number:
            known.settled = SettledTransaction(number, True, moved=False)
            if known.open != number:
                self._holds.drop_lane(lane_of(instance, known.open), now_ms)
            known.open = 0
        self._holds.release_lane(lane)

    # ---- forgetting ------------------------------------------------------------------------------

    def _forget(self, id_: TransactionalId) -> None:
        del self._instances[self.ids.pop(id_).instance]

    def _forget_unused(self, before_ms: int) -> None:
        """Forget ids that were not used since `before_ms`; stop at the first one that was used, or is open."""
        while self.ids:
            id_, known = next(iter(self.ids.items()))
            if known.used_ms >= before_ms or known.open:
                return
            self._forget(id_)

    # ---- snapshots -------------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Return the whole state as bytes."""
        prepared, ended = list(self.prepared.values()), list(self._ended.items())
        return _FORMAT.encode_state(
            _SavedTransactions(STATE_VERSION, self._last, list(self.ids.items()), prepared, ended)
        )

    def restore(self, state: bytes) -> None:
        """Read the state of a snapshot. Raises: UnsupportedFormatError for a newer one; CorruptDataError."""
        saved = _FORMAT.decode_state(state)
        self._last = saved.last
        self.ids = dict(saved.ids)
        self._instances = {known.instance: id_ for id_, known in self.ids.items()}
        self.prepared = {each.lane: each for each in saved.prepared}
        self._ended = dict(saved.ended)


def _aborted(number: int, error: MemqError) -> SettledTransaction:
    return SettledTransaction(number, False, error.code, kind_of(type(error)).code, str(error))


def _answer(
    decision: EndDecision | PrepareDecision, settled: SettledTransaction | None
) -> SettledTransaction | TransactionCommittedError | None:
    """Return the answer to a later decision about a settled transaction: its end, or an error."""
    moves = isinstance(decision, CommitTransactionDecision) and decision.moves is not None
    if settled is None or not moves or not settled.committed or settled.moved:
        return settled
    return TransactionCommittedError(
        f"transaction {decision.number} of {_text(decision.id)} is committed without its positions, by an operator or "
        f"before a restore: no position of group '{decision.id.group}' has moved",
        hint="read from the stored positions again, and leave out what this transaction has sent",
    )


def _at(committed: Committed | None) -> Position | None:
    return committed.position if committed is not None else None


def _text(id_: TransactionalId) -> str:
    return f"producer '{id_.name}'"


def _fenced(id_: TransactionalId) -> ProducerFencedError:
    return ProducerFencedError(
        f"another instance of the transactional producer '{id_.name}' has begun, or this one was not used for long",
        hint="stop this instance; two that run at once need two transactional ids",
    )
