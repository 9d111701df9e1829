"""What tasks get: copies found by pointers, edges of a range, splits of a size, micro-batches to the record."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memq.errors import CorruptDataError, InvalidRequestError
from memq.format.pointer import Location, Pointer, ProducerRanges
from memq.limits import KIB, MIB
from memq.notification import Entry
from memq.spark.options import ReadOptions
from memq.spark.read.planner import (
    PARTS_MAX,
    SPREAD_BYTES_MIN,
    SPREAD_TASKS,
    BatchPart,
    PartitionPlan,
    split_parts,
    spread_bytes,
)
from memq.spark.read.pruning import ReadFilter
from memq.spark.read.task import settings_of
from memq.spark.stores import StoreUrls
from memq.spark.stream_offsets import Admission, StreamLag, StreamPlace, decode_offsets, encode_offsets, lag
from memq.topic import Position, ReadPartition

PARTITION = ReadPartition("clicks", "0" * 32, 0)
PRODUCER = 7
END = Position(0, 1_000)


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


def test_a_task_is_told_what_batches_before_its_own_had() -> None:
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


def test_a_plan_that_goes_on_remembers() -> None:
    plan = plan_of()
    take(plan, 0, pointer_of(0, 10))
    plan.go_on(END, Position(0, 2_000))
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
    place, taken = StreamPlace(0), []
    while place.offset < len(counts):
        admission = Admission(records_max, None, {PARTITION: place})
        for offset in range(place.offset, len(counts)):
            if admission.full:
                break
            admission.take(PARTITION, offset, pointer_of(0, counts[offset]))
        after = admission.places[PARTITION]
        taken.append(after.records - place.records)
        place = after
    assert sum(taken) == sum(counts) == place.records
    assert all(count == records_max for count in taken[:-1])
    assert 0 < taken[-1] <= records_max


@given(st.lists(st.integers(1, 40), min_size=1), st.integers(1, 60))
def test_micro_batches_have_whole_batches_of_as_many_bytes(sizes: list[int], bytes_max: int) -> None:
    place = StreamPlace(0)
    while place.offset < len(sizes):
        admission = Admission(None, bytes_max, {PARTITION: place})
        for offset in range(place.offset, len(sizes)):
            if admission.full:
                break
            admission.take(PARTITION, offset, pointer_of(0, 1, size=sizes[offset]))
        after = admission.places[PARTITION]
        assert after.offset == place.offset + 1 or after.bytes - place.bytes <= bytes_max
        assert after.offset > place.offset
        place = after
    assert place.bytes == sum(sizes)


def test_offsets_go_through_json_and_name_what_they_are_not_of() -> None:
    places = {PARTITION: StreamPlace(17, 3, 100, 2_000), ReadPartition("clicks", "0" * 32, 1): StreamPlace(0)}
    encoded = encode_offsets(places)
    assert decode_offsets(encoded, list(places)) == places
    assert encode_offsets(decode_offsets(encoded, list(places))) == encoded, "Spark compares text"
    for other in (ReadPartition("clicks", "1" * 32, 0), ReadPartition("orders", "0" * 32, 0)):
        with pytest.raises(InvalidRequestError, match="checkpoint"):
            decode_offsets(encoded, [other])
    with pytest.raises(InvalidRequestError, match="can't be read"):
        decode_offsets({"clicks": 3}, [PARTITION])


def test_lag_is_the_difference_of_offsets_and_nothing_for_other_sources() -> None:
    here, end = (
        encode_offsets({PARTITION: place}) for place in (StreamPlace(1, 0, 10, 100), StreamPlace(5, 0, 25, 700))
    )
    ours = {"endOffset": here, "latestOffset": end}
    assert lag({"sources": [ours, {"endOffset": "5", "latestOffset": None}]}) == StreamLag(15, 600)
