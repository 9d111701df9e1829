"""Streams and staged writes under the live audit: each fault is named, a restart is no fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import BinaryType, StructField, StructType

from memq.audit.finding import Finding
from memq.audit.minutes import MinuteRow
from memq.client.observers.reporter import ReportCarrier
from memq.format.ranges import RangeSet
from memq.spark.options import read_options
from memq.spark.read.planner import Split
from memq.spark.stream_reader import MemqStreamReader
from memq.spark.write import commit, stage, write_options
from tests.processes import BrokerProcess
from tests.spark.audited import audit_until, auditing_broker, take_pointers_away
from tests.spark.topics import make_topic

TOPIC, STREAM, WRITER = "watched", "to-files", "loader"
WRITTEN = 100  # records of a batch
SCHEMA = StructType([StructField("value", BinaryType())])
Offsets = dict[str, Any]


class Query:
    """A streaming query: its checkpoint, and what it has read."""

    def __init__(self, address: str) -> None:
        self.options = read_options(
            {"brokers": address, "topics": TOPIC, "columns": "value", "auditName": STREAM, "partitionBytes": "64KiB"}
        )
        self.checkpoint: Offsets | None = None
        self.seen: list[int] = []

    def run(self, fault: Callable[[Split], Split] = lambda split: split, *, fails: bool = False) -> None:
        """Read to the end, batch for batch; `fault` happens to splits; one that `fails` has read a batch in vain."""
        reader = MemqStreamReader(self.options, SCHEMA)
        if self.checkpoint is None:
            self.checkpoint = reader.initialOffset()
        while (end := reader.latestOffset(self.checkpoint, ReadMaxRows(150))) != self.checkpoint:
            rows = [
                int(value)
                for split in reader.partitions(self.checkpoint, end)
                if isinstance(split, Split)
                for batch in reader.read(fault(split))
                for value in batch.column(0).to_pylist()
            ]
            if fails:
                break
            self.seen += rows
            self.checkpoint = end
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ReportCarrier, "send", lambda *_: None)  # it has no last word: Spark kills the driver
            reader.stop()


class Rig:
    """The broker, and what was written to it."""

    def __init__(self, broker: BrokerProcess, folder: Path) -> None:
        self.broker = broker
        self.folder = folder
        self.batches = 0
        make_topic(broker.address, TOPIC, partitions=2)

    @property
    def records(self) -> int:
        return self.batches * WRITTEN

    def write(self) -> None:
        """Stage and commit the next batch, as two tasks and a driver do."""
        options = write_options({"brokers": self.broker.address, "topic": TOPIC, "writer": WRITER}, streams=True)
        objects = []
        for half in (0, WRITTEN // 2):
            numbers = range(self.records + half, self.records + half + WRITTEN // 2)
            columns = {
                "value": pyarrow.array([b"%d" % number for number in numbers]),
                "partition": pyarrow.array([number % 2 for number in numbers], pyarrow.int32()),
            }
            objects += stage(iter([pyarrow.record_batch(columns)]), options, WRITER)
        self.batches += 1
        for _ in range(2):  # the second one is notified that all is there
            commit(options, WRITER, self.batches, objects, "", remember=True)

    def audit_until(self, done: Callable[[MinuteRow, list[Finding]], bool]) -> None:
        audit_until(self.broker, self.folder, TOPIC, done)

    def is_whole(self, row: MinuteRow, findings: list[Finding]) -> bool:
        """Whether all that was written has gone all the way; no finding may come up meanwhile."""
        assert findings == []
        queue, stream = row.side(""), row.side(STREAM)
        report = (queue["sent"], queue["acked"], queue["committed"], stream["processed"])
        return report == (self.records,) * 4 and (row.word(""), row.word(STREAM)) == ("ok", "ok")


def test_stream_without_losses_is_ok_and_vanished_records_are_named(tmp_path: Path) -> None:
    with auditing_broker(tmp_path) as broker:
        rig, query = Rig(broker, tmp_path), Query(broker.address)
        for _ in range(3):
            rig.write()
        query.run()
        assert sorted(query.seen) == list(range(rig.records))
        rig.audit_until(rig.is_whole)

        rig.write()
        query.run(fails=True)  # the micro-batch is run again by the next driver
        rig.write()
        query.run()
        assert sorted(query.seen) == list(range(rig.records))
        rig.audit_until(rig.is_whole)

        rig.write()
        gone = take_pointers_away(tmp_path, TOPIC, rig.batches)
        assert sum(next_ - first for each in gone for first, next_ in each.ranges) == WRITTEN

        def is_named(row: MinuteRow, findings: list[Finding]) -> bool:
            kinds = {("lost", "queue"), ("unreadable pointer", "queue")}  # the queue shows that it has lost pointers
            assert {(each.kind.value, each.stage) for each in findings} <= kinds
            lost = sum(each.records for each in findings)
            assert {each.producer for each in findings if each.records} <= {each.producer for each in gone}
            return lost == WRITTEN and row.word("") == "lost"

        rig.audit_until(is_named)


def test_records_that_a_task_skips_are_lost_for_the_stream(tmp_path: Path) -> None:
    with auditing_broker(tmp_path) as broker:
        rig, query = Rig(broker, tmp_path), Query(broker.address)
        rig.write()
        rig.write()
        passed_over: dict[tuple[int, int], RangeSet] = {}

        def forget_a_part(split: Split) -> Split:
            """Let a task lose the second batch of its split, once."""
            if passed_over or len(split.parts) < 2:
                return split
            pointer = split.parts[1].pointer
            assert pointer is not None
            passed_over[pointer.partition, pointer.records] = RangeSet()
            split.parts = (split.parts[0], *split.parts[2:])
            return split

        query.run(forget_a_part)
        ((partition, records),) = passed_over
        assert len(query.seen) == rig.records - records

        def is_named(row: MinuteRow, findings: list[Finding]) -> bool:
            assert {(each.kind.value, each.stage, each.group) for each in findings} <= {("lost", "consumer", STREAM)}
            return [(each.partition, each.records) for each in findings] == [(partition, records)]

        rig.audit_until(is_named)
