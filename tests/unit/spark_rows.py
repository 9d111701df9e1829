"""Rows that Spark's data source gives for a stored topic, without a session."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow
from pyspark.sql.datasource import Filter
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from memq.spark.options import read_options
from memq.spark.source import MemqSource
from tests.unit.blocks import NOW_MS
from tests.unit.stored_topic import StoredTopic, block

TYPES: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "headers": ArrayType(StructType([StructField("name", StringType()), StructField("value", BinaryType())])),
    "tag": StringType(),
    "timestamp": TimestampType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "record_index": IntegerType(),
    "producer_id": LongType(),
    "sequence": LongType(),
    "object": StringType(),
    "damage": StringType(),
    "orphan": BooleanType(),
}


Row = dict[str, Any]


def schema_of(options: dict[str, str], fields: Sequence[StructField] = ()) -> StructType:
    """Return the schema that Spark makes of the source's DDL, with `fields` in place of the value."""
    columns: list[StructField] = []
    for name in read_options(options).columns:
        columns += fields if fields and name == "value" else [StructField(name, TYPES[name])]
    return StructType(columns)


def batches_of(
    options: dict[str, str], filters: Sequence[Filter] = (), fields: Sequence[StructField] = ()
) -> list[list[pyarrow.RecordBatch]]:
    """Return what each task reads."""
    reader = MemqSource(options).reader(schema_of(options, fields))
    list(reader.pushFilters(list(filters)))
    return [list(reader.read(split)) for split in reader.partitions()]


def rows_of(
    options: dict[str, str], filters: Sequence[Filter] = (), fields: Sequence[StructField] = (), **more: str
) -> list[Row]:
    tasks = batches_of({**options, **more}, filters, fields)
    return [row for batches in tasks for batch in batches for row in batch.to_pylist()]


def values_of(options: dict[str, str], filters: Sequence[Filter] = (), **more: str) -> list[bytes | None]:
    return [row["value"] for row in rows_of({"columns": "value", **options, **more}, filters)]


def time_of(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


def spoiled(body: bytes, at: int) -> bytes:
    """Return the bytes of an object with one bit changed."""
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


def three_batches(folder: Path) -> StoredTopic:
    topic = StoredTopic(folder)
    for number in range(3):
        values = [b"%d" % (2 * number), b"%d" % (2 * number + 1)]
        topic.write(block(values, first=2 * number), time_ms=NOW_MS + 1_000 * number)
    return topic
