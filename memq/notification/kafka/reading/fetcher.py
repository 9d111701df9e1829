"""Reads entries from any offset: a few consumers, assigned manually to the requested partitions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from memq.errors import ClosedError, MemqError, QueueError
from memq.limits import MIB
from memq.notification import Entries, Entry
from memq.notification.kafka.admin import KafkaPartition
from memq.notification.kafka.librdkafka import LastErrors, consumer_of, end_threads
from memq.notification.kafka.settings import KafkaSettings
from memq.runtime.clock import Clock
from memq.runtime.tasks import TaskOwner
from memq.runtime.threads import ThreadPool

FETCH_WAIT_MS = 5  # a request that a consumer has in flight after a read delays its next read by so long
QUEUED_BYTES_MAX = 2 * MIB
MESSAGES_MAX = 500
TOGETHER_MAX = 64  # reads that one consumer does at once
METADATA_REQUESTS_MAX = (
    8  # more new topics are not looked up: librdkafka itself finds them sooner, all at once within 1 s
)
POLL_S = 0.1
PASSING = (KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._RESOLVE)
_CUT = "the next try asks for the end again; if Kafka lost the log, see docs/recovery.md"
WAITS_MAX = 3  # time-outs of requests that a read waits for a thread
_BUSY = "if it stays so, check Kafka's brokers, and restart this broker: librdkafka does not return"


@dataclass(slots=True, eq=False)
class _Read:
    """One partition to read, and the entries found."""

    topic: str
    number: int
    offset: int
    end: int
    bytes_max: int
    answer: asyncio.Future[Entries | MemqError]
    found: list[Entry] = field(default_factory=list)
    bytes: int = 0

    @property
    def partition(self) -> KafkaPartition:
        return self.topic, self.number

    def take(self, entry: Entry) -> Entries | QueueError | None:
        """Take the next entry; return the answer if the read is complete, else None."""
        if entry.offset < (self.found[-1].offset + 1 if self.found else self.offset):
            return self._so_far() or QueueError(f"{self}: its log was cut, it shows offset {entry.offset}", hint=_CUT)
        self.bytes += len(entry.body)
        if self.found and self.bytes > self.bytes_max:
            return self._so_far()
        self.found.append(entry)
        return self._so_far() if entry.offset + 1 >= self.end else None

    def meet_end(self, position: int) -> Entries | QueueError:
        """Return the answer when Kafka reports that `position` is the end of its log.

        A replica that lags may report so below the end that was read before: that is an error if no entry was found.
        """
        if position >= self.end:
            return Entries(self.found, max(position, self.offset))
        text = f"Kafka shows nothing at offset {position}, and the end before was {self.end}"
        return self._so_far() or QueueError(f"{self}: {text}", hint=_CUT)

    def _so_far(self) -> Entries | None:
        return Entries(self.found, self.found[-1].offset + 1) if self.found else None

    def settle(self, found: Entries | MemqError) -> None:
        """Pass the answer to the caller, unless the caller was cancelled."""
        if not self.answer.done():
            self.answer.set_result(found)

    def __str__(self) -> str:
        return f"reading partition {self.number} of Kafka topic '{self.topic}'"


@dataclass(slots=True)
class AssignedConsumer:
    """A consumer, and the topics of its last assignment, whose metadata it has."""

    consumer: Consumer
    topics: list[str] = field(default_factory=list)

    def request_metadata(self, topics: list[str], timeout_s: float) -> None:
        """Request the metadata of new topics: librdkafka itself looks up assigned topics only once a second."""
        new = [topic for topic in topics if topic not in self.topics]
        self.topics = topics
        if len(new) <= METADATA_REQUESTS_MAX:
            for topic in new:
                self.consumer.list_topics(topic, timeout_s)


class EntryFetcher:
    """Reads entries below the tail. A read takes 2 to 5 ms, in a thread.

    The next free thread does all waiting reads together, up to TOGETHER_MAX. The speed matters: an owner of thousands
    of partitions opens them at the rate of these reads.
    """

    def __init__(self, settings: KafkaSettings, clock: Clock, errors: LastErrors, tasks: TaskOwner) -> None:
        self._settings = settings.reader(FETCH_WAIT_MS, QUEUED_BYTES_MAX)
        self._timeout_s = settings.request_timeout_ms / 1000
        self._clock = clock
        self._errors = errors
        self._tasks = tasks
        self._threads_max = settings.fetchers_max
        self._pool = ThreadPool("kafka-fetcher", settings.fetchers_max)
        self._idle: deque[AssignedConsumer] = deque()
        self._waiting: deque[_Read] = deque()
        self._busy = 0
        self._closed = False

    async def fetch(self, topic: str, number: int, offset: int, end: int, bytes_max: int) -> Entries:
        """Return entries from `offset` on, within `bytes_max` but at least one; the read stops at `end`.

        The result is empty only if Kafka's consumer reached `end` without an entry. Raises: NotFoundError, DeniedError,
        QueueError, ClosedError.
        """
        if self._closed:
            raise ClosedError("the queue is closed")
        loop = asyncio.get_running_loop()
        read = _Read(topic, number, offset, end, bytes_max, loop.create_future())
        self._waiting.append(read)
        if self._busy < self._threads_max:
            self._busy += 1
            self._tasks.start(self._work(), "kafka fetcher")
        late = loop.call_later(WAITS_MAX * self._timeout_s, self._give_up, read)
        try:
            found = await read.answer
        finally:
            late.cancel()
        if isinstance(found, MemqError):
            raise found
        return found

    def _give_up(self, read: _Read) -> None:
        """Fail a read that no thread has begun: all of them are blocked, or wait for Kafka."""
        if read in self._waiting:
            self._waiting.remove(read)
            waited_s = WAITS_MAX * self._timeout_s
            read.settle(QueueError(f"{read}: all {self._threads_max} threads were busy for {waited_s:g} s", hint=_BUSY))

    async def close(self) -> None:
        """End threads and consumers; reads that are left fail with ClosedError."""
        self._closed = True
        await end_threads(self._pool, self._close_idle)
        while self._waiting:  # no thread has begun them: all are blocked, and left behind
            self._waiting.popleft().settle(ClosedError("the queue is closed"))

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().consumer.close()

    async def _work(self) -> None:
        try:
            while self._waiting:
                await self._read(self._next())
        finally:
            self._busy -= 1

    def _next(self) -> dict[KafkaPartition, _Read]:
        """Take the reads for one consumer: at most one for each partition."""
        chosen: dict[KafkaPartition, _Read] = {}
        later: list[_Read] = []
        while self._waiting and len(chosen) < TOGETHER_MAX:
            read = self._waiting.popleft()
            if not read.answer.done() and chosen.setdefault(read.partition, read) is not read:
                later.append(read)
        self._waiting.extendleft(reversed(later))
        return chosen

    async def _read(self, reads: dict[KafkaPartition, _Read]) -> None:
        chosen = list(reads.values())
        try:
            if reads:
                await self._pool.run(self._fetch, asyncio.get_running_loop(), reads)
        except (MemqError, KafkaException) as error:
            for read in chosen:
                read.settle(error if isinstance(error, MemqError) else self._errors.failure(error, str(read)))
        finally:
            for read in chosen:  # no effect on answered reads; the others remain if this task was stopped or died
                read.settle(ClosedError("the queue is closed"))

    # ---- in a thread -------------------------------------------------------------------------

    def _fetch(self, loop: asyncio.AbstractEventLoop, reads: dict[KafkaPartition, _Read]) -> None:
        """Do all reads; each gets its answer as soon as it is complete."""
        reader = self._idle.pop() if self._idle else AssignedConsumer(consumer_of(self._settings, self._errors.note))
        consumer, sound = reader.consumer, False
        try:
            reader.request_metadata(list(dict.fromkeys(read.topic for read in reads.values())), self._timeout_s)
            consumer.assign([TopicPartition(read.topic, read.number, read.offset) for read in reads.values()])
            sound = self._collect(consumer, loop, reads)
            consumer.unassign()
        except KafkaException:
            sound = False
            raise
        finally:
            if sound and not self._closed:
                self._idle.append(reader)
            else:
                with suppress(KafkaException):
                    consumer.close()

    def _collect(self, consumer: Consumer, loop: asyncio.AbstractEventLoop, reads: dict[KafkaPartition, _Read]) -> bool:
        """Read until none of `reads` is left; return whether all of them succeeded.

        The time-out begins again with each message for an open read; when it expires, all open reads fail. Messages
        for completed reads, whose partitions may be busy, do not count.
        """
        sound = True

        def done(read: _Read, found: Entries | MemqError) -> None:
            nonlocal sound
            sound = sound and isinstance(found, Entries)
            del reads[read.partition]
            loop.call_soon_threadsafe(read.settle, found)

        heard_s = self._clock.monotonic()
        while reads and self._clock.monotonic() <= heard_s + self._timeout_s:
            for message in _messages(consumer):
                error = message.error()
                for read in _meant(message, reads):
                    if error is None:
                        heard_s = self._clock.monotonic()
                        found = read.take(entry_of(message))
                        if found is not None:
                            done(read, found)
                    elif error.code() == KafkaError._PARTITION_EOF:
                        heard_s = self._clock.monotonic()
                        done(read, read.meet_end(message.offset() or 0))
                    elif error.code() not in PASSING:
                        done(read, self._errors.failure(error, str(read)))
        for read in list(reads.values()):
            done(read, QueueError(f"{read}: no answer in {self._timeout_s:g} s"))
        return sound


def _messages(consumer: Consumer) -> Iterator[Message]:
    """Yield the received messages; wait up to `POLL_S` for the first one."""
    first = consumer.poll(POLL_S)
    if first is not None:
        yield first
        yield from consumer.consume(MESSAGES_MAX, 0)


def _meant(message: Message, reads: dict[KafkaPartition, _Read]) -> list[_Read]:
    """Return the open reads that a message belongs to: all, if it names no partition."""
    topic, number = message.topic(), message.partition()
    if topic is None:
        return list(reads.values())
    read = None if number is None else reads.get((topic, number))
    return [] if read is None else [read]


def entry_of(message: Message) -> Entry:
    """Return the entry in a message without an error."""
    offset, value = message.offset(), message.value()
    assert offset is not None
    return Entry(offset, message.timestamp()[1], value if isinstance(value, bytes) else b"")
