"""A streaming read on the driver: finds ends, plans tasks between two offsets, answers PySpark."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from memq.client.consumer.progress import expired_error
from memq.client.io_thread import io_thread
from memq.client.link_pool import LinkPool, bootstrap_addresses
from memq.client.observers.reporter import CLOSE_S_MAX, STEP_S_MAX, JobReporter
from memq.errors import RetryableError
from memq.format.pointer import read_pointer
from memq.format.report import BeginReason
from memq.notification import Entry
from memq.runtime.clock import backoff_s
from memq.runtime.network import format_address
from memq.runtime.runtime import Runtime
from memq.spark.access import Access, SparkTopic, open_access
from memq.spark.options import ReadOptions
from memq.spark.read.batch_reader import Stretch, check_positions, parts_of, plan_of, position_of
from memq.spark.read.planner import BatchPart, PartitionPlan, Split, TaskAudit, TaskRange, stretches_of
from memq.spark.read.pruning import option_filter
from memq.spark.read.task import read_task, settings_of, splits_of
from memq.spark.stream_offsets import Admission, StreamPosition, StreamPositions, decode_offsets, encode_offsets
from memq.topic import Position, ReadPartition

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

Result = TypeVar("Result")
Offsets = Mapping[str, Any]
RETRY_S_MAX = 60.0  # a stream outlives a restart of brokers and of the queue
_RETRY_S_BASE = 0.1
_RETRY_S_MOST = 2.0


class StreamReport:
    """The driver's reports to the audit: its checkpoint at the start, and the progress since.

    Spark requests records after an offset once all records before it are processed and in its checkpoint. So the driver
    reports those as processed. The tasks report the records (`TaskReport`); the auditor judges tasks without a report.
    """

    def __init__(self, name: str, pool: LinkPool, topics: Mapping[str, SparkTopic], runtime: Runtime) -> None:
        self._topics = topics
        self._at: dict[ReadPartition, Position] = {}
        self._pool = pool
        self._reporter = JobReporter("spark-reader", name, runtime, pool)

    @property
    def interval_ms(self) -> int:
        """Interval in ms at which the cluster wants reports; 0: no reports."""
        return self._pool.audit_ms

    async def note_checkpoint(self, positions: StreamPositions, reason: BeginReason) -> None:
        """Note the checkpoint's positions; a new partition begins there.

        Progress is reported at once, because Spark ends this process without notice when all records are read.
        """
        came = False
        for partition, stored in positions.items():
            position, before = stored.in_partition(partition), self._at.get(partition)
            if position == before:
                continue
            self._at[partition] = position
            topic = self._topics[partition.topic]
            for writer in topic.partitions[partition]:
                recorder = self._reporter.part(topic, writer)
                if recorder is not None and before is not None and before < position:
                    recorder.commit(str(position))
                    came = True
                elif recorder is not None:
                    recorder.begin(str(position), reason)
        if came:
            await self._reporter.flush(STEP_S_MAX)

    async def close(self) -> None:
        """Send the last report; connections stay open."""
        await self._reporter.close(CLOSE_S_MAX)


@dataclass(frozen=True, slots=True)
class MicroBatchLimit:
    """The bounds of a micro-batch: stored records and bytes, None for none."""

    records_max: int | None = None
    bytes_max: int | None = None


class TopicStream:
    """One stream on one event loop. The first request opens the first connection."""

    def __init__(self, options: ReadOptions, runtime: Runtime) -> None:
        self._options = options
        self._wanted = option_filter(options)  # Spark pushes no filters into streams
        self._runtime = runtime
        self._stack = AsyncExitStack()
        self._access: Access | None = None
        self._ends: dict[ReadPartition, StreamPosition] | None = None
        self._plans: dict[ReadPartition, tuple[StreamPosition, PartitionPlan]] = {}
        self._report: StreamReport | None = None
        self._begins: BeginReason = "stored"

    async def initial(self) -> dict[str, Any]:
        """Return the offset of the configured start."""
        return encode_offsets(await self._tried(self._initial))

    async def latest(self, start: Offsets, limit: MicroBatchLimit) -> dict[str, Any]:
        """Return the end of a micro-batch from `start`; `start` itself without new records.

        Raises: PositionExpiredError if retention removed a next record, unless the options skip it; PositionLostError
        if the log was cut before `start` and has grown again; InvalidRequestError for the offsets of other topics.
        """

        async def latest(access: Access) -> StreamPositions:
            positions = decode_offsets(start, _partitions(access))
            await self._report_checkpoint(positions)
            ends = self._ends or await self._found_ends(access, positions)
            for partition, position in positions.items():
                await self._check_expired(access, partition, position)
            await _check_marks(access, positions)
            if limit == MicroBatchLimit():
                return {
                    partition: max(position, ends[partition], key=_order) for partition, position in positions.items()
                }
            return await self._admit(access, positions, ends, limit)

        return encode_offsets(await self._tried(latest))

    async def ends(self) -> dict[str, Any]:
        """Return the offset of the present end of the queue."""
        return encode_offsets(await self._tried(lambda access: self._found_ends(access, {})))

    async def fix_ends(self) -> None:
        """Fix the present end of the queue as the end of the stream."""
        self._ends = await self._tried(lambda access: self._found_ends(access, {}))

    async def plan(self, start: Offsets, end: Offsets) -> list[Split]:
        """Return the splits that tasks read between two offsets, always the same ones. Raises: as `latest`."""

        async def plan(access: Access) -> list[Split]:
            parts: dict[ReadPartition, list[BatchPart]] = {}
            first, last = (decode_offsets(offsets, _partitions(access)) for offsets in (start, end))
            await self._report_checkpoint(first)
            await _check_marks(access, first)
            await _check_marks(access, last)
            for partition, position in first.items():
                if position.in_partition(partition) < last[partition].in_partition(partition):
                    parts[partition] = [
                        part async for part in self._parts(access, partition, position, last[partition])
                    ]
                    await self._check_expired(access, partition, position)  # retention may delete during the read
            settings = settings_of(self._options, access.urls, self._wanted)
            splits = splits_of([part for found in parts.values() for part in found], self._options, settings)
            self._let_report(access, splits, parts, first, last)
            return splits

        return await self._tried(plan)

    async def close(self) -> None:
        """Send the last report to the audit, and close the connections."""
        if self._report is not None:
            await self._report.close()
            self._report = None
        self._access = None
        await self._stack.aclose()

    # ---- inside --------------------------------------------------------------------------------------

    async def _tried(self, work: Callable[[Access], Awaitable[Result]]) -> Result:
        """Call `work`, again while that may help: an error here would end the user's query."""
        tries = 0
        until_s = self._runtime.clock.monotonic() + RETRY_S_MAX
        while True:
            try:
                if self._access is None:
                    self._access = await self._stack.enter_async_context(open_access(self._options, self._runtime))
                    self._report = self._report_of(self._access)
                return await work(self._access)
            except RetryableError:
                tries += 1
                if self._runtime.clock.monotonic() >= until_s:
                    raise
                delay = backoff_s(self._runtime.random, tries, base_s=_RETRY_S_BASE, most_s=_RETRY_S_MOST)
                await asyncio.sleep(delay)

    async def _initial(self, access: Access) -> StreamPositions:
        self._begins = "start"
        check_positions(access, self._options)
        positions: StreamPositions = {}
        for topic in access.topics.values():
            for partition, writers in topic.partitions.items():
                start = await position_of(access, topic, partition, self._options.start, "beginning")
                totals = await access.resolver.totals_before(partition, start.pointer_offset, topic.settings, writers)
                start = replace(start, mark=await access.resolver.checked_mark(partition, start))
                positions[partition] = StreamPosition.of(start, totals)
        return positions

    # ---- the audit -----------------------------------------------------------------------------------

    def _report_of(self, access: Access) -> StreamReport | None:
        if not self._options.audit_name or access.pool is None:
            return None
        return StreamReport(self._options.audit_name, access.pool, access.topics, self._runtime)

    async def _report_checkpoint(self, positions: StreamPositions) -> None:
        if self._report is not None:
            await self._report.note_checkpoint(positions, self._begins)

    def _let_report(
        self,
        access: Access,
        splits: Sequence[Split],
        parts: Mapping[ReadPartition, Sequence[BatchPart]],
        first: StreamPositions,
        last: StreamPositions,
    ) -> None:
        """Give the tasks their reporting data, if reports are wanted."""
        if self._report is None or not self._report.interval_ms:
            return
        ranges = {
            partition: TaskRange(
                partition,
                tuple(access.topics[partition.topic].partitions[partition]),
                first[partition].in_partition(partition),
                last[partition].in_partition(partition),
            )
            for partition in parts
        }
        homes = (partition for partition, found in parts.items() for _ in found)
        brokers = tuple(format_address(address) for address in bootstrap_addresses(self._options.brokers))
        for split, stretches in zip(splits, stretches_of(splits, homes, ranges), strict=True):
            split.audit = TaskAudit(self._options.audit_name, brokers, self._report.interval_ms, stretches)

    # ---- positions -----------------------------------------------------------------------------------

    async def _found_ends(self, access: Access, known: StreamPositions) -> StreamPositions:
        """Return the present ends; for a partition without new pointers, its position in `known`."""
        ends: StreamPositions = {}
        for topic in access.topics.values():
            for partition, writers in topic.partitions.items():
                end = (await access.resolver.span(partition)).end
                position = known.get(partition)
                if position is not None and (position.offset, position.index) >= (end, 0):
                    ends[partition] = position
                else:
                    totals = await access.resolver.totals_before(partition, end, topic.settings, writers)
                    mark = await access.resolver.checked_mark(partition, Position(partition.partition, end))
                    ends[partition] = StreamPosition(end, 0, totals.records, totals.bytes, mark)
        return ends

    async def _check_expired(self, access: Access, partition: ReadPartition, position: StreamPosition) -> None:
        begin = (await access.resolver.span(partition)).begin
        if begin <= position.offset or self._options.skip_expired:
            return
        topic = access.topics[partition.topic]
        before = await access.resolver.totals_before(partition, begin, topic.settings, topic.partitions[partition])
        if before.records != position.records:  # else retention took pointers without records
            lost = max(0, before.records - position.records)
            raise expired_error(partition, position.in_partition(partition), begin, lost)

    async def _admit(
        self, access: Access, positions: StreamPositions, ends: StreamPositions, limit: MicroBatchLimit
    ) -> StreamPositions:
        """Take pointers of all partitions, the oldest first, until the limit is reached."""
        admission = Admission(limit.records_max, limit.bytes_max, dict(positions))
        streams = {
            partition: _entries(access, partition, position.offset, ends[partition].offset)
            for partition, position in positions.items()
        }
        heads: list[tuple[int, ReadPartition, Entry]] = []
        for partition, stream in streams.items():
            await _push_next(heads, partition, stream)
        while heads and not admission.full:
            _, partition, entry = heapq.heappop(heads)
            admission.take(partition, entry.offset, read_pointer(entry.body, newer="raise"))
            await _push_next(heads, partition, streams[partition])
        for stream in streams.values():
            await stream.aclose()
        return admission.positions

    async def _parts(
        self, access: Access, partition: ReadPartition, first: StreamPosition, last: StreamPosition
    ) -> AsyncIterator[BatchPart]:
        """Yield the parts to read. The dedup window is not read again if the last plan ended at `first`."""
        stretch = Stretch(partition, first.in_partition(partition), last.in_partition(partition))
        behind, plan = self._plans.pop(partition, (None, None))
        seen = plan is not None and behind == first and not first.index
        if plan is None or not seen:
            plan = plan_of(access, stretch, self._wanted, self._options, audited=self._report is not None)
        else:
            plan.extend(stretch.start, stretch.end)
        async for part in parts_of(access, stretch, plan, seen=seen):
            yield part
        self._plans[partition] = last, plan


