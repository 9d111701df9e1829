"""Retention that was faster than a compaction: what it took is gone, though a manifest names it. Parts in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest
from awscrt.checksums import crc32c

from memq.compaction.compaction import manifest_of
from memq.compaction.plan import spans_to_compact
from memq.compaction.reader import ManifestFiles
from memq.errors import NotReadyError
from memq.format.compaction_manifest import ManifestEntry, ManifestPart, PartRef, encode_manifest_part
from memq.format.object import open_object
from memq.notification import Span
from memq.storage_handlers import ObjectEntry
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import ReadPartition
from tests.contract.manual_clock import ManualClock
from tests.skipping_loop import run_skipping
from tests.unit.compaction_world import ID, OLD, PARTITION, RULE, TOPIC, World, manifest, ref, replace_rule

CLICKS = ReadPartition("clicks", ID, 1)
TIMES = {"greatest_ms": 1_700_000_000_000, "created_ms": 1_700_000_000_000}


class CountingStore(MemoryHandler):
    """Notes each object that is read as a whole."""

    def __init__(self) -> None:
        super().__init__(ManualClock())
        self.gets: list[str] = []

    async def get(self, key: str, *, checked: bool = True) -> bytes:
        self.gets.append(key)
        return await super().get(key, checked=checked)


@pytest.mark.parametrize(("bytes_max", "read"), [(250, "abacab"), (150, "ababbc"), (50, "aab")])
def test_the_parts_that_were_read_last_are_kept_as_far_as_they_fit(
    bytes_max: int, read: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memq.compaction.reader.PARTS_BYTES_MAX", bytes_max)
    kept: list[str] = []
    missed: list[str] = []
    for each in read:
        missed += [] if each in kept else [each]
        kept = [*(name for name in kept if name != each), each][-max(1, bytes_max // 100) :]

    async def work() -> None:
        store = CountingStore()
        files = ManifestFiles("memq", store)
        for name in "abc":
            data = encode_manifest_part(ManifestPart((ManifestEntry(0, 0, bytes(100)),), ("o",)))
            await store.put(name, [data], crc32c(data))
        for name in read:
            part = await files.part(PartRef(key=name, first=0, next=1, entries=1, bytes=100, objects=("o",), **TIMES))
            assert part.entries[0].body == bytes(100)
        assert store.gets == missed

    asyncio.run(work())


class SweptStore(MemoryHandler):
    """When the first manifest is read, a successor has come, and a sweep has taken the first one."""

    def __init__(self, files: Callable[[MemoryHandler], ManifestFiles]) -> None:
        super().__init__(ManualClock())
        self.files = files(self)
        self.listed = 0

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectEntry]:
        self.listed += 1
        async for entry in super().list(prefix):
            yield entry

    async def get(self, key: str, *, checked: bool = True) -> bytes:
        if self.objects.pop(self.files.manifest_key(CLICKS, 1), None) is not None:
            await self.files.publish(manifest(ref(3, 9), ref(9, 12), number=2))
        return await super().get(key, checked=checked)


def test_a_manifest_that_was_swept_before_it_was_read_has_a_successor() -> None:
    async def work() -> None:
        store = SweptStore(partial(ManifestFiles, "c"))
        assert await store.files.publish(manifest(ref(3, 9), number=1))
        found = await store.files.highest(CLICKS)
        assert found is not None
        assert (found.number, found.next) == (2, 12)
        assert await store.files.partitions("clicks", ID) == [1]

    run_skipping(work())


def omit_once(store: MemoryHandler) -> None:
    """Let the next listing of a store be empty."""
    walk = store.list

    async def nothing(prefix: str = "") -> AsyncIterator[ObjectEntry]:
        store.list = walk  # type: ignore[method-assign]  # one wrong answer
        async for entry in walk("another-prefix/"):
            yield entry

    store.list = nothing  # type: ignore[method-assign]


def test_a_listing_that_omits_the_manifest_hides_no_compacted_pointers() -> None:
    async def work() -> None:
        world = await World.made()
        begin = (await world.queue.span(PARTITION)).begin
        await world.compact()
        assert (await world.queue.span(PARTITION)).begin > begin
        reader = world.reader()
        omit_once(world.store)
        assert (await reader.span(PARTITION)).begin == begin
        world.clock.advance(60_000)
        omit_once(world.store)
        found = await reader.manifest(PARTITION, begin, 30.0)
        assert found is not None, "the one that was known is there"
        assert (await reader.read(PARTITION, begin, 1))[0].offset == begin

    asyncio.run(work())


def omit_always(store: MemoryHandler) -> list[str]:
    """Let all listings of a store be empty; return the prefixes, as they are listed."""
    walk, listed = store.list, list[str]()

    async def nothing(prefix: str = "") -> AsyncIterator[ObjectEntry]:
        listed.append(prefix)
        async for entry in walk("another-prefix/"):
            yield entry

    store.list = nothing  # type: ignore[method-assign]
    return listed


def test_listings_that_always_omit_the_only_manifest_hide_nothing() -> None:
    """The two listings of one moment are no two witnesses: a store may omit a new key for seconds."""

    async def work() -> None:
        world = await World.made()
        begin = (await world.queue.span(PARTITION)).begin
        await world.compact()
        listed = omit_always(world.store)
        assert (await world.reader().span(PARTITION)).begin == begin
        assert listed

    asyncio.run(work())


def test_the_number_after_a_listed_manifest_is_read_by_its_key() -> None:
    async def work() -> None:
        store = MemoryHandler(ManualClock())
        files = ManifestFiles("c", store)
        for number in (1, 2, 3):
            assert await files.publish(manifest(ref(3, 9 + number), number=number))
        known = await files.highest(CLICKS)
        assert known is not None
        assert known.number == 3
        assert await files.publish(manifest(ref(3, 13), number=4))
        del store.objects[files.manifest_key(CLICKS, 2)]  # a sweep
        omit_always(store)
        following = await files.highest(CLICKS, known)
        assert following is not None
        assert following.number == 4
        first = await files.highest(CLICKS)
        assert first is not None
        assert first.number == 1, "it proves that there are manifests"

    asyncio.run(work())


def test_a_reader_from_whom_all_answers_hid_a_manifest_finds_it_later() -> None:
    """Its queue does not begin later meanwhile, so nothing else would let it ask again."""

    async def work() -> None:
        world = await World.made()
        begin = (await world.queue.span(PARTITION)).begin
        await world.compact()
        left = (await world.queue.span(PARTITION)).begin
        walk, manifests = world.store.list, [key for key in world.store.objects if "/manifests/" in key]
        hidden = {key: world.store.objects.pop(key) for key in manifests}
        listed = omit_always(world.store)
        reader = world.reader()
        for later_s, count in ((0, 1), (29, 1), (1, 2), (29, 2), (1, 3), (59, 3), (1, 4), (119, 4), (1, 5)):
            world.clock.advance(later_s * 1_000)
            assert (await reader.span(PARTITION)).begin == left
            assert len(listed) == count, "each repetition waits for as long as the partition was apart, 30 s at least"
        world.store.list = walk  # type: ignore[method-assign]
        world.store.objects.update(hidden)
        world.clock.advance(3_600_000)
        assert (await reader.span(PARTITION)).begin == begin
        assert (await reader.read(PARTITION, begin, 1))[0].offset == begin

    asyncio.run(work())


def test_a_manifest_is_looked_for_again_when_it_is_older_than_allowed() -> None:
    async def work() -> None:
        world = await World.made()
        await world.compact()
        listed: list[str] = []
        walk = world.store.list

        def noted(prefix: str = "") -> AsyncIterator[ObjectEntry]:
            listed.append(prefix)
            return walk(prefix)

        world.store.list = noted  # type: ignore[method-assign]  # to count
        reader = world.reader()
        for later_ms, count in ((0, 1), (0, 1), (59_000, 1), (1_000, 2), (0, 2)):
            world.clock.advance(later_ms)
            assert await reader.manifest(PARTITION, 0, 60.0) is not None
            assert len(listed) == count
        reader.forget(PARTITION)
        await reader.manifest(PARTITION, 0, 60.0)
        assert len(listed) == 3, "a newer one is known to be there"

    asyncio.run(work())


def test_a_large_object_has_at_most_as_many_blocks_as_its_index_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memq.compaction.compaction.COMPACTION_BLOCKS_MAX", 4)  # less than the bytes of any block

    async def work() -> None:
        world = await World.made()
        assert await world.compact() > 0
        await world.check()
        indexes = [open_object(world.store.objects[key]) for key in world.keys(large=True)]
        assert {len(index.blocks) for index in indexes} <= {3, 4}

    asyncio.run(work())


def test_readers_and_compaction_skip_parts_before_a_hole() -> None:
    async def work() -> None:
        world = await World.made()
        early = world.reader()
        await early.span(PARTITION)
        await world.compact(replace_rule(rest=False, object_bytes=5_000))
        files = world.parts().files
        island = await manifest_of(files, PARTITION)
        end = len(world.expected)
        first = island.next + 2
        assert island.parts
        assert first < OLD
        await world.queue.trim(PARTITION, first)
        for reader in (early, world.reader()):
            assert await reader.span(PARTITION) == Span(first, end)
            assert await reader.seek_time(PARTITION, 0) == first
            assert (await reader.read(PARTITION, 0, 1))[0].offset == first
        assert await world.compact() > 0
        joined = await manifest_of(files, PARTITION)
        assert joined.begin == first
        assert [each.part for each in joined.left] == list(island.parts)
        for reader in (early, world.reader()):
            assert await reader.span(PARTITION) == Span(first, end)
            assert (await reader.read(PARTITION, 0, 1))[0].offset == first

    asyncio.run(work())


def test_a_missing_batch_is_reported_unless_retention_took_it() -> None:
    async def work() -> None:
        world = await World.made()
        key = world.expected[3][1].locations[0].key
        del world.store.objects[key]
        done = await world.parts().compact(PARTITION, TOPIC.settings, RULE)
        assert [found for each in done for found, _ in each.findings] == [key]

        other = await World.made()
        parts = other.parts()
        spans = [
            span
            async for span in spans_to_compact(parts.queue, PARTITION, 0, TOPIC.settings, RULE, other.clock.wall_ms())
        ]
        await other.queue.trim(PARTITION, 4)
        with pytest.raises(NotReadyError, match="retention"):
            await parts.copier.copy(PARTITION, spans[0])
        gone = next(pointer for _, pointer, _ in other.expected[spans[1].begin :] if pointer.locations)
        del other.store.objects[gone.locations[0].key]
        await other.queue.trim(PARTITION, spans[1].end)
        with pytest.raises(NotReadyError, match="retention"):
            await parts.copier.copy(PARTITION, Span(spans[1].end - 1, spans[1].end))

    asyncio.run(work())


def test_a_batch_that_goes_with_its_pointer_while_it_is_copied_is_no_damage() -> None:
    async def work() -> None:
        world = await World.made()
        gone = world.expected[4][1].locations[0].key
        get_range = world.store.get_range

        async def taken(key: str, offset: int, length: int) -> bytes:
            if key == gone:
                await world.queue.trim(PARTITION, 5)
                world.store.objects.pop(gone, None)
            return await get_range(key, offset, length)

        world.store.get_range = taken  # type: ignore[method-assign]  # retention comes in the midst
        with pytest.raises(NotReadyError, match="retention removed the pointer at offset 4"):
            await world.parts().copier.copy(PARTITION, Span(1, 8))

    asyncio.run(work())
