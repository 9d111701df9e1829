"""The public consumers: `Consumer` for threads, `AsyncConsumer` for an event loop.

`Consumer` does its I/O on the process's one I/O thread. `read_arrow` returns a range of a topic as one Arrow table,
`read_record` one record.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from memq.client.arguments import (
    check_callbacks,
    check_timeout,
    check_tracer_provider,
    encryption_of,
    public_name,
    runtime_of,
)
from memq.client.consumer.batch import Batch, Record, TopicPartition, topic_partition_of
from memq.client.consumer.core import CLOSE_S_MAX, ConsumerCore, ConsumerStats
from memq.client.consumer.fetch.fetcher import BatchFetcher, ReadMode
from memq.client.consumer.group.membership import AssignmentEvents
from memq.client.consumer.offset_resolver import Lag
from memq.client.consumer.record_filter import OnForgotten, filter_of
from memq.client.consumer.settings import ConsumerSettings, OnDamaged, OnExpired, Point, topics_of
from memq.client.lifecycle import AsyncClosing, Background, BlockingClient, KafkaHints
from memq.client.link_pool import CONNECT_TIMEOUT_MS, bootstrap_addresses
from memq.client.log_answers import LogAnswers
from memq.client.observers.reporter import reporting
from memq.errors import InvalidRequestError, MemqError, NotFoundError
from memq.limits import MIB
from memq.runtime.runtime import Runtime
from memq.runtime.tls import Tls
from memq.topic import Position

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from memq.client.observers.traces import ConsumerTraces
    from memq.encryption.encryption import Encryption


INTERRUPTED_S_MAX = 1.0
_ONE_READER = "make a consumer in each {0}, with the same group, or pass the batches of one {0} to the others"
Result = TypeVar("Result")
OnPartitions = Callable[[list[TopicPartition]], object]  # of an AsyncConsumer it may return an awaitable


class BaseConsumer(KafkaHints, ABC):
    """Settings and callbacks that the blocking and the asyncio consumer share."""

    @public_name("Consumer")
    def __init__(
        self,
        brokers: str | Sequence[str] | None,
        topics: str | Sequence[str],
        *,
        group: str | None = None,
        broadcast: str | None = None,
        start: Point = "beginning",
        end: Point | None = None,
        auto_commit: bool = True,
        auto_commit_interval_ms: int = 1_000,
        session_timeout_ms: int = 10_000,
        prefetch_bytes_max: int = 64 * MIB,
        on_damaged: OnDamaged = "fail",
        on_expired: OnExpired = "fail",
        tags: str | Sequence[str] | None = None,
        where: str | None = None,
        read: ReadMode = "auto",
        s3: Mapping[str, object] | None = None,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        client_id: str = "",
        zone: str = "",
        on_assigned: OnPartitions | None = None,
        on_revoked: OnPartitions | None = None,
        on_lost: OnPartitions | None = None,
        audit: bool = True,
        encryption: Encryption | str | None = None,
        on_forgotten: OnForgotten = "deliver",
        tracer_provider: TracerProvider | None = None,
        tls: Tls | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        settings = ConsumerSettings(
            topics=topics_of(topics),
            group=group,
            broadcast=broadcast,
            start=start,
            end=end,
            auto_commit=auto_commit,
            auto_commit_interval_ms=auto_commit_interval_ms,
            session_timeout_ms=session_timeout_ms,
            prefetch_bytes_max=prefetch_bytes_max,
            on_damaged=on_damaged,
            on_expired=on_expired,
            wanted=filter_of(tags, where, on_forgotten),
            read=read,
            connect_timeout_ms=connect_timeout_ms,
            s3=s3,
            client_id=client_id,
            zone=zone,
            audit=audit,
            encryption=encryption_of(encryption),
        ).check()
        check_callbacks(on_assigned=on_assigned, on_revoked=on_revoked, on_lost=on_lost)
        check_tracer_provider(tracer_provider)
        self._runtime = runtime_of(runtime, tls)
        self._traces: ConsumerTraces | None = None
        if tracer_provider is not None:
            from memq.client.observers.traces import ConsumerTraces

            self._traces = ConsumerTraces(tracer_provider, self._runtime.clock, settings.group_name)
        observe = reporting("consumer", settings.group_name or "") if audit else None
        make_fetcher = BatchFetcher if self._traces is None else self._traces.fetcher
        self._core = ConsumerCore(settings, self._runtime, bootstrap_addresses(brokers), make_fetcher, observe)
        self._callbacks = (on_lost, on_revoked, on_assigned)
        self._open()

    @abstractmethod
    def _open(self) -> None:
        """Take the core to the loop on which it is to run."""

    def _deadline_s(self, timeout_s: float | None) -> float | None:
        return None if timeout_s is None else self._runtime.clock.monotonic() + timeout_s

    def _left_s(self, deadline_s: float | None) -> float | None:
        return None if deadline_s is None else max(0.0, deadline_s - self._runtime.clock.monotonic())

    def _calls(self, changes: AssignmentEvents) -> list[tuple[OnPartitions, list[TopicPartition]]]:
        """Return the callbacks on_lost, on_revoked and on_assigned that changes concern, with their arguments."""
        parts = (changes.lost, changes.revoked, changes.assigned)
        named = zip(self._callbacks, parts, strict=True)
        return [(each, [topic_partition_of(one) for one in part]) for each, part in named if each is not None and part]


class Consumer(BaseConsumer, BlockingClient):
    """Reads topics. For use by one thread; only `wakeup` may be called from others.

    Args:
        brokers: `HOST:PORT`, several with commas or as a list; None: the environment variable MEMQ_BROKERS.
        topics: one topic or several.
        group: name of a group. Its members share the partitions, and its positions are stored. None: this consumer
            reads all partitions, and no position is stored.
        broadcast: name of this consumer, in place of a group: it reads all partitions, and continues at its own stored
            positions after a restart. Other consumers share nothing with it, and no group's lag counts it. RocketMQ
            calls this MessageModel.BROADCASTING. A newer consumer of the same name fences this one.
        start: "beginning", "end", a datetime with a time zone (the first batch sealed at or after it), a Position, a
            list of them, or {(topic, partition): Position}. It counts only for partitions without a stored position.
            A time after the last batch is the end. A Position with a mark is refused with PositionLostError
            if its log was cut before it.
        end: in the same forms, where the iteration stops. "end" is the end of the partition when it is opened. None:
            the iteration stops only after the last record of topics that an operator has sealed.
        auto_commit: commit finished batches periodically; asking for the next batch finishes a batch.
        auto_commit_interval_ms: interval of these commits.
        session_timeout_ms: after this silence of a member its partitions go to others. Heartbeats wait
            at the owner of the group for a change, for a third of it.
        prefetch_bytes_max: stored bytes that are fetched ahead; at least one batch.
        on_damaged: for a damaged block. "fail": raise CorruptDataError and stay there; "skip": count it and continue;
            "dead-letter": send its raw bytes to the topic `<topic>.dlq` and continue.
        on_expired: if retention has removed the next records. "fail": raise PositionExpiredError, which names the first
            remaining position, and stay until a seek; "skip": count the removed records and continue there.
        tags: deliver only records with one of these tags: "A || B", or a sequence of tags. Batches without such a tag
            are not fetched. None or "*": any record.
        where: deliver only records for whose headers a condition is true: "amount > 100 AND region = 'EU'", with = <>
            < <= > >=, BETWEEN, IN, IS NULL, AND, OR, NOT. Both together: records that match both.
        read: "direct": from the store; "broker": through a broker; "auto": directly if the store can be opened. Except
            with "direct", the owner of a partition sends new batches with their pointers.
        s3: settings of the section [s3] for a direct reader, by name; None: those of MEMQ_S3_… and memq.toml, and the
            keys that boto3 finds.
        connect_timeout_ms: time in which the first use must reach a broker; later restarts have no such bound.
        client_id: name of this client at brokers, for limits and logs; "": the name of its host.
        zone: zone in which this client runs; it prefers brokers of this zone for requests that any broker can answer.
        on_assigned: called with new partitions, a list of (topic, partition), inside `poll` and the iteration.
        on_revoked: the same with partitions that another member gets; it may commit before.
        on_lost: the same with partitions that the group has already given to another member.
        audit: report read and committed records to the audit, if the cluster asks for reports.
        encryption: keys for encrypted records: a `memq.Encryption`, or its first argument, as "file:keys.json".
        on_forgotten: for a record whose subject was forgotten. "deliver": give it without value and headers, with
            `forgotten` true; "skip": leave it out, as a filter does.
        tracer_provider: of OpenTelemetry, for spans of fetching and processing (extra `[otel]`); None: no spans.
        tls: certificates for connections to brokers; None: by the variables `MEMQ_TLS_…`, else without TLS.
        runtime: clock, randomness and network; default: those of the system.

    Raises: InvalidRequestError, InvalidNameError, InvalidFilterError. The first use opens the first connection.
    """

    _interrupted_close_s = 0.2

    def _open(self) -> None:
        self._background = Background("consumer", self._core)
        self._reading_thread = threading.RLock()  # a callback may poll
        self._closed = False

    def __enter__(self) -> Self:
        self._background.check_process()
        try:
            self._background.run(self._core.start())
        except BaseException:
            self.close()
            raise
        return self

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches; ends at `end`, at the end of sealed topics, and after `wakeup`. Raises: as `poll`."""
        return iter(self.poll, None)

    def poll(self, timeout: float | None = None) -> Batch | None:
        """Return the next batch, and finish the one before it. The callbacks run in this call.

        Returns None after `timeout` seconds, at the configured `end` or that of sealed topics (then `ended` is true),
        and after `wakeup`. The first call may take longer, because it connects.
        Raises: CorruptDataError before a damaged block; UnreachableError if the first use reaches no broker;
        NotFoundError if a topic does not exist; UnsupportedFormatError; ClosedError; ForkedError;
        InvalidRequestError while another thread polls.
        """
        timeout_s = check_timeout(timeout)
        self._background.check_process()
        if not self._reading_thread.acquire(blocking=False):
            raise InvalidRequestError("another thread polls this consumer", hint=_ONE_READER.format("thread"))
        try:
            return self._poll(timeout_s)
        finally:
            self._reading_thread.release()

    def _poll(self, timeout_s: float | None) -> Batch | None:
        traces = self._traces
        if traces is not None:
            traces.done()
        self._core.ask()
        try:
            batch = self._core.next_at_hand()
            if batch is None:
                batch = self._next(self._deadline_s(timeout_s))
            if traces is not None and batch is not None:
                traces.handed(batch)
        except MemqError:
            raise
        except BaseException:  # of a signal or of a tracer: a batch that came at that moment was not returned
            self._background.io.run(self._core.interrupted(), INTERRUPTED_S_MAX)
            raise
        return batch

    def _next(self, deadline_s: float | None) -> Batch | None:
        io = self._background.io
        while True:
            found = io.run(self._core.next(self._left_s(deadline_s)))
            if not isinstance(found, AssignmentEvents):
                return found
            for callback, partitions in self._calls(found):
                callback(partitions)
            io.run(self._core.take(found))

    def commit(self, batch: Batch | None = None) -> None:
        """Store the position after `batch`, or after all finished batches; wait for the answer.

        With `batch`, the batches of its partition before it count as finished, and no other batch is committed.
        A batch is finished when the program has asked for the next one, or has iterated or taken all of its records.
        It tries again after temporary errors, as long as this member is in its group.
        Raises: InvalidRequestError without a group; GenerationFencedError if another member has the partition now.
        """
        self._background.run(self._core.commit(batch))

    def seek(self, topic: str, partition: int, to: Point) -> None:
        """Continue from another position. Raises: InvalidRequestError if the partition is not assigned."""
        self._background.run(self._core.seek(topic, partition, to))

    def pause(self, topic: str, partition: int) -> None:
        """Stop delivering records of a partition until `resume`. Raises: as `seek`."""
        self._pause(topic, partition, paused=True)

    def resume(self, topic: str, partition: int) -> None:
        """Deliver records of a partition again. Raises: as `seek`."""
        self._pause(topic, partition, paused=False)

    def position(self) -> dict[TopicPartition, Position]:
        """Return the position of the next record in each assigned partition."""
        return self._background.run(_called(self._core.positions))

    def committed(self) -> dict[TopicPartition, Position]:
        """Return the group's stored positions. Raises: InvalidRequestError without a group; RetryableError."""
        return self._background.run(self._core.committed())

    def lag(self) -> LogAnswers[TopicPartition, Lag]:
        """Return the records and bytes from each position to the present end of its partition.

        A partition whose log does not answer is missing; `unknown` of the answer has its error.
        Raises: the first error if all logs fail.
        """
        return self._background.run(self._core.lag())

    @property
    def ended(self) -> bool:
        """Whether the iteration is over: all partitions were read to `end`, or to the ends of sealed topics."""
        return self._core.ended

    def stats(self) -> ConsumerStats:
        """Return counters of delivered, skipped and retried records and requests."""
        return self._background.run(_called(self._core.stats))

    def wakeup(self) -> None:
        """Let the running poll, else the next one, return None. Any thread may call it."""
        self._background.check_process()
        self._background.io.call(self._core.wakeup)

    def close(self) -> None:
        """Commit if auto-commit is on, leave the group, disconnect. May be called twice.

        Auto-commit includes the last batch only if the program has asked for the next one.
        """
        self._finish(None)

    def _closing(self, timeout_s: float | None) -> Coroutine[Any, Any, None]:
        if self._traces is not None:
            self._traces.done()
        return self._core.close(CLOSE_S_MAX if timeout_s is None else timeout_s)

    def _pause(self, topic: str, partition: int, *, paused: bool) -> None:
        self._background.check_process()

        async def pause() -> None:
            self._core.pause(topic, partition, paused=paused)

        self._background.run(pause())


