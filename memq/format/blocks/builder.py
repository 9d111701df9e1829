"""The open block of a producer: plain column lists that are sealed into one block of bytes."""

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
# Bytes of raw per record and column. A value has its length and, rounded up, its share of two null bitmaps.
_VALUE_COST, _KEY_COST, _TIMESTAMP_COST, _HEADERS_COST, _TAG_COST = 5, 4, 8, 2, 2
_HEADER_COST = 6  # per header: length and name
_ONCE_COST = 16  # h, the dictionary's count, the roundings of two bitmaps


@dataclass(frozen=True, slots=True)
class SealedBlock:
    """A block as it goes over the wire and into the object: `data` is header and payload in one piece."""

    header: BlockHeader
    data: bytes | bytearray


class BlockBuilder:
    """Columns of the records that wait for their block. A builder makes one block.

    `values` is always there; `keys`, `timestamps`, `header_counts` and `tags` are None until a record has
    one, and from then on exactly as long as `values`. Types are the caller's to check: what is not bytes
    fails at the seal, for the whole block.
    """

    __slots__ = (
        "_ids",
        "_names",
        "_tag_bits",
        "_tag_ids",
        "header_counts",
        "header_names",
        "header_values",
        "keys",
        "plain",
        "raw_bytes",
        "row_cost",
        "tags",
        "timestamps",
        "values",
    )

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self.keys: list[bytes | None] | None = None
        self.timestamps: list[int | None] | None = None
        self.header_counts: list[int] | None = None
        self.header_names: list[int] = []
        self.header_values: list[bytes | None] = []
        self.tags: list[int] | None = None
        self.plain = True  # there is no column but values
        self.raw_bytes = _ONCE_COST  # upper bound of the raw length, for the decision to seal
        self.row_cost = _VALUE_COST  # what each further record adds beside its bytes
        self._ids: dict[str, int] = {}  # names of headers and tags, by their place in the dictionary
        self._names: list[bytes] = []
        self._tag_ids: dict[str, int] = {}
        self._tag_bits = 0

    @property
    def count(self) -> int:
        """How many records wait."""
        return len(self.values)

    def append(
        self,
        value: bytes | None,
        key: bytes | None = None,
        headers: Headers | None = None,
        timestamp_ms: int | None = None,
        tag: str | None = None,
    ) -> None:
        """Add one record. A record without timestamp gets the time of the seal.

        Raises: TooLargeError, InvalidRequestError; the records are then as they were.
        """
        size = 0 if value is None else len(value)
        if self.plain and key is None and timestamp_ms is None and tag is None and not headers:
            self._claim(size, 1)
            self.values.append(value)
            return
        if key is not None:
            size += len(key)
        if timestamp_ms is not None and not -TIME_MS_END < timestamp_ms < TIME_MS_END:
            _check_timestamps(timestamp_ms, timestamp_ms)
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
        keys: Sequence[bytes | None] | None = None,
        timestamps_ms: Sequence[int] | None = None,
        tag: str | None = None,
    ) -> None:
        """Add many records; the columns have equal lengths, `tag` holds for all of them.

        Raises: TooLargeError, InvalidRequestError; the records are then as they were.
        """
        count = len(values)
        size = sum(_lengths(values))
        if keys is not None:
            _check_length("keys", len(keys), count)
            size += sum(_lengths(keys))
        if timestamps_ms is not None and count:
            _check_length("timestamps", len(timestamps_ms), count)
            _check_timestamps(min(timestamps_ms), max(timestamps_ms))
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

    def fill(
        self,
        values: list[bytes | None],
        keys: list[bytes | None] | None,
        timestamps_ms: list[int | None] | None,
        raw_bytes: int,
    ) -> None:
        """Take ownership of whole columns, into an empty builder, without checking any cell.

        The fast caller has held the bounds of `append` for each record, and counted `raw_bytes` as it does: to
        measure again costs 90 ns a record.
        """
        assert not self.values, "a builder is filled before anything else"
        self._open(keys is not None, timestamps_ms is not None, False, None)
        self.values, self.keys, self.timestamps = values, keys, timestamps_ms
        self.raw_bytes = raw_bytes

    def _append_headers(self, headers: Headers, size: int) -> None:
        """Claim room for one record of `size` bytes and its headers, and add these."""
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
            self._open_column(_KEY_COST)
            self.keys = [None] * count
        if timestamp and self.timestamps is None:
            self._open_column(_TIMESTAMP_COST)
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
            self._tag_bits |= tag_bit(tag)

    def _open_column(self, cost: int) -> None:
        """Count in a column that has `cost` bytes for each record."""
        self._check_room(cost * len(self.values))
        self.raw_bytes += cost * len(self.values)
        self.row_cost += cost
        self.plain = False

    def _id(self, name: str) -> int:
        """Return the place of a name in the block's dictionary, entering it when it is new."""
        known = self._ids.get(name)
        if known is not None:
            return known
        try:
            encoded = name.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"name {name[:60]!a} is not valid Unicode") from error
        if len(encoded) > NAME_BYTES_MAX:
            raise TooLargeError(f"name has {len(encoded)} bytes, {NAME_BYTES_MAX} are allowed")
        if len(self._names) >= NAMES_MAX:
            raise TooLargeError(f"block has {NAMES_MAX} names of headers and tags, more are not allowed")
        self._check_room(2 + len(encoded))
        self.raw_bytes += 2 + len(encoded)
        self._ids[name] = len(self._names)
        self._names.append(encoded)
        return len(self._names) - 1

    def _claim(self, size: int, count: int) -> None:
        """Count `size` bytes of `count` records in, when there is room."""
        total = self.raw_bytes + size + self.row_cost * count
        if len(self.values) + count > BLOCK_RECORDS_MAX:
            raise TooLargeError(f"block has {len(self.values)} + {count} records, {BLOCK_RECORDS_MAX} are allowed")
        if total > BLOCK_RAW_BYTES_MAX:
            self._check_room(total - self.raw_bytes)
        self.raw_bytes = total

    def _check_room(self, size: int) -> None:
        if self.raw_bytes + size > BLOCK_RAW_BYTES_MAX:
            raise TooLargeError(f"block has {self.raw_bytes} + {size} bytes, {BLOCK_RAW_BYTES_MAX} are allowed")

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

        `slot_range` (first and last) must hold the slots of all keys: the partition's range, or all of
        them when the caller chose the partition itself. With a null key the block says 0 to 65535.
        """
        assert self.values, "a block has at least one record"
        flags, base_ms, delta_ms, data = _join_columns(self, now_ms)
        if flags & block.KEY == 0 or flags & block.NULL_KEYS:
            slot_range = (0, SLOTS - 1)
        raw = memoryview(data)[BLOCK_HEADER_BYTES:]
        codec_used, payload = compress(raw, block.CODECS[codec])
        fields = (
            *(codec_used, flags, len(payload), len(raw), len(self.values), producer_epoch, scope),
            *(producer_id, first_sequence, base_ms, delta_ms, slot_range[0], slot_range[1], self._tag_bits),
        )
        tail = block.UNPREFIXED.pack(FORMAT_VERSION, *fields)
        checksum = crc32c(payload, crc32c(tail))
        head = b"".join((block.MAGIC, checksum.to_bytes(4, "little"), tail))
        header = block.parse_header(head)  # what would be refused must not leave
        if payload is not raw:
            return SealedBlock(header, head + payload)
        data[:BLOCK_HEADER_BYTES] = head
        return SealedBlock(header, data)

    @property
    def names(self) -> Sequence[bytes]:
        """The block's dictionary: the names of headers and tags, UTF-8, by id."""
        return self._names


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


