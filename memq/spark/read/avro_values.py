"""Decodes Avro values into columns with the library fastavro, one object per record.

A value is one datum without a header, as it was written with the schema that the option `avroSchema` has.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pyarrow

from memq.errors import InvalidSettingError
from memq.spark.read.json_values import DecodedColumns, Decoder

try:
    from fastavro import parse_schema, schemaless_reader
except ModuleNotFoundError as error:
    raise ImportError("valueFormat = avro needs fastavro (pip install 'memq[avro]')", name="fastavro") from error


def avro_decoder(schema: str) -> Callable[[Sequence[pyarrow.Field]], Decoder]:
    """Return what makes a decoder of values written with `schema`, which is JSON.

    A null value has null fields.

    Raises: InvalidSettingError for a schema that is none, or is not of records.
    """
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
                row = {} if value is None else _read(value, written)
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


def _read(value: bytes, written: Any) -> dict[str, Any] | None:
    """Return one record; None for a value that is none, or has more bytes than one."""
    stream = io.BytesIO(value)
    try:
        found = schemaless_reader(stream, written, None)
    except Exception:  # noqa: BLE001 - the library raises what its parts raise: of unpacking, of indexes, of UTF-8
        return None
    return found if isinstance(found, dict) and stream.tell() == len(value) else None
