"""The transactions of one service partition at its owner: requests become decisions in the log.

The owner counts the time of an open transaction from when it met it, or opened the log (T4). A time-out, a commit and
an operator race: the first decision that counts wins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from memq.errors import (
    InvalidRequestError,
    MemqError,
    NotFoundError,
    ThrottledError,
    TooLargeError,
    TransactionAbortedError,
    TransactionCommittedError,
)
from memq.holds.keeper import HoldKeeper, NewHold
from memq.holds.machine import HoldMachine, HoldState
from memq.runtime.clock import Clock
from memq.state_log import Answer, known_outcome
from memq.state_log.state_log import StateLog
from memq.transactions.machine import (
    ANY_BLOCKS,
    TRANSACTIONS_MACHINE,
    AbortDecision,
    BeginDecision,
    CommitTransactionDecision,
    PositionMoves,
    SettledTransaction,
    TransactionalId,
    TransactionDecision,
    TransactionMachine,
    encode_decision,
    lane_of,
)

TIMEOUT_CHECK_S = 0.25  # between two searches for transactions that are open for too long
UNUSED_ID_KEPT_MS = 7 * 86_400_000  # for so long an id that is not used is known


@dataclass(frozen=True, slots=True)
class TransactionState:
    """An open transaction, with the blocks of each topic."""

    id: TransactionalId
    instance: int
    number: int
    open_ms: int
    timeout_ms: int
    blocks: dict[str, int]


class TransactionCounters(Protocol):
    """Counters of the transactions that a broker has settled."""

    committed_transactions: int
    aborted_transactions: int
    expired_transactions: int


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
    ) -> None:
        self._log = log
        self._machine = machine
        self._holds = holds
        self._keeper = keeper
        self._clock = clock
        self._counters = counters
        self._settling: set[tuple[int, int]] = set()  # instance and number
        self._met_s: dict[str, float] = {}  # when each lane was met, by the monotonic clock

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

    async def commit(
        self, id_: TransactionalId, instance: int, number: int, blocks: int, moves: PositionMoves | None
    ) -> None:
        """Commit a transaction, once. Raises: why it was rolled back; ProducerFencedError; as above."""
        now_ms = self._clock.wall_ms()
        try:
            settled, _ = await self._settle(CommitTransactionDecision(id_, instance, number, now_ms, blocks, moves))
        except TooLargeError as error:  # no entry takes these positions
            await self.refuse(id_, instance, number, error)
            return
        if not settled.committed:
            raise settled.error

    async def refuse(self, id_: TransactionalId, instance: int, number: int, error: InvalidRequestError) -> None:
        """Roll back a transaction whose commit is not possible, so that each error is its end.

        A repeated commit may be refused by now, for example after the deletion of a topic: it is answered like the
        first one. Raises: TransactionAbortedError, unless it was committed before; as `commit`.
        """
        reason = f"was rolled back: {error}"
        if await self.abort(id_, instance, number, reason):
            raise TransactionAbortedError(f"transaction {number} of producer '{id_.name}' {reason}") from error

    async def abort(self, id_: TransactionalId, instance: int, number: int, reason: str) -> bool:
        """Roll a transaction back; return False if it was committed before. Raises: as `commit`."""
        settled, _ = await self._settle(AbortDecision(id_, instance, number, self._clock.wall_ms(), reason))
        return not settled.committed

    # ---- operators -------------------------------------------------------------------------------

    async def transactions(self, *, proven: bool = True) -> list[TransactionState]:
        """Return the open transactions; without a proof, another owner may know better."""
        if proven:
            await known_outcome(self._log.fresh())
        now_s, found = self._clock.monotonic(), list[TransactionState]()
        for id_, known in self._machine.ids.items():
            if known.open:
                lane = lane_of(known.instance, known.open)
                open_ms = int((now_s - self._met_s.get(lane, now_s)) * 1_000)
                blocks: dict[str, int] = {}
                for target, holds in self._holds.by_target(lane).items():
                    blocks[target.topic] = blocks.get(target.topic, 0) + len(holds)
                found.append(TransactionState(id_, known.instance, known.open, open_ms, known.timeout_ms, blocks))
        return found

    def open_counts(self) -> tuple[int, int, float]:
        """Return the number of open transactions here, of their blocks, and the age in s of the oldest."""
        now_s, ages_s, blocks = self._clock.monotonic(), list[float](), 0
        for id_, known in self._machine.ids.items():
            if known.open:
                ages_s.append(now_s - self._met_s.get(lane_of(known.instance, known.open), now_s))
                blocks += self._machine.open_blocks(id_)
        return len(ages_s), blocks, max(ages_s, default=0.0)

    async def settle(self, id_: TransactionalId, *, commit: bool) -> None:
        """Commit the open transaction of an id with the blocks that it has, or roll it back.

        Raises: NotFoundError if none is open; as `commit`.
        """
        await known_outcome(self._log.fresh())
        known = self._machine.ids.get(id_)
        if known is None or not known.open:
            raise NotFoundError(
                f"producer '{id_.name}' has no open transaction", hint="memq transaction list shows the open ones"
            )
        if commit:
            await self.commit(id_, known.instance, known.open, ANY_BLOCKS, None)
        elif not await self.abort(id_, known.instance, known.open, "was rolled back by an operator"):
            raise TransactionCommittedError(f"transaction {known.settled.number} of producer '{id_.name}' is committed")

    # ---- time-outs -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Roll back what is open for too long, until cancelled. Raises: MemqError when the log has ended."""
        while True:
            await self._roll_back_old()
            await asyncio.sleep(TIMEOUT_CHECK_S)

    async def _roll_back_old(self) -> None:
        now_s, met_s = self._clock.monotonic(), dict[str, float]()
        for id_, known in list(self._machine.ids.items()):
            if not known.open:
                continue
            number, lane = known.open, lane_of(known.instance, known.open)
            met_s[lane] = self._met_s.get(lane, now_s)
            if (now_s - met_s[lane]) * 1_000 <= known.timeout_ms:
                continue
            reason = f"was open for over {known.timeout_ms} ms"
            try:
                decision = AbortDecision(id_, known.instance, number, self._clock.wall_ms(), reason)
                settled, fresh = await self._settle(decision)
            except ThrottledError:
                continue
            self._counters.expired_transactions += fresh and not settled.committed
        self._met_s = met_s

    # ---- inside ----------------------------------------------------------------------------------

    async def _settle(self, decision: CommitTransactionDecision | AbortDecision) -> tuple[SettledTransaction, bool]:
        """Return the end of a transaction, and whether it was open until now and no other request settles it."""
        known = self._machine.ids.get(decision.id)
        fresh = known is not None and known.instance == decision.instance and known.settled.number < decision.number
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

    @contextmanager
    def _ending(self, instance: int, number: int) -> Iterator[bool]:
        """Yield whether no other request ends this transaction now: a repeated one is counted once."""
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
