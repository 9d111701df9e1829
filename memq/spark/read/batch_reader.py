"""A read on the driver: its pointers, cut into parts for tasks, and the batch read as PySpark runs it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from memq.client.consumer.progress import expired_error
from memq.client.io_thread import io_thread
from memq.errors import CorruptDataError, MemqError, NotFoundError, RetryableError
from memq.format.pointer import Pointer, read_pointer, unskipped
from memq.notification import Entry
from memq.notification.stored_blocks import BlockSearch
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.spark.access import Access, SparkTopic, open_access
from memq.spark.options import Point, ReadOptions
from memq.spark.read.planner import BatchPart, PartitionPlan, Split, is_seen, with_blocks
from memq.spark.read.pruning import ReadFilter, option_filter, take_filters
from memq.spark.read.raw import plan_raw
from memq.spark.read.task import read_task, settings_of, splits_of
from memq.topic import Position, ReadPartition

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType


@dataclass(frozen=True, slots=True)
class Stretch:
    """One read partition from `start` up to, not with, `end`."""

    partition: ReadPartition
    start: Position
    end: Position


async def stretches(access: Access, options: ReadOptions, wanted: ReadFilter) -> list[Stretch]:
    """Return the ranges of a batch read, up to the present ends of the queue.

    Raises: as the queue, InvalidRequestError; PositionLostError for a start with a mark that the log does not have.
    """
    found: list[Stretch] = []
    check_positions(access, options)
    for topic in access.topics.values():
        for partition in topic.partitions:
            if wanted.has(partition.topic, partition.partition):
                start = await position_of(access, topic, partition, options.start, "beginning")
                if start.mark:
                    await access.resolver.checked_mark(partition, start)
                end = await position_of(access, topic, partition, options.end, "end")
                span = await access.resolver.span(partition)
                found.append(Stretch(partition, start, min(end, Position(partition.partition, span.end))))
    return [stretch for stretch in found if stretch.start < stretch.end]


def check_positions(access: Access, options: ReadOptions) -> None:
    """Check that positions name existing partitions: others would silently be read completely.

    Raises: NotFoundError.
    """
    for name, point in (("start", options.start), ("end", options.end)):
        for topic, number in point if isinstance(point, Mapping) else ():
            numbers = sorted(partition.partition for partition in access.topics[topic].partitions)
            if number not in numbers and not options.queue:  # a queue knows those only that have had a pointer
                raise NotFoundError(
                    f"option '{name}' has a position in partition {number}, which topic '{topic}' does not have",
                    hint=f"its partitions are {numbers[0]} to {numbers[-1]}",
                )


async def position_of(
    access: Access, topic: SparkTopic, partition: ReadPartition, point: Point, otherwise: str
) -> Position:
    """Return the position of `point` in a read partition; `otherwise` replaces positions without it."""
    if isinstance(point, Mapping):
        named = point.get((partition.topic, partition.partition))
        if named is not None:
            return named
        point = otherwise
    return await access.resolver.position_of(point, partition, topic.settings)


async def _check_left(access: Access, stretch: Stretch, options: ReadOptions) -> None:
    """Check that retention removed nothing after a start by position before its pointers were read.

    Raises: PositionExpiredError.
    """
    partition, start = stretch.partition, stretch.start
    if isinstance(options.start, Mapping) and (partition.topic, partition.partition) in options.start:
        span = await access.resolver.span(partition)
        first = await access.resolver.first_left(partition, start.pointer_offset, span)
        if first is not None:
            raise expired_error(partition, start, first)


async def parts_of(
    access: Access, stretch: Stretch, plan: PartitionPlan, *, seen: bool = False
) -> AsyncIterator[BatchPart]:
    """Yield the parts of a stretch to read. With `seen`, the plan has the dedup window before it already.

    Raises: as the queue; as the store, for the few batches whose index is needed.
    """
    partition = stretch.partition
    settings = access.topics[partition.topic].settings
    if not seen:
        span = await access.resolver.span(partition)
        async for entries in access.resolver.window_before(partition, stretch.start.pointer_offset, span, settings):
            for entry in entries:
                await _look_back(access, plan, entry)
    last = stretch.end.pointer_offset + (1 if stretch.end.record_index else 0)
    async for entries in access.resolver.pages(partition, stretch.start.pointer_offset, last):
        for entry in entries:
            pointer = read_pointer(entry.body, newer="raise")
            if isinstance(pointer, Pointer) and plan.needs_index(pointer):
                pointer = await _complete(access, pointer)
            part = plan.take(entry, pointer)
            if part is not None:
                yield await _with_copies(access, partition, part) if part.seen else part


async def _with_copies(access: Access, partition: ReadPartition, part: BatchPart) -> BatchPart:
    """Return a part with the stored blocks that share its sequences but differ in checksum or bounds.

    If the index can't be read, sequences alone decide. Raises: RetryableError.
    """
    pointer = part.pointer
    assert pointer is not None, "a part without a pointer was compared"
    events = EventLog(access.runtime.clock)
    name = f"topic '{partition.topic}' partition {partition.partition}"
    search = BlockSearch(access.queue, partition, pointer.partition, access.fetcher.index_of, events, name)
    try:
        entries = await access.fetcher.index_of(pointer)
    except RetryableError:
        raise
    except MemqError as error:
        events.error("index-unread", f"{name} object {pointer.locations[0].key}: {error}")
        return part
    blocks = [
        (each.producer_id, each.first_sequence, each.next_sequence, each.checksum)
        for number, each in enumerate(entries)
        if number not in pointer.skip and is_seen(part.seen, each.producer_id, each.first_sequence, each.next_sequence)
    ]
    span = await access.resolver.span(partition)
    found = await search.find([block[:3] for block in blocks], span.begin, part.offset)
    copies = tuple(
        copy
        for block in blocks
        if block[:3] in found
        for copy in found[block[:3]].blocks
        if (*copy[:3], copy.checksum) != block
    )
    return replace(part, copies=copies)


def plan_of(
    access: Access, stretch: Stretch, wanted: ReadFilter, options: ReadOptions, *, audited: bool = False
) -> PartitionPlan:
    """Return the plan of a stretch; an `audited` one has the unwanted batches, too."""
    window = access.topics[stretch.partition.topic].settings.reader_window_ms
    dedup, skip_damaged = options.dedup, options.skip_damaged
    return PartitionPlan(
        stretch.start,
        stretch.end,
        window,
        wanted,
        dedup=dedup,
        keep_earlier=skip_damaged,
        names_unwanted=audited,
    )


async def _look_back(access: Access, plan: PartitionPlan, entry: Entry) -> None:
    pointer = read_pointer(entry.body, newer="return")
    if not isinstance(pointer, Pointer):
        return  # the reader of the batches before this position reports it
    if plan.needs_index(pointer):
        pointer = await _complete(access, pointer)
    plan.look_back(entry.time_ms, pointer)


async def _complete(access: Access, pointer: Pointer) -> Pointer:
    try:
        blocks = await access.fetcher.index_of(pointer)
    except (CorruptDataError, NotFoundError):
        if not pointer.producers_complete:
            raise
        return pointer
    shown = unskipped(pointer, blocks)
    return with_blocks(pointer, ((block.producer_id, block.first_sequence, block.next_sequence) for block in shown))


class _PushFilters:
    """The method `pushFilters` of a reader, in a form that PySpark accepts while filter pushdown is off.

    With `spark.sql.python.filterPushdown.enabled` off, its default, PySpark refuses every reader that overrides
    `pushFilters`, and never calls the method. Such a query reads more than it needs, and is correct. PySpark compares
    `__func__` with the inherited method, so `__func__` is the inherited one.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: MemqReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        return self._reader.take_filters(filters)


class MemqReader(DataSourceReader):
    """Reads the records that are in the topics when the query is planned."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._wanted = option_filter(options)

    @property
    def pushFilters(self) -> _PushFilters:  # noqa: N802 - PySpark's name, and see there
        """The interface by which PySpark passes a query's filters."""
        return _PushFilters(self)

    def take_filters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take the filters that prune; return those that Spark must still apply."""
        self._wanted, left = take_filters(filters, self._options.columns, option_filter(self._options))
        return left

    def partitions(self) -> Sequence[InputPartition]:
        """Return the splits of tasks, each of about `partitionBytes` stored bytes. Raises: as the queue."""
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
                await _check_left(access, stretch, self._options)
            return splits_of(parts, self._options, settings_of(self._options, access.urls, self._wanted))
