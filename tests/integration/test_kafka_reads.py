"""Reads of many partitions at once: they share consumers, and no read delays another."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from memq.errors import ClosedError, QueueError
from memq.limits import MIB
from memq.notification import Entry, Publication
from memq.notification.kafka.admin import Asked, KafkaAdmin, KafkaPartition
from memq.notification.kafka.librdkafka import LastErrors, consumer_of
from memq.notification.kafka.queue import KafkaQueue
from memq.notification.kafka.reading import fetcher as fetcher_module
from memq.notification.kafka.reading.fetcher import EntryFetcher
from memq.notification.kafka.reading.offsets import Offsets
from memq.notification.kafka.settings import KafkaSettings, Names, kafka_settings
from memq.notification.kafka.topic_metadata_cache import TopicMetadataCache
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq_localstack.servers import Server
from tests.contract.queues import HANG_S, STALE_MS, part
from tests.integration.kafka import kafka_queue

PARTITIONS = 40
PREFIX = "reads."
ALL = 1 << 30


async def _fill(queue: KafkaQueue) -> None:
    """Publish two pointers to each partition, and ten of a KiB to the last."""
    await queue.create([part(number) for number in range(PARTITIONS)], STALE_MS)
    for round_ in range(2):
        await asyncio.gather(*(_publish(queue, number, b"%d.%d" % (number, round_)) for number in range(PARTITIONS)))
    for _ in range(10):
        await _publish(queue, PARTITIONS - 1, bytes(1_024))


async def _publish(queue: KafkaQueue, number: int, body: bytes) -> None:
    await queue.publish(Publication(part(number), number, 1, SystemClock().wall_ms(), body))


class _RecordingConsumer:
    """A consumer of the library, which notes how many partitions it is assigned together."""

    def __init__(self, consumer: Consumer, noted: list[int]) -> None:
        self.consumer, self.noted = consumer, noted

    def assign(self, partitions: list[TopicPartition]) -> None:
        """See `Consumer.assign`."""
        self.noted.append(len(partitions))
        self.consumer.assign(partitions)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.consumer, name)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many reads each consumer did together."""
    found: list[int] = []
    monkeypatch.setattr(fetcher_module, "consumer_of", lambda *given: _RecordingConsumer(consumer_of(*given), found))
    return found


def _settings(address: str, prefix: str, **section: int) -> KafkaSettings:
    given = {"prefix": prefix, **section}
    return kafka_settings(f"kafka://{address}", {name: (value, "test") for name, value in given.items()})


def _tasks() -> TaskOwner:
    def failed(error: BaseException) -> None:
        raise error

    return TaskOwner(failed, EventLog(SystemClock()))


def _bodies(entries: Sequence[Entry]) -> list[bytes]:
    return [entry.body for entry in entries]


def test_reads_that_wait_are_done_together_and_each_gets_its_own(kafka: Server, noted: list[int]) -> None:
    async def run() -> None:
        async with asyncio.timeout(HANG_S):
            writer = kafka_queue(kafka.address, prefix=PREFIX)
            await _fill(writer)
            await writer.close()
            queue = kafka_queue(kafka.address, prefix=PREFIX, fetchers_max=2)  # it has nothing in its cache
            small = [queue.read(part(number), number % 2, ALL) for number in range(PARTITIONS - 1)]
            long = [queue.read(part(PARTITIONS - 1), 0, 3_000), queue.read(part(PARTITIONS - 1), 2, 1)]
            *found, first, second = await asyncio.gather(*small, *long)
            for number, entries in enumerate(found):
                assert _bodies(entries) == [b"%d.%d" % (number, each) for each in range(number % 2, 2)]
                assert [entry.offset for entry in entries] == list(range(number % 2, 2))
            assert [len(body) for body in _bodies(first)] == [4, 4, 1_024, 1_024], "within the bytes"
            assert [len(body) for body in _bodies(second)] == [1_024], "one at least"
            assert sum(noted) == PARTITIONS + 1
            assert len(noted) <= 4, "two that were first, what waited meanwhile, and the second of one partition"
            again = await asyncio.gather(*(queue.read(part(number), 0, ALL) for number in range(PARTITIONS)))
            assert [len(entries) for entries in again] == [2] * (PARTITIONS - 1) + [12], "consumers are used again"
            await queue.close()

    asyncio.run(run())


