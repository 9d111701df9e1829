"""How input becomes records that are sent: lines by columns, JSON one by one; and what became of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memq.cli.records.input_records import split_keys
from memq.cli.records.record_json import decode_record
from memq.client.producer.delivery import Ack
from memq.client.producer.producer import Producer
from memq.errors import InvalidRequestError, MemqError
from memq.protocol.frames import AckLevel


@dataclass(frozen=True, slots=True)
class Shape:
    """How a line of input becomes a record."""

    topic: str
    partition: int | None
    key: bytes | None
    headers: tuple[tuple[str, bytes], ...]
    separator: bytes | None
    null_when_empty: bool


@dataclass(slots=True)
class SentCount:
    """Counts of sent records and their outcomes; acks arrive on the I/O thread."""

    records: int = 0
    bytes: int = 0
    acked: int = 0
    error: MemqError | None = None

    def note(self, outcome: Ack | MemqError) -> None:
        """Count an ack, or keep the first error. Without acks there is nothing to count."""
        if isinstance(outcome, MemqError):
            self.error = self.error or outcome
        elif outcome.level is not AckLevel.NONE:
            self.acked += outcome.records


def line_sender(producer: Producer, shape: Shape, tally: SentCount) -> Callable[[list[bytes]], None]:
    """Return what sends a list of lines: by columns when no record needs more than value and key."""

    def send(records: list[bytes]) -> None:
        tally.records += len(records)
        tally.bytes += sum(map(len, records))
        keys, values = _columns(records, shape)
        if shape.partition is None and not shape.headers:
            producer.send_many(shape.topic, values, keys=keys)
            return
        for value, key in zip(values, keys or [None] * len(values), strict=True):
            producer.send(shape.topic, value, key=key, headers=shape.headers, partition=shape.partition)

    return send


def _columns(records: list[bytes], shape: Shape) -> tuple[list[bytes | None] | None, list[bytes | None]]:
    keys: list[bytes | None] | None = None
    if shape.separator is not None:
        keys, records = split_keys(records, shape.separator)
    values: list[bytes | None] = list(records)
    if shape.null_when_empty:
        values = [value or None for value in values]
        keys = [key or None for key in keys] if keys is not None else None
    if shape.key is not None:
        keys = [shape.key if key is None else key for key in keys or [None] * len(values)]
    return keys, values


def json_sender(producer: Producer, shape: Shape, tally: SentCount) -> Callable[[list[bytes]], None]:
    """Return what sends a list of lines of JSON; a bad one raises InvalidRequestError with its number."""

    def send(lines: list[bytes]) -> None:
        for line in lines:
            if not line.strip():
                continue
            try:
                record = decode_record(line)
            except InvalidRequestError as error:
                raise InvalidRequestError(
                    f"record {tally.records + 1} of the input: {error}", hint=error.hint
                ) from error
            producer.send(
                shape.topic,
                record.value,
                key=shape.key if record.key is None else record.key,
                headers=record.headers + shape.headers,
                timestamp_ms=record.timestamp_ms,
                tag=record.tag,
                partition=shape.partition,
            )
            tally.records += 1
            tally.bytes += len(record.value or b"")

    return send
