"""Kafka's metadata of topics: their partitions, and which node leads each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from memq.errors import MemqError, NotFoundError, QueueError
from memq.notification.kafka.last_errors import LastErrors
from memq.notification.kafka.library import answered
from memq.notification.kafka.request_coalescer import RequestCoalescer, settle
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
    main thread goes on with the request, and frees it, before the caller has handed it over). A start that asked for
    thousands of topics one after another met that three times in three.

    A broker of Kafka that has just started, or lost its controller, may answer from older metadata. So an absence needs
    two answers, and GONE_S without another one when the topic was seen before; a topic never loses partitions.
    """

    def __init__(
        self, admin: AdminClient, timeout_s: float, complaints: LastErrors, clock: Clock, tasks: TaskOwner
    ) -> None:
        self._admin = admin
        self._timeout_s = timeout_s
        self._complaints = complaints
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

    async def _describe(self, asked: Mapping[str, asyncio.Future[TopicView | MemqError]]) -> None:
        answers = await self._answers(list(asked))
        absent = [topic for topic, found in answers.items() if isinstance(found, NotFoundError)]
        if absent:
            answers |= await self._answers(absent)
        for topic, found in answers.items():
            settle(asked[topic], found)

    async def _answers(self, topics: list[str]) -> dict[str, TopicView | MemqError]:
        shown_s = self._clock.monotonic()
        answers = self._admin.describe_topics(TopicCollection(topics), request_timeout=self._timeout_s)
        works = (self._answer(topic, answers[topic], shown_s) for topic in topics)
        return dict(zip(topics, await asyncio.gather(*works), strict=True))

    async def _answer(self, topic: str, answer: Any, shown_s: float) -> TopicView | MemqError:
        try:
            partitions = (await answered(answer)).partitions
        except KafkaException as error:
            self._admin.poll(0)  # hands over what the connection complained of
            return self._complaints.failure(error, f"looking at Kafka topic '{topic}'")
        self._complaints.settled()
        leaders = {each.id: None if each.leader is None else each.leader.id for each in partitions}
        return TopicView(tuple(leaders.get(number) for number in range(len(partitions))), shown_s)