def _join_columns(builder: BlockBuilder, now_ms: int) -> tuple[int, int, int, bytearray]:
    """Return flags, base, max delta and the raw bytes: the columns in their order, values last.

    They lie behind room for a header: a block without a codec is this very piece of memory.
    """
    flags = 0
    base_ms, delta_ms = now_ms, 0
    count = len(builder.values)
    lengths, present_values, values = _cells(builder.values)
    parts = [lengths]
    present_keys: bytes = b""
    keys: Sequence[bytes] = ()
    if builder.keys is not None:
        flags |= block.KEY
        lengths, present_keys, keys = _cells(builder.keys)
        parts.append(lengths)
    if builder.timestamps is not None:
        times = [now_ms if time is None else time for time in builder.timestamps]
        base_ms = min(times)
        delta_ms = min(max(times) - base_ms, block.DELTA_SATURATED)
        if delta_ms:  # without the column, base is every record's
            flags |= block.TIMESTAMP
            parts.append(struct.pack(f"<{count}q", *times))
    if builder.header_counts is not None:
        flags |= block.HEADERS
        parts.append(_join_headers(builder, builder.header_counts))
    if builder.tags is not None:
        flags |= block.TAG
        parts.append(struct.pack(f"<{count}H", *builder.tags))
    if present_keys or present_values:
        flags |= (block.NULL_KEYS if present_keys else 0) | (block.NULL_VALUES if present_values else 0)
        parts += [present_values, present_keys]
    if flags & (block.HEADERS | block.TAG):
        parts.append(struct.pack("<H", len(builder.names)))
        for name in builder.names:
            parts += [struct.pack("<H", len(name)), name]
    header_values = [value for value in builder.header_values if value is not None]
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


def _join_headers(builder: BlockBuilder, counts: list[int]) -> bytes:
    """Return the columns of the headers: how many, lengths, names, and how many each record has."""
    values = builder.header_values
    lengths = [NULL_HEADER if value is None else len(value) for value in values]
    total = len(lengths)
    return struct.pack(f"<I{total}I{total}H{len(counts)}H", total, *lengths, *builder.header_names, *counts)
