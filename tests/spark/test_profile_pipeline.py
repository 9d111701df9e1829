"""The profile of a topic matches the produced records."""

from __future__ import annotations

import json

from click.testing import CliRunner
from pyspark.sql import SparkSession

import memq
from memq.spark.pipelines.__main__ import pipelines
from tests.servers import DevServer


def test_a_profile_tells_what_was_produced(spark: SparkSession, broker: DevServer) -> None:
    with memq.Admin(broker.address) as admin:
        admin.create_topic("profiled", partitions=2)
    with memq.Producer(broker.address, block_bytes=4096) as producer:
        for number in range(1_000):
            key = b"heavy" if number % 2 else b"key %d" % (number % 50)
            producer.send("profiled", json.dumps({"n": number, "name": "x" * 80}).encode(), key=key)
        for _ in range(10):
            producer.send("profiled", None, key=b"heavy")
        producer.send("profiled", b"not json")
    arguments = ["profile", "profiled", "-b", broker.address, "-o", "partitionBytes=64KiB"]
    done = CliRunner().invoke(pipelines, [*arguments, "--json"], standalone_mode=False, catch_exceptions=False)
    report = json.loads(done.stdout)
    assert (report["records"], report["tombstones"]) == (1_011, 10)
    assert (report["values"]["least"], report["values"]["greatest"]) == (8, len('{"n": 998, "name": ""}') + 80)
    keys = report["keys"]
    assert (keys["null"], keys["distinct"], keys["heaviest"][0]) == (1, 26, {"key": "heavy", "records": 510})
    assert report["json"]["schema"] == "`n` BIGINT, `name` STRING"
    assert report["json"]["sampled"] - report["json"]["objects"] <= 1
    assert report["stored"]["records"] == 1_011
    assert report["stored"]["ratio"] > 1
    text = CliRunner().invoke(pipelines, arguments, standalone_mode=False, catch_exceptions=False).stdout
    assert text.startswith("records: 1,011, of these 10 tombstones and 1 without key\nvalues: ")
