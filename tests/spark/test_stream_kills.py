"""Streaming reads and writes whose driver and tasks are killed lose no row and double none."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import memq
from tests.servers import DevServer
from tests.soak import repetitions, report
from tests.spark import streaming_job
from tests.spark.jobs import Job
from tests.spark.topics import make_topic, numbers, send, values_of

KILLS = repetitions(few=1, many=20)  # of the driver, and as many of tasks
RECORDS = repetitions(few=1_000, many=2_000 * KILLS)
BATCH = re.compile(r"batch \d+$")
TASKS = "local[2,8]"  # a task whose Python is killed is run again


@pytest.mark.soak
def test_kills_lose_and_double_nothing(spark: SparkSession, broker: DevServer, tmp_path: Path) -> None:
    chance = random.Random(RECORDS)
    make_topic(broker.address, "killed", partitions=3)
    make_topic(broker.address, "killed-copy", partitions=2)
    for first in range(0, RECORDS, 500):
        send(broker.address, "killed", numbers(first, first + 500))
    drivers = tasks = 0
    while drivers < KILLS or tasks < KILLS:
        job = Job([sys.executable, "-m", "tests.spark.streaming_job", broker.address, "killed", str(tmp_path)], TASKS)
        wait = chance.randrange(1, 4)  # micro-batches
        while (line := job.line()) and not line.endswith("all read\n"):
            if not BATCH.search(line):
                continue
            wait -= 1
            if tasks < KILLS and job.kill_a_task(chance):
                tasks += 1
            elif wait <= 0 and drivers < KILLS:
                drivers += 1
                job.kill_all()
                break
        else:
            assert line, f"the job ended by itself:\n{job.said}"
            job.close()
            break
    else:
        streaming_job.main(broker.address, "killed", str(tmp_path))  # the rest, in the session that runs already
    report(f"streaming read: {drivers} drivers and {tasks} tasks killed over {RECORDS} records")
    assert drivers == KILLS
    assert values_of(spark.read.parquet(str(tmp_path / "out"))) == list(range(RECORDS))
    with memq.Consumer(broker.address, ["killed-copy"], start="beginning", end="end") as consumer:
        copied = sorted(int(value or b"") for batch in consumer for value in batch.values())
    assert copied == list(range(RECORDS))
