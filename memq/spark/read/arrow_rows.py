"""A block as one Arrow batch with exactly Spark's schema: types, names and order.

Values and keys are not copied. A column that all records share, such as the topic, is repeated in Arrow, not in Python.

Arrow's parser takes the JSON values of a block in one call; fastavro makes one object for each Avro value. Each JSON
value is put between `{"v":` and `}` and a newline. A value that is not exactly one JSON value then breaks its line. So
if there are as many rows as values, each row belongs to its value. A block that does not parse is halved until the
malformed values are alone.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy
import pyarrow
import pyarrow.compute
import pyarrow.json
from pyspark.sql.pandas.types import to_arrow_schema

from memq.errors import InvalidRequestError, InvalidSettingError, MemqError
from memq.format.blocks.arrow import ArrowRows, block_rows
from memq.format.blocks.columns import BlockReader
from memq.format.blocks.header import BlockHeader
from memq.spark.options import COLUMNS
from memq.topic import Position

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


_MILLISECONDS = pyarrow.timestamp("ms", tz="UTC")
_PREFIX, _SUFFIX = (pyarrow.scalar(text, pyarrow.binary()) for text in (b'{"v":', b"}\n"))
_NULL = pyarrow.scalar(b"null", pyarrow.binary())
_NOTHING = pyarrow.scalar(b"", pyarrow.binary())
_ZONE = r"(Z|[+-]\d\d:?\d\d)$"
_MICROSECONDS = pyarrow.timestamp("us", tz="UTC")


class BlockOrigin(NamedTuple):
    """The origin of a block: topic, read partition, pointer offset, index of its first record, and object.

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
    """The decoding of values, and whether a value that does not match the schema ends the read."""

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

    def block(
        self, origin: BlockOrigin, reader: BlockReader, low: int, high: int, mask: bytes | None = None
    ) -> pyarrow.RecordBatch:
        """Return the records `low` up to, not with, `high` of a block; they keep its bytes alive.

        Of these only those with a 1 in `mask`, which has each record of the block; the others are not decoded.

        Raises: CorruptDataError, UnsupportedFormatError; as the decoder.
        """
        rows = block_rows(reader, low, high)
        source = _ColumnSource(origin, reader.header, low, rows)
        chosen = None if mask is None else pyarrow.array(numpy.frombuffer(mask[low:high], dtype=bool))
        fields = self._decoded(source, chosen)
        columns = [
            fields[number] if number in fields else _chosen(_MAKERS[field.name](source, field.type), chosen)
            for number, field in enumerate(self._schema)
        ]
        return pyarrow.RecordBatch.from_arrays(columns, schema=self._schema)

    def damage(self, origin: BlockOrigin, block: int, records: int, cause: MemqError) -> pyarrow.RecordBatch | None:
        """Return the row for a damaged block; None when the column `damage` is not read."""
        if "damage" not in self._own:
            return None
        position = Position(origin.partition, origin.pointer_offset, origin.first)
        cell = DamageCell(origin.object, block, records, str(position), str(cause))
        row: dict[str, object] = {
            "damage": msgspec.json.encode(cell).decode(),
            "topic": origin.topic,
            "partition": origin.partition,
            "offset": position.offset,
            "record_index": origin.first,
            "object": origin.object,
            "orphan": origin.orphan,
        }
        columns = [
            pyarrow.array([None if number in self._fields else row.get(field.name)], field.type)
            for number, field in enumerate(self._schema)
        ]
        return pyarrow.RecordBatch.from_arrays(columns, schema=self._schema)

    def _decoded(self, source: _ColumnSource, chosen: pyarrow.Array | None) -> dict[int, pyarrow.Array]:
        """Return the decoded fields by column index. Raises: InvalidRequestError for a malformed value."""
        if self._decode is None or self._decoding is None:
            return {}
        decoded = self._decode(_chosen(source.rows.values, chosen))
        if decoded.malformed and self._decoding.fail_malformed:
            origin, number = source.origin, decoded.malformed[0]
            if chosen is not None:
                number = int(numpy.flatnonzero(chosen)[number])
            at = Position(origin.partition, origin.pointer_offset, origin.first + source.low + number)
            raise InvalidRequestError(
                f"value at {at} of topic '{origin.topic}' does not match option 'schema'",
                hint="correct the schema, or with onMalformed = null let all its fields be null",
            )
        return dict(zip(self._fields, decoded.columns, strict=True))


class _ColumnSource(NamedTuple):
    """The source of the columns of a block."""

    origin: BlockOrigin
    header: BlockHeader
    low: int
    rows: ArrowRows


def _chosen(column: pyarrow.Array, chosen: pyarrow.Array | None) -> pyarrow.Array:
    return column if chosen is None else column.filter(chosen)


def _repeated(value: object, kind: pyarrow.DataType, count: int) -> pyarrow.Array:
    return pyarrow.repeat(pyarrow.scalar(value, kind), count)


def _counted(first: int, count: int, kind: pyarrow.DataType) -> pyarrow.Array:
    numbers = numpy.arange(first, first + count, dtype=kind.to_pandas_dtype())
    return pyarrow.Array.from_buffers(kind, count, [None, pyarrow.py_buffer(numbers)])


