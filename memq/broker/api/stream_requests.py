"""Answers requests about one write partition: streams, forwarded blocks, staged batches."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable, Sequence, Sized
from contextlib import suppress

from memq.broker.api import Answer, Call
from memq.broker.api.staged_publisher import publish_staged
from memq.broker.partition.append import ProducerState
from memq.broker.partition.topic_processor import TopicProcessor
from memq.broker.partitions import Partitions
from memq.broker.services import Services
from memq.broker.spool.forwarding import take_forwarded
from memq.errors import (
    DeniedError,
    InvalidRequestError,
    LogLostError,
    MovedError,
    NotFoundError,
    NotReadyError,
    ThrottledError,
)
from memq.format.pointer import ProducerEnd
from memq.format.ranges import RangeSet
from memq.limits import PRODUCER_ID_END, SEQUENCE_END, STREAMS_PER_CONNECTION_MAX
from memq.protocol.admin_messages import AdminAnswer, BeginProducer, PublishStaged, WireInstance
from memq.protocol.connection import Principal
from memq.protocol.frames import AckLevel
from memq.protocol.messages import Close, Done, Forward, Open, OpenAnswer
from memq.topic import is_internal, secret_producer_id

OPEN_TIMEOUT_S = 10.0
NOT_READY_MS = 200
BURNED_RANGES_MAX = 256


class StreamRequests:
    """Requests to the owner of a partition."""

    def __init__(self, services: Services, partitions: Partitions) -> None:
        self._services = services
        self._partitions = partitions

    async def open(self, call: Call[Open]) -> Answer:
        """Open a stream of blocks of one producer.

        Raises: InvalidRequestError; ThrottledError over STREAMS_PER_CONNECTION_MAX; NotReadyError if it was closed
        meanwhile; as the opening of the partition.
        """
        ask, connection, number = call.ask, call.connection, call.stream
        producer = producer_id_of(ask.producer)
        proven = _is_proven(ask.secret, producer)
        if number == 0:
            raise InvalidRequestError("stream 0 is the connection itself", hint="open streams 1 to 65535")
        if ask.acks not in tuple(AckLevel) or ask.sequence < 0:  # the message bounds it above
            raise InvalidRequestError(f"acks {ask.acks} or sequence {ask.sequence} is out of range")
        old = connection.streams.pop(number, None)
        if old is not None:
            old.target.close_stream(old)
        _check_room(connection.streams)  # first: a named producer's instance fences older ones
        if ask.producer_epoch and ask.acks != AckLevel.ALL:
            raise InvalidRequestError("a named producer has acks=all")
        processor = await self._open_processor(ask.topic, ask.topic_id, ask.partition)
        if ask.producer_epoch:
            await processor.admit_producer(producer, ask.producer_epoch, ask.sequence)
        _claim(processor.owned().producer(producer), ask.producer_epoch, connection.principal, proven=proven)
        if connection.closed or number in connection.streams:
            raise NotReadyError(f"stream {number} was closed or opened again meanwhile")
        _check_room(connection.streams)  # others may be opened meanwhile
        stream = processor.appender.open_stream(
            number,
            connection,
            producer,
            ask.acks,
            ask.sequence,
            ask.producer_epoch,
            connection.limiters,
            positions=ask.positions,
        )
        stream.proven = proven
        connection.bind(stream)
        assert processor.own is not None, "ready without an epoch"
        return OpenAnswer(epoch=processor.own.epoch, sequence=ask.sequence)

    async def close(self, call: Call[Close]) -> Answer:
        """Close a stream, and note the sequences at which its producer ends. Raises: NotFoundError.

        An end without proof may be forged: a wrong one would make findings of lost records, or hide some. It is noted
        only if all its records are in the queue.
        """
        ask = call.ask
        stream = call.connection.streams.pop(call.stream, None)
        if stream is None:
            raise NotFoundError(f"stream {call.stream} is not open")
        stream.target.close_stream(stream)
        end = ProducerEnd(
            producer=stream.producer_id,
            next_sequence=checked_sequence(ask.next_sequence),
            burned=_burned(ask.burned),
            acks=stream.acks,
        )
        complete = not end.burned and stream.producer.queued.covers(0, end.next_sequence)
        if stream.proven or stream.producer_epoch or complete:
            await stream.target.end_producer(end)
        else:
            ended = f"producer {stream.producer_id:016x} at {ask.next_sequence}"
            self._services.events.info("end-without-proof", f"{call.connection.peer} {stream.target.name}: {ended}")
        return Done()

    async def forward(self, call: Call[Forward]) -> Answer:
        """Take the block of another broker, and answer when it is in the queue."""
        slab, start, stop = call.attachment
        processor = await self._processor(call.ask.topic, call.ask.topic_id, call.ask.partition)
        absent_s = call.connection.ready_s + call.ask.absent_ms / 1000
        await take_forwarded(processor, slab, start, stop, absent_s)
        return Done()

    async def publish_staged(self, call: Call[PublishStaged]) -> Answer:
        """Publish pieces of a batch that a writer stored itself.

        Raises: InvalidRequestError for memq's own topics.
        """
        if is_internal(call.ask.topic):  # nobody has checked the records
            raise InvalidRequestError(f"topic '{call.ask.topic}' is memq's own: it takes no staged batches")
        processor = await self._open_processor(call.ask.topic, call.ask.topic_id, call.ask.partition)
        return AdminAnswer(published=await publish_staged(processor, call.ask))

    async def begin_producer(self, call: Call[BeginProducer]) -> Answer:
        """Begin an instance of a named producer."""
        ask = call.ask
        processor = await self._open_processor(ask.topic, ask.topic_id, ask.partition)
        producer = producer_id_of(ask.producer)
        begun = await processor.begin_producer(producer)
        _claim(processor.owned().producer(producer), begun.epoch, call.connection.principal)
        return AdminAnswer(instance=WireInstance(epoch=begun.epoch, next_sequence=begun.last_sequence))

    async def _open_processor(self, topic: str, topic_id: str, partition: int) -> TopicProcessor:
        """Return the processor of a partition of this broker, ready to take blocks."""
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

    async def _processor(self, name: str, topic_id: str, partition: int) -> TopicProcessor:
        """Return the processor of a partition of this broker.

        If the partition is not known here, refresh: another broker may have sent the client after a recent move.
        """
        topic = await self._partitions.current_topic(name, topic_id)
        try:
            return self._partitions.processor(topic, partition)
        except (MovedError, NotReadyError):
            await self._partitions.refresh()
            return self._partitions.processor(topic, partition)


def _check_room(streams: Sized) -> None:
    """Raise ThrottledError if a connection may have no more streams."""
    if len(streams) >= STREAMS_PER_CONNECTION_MAX:
        raise ThrottledError(f"connection has {STREAMS_PER_CONNECTION_MAX} streams already")


def _is_proven(secret: str, producer: int) -> bool:
    """Whether a client showed the secret of a producer. Raises: DeniedError for another one's secret."""
    if secret and secret_producer_id(secret) != producer:
        raise DeniedError(f"this is not the secret of producer {producer:016x}")
    return bool(secret)


