"""The same code on a cluster of Spark: a master and two workers, each with an executor of its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import zlib
from pathlib import Path

import memq
from tests.servers import DevServer
from tests.spark.conftest import ROOT
from tests.spark.standalone import standalone_cluster

PARTITIONS, RECORDS = 3, 3_000


def test_executors_of_a_cluster_read_a_topic_and_write_it_once_though_their_tasks_are_killed(
    tmp_path: Path, broker: DevServer
) -> None:
    topic, draw = "spread", random.Random(1)
    sums = [0] * PARTITIONS
    with memq.Admin(broker.address) as admin:
        admin.create_topic(topic, partitions=PARTITIONS)
        admin.create_topic(f"{topic}-copy", partitions=2)
    with memq.Producer(broker.address, codec="none", block_bytes=64 * 1024) as producer:
        for number in range(RECORDS):
            value = b"%d " % number + draw.randbytes(100)
            producer.send(topic, value, partition=number % PARTITIONS)
            sums[number % PARTITIONS] += zlib.crc32(value)
    with standalone_cluster(tmp_path) as (master, workers):
        job = [sys.executable, str(ROOT / "tests" / "spark" / "cluster_job.py"), master, broker.address, topic]
        environment = {**os.environ, **workers[0].launch.environment}
        ran = subprocess.run(job, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert ran.returncode == 0, ran.stderr[-4_000:] + "".join(worker.tail() for worker in workers)
        found = json.loads(ran.stdout.splitlines()[-1])
        assert found == [[number, RECORDS // PARTITIONS, sums[number]] for number in range(PARTITIONS)]
        for worker in workers:
            assert "Asked to launch executor" in worker.log.read_text(), f"{worker.launch.kind} had nothing to do"
    with memq.Consumer(broker.address, [f"{topic}-copy"], start="beginning", end="end") as consumer:
        copied = sorted(int((record.value or b"").split(b" ")[0]) for batch in consumer for record in batch)
    assert copied == list(range(RECORDS)), "what killed tasks have staged is not seen, nor what the second commit had"
