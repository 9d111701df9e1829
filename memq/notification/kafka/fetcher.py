"""Reads entries from any offset on: a few consumers, each assigned by hand to one partition for one read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from memq.clock import Clock
from memq.errors import QueueError
from memq.limits import MIB
from memq.notification import Entry
from memq.notification.kafka.complaints import Complaints
from memq.notification.kafka.library import consumer_of
from memq.notification.kafka.settings import KafkaSettings
from memq.threads import ThreadPool

FETCH_WAIT_MS = 5  # what a consumer still asks for when a read is done delays its next read
QUEUED_BYTES_MAX = 2 * MIB
MESSAGES_MAX = 500
POLL_S = 0.1
PASSING = (KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._RESOLVE)


class Fetcher:
    """Reads what lies before the tail. A read takes 2 to 5 ms and a thread while it lasts."""

    def __init__(self, settings: KafkaSettings, clock: Clock, complaints: Complaints) -> None:
        self._settings = settings.reader(FETCH_WAIT_MS, QUEUED_BYTES_MAX)
        self._timeout_s = settings.request_timeout_ms / 1000
        self._clock = clock
        self._complaints = complaints
        self._pool = ThreadPool("kafka-fetcher", settings.fetchers_max)
        self._idle: deque[Consumer] = deque()

    async def fetch(self, topic: str, number: int, offset: int, end: int, bytes_max: int) -> Sequence[Entry]:
        """Return entries from `offset` on and below `end`, within `bytes_max` but for the first.

        There are none only when none are left there. Raises: NotFoundError, DeniedError, QueueError.
        """
        return await self._pool.run(self._fetch, TopicPartition(topic, number, offset), end, bytes_max)

    async def close(self) -> None:
        """End threads and consumers."""
        await self._pool.close()
        while self._idle:
            self._idle.pop().close()

    # ---- in a thread -------------------------------------------------------------------------

    def _fetch(self, start: TopicPartition, end: int, bytes_max: int) -> Sequence[Entry]:
        consumer = self._idle.pop() if self._idle else consumer_of(self._settings, self._complaints.note)
        try:
            consumer.assign([start])
            found = self._collect(consumer, start, end, bytes_max)
            consumer.unassign()
        except KafkaException as error:
            consumer.close()
            raise self._complaints.failure(error, _doing(start)) from error
        except BaseException:
            with suppress(KafkaException):
                consumer.close()
            raise
        self._idle.append(consumer)
        return found

    def _collect(self, consumer: Consumer, start: TopicPartition, end: int, bytes_max: int) -> list[Entry]:
        found: list[Entry] = []
        size = 0
        for message in self._messages(consumer, start):
            entry = entry_of(message)
            if entry.offset < start.offset or entry.offset >= end:
                return found  # the log was cut behind this read's back
            size += len(entry.body)
            if found and size > bytes_max:
                return found
            found.append(entry)
            if entry.offset + 1 >= end:
                return found
        return found

    def _messages(self, consumer: Consumer, start: TopicPartition) -> Iterator[Message]:
        """Yield messages until the end of the partition is met. Raises: NotFoundError, QueueError."""
        deadline_s = self._clock.monotonic() + self._timeout_s
        while True:
            first = consumer.poll(POLL_S)
            if first is None:
                if self._clock.monotonic() > deadline_s:
                    raise QueueError(f"{_doing(start)}: no answer in {self._timeout_s:g} s")
                continue
            for message in (first, *consumer.consume(MESSAGES_MAX, 0)):
                error = message.error()
                if error is None:
                    yield message
                elif error.code() == KafkaError._PARTITION_EOF:
                    return
                elif error.code() not in PASSING:
                    raise self._complaints.failure(error, _doing(start))


def entry_of(message: Message) -> Entry:
    """Return the entry that a message without an error is."""
    offset, value = message.offset(), message.value()
    assert offset is not None
    return Entry(offset, message.timestamp()[1], value if isinstance(value, bytes) else b"")


def _doing(start: TopicPartition) -> str:
    return f"reading partition {start.partition} of Kafka topic '{start.topic}'"
