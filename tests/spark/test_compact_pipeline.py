"""Compaction writes each record once, goes on where it ended, and survives a kill of its driver."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from memq.spark.pipelines.__main__ import pipelines
from memq.spark.pipelines.file_store import place_of_text
from memq.spark.pipelines.from_files import manifest_of, read_files
from memq.spark.pipelines.inputs import options_of
from memq.spark.pipelines.to_files import write_files
from tests.servers import DevServer
from tests.soak import SOAKING, repetitions, report
from tests.spark.conftest import ROOT
from tests.spark.produced import HOUR_MS, START_MS, numbers_in, produce
from tests.spark.standalone import standalone_cluster

pytestmark = pytest.mark.soak
SMALL = "partitionBytes=64KiB"
EXECUTORS_KILLED = 20


def test_each_record_is_written_once_and_runs_go_on(spark: SparkSession, broker: DevServer, tmp_path: Path) -> None:
    produce(broker, "compacted", range(500))
    folder = tmp_path / "files"
    arguments = ["compact", "compacted", "-b", broker.address, "--to", str(folder), "-o", "partitionBytes=128KiB"]

    def compact(*more: str) -> str:
        done = CliRunner().invoke(pipelines, [*arguments, *more], standalone_mode=False, catch_exceptions=False)
        assert done.return_value == 0
        return done.stdout

    assert "0 records in 0 files" in compact()  # all of it may still have late copies
    compact("--unsettled", "--tasks", "1")
    place = place_of_text(str(folder))
    manifest = manifest_of(place)
    assert manifest.number > 2
    assert numbers_in(spark, folder) == [*range(500)]
    compact("--unsettled")
    assert manifest_of(place) == manifest
    produce(broker, "compacted", range(500, 600))
    compact("--unsettled")
    again = manifest_of(place)
    assert again.files[: len(manifest.files)] == manifest.files
    assert numbers_in(spark, folder) == [*range(600)]
    assert {(file.date, file.hour) for file in again.files} == {("2026-01-01", hour) for hour in range(6)}
    hour = read_files(spark, place, least_ms=START_MS + 2 * HOUR_MS, greatest_ms=START_MS + 3 * HOUR_MS - 1)
    assert hour.count() == len(range(2, 600, 6))
    read = spark.read.format("memq").options(brokers=broker.address, topics="compacted").load()
    assert read_files(spark, place).exceptAll(read).count() == 0


def start(broker: DevServer, topic: str, folder: Path, spark_arguments: str) -> subprocess.Popen[str]:
    """Start a compaction in rounds of few objects, in a session of its own."""
    command = [sys.executable, "-m", "memq.spark.pipelines", "compact", topic, "-b", broker.address]
    return subprocess.Popen(
        [*command, "--to", str(folder), "--unsettled", "--tasks", "1", "-o", SMALL],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYSPARK_SUBMIT_ARGS": f"--conf spark.ui.enabled=false {spark_arguments} pyspark-shell"},
    )


@pytest.mark.parametrize("seed", range(repetitions(few=1, many=20)))
def test_a_killed_driver_loses_and_doubles_nothing(
    spark: SparkSession, broker: DevServer, tmp_path: Path, seed: int
) -> None:
    topic, folder = f"killed-{seed}", tmp_path / "files"
    produce(broker, topic, range(500))
    process = start(broker, topic, folder, "--master local[2]")
    assert process.stderr is not None
    rounds = random.Random(seed).randrange(1, 4)
    for line in process.stderr:
        rounds -= f"{topic}: manifest" in line
        if not rounds:
            break
    os.killpg(process.pid, signal.SIGKILL)  # the driver, its JVM and its tasks
    process.wait()
    process.stderr.close()
    place = place_of_text(str(folder))
    assert manifest_of(place).number >= 1
    write_files(spark, options_of(topic, broker.address, [SMALL])[1], place, settled=False)
    assert numbers_in(spark, folder) == [*range(500)]


@pytest.mark.skipif(not SOAKING, reason="it takes minutes: make soak")
def test_killed_executors_of_a_cluster_lose_and_double_nothing(
    spark: SparkSession, broker: DevServer, tmp_path: Path
) -> None:
    topic, folder, chance = "executors", tmp_path / "files", random.Random(3)
    kills = sent = 0
    with standalone_cluster(tmp_path) as (master, workers):
        settings = {"cores.max": 2, "executor.cores": 1, "executor.memory": "512m", "driver.host": "127.0.0.1"}
        settings |= {"driver.bindAddress": "127.0.0.1", "executorEnv.PYTHONPATH": str(ROOT)}
        arguments = " ".join(f"--conf spark.{name}={value}" for name, value in settings.items())
        while kills < EXECUTORS_KILLED:
            produce(broker, topic, range(sent, sent + 1_000))
            sent += 1_000
            process = start(broker, topic, folder, f"--master {master} {arguments}")
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                executors = [pid for worker in workers for pid in children_of(worker.pid)]
                if f"{topic}: manifest" in line and executors:
                    os.kill(chance.choice(executors), signal.SIGKILL)
                    kills += 1
            process.stderr.close()
            assert process.wait() == 0, "".join(lines[-40:])
    report(f"compact: {kills} executors killed over {sent} records")
    assert numbers_in(spark, folder) == [*range(sent)]


def children_of(pid: int) -> list[int]:
    """Return the processes that a worker runs."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text().split()]
