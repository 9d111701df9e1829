"""A pass of the sweep at its bounds, on logs that change meanwhile, and the lists between passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import cast

import msgspec
import pytest

from memq.broker.sweep.log_reading import READINGS_MAX, whole_log
from memq.broker.sweep.orphan_objects import OrphanObjects, OrphanTopics, forgotten_topic, lost_log
from memq.broker.sweep.sweep import Sweep
from memq.broker.sweep.sweep_lists import ALL, PendingObject, SweepLists
from memq.compaction.reader import ManifestFiles
from memq.errors import CorruptDataError, QueueError, StoreError
from memq.format.compaction_manifest import LeftPart, ManifestPart, encode_manifest_part
from memq.format.key import (
    compaction_manifest_key,
    compaction_manifest_prefix,
    large_object_key,
    object_key,
    parse_sweep_list_key,
    shared_object_key,
    staged_object_key,
    sweep_prefix,
    topic_prefix,
)
from memq.format.object import ObjectTopic
from memq.format.packed_file import ListedObject
from memq.format.pointer import Location, Pointer, encode_pointer
from memq.governor import Coordinator
from memq.notification import Entries, Publication, Span
from memq.storage_handlers import ObjectEntry, confirmed_reads
from memq.topic import CLOCK_ERROR_MS, ReadPartition, Topic, Totals, read_partitions
from tests.unit.bare_cluster import CLUSTER, Cluster, compaction_manifest, indexed, newer, part_of, topic_of

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
PREFIX = f"{CLUSTER}/topics/clicks/{topic_of('clicks').id[:8]}/"


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed read is repeated at once."""
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)


class Yard(Cluster):
    """A topic with one batch that is named, and passes over the store."""

    def __init__(self) -> None:
        super().__init__()
        self.clicks = topic_of("clicks")
        self.notes: list[str] = []

    @property
    def log(self) -> ReadPartition:
        return read_partitions(self.clicks)[0]

    @property
    def lists(self) -> SweepLists:
        return SweepLists(CLUSTER, self.store, self.notes.append)

    async def name(self, number: int = 0, *, epoch: int = 1, totals: Totals | None = None) -> str:
        """Store a batch and publish its pointer."""
        key = await self.orphan(number, epoch=epoch)
        pointer = Pointer(
            kind="data",
            cluster=CLUSTER,
            topic="clicks",
            topic_id=self.clicks.id,
            partition=0,
            epoch=epoch,
            batch_sequence=number,
            locations=(Location(store="main", key=key, offset=0, length=1),),
            records=1,
            stored_bytes=1,
            totals=totals or Totals(),
        )
        await self.queue.publish(Publication(self.log, 0, epoch, self.clock.wall_ms(), encode_pointer(pointer)))
        return key

    async def orphan(self, number: int = 0, *, epoch: int = 1, again: int = 0) -> str:
        """Store a batch that no pointer names, as an upload that was repeated for the `again`th time."""
        sealed_ms = self.clock.wall_ms() - again * HOUR_MS
        return await self.put(object_key(CLUSTER, "clicks", self.clicks.id, 0, epoch, number, sealed_ms))

    async def find(self, age_ms: int = HOUR_MS) -> list[str]:
        """Return what a pass finds."""
        topics = cast("Coordinator", self.topics)
        sweep = Sweep(CLUSTER, self.store, self.queue, topics, self.clock, self.notes.append, DAY_MS)
        return [each.key async for each in sweep.find(age_ms, 7 * DAY_MS)]


def in_yard(work: Callable[[Yard], Awaitable[None]]) -> None:
    async def made() -> None:
        yard = Yard()
        await yard.topic(yard.clicks)
        await work(yard)

    asyncio.run(made())


# ---- what a pass finds ---------------------------------------------------------------------------


