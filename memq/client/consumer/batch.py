"""Records as consumers get them: `Record`, `TopicPartition`, and `Batch`, which is unpacked on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress, islice, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from memq.errors import CorruptDataError, MemqError
from memq.format.batch import BlockPiece
from memq.format.blocks import header
from memq.format.blocks.columns import BlockReader, RecordHeaders
from memq.format.blocks.envelope import FORGOTTEN
from memq.format.blocks.header import HEADERS, is_sound
from memq.runtime.html import shown_bytes, table_html
from memq.topic import Committed, Position, ReadPartition

if TYPE_CHECKING:
    import pyarrow


_INDEX_BITS = 24
SHOWN_RECORDS = 20  # of a batch in a notebook
SHOWN_BYTES = 100  # of a value or key in a repr
_INDEX_MASK = (1 << _INDEX_BITS) - 1


class TopicPartition(NamedTuple):
    """One read partition of a topic, by name and number."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}"


def topic_partition_of(partition: ReadPartition) -> TopicPartition:
    """Return a read partition as users name it."""
    return TopicPartition(partition.topic, partition.partition)


class Record(msgspec.Struct, frozen=True, gc=False):
    """One record. Its timestamp is in Unix ms; its headers are pairs in the order in which they were sent.

    `offset` grows within its read partition, with gaps, and fits 63 bits.
    A Struct, since making one takes 78 ns where a named tuple takes 190; it holds nothing that could form a cycle.
    """

    value: bytes | None
    key: bytes | None
    headers: RecordHeaders
    timestamp_ms: int
    tag: str | None
    offset: int
    partition: int

    def __repr__(self) -> str:
        fields = msgspec.structs.asdict(self).items()
        return f"Record({', '.join(f'{name}={_shortened(value)}' for name, value in fields)})"

    def _repr_html_(self) -> str:
        """Return the fields as a table, for notebooks."""
        return table_html(_HEADS, [_cells(self)])

    @property
    def forgotten(self) -> bool:
        """Whether the key of its subject was destroyed: value and headers can't be read any more."""
        return any(name == FORGOTTEN for name, _ in self.headers)

    @property
    def position(self) -> Position:
        """The record's position, without a mark: a consumer that starts here gets this record first."""
        return Position(self.partition, self.offset >> _INDEX_BITS, self.offset & _INDEX_MASK)


_HEADS = ("partition", "offset", "timestamp", "key", "value", "headers", "tag")


def _cells(record: Record) -> tuple[object, ...]:
    headers = ", ".join(f"{name}={'' if value is None else shown_bytes(value)}" for name, value in record.headers)
    place = record.partition, record.offset, record.timestamp_ms
    return (*place, record.key, record.value, headers, record.tag)


def _shortened(value: object) -> str:
    """Return the repr of a field; of long bytes only the beginning, with their number."""
    if isinstance(value, bytes) and len(value) > SHOWN_BYTES:
        return f"{value[:SHOWN_BYTES]!r}… ({len(value):,} bytes)"
    return repr(value)


def _offsets(first: int, part: Slice) -> Iterable[int]:
    """Return the offsets of the records of a slice; `first` is that of the batch's pointer."""
    low = first + part.piece.first
    offsets = range(low + part.low, low + part.high)
    return offsets if part.mask is None else compress(offsets, part.mask[part.low : part.high])


def block_records(
    reader: BlockReader, *, first: Position, low: int, high: int, mask: bytes | None = None
) -> Iterator[Record]:
    """Iterate over records `low` to `high` (exclusive) of a block whose first record is number `first`.

    With a `mask` only over those whose byte is 1. Columns that the block does not have cost nothing.
    Raises: CorruptDataError, UnsupportedFormatError, at the call.
    """
    flags = reader.header.flags
    columns: tuple[Iterable[Any], ...] = (
        reader.values(),
        reader.keys() if flags & header.KEY else repeat(None),
        reader.headers() if flags & header.HEADERS else repeat(()),
        reader.timestamps() if flags & header.TIMESTAMP else repeat(reader.header.base_ms),
        reader.tags() if flags & header.TAG else repeat(None),
        range(first.offset, first.offset + reader.count),
        repeat(first.read_partition),
    )
    records = map(Record, *columns)
    if mask is not None:
        return compress(islice(records, low, high), mask[low:high])
    return records if (low, high) == (0, reader.count) else islice(records, low, high)


