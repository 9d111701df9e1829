"""Decoded JSON and Avro values of the data source, and values that do not match a schema."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql.types import IntegerType, StringType, StructField

from memq.errors import InvalidRequestError, InvalidSettingError
from memq.spark.source import MemqSource
from tests.unit.blocks import Record
from tests.unit.spark_rows import rows_of
from tests.unit.stored_topic import StoredTopic, block

FIELDS = [StructField("a", IntegerType()), StructField("s", StringType())]
DDL = "a INT, s STRING"


def test_values_are_decoded_in_place(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    topic.write(block([b'{"a": 1, "s": "x"}', b'{"a": 2}', b"null"]))
    options = {**topic.options, "columns": "sequence,value,topic", "schema": DDL}
    assert MemqSource(options).schema() == "sequence BIGINT, a INT, s STRING, topic STRING"
    rows = rows_of(options, fields=FIELDS)
    assert [tuple(row.values()) for row in rows] == [
        (0, 1, "x", "clicks"),
        (1, 2, None, "clicks"),
        (2, None, None, "clicks"),
    ]
    assert [row["a"] for row in rows_of(options, fields=FIELDS, start="0:0:1")] == [2, None]


def test_a_value_that_is_not_of_the_schema_ends_the_read_or_is_null(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    topic.write(block([b"x", b'{"a": 1}', b'{"a": "no"}'], first=0))
    topic.write(block([b'{"a": 3}', b"no"], first=3))
    options = {**topic.options, "columns": "value", "schema": DDL}
    with pytest.raises(InvalidRequestError, match="value at 0:0:0 of topic 'clicks' does not match option 'schema'"):
        rows_of(options, fields=FIELDS)
    with pytest.raises(InvalidRequestError, match="value at 0:0:2 of topic"):
        rows_of(options, fields=FIELDS, start="0:0:1")
    with pytest.raises(InvalidRequestError, match="value at 0:1:1 of topic"):
        rows_of(options, fields=FIELDS, start="0:1:0")
    assert [row["a"] for row in rows_of(options, fields=FIELDS, onMalformed="null")] == [None, 1, None, 3, None]


AVRO = '{"type": "record", "name": "r", "fields": [{"name": "a", "type": "int"}, {"name": "s", "type": "string"}]}'


def avro(a: int, s: str) -> bytes:
    """Return a datum by Avro's encoding: a zigzag number, a length and a text."""
    return bytes([2 * a, 2 * len(s)]) + s.encode()


def test_values_of_avro_are_decoded_by_the_schema_that_wrote_them(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    rows: list[Record] = [(value, None, (), None, None) for value in (avro(1, "x"), None, avro(2, "yz"))]
    topic.write(block(rows))
    options = {**topic.options, "columns": "value", "schema": DDL, "valueFormat": "avro", "avroSchema": AVRO}
    found = [tuple(row.values()) for row in rows_of(options, fields=FIELDS)]
    assert found == [(1, "x"), (None, None), (2, "yz")]
    more = [StructField("a", IntegerType()), StructField("other", StringType())]
    unknown = rows_of({**options, "schema": "a INT, other STRING"}, fields=more)
    assert [tuple(row.values()) for row in unknown] == [(1, None), (None, None), (2, None)]


@pytest.mark.parametrize("value", [b"", b"\x02", avro(1, "x") + b"\x00", avro(1, "x")[:-1], b"\x02\x04\xff\xff"])
def test_bytes_that_are_no_datum_are_malformed(tmp_path: Path, value: bytes) -> None:
    topic = StoredTopic(tmp_path)
    topic.write(block([avro(1, "x"), value, avro(2, "y")]))
    options = {**topic.options, "columns": "value", "schema": DDL, "valueFormat": "avro", "avroSchema": AVRO}
    with pytest.raises(InvalidRequestError, match="value at 0:0:1"):
        rows_of(options, fields=FIELDS)
    assert [row["a"] for row in rows_of(options, fields=FIELDS, onMalformed="null")] == [1, None, 2]


@pytest.mark.parametrize(
    ("schema", "said"),
    [("{", "is no schema of Avro"), ('"int"', "is not of a record"), ('{"type": "map", "values": "int"}', "not of a")],
)
def test_a_schema_of_avro_that_is_none_is_refused(tmp_path: Path, schema: str, said: str) -> None:
    topic = StoredTopic(tmp_path)
    topic.write(block([avro(1, "x")]))
    options = {**topic.options, "columns": "value", "schema": DDL, "valueFormat": "avro", "avroSchema": schema}
    with pytest.raises(InvalidSettingError, match=said):
        rows_of(options, fields=FIELDS)


def test_a_field_of_another_type_than_avros_is_refused(tmp_path: Path) -> None:
    topic = StoredTopic(tmp_path)
    topic.write(block([avro(1, "x")]))
    options = {**topic.options, "columns": "value", "schema": "s INT", "valueFormat": "avro", "avroSchema": AVRO}
    with pytest.raises(InvalidSettingError, match="option 'schema' has field 's' as int32, Avro's is another"):
        rows_of(options, fields=[StructField("s", IntegerType())])
