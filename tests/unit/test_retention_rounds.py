"""Rounds of retention on parts in memory: deletions, counts and log lines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import msgspec
import pytest

from memq.broker.metrics import Counters
from memq.broker.partition.recent_pointer_cache import RecentPointer, RecentPointerCache
from memq.broker.partitions import Partitions
from memq.broker.services import Services, SweptNow
from memq.broker.sweep.broker_sweep import sweep
from memq.broker.upkeep.retention import expired, expired_parts, first_old_ms, retire, trim_compacted
from memq.compaction.reader import CompactedLogReader, ManifestFiles
from memq.format.compaction_manifest import CompactionManifest
from memq.format.key import object_key, shared_object_key
from memq.format.pointer import Location, Pointer, encode_pointer
from memq.limits import TIME_MS_END
from memq.notification import Entry, Publication, Span
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.topic import CLOCK_ERROR_MS, ReadPartition, TopicSettings, read_partitions
from tests.unit.bare_cluster import CLUSTER, Cluster, compaction_manifest, indexed, part_of, topic_of

if TYPE_CHECKING:
    from memq.governor import Coordinator

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
KEPT = TopicSettings(retention_ms=DAY_MS)
NOW_MS = 1_000 * HOUR_MS
YOUNG_MS = KEPT.dedup_window_ms + CLOCK_ERROR_MS


class RecordedRound:
    """Keeps what was logged as (event, text)."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str]] = []

    def info(self, event: str, text: str) -> None:
        self.all.append((event, text))

    warning = error = info

    def take(self) -> list[tuple[str, str]]:
        """Return what is new."""
        found, self.all = self.all, []
        return found


class Keeper(Cluster):
    """One topic, and the parts of a broker that retention and sweep work with; its clock moves when a test says so."""

    def __init__(self, settings: TopicSettings = KEPT, partitions: int = 1, owned: tuple[int, ...] = (0,)) -> None:
        super().__init__()
        self.runtime = Runtime(self.clock)
        self.events, self.counters = RecordedRound(), Counters()
        self.trims: list[int] = []
        self.spans = 0
        self.clicks = topic_of("clicks", partitions, settings)
        manifests = ManifestFiles(CLUSTER, self.store)
        parts = SimpleNamespace(
            settings=BrokerSettings(),
            runtime=self.runtime,
            deletion_clock=self.clock,
            store=self.store,
            queue=self.queue,
            coordinator=cast("Coordinator", self.topics),
            counters=self.counters,
            events=self.events,
            manifests=manifests,
            pointers=CompactedLogReader(self.queue, manifests, self.clock),
            recent_pointers=RecentPointerCache(),
            swept=SweptNow(),
            deleted_since={},
        )
        self.services = cast("Services", parts)
        self.owned = owned
        held = SimpleNamespace(
            retention_due={}, topics=lambda: [self.clicks], owns=lambda _, number: number in owned, processors={}
        )
        self.partitions = cast("Partitions", held)

    @property
    def now_ms(self) -> int:
        return self.clock.wall_ms()

    @property
    def log(self) -> ReadPartition:
        return read_partitions(self.clicks)[0]

    async def write(self, number: int, *, age_ms: int = 0, partition: int = 0, body: bytes = b"", key: str = "") -> str:
        """Store a batch of 100 bytes, but for a given key, and publish its pointer or a damaged one; return its key."""
        if not key:
            key = object_key(CLUSTER, "clicks", self.clicks.id, partition, 1, number, self.now_ms)
            await self.put(key, b"x" * 100)
        pointer = Pointer(
            kind="data",
            cluster=CLUSTER,
            topic="clicks",
            topic_id=self.clicks.id,
            partition=partition,
            epoch=1,
            batch_sequence=number,
            locations=(Location(store="main", key=key, offset=0, length=100),),
            records=1,
            stored_bytes=100,
        )
        log = read_partitions(self.clicks)[partition]
        await self.queue.publish(Publication(log, partition, 1, self.now_ms - age_ms, body or encode_pointer(pointer)))
        return key

    async def publish_parts(self, manifest: CompactionManifest) -> None:
        assert await ManifestFiles(CLUSTER, self.store).publish(manifest)

    async def round(self) -> None:
        await retire(self.services, self.partitions)


