"""Plans of tasks: copies by pointers, edges of a range, splits by size, exact micro-batches."""

from __future__ import annotations

import asyncio
import itertools
import pickle
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.errors import CorruptDataError, InvalidRequestError
from memq.format.batch import BlockPiece
from memq.format.blocks.header import parse_header
from memq.format.pointer import Location, Pointer, ProducerRanges, pointer_mark
from memq.limits import KIB, MIB
from memq.notification import Entry, Span
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime
from memq.spark.access import Access, SparkTopic
from memq.spark.options import ReadOptions, read_options
from memq.spark.read import batch_reader, planner
from memq.spark.read.planner import (
    PARTS_MAX,
    SPREAD_BYTES_MIN,
    SPREAD_TASKS,
    BatchPart,
    EarlierBatches,
    PartitionPlan,
    Split,
    TaskRange,
    TaskSettings,
    sound_copies,
    split_parts,
    spread_bytes,
    stretches_of,
)
from memq.spark.read.pruning import ReadFilter
from memq.spark.read.task import settings_of
from memq.spark.stores import StoreUrls
from memq.spark.stream_offsets import Admission, StreamLag, StreamPosition, decode_offsets, encode_offsets, lag
from memq.topic import Position, ReadPartition, TopicSettings
from tests.unit.audited import block, data_pointer

PARTITION = ReadPartition("clicks", "0" * 32, 0)
PRODUCER = 7
END = Position(0, 1_000)
WINDOW_MS = 1_000
Block = tuple[int, int, bool]  # producer, number, whether it is sound
SETTINGS = TaskSettings(StoreUrls({}), ReadFilter(), 0, skip_damaged=False, dedup=True, missing_s=0.0)


def pointer_of(first: int, next_: int, *, size: int = 100) -> Pointer:
    return Pointer(
        kind="data", cluster="c", topic="clicks", topic_id="0" * 32, partition=0, epoch=1, records=next_ - first,
        locations=(Location(store="main", key="k", offset=0, length=size),),
        producers=(ProducerRanges(PRODUCER, ((first, next_),)),),
    )  # fmt: skip


def plan_of(offset: int = 0, *, dedup: bool = True) -> PartitionPlan:
    return PartitionPlan(Position(0, offset), END, 60_000, ReadFilter(), dedup=dedup)


def take(plan: PartitionPlan, offset: int, pointer: Pointer, time_ms: int = 0) -> BatchPart:
    part = plan.take(Entry(offset, time_ms, b""), pointer)
    assert part is not None
    return part


def test_a_task_gets_the_sequences_of_batches_before_its_own() -> None:
    plan = plan_of()
    assert take(plan, 0, pointer_of(0, 10)).seen == ()
    assert take(plan, 1, pointer_of(10, 20)).seen == ()
    assert take(plan, 2, pointer_of(5, 25)).seen == ((PRODUCER, (5, 20)),)
    assert take(plan, 3, pointer_of(20, 30)).seen == ((PRODUCER, (20, 25)),)
    assert take(plan_of(dedup=False), 0, pointer_of(0, 10)).seen == ()


def test_the_window_before_the_start_counts_and_ends() -> None:
    plan = plan_of(5)
    plan.look_back(0, pointer_of(0, 10))
    assert take(plan, 5, pointer_of(0, 10), time_ms=1_000).seen == ((PRODUCER, (0, 10)),)
    take(plan, 6, pointer_of(50, 60), time_ms=1_000_000)
    assert take(plan, 7, pointer_of(0, 10), time_ms=1_100_000).seen == (), "what is older than the window is not seen"


def test_a_plan_that_continues_remembers() -> None:
    plan = plan_of()
    take(plan, 0, pointer_of(0, 10))
    plan.extend(END, Position(0, 2_000))
    assert take(plan, 1_000, pointer_of(0, 10)).seen == ((PRODUCER, (0, 10)),)


def test_edges_inside_of_batches() -> None:
    plan = PartitionPlan(Position(0, 3, 4), Position(0, 5, 2), 60_000, ReadFilter(), dedup=True)
    edges = [(part.low, part.high) for part in (take(plan, offset, pointer_of(0, 10)) for offset in (3, 4, 5))]
    assert edges == [(4, None), (0, None), (0, 2)]


