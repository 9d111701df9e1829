"""Distributes work over executors: divides a topic's queue, and runs one task per item."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import pyarrow
from pyspark.sql.pandas.types import from_arrow_schema

from memq.client.io_thread import io_thread
from memq.format.pointer import Pointer, read_pointer
from memq.notification import Span
from memq.spark.access import Access
from memq.spark.stores import begin_tasks
from memq.topic import ReadPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

POINTERS_MAX = 16_384  # of one piece
Item = TypeVar("Item")
Row = dict[str, object]
_END = object()


Batches = Iterator[pyarrow.RecordBatch]


@dataclass(frozen=True, slots=True)
class PointerSpan:
    """The pointers of a span of a read partition."""

    partition: ReadPartition
    span: Span


async def pieces_of(access: Access, partition: ReadPartition, span: Span, bytes_max: int) -> list[PointerSpan]:
    """Return the pieces of a span, all of it in order. Raises: as `PointerReader.read`."""
    cuts = [span.begin]
    size = count = 0
    async for entries in access.resolver.pages(partition, span.begin, span.end):
        for entry in entries:
            size, count = size + _stored_bytes(entry.body), count + 1
            if size >= bytes_max or count == POINTERS_MAX:
                cuts.append(entry.offset + 1)
                size = count = 0
    if cuts[-1] < span.end:
        cuts.append(span.end)
    return [PointerSpan(partition, Span(begin, end)) for begin, end in pairwise(cuts)]


def _stored_bytes(body: bytes) -> int:
    pointer = read_pointer(body, newer="return")
    return sum(location.length for location in pointer.locations) if isinstance(pointer, Pointer) else 0


def spread(
    spark: SparkSession, items: Sequence[Item], work: Callable[[Item], Batches], schema: pyarrow.Schema
) -> DataFrame:
    """Return the batches of `work` for all items, with one task for each item.

    All tasks receive all items: keep them small.
    """

    def run(batches: Batches) -> Batches:
        begin_tasks()
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from work(items[number])

    return mapped(spark.range(0, len(items), 1, max(1, len(items))), run, schema)


def mapped(frame: DataFrame, work: Callable[[Batches], Batches], schema: pyarrow.Schema) -> DataFrame:
    """Return a frame of the batches that `work` makes of each partition; they have exactly this schema."""
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
    """Yield the items of an async generator, which runs on the I/O thread. Raises: as the generator."""
    thread = io_thread()
    try:
        while (found := thread.run(_next(source))) is not _END:
            yield found  # type: ignore[misc]  # the end is no item
    finally:
        thread.run(source.aclose())


async def _next(source: AsyncGenerator[Item, None]) -> object:
    return await anext(source, _END)
