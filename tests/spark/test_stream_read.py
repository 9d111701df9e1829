"""A streaming read: limits of micro-batches to the record, exact restarts, the end of AvailableNow, retention, lag."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.runtime import Runtime
from memq.spark.stream_offsets import StreamLag, lag
from tests.servers import DevServer
from tests.spark.streams import run_to_end
from tests.spark.topics import make_topic, numbers, read, send, values_of


def follow(spark: SparkSession, broker: DevServer, topic: str, folder: Path, **options: str) -> list[Any]:
    """Read all that is new into files, and return the progress of each micro-batch that had something."""
    frame = spark.readStream.format("memq").options(brokers=broker.address, topics=topic, **options).load()
    writer = frame.select("value", "partition", "offset").writeStream.format("parquet")
    query = run_to_end(writer.option("checkpointLocation", str(folder / "checkpoint")), str(folder / "out"))
    return [progress for progress in query.recentProgress if progress["numInputRows"]]


def written(spark: SparkSession, folder: Path) -> list[int]:
    return values_of(spark.read.parquet(str(folder / "out")))


def test_micro_batches_have_as_many_records_as_allowed(spark: SparkSession, broker: DevServer, tmp_path: Path) -> None:
    make_topic(broker.address, "limited", partitions=2)
    send(broker.address, "limited", numbers(0, 4_000))
    send(broker.address, "limited", numbers(4_000, 4_500))
    # Options are met in any case: read as they come they would be missed, and everything would come at once.
    progress = follow(spark, broker, "limited", tmp_path, MAXRecordsPerTRIGGER="1000")
    assert [each["numInputRows"] for each in progress] == [1_000] * 4 + [500]
    assert written(spark, tmp_path) == list(range(4_500))
    assert [lag(each).records for each in progress] == [3_500, 2_500, 1_500, 500, 0]
    assert lag(progress[-1]) == StreamLag(0, 0)


def test_micro_batches_have_as_many_bytes_as_allowed(spark: SparkSession, broker: DevServer, tmp_path: Path) -> None:
    make_topic(broker.address, "sized")
    for first in range(0, 600, 100):
        send(broker.address, "sized", numbers(first, first + 100))  # one batch each
    stored = read(spark, broker.address, "sized").count()
    assert stored == 600
    progress = follow(spark, broker, "sized", tmp_path, maxBytesPerTrigger="1")
    assert [each["numInputRows"] for each in progress] == [100] * 6, "one batch at least, and no more"
    assert written(spark, tmp_path) == list(range(600))


def test_a_restart_continues_where_it_was(spark: SparkSession, broker: DevServer, tmp_path: Path) -> None:
    make_topic(broker.address, "restarted", partitions=2)
    send(broker.address, "restarted", numbers(0, 500))
    assert sum(each["numInputRows"] for each in follow(spark, broker, "restarted", tmp_path)) == 500
    assert follow(spark, broker, "restarted", tmp_path) == []
    send(broker.address, "restarted", numbers(500, 700))
    progress = follow(spark, broker, "restarted", tmp_path, maxRecordsPerTrigger="150")
    assert [each["numInputRows"] for each in progress] == [150, 50]
    assert written(spark, tmp_path) == list(range(700))


def test_retention_that_was_faster_is_an_error_or_passed_over(
    spark: SparkSession, broker: DevServer, tmp_path: Path
) -> None:
    make_topic(broker.address, "expired")
    send(broker.address, "expired", numbers(0, 10))
    follow(spark, broker, "expired", tmp_path)
    for first in range(10, 40, 10):
        send(broker.address, "expired", numbers(first, first + 10))
    asyncio.run(_trim_to_last(broker.data / "queue.sqlite", "expired"))
    with pytest.raises(StreamingQueryException, match="PositionExpiredError"):
        follow(spark, broker, "expired", tmp_path)
    follow(spark, broker, "expired", tmp_path, onExpired="skip")
    assert written(spark, tmp_path) == [*range(10), *range(30, 40)]


async def _trim_to_last(path: Path, topic: str) -> None:
    """Take all pointers but the last batch's, as retention does; what follows is of the same owner."""
    queue = SqliteQueue(path, Runtime().clock)
    try:
        (partition,) = await queue.partitions(topic)
        await queue.trim(partition, (await queue.span(partition)).end - 2)  # its producer's end comes last
    finally:
        await queue.close()
