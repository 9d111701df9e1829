"""Spark's client of a chaos run, killed with SIGKILL once: its files and its copies have each record once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import memq
from tests.chaos.clients import SparkClient
from tests.chaos.journal import COPIES, lines_of, value_of
from tests.chaos.spark_rules import SparkRules, rows_of
from tests.chaos.verdict import Acks, Verdict
from tests.servers import DevServer, dev_server
from tests.soak import SOAKING

SIZE = 100
RECORDS = 500
BEGINS_S = 400.0  # 25 s on an idle machine
PRODUCER = "00000000000000aa"


def send(broker: DevServer, topic: str, worker: str, first: int) -> None:
    with memq.Producer(broker.address) as producer:
        for number in range(first, first + RECORDS):
            for partition in range(2):
                producer.send(topic, value_of(worker, number, SIZE), partition=partition)
        producer.flush()


def wait_for_commits(spark: SparkClient) -> None:
    """Wait until each query of this life has committed a micro-batch."""
    for _ in range(int(BEGINS_S)):
        if spark.may_be_struck:
            return
        assert spark.runs, spark.log.read_text()[-3_000:]
        threading.Event().wait(1.0)
    raise AssertionError(f"nothing committed within {BEGINS_S:.0f} s: {spark.log.read_text()[-3_000:]}")


@pytest.mark.soak
@pytest.mark.skipif(not SOAKING, reason="tests/spark/test_stream_kills.py kills streams: make soak")
def test_a_killed_stream_has_each_record_once(tmp_path: Path) -> None:
    with dev_server(tmp_path / "data") as broker:
        with memq.Admin(broker.address) as admin:
            for topic in ("all", "jobs", COPIES):
                admin.create_topic(topic, partitions=2)
        spark = SparkClient(tmp_path, "spark", "stream", "all,jobs", broker.address)
        try:
            send(broker, "all", "all-1", 0)
            spark.begin()
            wait_for_commits(spark)
            spark.kill()
            spark.begin()
            send(broker, "all", "all-1", RECORDS)
            send(broker, "jobs", "named", 0)
            wait_for_commits(spark)
            spark.end()
            spark.process.wait(BEGINS_S)
            assert spark.wait() == 0, spark.log.read_text()[-3_000:]
        finally:
            spark.close()
        assert [words[0] for words in lines_of(tmp_path / "spark.1.journal")][-1] == "E"
        verdict, acks = Verdict(), Acks()
        rules = SparkRules(verdict, SIZE)
        for row in rows_of(tmp_path / "spark" / "sink"):
            rules.take_row(*row)
        with memq.Consumer(broker.address, [COPIES], start="beginning", end="end") as consumer:
            for batch in consumer:
                for value in batch.values():
                    rules.take_copy(value or b"")
    for partition in range(2):
        acks.ranges["all", partition, PRODUCER].append((0, 2 * RECORDS))
    acks.workers[PRODUCER] = "all-1"
    acks.ranges["jobs", 0, "b" * 16].append((0, RECORDS))
    acks.workers["b" * 16] = "named"
    rules.finish(acks, copied="all")
    assert verdict.findings == []
    assert verdict.counts["rows of Spark's files"] == 6 * RECORDS
    assert verdict.counts["records that Spark wrote"] == 4 * RECORDS
