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
Asked = dict[Place, tuple["int | str", Answer]]  # with what is asked of each: a time, or one of `_SPECS`


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
        self._waiting: dict[tuple[int | str, Place], Answer] = {}
        self._coming = False  # a request that will take what waits has not been handed over
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
        answer = self._waiting.get((kind, place))
        if answer is None:
            answer = self._waiting[kind, place] = asyncio.get_running_loop().create_future()
            self._request_soon()
        found = await asyncio.shield(answer)
        if isinstance(found, MemqError):
            raise found
        return found

    def _request_soon(self) -> None:
        if not self._coming:
            self._coming = True
            self._tasks.start(self._request(), "kafka offsets")

    async def _request(self) -> None:
        async with self._slots:
            asked = self._next()  # who asks from here on shares the next request
            try:
                unknown = await self._list(asked)
                if unknown:
                    await self._list_again({place: asked[place] for place in unknown})
            finally:
                for _, waiting in asked.values():
                    waiting.cancel()  # nothing, unless this task is being stopped

    def _next(self) -> Asked:
        """Take what waits, of each partition the first; what else is asked of it comes with the next request."""
        asked: Asked = {}
        self._waiting = {
            (kind, place): answer
            for (kind, place), answer in self._waiting.items()
            if asked.setdefault(place, (kind, answer))[1] is not answer
        }
        self._coming = False
        if self._waiting:
            self._request_soon()
        return asked

    async def _list(self, asked: Asked) -> dict[Place, KafkaError]:
        """Answer each as Kafka does; return those whose partition is not known, unanswered, with what was said."""
        unknown: dict[Place, KafkaError] = {}
        partitions = {TopicPartition(*place): _spec(kind) for place, (kind, _) in asked.items()}

        async def take(partition: TopicPartition, answer: Any) -> None:
            place = (partition.topic, partition.partition)
            found = await self._found(answer, place)
            if isinstance(found, KafkaError):
                unknown[place] = found
            else:
                _settle(asked[place][1], found)

        answers = self._admin.list_offsets(partitions, request_timeout=self._timeout_s)
        await asyncio.gather(*(take(partition, answer) for partition, answer in answers.items()))
        return unknown

    async def _found(self, answer: Any, place: Place) -> int | KafkaError | MemqError:
        """Return the offset, an error that says that the partition is not known, or any other error."""
        try:
            offset = (await asyncio.wrap_future(answer)).offset
        except KafkaException as error:
            self._admin.poll(0)  # hands over what the connection complained of
            if error.args[0].code() in _NOT_KNOWN:
                cause: KafkaError = error.args[0]
                return cause
            return self._complaints.failure(error, _doing(place))
        self._complaints.settled()
        return int(offset)

    async def _list_again(self, asked: Asked) -> None:
        """Look which partitions are there: the library may know a topic as it was before it was made or widened."""
        topics = TopicCollection(list(dict.fromkeys(topic for topic, _ in asked)))
        answers: dict[str, Any] = self._admin.describe_topics(topics, request_timeout=self._timeout_s)
        there: Asked = {}
        for place, (kind, waiting) in asked.items():
            try:
                count = len((await asyncio.wrap_future(answers[place[0]])).partitions)
            except KafkaException as error:
                _settle(waiting, self._complaints.failure(error, _doing(place)))
                continue
            if place[1] < count:
                there[place] = kind, waiting
            else:
                _settle(waiting, NotFoundError(f"{_doing(place)}: the topic has {count} partitions"))
        for place, cause in (await self._list(there) if there else {}).items():
            _settle(asked[place][1], self._complaints.failure(cause, _doing(place)))


def _settle(waiting: Answer, found: int | MemqError) -> None:
    if not waiting.done():
        waiting.set_result(found)


def _doing(place: Place) -> str:
    return f"asking for offsets of partition {place[1]} of Kafka topic '{place[0]}'"


def _spec(kind: int | str) -> OffsetSpec:
    spec: Any = OffsetSpec  # untyped in the library
    found: OffsetSpec = spec.for_timestamp(kind) if isinstance(kind, int) else getattr(spec, _SPECS[kind])()
    return found