def test_control_pointers_and_unreadable_ones() -> None:
    plan = plan_of()
    opened = Pointer(kind="opened", cluster="c", topic="clicks", topic_id="0" * 32, partition=0, epoch=1)
    assert plan.take(Entry(0, 0, b""), opened) is None
    cause = CorruptDataError("pointer can't be read", hint="look")
    part = plan.take(Entry(1, 0, b""), cause)
    assert part is not None
    assert part.cause is cause


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 100))
def test_splits_keep_order_and_size(sizes: list[int], bytes_max: int) -> None:
    parts = [BatchPart(0, offset, pointer_of(0, 1, size=size)) for offset, size in enumerate(sizes)]
    settings = settings_of(ReadOptions(), StoreUrls({}), ReadFilter())
    splits = split_parts(parts, bytes_max, settings)
    assert [part for split in splits for part in split.parts] == parts
    for split in splits:
        assert len(split.parts) == 1 or sum(part.bytes for part in split.parts) <= bytes_max
    many = split_parts([BatchPart(0, 0, None)] * (PARTS_MAX + 1), bytes_max, settings)
    assert [len(split.parts) for split in many] == [PARTS_MAX, 1]


@given(st.lists(st.integers(1, 16 * MIB), max_size=60))
def test_small_reads_are_shared_evenly(sizes: list[int]) -> None:
    parts = [BatchPart(0, offset, pointer_of(0, 1, size=size)) for offset, size in enumerate(sizes)]
    settings = settings_of(ReadOptions(), StoreUrls({}), ReadFilter())
    bytes_max = spread_bytes(parts, 128 * MIB)
    splits = split_parts(parts, bytes_max, settings)
    assert len(splits) <= SPREAD_TASKS
    assert SPREAD_BYTES_MIN <= bytes_max <= 128 * MIB
    share = max(sum(sizes) / SPREAD_TASKS, SPREAD_BYTES_MIN)
    largest = max((sum(part.bytes for part in split.parts) for split in splits), default=0)
    assert largest <= 1.04 * (share + max(sizes, default=0)), "no task has much more than its share"
    assert spread_bytes(parts, 64 * KIB) == 64 * KIB, "what was asked for is the most"


def test_splits_are_filled_to_their_last_byte() -> None:
    settings = settings_of(ReadOptions(), StoreUrls({}), ReadFilter())
    parts = [BatchPart(0, offset, pointer_of(0, 1, size=50)) for offset in range(7)]
    assert [len(split.parts) for split in split_parts(parts, 100, settings)] == [2, 2, 2, 1]
    assert [len(split.parts) for split in split_parts(parts, 99, settings)] == [1] * 7
    assert [len(split.parts) for split in split_parts(parts, 150, settings)] == [3, 3, 1]


def test_a_read_that_few_tasks_share_has_the_least_bound() -> None:
    few = [BatchPart(0, offset, pointer_of(0, 1, size=MIB)) for offset in range(3)]
    assert spread_bytes(few, 128 * MIB) == SPREAD_BYTES_MIN
    even = [BatchPart(0, offset, pointer_of(0, 1, size=16 * MIB)) for offset in range(SPREAD_TASKS)]
    assert spread_bytes(even, 128 * MIB) == 16 * MIB, "a part for each task"
    assert spread_bytes([], 128 * MIB) == SPREAD_BYTES_MIN
    one_more = [*even, even[0]]
    settings = settings_of(ReadOptions(), StoreUrls({}), ReadFilter())
    assert [len(split.parts) for split in split_parts(one_more, spread_bytes(one_more, 128 * MIB), settings)][:1] == [2]


def test_splits_travel_to_tasks() -> None:
    cause = CorruptDataError("pointer can't be read", hint="look")
    parts = [BatchPart(0, 0, pointer_of(0, 10), seen=((PRODUCER, (0, 5)),)), BatchPart(0, 1, None, cause=cause)]
    (split,) = split_parts(parts, 1 << 30, settings_of(ReadOptions(), StoreUrls({"main": "file:/x"}), ReadFilter()))
    came = pickle.loads(pickle.dumps(split))
    assert came.parts[0] == split.parts[0]
    assert came.settings == split.settings
    assert isinstance(came.parts[1].cause, CorruptDataError)
    assert (str(came.parts[1].cause), came.parts[1].cause.hint) == (str(cause), "look")


