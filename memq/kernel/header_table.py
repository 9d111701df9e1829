"""The headers of a batch's blocks, and the values for index and pointer that follow from them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from memq.format.blocks.header import BlockHeader, parse_header
from memq.format.blocks.latency import Latency
from memq.kernel.blocks import Extents, latencies, lay_out
from memq.limits import BLOCK_HEADER_BYTES


@dataclass(frozen=True, slots=True)
class HeaderTable:
    """The headers of checked blocks, in order; this class checks nothing. `lay_out` returns the fields."""

    headers: bytes  # one after another
    packed: bytes | bytearray  # their index entries, for a batch that begins its object
    checksum: int  # crc32c of all blocks
    raw_bytes: int
    records: int
    least_ms: int
    greatest_ms: int  # or an upper bound of it
    slots: tuple[int, int]  # the least and the greatest hash slot
    tag_bits: int

    def __len__(self) -> int:
        """How many blocks there are."""
        return len(self.headers) // BLOCK_HEADER_BYTES

    def __getitem__(self, number: int) -> BlockHeader:
        """Return one header as a value."""
        return parse_header(self.headers, number * BLOCK_HEADER_BYTES)

    def latency(self, now_ms: int, skip: Sequence[int] = ()) -> Latency:
        """Return the ages of the records at `now_ms`, without those of the blocks with the numbers `skip`."""
        return latencies(self.headers, now_ms, skip)

    def sequences(self) -> list[tuple[int, int, int]]:
        """Return producer id, first and next sequence of each block."""
        view = memoryview(self.headers)
        by_64 = view.cast("Q")
        firsts, counts = by_64[5::9].tolist(), view.cast("I")[5::18].tolist()
        return list(zip(by_64[4::9].tolist(), firsts, map(add, firsts, counts), strict=True))

    def entries(self, offset: int) -> bytes | bytearray:
        """Return the index's block entries, packed, for a batch at `offset` of its object."""
        if not offset:
            return self.packed
        moved = bytearray(self.packed)
        offsets = memoryview(moved).cast("Q")[0::8]
        offsets[:] = memoryview(array("Q", [offset + each for each in offsets.tolist()]))
        return moved


def table_of(extents: Extents) -> tuple[list[memoryview], HeaderTable]:
    """Return a view of each block, without a copy, and the table of their headers; at least one block."""
    views, fields = lay_out(extents)
    return views, HeaderTable(*fields)
