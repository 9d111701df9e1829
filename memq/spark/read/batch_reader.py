"""A batch read as PySpark plans it: filters in, partitions out, all by pointers.

Then tasks read from the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from memq.client.io_thread import io_thread
from memq.runtime.network import Runtime
from memq.spark.access import open_access
from memq.spark.options import ReadOptions
from memq.spark.read.planner import BatchPart, Split
from memq.spark.read.planning import parts_of, plan_of, stretches
from memq.spark.read.pruning import ReadFilter, take_filters
from memq.spark.read.raw import plan_raw
from memq.spark.read.task import read_task, settings_of, splits_of

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType


class _PushFilters:
    """The method `pushFilters` of a reader, which PySpark does not refuse while it pushes none.

    With `spark.sql.python.filterPushdown.enabled` off, its default, PySpark refuses every reader whose `pushFilters`
    is not the one that it inherits, and never calls it. Such a query reads more than it needs, and is right: so what
    PySpark reads is the one that is inherited.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: MemqReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        return self._reader.take_filters(filters)


class MemqReader(DataSourceReader):
    """Reads what is in the topics when the query is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._wanted = ReadFilter()

    @property
    def pushFilters(self) -> _PushFilters:  # noqa: N802 - PySpark's name, and see there
        """The interface by which PySpark passes a query's filters."""
        return _PushFilters(self)

    def take_filters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take what prunes; return what Spark is still to apply."""
        self._wanted, left = take_filters(filters, self._options.columns)
        return left

    def partitions(self) -> Sequence[InputPartition]:
        """Return what tasks read, each about `partitionBytes` of stored bytes at most. Raises: as the queue."""
        # PySpark makes one partition of none, with nothing in it: an empty one is ours
        return io_thread().run(self._plan()) or [Split((), None)]

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the records of a partition. Raises: as `read_split`."""
        assert isinstance(partition, Split)
        return read_task(partition, self._options, self._schema)

    async def _plan(self) -> list[Split]:
        if self._options.path:
            return await plan_raw(self._options, self._wanted, Runtime())
        parts: list[BatchPart] = []
        async with open_access(self._options, Runtime()) as access:
            for stretch in await stretches(access, self._options, self._wanted):
                plan = plan_of(access, stretch, self._wanted, self._options)
                parts += [part async for part in parts_of(access, stretch, plan)]
            return splits_of(parts, self._options, settings_of(self._options, access.urls, self._wanted))