async def _called(function: Callable[[], Result]) -> Result:
    """Call a function of the core on its own thread."""
    return function()


class AsyncConsumer(BaseConsumer, AsyncClosing):
    """Reads topics. Arguments as those of `memq.Consumer`; callbacks may be coroutine functions.

    Use it as `async with`, on one event loop and from one task; any task or thread may call `wakeup`.
    """

    def _open(self) -> None:
        """The core runs on the loop of the first use."""
        self._poller: asyncio.Task[Any] | None = None

    async def __aenter__(self) -> Self:
        self._check_loop()
        try:
            await self._core.start()
        except BaseException:
            await self._core.close()
            raise
        return self

    def __aiter__(self) -> AsyncIterator[Batch]:
        """Yield batches; ends at `end`, and after `wakeup`. Raises: as `poll`."""
        return _Batches(self)

    async def poll(self, timeout: float | None = None) -> Batch | None:
        """Return the next batch, and finish the one before it. The callbacks run in this call.

        Returns None after `timeout` seconds, at the configured `end`, and after `wakeup`. The first call may take
        longer, because it connects. Raises: as `memq.Consumer.poll`; InvalidRequestError while another task polls.
        """
        timeout_s = check_timeout(timeout)
        self._check_loop()
        before, task = self._poller, asyncio.current_task()
        if before not in (None, task):  # a callback may poll
            raise InvalidRequestError("another task polls this consumer", hint=_ONE_READER.format("task"))
        self._poller = task
        try:
            return await self._poll(timeout_s)
        finally:
            self._poller = before

    async def _poll(self, timeout_s: float | None) -> Batch | None:
        traces = self._traces
        if traces is not None:
            traces.done()
        self._core.ask()
        try:
            batch = self._core.next_at_hand()
            if batch is None:
                batch = await self._next(self._deadline_s(timeout_s))
            if traces is not None and batch is not None:
                traces.handed(batch)
        except MemqError:
            raise
        except BaseException:
            await self._core.interrupted()
            raise
        return batch

    async def _next(self, deadline_s: float | None) -> Batch | None:
        while True:
            found = await self._core.next(self._left_s(deadline_s))
            if not isinstance(found, AssignmentEvents):
                return found
            for callback, partitions in self._calls(found):
                result = callback(partitions)
                if inspect.isawaitable(result):
                    await result
            await self._core.take(found)

    async def commit(self, batch: Batch | None = None) -> None:
        """Store the position after `batch`, or after all finished batches.

        Raises: as `memq.Consumer.commit`.
        """
        await self._core.commit(batch)

    async def seek(self, topic: str, partition: int, to: Point) -> None:
        """Continue from another position. Raises: InvalidRequestError if the partition is not assigned."""
        await self._core.seek(topic, partition, to)

    def pause(self, topic: str, partition: int) -> None:
        """Stop delivering records of a partition until `resume`. Raises: as `seek`."""
        self._core.pause(topic, partition, paused=True)

    def resume(self, topic: str, partition: int) -> None:
        """Deliver records of a partition again. Raises: as `seek`."""
        self._core.pause(topic, partition, paused=False)

    def position(self) -> dict[TopicPartition, Position]:
        """Return the position of the next record in each assigned partition."""
        return self._core.positions()

    async def committed(self) -> dict[TopicPartition, Position]:
        """Return the group's stored positions. Raises: InvalidRequestError without a group; RetryableError."""
        return await self._core.committed()

    async def lag(self) -> LogAnswers[TopicPartition, Lag]:
        """Return the records and bytes from each position to the present end of its partition.

        A partition whose log does not answer is missing; `unknown` of the answer has its error.
        Raises: the first error if all logs fail.
        """
        return await self._core.lag()

    @property
    def ended(self) -> bool:
        """Whether the iteration is over: all partitions were read to `end`, or to the ends of sealed topics."""
        return self._core.ended

    def stats(self) -> ConsumerStats:
        """Return counters of delivered, skipped and retried records and requests."""
        return self._core.stats()

    def wakeup(self) -> None:
        """Let the running poll, else the next one, return None. Any thread may call it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._core.wakeup)
        else:
            self._core.wakeup()  # nothing is under way before the first use

    async def close(self) -> None:
        """Commit if auto-commit is on, leave the group, disconnect. May be called twice.

        Auto-commit includes the last batch only if the program has asked for the next one.
        """
        if self._traces is not None:
            self._traces.done()
        await self._core.close()


class _Batches(AsyncIterator[Batch]):
    """The batches of an AsyncConsumer up to its `end`, or a wakeup."""

    def __init__(self, consumer: AsyncConsumer) -> None:
        self._consumer = consumer

    async def __anext__(self) -> Batch:
        batch = await self._consumer.poll()
        if batch is None:
            raise StopAsyncIteration
        return batch


def read_record(
    brokers: str | Sequence[str] | None,
    topic: str,
    position: Position,
    *,
    read: ReadMode = "auto",
    s3: Mapping[str, object] | None = None,
    encryption: Encryption | str | None = None,
    tls: Tls | None = None,
    runtime: Runtime | None = None,
) -> Record:
    """Return the record at a position, as an `Ack` or a record of a consumer has it.

    It fetches the index of the record's batch and the block of the record.
    Raises: NotFoundError if no reader gets a record there: it is a copy, or the position is after the end.
    PositionExpiredError if retention removed it; otherwise as `memq.Consumer` and its `poll`.
    """
    if not isinstance(position, Position):
        raise TypeError(f"position must be a memq.Position, not {type(position).__name__}")
    at = (topic, position.read_partition)
    after = Position(position.read_partition, position.pointer_offset, position.record_index + 1)
    missing = NotFoundError(
        f"topic '{topic}' has no record at position {position}",
        hint="memq consume --json shows positions; memq trace shows whether the record is a copy",
    )
    # The other partitions end where they begin.
    with Consumer(
        brokers,
        topic,
        start={at: position},
        end={at: after},
        read=read,
        s3=s3,
        audit=False,
        encryption=encryption,
        tls=tls,
        runtime=runtime,
    ) as consumer:
        try:
            found = [record for batch in consumer for record in batch if record.offset == position.offset]
        except InvalidRequestError as error:
            if type(error) is InvalidRequestError:  # the position is after the end of its batch, or of the log
                raise missing from error
            raise
    if not found:
        raise missing
    return found[0]