def keep(work: Callable[[Keeper], Awaitable[None]], keeper: Callable[[], Keeper] = Keeper) -> None:
    async def made() -> None:
        found = keeper()
        await found.topic(found.clicks)
        trim, span = found.queue.trim, found.queue.span

        async def noted(partition: ReadPartition, before: int) -> None:
            found.trims.append(before)
            await trim(partition, before)

        async def counted(partition: ReadPartition) -> Span:
            found.spans += 1
            return await span(partition)

        found.queue.trim = noted  # type: ignore[method-assign]
        found.queue.span = counted  # type: ignore[method-assign]
        await work(found)

    asyncio.run(made())


# ---- what is decided -----------------------------------------------------------------------------


def entries(*ages_ms: int) -> list[tuple[Entry, Pointer | None]]:
    """Return pointers of 100 bytes each, from offset 10 on."""
    pointer = Pointer(
        kind="data", cluster=CLUSTER, topic="clicks", topic_id="0" * 32, partition=0, epoch=1, stored_bytes=100
    )
    return [(Entry(10 + number, NOW_MS - age_ms, b""), pointer) for number, age_ms in enumerate(ages_ms)]


def test_exactly_the_wanted_bytes_stay_and_a_damaged_entry_has_none() -> None:
    known = entries(*[3 * YOUNG_MS] * 3, 2 * YOUNG_MS)
    known[0] = (known[0][0], None)
    assert expired(known, TopicSettings(retention_ms=0, retention_bytes=300), NOW_MS).before == 11
    assert expired(known, TopicSettings(retention_ms=0, retention_bytes=301), NOW_MS).before == 10


def test_a_log_of_damaged_entries_alone_loses_none_and_an_empty_one_begins_at_the_start() -> None:
    damaged = [(entry, None) for entry, _ in entries(9 * DAY_MS, 8 * DAY_MS)]
    found = expired(damaged, KEPT, NOW_MS)
    assert (found.before, found.keys, found.holding) == (10, (), ())
    assert expired([], KEPT, NOW_MS).before == 0


@pytest.mark.parametrize(
    ("numbers", "bytes_left", "taken"),
    [
        ((5, 6, 7, 5, 8, 9), 300, 0),  # the second 5 alone would look like a log that has lost 6 and 7
        ((5, 6, 7, 5, 8, 9), 200, 4),
        ((4, 5, 6, 7, 5, 8), 200, 1),
        ((5, 6, 5, 7, 6, 8), 200, 0),
        ((5, 6, 5, 7, 6, 8), 100, 5),
        ((5, 6, 6, 7, 8), 300, 1),
    ],
)
def test_retention_takes_all_pointers_of_a_batch_together(
    numbers: tuple[int, ...], bytes_left: int, taken: int
) -> None:
    known: list[tuple[Entry, Pointer | None]] = [
        (entry, msgspec.structs.replace(pointer, batch_sequence=number))
        for number, (entry, pointer) in zip(numbers, entries(*[3 * YOUNG_MS] * len(numbers)), strict=True)
        if pointer is not None
    ]
    opened = Pointer(kind="opened", cluster=CLUSTER, topic="clicks", topic_id="0" * 32, partition=0, epoch=2)
    known.append((Entry(10 + len(numbers), NOW_MS, b""), opened))
    found = expired(known, TopicSettings(retention_ms=0, retention_bytes=bytes_left), NOW_MS)
    assert found.before == 10 + taken


@pytest.mark.parametrize(
    ("bytes_max", "behind", "count"),
    [(0, 0, 0), (100, 0, 2), (101, 0, 1), (200, 0, 1), (250, 50, 1), (100, 100, 3), (1_000, 0, 0)],
)
def test_parts_go_while_the_wanted_bytes_are_behind_them(bytes_max: int, behind: int, count: int) -> None:
    parts = compaction_manifest(topic_of("clicks"), part_of(0), part_of(1), part_of(2))
    settings = TopicSettings(retention_ms=0, retention_bytes=bytes_max)
    assert expired_parts(parts, behind, settings, NOW_MS) == count


@pytest.mark.parametrize(("age_ms", "goes"), [(YOUNG_MS + 1, True), (YOUNG_MS, False), (0, False)])
def test_a_part_that_is_too_much_stays_while_the_dedup_window_is_rebuilt_from_it(age_ms: int, *, goes: bool) -> None:
    parts = compaction_manifest(topic_of("clicks"), part_of(0, NOW_MS - age_ms))
    settings = TopicSettings(retention_ms=0, retention_bytes=1)
    assert expired_parts(parts, 100, settings, NOW_MS) == goes


