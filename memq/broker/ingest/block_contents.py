"""Checks the records in a block: lengths and counts of its columns, and `record_bytes_max`.

A block with a right checksum may have columns that no reader can read. To open every block would cost more CPU than all
other work on it. So the broker opens the first block of each stream, which finds a broken client at once, and each
block that is large enough to have a record above the bound.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import add
from typing import Any

from memq.errors import CorruptDataError, TooLargeError, UnsupportedFormatError
from memq.format.blocks.columns import BlockReader
from memq.format.blocks.envelope import parse_envelope
from memq.format.blocks.header import ENVELOPE, HEADERS, BlockHeader
from memq.topic import Topic

_RAW_LENGTH = struct.Struct("<I").unpack_from
_RAW_LENGTH_AT = 16
_SMALL = 1 << 16
_FIRST_SEQUENCE = struct.Struct("<Q").unpack_from
_FIRST_SEQUENCE_AT = 40


def first_to_open(extents: Sequence[tuple[Any, int, int]], record_bytes_max: int) -> int | None:
    """Return the number of the first block that is larger than a record may be; None without one."""
    if not extents:
        return None
    view = extents[0][0].view  # a run lies in one slab
    if record_bytes_max >= _SMALL:  # two bytes of each block tell the small ones, at half the cost of the length
        third, fourth = _RAW_LENGTH_AT + 2, _RAW_LENGTH_AT + 3
        if not [1 for _, start, _ in extents if view[start + third] or view[start + fourth]]:
            return None
    for number, (_, start, _) in enumerate(extents):
        if _RAW_LENGTH(view, start + _RAW_LENGTH_AT)[0] > record_bytes_max:
            return number
    return None


def first_sequence_of(extent: tuple[Any, int, int]) -> int:
    """Return the first sequence of a sound block."""
    (first,) = _FIRST_SEQUENCE(extent[0].view, extent[1] + _FIRST_SEQUENCE_AT)
    return int(first)


def check_contents(block: memoryview, header: BlockHeader, topic: Topic) -> None:
    """Check that every column of a sound block can be read, and that no record is over the topic's bound.

    A block with an extension of a newer version passes: only a reader of that version can judge it. Of an encrypted
    block, the envelope is checked.
    Raises: CorruptDataError, TooLargeError.
    """
    bound = topic.settings.record_bytes_max
    try:
        if header.codec == ENVELOPE:
            parse_envelope(block, header)
            return
        largest = _largest_record(BlockReader(block, header))
    except UnsupportedFormatError:
        return
    except CorruptDataError as error:
        raise CorruptDataError(f"the checksum is right, but no reader can read the records: {error}") from error
    if largest > bound:
        raise TooLargeError(
            f"a record of {largest} bytes is over record_bytes_max = {bound} of '{topic.name}'",
            hint=f"make it smaller, or raise the bound: memq topic alter {topic.name} --set record_bytes_max=SIZE",
        )


def _largest_record(reader: BlockReader) -> int:
    """Return the size of the largest record, as producers measure it. Raises: CorruptDataError."""
    cells = reader.cells()
    reader.timestamps()
    reader.tags()
    reader.check_nulls()
    sizes: list[int] | Sequence[int] = cells.value_lengths
    if cells.key_lengths:
        sizes = list(map(add, sizes, cells.key_lengths))
    if reader.header.flags & HEADERS:
        sizes = [
            size + sum(len(name) + len(value or b"") for name, value in pairs)
            for size, pairs in zip(sizes, reader.headers(), strict=True)
        ]
    return max(sizes)
