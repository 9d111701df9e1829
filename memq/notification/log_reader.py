"""Reads a read partition up to an end that was read before; only this proves a complete log.

An empty answer of a queue is no proof of the end. A library without its connection, a replica that lags or an older
broker may return one in the middle of a log. A reader that trusted it would miss the rest of the log, and a sweep
would delete the objects that the rest names. So the end is read first, and no earlier offset counts as the end.

An answer may also lack entries. Every queue numbers its entries densely and removes them from the front only, so a
hole is retention, a loss, or a wrong answer. A hole counts only if two answers have it. An answer is used up to its
first hole, and the next read begins there. An answer that begins with a hole is read once more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from memq.errors import QueueError
from memq.limits import POLL_BYTES_MAX
from memq.notification import Entries, Entry, PointerReader, Span, checked_span
from memq.topic import ReadPartition


async def valid_span(queue: PointerReader, partition: ReadPartition) -> Span:
    """Return the span of a partition. Raises: QueueError for an impossible span; as `span`."""
    span = await queue.span(partition)
    return checked_span(partition, span.begin, span.end)


def falls_short(entries: Entries, end: int) -> bool:
    """Whether an answer has no entries although it is before `end`, a valid end that was read before."""
    return not entries and entries.next < end


def first_of(entries: Entries) -> int:
    """Return the offset of the first entry, or the next offset to read if there are no entries."""
    return entries[0].offset if entries else entries.next


def first_run(entries: Entries) -> Entries:
    """Return the entries of an answer up to its first hole."""
    if not entries:
        return entries
    first = entries[0].offset
    count = next((number for number, entry in enumerate(entries) if entry.offset != first + number), len(entries))
    return entries if entries.next == first + count else Entries(entries[:count], first + count)


async def valid_seek(queue: PointerReader, partition: ReadPartition, time_ms: int) -> int:
    """Return the least offset at or after a queue time, or the end.

    Raises: QueueError when the entry before it is not older, since a reader would skip that entry; as `seek_time`.
    """
    offset = await queue.seek_time(partition, time_ms)
    before = await queue.read(partition, offset - 1, 1) if offset else ()
    if before and before[0].offset == offset - 1 and before[0].time_ms >= time_ms:
        raise QueueError(
            f"read partition {partition.partition} of topic '{partition.topic}' shows offset {offset} for time "
            f"{time_ms}, and the entry before it is of {before[0].time_ms}",
            hint="ask again; if it repeats, check the notification queue",
        )
    return offset


async def page_before(
    queue: PointerReader, partition: ReadPartition, first: int, end: int, bytes_max: int = POLL_BYTES_MAX
) -> Entries:
    """Return entries from offset `first` on, up to the first hole.

    An answer without entries is the end of the log. `end` is an end that was read before, or an offset below it.
    Raises: QueueError when the queue returns no entry before `end`; as `PointerReader.read`.
    """
    entries = await queue.read(partition, first, bytes_max)
    if first_of(entries) > first:
        entries = min(entries, await queue.read(partition, first, bytes_max), key=first_of)
    if falls_short(entries, end) or entries.next <= first < end:
        raise QueueError(
            f"read partition {partition.partition} of topic '{partition.topic}' shows nothing at offset {first}, "
            f"and its end was {end} before",
            hint="read it again; if it repeats, see docs/recovery.md",
        )
    return first_run(entries)


async def entries_between(
    queue: PointerReader, partition: ReadPartition, first: int, end: int, bytes_max: int = POLL_BYTES_MAX
) -> AsyncIterator[list[Entry]]:
    """Yield all entries from offset `first` up to `end` (exclusive), in pages that are not empty.

    `end` and the errors are as for `page_before`.
    """
    while first < end:
        entries = await page_before(queue, partition, first, end, bytes_max)
        page = [entry for entry in entries if entry.offset < end]
        if page:
            yield page
        first = entries.next


async def all_entries(queue: PointerReader, partition: ReadPartition) -> AsyncIterator[list[Entry]]:
    """Yield all entries of a partition up to its current end, in pages.

    Raises: as `valid_span` and `entries_between`.
    """
    span = await valid_span(queue, partition)
    async for page in entries_between(queue, partition, span.begin, span.end):
        yield page
