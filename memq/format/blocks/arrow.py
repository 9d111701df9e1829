"""Blocks as an Arrow table: the bytes of the values stay where they are, only offsets are made.

Theory: the payload has lengths, Arrow needs offsets. A cumulative sum in Arrow costs 2 ns per record and
4 µs per call; a list of Python integers costs 30 ns per record. So this module makes no Python object per record,
and few calls per block.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

try:
    import pyarrow as pa
    import pyarrow.compute as pc
except ModuleNotFoundError as error:
    raise ImportError("Arrow tables need pyarrow (pip install 'memq[arrow]')", name="pyarrow") from error

from memq.format.blocks import header
from memq.format.blocks.builder import NO_TAG, NULL_HEADER

if TYPE_CHECKING:
    from memq.format.blocks.columns import BlockReader

SCHEMA = pa.schema(
    [
        pa.field("value", pa.binary()),
        pa.field("key", pa.binary()),
        pa.field(
            "headers",
            pa.list_(pa.struct([pa.field("name", pa.string(), nullable=False), pa.field("value", pa.binary())])),
            nullable=False,
        ),
        pa.field("timestamp", pa.timestamp("ms", tz="UTC"), nullable=False),
        pa.field("tag", pa.string()),
    ]
)
PLACED_SCHEMA = SCHEMA.append(pa.field("partition", pa.int32(), nullable=False)).append(
    pa.field("offset", pa.int64(), nullable=False)
)

_HEADERS = SCHEMA.field("headers").type
_TIMESTAMP = SCHEMA.field("timestamp").type
_U32 = pa.uint32()
_BINARY = pa.binary()
_ZERO = pa.Array.from_buffers(_U32, 1, [None, pa.py_buffer(bytes(4))])  # pa.array would import pandas: 0.5 s
_SUMS, _SUM_OPTIONS = pc.get_function("cumulative_sum_checked"), pc.CumulativeOptions()


class Ends(NamedTuple):
    """Arrow's offsets of cells (one more than cells); the last one is the size of all cells."""

    offsets: pa.Array
    total: int


_NO_ENDS = Ends(_ZERO, 0)


class ArrowRows(NamedTuple):
    """Some records of one block, in columns. A column that no record has is None.

    `timestamps` is a number when all records have the same time.
    """

    records: int
    values: pa.Array
    keys: pa.Array | None
    headers: pa.Array | None
    timestamps: pa.Array | int
    tags: pa.Array | None


def block_rows(reader: BlockReader, low: int = 0, high: int | None = None, mask: bytes | None = None) -> ArrowRows:
    """Return the records `low` up to, not with, `high` of a block; they keep the block's bytes alive.

    With a `mask` only those whose byte in it is 1, copied. Else values and keys are not copied. Timestamps are copied
    when their address is not a multiple of 8, which some readers of Arrow require.
    Raises: CorruptDataError, UnsupportedFormatError.
    """
    columns = _Columns(reader)
    layout, flags, count = columns.layout, reader.header.flags, reader.count
    value_ends = columns.ends(columns.numbers(_U32, 0), "values")
    key_ends = columns.ends(columns.numbers(_U32, layout.key_lengths), "keys") if flags & header.KEY else _NO_ENDS
    header_ends, header_present = columns.header_ends() if layout.headers else (_NO_ENDS, None)
    key_at, header_at, value_at = reader.cell_offsets(key_ends.total, header_ends.total, value_ends.total)
    values = columns.cells(value_at, value_ends, layout.present_values, "values")
    keys = columns.cells(key_at, key_ends, layout.present_keys, "keys") if flags & header.KEY else None
    headers = None
    if flags & header.HEADERS:
        headers = columns.headers(columns.bytes_array(header_at, header_ends, header_present))
    times = columns.timestamps() if flags & header.TIMESTAMP else reader.header.base_ms
    rows = ArrowRows(count, values, keys, headers, times, columns.tags() if flags & header.TAG else None)
    end = count if high is None else high
    if mask is not None:
        chosen = pa.array(memoryview(mask)[low:end], pa.uint8()).cast(pa.bool_())
        kept = [
            column.slice(low, end - low).filter(chosen) if isinstance(column, pa.Array) else column
            for column in rows[1:]
        ]
        return ArrowRows(mask.count(1, low, end), *kept)
    if end - low == count:
        return rows
    cut = [column.slice(low, end - low) if isinstance(column, pa.Array) else column for column in rows[1:]]
    return ArrowRows(end - low, *cut)


