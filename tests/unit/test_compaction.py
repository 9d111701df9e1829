"""Compaction killed at every step, raced and swept: the log stays whole, and in the end only large objects are left."""

from __future__ import annotations

import asyncio

import pytest

from memq.broker.restore.restore import Restorer
from memq.broker.upkeep.retention import expired_parts
from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.compaction.compaction import leave_queue, manifest_of
from memq.compaction.plan import following, without
from memq.compaction.reader import CompactedLogReader
from memq.errors import DeniedError, InvalidRequestError, MemqError, NotReadyError
from memq.format.pointer import decode_pointer
from memq.notification import Entry, Publication
from memq.notification.log_reader import all_entries
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.storage_handlers.confirmed_reads import ConfirmedReads
from memq.topic import TopicSettings
from tests.compaction import DAY_MS, SWEEP_AGE_MS, parts_on
from tests.simulation.bug import Planted, after, omit, swap
from tests.simulation.planted_bugs import plant
from tests.unit.compaction_world import (
    CLUSTER,
    OLD,
    PARTITION,
    RULE,
    STORE,
    TOPIC,
    YOUNG,
    KilledError,
    KillingQueue,
    World,
    nothing,
    replace_rule,
)


def test_old_batches_move_into_large_objects_and_nobody_sees_a_difference() -> None:
    async def work() -> None:
        world = await World.made()
        early = world.reader()
        await world.check(early)
        objects = await world.compact()
        assert objects > 2
        span = await world.queue.span(PARTITION)
        assert span.begin == OLD + 2, "what is young stays in the queue"
        for bytes_max in (1, 3_000, 1 << 20):
            await world.check(bytes_max=bytes_max)
            await world.check(early, bytes_max)
        assert await world.compact() == 0, "nothing is left to do"
        assert len(world.keys(large=True)) == objects

    asyncio.run(work())


def test_times_are_found_on_both_sides_of_the_seam() -> None:
    async def work() -> None:
        world = await World.made()
        times = [each.time_ms for each, _, _ in world.expected]
        asked = sorted({at for time in times for at in (time - 1, time, time + 1)})
        before = [await world.reader().seek_time(PARTITION, at) for at in asked]
        await world.compact()
        assert [await world.reader().seek_time(PARTITION, at) for at in asked] == before

    asyncio.run(work())


def test_only_whole_objects_are_made_unless_the_rest_is_asked_for() -> None:
    async def work() -> None:
        world = await World.made()
        assert await world.compact(replace_rule(rest=False, object_bytes=1 << 20)) == 0
        some = await world.compact(replace_rule(rest=False))
        assert some > 2
        begin = (await world.queue.span(PARTITION)).begin
        assert begin < OLD + 2
        assert await world.compact() == 1
        await world.check()

    asyncio.run(work())


async def killed_everywhere() -> None:
    """Kill a compaction at each of its steps; readers, sweeps and the next compaction find all."""
    fatal = 0
    while True:
        fatal += 1
        world = await World.made()
        early = world.reader()
        await world.check(early)
        world.steps.fatal = fatal
        try:
            await world.compact()
        except KilledError:
            pass
        else:
            break
        await world.check()
        await world.check(early)
        await world.sweep()
        await world.check()
        assert await world.compact() >= 0
        await world.check()
        await world.sweep()
        await world.check()
        assert len(world.keys(large=False)) == YOUNG, "the originals are still there"
        assert await world.sweep() == 0
    assert fatal > 20


async def grown() -> None:
    """Compact again and again under a reader that was there before."""
    world = await World.made()
    reader = world.reader()
    for rule in (replace_rule(rest=False, object_bytes=5_000), RULE):
        await world.check(reader)
        assert await world.compact(rule) > 0
    await world.check(reader)


async def all_of_it() -> None:
    await grown()
    await killed_everywhere()


def test_a_compaction_killed_at_any_step_leaves_a_whole_log() -> None:
    asyncio.run(killed_everywhere())


