"""Finds places in a read partition by asking the queue: where a time lies, what lies before a start, and at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from memq.client.flow import PartitionFlow
from memq.client.progress import Progress, end_progress
from memq.clock import Clock
from memq.errors import InvalidRequestError, MemqError
from memq.format.object import BlockEntry
from memq.format.pointer import Pointer, decode_pointer
from memq.limits import POLL_BYTES_MAX
from memq.notification import Entry, PointerReader
from memq.topic import CLOCK_ERROR_MS, Position, ReadPartition, Topic, TopicSettings, Totals

IndexOf = Callable[[Pointer], Awaitable[Sequence[BlockEntry]]]
_TAIL_OFFSETS = 16


@dataclass(frozen=True, slots=True)
class Lag:
    """What lies between a position and the end: records, stored bytes, and how many seconds the oldest has waited."""

    records: int
    bytes: int
    seconds: float


def late_ms(settings: TopicSettings) -> int:
    """How much older the queue time of a pointer may be than the moment it was published."""
    return settings.stale_publish_ms + CLOCK_ERROR_MS


def window_ms(settings: TopicSettings) -> int:
    """How much queue time a reader remembers: W, and what later pointers may be late."""
    return settings.dedup_window_ms + late_ms(settings)


class Places:
    """Answers questions about places, by reading pointers only."""

    def __init__(self, queue: PointerReader) -> None:
        self._queue = queue

    async def position_of(
        self, point: str | int | Position, partition: ReadPartition, settings: TopicSettings
    ) -> Position:
        """Return the position that a point means now.

        `beginning` is what retention left, `end` is behind all that is there. A time in Unix ms is the first batch
        that was sealed at or after it, so that ranges that follow on each other in time share no record and
        leave none out.
        """
        number = partition.partition
        if isinstance(point, Position):
            if point.read_partition != number:
                raise InvalidRequestError(f"position {point} is not in partition {number} of '{partition.topic}'")
            return point
        if isinstance(point, int):
            return Position(number, await self._offset_at(partition, point, settings))
        span = await self._queue.span(partition)
        return Position(number, span.begin if point == "beginning" else span.end)

    async def look_back(self, flow: PartitionFlow, settings: TopicSettings, index_of: IndexOf) -> None:
        """Show `flow` the pointers of the dedup window before its start."""
        partition, start = flow.partition, flow.position.pointer_offset
        span = await self._queue.span(partition)
        if start > span.begin:
            base = await self._time_around(partition, start, span.begin)
            first = await self._queue.seek_time(partition, base - window_ms(settings))
            async for entries in self._pages(partition, first, start):
                for pointer in flow.look_back(entries):
                    flow.note_index(pointer, await index_of(pointer))

    async def end_totals(self, partition: ReadPartition, write_partitions: Sequence[int]) -> Totals:
        """Return how much the partition holds up to its end now, all that retention took included."""
        span = await self._queue.span(partition)
        back = _TAIL_OFFSETS
        while True:
            first = max(span.begin, span.end - back)
            tail = await self._pointers(partition, first, span.end)
            progress = end_progress(tail)
            if progress.knows(write_partitions) or first == span.begin:
                return progress.totals
            back *= 4

    async def totals_at(self, progress: Progress, position: Position, partition: ReadPartition) -> Totals:
        """Return what lies before `position`, where `progress` has folded what was read before it."""
        ahead = await self._queue.read(partition, position.pointer_offset, 1)
        if ahead:
            try:
                progress.start_at(decode_pointer(ahead[0].body))
            except MemqError:
                return progress.totals  # unreadable: it is met, and dealt with, when it is delivered
        return progress.totals

    async def lag(self, topic: Topic, partition: ReadPartition, position: Position, here: Totals, clock: Clock) -> Lag:
        """Return what lies between `position`, with `here` before its pointer, and the end now."""
        end = await self.end_totals(partition, topic.writers_of(partition))
        records = end.records - here.records - position.record_index
        if records <= 0:
            return Lag(0, 0, 0.0)
        ahead = await self._queue.read(partition, position.pointer_offset, 1)
        waiting_ms = clock.wall_ms() - ahead[0].time_ms if ahead else 0
        return Lag(records, max(0, end.bytes - here.bytes), max(0, waiting_ms) / 1000)

    # ---- inside --------------------------------------------------------------------------------

    async def _offset_at(self, partition: ReadPartition, time_ms: int, settings: TopicSettings) -> int:
        """A queue time is at most `late_ms` older than the seal: start there, and look at the seals."""
        first = await self._queue.seek_time(partition, time_ms - late_ms(settings))
        end = (await self._queue.span(partition)).end
        async for entries in self._pages(partition, first, end):
            for entry in entries:
                try:
                    sealed_ms = decode_pointer(entry.body).sealed_ms
                except MemqError:
                    sealed_ms = entry.time_ms
                if sealed_ms >= time_ms:
                    return entry.offset
        return end

    async def _time_around(self, partition: ReadPartition, offset: int, begin: int) -> int:
        """Return the queue time at `offset`, or at the last entry before it when there is none yet."""
        ahead = await self._queue.read(partition, offset, 1)
        if ahead:
            return ahead[0].time_ms
        back = 1
        while True:
            first = max(begin, offset - back)
            entries = [entry async for page in self._pages(partition, first, offset) for entry in page]
            if entries or first == begin:
                return entries[-1].time_ms if entries else 0
            back *= 4

    async def _pointers(self, partition: ReadPartition, first: int, end: int) -> list[tuple[int, Pointer]]:
        found: list[tuple[int, Pointer]] = []
        async for entries in self._pages(partition, first, end):
            for entry in entries:
                try:
                    found.append((entry.offset, decode_pointer(entry.body)))
                except MemqError:
                    continue  # unreadable: nothing can be said of its batch
        return found

    async def _pages(self, partition: ReadPartition, first: int, end: int) -> AsyncIterator[list[Entry]]:
        """Yield the entries from `first` up to, not with, `end`, in pages."""
        while first < end:
            page = await self._queue.read(partition, first, POLL_BYTES_MAX)
            entries = [entry for entry in page if entry.offset < end]
            if not entries:
                return
            yield entries
            first = entries[-1].offset + 1
