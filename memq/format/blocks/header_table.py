"""Headers of many blocks as a table of columns, for index and pointer; latencies of blocks.

Bucket b has the records that passed a stage from 2^(b-1) ms to below 2^b ms after the least timestamp of their block.
Bucket 0 has those below 1 ms, also negative ones from clocks that differ.

A batch of 4 KiB blocks has thousands of headers. A named tuple for each cost 5 µs per block, more than the rest of
the broker. So the columns are strided copies in C. A header is 18 words of 32 bits or 9 of 64, an index entry 16 or 8,
and no field straddles a word.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from itertools import accumulate
from operator import add, or_
from typing import Annotated

from msgspec import Meta

from memq.format.blocks.header import CHECKED_FROM, DELTA_SATURATED, BlockHeader, parse_header
from memq.limits import BLOCK_ENTRY_BYTES, BLOCK_HEADER_BYTES, TIME_MS_END

Bucket = Annotated[int, Meta(ge=0, le=64)]
Latency = tuple[tuple[int, int], ...]  # bucket, records
_START = struct.Struct(f"{CHECKED_FROM}s{BLOCK_HEADER_BYTES - CHECKED_FROM}x")


def bucket_of(latency_ms: int) -> int:
    """Return the bucket of a latency in ms."""
    return latency_ms.bit_length() if latency_ms > 0 else 0


def latency_of(least_ms: Sequence[int], records: Sequence[int], now_ms: int) -> Latency:
    """Return the number of records by bucket, for blocks that pass a stage at `now_ms`."""
    if not least_ms:
        return ()
    first, last = bucket_of(now_ms - max(least_ms)), bucket_of(now_ms - min(least_ms))
    if first == last:
        return ((first, sum(records)),)
    found: dict[int, int] = {}
    for least, count in zip(least_ms, records, strict=True):
        bucket = bucket_of(now_ms - least)
        found[bucket] = found.get(bucket, 0) + count
    return tuple(sorted(found.items()))


assert sys.byteorder == "little", "memoryview.cast and array read words in the machine's order"
assert (array("I").itemsize, array("Q").itemsize) == (4, 8)


class HeaderTable:
    """The headers of checked blocks, in order; this class checks nothing."""

    __slots__ = ("_16", "_32", "_64", "_64_signed", "_greatest", "headers")

    def __init__(self, headers: Iterable[bytes | memoryview]) -> None:
        self.headers = b"".join(headers)
        assert len(self.headers) % BLOCK_HEADER_BYTES == 0, f"{len(self.headers)} bytes are no headers"
        view = memoryview(self.headers)
        self._16, self._32, self._64, self._64_signed = view.cast("H"), view.cast("I"), view.cast("Q"), view.cast("q")
        self._greatest = self._greatest_ms()

    def __len__(self) -> int:
        """How many blocks there are."""
        return len(self.headers) // BLOCK_HEADER_BYTES

    def __getitem__(self, number: int) -> BlockHeader:
        """Return one header as a value."""
        return parse_header(self.headers, number * BLOCK_HEADER_BYTES)

    def starts(self) -> Iterator[tuple[bytes]]:
        """Iterate over the first 8 bytes of each block, which its own checksum does not cover."""
        return _START.iter_unpack(self.headers)

    @property
    def checksums(self) -> list[int]:
        """The crc32c of each block from byte 8 to its end, as its producer stated it."""
        return self._32[1::18].tolist()

    @property
    def raw_bytes(self) -> int:
        """The raw lengths of all blocks together."""
        return sum(self._32[4::18].tolist())

    @property
    def records(self) -> int:
        """The records of all blocks together."""
        return sum(self._32[5::18].tolist())

    @property
    def least_ms(self) -> int:
        """The least timestamp of all."""
        return min(self._leasts())

    def latency(self, now_ms: int, skip: Sequence[int] = ()) -> Latency:
        """Return the ages of the records at `now_ms`, without those of the blocks with the numbers `skip`."""
        leasts, counts = self._leasts(), self._32[5::18].tolist()
        for number in reversed(skip):
            del leasts[number], counts[number]
        return latency_of(leasts, counts, now_ms)

    @property
    def greatest_ms(self) -> int:
        """The greatest timestamp of all, or an upper bound of it."""
        return max(self._greatest)

    @property
    def slots(self) -> tuple[int, int]:
        """The least and the greatest hash slot of all."""
        return min(self._16[30::36].tolist()), max(self._16[31::36].tolist())

    @property
    def tag_bits(self) -> int:
        """The tag bits of all."""
        return reduce(or_, self._64[8::9].tolist())

    def sequences(self) -> list[tuple[int, int, int]]:
        """Return producer id, first and next sequence of each block."""
        firsts, counts = self._64[5::9].tolist(), self._32[5::18].tolist()
        return list(zip(self._64[4::9].tolist(), firsts, map(add, firsts, counts), strict=True))

    def entries(self, lengths: Sequence[int], offset: int = 0) -> bytearray:
        """Return the index's block entries, packed, for blocks of these lengths that lie one after another."""
        packed = bytearray(len(self) * BLOCK_ENTRY_BYTES)
        entries = memoryview(packed)
        by_32, by_64 = entries.cast("I"), entries.cast("Q")
        offsets = array("Q", accumulate(lengths, initial=offset))
        by_64[0::8] = memoryview(offsets)[:-1]
        by_64[1::8] = self._64[4::9]  # producer id
        by_64[2::8] = self._64[5::9]  # first sequence
        by_64[3::8] = self._64[6::9]  # least timestamp
        entries.cast("q")[4::8] = memoryview(array("q", self._greatest))
        by_32[10::16] = memoryview(array("I", lengths))
        by_32[11::16] = self._32[5::18]  # count
        by_32[12::16] = self._32[1::18]  # checksum
        by_32[13::16] = self._32[15::18]  # both slots
        by_64[7::8] = self._64[8::9]  # tag bits
        return packed

    def _leasts(self) -> list[int]:
        return self._64_signed[6::9].tolist()

    def _greatest_ms(self) -> list[int]:
        """Return `BlockHeader.greatest_ms` of each block."""
        deltas = self._32[14::18].tolist()
        greatest = list(map(add, self._leasts(), deltas))
        if DELTA_SATURATED in deltas or max(greatest, default=0) >= TIME_MS_END:
            last = TIME_MS_END - 1
            greatest = [
                last if delta == DELTA_SATURATED else min(found, last)
                for found, delta in zip(greatest, deltas, strict=True)
            ]
        return greatest
