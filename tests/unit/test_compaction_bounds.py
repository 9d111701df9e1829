"""Compaction at its bounds: what is named in time, which blocks fit, what readers of compacted parts ask for."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest
from msgspec.structs import replace

from memq.compaction import compaction, reader
from memq.compaction.compaction import Copied, checked_blocks, leave_queue, manifest_of, publish_parts
from memq.compaction.plan import CompactionRule, TailNeeds
from memq.compaction.reader import REFRESH_S, CompactedLogReader, ManifestFiles
from memq.errors import CorruptDataError, NotReadyError, RetryableError, StoreError
from memq.format.compaction_manifest import (
    LeftPart,
    ManifestEntry,
    ManifestPart,
    PartRef,
    decode_manifest_part,
    encode_manifest_part,
)
from memq.format.key import is_large_object
from memq.format.pointer import Pointer, ProducerRanges, decode_pointer
from memq.format.totals import contended_ms
from memq.notification import Entries, Entry, Span
from memq.notification.memory import MemoryQueue
from memq.runtime.runtime import Runtime
from memq.storage_handlers import confirmed_reads
from memq.topic import ReadPartition, TopicSettings, read_partitions
from tests.brokers import block_of
from tests.compaction import parts_on
from tests.contract.manual_clock import ManualClock
from tests.unit.bare_cluster import CLUSTER, Cluster, compaction_manifest, part_of, topic_of
from tests.unit.compaction_world import OLD, PARTITION, RULE, World
from tests.unit.lying_queue import LyingQueue

CLICKS = topic_of("clicks")
LOG = read_partitions(CLICKS)[0]
SETTINGS = TopicSettings()


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed read is repeated at once."""
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)


# ---- what an opening needs -----------------------------------------------------------------------


def needs(*pointers: tuple[int, int, int]) -> int:
    """Return from when on entries are needed, by (queue time, epoch, time of the last names) of the pointers."""
    found = TailNeeds()
    for time_ms, epoch, named_ms in pointers:
        pointer = Pointer(
            kind="data",
            cluster=CLUSTER,
            topic="clicks",
            topic_id=CLICKS.id,
            partition=0,
            epoch=epoch,
            named_ms=named_ms,
        )
        found.take(Entry(0, time_ms, b""), pointer)
    return found.since_ms(SETTINGS)[0] + contended_ms(SETTINGS.stale_publish_ms)


@pytest.mark.parametrize(
    ("pointers", "since_ms"),
    [
        ([(900, 1, 0)], 900),
        ([(900, 1, 500)], 500),
        ([(900, 1, 500), (1_000, 1, 700)], 700),
        ([(900, 1, 500), (1_000, 1, 0)], 1_000),
        ([(900, 2, 500), (1_000, 1, 700)], 500),
        ([(900, 2, 1), (1_000, 1, 700)], 1),
        ([(900, 1, 500), (1_000, 2, 700)], 700),
    ],
)
def test_entries_are_needed_from_the_last_names_of_the_newest_epoch_on(
    pointers: list[tuple[int, int, int]], since_ms: int
) -> None:
    assert needs(*pointers) == since_ms


# ---- what a manifest names -----------------------------------------------------------------------


def copied(*parts: PartRef) -> list[Copied]:
    return [Copied(part, ()) for part in parts]


@pytest.mark.parametrize(("late", "named"), [(-1, True), (0, False)])
def test_parts_are_named_within_the_time_of_a_sweep_or_not_at_all(late: int, *, named: bool) -> None:
    async def work() -> None:
        cluster = Cluster()
        files = ManifestFiles(CLUSTER, cluster.store)
        now_ms = cluster.clock.wall_ms()
        first, second = (replace(part_of(n), created_ms=now_ms + 500 * n) for n in range(2))
        before = await manifest_of(files, LOG)
        cluster.clock.advance(1_000 + late)
        publishing = publish_parts(cluster.queue, files, before, copied(second, first), cluster.clock, 1_000)
        if named:
            found = await publishing
            assert found is not None
            assert (found.number, found.parts, found.next) == (1, (first, second), 2)
            return
        with pytest.raises(NotReadyError, match="copying took over 1000 ms"):
            await publishing
        assert cluster.store.objects == {}

    asyncio.run(work())


