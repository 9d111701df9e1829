"""What tasks answer for: stretches that cover each read partition of a micro-batch once, without a gap."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.notification import Span
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.runtime.network import Runtime
from memq.spark.access import Access, TopicPlace
from memq.spark.options import read_options
from memq.spark.read import batch_reader
from memq.spark.read.planner import BatchPart, Split, TaskRange, TaskSettings, split_parts, stretches_of
from memq.spark.read.pruning import ReadFilter
from memq.spark.stores import StoreUrls
from memq.topic import Position, ReadPartition, TopicSettings

SETTINGS = TaskSettings(StoreUrls({}), ReadFilter(), 0, skip_damaged=False, dedup=True, missing_s=0.0)


def place_of(number: int, topic: str) -> TaskRange:
    partition = ReadPartition(topic, topic * 32, number)
    return TaskRange(partition, (number, number + 10), Position(number, 2, 3), Position(number, 50, 1))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), max_size=4))
def test_stretches_cover_all_once(shapes: list[tuple[int, int]]) -> None:
    """`shapes`: for each read partition how many batches, and after how many of all of them a new task begins."""
    places = {place.partition: place for place in (place_of(at % 2, "ab"[at // 2]) for at in range(len(shapes)))}
    parts: list[BatchPart] = []
    homes: list[ReadPartition] = []
    splits: list[Split] = []
    for place, (batches, step) in zip(places.values(), shapes, strict=True):
        for batch in range(batches):
            low = 3 if batch == 0 else 0
            parts.append(BatchPart(place.begin.read_partition, 2 + 5 * batch, None, low=low))
            homes.append(place.partition)
            if len(parts) >= step:
                splits.append(Split(parts, SETTINGS))
                parts = []
    if parts:
        splits.append(Split(parts, SETTINGS))
    ranges = stretches_of(splits, homes, places)
    assert len(ranges) == len(splits)
    for place in places.values() if splits else ():
        mine = [each for stretches in ranges for each in stretches if (each.id, each.writers) == key_of(place)]
        mine.sort(key=lambda each: each.begin)
        assert [each.begin for each in mine] == [place.begin, *(each.end for each in mine[:-1])]
        assert mine[-1].end == place.end
    numbered = iter(homes)
    for split, stretches in zip(splits, ranges, strict=True):
        for part in split.parts:
            home = next(numbered)
            at = Position(part.partition, part.offset, part.low)
            assert sum(each.id == home.topic_id and each.begin <= at < each.end for each in stretches) == 1


def key_of(place: TaskRange) -> tuple[str, tuple[int, ...]]:
    return place.partition.topic_id, place.writers


def test_without_tasks_nobody_answers() -> None:
    place = place_of(0, "a")
    assert stretches_of(split_parts([], 1, SETTINGS), [], {place.partition: place}) == []


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
        topic = TopicPlace("t", partition.topic_id, TopicSettings(), {partition: [0]})
        queue: Any = LaggingQueue()
        access = Access(queue, {"t": topic}, StoreUrls({}), cast(BatchFetcher, None), queue, Runtime())
        options = read_options({"brokers": "localhost", "topics": "t"})
        for _ in range(3):
            (stretch,) = await batch_reader.stretches(access, options, ReadFilter())
            assert (stretch.start, stretch.end) == (Position(0, 0), Position(0, 10))

    asyncio.run(work())
