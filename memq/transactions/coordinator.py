"""The transactions of one service partition at its owner: requests become decisions in the log.

The owner measures the time of an open transaction from its first block, or from the opening of the log (T4). A
time-out, a commit and an operator may race: the first decision that counts wins.

A time-out does not end a prepared transaction. The owner writes each question to its producer group into the log. It
gives the question to the producer of the transaction, or a little later to any member of the group that polls. After
the last question it parks the transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from memq.errors import (
    InvalidRequestError,
    MemqError,
    NotFoundError,
    ThrottledError,
    TooLargeError,
    TransactionAbortedError,
    TransactionCommittedError,
)
from memq.format.held_object import HeldLane
from memq.holds.decisions import HoldState
from memq.holds.keeper import HoldKeeper
from memq.holds.machine import HoldMachine
from memq.holds.storing import NewHold
from memq.runtime.clock import Clock
from memq.runtime.logs import EventLog
from memq.state_log import Answer, known_outcome
from memq.state_log.state_log import StateLog
from memq.transactions.machine import (
    ANY_BLOCKS,
    TRANSACTIONS_MACHINE,
    AbortDecision,
    AnswerDecision,
    BeginDecision,
    CheckDecision,
    CommitTransactionDecision,
    EndDecision,
    PositionMoves,
    PrepareDecision,
    PreparedTransaction,
    SettledTransaction,
    TransactionalId,
    TransactionDecision,
    TransactionMachine,
    encode_decision,
    lane_of,
)

Item = TypeVar("Item")
TIMEOUT_CHECK_S = 0.25  # between two searches for transactions that are open for too long
VISIBLE_S = 5.0  # for which one request waits until all records of a transaction are visible
PREPARED_MAX = 10_000  # undecided transactions in memory, up to 2 KiB each
QUESTIONS_MAX = 64  # to a producer group in one answer
ASK_AGAIN_MS_MAX = 5_000  # of a member of a producer group
OWN_FIRST = 2  # periods of asking again, for which a question waits for the producer of its transaction
DECISIONS_AT_ONCE = 256  # of the owner about old transactions: they share entries of the log
UNUSED_ID_KEPT_MS = 7 * 86_400_000  # for so long an id that is not used is known


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """How often a producer group is asked about a prepared transaction, and at which interval."""

    tries_max: int
    interval_ms: int


@dataclass(frozen=True, slots=True)
class TransactionState:
    """An open or prepared transaction, with the number of blocks of each topic."""

    id: TransactionalId
    instance: int
    number: int
    open_ms: int
    timeout_ms: int
    blocks: dict[str, int]
    prepared: PreparedTransaction | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """A prepared transaction that a producer group is to decide, and the topics of its records."""

    transaction: PreparedTransaction
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TransactionCounts:
    """Counts of one coordinator: transactions, their blocks, the age of the oldest open one in s.

    `open` does not include prepared transactions; `prepared` includes parked ones.
    """

    open: int
    prepared: int
    parked: int
    blocks: int
    oldest_s: float


class TransactionCounters(Protocol):
    """Counters of the transactions that a broker has settled."""

    committed_transactions: int
    aborted_transactions: int
    expired_transactions: int
    transaction_checks: int


class TransactionCoordinator:
    """Answers for the transactions of one service partition, while `log` is open.

    Raises: as `StateLog.propose`, but NotReadyError for an unknown outcome: each request may be repeated.
    """

    def __init__(
        self,
        log: StateLog,
        machine: TransactionMachine,
        holds: HoldMachine,
        keeper: HoldKeeper,
        clock: Clock,
        counters: TransactionCounters,
        events: EventLog,
        checks: CheckSettings,
    ) -> None:
        self._log = log
        self._machine = machine
        self._holds = holds
        self._keeper = keeper
        self._clock = clock
        self._counters = counters
        self._events = events
        self._checks = checks
        self._settling: set[tuple[int, int]] = set()  # instance and number
        self._met_s: dict[str, float] = {}  # when each lane was first seen, by the monotonic clock
        self._prepared_s: dict[str, float] = {}  # when each lane was first seen as prepared
        self._asked_s: dict[str, float] = {}  # when the present question about each prepared lane began
        self._given: dict[str, int] = {}  # by lane: the number of the last question that a member got

    # ---- producers -------------------------------------------------------------------------------

    async def begin(self, id_: TransactionalId, token: int, timeout_ms: int) -> int:
        """Begin a new instance; return its number. Raises: ProducerFencedError for a former token; as above."""
        now_ms = self._clock.wall_ms()
        former = self._machine.ids.get(id_)
        with self._ending(*((former.instance, former.open) if former is not None else (0, 0))) as first:
            answer = await self._propose(BeginDecision(id_, token, timeout_ms, now_ms, now_ms - UNUSED_ID_KEPT_MS))
        assert isinstance(answer, int), "the machine answers with the instance"
        if former is not None and former.open and former.instance != answer and first:
            self._counters.aborted_transactions += 1  # T2
        return answer

    async def hold(self, id_: TransactionalId, instance: int, number: int, blocks: Sequence[NewHold]) -> None:
        """Hold blocks of a transaction.

        Raises: ProducerFencedError, TransactionAbortedError; as `HoldKeeper.hold`.
        """
        states = await self._keeper.hold(blocks)
        if any(state in (HoldState.REFUSED, HoldState.DROPPED) for state in states):
            raise self._machine.refusal_of(id_, instance, number)

    async def hold_staged(
        self, id_: TransactionalId, instance: int, number: int, key: str, lanes: Sequence[HeldLane]
    ) -> None:
        """Hold parts of a transaction in the staged objects of manifest `key`. Raises: as `hold`."""
        states = await self._keeper.hold_staged(key, lanes)
        if any(state in (HoldState.REFUSED, HoldState.DROPPED) for state in states):
            raise self._machine.refusal_of(id_, instance, number)

    async def commit(
        self, id_: TransactionalId, instance: int, number: int, blocks: int, moves: PositionMoves | None
    ) -> None:
        """Commit a transaction, once. Raises: the error of its roll-back; ProducerFencedError; as above."""
        now_ms = self._clock.wall_ms()
        try:
            settled, _ = await self._settle(CommitTransactionDecision(id_, instance, number, now_ms, blocks, moves))
        except TooLargeError as error:  # no entry takes these positions
            await self.refuse(id_, instance, number, error)
            return
        if not settled.committed:
            raise settled.error

    async def until_visible(self, instance: int, number: int) -> bool:
        """Wait at most VISIBLE_S until all records of a committed transaction are in their logs (T5).

        Return whether they are. Raises: as above.
        """
        await known_outcome(self._log.fresh())
        return await self._keeper.until_done(lane_of(instance, number), VISIBLE_S)

    async def refuse(self, id_: TransactionalId, instance: int, number: int, error: InvalidRequestError) -> None:
        """Roll back a transaction whose commit is refused with `error`, so that the error is final.

        If an earlier request committed the transaction, return: a repeated commit may be refused, for example after the
        deletion of a topic. Raises: TransactionAbortedError; as `commit`.
        """
        reason = f"was rolled back: {error}"
        if await self.abort(id_, instance, number, reason):
            raise TransactionAbortedError(f"transaction {number} of producer '{id_.name}' {reason}") from error

    async def abort(self, id_: TransactionalId, instance: int, number: int, reason: str) -> bool:
        """Roll a transaction back; return False if it was committed before. Raises: as `commit`."""
        settled, _ = await self._settle(AbortDecision(id_, instance, number, self._clock.wall_ms(), reason))
        return not settled.committed

    # ---- prepared transactions -------------------------------------------------------------------

    async def prepare(
        self,
        id_: TransactionalId,
        instance: int,
        number: int,
        blocks: int,
        *,
        producer_group: str,
        note: bytes,
        began_ms: int,
    ) -> None:
        """Prepare a transaction, which has all of its blocks.

        Raises: the error of its roll-back; TransactionCommittedError; ThrottledError if too many are undecided; as
        `commit`.
        """
        prepared = self._machine.prepared
        if len(prepared) >= PREPARED_MAX and lane_of(instance, number) not in prepared:
            raise ThrottledError(
                f"{len(prepared)} prepared transactions of this service partition are undecided",
                hint="see memq transaction list: their producer groups do not decide",
            )
        now_ms = self._clock.wall_ms()
        decision = PrepareDecision(id_, instance, number, now_ms, blocks, producer_group, note, began_ms)
        fresh = self._is_undecided(decision)
        with self._ending(instance, number) as first:
            answer = await self._propose(decision)
        if isinstance(answer, PreparedTransaction):
            return
        assert isinstance(answer, SettledTransaction), "the machine answers with the end of the transaction"
        self._counters.aborted_transactions += fresh and first and not answer.committed
        if answer.committed:
            raise TransactionCommittedError(f"transaction {number} of producer '{id_.name}' is committed")
        raise answer.error

    def questions(self, producer_group: str, transactional_id: str = "") -> list[Question]:
        """Return the prepared transactions that a producer group is asked about now.

        Each question is given once: to the producer of the transaction, which polls as `transactional_id`, or to any
        member when that producer has not polled in time.
        """
        found: list[Question] = []
        others_s = self._clock.monotonic() - OWN_FIRST * ask_again_ms(self._checks.interval_ms) / 1_000
        for lane, each in self._machine.prepared.items():
            asked = each.tries > self._given.get(lane, 0) and not each.parked
            if each.id.name != transactional_id and self._asked_s.get(lane, others_s) > others_s:
                continue
            if each.producer_group == producer_group and asked and len(found) < QUESTIONS_MAX:
                self._given[lane] = each.tries
                topics = dict.fromkeys(target.topic for target in self._holds.by_target(lane))
                found.append(Question(each, tuple(topics)))
        return found

    async def answer(
        self, id_: TransactionalId, instance: int, number: int, *, producer_group: str, commit: bool
    ) -> bool:
        """End a prepared transaction as its producer group says; return whether it is committed.

        An earlier decision wins. Raises: NotFoundError for an unknown transaction; InvalidRequestError for another
        group; as above.
        """
        now_ms = self._clock.wall_ms()
        settled, _ = await self._settle(AnswerDecision(id_, instance, number, now_ms, producer_group, commit))
        return settled.committed

    # ---- operators -------------------------------------------------------------------------------

    async def transactions(self, *, proven: bool = True) -> list[TransactionState]:
        """Return the open and prepared transactions. Without `proven`, a former owner may answer."""
        if proven:
            await known_outcome(self._log.fresh())
        return [self._state_of(each) for each in self._undecided()]

    def counts(self) -> TransactionCounts:
        """Return the present counts of this coordinator."""
        now_s, prepared = self._clock.monotonic(), self._machine.prepared.values()
        lanes = [lane_of(known.instance, known.open) for known in self._machine.ids.values() if known.open]
        return TransactionCounts(
            open=len(lanes),
            prepared=len(prepared),
            parked=sum(each.parked for each in prepared),
            blocks=sum(len(self._holds.lanes.get(lane, ())) for lane in (*lanes, *self._machine.prepared)),
            oldest_s=max((now_s - self._met_s.get(lane, now_s) for lane in lanes), default=0.0),
        )

    async def settle(self, id_: TransactionalId, *, commit: bool, lane: str = "") -> None:
        """Commit an undecided transaction of an id with the blocks that it has, or roll it back.

        `lane` names one of several. Raises: NotFoundError if none is open or prepared; InvalidRequestError if there are
        several and `lane` is empty; as `commit`.
        """
        await known_outcome(self._log.fresh())
        found = [each for each in self._undecided() if each[0] == id_ and lane in ("", lane_of(*each[1:]))]
        if not found:
            raise NotFoundError(
                f"producer '{id_.name}' has no open transaction" + (f" '{lane}'" if lane else ""),
                hint="memq transaction list shows the open ones",
            )
        if len(found) > 1:
            names = ", ".join(lane_of(*each[1:]) for each in found)
            raise InvalidRequestError(
                f"producer '{id_.name}' has {len(found)} undecided transactions: {names}", hint="name one of them"
            )
        ((_, instance, number),) = found
        if commit:
            await self.commit(id_, instance, number, ANY_BLOCKS, None)
        elif not await self.abort(id_, instance, number, "was rolled back by an operator"):
            raise TransactionCommittedError(f"transaction {number} of producer '{id_.name}' is committed")

    def _undecided(self) -> list[tuple[TransactionalId, int, int]]:
        """Return id, instance and number of the open and the prepared transactions, by id."""
        found = [(id_, known.instance, known.open) for id_, known in self._machine.ids.items() if known.open]
        return found + [(each.id, each.instance, each.number) for each in self._machine.prepared.values()]

    def _state_of(self, named: tuple[TransactionalId, int, int]) -> TransactionState:
        id_, instance, number = named
        lane, now_s = lane_of(instance, number), self._clock.monotonic()
        prepared = self._machine.prepared.get(lane)
        timeout_ms = self._machine.ids[id_].timeout_ms if prepared is None else prepared.timeout_ms
        open_ms = int((now_s - self._met_s.get(lane, now_s)) * 1_000)
        blocks: dict[str, int] = {}
        for target, holds in self._holds.by_target(lane).items():
            blocks[target.topic] = blocks.get(target.topic, 0) + len(holds)
        return TransactionState(id_, instance, number, open_ms, timeout_ms, blocks, prepared)

    # ---- time-outs -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Roll back transactions whose time-out is over, and ask about prepared ones, until cancelled.

        Raises: MemqError when the log has ended.
        """
        while True:
            await self._roll_back_old()
            await self._ask_about_prepared()
            await asyncio.sleep(TIMEOUT_CHECK_S)

    async def _roll_back_old(self) -> None:
        now_s = self._clock.monotonic()
        met_s = {lane: self._met_s.get(lane, now_s) for lane in self._machine.prepared}
        old: list[AbortDecision] = []
        for id_, known in self._machine.ids.items():
            if known.open:
                lane = lane_of(known.instance, known.open)
                met_s[lane] = self._met_s.get(lane, now_s)
                if (now_s - met_s[lane]) * 1_000 > known.timeout_ms:
                    reason = f"was open for over {known.timeout_ms} ms"
                    numbers = known.instance, known.open
                    old.append(AbortDecision(id_, *numbers, self._clock.wall_ms(), reason, expired=True))
        self._met_s = met_s
        for some in _slices(old):
            await asyncio.gather(*(self._roll_back(decision) for decision in some))

    async def _roll_back(self, decision: AbortDecision) -> None:
        try:
            settled, fresh = await self._settle(decision)
        except (ThrottledError, InvalidRequestError):  # later; or it was prepared meanwhile
            return
        self._counters.expired_transactions += fresh and not settled.committed

    async def _ask_about_prepared(self) -> None:
        """Write the questions about prepared transactions that are due; park those without a further one."""
        now_s = self._clock.monotonic()
        self._prepared_s = {lane: self._prepared_s.get(lane, now_s) for lane in self._machine.prepared}
        self._asked_s = {lane: asked_s for lane, asked_s in self._asked_s.items() if lane in self._machine.prepared}
        self._given = {lane: number for lane, number in self._given.items() if lane in self._machine.prepared}
        due = [
            (lane, each)
            for lane, each in self._machine.prepared.items()
            if not each.parked and now_s >= self._due_s(lane, each)
        ]
        for some in _slices(due):
            await asyncio.gather(*(self._ask_about(lane, each) for lane, each in some))

    async def _ask_about(self, lane: str, each: PreparedTransaction) -> None:
        park = each.tries >= self._checks.tries_max
        decision = CheckDecision(each.instance, each.number, each.tries + (not park), park)
        try:
            counts = await self._propose(decision)
        except ThrottledError:
            return
        self._asked_s[lane] = self._clock.monotonic()
        if counts and park:
            self._events.error(
                "transaction-parked",
                f"transaction {lane} of producer '{each.id.name}': producer group '{each.producer_group}' was asked"
                f" {each.tries} times and did not decide; memq transaction commit or abort does",
            )
        elif counts:
            self._counters.transaction_checks += 1

    def _due_s(self, lane: str, each: PreparedTransaction) -> float:
        """Return when the next question about a prepared transaction is due, by the monotonic clock.

        The first question is due after the time-out, which begins again with `prepare`: after it, the program commits
        its database. The question is due at once if another instance of the producer has begun.
        """
        met_s = self._prepared_s.get(lane, self._clock.monotonic())
        if each.tries:
            return self._asked_s.get(lane, met_s) + self._checks.interval_ms / 1_000
        known = self._machine.ids.get(each.id)
        gone = known is None or known.instance != each.instance
        return met_s + (0 if gone else each.timeout_ms / 1_000)

    # ---- inside ----------------------------------------------------------------------------------

    async def _settle(self, decision: EndDecision | AnswerDecision) -> tuple[SettledTransaction, bool]:
        """Settle a transaction; return its end, and whether this request is the one that ended it."""
        fresh = self._is_undecided(decision)
        with self._ending(decision.instance, decision.number) as first:
            answer = await self._propose(decision)
        fresh &= first
        assert isinstance(answer, SettledTransaction), "the machine answers with the end of the transaction"
        if fresh and answer.committed:
            self._counters.committed_transactions += 1
        elif fresh:
            self._counters.aborted_transactions += 1
        self._keeper.carry_out()
        return answer, fresh

    def _is_undecided(self, decision: EndDecision | PrepareDecision | AnswerDecision) -> bool:
        known = self._machine.ids.get(decision.id)
        if known is not None and known.instance == decision.instance and known.settled.number < decision.number:
            return True
        return lane_of(decision.instance, decision.number) in self._machine.prepared

    @contextmanager
    def _ending(self, instance: int, number: int) -> Iterator[bool]:
        """Yield whether this is the only request that ends the transaction now: repeats are counted once."""
        named = instance, number
        first = named not in self._settling
        self._settling.add(named)
        try:
            yield first
        finally:
            if first:
                self._settling.discard(named)

    async def _propose(self, decision: TransactionDecision) -> Answer:
        answer = await known_outcome(self._log.propose(TRANSACTIONS_MACHINE, encode_decision(decision)))
        if isinstance(answer, MemqError):
            raise answer
        return answer


def ask_again_ms(interval_ms: int) -> int:
    """Return the time in ms between two polls of a member of a producer group for questions."""
    return min(interval_ms // 4, ASK_AGAIN_MS_MAX)


def _slices(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Yield items in slices of DECISIONS_AT_ONCE, which are decided at the same time."""
    for at in range(0, len(items), DECISIONS_AT_ONCE):
        yield items[at : at + DECISIONS_AT_ONCE]
