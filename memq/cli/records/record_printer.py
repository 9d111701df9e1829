"""Printers of `memq consume`: a format, JSON lines, or values with delimiters (the fast way)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice

from memq.cli.records.record_format import parse_delimiter, parse_format
from memq.cli.records.record_json import encode_record
from memq.client.consumer.batch import Batch
from memq.client.consumer.record import Record

# Batch and how many of its records to print (None: all) -> the bytes to write and the records in them.
Printer = Callable[[Batch, int | None], tuple[bytes, int]]


def record_printer(
    form: str | None, *, separator: str | None = None, delimiter: str = r"\n", null: bool = False, as_json: bool = False
) -> Printer:
    """Return what turns a batch into bytes.

    `form` is a format, as in `parse_format`; without it a record is its value and `delimiter`, with the key and
    `separator` in front when there is one. `null` prints null as NULL, else as nothing.
    Raises: InvalidRequestError for a bad format or delimiter.
    """
    shown_null = b"NULL" if null else b""
    if as_json:
        return _each(_json_line)
    if form is not None:
        return _each(parse_format(form, shown_null))
    end = parse_delimiter(delimiter)
    if separator is None:
        return _values(end, shown_null)
    between = parse_delimiter(separator)
    return _each(
        lambda record, topic, partition: b"".join(
            (
                shown_null if record.key is None else record.key,
                between,
                shown_null if record.value is None else record.value,
                end,
            )
        )
    )


def _each(show: Callable[[Record, str, int], bytes]) -> Printer:
    def print_batch(batch: Batch, count: int | None) -> tuple[bytes, int]:
        parts = [show(record, batch.topic, batch.partition) for record in islice(batch, count)]
        return b"".join(parts), len(parts)

    return print_batch


def _values(end: bytes, null: bytes) -> Printer:
    def print_batch(batch: Batch, count: int | None) -> tuple[bytes, int]:
        values: Sequence[bytes | None] = batch.values()[:count]
        shown = [null if value is None else value for value in values] if None in values else values
        return (end.join(shown) + end if shown else b""), len(shown)  # type: ignore[arg-type]  # no None is left

    return print_batch


def _json_line(record: Record, topic: str, partition: int) -> bytes:
    place = {"topic": topic, "partition": partition, "offset": record.offset, "position": str(record.position)}
    line = encode_record(place, record.value, record.key, record.headers, record.timestamp_ms, record.tag)
    return line.encode() + b"\n"
