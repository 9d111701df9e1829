"""Kafka's metadata of topics: their partitions, and which of them have no leader."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from memq.clock import Clock
from memq.errors import MemqError
from memq.notification.kafka.complaints import Complaints
from memq.notification.kafka.joined import Joined, settle
from memq.tasks import TaskOwner

ASKED_MAX = 64  # topics of one request: an answer names each of their partitions
FRESH_S = 300.0  # the library forgets a topic 900 s after it was shown


@dataclass(frozen=True, slots=True)
class Shown:
    """A topic as Kafka showed it: its partitions, those without a leader, and when that was."""

    count: int
    leaderless: frozenset[int]
    shown_s: float

    def has(self, number: int) -> bool:
        """Whether a partition exists and has a leader."""
        return number < self.count and number not in self.leaderless


class Looks:
    """Looks at topics, all of them that are asked for at once together.

    Whoever asks for offsets looks first, for the library has them then. It would look by itself: but while it begins to
    wait for what it does not know, any other answer about topics that comes in ends the process (librdkafka 2.16: its
    main thread goes on with the request, and frees it, before the caller has handed it over). A start that asked for
    thousands of topics one after another met that three times in three.
    """

    def __init__(
        self, admin: AdminClient, timeout_s: float, complaints: Complaints, clock: Clock, tasks: TaskOwner
    ) -> None:
        self._admin = admin
        self._timeout_s = timeout_s
        self._complaints = complaints
        self._clock = clock
        self._shown: dict[str, Shown] = {}
        self._joined: Joined[str, Shown] = Joined(self._describe, str, ASKED_MAX, tasks, "kafka topics")

    async def look(self, topic: str) -> Shown:
        """Return what Kafka shows now. Raises: NotFoundError, DeniedError, QueueError."""
        self._shown.pop(topic, None)
        found = await self._joined.ask(topic)
        self._shown[topic] = found
        return found

    def forget(self, topic: str) -> None:
        """Look again before the next use."""
        self._shown.pop(topic, None)

    def known(self, topic: str) -> Shown | None:
        """Return what Kafka showed not long ago, None when one has to look."""
        found = self._shown.get(topic)
        return found if found is not None and self._clock.monotonic() - found.shown_s <= FRESH_S else None

    async def _describe(self, asked: Mapping[str, asyncio.Future[Shown | MemqError]]) -> None:
        shown_s = self._clock.monotonic()
        answers = self._admin.describe_topics(TopicCollection(list(asked)), request_timeout=self._timeout_s)
        works = (self._answer(topic, answers[topic], shown_s) for topic in asked)
        for waiting, found in zip(asked.values(), await asyncio.gather(*works), strict=True):
            settle(waiting, found)

    async def _answer(self, topic: str, answer: Any, shown_s: float) -> Shown | MemqError:
        try:
            partitions = (await asyncio.wrap_future(answer)).partitions
        except KafkaException as error:
            self._admin.poll(0)  # hands over what the connection complained of
            return self._complaints.failure(error, f"looking at Kafka topic '{topic}'")
        self._complaints.settled()
        return Shown(len(partitions), frozenset(each.id for each in partitions if each.leader is None), shown_s)