def test_parts_behind_a_gap_replace_what_retention_has_taken_which_stays_named_for_readers() -> None:
    async def work() -> None:
        cluster = Cluster()
        files = ManifestFiles(CLUSTER, cluster.store)
        now_ms = cluster.clock.wall_ms()
        old, young = (LeftPart(part=part_of(n), since_ms=now_ms - 4_000 - 1 + n) for n in range(2))
        before = replace(compaction_manifest(CLICKS, part_of(5)), left=(old, young))
        later = replace(part_of(9), created_ms=now_ms)
        await cluster.topic(CLICKS, entries=10)
        await cluster.queue.trim(LOG, 9)
        found = await publish_parts(cluster.queue, files, before, copied(later), cluster.clock, 1_000)
        assert found is not None
        assert found.parts == (later,)
        assert found.left == (young, LeftPart(part=part_of(5), since_ms=now_ms))

    asyncio.run(work())


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_beginning_that_is_shown_too_high_once_gives_up_no_part(wrong: int) -> None:
    async def work() -> None:
        cluster = Cluster()
        files = ManifestFiles(CLUSTER, cluster.store)
        before = compaction_manifest(CLICKS, part_of(5))
        later = replace(part_of(9), created_ms=cluster.clock.wall_ms())
        await cluster.topic(CLICKS, entries=10)
        await cluster.queue.trim(LOG, 6)
        answers = [Span(6, 10), Span(6, 10)]
        answers[wrong] = Span(9, 10)

        async def shown(partition: ReadPartition) -> Span:
            return answers.pop(0)

        cluster.queue.span = shown  # type: ignore[method-assign]
        found = await publish_parts(cluster.queue, files, before, copied(later), cluster.clock, 1_000)
        assert found is not None
        assert (found.parts, found.left) == ((part_of(5), later), ())

    asyncio.run(work())


def test_pointers_leave_the_queue_once() -> None:
    async def work() -> None:
        cluster = Cluster()
        await cluster.topic(CLICKS, entries=3)
        trims: list[int] = []
        trim = cluster.queue.trim

        async def noted(partition: ReadPartition, before: int) -> None:
            trims.append(before)
            await trim(partition, before)

        cluster.queue.trim = noted  # type: ignore[method-assign]
        for _ in range(2):
            manifest = compaction_manifest(CLICKS, part_of(0, entries=2))
            await leave_queue(cluster.queue, ManifestFiles(CLUSTER, cluster.store), LOG, manifest)
        assert trims == [2]

    asyncio.run(work())


