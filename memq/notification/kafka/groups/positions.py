"""Reads the committed positions of any group: a few consumers that never join, each of one group.

librdkafka has an admin request for that, too. It ends the whole process when the answer names a coordinator's error (an
OffsetFetch of 2.12 passes it on to the member of a group, which an admin client has not): whenever a coordinator
moves, or a Kafka has just been started. A consumer looks for the coordinator again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from memq.notification.kafka.failures import LastErrors
from memq.notification.kafka.library import consumer_of, end_threads
from memq.notification.kafka.settings import KafkaSettings
from memq.runtime.threads import ThreadPool

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
