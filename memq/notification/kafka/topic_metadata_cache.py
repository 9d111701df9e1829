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

ASKED_MAX = 64  # topics in one request: the answer has all of their partitions
GONE_S = 10.0  # a topic that was listed before is gone only after answers without it for so long
FRESH_S = 300.0  # librdkafka forgets a topic 900 s after it was listed


@dataclass(frozen=True, slots=True)
class TopicView:
    """A topic as Kafka listed it at `shown_s` (monotonic s): each partition's leader, None without one."""

    leaders: tuple[int | None, ...]
    shown_s: float

    @property
    def count(self) -> int:
        """Number of partitions."""
        return len(self.leaders)

    def leader(self, number: int) -> int | None:
        """Return the leader of a partition; None for a missing partition, or one without a leader."""
        return self.leaders[number] if number < len(self.leaders) else None


class TopicMetadataCache:
    """Reads the metadata of topics; concurrent requests share one read.

    Callers that request offsets must call `look` first, so that librdkafka knows the topic's leaders. Otherwise
    librdkafka 2.16 would request them itself, with a fault. If an answer about topics arrives at that moment, its main
    thread continues with the request and frees it. The caller has not passed on the request yet, and the process
    aborts. A start with thousands of topics had this fault in three of three runs.

    A broker of Kafka that has just started, or lost its controller, may answer from older metadata. So a topic is
    missing only after two answers. If the topic was seen before, it must be missing in all answers for GONE_S. A count
    of partitions that shrinks is an error.
    """

    def __init__(self, admin: KafkaAdmin, clock: Clock, tasks: TaskOwner) -> None:
        self._admin = admin
        self._clock = clock
        self._shown: dict[str, TopicView] = {}
        self._seen: dict[str, int] = {}  # the greatest count of partitions that each topic has shown
        self._absent_s: dict[str, float] = {}  # since when (monotonic s) a topic that was seen is missing
        self._requests: RequestCoalescer[str, TopicView] = RequestCoalescer(
            self._describe, str, ASKED_MAX, tasks, "kafka topics"
        )

    async def refresh(self, topic: str) -> TopicView:
        """Return Kafka's current view of a topic. Raises: NotFoundError, DeniedError, QueueError.

        During the request, and after a failure other than NotFoundError, `known` returns the previous view.
        """
        try:
            found = await self._requests.ask(topic)
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
        """Return the current number of partitions of a Kafka topic, 0 if it does not exist."""
        try:
            return (await self.refresh(topic)).count
        except NotFoundError:
            return 0

    async def need(self, topic: str, number: int) -> None:
        """Raise NotFoundError unless a partition exists, or did at the last refresh.

        Without this check, a producer would let Kafka create the topic, or wait for the partition.
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
        """Forget the view of a topic, so that the next use refreshes it."""
        self._shown.pop(topic, None)

    def known(self, topic: str) -> TopicView | None:
        """Return the view of a topic if it is at most FRESH_S old, else None: the caller must `refresh`."""
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
            partitions = (await self._admin.ask(answer, f"reading the metadata of Kafka topic '{topic}'")).partitions
        except MemqError as error:
            return error
        leaders = {each.id: None if each.leader is None else each.leader.id for each in partitions}
        return TopicView(tuple(leaders.get(number) for number in range(len(partitions))), shown_s)
