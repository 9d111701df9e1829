"""Restored pointers equal the published ones, and each record is in one pointer."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import msgspec
import pytest
from awscrt.checksums import crc32c

from memq.broker.broker import Broker
from memq.broker.partition.opening import open_partition
from memq.broker.partition.ownership import INSTANCES_PER_EPOCH
from memq.broker.restore import rebuild
from memq.broker.restore.restore import Restored, Restorer
from memq.client.bulk.staged_writer import StagedCommits, StagedWriter
from memq.client.producer.producer import AsyncProducer
from memq.errors import CorruptDataError, NotFoundError, QueueError, QueueRefusedError, StoreError
from memq.format.blocks.header import parse_header
from memq.format.key import object_key, shared_prefix, staged_prefix, topic_prefix
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.pointer import Pointer, decode_pointer, encode_pointer
from memq.format.staged_manifest import Manifest, encode_manifest
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification import NotificationQueue, Publication, Span
from memq.notification.memory import MemoryQueue
from memq.protocol.frames import Api
from memq.runtime.clock import SystemClock
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import (
    Committed,
    Position,
    ReadPartition,
    Topic,
    TopicSettings,
    Totals,
    producer_id_of,
    read_partitions,
    writer_id,
)
from tests.brokers import BareClient, batch_pointers, block_of, run, running_broker, write_frame
from tests.skipping_loop import run_skipping, skipping_runtime
from tests.unit.sealed_batches import SHARED, TOPIC, batch, block, joined

BATCHES = 5


async def fill(broker: Broker) -> Topic:
    """Have batches of two producers committed one after another."""
    client = await BareClient.connect(broker)
    topic = await client.topic()
    await client.open(topic, stream=1, producer=1)
    await client.open(topic, stream=2, producer=2)
    for number in range(BATCHES):
        stream = 1 + number % 2
        block = block_of(topic, 3 * (number // 2), [b"a", b"bb", b"ccc"], producer=stream)
        client.write(write_frame(block, stream=stream))
        assert (await client.frame()).api == Api.ACK
    await client.close()
    return topic


async def restore(broker: Broker, queue: NotificationQueue, topic: Topic, *, dry_run: bool = False) -> Restored:
    services = broker.services
    clock = services.runtime.clock
    restorer = Restorer(services.settings.cluster, "main", services.store, queue, clock, dry_run=dry_run)
    return await restorer.restore(topic)


def test_restored_pointers_are_those_that_were_published() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            queue = MemoryQueue(SystemClock())
            report = await restore(broker, queue, topic)
            expected = await batch_pointers(broker.services.queue, topic)
            assert await batch_pointers(queue, topic) == expected
            assert (report.pointers, report.records, report.held, report.findings) == (BATCHES, 3 * BATCHES, 0, [])
            assert report.bytes == sum(pointer.stored_bytes for pointer in expected)
            again = await restore(broker, queue, topic)
            assert (again.pointers, again.held) == (0, BATCHES)
            assert await batch_pointers(queue, topic) == expected

    run(work())


def test_a_restore_counts_each_finished_object() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic, moved = await fill(broker), list[int]()
            store = broker.services.stores["main"]
            queue, clock = MemoryQueue(SystemClock()), SystemClock()
            report = await Restorer("memq", "main", store, queue, clock, moved=moved.append).restore(topic)
            assert sum(moved) == report.objects > 1

    run(work())


def test_after_a_restore_the_queue_refuses_what_is_too_old() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            queue = MemoryQueue(SystemClock(), "age")
            assert (await restore(broker, queue, topic)).pointers == BATCHES
            with pytest.raises(QueueRefusedError):
                await queue.publish(Publication(read_partitions(topic)[0], 0, 9, 1_000, b"old"))

    run(work())


class CheckingStore(MemoryHandler):
    """A store that keeps checksums, none of which fits."""

    async def get(self, key: str, *, checked: bool = True) -> bytes:
        """See `StorageReader.get`."""
        data = await super().get(key)
        if checked:
            raise CorruptDataError(f"object '{key}' has another checksum")
        return data


def test_a_batch_is_restored_by_its_blocks_though_the_checksum_of_its_object_fails() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            store, services = CheckingStore(SystemClock()), broker.services
            async for entry in services.store.list(""):
                body = await services.store.get(entry.key)
                await store.put(entry.key, [body], crc32c(body))
            queue = MemoryQueue(SystemClock())
            report = await Restorer(services.settings.cluster, "main", store, queue, SystemClock()).restore(topic)
            assert (report.pointers, report.records, report.findings) == (BATCHES, 3 * BATCHES, [])

    run(work())


def test_objects_of_a_topic_that_the_coordinator_lost_are_counted_and_named() -> None:
    """A restore with an old backup of the coordinator restored the other topics, and had no finding."""

    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            services, clock = broker.services, SystemClock()
            coordinator = MemoryCoordinator(MemoryCluster())
            other = msgspec.structs.replace(topic, name="other", id="0b" * 16)
            await coordinator.create_topic(other)
            restorer = Restorer(services.settings.cluster, "main", services.store, MemoryQueue(clock), clock)
            known, lost = await restorer.restore_all(coordinator)
            assert (known.topic, known.objects, known.findings) == ("other", 0, [])
            assert (lost.topic, lost.objects, lost.pointers) == (topic.name, BATCHES, 0)
            ((name, text),) = lost.findings
            assert name == f"topic '{topic.name}' with id {topic.id}"
            assert f"{BATCHES} objects were not restored" in text
            await coordinator.create_topic(topic)
            await coordinator.delete_topic(topic)
            assert await restorer.restore_all(coordinator) == [known], "a deleted topic leaves objects until a sweep"

    run(work())


def test_a_dry_run_makes_nothing() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            queue = MemoryQueue(SystemClock())
            assert (await restore(broker, queue, topic, dry_run=True)).pointers == BATCHES
            await restore(broker, queue, topic)  # would meet what a dry run had made
            assert len(await batch_pointers(queue, topic)) == BATCHES

    run(work())


def test_keys_that_memq_does_not_write_are_named_and_hide_no_batch() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            prefix = topic_prefix(broker.services.settings.cluster, topic.name, topic.id)
            strange = [f"{prefix}{name}" for name in ("0-first", "zz-last")]
            for key in strange:
                await broker.services.store.put(key, [b"x"], crc32c(b"x"))
            report = await restore(broker, MemoryQueue(SystemClock()), topic)
            assert report.pointers == BATCHES
            assert sorted(key for key, _ in report.findings) == strange

    run(work())


def test_manifests_that_can_not_be_read_are_named_and_hide_no_batch() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            folder = f"{staged_prefix(broker.services.settings.cluster)}w/commits/"
            newer = encode_manifest(
                Manifest(version=99, cluster="memq", writer="w", batch_id=1, store="main", created_ms=1, objects=())
            )
            for key, body in ((f"{folder}1", newer), (f"{folder}2", b"{torn")):
                await broker.services.store.put(key, [body], crc32c(body))
            report = await restore(broker, MemoryQueue(SystemClock()), topic)
            assert report.pointers == BATCHES
            (_, first), (_, second) = sorted(report.findings)
            assert "has version 99" in first
            assert "can't be read" in second

    run(work())


def test_a_log_with_pointers_of_a_newer_version_is_left_as_it_is() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            queue, partition = MemoryQueue(SystemClock(), "age"), read_partitions(topic)[0]
            await queue.create([partition], 1 << 50)
            newer = b'{"version":99,"kind":"opened"}'
            await queue.publish(Publication(partition, 0, 1, SystemClock().wall_ms(), newer))
            report = await restore(broker, queue, topic)
            assert (report.pointers, report.intact) == (0, 0)
            assert "has version 99" in report.findings[0][1]
            assert [entry.body for entry in await queue.read(partition, 0, 1 << 20)] == [newer]

    run(work())


def test_a_log_of_a_newer_version_does_not_keep_other_logs_of_its_topic_from_a_restore() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await broker.partitions.create("clicks", 2, TopicSettings(), exist_ok=False)
            async with AsyncProducer(broker.address) as producer:
                await (await producer.send("clicks", b"x", partition=1))
            queue, newer = MemoryQueue(SystemClock(), "age"), b'{"version":99,"kind":"opened"}'
            first, second = read_partitions(topic)
            await queue.create([first], 1 << 50)
            await queue.publish(Publication(first, 0, 1, SystemClock().wall_ms(), newer))
            report = await restore(broker, queue, topic)
            assert (report.records, len(report.findings)) == (1, 1)
            [entry] = await queue.read(second, 0, 1 << 20)
            assert decode_pointer(entry.body).records == 1

    run(work())


def test_a_queue_that_does_not_answer_ends_a_restore_and_is_no_fault_of_a_log() -> None:
    class Silent(MemoryQueue):
        async def span(self, partition: ReadPartition) -> Span:
            raise QueueError("it does not answer")

    async def work() -> None:
        clock = skipping_runtime().clock
        with pytest.raises(QueueError, match="does not answer"):
            await Restorer("memq", "main", MemoryHandler(clock), Silent(clock), clock).restore(TOPIC)

    run_skipping(work())


def test_a_log_in_use_that_the_queue_does_not_show_for_a_moment_is_left_alone() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            queue = MemoryQueue(SystemClock(), "age")
            await queue.create(read_partitions(topic), 1 << 50)
            entries = await broker.services.queue.read(read_partitions(topic)[0], 0, 1 << 20)
            for entry in entries:
                pointer = decode_pointer(entry.body)
                await queue.publish(
                    Publication(read_partitions(topic)[0], 0, pointer.epoch, entry.time_ms, bytes(entry.body))
                )
            span, hidden = queue.span, 1

            async def hides(partition: ReadPartition) -> Span:
                nonlocal hidden
                hidden -= 1
                if hidden >= 0:
                    raise NotFoundError("unknown topic or partition")
                return await span(partition)

            queue.span = hides  # type: ignore[method-assign]
            with pytest.raises(QueueError, match="did not show it before"):
                await restore(broker, queue, topic)
            assert len(await batch_pointers(queue, topic)) == BATCHES
            assert (await restore(broker, queue, topic)).intact == 1

    run(work())


def test_restore_names_a_batch_that_is_stored_twice_once() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            store = broker.services.store
            first = (await batch_pointers(broker.services.queue, topic))[0]
            misplaced = object_key(
                first.cluster, topic.name, topic.id, 0, first.epoch, first.batch_sequence + BATCHES, first.sealed_ms
            )
            body = await store.get(first.locations[0].key)
            await store.put(misplaced, [body], crc32c(body))
            queue = MemoryQueue(SystemClock())
            report = await restore(broker, queue, topic)
            assert len(await batch_pointers(queue, topic)) == BATCHES
            assert [key for key, _ in report.findings] == [misplaced], "its index names another batch"

    run(work())


def test_a_copy_of_a_lost_epoch_is_left_out_and_partly_new_batches_skip() -> None:
    """An owner that was fenced left an object without a pointer; its producers sent the same blocks to the next one."""

    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            await store_next_epoch(broker, topic)
            queue = MemoryQueue(SystemClock())
            report = await restore(broker, queue, topic)
            found = await batch_pointers(queue, topic)
            assert (report.copies, report.pointers) == (1, BATCHES + 1)
            assert found[-1].skip == (0,)
            assert found[-1].totals == Totals(3 * BATCHES, sum(pointer.stored_bytes for pointer in found[:-1]))

    run(work())


async def store_next_epoch(broker: Broker, topic: Topic) -> None:
    """Store two objects of epoch 2: a copy of what there is, and a batch of one known and one new block."""
    known = block_of(topic, 0, [b"a", b"bb", b"ccc"], producer=1)
    new = block_of(topic, 100, [b"d"], producer=1)
    for sequence, blocks in ((0, [known]), (1, [known, new])):
        entries, at = [], 0
        for each in blocks:
            entries.append(BlockEntry.from_header(parse_header(each), at))
            at += len(each)
        records = sum(entry.count for entry in entries)
        batch = BatchEntry(0, at, 2_000 + sequence, sequence, records, 0, len(blocks), 0, 2)
        meta = ObjectMeta(cluster="memq", broker="b", topics=(ObjectTopic(topic.name, topic.id),), created_ms=1)
        body = b"".join(blocks) + encode_index(meta, [batch], entries, at)
        cluster = broker.services.settings.cluster
        key = object_key(cluster, topic.name, topic.id, 0, 2, sequence, 2_000 + sequence)
        await broker.services.store.put(key, [body], crc32c(body))


def test_restore_reports_and_keeps_a_partition_opened_in_the_new_queue() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            queue = MemoryQueue(SystemClock())
            await open_in(queue, topic, epoch=9)
            report = await restore(broker, queue, topic)
            assert (report.intact, report.pointers, await batch_pointers(queue, topic)) == (0, 0, [])
            ((where, text),) = report.findings
            assert where == f"topic '{topic.name}' partition 0"
            assert "opened in the new queue before all was restored" in text

    run(work())


def test_a_restore_that_was_ended_half_way_before_brokers_started_is_reported() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            queue = MemoryQueue(SystemClock())
            await queue.create(read_partitions(topic), 1 << 53)
            for pointer in (await batch_pointers(broker.services.queue, topic))[:-1]:
                await put(queue, topic, pointer)
            await open_in(queue, topic, epoch=9)
            report = await restore(broker, queue, topic)
            assert (report.intact, report.pointers, len(report.findings)) == (0, 0, 1)

    run(work())


async def open_in(queue: NotificationQueue, topic: Topic, epoch: int) -> None:
    await queue.create(read_partitions(topic), 30_000)
    opened = Pointer(
        kind="opened", cluster="memq", topic=topic.name, topic_id=topic.id, partition=0, epoch=epoch, batch_sequence=0
    )
    await put(queue, topic, opened)


async def put(queue: NotificationQueue, topic: Topic, pointer: Pointer) -> None:
    now_ms = SystemClock().wall_ms()
    await queue.publish(Publication(read_partitions(topic)[0], 0, pointer.epoch, now_ms, encode_pointer(pointer)))


def test_a_queue_in_use_is_intact_whatever_orphans_there_are() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            await store_next_epoch(broker, topic)  # of an owner that was fenced before it published
            queue = broker.services.queue
            before = await queue.read(read_partitions(topic)[0], 0, 1 << 20)
            for _ in range(2):
                report = await restore(broker, queue, topic)
                assert (report.intact, report.pointers, report.objects, report.findings) == (1, 0, 0, [])
                await queue.trim(read_partitions(topic)[0], 1)  # as retention does: what it took is not lost
            assert await queue.read(read_partitions(topic)[0], 0, 1 << 20) == before[1:]

    run(work())


def test_restored_and_opened_partition_is_intact_despite_a_copy_without_pointer() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            await store_next_epoch(broker, topic)
            queue = MemoryQueue(SystemClock())
            report = await restore(broker, queue, topic)
            assert (report.pointers, report.copies) == (BATCHES + 1, 1)
            await open_in(queue, topic, epoch=9)
            report = await restore(broker, queue, topic)
            assert (report.intact, report.pointers, report.findings) == (1, 0, [])

    run(work())


def test_of_a_topic_only_the_partition_is_restored_that_is_lost() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await broker.partitions.create("clicks", 2, TopicSettings(), exist_ok=False)
            async with AsyncProducer(broker.address) as producer:
                for number in range(2 * BATCHES):
                    await (await producer.send("clicks", b"%d" % number, partition=number % 2))
            queue = MemoryQueue(SystemClock())
            intact, lost = read_partitions(topic)
            await queue.create([intact, lost], 1 << 53)
            for entry in await broker.services.queue.read(intact, 0, 1 << 20):
                pointer = decode_pointer(entry.body)
                await queue.publish(Publication(intact, 0, pointer.epoch, entry.time_ms, entry.body))
            before = await queue.read(intact, 0, 1 << 20)
            report = await restore(broker, queue, topic)
            assert (report.intact, report.records, report.findings) == (1, BATCHES, [])
            assert await queue.read(intact, 0, 1 << 20) == before
            found = [decode_pointer(entry.body) for entry in await queue.read(lost, 0, 1 << 20)]
            assert sum(pointer.records for pointer in found) == BATCHES

    run(work())


@pytest.mark.parametrize("shared", [False, True])
def test_a_store_that_does_not_answer_ends_a_restore_and_is_no_fault_of_an_object(shared: bool) -> None:
    """Else the batch would be left out, and what owners publish then would lie before it for ever."""

    class Silent(MemoryHandler):
        async def get(self, key: str, *, checked: bool = True) -> bytes:
            raise StoreError("it does not answer")

        async def get_range(self, key: str, offset: int, length: int) -> bytes:
            raise StoreError("it does not answer")

    async def work() -> None:
        clock = skipping_runtime().clock
        store, queue = Silent(clock), MemoryQueue(clock)
        topic = msgspec.structs.replace(TOPIC, settings=TopicSettings(shared_objects=shared))
        own = object_key("memq", topic.name, topic.id, 0, 4, 6, 2_006)
        await store.put(f"{shared_prefix('memq')}one" if shared else own, [SHARED], crc32c(SHARED))
        with pytest.raises(StoreError):
            await Restorer("memq", "main", store, queue, clock).restore(topic)

    run_skipping(work())


def test_names_and_staged_batches_are_remembered_by_who_opens_the_new_queue() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            async with AsyncProducer(broker.address, name="job") as producer:
                for number in range(3):
                    await (await producer.send("clicks", b"%d" % number))
            await stage(broker, topic, [b"x", b"yy"], batch_id=7)
            before = await batch_pointers(broker.services.queue, topic)
            queue = MemoryQueue(SystemClock())
            report = await restore(broker, queue, topic)
            assert report.findings == []
            found = await batch_pointers(queue, topic)
            assert [pointer.records for pointer in found] == [pointer.records for pointer in before]
            assert found[-1].locations == before[-1].locations
            assert found[-1].checksum == before[-1].checksum
            assert (await restore(broker, queue, topic)).held == len(before)
            own = await open_partition(replace(broker.services, queue=queue), topic, 0, read_partitions(topic)[0])
            job, writer = own.named.get(producer_id_of("job")), own.named.get(writer_id("nightly"))
            assert job is not None
            assert writer is not None
            assert (job.epoch, job.last_sequence) == (INSTANCES_PER_EPOCH + 1, 3)
            assert (writer.batch_id, writer.last_sequence, writer.pieces) == ("7", 1, 1)

    run(work())


def test_the_queue_times_of_staged_batches_continue_those_before_them() -> None:
    """They come behind the other batches, however early they were committed: a seek by time needs that order."""

    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            await stage(broker, topic, [b"x"], batch_id=7)
            async with AsyncProducer(broker.address) as producer:
                await (await producer.send("clicks", b"later"))
            queue = MemoryQueue(SystemClock())
            await restore(broker, queue, topic)
            entries = await queue.read(read_partitions(topic)[0], 0, 1 << 20)
            assert decode_pointer(entries[-1].body).named, "the staged one is the last"
            assert [entry.time_ms for entry in entries] == sorted(entry.time_ms for entry in entries)

    run(work())


@pytest.mark.parametrize("first", [0, 1_000])  # of a log whose entries all went, and of a new one
def test_groups_begin_at_the_beginning_of_a_log_that_was_restored_and_keep_their_positions_in_others(
    first: int,
) -> None:
    """Offsets of the lost log are other ones: the log had pointers without records, too."""

    async def work() -> None:
        async with running_broker() as broker:
            topic, queue = await fill(broker), broker.services.queue
            (partition,) = read_partitions(topic)
            other = ReadPartition("others", "0" * 32, 0)
            await queue.create([other], 30_000)
            kept = Committed(Position(0, BATCHES, 1), Totals(13, 100))
            await queue.former.store("billing", {partition: kept, other: kept})
            await queue.former.store("audit", {other: kept})
            assert (await restore(broker, queue, topic)).groups == []
            assert (await queue.former.read("billing")).committed[partition] == kept, "its log is in use"
            log = queue.log(partition)  # type: ignore[attr-defined]  # the memory queue
            log.entries.clear()
            log.begin = first
            assert (await restore(broker, queue, topic, dry_run=True)).groups == []
            assert (await restore(broker, queue, topic)).groups == ["billing"]
            begin = Committed(Position(0, first), Totals())
            assert (await queue.former.read("billing")).committed == {partition: begin, other: kept}
            assert (await restore(broker, queue, topic)).groups == []
            assert len(await batch_pointers(queue, topic)) == BATCHES

    run(work())


def test_staged_objects_that_nobody_committed_are_not_restored() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            topic = await fill(broker)
            await stage(broker, topic, [b"never"], batch_id=None)
            queue = MemoryQueue(SystemClock())
            assert (await restore(broker, queue, topic)).pointers == BATCHES

    run(work())


async def stage(broker: Broker, topic: Topic, values: list[bytes], batch_id: int | None) -> None:
    """Stage values, and commit them as a batch, if it has an id."""
    store = broker.services.store
    async with StagedCommits(broker.address, "nightly") as commits:
        await commits.topics([topic.name])
        writer = StagedWriter(commits.cluster, {topic.name: topic}, store, "nightly")
        for value in values:
            await writer.add(topic.name, value)
        objects = await writer.finish()
        if batch_id is not None:
            await commits.commit(batch_id, objects, store)


def test_a_restore_remembers_the_blocks_of_one_window_in_every_partition() -> None:
    """Behind the end of one partition nothing was forgotten, until the next one had reached its time."""
    count, clock = 100, SystemClock()
    held: list[int] = []

    def moved(number: int) -> None:
        traces = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, rebuild.__file__)])
        held.append(sum(each.count for each in traces.statistics("filename")))

    async def work() -> None:
        store, window_ms = MemoryHandler(clock), TOPIC.settings.dedup_window_ms
        for partition in range(2):
            for sequence in range(count):
                at_ms = (1 + sequence) * 3 * window_ms
                entry = batch(sequence, partition=partition)._replace(appended_ms=at_ms)
                data = joined((entry, [block(sequence, [b"a"], partition=partition)]))
                key = object_key("c-1", TOPIC.name, TOPIC.id, partition, 4, sequence, at_ms)
                await store.put(key, [data], crc32c(data))
        report = await Restorer("c-1", "main", store, MemoryQueue(clock), clock, moved=moved).restore(TOPIC)
        assert report.pointers == 2 * count

    tracemalloc.start()
    try:
        run(work())
    finally:
        tracemalloc.stop()
    assert max(held[count:]) < 2 * max(held[:count])
