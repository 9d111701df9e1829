"""The only builder of blocks: takes records, returns one sealed block as bytes. Pure.

Producer, bulk writers, import and staged objects all use it. No other code knows the layout of unsealed records, except
`memq.kernel.rows`, its compiled classes, and `send`, which adds rows by the rule of that module.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from awscrt.checksums import crc32c

from memq.errors import InvalidRequestError, TooLargeError
from memq.format.blocks import header as block
from memq.format.blocks.codec import compress
from memq.format.blocks.header import BlockHeader, tag_bit
from memq.kernel.rows import KEY_COST, KEYED, MIXED, ONCE_COST, PLAIN, TIMED, TIMESTAMP_COST, VALUE_COST, Rows
from memq.limits import (
    BLOCK_HEADER_BYTES,
    BLOCK_RAW_BYTES_MAX,
    BLOCK_RECORDS_MAX,
    FORMAT_VERSION,
    HEADERS_PER_RECORD_MAX,
    NAME_BYTES_MAX,
    NAMES_MAX,
    SLOTS,
    TIME_MS_END,
)

Headers = Sequence[tuple[str, bytes | None]]

NO_TAG = 0xFFFF
NULL_HEADER = 0xFFFF_FFFF
# Bytes of raw per record and column that rows do not have.
_HEADERS_COST, _TAG_COST = 2, 2
_HEADER_COST = 6  # per header: length and name


@dataclass(frozen=True, slots=True)
class SealedBlock:
    """A block with the bytes of the wire and the object: `data` is header and payload in one piece.

    `memory_bytes` is the memory of `data` in bytes, at least its length.
    """

    header: BlockHeader
    data: bytes | bytearray | memoryview
    memory_bytes: int


class BlockBuilder:
    """Records that wait for their block: `append`, `append_many`, then `seal`. One builder, one block.

    The caller decides when to seal, by `raw_bytes`, `count` and the age, and chooses the partition. The caller
    also checks types: with one value that is not bytes, the seal of the whole block fails.

    Records are *rows* while all have the same shape, else *columns*. Threads may add rows without a lock, by the rule
    of `memq.kernel.rows`. A builder whose rows became columns stays closed: further records need the lock.
    `OpenBlock` may have compiled rows, to which `append_many` adds keys and timestamps, too.
    """

    __slots__ = ("_columns", "closed", "limit", "rows")

    rows_of_all_shapes = False  # whether `append_many` adds rows of each shape: in Python it would cost twice as much

    def __init__(self, limit: int = BLOCK_RAW_BYTES_MAX) -> None:
        self.limit = limit
        self.closed = False
        self.rows: Rows | None = None  # until the first record, and for columns
        self._columns: _OpenColumns | None = None

    @property
    def shape(self) -> int:
        """The shape of all records; MIXED without any, and for columns."""
        return MIXED if self.rows is None else self.rows.shape

    @property
    def count(self) -> int:
        """Number of records in the builder."""
        if self._columns is not None:
            return self._columns.count
        return 0 if self.rows is None else self.rows.count

    @property
    def raw_bytes(self) -> int:
        """Upper bound of the raw length."""
        if self._columns is not None:
            return self._columns.raw_bytes
        return ONCE_COST if self.rows is None else self.limit - self.rows.room

    def grow(self, limit: int) -> None:
        """Raise the raw size up to which `room` of the rows counts."""
        if self.rows is not None:
            self.rows.grow(limit)
        self.limit = limit

    def append(
        self,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers | None = None,
        timestamp_ms: int | None = None,
        tag: str | None = None,
    ) -> None:
        """Add one record. A record without timestamp gets the time of the seal.

        Raises: TooLargeError, InvalidRequestError; then the builder is unchanged.
        """
        if timestamp_ms is not None and not -TIME_MS_END < timestamp_ms < TIME_MS_END:
            _check_timestamps(timestamp_ms, timestamp_ms)
        if headers or tag is not None or (key is None and timestamp_ms is not None):
            shape = MIXED
        else:
            shape = PLAIN if key is None else KEYED if timestamp_ms is None else TIMED
        rows = self._rows_for(shape)
        if rows is not None:
            size = (0 if value is None else len(value)) + (0 if key is None else len(key))
            self._check_rows(rows, size, 1)
            if rows.append(value, key, timestamp_ms, size):
                return
        self._widened().append(value, key, headers, timestamp_ms, tag)

    def append_many(
        self,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None = None,
        timestamps_ms: Sequence[int] | None = None,
        tag: str | None = None,
        size: int | None = None,
    ) -> None:
        """Add many records; the columns have equal lengths, `tag` holds for all of them.

        `size` is the sum of the bytes of values and keys, if the caller knows it: measuring costs 30 ns per record.
        Raises: TooLargeError, InvalidRequestError; then the builder is unchanged.
        """
        count = len(values)
        if keys is not None:
            _check_length("keys", len(keys), count)
            if count and keys[0] is None and all(key is None for key in keys):
                keys = None  # so that the block is the same as with `append` for each record
        if timestamps_ms is not None and count:
            _check_length("timestamps", len(timestamps_ms), count)
            _check_timestamps(min(timestamps_ms), max(timestamps_ms))
        if size is None:
            size = sum(_lengths(values)) + (sum(_lengths(keys)) if keys is not None else 0)
        if tag is not None or (keys is None and timestamps_ms is not None):
            shape = MIXED
        else:
            shape = PLAIN if keys is None else KEYED if timestamps_ms is None else TIMED
        rows = self._rows_for(shape) if shape == PLAIN or self.rows_of_all_shapes else None
        if rows is not None:
            self._check_rows(rows, size, count)
            if rows.extend(values, keys, timestamps_ms, size):
                return
        self._widened().extend(values, keys, timestamps_ms, tag, size)

    def _rows_for(self, shape: int) -> Rows | None:
        """Return the rows for records of a shape, if they are added as rows; the first one decides."""
        if self.closed or self._columns is not None:
            return None
        if self.rows is None and shape != MIXED:
            self.rows = self._new_rows(shape)
        return self.rows if self.shape == shape else None

    def _new_rows(self, shape: int) -> Rows:
        return Rows(shape, self.limit)

    def _check_rows(self, rows: Rows, size: int, count: int) -> None:
        """Check that the format has room for `count` more rows with `size` bytes. Raises: TooLargeError."""
        _check_bounds(rows.count, count, self.limit - rows.room, size + rows.row_cost * count)

    def close(self) -> None:
        """End the adding of rows without the lock."""
        self.closed = True
        if self.rows is not None:
            self.rows.close()

    def _in_columns(self) -> _OpenColumns:
        """Return the records as columns; the rows stay as they are."""
        if self._columns is not None:
            return self._columns
        self.close()
        if self.rows is None:
            return _OpenColumns([], None, None, ONCE_COST)
        return _OpenColumns(*self.rows.columns(), self.raw_bytes)

    def _widened(self) -> _OpenColumns:
        """Return the columns to which all further records are added; the caller holds the lock."""
        if self._columns is None:
            self._columns = self._in_columns()
            self.rows = None  # a thread that adds a row late still has them
        return self._columns

    def seal(
        self,
        *,
        producer_id: int,
        first_sequence: int,
        scope: int,
        now_ms: int,
        codec: str = "zstd",
        slot_range: tuple[int, int] = (0, SLOTS - 1),
        producer_epoch: int = 0,
    ) -> SealedBlock:
        """Return the block. `now_ms` is the timestamp of the records that have none.

        Rows in Python and columns may be sealed again; compiled rows are empty after their seal.

        `slot_range` (first and last) must include the slots of all keys. It is the partition's range, or all slots
        when the caller chose the partition itself. A block with a null key, or without keys, gets 0 to 65535.
        """
        if self._columns is None and self.rows is not None:
            self.close()
            found = self.rows.seal(
                block.CODECS[codec], producer_id, producer_epoch, first_sequence, scope, now_ms, slot_range
            )
            if found is not None:
                whole, memory_bytes = found
                return SealedBlock(block.parse_header(whole), memoryview(whole), memory_bytes)
        columns = self._in_columns()
        assert columns.values, "a block has at least one record"
        flags, base_ms, delta_ms, data = _join_columns(columns, now_ms)
        if flags & block.KEY == 0 or flags & block.NULL_KEYS:
            slot_range = (0, SLOTS - 1)
        raw = memoryview(data)[BLOCK_HEADER_BYTES:]
        codec_used, payload = compress(raw, block.CODECS[codec])
        fields = (
            *(codec_used, flags, len(payload), len(raw), columns.count, producer_epoch, scope),
            *(producer_id, first_sequence, base_ms, delta_ms, slot_range[0], slot_range[1], columns.tag_bits),
        )
        tail = block.UNPREFIXED.pack(FORMAT_VERSION, *fields)
        checksum = crc32c(payload, crc32c(tail))
        head = b"".join((block.MAGIC, checksum.to_bytes(4, "little"), tail))
        header = block.parse_header(head)  # fails for a block that a reader would refuse
        if payload is not raw:
            return SealedBlock(header, head + payload, len(head) + len(payload))
        data[:BLOCK_HEADER_BYTES] = head
        return SealedBlock(header, data, len(data))


class _OpenColumns:
    """Records in columns, for records of different shapes and for the seal.

    `keys`, `timestamps`, `header_counts` and `tags` are None until a record has one, and from then on exactly as long
    as `values`.
    """

    __slots__ = (
        "_ids",
        "_tag_ids",
        "header_counts",
        "header_names",
        "header_values",
        "keys",
        "names",
        "raw_bytes",
        "row_cost",
        "tag_bits",
        "tags",
        "timestamps",
        "values",
    )

    def __init__(
        self,
        values: list[bytes | None],
        keys: list[bytes | None] | None,
        timestamps: list[int | None] | None,
        raw_bytes: int,
    ) -> None:
        self.values = values
        self.keys = keys
        self.timestamps = timestamps
        self.header_counts: list[int] | None = None
        self.header_names: list[int] = []
        self.header_values: list[bytes | None] = []
        self.tags: list[int] | None = None
        self.tag_bits = 0
        self.names: list[bytes] = []  # the block's dictionary: names of headers and tags, UTF-8, by id
        self.raw_bytes = raw_bytes  # upper bound of the raw length; to measure the cells again costs 90 ns a record
        self.row_cost = VALUE_COST + (KEY_COST if keys is not None else 0)
        self.row_cost += TIMESTAMP_COST if timestamps is not None else 0
        self._ids: dict[str, int] = {}
        self._tag_ids: dict[str, int] = {}

    @property
    def count(self) -> int:
        """Number of records in the builder."""
        return len(self.values)

    def append(
        self,
        value: bytes | None,
        key: bytes | None,
        headers: Headers | None,
        timestamp_ms: int | None,
        tag: str | None,
    ) -> None:
        """See `BlockBuilder.append`."""
        size = 0 if value is None else len(value)
        if key is not None:
            size += len(key)
        if (
            (key is not None and self.keys is None)
            or (timestamp_ms is not None and self.timestamps is None)
            or (tag is not None and tag not in self._tag_ids)
            or (headers and self.header_counts is None)
        ):
            self._open(key is not None, timestamp_ms is not None, bool(headers), tag)
        if headers:
            self._append_headers(headers, size)
        else:
            self._claim(size, 1)
            if self.header_counts is not None:
                self.header_counts.append(0)
        self.values.append(value)
        if self.keys is not None:
            self.keys.append(key)
        if self.timestamps is not None:
            self.timestamps.append(timestamp_ms)
        if self.tags is not None:
            self.tags.append(NO_TAG if tag is None else self._tag_ids[tag])

    def extend(
        self,
        values: Sequence[bytes | None],
        keys: Sequence[bytes | None] | None,
        timestamps_ms: Sequence[int] | None,
        tag: str | None,
        size: int,
    ) -> None:
        """See `BlockBuilder.append_many`."""
        count = len(values)
        self._open(keys is not None, timestamps_ms is not None, False, tag)
        self._claim(size, count)
        self.values.extend(values)
        if self.keys is not None:
            self.keys.extend(keys if keys is not None else repeat(None, count))
        if self.timestamps is not None:
            self.timestamps.extend(timestamps_ms if timestamps_ms is not None else repeat(None, count))
        if self.header_counts is not None:
            self.header_counts.extend(repeat(0, count))
        if self.tags is not None:
            self.tags.extend(repeat(NO_TAG if tag is None else self._tag_ids[tag], count))

    def _append_headers(self, headers: Headers, size: int) -> None:
        """Take room for one record of `size` bytes and its headers, and add the headers."""
        if len(headers) > HEADERS_PER_RECORD_MAX:
            raise TooLargeError(f"record has {len(headers)} headers, {HEADERS_PER_RECORD_MAX} are allowed")
        ids = self._ids
        names: list[int] = []
        values: list[bytes | None] = []
        for name, value in headers:
            number = ids.get(name)
            names.append(number if number is not None else self._id(name))
            values.append(value)
            if value is not None:
                size += len(value)
        self._claim(size + _HEADER_COST * len(names), 1)
        assert self.header_counts is not None, "opened by append"
        self.header_counts.append(len(names))
        self.header_names += names
        self.header_values += values

    def _open(self, key: bool, timestamp: bool, headers: bool, tag: str | None) -> None:
        """Add the columns that a record needs, filled with absent cells for earlier records."""
        count = len(self.values)
        if key and self.keys is None:
            self._open_column(KEY_COST)
            self.keys = [None] * count
        if timestamp and self.timestamps is None:
            self._open_column(TIMESTAMP_COST)
            self.timestamps = [None] * count
        if headers and self.header_counts is None:
            self._open_column(_HEADERS_COST)
            self.header_counts = [0] * count
        if tag is not None and tag not in self._tag_ids:
            number = self._id(tag)
            if self.tags is None:
                self._open_column(_TAG_COST)
                self.tags = [NO_TAG] * count
            self._tag_ids[tag] = number
            self.tag_bits |= tag_bit(tag)

    def _open_column(self, cost: int) -> None:
        """Take room for a new column of `cost` bytes for each record. Raises: TooLargeError."""
        self._check_room(cost * len(self.values))
        self.raw_bytes += cost * len(self.values)
        self.row_cost += cost

    def _id(self, name: str) -> int:
        """Return the index of a name in the block's dictionary; add the name if it is new."""
        known = self._ids.get(name)
        if known is not None:
            return known
        try:
            encoded = name.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"name {name[:60]!a} is not valid Unicode") from error
        if len(encoded) > NAME_BYTES_MAX:
            raise TooLargeError(f"name has {len(encoded)} bytes, {NAME_BYTES_MAX} are allowed")
        if len(self.names) >= NAMES_MAX:
            raise TooLargeError(f"block has {NAMES_MAX} names of headers and tags, more are not allowed")
        self._check_room(2 + len(encoded))
        self.raw_bytes += 2 + len(encoded)
        self._ids[name] = len(self.names)
        self.names.append(encoded)
        return len(self.names) - 1

    def _claim(self, size: int, count: int) -> None:
        """Take room for `count` records of `size` bytes. Raises: TooLargeError."""
        size += self.row_cost * count
        _check_bounds(len(self.values), count, self.raw_bytes, size)
        self.raw_bytes += size

    def _check_room(self, size: int) -> None:
        _check_bounds(0, 0, self.raw_bytes, size)