def _claim(state: ProducerState, epoch: int, principal: Principal, *, proven: bool = False) -> None:
    """Bind a producer to the holder of its secret, or an instance of a named one to its principal.

    Raises: DeniedError when it is bound to another client.
    """
    if not epoch:
        if state.proven and not proven:
            raise DeniedError(f"producer {state.id:016x} belongs to a client with its secret", hint="draw another id")
        state.proven = proven
        return
    if state.holder[0] == epoch and state.holder[1] != principal.name:
        raise DeniedError(
            f"instance {epoch} of named producer {state.id:016x} belongs to another principal",
            hint="begin an instance of your own, or choose another name",
        )
    state.holder = (epoch, principal.name)


def producer_id_of(text: str) -> int:
    """Return a producer id from its 16 hex digits. Raises: InvalidRequestError."""
    try:
        number = int(text, 16) if len(text) == 16 else 0
    except ValueError:
        number = 0
    if not 0 < number < PRODUCER_ID_END:
        raise InvalidRequestError(f"bad producer id {text[:40]!a}", hint="16 hex digits, 1 to 2^63-1")
    return number


def producer_ids_of(texts: Sequence[str]) -> Iterable[int]:
    """Return producer ids; many at once take a tenth of the time. Raises: as `producer_id_of`."""
    numbers: tuple[int, ...] = ()
    with suppress(ValueError, struct.error):
        numbers = struct.unpack(f">{len(texts)}Q", bytes.fromhex("".join(texts)))
    if set(map(len, texts)) == {16} and min(numbers, default=0) > 0 and max(numbers) < PRODUCER_ID_END:
        return numbers
    return [producer_id_of(text) for text in texts]


def checked_sequence(number: int) -> int:
    """Return a sequence. Raises: InvalidRequestError."""
    if not 0 <= number <= SEQUENCE_END:
        raise InvalidRequestError(f"sequence {number} is out of range")
    return number


def _burned(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the sequences that a producer gave up, merged; only the newest BURNED_RANGES_MAX ranges.

    Raises: InvalidRequestError.
    """
    merged = RangeSet()
    for first, next_ in ranges:
        if not checked_sequence(first) < checked_sequence(next_):
            raise InvalidRequestError(f"burned sequences {first} to {next_} are no range")
        merged.add(first, next_)
    return tuple(merged)[-BURNED_RANGES_MAX:]
