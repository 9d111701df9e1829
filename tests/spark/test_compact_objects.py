"""Spark tasks compact small objects into large ones: every read has the same result, also after kills."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession

import memq
from memq.errors import InvalidSettingError
from memq.format.key import is_large_object
from memq.spark.pipelines.__main__ import pipelines
from tests.compaction import all_records, make_old
from tests.servers import DevServer
from tests.soak import SOAKING, report
from tests.spark.jobs import PIPELINES, Job
from tests.spark.produced import produce

pytestmark = pytest.mark.soak
SETTINGS = {"stale_publish_ms": 1_000, "delivery_timeout_ms": 1_000, "dedup_window_ms": 43_000}
RECORDS, OLD_OFFSETS = 400, 4  # the last pointers are young
TASKS_KILLED = 20
COLUMNS = ("key", "value", "timestamp", "partition", "offset", "producer_id", "sequence")


def fill(broker: DevServer, topic: str) -> None:
    with memq.Admin(broker.address) as admin:
        admin.create_topic(topic, partitions=2, settings=SETTINGS)
    produce(broker, topic, range(RECORDS))
    make_old(broker.data, topic, OLD_OFFSETS)


def compact(broker: DevServer, topic: str, *more: str) -> str:
    arguments = ["compact", topic, "-b", broker.address, "--into", "objects", "--object-bytes", "20KiB", *more]
    done = CliRunner().invoke(pipelines, arguments, standalone_mode=False, catch_exceptions=False)
    assert done.return_value == 0, done.output
    return done.stdout


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    return sorted((tuple(row) for row in frame.select(*COLUMNS).collect()), key=lambda row: (row[3], row[4]))


def through_broker(spark: SparkSession, broker: DevServer, topic: str) -> DataFrame:
    return spark.read.format("memq").options(brokers=broker.address, topics=topic, columns=",".join(COLUMNS)).load()


def through_queue(spark: SparkSession, broker: DevServer, topic: str) -> DataFrame:
    source = {"queue": f"sqlite:{broker.data}/queue.sqlite", "store": (broker.data / "objects").as_uri()}
    return spark.read.format("memq").options(topics=topic, columns=",".join(COLUMNS), **source).load()


def objects(broker: DevServer, topic: str, *, large: bool) -> list[Path]:
    root = broker.data / "objects"
    files = [path for path in root.glob(f"*/topics/{topic}/**/*") if path.is_file()]
    keys = {path: path.relative_to(root).as_posix() for path in files}
    return [path for path in files if (is_large_object(keys[path]) if large else "/cold/" not in keys[path])]


def test_every_read_sees_the_same_before_and_after(spark: SparkSession, broker: DevServer, tmp_path: Path) -> None:
    fill(broker, "to-large")
    before, consumed = rows(through_broker(spark, broker, "to-large")), all_records(broker.address, "to-large")
    assert len(before) == len(consumed) == RECORDS
    assert "go to 0 large objects" in compact(broker, "to-large", "--age", "3d")
    assert "go to 0 large objects" not in compact(broker, "to-large", "--rest", "--tasks", "2")
    assert "go to 0 large objects" in compact(broker, "to-large", "--rest")
    made = objects(broker, "to-large", large=True)
    assert made
    named = {path.name for path in made}
    read = through_broker(spark, broker, "to-large").select("*")
    assert rows(read) == before
    listed = spark.read.format("memq").options(brokers=broker.address, topics="to-large", columns="object").load()
    assert named <= {str(row.object).rpartition("/")[2] for row in listed.distinct().collect()}
    assert rows(through_queue(spark, broker, "to-large")) == before
    assert all_records(broker.address, "to-large") == consumed
    folder = made[0].parents[5]
    raw = spark.read.format("memq").option("path", f"{folder}").option("columns", "value").load()
    assert sorted(row.value for row in raw.collect()) == sorted(row[1] for row in before)


def test_objects_are_compacted_with_brokers_only(spark: SparkSession, broker: DevServer) -> None:
    fill(broker, "by-queue")
    source = [f"queue=sqlite:{broker.data}/queue.sqlite", f"store={(broker.data / 'objects').as_uri()}"]
    arguments = ["compact", "by-queue", "--into", "objects", *(word for each in source for word in ("-o", each))]
    with pytest.raises(InvalidSettingError, match="with brokers"):
        CliRunner().invoke(pipelines, arguments, standalone_mode=False, catch_exceptions=False)


def words(broker: DevServer, topic: str) -> list[str]:
    """Return the command of a compaction in rounds of one object."""
    small = ["--object-bytes", "12KiB", "--rest", "--tasks", "1"]
    return [*PIPELINES, "compact", topic, "-b", broker.address, "--into", "objects", *small]


@pytest.mark.skipif(not SOAKING, reason="tests/unit/test_compaction.py kills at every step: make soak")
@pytest.mark.parametrize("seed", range(20))
def test_a_killed_driver_loses_and_doubles_nothing(spark: SparkSession, broker: DevServer, seed: int) -> None:
    topic = f"large-{seed}"
    fill(broker, topic)
    before = all_records(broker.address, topic)
    job = Job(words(broker, topic))
    rounds = random.Random(seed).randrange(1, 3)
    while rounds and (line := job.line()):
        rounds -= f"{topic}: " in line
    assert not rounds, job.said
    job.kill_all()
    assert all_records(broker.address, topic) == before
    compact(broker, topic, "--rest")
    assert all_records(broker.address, topic) == before
    assert objects(broker, topic, large=True)


@pytest.mark.skipif(not SOAKING, reason="it takes minutes: make soak")
def test_killed_tasks_lose_and_double_nothing(spark: SparkSession, broker: DevServer) -> None:
    topic, chance, kills, runs = "large-tasks", random.Random(3), 0, 0
    fill(broker, topic)
    while kills < TASKS_KILLED:
        runs += 1
        before = all_records(broker.address, topic)
        job = Job(words(broker, topic), "local[2,40]")
        while job.line():
            kills += job.kill_a_task(chance)
        assert job.close() == 0, job.said
        assert all_records(broker.address, topic) == before
        produce(broker, topic, range(RECORDS))
        make_old(broker.data, topic, 1 << 30)
    report(f"compact into objects: {kills} tasks killed in {runs} runs")
