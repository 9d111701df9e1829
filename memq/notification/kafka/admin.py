"""All admin requests to Kafka: a wrong or missing answer raises an error of memq."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import OffsetSpec

from memq.errors import ClosedError, MemqError, QueueError
from memq.notification.kafka.library import LastErrors, admin_of, answered, code_of, end_threads
from memq.notification.kafka.settings import KafkaSettings
from memq.runtime.process import keep_to_end
from memq.runtime.threads import ThreadPool

NOBODY = "nobody"  # behind the prefix, the name of a topic that is asked for to hear anything at all
_ABOUT_TOPIC = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_AUTHORIZATION_FAILED)
LOOK_S = 0.2  # how often a check looks for what the library complains of
_NOTHING_AT_TIME = -1  # Kafka's own answer; any other negative offset is the library's, of a request that failed
_NO_CONTROLLER = "waiting for controller"  # librdkafka's words; its code is that of each request that times out
_SPECS = {"begin": "earliest", "end": "latest"}
Place = tuple[str, int]  # a Kafka topic and the number of a partition
Asked = int | str  # of a partition: the offset of a time, or one of `_SPECS`
P = ParamSpec("P")
T = TypeVar("T")


class KafkaAdmin:
    """An admin client, its connection errors, and a thread for calls of the library that block.

    The client must be kept: one without a name is destroyed before its requests are answered.
    """

    def __init__(self, settings: KafkaSettings, errors: LastErrors) -> None:
        """Nothing is reached here. Raises: InvalidSettingError."""
        self.errors = errors
        self.servers = settings.servers
        self.timeout_s = settings.request_timeout_ms / 1000
        self.client = admin_of(settings.client(), errors.note)
        self._prefix = settings.prefix
        self._pool = ThreadPool("kafka-lists", 1)
        self._learning = asyncio.Lock()

    async def check(self) -> None:
        """Prove that Kafka answers, by asking for a topic that need not be there.

        Raises: QueueError, DeniedError.
        """
        doing = f"asking Kafka at {self.servers}"
        waiting = asyncio.create_task(self._heard(f"{self._prefix}{NOBODY}", doing), name="kafka check")
        try:
            while not waiting.done():
                await asyncio.wait((waiting,), timeout=LOOK_S)
                self.client.poll(0)
                denial = self.errors.denial(doing)
                if denial is not None and not waiting.done():
                    raise denial  # the library would try to log in until the request times out
            waiting.result()
        finally:
            waiting.cancel()

    async def _heard(self, topic: str, doing: str) -> None:
        """Wait for an answer about a topic, whatever it says of it."""
        try:
            await self.ask(self.describe_topics([topic])[topic], doing)
        except MemqError as error:
            if code_of(error) not in _ABOUT_TOPIC:
                raise
            self.errors.settled()

    async def ask(self, answer: Any, doing: str) -> Any:
        """Return what Kafka answers to a request of the client. Raises: memq's error for Kafka's (`code_of`)."""
        try:
            found = await answered(answer)
        except KafkaException as error:
            failure = self.failure(error, doing)
            if _NO_CONTROLLER in error.args[0].str():
                await self._learn_brokers()
            raise failure from error
        self.errors.settled()
        return found

    async def _learn_brokers(self) -> None:
        """Ask any broker which brokers there are, unless another request that failed does so.

        A Kafka that was paused names none for a moment. The library waits for its next refresh then, 30 s at most, and
        each request until then waits for a controller that the library does not look for.
        """
        if not self._learning.locked():
            async with self._learning:
                with suppress(KafkaException, ClosedError):
                    await self._pool.run(self.client.list_topics, timeout=self.timeout_s)

    async def run(self, function: Callable[P, T], doing: str, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what a call of the library returns that blocks. Raises: as `ask`."""
        try:
            return await self._pool.run(function, *args, **kwargs)
        except KafkaException as error:
            raise self.failure(error, doing) from error

    def failure(self, error: KafkaError | KafkaException, doing: str) -> MemqError:
        """Return memq's error for one of Kafka's, with the last connection error."""
        self.client.poll(0)  # hands over what the connection complained of
        return self.errors.failure(error, doing)

    def describe_topics(self, topics: Sequence[str], *, rights: bool = False) -> dict[str, Any]:
        """Return the answers about topics, for `ask`; with `rights`, what may be done with them, too."""
        asked: dict[str, Any] = {"include_authorized_operations": True} if rights else {}
        found: dict[str, Any] = self.client.describe_topics(
            TopicCollection(list(topics)), request_timeout=self.timeout_s, **asked
        )
        return found

    async def list_topics(self) -> Any:
        """Return the library's view of the cluster: its id, and all topics that Kafka shows."""
        return await self.run(self.client.list_topics, "listing Kafka's topics", timeout=self.timeout_s)

    async def topic_counts(self) -> dict[str, int]:
        """Return how many partitions each Kafka topic has, of memq and of others."""
        return {name: len(topic.partitions) for name, topic in (await self.list_topics()).topics.items()}

    async def list_groups(self) -> list[str]:
        """Return the names of all groups, of memq and of others."""
        doing = "listing Kafka's groups"
        try:
            listed = await answered(self.client.list_consumer_groups(request_timeout=self.timeout_s))
        except KafkaException as error:
            raise self.errors.group_failure(error, doing) from error
        if listed.errors:  # of brokers that did not answer: their groups are not among those that are listed
            raise self.errors.group_failure(listed.errors[0], doing)
        return [each.group_id for each in listed.valid]

    async def list_offsets(
        self, asked: Mapping[Place, Asked], *, committed: bool = False
    ) -> dict[Place, int | MemqError]:
        """Return the offset of each partition, or its MemqError; -1 where a time is behind all records.

        With `committed` the end is the one behind the last record that no transaction holds back. The partitions are
        those of `TopicMetadataCache`.

        librdkafka answers offset -1001 without an error when the connection breaks under a request: that is an error.
        """
        wanted = {TopicPartition(*place): _spec(kind) for place, kind in asked.items()}
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
    """Return how errors name a request for an offset."""
    return f"asking for offsets of partition {number} of Kafka topic '{topic}'"


def _spec(kind: Asked) -> OffsetSpec:
    spec: Any = OffsetSpec  # untyped in the library
    found: OffsetSpec = spec.for_timestamp(kind) if isinstance(kind, int) else getattr(spec, _SPECS[kind])()
    return found
