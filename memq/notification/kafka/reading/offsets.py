"""Asks Kafka for begin and end offsets and offsets of times; concurrent callers share a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from confluent_kafka import KafkaError

from memq.errors import MemqError, NotFoundError, QueueError
from memq.notification.kafka.admin import Asked, KafkaAdmin, Place, asking_for
from memq.notification.kafka.library import code_of
from memq.notification.kafka.request_coalescer import RequestCoalescer
from memq.notification.kafka.topic_metadata_cache import TopicMetadataCache
from memq.runtime.tasks import TaskOwner

# The library knows the topic as it was before it was widened, or its leader as it was before Kafka was started again.
_NOT_KNOWN = (KafkaError._NOENT, KafkaError._UNKNOWN_PARTITION, KafkaError.FENCED_LEADER_EPOCH)
SAID_S = 30.0
PLACES_MAX = 1_000  # of one request: the library compares each with all others
_CUT = "check Kafka's brokers; if Kafka lost a log, see A lost queue in docs/operations.md, then restart the brokers"
Question = tuple[Asked, Place]


class Offsets:
    """Offsets as Kafka has them now, when it was asked after the question came (`RequestCoalescer`).

    A replica that lags shows an end that lies before entries which were read: that is none, and raises QueueError. An
    end that Kafka has only said, once, and that nobody has read or written up to, may itself have been wrong: lower
    ones raise QueueError for `SAID_S`, and are believed when no other answer came in that time.
    Each leader has requests of its own: the library answers nothing of one before all of its leaders have answered, so
    that one silent leader would delay the partitions of all.
    """

    def __init__(self, admin: KafkaAdmin, looks: TopicMetadataCache, tasks: TaskOwner) -> None:
        self._admin = admin
        self._looks = looks
        self._tasks = tasks
        self._joined: dict[int, RequestCoalescer[Question, int]] = {}  # by leader
        self._lost: dict[Place, None] = {}  # where the leader that is known did not answer
        self._proven: dict[Place, int] = {}  # an end that each partition had; one number per partition in use
        self._said: dict[Place, int] = {}  # the greatest end that Kafka answered
        self._lower_s: dict[Place, float] = {}  # since when it answers lower ones only

    def prove(self, topic: str, number: int, end: int) -> None:
        """Note that all offsets below `end` were given out: an end below it is no end from now on."""
        place = (topic, number)
        if end > self._proven.get(place, 0):
            self._proven[place] = end

    def proven(self, topic: str, number: int) -> int:
        """Return the highest end that was proven, 0 for none."""
        return self._proven.get((topic, number), 0)

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
            raise QueueError(f"{asking_for(*place)}: the end is {end}, after it was {max(proven, said)}", hint=_CUT)
        self._lower_s.pop(place, None)
        self._said[place] = max(end, self._proven.get(place, 0))
        return end

    def _stays_lower(self, place: Place) -> bool:
        now_s = asyncio.get_running_loop().time()
        return now_s >= self._lower_s.setdefault(place, now_s) + SAID_S

    async def at_time(self, topic: str, number: int, time_ms: int) -> int | None:
        """Return the least offset whose time is at least `time_ms`; None when there is none. Raises: as `end`."""
        offset = await self._ask((max(time_ms, 0), (topic, number)))
        return None if offset < 0 else offset

    async def _ask(self, question: Question) -> int:
        """Ask the leader of a partition; look for it once more when it does not know the partition."""
        place = question[1]
        for again in (True, False):
            leader = await self._leader(place)
            try:
                return await self._ask_leader(leader, question)
            except MemqError as error:
                self._lost[place] = None
                missing = isinstance(error, NotFoundError)
                if not again and missing:  # the topic was shown with this partition
                    raise QueueError(str(error)) from error
                if not again or not (missing or code_of(error) in _NOT_KNOWN):
                    raise
        raise AssertionError("the last try raised")

    async def _ask_leader(self, leader: int, question: Question) -> int:
        joined = self._joined.get(leader)
        if joined is None:
            joined = self._joined[leader] = RequestCoalescer(
                self._request, _place_of, PLACES_MAX, self._tasks, "kafka offsets"
            )
        return await joined.ask(question)

    async def _leader(self, place: Place) -> int:
        """Return the node that leads a partition: known to have answered, else looked for.

        Raises: NotFoundError; QueueError when nobody leads it.
        """
        topic, number = place
        shown = self._looks.known(topic)
        leader = shown.leader(number) if shown is not None and place not in self._lost else None
        if leader is not None:
            return leader
        try:
            shown = await self._looks.look(topic)
        except NotFoundError:
            self.forget(topic, number)
            raise
        leader = shown.leader(number)
        if leader is not None:
            self._lost.pop(place, None)
            return leader
        if number < shown.count:
            raise QueueError(f"{asking_for(topic, number)}: it has no leader now")
        raise NotFoundError(f"{asking_for(topic, number)}: the topic has {shown.count} partitions")

    async def _request(self, questions: Sequence[Question]) -> dict[Question, int | MemqError]:
        """Answer questions, each of another partition."""
        found = await self._admin.list_offsets({place: kind for kind, place in questions})
        return {question: found[question[1]] for question in questions}


def _place_of(question: Question) -> Place:
    return question[1]