def _or_nulls(column: pyarrow.Array | None, kind: pyarrow.DataType, count: int) -> pyarrow.Array:
    return pyarrow.nulls(count, kind) if column is None else column


def _timestamps(source: _ColumnSource, kind: pyarrow.DataType) -> pyarrow.Array:
    times = source.rows.timestamps
    if isinstance(times, int):
        return pyarrow.repeat(pyarrow.scalar(times, _MILLISECONDS).cast(kind), source.rows.records)
    return times.cast(kind)


def _headers(source: _ColumnSource, kind: pyarrow.DataType) -> pyarrow.Array:
    """Give the lists Spark's own names of fields."""
    found = source.rows.headers
    if found is None:
        none = pyarrow.array([], kind.value_type)
        return pyarrow.ListArray.from_arrays(_repeated(0, pyarrow.int32(), source.rows.records + 1), none, type=kind)
    pairs = found.values
    named = pyarrow.StructArray.from_arrays([pairs.field(0), pairs.field(1)], fields=list(kind.value_type))
    return pyarrow.ListArray.from_arrays(found.offsets, named, type=kind)


_MAKERS: Mapping[str, Callable[[_ColumnSource, pyarrow.DataType], pyarrow.Array]] = {
    "key": lambda source, kind: _or_nulls(source.rows.keys, kind, source.rows.records),
    "value": lambda source, kind: source.rows.values,
    "headers": _headers,
    "tag": lambda source, kind: _or_nulls(source.rows.tags, kind, source.rows.records),
    "timestamp": _timestamps,
    "topic": lambda source, kind: _repeated(source.origin.topic, kind, source.rows.records),
    "partition": lambda source, kind: _repeated(source.origin.partition, kind, source.rows.records),
    "offset": lambda source, kind: _counted(_offset(source), source.rows.records, kind),
    "record_index": lambda source, kind: _counted(source.origin.first + source.low, source.rows.records, kind),
    "producer_id": lambda source, kind: _repeated(source.header.producer_id, kind, source.rows.records),
    "sequence": lambda source, kind: _counted(source.header.first_sequence + source.low, source.rows.records, kind),
    "object": lambda source, kind: _repeated(source.origin.object, kind, source.rows.records),
    "damage": lambda source, kind: pyarrow.nulls(source.rows.records, kind),
    "orphan": lambda source, kind: _repeated(source.origin.orphan, kind, source.rows.records),
}
assert _MAKERS.keys() == COLUMNS.keys()


def _offset(source: _ColumnSource) -> int:
    origin = source.origin
    return Position(origin.partition, origin.pointer_offset, origin.first + source.low).offset


def avro_decoder(schema: str) -> Callable[[Sequence[pyarrow.Field]], Decoder]:
    """Return a maker of decoders for values that were written with `schema` (JSON).

    A value is one datum without a header. A null value has null fields.

    Raises: InvalidSettingError for text that is no schema, or a schema of another type than a record; ImportError.
    """
    try:
        from fastavro import parse_schema, schemaless_reader
    except ModuleNotFoundError as error:
        raise ImportError("valueFormat = avro needs fastavro (pip install 'memq[avro]')", name="fastavro") from error
    try:
        written = parse_schema(msgspec.json.decode(schema))
    except Exception as error:
        raise InvalidSettingError(f"option 'avroSchema' is no schema of Avro: {error}") from error
    if not isinstance(written, dict) or written.get("type") != "record":
        raise InvalidSettingError("option 'avroSchema' is not of a record", hint='its type is "record"')

    def decoder(fields: Sequence[pyarrow.Field]) -> Decoder:
        def decode(values: pyarrow.Array) -> DecodedColumns:
            rows: list[dict[str, Any]] = []
            malformed: list[int] = []
            for number, value in enumerate(values.to_pylist()):
                row = {} if value is None else _read(schemaless_reader, value, written)
                if row is None:
                    malformed.append(number)
                rows.append(row or {})
            columns = tuple(_column([row.get(field.name) for row in rows], field) for field in fields)
            return DecodedColumns(columns, tuple(malformed))

        return decode

    return decoder


def _column(cells: list[Any], field: pyarrow.Field) -> pyarrow.Array:
    """Return the cells of a field. Raises: InvalidSettingError when the schema has another type for it."""
    try:
        return pyarrow.array(cells, field.type)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
        raise InvalidSettingError(
            f"option 'schema' has field '{field.name}' as {field.type}, Avro's is another: {error}",
            hint="use the type that 'avroSchema' has",
        ) from error


def _read(reader: Callable[..., object], value: bytes, written: Any) -> dict[str, Any] | None:
    """Return the record of a value; None if the value is not exactly one record."""
    stream = io.BytesIO(value)
    try:
        found = reader(stream, written, None)
    except Exception:  # noqa: BLE001 - the library raises what its parts raise: of unpacking, of indexes, of UTF-8
        return None
    return found if isinstance(found, dict) and stream.tell() == len(value) else None


