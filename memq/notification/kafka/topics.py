"""Kafka topics of memq: created, described, trimmed and deleted.

Errors name settings of a topic that others have changed and that lose pointers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions, NewTopic, ResourceType

from memq.errors import DeniedError, InvalidSettingError, MemqError, NotFoundError, QueueError
from memq.limits import POINTER_BYTES_MAX
from memq.notification.kafka.admin import KafkaAdmin
from memq.notification.kafka.librdkafka import code_of
from memq.notification.kafka.reading.offsets import Offsets
from memq.notification.kafka.request_coalescer import RequestCoalescer
from memq.notification.kafka.settings import KafkaSettings
from memq.notification.kafka.topic_metadata_cache import TopicMetadataCache
from memq.runtime.tasks import TaskOwner

AHEAD_MS_MAX = 10_000
STALE = "message.timestamp.before.max.ms"
# Settings of every Kafka topic of memq, whatever Kafka's defaults are.
REQUIRED = {
    "cleanup.policy": "delete",  # compaction would keep one pointer of each write partition
    "message.timestamp.type": "CreateTime",  # the queue time is the owner's last proof
    "message.timestamp.after.max.ms": str(AHEAD_MS_MAX),
    "retention.ms": "-1",  # memq trims by itself: pointers that Kafka removed would leave objects without a pointer
    "retention.bytes": "-1",
}
_LARGEST = "max.message.bytes"
_LARGEST_LEAST = 2 * POINTER_BYTES_MAX  # a pointer, and Kafka's overhead
TopicConfig = Mapping[str, str]  # all settings of a Kafka topic
READY_TRIES = 200  # 20 s: with many thousands of partitions, Kafka lists a new topic only after seconds
READY_PAUSE_S = 0.1
KNOWN_TRIES = 20  # 2 s
ASKED_MAX = 64  # topics in one request: the answer has all of their settings


class KafkaTopics:
    """The Kafka topics, by name, through an admin client."""

    def __init__(
        self,
        admin: KafkaAdmin,
        settings: KafkaSettings,
        metadata: TopicMetadataCache,
        offsets: Offsets,
        tasks: TaskOwner,
    ) -> None:
        self._admin = admin
        self._client = admin.client
        self._timeout_s = admin.timeout_s
        self._settings = settings
        self._offsets = offsets
        self._metadata = metadata
        self._configs: RequestCoalescer[str, TopicConfig] = RequestCoalescer(
            self._ask_settings, str, ASKED_MAX, tasks, "kafka topic settings"
        )

    async def create(self, topic: str, partitions: int, stale_publish_ms: int) -> None:
        """Create a Kafka topic, or update the partition count and the bound of age of an existing one.

        Raises: InvalidSettingError when the topic has settings that lose pointers; DeniedError, QueueError.
        """
        try:
            found = await self._metadata.count(topic)
            if not found and not await self._create(topic, partitions, stale_publish_ms):
                found = await self._until_shown(topic)
            if found:
                await self._check_when_known(topic, stale_publish_ms)
                if found < partitions:
                    await self._widen(topic, partitions)
        except NotFoundError as error:  # from a node of Kafka that does not know the new topic yet
            raise QueueError(str(error)) from error
        await self._until_ready(topic, partitions)

    async def create_if_absent(self, topic: str) -> None:
        """Create an empty Kafka topic with one partition. Raises: DeniedError, QueueError."""
        try:
            found = await self._metadata.count(topic)
        except DeniedError:
            found = 0  # without the right Describe, a client does not learn whether a topic exists
        if not found:
            await self._create(topic, 1, 0)

    async def drop(self, topics: Sequence[str]) -> None:
        """Delete Kafka topics with their pointers; missing ones are ignored.

        Raises: DeniedError, QueueError, also while Kafka still lists a topic that it calls deleted or missing.
        """
        if not topics:
            return
        for topic, answer in self._client.delete_topics(list(topics), request_timeout=self._timeout_s).items():
            doing = f"deleting Kafka topic '{topic}'"
            with suppress(NotFoundError):
                await self._admin.ask(answer, doing)
            await self._until_gone(topic, doing)

    async def trim(self, topic: str, number: int, before: int) -> None:
        """Delete entries below offset `before`, which is from 0 up to the end.

        A negative offset is refused, because -1 means the end for Kafka. Kafka answers with the first remaining offset,
        which is checked. librdkafka must know the partition's leader, as for offsets (see `TopicMetadataCache`).
        Raises: QueueError, NotFoundError, DeniedError.
        """
        assert before >= 0
        if self._metadata.known(topic) is None:
            await self._metadata.refresh(topic)
        doing = f"trimming partition {number} of Kafka topic '{topic}'"
        cut = TopicPartition(topic, number, before)
        for answer in self._client.delete_records([cut], request_timeout=self._timeout_s).values():
            try:
                left = (await self._admin.ask(answer, doing)).low_watermark
            except MemqError as error:
                self._metadata.forget(topic)
                if isinstance(error, NotFoundError) and number < await self._metadata.count(topic):
                    raise QueueError(f"{error}, but Kafka shows it to others") from error
                raise
            if left < before:
                raise QueueError(f"{doing}: Kafka kept offset {left}, below {before}")

    # ---- inside --------------------------------------------------------------------------------

    async def _ask_settings(self, topics: Sequence[str]) -> dict[str, TopicConfig | MemqError]:
        resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
        answers = self._client.describe_configs(resources, request_timeout=self._timeout_s)

        async def read(topic: str, answer: Any) -> TopicConfig | MemqError:
            try:
                entries = await self._admin.ask(answer, f"reading the settings of Kafka topic '{topic}'")
            except MemqError as error:
                return error
            return {name: entry.value for name, entry in entries.items()}

        found = await asyncio.gather(*(read(resource.name, answer) for resource, answer in answers.items()))
        return {resource.name: each for resource, each in zip(answers, found, strict=True)}

    async def _create(self, topic: str, partitions: int, stale_publish_ms: int) -> bool:
        """Create a Kafka topic. Return False when it exists already; Kafka may not list it yet."""
        settings = self._required() | {STALE: str(stale_publish_ms)}
        new = NewTopic(topic, partitions, self._settings.replication_factor, config=settings)
        answer = self._client.create_topics([new], request_timeout=self._timeout_s)[topic]
        try:
            await self._admin.ask(answer, f"creating Kafka topic '{topic}'")
        except MemqError as error:
            if code_of(error) == KafkaError.TOPIC_ALREADY_EXISTS:
                return False
            if isinstance(error, NotFoundError):  # no valid answer to a creation: retry
                raise QueueError(str(error)) from error
            raise
        return True

    def _required(self) -> dict[str, str]:
        """Return the required settings of a topic; a number of copies only if `[kafka]` sets one."""
        copies = self._settings.min_insync_replicas
        return REQUIRED | ({"min.insync.replicas": str(copies)} if copies else {})

    async def _widen(self, topic: str, partitions: int) -> None:
        new = NewPartitions(topic, partitions)
        answer = self._client.create_partitions([new], request_timeout=self._timeout_s)[topic]
        await self._admin.ask(answer, f"widening Kafka topic '{topic}' to {partitions} partitions")

    async def _check_when_known(self, topic: str, stale_publish_ms: int) -> None:
        """Check the settings; a node of Kafka may not know a topic yet that another broker has just created."""
        for _ in range(KNOWN_TRIES):
            with suppress(NotFoundError):
                return await self._check_settings(topic, stale_publish_ms)
            await asyncio.sleep(READY_PAUSE_S)
        return await self._check_settings(topic, stale_publish_ms)

    async def _check_settings(self, topic: str, stale_publish_ms: int) -> None:
        found = await self._configs.ask(topic)
        wrong = {name: value for name, value in self._required().items() if found.get(name) != value}
        if int(found.get(_LARGEST) or _LARGEST_LEAST) < _LARGEST_LEAST:
            wrong[_LARGEST] = str(_LARGEST_LEAST)
        if wrong:
            raise self._wrong(topic, found, wrong)
        if found.get(STALE) != str(stale_publish_ms):
            await self._alter_stale(topic, stale_publish_ms)

    def _wrong(self, topic: str, found: Mapping[str, str], wrong: Mapping[str, str]) -> InvalidSettingError:
        shown = ", ".join(f"{name} = {found.get(name)}" for name in wrong)
        wanted = ",".join(f"{name}={value}" for name, value in wrong.items())
        return InvalidSettingError(
            f"Kafka topic '{topic}' has {shown}: pointers could get lost, or never be accepted",
            hint=f"kafka-configs.sh --bootstrap-server {self._settings.servers.split(',')[0]} --alter "
            f"--entity-type topics --entity-name {topic} --add-config {wanted}",
        )

    async def _alter_stale(self, topic: str, stale_publish_ms: int) -> None:
        entry = ConfigEntry(STALE, str(stale_publish_ms), incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        answers = self._client.incremental_alter_configs([resource], request_timeout=self._timeout_s)
        await self._admin.ask(next(iter(answers.values())), f"setting {STALE} of Kafka topic '{topic}'")

    async def _until_ready(self, topic: str, partitions: int) -> None:
        """Wait until the leader of every partition answers: a new topic has no leaders at first."""
        for last in range(READY_TRIES, 0, -1):
            try:
                await asyncio.gather(*(self._offsets.end(topic, number) for number in range(partitions)))
            except (QueueError, NotFoundError) as error:
                if last == 1:
                    raise QueueError(f"Kafka topic '{topic}' was created but does not answer: {error}") from error
                await asyncio.sleep(READY_PAUSE_S)
            else:
                return

    async def _until_shown(self, topic: str) -> int:
        """Wait until Kafka lists a topic that it calls existing. Return its number of partitions."""
        for _ in range(READY_TRIES):
            found = await self._metadata.count(topic)
            if found:
                return found
            await asyncio.sleep(READY_PAUSE_S)
        raise QueueError(f"Kafka says that topic '{topic}' exists, but does not list it")

    async def _until_gone(self, topic: str, doing: str) -> None:
        """Wait until Kafka no longer lists a deleted topic. Raises: DeniedError, QueueError."""
        for _ in range(READY_TRIES):
            self._metadata.drop(topic)  # else the cache would doubt the absence of a topic that it has seen
            if not await self._metadata.count(topic):
                return
            await asyncio.sleep(READY_PAUSE_S)
        raise QueueError(f"{doing}: Kafka shows it after {READY_TRIES * READY_PAUSE_S:.0f} s")
