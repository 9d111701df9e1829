"""A log that the queue has lost is neither swept nor opened; other logs are, and a restore rebuilds it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from memq.broker.broker import Broker
from memq.broker.partition.opening import open_partition
from memq.broker.restore.restore import Restorer
from memq.broker.services import Services
from memq.client.bulk.staged_writer import StagedWriter
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.producer import AsyncProducer
from memq.compaction.plan import CompactionRule
from memq.errors import DeniedError, EpochFencedError, InvalidRequestError, LogLostError
from memq.format.key import is_staged_object, shared_prefix
from memq.format.pointer import ProducerEnd
from memq.notification.memory import MemoryQueue
from memq.protocol.frames import Api
from memq.settings import BrokerSettings
from memq.storage_handlers import ObjectEntry
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import CLOCK_ERROR_MS, PartitionSlots, Topic, TopicSettings, read_partitions
from tests.brokers import BareClient, run, running_broker, until
from tests.compaction import DAY_MS, parts_on
from tests.partition_owners import turns
from tests.sweeps import sweep_twice
from tests.unit.bare_cluster import newer

RECORDS = 5


async def filled(broker: Broker, *, shared: bool = False) -> Topic:
    """Make a topic of two partitions with records, each an object of its own unless topics share them."""
    topic = await broker.partitions.create("clicks", 2, TopicSettings(shared_objects=shared), exist_ok=False)
    async with AsyncProducer(broker.address) as producer:
        for number in range(2 * RECORDS):
            await (await producer.send("clicks", b"%d" % number, partition=number % 2))
    return topic


async def with_lost_log(services: Services, topic: Topic, lost: int = 1) -> Services:
    """Return the parts with a queue that has lost one log of the topic."""
    queue = MemoryQueue(services.runtime.clock)
    for each in await services.coordinator.topics():
        partitions = read_partitions(each)
        await queue.create(partitions, each.settings.stale_publish_ms)
        for partition in partitions:
            if each.id != topic.id or partition.partition != lost:
                log = queue.logs[partition]
                log.entries += await services.queue.read(partition, 0, 1 << 24)
                log.begin = log.entries[0].offset if log.entries else 0
    return replace(services, queue=queue)


async def restore(services: Services, topic: Topic) -> int:
    """Restore what is lost; return how many pointers were made."""
    clock, cluster = services.runtime.clock, services.settings.cluster
    report = await Restorer(cluster, "main", services.store, services.queue, clock).restore(topic)
    assert report.findings == []
    return report.pointers


async def opened(services: Services, topic: Topic, partition: int = 1) -> str:
    """Open a partition; return why it is not opened, "" when it is."""
    opening = asyncio.create_task(open_partition(services, topic, partition, topic.read_partition_of(partition)))
    await until(lambda: opening.done() or bool(services.lost_logs))
    why = "".join(services.lost_logs.values())
    if not why:
        opening.result()
    opening.cancel()
    await asyncio.wait([opening])
    assert not services.lost_logs
    return why


def objects_of(services: Services) -> dict[str, bytes]:
    store = services.store
    assert isinstance(store, MemoryHandler)
    return dict(store.objects)


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    """Return what was logged of an event."""
    return [each.getMessage() for each in caplog.records if event in each.getMessage()]


def test_nothing_of_a_lost_log_is_swept_and_a_restore_brings_it_back(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with running_broker(audit=False) as broker:
            topic = await filled(broker)
            services = await with_lost_log(broker.services, topic)
            before = objects_of(services)
            assert await sweep_twice(services, 0) == (0, 0)
            assert objects_of(services) == before
            assert services.counters.kept_objects == 2 * RECORDS
            report, again = said(caplog, "not-swept")
            assert report == again
            assert f"topic 'clicks' partition 1: the queue has lost what may have named {RECORDS} objects" in report
            assert "the queue shows nothing of it, the store has" in await opened(services, topic)
            assert await opened(services, topic, 0) == "", "the other one is served"
            assert await restore(services, topic) == RECORDS
            assert await opened(services, topic) == ""
            assert await sweep_twice(services, 0) == (0, 0)
            assert services.counters.kept_objects == 2 * RECORDS, "no more than before"

    with caplog.at_level(logging.WARNING, "memq"):
        run(work())


def test_an_object_of_a_newer_version_that_a_restore_could_not_read_is_not_swept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An older release restored the queue: the records are whole, and a later restore brings them."""

    async def work() -> None:
        async with running_broker(audit=False) as broker:
            topic = await filled(broker)
            services = await with_lost_log(broker.services, topic)
            store = services.store
            assert isinstance(store, MemoryHandler)
            keys = [each for each in store.objects if "/00001-" in each]
            key = min(keys, key=lambda each: each.rpartition("/")[2])
            store.objects[key] = newer(store.objects[key])
            before = objects_of(services)
            clock, cluster = services.runtime.clock, services.settings.cluster
            report = await Restorer(cluster, "main", store, services.queue, clock).restore(topic)
            assert (report.pointers, [each for each, _ in report.findings]) == (RECORDS - 1, [key])
            assert await opened(services, topic) == ""
            assert await sweep_twice(services, 0) == (0, 0)
            assert objects_of(services) == before
            (line, _) = said(caplog, "not-swept")
            assert "a newer version of memq wrote, and no restore by this one named, 1 objects" in line

    with caplog.at_level(logging.WARNING, "memq"):
        run(work())