def test_an_object_is_found_when_it_is_as_old_as_the_safety_age() -> None:
    async def work(yard: Yard) -> None:
        await yard.name()
        orphan = await yard.orphan(again=1)
        yard.clock.advance(HOUR_MS - 1)
        assert await yard.find() == []
        yard.clock.advance(1)
        assert await yard.find() == [orphan]

    in_yard(work)


def test_a_pass_that_finds_nothing_asks_for_no_assignments_and_no_lists_of_what_is_kept() -> None:
    async def work(yard: Yard) -> None:
        await yard.name()
        yard.clock.advance(HOUR_MS)
        assert await yard.find() == []
        assert yard.topics.asked == 0
        assert not any("/kept/" in prefix for prefix in yard.store.listed)

    in_yard(work)


@pytest.mark.parametrize("begin", [0, 1])
def test_orphan_of_an_owner_before_the_cut_goes_and_one_of_a_lost_log_stays(begin: int) -> None:
    async def work(yard: Yard) -> None:
        old = await yard.orphan(epoch=1)
        log = yard.queue.logs[yard.log]
        log.begin = begin  # retention took what came before, or the queue lost it
        await yard.name(epoch=2, totals=Totals(records=10, bytes=100))
        yard.clock.advance(HOUR_MS)
        assert await yard.find() == ([old] if begin else [])

    in_yard(work)


def test_a_damaged_pointer_is_named_as_the_reason_why_a_topic_is_not_swept() -> None:
    async def work(yard: Yard) -> None:
        await yard.name()
        await yard.orphan(again=1)
        await yard.queue.publish(Publication(yard.log, 0, 1, 0, b"{damaged"))
        yard.clock.advance(HOUR_MS)
        assert await yard.find() == []
        assert "topic 'clicks' is not swept: a pointer is damaged" in yard.notes
        assert any("offset 1:" in note for note in yard.notes)

    in_yard(work)


