"""A query on tag, time or partition fetches little more than its records, counted at the store."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql import DataFrame, SparkSession

import memq
from memq.format.blocks.header import tag_bit
from memq.format.object import BlockEntry
from tests.spark.counted_store import CountedStore, counted_store
from tests.spark.topics import make_topic, read

TOPIC = "pruned"
HOUR_MS = 3_600_000
START_MS = 1_767_225_600_000
TAGS = ("red", "green", "blue")  # of different bits
HOURS = 4
PER_BLOCK = 200
MORE_THAN_NEEDED = 1.15


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountedStore]:
    """Store blocks of one tag and one hour each, several to a batch."""
    with counted_store(tmp_path_factory.mktemp("counted")) as store:
        make_topic(store.address, TOPIC, partitions=2, seal_when_idle=False, batch_age_ms_max=1_000)
        with ExitStack() as stack:
            producers = [
                stack.enter_context(memq.Producer(store.address, codec="none", linger_ms=60_000)) for _ in TAGS
            ]
            pool = stack.enter_context(ThreadPoolExecutor(len(TAGS)))
            for hour in range(HOURS):
                for producer, tag in zip(producers, TAGS, strict=True):
                    send_hour(producer, tag, hour)
                list(pool.map(lambda producer: producer.flush(timeout=60), producers))  # at once, to share batches
        yield store


def send_hour(producer: memq.Producer, tag: str, hour: int) -> None:
    chance = random.Random(hour)
    for number in range(2 * PER_BLOCK):
        time_ms = START_MS + hour * HOUR_MS + number
        producer.send(TOPIC, chance.randbytes(200), timestamp_ms=time_ms, tag=tag, partition=number % 2)


def frame_of(spark: SparkSession, store: CountedStore, **options: str) -> DataFrame:
    return read(
        spark, store.address, TOPIC, columns="value,tag,timestamp,partition", config=str(store.config), **options
    )


def check(frame: DataFrame, store: CountedStore, needed: list[BlockEntry]) -> None:
    """Run a query that needs these blocks whole, and compare what came and what was fetched."""
    store.fetched()
    assert frame.count() == sum(block.count for block in needed)
    requests, fetched = store.fetched()
    size = sum(block.length for block in needed)
    assert fetched <= MORE_THAN_NEEDED * size, f"{fetched} bytes in {requests} requests, {size} are needed"


def test_all_blocks_are_fetched_once_without_a_filter(spark: SparkSession, store: CountedStore) -> None:
    blocks = store.blocks()
    batches = len(store.server.objects)
    assert sum(block.count for block in blocks) == 2 * PER_BLOCK * HOURS * len(TAGS)
    assert batches < len(blocks), "no batch has several blocks: nothing can be pruned by an index"
    store.fetched()
    assert frame_of(spark, store).count() == 2 * PER_BLOCK * HOURS * len(TAGS)
    requests, fetched = store.fetched()
    assert (requests, fetched) == (batches, sum(block.length for block in blocks)), "one GET a batch, no index"


def test_a_tag_is_found_by_pointers_and_index(spark: SparkSession, store: CountedStore) -> None:
    needed = [block for block in store.blocks() if block.tag_bits & tag_bit("green")]
    check(frame_of(spark, store).where("tag = 'green'"), store, needed)


def test_a_time_is_found_by_pointers_and_index(spark: SparkSession, store: CountedStore) -> None:
    low, high = START_MS + HOUR_MS, START_MS + 2 * HOUR_MS
    needed = [block for block in store.blocks() if low <= block.least_ms < high]
    start, end = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms) for ms in (low, high))
    frame = frame_of(spark, store)
    check(frame.where((frame.timestamp >= start) & (frame.timestamp < end)), store, needed)


def test_a_partition_is_found_without_its_neighbour(spark: SparkSession, store: CountedStore) -> None:
    frame = frame_of(spark, store).where("partition = 1")
    store.fetched()
    assert frame.count() == PER_BLOCK * HOURS * len(TAGS)
    _, fetched = store.fetched()
    assert fetched == pytest.approx(sum(block.length for block in store.blocks()) / 2, rel=0.02)


def test_filter_that_matches_nothing_costs_no_request(spark: SparkSession, store: CountedStore) -> None:
    store.fetched()
    assert frame_of(spark, store).where("partition = 7").count() == 0
    assert frame_of(spark, store).where("timestamp < '2020-01-01'").count() == 0
    assert store.fetched() == (0, 0)


def test_no_plan_shows_a_key_of_the_store(spark: SparkSession, store: CountedStore) -> None:
    frame = frame_of(spark, store).where("tag = 'green'")
    plan = frame._jdf.queryExecution().toString()
    assert "memq" in plan
    assert "secret" not in plan
