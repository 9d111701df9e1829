"""A Kafka queue on a librdkafka in memory, with a few records in one partition."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from memq.notification import Publication
from memq.notification.kafka import queue as queue_module
from memq.notification.kafka.admin import KafkaAdmin
from memq.notification.kafka.librdkafka import LastErrors
from memq.notification.kafka.queue import KafkaQueue
from memq.notification.kafka.reading.offsets import Offsets
from memq.notification.kafka.settings import Names, kafka_settings
from memq.notification.kafka.topic_metadata_cache import TopicMetadataCache
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.topic import ReadPartition
from tests.librdkafka import Library, Log, use
from tests.skipping_loop import run_skipping, skipping_runtime

PARTITION = ReadPartition("clicks", "0a" * 16, 0)
TOPIC = Names("memq.").kafka_topic(PARTITION)
ALL = 1 << 30
RECORDS = 5


def few_records(monkeypatch: pytest.MonkeyPatch) -> Library:
    """A library with one topic of a few records. A span is not asked for again by itself."""
    found = Library({TOPIC: [Log()]})
    for number in range(RECORDS):
        found.log((TOPIC, 0)).append(1_000 + number, b"%d" % number)
    use(found, monkeypatch)
    monkeypatch.setattr(queue_module, "LEADERLESS_S_MAX", 0.0)
    return found


def over(work: Callable[[KafkaQueue], Awaitable[None]], request_timeout_ms: int = 500) -> None:
    async def run() -> None:
        section: dict[str, tuple[object, str]] = {"request_timeout_ms": (request_timeout_ms, "test")}
        queue = KafkaQueue(kafka_settings("kafka://localhost", section), Runtime())
        try:
            async with asyncio.timeout(30):
                await work(queue)
        finally:
            await queue.close()

    asyncio.run(run())


def over_virtual(work: Callable[[KafkaQueue], Awaitable[None]], servers: str = "localhost", **section: object) -> None:
    """Run work that needs no thread of the queue, on virtual time."""

    async def run() -> None:
        settings = kafka_settings(f"kafka://{servers}", {name: (value, "test") for name, value in section.items()})
        queue = KafkaQueue(settings, skipping_runtime())
        try:
            await work(queue)
        finally:
            await queue.close()

    run_skipping(run())


def over_offsets(work: Callable[[Offsets, TopicMetadataCache], Awaitable[None]]) -> None:
    """Run work on offsets and metadata of the library in use, on virtual time."""

    async def run() -> None:
        runtime, failures = skipping_runtime(), list[BaseException]()
        tasks = TaskOwner(failures.append, EventLog(runtime.clock))
        admin = KafkaAdmin(kafka_settings("kafka://localhost", {}), LastErrors())
        metadata = TopicMetadataCache(admin, runtime.clock, tasks)
        await work(Offsets(admin, metadata, tasks), metadata)
        await admin.close()
        await tasks.stop()
        assert failures == []

    run_skipping(run())


def publication(body: bytes) -> Publication:
    return Publication(PARTITION, 0, 1, int(time.time() * 1000), body)  # noqa: TID251 - Kafka's clock