def placed(found: pa.Table, partition: int, offsets: Iterable[int]) -> pa.Table:
    """Return a table with the columns `partition` and `offset`; `offsets` has one for each row."""
    columns = (array("i", [partition]) * found.num_rows, array("q", offsets))
    for field, column in zip(list(PLACED_SCHEMA)[-2:], columns, strict=True):
        values = pa.Array.from_buffers(field.type, len(column), [None, pa.py_buffer(column)])
        found = found.append_column(field, values)
    return found


def table(blocks: Sequence[ArrowRows]) -> pa.Table:
    """Return the records of blocks that follow on each other as one table of `SCHEMA`.

    Values have a chunk per block. Adjacent blocks that lack a column share one absent chunk: a chunk for each block
    was half of the cost.
    """
    counts = [rows.records for rows in blocks]
    columns = [
        [rows.values for rows in blocks],
        _filled([rows.keys for rows in blocks], counts, 0),
        _filled([rows.headers for rows in blocks], counts, 1),
        _filled_times([rows.timestamps for rows in blocks], counts),
        _filled([rows.tags for rows in blocks], counts, 2),
    ]
    chunked = [pa.chunked_array(chunks, field.type) for chunks, field in zip(columns, SCHEMA, strict=True)]
    return pa.Table.from_arrays(chunked, schema=SCHEMA)


def _filled(chunks: Sequence[pa.Array | None], counts: Sequence[int], kind: int) -> list[pa.Array]:
    """Return the chunks of a column, with an absent chunk of `kind` for each run that is None."""
    found: list[pa.Array] = []
    missing = 0
    for chunk, count in zip(chunks, counts, strict=True):
        if chunk is None:
            missing += count
            continue
        if missing:
            found.append(_absent(missing, kind))
            missing = 0
        found.append(chunk)
    if missing:
        found.append(_absent(missing, kind))
    return found


def _filled_times(chunks: Sequence[pa.Array | int], counts: Sequence[int]) -> list[pa.Array]:
    """Return the chunks of the timestamps, with one array in place of each run of numbers."""
    found: list[pa.Array] = []
    constant: list[bytes] = []
    for chunk, count in zip(chunks, counts, strict=True):
        if isinstance(chunk, int):
            constant.append(struct.pack("=q", chunk) * count)
            continue
        if constant:
            found.append(_times(constant))
            constant = []
        found.append(chunk)
    if constant:
        found.append(_times(constant))
    return found


