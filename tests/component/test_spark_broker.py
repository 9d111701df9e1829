"""Spark's readers through a broker, without a JVM: what they read, and what they report to the audit."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import BinaryType, StructField, StructType

from memq.client.link_pool import LinkPool
from memq.client.producer.producer import Producer
from memq.errors import CorruptDataError, NotFoundError
from memq.format.batch import BlockPiece
from memq.format.ranges import RangeSet
from memq.runtime.runtime import Runtime
from memq.spark.read.planner import BatchPart, TaskAudit
from memq.spark.read.task import TaskReport
from memq.spark.source import MemqSource
from memq.spark.stream_reader import MemqStreamReader
from memq.testing import Cluster
from memq.topic import Position
from tests.component.live_reports import ReceivedReports

SCHEMA = StructType([StructField("value", BinaryType())])
STREAM = "to-files"
ALL = ReadAllAvailable()


class Job:
    """A Spark job on the topic `clicks`, which has two partitions; its tasks read a folder with the objects."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        cluster.create_topic("clicks", partitions=2)
        self.sent = 0
        self.at: dict[str, Any] = {}
        self.readers: list[MemqStreamReader] = []

    def send(self, count: int) -> None:
        """Send records to both partitions in turn, in one block for each partition."""
        with Producer(self.cluster.address, linger_ms=60_000) as producer:
            for number in range(self.sent, self.sent + count):
                producer.send("clicks", b"%d" % number, partition=number % 2)
            producer.flush(60)
        self.sent += count
        for key, body in self.cluster.store.objects.items():
            path = self.folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(body))

    def options(self, **options: str) -> dict[str, str]:
        known = {"topics": "clicks", "brokers": self.cluster.address, "store": self.folder.as_uri()}
        return {**known, "columns": "value", "missingSeconds": "0", **options}

    def read(self, **options: str) -> list[int]:
        """Return the values of a batch read."""
        reader = MemqSource(self.options(**options)).reader(SCHEMA)
        return self.values(reader, reader.partitions())

    def follow(self, **options: str) -> MemqStreamReader:
        """Return the stream's reader in a new driver."""
        reader = MemqSource(self.options(auditName=STREAM, **options)).streamReader(SCHEMA)
        assert isinstance(reader, MemqStreamReader)
        self.readers.append(reader)
        return reader

    def step(self, reader: MemqStreamReader, limit: Any = ALL) -> list[int]:
        """Run a micro-batch from the checkpoint."""
        end = reader.latestOffset(self.at, limit)
        found = self.values(reader, reader.partitions(self.at, end))
        self.at = end
        return found

    def values(self, reader: Any, splits: Any) -> list[int]:
        return [
            int(value)
            for split in splits
            for batch in reader.read(split)
            for value in batch.column(0).to_pylist()
            if value is not None
        ]


@contextmanager
def running(folder: Path, interval_ms: int) -> Iterator[Job]:
    with Cluster(audit=True, audit_interval_ms=interval_ms) as cluster:
        made = Job(cluster, folder)
        yield made
        for reader in made.readers:
            reader.stop()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with running(tmp_path, interval_ms=100) as made:
        yield made


def test_a_batch_read_goes_by_what_brokers_say(job: Job) -> None:
    job.send(6)
    assert sorted(job.read()) == list(range(6))
    assert sorted(job.read(start="1:0:0", end="1:99:0")) == list(range(6))
    with pytest.raises(
        NotFoundError, match="has a position in partition 2, which topic 'clicks' does not have"
    ) as caught:
        job.read(start="2:0:0")
    assert caught.value.hint == "its partitions are 0 to 1"
    with pytest.raises(NotFoundError, match="option 'end' has a position in partition 2"):
        job.read(end="2:0:0")
    with pytest.raises(NotFoundError, match="topic 'views' does not exist"):
        job.read(topics="views")


def test_a_stream_reports_what_its_tasks_have_read_and_how_far_its_checkpoint_is(job: Job) -> None:
    job.send(6)
    reader = job.follow()
    job.at = reader.initialOffset()
    found = job.step(reader, ReadMaxRows(4))
    found += job.step(reader)
    assert sorted(found) == list(range(6))
    assert job.step(reader) == []
    heard = ReceivedReports(job.cluster)
    each = RangeSet([(0, 3)])  # of both partitions
    heard.until(lambda: heard.stages("spark-task").get("fetched") == each and len(committed(heard)) == 2)
    assert heard.stages("spark-task") == {"fetched": each}
    assert {report.name for report in heard.reports if report.kind in ("spark-task", "spark-reader")} == {STREAM}
    begins = {(part.partition, begin.at, begin.reason) for part in heard.parts("spark-reader") for begin in part.begins}
    assert begins == {(0, "0:0:0", "start"), (1, "1:0:0", "start")}
    last = {number: max(map(Position.parse, positions)) for number, positions in committed(heard).items()}
    ends = {number: Position(number, position["offset"]) for number, position in positions_of(job.at).items()}
    assert last == ends, "the checkpoint of the last question"
    for number, end in ends.items():
        stretches = sorted(stretches_of(heard, number))
        assert (stretches[0][0], stretches[-1][1]) == (Position(number, 0), end)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(stretches))