class Slice(NamedTuple):
    """The records `low` up to, not with, `high` of one block; with a `mask` those whose byte in it is 1."""

    piece: BlockPiece
    low: int
    high: int
    mask: bytes | None = None  # a byte for each record of the block

    @property
    def records(self) -> int:
        """Number of records."""
        return self.high - self.low if self.mask is None else self.mask.count(1, self.low, self.high)


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged block: its position, number of records, raw bytes as found, and the cause."""

    object_key: str
    block: int
    position: Position
    records: int
    data: bytes = field(repr=False)
    cause: MemqError

    def __str__(self) -> str:
        return f"block {self.block} of object '{self.object_key}' at {self.position}: {self.cause}"


class Batch:
    """Records of one partition, from `first` up to, not with, `next`.

    `damaged` lists the skipped blocks; all blocks are of one `write_partition`. A block's payload is unpacked when it
    is read, one block at a time, so a batch takes little more memory than its stored bytes while it is iterated.
    A block whose checksum is right, but whose records no reader can read, is reported and skipped: its producer made
    it so, and no other copy has its records. For other damage, `on_damaged` decides whether reading raises
    CorruptDataError.
    """

    __slots__ = (
        "_behind",
        "_finished",
        "_object_key",
        "_on_damaged",
        "_report",
        "_slices",
        "damaged",
        "first",
        "next",
        "partition",
        "topic",
        "write_partition",
    )

    def __init__(
        self,
        source: TopicPartition,
        span: tuple[Position, Position],
        slices: Sequence[Slice],
        damaged: list[Damage],
        object_key: str,
        report: Callable[[Batch, Damage], None] | None = None,
        write_partition: int = 0,
        behind: Committed | None = None,
        on_damaged: str = "skip",
    ) -> None:
        self.topic, self.partition = source
        self.write_partition = write_partition
        self.first, self.next = span
        self.damaged = damaged
        self._slices = slices
        self._object_key = object_key
        self._report = report  # None: damage that is found while reading is raised
        self._on_damaged = on_damaged
        self._finished = False
        self._behind = behind or Committed(self.next)

    @property
    def finished(self) -> bool:
        """Whether the program has iterated or taken all records."""
        return self._finished

    def __len__(self) -> int:
        """How many records there are, those of a damaged payload included until it was read."""
        return sum(part.records for part in self._slices)

    def __bool__(self) -> bool:
        return True  # a batch in the hand is a batch, also when all of it is damaged

    def __repr__(self) -> str:
        return f"<Batch {self.topic}:{self.first} to {self.next}, {len(self)} records>"

    def __iter__(self) -> Iterator[Record]:
        """Iterate over the records."""
        return chain.from_iterable(self._iterators())  # in C: a generator would cost 25 ns per record

    @property
    def pieces(self) -> list[BlockPiece]:
        """The blocks of the batch."""
        return [part.piece for part in self._slices]

    def headers(self) -> Iterator[RecordHeaders]:
        """Iterate over the headers of the records that have headers. The batch stays unfinished.

        Raises: CorruptDataError for a payload that can't be unpacked.
        """
        for piece, low, high, mask in self._slices:
            if piece.header is not None and piece.header.flags & HEADERS:
                first = Position(self.first.read_partition, self.first.pointer_offset, piece.first)
                records = block_records(
                    BlockReader(piece.data, piece.header), first=first, low=low, high=high, mask=mask
                )
                yield from (record.headers for record in records)

    def _iterators(self) -> Iterator[Iterator[Record]]:
        for part in self._slices:
            first = Position(self.first.read_partition, self.first.pointer_offset, part.piece.first)
            records = self._read(part, partial(block_records, first=first))
            if records is not None:
                yield records
        self._finished = True

    def values(self) -> list[bytes | None]:
        """Return the values of all records."""
        return self._lists(BlockReader.values)

    def memoryviews(self) -> list[memoryview | None]:
        """Return the values as views without a copy. A view keeps its unpacked block in memory."""
        return self._lists(BlockReader.memoryviews)

    def arrow(self, *, places: bool = False) -> pyarrow.Table:
        """Return value, key, headers, timestamp and tag as an Arrow table, without copying values.

        With `places` also partition and offset, 12 bytes for each record.
        Raises: ImportError if the extra [arrow] is not installed.
        """
        from memq.format.blocks.arrow import block_rows, placed, table

        blocks = [(part, self._read(part, block_rows)) for part in self._slices]
        self._finished = True
        found = table([rows for _, rows in blocks if rows is not None])
        if not places:
            return found
        first = self.first.pointer_offset << _INDEX_BITS
        offsets = [_offsets(first, part) for part, rows in blocks if rows is not None]
        return placed(found, self.partition, chain.from_iterable(offsets))

    def _repr_html_(self) -> str:
        """Return the first records as a table, for notebooks. The batch stays unfinished."""
        rows: list[Record] = []
        for piece, low, high, mask in self._slices:
            if len(rows) >= SHOWN_RECORDS:
                break
            first = Position(self.first.read_partition, self.first.pointer_offset, piece.first)
            with suppress(CorruptDataError):
                records = block_records(
                    BlockReader(piece.data, piece.header), first=first, low=low, high=high, mask=mask
                )
                rows += islice(records, SHOWN_RECORDS - len(rows))
        more = f", the first {len(rows)} of them" if len(rows) < len(self) else ""
        caption = f"{self.topic}:{self.first} to {self.next}, {len(self)} records{more}"
        return table_html(_HEADS, map(_cells, rows), caption)

    def _lists(self, column: Callable[[BlockReader], list[Any]]) -> list[Any]:
        found: list[Any] = []
        for part in self._slices:
            rows = self._read(part, partial(_rows, column=column))
            if rows is None:
                continue
            if found:
                found += rows
            else:
                found = rows  # nearly always the only one: not copied
        self._finished = True
        return found

    def _read(self, part: Slice, read: Callable[..., Any]) -> Any:
        """Return what `read` makes of a block; None when its payload is damaged and that is passed over."""
        try:
            reader = BlockReader(part.piece.data, part.piece.header)
            return read(reader, low=part.low, high=part.high, mask=part.mask)
        except CorruptDataError as error:
            damage = self._damage_of(part, error)
            if self._report is None or (self._on_damaged == "fail" and not is_sound(part.piece.data)):
                raise CorruptDataError(str(damage)) from error
            if all(known.block != damage.block for known in self.damaged):
                self.damaged.append(damage)
                self._report(self, damage)
            return None

    def _damage_of(self, part: Slice, error: MemqError) -> Damage:
        position = Position(self.first.read_partition, self.first.pointer_offset, part.piece.first)
        return Damage(self._object_key, part.piece.number, position, part.piece.records, bytes(part.piece.data), error)


def _rows(
    reader: BlockReader, *, low: int, high: int, mask: bytes | None, column: Callable[[BlockReader], list[Any]]
) -> list[Any]:
    rows = column(reader)
    if mask is not None:
        return list(compress(rows[low:high], mask[low:high]))
    return rows if high - low == len(rows) else rows[low:high]


def behind(batch: Batch) -> Committed:
    """Return the position after a batch, with the totals before it."""
    return batch._behind
