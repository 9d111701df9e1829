"""The plan of a compaction: removed batches in a manifest, and batches that are not copied."""

from __future__ import annotations

import asyncio

import pytest

from memq.compaction import plan
from memq.compaction.compaction import checked_blocks
from memq.compaction.plan import CompactionRule, following, spans_to_compact, without
from memq.errors import CorruptDataError
from memq.format.blocks.header import scope_of
from memq.format.compaction_manifest import CompactionManifest, LeftPart, PartRef
from memq.format.key import large_object_key
from memq.format.pointer import Location, Pointer, ProducerRanges, encode_pointer
from memq.notification import Publication
from memq.notification.memory import MemoryQueue
from memq.topic import CLOCK_ERROR_MS, ReadPartition, TopicSettings
from tests.contract.manual_clock import ManualClock
from tests.unit.blocks import build, seal

TOPIC_ID = "0" * 31 + "1"
KEPT_MS = 1_000


def part(first: int, next_: int) -> PartRef:
    return PartRef(
        key=f"part-{first}",
        first=first,
        next=next_,
        entries=next_ - first,
        bytes=10,
        greatest_ms=1,
        created_ms=1,
        objects=(),
    )


def manifest(*parts: PartRef, left: tuple[LeftPart, ...] = ()) -> CompactionManifest:
    end = parts[-1].next if parts else 0
    return CompactionManifest(
        number=3, cluster="c", topic="clicks", topic_id=TOPIC_ID, partition=0, next=end, parts=parts, left=left
    )


def test_removed_part_is_named_for_twice_the_requested_time() -> None:
    """A sweep that began before the part left goes by the manifest of then, one that begins later by this one."""
    now_ms = 100_000
    old, young = (LeftPart(part=part(n, n + 1), since_ms=now_ms - age) for n, age in ((0, 2_001), (1, 2_000)))
    successor = without(manifest(part(2, 5), part(5, 9), left=(old, young)), 1, now_ms, KEPT_MS)
    assert successor.number == 4
    assert successor.parts == (part(5, 9),)
    assert successor.left == (young, LeftPart(part=part(2, 5), since_ms=now_ms))
    assert (successor.begin, successor.next) == (5, 9)


def test_a_successor_ends_with_its_last_part_and_one_without_parts_where_it_was() -> None:
    before = manifest(part(2, 5))
    assert following(before, ()).next == 5
    after = following(before, (part(5, 7), part(7, 9)))
    assert (after.number, after.begin, after.next) == (4, 2, 9)


@pytest.mark.parametrize("records", [2, 4])
def test_a_batch_with_other_records_than_its_pointer_says_is_not_copied(records: int) -> None:
    scope = scope_of(bytes.fromhex(TOPIC_ID), 0)
    block = seal(build([(b"v", None, (), None, None)] * 3), producer_id=7, first_sequence=0, scope=scope)
    pointer = Pointer(
        kind="data",
        cluster="c",
        topic="clicks",
        topic_id=TOPIC_ID,
        partition=0,
        epoch=1,
        records=records,
        producers=(ProducerRanges(7, ((0, 3),)),),
    )
    with pytest.raises(CorruptDataError, match=r"beyond record 2|batch ends after 3 of 4 records"):
        checked_blocks(pointer, bytes(block.data))


def test_pointers_that_the_next_opening_needs_are_not_compacted() -> None:
    """The last pointer of a write partition settles its totals: an opening looks for it in the queue."""

    async def work() -> list[tuple[int, int]]:
        clock = ManualClock()
        queue, partition = MemoryQueue(clock), ReadPartition("clicks", TOPIC_ID, 0)
        settings = TopicSettings()
        await queue.create([partition], settings.stale_publish_ms)
        day_ms = 86_400_000
        for hour in range(4):
            pointer = Pointer(kind="opened", cluster="c", topic="clicks", topic_id=TOPIC_ID, partition=0, epoch=1)
            time_ms = clock.wall_ms() - 3 * day_ms + hour * 3_600_000
            await queue.publish(Publication(partition, 0, 1, time_ms, encode_pointer(pointer)))
        rule = CompactionRule(age_ms=day_ms, rest=True)
        spans = spans_to_compact(queue, partition, 0, settings, rule, clock.wall_ms())
        return [(span.begin, span.end) async for span in spans]

    assert asyncio.run(work()) == [(0, 3)]


# ---- where large objects are cut --------------------------------------------------------------------

DAY_MS = 86_400_000


def data_body(length: int, *, key: str = "c/t/clicks/0/1/7") -> bytes:
    """Return a pointer to a batch of so many bytes."""
    location = Location(store="main", key=key, offset=0, length=length, index=length + 1)
    return encode_pointer(
        Pointer(
            kind="data",
            cluster="c",
            topic="clicks",
            topic_id=TOPIC_ID,
            partition=0,
            epoch=1,
            records=1,
            locations=(location,),
        )
    )


