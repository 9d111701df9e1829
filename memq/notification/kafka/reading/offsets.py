"""Asks Kafka for begin and end offsets and offsets of times; concurrent callers share a request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from confluent_kafka import KafkaError

from memq.errors import LogCutError, MemqError, NotFoundError, QueueError
from memq.notification.kafka.admin import Asked, KafkaAdmin, KafkaPartition, asking_for
from memq.notification.kafka.librdkafka import code_of
from memq.notification.kafka.request_coalescer import RequestCoalescer
from memq.notification.kafka.topic_metadata_cache import TopicMetadataCache
from memq.runtime.tasks import TaskOwner

# librdkafka's metadata is older than the topic's last widening, or than Kafka's restart.
_NOT_KNOWN = (KafkaError._NOENT, KafkaError._UNKNOWN_PARTITION, KafkaError.FENCED_LEADER_EPOCH)
LOWER_END_S = 30.0  # for so long, ends below the last accepted one are errors
CUT_S = 120.0  # a new leader's end may lag until a silent replica leaves the set in sync: 30 s to 45 s by default
PARTITIONS_MAX = 1_000  # partitions in one request: librdkafka compares each with all others
_CUT = "check Kafka's brokers; if Kafka lost a log, see docs/recovery.md, then restart the brokers"
Question = tuple[Asked, KafkaPartition]


class Offsets:
    """Current offsets from Kafka: each request is sent after its call began (`RequestCoalescer`).

    A replica that lags may answer an end below entries that were already read or written: that raises QueueError, and
    LogCutError after lower answers for `CUT_S`. A higher end that Kafka only answered may itself have been wrong.
    After it, lower ends raise QueueError for `LOWER_END_S`, and are accepted if all answers in that time were lower.
    Each leader has requests of its own. The reason: librdkafka returns the answers of a request only after all leaders
    in it have answered, so one silent leader would delay the others.
    """

    def __init__(self, admin: KafkaAdmin, metadata: TopicMetadataCache, tasks: TaskOwner) -> None:
        self._admin = admin
        self._metadata = metadata
        self._tasks = tasks
        self._requests: dict[int, RequestCoalescer[Question, int]] = {}  # by leader
        self._unanswered: dict[KafkaPartition, None] = {}  # partitions whose known leader did not answer
        self._proven: dict[KafkaPartition, int] = {}  # the highest proven end of each partition in use
        self._accepted: dict[KafkaPartition, int] = {}  # the last accepted end, or the proven one if that is greater
        self._lower_s: dict[KafkaPartition, float] = {}  # since when Kafka answers only lower ends (loop's time in s)
        self._cut_s: dict[KafkaPartition, tuple[float, float]] = {}  # the same below the proven end; last answer

    def prove(self, topic: str, number: int, end: int) -> None:
        """Note that all offsets below `end` are in use: from now on a lower end is an error."""
        partition = (topic, number)
        self._proven[partition] = max(end, self._proven.get(partition, 0))

    def proven(self, topic: str, number: int) -> int:
        """Return the highest end that was proven, 0 for none."""
        return self._proven.get((topic, number), 0)

    def forget(self, topic: str, number: int) -> None:
        """Forget a partition that was deleted."""
        for known in (self._proven, self._accepted, self._lower_s, self._cut_s, self._unanswered):
            known.pop((topic, number), None)

    async def begin(self, topic: str, number: int) -> int:
        """Return the first offset of the log. Raises: NotFoundError, DeniedError, QueueError."""
        return await self._ask(("begin", (topic, number)))

    async def end(self, topic: str, number: int) -> int:
        """Return the next entry's offset. Raises: NotFoundError, DeniedError, QueueError.

        QueueError also for an end below one that was proven before the call; LogCutError if such answers remain.
        """
        partition = (topic, number)
        proven, before = self._proven.get(partition, 0), self._accepted.get(partition, 0)
        end = await self._ask(("end", partition))
        if end < max(proven, before):
            text = f"{asking_for(*partition)}: the end is {end}, after it was {max(proven, before)}"
            if end < proven and self._is_cut(partition):
                raise LogCutError(text)
            if end < proven or not self._stays_lower(partition):
                raise QueueError(text, hint=_CUT)
        self._lower_s.pop(partition, None)
        self._cut_s.pop(partition, None)
        self._accepted[partition] = max(end, self._proven.get(partition, 0))
        return end

    def _stays_lower(self, partition: KafkaPartition) -> bool:
        now_s = asyncio.get_running_loop().time()
        return now_s >= self._lower_s.setdefault(partition, now_s) + LOWER_END_S

    def _is_cut(self, partition: KafkaPartition) -> bool:
        """Whether the answers are below the proven end for long; two that are `CUT_S` apart prove nothing."""
        now_s = asyncio.get_running_loop().time()
        since_s, last_s = self._cut_s.get(partition, (now_s, now_s))
        if now_s > last_s + CUT_S:
            since_s = now_s
        self._cut_s[partition] = (since_s, now_s)
        return now_s >= since_s + CUT_S

    async def at_time(self, topic: str, number: int, time_ms: int) -> int | None:
        """Return the least offset with a time of at least `time_ms`, None without one. Raises: as `end`."""
        offset = await self._ask((max(time_ms, 0), (topic, number)))
        return None if offset < 0 else offset

    async def _ask(self, question: Question) -> int:
        """Ask the leader of a partition; if it does not know the partition, find the leader and retry once."""
        partition = question[1]
        for again in (True, False):
            leader = await self._leader(partition)
            try:
                return await self._ask_leader(leader, question)
            except MemqError as error:
                self._unanswered[partition] = None
                missing = isinstance(error, NotFoundError)
                if not again and missing:  # but Kafka has just listed the topic with this partition
                    raise QueueError(str(error)) from error
                if not again or not (missing or code_of(error) in _NOT_KNOWN):
                    raise
        raise AssertionError("the last try raised")

    async def _ask_leader(self, leader: int, question: Question) -> int:
        requests = self._requests.get(leader)
        if requests is None:
            requests = self._requests[leader] = RequestCoalescer(
                self._request, _partition_of, PARTITIONS_MAX, self._tasks, "kafka offsets"
            )
        return await requests.ask(question)

    async def _leader(self, partition: KafkaPartition) -> int:
        """Return the leader of a partition: the known one, or a new look-up if that one did not answer.

        Raises: NotFoundError; QueueError when the partition has no leader.
        """
        topic, number = partition
        shown = self._metadata.known(topic)
        leader = shown.leader(number) if shown is not None and partition not in self._unanswered else None
        if leader is not None:
            return leader
        try:
            shown = await self._metadata.refresh(topic)
        except NotFoundError:
            self.forget(topic, number)
            raise
        leader = shown.leader(number)
        if leader is not None:
            self._unanswered.pop(partition, None)
            return leader
        if number < shown.count:
            raise QueueError(f"{asking_for(topic, number)}: it has no leader now")
        raise NotFoundError(f"{asking_for(topic, number)}: the topic has {shown.count} partitions")

    async def _request(self, questions: Sequence[Question]) -> dict[Question, int | MemqError]:
        """Answer questions, at most one for each partition."""
        found = await self._admin.list_offsets({partition: kind for kind, partition in questions})
        return {question: found[question[1]] for question in questions}


def _partition_of(question: Question) -> KafkaPartition:
    return question[1]