@given(st.lists(st.integers(1, 40), min_size=1), st.integers(1, 60))
def test_micro_batches_take_each_record_once_and_as_many_as_allowed(counts: list[int], records_max: int) -> None:
    position, taken = StreamPosition(0), []
    while position.offset < len(counts):
        admission = Admission(records_max, None, {PARTITION: position})
        for offset in range(position.offset, len(counts)):
            if admission.full:
                break
            admission.take(PARTITION, offset, pointer_of(0, counts[offset]))
        after = admission.positions[PARTITION]
        taken.append(after.records - position.records)
        position = after
    assert sum(taken) == sum(counts) == position.records
    assert all(count == records_max for count in taken[:-1])
    assert 0 < taken[-1] <= records_max


@given(st.lists(st.integers(1, 40), min_size=1), st.integers(1, 60))
def test_micro_batches_have_whole_batches_of_as_many_bytes(sizes: list[int], bytes_max: int) -> None:
    position = StreamPosition(0)
    while position.offset < len(sizes):
        admission = Admission(None, bytes_max, {PARTITION: position})
        for offset in range(position.offset, len(sizes)):
            if admission.full:
                break
            admission.take(PARTITION, offset, pointer_of(0, 1, size=sizes[offset]))
        after = admission.positions[PARTITION]
        assert after.offset == position.offset + 1 or after.bytes - position.bytes <= bytes_max
        assert after.offset > position.offset
        position = after
    assert position.bytes == sum(sizes)


@pytest.mark.parametrize(
    ("records_max", "bytes_max", "end"),
    [
        (None, 99, (1, 0)),
        (None, 100, (2, 0)),
        (None, 149, (2, 0)),
        (None, 150, (3, 0)),
        (19, None, (1, 9)),
        (20, None, (2, 0)),
        (21, None, (2, 1)),
        (30, 100, (2, 0)),
        (15, 100, (1, 5)),
        (None, 1, (1, 0)),
        (10, 1, (1, 0)),
        (1, 1, (0, 1)),
    ],
)
def test_a_micro_batch_reaches_its_bounds_exactly(
    records_max: int | None, bytes_max: int | None, end: tuple[int, int]
) -> None:
    """The batches have ten records each, and 40, 60 and 50 bytes."""
    admission = Admission(records_max, bytes_max, {PARTITION: StreamPosition(0)})
    for offset, size in enumerate((40, 60, 50)):
        if not admission.full:
            admission.take(PARTITION, offset, pointer_of(10 * offset, 10 * offset + 10, size=size))
    found = admission.positions[PARTITION]
    assert (found.offset, found.index) == end
    assert found.records == 10 * end[0] + end[1]
    assert found.bytes == sum((40, 60, 50)[: end[0]])


def test_pointers_without_records_pass_the_bounds_of_a_micro_batch() -> None:
    admission = Admission(10, 40, {PARTITION: StreamPosition(0)})
    opened = Pointer(kind="opened", cluster="c", topic="clicks", topic_id="0" * 32, partition=0, epoch=1)
    admission.take(PARTITION, 0, opened)
    admission.take(PARTITION, 1, CorruptDataError("pointer can't be read"))
    admission.take(PARTITION, 2, pointer_of(0, 10, size=40))
    admission.take(PARTITION, 3, opened)
    assert (admission.positions[PARTITION], admission.full) == (
        StreamPosition(4, 0, 10, 40, pointer_mark(opened)),
        False,
    )


def test_offsets_go_through_json_and_name_what_they_are_not_of() -> None:
    positions = {PARTITION: StreamPosition(17, 3, 100, 2_000), ReadPartition("clicks", "0" * 32, 1): StreamPosition(0)}
    encoded = encode_offsets(positions)
    assert decode_offsets(encoded, list(positions)) == positions
    assert encode_offsets(decode_offsets(encoded, list(positions))) == encoded, "Spark compares text"
    for other in (ReadPartition("clicks", "1" * 32, 0), ReadPartition("orders", "0" * 32, 0)):
        with pytest.raises(InvalidRequestError, match="checkpoint"):
            decode_offsets(encoded, [other])
    with pytest.raises(InvalidRequestError, match="can't be read"):
        decode_offsets({"clicks": 3}, [PARTITION])