def positions_of(offsets: dict[str, Any]) -> dict[int, dict[str, int]]:
    return {int(number): position for number, position in offsets["clicks"]["partitions"].items()}


def committed(heard: ReceivedReports) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for part in heard.parts("spark-reader"):
        if part.committed:
            found.setdefault(part.partition, []).append(part.committed)
    return found


def stretches_of(heard: ReceivedReports, number: int) -> list[tuple[Position, Position]]:
    """Return from where to where tasks say that they have read all of a partition."""
    return [
        (Position.parse(part.read[0]), Position.parse(part.read[1]))
        for part in heard.parts("spark-task")
        if part.partition == number and part.read is not None
    ]


def test_tasks_and_the_checkpoint_are_reported_before_the_interval_is_over(tmp_path: Path) -> None:
    """Spark ends a driver that has read all without a word."""
    with running(tmp_path, interval_ms=60_000) as job:
        job.send(2)
        reader = job.follow()
        job.at = reader.initialOffset()
        assert sorted(job.step(reader)) == [0, 1]
        assert job.step(reader) == []
        heard = ReceivedReports(job.cluster)
        heard.until(
            lambda: heard.stages("spark-task") == {"fetched": RangeSet([(0, 1)])} and len(committed(heard)) == 2
        )


def test_a_task_reports_what_it_has_read_while_it_reads_on(job: Job) -> None:
    """A task may take hours: the audit would hold all of its records for missing."""
    for _ in range(4):
        job.send(2)
    reader = job.follow()
    split, *_ = reader.partitions(reader.initialOffset(), reader.latestOffset(reader.initialOffset(), ALL))
    batches = reader.read(split)
    for _ in range(3):
        next(batches)
    heard = ReceivedReports(job.cluster)
    heard.until(lambda: len(heard.stages("spark-task").get("fetched", ())) > 0)
    assert sum(1 for _ in batches) > 0, "it was not at its end"


def test_a_driver_that_continues_says_where(job: Job) -> None:
    job.send(4)
    reader = job.follow()
    job.at = reader.initialOffset()
    job.step(reader)
    reader.stop()
    job.send(2)
    assert sorted(job.step(job.follow())) == [4, 5]
    heard = ReceivedReports(job.cluster)
    stored: set[tuple[int, str]] = set()

    def enough() -> bool:
        parts = heard.parts("spark-reader")
        stored.update((part.partition, begin.at) for part in parts for begin in part.begins if begin.reason == "stored")
        return len(stored) == 2

    heard.until(enough)
    assert {Position.parse(at).read_partition for _, at in stored} == {0, 1}


def test_a_stream_names_damage_that_it_passes_over(job: Job) -> None:
    job.send(2)
    (offset,) = {record.position.pointer_offset for record in job.cluster.records("clicks") if record.partition == 1}
    job.cluster.damage(Position(1, offset, 0), "clicks")
    job.send(0)
    reader = job.follow(onDamaged="skip")
    job.at = reader.initialOffset()
    assert job.step(reader) == [0]
    heard = ReceivedReports(job.cluster)
    heard.until(lambda: any(part.damages for part in heard.parts("spark-task")))
    (damage,) = [damage for part in heard.parts("spark-task") for damage in part.damages]
    assert (damage.block, damage.offset, damage.records) == (0, offset, 1)
    failing = job.follow()
    with pytest.raises(CorruptDataError):
        job.values(failing, failing.partitions(failing.initialOffset(), job.at))


def test_a_read_reports_nothing_unless_it_has_a_name(job: Job) -> None:
    job.send(2)
    assert sorted(job.read()) == [0, 1]
    unnamed = MemqSource(job.options()).streamReader(SCHEMA)
    assert isinstance(unnamed, MemqStreamReader)
    job.readers.append(unnamed)
    job.at = unnamed.initialOffset()
    assert sorted(job.step(unnamed)) == [0, 1]
    assert all(split.audit is None for split in unnamed.partitions(unnamed.initialOffset(), job.at))  # type: ignore[attr-defined]
    named = job.follow()
    assert all(split.audit is not None for split in named.partitions(unnamed.initialOffset(), job.at))  # type: ignore[attr-defined]


def test_a_pointer_that_can_not_be_read_is_no_damage_that_a_task_could_name(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[LinkPool] = []
    close = LinkPool.close

    async def noted(pool: LinkPool) -> None:
        closed.append(pool)
        await close(pool)

    monkeypatch.setattr(LinkPool, "close", noted)

    async def work() -> None:
        report = TaskReport(TaskAudit(STREAM, ("127.0.0.1:1",), 100, ()), Runtime())
        cause = CorruptDataError("pointer can't be read")
        report.damage(BatchPart(0, 7, None, cause=cause), BlockPiece(0, 0, 0, None, memoryview(b""), cause))
        await report.close(whole=False)
        assert len(closed) == 1, "its connections end with it"

    asyncio.run(work())
