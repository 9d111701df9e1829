"""The options `tags` and `where` in Spark: batch, stream, the bytes that are fetched, and the live audit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import BinaryType, StructField, StructType

import memq
from memq.audit.finding import Finding
from memq.audit.minutes import MinuteRow
from memq.client.observers.reporter import ReportCarrier
from memq.spark.options import read_options
from memq.spark.stream_reader import MemqStreamReader
from tests.servers import DevServer
from tests.spark.audited import audit_until, auditing_broker
from tests.spark.counted_store import CountedStore, counted_store
from tests.spark.streams import run_to_end
from tests.spark.topics import make_topic, read

TOPIC, STREAM = "filtered", "of-filtered"
BATCHES, RECORDS = 100, 20
OTHER_TAG = "x"
WANTED = [number for number in range(BATCHES * RECORDS) if number // RECORDS % 20 == 3]


def fill(address: str, topic: str, batches: int = BATCHES) -> None:
    """Send batches of `RECORDS` records; the tag T is in 5 of 100, and record number n has the header n."""
    chance = random.Random(1)
    with memq.Producer(address, codec="none", linger_ms=60_000) as producer:
        for number in range(batches * RECORDS):
            tag = "T" if number // RECORDS % 20 == 3 else OTHER_TAG
            value = b"%d" % number + chance.randbytes(100)
            producer.send(topic, value, headers={"n": str(number)}, tag=tag)
            if number % RECORDS == RECORDS - 1:
                producer.flush(timeout=60)


def numbers_of(values: list[bytes]) -> list[int]:
    return sorted(int(value[: len(value) - 100]) for value in values)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountedStore]:
    with counted_store(tmp_path_factory.mktemp("filtered")) as store:
        make_topic(store.address, TOPIC)
        fill(store.address, TOPIC)
        yield store


def test_a_tag_in_5_of_100_batches_costs_few_bytes_of_the_store(spark: SparkSession, store: CountedStore) -> None:
    frame = read(spark, store.address, TOPIC, columns="value", config=str(store.config), tags="T")
    store.fetched()
    values = frame.toArrow().column(0).to_pylist()
    _, fetched = store.fetched()
    assert numbers_of(values) == WANTED
    assert fetched <= 0.15 * sum(block.length for block in store.blocks())


def test_tags_and_a_condition_apply_in_batch_and_stream(
    spark: SparkSession, store: CountedStore, tmp_path: Path
) -> None:
    options = {"columns": "value", "config": str(store.config), "tags": "T || y", "where": "n BETWEEN 70 AND 500"}
    wanted = [number for number in WANTED if 70 <= number <= 500]
    frame = read(spark, store.address, TOPIC, **options)
    assert numbers_of(frame.toArrow().column(0).to_pylist()) == wanted
    stream = spark.readStream.format("memq").options(brokers=store.address, topics=TOPIC, **options).load()
    run_to_end(
        stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint")),
        str(tmp_path / "out"),
    )
    written = spark.read.parquet(str(tmp_path / "out")).toArrow().column(0).to_pylist()
    assert numbers_of(written) == wanted


def test_a_stream_without_a_wanted_record_ends(spark: SparkSession, store: CountedStore, tmp_path: Path) -> None:
    options = {"columns": "value", "config": str(store.config), "tags": "no such tag"}
    assert read(spark, store.address, TOPIC, **options).count() == 0
    stream = spark.readStream.format("memq").options(brokers=store.address, topics=TOPIC, **options).load()
    writer = stream.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
    run_to_end(writer, str(tmp_path / "out"))


def test_a_malformed_condition_is_refused_with_its_place(spark: SparkSession, broker: DevServer) -> None:
    with pytest.raises(PySparkException, match="where can't be read at its end"):
        read(spark, broker.address, TOPIC, where="n >")


def test_records_that_a_filter_of_a_stream_leaves_out_are_passed_for_the_audit(tmp_path: Path) -> None:
    with auditing_broker(tmp_path) as broker:
        make_topic(broker.address, TOPIC)
        fill(broker.address, TOPIC, batches=24)
        wanted = [number for number in range(24 * RECORDS) if number // RECORDS % 20 == 3 and number >= 70]
        options = read_options(
            {
                "brokers": broker.address,
                "topics": TOPIC,
                "columns": "value",
                "auditName": STREAM,
                "tags": "T",
                "where": "n >= 70",
            },
            "streaming",
        )
        reader = MemqStreamReader(options, StructType([StructField("value", BinaryType())]))
        checkpoint, found = reader.initialOffset(), list[bytes]()
        while (end := reader.latestOffset(checkpoint, ReadMaxRows(110))) != checkpoint:
            for split in reader.partitions(checkpoint, end):
                for batch in reader.read(split):
                    found += batch.column(0).to_pylist()
            checkpoint = end
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ReportCarrier, "send", lambda *_: None)  # Spark kills the driver
            reader.stop()
        assert numbers_of(found) == wanted

        def is_known(row: MinuteRow, findings: list[Finding]) -> bool:
            assert findings == [], "not even for a while"
            side = row.side(STREAM)
            known = (side["processed"], side["passed"]) == (len(wanted), 24 * RECORDS - len(wanted))
            return known and row.word(STREAM) == "ok"

        audit_until(broker, tmp_path, TOPIC, is_known)
