"""A restore's reads of large and shared objects: their batches, and unreadable ones."""

from __future__ import annotations

import asyncio

import pytest
from awscrt.checksums import crc32c
from msgspec.structs import replace

from memq.broker.restore.compacted_batches import compacted_batches, locations_below
from memq.broker.restore.restore import Restorer
from memq.client.bulk.staged_object import StagedObjectBuilder
from memq.client.producer.fields import check_fields
from memq.compaction.reader import ManifestFiles
from memq.errors import StoreError
from memq.format.compaction_manifest import CompactionManifest, LeftPart, PartRef
from memq.format.key import compaction_prefix, manifest_key, staged_object_key
from memq.format.pointer import Location, Pointer, ProducerRanges, decode_pointer
from memq.format.staged_manifest import Manifest, StagedObject, StagedPiece, encode_manifest
from memq.notification.log_reader import all_entries
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import Topic, equal_slots, read_partitions
from tests.compaction import DAY_MS
from tests.skipping_loop import run_skipping
from tests.unit.bare_cluster import CLUSTER, Cluster, indexed, newer, topic_of
from tests.unit.compaction_world import NAMED, OLD, STORE, WRITER, YOUNG, KillingQueue, World
from tests.unit.compaction_world import PARTITION as LOG_PARTITION
from tests.unit.compaction_world import TOPIC as LOG_TOPIC

TOPIC = topic_of("clicks", 2)
OTHER = topic_of("views")


def test_the_batches_below_a_prefix_are_found_by_topic_and_unreadable_indexes_are_named() -> None:
    async def work() -> None:
        cluster, moved = Cluster(), list[int]()
        await cluster.put("p/a", indexed(TOPIC, 1, epoch=4, number=2))
        await cluster.put("p/b", newer(indexed(TOPIC, 0)))
        await cluster.put("p/c", indexed(OTHER, 0)[:-5])
        await cluster.put("p/d", indexed(OTHER, 0))
        await cluster.put("q/e", indexed(TOPIC, 0))
        findings: list[tuple[str, str]] = []
        found = await locations_below(cluster.store, "p/", findings, moved.append)
        assert {topic.id: [location.key for location in locations] for topic, locations in found.items()} == {
            TOPIC.id: ["p/a"],
            OTHER.id: ["p/d"],
        }
        assert [key for key, _ in findings] == ["p/b", "p/c"]
        assert all(text for _, text in findings)
        assert moved == [1, 1, 1, 1]

    asyncio.run(work())


def test_a_manifest_that_can_not_be_read_is_named_and_the_others_count() -> None:
    async def work() -> None:
        cluster = Cluster()
        files = ManifestFiles(CLUSTER, cluster.store)
        first, _ = read_partitions(TOPIC)
        prefix = f"{compaction_prefix(CLUSTER, TOPIC.name, TOPIC.id)}objects/"
        await cluster.put(f"{prefix}a", indexed(TOPIC, 1))
        await cluster.put(files.manifest_key(first, 1), b"no manifest")
        batches = await compacted_batches(CLUSTER, cluster.store, TOPIC)
        assert [location.key for location in batches.locations] == [f"{prefix}a"]
        ((key, text),) = batches.findings
        assert key == files.manifest_key(first, 0)
        assert text.startswith("compacted part of partition 0: ")

    asyncio.run(work())


def test_deleted_parts_are_confirmed_at_once() -> None:
    """Each takes 0.2 s to confirm, and a topic may have left thousands."""

    async def work() -> None:
        cluster, loop = Cluster(), asyncio.get_running_loop()
        files, facts = ManifestFiles(CLUSTER, cluster.store), {"entries": 1, "bytes": 1, "greatest_ms": 1}
        for partition in read_partitions(TOPIC):
            left = tuple(
                LeftPart(part=PartRef(key=f"p/{n}", first=n, next=n + 1, created_ms=1, objects=(), **facts), since_ms=1)
                for n in range(20)
            )
            manifest = CompactionManifest(
                number=1,
                cluster=CLUSTER,
                topic=TOPIC.name,
                topic_id=TOPIC.id,
                partition=partition.partition,
                left=left,
            )
            assert await files.publish(manifest)
        begun_s = loop.time()
        assert (await compacted_batches(CLUSTER, cluster.store, TOPIC)).findings == []
        assert loop.time() - begun_s < 2

    run_skipping(work())


# ---- staged batches ------------------------------------------------------------------------------


async def stage(world: World, batch_id: int) -> None:
    """Store the manifest of a batch that a writer has staged in an object, which is not there."""
    facts = {"topic": LOG_TOPIC.name, "topic_id": LOG_TOPIC.id, "partition": 0}
    piece = StagedPiece(**facts, offset=0, length=100, records=3, raw_bytes=100)  # type: ignore[arg-type]
    staged = StagedObject(key=f"staged-{batch_id}", bytes=500, index_offset=100, pieces=(piece,))
    manifest = Manifest(cluster=CLUSTER, writer=WRITER, batch_id=batch_id, store=STORE, created_ms=1, objects=(staged,))
    body = encode_manifest(manifest)
    await MemoryHandler.put(world.store, manifest_key(CLUSTER, WRITER, batch_id), [body], crc32c(body))


