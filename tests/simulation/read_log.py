"""One read partition as the checker knows it: all entries that ever landed, and what retention left of them. Pure."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from tests.simulation.reader import Delivered, LogEntry, ReferenceReader

Place = tuple[int, int]  # pointer offset, record index


@dataclass(slots=True)
class ReadLog:
    """One read partition: its entries by offset, the reference stream so far, and the first offset that is left."""

    entries: list[LogEntry] = field(default_factory=list)
    stream: list[Delivered] = field(default_factory=list)
    reader: ReferenceReader = field(default_factory=ReferenceReader)
    begin: int = 0

    def index_of(self, offset: int, record_index: int) -> int:
        """Return the place of the first record at or behind a position."""
        return bisect_left(self.stream, (offset, record_index), key=lambda one: (one.offset, one.record_index))

    @property
    def begin_index(self) -> int:
        """The place of the first record that retention left."""
        return self.index_of(self.begin, 0)

    def is_expired(self, index: int) -> bool:
        """Whether retention took the record at this place of the stream."""
        return self.stream[index].offset < self.begin

    def value_at(self, offset: int, record_index: int) -> bytes | None:
        """Return the value that is stored at a position, a copy or not; None when there is none."""
        if offset >= len(self.entries):
            return None
        for block in self.entries[offset].blocks:
            if block.record_index <= record_index < block.record_index + len(block.values):
                return block.values[record_index - block.record_index]
        return None
