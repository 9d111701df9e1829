"""A block as one Arrow batch with exactly Spark's schema: types, names and order.

Values and keys are not copied. A column that all records share, such as the topic, is repeated in Arrow, not in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy
import pyarrow
import pyarrow.compute
from pyspark.sql.pandas.types import to_arrow_schema

from memq.errors import InvalidRequestError, MemqError
from memq.format.blocks.arrow import Rows, block_rows
from memq.format.blocks.columns import BlockReader
from memq.format.blocks.header import BlockHeader
from memq.spark.columns import COLUMNS
from memq.topic import Position

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from memq.spark.read.decoded_values import Decoder

_MILLISECONDS = pyarrow.timestamp("ms", tz="UTC")


class BlockPlace(NamedTuple):
    """The place of a block: topic, read partition, pointer offset, first record index, and object.

    An `orphan` is in an object that no pointer would have named.
    """

    topic: str
    partition: int
    pointer_offset: int
    first: int
    object: str
    orphan: bool = False


class DamageCell(msgspec.Struct, frozen=True):
    """A damaged block that was skipped, as JSON for the column `damage`."""

    object: str
    block: int
    records: int
    position: str
    cause: str


class Decoding(NamedTuple):
    """How values are decoded, and whether one that is not what the schema says ends the read."""

    decoder: Callable[[Sequence[pyarrow.Field]], Decoder]
    fail_malformed: bool


class RowMaker:
    """Makes the batches of one read.

    The columns at `fields` are fields of the values, which `decoding` makes.
    """

    def __init__(self, schema: StructType, fields: range, decoding: Decoding | None = None) -> None:
        self._schema = to_arrow_schema(schema, timezone="UTC")
        self._fields = fields
        self._own = [name for number, name in enumerate(self._schema.names) if number not in fields]
        self._decoding = decoding
        self._decode = decoding.decoder([self._schema.field(number) for number in fields]) if decoding else None

    def block(self, place: BlockPlace, reader: BlockReader, low: int, high: int) -> pyarrow.RecordBatch:
        """Return the records `low` up to, not with, `high` of a block; they keep its bytes alive.

        Raises: CorruptDataError, UnsupportedFormatError; what `decode` raises.
        """
        rows = block_rows(reader, low, high)
        source = _Source(place, reader.header, low, rows)
        fields = self._decoded(source)
        columns = [
            fields[number] if number in fields else _MAKERS[field.name](source, field.type)
            for number, field in enumerate(self._schema)
        ]
        return pyarrow.RecordBatch.from_arrays(columns, schema=self._schema)

    def damage(self, place: BlockPlace, block: int, records: int, cause: MemqError) -> pyarrow.RecordBatch | None:
        """Return the row for a damaged block; None when the column `damage` is not read."""
        if "damage" not in self._own:
            return None
        position = Position(place.partition, place.pointer_offset, place.first)
        cell = DamageCell(place.object, block, records, str(position), str(cause))
        row: dict[str, object] = {
            "damage": msgspec.json.encode(cell).decode(),
            "topic": place.topic,
            "partition": place.partition,
            "offset": position.offset,
            "record_index": place.first,
            "object": place.object,
            "orphan": place.orphan,
        }
        columns = [
            pyarrow.array([None if number in self._fields else row.get(field.name)], field.type)
            for number, field in enumerate(self._schema)
        ]
        return pyarrow.RecordBatch.from_arrays(columns, schema=self._schema)

    def _decoded(self, source: _Source) -> dict[int, pyarrow.Array]:
        """Return the columns of fields by their places. Raises: InvalidRequestError for a value that is none."""
        if self._decode is None or self._decoding is None:
            return {}
        decoded = self._decode(source.rows.values)
        if decoded.malformed and self._decoding.fail_malformed:
            place = source.place
            at = Position(place.partition, place.pointer_offset, place.first + source.low + decoded.malformed[0])
            raise InvalidRequestError(
                f"value at {at} of topic '{place.topic}' does not match option 'schema'",
                hint="mend the schema, or with onMalformed = null let all its fields be null",
            )
        return dict(zip(self._fields, decoded.columns, strict=True))


class _Source(NamedTuple):
    """The source of the columns of a block."""

    place: BlockPlace
    header: BlockHeader
    low: int
    rows: Rows


def _repeated(value: object, kind: pyarrow.DataType, count: int) -> pyarrow.Array:
    return pyarrow.repeat(pyarrow.scalar(value, kind), count)


def _counted(first: int, count: int, kind: pyarrow.DataType) -> pyarrow.Array:
    numbers = numpy.arange(first, first + count, dtype=kind.to_pandas_dtype())
    return pyarrow.Array.from_buffers(kind, count, [None, pyarrow.py_buffer(numbers)])


def _or_nulls(column: pyarrow.Array | None, kind: pyarrow.DataType, count: int) -> pyarrow.Array:
    return pyarrow.nulls(count, kind) if column is None else column


def _timestamps(source: _Source, kind: pyarrow.DataType) -> pyarrow.Array:
    times = source.rows.timestamps
    if isinstance(times, int):
        return pyarrow.repeat(pyarrow.scalar(times, _MILLISECONDS).cast(kind), source.rows.records)
    return times.cast(kind)


def _headers(source: _Source, kind: pyarrow.DataType) -> pyarrow.Array:
    """Give the lists Spark's own names of fields."""
    found = source.rows.headers
    if found is None:
        none = pyarrow.array([], kind.value_type)
        return pyarrow.ListArray.from_arrays(_repeated(0, pyarrow.int32(), source.rows.records + 1), none, type=kind)
    pairs = found.values
    named = pyarrow.StructArray.from_arrays([pairs.field(0), pairs.field(1)], fields=list(kind.value_type))
    return pyarrow.ListArray.from_arrays(found.offsets, named, type=kind)


_MAKERS: Mapping[str, Callable[[_Source, pyarrow.DataType], pyarrow.Array]] = {
    "key": lambda source, kind: _or_nulls(source.rows.keys, kind, source.rows.records),
    "value": lambda source, kind: source.rows.values,
    "headers": _headers,
    "tag": lambda source, kind: _or_nulls(source.rows.tags, kind, source.rows.records),
    "timestamp": _timestamps,
    "topic": lambda source, kind: _repeated(source.place.topic, kind, source.rows.records),
    "partition": lambda source, kind: _repeated(source.place.partition, kind, source.rows.records),
    "offset": lambda source, kind: _counted(_offset(source), source.rows.records, kind),
    "record_index": lambda source, kind: _counted(source.place.first + source.low, source.rows.records, kind),
    "producer_id": lambda source, kind: _repeated(source.header.producer_id, kind, source.rows.records),
    "sequence": lambda source, kind: _counted(source.header.first_sequence + source.low, source.rows.records, kind),
    "object": lambda source, kind: _repeated(source.place.object, kind, source.rows.records),
    "damage": lambda source, kind: pyarrow.nulls(source.rows.records, kind),
    "orphan": lambda source, kind: _repeated(source.place.orphan, kind, source.rows.records),
}
assert _MAKERS.keys() == COLUMNS.keys()


def _offset(source: _Source) -> int:
    place = source.place
    return Position(place.partition, place.pointer_offset, place.first + source.low).offset
