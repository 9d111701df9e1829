"""Reads all pointers of a read partition once, and states whether the reading is complete.

Theory. Retention and the sweep delete objects that a log does not name, so a short answer would destroy data. An empty
read does not prove the end of a log: a queue that lost its connection has answered so. The proof is the span, read
before the first page. The reading must reach the end of the span, with dense offsets from its beginning. It continues
after that end, for entries that landed meanwhile. (`memq.notification.log_reader` reads up to an end, and has the rule
for an empty read.) Every queue numbers its entries densely, and removes them only from the front. So a hole is a loss,
and so is an entry that the queue itself shows as lost.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from memq.errors import QueueError
from memq.format.pointer import Pointer, read_pointer
from memq.notification import Entry, PointerReader, Span
from memq.notification.log_reader import falls_short
from memq.topic import ReadPartition

READ_BYTES = 1 << 20
READINGS_MAX = 3  # of one log, when retention takes entries meanwhile


class LogReading:
    """One reading of a read partition. `damaged` gets the fault of a pointer.

    These attributes are valid after the iteration. `begin` is the first offset according to the queue; `lost` counts
    the entries that the queue should have and did not show. `fault` is the reason of an incomplete reading, "" for a
    complete one. `trimmed_meanwhile`: the reason is retention, which removed entries, so another reading helps.
    """

    def __init__(self, queue: PointerReader, partition: ReadPartition, damaged: Callable[[str], None]) -> None:
        self.begin = 0
        self.lost = 0
        self.fault = ""
        self.trimmed_meanwhile = False
        self._queue = queue
        self._partition = partition
        self._damaged = damaged

    async def entries(self) -> AsyncIterator[tuple[Entry, Pointer | None]]:
        """Yield each entry with its pointer, None for a damaged one; `fault` ends the iteration.

        Raises: QueueError, NotFoundError, UnsupportedFormatError for a pointer of a newer version.
        """
        span = await self._queue.span(self._partition)
        if not 0 <= span.begin <= span.end:
            self.fault = f"the queue says that its log lies between {span.begin} and {span.end}"
            return
        self.begin = offset = span.begin
        page = await self._queue.read(self._partition, offset, READ_BYTES)
        while page:
            for entry in page:
                if entry.offset < offset:
                    self.fault = f"the queue shows offset {entry.offset} where {offset} or more was asked for"
                    return
                if entry.offset > offset and await self._skipped(offset, entry.offset):
                    return
                offset = entry.offset + 1
                if entry.lost:
                    self.lost += 1
                else:
                    yield entry, self._decoded(entry)
            page = await self._queue.read(self._partition, offset, READ_BYTES)
        if falls_short(page, span.end):
            self.fault = f"the queue shows nothing from offset {offset} on, though its end is {span.end}"
        elif offset < span.end:
            await self._skipped(offset, span.end)

    async def _skipped(self, first: int, next_: int) -> bool:
        """Count missing entries from `first` up to `next_`; True if retention removed them meanwhile."""
        begin = (await self._queue.span(self._partition)).begin
        if begin > first:
            self.trimmed_meanwhile, self.fault = (
                True,
                f"retention took offsets {first} to {begin - 1} while they were read",
            )
            return True
        self.lost += next_ - first
        return False

    def _decoded(self, entry: Entry) -> Pointer | None:
        pointer = read_pointer(entry.body, newer="raise")
        if isinstance(pointer, Pointer):
            return pointer
        self._damaged(f"topic '{self._partition.topic}' offset {entry.offset}: {pointer}")
        return None


async def whole_log(
    queue: PointerReader, partition: ReadPartition, damaged: Callable[[str], None]
) -> tuple[Span, list[tuple[Entry, Pointer | None]]]:
    """Return all entries of a read partition with their pointers, and the span that they fill.

    Raises: QueueError when the reading was not whole; as `LogReading.entries`.
    """
    tries = 0
    while True:
        reading, tries = LogReading(queue, partition, damaged), tries + 1
        known = [item async for item in reading.entries()]
        if not reading.trimmed_meanwhile or tries == READINGS_MAX:
            break
    if reading.fault:
        raise QueueError(f"topic '{partition.topic}' partition {partition.partition}: {reading.fault}")
    return Span(reading.begin, known[-1][0].offset + 1 if known else reading.begin), known


def keys_of(pointer: Pointer | None) -> list[str]:
    """Return the keys of the objects that a pointer names."""
    return [] if pointer is None else [location.key for location in pointer.locations]
