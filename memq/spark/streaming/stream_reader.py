"""A streaming read for PySpark: offsets per read partition, limits, AvailableNow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from memq.client.io_thread import io_thread
from memq.runtime.network import Runtime
from memq.spark.options import ReadOptions
from memq.spark.read.planner import Split
from memq.spark.read.task import read_task
from memq.spark.streaming.stream import MicroBatchLimit, TopicStream

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType


class MemqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows topics. PySpark sends it to tasks before it asks anything: nothing is open until then."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._stream: TopicStream | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - PySpark's name, as all below
        """Return where `start` lies. Raises: as the queue."""
        return io_thread().run(self._opened().initial())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return how far the next micro-batch goes. Raises: as `TopicStream.latest`."""
        return io_thread().run(self._opened().latest(start, self._limit(limit)))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit that the options set.

        PySpark knows one kind at a time, `latestOffset` keeps to both.
        """
        if self._options.trigger_records_max:
            return ReadMaxRows(self._options.trigger_records_max)
        if self._options.trigger_bytes_max:
            return ReadMaxBytes(self._options.trigger_bytes_max)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the end of the topics: what lies between it and the end of a micro-batch is the lag."""
        return io_thread().run(self._opened().ends())

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Take the end of now as the end of the query."""
        io_thread().run(self._opened().fix_ends())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return what tasks read between two offsets. Raises: as `TopicStream.plan`."""
        return io_thread().run(self._opened().plan(start, end))

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the records of a partition. Raises: as `read_split`."""
        assert isinstance(partition, Split)
        return read_task(partition, self._options, self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Spark's checkpoint keeps the place; the audit has heard of it when Spark asked what lies behind it."""

    def stop(self) -> None:
        """Let go of the connections."""
        if self._stream is not None:
            io_thread().run(self._stream.close())
            self._stream = None

    def _opened(self) -> TopicStream:
        if self._stream is None:
            self._stream = TopicStream(self._options, Runtime())
        return self._stream

    def _limit(self, limit: ReadLimit) -> MicroBatchLimit:
        """Return the end that the engine wants: everything, or the lower of its limit and the options."""
        if isinstance(limit, ReadAllAvailable):
            return MicroBatchLimit()
        records, size = self._options.trigger_records_max or None, self._options.trigger_bytes_max or None
        if isinstance(limit, ReadMaxRows):
            records = min(limit.max_rows, records or limit.max_rows)
        if isinstance(limit, ReadMaxBytes):
            size = min(limit.max_bytes, size or limit.max_bytes)
        return MicroBatchLimit(records, size)
