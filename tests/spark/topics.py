"""Topics for the tests: made on a broker, filled, and read as data frames."""

from __future__ import annotations

from collections.abc import Iterable

from pyspark.sql import DataFrame, SparkSession

import memq


def make_topic(address: str, topic: str, partitions: int = 1, **settings: int | bool | str) -> None:
    with memq.Admin(address) as admin:
        admin.create_topic(topic, partitions=partitions, settings=settings)


def send(address: str, topic: str, values: Iterable[bytes], tag: str | None = None) -> None:
    """Send values and wait until all are stored."""
    with memq.Producer(address) as producer:
        producer.send_many(topic, list(values), tag=tag)
        producer.flush(timeout=60)


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


def read(spark: SparkSession, address: str, topics: str, **options: str) -> DataFrame:
    return spark.read.format("memq").options(brokers=address, topics=topics, **options).load()


def values_of(frame: DataFrame) -> list[int]:
    """Return the values, sorted as numbers."""
    return sorted(int(value) for value in frame.select("value").toArrow().column(0).to_pylist())
