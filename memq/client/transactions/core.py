"""The transactions of one producer on its event loop: begun, held, committed or rolled back.

A transaction's blocks have a producer id of their own for each partition, so a request that is repeated holds a block
once. The coordinator settles each number once (T3). An end with an unknown outcome is settled before the next
transaction begins. The transaction and the consumer whose positions it moves learn it then.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from memq.client.broker_router import BrokerRouter
from memq.client.producer.delayed import NoteHeld
from memq.client.producer.fields import RecordFields, check_size
from memq.client.producer.open_block import Route
from memq.client.producer.settings import ProducerSettings
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
from memq.format.blocks.builder import BlockBuilder
from memq.format.held_sequences import held_minute, transactional_sequence
from memq.format.report import HeldStage
from memq.groups import OUTSIDE_GENERATION
from memq.groups.remote import wire_of
from memq.limits import (
    HOLD_BYTES_MAX,
    HOLDS_PER_REQUEST_MAX,
    KIB,
    POINTER_RANGES_MAX,
    PRODUCER_ID_END,
    SLOTS,
    TRANSACTION_TARGET_BYTES_MAX,
)
from memq.protocol.admin_messages import AdminAnswer, AdminRequest
from memq.protocol.frames import Api
from memq.protocol.transaction_messages import (
    BeginTransactions,
    EndTransaction,
    HoldTransaction,
    WireTransaction,
    WireTransactionBlock,
)
from memq.runtime.clock import backoff_s
from memq.runtime.runtime import Runtime
from memq.topic import Committed, ReadPartition, Topic

if TYPE_CHECKING:
    from memq.client.consumer.assigned import Assigned
    from memq.client.consumer.batch import Batch
    from memq.client.consumer.group_session import Committer
    from memq.client.consumer.settings import ConsumerSettings

BLOCK_BYTES = 256 * KIB  # raw size at which a block is sealed
REQUEST_BYTES_MAX = 600 * KIB  # of the blocks in one request, which has them as text
ABORT_S_MAX = 5.0
ROLLED_BACK = (TransactionAbortedError, GenerationFencedError, TooLargeError, ProducerFencedError)  # ends of a commit
RETRY_S_BASE, RETRY_S_MAX = 0.05, 1.0
IS_BEING_COMMITTED, HAS_UNKNOWN_END = "is being committed", "has an unknown end"  # how a transaction has ended
IS_COMMITTED, WAS_ROLLED_BACK = "is committed", "was rolled back"
# How the audit gets the end of a transaction; an unknown one may be followed by another.
_STAGES: dict[str, HeldStage] = {
    HAS_UNKNOWN_END: "unsure",
    WAS_ROLLED_BACK: "rolled-back",
    IS_COMMITTED: "committed",
}


class PositionSource(Protocol):
    """The core of a consumer, which imports this module: it sends dead letters."""

    @property
    def settings(self) -> ConsumerSettings:
        """Its group, and whether it commits by itself."""
        ...

    async def finish(self, batch: Batch | None) -> tuple[Committer, tuple[Assigned, Committed] | None]:
        """Finish `batch`, or all that were read; return what commits, and the only position to commit."""
        ...


@dataclass(slots=True)
class _Target:
    """The records of a transaction for one partition: the open block, and what was sealed."""

    topic: str
    topic_id: str
    partition: int
    scope: int
    slots: tuple[int, int]
    producer_id: int
    next: int
    builder: BlockBuilder = field(default_factory=BlockBuilder)
    slots_hold: bool = True
    blocks: int = 0
    bytes: int = 0


class OpenTransaction:
    """The records of one transaction that are not held yet. Any thread may add some."""

    def __init__(self, settings: ProducerSettings, runtime: Runtime, number: int) -> None:
        self.number = number
        self.blocks = 0
        self.committer: Committer | None = None  # of the consumer whose positions move
        self.member = "", OUTSIDE_GENERATION
        self.before: dict[ReadPartition, Committed] = {}
        self.after: dict[ReadPartition, Committed] = {}
        self.commit_sent = False  # and may have moved the positions
        self.note_held: NoteHeld = lambda *noted: None  # reports its records to the audit
        self._ended = ""
        self._noted: HeldStage | None = None  # the end that was reported
        self._settings = settings
        self._runtime = runtime
        self._lock = threading.Lock()
        self._targets: dict[tuple[str, int], _Target] = {}
        self._topics: dict[str, Topic] = {}
        self._first = transactional_sequence(runtime.clock.wall_ms())
        self._chosen: dict[str, int] = {}  # by topic: the partition of its records without a key
        self._sealed: list[WireTransactionBlock] = []
        self._sealed_bytes = 0

    @property
    def ended(self) -> str:
        """How it has ended; "" if it has not."""
        return self._ended

    @ended.setter
    def ended(self, how: str) -> None:
        self._ended = how
        self._note_end(_STAGES.get(how))

    def _note_end(self, stage: HeldStage | None) -> None:
        """Report how its records have ended, unless that is known already."""
        if stage is None or stage == self._noted or (stage == "unsure" and not self.commit_sent):
            return
        self._noted = stage
        with self._lock:
            for target in self._targets.values():
                records = target.next - self._first + target.builder.count
                topic = self._topics[target.topic_id]
                self.note_held(topic, target.partition, stage, held_minute(self._first), records)

    def add(self, route: Route, fields: RecordFields, partition: int | None) -> bool:
        """Add a record; return whether so much waits that it should be held now.

        Raises: TooLargeError, NotFoundError; InvalidRequestError after the end.
        """
        check_size(fields.size, route.topic)
        with self._lock:
            self.check_open()
            target = self._target(route, fields, partition)
            if target.builder.count and target.builder.raw_bytes + fields.size > BLOCK_BYTES:
                self._seal(target)
            target.builder.append(*fields)
            target.slots_hold &= partition is None
            if target.builder.raw_bytes >= BLOCK_BYTES:
                self._seal(target)
            return self._sealed_bytes >= REQUEST_BYTES_MAX

    def take(self, *, everything: bool) -> list[WireTransactionBlock]:
        """Return the blocks that wait; with `everything`, also the open ones. Raises: TooLargeError."""
        with self._lock:
            for target in self._targets.values() if everything else ():
                if target.builder.count:
                    self._seal(target)
            found, self._sealed, self._sealed_bytes = self._sealed, [], 0
            return found

    def close(self) -> bool:
        """Take no more records; return False if some wait, which must be held first."""
        with self._lock:
            if self._sealed or any(target.builder.count for target in self._targets.values()):
                return False
            self.ended = IS_BEING_COMMITTED
            return True

    def check_open(self) -> None:
        """Raise InvalidRequestError after the end."""
        if self.ended:
            raise InvalidRequestError(f"the transaction {self.ended}", hint="begin another one: producer.transaction()")

    def _target(self, route: Route, fields: RecordFields, partition: int | None) -> _Target:
        topic = route.topic
        if partition is not None:
            index = route.map.index_of(partition)
        elif fields.key is not None:
            index = route.map.index_of_key(fields.key)
        else:
            drawn = self._runtime.random.randrange(len(route.buffers))
            index = self._chosen.setdefault(topic.id, drawn) % len(route.buffers)
        buffer = route.buffers[index]
        place = topic.id, buffer.partition
        found = self._targets.get(place)
        if found is None:
            producer_id = self._runtime.random.randrange(1, PRODUCER_ID_END)
            found = _Target(
                topic.name, topic.id, buffer.partition, buffer.scope, buffer.slots, producer_id, self._first
            )
            self._targets[place], self._topics[topic.id] = found, topic
        found.slots_hold &= found.slots == buffer.slots
        return found

    def _seal(self, target: _Target) -> None:
        builder, count = target.builder, target.builder.count
        data = bytes(
            builder.seal(
                producer_id=target.producer_id,
                first_sequence=target.next,
                scope=target.scope,
                now_ms=self._runtime.clock.wall_ms(),
                codec=self._settings.codec,
                slot_range=target.slots if target.slots_hold else (0, SLOTS - 1),
            ).data
        )
        target.builder, target.slots_hold = BlockBuilder(), True
        target.next += count
        target.blocks, target.bytes = target.blocks + 1, target.bytes + len(data)
        place = f"topic '{target.topic}' partition {target.partition}"
        if len(data) > HOLD_BYTES_MAX:
            raise TooLargeError(f"a record of {len(data)} bytes in a transaction, {HOLD_BYTES_MAX} are allowed")
        if target.bytes > TRANSACTION_TARGET_BYTES_MAX or target.blocks > POINTER_RANGES_MAX:  # T5
            raise TooLargeError(
                f"a transaction has {target.bytes} bytes in {place}, {TRANSACTION_TARGET_BYTES_MAX} are allowed"
            )
        self.blocks += 1
        self._sealed.append(
            WireTransactionBlock(topic=target.topic, topic_id=target.topic_id, partition=target.partition, block=data)
        )
        self._sealed_bytes += len(data)


class TransactionalCore:
    """The transactions of one producer, one at a time. All methods are called on its loop."""

    def __init__(self, settings: ProducerSettings, runtime: Runtime, router: BrokerRouter) -> None:
        self._settings = settings
        self._runtime = runtime
        self._router = router
        self._token = runtime.random.getrandbits(64)
        self._instance = 0
        self._number = 0
        self._unsettled: OpenTransaction | None = None  # the last one, if its end is not known
        self._present: OpenTransaction | None = None
        self._fenced: ProducerFencedError | None = None
        self.note_held: NoteHeld = lambda *noted: None

    async def begin(self) -> OpenTransaction:
        """Begin a transaction.

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
        self._number += 1
        made = self._present = OpenTransaction(self._settings, self._runtime, self._number)
        try:
            await self._begin_instance()
            if self._unsettled is not None:
                await self._roll_back(self._unsettled, self._settings.delivery_timeout_s)
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

    async def take_positions(self, transaction: OpenTransaction, consumer: PositionSource, batch: Batch | None) -> None:
        """Note the positions of a consumer: they move with the decision.

        Raises: InvalidRequestError for a consumer of another group, or one that commits by itself.
        """
        transaction.check_open()
        group = self._settings.transaction_group
        if not group or consumer.settings.group != group:
            raise InvalidRequestError(
                f"positions of group '{consumer.settings.group}' can't move in a transaction of group '{group}'",
                hint="make the producer with transaction_group='…', the group of the consumer",
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
        """Commit; after an error that says so, all is rolled back.

        Raises: TransactionAbortedError, GenerationFencedError, TooLargeError, ProducerFencedError: it was rolled back.
        OutcomeUnknownError: no broker said how it ended. TransactionCommittedError: an operator has committed it, with
        less than it has now, or without its positions.
        """
        transaction.check_open()
        try:
            while not transaction.close():
                await self.hold(transaction, everything=True)
        except BaseException as error:
            await self.abort(transaction, after=error)
            raise
        ask = EndTransaction(transaction=self._wire(transaction.number), commit=True, blocks=transaction.blocks)
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

        Raises: InvalidRequestError before its end; as `begin`.
        """
        if self._present is transaction:
            raise InvalidRequestError(f"transaction {transaction.number} is open", hint="end it first")
        if self._unsettled is transaction:
            await self._roll_back(transaction, self._settings.delivery_timeout_s)
        return transaction.ended == IS_COMMITTED

    # ---- inside ----------------------------------------------------------------------------------

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

    async def _surely(self, ask: BeginTransactions | HoldTransaction | EndTransaction, timeout_s: float) -> AdminAnswer:
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
