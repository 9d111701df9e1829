"""The options of `format("memq")`: names in any case, bounds, errors in one line, no keys."""

from __future__ import annotations

import pytest

from memq.errors import InvalidSettingError, UnknownSettingError
from memq.limits import KIB, MIB
from memq.spark.options import (
    COLUMNS,
    DEFAULT_COLUMNS,
    DESCRIPTIONS,
    MISSING_S,
    SPELLING,
    fields_at,
    read_options,
    table_ddl,
)
from memq.topic import Position


def test_names_are_read_in_any_case() -> None:
    options = read_options({"Topics": "a, b", "PARTITIONBYTES": "1MiB", "onDamaged": "SKIP"})
    assert options.topics == ("a", "b")
    assert options.partition_bytes == 1 << 20
    assert options.skip_damaged
    assert options.columns == DEFAULT_COLUMNS


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "one of the options 'topics' and 'path'"),
        ({"topics": "a", "path": "b"}, "'path' and 'topics' exclude each other"),
        ({"path": "b", "queue": "sqlite:q", "store": "file:s"}, "'path' and 'queue' exclude each other"),
        ({"path": "b", "store": "file:s"}, "'path' and 'store' exclude each other"),
        ({"topics": "a", "brokers": "b:1", "queue": "sqlite:q", "store": "file:s"}, "exclude each other"),
        ({"topics": "a", "queue": "sqlite:q"}, "needs 'store'"),
        ({"topics": "a", "start": "1738310400"}, "time 1738310400 is in ms, and in 1970"),
        ({"topics": "a", "start": "²"}, "neither a position nor a time"),
        ({"topics": "a", "start": "9" * 17}, "neither a position nor a time"),
        ({"topics": "a", "missingSeconds": "²"}, "not from"),
        ({"topics": "a", "missingSeconds": "9" * 5_000}, "not from"),
        ({"topics": "a", "partitionBytes": "9" * 5_000}, "not from"),
        ({"topics": "a", "columns": "key, valu"}, "'valu'"),
        ({"topics": "a", "columns": "key,key"}, "twice"),
        ({"topics": "a", "start": "yesterday"}, "neither a position nor a time"),
        ({"topics": "a", "start": "2026-01-01T00:00:00"}, "neither a position nor a time"),
        ({"topics": "a,b", "start": "0:17:3"}, "of no topic"),
        ({"topics": "a", "partitionBytes": "1"}, "not from"),
        ({"topics": "a", "partitionBytes": "many"}, "not from"),
        ({"topics": "a", "dedup": "off"}, "none of on, raw"),
        ({"topics": "a", "valueFormat": "avro"}, "needs the options"),
        ({"topics": "a", "valueFormat": "avro", "schema": "a INT"}, "needs the options"),
        ({"topics": "a", "valueFormat": "avro", "avroSchema": "{}"}, "needs the options"),
        ({"topics": "a", "queue": "sqlite:q", "store": "file:s", "auditName": "n"}, "'auditName' needs 'brokers'"),
        ({"topics": "a", "dedup": "raw", "auditName": "n"}, "'auditName' needs dedup = on"),
    ],
)
def test_a_mistake_is_named(given: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidSettingError, match=said):
        read_options(given)


def test_a_name_for_the_audit_goes_with_the_defaults_and_with_what_they_are() -> None:
    for more in ({}, {"dedup": "on"}, {"brokers": "h:1"}):
        assert read_options({"topics": "a", "auditName": "n", **more}, "streaming").audit_name == "n"
    assert read_options({"topics": "a", "dedup": "raw"}).audit_name == ""