def _times(parts: Sequence[bytes]) -> pa.Array:
    data = b"".join(parts)
    return pa.Array.from_buffers(_TIMESTAMP, len(data) // 8, [None, pa.py_buffer(data)])


def _absent(count: int, kind: int) -> pa.Array:
    """Return a column that no record has: of keys (0), headers (1) or tags (2)."""
    return _absent_columns(count.bit_length())[kind].slice(0, count)


@lru_cache(maxsize=4)
def _absent_columns(bits: int) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Return absent keys, headers and tags of 2^`bits` records; batches share them."""
    count = 1 << bits
    ends = pa.py_buffer(bytes(4 * count + 4))
    headers = pa.Array.from_buffers(_HEADERS, count, [None, ends], children=[pa.array([], _HEADERS.value_type)])
    return pa.nulls(count, _BINARY), headers, pa.nulls(count, pa.string())


class _Columns:
    """The columns of one block as Arrow arrays over its raw bytes."""

    __slots__ = ("buffer", "layout", "reader")

    def __init__(self, reader: BlockReader) -> None:
        self.reader = reader
        self.layout = reader.layout()
        self.buffer = pa.py_buffer(reader.raw())

    def numbers(self, kind: pa.DataType, at: int, count: int | None = None) -> pa.Array:
        """Return a column of numbers."""
        count = self.reader.count if count is None else count
        return pa.Array.from_buffers(kind, count, [None, self.buffer.slice(at, count * kind.bit_width // 8)])

    def ends(self, lengths: pa.Array, what: str) -> Ends:
        """Return the offsets of cells that have these lengths."""
        try:
            offsets = _SUMS.call([pa.concat_arrays([_ZERO, lengths])], _SUM_OPTIONS)
        except pa.ArrowInvalid as error:
            raise self.reader.damage(f"lengths of {what} add up to 2^32 or more") from error
        return Ends(offsets, offsets[len(lengths)].as_py())

    def cells(self, at: int, ends: Ends, present_at: int, what: str) -> pa.Array:
        """Return values or keys; `present_at` is the offset of their bitmap, 0 when none is null."""
        if not present_at:
            return self.bytes_array(at, ends, None)
        self.reader.present(present_at, pc.pairwise_diff(ends.offsets)[1:].to_pylist(), what)
        return self.bytes_array(at, ends, self.buffer.slice(present_at, (self.reader.count + 7) // 8))

    def bytes_array(self, at: int, ends: Ends, present: pa.Buffer | None) -> pa.Array:
        """Return an array of bytes that lie one after another from `at` on."""
        offsets, total = ends
        buffers = [present, offsets.buffers()[1], self.buffer.slice(at, total)]
        return pa.Array.from_buffers(_BINARY, len(offsets) - 1, buffers)

    def timestamps(self) -> pa.Array:
        """Return the column of timestamps."""
        self.reader.check_timestamps()
        count = self.reader.count
        column = self.buffer.slice(self.layout.timestamps, 8 * count)
        if column.address % 8:
            column = pa.py_buffer(column.to_pybytes())
        return pa.Array.from_buffers(_TIMESTAMP, count, [None, column])

    def header_ends(self) -> tuple[Ends, pa.Buffer]:
        """Return the offsets of the header values, and the bitmap of those that are not null."""
        lengths = self.numbers(_U32, self.layout.header_lengths, self.layout.headers)
        null = pc.equal(lengths, pa.scalar(NULL_HEADER, _U32))
        ends = self.ends(pc.if_else(null, pa.scalar(0, _U32), lengths), "headers")
        return ends, pc.invert(null).buffers()[1]

    def headers(self, values: pa.Array) -> pa.Array:
        """Return the list of headers of each record; `values` are those of all records."""
        count, layout = self.reader.count, self.layout
        ends = self.ends(self.numbers(pa.uint16(), layout.header_counts).cast(_U32), "headers")
        if ends.total != layout.headers:
            raise self.reader.damage(f"records have {ends.total} headers, the block has {layout.headers}")
        names = self.named(self.numbers(pa.uint16(), layout.header_names, layout.headers), "header")
        pairs = pa.StructArray.from_arrays([names, values], fields=list(_HEADERS.value_type))
        return pa.Array.from_buffers(_HEADERS, count, [None, ends.offsets.buffers()[1]], children=[pairs])

    def tags(self) -> pa.Array:
        """Return the tags."""
        ids = self.numbers(pa.uint16(), self.layout.tags)
        return self.named(pc.if_else(pc.equal(ids, pa.scalar(NO_TAG, pa.uint16())), None, ids), "tag")

    def named(self, ids: pa.Array, what: str) -> pa.Array:
        """Return the names of ids; a null id stays null."""
        greatest = pc.max(ids).as_py()
        if greatest is not None and greatest >= len(self.layout.names):
            raise self.reader.damage(f"{what} has name {greatest} of {len(self.layout.names)}")
        return pa.array(self.layout.names, pa.string()).take(ids)
