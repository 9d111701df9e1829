"""Writes Arrow batches as Parquet files per hour of their timestamps, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import numpy
import pyarrow
import pyarrow.compute
import pyarrow.parquet
from awscrt.checksums import crc32c

from memq.limits import MIB
from memq.spark.pipelines.files.manifest import File

FILE_BYTES_MAX = 128 * MIB
HELD_BYTES_MAX = 256 * MIB  # of all hours: then the largest file is ended
HOURS_MAX = 64  # that are open at once
_GROUP_BYTES = 16 * MIB  # of Arrow, before it goes into a row group
_HOUR_US = 3_600_000_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class WrittenFile(NamedTuple):
    """A file that is complete: what the manifest says of it, and its bytes."""

    file: File
    data: pyarrow.Buffer


@dataclass(slots=True)
class _Hour:
    """The open file of an hour: row groups in `sink`, and what is not yet one."""

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
    """Return date and hour of the day; producers may send any time, also one that no calendar has."""
    try:
        start = _EPOCH + timedelta(hours=hour)
    except OverflowError:
        return "no-date", 0
    return start.date().isoformat(), start.hour
