"""Checks the product's lag of a log at any moment, from any position, also after retention. Pure.

The truth is the plain sum over all pointers from offset 0 on; the product sees a part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from memq.client.consumer.fetch.partition_cursor import PartitionCursor
from memq.client.consumer.offset_resolver import OffsetResolver
from memq.format.object import BlockEntry
from memq.format.pointer import Pointer, encode_pointer
from memq.format.totals import contended_ms
from memq.notification import Entries, Entry, Span
from memq.topic import Position, ReadPartition, TopicSettings, Totals
from tests.simulation.reader import FindingError, LogEntry

Result = TypeVar("Result")


class PartOfLog:
    """A `PointerReader` of the entries `begin` up to `end` of a log: a moment of its life."""

    def __init__(self, entries: Sequence[Entry], begin: int, end: int) -> None:
        self._begin = begin
        self._end = end
        self._entries = entries[begin:end]

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`."""
        return Entries(self._entries[max(offset - self._begin, 0) :], max(offset, self._end))

    async def span(self, partition: ReadPartition) -> Span:
        """See `PointerReader.span`."""
        return Span(self._begin, self._end)

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        """See `PointerReader.seek_time`."""
        return next((entry.offset for entry in self._entries if entry.time_ms >= time_ms), self._end)

    async def wait(self, ends: dict[ReadPartition, int], timeout_s: float) -> None:
        """See `PointerReader.wait`."""
        raise AssertionError("places are found without waiting")


class LagCheck:
    """One read partition's log, whole and without holes in its offsets."""

    def __init__(self, partition: ReadPartition, log: Sequence[LogEntry], settings: TopicSettings) -> None:
        assert [entry.offset for entry in log] == list(range(len(log))), "a log with holes"
        self._partition = partition
        self._log = log
        self._settings = settings
        self._entries = [Entry(entry.offset, entry.time_ms, encode_pointer(entry.pointer)) for entry in log]
        self._writers = sorted({entry.pointer.partition for entry in log})
        self._before = _sums(log)

    def check(self, draw_below: Callable[[int], int], moments_max: int) -> None:
        """Check the statements of all pointers, and lag at some moments. Raises: FindingError."""
        _check_stated(self._log)
        for _ in range(moments_max):
            end = draw_below(len(self._log)) + 1
            here = draw_below(end + 1)
            begin = draw_below(1 + min(self._settled(end), self._settled(here))) if draw_below(2) else 0
            self._check_moment(begin, here, end, 1 << draw_below(5))

    def _settled(self, place: int) -> int:
        """Return from where on retention leaves the pointers that settle the totals at `place`, and so keeps them."""
        last: dict[int, int] = {}
        for entry in self._log[:place]:
            last[entry.pointer.partition] = max(entry.time_ms, last.get(entry.pointer.partition, 0))
        if len(last) < len(self._writers):
            return 0
        least_ms = min(last.values()) - contended_ms(self._settings.stale_publish_ms)
        return next(entry.offset for entry in self._log if entry.time_ms >= least_ms)

    def _check_moment(self, begin: int, here: int, end: int, tail_offsets: int) -> None:
        """Check the totals at `end` and at `here`, and of a reader that starts here and reads to the end."""
        where, settings, writers = self._partition, self._settings, self._writers
        resolver = OffsetResolver(PartOfLog(self._entries, begin, end), tail_offsets)
        moment = f"of {where.partition} with {begin} to {end}"
        self._compare(f"end {moment}", end, _run(resolver.end_totals(where, settings, writers)))
        self._compare(f"{here} {moment}", here, _run(resolver.totals_before(where, here, settings, writers)))
        cursor = PartitionCursor(where, Position(where.partition, here), window_ms=settings.reader_window_ms)
        _run(resolver.look_back(cursor, settings, writers, _no_index))
        self._compare(f"a start at {here} {moment}", here, cursor.progress.totals)
        for entry in self._log[here:end]:
            cursor.progress.pass_over(entry.pointer)
            self._compare(f"{entry.offset} read from {here} {moment}", entry.offset + 1, cursor.progress.totals)

    def _compare(self, what: str, place: int, found: Totals) -> None:
        if found != self._before[place]:
            raise FindingError(f"totals at {what} are {found}, stored are {self._before[place]}")


def _sums(log: Sequence[LogEntry]) -> list[Totals]:
    sums = [Totals()]
    for entry in log:
        sums.append(sums[-1].plus(entry.pointer.records, entry.pointer.stored_bytes))
    return sums


def _check_stated(log: Sequence[LogEntry]) -> None:
    """Check that no pointer states more than the totals before it in its write partition."""
    stored: dict[int, Totals] = {}
    for entry in log:
        pointer = entry.pointer
        before = stored.get(pointer.partition, Totals())
        if pointer.totals.records > before.records or pointer.totals.bytes > before.bytes:
            raise FindingError(f"pointer at {entry.offset} states {pointer.totals}, before it lie {before}")
        stored[pointer.partition] = before.plus(pointer.records, pointer.stored_bytes)


async def _no_index(pointer: Pointer) -> Sequence[BlockEntry]:
    """Return no blocks: lag depends on pointers alone. Readers ask for the index of a pointer with skipped blocks."""
    if not pointer.producers_complete:
        raise FindingError("pointer with cut producers: the simulation keeps batches smaller than that")
    return ()


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run what never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        result: Result = done.value
        return result
    raise AssertionError("it waits")
