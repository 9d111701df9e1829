"""Kafka's metadata of topics: their partitions, and which node leads each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memq.errors import MemqError, NotFoundError, QueueError
from memq.notification.kafka.admin import KafkaAdmin
from memq.notification.kafka.request_coalescer import RequestCoalescer
from memq.runtime.clock import Clock
from memq.runtime.tasks import TaskOwner

ASKED_MAX = 64  # topics of one request: an answer names each of their partitions
GONE_S = 10.0  # for how long Kafka has to say that a topic is not there which it has shown
FRESH_S = 300.0  # the library forgets a topic 900 s after it was shown


@dataclass(frozen=True, slots=True)
class TopicView:
    """A topic as Kafka showed it: the node that leads each partition, None for nobody, and when that was."""

    leaders: tuple[int | None, ...]
    shown_s: float

    @property
    def count(self) -> int:
        """How many partitions it has."""
        return len(self.leaders)

    def leader(self, number: int) -> int | None:
        """Return the node that leads a partition; None when there is no such partition, or nobody leads it."""
        return self.leaders[number] if number < len(self.leaders) else None


class TopicMetadataCache:
    """Reads the metadata of topics; concurrent requests share one read.

    Whoever asks for offsets looks first, for the library has them then. It would look by itself: but while it begins to
    wait for what it does not know, any other answer about topics that comes in ends the process (librdkafka 2.16: its
    main thread continues with the request, and frees it, before the caller has handed it over). A start that asked for
    thousands of topics one after another met that three times in three.

    A broker of Kafka that has just started, or lost its controller, may answer from older metadata. So an absence needs
    two answers, and GONE_S without another one when the topic was seen before; a topic never loses partitions.
    """

    def __init__(self, admin: KafkaAdmin, clock: Clock, tasks: TaskOwner) -> None:
        self._admin = admin
        self._clock = clock
        self._shown: dict[str, TopicView] = {}
        self._seen: dict[str, int] = {}  # the greatest count of partitions that each topic has shown
        self._absent_s: dict[str, float] = {}  # since when a topic that was seen is not there
        self._joined: RequestCoalescer[str, TopicView] = RequestCoalescer(
            self._describe, str, ASKED_MAX, tasks, "kafka topics"
        )

    async def look(self, topic: str) -> TopicView:
        """Return what Kafka shows now. Raises: NotFoundError, DeniedError, QueueError.

        While Kafka is asked, and when it does not answer, `known` is what it showed before.
        """
        try:
            found = await self._joined.ask(topic)
        except NotFoundError as error:
            self.forget(topic)
            if self._is_gone(topic):
                raise
            raise QueueError(f"{error}, which it has shown before", hint=error.hint) from error
        seen = self._seen.get(topic, 0)
        if found.count < seen:
            raise QueueError(f"Kafka shows {found.count} partitions of topic '{topic}', and showed {seen} before")
        self._absent_s.pop(topic, None)
        self._seen[topic] = found.count
        self._shown[topic] = found
        return found

    async def count(self, topic: str) -> int:
        """Return how many partitions a Kafka topic has now, 0 when it is not there."""
        try:
            return (await self.look(topic)).count
        except NotFoundError:
            return 0

    async def need(self, topic: str, number: int) -> None:
        """Prove that a partition is there, or was a while ago.

        A producer would make Kafka make it, or wait for it.
        """
        shown = self._shown.get(topic)
        if (shown is None or number >= shown.count) and number >= await self.count(topic):
            raise NotFoundError(f"partition {number} of Kafka topic '{topic}' does not exist")

    def _is_gone(self, topic: str) -> bool:
        now_s = self._clock.monotonic()
        if topic in self._seen and now_s < self._absent_s.setdefault(topic, now_s) + GONE_S:
            return False
        self.drop(topic)
        return True

    def drop(self, topic: str) -> None:
        """Forget a topic that was deleted."""
        for known in (self._shown, self._seen, self._absent_s):
            known.pop(topic, None)

    def forget(self, topic: str) -> None:
        """Look again before the next use."""
        self._shown.pop(topic, None)

    def known(self, topic: str) -> TopicView | None:
        """Return what Kafka showed not long ago, None when one has to look."""
        found = self._shown.get(topic)
        return found if found is not None and self._clock.monotonic() - found.shown_s <= FRESH_S else None

    async def _describe(self, topics: Sequence[str]) -> dict[str, TopicView | MemqError]:
        answers = await self._answers(topics)
        absent = [topic for topic, found in answers.items() if isinstance(found, NotFoundError)]
        return answers | await self._answers(absent) if absent else answers

    async def _answers(self, topics: Sequence[str]) -> dict[str, TopicView | MemqError]:
        shown_s = self._clock.monotonic()
        answers = self._admin.describe_topics(topics)
        works = (self._answer(topic, answers[topic], shown_s) for topic in topics)
        return dict(zip(topics, await asyncio.gather(*works), strict=True))

    async def _answer(self, topic: str, answer: Any, shown_s: float) -> TopicView | MemqError:
        try:
            partitions = (await self._admin.ask(answer, f"looking at Kafka topic '{topic}'")).partitions
        except MemqError as error:
            return error
        leaders = {each.id: None if each.leader is None else each.leader.id for each in partitions}
        return TopicView(tuple(leaders.get(number) for number in range(len(partitions))), shown_s)
