"""Requests to group coordinators, and reads of committed positions: none aborts the process.

librdkafka aborts the process if a request to a coordinator times out at a bad moment.

A few consumers that never join read the positions, one for each group. They replace librdkafka's admin request for
positions, which aborts the process when the coordinator answers with an error. The reason: librdkafka 2.12 and later
passes the error to the member of a group, and an admin client has none. Such answers occur whenever a coordinator
moves, or Kafka has just started. A consumer looks for the coordinator again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from memq.notification.kafka.admin import KafkaAdmin, KafkaPartition
from memq.notification.kafka.librdkafka import LastErrors, answered, consumer_of, end_threads
from memq.notification.kafka.settings import KafkaSettings
from memq.runtime.process import keep_for_ever, keep_to_end
from memq.runtime.tasks import TimedSemaphore
from memq.runtime.threads import ThreadPool

LIBRARY_TIMEOUT_S = 3_600.0  # the longest time-out that librdkafka accepts
RENEW_S = 1.0  # pause between two new clients; doubles with each one until a request is answered
RENEW_S_MAX = 60.0
THREADS_MAX = 64  # so many groups may have silent coordinators before others wait; threads start when needed
READS_AT_ONCE_MAX = 4
READ_S = 1.0  # a read takes some ms, or 0.5 s with a new consumer
CONSUMERS_MAX = 4  # kept idle, since a new one must first connect, and the same groups are often requested again
PARTITIONS_MAX = 1_000  # in one request
COORDINATOR_TRIES = 200
COORDINATOR_PAUSE_S = 0.05
COORDINATOR_MOVES = (  # also while Kafka creates its topic of positions, at the first commit
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)


class Positions:
    """Reads committed positions of groups from Kafka.

    A coordinator that is silent delays only its groups: a group has one read at a time, on a thread of its own, and a
    read that takes longer than `READ_S` does not count among the `READS_AT_ONCE_MAX`.
    """

    def __init__(self, settings: KafkaSettings, errors: LastErrors) -> None:
        self._settings = settings
        self._timeout_s = settings.request_timeout_ms / 1000
        self._errors = errors
        self._pool = ThreadPool("kafka-positions", THREADS_MAX)
        self._reads = TimedSemaphore(READS_AT_ONCE_MAX, READ_S)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # of the groups that are read
        self._idle: OrderedDict[str, Consumer] = OrderedDict()
        self._closed = False

    async def of(self, group: str, partitions: Sequence[KafkaPartition]) -> list[TopicPartition]:
        """Return the positions of a Kafka group in these partitions, without those that have none.

        Raises: QueueError, DeniedError.
        """
        found: list[TopicPartition] = []
        turn = self._turns.setdefault(group, asyncio.Lock())
        async with turn, self._reads.turn():
            for start in range(0, len(partitions), PARTITIONS_MAX):
                found += await self._pool.run(self._read, group, partitions[start : start + PARTITIONS_MAX])
        return found

    async def close(self) -> None:
        """End the consumers and the threads; closing twice is fine."""
        self._closed = True
        await end_threads(self._pool, lambda: self._close_idle(0))

    # ---- in a thread -------------------------------------------------------------------------

    def _read(self, group: str, partitions: Sequence[KafkaPartition]) -> list[TopicPartition]:
        """Return the positions, with the group's consumer if there is one; no other thread reads this group."""
        consumer = self._idle.pop(group, None) or self._make(group)
        try:
            return self._ask_twice(consumer, group, partitions)
        finally:
            self._idle[group] = consumer
            self._close_idle(0 if self._closed else CONSUMERS_MAX)

    def _ask_twice(self, consumer: Consumer, group: str, partitions: Sequence[KafkaPartition]) -> list[TopicPartition]:
        """Return the positions; a partition has none only if two answers say so.

        librdkafka has the same value for "no position" and for a partition that the answer lacks. A consumer that
        assumed a new group would begin at the end, and skip records.
        """
        found = self._ask(consumer, group, partitions)
        known = {(part.topic, part.partition) for part in found}
        missing = [partition for partition in partitions if partition not in known]
        return found + self._ask(consumer, group, missing) if missing else found

    def _ask(self, consumer: Consumer, group: str, partitions: Sequence[KafkaPartition]) -> list[TopicPartition]:
        doing = f"reading the positions of group '{group}'"
        for last in range(COORDINATOR_TRIES, 0, -1):
            try:
                found = consumer.committed(
                    [TopicPartition(*partition) for partition in partitions], timeout=self._timeout_s
                )
            except KafkaException as error:
                if last == 1 or error.args[0].code() not in COORDINATOR_MOVES:
                    raise self._errors.group_failure(error, doing) from error
                consumer.poll(COORDINATOR_PAUSE_S)  # returns no message: the consumer looks for the coordinator
            else:
                self._errors.clear()
                return [part for part in found if self._is_stored(part, doing)]
        raise AssertionError("the last try raised")

    def _is_stored(self, part: TopicPartition, doing: str) -> bool:
        """Whether the group has a position in this partition.

        Raises: Kafka's error for the partition, which must not count as "no position".
        """
        error: Any = part.error
        if error is not None:
            doing = f"{doing}: partition {part.partition} of '{part.topic}'"
            raise self._errors.group_failure(error, doing)
        return part.offset >= 0

    def _make(self, group: str) -> Consumer:
        return consumer_of(self._settings.positions(group), self._errors.note)

    def _close_idle(self, kept: int) -> None:
        """Close the idle consumers that were used least recently, except `kept` of them."""
        while len(self._idle) > kept:
            with suppress(KeyError):  # another thread may have taken the last one
                self._idle.popitem(last=False)[1].close()


