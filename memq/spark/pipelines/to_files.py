"""Writes a topic to Parquet files in rounds, each committed by one manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from awscrt.checksums import crc32c
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from memq.client.io_thread import io_thread
from memq.errors import InvalidSettingError
from memq.limits import MIB
from memq.spark.options import ReadOptions, table_ddl
from memq.spark.pipelines.inputs import print_progress
from memq.spark.pipelines.rounds import ROUND_TASKS, Round, plan_round, topic_of
from memq.spark.pipelines.spread import Batches, spread
from memq.spark.pipelines.topic_files import (
    FILE_BYTES_MAX,
    File,
    FilesLocation,
    FilesManifest,
    at_location,
    first_of,
    publish,
    put_file,
)
from memq.spark.read.planner import Split
from memq.spark.read.task import read_task
from memq.topic import Position

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_FILES = pyarrow.schema(
    {
        "key": pyarrow.string(),
        "date": pyarrow.string(),
        "hour": pyarrow.int32(),
        **dict.fromkeys(("records", "bytes", "least_ms", "greatest_ms"), pyarrow.int64()),
    }
)
HELD_BYTES_MAX = 256 * MIB  # of all hours: then the largest file is ended
HOURS_MAX = 64  # that are open at once
_GROUP_BYTES = 16 * MIB  # of Arrow, before it goes into a row group
_HOUR_US = 3_600_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def write_files(
    spark: SparkSession,
    options: ReadOptions,
    location: FilesLocation,
    *,
    settled: bool,
    tasks: int = ROUND_TASKS,
    starts: dict[int, Position] | None = None,
    done: Callable[[FilesManifest], None] = lambda manifest: None,
) -> FilesManifest:
    """Write the records of a topic that the location lacks; return the location's new manifest.

    `starts` replaces the options' start. `done` is called with an existing manifest first, and with the manifest after
    each round. A run may be killed at any moment and repeated: the highest manifest's files have each record once.
    Raises: InvalidRequestError if the location holds another topic, InvalidSettingError without timestamps; as a batch
    read; as `ObjectWriter`.
    """
    if "timestamp" not in options.columns:
        raise InvalidSettingError("files by hour need the column timestamp", hint="add it to the option 'columns'")
    thread = io_thread()
    topic = thread.run(topic_of(options))
    while True:
        manifest = at_location(location, partial(first_of, topic=topic.name, topic_id=topic.id))
        if manifest.number:
            done(manifest)
        covered = {**(starts or {}), **manifest.positions}
        found = thread.run(plan_round(options, covered, settled=settled, tasks=tasks))
        if not found.splits and manifest.number:
            return manifest
        successor = manifest.next(found.starts, found.ends, _written(spark, options, location, found))
        if at_location(location, partial(publish, manifest=successor)):
            print_progress(
                f"{topic.name}: manifest {successor.number}, {found.bytes:,} bytes read,"
                f" {successor.records:,} records in {len(successor.files):,} files"
            )
        else:
            print_progress(f"{topic.name}: another run wrote manifest {successor.number}; continuing from it")


def _written(spark: SparkSession, options: ReadOptions, location: FilesLocation, found: Round) -> tuple[File, ...]:
    """Have tasks write files; return the files."""
    if not found.splits:
        return ()
    schema = StructType.fromDDL(table_ddl(options.columns, options.schema))
    work = partial(_write_split, options, location, schema)
    rows = spread(spark, found.splits, work, _FILES).toArrow().to_pylist()
    return tuple(sorted((File(**row) for row in rows), key=lambda file: file.key))


def _write_split(options: ReadOptions, location: FilesLocation, schema: Any, split: Split) -> Batches:
    """Write the files of one split.

    A file's name is the first batch of the split and the hour, so a second attempt writes the same names.
    """
    first = split.parts[0]
    arrow = to_arrow_schema(schema, timezone="UTC")
    files = HourFiles(arrow, f"{first.partition:05}-{first.offset:016}")
    for batch in read_task(split, options, schema):
        for written in files.take(batch):
            yield _stored(location, written)
    for written in files.end():
        yield _stored(location, written)


def _stored(location: FilesLocation, written: WrittenFile) -> pyarrow.RecordBatch:
    file = written.file
    at_location(location, partial(put_file, key=file.key, data=memoryview(written.data)))
    return pyarrow.RecordBatch.from_pylist([msgspec.structs.asdict(file)], _FILES)


class WrittenFile(NamedTuple):
    """A complete file: its entry in the manifest, and its bytes."""

    file: File
    data: pyarrow.Buffer


@dataclass(slots=True)
class _Hour:
    """The open file of an hour: the row groups in `sink`, and the batches of the next one."""

    sink: pyarrow.BufferOutputStream
    writer: pyarrow.parquet.ParquetWriter
    held: list[pyarrow.RecordBatch] = field(default_factory=list)
    held_bytes: int = 0
    records: int = 0
    least_us: int = 1 << 63
    greatest_us: int = -(1 << 63)

    @property
    def bytes(self) -> int:
        return self.held_bytes + int(self.sink.tell())


class HourFiles:
    """Takes batches with a column `timestamp` and gives complete files; `stem` begins the name of each."""

    def __init__(self, schema: pyarrow.Schema, stem: str, *, file_bytes: int = FILE_BYTES_MAX) -> None:
        self._schema = schema
        self._stem = stem
        self._file_bytes = file_bytes
        self._open: dict[int, _Hour] = {}
        self._ended = 0

    def take(self, batch: pyarrow.RecordBatch) -> Iterator[WrittenFile]:
        """Take a batch; yield the files that are complete with it."""
        hours = batch.column("timestamp").cast(pyarrow.int64()).to_numpy() // _HOUR_US
        found = numpy.unique(hours).tolist()
        for hour in found:
            rows = batch if len(found) == 1 else batch.filter(pyarrow.array(hours == hour))
            self._add(hour, rows)
            if self._open[hour].bytes >= self._file_bytes:
                yield self._end(hour)
        while len(self._open) > HOURS_MAX or sum(each.bytes for each in self._open.values()) > HELD_BYTES_MAX:
            yield self._end(max(self._open, key=lambda hour: self._open[hour].bytes))

    def end(self) -> Iterator[WrittenFile]:
        """Yield the files that are still open."""
        for hour in sorted(self._open):
            yield self._end(hour)

    def _add(self, hour: int, rows: pyarrow.RecordBatch) -> None:
        if hour not in self._open:
            sink = pyarrow.BufferOutputStream()
            self._open[hour] = _Hour(sink, pyarrow.parquet.ParquetWriter(sink, self._schema, compression="zstd"))
        into = self._open[hour]
        into.held.append(rows)
        into.held_bytes += rows.nbytes
        into.records += rows.num_rows
        times = pyarrow.compute.min_max(rows.column("timestamp").cast(pyarrow.int64()))
        into.least_us = min(into.least_us, times["min"].as_py())
        into.greatest_us = max(into.greatest_us, times["max"].as_py())
        if into.held_bytes >= _GROUP_BYTES:
            self._write(into)

    def _write(self, into: _Hour) -> None:
        if into.held:
            into.writer.write_table(pyarrow.Table.from_batches(into.held, self._schema))
            into.held, into.held_bytes = [], 0

    def _end(self, hour: int) -> WrittenFile:
        ended = self._open.pop(hour)
        self._write(ended)
        ended.writer.close()
        data = ended.sink.getvalue()
        date, clock_hour = _named(hour)
        key = f"data/{date}/{clock_hour:02}/{self._stem}-{self._ended}-{crc32c(memoryview(data)):08x}.parquet"
        self._ended += 1
        file = File(
            key=key,
            date=date,
            hour=clock_hour,
            records=ended.records,
            bytes=data.size,
            least_ms=ended.least_us // 1_000,
            greatest_ms=ended.greatest_us // 1_000,
        )
        return WrittenFile(file, data)


def _named(hour: int) -> tuple[str, int]:
    """Return date and hour of a time; producers may send any number, also one outside the calendar."""
    try:
        start = _EPOCH + timedelta(hours=hour)
    except OverflowError:
        return "no-date", 0
    return start.date().isoformat(), start.hour