def _check_bounds(records: int, more: int, raw_bytes: int, size: int) -> None:
    """Refuse records for which the format has no room. Raises: TooLargeError."""
    if records + more > BLOCK_RECORDS_MAX:
        raise TooLargeError(f"block has {records} + {more} records, {BLOCK_RECORDS_MAX} are allowed")
    if raw_bytes + size > BLOCK_RAW_BYTES_MAX:
        raise TooLargeError(f"block has {raw_bytes} + {size} bytes, {BLOCK_RAW_BYTES_MAX} are allowed")


def _lengths(cells: Iterable[bytes | None]) -> Sequence[int]:
    """Return the length of each cell; a null cell has 0."""
    cells = list(cells)
    try:
        return list(map(len, cells))  # type: ignore[arg-type]  # None raises, which is the quick way to find one
    except TypeError:
        return [0 if cell is None else len(cell) for cell in cells]


def _check_length(what: str, found: int, count: int) -> None:
    if found != count:
        raise InvalidRequestError(f"{found} {what} for {count} values")


def _check_timestamps(least: int, greatest: int) -> None:
    if not -TIME_MS_END < least <= greatest < TIME_MS_END:
        wrong = least if least <= -TIME_MS_END else greatest
        raise InvalidRequestError(f"timestamp {wrong} ms is outside -2^53 to 2^53")


