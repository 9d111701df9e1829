"""Spark's audit reports what was injected, exactly, and says what `memq audit` says."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

import memq
from memq.audit.minutes import COUNTS
from memq.client.io_thread import io_thread
from memq.errors import InvalidRequestError
from memq.spark.access import UnknownGroups
from memq.spark.options import read_options
from memq.spark.pipelines.__main__ import pipelines
from memq.spark.pipelines.audit import audit, plan_audit
from memq.spark.pipelines.inputs import positions_of
from memq.topic import Committed, Position, ReadPartition
from tests.servers import DevServer
from tests.soak import repetitions
from tests.spark.faulty_topic import GROUP, GROUP_OFFSET, MINUTE_MS, Stream, inject_faults
from tests.unit.blocks import NOW_MS

pytestmark = pytest.mark.soak
KINDS = ("delivered", "copies", "lost", "corrupt", "doubled", "unknown", "late")


def test_a_pipeline_without_a_broker_is_refused_the_positions_of_a_group(tmp_path: Path) -> None:
    """The queue has none: the pipeline would take the group for a new one."""
    options = read_options(inject_faults(tmp_path, 1).options, "batch")
    with pytest.raises(InvalidRequestError, match="positions of group 'report' are not in the queue"):
        asyncio.run(positions_of(options, "report"))


@pytest.mark.parametrize("seed", range(repetitions(few=3, many=50)))
def test_reported_is_what_was_injected_and_what_memq_audit_says(
    spark: SparkSession, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = inject_faults(tmp_path, seed)

    async def groups(unknown: UnknownGroups) -> Sequence[str]:
        return (GROUP,)

    async def committed(
        unknown: UnknownGroups, group: str, partitions: Sequence[ReadPartition]
    ) -> dict[ReadPartition, Committed]:
        return {each: Committed(Position(0, GROUP_OFFSET)) for each in partitions if each.partition == 0}

    monkeypatch.setattr(UnknownGroups, "groups", groups)
    monkeypatch.setattr(UnknownGroups, "committed", committed)
    options = replace(read_options(topic.options, "batch"), partition_bytes=8_192)  # a few pieces of each partition
    verdict, table = audit(spark, options, io_thread().run(plan_audit(options)))
    assert verdict == topic.audited()
    rows = table.collect()
    found: dict[Stream, Counter[str]] = {}
    for row in rows:
        found.setdefault((row.partition, row.producer_id), Counter()).update({kind: row[kind] for kind in KINDS})
        assert row.sent == row.delivered + row.lost + row.corrupt + row.unread + row.unknown + row.in_flight
        assert (row.topic, row.final) == ("clicks", True)
        assert (row.verdict == "ok") == (not any(row[kind] for kind in (*KINDS[2:], "unread", "in_flight")))
    assert {stream: +counts for stream, counts in found.items()} == topic.truth
    assert sum(row.committed[GROUP] for row in rows) == topic.processed
    minutes = {row.minute.replace(tzinfo=UTC) for row in rows}
    assert min(minutes) == datetime.fromtimestamp(NOW_MS // MINUTE_MS * 60, UTC)


def test_a_topic_of_a_broker_as_a_command(spark: SparkSession, broker: DevServer, tmp_path: Path) -> None:
    with memq.Admin(broker.address) as admin:
        admin.create_topic("audited", partitions=2)
        admin.create_topic("empty-report")
    with memq.Producer(broker.address, block_bytes=4096) as producer:
        for number in range(2_000):
            producer.send("audited", b"value %d" % number, key=b"key %d" % (number % 50))
    table = tmp_path / "table"
    arguments = ["audit", "audited", "-b", broker.address, "--json", "-o", "partitionBytes=64KiB"]
    with memq.Consumer(broker.address, "audited", group="idle", auto_commit=False) as consumer:
        assert consumer.poll(timeout=60) is not None  # a group that has stored nothing
        done = CliRunner().invoke(
            pipelines,
            [*arguments, "--parquet", str(table), "--report", "empty-report"],
            standalone_mode=False,
            catch_exceptions=False,
        )
    assert done.return_value == 0
    report = json.loads(done.stdout)
    line = subprocess.run(
        [sys.executable, "-m", "memq", "audit", "audited", "-b", broker.address, "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert report == json.loads(line.stdout)
    rows = spark.read.parquet(str(table)).collect()
    assert sum(row.delivered for row in rows) == sum(row.sent for row in rows) == 2_000
    with memq.Consumer(broker.address, "empty-report", end="end") as consumer:
        sent = [json.loads(bytes(record.value or b"")) for batch in consumer for record in batch]
    assert len(sent) == len(rows)
    assert sum(row["delivered"] for row in sent) == 2_000
    assert set(sent[0]) >= {*COUNTS, "topic", "partition", "producer_id", "minute", "verdict", "final"}


def test_records_acked_with_1_that_a_broker_holds_are_not_lost(spark: SparkSession, broker: DevServer) -> None:
    """Its batch stays open: the end of the producer is in the queue, and its records are not."""
    with memq.Admin(broker.address) as admin:
        admin.create_topic("open", settings={"seal_when_idle": False, "batch_age_ms_max": 600_000})
    with memq.Producer(broker.address, acks=1) as producer:
        for number in range(100):
            producer.send("open", b"value %d" % number)
    arguments = ["audit", "open", "-b", broker.address, "--json"]
    done = CliRunner().invoke(pipelines, arguments, standalone_mode=False, catch_exceptions=False)
    assert done.return_value == 0
    report = json.loads(done.stdout)
    assert [(found["kind"], found["count"]) for found in report["findings"]] == [("held", 100)]
    line = subprocess.run(
        [sys.executable, "-m", "memq", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    assert report == json.loads(line.stdout)


def test_a_user_mistake_is_one_line(capsys: pytest.CaptureFixture[str], spark: SparkSession) -> None:
    done = CliRunner().invoke(pipelines, ["audit", "clicks", "-o", "partitionbites=1"], standalone_mode=False)
    assert "partitionBytes" in str(getattr(done.exception, "hint", ""))
