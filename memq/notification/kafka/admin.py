"""All admin requests to Kafka: a wrong or missing answer raises an error of memq."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import OffsetSpec

from memq.errors import ClosedError, MemqError, QueueError
from memq.notification.kafka.librdkafka import LastErrors, admin_of, answered, code_of, end_threads
from memq.notification.kafka.settings import KafkaSettings
from memq.runtime.process import keep_to_end
from memq.runtime.threads import ThreadPool

NOBODY = "nobody"  # after the prefix: name of a topic that `check` requests, whether it exists or not
_ABOUT_TOPIC = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED)
POLL_S = 0.2  # interval at which `check` polls for connection errors
_NOTHING_AT_TIME = -1  # Kafka's own answer; librdkafka returns other negative offsets for requests that failed
_NO_CONTROLLER = "waiting for controller"  # part of librdkafka's text; the code is that of any time-out
_SPECS = {"begin": "earliest", "end": "latest"}
KafkaPartition = tuple[str, int]  # a Kafka topic and the number of a partition
Asked = int | str  # requested offset of a partition: of a time in Unix ms, or one of `_SPECS`
P = ParamSpec("P")
T = TypeVar("T")


class KafkaAdmin:
    """An admin client, its connection errors, and a thread for calls of the library that block.

    `client` must be kept: an unreferenced client is destroyed before its requests are answered.
    """

    def __init__(self, settings: KafkaSettings, errors: LastErrors) -> None:
        """Send no request. Raises: InvalidSettingError."""
        self.errors = errors
        self.servers = settings.servers
        self.timeout_s = settings.request_timeout_ms / 1000
        self.client = admin_of(settings.client(), errors.note)
        self._prefix = settings.prefix
        self._pool = ThreadPool("kafka-lists", 1)
        self._learning = asyncio.Lock()

    async def check(self) -> None:
        """Prove that Kafka answers, by a request for a topic that need not exist.

        Raises: QueueError, DeniedError.
        """
        doing = f"asking Kafka at {self.servers}"
        waiting = asyncio.create_task(self._await_answer(f"{self._prefix}{NOBODY}", doing), name="kafka check")
        try:
            while not waiting.done():
                await asyncio.wait((waiting,), timeout=POLL_S)
                self.client.poll(0)
                denial = self.errors.denial(doing)
                if denial is not None and not waiting.done():
                    raise denial  # librdkafka would retry the login until the request times out
            waiting.result()
        finally:
            waiting.cancel()

    async def _await_answer(self, topic: str, doing: str) -> None:
        """Wait for an answer about a topic; an error about the topic is an answer, too."""
        try:
            await self.ask(self.describe_topics([topic])[topic], doing)
        except MemqError as error:
            if code_of(error) not in _ABOUT_TOPIC:
                raise
            self.errors.clear()

    async def ask(self, answer: Any, doing: str) -> Any:
        """Return Kafka's answer to a request of the client. Raises: memq's error for Kafka's (`code_of`)."""
        try:
            found = await answered(answer)
        except KafkaException as error:
            failure = self.failure(error, doing)
            if _NO_CONTROLLER in error.args[0].str():
                await self._learn_brokers()
            raise failure from error
        self.errors.clear()
        return found

    async def _learn_brokers(self) -> None:
        """Request the list of brokers from any broker, unless such a request is running.

        A Kafka that was paused may name no brokers for a moment. Then librdkafka knows no controller until its next
        refresh, 30 s at most, and each request waits for one.
        """
        if not self._learning.locked():
            async with self._learning:
                with suppress(KafkaException, ClosedError):
                    await self._pool.run(self.client.list_topics, timeout=self.timeout_s)

    async def run(self, function: Callable[P, T], doing: str, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call of the library in the thread; return its result. Raises: as `ask`."""
        try:
            return await self._pool.run(function, *args, **kwargs)
        except KafkaException as error:
            raise self.failure(error, doing) from error

    def failure(self, error: KafkaError | KafkaException, doing: str) -> MemqError:
        """Return memq's error for one of Kafka's, with the last connection error."""
        self.client.poll(0)  # calls `errors.note` for waiting connection errors
        return self.errors.failure(error, doing)

    def describe_topics(self, topics: Sequence[str], *, rights: bool = False) -> dict[str, Any]:
        """Return the answers about topics, for `ask`; with `rights`, also the allowed operations."""
        asked: dict[str, Any] = {"include_authorized_operations": True} if rights else {}
        found: dict[str, Any] = self.client.describe_topics(
            TopicCollection(list(topics)), request_timeout=self.timeout_s, **asked
        )
        return found

    async def list_topics(self) -> Any:
        """Return the library's view of the cluster: its id, and all topics that Kafka shows."""
        return await self.run(self.client.list_topics, "listing Kafka's topics", timeout=self.timeout_s)

    async def partition_counts(self) -> dict[str, int]:
        """Return the number of partitions of each Kafka topic, of memq and of others."""
        return {name: len(topic.partitions) for name, topic in (await self.list_topics()).topics.items()}

    async def list_groups(self) -> list[str]:
        """Return the names of all groups, of memq and of others."""
        doing = "listing Kafka's groups"
        try:
            listed = await answered(self.client.list_consumer_groups(request_timeout=self.timeout_s))
        except KafkaException as error:
            raise self.errors.group_failure(error, doing) from error
        if listed.errors:  # of brokers that did not answer: the list lacks their groups
            raise self.errors.group_failure(listed.errors[0], doing)
        return [each.group_id for each in listed.valid]

    async def list_offsets(
        self, asked: Mapping[KafkaPartition, Asked], *, committed: bool = False
    ) -> dict[KafkaPartition, int | MemqError]:
        """Return the offset of each partition, or its MemqError; -1 if no record has the time or a later one.

        With `committed`, the end is the last stable offset: open transactions hold back later records. Callers first
        read the topics' metadata (`TopicMetadataCache`).

        If the connection breaks during a request, librdkafka answers offset -1001 without an error: that is a
        QueueError here.
        """
        wanted = {TopicPartition(*partition): _spec(kind) for partition, kind in asked.items()}
        options: dict[str, Any] = {"isolation_level": IsolationLevel.READ_COMMITTED} if committed else {}
        answers: dict[Any, Any] = self.client.list_offsets(wanted, request_timeout=self.timeout_s, **options)

        async def judged(part: TopicPartition, answer: Any) -> int | MemqError:
            doing = asking_for(part.topic, part.partition)
            try:
                offset = int((await self.ask(answer, doing)).offset)
            except MemqError as error:
                return error
            if offset >= 0 or (offset == _NOTHING_AT_TIME and isinstance(asked[part.topic, part.partition], int)):
                return offset
            return QueueError(f"{doing}: librdkafka answered {offset}, which is no offset")

        found = await asyncio.gather(*(judged(part, answer) for part, answer in answers.items()))
        return {(part.topic, part.partition): each for part, each in zip(answers, found, strict=True)}

    async def close(self) -> None:
        """End the thread."""
        await end_threads(self._pool)
        keep_to_end(self.client)


def asking_for(topic: str, number: int) -> str:
    """Return the text for a request for an offset in error messages."""
    return f"asking for offsets of partition {number} of Kafka topic '{topic}'"


def _spec(kind: Asked) -> OffsetSpec:
    spec: Any = OffsetSpec  # untyped in the library
    found: OffsetSpec = spec.for_timestamp(kind) if isinstance(kind, int) else getattr(spec, _SPECS[kind])()
    return found
