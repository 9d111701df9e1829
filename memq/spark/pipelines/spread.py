"""Distributes work over executors: one task per item, async work as plain iterators."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import pyarrow
from pyspark.sql.pandas.types import from_arrow_schema

from memq.client.io_thread import io_thread
from memq.spark.worker import begin_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Item = TypeVar("Item")
Row = dict[str, object]
_END = object()


Batches = Iterator[pyarrow.RecordBatch]


def spread(
    spark: SparkSession, items: Sequence[Item], work: Callable[[Item], Batches], schema: pyarrow.Schema
) -> DataFrame:
    """Return what `work` gives for all items, a task for each.

    All tasks receive all items: keep them small.
    """

    def run(batches: Batches) -> Batches:
        begin_tasks()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from work(items[number])

    return mapped(spark.range(0, len(items), 1, max(1, len(items))), run, schema)


def mapped(frame: DataFrame, work: Callable[[Batches], Batches], schema: pyarrow.Schema) -> DataFrame:
    """Return what `work` makes of each partition of a frame; its batches have exactly this schema."""
    return frame.mapInArrow(work, from_arrow_schema(schema))


def batches_of(rows: Iterator[Row], schema: pyarrow.Schema, rows_max: int) -> Batches:
    """Yield rows as Arrow batches of at most `rows_max`; columns that a row leaves out are null."""
    held: list[Row] = []
    for row in rows:
        held.append(row)
        if len(held) == rows_max:
            yield pyarrow.RecordBatch.from_pylist(held, schema)
            held = []
    if held:
        yield pyarrow.RecordBatch.from_pylist(held, schema)


def iterate(source: AsyncGenerator[Item, None]) -> Iterator[Item]:
    """Yield what an async generator yields, which runs on the I/O thread. Raises: what it raises."""
    thread = io_thread()
    try:
        while (found := thread.run(_next(source))) is not _END:
            yield found  # type: ignore[misc]  # the end is no item
    finally:
        thread.run(source.aclose())


async def _next(source: AsyncGenerator[Item, None]) -> object:
    return await anext(source, _END)