def test_a_reader_follows_one_compaction_after_another() -> None:
    asyncio.run(grown())


BUGS = (
    Planted(
        "pointers leave the queue before their manifest",
        "memq.compaction.compaction",
        "compact",
        after("copier.copy", "await queue.trim(partition, span.end)"),
    ),
    Planted(
        "large object behind its manifest",
        "memq.compaction.compaction",
        "BatchCopier.copy",
        omit("self._store.put"),
    ),
    Planted(
        "sweep takes what manifests name",
        "memq.broker.sweep.sweep",
        "Sweep._compaction_keys",
        swap("part.objects", "()"),
    ),
    Planted(
        "sweep takes parts",
        "memq.broker.sweep.sweep",
        "Sweep._compaction_keys",
        swap("(part.key, *part.objects)", "part.objects"),
    ),
    Planted(
        "reader takes the queue for all there is",
        "memq.compaction.reader",
        "CompactedLogReader._manifest",
        swap("known is None or not known.suffices(begin, self._clock.monotonic())", "known is None"),
    ),
    Planted(
        "batches named a byte off",
        "memq.compaction.compaction",
        "_LargeObject.add",
        swap("return start", "return start + 1"),
    ),
    Planted(
        "seam one too far", "memq.compaction.compaction", "following", swap("parts[-1].next", "parts[-1].next + 1")
    ),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Planted) -> None:
    with plant(bug), pytest.raises((AssertionError, MemqError)):
        asyncio.run(all_of_it())


def test_of_two_compactions_at_once_one_wins_and_the_other_continues_from_there() -> None:
    async def work() -> None:
        world = await World.made()
        others: list[int] = []

        async def putting(key: str) -> None:
            if "/manifests/" in key and not others:
                others.append(-1)
                others[0] = await world.compact()

        world.store.putting = putting
        assert await world.compact() == 0, "the other one has done all"
        assert others[0] > 2
        await world.check()
        await world.sweep()
        assert len(world.keys(large=True)) == others[0], "what the loser copied is swept"
        await world.check()

    asyncio.run(work())


def test_a_number_that_was_swept_is_not_won_by_a_compaction_that_slept() -> None:
    async def work() -> None:
        world = await World.made()
        files = world.parts().files
        await world.compact(replace_rule(rest=False))
        slept = following(await manifest_of(files, PARTITION), ())
        await world.compact()
        assert await files.publish(following(await manifest_of(files, PARTITION), ()))
        await world.sweep()
        key = files.manifest_key(PARTITION, slept.number)
        assert key not in world.store.objects
        highest = await files.highest(PARTITION)
        assert highest is not None
        assert not await files.publish(slept)
        assert key in world.store.objects, "its put succeeds"
        assert await files.highest(PARTITION) == highest
        await world.check()

    asyncio.run(work())