class KafkaGroupRequests:
    """Describes a group, sets its positions, deletes it.

    librdkafka first looks for the group's coordinator. If the request times out before that look-up is answered, the
    late answer aborts the process (2.16: assertion `eonce->refcnt > 0`). A Kafka that hung for a moment, or was
    restarted, would end all brokers. So librdkafka gets a time-out of an hour, and the caller waits for
    `request_timeout_ms`. A request that was sent fails in librdkafka by `socket.timeout.ms`, which is harmless. A
    request that still looks for its coordinator may be executed later. To make that rare, `KafkaAdmin.check` first
    proves that Kafka is reachable.
    A client whose connection breaks during such a request never asks that coordinator again (2.16: it remains in state
    TRY_CONNECT). It can't be destroyed either, and keeps a few threads. A new client replaces it. Pauses between new
    clients grow until a request is answered. Their number has no bound: with one, requests failed until a restart.
    All methods raise KafkaException, and the errors of `KafkaAdmin.check`.
    """

    def __init__(self, make: Callable[[], AdminClient], kafka: KafkaAdmin) -> None:
        self._make = make
        self._client: AdminClient | None = None
        self._renewals = 0  # since a request was answered
        self._renew_at_s = 0.0  # loop's time of the next allowed renewal
        self._kafka = kafka
        self._timeout_s = kafka.timeout_s

    async def describe(self, group: str, *, rights: bool = False) -> Any:
        """Return librdkafka's description of a Kafka group; with `rights`, also the allowed operations."""
        await self._kafka.check()
        answers: Any = self._admin.describe_consumer_groups(
            [group], include_authorized_operations=rights, request_timeout=LIBRARY_TIMEOUT_S
        )
        return await self._answered(answers[group])

    async def store(self, group: str, offsets: list[TopicPartition]) -> Sequence[TopicPartition]:
        """Set positions of a Kafka group that has no members; return them, each with its error."""
        await self._kafka.check()
        request = ConsumerGroupTopicPartitions(group, offsets)
        answers: Any = self._admin.alter_consumer_group_offsets([request], request_timeout=LIBRARY_TIMEOUT_S)
        stored: Sequence[TopicPartition] = (await self._answered(answers[group])).topic_partitions
        return stored

    async def delete(self, group: str) -> None:
        """Delete a Kafka group."""
        await self._kafka.check()
        answers: Any = self._admin.delete_consumer_groups([group], request_timeout=LIBRARY_TIMEOUT_S)
        await self._answered(answers[group])

    @property
    def _admin(self) -> AdminClient:
        if self._client is None:
            self._client = self._make()
        return self._client

    def close(self) -> None:
        """Release the client, without its destructor in a command of memq."""
        if self._client is not None:
            keep_to_end(self._client)
        self._client = None

    def _renew(self, used: AdminClient) -> None:
        """Use a new client from now on, unless the last renewal was too recent.

        The old client is kept until the end of the process, because its destructor may wait for ever.
        """
        now_s = asyncio.get_running_loop().time()
        if used is self._client and now_s >= self._renew_at_s:
            self._renew_at_s = now_s + min(RENEW_S * 2 ** min(self._renewals, 6), RENEW_S_MAX)
            self._renewals += 1
            self._client = None
            keep_for_ever(used)

    async def _answered(self, answer: Any) -> Any:
        used = self._admin
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await answered(answer)
        except KafkaException as error:
            if error.args[0].code() == KafkaError._TRANSPORT:
                self._renew(used)
            raise
        except TimeoutError as error:
            self._renew(used)
            late = KafkaError(KafkaError._TIMED_OUT, f"no answer in {self._timeout_s:g} s")
            raise KafkaException(late) from error
        self._renewals = 0
        return found
