"""The public transactions: `Transaction` for threads, `AsyncTransaction` for an event loop."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from memq.client.producer.fields import BytesLike, HeadersLike, check_fields, check_many
from memq.client.producer.open_block import Route
from memq.client.transactions.core import PositionSource, TransactionalCore
from memq.client.transactions.open_transaction import OpenTransaction
from memq.client.transactions.undecided import checked_note
from memq.errors import InvalidRequestError

if TYPE_CHECKING:
    from memq.client.consumer.batch import Batch


class _Run(Protocol):
    def __call__(self, work: Coroutine[Any, Any, Any], /) -> Any: ...


class TransactedConsumer(Protocol):
    """A `Consumer`, or `memq.aio.Consumer`."""

    @property
    def _core(self) -> PositionSource: ...


def _core_of(consumer: TransactedConsumer) -> PositionSource:
    """Return the core of a consumer. Raises: TypeError."""
    core: PositionSource | None = getattr(consumer, "_core", None)
    if core is None or not hasattr(core, "finish"):
        raise TypeError(f"consumer must be a memq.Consumer, not {type(consumer).__name__}")
    return core


class _TransactionState:
    """The open transaction of a `with` block."""

    def __init__(self, core: TransactionalCore, note: bytes | str, visible: bool) -> None:
        self._core = core
        self._visible = visible
        self._note = checked_note(note)
        self._begun: OpenTransaction | None = None

    @property
    def _open(self) -> OpenTransaction:
        self._used.check_open()
        return self._used

    @property
    def _used(self) -> OpenTransaction:
        if self._begun is None:
            raise InvalidRequestError("the transaction has not begun", hint="with producer.transaction() as t: …")
        return self._begun

    def _check_new(self) -> None:
        if self._begun is not None:
            raise InvalidRequestError("a transaction is used once", hint="begin another one: producer.transaction()")


class Transaction(_TransactionState):
    """A transaction of a `Producer`, for one `with` block.

    The end of the block commits. An exception in it rolls back, unless `prepare` was called before. Readers get all
    records of a partition at once, or none. Raises at the end: as `settle`; TransactionAbortedError,
    GenerationFencedError: it was rolled back; OutcomeUnknownError: `settle` says how it ended;
    TransactionCommittedError: an operator has committed it with less than it has, or before an exception.
    """

    def __init__(
        self,
        core: TransactionalCore,
        run: _Run,
        route: Callable[[str], Route],
        note: bytes | str = b"",
        *,
        visible: bool = False,
    ) -> None:
        super().__init__(core, note, visible)
        self._run = run
        self._route = route

    def send(
        self,
        topic: str,
        value: BytesLike | None,
        key: BytesLike | None = None,
        headers: HeadersLike | None = None,
        timestamp_ms: int | None = None,
        tag: str | None = None,
        partition: int | None = None,
        *,
        subject: str | None = None,
    ) -> None:
        """Add a record; arguments as those of `Producer.send`.

        Within a transaction, all records of a topic without key and partition go to one partition.
        Raises: as `Producer.send`; InvalidRequestError after the end; TooLargeError for a record over 512 KiB, over
        64 MiB of blocks in a partition, or over 4 MiB without a way to the store; DeniedError if the store refuses
        this process; TransactionAbortedError, ProducerFencedError: it was rolled back.
        """
        transaction = self._open
        named = transaction.named_headers(headers, subject)
        fields = check_fields(value, key, named, timestamp_ms, tag)
        if transaction.add(self._route(topic), fields, partition):
            self._run(self._core.hold(transaction))

    def send_many(
        self,
        topic: str,
        values: Sequence[BytesLike | None],
        keys: Sequence[BytesLike | None] | None = None,
        timestamps_ms: Sequence[int] | None = None,
        tag: str | None = None,
    ) -> None:
        """Add many records; arguments as those of `Producer.send_many`.

        Raises: as `send`; InvalidRequestError for columns of different lengths. After TypeError no record was added.
        """
        transaction, route = self._open, self._route(topic)
        for fields in check_many(values, keys, timestamps_ms, tag).rows():
            if transaction.add(route, fields, None):
                self._run(self._core.hold(transaction))

    def flush(self) -> None:
        """Send all records so far, and wait until they are held. Raises: as `send`."""
        self._run(self._core.flush(self._open))

    def prepare(self) -> None:
        """Send all records; return when the cluster can commit them, whatever happens to this process.

        Commit your database after it. From here on an exception in the block rolls nothing back: the commit of the
        database may have counted, so the checker decides. `abort` rolls back. No record can be added.
        Raises: as `send`; InvalidRequestError without a checker or a producer group.
        """
        self._run(self._core.prepare(self._open))

    def commit_positions(self, consumer: TransactedConsumer, batch: Batch | None = None) -> None:
        """Move the positions of a group when this transaction is committed, and only then.

        They are those after the finished batches of `consumer`, or after `batch`, as `Consumer.commit` takes them. The
        producer has the group as `transaction_group`, and the consumer has `auto_commit=False`.
        Raises: InvalidRequestError; GenerationFencedError if another member has a partition now.
        """
        self._run(self._take(consumer, batch))

    async def _take(self, consumer: TransactedConsumer, batch: Batch | None) -> None:
        await self._core.take_positions(self._open, _core_of(consumer), batch)

    def abort(self) -> None:
        """Roll back. The end of the block does nothing then.

        Raises: TimedOutError when no broker answers; TransactionCommittedError if an operator has committed it.
        """
        self._run(self._core.abort(self._open))

    def settle(self) -> bool:
        """Return whether the transaction is committed, after its block; if no decision is known, roll it back.

        After OutcomeUnknownError this says whether the records have to be sent again. A prepared transaction whose
        commit was sent is committed.
        Raises: InvalidRequestError before its end; OutcomeUnknownError for a prepared one that an exception left;
        ProducerFencedError; TimedOutError when no broker answers.
        """
        return bool(self._run(self._core.settle(self._used)))

    def __enter__(self) -> Self:
        self._check_new()
        self._begun = self._run(self._core.begin(self._note, visible=self._visible))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        transaction = self._begun
        if transaction is None or transaction.ended:
            return
        if error is None:
            self._run(self._core.commit(transaction))
        elif transaction.prepared:
            self._run(self._core.leave(transaction))
        else:
            self._run(self._core.abort(transaction, after=error))


class AsyncTransaction(_TransactionState):
    """A transaction of a `memq.aio.Producer`, for one `async with` block. See `Transaction`."""

    def __init__(
        self,
        core: TransactionalCore,
        route: Callable[[str], Coroutine[Any, Any, Route]],
        note: bytes | str = b"",
        *,
        visible: bool = False,
    ) -> None:
        super().__init__(core, note, visible)
        self._route = route

    async def send(
        self,
        topic: str,
        value: BytesLike | None,
        key: BytesLike | None = None,
        headers: HeadersLike | None = None,
        timestamp_ms: int | None = None,
        tag: str | None = None,
        partition: int | None = None,
        *,
        subject: str | None = None,
    ) -> None:
        """Add a record. See `Transaction.send`."""
        transaction = self._open
        named = transaction.named_headers(headers, subject)
        fields = check_fields(value, key, named, timestamp_ms, tag)
        if transaction.add(await self._route(topic), fields, partition):
            await self._core.hold(transaction)

    async def send_many(
        self,
        topic: str,
        values: Sequence[BytesLike | None],
        keys: Sequence[BytesLike | None] | None = None,
        timestamps_ms: Sequence[int] | None = None,
        tag: str | None = None,
    ) -> None:
        """Add many records. See `Transaction.send_many`."""
        transaction, route = self._open, await self._route(topic)
        for fields in check_many(values, keys, timestamps_ms, tag).rows():
            if transaction.add(route, fields, None):
                await self._core.hold(transaction)

    async def flush(self) -> None:
        """Send all records so far, and wait until they are held. Raises: as `send`."""
        await self._core.flush(self._open)

    async def prepare(self) -> None:
        """Send all records; return when the cluster can commit them. See `Transaction.prepare`."""
        await self._core.prepare(self._open)

    async def commit_positions(self, consumer: TransactedConsumer, batch: Batch | None = None) -> None:
        """Move the positions of a group with this transaction. See `Transaction.commit_positions`."""
        await self._core.take_positions(self._open, _core_of(consumer), batch)

    async def abort(self) -> None:
        """Roll back. See `Transaction.abort`."""
        await self._core.abort(self._open)

    async def settle(self) -> bool:
        """Return whether the transaction is committed. See `Transaction.settle`."""
        return await self._core.settle(self._used)

    async def __aenter__(self) -> Self:
        self._check_new()
        self._begun = await self._core.begin(self._note, visible=self._visible)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        transaction = self._begun
        if transaction is None or transaction.ended:
            return
        if error is None:
            await self._core.commit(transaction)
        elif transaction.prepared:
            await self._core.leave(transaction)
        else:
            await self._core.abort(transaction, after=error)
