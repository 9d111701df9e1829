"""Options of a batch read: sources, positions, columns, splits, copies, damage, JSON and Avro values."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
from fastavro import parse_schema, schemaless_writer
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import memq
from memq.format.key import ObjectKey, parse_object_key
from tests.servers import DevServer
from tests.spark.topics import make_topic, numbers, publish_again, read, send, values_of


def objects_of(broker: DevServer, topic: str) -> list[Path]:
    """Return the objects of a topic, in the order of their batches."""
    root = broker.data / "objects"
    found: list[tuple[int, Path]] = []
    for path in root.glob(f"*/topics/{topic}/**/*"):
        if path.is_file():
            key = parse_object_key(path.relative_to(root).as_posix())
            if isinstance(key, ObjectKey) and key.topic == topic:
                found.append((key.batch_sequence, path))
    return [path for _, path in sorted(found)]


def topic_folder(broker: DevServer, topic: str) -> str:
    (folder,) = (broker.data / "objects").glob(f"*/topics/{topic}")
    return str(folder)


def test_queue_and_store_are_enough_without_a_broker(spark: SparkSession, broker: DevServer) -> None:
    make_topic(broker.address, "direct", partitions=2)
    send(broker.address, "direct", numbers(0, 1_000))
    options = {"queue": f"sqlite:{broker.data / 'queue.sqlite'}", "store": (broker.data / "objects").as_uri()}
    frame = spark.read.format("memq").options(topics="direct", **options).load()
    assert values_of(frame) == list(range(1_000))
    with pytest.raises(PySparkException, match="topic 'nowhere' is not in the queue"):
        spark.read.format("memq").options(topics="nowhere", **options).load().count()


def test_topics_columns_and_splits(spark: SparkSession, broker: DevServer) -> None:
    chance = random.Random(1)  # what does not compress
    for number, topic in enumerate(("one", "two")):
        make_topic(broker.address, topic)
        for _ in range(2):
            send(broker.address, topic, [chance.randbytes(1_000) for _ in range(100)], tag=str(number))
    frame = read(spark, broker.address, "one,two", columns="topic, tag, sequence")
    assert frame.columns == ["topic", "tag", "sequence"]
    counts = frame.groupBy("topic", "tag").count().collect()
    found = {(row["topic"], row["tag"], row["count"]) for row in counts}
    assert found == {("one", "0", 200), ("two", "1", 200)}
    assert frame.rdd.getNumPartitions() == 1, "one task for about 128 MiB"
    assert read(spark, broker.address, "one,two", partitionBytes="64KiB").rdd.getNumPartitions() > 1


def test_points_are_positions_and_times(spark: SparkSession, broker: DevServer) -> None:
    make_topic(broker.address, "places")
    for first in range(0, 300, 100):
        send(broker.address, "places", numbers(first, first + 100))
    rows = read(spark, broker.address, "places").orderBy("offset").toArrow().to_pylist()
    middle = rows[150]
    position = f"0:{middle['offset'] >> 24}:{middle['record_index']}"
    assert values_of(read(spark, broker.address, "places", start=position)) == list(range(150, 300))
    assert values_of(read(spark, broker.address, "places", end=position)) == list(range(150))
    with memq.Consumer(broker.address, "places", end="end") as consumer:
        assert len([record for batch in consumer for record in batch]) == 300
    year_ago, year_ahead = "2020-01-01T00:00:00Z", "2100-01-01T00:00:00Z"
    assert len(values_of(read(spark, broker.address, "places", start=year_ago, end=year_ahead))) == 300
    assert values_of(read(spark, broker.address, "places", start=year_ahead)) == []
    with pytest.raises(PySparkException, match="partition 9, which topic 'places' does not have"):
        read(spark, broker.address, "places", end="9:1:0").count()


def test_batches_published_twice_are_read_once_or_raw(spark: SparkSession, broker: DevServer) -> None:
    make_topic(broker.address, "twice")
    for first in range(0, 300, 100):
        send(broker.address, "twice", numbers(first, first + 100))
    publish_again(broker.data, "twice")
    assert values_of(read(spark, broker.address, "twice")) == list(range(300))
    raw = values_of(read(spark, broker.address, "twice", dedup="raw"))
    assert raw == sorted([*range(300), *range(100)])


def test_damage_ends_a_read_or_is_shown_in_a_column(spark: SparkSession, broker: DevServer) -> None:
    make_topic(broker.address, "damaged")
    for first in range(0, 400, 100):
        send(broker.address, "damaged", numbers(first, first + 100))
    paths = objects_of(broker, "damaged")
    changed, cut, missing = (path.relative_to(broker.data / "objects").as_posix() for path in paths[:3])
    body = bytearray(paths[0].read_bytes())
    body[100] ^= 1
    paths[0].write_bytes(body)
    paths[1].write_bytes(paths[1].read_bytes()[:80])
    paths[2].unlink()
    with pytest.raises(PySparkException, match=f"CorruptDataError: block 0 of object '{changed}' at 0:"):
        read(spark, broker.address, "damaged").count()
    skip = {"onDamaged": "skip", "missingSeconds": "1"}
    assert values_of(read(spark, broker.address, "damaged", **skip)) == list(range(300, 400))
    report = read(spark, broker.address, "damaged", columns="value,damage,object", **skip)
    damage = {each.object: json.loads(each.damage) for each in report.where("damage is not null").collect()}
    assert set(damage) == {changed, cut, missing}
    assert all(each["records"] == 100 and each["block"] == 0 for each in damage.values())
    assert "missing" in damage[missing]["cause"]


def test_objects_are_read_by_listing_alone(spark: SparkSession, broker: DevServer) -> None:
    make_topic(broker.address, "listed")
    for first in range(0, 500, 100):
        send(broker.address, "listed", numbers(first, first + 100))
    folder = topic_folder(broker, "listed")

    def listed(**options: str) -> list[int]:
        return values_of(spark.read.format("memq").options(path=folder, **options).load())

    assert listed() == list(range(500))
    paths = objects_of(broker, "listed")
    paths[3].unlink()  # stored last of all: nothing behind it was published
    frame = spark.read.format("memq").options(path=folder, columns="value,object,orphan").load()
    orphans = {row.object for row in frame.where("orphan").select("object").distinct().collect()}
    assert orphans == {paths[4].relative_to(broker.data / "objects").as_posix()}
    assert values_of(frame.where("not orphan")) == list(range(300))
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    with pytest.raises(PySparkException, match="CorruptDataError"):
        listed()
    assert listed(onDamaged="skip") == [*range(100, 300), *range(400, 500)]


def test_listing_a_topic_finds_what_lies_in_shared_objects(spark: SparkSession, broker: DevServer) -> None:
    for topic in ("sharing", "beside"):
        make_topic(broker.address, topic, shared_objects=True)
    for first in range(0, 300, 100):
        send(broker.address, "sharing", numbers(first, first + 100))
        send(broker.address, "beside", numbers(0, 10))
    (cluster,) = {path.parent.name for path in (broker.data / "objects").glob("*/topics")}
    path = str(broker.data / "objects" / cluster / "topics" / "sharing")
    frame = spark.read.format("memq").options(path=path, columns="value,topic,orphan").load()
    assert values_of(frame) == list(range(300))
    assert frame.where("orphan OR topic <> 'sharing'").count() == 0


def test_values_are_decoded_into_columns(spark: SparkSession, broker: DevServer) -> None:
    make_topic(broker.address, "json")
    send(broker.address, "json", [b'{"n": %d, "s": "x%d", "more": [1]}' % (n, n) for n in range(100)])
    fields = "n BIGINT, s STRING"
    frame = read(spark, broker.address, "json", schema=fields, columns="key,value,sequence")
    assert frame.columns == ["key", "n", "s", "sequence"]
    assert [tuple(row) for row in frame.orderBy("n").collect()] == [(None, n, f"x{n}", n) for n in range(100)]
    send(broker.address, "json", [b"no JSON"])
    with pytest.raises(PySparkException, match="does not match option 'schema'"):
        read(spark, broker.address, "json", schema=fields).count()
    lenient = read(spark, broker.address, "json", schema=fields, onMalformed="null")
    assert lenient.where("n is null").count() == 1
    assert lenient.count() == 101


def test_fields_may_have_the_names_of_columns_that_are_not_read(spark: SparkSession, broker: DevServer) -> None:
    make_topic(broker.address, "named-alike", partitions=2)
    send(broker.address, "named-alike", [b'{"value": %d.5, "tag": "red", "partition": 7}' % n for n in range(50)])
    fields = "value DOUBLE, tag STRING, partition INT"
    frame = read(spark, broker.address, "named-alike", schema=fields, columns="value,sequence")
    assert frame.columns == ["value", "tag", "partition", "sequence"]
    found = frame.where("tag = 'red' AND partition = 7").orderBy("value").collect()  # no pruning by memq's tag
    assert [tuple(row)[:3] for row in found] == [(n + 0.5, "red", 7) for n in range(50)]
    with pytest.raises(PySparkException, match="fields with names of columns: tag, partition"):
        read(spark, broker.address, "named-alike", schema=fields).collect()
    reading = spark.read.schema("price DOUBLE").format("memq").options(brokers=broker.address, topics="named-alike")
    with pytest.raises(PySparkException, match="schema of its own, with price"):
        reading.load().collect()


def test_values_in_avro_are_decoded(spark: SparkSession, broker: DevServer) -> None:
    fields = [{"name": "n", "type": "long"}, {"name": "s", "type": ["null", "string"]}]
    schema = {"type": "record", "name": "R", "fields": fields}
    parsed, values = parse_schema(schema), []
    for number in range(50):
        stream = io.BytesIO()
        schemaless_writer(stream, parsed, {"n": number, "s": None if number % 2 else f"x{number}"})
        values.append(stream.getvalue())
    make_topic(broker.address, "avro")
    send(broker.address, "avro", [*values, b""])
    options = {"schema": "n BIGINT, s STRING", "valueFormat": "avro", "avroSchema": json.dumps(schema)}
    frame = read(spark, broker.address, "avro", columns="value", onMalformed="null", **options)
    rows = [tuple(row) for row in frame.where("n is not null").orderBy("n").collect()]
    assert rows == [(number, None if number % 2 else f"x{number}") for number in range(50)]
    assert frame.count() == 51


def test_a_wrong_option_is_one_line_with_a_hint(spark: SparkSession) -> None:
    with pytest.raises(PySparkException, match="unknown option 'topic'"):
        spark.read.format("memq").options(topic="clicks").load()
