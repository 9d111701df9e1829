"""Requests to group coordinators, and reads of committed positions: none aborts the process.

librdkafka aborts the process if a request to a coordinator times out at a bad moment.

Positions are read by a few consumers that never join, each of one group. librdkafka has an admin request for that, too.
It ends the whole process when the answer names a coordinator's error (an OffsetFetch of 2.12 passes it on to the member
of a group, which an admin client has not): whenever a coordinator moves, or a Kafka has just been started. A consumer
looks for the coordinator again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from memq.notification.kafka.admin import KafkaAdmin
from memq.notification.kafka.library import LastErrors, answered, consumer_of, end_threads
from memq.notification.kafka.settings import KafkaSettings
from memq.runtime.process import keep_for_ever, keep_to_end
from memq.runtime.threads import ThreadPool

LIBRARY_TIMEOUT_S = 3_600.0  # the longest that librdkafka takes
RENEW_S = 1.0  # between two new clients, twice as long after each one until a request is answered
RENEW_S_MAX = 60.0
CONSUMERS_MAX = 4  # a new one takes its time to connect; a group that is asked for once is often asked for again
SESSION_TIMEOUT_MS = 45_000  # of nothing: they join no group
PARTITIONS_MAX = 1_000  # of one request
COORDINATOR_TRIES = 200
COORDINATOR_PAUSE_S = 0.05
_MOVES = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)


class Positions:
    """Reads committed positions of groups from Kafka."""

    def __init__(self, settings: KafkaSettings, complaints: LastErrors) -> None:
        self._settings = settings
        self._timeout_s = settings.request_timeout_ms / 1000
        self._complaints = complaints
        self._pool = ThreadPool("kafka-positions", 1)
        self._consumers: OrderedDict[str, Consumer] = OrderedDict()

    async def of(self, group: str, places: Sequence[tuple[str, int]]) -> list[TopicPartition]:
        """Return what a Kafka group has stored for those of the places that have something.

        Raises: QueueError, DeniedError.
        """
        found: list[TopicPartition] = []
        for start in range(0, len(places), PARTITIONS_MAX):
            found += await self._pool.run(self._ask_twice, group, places[start : start + PARTITIONS_MAX])
        return found

    async def close(self) -> None:
        """End the consumers and the thread; closing twice is fine."""
        await end_threads(self._pool, self._close)

    # ---- in the thread -------------------------------------------------------------------------

    def _ask_twice(self, group: str, places: Sequence[tuple[str, int]]) -> list[TopicPartition]:
        """Return the positions; that there is none counts only when two answers say so.

        librdkafka has one value for "no position" and for a partition that an answer lacks. A consumer that took that
        for a new group would begin at the end, and pass over records.
        """
        found = self._ask(group, places)
        known = {(part.topic, part.partition) for part in found}
        missing = [place for place in places if place not in known]
        return found + self._ask(group, missing) if missing else found

    def _ask(self, group: str, places: Sequence[tuple[str, int]]) -> list[TopicPartition]:
        doing = f"reading the positions of group '{group}'"
        consumer = self._consumers.pop(group, None) or self._make(group)
        self._consumers[group] = consumer
        for last in range(COORDINATOR_TRIES, 0, -1):
            try:
                found = consumer.committed([TopicPartition(*place) for place in places], timeout=self._timeout_s)
            except KafkaException as error:
                if last == 1 or error.args[0].code() not in _MOVES:
                    raise self._complaints.group_failure(error, doing) from error
                consumer.poll(COORDINATOR_PAUSE_S)  # nothing comes: it looks for the coordinator meanwhile
            else:
                self._complaints.settled()
                return [part for part in found if self._is_stored(part, doing)]
        raise AssertionError("the last try raised")

    def _is_stored(self, part: TopicPartition, doing: str) -> bool:
        """Whether the group has a position there.

        Raises: what Kafka says, which else would pass for no position.
        """
        error: Any = part.error
        if error is not None:
            doing = f"{doing}: partition {part.partition} of '{part.topic}'"
            raise self._complaints.group_failure(error, doing)
        return part.offset >= 0

    def _make(self, group: str) -> Consumer:
        while len(self._consumers) >= CONSUMERS_MAX:
            self._consumers.popitem(last=False)[1].close()
        settings = self._settings.member(group, "memq-positions", SESSION_TIMEOUT_MS)
        settings.pop("group.instance.id", None)
        return consumer_of(settings, self._complaints.note)

    def _close(self) -> None:
        while self._consumers:
            self._consumers.popitem()[1].close()


class KafkaGroupRequests:
    """Asks about a group, sets its positions, deletes it.

    librdkafka first asks who coordinates the group. When the request times out before that is answered, the answer
    that comes then ends the process (2.16: its assertion `eonce->refcnt > 0`): a Kafka that hung for a moment,
    or was started again, would take all brokers with it. So the library is given an hour, and who asks waits for as
    long as a request may take; what was sent fails in the library by `socket.timeout.ms`, which is harmless. What
    still looks for a coordinator then may come to pass later. So that hardly anything does, a topic is asked for
    first: a Kafka that is away is found by that.
    A client whose connection breaks under such a request never asks that coordinator again (2.16: it stays in its
    state TRY_CONNECT). It can't be destroyed, either, and keeps a few threads. A new one takes its place, after pauses
    that grow until a request is answered: with a bound on their number requests failed until the broker was restarted.
    All raise KafkaException, and what `KafkaAdmin.check` raises.
    """

    def __init__(self, make: Callable[[], AdminClient], kafka: KafkaAdmin) -> None:
        self._make = make
        self._client: AdminClient | None = None
        self._renewals = 0  # since a request was answered
        self._renew_at_s = 0.0  # on the loop's clock
        self._kafka = kafka
        self._timeout_s = kafka.timeout_s

    async def describe(self, group: str, *, rights: bool = False) -> Any:
        """Return the library's description of a Kafka group; with `rights`, what may be done with it, too."""
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
        """Let go of the client."""
        if self._client is not None:
            keep_to_end(self._client)
        self._client = None

    def _renew(self, used: AdminClient) -> None:
        """Use a new client from now on.

        The one that was used is kept to the end of the process, for its destructor would wait.
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
