"""Asks Kafka for begin and end offsets and offsets of times; concurrent callers share a request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from memq.errors import MemqError, NotFoundError, QueueError
from memq.notification.kafka.failures import is_not_there
from memq.notification.kafka.last_errors import LastErrors
from memq.notification.kafka.library import answered
from memq.notification.kafka.request_coalescer import RequestCoalescer, settle
from memq.notification.kafka.topic_metadata_cache import TopicMetadataCache
from memq.runtime.tasks import TaskOwner

# The library knows the topic as it was before it was widened, or its leader as it was before Kafka was started again.
_NOT_KNOWN = (KafkaError._NOENT, KafkaError._UNKNOWN_PARTITION, KafkaError.FENCED_LEADER_EPOCH)
SAID_S = 30.0
PLACES_MAX = 1_000  # of one request: the library compares each with all others
_NOTHING_AT_TIME = -1  # Kafka's own answer; any other negative offset is the library's, of a request that failed
_CUT = "check Kafka's brokers; if Kafka lost a log, see A lost queue in docs/operations.md, then restart the brokers"
_SPECS = {"begin": "earliest", "end": "latest"}
Place = tuple[str, int]  # a Kafka topic and the number of a partition
Question = tuple["int | str", Place]  # what is asked of it: a time, or one of `_SPECS`
Answer = asyncio.Future[int | MemqError]
Asked = dict[Place, tuple["int | str", Answer]]


class Offsets:
    """Offsets as Kafka has them now, when it was asked after the question came (`RequestCoalescer`).

    librdkafka answers offset -1001 without an error when the connection breaks under a request, and a replica that
    lags shows an end that lies before entries which were read. Neither is an offset: both raise QueueError. An end that
    Kafka has only said, once, and that nobody has read or written up to, may itself have been wrong: lower ones raise
    QueueError for `SAID_S`, and are believed when no other answer came in that time.
    """

    def __init__(
        self, admin: AdminClient, timeout_s: float, complaints: LastErrors, looks: TopicMetadataCache, tasks: TaskOwner
    ) -> None:
        self._admin = admin
        self._timeout_s = timeout_s
        self._complaints = complaints
        self._looks = looks
        self._tasks = tasks
        self._joined: dict[
            int | None, RequestCoalescer[Question, int]
        ] = {}  # by leader, None while that is to be looked for
        self._lost: dict[Place, None] = {}  # where the leader that is known did not answer
        self._proven: dict[Place, int] = {}  # an end that each partition had; one number per partition in use
        self._said: dict[Place, int] = {}  # the greatest end that Kafka answered
        self._lower_s: dict[Place, float] = {}  # since when it answers lower ones only

    def prove(self, topic: str, number: int, end: int) -> None:
        """Note that all offsets below `end` were given out: an end below it is no end from now on."""
        place = (topic, number)
        if end > self._proven.get(place, 0):
            self._proven[place] = end

    def forget(self, topic: str, number: int) -> None:
        """Forget a partition that was deleted."""
        for known in (self._proven, self._said, self._lower_s, self._lost):
            known.pop((topic, number), None)

    async def begin(self, topic: str, number: int) -> int:
        """Return the first offset that is there. Raises: NotFoundError, DeniedError, QueueError."""
        return await self._ask(("begin", (topic, number)))

    async def end(self, topic: str, number: int) -> int:
        """Return the next entry's offset. Raises: NotFoundError, DeniedError, QueueError.

        QueueError also for an end below one that was proven before the question.
        """
        place = (topic, number)
        proven, said = self._proven.get(place, 0), self._said.get(place, 0)
        end = await self._ask(("end", place))
        if end < proven or (end < said and not self._stays_lower(place)):
            raise QueueError(f"{_doing(place)}: the end is {end}, after it was {max(proven, said)}", hint=_CUT)
        self._lower_s.pop(place, None)
        self._said[place] = max(end, self._proven.get(place, 0))
        return end

    def _stays_lower(self, place: Place) -> bool:
        now_s = asyncio.get_running_loop().time()
        return now_s >= self._lower_s.setdefault(place, now_s) + SAID_S

    async def at_time(self, topic: str, number: int, time_ms: int) -> int | None:
        """Return the least offset whose time is at least `time_ms`; None when there is none. Raises: as `end`."""
        offset = await self._ask((max(time_ms, 0), (topic, number)))
        return None if offset == _NOTHING_AT_TIME else offset

    async def _ask(self, question: Question) -> int:
        """Share a request with others to the same leader; a silent leader delays only its own partitions."""
        leader = self._leader(question[1])
        joined = self._joined.get(leader)
        if joined is None:
            joined = self._joined[leader] = RequestCoalescer(
                self._request, _place_of, PLACES_MAX, self._tasks, "kafka offsets"
            )
        return await joined.ask(question)

    def _leader(self, place: Place) -> int | None:
        """Return the node that is known to lead a place and has answered; None: it is to be looked for."""
        shown = self._looks.known(place[0])
        return None if shown is None or place in self._lost else shown.leader(place[1])

    async def _request(self, questions: Mapping[Question, Answer]) -> None:
        """Answer questions, each of another place."""
        asked = {place: (kind, waiting) for (kind, place), waiting in questions.items()}
        known = {place: each for place, each in asked.items() if self._leader(place) is not None}
        new = {place: each for place, each in asked.items() if place not in known}
        unknown = await self._list(known | await self._there(new))
        if unknown:
            for place, cause in (
                await self._list(await self._there({place: asked[place] for place in unknown}))
            ).items():  # not NotFoundError: the topic was shown with this partition
                settle(asked[place][1], QueueError(f"{_doing(place)}: {cause.str().lower()}"))

    async def _there(self, asked: Asked) -> Asked:
        """Look, and return what Kafka can be asked for.

        The rest is answered: it is not there, or nobody leads it.
        """
        topics = dict.fromkeys(topic for topic, _ in asked)
        looks = await asyncio.gather(*map(self._looks.look, topics), return_exceptions=True)
        shown = dict(zip(topics, looks, strict=True))
        there: Asked = {}
        for place, (kind, waiting) in asked.items():
            found = shown[place[0]]
            if isinstance(found, MemqError):
                if isinstance(found, NotFoundError):
                    self.forget(*place)
                settle(waiting, found)
            elif isinstance(found, BaseException):
                raise found
            elif found.leader(place[1]) is not None:
                self._lost.pop(place, None)
                there[place] = kind, waiting
            elif place[1] < found.count:
                settle(waiting, QueueError(f"{_doing(place)}: it has no leader now"))
            else:
                settle(waiting, NotFoundError(f"{_doing(place)}: the topic has {found.count} partitions"))
        return there

    async def _list(self, asked: Asked) -> dict[Place, KafkaError]:
        """Answer each as Kafka does, by a request for each leader.

        The library answers nothing of a request before all leaders have answered theirs. Return those whose partition
        is not known, unanswered, with what was said.
        """
        led: dict[int | None, Asked] = {}
        for place, each in asked.items():
            led.setdefault(self._leader(place), {})[place] = each
        unknown: dict[Place, KafkaError] = {}
        for found in await asyncio.gather(*map(self._list_of_one, led.values())):
            unknown |= found
        return unknown

    async def _list_of_one(self, asked: Asked) -> dict[Place, KafkaError]:
        unknown: dict[Place, KafkaError] = {}
        partitions = {TopicPartition(*place): _spec(kind) for place, (kind, _) in asked.items()}

        async def take(partition: TopicPartition, answer: Any) -> None:
            place = (partition.topic, partition.partition)
            found = await self._found(answer, asked[place][0], place)
            if isinstance(found, KafkaError):
                unknown[place] = found
            else:
                settle(asked[place][1], found)

        answers = self._admin.list_offsets(partitions, request_timeout=self._timeout_s)
        await asyncio.gather(*(take(partition, answer) for partition, answer in answers.items()))
        return unknown

    async def _found(self, answer: Any, kind: int | str, place: Place) -> int | KafkaError | MemqError:
        """Return the offset, an error that says that the partition is not known, or any other error."""
        try:
            offset = int((await answered(answer)).offset)
        except KafkaException as error:
            self._admin.poll(0)  # hands over what the connection complained of
            if error.args[0].code() in _NOT_KNOWN or is_not_there(error.args[0]):
                cause: KafkaError = error.args[0]
                return cause
            self._lost[place] = None
            return self._complaints.failure(error, _doing(place))
        if offset < 0 and not (offset == _NOTHING_AT_TIME and isinstance(kind, int)):
            self._lost[place] = None
            return QueueError(f"{_doing(place)}: librdkafka answered {offset}, which is no offset")
        self._complaints.settled()
        return offset


def _place_of(question: Question) -> Place:
    return question[1]


def _doing(place: Place) -> str:
    return f"asking for offsets of partition {place[1]} of Kafka topic '{place[0]}'"


def _spec(kind: int | str) -> OffsetSpec:
    spec: Any = OffsetSpec  # untyped in the library
    found: OffsetSpec = spec.for_timestamp(kind) if isinstance(kind, int) else getattr(spec, _SPECS[kind])()
    return found
