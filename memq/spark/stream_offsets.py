"""Positions of a stream in Spark's checkpoint, and the end of the next micro-batch. Pure.

Spark compares offsets as text, so equal positions must have equal text. Each position includes the records and bytes
before it. So the difference between two offsets is the lag in the query's progress.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from memq.errors import InvalidRequestError, MemqError
from memq.format.pointer import Pointer, pointer_mark
from memq.topic import Position, ReadPartition, Totals


class StreamPosition(msgspec.Struct, frozen=True, omit_defaults=True):
    """The next pointer and next record of one read partition, and the records and bytes before them.

    `mark` is the mark of the last pointer before it (`Position`); a checkpoint of an earlier release has none.
    """

    offset: int
    index: int = 0
    records: int = 0
    bytes: int = 0
    mark: int = 0

    def in_partition(self, partition: ReadPartition) -> Position:
        """Return the position in `partition`, without the records and bytes before it."""
        return Position(partition.partition, self.offset, self.index, self.mark)

    @classmethod
    def of(cls, position: Position, totals: Totals) -> StreamPosition:
        """Return a position with the totals before it, given those before its pointer."""
        records = totals.records + position.record_index
        return cls(position.pointer_offset, position.record_index, records, totals.bytes, position.mark)


class TopicPositions(msgspec.Struct, frozen=True):
    """Positions in one topic; `id` distinguishes it from a later topic of the same name."""

    id: str
    partitions: dict[int, StreamPosition]


StreamPositions = dict[ReadPartition, StreamPosition]


def encode_offsets(positions: StreamPositions) -> dict[str, Any]:
    """Return the JSON text for Spark's checkpoint."""
    topics: dict[str, TopicPositions] = {}
    for partition, position in sorted(positions.items()):
        topics.setdefault(partition.topic, TopicPositions(partition.topic_id, {})).partitions[partition.partition] = (
            position
        )
    encoded: dict[str, Any] = msgspec.to_builtins(topics, str_keys=True)
    return encoded


def decode_offsets(offsets: Mapping[str, Any], partitions: list[ReadPartition]) -> StreamPositions:
    """Return the positions of `partitions` in a checkpoint.

    Raises: InvalidRequestError if the checkpoint is of other topics: it belongs to one set of topics.
    """
    try:
        topics = msgspec.convert(offsets, dict[str, TopicPositions], strict=False)
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"offset {str(offsets)[:120]} can't be read: {error}") from error
    positions: StreamPositions = {}
    for partition in partitions:
        topic = topics.get(partition.topic)
        if topic is None or topic.id != partition.topic_id or partition.partition not in topic.partitions:
            known = {name: topic.id for name, topic in topics.items()}
            raise InvalidRequestError(
                f"the checkpoint is of topics {known}, and has no position in partition {partition.partition} of "
                f"'{partition.topic}' with id {partition.topic_id}",
                hint="use another checkpointLocation for other topics, or for one that was created again",
            )
        positions[partition] = topic.partitions[partition.partition]
    return positions


@dataclass(slots=True)
class Admission:
    """Cuts a micro-batch: bounded records and stored bytes (None: no bound), at least one batch."""

    records_max: int | None
    bytes_max: int | None
    positions: StreamPositions
    full: bool = False
    _records: int = field(default=0, init=False)
    _bytes: int = field(default=0, init=False)

    def take(self, partition: ReadPartition, offset: int, pointer: Pointer | MemqError) -> None:
        """Add the next pointer, in a fair order of partitions, or the part of its batch that fits."""
        position = self.positions[partition]
        mark = pointer_mark(pointer) if isinstance(pointer, Pointer) else 0
        behind = StreamPosition(offset + 1, 0, position.records, position.bytes, mark)
        if not isinstance(pointer, Pointer) or pointer.kind != "data":
            self.positions[partition] = behind
            return
        low = position.index if offset == position.offset else 0
        records, size = pointer.records - low, pointer.locations[0].length
        if self.bytes_max is not None and self._bytes and self._bytes + size > self.bytes_max:
            self.full = True
            return
        room = records if self.records_max is None else min(records, self.records_max - self._records)
        if room < records:
            self.full = True
            if room > 0:
                self.positions[partition] = StreamPosition(
                    offset, low + room, position.records + room, position.bytes, mark
                )
            return
        self._records += records
        self._bytes += size
        self.positions[partition] = msgspec.structs.replace(
            behind, records=position.records + records, bytes=position.bytes + size
        )


@dataclass(frozen=True, slots=True)
class StreamLag:
    """Records and stored bytes after the end of a micro-batch when Spark reported it."""

    records: int
    bytes: int


def lag(progress: Mapping[str, Any]) -> StreamLag:
    """Return the lag of a micro-batch, from `query.lastProgress` or one of `query.recentProgress`.

    Other sources count as 0. Rates are Spark's: `inputRowsPerSecond`, `processedRowsPerSecond`.
    """
    records = size = 0
    for source in progress["sources"]:
        here, end = (_totals(source[name]) for name in ("endOffset", "latestOffset"))
        records += max(0, end[0] - here[0])
        size += max(0, end[1] - here[1])
    return StreamLag(records, size)


def _totals(offset: object) -> tuple[int, int]:
    """Return the records and bytes before an offset; PySpark hands it out as text within text."""
    while isinstance(offset, str):
        offset = json.loads(offset)
    try:
        topics = msgspec.convert(offset, dict[str, TopicPositions], strict=False)
    except (msgspec.ValidationError, UnicodeDecodeError):
        return 0, 0
    positions = [position for topic in topics.values() for position in topic.partitions.values()]
    return sum(position.records for position in positions), sum(position.bytes for position in positions)