CONTROL = encode_pointer(Pointer(kind="opened", cluster="c", topic="clicks", topic_id=TOPIC_ID, partition=0, epoch=1))


def spans_of(
    bodies: list[bytes], rule: CompactionRule, *, age_ms: int = 3 * DAY_MS, start: int = 0
) -> list[tuple[int, int]]:
    """Return the runs of entries of that age; a young pointer behind them is what the next opening wants."""

    async def work() -> list[tuple[int, int]]:
        clock = ManualClock()
        queue, partition = MemoryQueue(clock), ReadPartition("clicks", TOPIC_ID, 0)
        settings = TopicSettings()
        await queue.create([partition], settings.stale_publish_ms)
        for body in bodies:
            await queue.publish(Publication(partition, 0, 1, clock.wall_ms() - age_ms, body))
        await queue.publish(Publication(partition, 0, 1, clock.wall_ms(), CONTROL))
        spans = spans_to_compact(queue, partition, start, settings, rule, clock.wall_ms())
        return [(span.begin, span.end) async for span in spans]

    return asyncio.run(work())


@pytest.mark.parametrize(
    ("lengths", "rest", "spans"),
    [
        ([40, 60], False, [(0, 2)]),  # full to the byte
        ([40, 59], False, []),  # what fills no object waits
        ([40, 59], True, [(0, 2)]),
        ([40, 61], False, [(0, 1)]),  # one byte too many: the next run begins there
        ([40, 61], True, [(0, 1), (1, 2)]),
        ([250, 10], True, [(0, 1), (1, 2)]),  # a batch larger than an object is one alone
        ([250], False, [(0, 1)]),
        ([0, 0, 100, 1], True, [(0, 3), (3, 4)]),
        ([30, 30, 30, 30, 30, 30, 30], True, [(0, 3), (3, 6), (6, 7)]),
        ([], True, []),
    ],
)
def test_a_run_ends_before_the_batch_that_its_object_has_no_room_for(
    lengths: list[int], rest: bool, spans: list[tuple[int, int]]
) -> None:
    rule = CompactionRule(age_ms=DAY_MS, object_bytes=100, rest=rest)
    assert spans_of([data_body(length) for length in lengths], rule) == spans


def test_entries_that_are_not_copied_count_no_bytes_and_split_no_run() -> None:
    large = data_body(90, key=large_object_key("c", "clicks", TOPIC_ID, 7, 1))
    bodies = [CONTROL, data_body(50), large, b"damaged", data_body(50), CONTROL, data_body(1)]
    assert spans_of(bodies, CompactionRule(age_ms=DAY_MS, object_bytes=100)) == [(0, 6)]


def test_an_entry_is_compacted_once_it_is_older_than_the_rule_says() -> None:
    bodies, rule = [data_body(100)], CompactionRule(age_ms=DAY_MS, object_bytes=100)
    assert spans_of(bodies, rule, age_ms=DAY_MS) == []
    assert spans_of(bodies, rule, age_ms=DAY_MS + 1) == [(0, 1)]
    assert spans_of(bodies * 3, rule, start=1) == [(1, 2), (2, 3)]


def test_no_entry_is_compacted_that_an_opening_rebuilds_the_dedup_window_from() -> None:
    bodies, rule = [data_body(100)], CompactionRule(age_ms=0, rest=True)
    window_ms = TopicSettings().dedup_window_ms + CLOCK_ERROR_MS
    assert spans_of(bodies, rule, age_ms=window_ms) == []
    assert spans_of(bodies, rule, age_ms=window_ms + 1) == [(0, 1)]


def test_a_run_ends_with_so_many_pointers_or_bytes_of_them_as_a_part_may_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bodies, rule = [data_body(1)] * 7, CompactionRule(age_ms=DAY_MS, rest=True)
    with monkeypatch.context() as changed:
        changed.setattr(plan, "POINTERS_MAX", 3)
        assert spans_of(bodies, rule) == [(0, 3), (3, 6), (6, 7)]
    with monkeypatch.context() as changed:
        changed.setattr(plan, "COMPACTION_POINTER_BYTES_MAX", 3 * len(bodies[0]))
        assert spans_of(bodies, rule) == [(0, 3), (3, 6), (6, 7)]
        changed.setattr(plan, "COMPACTION_POINTER_BYTES_MAX", 3 * len(bodies[0]) - 1)
        assert spans_of(bodies, rule) == [(0, 2), (2, 4), (4, 6), (6, 7)]
