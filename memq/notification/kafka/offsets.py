"""Asks Kafka where partitions begin and end, and where a time lies: all who ask at once share a request."""

from __future__ import annotations

import asyncio
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from memq.errors import MemqError, NotFoundError
from memq.notification.kafka.complaints import Complaints
from memq.tasks import TaskOwner

# The library knows the topic as it was before it was widened, or its leader as it was before Kafka was started again.
_NOT_KNOWN = (KafkaError._NOENT, KafkaError._UNKNOWN_PARTITION, KafkaError.FENCED_LEADER_EPOCH)
REQUESTS_MAX = 4  # at once; who comes later shares the next one
_SPECS = {"begin": "earliest", "end": "latest"}
Place = tuple[str, int]  # a Kafka topic and the number of a partition
Answer = asyncio.Future[int | MemqError]


class Offsets:
    """Offsets as Kafka has them now.

    An answer is of a request that was handed over after the question was asked, never of an earlier one: an owner's
    proof that it has read to the end rests on that.
    """

    def __init__(self, admin: AdminClient, timeout_s: float, complaints: Complaints, tasks: TaskOwner) -> None:
        self._admin = admin
        self._timeout_s = timeout_s
        self._complaints = complaints
        self._tasks = tasks
        self._waiting: dict[int | str, dict[Place, Answer]] = {}
        self._slots = asyncio.Semaphore(REQUESTS_MAX)

    async def begin(self, topic: str, number: int) -> int:
        """Return the first offset that is there. Raises: NotFoundError, DeniedError, QueueError."""
        return await self._ask("begin", (topic, number))

    async def end(self, topic: str, number: int) -> int:
        """Return the next entry's offset. Raises: NotFoundError, DeniedError, QueueError."""
        return await self._ask("end", (topic, number))

    async def at_time(self, topic: str, number: int, time_ms: int) -> int | None:
        """Return the least offset whose time is at least `time_ms`; None when there is none."""
        offset = await self._ask(max(time_ms, 0), (topic, number))
        return None if offset < 0 else offset

    async def _ask(self, kind: int | str, place: Place) -> int:
        asked = self._waiting.get(kind)
        if asked is None:
            asked = self._waiting[kind] = {}
            self._tasks.start(self._request(kind), f"kafka offsets {kind}")
        answer = asked.get(place)
        if answer is None:
            answer = asked[place] = asyncio.get_running_loop().create_future()
        found = await asyncio.shield(answer)
        if isinstance(found, MemqError):
            raise found
        return found

    async def _request(self, kind: int | str) -> None:
        async with self._slots:
            asked = self._waiting.pop(kind)  # who asks from here on shares the next request
            spec = _spec(kind)
            partitions = {TopicPartition(topic, number): spec for topic, number in asked}
            try:
                answers = self._admin.list_offsets(partitions, request_timeout=self._timeout_s)
                for partition, answer in answers.items():
                    await self._take(kind, answer, asked[partition.topic, partition.partition], partition)
            finally:
                for waiting in asked.values():
                    waiting.cancel()  # nothing, unless this task is being stopped

    async def _take(self, kind: int | str, answer: Any, waiting: Answer, partition: TopicPartition) -> None:
        found = await self._found(answer, partition)
        if isinstance(found, KafkaError):
            found = await self._ask_again(kind, found, partition)
        if not waiting.done():
            waiting.set_result(found)

    async def _found(self, answer: Any, partition: TopicPartition) -> int | KafkaError | MemqError:
        """Return the offset, an error that says that the partition is not known, or any other error."""
        try:
            offset = (await asyncio.wrap_future(answer)).offset
        except KafkaException as error:
            self._admin.poll(0)  # hands over what the connection complained of
            if error.args[0].code() in _NOT_KNOWN:
                cause: KafkaError = error.args[0]
                return cause
            return self._complaints.failure(error, _doing(partition))
        self._complaints.settled()
        return int(offset)

    async def _ask_again(self, kind: int | str, cause: KafkaError, partition: TopicPartition) -> int | MemqError:
        """Look whether the partition is there: the library may know the topic as it was before it was widened."""
        topics = TopicCollection([partition.topic])
        answer: Any = self._admin.describe_topics(topics, request_timeout=self._timeout_s)[partition.topic]
        try:
            described = await asyncio.wrap_future(answer)
        except KafkaException as error:
            return self._complaints.failure(error, _doing(partition))
        if partition.partition >= len(described.partitions):
            return NotFoundError(f"{_doing(partition)}: the topic has {len(described.partitions)} partitions")
        answers = self._admin.list_offsets({partition: _spec(kind)}, request_timeout=self._timeout_s)
        found = await self._found(answers[partition], partition)
        return self._complaints.failure(found, _doing(partition)) if isinstance(found, KafkaError) else found


def _doing(partition: TopicPartition) -> str:
    return f"asking for offsets of partition {partition.partition} of Kafka topic '{partition.topic}'"


def _spec(kind: int | str) -> OffsetSpec:
    spec: Any = OffsetSpec  # untyped in the library
    found: OffsetSpec = spec.for_timestamp(kind) if isinstance(kind, int) else getattr(spec, _SPECS[kind])()
    return found
