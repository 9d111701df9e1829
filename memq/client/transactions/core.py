"""The transactions of one producer on its event loop: begun, held, committed or rolled back.

A transaction's blocks have a producer id of their own for each partition, so a request that is repeated holds a block
once. The coordinator settles each number once (T3). An end with an unknown outcome is settled before the next
transaction begins. The transaction and the consumer whose positions it moves learn it then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, TypeAlias

from memq.client.broker_router import BrokerRouter
from memq.client.producer.delayed import NoteHeld
from memq.client.producer.settings import ProducerSettings
from memq.client.transactions.open_transaction import (
    HAS_UNKNOWN_END,
    IS_COMMITTED,
    IS_LEFT,
    REQUEST_BYTES_MAX,
    WAS_ROLLED_BACK,
    OpenTransaction,
)
from memq.client.transactions.staging import StagedTransaction, Stager
from memq.errors import (
    GenerationFencedError,
    InvalidRequestError,
    MemqError,
    OutcomeUnknownError,
    ProducerFencedError,
    RetryableError,
    TimedOutError,
    TooLargeError,
    TransactionAbortedError,
    TransactionCommittedError,
)
from memq.groups.remote import wire_of
from memq.limits import (
    HOLDS_PER_REQUEST_MAX,
    STAGED_PARTS_MAX,
)
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import Api
from memq.protocol.transaction_messages import (
    AwaitTransaction,
    BeginTransactions,
    EndTransaction,
    HoldStagedParts,
    HoldTransaction,
    PrepareTransaction,
    WireTransaction,
)
from memq.runtime.clock import backoff_s
from memq.runtime.runtime import Runtime
from memq.topic import Committed

if TYPE_CHECKING:
    from memq.client.consumer.assigned import Assigned
    from memq.client.consumer.batch import Batch
    from memq.client.consumer.group.session import Committer
    from memq.client.consumer.settings import ConsumerSettings

ABORT_S_MAX = 5.0
ROLLED_BACK = (TransactionAbortedError, GenerationFencedError, TooLargeError, ProducerFencedError)  # ends of a commit
ProducerRequest: TypeAlias = (
    BeginTransactions | HoldTransaction | HoldStagedParts | PrepareTransaction | EndTransaction | AwaitTransaction
)
CHECKER_HINT = "make the producer with transaction_checker=…"
RETRY_S_BASE, RETRY_S_MAX = 0.05, 1.0


class PositionSource(Protocol):
    """The core of a consumer, which imports this module: it sends dead letters."""

    @property
    def settings(self) -> ConsumerSettings:
        """Its group, and whether it commits by itself."""
        ...

    async def finish(self, batch: Batch | None) -> tuple[Committer, tuple[Assigned, Committed] | None]:
        """Finish `batch`, or all that were read; return what commits, and the only position to commit."""
        ...


class TransactionalCore:
    """The transactions of one producer, one at a time. All methods are called on its loop."""

    def __init__(
        self,
        settings: ProducerSettings,
        runtime: Runtime,
        router: BrokerRouter,
        began: Callable[[], object] = lambda: None,
    ) -> None:
        """`began` is called at each begin."""
        self._settings = settings
        self._began = began
        self._runtime = runtime
        self._router = router
        self._token = runtime.random.getrandbits(64)
        self._instance = 0
        self._number = 0
        self._unsettled: OpenTransaction | None = None  # the last one, if its end is not known
        self._present: OpenTransaction | None = None
        self._fenced: ProducerFencedError | None = None
        self.note_held: NoteHeld = lambda *noted: None
        self.stager: Stager | None = None  # without one, a transaction has no staged parts

    async def begin(self, note: bytes = b"", *, visible: bool = False) -> OpenTransaction:
        """Begin a transaction. `note` is for the checker.

        `visible`: its commit waits until all records are visible.
        Raises: InvalidRequestError while one is open; ProducerFencedError; TimedOutError, and what does not pass.
        """
        if not self._settings.transactional_id:
            raise InvalidRequestError(
                "this producer has no transactions", hint="pass transactional_id='…', the same at each restart"
            )
        if self._fenced is not None:
            raise self._fenced
        if self._present is not None:
            raise InvalidRequestError("a transaction of this producer is open", hint="end it before the next one")
        if note and not self._settings.producer_group:
            raise InvalidRequestError("a note is for a checker", hint=CHECKER_HINT)
        self._number += 1
        made = self._present = OpenTransaction(self._settings, self._runtime, self._number, note, visible=visible)
        self._began()
        try:
            await self._begin_instance()
            if self._unsettled is not None:
                await self._settle_former(self._unsettled)
        except BaseException:
            self._present = None
            raise
        made.note_held = self.note_held
        return made

    async def hold(self, transaction: OpenTransaction, *, everything: bool = False) -> None:
        """Send the waiting blocks, and wait until they are held.

        Raises: TransactionAbortedError, ProducerFencedError; TimedOutError after the delivery time-out; TooLargeError.
        """
        transaction.check_open()
        if transaction.needs_store:
            await self._stager_of(transaction).check()
            transaction.needs_store = False
        blocks = transaction.take(everything=everything)
        while blocks:
            size = count = 0
            while count < min(len(blocks), HOLDS_PER_REQUEST_MAX) and (
                not count or size + len(blocks[count].block) <= REQUEST_BYTES_MAX
            ):
                size += len(blocks[count].block)
                count += 1
            ask = HoldTransaction(transaction=self._wire(transaction.number), blocks=blocks[:count])
            await self._surely(ask, self._settings.delivery_timeout_s)
            del blocks[:count]

    async def flush(self, transaction: OpenTransaction) -> None:
        """Hold all records so far. A staged part is put whole, and again if it grows. Raises: as `hold`."""
        await self.hold(transaction, everything=True)
        await self._hold_staged(transaction)

    async def prepare(self, transaction: OpenTransaction) -> None:
        """Hold all records, and prepare: from now on only a decision ends the transaction.

        Raises: as `hold`; InvalidRequestError without a producer group.
        """
        transaction.check_open()
        group = self._settings.producer_group
        if not group:
            raise InvalidRequestError("this producer has no producer group", hint=CHECKER_HINT)
        if transaction.prepared:
            return
        transaction.complete()
        await self.hold(transaction, everything=True)
        await self._hold_staged(transaction)
        ask = PrepareTransaction(
            transaction=self._wire(transaction.number),
            blocks=transaction.blocks,
            producer_group=group,
            note=transaction.note,
            began_ms=transaction.began_ms,
        )
        await self._surely(ask, self._settings.delivery_timeout_s)
        transaction.prepared = True

    async def leave(self, transaction: OpenTransaction) -> None:
        """Leave a prepared transaction undecided: its producer group is asked."""
        transaction.ended = IS_LEFT
        self._leave(transaction)

    async def take_positions(self, transaction: OpenTransaction, consumer: PositionSource, batch: Batch | None) -> None:
        """Note the positions of a consumer: they move with the decision.

        Raises: InvalidRequestError for a consumer of another group, or one that commits by itself.
        """
        transaction.check_open()
        group = self._settings.transaction_group
        of_consumer = consumer.settings.group
        if not of_consumer:
            raise InvalidRequestError(
                "the consumer has no group, so no position of it can move", hint="pass group='…' to the consumer"
            )
        if of_consumer != group:
            has = f"has transaction_group = '{group}'" if group else "has no transaction_group"
            raise InvalidRequestError(
                f"positions of group '{of_consumer}' can't move: the producer {has}",
                hint=f"make the producer with transaction_group='{of_consumer}'",
            )
        if consumer.settings.auto_commit:
            raise InvalidRequestError(
                "a consumer that commits by itself has no part in a transaction", hint="pass auto_commit=False"
            )
        committer, only = await consumer.finish(batch)
        if transaction.committer not in (None, committer):
            raise InvalidRequestError("a transaction moves the positions of one consumer")
        taken = committer.take(only)
        transaction.committer = committer
        transaction.before |= taken.before
        transaction.after |= taken.after
        transaction.member = taken.member, taken.generation

    async def commit(self, transaction: OpenTransaction) -> None:
        """Commit, and wait until all records are visible if the program wants that.

        Raises: TimedOutError if it is committed, and not visible in the delivery time-out; as `_commit`.
        """
        await self._commit(transaction)
        if not transaction.visible:
            return
        ask, timeout_s = AwaitTransaction(transaction=self._wire(transaction.number)), self._settings.delivery_timeout_s
        until_s = self._runtime.clock.monotonic() + timeout_s
        while not (await self._surely(ask, timeout_s)).visible:
            if self._runtime.clock.monotonic() > until_s:
                raise TimedOutError(
                    f"transaction {transaction.number} is committed, and some of its records are not visible after "
                    f"{timeout_s:g} s",
                    hint="they become visible when their partitions take records: do not send them again",
                )

    async def _commit(self, transaction: OpenTransaction) -> None:
        """Commit; after an error that says so, all is rolled back.

        Raises: TransactionAbortedError, GenerationFencedError, TooLargeError, ProducerFencedError: it was rolled back.
        OutcomeUnknownError: no broker said how it ended. TransactionCommittedError: an operator has committed it, with
        less than it has now, or without its positions. InvalidRequestError for one that should be prepared.
        """
        transaction.check_open()
        if transaction.prepared:
            await self._commit_prepared(transaction)
            return
        if self._settings.producer_group and not transaction.empty:
            unprepared = InvalidRequestError(
                "the transaction is not prepared", hint="call prepare() after the last record"
            )
            await self.abort(transaction, after=unprepared)
            raise unprepared
        try:
            while not transaction.close():
                await self.hold(transaction, everything=True)
            await self._hold_staged(transaction)
        except BaseException as error:
            transaction.reopen()
            await self.abort(transaction, after=error)
            raise
        ask = self._commit_of(transaction)
        ask.member, ask.generation = transaction.member
        ask.before = [wire_of(partition, at) for partition, at in transaction.before.items()]
        ask.after = [wire_of(partition, at) for partition, at in transaction.after.items()]
        self._unsettled, transaction.commit_sent = transaction, True
        try:
            await self._surely(ask, self._settings.delivery_timeout_s)
        except TimedOutError as error:
            raise OutcomeUnknownError(
                f"no broker said whether transaction {transaction.number} is committed: {error}",
                hint="settle() of the transaction asks again, and says how it ended",
            ) from error
        except ROLLED_BACK:
            self._settled(transaction, committed=False)
            raise
        except TransactionCommittedError:  # by an operator
            transaction.commit_sent = False
            self._settled(transaction, committed=True)
            raise
        except MemqError as error:  # it may be about this try alone, and an earlier one may have landed
            await self._settle_refused(transaction, error)
        else:
            self._settled(transaction, committed=True)
        finally:
            self._leave(transaction)

    async def abort(self, transaction: OpenTransaction, *, after: BaseException | None = None) -> None:
        """Roll back. `after` an error of the program, it is no other error if no broker answers.

        The coordinator rolls back by its time-out then.
        Raises: TransactionCommittedError if an operator has committed it; as `begin`.
        """
        if transaction.ended:
            return
        self._unsettled = transaction
        self._leave(transaction)
        try:
            committed = await self._roll_back(transaction, ABORT_S_MAX)
        except MemqError:
            if after is None:
                raise
            return
        if committed and (after is None or isinstance(after, Exception)):
            raise TransactionCommittedError(
                f"transaction {transaction.number} can't be rolled back: an operator has committed it, with the "
                "records that were held"
            ) from after

    async def settle(self, transaction: OpenTransaction) -> bool:
        """Return whether a transaction that has ended is committed; if no decision is known, roll it back.

        A prepared one whose commit was sent is committed then.
        Raises: InvalidRequestError before its end; OutcomeUnknownError for one that was left; as `begin`.
        """
        if self._present is transaction:
            raise InvalidRequestError(f"transaction {transaction.number} is open", hint="end it first")
        if transaction.ended == IS_LEFT:
            raise OutcomeUnknownError(f"prepared transaction {transaction.number} {IS_LEFT}")
        if transaction.commits_for_ever and transaction.ended == HAS_UNKNOWN_END:
            await self._commit_again(transaction, self._settings.delivery_timeout_s)
        elif self._unsettled is transaction:
            await self._roll_back(transaction, self._settings.delivery_timeout_s)
        return transaction.ended == IS_COMMITTED

    # ---- inside ----------------------------------------------------------------------------------

    async def _hold_staged(self, transaction: OpenTransaction) -> None:
        """Put the parts that are too large for held blocks, and hold them.

        Raises: as `hold`; as `Stager.stage`.
        """
        parts, timeout_s = transaction.staged_parts(), self._settings.delivery_timeout_s
        if not parts:
            return
        await self.hold_parts(transaction, await self._stager_of(transaction).stage(parts, timeout_s))
        transaction.note_staged(parts)

    async def hold_parts(self, transaction: OpenTransaction, staged: StagedTransaction) -> None:
        """Hold parts of a transaction that lie in staged objects. Raises: as `hold`."""
        for at in range(0, len(staged.parts), STAGED_PARTS_MAX):
            ask = HoldStagedParts(
                transaction=self._wire(transaction.number),
                writer=staged.writer,
                batch_id=staged.batch_id,
                parts=list(staged.parts[at : at + STAGED_PARTS_MAX]),
            )
            await self._surely(ask, self._settings.delivery_timeout_s)

    def _stager_of(self, transaction: OpenTransaction) -> Stager:
        if self.stager is None:
            raise TooLargeError(f"a part of transaction {transaction.number} is too large for this producer")
        return self.stager

    async def _commit_prepared(self, transaction: OpenTransaction) -> None:
        """Commit a prepared transaction.

        Raises: TransactionAbortedError if the group or an operator rolled it back; OutcomeUnknownError: the group is
        asked.
        """
        self._unsettled, transaction.commit_sent = transaction, True
        try:
            await self._surely(self._commit_of(transaction), self._settings.delivery_timeout_s)
        except TransactionAbortedError:
            self._settled(transaction, committed=False)
            raise
        except MemqError as error:
            text = f"no broker said whether the prepared transaction {transaction.number} is committed"
            raise OutcomeUnknownError(f"{text}: {error}", hint="the checker of its producer group decides") from error
        else:
            self._settled(transaction, committed=True)
        finally:
            self._leave(transaction)

    async def _commit_again(self, transaction: OpenTransaction, timeout_s: float) -> None:
        """Learn the end of a prepared transaction whose commit had no answer."""
        try:
            await self._surely(self._commit_of(transaction), timeout_s)
        except TransactionAbortedError:
            self._settled(transaction, committed=False)
        else:
            self._settled(transaction, committed=True)

    async def _settle_former(self, transaction: OpenTransaction) -> None:
        """Settle the transaction before the next one. A prepared one may stay: its producer group is asked."""
        if not transaction.commits_for_ever:
            await self._roll_back(transaction, self._settings.delivery_timeout_s)
            return
        with suppress(MemqError):
            await self._commit_again(transaction, ABORT_S_MAX)
        self._unsettled = None

    def _commit_of(self, transaction: OpenTransaction) -> EndTransaction:
        return EndTransaction(transaction=self._wire(transaction.number), commit=True, blocks=transaction.blocks)

    def _leave(self, transaction: OpenTransaction) -> None:
        """Let another transaction begin: it settles this one first, if its end is not known."""
        if self._unsettled is transaction:
            transaction.ended = HAS_UNKNOWN_END
        if self._present is transaction:
            self._present = None

    def _settled(self, transaction: OpenTransaction, *, committed: bool) -> None:
        """Note how a transaction has ended, perhaps by a commit whose answer was lost."""
        transaction.ended = IS_COMMITTED if committed else WAS_ROLLED_BACK
        if self._unsettled is transaction:
            self._unsettled = None
        if committed and transaction.commit_sent and transaction.committer is not None:
            transaction.committer.note_stored(transaction.after)

    async def _begin_instance(self) -> None:
        if self._instance:
            return
        settings = self._settings
        ask = BeginTransactions(
            name=settings.transactional_id,
            group=settings.transaction_group,
            token=f"{self._token:016x}",
            timeout_ms=settings.transaction_timeout_ms,
        )
        self._instance = (await self._surely(ask, settings.delivery_timeout_s)).transactional

    async def _settle_refused(self, transaction: OpenTransaction, refusal: MemqError) -> None:
        """Return if a refused commit is committed after all.

        Raises: the refusal after a roll-back; OutcomeUnknownError.
        """
        try:
            committed = await self._roll_back(transaction, ABORT_S_MAX)
        except MemqError as error:
            text = f"a broker refused to commit transaction {transaction.number}, and none rolls it back"
            raise OutcomeUnknownError(f"{text}: {refusal}; {error}") from refusal
        if not committed:
            raise refusal

    async def _roll_back(self, transaction: OpenTransaction, timeout_s: float) -> bool:
        """Settle a transaction, at best by rolling it back; return whether it was committed before."""
        ask = EndTransaction(transaction=self._wire(transaction.number), commit=False)
        answer = await self._surely(ask, timeout_s)
        self._settled(transaction, committed=answer.committed)
        return answer.committed

    async def _surely(self, ask: ProducerRequest, timeout_s: float) -> AdminAnswer:
        """Ask until a broker answers, for at most `timeout_s`. Raises: TimedOutError, and what does not pass."""
        until_s, tries = self._runtime.clock.monotonic() + timeout_s, 0
        while True:
            try:
                return await self._router(
                    Api.ADMIN, AdminRequest(ask=ask), AdminAnswer, timeout_s=self._settings.open_timeout_s
                )
            except ProducerFencedError as error:
                self._fenced = error
                raise
            except RetryableError as error:
                tries += 1
                if self._runtime.clock.monotonic() > until_s:
                    raise TimedOutError(f"no answer about a transaction in {timeout_s:g} s: {error}") from error
                delay_s = backoff_s(self._runtime.random, tries, base_s=RETRY_S_BASE, most_s=RETRY_S_MAX)
                await asyncio.sleep(error.retry_after_ms / 1_000 + delay_s)

    def _wire(self, number: int) -> WireTransaction:
        settings = self._settings
        return WireTransaction(
            name=settings.transactional_id,
            group=settings.transaction_group,
            instance=self._instance,
            number=number,
        )