def test_objects_of_a_partition_opened_on_an_empty_log_are_not_swept() -> None:
    """By an owner of an earlier version, that did not look."""

    async def work() -> None:
        async with running_broker(audit=False) as broker:
            topic = await filled(broker)
            services = await with_lost_log(broker.services, topic)
            empty = replace(services, stores={"main": MemoryHandler(services.runtime.clock)})
            assert await opened(empty, topic) == ""
            assert await sweep_twice(services, 0) == (0, 0)
            assert services.counters.kept_objects == 2 * RECORDS

    run(work())


def test_an_opening_that_was_interrupted_is_none_of_a_lost_log() -> None:
    async def work() -> None:
        async with running_broker(audit=False) as broker:
            services = broker.services
            topic = await broker.partitions.create("clicks", 2, TopicSettings(), exist_ok=False)
            async with AsyncProducer(broker.address) as producer:
                await (await producer.send("clicks", b"x", partition=0))
            claimed = msgspec.structs.replace(await services.coordinator.assignment(topic.id, 1), epoch=7)
            await services.coordinator.set_assignment(claimed)
            assert await services.lost_queue.check() == []
            assert await opened(services, topic) == ""

    run(work())


def test_new_partition_on_a_lost_log_is_not_opened() -> None:
    """Its `opened` would be the first entry, and nothing could be restored before that."""

    async def work() -> None:
        async with running_broker(audit=False) as broker:
            topic = await filled(broker)
            services = await with_lost_log(broker.services, topic)
            first, second = topic.partitions
            split = PartitionSlots(partition=2, slot_first=60_000, slot_last=second.slot_last, read_partition=1)
            wider = msgspec.structs.replace(
                topic, partitions=(first, msgspec.structs.replace(second, slot_last=59_999), split)
            )
            await services.coordinator.alter_topic(wider)
            own = msgspec.structs.replace(
                await services.coordinator.assignment(topic.id, 2), broker=services.settings.broker_id
            )
            await services.coordinator.set_assignment(own)
            assert await opened(services, wider, 2)
            assert await restore(services, wider) == RECORDS
            assert await opened(services, wider, 2) == ""

    run(work())


def test_shared_objects_stay_that_a_lost_log_may_have_named() -> None:
    async def work() -> None:
        async with running_broker(audit=False, shared_age_ms_max=1) as broker:
            topic = await filled(broker, shared=True)
            services = await with_lost_log(broker.services, topic)
            before = objects_of(services)
            assert all(key.startswith(shared_prefix(services.settings.cluster)) for key in before)
            assert await sweep_twice(services, 0) == (0, 0)
            assert objects_of(services) == before
            assert await opened(services, topic)
            await restore(services, topic)
            assert await opened(services, topic) == ""
            await broker.partitions.delete(broker.partitions.topic("clicks"))
            await services.queue.drop(read_partitions(topic))  # as the broker has done with its own
            assert (await sweep_twice(services, 0))[0] == len(before), "nobody is left who could have named them"

    run(work())


