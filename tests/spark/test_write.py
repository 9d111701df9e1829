"""Writes with Spark: every column arrives, a batch exists once, and a failed attempt is invisible."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import memq
from memq.client.bulk.staged_writer import StagedCommits
from memq.client.io_thread import io_thread
from memq.errors import InvalidRequestError, InvalidSettingError, UnknownSettingError
from memq.spark.write import (
    WRITE_COLUMNS,
    WRITE_SPELLING,
    StagedTask,
    WriteOptions,
    check_columns,
    columns_of,
    open_stores,
    write_options,
)
from tests.servers import DevServer
from tests.spark.conftest import ROOT
from tests.spark.topics import make_topic

PAGE = ROOT / "docs" / "spark-write.md"


def consumed(address: str, topic: str) -> list[memq.Record]:
    with memq.Consumer(address, [topic], start="beginning", end="end") as consumer:
        return [record for batch in consumer for record in batch]


def numbers_in(address: str, topic: str) -> list[int]:
    return sorted(int(record.value or b"") for record in consumed(address, topic))


def write(frame: DataFrame, broker: DevServer, **options: str) -> None:
    frame.write.format("memq").mode("append").options(brokers=broker.address, **options).save()


def numbers(spark: SparkSession, first: int, end: int) -> DataFrame:
    return spark.range(first, end, numPartitions=3).selectExpr("cast(id as string) as value")


@pytest.mark.parametrize("mode", ["exactly-once", "low-latency"])
def test_every_column_arrives(spark: SparkSession, broker: DevServer, mode: str) -> None:
    topics = [f"out-{mode}-a", f"out-{mode}-b"]
    for topic in topics:
        make_topic(broker.address, topic, partitions=2)
    frame = spark.range(0, 300, numPartitions=2).selectExpr(
        "cast(id as string) as value",
        "case when id % 3 = 0 then null else cast(cast(id % 7 as string) as binary) end as key",
        "array(named_struct('name', 'trace', 'value', cast(cast(id as string) as binary))) as headers",
        "case when id % 2 = 0 then 'even' end as tag",
        "timestamp_millis(1767225600000 + id) as timestamp",
        f"concat('out-{mode}-', case when id % 5 = 0 then 'b' else 'a' end) as topic",
        "cast(id % 2 as int) as partition",
    )
    write(frame, broker, mode=mode)
    found = [(topic, record) for topic in topics for record in consumed(broker.address, topic)]
    assert len(found) == 300
    for topic, record in found:
        number = int(record.value or b"")
        assert topic.endswith("b" if number % 5 == 0 else "a")
        assert record.key == (None if number % 3 == 0 else b"%d" % (number % 7))
        assert tuple(record.headers) == (("trace", b"%d" % number),)
        assert record.tag == ("even" if number % 2 == 0 else None)
        assert record.timestamp_ms == 1_767_225_600_000 + number
        assert record.position.read_partition == number % 2


@pytest.mark.parametrize("atomic", ["false", "true"])
def test_a_named_batch_that_runs_again_is_there_once(spark: SparkSession, broker: DevServer, atomic: str) -> None:
    topic, writer = f"job-{atomic}", f"nightly-{atomic}"
    make_topic(broker.address, topic, partitions=2)
    options = {"topic": topic, "writer": writer, "atomic": atomic}
    for attempt in range(2):
        write(numbers(spark, 0, 1_000), broker, batchId="1", **options)
        assert numbers_in(broker.address, topic) == list(range(1_000)), attempt
    write(numbers(spark, 1_000, 1_500), broker, batchId="3", **options)
    assert numbers_in(broker.address, topic) == list(range(1_500))
    write(numbers(spark, 0, 1_000), broker, batchId="1", **options)
    with pytest.raises(PySparkException, match=f"batch 2 was never written, and writer '{writer}' has written batch 3"):
        write(numbers(spark, 1_500, 1_600), broker, batchId="2", **options)
    assert numbers_in(broker.address, topic) == list(range(1_500))


def test_a_batch_that_fails_leaves_nothing_to_see(spark: SparkSession, broker: DevServer) -> None:
    make_topic(broker.address, "failed")
    broken = spark.range(0, 1_000, numPartitions=3).selectExpr(
        "case when id = 999 then raise_error('on purpose') else cast(id as string) end as value"
    )
    with pytest.raises(PySparkException, match="on purpose"):
        write(broken, broker, topic="failed")
    assert consumed(broker.address, "failed") == []
    write(numbers(spark, 0, 10), broker, topic="failed")
    assert numbers_in(broker.address, "failed") == list(range(10))


def test_a_batch_that_was_decided_and_not_published_comes_with_the_next_one(
    spark: SparkSession, broker: DevServer
) -> None:
    """What is left of a driver that is killed in its commit, and of a job that nobody runs again."""
    make_topic(broker.address, "left")
    options = write_options(
        {"brokers": broker.address, "topic": "left", "writer": "lefts", "batchId": "1"}, streams=False
    )

    async def decide() -> None:
        commits = StagedCommits(options.brokers, options.writer)
        await commits.connect()
        stores = open_stores(options, {commits.store.name: commits.store.url})
        task = StagedTask(commits, stores, options, options.writer)
        try:
            await task.add(pyarrow.record_batch({"value": [b"%d" % number for number in range(10)]}))
            await commits.decide(1, await task.finish(), task.store)
        finally:
            await task.close()

    io_thread().run(decide())
    assert consumed(broker.address, "left") == []
    write(numbers(spark, 10, 20), broker, topic="left", writer="lefts", batchId="2")
    assert numbers_in(broker.address, "left") == list(range(20))


def test_an_empty_frame_is_a_batch_too(spark: SparkSession, broker: DevServer) -> None:
    make_topic(broker.address, "nothing")
    write(numbers(spark, 0, 0), broker, topic="nothing")
    assert consumed(broker.address, "nothing") == []


@pytest.mark.parametrize(
    ("mode", "atomic"), [("exactly-once", "false"), ("exactly-once", "true"), ("low-latency", "false")]
)
def test_a_stream_whose_driver_forgot_its_last_commits_writes_them_once(
    spark: SparkSession, broker: DevServer, tmp_path: Path, mode: str, atomic: str
) -> None:
    """What a killed driver leaves: batches whose commits its checkpoint does not know of run again."""
    topic, source, checkpoint = f"stream-{mode}-{atomic}", tmp_path / "in", tmp_path / "checkpoint"
    make_topic(broker.address, topic, partitions=2)
    source.mkdir()

    def run(checkpoint: Path = checkpoint) -> None:
        frame = spark.readStream.schema("value STRING").option("maxFilesPerTrigger", 1).text(str(source))
        query = (
            frame.writeStream.format("memq")
            .options(brokers=broker.address, topic=topic, writer=f"w-{topic}", mode=mode, atomic=atomic)
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(400)

    for number in range(3):
        (source / f"{number}.txt").write_text("".join(f"{number * 100 + row}\n" for row in range(100)))
    run()
    assert numbers_in(broker.address, topic) == list(range(300))
    for name in ("2", ".2.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    (source / "3.txt").write_text("".join(f"{300 + row}\n" for row in range(100)))
    run()
    assert numbers_in(broker.address, topic) == list(range(400))
    if mode == "exactly-once":
        with pytest.raises(StreamingQueryException, match="give each stream a writer name of its own"):
            run(tmp_path / "another")
        assert numbers_in(broker.address, topic) == list(range(400))


# ---- options and columns -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "streams", "wrong"),
    [
        ({"topics": "a"}, False, "unknown option 'topics'"),
        ({"secretKey": "x"}, False, "option 'secretkey' is refused"),
        ({"mode": "once"}, False, "option 'mode' = 'once'"),
        ({"writer": "w"}, False, "require each other"),
        ({"writer": "w", "batchId": "-1"}, False, "option 'batchId' = '-1'"),
        ({}, True, "a stream needs the option 'writer'"),
        ({"codec": "gzip"}, False, "option 'codec' = 'gzip'"),
        ({"atomic": "yes"}, False, "option 'atomic' = 'yes'"),
        ({"atomic": "true"}, False, "needs the mode exactly-once and a writer"),
        ({"atomic": "true", "writer": "w", "mode": "low-latency"}, True, "needs the mode exactly-once and a writer"),
    ],
)
def test_options_that_are_wrong_are_named(given: dict[str, str], streams: bool, wrong: str) -> None:
    with pytest.raises((UnknownSettingError, InvalidSettingError), match=wrong):
        write_options(given, streams=streams)


def test_each_snippet_of_the_page_runs_and_each_option_is_in_one(
    spark: SparkSession, broker: DevServer, tmp_path: Path
) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert [name for name in WRITE_SPELLING.values() if f"{name}=" not in "".join(snippets)] == []
    (tmp_path / "memq.toml").write_text('[profile.reports.s3]\nregion = "eu-central-1"\n')
    real = {
        "127.0.0.1:9876": broker.address,
        "/srv/memq.toml": str(tmp_path / "memq.toml"),
        "/srv/memq/": f"{broker.data}/",
        "/srv/out": str(tmp_path),
        "20260131": "1",
        '"orders"': '"page-orders"',
        '"copies"': '"page-copies"',
    }
    names: dict[str, object] = {}
    for snippet in snippets:
        for shown, meant in real.items():
            snippet = snippet.replace(shown, meant)
        exec(compile(snippet, str(PAGE), "exec"), names)
    assert len(consumed(broker.address, "page-orders")) == 4_000
    assert len(consumed(broker.address, "page-copies")) == 1_000


def test_the_page_names_every_option_and_column() -> None:
    page = PAGE.read_text(encoding="utf-8")
    report = {name for row in page.splitlines() if row.startswith("| ") for name in row.split(" | ")[0][2:].split(", ")}
    assert report >= set(WRITE_SPELLING.values()) | set(WRITE_COLUMNS)


@pytest.mark.parametrize(
    ("columns", "wrong"),
    [
        ({"key": "binary"}, "there is no column value"),
        ({"value": "int"}, "column 'value' is int, not binary or string"),
        ({"value": "binary", "vlaue": "binary"}, "column 'vlaue' is none"),
        ({"value": "binary", "topic": "string"}, "one of the option 'topic' and the column topic"),
    ],
)
def test_columns_that_are_wrong_are_named(columns: dict[str, str], wrong: str) -> None:
    with pytest.raises(InvalidSettingError, match=wrong):
        check_columns(list(columns.items()), WriteOptions(topic="clicks"))


def test_overwriting_is_refused(spark: SparkSession, broker: DevServer) -> None:
    with pytest.raises(Exception, match=r"overwritten|truncate|overwrite"):
        numbers(spark, 0, 1).write.format("memq").mode("overwrite").options(brokers=broker.address, topic="x").save()


def test_nulls_where_none_may_be_are_named() -> None:
    rows = pyarrow.RecordBatch.from_pylist([{"value": b"a", "topic": "one"}, {"value": b"b", "topic": None}])
    with pytest.raises(InvalidRequestError, match="topic is null"):
        columns_of(rows)
    for headers, named in (([], True), (None, True), ([{"name": "a", "value": None}], True), ([{"name": None}], False)):
        kind = pyarrow.list_(pyarrow.struct({"name": pyarrow.string(), "value": pyarrow.binary()}))
        batch = pyarrow.RecordBatch.from_arrays([pyarrow.array([headers], kind)], ["headers"])
        if named:
            assert columns_of(batch)["headers"] == [headers and [(each["name"], each["value"]) for each in headers]]
        else:
            with pytest.raises(InvalidRequestError, match="a header has no name"):
                columns_of(batch)