def test_lag_is_the_difference_of_offsets_and_nothing_for_other_sources() -> None:
    here, end = (
        encode_offsets({PARTITION: position})
        for position in (StreamPosition(1, 0, 10, 100), StreamPosition(5, 0, 25, 700))
    )
    ours = {"endOffset": here, "latestOffset": end}
    assert lag({"sources": [ours, {"endOffset": "5", "latestOffset": None}]}) == StreamLag(15, 600)
    assert lag({"sources": [{"endOffset": None, "latestOffset": end}]}) == StreamLag(25, 700), "nothing is read so far"
    assert lag({"sources": [{"endOffset": end, "latestOffset": here}, ours]}) == StreamLag(15, 600), "never below 0"


def pieces_of(blocks: list[Block]) -> list[BlockPiece]:
    """Return blocks of ten records, number 3 having 30 to 40."""
    found = []
    for number, (producer, at, sound) in enumerate(blocks):
        data = block(producer, at * 10, at * 10 + 10)
        header, cause = (parse_header(data), None) if sound else (None, CorruptDataError("damaged", hint="none"))
        found.append(BlockPiece(number, number * 10, 10, header, memoryview(data), cause))
    return found


def resent_pointer(blocks: list[Block]) -> Pointer:
    return data_pointer([(producer, at * 10, at * 10 + 10) for producer, at, _ in blocks])


blocks = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.booleans()), min_size=1, max_size=6, unique=True)


@given(st.lists(blocks, max_size=6), st.integers(1, 3), st.integers(0, 5))
def test_block_with_a_sound_copy_is_seen(batches: list[list[Block]], producer: int, at: int) -> None:
    passed = EarlierBatches(WINDOW_MS)
    for batch in batches:
        passed.note(0, resent_pointer(batch))
    seen = [(producer, (at * 10, at * 10 + 10))]
    holders = passed.holders(0, resent_pointer([(producer, at, True)]), seen)
    holding = [batch for batch in batches if any(each[:2] == (producer, at) for each in batch)]
    assert list(holders) == [resent_pointer(batch) for batch in holding]
    found = sound_copies(seen, [(resent_pointer(batch), pieces_of(batch)) for batch in holding])
    sound = any((producer, at, True) in batch for batch in batches)
    assert list(found) == (seen if sound else [])


def test_a_block_that_its_pointer_says_to_pass_over_is_no_copy() -> None:
    batch = [(1, 0, True), (1, 1, True)]
    pointer = replace(resent_pointer(batch), skip=(0,))
    assert sound_copies([(1, (0, 20))], [(pointer, pieces_of(batch))]) == ((1, (10, 20)),)


def test_batches_are_forgotten_after_the_window_and_of_too_many_the_pointers_decide() -> None:
    passed, batch = EarlierBatches(WINDOW_MS), resent_pointer([(1, 0, True)])
    passed.note(0, batch)
    passed.note(3 * WINDOW_MS, batch)
    assert passed.holders(3 * WINDOW_MS, batch, [(1, (0, 10))]) == (batch,)
    for _ in range(planner.BATCHES_MAX):
        passed.note(3 * WINDOW_MS, batch)
    assert passed.holders(3 * WINDOW_MS, batch, [(1, (0, 10))]) == ()