def _order(position: StreamPosition) -> tuple[int, int]:
    return position.offset, position.index


async def _check_marks(access: Access, positions: StreamPositions) -> None:
    """Check that the log of each partition still has the last pointer before its position.

    Raises: PositionLostError if the log was cut and has grown again; QueueError if it ends before the position.
    """
    for partition, position in positions.items():
        if position.mark:
            await access.resolver.checked_mark(partition, position.in_partition(partition))


def _partitions(access: Access) -> list[ReadPartition]:
    return [partition for topic in access.topics.values() for partition in topic.partitions]


async def _entries(access: Access, partition: ReadPartition, first: int, end: int) -> AsyncGenerator[Entry, None]:
    async for entries in access.resolver.pages(partition, first, end):
        for entry in entries:
            yield entry


async def _push_next(
    heads: list[tuple[int, ReadPartition, Entry]], partition: ReadPartition, stream: AsyncIterator[Entry]
) -> None:
    entry = await anext(stream, None)
    if entry is not None:
        heapq.heappush(heads, (entry.time_ms, partition, entry))


class MemqStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows topics. PySpark pickles it for tasks before its first call, so it opens connections later."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._stream: TopicStream | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - PySpark's name, as all below
        """Return the offset of `start`. Raises: as the queue."""
        return io_thread().run(self._opened().initial())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next micro-batch. Raises: as `TopicStream.latest`."""
        return io_thread().run(self._opened().latest(start, self._limit(limit)))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limit of the options.

        PySpark supports one kind at a time; `latestOffset` applies both.
        """
        if self._options.trigger_records_max:
            return ReadMaxRows(self._options.trigger_records_max)
        if self._options.trigger_bytes_max:
            return ReadMaxBytes(self._options.trigger_bytes_max)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the end of the topics; the lag is its distance from the end of a micro-batch."""
        return io_thread().run(self._opened().ends())

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Use the present end as the end of the query."""
        io_thread().run(self._opened().fix_ends())

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the splits between two offsets. Raises: as `TopicStream.plan`."""
        return io_thread().run(self._opened().plan(start, end))

    def read(self, partition: InputPartition) -> Iterator[pyarrow.RecordBatch]:
        """Yield the records of a partition. Raises: as `read_split`."""
        assert isinstance(partition, Split)
        return read_task(partition, self._options, self._schema)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: the checkpoint has the position, and an earlier request has reported it."""

    def stop(self) -> None:
        """Close the connections."""
        if self._stream is not None:
            io_thread().run(self._stream.close())
            self._stream = None

    def _opened(self) -> TopicStream:
        if self._stream is None:
            self._stream = TopicStream(self._options, Runtime())
        return self._stream

    def _limit(self, limit: ReadLimit) -> MicroBatchLimit:
        """Return the limit that the engine wants: none, or the lower of its limit and the options."""
        if isinstance(limit, ReadAllAvailable):
            return MicroBatchLimit()
        records, size = self._options.trigger_records_max or None, self._options.trigger_bytes_max or None
        if isinstance(limit, ReadMaxRows):
            records = min(limit.max_rows, records or limit.max_rows)
        if isinstance(limit, ReadMaxBytes):
            size = min(limit.max_bytes, size or limit.max_bytes)
        return MicroBatchLimit(records, size)
