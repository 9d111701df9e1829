"""The path of one record: its pointers, block and object, times, and lagging groups. Pure.

Producer and sequence identify a record. For a key or a position, these two are first found in the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from memq.errors import MemqError
from memq.format.batch import BlockPiece, cut_batch
from memq.format.blocks.header import BlockHeader, Buffer, parse_header
from memq.format.held_sequences import due_time_of, held_minute, is_transactional
from memq.format.pointer import Pointer
from memq.notification import Entry
from memq.topic import Position, slot_of_key

NO_BLOCK = -1


@dataclass(frozen=True, slots=True)
class Sighting:
    """One block that holds the record. Times are Unix ms; `record_index` is the record's in the batch.

    `copy` says that the pointer skips the block, or that it was seen before: readers pass over it. `damage` is the
    reason why the block can't be read; the record's own time is then unknown, and 0. If the block can't be found, and
    only the pointer names the record, `block` is NO_BLOCK, and offset and position are those of the batch.
    """

    producer: int
    sequence: int
    position: Position
    time_ms: int
    sealed_ms: int
    queue_ms: int
    epoch: int
    broker: str
    object: str
    block: int
    offset: int
    length: int
    copy: bool = False
    damage: str = ""

    def passed_by(self, groups: Mapping[str, Position]) -> dict[str, bool]:
        """Return for each group whether the position that it has committed lies after the record."""
        return {group: at > self.position for group, at in sorted(groups.items())}

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values; of a held record also its due time, or its transaction's begin."""
        named = {name: getattr(self, name) for name in self.__slots__}
        if due_ms := due_time_of(self.sequence):
            named["due_ms"] = due_ms
        elif is_transactional(self.sequence):
            named["begun_minute"] = held_minute(self.sequence)
        return named | {"producer": f"{self.producer:016x}", "position": str(self.position)}


@dataclass(frozen=True, slots=True)
class TraceTarget:
    """Target of a search: a producer's sequence, a key, or a position in the queue; the others are None."""

    producer: int | None = None
    sequence: int | None = None
    key: bytes | None = None
    position: Position | None = None

    def may_be_in(self, offset: int, pointer: Pointer) -> bool:
        """Whether a batch may hold it, by its pointer alone."""
        if pointer.kind != "data":
            return False
        if self.position is not None:
            return offset == self.position.pointer_offset
        if self.key is not None:
            return pointer.slots[0] <= slot_of_key(self.key) <= pointer.slots[1]
        return self.is_named_by(pointer) or not pointer.producers_complete

    def is_named_by(self, pointer: Pointer) -> bool:
        """Whether a pointer names its producer and sequence."""
        return self.sequence is not None and any(
            entry.producer == self.producer and any(first <= self.sequence < next_ for first, next_ in entry.ranges)
            for entry in pointer.producers
        )


def unread_sighting(wanted: TraceTarget, partition: int, entry: Entry, pointer: Pointer, cause: str) -> Sighting | None:
    """Return what a pointer alone says of a record that its batch does not show.

    The result is None when it does not name it.
    """
    if wanted.producer is None or wanted.sequence is None or not wanted.is_named_by(pointer):
        return None
    location = pointer.locations[0]
    return Sighting(
        producer=wanted.producer,
        sequence=wanted.sequence,
        position=Position(partition, entry.offset, 0),
        time_ms=0,
        sealed_ms=pointer.sealed_ms,
        queue_ms=entry.time_ms,
        epoch=pointer.epoch,
        broker=pointer.broker,
        object=location.key,
        block=NO_BLOCK,
        offset=location.offset,
        length=location.length,
        damage=cause,
    )


def sightings(wanted: TraceTarget, partition: int, entry: Entry, pointer: Pointer, batch: Buffer) -> Iterator[Sighting]:
    """Yield the records of a batch that are wanted; `batch` are its bytes.

    After a damaged header nothing more is found.
    """
    location = pointer.locations[0]
    for piece in cut_batch(pointer, batch):
        try:
            header = piece.header or parse_header(piece.data)
        except MemqError:
            continue
        for record, damage in _records(wanted, header, piece):
            yield Sighting(
                producer=header.producer_id,
                sequence=header.first_sequence + record,
                position=Position(partition, entry.offset, piece.first + record),
                time_ms=0 if damage else piece.reader().timestamps()[record],
                sealed_ms=pointer.sealed_ms,
                queue_ms=entry.time_ms,
                epoch=pointer.epoch,
                broker=pointer.broker,
                object=location.key,
                block=piece.number,
                offset=location.offset + piece.at,
                length=header.length,
                copy=piece.number in pointer.skip,
                damage=damage,
            )


def _records(wanted: TraceTarget, header: BlockHeader, piece: BlockPiece) -> list[tuple[int, str]]:
    """Return the wanted records of a block by number, each with the fault of the block, if any."""
    if wanted.position is not None:
        found = [wanted.position.record_index - piece.first]
    elif wanted.sequence is not None:
        found = [wanted.sequence - header.first_sequence] if header.producer_id == wanted.producer else []
    else:
        found = list(range(header.count))
    found = [record for record in found if 0 <= record < header.count]
    try:
        keys = piece.reader().keys() if found and wanted.key is not None else None
        if found and keys is None:
            piece.reader().values()
    except MemqError as error:
        return [] if wanted.key is not None else [(record, str(error)) for record in found]
    return [(record, "") for record in found if keys is None or keys[record] == wanted.key]