@pytest.mark.parametrize(("age_ms", "goes"), [(DAY_MS + 1, True), (DAY_MS, False)])
def test_a_part_goes_when_its_youngest_pointer_is_too_old(age_ms: int, *, goes: bool) -> None:
    parts = compaction_manifest(topic_of("clicks"), part_of(0, NOW_MS - age_ms), part_of(1, NOW_MS))
    assert expired_parts(parts, 0, KEPT, NOW_MS) == goes
    assert first_old_ms(parts) == NOW_MS - age_ms
    assert first_old_ms(None) == first_old_ms(compaction_manifest(topic_of("clicks"))) == TIME_MS_END


# ---- rounds of retention -------------------------------------------------------------------------


def test_a_pointer_goes_one_millisecond_after_its_time_and_not_before() -> None:
    async def work(keeper: Keeper) -> None:
        old = await keeper.write(0, age_ms=DAY_MS - 10)
        kept = await keeper.write(1)
        await keeper.round()
        first = keeper.spans
        keeper.clock.advance(10)
        await keeper.round()
        assert keeper.spans == first, "it can't be too old: nothing is asked"
        keeper.clock.advance(1)
        await keeper.round()
        assert (await keeper.queue.span(keeper.log)).begin == 1
        assert list(keeper.store.objects) == [kept] != [old]
        assert (keeper.counters.retired_pointers, keeper.counters.retired_objects) == (1, 1)
        assert keeper.events.take() == [("retired", "topic 'clicks' partition 0: 1 pointers, 1 objects")]

    keep(work)


def test_a_round_that_comes_just_in_time_reads_one_pointer_and_leaves_the_log() -> None:
    async def work(keeper: Keeper) -> None:
        await keeper.write(0, age_ms=DAY_MS)
        await keeper.write(1)
        read: list[int] = []
        whole = keeper.queue.read

        async def noted(partition: ReadPartition, offset: int, bytes_max: int) -> object:
            read.append(offset)
            return await whole(partition, offset, bytes_max)

        keeper.queue.read = noted  # type: ignore[method-assign, assignment]
        await keeper.round()
        assert read == [0]
        assert keeper.trims == []
        [(_, due_ms)] = keeper.partitions.retention_due.values()
        assert due_ms == keeper.now_ms + 1

    keep(work)


def test_each_retention_round_counts_its_removals() -> None:
    async def work(keeper: Keeper) -> None:
        for number in range(5):
            await keeper.write(number, age_ms=DAY_MS - number * 1_000)
        await keeper.write(5)
        for _ in range(2):
            keeper.clock.advance(2_000)
            await keeper.round()
        assert keeper.trims == [2, 4]
        assert keeper.counters.retired_pointers == keeper.counters.retired_objects == 4
        assert [text for _, text in keeper.events.take()] == ["topic 'clicks' partition 0: 2 pointers, 2 objects"] * 2

    keep(work)


def test_the_owner_forgets_the_pointers_of_a_log_that_retention_has_cut() -> None:
    """A consumer got records from the owner's memory that retention had taken."""

    async def work(keeper: Keeper) -> None:
        cache = keeper.services.recent_pointers
        for number, age_ms in enumerate((DAY_MS, 0)):
            await keeper.write(number, age_ms=age_ms)
            cache.add(keeper.log, RecentPointer(Entry(number, 0, b"p"), None))
        await keeper.round()
        assert keeper.trims == []
        assert cache.find(keeper.log, 0) is not None
        keeper.clock.advance(2_000)
        await keeper.round()
        assert keeper.trims == [1]
        assert cache.find(keeper.log, 0) is None

    keep(work)


def test_where_objects_are_not_deleted_the_pointers_go_alone() -> None:
    async def work(keeper: Keeper) -> None:
        await keeper.write(0, age_ms=DAY_MS + 1)
        await keeper.write(1)
        keeper.services.settings = replace(keeper.services.settings, delete_objects=False)  # type: ignore[misc]
        await keeper.round()
        assert len(keeper.store.objects) == 2
        assert keeper.events.take() == [("retired", "topic 'clicks' partition 0: 1 pointers, 0 objects")]

    keep(work)


def test_a_round_in_which_nothing_may_go_trims_nothing_and_says_nothing() -> None:
    async def work(keeper: Keeper) -> None:
        await keeper.write(0, age_ms=2 * DAY_MS)
        await keeper.round()
        assert (keeper.trims, keeper.events.take(), keeper.counters.retired_pointers) == ([], [], 0)

    keep(work)