@pytest.mark.parametrize(
    ("batches", "missing"), [((7,), []), ((8,), ["staged-8"]), ((7, 8), ["staged-8"])], ids=["7", "8", "both"]
)
def test_a_restore_looks_for_staged_batches_where_compaction_has_left_them(
    batches: tuple[int, ...], missing: list[str]
) -> None:
    async def work() -> None:
        world = await World.made()
        await world.compact()
        for batch_id in batches:
            await stage(world, batch_id)
        restorer = Restorer(CLUSTER, STORE, world.store, KillingQueue(world.clock, world.steps), world.clock)
        report = await restorer.restore(LOG_TOPIC)
        assert report.records == 3 * (OLD + YOUNG)
        assert [key for key, _ in report.findings] == missing

    asyncio.run(work())


async def pointers_of(queue: KillingQueue) -> list[Pointer]:
    pages = [entries async for entries in all_entries(queue, LOG_PARTITION)]
    return [decode_pointer(entry.body) for entries in pages for entry in entries]


async def made_of_staged(topic: Topic, *, named: bool, producer: bool) -> World:
    """Return a log that begins with a staged batch of 3 records for each partition, compacted in the first only."""
    world = World()
    await world.queue.create([LOG_PARTITION], topic.settings.stale_publish_ms)
    old_ms = world.clock.wall_ms() - 3 * DAY_MS
    await world.publish(old_ms, kind="opened")
    builder = StagedObjectBuilder({topic.name: topic}, 99, block_bytes=1_000, codec="none")
    for partition in (0, 1):
        for value in (b"a", b"b", b"c"):
            builder.add(topic.name, check_fields(value, None, None, None, None), partition, old_ms)
    key = staged_object_key(CLUSTER, WRITER, 1, old_ms)
    buffers, checksum, staged = builder.build(CLUSTER, WRITER, key, old_ms)
    await MemoryHandler.put(world.store, key, buffers, checksum)
    (piece, _) = staged.pieces
    body = await MemoryHandler.get_range(world.store, key, piece.offset, piece.length)
    location = Location(store=STORE, key=key, offset=piece.offset, length=piece.length, index=staged.index_offset)
    await world.publish(
        old_ms,
        kind="data",
        batch_sequence=0,
        locations=(location,),
        records=piece.records,
        stored_bytes=piece.length,
        producers=(ProducerRanges(99, ((0, 3),)),),
        checksum=crc32c(body),
        sealed_ms=old_ms,
        named=NAMED if named else (),
    )
    for number in range(4, OLD):  # 3 would name the writer
        await world.batch(number, old_ms + number * 60_000)
    for number in range(OLD, OLD + YOUNG):
        await world.batch(number, world.clock.wall_ms() - 1_000)
    objects = (staged if producer else replace(staged, producer="0" * 16),)
    manifest = Manifest(cluster=CLUSTER, writer=WRITER, batch_id=7, store=STORE, created_ms=old_ms, objects=objects)
    packed = encode_manifest(manifest)
    await MemoryHandler.put(world.store, manifest_key(CLUSTER, WRITER, 7), [packed], crc32c(packed))
    assert await world.compact()
    return world


@pytest.mark.parametrize(("named", "producer"), [(True, True), (True, False), (False, True)])
def test_of_a_staged_batch_each_partition_is_restored_once_however_often(named: bool, producer: bool) -> None:
    """One partition of it was compacted, the other was not; its writer may not be remembered."""

    async def work() -> None:
        topic = replace(LOG_TOPIC, partitions=equal_slots(2))
        world = await made_of_staged(topic, named=named, producer=producer)
        new = KillingQueue(world.clock, world.steps)
        for records in (3 * (OLD + YOUNG - 4) + 2 * 3, 0):
            report = await Restorer(CLUSTER, STORE, world.store, new, world.clock).restore(topic)
            assert (report.records, report.findings) == (records, [])
        found = await pointers_of(new)
        assert [len(pointer.named) for pointer in found] == [1] + [0] * (len(found) - 1)
        assert found[0].named[0].batch_id == "7", "a commit of it that is repeated publishes nothing"

    asyncio.run(work())


def test_a_restore_that_was_killed_before_its_queue_was_there_is_repeated_with_all_facts() -> None:
    """The manifests are retired by then, and the sweep may have taken what was staged."""

    async def work() -> None:
        world = await World.made()
        await world.compact()
        for _ in range(2):
            new = KillingQueue(world.clock, world.steps)
            await Restorer(CLUSTER, STORE, world.store, new, world.clock).restore(LOG_TOPIC)
            found = await pointers_of(new)
            assert [pointer.named for pointer in found if pointer.named] == [NAMED]
        for key in [key for key in world.store.objects if "/cold/parts/" in key]:
            del world.store.objects[key]  # the sweep takes what was left
        last = Restorer(CLUSTER, STORE, world.store, KillingQueue(world.clock, world.steps), world.clock)
        report = await last.restore(LOG_TOPIC)
        assert report.findings == []

    asyncio.run(work())


def test_a_staged_object_that_the_store_does_not_give_now_ends_a_restore() -> None:
    async def work() -> None:
        world = await World.made()
        await stage(world, 8)
        read = world.store.get_range

        async def sick(key: str, offset: int, length: int) -> bytes:
            if key == "staged-8":
                raise StoreError("it does not answer")
            return await read(key, offset, length)

        world.store.get_range = sick  # type: ignore[method-assign]
        new = KillingQueue(world.clock, world.steps)
        with pytest.raises(StoreError, match="it does not answer"):
            await Restorer(CLUSTER, STORE, world.store, new, world.clock).restore(LOG_TOPIC)

    asyncio.run(work())
