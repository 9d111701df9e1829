"""Records of every kind in five mixes of codec and columns, and a data frame compared with them and with a consumer."""

from __future__ import annotations

from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

from pyarrow.dataset import dataset
from pyspark.sql import DataFrame, functions

import memq

MIXES = (  # codec, and kinds of records: they decide which columns a block has
    ("none", (0,)),
    ("zstd", (1, 2)),
    ("lz4", (0, 4)),
    ("none", (3,)),
    ("zstd", (0, 1, 2, 3, 4)),
)
START_MS = 1_767_225_600_000


def record_of(kind: int, number: int) -> dict[str, Any]:
    """Return a record of one of five kinds: bare, keyed, with headers and a tag, with nulls, with a time."""
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


def send_mixed(address: str, topic: str, count: int) -> list[dict[str, Any]]:
    """Send as many records of each mix, and return them in order."""
    sent: list[dict[str, Any]] = []
    for codec, kinds in MIXES:
        with memq.Producer(address, codec=codec, block_bytes=64 * 1024) as producer:
            for number in range(len(sent), len(sent) + count // len(MIXES)):
                record = record_of(kinds[number % len(kinds)], number)
                producer.send(topic, **record)
                sent.append(record)
            producer.flush(timeout=60)
    return sent


def check_mixed(frame: DataFrame, address: str, topic: str, sent: list[dict[str, Any]]) -> None:
    """Compare every column with what a consumer reads, and all values and keys with what was sent."""
    with memq.Consumer(address, topic, end="end") as consumer:
        consumed = {(each.partition, each.offset): each for batch in consumer for each in batch}
    found = []
    for row in _rows_of(frame):
        found.append((row["value"] or b"", row["key"] or b""))
        record = consumed.pop((row["partition"], row["offset"]))
        headers = tuple((header["name"], header["value"]) for header in row["headers"])
        assert (row["key"], row["value"], row["tag"]) == (record.key, record.value, record.tag)
        assert headers == tuple(record.headers)
        assert row["timestamp"] == record.timestamp_ms * 1_000
        assert row["record_index"] == record.position.record_index
        assert row["topic"] == topic
    assert not consumed
    assert sorted(found) == sorted((record["value"] or b"", record.get("key") or b"") for record in sent)


def _rows_of(frame: DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the rows with times in µs, by files that tasks write: a million of them are too many for the driver."""
    with TemporaryDirectory() as folder:
        path = f"{folder}/rows"
        frame.withColumn("timestamp", functions.unix_micros("timestamp")).write.parquet(path)
        for batch in dataset(path).to_batches():
            yield from batch.to_pylist()
