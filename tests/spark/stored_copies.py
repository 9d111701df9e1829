"""Every way of Spark to copy a topic, on any store and queue: write, stream, replay, files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession

from memq.spark.pipelines.__main__ import pipelines
from memq.spark.pipelines.topic_files import location_of_text, read_files
from tests.spark.streams import run_to_end
from tests.spark.topics import make_topic, read

RECORD = ("key", "value", "headers", "tag", "timestamp")
MODES = ("exactly-once", "low-latency")
Options = Mapping[str, str]


def contents(frame: DataFrame) -> list[str]:
    """Return the records of a frame, whole, in an order that does not depend on where they are."""
    return sorted(str(sorted(row.items())) for row in frame.select(*RECORD).toArrow().to_pylist())


def written_copies(spark: SparkSession, broker: str, topic: str, config: str, folder: Path) -> Iterator[DataFrame]:
    """Yield copies that a batch and a stream write, in each mode; what can be said twice is."""
    for mode in MODES:
        to = {"brokers": broker, "config": config, "mode": mode}
        copy = f"{topic}-batch-{mode}"
        make_topic(broker, copy, partitions=2)
        records = read(spark, broker, topic, config=config).select(*RECORD)
        for _ in range(2):
            records.write.format("memq").mode("append").options(**to, topic=copy, writer=copy, batchId="1").save()
        yield read(spark, broker, copy, config=config)
        copy = f"{topic}-stream-{mode}"
        make_topic(broker, copy, partitions=2)
        options = {"brokers": broker, "topics": topic, "config": config, "maxRecordsPerTrigger": "1000"}
        stream = spark.readStream.format("memq").options(**options).load().select(*RECORD).writeStream
        stream = stream.format("memq").options(**to, topic=copy, writer=copy)
        run_to_end(stream.option("checkpointLocation", str(folder / copy)))
        yield read(spark, broker, copy, config=config)


def piped_copies(
    spark: SparkSession, broker: str, direct: Options, bucket: str, count: int
) -> Iterator[tuple[str, DataFrame]]:
    """Yield what pipelines make of the topic of `direct`, which are options that need no broker.

    Those that copy nothing are checked for what they say of `count` records.
    """
    topic, config = direct["topics"], direct["config"]
    by_queue = [word for name in ("queue", "store", "config") for word in ("-o", f"{name}={direct[name]}")]
    by_broker = ["-b", broker, "-o", f"config={config}"]
    make_topic(broker, f"{topic}-replayed", partitions=2)
    make_topic(broker, f"{topic}-report", partitions=1)
    assert json.loads(run("profile", topic, *by_queue, "--json"))["records"] == count
    report = json.loads(run("audit", topic, *by_broker, "--report", f"{topic}-report", "--json"))
    assert report == json.loads(run("audit", topic, *by_queue, "--json"))
    yield "report", read(spark, broker, f"{topic}-report", config=config)
    run("replay", topic, *by_broker, "--to-topic", f"{topic}-replayed")
    yield "replayed", read(spark, broker, f"{topic}-replayed", config=config)
    for name, more in (("compact", ["--unsettled"]), ("backfill", ["--group", "files"]), ("replay", [])):
        url = bucket.replace("?", f"/{name}?")
        for _ in range(2):
            run(name, topic, *(by_broker if name == "backfill" else by_queue), *more, "--to", url)
        yield name, read_files(spark, location_of_text(url, config))


def run(*words: str) -> str:
    """Run a pipeline in the session that is there, and return what it printed."""
    done = CliRunner().invoke(pipelines, list(words), standalone_mode=False, catch_exceptions=False)
    assert done.return_value == 0, done.output
    return done.stdout
