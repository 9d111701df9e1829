"""Reads a checked block as columns of records; each column is created on demand."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, compress, pairwise, repeat
from typing import NamedTuple

from memq.errors import CorruptDataError, KeyMissingError, UnsupportedFormatError
from memq.format.blocks import header as block
from memq.format.blocks.builder import NO_TAG, NULL_HEADER
from memq.format.blocks.codec import decompress
from memq.format.blocks.envelope import Envelope, parse_envelope
from memq.format.blocks.header import DELTA_SATURATED, BlockHeader, Buffer, check_block, tag_bit
from memq.limits import BLOCK_HEADER_BYTES, SLOTS, TIME_MS_END
from memq.topic import slot_of_key

RecordHeaders = tuple[tuple[str, bytes | None], ...]
RecordTuple = tuple[bytes | None, bytes | None, RecordHeaders, int, str | None]

_REQUIRED_EXTENSION = 0x8000
_BELOW_END = bytes(range(TIME_MS_END >> 48))  # the seventh byte of a time from 1970 on that is below the end
_BITS = tuple(tuple(byte >> bit & 1 for bit in range(8)) for byte in range(256))


class Layout(NamedTuple):
    """Byte offsets of a block's columns in its raw bytes; 0 for a missing column."""

    key_lengths: int
    timestamps: int
    headers: int  # how many headers all records have together
    header_lengths: int
    header_names: int
    header_counts: int
    tags: int
    present_values: int
    present_keys: int
    names: tuple[str, ...]
    cells: int  # the bytes of keys, header values and values start here and fill the rest


def parse_layout(raw: memoryview, header: BlockHeader) -> Layout:
    """Find the columns; check the size of each against the rest of `raw`.

    Raises: CorruptDataError; UnsupportedFormatError for an extension that must be understood.
    """
    cursor = _Cursor(raw)
    count, flags = header.count, header.flags
    bitmap = (count + 7) // 8
    cursor.take(4 * count, "value lengths")
    key_lengths = cursor.take(4 * count, "key lengths") if flags & block.KEY else 0
    timestamps = cursor.take(8 * count, "timestamps") if flags & block.TIMESTAMP else 0
    headers = header_lengths = header_names = header_counts = 0
    if flags & block.HEADERS:
        headers = cursor.number(4, "header count")
        header_lengths = cursor.take(4 * headers, "header lengths")
        header_names = cursor.take(2 * headers, "header names")
        header_counts = cursor.take(2 * count, "header counts")
    tags = cursor.take(2 * count, "tags") if flags & block.TAG else 0
    present_values = cursor.take(bitmap, "nulls of values") if flags & block.NULL_VALUES else 0
    present_keys = cursor.take(bitmap, "nulls of keys") if flags & block.NULL_KEYS else 0
    names = _parse_names(cursor) if flags & (block.HEADERS | block.TAG) else ()
    if flags & block.EXTENSIONS:
        _pass_extensions(cursor)
    return Layout(
        *(key_lengths, timestamps, headers, header_lengths, header_names, header_counts),
        *(tags, present_values, present_keys, names, cursor.at),
    )


class _Cursor:
    """An offset in the raw bytes that only moves forward, and never past the end."""

    __slots__ = ("at", "raw")

    def __init__(self, raw: memoryview) -> None:
        self.raw = raw
        self.at = 0

    def take(self, size: int, what: str) -> int:
        """Pass `size` bytes and return where they start. Raises: CorruptDataError if the block is shorter."""
        at = self.at
        if size > len(self.raw) - at:
            raise CorruptDataError(f"{what} need {size} bytes at {at}, the block has {len(self.raw)}")
        self.at += size
        return at

    def number(self, size: int, what: str) -> int:
        """Read an unsigned integer of `size` bytes."""
        at = self.take(size, what)
        return int.from_bytes(self.raw[at : at + size], "little")


def _parse_names(cursor: _Cursor) -> tuple[str, ...]:
    """Read the dictionary: strict UTF-8, no name twice."""
    names: dict[str, None] = {}
    for _ in range(cursor.number(2, "dictionary")):
        size = cursor.number(2, "name length")
        at = cursor.take(size, "name")
        try:
            name = str(cursor.raw[at : at + size], "utf-8")
        except UnicodeDecodeError as error:
            raise CorruptDataError(f"name at {at} is not UTF-8: {error.reason}") from error
        if name in names:
            raise CorruptDataError(f"name {name[:60]!a} is twice in the dictionary")
        names[name] = None
    return tuple(names)


