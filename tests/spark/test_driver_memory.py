"""Every pipeline handles more data than its driver's memory: the driver reads pointers only."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import memq
from memq.spark.pipelines.topic_files import location_of_text, manifest_of
from tests.servers import DevServer
from tests.soak import SOAKING
from tests.spark.jobs import PIPELINES, Job
from tests.spark.topics import make_topic

pytestmark = pytest.mark.soak
TOPIC, COPY, GROUP = "larger", "larger-copy", "larger-group"
RECORDS, VALUE_BYTES = 2_400, 250_000
DRIVER_MEMORY = "512m"  # of its JVM, which all tasks share; Spark does not start with less than 450


@pytest.mark.skipif(not SOAKING, reason="it takes minutes: make soak")
def test_pipelines_work_on_more_than_the_drivers_memory(spark: SparkSession, broker: DevServer, tmp_path: Path) -> None:
    for topic in (TOPIC, COPY):
        make_topic(broker.address, topic, partitions=2)
    with memq.Producer(broker.address) as producer:
        for number in range(RECORDS):
            producer.send(TOPIC, b"%d" % number + bytes(VALUE_BYTES), key=b"%d" % number)
    files, caught_up = tmp_path / "files", tmp_path / "caught-up"

    def run(*words: str) -> str:
        job = Job([*PIPELINES, words[0], TOPIC, "-b", broker.address, *words[1:]], driver_memory=DRIVER_MEMORY)
        while job.line():
            pass
        assert job.close() == 0, job.said
        return job.said

    run("audit", "--json")
    run("profile", "--json")
    assert f"{RECORDS} records" in run("compact", "--to", str(files), "--unsettled")
    assert f"{RECORDS} records sent" in run("replay", "--to-topic", COPY)
    run("backfill", "--group", GROUP, "--to", str(caught_up))
    assert [manifest_of(location_of_text(str(folder))).records for folder in (files, caught_up)] == [RECORDS, RECORDS]
    frame = spark.read.format("memq").options(brokers=broker.address, topics=COPY, columns="key").load()
    assert frame.distinct().count() == RECORDS
