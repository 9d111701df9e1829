"""Answers requests of readers: POLL of pointers in the queue, and READ of the bytes of objects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec

from memq.broker.api import Answer, Call, WithBlocks
from memq.broker.partitions import Partitions
from memq.broker.permissions.object_topics import ObjectTopics
from memq.broker.services import Services
from memq.errors import MemqError, NotFoundError, NotReadyError, QueueError, StoreError, TooLargeError
from memq.limits import POLL_BLOCKS_BYTES_MAX, POLL_BYTES_MAX, READ_BYTES_MAX
from memq.notification import Entries, Entry, Span
from memq.notification.remote import partition_of, ref_of
from memq.permissions import Resource
from memq.protocol.messages import (
    PartitionEntries,
    PartitionRef,
    PollAnswer,
    PollEntries,
    PollSpans,
    PollTime,
    ReadRequest,
    WireEntry,
    nack_of,
)
from memq.storage_handlers import StorageHandler
from memq.topic import ReadPartition, Topic

WAIT_MS_MAX = 30_000
POLL_PARTITIONS_MAX = 10_000
LOG_S_MAX = 5.0  # time-out for one log of a POLL; a log that takes longer fails alone
LOGS_S_MAX = 10.0  # time-out for all logs of a POLL; the next POLL reads the others
CONFIRM_S = 2.0  # time-out for the coordinator to confirm that a partition is new; after it, the partition is opened
READ_S_MAX = 20.0  # of a store for one READ; clients wait 30 s
Found = TypeVar("Found")
_JSON = msgspec.json.Decoder(msgspec.Raw)


class ReaderRequests:
    """Reads queue and stores for clients; any broker answers, from memory if it can."""

    def __init__(self, services: Services, partitions: Partitions) -> None:
        self._services = services
        self._partitions = partitions
        self._queue = services.queue
        self._pointers = services.pointers
        self._recent = services.recent_pointers
        self._topics = ObjectTopics(services)

    async def read_resources(self, call: Call[ReadRequest]) -> list[Resource]:
        """Return the topics of the object of a READ. Raises: as `ObjectTopics.resources`."""
        return await self._topics.resources(call.ask.store, call.ask.key)

    async def read(self, call: Call[ReadRequest]) -> Answer:
        """Return a range of an object.

        Raises: StoreError when the store takes longer than READ_S_MAX. Otherwise the client would time out first,
        without the reason, and close the connection with all its other requests.
        """
        ask = call.ask
        if not 0 < ask.length <= READ_BYTES_MAX or ask.offset < 0:
            raise TooLargeError(f"READ of {ask.length} bytes at {ask.offset}; 1 to {READ_BYTES_MAX} are allowed")
        store = self._services.stores.get(ask.store)
        if store is None:
            raise NotFoundError(f"store {ask.store[:60]!a} is not one of this cluster")
        counters = self._services.counters
        counters.read_requests += 1
        found = None if ask.stored else self._services.recent_batches.read(ask.key, ask.offset, ask.length)
        if found is not None:
            counters.read_hot_requests += 1
        data = await _read(store, ask) if found is None else found
        counters.read_bytes += len(data)
        return data

    async def prepare_poll(self, ask: PollEntries) -> Sequence[Span | MemqError]:
        """Wait until a POLL has an answer or its time is over. Return the spans of its logs."""
        if len(ask.partitions) > POLL_PARTITIONS_MAX:
            return ()
        with suppress(MemqError):  # the request for the span of that partition fails, too
            await self._wait(ask)
        logs = {partition_of(part.partition): part.offset for part in ask.partitions}
        spans: dict[ReadPartition, Span | MemqError] = {}
        if ask.wait_ms > 0:
            spans = {log: span for log, offset in logs.items() if (span := self._recent.span(log, offset)) is not None}
        ask_spans = {log: self._in_time(log, partial(self._queue.span, log)) for log in logs if log not in spans}
        if ask_spans:  # at the same time: the queue may ask for all in one request
            spans |= zip(ask_spans, await asyncio.gather(*ask_spans.values()), strict=True)
        return [spans[log] for log in logs]

    async def _wait(self, ask: PollEntries) -> None:
        """Wait for an entry, unless this broker has just published one that is wanted."""
        if ask.wait_ms > 0:
            wanted = {await known_partition(self._partitions, part.partition): part.offset for part in ask.partitions}
            if not any(self._recent.find(log, offset) for log, offset in wanted.items()):
                await self._pointers.wait(wanted, min(ask.wait_ms, WAIT_MS_MAX) / 1000)

    async def poll_time(self, call: Call[PollTime]) -> Answer:
        """Return the first offset of a log that is not older than a time."""
        log = partition_of(call.ask.partition)
        offset = await self._in_time(log, partial(self._pointers.seek_time, log, call.ask.time_ms))
        if isinstance(offset, MemqError):
            raise offset
        return PollAnswer(offset=offset)

    async def poll_spans(self, call: Call[PollSpans]) -> Answer:
        """Return the span of each log, or its error.

        If the request names a write partition, its owner opens it, and proves the end (`TopicProcessor.proven_end`). A
        partition that no broker has ever opened stays closed.

        Raises: as `poll_entries`; MovedError when another broker is the owner; NotReadyError when the end could not be
        proved.
        """
        _check_count(call.ask.partitions)
        proven: dict[ReadPartition, int] = {}
        if call.ask.writer is not None:
            for name, topic_id in dict.fromkeys((ref.topic, ref.topic_id) for ref in call.ask.partitions):
                topic = await self._partitions.current_topic(name, topic_id)
                end = await self._proven_end(topic, call.ask.writer)
                proven[topic.read_partition_of(call.ask.writer)] = end
        logs = [partition_of(ref) for ref in call.ask.partitions]
        # At the same time: the queue may ask for all of them in one request.
        spans = await asyncio.gather(*(self._in_time(log, partial(self._pointers.span, log)) for log in logs))
        errors = [span for span in spans if isinstance(span, MemqError)]
        if errors and len(errors) == len(spans):
            raise errors[0]
        return PollAnswer(
            partitions=[
                _failed(log, span)
                if isinstance(span, MemqError)
                else PartitionEntries(partition=ref_of(log), begin=span.begin, end=max(span.end, proven.get(log, 0)))
                for log, span in zip(logs, spans, strict=True)
            ]
        )

    async def _proven_end(self, topic: Topic, writer: int) -> int:
        at_work = (topic.id, writer) in self._partitions.processors  # then it answers also while the broker drains
        if not at_work and await self._is_new(topic, writer):
            return 0
        processor = self._partitions.processor(topic, writer, to_end=at_work)
        try:
            async with asyncio.timeout(LOG_S_MAX):
                return await processor.proven_end()
        except TimeoutError as error:
            raise NotReadyError(f"{processor.name}: its owner proved no end within {LOG_S_MAX:g} s") from error

    async def _is_new(self, topic: Topic, writer: int) -> bool:
        """Whether no broker has ever opened a partition that this one owns, so that nothing was acked there.

        A fresh read of the coordinator must confirm it, and the log must be empty: a coordinator that was set back
        proves nothing.
        """
        if not self._partitions.owns(topic, writer):
            return False
        try:
            async with asyncio.timeout(CONFIRM_S):
                if (await self._services.coordinator.assignment(topic.id, writer)).epoch:
                    return False
                return (await self._pointers.span(topic.read_partition_of(writer))).end == 0
        except (MemqError, TimeoutError):
            return False

    async def poll_entries(self, call: Call[PollEntries]) -> Answer:
        """Return the entries of each log; for a log that fails, the answer has its error instead.

        Raises: the error of the first log when all fail; TooLargeError.
        """
        ask, spans = call.ask, call.attachment
        _check_count(ask.partitions)
        offsets = {partition_of(part.partition): part.offset for part in ask.partitions}
        loop = asyncio.get_running_loop()
        until_s = loop.time() + LOGS_S_MAX
        left = min(ask.bytes_max, POLL_BYTES_MAX)
        found: list[PartitionEntries | MemqError] = []
        for (partition, offset), span in zip(offsets.items(), spans, strict=True):
            if isinstance(span, MemqError):
                found.append(span)
                continue
            room = left if (left > 0 and loop.time() < until_s) or not found else None
            from_memory = ask.wait_ms > 0  # a POLL that does not wait asks the log: it may confirm an earlier answer
            read = partial(self._entries, partition, offset, room, span, from_memory=from_memory)
            part = await self._in_time(partition, read)
            if not isinstance(part, MemqError):
                left -= sum(len(entry.pointer) for entry in part.entries)
            found.append(part)
        errors = [part for part in found if isinstance(part, MemqError)]
        if errors and len(errors) == len(found):
            raise errors[0]
        answer = PollAnswer(
            partitions=[
                _failed(partition, part) if isinstance(part, MemqError) else part
                for partition, part in zip(offsets, found, strict=True)
            ]
        )
        blocks = self._add_blocks(answer, call.spare_bytes, int(ask.tag_bits, 16))
        return WithBlocks(answer, blocks) if blocks else answer

    def _add_blocks(self, answer: PollAnswer, bytes_max: int, tag_bits: int) -> list[bytes]:
        """Return the blocks in memory of new pointers, up to `bytes_max`; note the length of each.

        Not those of batches without any of the `tag_bits`, which the consumer passes over; 0 for all batches.
        """
        found: list[bytes] = []
        for part in answer.partitions:
            log = partition_of(part.partition)
            for entry in part.entries:
                pointer = self._recent.find(log, entry.offset)
                location = pointer.location if pointer is not None else None
                if pointer is None or location is None or (tag_bits and not pointer.tag_bits & tag_bits):
                    continue
                if location.length > bytes_max:
                    break
                blocks = self._services.recent_batches.read(location.key, location.offset, location.length)
                if blocks is None:
                    break  # the consumer takes batches in order: it would drop later ones
                entry.blocks_bytes = len(blocks)
                bytes_max -= len(blocks)
                found.append(blocks)
        self._services.counters.poll_batches += len(found)
        return found

    async def _in_time(self, partition: ReadPartition, ask: Callable[[], Awaitable[Found]]) -> Found | MemqError:
        """Return the answer of a log, or its error, within `LOG_S_MAX`.

        Only the coordinator decides that a topic is deleted. If the queue answers "not found", perhaps while it loads
        its metadata, the error is retryable, because "not found" ends a consumer.
        """
        name = f"partition {partition.partition} of topic '{partition.topic}'"
        try:
            async with asyncio.timeout(LOG_S_MAX):
                await known_partition(self._partitions, ref_of(partition))
                try:
                    return await ask()
                except NotFoundError as error:
                    raise QueueError(f"the queue does not find the log of {name}, which exists: {error}") from error
        except MemqError as error:
            return error
        except TimeoutError:
            return QueueError(f"the log of {name} did not answer within {LOG_S_MAX:g} s")

    async def _entries(
        self, partition: ReadPartition, offset: int, bytes_max: int | None, span: Span, *, from_memory: bool
    ) -> PartitionEntries:
        """Return the entries from `offset` on; none if `bytes_max` is None. `span` is the span in the queue.

        With `from_memory`, those that this broker has just published are not read from the log.
        """
        if bytes_max is None:
            entries = Entries((), -1)
        elif run := self._recent.run(partition, offset, bytes_max) if from_memory else ():
            entries = Entries((pointer.entry for pointer in run), run[-1].entry.offset + 1)
        elif offset >= span.end:
            entries = Entries((), offset)
        else:
            entries = await self._pointers.read(partition, offset, bytes_max)
            self._recent.compare(partition, entries)
        if (entries[0].offset if entries else span.begin) > offset:
            span = await self._pointers.span(partition)  # with the compacted part
        return PartitionEntries(
            partition=ref_of(partition),
            begin=span.begin,
            end=span.end,
            entries=[_wire_entry(entry) for entry in entries],
            next=entries.next,
            ended=(await self._partitions.current_topic(partition.topic, partition.topic_id)).ended,
        )


def read_bytes(ask: ReadRequest) -> int:
    """Return the bytes that the answer to a READ has at most; 0 for a refusal."""
    return max(0, min(ask.length, READ_BYTES_MAX))


def poll_bytes(ask: PollEntries) -> int:
    """Return the bytes that the pointers in the answer to a POLL have at most."""
    return max(0, min(ask.bytes_max, POLL_BYTES_MAX))


def poll_blocks_bytes(ask: PollEntries) -> int:
    """Return the bytes that the blocks in the answer to a POLL have at most."""
    return max(0, min(ask.blocks_bytes_max, POLL_BLOCKS_BYTES_MAX))


async def known_partition(partitions: Partitions, ref: PartitionRef) -> ReadPartition:
    """Return the read partition that a message names. Raises: NotFoundError."""
    topic = await partitions.current_topic(ref.topic, ref.topic_id)
    if not 0 <= ref.partition < topic.read_partitions:
        raise NotFoundError(
            f"topic '{topic.name}' has {topic.read_partitions} read partitions, none is {ref.partition}"
        )
    return partition_of(ref)


def _check_count(partitions: Sequence[object]) -> None:
    if len(partitions) > POLL_PARTITIONS_MAX:
        raise TooLargeError(f"poll of {len(partitions)} partitions at once, {POLL_PARTITIONS_MAX} are allowed")


def _wire_entry(entry: Entry) -> WireEntry:
    """Return an entry for an answer; a pointer that is no JSON would make the whole answer unreadable."""
    try:
        _JSON.decode(entry.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return WireEntry(
            offset=entry.offset, time_ms=entry.time_ms, pointer=msgspec.Raw(b"null"), damaged=bytes(entry.body)
        )
    return WireEntry(offset=entry.offset, time_ms=entry.time_ms, pointer=msgspec.Raw(entry.body))


def _failed(partition: ReadPartition, error: MemqError) -> PartitionEntries:
    return PartitionEntries(partition=ref_of(partition), begin=-1, end=-1, error=nack_of(error))


async def _read(store: StorageHandler, ask: ReadRequest) -> bytes:
    try:
        async with asyncio.timeout(READ_S_MAX):
            return await store.get_range(ask.key, ask.offset, ask.length)
    except TimeoutError as error:
        raise StoreError(f"object '{ask.key}' in store '{ask.store}' was not read within {READ_S_MAX:g} s") from error