def _join_columns(columns: _OpenColumns, now_ms: int) -> tuple[int, int, int, bytearray]:
    """Return flags, base, max delta and the raw bytes: the columns in their order, values last.

    The bytes begin with space for the header: a block without a codec is this bytearray itself.
    """
    flags = 0
    base_ms, delta_ms = now_ms, 0
    count = len(columns.values)
    lengths, present_values, values = _cells(columns.values)
    parts = [lengths]
    present_keys: bytes = b""
    keys: Sequence[bytes] = ()
    if columns.keys is not None:
        flags |= block.KEY
        lengths, present_keys, keys = _cells(columns.keys)
        parts.append(lengths)
    if columns.timestamps is not None:
        times = [now_ms if time is None else time for time in columns.timestamps]
        base_ms = min(times)
        delta_ms = min(max(times) - base_ms, block.DELTA_SATURATED)
        if delta_ms:  # without the column, `base_ms` is the time of every record
            flags |= block.TIMESTAMP
            parts.append(struct.pack(f"<{count}q", *times))
    if columns.header_counts is not None:
        flags |= block.HEADERS
        parts.append(_join_headers(columns, columns.header_counts))
    if columns.tags is not None:
        flags |= block.TAG
        parts.append(struct.pack(f"<{count}H", *columns.tags))
    if present_keys or present_values:
        flags |= (block.NULL_KEYS if present_keys else 0) | (block.NULL_VALUES if present_values else 0)
        parts += [present_values, present_keys]
    if flags & (block.HEADERS | block.TAG):
        parts.append(struct.pack("<H", len(columns.names)))
        for name in columns.names:
            parts += [struct.pack("<H", len(name)), name]
    header_values = [value for value in columns.header_values if value is not None]
    room = bytes(BLOCK_HEADER_BYTES)
    return flags, base_ms, delta_ms, bytearray().join([room, *parts, *keys, *header_values, *values])


def _cells(column: list[bytes | None]) -> tuple[bytes, bytes, Sequence[bytes]]:
    """Return the column of lengths, the bitmap of present cells (empty if all), and these cells."""
    try:
        return struct.pack(f"<{len(column)}I", *map(len, column)), b"", column  # type: ignore[arg-type, return-value]
    except TypeError:
        present = "".join("0" if cell is None else "1" for cell in reversed(column))
        bitmap = int(present, 2).to_bytes((len(column) + 7) // 8, "little")
        return struct.pack(f"<{len(column)}I", *_lengths(column)), bitmap, [c for c in column if c is not None]


def _join_headers(columns: _OpenColumns, counts: list[int]) -> bytes:
    """Return the columns of the headers: how many, lengths, names, and how many each record has."""
    values = columns.header_values
    lengths = [NULL_HEADER if value is None else len(value) for value in values]
    total = len(lengths)
    return struct.pack(f"<I{total}I{total}H{len(counts)}H", total, *lengths, *columns.header_names, *counts)