@pytest.mark.parametrize(
    ("name", "field", "least", "default"),
    [
        ("partitionBytes", "partition_bytes", 64 * KIB, 128 * MIB),
        ("prefetchBytes", "prefetch_bytes", 64 * KIB, 64 * MIB),
        ("maxBytesPerTrigger", "trigger_bytes_max", 1, 0),
        ("maxRecordsPerTrigger", "trigger_records_max", 1, 0),
        ("missingSeconds", "missing_s", 0, MISSING_S),
    ],
)
def test_a_number_is_taken_from_its_least_value_up_to_2_52(name: str, field: str, least: int, default: int) -> None:
    assert getattr(read_options({"topics": "a"}), field) == default
    assert getattr(read_options({"topics": "a", name: ""}), field) == default
    for value in (least, 1 << 52):
        assert getattr(read_options({"topics": "a", name: str(value)}), field) == value
    for value in (least - 1, (1 << 52) + 1):
        with pytest.raises(InvalidSettingError, match=f"option '{name}' = '{value}' is not from {least} to {1 << 52}"):
            read_options({"topics": "a", name: str(value)})


def test_an_unknown_name_is_answered_with_a_near_one() -> None:
    with pytest.raises(UnknownSettingError) as caught:
        read_options({"topics": "a", "partition_bytes": "1MiB"})
    assert "partitionBytes" in caught.value.hint


@pytest.mark.parametrize("name", ["secret_access_key", "s3.access_key_id", "kafka.sasl.password", "sessionToken"])
def test_keys_are_refused_and_not_repeated(name: str) -> None:
    with pytest.raises(UnknownSettingError) as caught:
        read_options({"topics": "a", name: "hunter2"})
    assert "hunter2" not in f"{caught.value} {caught.value.hint}"
    assert "environment" in caught.value.hint


def test_options_belong_to_batch_reads_or_to_streams() -> None:
    with pytest.raises(InvalidSettingError, match="maxBytesPerTrigger"):
        read_options({"topics": "a", "maxBytesPerTrigger": "1MiB"}, "batch")
    with pytest.raises(InvalidSettingError, match="'end'"):
        read_options({"topics": "a", "end": "end"}, "streaming")
    assert read_options({"topics": "a", "maxBytesPerTrigger": "1MiB"}).trigger_bytes_max == 1 << 20


def test_points_are_words_times_and_positions() -> None:
    assert read_options({"topics": "a", "start": "end"}).start == "end"
    assert read_options({"topics": "a", "start": "1767225600000"}).start == 1_767_225_600_000
    assert read_options({"topics": "a", "start": "2026-01-01T00:00:00Z"}).start == 1_767_225_600_000
    found = read_options({"topics": "a,b", "start": "a=0:17:3, b=1:2:0"}).start
    assert found == {("a", 0): Position(0, 17, 3), ("b", 1): Position(1, 2, 0)}
    assert read_options({"topics": "a", "end": "2:5:1"}).end == {("a", 2): Position(2, 5, 1)}


def test_fields_of_values_replace_the_value() -> None:
    assert table_ddl(("key", "value", "tag"), "a INT") == "key BINARY, a INT, tag STRING"
    with pytest.raises(InvalidSettingError, match="lacks"):
        table_ddl(("key",), "a INT")


def test_fields_are_distinguished_from_columns_by_their_index() -> None:
    assert fields_at(("key", "value", "a", "tag"), ("key", "value", "tag"), "value DOUBLE, a INT") == range(1, 3)
    assert fields_at(("timestamp", "tag"), ("value",), "timestamp STRING, tag STRING") == range(2)
    assert fields_at(("key", "value"), ("key", "value"), "") == range(0)


@pytest.mark.parametrize("name", ["tag", "Tag"])
def test_a_field_with_the_name_of_a_column_next_to_it_is_refused(name: str) -> None:
    with pytest.raises(InvalidSettingError, match=f"names of columns: {name}") as caught:
        fields_at(("key", "a", name, "tag"), ("key", "value", "tag"), f"a INT, {name} STRING")
    assert caught.value.hint == "columns = key,value"


@pytest.mark.parametrize(("names", "fields"), [(("a",), ""), (("key", "a"), "a INT"), (("a", "tag"), "a INT")])
def test_a_schema_that_spark_was_given_is_refused(names: tuple[str, ...], fields: str) -> None:
    with pytest.raises(InvalidSettingError, match="schema of its own"):
        fields_at(names, ("value", "timestamp"), fields)


def test_each_option_has_a_spelling_and_a_meaning() -> None:
    assert {name.lower() for name in SPELLING.values()} == DESCRIPTIONS.keys()
    assert "damage" in COLUMNS