def test_each_owner_takes_what_is_its_own() -> None:
    async def work(keeper: Keeper) -> None:
        for partition in range(2):
            await keeper.write(0, age_ms=DAY_MS + 1, partition=partition)
            await keeper.write(1, partition=partition)
        await keeper.round()
        begins = [(await keeper.queue.span(log)).begin for log in read_partitions(keeper.clicks)]
        assert begins == [0, 1], "the one that others own stays, and does not end the round"
        assert [log.partition for log in keeper.partitions.retention_due] == [1]

    keep(work, lambda: Keeper(partitions=2, owned=(1,)))


def test_a_damaged_pointer_is_counted_and_named_at_each_reading() -> None:
    async def work(keeper: Keeper) -> None:
        await keeper.write(0, age_ms=2 * DAY_MS, body=b"{damaged")
        await keeper.write(1, age_ms=2 * DAY_MS)
        await keeper.write(2)
        await keeper.round()
        assert keeper.counters.damaged_pointers == 1
        assert [event for event, _ in keeper.events.take()] == ["pointer-damaged", "retired"]
        assert keeper.trims == [2]

    keep(work)


def test_no_object_goes_while_the_queue_shows_what_was_trimmed() -> None:
    """The witness of a trim is the log behind it."""

    async def work(keeper: Keeper) -> None:
        for number in range(2):
            await keeper.write(number, age_ms=2 * DAY_MS)
        await keeper.write(2)

        async def ignored(partition: ReadPartition, before: int) -> None: ...

        keeper.queue.trim = ignored  # type: ignore[method-assign]
        await keeper.round()
        assert len(keeper.store.objects) == 3
        [(event, text)] = keeper.events.take()
        assert event == "retention-failed"
        assert "the queue shows offset 0 after a trim to 2: 2 objects are left" in text
        keeper.queue.logs[keeper.log].epochs.clear()

    keep(work)


# ---- compacted parts ----------------------------------------------------------------------------------


def test_an_empty_log_is_left_alone_whatever_its_manifest_says() -> None:
    """A queue that lost the log: its compacted parts are what a restore goes by."""

    async def work(keeper: Keeper) -> None:
        await keeper.publish_parts(compaction_manifest(keeper.clicks, part_of(0)))
        keeper.queue.logs[keeper.log].begin = 1
        await keeper.round()
        assert (keeper.trims, keeper.counters.retired_pointers) == ([], 0)
        assert await ManifestFiles(CLUSTER, keeper.store).highest_number(keeper.log) == 1

    keep(work, lambda: Keeper(TopicSettings(retention_ms=DAY_MS, retention_bytes=1)))


def test_pointers_stay_while_a_compacted_part_before_them_does() -> None:
    """Their order is that of offsets: a log has no hole between its manifest and its queue."""

    async def work(keeper: Keeper) -> None:
        for number in range(2):
            await keeper.write(number, age_ms=3 * DAY_MS)
        for number in range(2, 4):
            await keeper.write(number, age_ms=2 * DAY_MS)
        await keeper.write(4)
        await keeper.publish_parts(compaction_manifest(keeper.clicks, part_of(0, keeper.now_ms, entries=2)))
        await keeper.queue.trim(keeper.log, 1)  # the compaction was killed before it took the rest
        await keeper.round()
        assert (await keeper.queue.span(keeper.log)).begin == 2, "what the manifest has leaves the queue"
        assert keeper.counters.retired_pointers == 0

    keep(work)


def test_compacted_parts_go_by_the_bytes_behind_them_and_then_the_pointers() -> None:
    async def work(keeper: Keeper) -> None:
        for number in range(2):
            await keeper.write(number, age_ms=3 * YOUNG_MS)
        for number in range(2, 4):
            await keeper.write(number, age_ms=2 * YOUNG_MS)
        await keeper.write(4)
        await keeper.publish_parts(compaction_manifest(keeper.clicks, part_of(0, entries=2)))
        await keeper.queue.trim(keeper.log, 1)
        await keeper.services.pointers.span(keeper.log)  # a reader has met the manifest
        keeper.trims.clear()
        await keeper.round()
        assert keeper.events.take() == [
            ("retired", "topic 'clicks' partition 0: 2 compacted pointers"),
            ("retired", "topic 'clicks' partition 0: 1 pointers, 1 objects"),
        ]
        assert keeper.trims == [2, 3]
        assert keeper.counters.retired_pointers == 3
        assert await keeper.services.pointers.span(keeper.log) == Span(3, 5), "readers see the new manifest at once"

    keep(work, lambda: Keeper(TopicSettings(retention_ms=0, retention_bytes=200)))