def test_a_read_that_fails_or_is_given_up_leaves_the_others_alone(kafka: Server, noted: list[int]) -> None:
    async def run() -> None:
        async with asyncio.timeout(HANG_S):
            writer = kafka_queue(kafka.address, prefix=PREFIX + "alone.")
            await _fill(writer)
            await writer.close()
            settings = _settings(kafka.address, PREFIX + "alone.", fetchers_max=1, request_timeout_ms=5_000)
            tasks = _tasks()
            fetcher = EntryFetcher(settings, SystemClock(), LastErrors(), tasks)
            topic = Names(PREFIX + "alone.").kafka_topic(part())
            reads = [asyncio.create_task(fetcher.fetch(topic, number, 0, 2, MIB)) for number in range(8)]
            reads.append(asyncio.create_task(fetcher.fetch(topic + "-gone", 0, 0, 2, MIB)))
            await asyncio.sleep(0)  # all have asked; the one thread has taken none or the first
            reads[5].cancel()
            gone = reads.pop()
            ends = await asyncio.gather(*reads, return_exceptions=True)
            assert not gone.done(), "nobody waits for what Kafka says nothing of"
            with pytest.raises(QueueError, match="-gone': no answer in 5 s"):
                await gone
            assert isinstance(ends.pop(5), asyncio.CancelledError)
            assert [_bodies(end) for end in ends if not isinstance(end, BaseException)] == [
                [b"%d.0" % number, b"%d.1" % number] for number in (0, 1, 2, 3, 4, 6, 7)
            ]
            assert sum(noted) == 8, "who was given up was not read"
            assert len(await fetcher.fetch(topic, 5, 0, 2, MIB)) == 2
            await fetcher.close()
            with pytest.raises(ClosedError):
                await fetcher.fetch(topic, 5, 0, 2, MIB)
            await tasks.stop()

    asyncio.run(run())


def test_questions_about_many_partitions_are_one_request_for_each_kind(
    kafka: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with asyncio.timeout(HANG_S):
            writer = kafka_queue(kafka.address, prefix=PREFIX + "asked.")
            await _fill(writer)
            await writer.close()
            admin, tasks = KafkaAdmin(_settings(kafka.address, PREFIX + "asked."), LastErrors()), _tasks()
            offsets = Offsets(admin, TopicMetadataCache(admin, SystemClock(), tasks), tasks)
            topic = Names(PREFIX + "asked.").kafka_topic(part())
            noted: list[int] = []
            list_ = KafkaAdmin.list_offsets

            async def noting(admin: KafkaAdmin, asked: Mapping[KafkaPartition, Asked], **options: bool) -> Any:
                noted.append(len(asked))
                return await list_(admin, asked, **options)

            monkeypatch.setattr(KafkaAdmin, "list_offsets", noting)
            now_ms = SystemClock().wall_ms()
            asks = [
                *(offsets.begin(topic, number) for number in range(0, PARTITIONS - 1, 2)),
                *(offsets.end(topic, number) for number in range(1, PARTITIONS - 1, 2)),
                *(offsets.at_time(topic, PARTITIONS - 1, time_ms) for time_ms in (1, 1, now_ms + 60_000)),
            ]
            found = await asyncio.gather(*asks)
            assert found == [*[0] * 20, *[2] * 19, 0, 0, None]
            assert noted == [PARTITIONS, 1], "a partition is asked one thing at a time"
            await tasks.stop()
            await admin.close()

    asyncio.run(run())
