"""Resolves start, end, time and totals of a read partition through the queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from memq.client.consumer.fetch.partition_cursor import CursorState, PartitionCursor
from memq.client.consumer.progress import LogContinuity, ReadProgress, expired_error, lost_error, past_batch_error
from memq.errors import CorruptDataError, InvalidRequestError, NotFoundError
from memq.format.object import BlockEntry
from memq.format.pointer import Pointer, pointer_mark, read_pointer, unskipped
from memq.format.totals import contended_ms
from memq.notification import Entry, PointerReader, Span
from memq.notification.log_reader import entries_between, page_before, valid_seek, valid_span
from memq.runtime.clock import Clock
from memq.topic import Covered, Position, ReadPartition, Topic, TopicSettings, Totals

OwnerSpans = Callable[[ReadPartition], Awaitable[Sequence[Span]]]
IndexOf = Callable[[Pointer], Awaitable[Sequence[BlockEntry]]]
TAIL_OFFSETS = 16
COVERED_OFFSETS = 1_024  # entries in which the last batch of a quiet writer is searched for
END_TRIES = 4
END_RETRY_S = 0.1  # doubled for each try: 1.5 s in all


@dataclass(frozen=True, slots=True)
class Lag:
    """The remainder before the end: records, stored bytes, and the age in s of the oldest."""

    records: int
    bytes: int
    seconds: float


class OffsetResolver:
    """Finds offsets, totals and lag of a log. It reads pointers only, no objects.

    It takes totals from the last `tail_offsets` entries if these suffice. `owner_spans` asks the owners that write to
    a partition.
    """

    def __init__(
        self, queue: PointerReader, tail_offsets: int = TAIL_OFFSETS, owner_spans: OwnerSpans | None = None
    ) -> None:
        self._queue = queue
        self._tail_offsets = tail_offsets
        self._owner_spans = owner_spans

    async def position_of(
        self, point: str | int | Position, partition: ReadPartition, settings: TopicSettings
    ) -> Position:
        """Return the position that a point means now.

        `beginning` is the first entry that retention left, `end` is after the last one. A time in Unix ms is the first
        batch that was sealed at or after it. So consecutive ranges of time share no record and leave none out. A
        position is returned unchanged. Raises: InvalidRequestError for one of another partition.
        """
        number = partition.partition
        if isinstance(point, Position):
            if point.read_partition != number:
                raise InvalidRequestError(f"position {point} is not in partition {number} of '{partition.topic}'")
            return point
        if isinstance(point, int):
            return Position(number, await self._offset_at(partition, point, settings))
        if point == "beginning":
            return Position(number, (await self.span(partition)).begin)
        return Position(number, await self.end(partition))

    async def end(self, partition: ReadPartition) -> int:
        """Return the offset after all pointers that were acked before this call. Raises: QueueError.

        The owners are asked, too, because an owner knows all pointers that it has published. A Kafka node that was
        paused, and no longer leads the partition, answers an old end. Measured: 11 to 106 times in a row, for up to
        127 ms after it was resumed. So a second answer of the node proves nothing.
        """
        spans = [await self.span(partition)]
        if self._owner_spans is not None:
            spans += await self._owner_spans(partition)
        return max(span.end for span in spans)

    async def span(self, partition: ReadPartition) -> Span:
        """Return the union of two answers, since a replica that lags shows less. Raises: QueueError."""
        spans = [await valid_span(self._queue, partition) for _ in range(2)]
        return Span(min(span.begin for span in spans), max(span.end for span in spans))

    async def start_at(
        self,
        point: str | int | Position,
        partition: ReadPartition,
        settings: TopicSettings,
        *,
        pass_expired: bool = False,
    ) -> Position:
        """Return the position that a point means now, for a reader that starts there.

        With `pass_expired`, a position that retention has passed is no error.

        Raises: PositionExpiredError for a position that retention has passed, InvalidRequestError for one after the
        end; as `position_of`.
        """
        position = await self.position_of(point, partition, settings)
        if isinstance(point, Position):
            span = await valid_span(self._queue, partition)
            first = None if pass_expired else await self.first_left(partition, position.pointer_offset, span)
            if first is not None:
                raise expired_error(partition, position, first)
            await self._check_end(partition, position, span)
        return position

    async def first_left(self, partition: ReadPartition, offset: int, span: Span) -> int | None:
        """Return the first offset that is left when retention has passed `offset`, else None.

        Two answers must agree, `span` and a new one: the reader never returns to entries that it passes over.
        """
        if span.begin <= offset:
            return None
        begin = min(span.begin, (await valid_span(self._queue, partition)).begin)
        return begin if begin > offset else None

    async def _check_end(self, partition: ReadPartition, position: Position, span: Span) -> None:
        """Refuse a position that no record has yet: a reader there would miss the records that come before it.

        A replica that lags shows an earlier end for a moment, so it is asked for again, within bounds.
        """
        reached = position.pointer_offset + (position.record_index > 0)
        for number in range(END_TRIES):
            if reached <= span.end:
                return
            await asyncio.sleep(END_RETRY_S * 2**number)
            span = await valid_span(self._queue, partition)
        if reached > span.end:
            raise InvalidRequestError(
                f"position {position} of topic '{partition.topic}' is after its end, "
                f"{Position(partition.partition, span.end)}",
                hint="give one up to the end, 'end' or 'beginning'; if it is stored for a group, use memq group reset",
            )

    async def check_continuity(self, partition: ReadPartition, continuity: LogContinuity) -> None:
        """Check that the log still has the last pointer that `continuity` has read.

        If `continuity` has no mark, it gets the mark of the log. Nothing is compared if retention took the pointer.

        Raises: PositionLostError if the log has another pointer there; InvalidRequestError if the position is after the
        last record of its batch; QueueError if the log ends before it.
        """
        position, known = continuity.reached, continuity.mark  # as now: the reader may take more pointers meanwhile
        pointer = await self._pointer_before(partition, position)
        if pointer is not None:
            mark = pointer_mark(pointer)
            if known not in (0, mark):
                raise lost_error(partition, position)
            if position.record_index > pointer.records:
                raise past_batch_error(partition, position, pointer.records)
            if continuity.reached == position:
                continuity.mark = mark

    async def checked_mark(self, partition: ReadPartition, position: Position) -> int:
        """Return the mark of a position, or of the log if it has none. Raises: as `check_continuity`."""
        continuity = LogContinuity(position, position.mark)
        await self.check_continuity(partition, continuity)
        return continuity.mark

    async def marked(self, partition: ReadPartition, position: Position) -> Position:
        """Return a position with its mark, or else with that of the log.

        Raises: QueueError if the log ends before the position.
        """
        if position.mark:
            return position
        pointer = await self._pointer_before(partition, position)
        return position if pointer is None else replace(position, mark=pointer_mark(pointer))

    async def look_back(
        self, cursor: PartitionCursor, settings: TopicSettings, writers: Sequence[int], index_of: IndexOf
    ) -> None:
        """Show `cursor` the pointers of the dedup window before its start, and how much lies before it.

        Raises: InvalidRequestError for a start after the end, for example of a group whose partition lost its log;
        PositionLostError if the log has grown past the start since then.
        """
        partition, start = cursor.partition, cursor.position.pointer_offset
        span = await valid_span(self._queue, partition)
        if 0 < start <= span.begin:  # nothing is before the start: one answer does not prove that
            span = await self.span(partition)
        await self._check_end(partition, cursor.position, span)
        if span.begin <= start:
            await self.check_continuity(partition, cursor.continuity)
        cursor.begin_look_back()
        async for entries in self.window_before(partition, start, span, settings):
            for pointer in cursor.look_back(entries):
                try:
                    blocks = await index_of(pointer)
                except (CorruptDataError, NotFoundError):
                    if not pointer.producers_complete:
                        raise
                    continue  # no reader got its records
                cursor.note_index(pointer, unskipped(pointer, blocks))
        if start and not all(cursor.progress.is_settled(writer) for writer in writers):
            cursor.progress.join(await self._before(partition, start, span, settings, writers))

    async def window_before(
        self, partition: ReadPartition, start: int, span: Span, settings: TopicSettings
    ) -> AsyncIterator[list[Entry]]:
        """Yield the entries of the dedup window before offset `start`, in pages."""
        if start > span.begin:
            base = await self._time_around(partition, start, span.begin)
            first = await valid_seek(self._queue, partition, base - settings.reader_window_ms)
            async for entries in self.pages(partition, first, start):
                yield entries

    async def end_totals(self, partition: ReadPartition, settings: TopicSettings, writers: Sequence[int]) -> Totals:
        """Return the totals up to the present end, including all that retention took."""
        span = await valid_span(self._queue, partition)
        return (await self._before(partition, span.end, span, settings, writers)).totals

    async def totals_before(
        self, partition: ReadPartition, offset: int, settings: TopicSettings, writers: Sequence[int]
    ) -> Totals:
        """Return the totals before the pointer at `offset`, including all that retention took."""
        span = await valid_span(self._queue, partition)
        return (await self._before(partition, offset, span, settings, writers)).totals

    async def covered_before(
        self, partition: ReadPartition, offset: int, settings: TopicSettings, writers: Sequence[int]
    ) -> Covered:
        """Return the batches before `offset`, for a position that no reader has reached (G5).

        They are known by the last batch of each writer, and by pointers from before the dedup window. A writer without
        a batch in the last COVERED_OFFSETS entries is left out.
        """
        span = await valid_span(self._queue, partition)
        end, back = min(offset, span.end), self._tail_offsets
        while True:
            first = max(span.begin, end - back)
            last = [each async for each in self._pointers(partition, first, end)]
            found = {pointer.partition for _, pointer in last if pointer.kind == "data"}
            if found.issuperset(writers) or first == span.begin or back >= COVERED_OFFSETS:
                break
            back *= 4
        now_ms = max((time_ms for time_ms, _ in last), default=0)
        progress = ReadProgress(settings.reader_window_ms)
        if last:
            old = min(first, await valid_seek(self._queue, partition, now_ms - settings.reader_window_ms))
            async for time_ms, pointer in self._pointers(partition, max(span.begin, old - self._tail_offsets), old):
                progress.pass_over(pointer, time_ms)
        for time_ms, pointer in last:
            progress.pass_over(pointer, time_ms)
        progress.pass_time(now_ms)
        return progress.covered

    async def totals_of(self, cursor: PartitionCursor, settings: TopicSettings, writers: Sequence[int]) -> Totals:
        """Return the totals before the pointer at the position of `cursor`."""
        if cursor.state is CursorState.LOOKING_BACK:
            return await self.totals_before(cursor.partition, cursor.position.pointer_offset, settings, writers)
        return cursor.progress.totals

    async def lag(self, topic: Topic, partition: ReadPartition, position: Position, here: Totals, clock: Clock) -> Lag:
        """Return the lag from `position` to the present end; `here` are the totals before its pointer."""
        span = await valid_span(self._queue, partition)
        writers = topic.writers_of(partition)
        end = (await self._before(partition, span.end, span, topic.settings, writers)).totals
        records = end.records - here.records - position.record_index
        if records <= 0:
            return Lag(0, 0, 0.0)
        ahead = await page_before(self._queue, partition, position.pointer_offset, span.end, 1)
        waiting_ms = clock.wall_ms() - ahead[0].time_ms if ahead else 0
        return Lag(records, max(0, end.bytes - here.bytes), max(0, waiting_ms) / 1000)

    async def shifted(self, topic: Topic, partition: ReadPartition, position: Position, records: int) -> Position:
        """Return the position `records` after another one, before it if negative.

        The begin and the end of the log bound it. Copies are records, too.
        """
        span, writers = await self.span(partition), topic.writers_of(partition)

        async def before(offset: int) -> int:
            return (await self.totals_before(partition, offset, topic.settings, writers)).records

        wanted = await before(max(span.begin, position.pointer_offset)) + position.record_index + records
        low, high = span.begin, span.end
        at_low = await before(low)
        if wanted <= at_low:
            return Position(partition.partition, low)
        if wanted >= await before(high):
            return Position(partition.partition, high)
        while high - low > 1:
            middle = (low + high) // 2
            at_middle = await before(middle)
            if at_middle <= wanted:
                low, at_low = middle, at_middle
            else:
                high = middle
        return Position(partition.partition, low, wanted - at_low)

    async def first_seal(self, partition: ReadPartition, span: Span) -> int | None:
        """Return the seal of the first batch in Unix ms; None if the log has none."""
        async for _, pointer in self._pointers(partition, span.begin, span.end):
            if pointer.kind == "data":
                return pointer.sealed_ms
        return None

    async def last_seal(self, partition: ReadPartition, span: Span) -> int | None:
        """Return the seal of the last batch in Unix ms; None if the log has none."""
        back = self._tail_offsets
        while True:
            first = max(span.begin, span.end - back)
            seals = [
                pointer.sealed_ms
                async for _, pointer in self._pointers(partition, first, span.end)
                if pointer.kind == "data"
            ]
            if seals or first == span.begin:
                return seals[-1] if seals else None
            back *= 4

    async def batches_since(self, partition: ReadPartition, time_ms: int, span: Span) -> int:
        """Return how many batches the log has from a queue time on.

        Above COVERED_OFFSETS entries, the few that are no batches are counted, too.
        """
        first = min(span.end, max(span.begin, await valid_seek(self._queue, partition, time_ms)))
        if span.end - first > COVERED_OFFSETS:
            return span.end - first
        return sum([pointer.kind == "data" async for _, pointer in self._pointers(partition, first, span.end)])

    # ---- inside --------------------------------------------------------------------------------

    async def _pointer_before(self, partition: ReadPartition, position: Position) -> Pointer | None:
        """Return the last pointer before a position, or that of its batch if it is inside one.

        None if there is none, if retention took it, or if it can't be read. Raises: QueueError if the log ends before.
        """
        reached = position.pointer_offset + (position.record_index > 0)
        if not reached:
            return None
        offset = reached - 1
        found = await page_before(self._queue, partition, offset, reached, 1)
        pointer = read_pointer(found[0].body, newer="return") if found and found[0].offset == offset else None
        return pointer if isinstance(pointer, Pointer) else None

    async def _offset_at(self, partition: ReadPartition, time_ms: int, settings: TopicSettings) -> int:
        """Return the offset of the first batch that was sealed at `time_ms` or later.

        A queue time is at most `late_ms` after the seal, so the search starts there and compares the seals. Without
        such a batch it returns the same as `end`: otherwise two ranges would leave out the records between.
        """
        first = await valid_seek(self._queue, partition, time_ms - settings.late_ms)
        end = await self.end(partition)
        async for entries in self.pages(partition, first, end):
            for entry in entries:
                pointer = read_pointer(entry.body, newer="return")
                if (pointer.sealed_ms if isinstance(pointer, Pointer) else entry.time_ms) >= time_ms:
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
            entries = [entry async for page in self.pages(partition, first, offset) for entry in page]
            if entries or first == begin:
                return entries[-1].time_ms if entries else 0
            back *= 4

    async def _before(
        self, partition: ReadPartition, offset: int, span: Span, settings: TopicSettings, writers: Sequence[int]
    ) -> ReadProgress:
        """Return the totals before `offset`, from as few pointers before it as settle all `writers`.

        See `memq.format.totals`. Where retention took them, the first pointer that is left says what lay before it.
        """
        end = min(offset, span.end)
        first = max(span.begin, end - self._tail_offsets)
        while True:
            progress = ReadProgress()
            last_ms: dict[int, int] = {}
            async for time_ms, pointer in self._pointers(partition, first, end):
                progress.pass_over(pointer)
                last_ms[pointer.partition] = max(time_ms, last_ms.get(pointer.partition, 0))
            open_ms = [last_ms.get(writer) for writer in writers if not progress.is_settled(writer)]
            earlier = end - 4 * (end - first)
            known_ms = [time_ms for time_ms in open_ms if time_ms is not None]
            if open_ms == known_ms:
                settled_ms = min(known_ms, default=0) - contended_ms(settings.stale_publish_ms)
                earlier = await self._queue.seek_time(partition, settled_ms) if known_ms else first
            if first <= max(earlier, span.begin):
                break
            first = max(earlier, span.begin)
        if span.begin and not progress.knows(writers):
            await self._read_on(progress, partition, end, span.end, writers)
        return progress

    async def _read_on(
        self, progress: ReadProgress, partition: ReadPartition, first: int, end: int, writers: Sequence[int]
    ) -> None:
        """Take the totals that the next pointers state, for `writers` without a pointer before `first`."""
        async for _, pointer in self._pointers(partition, first, end):
            if not progress.knows([pointer.partition]):
                progress.start_at(pointer)
                if progress.knows(writers):
                    return

    async def _pointers(self, partition: ReadPartition, first: int, end: int) -> AsyncIterator[tuple[int, Pointer]]:
        """Yield the pointers from `first` up to, not with, `end`, with their queue times."""
        async for entries in self.pages(partition, first, end):
            for entry in entries:
                pointer = read_pointer(entry.body, newer="return")
                if isinstance(pointer, Pointer):  # else its batch is unknown
                    yield entry.time_ms, pointer

    async def pages(self, partition: ReadPartition, first: int, end: int) -> AsyncIterator[list[Entry]]:
        """Yield the entries from `first` up to, not with, `end`, in pages. Raises: as `entries_between`."""
        async for page in entries_between(self._queue, partition, first, end):
            yield page
