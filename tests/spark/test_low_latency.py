"""A low-latency write whose task is killed and runs again has each row at least once, in any order."""

from __future__ import annotations

import sys

import pytest
from pyspark.sql import SparkSession

import memq
from tests.servers import DevServer
from tests.soak import SOAKING
from tests.spark.jobs import Job
from tests.spark.killed_writer_job import ROWS, SEEN
from tests.spark.topics import make_topic

ROWS_IN_A_BLOCK = 4


@pytest.mark.soak
@pytest.mark.parametrize("order", ["shuffled", *(["same"] if SOAKING else [])])
def test_a_killed_task_loses_no_row(spark: SparkSession, broker: DevServer, order: str) -> None:
    topic = f"killed-writer-{order}"
    make_topic(broker.address, topic)
    job = Job([sys.executable, "-m", "tests.spark.killed_writer_job", broker.address, topic, order], "local[1,4]")
    while job.line():
        pass
    assert job.close() == 0, job.said
    with memq.Consumer(broker.address, topic, start="beginning", end="end") as consumer:
        values = [bytes(record.value or b"") for batch in consumer for record in batch]
    assert set(values) == set(ROWS)
    doubles = len(values) - len(ROWS)
    if order == "same":
        assert doubles < ROWS_IN_A_BLOCK, "what both attempts sent is there once, but for a block that was cut short"
    else:
        assert doubles >= SEEN, "what the first attempt had sent is there twice"