def test_a_log_that_the_queue_calls_damaged_is_named_and_ends_no_pass() -> None:
    """The database of an embedded queue may have a damaged row."""

    async def work(yard: Yard) -> None:
        await yard.name()
        await yard.orphan(again=1)
        views = await yard.topic(topic_of("views"), entries=1)
        orphan = await yard.put(object_key(CLUSTER, "views", views.id, 0, 1, 0, yard.clock.wall_ms()))
        read = yard.queue.read

        async def damaged(partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
            if partition == yard.log:
                raise CorruptDataError("row 7 is damaged")
            return await read(partition, offset, bytes_max)

        yard.queue.read = damaged  # type: ignore[method-assign]
        yard.clock.advance(HOUR_MS)
        assert await yard.find() == [orphan]
        assert "topic 'clicks' is not swept: row 7 is damaged" in yard.notes

    in_yard(work)


def trimmed_at_each_reading(yard: Yard, times: int) -> list[int]:
    """Let retention take the first entry between the span and the first page of so many readings; count those."""
    read, readings = yard.queue.read, list[int]()

    async def trimmed(partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        begin = (await yard.queue.span(partition)).begin
        if offset == begin:
            readings.append(offset)
            if len(readings) <= times:
                await yard.queue.trim(partition, begin + 1)
        return await read(partition, offset, bytes_max)

    yard.queue.read = trimmed  # type: ignore[method-assign]
    return readings


@pytest.mark.parametrize("times", [0, 1, READINGS_MAX - 1, READINGS_MAX, 99])
def test_a_log_is_read_again_while_retention_takes_from_it_a_few_times(times: int) -> None:
    async def work(yard: Yard) -> None:
        for number in range(READINGS_MAX + 3):
            await yard.name(number)
        orphan = await yard.orphan(READINGS_MAX + 2, again=1)
        yard.clock.advance(HOUR_MS)
        readings = trimmed_at_each_reading(yard, times)
        found = await yard.find()
        assert len(readings) == min(times + 1, READINGS_MAX)
        if times < READINGS_MAX:
            assert orphan in found
            assert yard.notes == []
        else:
            assert found == []
            assert "is not swept: retention took offsets" in yard.notes[0]

    in_yard(work)


@pytest.mark.parametrize("times", [0, 1, READINGS_MAX - 1, READINGS_MAX, 99])
def test_retention_of_two_hands_reads_a_log_again_a_few_times_and_then_gives_up(times: int) -> None:
    async def work(yard: Yard) -> None:
        for number in range(READINGS_MAX + 3):
            await yard.name(number)
        readings = trimmed_at_each_reading(yard, times)
        if times < READINGS_MAX:
            span, known = await whole_log(yard.queue, yard.log, yard.notes.append)
            assert span == Span(times, READINGS_MAX + 3)
            assert [entry.offset for entry, _ in known] == list(range(times, READINGS_MAX + 3))
        else:
            with pytest.raises(QueueError, match="retention took offsets"):
                await whole_log(yard.queue, yard.log, yard.notes.append)
        assert len(readings) == min(times + 1, READINGS_MAX)

    in_yard(work)


def test_the_span_is_asked_again_only_where_offsets_are_missing() -> None:
    async def work(yard: Yard) -> None:
        for number in range(3):
            await yard.name(number)
        span, asked = yard.queue.span, list[ReadPartition]()

        async def counted(partition: ReadPartition) -> Span:
            asked.append(partition)
            return await span(partition)

        yard.queue.span = counted  # type: ignore[method-assign]
        await whole_log(yard.queue, yard.log, yard.notes.append)
        assert len(asked) == 1

    in_yard(work)


# ---- compacted parts ----------------------------------------------------------------------------------


def large_key(yard: Yard, number: int) -> str:
    return large_object_key(CLUSTER, "clicks", yard.clicks.id, number, yard.clock.wall_ms())


@pytest.mark.parametrize("late", [0, 1])
def test_removed_parts_are_named_for_the_safety_age_and_the_clock_error(late: int) -> None:
    async def work(yard: Yard) -> None:
        await yard.name()
        left, held, original = large_key(yard, 1), large_key(yard, 2), await yard.orphan(again=1)
        for key in (left, held):
            await yard.put(key)
        since_ms = yard.clock.wall_ms()
        part = ManifestPart((), (original,))
        ref = msgspec.structs.replace(part_of(0), key=f"{left}-part", objects=(held,), created_ms=since_ms)
        await yard.put(ref.key, encode_manifest_part(part))
        gone = msgspec.structs.replace(part_of(1), objects=(left,))
        manifest = msgspec.structs.replace(
            compaction_manifest(yard.clicks, ref), left=(LeftPart(part=gone, since_ms=since_ms),)
        )
        await ManifestFiles(CLUSTER, yard.store).publish(manifest)
        yard.clock.advance(HOUR_MS + CLOCK_ERROR_MS + late)
        found = await yard.find()
        assert [key in found for key in (left, original, held)] == [bool(late), bool(late), False]

    in_yard(work)


def test_nothing_of_a_topic_goes_whose_manifest_does_not_read() -> None:
    async def work(yard: Yard) -> None:
        await yard.name()
        await yard.orphan(again=1)
        await yard.put(compaction_manifest_key(CLUSTER, "clicks", yard.clicks.id, 0, 1), b"damaged")
        yard.clock.advance(HOUR_MS)
        assert await yard.find() == []
        assert any(note.startswith("topic 'clicks' is not swept: ") for note in yard.notes)

    in_yard(work)


def test_a_store_that_fails_at_a_manifest_ends_the_pass() -> None:
    async def work(yard: Yard) -> None:
        await yard.name()
        await yard.orphan(again=1)
        await yard.put(compaction_manifest_key(CLUSTER, "clicks", yard.clicks.id, 0, 1), b"never read")
        yard.clock.advance(HOUR_MS)

        async def failing(key: str, *, checked: bool = True) -> bytes:
            raise StoreError("503")

        yard.store.get = failing  # type: ignore[method-assign]
        with pytest.raises(StoreError):
            await yard.find()

    in_yard(work)


def test_a_manifest_that_vanishes_between_two_listings_names_nothing() -> None:
    async def work(yard: Yard) -> None:
        await yard.name()
        orphan = await yard.orphan(again=1)
        manifest = compaction_manifest_key(CLUSTER, "clicks", yard.clicks.id, 0, 2)
        await yard.put(manifest, b"never read")
        listing, own = yard.store.list, compaction_manifest_prefix(CLUSTER, "clicks", yard.clicks.id, 0)

        async def without(prefix: str = "") -> AsyncIterator[ObjectEntry]:
            async for entry in listing(prefix):
                if prefix != own:
                    yield entry

        yard.store.list = without  # type: ignore[method-assign]
        yard.clock.advance(HOUR_MS)
        assert orphan in await yard.find()

    in_yard(work)


# ---- objects without a log -----------------------------------------------------------------------


def orphans_of(yard: Yard, *topics: Topic, claimed: frozenset[tuple[str, int]] = frozenset()) -> OrphanObjects:
    forgotten = OrphanTopics(yard.store, yard.queue)
    return OrphanObjects(yard.store, {topic.id: topic for topic in topics}, {}, claimed, forgotten)


def test_object_without_index_may_go_and_a_missing_one_is_no_error() -> None:
    async def work(yard: Yard) -> None:
        orphans = orphans_of(yard, yard.clicks)
        damaged = await yard.put(shared_object_key(CLUSTER, "b", 1, 0, 1_000), b"damaged")
        assert await orphans.claim_on(ObjectEntry(damaged, 7, 0)) is None
        gone = shared_object_key(CLUSTER, "b", 1, 1, 1_000)
        assert await orphans.claim_on(ObjectEntry(gone, 100, 0)) is None

    in_yard(work)


def test_a_staged_object_is_of_any_owner_and_of_none_where_a_partition_never_had_one() -> None:
    async def work(yard: Yard) -> None:
        body = indexed(yard.clicks, 0, epoch=1)
        staged = await yard.put(staged_object_key(CLUSTER, "nightly", 7, 1_000), body)
        entry = ObjectEntry(staged, len(body), 0)
        assert await orphans_of(yard, yard.clicks).claim_on(entry) is None
        claimed = frozenset({(yard.clicks.id, 0)})
        assert await orphans_of(yard, yard.clicks, claimed=claimed).claim_on(entry) == lost_log("clicks", 0)
        shared = await yard.put(shared_object_key(CLUSTER, "b", 1, 0, 1_000), body)
        claim = await orphans_of(yard, yard.clicks).claim_on(ObjectEntry(shared, len(body), 0))
        assert claim == lost_log("clicks", 0), "an owner opens before it stores"

    in_yard(work)


def test_the_topic_of_forgotten_objects_is_read_from_the_first_index_that_reads() -> None:
    async def work(yard: Yard) -> None:
        views = topic_of("views")
        await yard.topic(views)
        bodies = {
            "memq/topics/views/no-key": b"x",
            large_object_key(CLUSTER, "views", views.id, 1, 1_000): indexed(yard.clicks, 0),
            object_key(CLUSTER, "views", views.id, 0, 1, 0, 1_000): b"damaged",
            object_key(CLUSTER, "views", views.id, 0, 1, 1, 1_000): b"",
            object_key(CLUSTER, "views", views.id, 0, 1, 2, 1_000): indexed(views, 0),
        }
        for key, body in bodies.items():
            if body:
                await yard.put(key, body)
        entries = [ObjectEntry(key, len(body) or 100, 0) for key, body in bodies.items()]
        topics = OrphanTopics(yard.store, yard.queue)
        assert await topics.owner_of(entries) == ObjectTopic("views", views.id)
        assert await topics.owner_of(entries[:-1]) is None
        assert list(topics.held) == [views.id]
        assert forgotten_topic(ObjectTopic("views", views.id)).text.startswith("topic 'views' with id")

    in_yard(work)


def test_an_object_of_a_later_version_is_not_passed_over() -> None:
    async def work(yard: Yard) -> None:
        body = newer(indexed(yard.clicks, 0))
        key = await yard.put(shared_object_key(CLUSTER, "b", 1, 0, 1_000), body)
        with pytest.raises(Exception, match="version 200"):
            await orphans_of(yard, yard.clicks).claim_on(ObjectEntry(key, len(body), 0))

    in_yard(work)


# ---- lists between passes ------------------------------------------------------------------------


def listed(*names: str) -> list[ListedObject]:
    return [ListedObject(f"{PREFIX}{name}", 5, 1_000, "why") for name in names]


def entry_of(each: ListedObject, modified_ms: int = 1_000) -> ObjectEntry:
    return ObjectEntry(each.key, each.size, modified_ms)


async def waiting(yard: Yard, entry: ObjectEntry, now_ms: int) -> dict[str, int]:
    lists = yard.lists
    (pending,) = (await lists.pending()).values()
    return await lists.waiting(PREFIX, pending, {entry.key: entry}, now_ms)


def test_a_list_counts_when_it_is_ahead_by_the_error_of_clocks_and_not_more() -> None:
    async def work(yard: Yard) -> None:
        (each,) = listed("a")
        now_ms = yard.clock.wall_ms()
        await yard.lists.add(PREFIX, [each], now_ms)
        assert await waiting(yard, entry_of(each), now_ms - CLOCK_ERROR_MS) == {each.key: now_ms}
        assert await waiting(yard, entry_of(each), now_ms - CLOCK_ERROR_MS - 1) == {}
        assert await waiting(yard, entry_of(each, now_ms), now_ms) == {each.key: now_ms}
        assert await waiting(yard, entry_of(each, now_ms + 1), now_ms) == {}, "it was written since"

    in_yard(work)


def test_the_first_of_several_lists_counts_and_one_that_does_not_read_hides_none() -> None:
    async def work(yard: Yard) -> None:
        (each,) = listed("a")
        times = []
        for _ in range(3):
            yard.clock.advance(HOUR_MS)
            times.append(yard.clock.wall_ms())
            await yard.lists.add(PREFIX, [each], times[-1])
        first = min(key for key in yard.store.objects if parse_sweep_list_key(key))
        assert await waiting(yard, entry_of(each), times[-1]) == {each.key: times[0]}
        yard.store.objects[first] = b"damaged"
        assert await waiting(yard, entry_of(each), times[-1]) == {each.key: times[1]}
        assert len(yard.notes) == 1

    in_yard(work)


def test_a_list_that_another_sweep_took_is_no_news_and_one_of_kept_objects_is() -> None:
    async def work(yard: Yard) -> None:
        (each,) = listed("a")
        for kept in (False, True):
            await yard.lists.add(PREFIX, [each], yard.clock.wall_ms(), kept=kept)
        entries = [entry async for entry in yard.store.list(sweep_prefix(CLUSTER))]
        yard.store.objects.clear()
        waits = [entry for entry in entries if "/kept/" not in entry.key]
        assert await yard.lists.waiting(PREFIX, waits, {each.key: entry_of(each)}, yard.clock.wall_ms()) == {}
        assert yard.notes == []
        (kept_key,) = [entry.key for entry in entries if "/kept/" in entry.key]
        yard.store.gone = kept_key
        assert await yard.lists.kept(PREFIX) is None, "nothing of the prefix goes"
        assert kept_key in yard.notes[0]

    in_yard(work)


@pytest.mark.parametrize("number", [0, 1])
def test_one_listing_that_lacks_a_list_of_kept_objects_releases_none(number: int) -> None:
    async def work(yard: Yard) -> None:
        (each,) = listed("a")
        await yard.lists.add(PREFIX, [each], yard.clock.wall_ms(), kept=True)
        listing, calls = yard.store.list, list[str]()

        async def lacking(prefix: str = "") -> AsyncIterator[ObjectEntry]:
            calls.append(prefix)
            if len(calls) != number + 1:
                async for entry in listing(prefix):
                    yield entry

        yard.store.list = lacking  # type: ignore[method-assign]  # one answer has no entries
        assert await yard.lists.kept(PREFIX) == {each.key: None}

    in_yard(work)


def test_an_operator_sees_what_waits_and_what_is_kept_and_takes_one_of_several() -> None:
    async def work(yard: Yard) -> None:
        one, two = listed("a", "b")
        now_ms = yard.clock.wall_ms()
        await yard.lists.add(PREFIX, [one, two], now_ms)
        assert [each async for each in yard.lists.all()] == [
            PendingObject(one, now_ms, False),
            PendingObject(two, now_ms, False),
        ]
        assert await yard.lists.keep(ALL, now_ms) == [one, two]
        held = {key for key in yard.store.objects if "/kept/" in key}
        yard.clock.advance(HOUR_MS)
        assert await yard.lists.release(one.key, yard.clock.wall_ms()) == [one]
        assert await yard.lists.kept(PREFIX) == {two.key: None}, "the other one is kept"
        (left,) = [key for key in yard.store.objects if "/kept/" in key]
        assert left not in held
        assert await yard.lists.release(ALL, now_ms) == [two]
        assert await yard.lists.kept(PREFIX) == {}
        assert await yard.lists.release(ALL, now_ms) == []

    in_yard(work)


def test_a_list_stays_as_it_is_when_another_object_is_released() -> None:
    async def work(yard: Yard) -> None:
        one, two = listed("a", "b")
        other = ListedObject(f"{CLUSTER}/topics/views/00000000/c", 5, 1_000, "why")
        now_ms = yard.clock.wall_ms()
        for prefix, each in ((PREFIX, one), (topic_prefix(CLUSTER, "views", "0" * 32), other)):
            await yard.lists.add(prefix, [each], now_ms, kept=True)
        before = set(yard.store.objects)
        yard.clock.advance(HOUR_MS)
        assert await yard.lists.release(other.key, yard.clock.wall_ms()) == [other]
        assert len(before - set(yard.store.objects)) == 1
        assert set(yard.store.objects) < before
        assert two.key not in (await yard.lists.kept(PREFIX) or ())

    in_yard(work)


def test_nothing_is_released_beyond_what_was_asked_when_a_store_fails_in_between() -> None:
    async def work(yard: Yard) -> None:
        one, two = listed("a", "b")
        await yard.lists.add(PREFIX, [one, two], yard.clock.wall_ms(), kept=True)
        yard.clock.advance(HOUR_MS)
        put = yard.store.put

        async def failing(key: str, buffers: Sequence[bytes], checksum: int) -> None:
            raise StoreError("503")

        yard.store.put = failing  # type: ignore[assignment, method-assign]
        with pytest.raises(StoreError):
            await yard.lists.release(one.key, yard.clock.wall_ms())
        yard.store.put = put  # type: ignore[method-assign]
        assert await yard.lists.kept(PREFIX) == {one.key: None, two.key: None}

    in_yard(work)


def test_objects_of_a_newer_version_stay_if_the_coordinator_does_not_know_their_topic() -> None:
    """Their index would name the topic, which the queue may have."""

    async def work(yard: Yard) -> None:
        views = await yard.topic(topic_of("views"), entries=1)
        yard.topics.known.remove(views)
        key = object_key(CLUSTER, "views", views.id, 0, 1, 0, 1_000)
        await yard.put(key, newer(indexed(views, 0)))
        yard.clock.advance(2 * HOUR_MS)
        assert key not in await yard.find()
        assert [note for note in yard.notes if "are not swept: " in note and "/views/" in note]

    in_yard(work)
