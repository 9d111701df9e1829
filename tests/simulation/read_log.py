"""One read partition in the checker: all entries that ever landed, and those that retention left. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from operator import attrgetter

from memq.format.pointer import Location
from tests.simulation.reader import Delivered, LogEntry, ReferenceReader, Source

RecordPosition = tuple[int, int]  # pointer offset, record index
_PLACE = attrgetter("offset", "record_index")


@dataclass(slots=True)
class ReadLog:
    """One read partition: its entries by offset, the reference stream so far, and the first offset that is left.

    What lies before `queue_begin` has left the queue; from offset `compacted` up to `compacted_next` a manifest has it.
    """

    entries: list[LogEntry] = field(default_factory=list)
    stream: list[Delivered] = field(default_factory=list)
    reader: ReferenceReader = field(default_factory=ReferenceReader)
    queue_begin: int = 0
    compacted: int = 0
    compacted_next: int = 0
    begin_max: int = 0  # the greatest `begin` so far: a compaction that was slower than retention brings some back
    cut_at: int | None = None  # the lowest offset at which the log was cut
    lost: dict[RecordPosition, dict[bytes, None]] = field(default_factory=dict)  # the records that it lost
    moved: dict[int, tuple[Location, ...]] = field(default_factory=dict)  # by offset: where the last copy lies

    @property
    def begin(self) -> int:
        """The first offset that is left."""
        joined = self.compacted < self.compacted_next and self.queue_begin <= self.compacted_next
        return min(self.compacted, self.queue_begin) if joined else self.queue_begin

    def snapshot(self) -> ReadLog:
        """Return a copy to read, which no later event of the run changes."""
        return replace(self, entries=list(self.entries), stream=list(self.stream), moved=dict(self.moved))

    def leave_queue(self, before: int) -> None:
        """Note that the entries below `before` have left the queue."""
        self.queue_begin = max(self.queue_begin, before)
        self.begin_max = max(self.begin_max, self.begin)

    def cut(self, end: int) -> tuple[list[LogEntry], list[Delivered]]:
        """Remove all entries and records from offset `end` on, and return them."""
        self.cut_at = end if self.cut_at is None else min(self.cut_at, end)
        index = self.index_of(end, 0)
        entries, records = self.entries[end:], self.stream[index:]
        del self.entries[end:], self.stream[index:]
        for entry in entries:
            for block in entry.blocks:
                for number, value in enumerate(block.values, block.record_index):
                    self.lost.setdefault((entry.offset, number), {})[value] = None
        self.reader = ReferenceReader()
        for entry in self.entries:
            self.reader.take(entry)
        return entries, records

    def keep_compacted(self, begin: int, next_: int) -> None:
        """Note that a manifest has the entries from `begin` up to, not with, `next_`."""
        self.compacted, self.compacted_next = begin, next_
        self.begin_max = max(self.begin_max, self.begin)

    def locations(self, entry: LogEntry) -> tuple[Location, ...]:
        """Return the locations of the batch of a remaining entry; in the queue they are those of its pointer."""
        return entry.pointer.locations if entry.offset >= self.queue_begin else self.moved[entry.offset]

    def index_of(self, offset: int, record_index: int) -> int:
        """Return the place of the first record at or behind a position."""
        return bisect_left(self.stream, (offset, record_index), key=_PLACE)

    @property
    def begin_index(self) -> int:
        """The place of the first record that retention left."""
        return self.index_of(self.begin, 0)

    @property
    def gone_index(self) -> int:
        """The place of the first record that retention never took."""
        return self.index_of(self.begin_max, 0)

    def is_expired(self, index: int) -> bool:
        """Whether retention took the record at this place of the stream."""
        return self.stream[index].offset < self.begin

    def was_expired(self, index: int) -> bool:
        """Whether retention ever took it, though it may be back."""
        return self.stream[index].offset < self.begin_max

    def source_of(self, offset: int, record_index: int, value: bytes) -> Source | None:
        """Return the source of the record at a position, a copy or not; None when it does not have this value."""
        if offset >= len(self.entries):
            return None
        for block in self.entries[offset].blocks:
            if block.record_index <= record_index < block.record_index + len(block.values):
                return block.source if block.values[record_index - block.record_index] == value else None
        return None