def test_a_topic_that_shares_objects_no_more_is_not_opened_on_a_lost_log_either() -> None:
    async def work() -> None:
        async with running_broker(audit=False, shared_age_ms_max=1) as broker:
            topic = await filled(broker, shared=True)
            services = await with_lost_log(broker.services, topic)
            alone = msgspec.structs.replace(topic, version=2, settings=TopicSettings(shared_objects=False))
            assert "the queue shows nothing of it, the store has" in await opened(services, alone)
            young = msgspec.structs.replace(alone, created_ms=services.runtime.clock.wall_ms() + 2 * CLOCK_ERROR_MS)
            assert await opened(services, young) == "", "what is older than a topic is of others"

    run(work())


def test_staged_objects_stay_that_a_lost_log_may_have_named() -> None:
    async def work() -> None:
        async with running_broker(audit=False, staged_age_ms=60_000) as broker:
            topic = await filled(broker)
            store = broker.services.store
            writer = StagedWriter(broker.services.settings.cluster, {topic.name: topic}, store, "nightly")
            await writer.add(topic.name, b"x", partition=1)
            await writer.finish()
            (staged,) = [key for key in objects_of(broker.services) if is_staged_object(key)]
            assert isinstance(store, MemoryHandler)
            store.modified_ms[staged] -= 120_000
            await sweep_twice(await with_lost_log(broker.services, topic), 0)
            assert staged in objects_of(broker.services)
            await sweep_twice(broker.services, 0)
            assert staged not in objects_of(broker.services), "nobody committed it"

    run(work())


def test_an_empty_log_with_batches_in_large_objects_is_not_opened() -> None:
    async def work() -> None:
        async with running_broker(audit=False) as broker:
            topic = await filled(broker)
            services, partition = broker.services, read_partitions(topic)[1]
            queue, store = services.queue, services.store
            assert isinstance(queue, MemoryQueue)
            assert isinstance(store, MemoryHandler)
            log = queue.logs[partition]
            log.entries[:] = [replace(entry, time_ms=entry.time_ms - 2 * DAY_MS) for entry in log.entries]
            async with AsyncProducer(broker.address) as producer:
                await (await producer.send("clicks", b"young", partition=1))
            parts = parts_on(queue, store, services.runtime, services.settings.cluster)
            rule = CompactionRule(age_ms=DAY_MS, object_bytes=1, rest=True)
            assert await parts.compact(partition, topic.settings, rule)
            for key in list(store.objects):
                if "/cold/" not in key:
                    del store.objects[key]
            services = await with_lost_log(services, topic)
            assert "/cold/parts/" in await opened(services, topic)
            before = objects_of(services)
            await sweep_twice(services, 0)
            assert objects_of(services) == before
            assert await restore(services, topic) == RECORDS
            assert await opened(services, topic) == ""

    run(work())


@asynccontextmanager
async def broker_on(services: Services) -> AsyncIterator[Broker]:
    """Run another broker on these parts."""
    settings = BrokerSettings(port=0, audit=False, broker_id=services.settings.broker_id)
    broker = Broker(settings, services.runtime, services.stores, services.queue, services.coordinator)
    await broker.start()
    try:
        yield broker
    finally:
        await broker.close()


def test_a_start_names_the_lost_log_and_serves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with running_broker(audit=False) as broker:
            topic = await filled(broker)
            services = broker.services
        services = await with_lost_log(services, topic)
        async with broker_on(services) as broker:
            (report,) = said(caplog, "log-lost")
            assert "topic 'clicks' partition 1: the queue shows nothing of it" in report, "at the start"
            assert "memq restore" in report
            broker.partitions.processor(topic, 1)
            await until(lambda: bool(broker.services.lost_logs))
            client = await BareClient.connect(broker)
            client.send_open(topic, partition=1)
            error = await client.error()
            assert (error.code, error.kind) == ("log-lost", "retryable")
            assert "topic 'clicks' partition 1" in error.text
            await client.open(topic, stream=2)
            await client.close()
            await broker.drain()
        assert await restore(services, topic) == RECORDS
        async with broker_on(services) as broker:
            client = await BareClient.connect(broker)
            client.send_open(topic, partition=1)
            assert (await client.frame()).api == Api.OPEN
            await client.close()

    with caplog.at_level(logging.WARNING, "memq"):
        run(work())


