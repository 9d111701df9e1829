"""Answers control frames: each request is a task, and each connection has a bounded number."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import msgspec

from memq import __version__
from memq.broker.api.cluster_requests import ClusterRequests
from memq.broker.api.group_requests import GroupRequests
from memq.broker.ingest.connection import Connection
from memq.broker.ingest.rate_limit import refusal_of
from memq.broker.ingest.slabs import Slab
from memq.broker.partition.topic_processor import TopicProcessor
from memq.broker.partitions import Partitions
from memq.broker.services import Services
from memq.broker.spool.forwarded_block import take_forwarded
from memq.broker.staging.publisher import publish_staged
from memq.broker.upkeep.cold_retention import trim_cold
from memq.errors import (
    InvalidRequestError,
    LogLostError,
    MemqError,
    MovedError,
    NotFoundError,
    NotReadyError,
    ThrottledError,
    TooLargeError,
)
from memq.format.pointer import ProducerEnd
from memq.format.ranges import RangeSet
from memq.limits import POLL_BYTES_MAX, PRODUCER_ID_END, READ_BYTES_MAX, SEQUENCE_END, STREAMS_PER_CONNECTION_MAX
from memq.protocol.forward import decode_forward
from memq.protocol.frames import HELLO_MAGIC, AckLevel, Api, Frame, check_version, encode_frame, encode_prefix
from memq.protocol.messages import (
    AdminAnswer,
    AdminRequest,
    AlterTopic,
    BeginProducer,
    Close,
    CreateTopic,
    DeleteTopic,
    DescribeClients,
    DescribeCluster,
    DescribeLoad,
    Done,
    DrainBroker,
    Hello,
    HelloAnswer,
    Metadata,
    MetadataRequest,
    Open,
    OpenAnswer,
    PollEntries,
    PollRequest,
    PublishStaged,
    ReadRequest,
    StoreMetadata,
    TopicMetadata,
    TrimCold,
    WireInstance,
    decode_message,
    encode_message,
    nack_of,
)
from memq.runtime.allocator import keep_freed_blocks
from memq.runtime.byte_budget import ByteBudget
from memq.runtime.tasks import TaskOwner
from memq.topic import Topic, TopicSettings, check_name, parse_settings

REQUESTS_PER_CONNECTION_MAX = 64
REQUEST_BYTES_MAX = 1 << 20
PENDING_BYTES_MAX = 32 << 20  # bodies of requests that wait for their answers, of all connections
ANSWERS_SHARE = 8  # an eighth of the memory budget, on top of it, is lent to answers: half to READ, half to POLL
# What a client's limit holds back or refuses beside blocks; not what keeps its streams and groups alive.
LIMITED = frozenset({Api.METADATA, Api.READ, Api.POLL, Api.ADMIN})
HELD_MS_MAX = 3_000  # within what clients wait for an answer; what is still owed then, the next request waits for
OPEN_TIMEOUT_S = 10.0
NOT_READY_MS = 200
TOPICS_PER_METADATA_MAX = 10_000
BURNED_RANGES_MAX = 256

Answer = msgspec.Struct | bytes


class Requests:
    """Answers for all connections of one broker."""

    def __init__(self, services: Services, partitions: Partitions, hand_over: Callable[[], Awaitable[None]]) -> None:
        self._services = services
        self._partitions = partitions
        self._cluster = ClusterRequests(services, partitions, hand_over)
        self._groups = GroupRequests(services, partitions)
        self._tasks = TaskOwner(self._failed, services.events)
        half = services.settings.memory_bytes_max // ANSWERS_SHARE // 2
        self._lent = {Api.READ: ByteBudget(half), Api.POLL: ByteBudget(half)}  # a store that hangs delays no POLL
        keep_freed_blocks(services.settings.memory_bytes_max // ANSWERS_SHARE)
        self._pending_bytes = 0
        self._working: dict[Connection, dict[asyncio.Task[None], None]] = {}
        self._answers: dict[int, Callable[[Connection, Frame], Awaitable[Answer]]] = {
            Api.OPEN: self._open,
            Api.CLOSE: self._close,
            Api.METADATA: self._metadata,
            Api.READ: self._read,
            Api.ADMIN: self._admin,
            Api.COMMIT: self._groups.commit,
            Api.JOIN: self._groups.join,
            Api.HEARTBEAT: self._groups.heartbeat,
        }

    # ---- memq.broker.ingest.connection.Handler ------------------------------------------------------------

    def request(self, connection: Connection, frame: Frame) -> None:
        """Start to answer a request; HELLO is answered at once.

        Raises: ProtocolError, UnsupportedVersionError.
        """
        if self._tasks.stopped:
            connection.abort()  # the broker closes: this connection was accepted, but not made, when it closed all
            return
        if frame.api == Api.HELLO:
            connection.send(self._hello(connection, frame))
            return
        working = self._working.setdefault(connection, {})
        error = self._too_much(len(working), len(frame.body))
        if error is not None:
            connection.send(_error_frame(frame, error))
            return
        self._pending_bytes += len(frame.body)
        self._begin(connection, frame, self._answer(connection, frame), lambda: self._forget(frame))

    def forward(self, connection: Connection, request: int, slab: Slab, start: int, stop: int) -> None:
        """See `ingest.connection.Handler.forward`. The slab is kept until the block is in the queue."""
        if self._tasks.stopped:
            connection.abort()
            return
        frame = Frame(Api.FORWARD, 0, 0, request, slab.view[start:stop])
        error = self._too_much(len(self._working.setdefault(connection, {})), 0)
        if error is not None:
            connection.send(_error_frame(frame, error))
            return
        slab.references += 1
        work = self._reply(connection, frame, partial(self._forward, connection, frame, slab, start))
        self._begin(connection, frame, work, lambda: self._services.pool.release(slab))

    def _begin(
        self, connection: Connection, frame: Frame, work: Coroutine[Any, Any, None], after: Callable[[], None]
    ) -> None:
        working = self._working[connection]
        task = self._tasks.start(work, Api(frame.api).name)
        working[task] = None

        def done(task: asyncio.Task[None]) -> None:
            working.pop(task, None)
            after()
            if not task.cancelled() and task.exception() is not None:
                connection.abort()  # what nobody foresaw ends the connection that it came from, and nothing else

        task.add_done_callback(done)

    def _forget(self, frame: Frame) -> None:
        self._pending_bytes -= len(frame.body)

    def _too_much(self, waiting: int, size: int) -> MemqError | None:
        if size > REQUEST_BYTES_MAX:
            return TooLargeError(f"request of {size} bytes, {REQUEST_BYTES_MAX} are allowed")
        if waiting >= REQUESTS_PER_CONNECTION_MAX:
            return ThrottledError(f"{waiting} requests of this connection are waiting for their answers")
        if self._pending_bytes + size > PENDING_BYTES_MAX:
            return ThrottledError(f"requests of {self._pending_bytes} bytes are waiting for their answers")
        return None

    def gone(self, connection: Connection) -> None:
        """Stop the answers that nobody will read."""
        if connection.limiters:
            self._services.limits.leave(connection.client)
        for task in list(self._working.pop(connection, {})):
            task.cancel()

    def _failed(self, error: BaseException) -> None:
        self._services.events.error("request-failed", repr(error), error)

    async def stop(self) -> None:
        """Stop all answers."""
        await self._tasks.stop()

    async def _answer(self, connection: Connection, frame: Frame) -> None:
        """Answer a request.

        Answers that may be large are made one budget at a time, and only for who reads them.
        """
        if frame.api in (Api.OPEN, Api.CLOSE):
            await self._reply(connection, frame, partial(self._answers[frame.api], connection, frame))
            return
        if connection.limiters and frame.api in LIMITED and not await self._let_in(connection, frame):
            return
        handler = await self._groups.prepare_poll(frame) if frame.api == Api.POLL else self._answers[frame.api]
        await connection.outbox.writable()
        lent = self._lent.get(Api(frame.api))
        if lent is None:
            await self._reply(connection, frame, partial(handler, connection, frame))
            return
        async with lent.lend(_answer_bytes(frame)):
            await self._reply(connection, frame, partial(handler, connection, frame))
            await connection.outbox.writable()  # until then the answer is in memory

    async def _let_in(self, connection: Connection, frame: Frame) -> bool:
        """Hold a request back as long as its client is over a soft limit; over a hard one, refuse it."""
        refusal = refusal_of(connection.limiters, self._services.runtime.clock.monotonic())
        if refusal is not None:
            mode, error = refusal
            if mode == "hard":
                connection.send(_error_frame(frame, error))
                return False
            await asyncio.sleep(min(error.retry_after_ms, HELD_MS_MAX) / 1000)
        for limiter in connection.limiters:
            limiter.take(1, 0)
        return True

    async def _reply(self, connection: Connection, frame: Frame, work: Callable[[], Awaitable[Answer]]) -> None:
        """Send the answer, or the error of it.

        `work` begins here: a coroutine that is made before would be left unawaited by a cancelled task.
        """
        try:
            answer = await work()
            body = answer if isinstance(answer, bytes) else encode_message(answer)
            reply = (encode_prefix(frame.api, frame.stream, frame.argument, len(body)), body)
        except MemqError as error:
            reply = _error_frame(frame, error), b""
        if not connection.closed:
            if frame.api in LIMITED:
                for limiter in connection.limiters:
                    limiter.owe(len(reply[1]))
            connection.send(*reply)

    def _hello(self, connection: Connection, frame: Frame) -> bytes:
        hello = decode_message(frame.body, Hello)
        version = check_version(hello.least_version, hello.greatest_version)
        host = connection.peer.rpartition(":")[0]
        connection.client = check_name(hello.client_id, "client") if hello.client_id else host
        connection.limiters = self._services.limits.come(connection.client)
        settings = self._services.settings
        answer = HelloAnswer(
            version=version,
            broker=settings.broker_id,
            cluster=settings.cluster,
            memq=__version__,
            audit_ms=settings.audit_interval_ms if settings.audit else 0,
        )
        return encode_frame(Api.HELLO, 0, HELLO_MAGIC, encode_message(answer))

    # ---- streams ---------------------------------------------------------------------------------

    async def _open(self, connection: Connection, frame: Frame) -> Answer:
        ask = decode_message(frame.body, Open)
        producer = _producer_id(ask.producer)
        if frame.stream == 0:
            raise InvalidRequestError("stream 0 is the connection itself", hint="open streams 1 to 65535")
        if ask.acks not in tuple(AckLevel) or not 0 <= ask.sequence < SEQUENCE_END:
            raise InvalidRequestError(f"acks {ask.acks} or sequence {ask.sequence} is out of range")
        old = connection.streams.pop(frame.stream, None)
        if old is not None:
            old.processor.close_stream(old)
        if len(connection.streams) >= STREAMS_PER_CONNECTION_MAX:
            raise ThrottledError(f"connection has {STREAMS_PER_CONNECTION_MAX} streams already")
        if ask.producer_epoch and ask.acks != AckLevel.ALL:
            raise InvalidRequestError("a named producer has acks=all")
        processor = await self._open_processor(ask.topic, ask.topic_id, ask.partition)
        if ask.producer_epoch:
            await processor.admit_producer(producer, ask.producer_epoch, ask.sequence)
        if connection.closed or frame.stream in connection.streams:
            raise NotReadyError(f"stream {frame.stream} was closed or opened again meanwhile")
        stream = processor.open_stream(frame.stream, connection, producer, ask.acks, ask.sequence, ask.producer_epoch)
        connection.bind(stream)
        assert processor.own is not None, "ready without an epoch"
        return OpenAnswer(epoch=processor.own.epoch, sequence=ask.sequence)

    async def _begin_producer(self, ask: BeginProducer) -> AdminAnswer:
        processor = await self._open_processor(ask.topic, ask.topic_id, ask.partition)
        begun = await processor.begin_producer(_producer_id(ask.producer))
        return AdminAnswer(instance=WireInstance(epoch=begun.epoch, next_sequence=begun.last_sequence))

    async def _open_processor(self, topic: str, topic_id: str, partition: int) -> TopicProcessor:
        """Return the processor of a partition of ours, ready to take blocks."""
        processor = await self._processor(topic, topic_id, partition)
        lost = self._services.lost_logs.get((processor.topic.id, partition))
        if lost is not None:
            raise LogLostError(lost, retry_after_ms=NOT_READY_MS)
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await processor.ready()
        except TimeoutError as error:
            raise NotReadyError(f"{processor.name} is still being opened", retry_after_ms=NOT_READY_MS) from error
        return processor

    async def _forward(self, connection: Connection, frame: Frame, slab: Slab, start: int) -> Answer:
        message, head_bytes = decode_forward(frame.body)
        processor = await self._processor(message.topic, message.topic_id, message.partition)
        absent_s = connection.ready_s + message.absent_ms / 1000
        await take_forwarded(processor, slab, start + head_bytes, start + len(frame.body), absent_s)
        return Done()

    async def _close(self, connection: Connection, frame: Frame) -> Answer:
        ask = decode_message(frame.body, Close)
        stream = connection.streams.pop(frame.stream, None)
        if stream is None:
            raise NotFoundError(f"stream {frame.stream} is not open")
        stream.processor.close_stream(stream)
        end = ProducerEnd(
            producer=stream.producer_id,
            next_sequence=_checked_sequence(ask.next_sequence),
            burned=_burned(ask.burned),
        )
        await stream.processor.end_producer(end)
        return Done()

    async def _processor(self, name: str, topic_id: str, partition: int) -> TopicProcessor:
        """Return the processor of a partition of ours.

        It may have come here just now, and who sent the client knew.
        """
        topic = await self._partitions.current_topic(name, topic_id)
        try:
            return self._partitions.processor(topic, partition)
        except (MovedError, NotReadyError):
            await self._partitions.refresh()
            return self._partitions.processor(topic, partition)

    # ---- metadata and objects --------------------------------------------------------------------

    async def _metadata(self, connection: Connection, frame: Frame) -> Answer:
        ask = decode_message(frame.body, MetadataRequest)
        if ask.topics is not None and len(ask.topics) > TOPICS_PER_METADATA_MAX:
            raise TooLargeError(f"metadata of {len(ask.topics)} topics at once, {TOPICS_PER_METADATA_MAX} are allowed")
        names = [topic.name for topic in self._partitions.topics()] if ask.topics is None else ask.topics
        for name in names:
            check_name(name, internal=True)
        unconfirmed = [] if ask.topics is None else await self._partitions.confirm(names, ask.known)
        found: list[TopicMetadata] = []
        missing: list[str] = []
        for name in names:
            topic = await self._find(name, create=ask.create)
            if topic is None:
                missing.append(name)
            else:
                found.append(TopicMetadata(topic=topic, owners=self._partitions.owners(topic)))
        return Metadata(
            cluster=self._services.settings.cluster,
            brokers=list(self._partitions.brokers()),
            zones=list(self._partitions.brokers().values()),
            topics=found,
            missing=missing,
            unconfirmed=unconfirmed,
            stores=[StoreMetadata(name=name, url=store.url) for name, store in self._services.stores.items()],
        )

    async def _find(self, name: str, *, create: bool) -> Topic | None:
        try:
            return await self._partitions.current_topic(name)
        except NotFoundError:
            settings = self._services.settings
            if not (create and settings.auto_create_topics):
                return None
            return await self._partitions.create(name, settings.partitions, TopicSettings(), exist_ok=True)

    async def _read(self, connection: Connection, frame: Frame) -> Answer:
        ask = decode_message(frame.body, ReadRequest)
        if not 0 < ask.length <= READ_BYTES_MAX or ask.offset < 0:
            raise TooLargeError(f"READ of {ask.length} bytes at {ask.offset}; 1 to {READ_BYTES_MAX} are allowed")
        store = self._services.stores.get(ask.store)
        if store is None:
            raise NotFoundError(f"store {ask.store[:60]!a} is not one of this cluster")
        counters = self._services.counters
        counters.read_requests += 1
        hot = self._services.hot.read(ask.key, ask.offset, ask.length)
        if hot is not None:
            counters.read_hot_requests += 1
        data = await store.get_range(ask.key, ask.offset, ask.length) if hot is None else hot
        counters.read_bytes += len(data)
        return data

    # ---- administration --------------------------------------------------------------------------

    async def _admin(self, connection: Connection, frame: Frame) -> Answer:
        ask = decode_message(frame.body, AdminRequest).ask
        if isinstance(ask, CreateTopic):
            settings = parse_settings(ask.settings, TopicSettings())
            count = ask.partitions or self._services.settings.partitions
            return AdminAnswer(topic=await self._partitions.create(ask.name, count, settings, exist_ok=ask.exist_ok))
        if isinstance(ask, AlterTopic):
            topic = await self._partitions.current_topic(ask.name, ask.topic_id)
            return AdminAnswer(topic=await self._partitions.alter(topic, parse_settings(ask.settings, topic.settings)))
        if isinstance(ask, DeleteTopic):
            await self._partitions.delete(await self._partitions.current_topic(ask.name, ask.topic_id))
            return AdminAnswer()
        if isinstance(ask, BeginProducer):
            return await self._begin_producer(ask)
        if isinstance(ask, PublishStaged):
            processor = await self._open_processor(ask.topic, ask.topic_id, ask.partition)
            return AdminAnswer(published=await publish_staged(processor, ask))
        if isinstance(ask, TrimCold):
            await trim_cold(self._services, await self._partitions.current_topic(ask.topic, ask.topic_id))
            return AdminAnswer(sweep_age_ms=self._services.settings.sweep_age_ms)
        if isinstance(ask, DescribeCluster | DescribeClients | DescribeLoad | DrainBroker):
            return await self._cluster.admin(ask)
        return await self._groups.admin(ask)


def _answer_bytes(frame: Frame) -> int:
    """Return the most bytes that the answer to a READ or POLL may have; 0 for a refusal."""
    try:
        if frame.api == Api.READ:
            return max(0, min(decode_message(frame.body, ReadRequest).length, READ_BYTES_MAX))
        ask = decode_message(frame.body, PollRequest).ask
    except MemqError:
        return 0
    return max(0, min(ask.bytes_max, POLL_BYTES_MAX)) if isinstance(ask, PollEntries) else 0


def _producer_id(text: str) -> int:
    try:
        number = int(text, 16) if len(text) == 16 else 0
    except ValueError:
        number = 0
    if not 0 < number < PRODUCER_ID_END:
        raise InvalidRequestError(f"bad producer id {text[:40]!a}", hint="16 hex digits, 1 to 2^63-1")
    return number


def _checked_sequence(number: int) -> int:
    if not 0 <= number <= SEQUENCE_END:
        raise InvalidRequestError(f"sequence {number} is out of range")
    return number


def _burned(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the sequences that a producer gave up, merged.

    The newest when there are too many for a pointer.
    """
    merged = RangeSet()
    for first, next_ in ranges:
        if not _checked_sequence(first) < _checked_sequence(next_):
            raise InvalidRequestError(f"burned sequences {first} to {next_} are no range")
        merged.add(first, next_)
    return tuple(merged)[-BURNED_RANGES_MAX:]


def _error_frame(frame: Frame, error: MemqError) -> bytes:
    return encode_frame(Api.ERROR, frame.stream, frame.argument, encode_message(nack_of(error)))