def test_a_long_compaction_publishes_a_manifest_of_some_objects_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "OBJECTS_MAX", 4)

    async def work() -> None:
        world = await World.made()
        objects = await world.compact(CompactionRule(age_ms=RULE.age_ms, object_bytes=1, rest=True))
        assert objects > 8
        assert await world.parts().files.highest_number(PARTITION) == -(-objects // 4)
        await world.check()

    asyncio.run(work())


def test_a_part_names_the_objects_that_its_batches_were_copied_from() -> None:
    """The sweep keeps those for readers that are at them."""

    async def work() -> None:
        world = await World.made()
        before = world.keys(large=False)
        await world.compact()
        files = world.parts().files
        parts = [await files.part(part) for part in (await manifest_of(files, PARTITION)).parts]
        assert sorted(key for part in parts for key in part.originals) == sorted(before[:OLD])

    asyncio.run(work())


# ---- what is copied ------------------------------------------------------------------------------


async def part_with(world: World, span: Span) -> tuple[Copied, list[Pointer]]:
    """Copy a span; return the part and its pointers."""
    done = await world.parts().copier.copy(PARTITION, span)
    content = decode_manifest_part(await world.store.get(done.part.key))
    return done, [decode_pointer(entry.body) for entry in content.entries]


@pytest.mark.parametrize(("blocks_max", "moved"), [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (6, 4)])
def test_a_large_object_takes_batches_while_their_blocks_fit(
    monkeypatch: pytest.MonkeyPatch, blocks_max: int, moved: int
) -> None:
    """Batches of one and of two blocks by turns; a part may skip what does not fit, and take what is smaller."""
    monkeypatch.setattr(compaction, "COMPACTION_BLOCKS_MAX", blocks_max)

    async def work() -> None:
        world = await World.made()
        _, pointers = await part_with(world, Span(1, 5))
        assert [pointer.records for pointer in pointers] == [3] * 4
        keys = [location.key for pointer in pointers for location in pointer.locations]
        assert sum(map(is_large_object, keys)) == moved

    asyncio.run(work())


def test_only_the_last_batch_of_an_object_lies_before_its_index() -> None:
    async def work() -> None:
        world = await World.made()
        _, pointers = await part_with(world, Span(1, 4))
        locations = [location for pointer in pointers for location in pointer.locations]
        end = locations[-1].offset + locations[-1].length
        assert [location.index for location in locations] == [end, end, 0]
        assert [location.index_offset for location in locations] == [end] * 3

    asyncio.run(work())


def test_a_store_that_does_not_answer_ends_the_copy() -> None:
    async def work() -> None:
        world = await World.made()

        async def failing(key: str, offset: int, length: int) -> bytes:
            raise StoreError("503")

        world.store.get_range = failing  # type: ignore[method-assign]
        with pytest.raises(StoreError):
            await world.compact()
        assert await world.parts().files.highest_number(PARTITION) == 0

    asyncio.run(work())


class Ones(random.Random):
    """All bits are set."""

    def getrandbits(self, k: int) -> int:
        """See `Random.getrandbits`."""
        return (1 << k) - 1


def test_every_random_number_makes_a_key_of_a_large_object() -> None:
    async def work() -> None:
        world = await World.made()
        parts = parts_on(world.queue, world.store, Runtime(world.clock, Ones()))
        done = await parts.copier.copy(PARTITION, Span(1, 3))
        assert [is_large_object(key) for key in done.part.objects] == [True]

    asyncio.run(work())


def test_a_block_that_the_pointer_does_not_name_is_damage_unless_it_is_left_out() -> None:
    block = block_of(CLICKS, 5, [b"a", b"b"], producer=7)
    pointer = Pointer(
        kind="data",
        cluster=CLUSTER,
        topic="clicks",
        topic_id=CLICKS.id,
        partition=0,
        epoch=1,
        records=2,
        producers=(ProducerRanges(7, ((5, 7),)),),
    )
    assert len(checked_blocks(pointer, block)) == 1
    others = replace(pointer, producers=(ProducerRanges(8, ((5, 7),)),))
    with pytest.raises(CorruptDataError, match="is not one that the pointer names"):
        checked_blocks(others, block)
    assert len(checked_blocks(replace(others, skip=(0,)), block)) == 1


# ---- what readers ask for ------------------------------------------------------------------------


class Shelf(Cluster):
    """A log whose first entries, of 10 bytes or more each, are in a compacted part."""

    def __init__(self) -> None:
        super().__init__()
        self.files = ManifestFiles(CLUSTER, self.store)
        self.reader = CompactedLogReader(self.queue, self.files, self.clock)
        self.reads, self.spans = 0, 0

    async def fill(self, entries: int = 6) -> None:
        await self.topic(CLICKS, entries=entries)
        read, span = self.queue.read, self.queue.span

        async def counted(partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
            self.reads += 1
            return await read(partition, offset, bytes_max)

        async def counted_span(partition: ReadPartition) -> Span:
            self.spans += 1
            return await span(partition)

        self.queue.read = counted  # type: ignore[method-assign]
        self.queue.span = counted_span  # type: ignore[method-assign]

    async def move(self, count: int) -> int:
        """Move the first entries into a part; return the bytes of one."""
        entries = await self.queue.read(LOG, 0, 1 << 20)
        moved = tuple(ManifestEntry(entry.offset, entry.time_ms, entry.body) for entry in entries[:count])
        data = encode_manifest_part(ManifestPart(moved, ()))
        await self.put("part-0", data)
        await self.files.publish(compaction_manifest(CLICKS, part_of(0, entries=count)))
        await self.queue.trim(LOG, count)
        self.reads = self.spans = 0
        self.store.listed.clear()
        return len(moved[0].body)

    async def offsets(self, offset: int, bytes_max: int = 1 << 20) -> list[int]:
        return [entry.offset for entry in await self.reader.read(LOG, offset, bytes_max)]


def test_a_reader_finds_the_first_entry_that_left_the_queue() -> None:
    async def work() -> None:
        shelf = Shelf()
        await shelf.fill()
        await shelf.reader.manifest(LOG, 0, 600.0)  # it looked before there was a manifest
        await shelf.move(1)
        assert await shelf.reader.span(LOG) == Span(0, 6)
        assert await shelf.offsets(0) == [0]

    asyncio.run(work())


def test_entries_in_the_queue_cost_one_request_and_compacted_ones_none() -> None:
    async def work() -> None:
        shelf = Shelf()
        await shelf.fill()
        assert await shelf.offsets(3) == [3, 4, 5]
        assert (shelf.reads, shelf.spans, shelf.store.listed) == (1, 0, []), "nothing has left the queue"
        assert await shelf.reader.span(LOG) == Span(0, 6)
        assert shelf.store.listed == []
        await shelf.move(3)
        assert await shelf.offsets(0) == [0, 1, 2]
        asked = (shelf.reads, shelf.spans, len(shelf.store.listed))
        assert asked == (1, 1, 1), "the queue's beginning leads to the manifest"
        assert await shelf.offsets(1) == [1, 2]
        assert (shelf.reads, shelf.spans, len(shelf.store.listed)) == asked
        assert await shelf.reader.span(LOG) == Span(0, 6)
        assert len(shelf.store.listed) == 1, "the manifest reaches where the queue begins"

    asyncio.run(work())


def test_a_reader_behind_the_compacted_part_never_looks_for_a_newer_manifest() -> None:
    async def work() -> None:
        shelf = Shelf()
        await shelf.fill()
        await shelf.move(3)
        assert await shelf.offsets(2) == [2]
        shelf.clock.advance(int(REFRESH_S * 1_000))
        assert await shelf.offsets(3) == [3, 4, 5]
        assert len(shelf.store.listed) == 1
        assert await shelf.offsets(2) == [2]
        assert len(shelf.store.listed) == 2, "within it, it does"

    asyncio.run(work())


@pytest.mark.parametrize(("times", "less", "count"), [(1, 1, 1), (1, 0, 1), (2, 1, 1), (2, 0, 2), (3, 1, 2), (3, 0, 3)])
def test_a_read_of_compacted_pointers_has_as_many_entries_as_fit_and_at_least_one(
    times: int, less: int, count: int
) -> None:
    async def work() -> None:
        shelf = Shelf()
        await shelf.fill()
        size = await shelf.move(4)
        found = await shelf.reader.read(LOG, 0, times * size - less)
        assert [entry.offset for entry in found] == list(range(count))
        assert found.next == count, "reading continues right behind them"

    asyncio.run(work())


def test_the_manifests_that_were_looked_for_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "PARTITIONS_MAX", 2)

    async def work() -> None:
        shelf = Shelf()
        logs = [ReadPartition("clicks", CLICKS.id, number) for number in range(3)]

        async def listings(log: ReadPartition, age_s: float) -> int:
            shelf.store.listed.clear()
            await shelf.reader.manifest(log, 0, age_s)
            return len(shelf.store.listed)

        assert [await listings(log, 600.0) for log in logs[:2]] == [1, 1]
        assert await listings(logs[0], 0.0) == 1
        assert await listings(logs[2], 600.0) == 1
        assert [await listings(log, 600.0) for log in (logs[0], logs[2], logs[1])] == [0, 0, 1]

    asyncio.run(work())


def test_a_known_manifest_is_not_read_again() -> None:
    async def work() -> None:
        shelf = Shelf()
        await shelf.files.publish(compaction_manifest(CLICKS, part_of(0)))
        known = await shelf.files.highest(LOG)
        assert known is not None
        get, read = shelf.store.get, list[str]()

        async def noted(key: str, *, checked: bool = True) -> bytes:
            read.append(key)
            return await get(key, checked=checked)

        shelf.store.get = noted  # type: ignore[method-assign]
        assert await shelf.files.highest(LOG, known) is known
        assert read == [shelf.files.manifest_key(LOG, known.number + 1)]
        assert await shelf.files.highest(LOG) == known
        assert len(read) == 3, "a listing may omit the next one, which is read by its key"

    asyncio.run(work())


# ---- what one answer leaves out ------------------------------------------------------------------


class FalseOnceQueue(MemoryQueue):
    """Answers one question falsely: the `false_at`th of those that a subclass counts."""

    def __init__(self, queue: MemoryQueue, clock: ManualClock, offset: int, false_at: int) -> None:
        super().__init__(clock)
        self.logs = queue.logs
        self.asked = 0
        self.offset = offset
        self._false_at = false_at

    def lies(self) -> bool:
        """Count a question, and return whether its answer is the false one."""
        self.asked += 1
        return self.asked == self._false_at


class OmittingQueue(FalseOnceQueue):
    """Leaves the entry at `offset` out of one answer."""

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`."""
        found = await super().read(partition, offset, bytes_max)
        if self.offset not in [entry.offset for entry in found] or not self.lies():
            return found
        left = [entry for entry in found if entry.offset != self.offset] or await super().read(
            partition, self.offset + 1, bytes_max
        )
        return Entries(left, left[-1].offset + 1)


class LaggingQueue(FalseOnceQueue):
    """Shows one end too low, as a replica that has only the entries before `offset`."""

    async def span(self, partition: ReadPartition) -> Span:
        """See `PointerReader.span`."""
        found = await super().span(partition)
        return Span(found.begin, max(found.begin, self.offset)) if self.lies() else found


def check_compaction_with_each_answer_false(kind: type[FalseOnceQueue], offset: int) -> None:
    """Compact new worlds, in each of which another answer is false, and check that readers lose nothing."""

    async def work() -> None:
        false_at = 0
        while True:
            false_at += 1
            world = await World.made()
            queue = kind(world.queue, world.clock, offset, false_at)
            with suppress(RetryableError):
                await parts_on(queue, world.store, world.runtime, CLUSTER).compact(PARTITION, SETTINGS, RULE)
            await world.check()
            if queue.asked < false_at:
                break
        assert false_at > 3

    asyncio.run(work())


@pytest.mark.parametrize("omits", [0, 1, 5, OLD + 1])
def test_entry_that_one_answer_omits_is_not_lost_by_compaction(omits: int) -> None:
    """It would be in no part, and leave the queue with the pointers around it."""
    check_compaction_with_each_answer_false(OmittingQueue, omits)


@pytest.mark.parametrize("has", [0, 2, 5, OLD])
def test_an_end_that_is_shown_too_low_once_loses_nothing_by_compaction(has: int) -> None:
    """A part would end there, and the pointers up to the next part would leave the queue with those around them."""
    check_compaction_with_each_answer_false(LaggingQueue, has)


def test_an_entry_that_the_queue_has_lost_is_passed_over() -> None:
    async def work() -> None:
        world = await World.made()
        lying = LyingQueue(world.queue)
        lying.omits = frozenset({3})
        assert await parts_on(lying, world.store, world.runtime, CLUSTER).compact(PARTITION, SETTINGS, RULE)

    asyncio.run(work())


def test_an_entry_that_the_queue_has_lost_behind_a_manifest_takes_nothing_before_it_along() -> None:
    """Retention alone takes from the front; a loss looks the same to who reads there."""

    async def work() -> None:
        world = await World.made()
        await world.compact(CompactionRule(RULE.age_ms, 5_000))
        before = await manifest_of(world.parts().files, PARTITION)
        lying = LyingQueue(world.queue)
        lying.omits = frozenset({before.next})
        assert await parts_on(lying, world.store, world.runtime, CLUSTER).compact(PARTITION, SETTINGS, RULE)
        after = await manifest_of(world.parts().files, PARTITION)
        assert after.parts[: len(before.parts)] == before.parts
        assert (await world.reader().span(PARTITION)).begin == 0

    asyncio.run(work())


def test_a_reader_waits_for_what_comes_as_its_queue_does() -> None:
    async def work() -> None:
        shelf = Shelf()
        await shelf.fill(1)
        end = (await shelf.queue.span(LOG)).end
        waiting = asyncio.create_task(shelf.reader.wait({LOG: end}, 60.0))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not waiting.done()
        await shelf.show(CLICKS, LOG)
        await waiting

    asyncio.run(work())
