"""A batch read gives back what was produced: every column, byte for byte, over codecs, nulls, headers and tags."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import SparkSession

import memq
from tests.servers import DevServer
from tests.spark.topics import make_topic, read

CODECS = ("none", "zstd", "lz4")
START_MS = 1_767_225_600_000


def record_of(number: int) -> dict[str, Any]:
    """Return a record of one of five kinds: bare, keyed, with headers and a tag, with nulls, with a time."""
    kind = number % 5
    value = b"value %d" % number
    if kind == 0:
        return {"value": value}
    if kind == 1:
        return {"value": value * 20, "key": b"key %d" % (number % 50)}
    if kind == 2:
        return {"value": value, "key": b"", "headers": [("trace", b"%d" % number), ("none", None)], "tag": "web"}
    if kind == 3:
        return {"value": None, "key": b"gone %d" % number, "tag": None}
    return {"value": b"", "timestamp_ms": START_MS + number, "tag": f"t{number % 3}", "headers": [("a", b"")]}


def send_mixed(broker: DevServer, topic: str, count: int) -> list[dict[str, Any]]:
    """Send records through producers of every codec, and return them in order."""
    sent: list[dict[str, Any]] = []
    for codec in CODECS:
        with memq.Producer(broker.address, codec=codec, block_bytes=64 * 1024) as producer:
            for number in range(len(sent), len(sent) + count // len(CODECS)):
                record = record_of(number)
                producer.send(topic, **record)
                sent.append(record)
            producer.flush(timeout=60)
    return sent


@pytest.mark.parametrize("pushdown", ["true", "false"])
def test_every_record_comes_back_byte_for_byte(spark: SparkSession, broker: DevServer, pushdown: str) -> None:
    topic = f"mixed-{pushdown}"
    make_topic(broker.address, topic, partitions=3)
    sent = send_mixed(broker, topic, 9_000)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", pushdown)
    try:
        table = read(spark, broker.address, topic).toArrow().to_pylist()
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    assert len(table) == len(sent)
    with memq.Consumer(broker.address, topic, end="end") as consumer:
        consumed = {(each.partition, each.offset): each for batch in consumer for each in batch}
    for row in table:
        record = consumed.pop((row["partition"], row["offset"]))
        headers = tuple((header["name"], header["value"]) for header in row["headers"])
        assert (row["key"], row["value"], row["tag"]) == (record.key, record.value, record.tag)
        assert headers == tuple(record.headers)
        assert round(row["timestamp"].timestamp() * 1000) == record.timestamp_ms
        assert row["record_index"] == record.position.record_index
        assert row["topic"] == topic
    assert not consumed
    assert sorted((row["value"] or b"", row["key"] or b"") for row in table) == sorted(
        (record["value"] or b"", record.get("key") or b"") for record in sent
    )


def test_an_empty_topic_is_an_empty_frame(spark: SparkSession, broker: DevServer) -> None:
    make_topic(broker.address, "empty")
    assert read(spark, broker.address, "empty").count() == 0
