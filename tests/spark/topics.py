"""Topics for the tests: made on a broker, filled, and read as data frames."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from shutil import copyfile

from msgspec.structs import replace
from pyspark.sql import DataFrame, SparkSession

import memq
from memq.format.pointer import decode_pointer, encode_pointer
from memq.notification import Publication
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.runtime import Runtime
from tests.servers import DevServer


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


def publish_again(data: Path, topic: str, *, copied: bool = False) -> Path:
    """Let the pointer of the first batch stand in the queue once more; return the batch's object.

    As after a lost answer; or, when `copied`, with an object of its own, as when its producer has sent it again.
    """
    return asyncio.run(_publish_again(data, topic, copied))


async def _publish_again(data: Path, topic: str, copied: bool) -> Path:
    queue = SqliteQueue(data / "queue.sqlite", Runtime().clock)
    try:
        (partition,) = await queue.partitions(topic)
        entries = await queue.read(partition, 0, 1 << 20)
        pointers = [decode_pointer(entry.body) for entry in entries]
        pointer = next(pointer for pointer in pointers if pointer.kind == "data")
        (location,) = pointer.locations
        path = data / "objects" / location.key
        if copied:
            again = replace(location, key=f"{location.key}-again")
            pointer = replace(pointer, locations=(again,))
            copyfile(path, data / "objects" / again.key)
        body = encode_pointer(pointer)
        await queue.publish(Publication(partition, pointer.partition, pointer.epoch, entries[-1].time_ms, body))
    finally:
        await queue.close()
    return path


def left_of(broker: DevServer, group: str) -> int:
    """Return the lag of a group, in records."""
    with memq.Admin(broker.address) as admin:
        return sum(each.lag.records for each in admin.group(group).partitions)