def test_parts_stay_when_a_compaction_publishes_first() -> None:
    async def work(keeper: Keeper) -> None:
        for number in range(2):
            await keeper.write(number, age_ms=2 * DAY_MS)
        await keeper.write(2)
        await keeper.publish_parts(compaction_manifest(keeper.clicks, part_of(0, entries=2)))
        await keeper.queue.trim(keeper.log, 1)
        manifests = keeper.services.manifests
        publish = manifests.publish

        async def late(manifest: CompactionManifest) -> bool:
            await publish(msgspec.structs.replace(compaction_manifest(keeper.clicks, part_of(0, entries=2)), number=2))
            return await publish(manifest)

        manifests.publish = late  # type: ignore[method-assign]
        await keeper.round()
        assert keeper.counters.retired_pointers == 0
        found = await manifests.highest(keeper.log)
        assert found is not None
        assert [part.key for part in found.parts] == ["part-0"]

    keep(work)


def test_an_owner_trims_what_manifests_have_and_readers_notice_at_once() -> None:
    async def work(keeper: Keeper) -> None:
        for number in range(3):
            await keeper.write(number)
        pointers = keeper.services.pointers
        await keeper.queue.trim(keeper.log, 1)
        assert await pointers.span(keeper.log) == Span(1, 3)
        await keeper.publish_parts(compaction_manifest(keeper.clicks, part_of(0, entries=2)))
        keeper.trims.clear()
        await trim_compacted(keeper.services, keeper.clicks)
        assert keeper.trims == [2]
        assert await pointers.span(keeper.log) == Span(0, 3)

    keep(work)


def test_log_without_compaction_keeps_its_pointers() -> None:
    async def work(keeper: Keeper) -> None:
        await keeper.write(0)
        await trim_compacted(keeper.services, keeper.clicks)
        assert keeper.trims == []

    keep(work)


@pytest.mark.parametrize(
    ("settings", "trims", "retired", "deleted"),
    [(KEPT, [2, 5], 3 + 1, 1), (TopicSettings(retention_ms=0, retention_bytes=200), [2], 3, 0)],
    ids=["the repetition is too old, too", "the repetition stays"],
)
def test_pointers_behind_which_a_batch_landed_again_leave_the_queue_with_the_repetition(
    settings: TopicSettings, trims: list[int], retired: int, deleted: int
) -> None:
    async def work(keeper: Keeper) -> None:
        for number in (0, 1, 2, 3, 2):
            await keeper.write(number, age_ms=2 * DAY_MS)
        await keeper.write(4)
        await keeper.queue.trim(keeper.log, 1)
        await keeper.publish_parts(compaction_manifest(keeper.clicks, part_of(1, entries=3)))
        keeper.trims.clear()
        for _ in range(2):
            await keeper.round()
        assert keeper.trims == trims
        assert keeper.counters.retired_pointers == retired
        assert keeper.counters.retired_objects == deleted

    keep(work, lambda: Keeper(settings))


def test_shared_objects_of_batches_before_a_late_try_are_swept_and_not_reported_as_lost() -> None:
    async def work(keeper: Keeper) -> None:
        keys = [shared_object_key(CLUSTER, "b", 1, number, keeper.now_ms) for number in range(6)]

        async def write(number: int, age_ms: int = 0) -> None:
            await keeper.put(keys[number], indexed(keeper.clicks, 0, number=number))
            await keeper.write(number, age_ms=age_ms, key=keys[number])

        for number in (0, 1, 2, 0, 3):
            await write(number, DAY_MS)
        for number, left in ((4, keys[:5]), (5, keys[3:])):
            await write(number)
            keeper.clock.advance(DAY_MS)
            await keeper.round()
            for _ in range(2):
                await sweep(keeper.services, HOUR_MS)
                keeper.clock.advance(keeper.services.settings.sweep_confirm_ms)
            assert "not-swept" not in dict(keeper.events.take())
            assert [key for key in keeper.store.objects if key in keys] == left

    keep(work, lambda: Keeper(TopicSettings(retention_ms=0, retention_bytes=300)))