def _pass_extensions(cursor: _Cursor) -> None:
    """Skip extensions, none of which this version knows. Raises: as `parse_layout`."""
    size = cursor.number(4, "extensions")
    at = cursor.take(size, "extensions")
    inside = _Cursor(cursor.raw[at : at + size])
    while inside.at < size:
        extension = inside.number(2, "extension id")
        inside.take(inside.number(4, "extension length"), "extension")
        if extension >= _REQUIRED_EXTENSION:
            raise UnsupportedFormatError(f"block has extension {extension:#x}, which this version does not know")


class Cells(NamedTuple):
    """Lengths of the cells of each variable column, and where its bytes start; null cells have length 0."""

    key_lengths: Sequence[int]
    key_at: int
    header_lengths: Sequence[int]
    header_at: int
    value_lengths: Sequence[int]
    value_at: int


class BlockReader:
    """The records of one checked block. The first request for a column unpacks the payload.

    Every method raises CorruptDataError when the payload does not match the header, and
    UnsupportedFormatError when it has an extension that this version must not skip.
    """

    __slots__ = ("_buffer", "_cells", "_layout", "_raw", "header")

    def __init__(self, buffer: Buffer, header: BlockHeader | None = None) -> None:
        self.header = header if header is not None else block.parse_header(buffer)
        self._buffer = memoryview(buffer)[: self.header.length]
        self._raw: memoryview | None = None
        self._layout: Layout | None = None
        self._cells: Cells | None = None

    @property
    def count(self) -> int:
        """How many records the block has."""
        return self.header.count

    def raw(self) -> memoryview:
        """Return the columns' bytes, unpacked."""
        if self._raw is None:
            header = self.header
            payload = self._buffer[BLOCK_HEADER_BYTES:]
            if header.codec == block.ENVELOPE:
                raise KeyMissingError(f"{header.describe()} is encrypted with the key {self.envelope().key_id[:60]!a}")
            try:
                self._raw = memoryview(decompress(payload, header.codec, header.raw_length))
            except CorruptDataError as error:
                raise self.damage(error) from error
        return self._raw

    def envelope(self) -> Envelope:
        """Return the envelope of an encrypted block."""
        return parse_envelope(self._buffer, self.header)

    def layout(self) -> Layout:
        """Return the offsets of the columns in `raw()`."""
        if self._layout is None:
            try:
                self._layout = parse_layout(self.raw(), self.header)
            except CorruptDataError as error:
                raise self.damage(error) from error
        return self._layout

    def damage(self, cause: object) -> CorruptDataError:
        """Return the error that names this block and the cause of its damage."""
        return CorruptDataError(f"{self.header.describe()}: {cause}")

    def cells(self) -> Cells:
        """Return the offsets of the cells of keys, headers and values, which fill the rest of the block."""
        if self._cells is None:
            layout = self.layout()
            keys = self._numbers("I", layout.key_lengths) if layout.key_lengths else ()
            headers = self._numbers("I", layout.header_lengths, layout.headers) if layout.headers else ()
            if NULL_HEADER in headers:
                headers = tuple(0 if length == NULL_HEADER else length for length in headers)
            values = self._numbers("I", 0)
            key_at, header_at, value_at = self.cell_offsets(sum(keys), sum(headers), sum(values))
            self._cells = Cells(keys, key_at, headers, header_at, values, value_at)
        return self._cells

    def cell_offsets(self, keys: int, headers: int, values: int) -> tuple[int, int, int]:
        """Return the offsets of keys, header values and values; the arguments are their sizes in bytes."""
        at = self.layout().cells
        if at + keys + headers + values != self.header.raw_length:
            raise self.damage(
                f"{at} bytes of columns, {keys} of keys, {headers} of headers and {values} of values "
                f"do not fill {self.header.raw_length}"
            )
        return at, at + keys, at + keys + headers

    def _numbers(self, code: str, at: int, count: int | None = None) -> tuple[int, ...]:
        """Return a column of integers."""
        return struct.unpack_from(f"<{self.count if count is None else count}{code}", self.raw(), at)

    def _read(self, at: int, lengths: Sequence[int]) -> list[bytes]:
        """Return cells that lie one after another from `at` on.

        `BytesIO.read` makes the bytes objects in C, without a slice object or two offsets per cell. It takes 34 ns
        per cell of 100 B; slicing takes 107 ns.
        """
        raw = self.raw()
        whole = raw.obj
        if type(whole) is bytes and len(whole) == len(raw):
            stream = io.BytesIO(whole)  # shares the bytes: a copy of 256 KiB costs more in page faults than all reads
            stream.seek(at)
        else:
            stream = io.BytesIO(raw[at:])
        return list(map(stream.read, lengths))

    def present(self, at: int, lengths: Sequence[int], what: str) -> list[int]:
        """Return 1 for each present cell and 0 for each null, from the bitmap at `at`."""
        count = self.count
        bits = list(chain.from_iterable(map(_BITS.__getitem__, self.raw()[at : at + (count + 7) // 8])))
        if any(bits[count:]):
            raise self.damage(f"unused bits are set in the nulls of {what}")
        if any(compress(lengths, (not bit for bit in bits[:count]))):
            raise self.damage(f"a null among the {what} has bytes")
        return bits[:count]

    def _with_nulls(self, cells: Sequence[bytes], at: int, lengths: Sequence[int], what: str) -> list[bytes | None]:
        """Replace the cells that are null in the bitmap at `at` by None."""
        return [cell if bit else None for cell, bit in zip(cells, self.present(at, lengths, what), strict=True)]

    def check_nulls(self) -> None:
        """Check the bitmaps of null keys and values; the cells are not read. Raises: CorruptDataError."""
        cells, layout = self.cells(), self.layout()
        if self.header.flags & block.NULL_VALUES:
            self.present(layout.present_values, cells.value_lengths, "values")
        if self.header.flags & block.KEY and self.header.flags & block.NULL_KEYS:
            self.present(layout.present_keys, cells.key_lengths, "keys")

    def values(self) -> list[bytes | None]:
        """Return the values."""
        cells, layout = self.cells(), self.layout()
        values = self._read(cells.value_at, cells.value_lengths)
        if self.header.flags & block.NULL_VALUES:
            return self._with_nulls(values, layout.present_values, cells.value_lengths, "values")
        return values  # type: ignore[return-value]  # list is invariant; this one has no other reference

    def memoryviews(self) -> list[memoryview | None]:
        """Return the values as views into the block: no byte is copied, and the block stays alive with them."""
        cells, layout, raw = self.cells(), self.layout(), self.raw()
        views = [raw[at:end] for at, end in pairwise(accumulate(cells.value_lengths, initial=cells.value_at))]
        if self.header.flags & block.NULL_VALUES:
            present = self.present(layout.present_values, cells.value_lengths, "values")
            return [view if bit else None for view, bit in zip(views, present, strict=True)]
        return views  # type: ignore[return-value]  # as in values()

    def keys(self) -> list[bytes | None]:
        """Return the keys, None for a record without."""
        if not self.header.flags & block.KEY:
            return [None] * self.count
        cells, layout = self.cells(), self.layout()
        keys = self._read(cells.key_at, cells.key_lengths)
        if self.header.flags & block.NULL_KEYS:
            return self._with_nulls(keys, layout.present_keys, cells.key_lengths, "keys")
        return keys  # type: ignore[return-value]  # as in values()

    def timestamps(self) -> list[int]:
        """Return the timestamps, Unix ms."""
        if not self.header.flags & block.TIMESTAMP:
            return [self.header.base_ms] * self.count
        self.check_timestamps()
        return list(self._numbers("q", self.layout().timestamps))

    def check_timestamps(self) -> None:
        """Check that the column of timestamps is within the bounds of a time.

        The comparison of two bytes of each time costs 2 ns per record, minimum and maximum 19 ns.
        """
        at = self.layout().timestamps
        column = bytes(self.raw()[at : at + 8 * self.count])
        if not column[7::8].strip(b"\0") and not column[6::8].translate(None, _BELOW_END):
            return
        times = self._numbers("q", at)
        if not -TIME_MS_END < min(times) <= max(times) < TIME_MS_END:
            raise self.damage(f"timestamps {min(times)} to {max(times)} are outside -2^53 to 2^53")

    def headers(self) -> list[RecordHeaders]:
        """Return the headers of each record, as pairs of name and value in the order they were given."""
        if not self.header.flags & block.HEADERS:
            return [()] * self.count
        cells, layout = self.cells(), self.layout()
        counts = self._numbers("H", layout.header_counts)
        if sum(counts) != layout.headers:
            raise self.damage(f"records have {sum(counts)} headers, the block has {layout.headers}")
        ids = self._numbers("H", layout.header_names, layout.headers)
        if ids and max(ids) >= len(layout.names):
            raise self.damage(f"header has name {max(ids)} of {len(layout.names)}")
        lengths = self._numbers("I", layout.header_lengths, layout.headers)
        read = self._read(cells.header_at, cells.header_lengths)
        values: Iterable[bytes | None] = read
        if NULL_HEADER in lengths:
            values = [None if length == NULL_HEADER else cell for cell, length in zip(read, lengths, strict=True)]
        pairs = tuple(zip(map(layout.names.__getitem__, ids), values, strict=True))
        return [pairs[at:end] for at, end in pairwise(accumulate(counts, initial=0))]

    def tags(self) -> list[str | None]:
        """Return the tags, None for a record without."""
        if not self.header.flags & block.TAG:
            return [None] * self.count
        layout = self.layout()
        names: dict[int, str | None] = {NO_TAG: None, **dict(enumerate(layout.names))}
        try:
            return list(map(names.__getitem__, self._numbers("H", layout.tags)))
        except KeyError as error:
            raise self.damage(f"tag has name {error.args[0]} of {len(layout.names)}") from error

    def records(self) -> Iterator[RecordTuple]:
        """Iterate over (value, key, headers, timestamp in ms, tag); all columns are read at the call."""
        flags = self.header.flags
        values = self.values()
        keys: Iterable[bytes | None] = self.keys() if flags & block.KEY else repeat(None)
        headers: Iterable[RecordHeaders] = self.headers() if flags & block.HEADERS else repeat(())
        times: Iterable[int] = self.timestamps() if flags & block.TIMESTAMP else repeat(self.header.base_ms)
        tags: Iterable[str | None] = self.tags() if flags & block.TAG else repeat(None)
        return zip(values, keys, headers, times, tags, strict=False)  # repeat() has no end


def open_block(buffer: Buffer) -> BlockReader:
    """Check that `buffer` is exactly one whole block, and return its reader.

    Raises: CorruptDataError, UnsupportedFormatError.
    """
    return BlockReader(buffer, check_block(buffer))


def verify_block(reader: BlockReader) -> None:
    """Read every column, and compare times, slots and tag bits with those of the header.

    Readers skip blocks by their headers, so too narrow a header hides records from them. Of an encrypted block, the
    envelope is checked: its columns can't be read here.
    Raises: CorruptDataError, UnsupportedFormatError.
    """
    header = reader.header
    if header.codec == block.ENVELOPE:
        reader.envelope()
        return
    times: list[int] = []
    keys: list[bytes | None] = []
    tags: dict[str | None, None] = {}
    for _, key, _, time, tag in reader.records():
        times.append(time)
        keys.append(key)
        tags[tag] = None
    _verify_times(header, min(times), max(times))
    _verify_slots(header, keys)
    for tag in tags:
        if tag is not None and not header.tag_bits & tag_bit(tag):
            raise CorruptDataError(f"{header.describe()}: tag {tag[:60]!a} is not in tag bits {header.tag_bits:#x}")


def _verify_times(header: BlockHeader, least: int, greatest: int) -> None:
    saturated = header.max_delta_ms == DELTA_SATURATED and greatest - least >= DELTA_SATURATED
    if least != header.base_ms or not (saturated or greatest - least == header.max_delta_ms):
        raise CorruptDataError(
            f"{header.describe()}: timestamps are {least} to {greatest}, "
            f"the header says {header.base_ms} + {header.max_delta_ms}"
        )


def _verify_slots(header: BlockHeader, keys: list[bytes | None]) -> None:
    slots = [(0, SLOTS - 1) if key is None else (slot_of_key(key),) for key in keys]
    least, greatest = min(slot[0] for slot in slots), max(slot[-1] for slot in slots)
    if least < header.slot_first or greatest > header.slot_last:
        raise CorruptDataError(
            f"{header.describe()}: keys have slots {least} to {greatest}, "
            f"the header says {header.slot_first} to {header.slot_last}"
        )