@dataclass(frozen=True, slots=True)
class DecodedColumns:
    """The columns of the fields in order, and the indexes of malformed values, whose fields are null."""

    columns: tuple[pyarrow.Array, ...]
    malformed: tuple[int, ...] = ()


Decoder = Callable[[pyarrow.Array], DecodedColumns]


def json_decoder(fields: Sequence[pyarrow.Field]) -> Decoder:
    """Return a decoder of values, which are JSON objects, to `fields`.

    A null value, and a missing field, give null. Times are ISO 8601 strings, in UTC if they name no zone. Names that
    are no field are ignored. Raises: InvalidSettingError for a type that JSON does not have.
    """
    for field in fields:
        _check_type(field.name, field.type, nested=False)
    read = pyarrow.struct([pyarrow.field(field.name, _read_type(field.type)) for field in fields])
    options = pyarrow.json.ParseOptions(
        explicit_schema=pyarrow.schema([pyarrow.field("v", read)]),
        newlines_in_values=True,
        unexpected_field_behavior="ignore",
    )

    def decode(values: pyarrow.Array) -> DecodedColumns:
        filled = pyarrow.compute.fill_null(values, _NULL)
        lines = pyarrow.compute.binary_join_element_wise(_PREFIX, filled, _SUFFIX, _NOTHING)
        malformed: list[int] = []
        parts = _parse(lines, 0, options, fields, malformed)
        columns = (pyarrow.concat_arrays([part[number] for part in parts]) for number in range(len(fields)))
        return DecodedColumns(tuple(columns), tuple(malformed))

    return decode


def _check_type(name: str, kind: pyarrow.DataType, *, nested: bool) -> None:
    """Raise InvalidSettingError for a type that is not decoded."""
    plain = pyarrow.types
    if plain.is_list(kind):
        _check_type(name, kind.value_type, nested=True)
    elif plain.is_struct(kind):
        for field in kind:
            _check_type(f"{name}.{field.name}", field.type, nested=True)
    elif not (
        any(is_kind(kind) for is_kind in (plain.is_integer, plain.is_floating, plain.is_boolean, plain.is_string))
        or (not nested and (plain.is_date32(kind) or kind == _MICROSECONDS))
    ):
        raise InvalidSettingError(
            f"option 'schema' has field '{name}' of type {kind}, which is not decoded from JSON",
            hint="use STRING and cast it; DATE and TIMESTAMP are decoded where they are not nested",
        )


def _read_type(kind: pyarrow.DataType) -> pyarrow.DataType:
    """Return the type for Arrow's parser: strings for times, because it accepts fewer forms of them."""
    is_time = pyarrow.types.is_date32(kind) or kind == _MICROSECONDS
    return pyarrow.string() if is_time else kind


def _parse(
    lines: pyarrow.Array,
    first: int,
    options: pyarrow.json.ParseOptions,
    fields: Sequence[pyarrow.Field],
    malformed: list[int],
) -> list[list[pyarrow.Array]]:
    """Return the columns of `lines` in consecutive parts; the first line has value number `first`."""
    count = len(lines)
    try:
        return [_parse_at_once(lines, options, fields)]
    except pyarrow.ArrowInvalid:
        if count <= 1:
            malformed += [first] * count
            return [[pyarrow.nulls(count, field.type) for field in fields]]
    half = count // 2
    return _parse(lines[:half], first, options, fields, malformed) + _parse(
        lines[half:], first + half, options, fields, malformed
    )


def _parse_at_once(
    lines: pyarrow.Array, options: pyarrow.json.ParseOptions, fields: Sequence[pyarrow.Field]
) -> list[pyarrow.Array]:
    """Return the columns of `lines`. Raises: ArrowInvalid if one of the lines is malformed."""
    start, end = lines.offset, lines.offset + len(lines)
    offsets = pyarrow.Array.from_buffers(pyarrow.int32(), end + 1, [None, lines.buffers()[1]])
    low, high = offsets[start].as_py(), offsets[end].as_py()
    buffer = lines.buffers()[2].slice(low, high - low)
    reading = pyarrow.json.ReadOptions(use_threads=False, block_size=high - low + 1)
    table = pyarrow.json.read_json(pyarrow.BufferReader(buffer), read_options=reading, parse_options=options)
    if table.num_rows != len(lines):
        raise pyarrow.ArrowInvalid(f"{table.num_rows} rows of {len(lines)} values")
    found = table.column(0).combine_chunks()
    if isinstance(found, pyarrow.ChunkedArray):
        found = pyarrow.concat_arrays(found.chunks)
    return [_cast(column, field.type) for column, field in zip(found.flatten(), fields, strict=True)]


def _cast(column: pyarrow.Array, kind: pyarrow.DataType) -> pyarrow.Array:
    """Return a column as `kind`. Raises: ArrowInvalid for a string that is no time."""
    if kind == _MICROSECONDS:
        has_zone = pyarrow.compute.match_substring_regex(column, _ZONE)
        in_utc = pyarrow.compute.binary_join_element_wise(column, "Z", "")
        column = pyarrow.compute.if_else(has_zone, column, in_utc)
    return column if column.type == kind else column.cast(kind)
