"""Asks an object's index which blocks a batch has, where the pointer alone does not tell."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from memq.audit.whole_object import ReadRange
from memq.errors import CorruptDataError
from memq.format.object import BlockEntry, index_bytes, parse_index, parse_trailer
from memq.format.pointer import Location, Pointer
from memq.format.report import Damage
from memq.limits import INDEX_HEAD_BYTES, TRAILER_BYTES


async def read_entries(read: ReadRange, location: Location) -> Sequence[BlockEntry]:
    """Return the index entries of a batch's blocks, by two ranged reads.

    Raises: NotFoundError; CorruptDataError when the index is damaged or knows no such batch; DeniedError;
    RetryableError.
    """
    at = location.index_offset
    length = index_bytes(await read(location.store, location.key, at, INDEX_HEAD_BYTES))
    tail = memoryview(await read(location.store, location.key, at, length + TRAILER_BYTES))
    index = parse_index(tail[:length], parse_trailer(tail[length:], at + length + TRAILER_BYTES))
    for batch in index.batches:
        if (batch.offset, batch.length) == (location.offset, location.length):
            return index.blocks_of(batch)
    raise CorruptDataError(f"index of object '{location.key}' has no batch at {location.offset}+{location.length}")


def named(damage: Damage, pointer: Pointer, entries: Sequence[BlockEntry]) -> list[Damage]:
    """Return a damage that does not say whose records it is about as one, or several, that do.

    `entries` are the blocks of the batch that `pointer` names, as the index has them; none when it is damaged, too.
    """
    if damage.producer or damage.first < damage.next:
        return [damage]
    if damage.records >= pointer.records:  # nothing of the batch could be read
        pieces = [(entry.producer, *piece) for entry in pointer.producers for piece in entry.ranges]
    elif damage.block < len(entries):
        entry = entries[damage.block]
        pieces = [(entry.producer_id, entry.first_sequence, entry.next_sequence)]
    else:
        return [damage]
    return [
        msgspec.structs.replace(damage, producer=producer, first=first, next=next_, records=next_ - first)
        for producer, first, next_ in pieces
    ]