def test_batches_are_kept_for_longer_than_a_lookback_remembers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It forgets in quarters: of what it calls seen, the holder must be known, or that one may be missing."""
    remembered_ms, seen = WINDOW_MS * 5 // 4, [(1, (0, 10))]
    batch, other = resent_pointer([(1, 0, True)]), resent_pointer([(2, 0, True)])
    passed = EarlierBatches(WINDOW_MS)
    passed.note(0, batch)
    passed.note(remembered_ms, other)
    assert passed.holders(remembered_ms, batch, seen) == (batch,)
    monkeypatch.setattr(planner, "BATCHES_MAX", 2)
    passed.note(remembered_ms, replace(other, producers=batch.producers))  # holds some of it, and is kept
    assert passed.holders(remembered_ms, batch, seen) == (), "the first one, which was forgotten, may be missing"


def test_batches_of_another_write_partition_hold_other_records() -> None:
    passed, batch = EarlierBatches(WINDOW_MS), resent_pointer([(1, 0, True)])
    passed.note(0, replace(batch, partition=batch.partition + 1))
    assert passed.holders(0, batch, [(1, (0, 10))]) == ()


def range_of(number: int, topic: str) -> TaskRange:
    partition = ReadPartition(topic, topic * 32, number)
    return TaskRange(partition, (number, number + 10), Position(number, 2, 3), Position(number, 50, 1))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), max_size=4))
def test_stretches_cover_all_once(shapes: list[tuple[int, int]]) -> None:
    """`shapes`: for each read partition how many batches, and after how many of all of them a new task begins."""
    whole = {covered.partition: covered for covered in (range_of(at % 2, "ab"[at // 2]) for at in range(len(shapes)))}
    parts: list[BatchPart] = []
    homes: list[ReadPartition] = []
    splits: list[Split] = []
    for covered, (batches, step) in zip(whole.values(), shapes, strict=True):
        for batch in range(batches):
            low = 3 if batch == 0 else 0
            parts.append(BatchPart(covered.begin.read_partition, 2 + 5 * batch, None, low=low))
            homes.append(covered.partition)
            if len(parts) >= step:
                splits.append(Split(parts, SETTINGS))
                parts = []
    if parts:
        splits.append(Split(parts, SETTINGS))
    tasks = stretches_of(splits, homes, whole)
    assert len(tasks) == len(splits)
    for stretches in tasks:
        assert len({each.partition for each in stretches}) == len(stretches), "a task has one range of a partition"
    for covered in whole.values() if splits else ():
        mine = [each for stretches in tasks for each in stretches if (each.id, each.writers) == key_of(covered)]
        mine.sort(key=lambda each: each.begin)
        assert [each.begin for each in mine] == [covered.begin, *(each.end for each in mine[:-1])]
        assert mine[-1].end == covered.end
    numbered = iter(homes)
    for split, stretches in zip(splits, tasks, strict=True):
        for part in split.parts:
            home = next(numbered)
            at = Position(part.partition, part.offset, part.low)
            assert sum(each.id == home.topic_id and each.begin <= at < each.end for each in stretches) == 1


def key_of(covered: TaskRange) -> tuple[str, tuple[int, ...]]:
    return covered.partition.topic_id, covered.writers


def test_a_range_without_a_batch_goes_with_the_first_task() -> None:
    first, idle = range_of(0, "a"), range_of(1, "a")
    parts = [BatchPart(0, 2 + number, None) for number in range(2)]
    for splits in ([Split(parts, SETTINGS)], [Split([part], SETTINGS) for part in parts]):
        ranges = stretches_of(splits, [first.partition] * 2, {each.partition: each for each in (first, idle)})
        assert [idle in stretches for stretches in ranges] == [True, *[False] * (len(splits) - 1)]


def test_without_tasks_nobody_answers() -> None:
    covered = range_of(0, "a")
    assert stretches_of(split_parts([], 1, SETTINGS), [], {covered.partition: covered}) == []


class LaggingQueue(MemoryQueue):
    """A queue of which one answer in three comes from a replica that lags."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.answers = itertools.cycle([Span(0, 4), Span(0, 10), Span(0, 10)])

    async def span(self, partition: ReadPartition) -> Span:
        return next(self.answers)


def test_a_batch_read_covers_all_though_a_replica_lags() -> None:
    async def work() -> None:
        partition = ReadPartition("t", "ab" * 16, 0)
        topic = SparkTopic("t", partition.topic_id, TopicSettings(), {partition: [0]})
        queue: Any = LaggingQueue()
        access = Access(queue, {"t": topic}, StoreUrls({}), cast(BatchFetcher, None), queue, Runtime())
        options = read_options({"brokers": "localhost", "topics": "t"})
        for _ in range(3):
            (stretch,) = await batch_reader.stretches(access, options, ReadFilter())
            assert (stretch.start, stretch.end) == (Position(0, 0), Position(0, 10))

    asyncio.run(work())