def test_a_start_is_refused_when_the_queue_lacks_any_partition_of_a_topic_with_objects() -> None:
    async def work() -> None:
        async with running_broker(audit=False) as broker:
            topic = await filled(broker)
            services = broker.services
        await services.queue.drop(read_partitions(topic)[1:])
        with pytest.raises(InvalidRequestError, match="does not have all of topic 'clicks'"):
            async with broker_on(services):
                pass

    run(work())


def test_broker_without_the_right_to_list_serves() -> None:
    class Unlisted(MemoryHandler):
        def list(self, prefix: str = "") -> AsyncIterator[ObjectEntry]:
            raise DeniedError(f"'{prefix}' may not be listed")

    async def work() -> None:
        async with running_broker(audit=False) as broker:
            topic = await filled(broker)
            services = await with_lost_log(broker.services, topic)
            services = replace(services, stores={"main": Unlisted(services.runtime.clock)})
            assert await services.lost_queue.check() == []
            assert await opened(services, topic) == ""

    run(work())


def test_an_owner_whose_log_was_replaced_reads_it_again_before_it_acks(caplog: pytest.LogCaptureFixture) -> None:
    """It acked with what it knew of the old log: its end of the log was one that no reader reached."""

    async def work() -> None:
        async with running_broker(audit=False) as broker:
            topic = await filled(broker)
            queue = broker.services.queue
            assert isinstance(queue, MemoryQueue)
            log = queue.logs[read_partitions(topic)[1]]
            log.entries.clear()
            processor = broker.partitions.processors[topic.id, 1]
            epoch = processor.owned().epoch
            before = objects_of(broker.services)
            async with AsyncProducer(broker.address) as producer:
                await (await producer.send("clicks", b"x", partition=0))
                assert said(caplog, "log-lost") == []
                await (await producer.send("clicks", b"x", partition=1))
                assert processor.owned().epoch > epoch
                assert await processor.proven_end() == log.end
            (line,) = said(caplog, "log-lost")
            assert "partition 1: the queue put a pointer at offset 0, below" in line
            async with AsyncConsumer(broker.address, "clicks", start="beginning", end="end", audit=False) as consumer:
                records = [record async for batch in consumer for record in batch]
            values = [record.value for record in records if record.position.read_partition == 1]
            assert values == [b"x"], "the block that was sent again is a copy"
            await sweep_twice(broker.services, 0)
            assert objects_of(broker.services).keys() >= before.keys()

    with caplog.at_level(logging.WARNING, "memq"):
        run(work())


def test_a_producer_that_ends_while_the_loss_is_found_delays_a_drain_until_then_only() -> None:
    """Its epoch is lost, and `lost_logs` does not have the log yet: the end of the producer waits for the opening."""

    class SlowListing(MemoryHandler):
        begun, gate = asyncio.Event(), asyncio.Event()

        async def list(self, prefix: str = "") -> AsyncIterator[ObjectEntry]:
            self.begun.set()
            await self.gate.wait()
            async for entry in super().list(prefix):
                yield entry

    async def work() -> None:
        async with running_broker(audit=False) as broker:
            topic = await filled(broker)
            queue, before = broker.services.queue, broker.services.store
            assert isinstance(queue, MemoryQueue)
            assert isinstance(before, MemoryHandler)
            store = SlowListing(broker.services.runtime.clock)
            store.objects, store.modified_ms = before.objects, before.modified_ms
            broker.services.stores["main"] = store
            processor = broker.partitions.processors[topic.id, 1]
            queue.logs[read_partitions(topic)[1]].entries.clear()
            processor.fence(EpochFencedError("a higher epoch was there"))
            await store.begun.wait()
            ends = asyncio.create_task(processor.end_producer(ProducerEnd(producer=9, next_sequence=1)))
            drains = asyncio.create_task(processor.drain())
            await turns()
            assert not drains.done()
            store.gate.set()
            with pytest.raises(LogLostError):
                await ends
            await drains

    run(work())
