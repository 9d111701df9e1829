"""Processes a topic in rounds: each plans its reads by pointers and ends where the next begins.

So a pipeline that is killed loses at most one round, whatever the size of the topic, and shows how far it is.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import cast

from memq.audit.minutes import watermark_ms
from memq.client.consumer.progress import expired_error
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.spark.access import Access, SparkTopic, open_access
from memq.spark.options import ReadOptions
from memq.spark.read.batch_reader import Stretch, check_positions, parts_of, plan_of, position_of
from memq.spark.read.planner import BatchPart, Split, split_parts
from memq.spark.read.pruning import ReadFilter
from memq.spark.read.task import settings_of
from memq.topic import Position, ReadPartition

ROUND_TASKS = 64  # splits of one round, about


@dataclass(frozen=True, slots=True)
class Round:
    """The splits of a round, and its begin and end by read partition."""

    topic: SparkTopic
    splits: Sequence[Split]
    starts: Mapping[int, Position]
    ends: Mapping[int, Position]

    @property
    def bytes(self) -> int:
        """Number of stored bytes that the round reads."""
        return sum(part.bytes for split in self.splits for part in split.parts)


async def topic_of(options: ReadOptions) -> SparkTopic:
    """Return the topic that options name. Raises: UnreachableError, NotFoundError."""
    async with open_access(options, Runtime()) as access:
        return access.topics[options.topics[0]]


async def starts_of(options: ReadOptions, covered: Mapping[int, Position]) -> dict[int, Position]:
    """Return by read partition the start of a round after `covered`. Raises: as `plan_round`."""
    async with open_access(options, Runtime()) as access:
        topic = access.topics[options.topics[0]]
        return {
            partition.partition: await _start(access, topic, partition, options, covered)
            for partition in topic.partitions
        }


async def plan_round(
    options: ReadOptions, covered: Mapping[int, Position], *, settled: bool, tasks: int = ROUND_TASKS
) -> Round:
    """Plan a round after `covered`; in read partitions without it, from the options' start.

    A round without splits means that no records are left. With `settled` the round ends below the watermark. If
    retention was faster, that is logged, and the round begins at the first present record.
    Raises: UnreachableError, NotFoundError; QueueError; PositionLostError if a log was cut before `covered` and has
    grown again.
    """
    runtime = Runtime()
    async with open_access(options, runtime) as access:
        topic = access.topics[options.topics[0]]
        check_positions(access, options)
        until_ms = watermark_ms(topic.settings, runtime.clock.wall_ms()) if settled else None
        stretches = [
            await _stretch(access, topic, partition, options, covered, until_ms)
            for partition in sorted(topic.partitions)
        ]
        parts, starts, ends = [], {}, {}
        bytes_max = tasks * options.partition_bytes // len(stretches)
        for stretch in stretches:
            taken, end = await _take(access, stretch, options, bytes_max)
            parts += taken
            end = replace(end, mark=await access.resolver.checked_mark(stretch.partition, end))
            starts[stretch.partition.partition], ends[stretch.partition.partition] = stretch.start, end
            await _log_expired(access, stretch.partition, covered)
        settings = settings_of(options, access.urls, ReadFilter())
        return Round(topic, split_parts(parts, options.partition_bytes, settings), starts, ends)


async def _stretch(
    access: Access,
    topic: SparkTopic,
    partition: ReadPartition,
    options: ReadOptions,
    covered: Mapping[int, Position],
    until_ms: int | None,
) -> Stretch:
    """Return the range of a read partition to read."""
    number = partition.partition
    start = await _start(access, topic, partition, options, covered)
    end = await position_of(access, topic, partition, options.end, "end")
    span = await access.resolver.span(partition)
    last = span.end if until_ms is None else await access.queue.seek_time(partition, until_ms)
    return Stretch(partition, start, max(start, min(end, Position(number, last))))


async def _start(
    access: Access, topic: SparkTopic, partition: ReadPartition, options: ReadOptions, covered: Mapping[int, Position]
) -> Position:
    """Return the position after `covered`, or the options' start, or the first one that retention left."""
    start = covered.get(partition.partition) or await position_of(access, topic, partition, options.start, "beginning")
    begin = Position(partition.partition, (await access.resolver.span(partition)).begin)
    if start.mark and start >= begin:
        await access.resolver.checked_mark(partition, start)
    return max(start, begin)


async def _log_expired(access: Access, partition: ReadPartition, covered: Mapping[int, Position]) -> None:
    """Log it if retention removed records after a covered position; called when its pointers were read."""
    position, begin = covered.get(partition.partition), (await access.resolver.span(partition)).begin
    if position is not None and position.pointer_offset < begin:
        events = EventLog(access.runtime.clock)
        events.warning("spark.expired", f"{expired_error(partition, position, begin)}; reading continues there")


async def _take(
    access: Access, stretch: Stretch, options: ReadOptions, bytes_max: int
) -> tuple[list[BatchPart], Position]:
    """Return parts of about `bytes_max` stored bytes, and the position after them."""
    parts: list[BatchPart] = []
    size = 0
    if stretch.start >= stretch.end:
        return parts, stretch.start
    plan = plan_of(access, stretch, ReadFilter(), options)
    source = cast(AsyncGenerator[BatchPart, None], parts_of(access, stretch, plan))
    async with aclosing(source):
        async for part in source:
            if parts and size + part.bytes > bytes_max:
                return parts, Position(stretch.partition.partition, part.offset)
            parts.append(part)
            size += part.bytes
    return parts, stretch.end