def test_parts_copied_too_long_ago_are_not_named() -> None:
    async def work() -> None:
        world = await World.made()

        async def putting(key: str) -> None:
            if "/parts/" in key:
                world.clock.advance(SWEEP_AGE_MS // 2)

        world.store.putting = putting
        with pytest.raises(NotReadyError, match="fewer objects"):
            await world.compact()
        world.store.putting = nothing
        made = await world.compact()
        assert len(world.keys(large=True)) > made, "those of the first try are there, too"
        await world.sweep()
        assert len(world.keys(large=True)) == made
        await world.check()

    asyncio.run(work())


def test_a_damaged_batch_stays_as_it_is_and_is_reported() -> None:
    async def work() -> None:
        world = await World.made()
        (_, pointer, body) = world.expected[5]
        key = pointer.locations[0].key
        data = bytearray(world.store.objects[key])
        data[len(body) // 2] ^= 1
        world.store.objects[key] = bytes(data)
        done = await world.parts().compact(PARTITION, TOPIC.settings, RULE)
        assert [found for each in done for found, _ in each.findings] == [key]
        entries = await world.reader().read(PARTITION, 5, 1)
        assert decode_pointer(entries[0].body) == pointer
        await world.sweep()
        assert key in world.store.objects, "the manifest names it where it lies"

    asyncio.run(work())


def test_a_store_of_another_cluster_is_refused() -> None:
    async def work() -> None:
        world = await World.made()
        parts = parts_on(world.queue, world.store, world.runtime, "other")
        with pytest.raises(InvalidRequestError, match="of cluster 'memq', not of 'other'"):
            await parts.compact(PARTITION, TOPIC.settings, RULE)

    asyncio.run(work())


def test_originals_stay_for_the_safety_age_since_readers_may_be_at_them() -> None:
    async def work() -> None:
        world = await World.made()
        await world.compact()
        assert await world.sweep(later_ms=SWEEP_AGE_MS // 2) == 0
        assert len(world.keys(large=False)) == OLD + YOUNG
        assert await world.sweep(later_ms=SWEEP_AGE_MS) == OLD
        await world.check()

    asyncio.run(work())


def test_retention_of_a_compacted_part_removes_its_front_after_the_safety_age() -> None:
    async def work() -> None:
        world = await World.made()
        reader = world.reader()
        await world.compact()
        await world.sweep()
        await world.check(reader)
        files = world.parts().files
        manifest = await manifest_of(files, PARTITION)
        now_ms = world.clock.wall_ms()
        age_ms = now_ms - manifest.parts[1].greatest_ms
        for settings, count in (
            (TopicSettings(retention_ms=age_ms), 1),
            (TopicSettings(retention_ms=age_ms - 1), 2),
            (TopicSettings(retention_ms=0), 0),
            (TopicSettings(retention_ms=0, retention_bytes=sum(part.bytes for part in manifest.parts[2:])), 2),
            (TopicSettings(retention_ms=0, retention_bytes=1), len(manifest.parts) - 1),
        ):
            assert expired_parts(manifest, 0, settings, now_ms) == count
        assert expired_parts(manifest, 1, TopicSettings(retention_ms=0, retention_bytes=1), now_ms) == len(
            manifest.parts
        )
        assert await files.publish(without(manifest, 2, now_ms, SWEEP_AGE_MS))
        begin = manifest.parts[2].first
        assert (await world.reader().span(PARTITION)).begin == begin
        assert (await reader.read(PARTITION, 0, 1))[0].offset == 0, "it has not looked since"
        assert await world.sweep(later_ms=SWEEP_AGE_MS // 2) == 0, "the first manifest stays"
        assert (await reader.read(PARTITION, 0, 1))[0].offset == begin
        assert await world.sweep(later_ms=SWEEP_AGE_MS) == 2 * 2, "two objects with their parts"
        assert (await reader.read(PARTITION, begin, 1))[0].offset == begin

    asyncio.run(work())


def test_a_queue_that_still_has_what_a_manifest_has_lets_go_of_it() -> None:
    async def work() -> None:
        world = await World.made()
        await world.compact()
        manifest = await manifest_of(world.parts().files, PARTITION)
        await leave_queue(world.queue, world.parts().files, PARTITION, manifest)
        assert (await world.queue.span(PARTITION)).begin == manifest.next

    asyncio.run(work())


def test_pointers_of_a_batch_that_landed_again_behind_the_compacted_ones_lose_no_batch() -> None:
    """The batches between the two pointers are not reported as lost, and the sweep deletes their old objects."""

    async def work() -> None:
        world = await World.made()
        first, pointer, body = next(each for each in world.expected if each[1].batch_sequence == OLD - 2)
        offset = await world.queue.publish(Publication(PARTITION, 0, 1, first.time_ms, first.body))
        world.expected.append((Entry(offset, first.time_ms, first.body), pointer, body))
        await world.batch(OLD + YOUNG, world.clock.wall_ms())
        await world.compact()
        assert (await world.queue.span(PARTITION)).begin == first.offset
        assert await world.sweep() == OLD - 2, "the queue still has the pointers from the first of the two on"
        await world.check()
        world.clock.advance(2 * DAY_MS)
        await world.publish(world.clock.wall_ms(), kind="opened")
        await world.compact()
        assert (await world.queue.span(PARTITION)).begin > offset
        await world.sweep()
        assert world.keys(large=False) == []
        await world.check()

    asyncio.run(work())


def test_a_restore_names_what_lies_in_large_objects_once_and_the_old_manifests_hold_no_more() -> None:
    async def work(*, swept: bool) -> None:
        world = await World.made()
        objects = await world.compact()
        if swept:
            await world.sweep()
        new = KillingQueue(world.clock, world.steps)
        restorer = Restorer(CLUSTER, STORE, world.store, new, world.clock)
        report = await restorer.restore(TOPIC)
        assert (report.findings, report.records, report.copies) == ([], 3 * (OLD + YOUNG), 0 if swept else OLD)
        entries = await new.read(PARTITION, 0, 1 << 20)
        pointers = [decode_pointer(entry.body) for entry in entries]
        data = [(pointer, body) for _, pointer, body in world.expected if body]
        for found, (pointer, body) in zip(pointers, data, strict=True):
            assert (found.batch_sequence, found.records, found.producers, found.named) == (
                (pointer.batch_sequence, pointer.records, pointer.producers, pointer.named)
            )
            (location,) = found.locations
            assert await world.store.get_range(location.key, location.offset, location.length) == body
        assert await CompactedLogReader(new, world.parts().files, world.clock).read(PARTITION, 0, 1 << 20) == entries
        assert (await restorer.restore(TOPIC)).held == len(entries)
        world.queue = new
        world.expected = [(entry, each, body) for entry, each, (_, body) in zip(entries, pointers, data, strict=True)]
        await world.sweep()
        await world.check()
        await world.compact()
        await world.check()
        assert len(world.keys(large=True)) == objects, "what lies in large objects stays there"

    for swept in (False, True):
        asyncio.run(work(swept=swept))


@pytest.mark.parametrize("indexes_kept", [1, 4])
def test_neighbours_in_a_large_object_are_fetched_by_one_request(
    indexes_kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memq.client.consumer.fetch.fetcher.INDEXES_MAX", indexes_kept)

    async def work() -> None:
        world = await World.made()
        objects = await world.compact()
        await world.sweep()
        fetcher = BatchFetcher("direct", no_broker, lambda name: world.store, ConfirmedReads(EventLog(SystemClock())))
        entries = [entry async for page in all_entries(world.reader(), PARTITION) for entry in page]
        pointers = [decode_pointer(entry.body) for entry in entries]
        batches = [pointer for pointer in pointers if pointer.kind == "data"]
        world.store.reads = 0
        found = await asyncio.gather(*(fetcher.fetch(pointer) for pointer in batches))
        assert [b"".join(piece.data for piece in pieces) for pieces in found] == [
            body for _, _, body in world.expected if body
        ]
        assert world.store.reads == objects + YOUNG
        world.store.reads = 0
        for pointer in batches:
            await fetcher.index_of(pointer)
        assert world.store.reads == 2 * (objects + YOUNG), "the index of a large object is read once"

    asyncio.run(work())


async def no_broker(store: str, key: str, offset: int, length: int) -> bytes:
    raise AssertionError("it reads straight from the store")


def test_reader_without_the_right_to_list_uses_the_queue_alone() -> None:
    async def work() -> None:
        world = await World.made()
        await world.queue.trim(PARTITION, 4)  # as retention does
        world.store.denied = True
        reader = world.reader()
        assert (await reader.span(PARTITION)).begin == 4
        assert (await reader.read(PARTITION, 0, 1))[0].offset == 4
        assert await reader.seek_time(PARTITION, 0) == 4
        with pytest.raises(DeniedError):
            await world.compact()
        assert not world.keys(large=True)

    asyncio.run(work())
