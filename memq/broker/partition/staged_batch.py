"""A batch that a writer put into the store itself, checked by the index of its object. Pure.

The checks cover the checksum of trailer and index. The index must have the batch at the writer's offset, for this topic
and partition, and the blocks must fill the batch. The bytes of the blocks are not read: the store compared them with
their checksum at the put, and readers check them as always.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memq.errors import CorruptDataError, InvalidRequestError, MemqError
from memq.format.blocks.header import Buffer
from memq.format.object import BatchEntry, BlockEntry, ObjectIndex, batch_checksum, parse_index, parse_trailer
from memq.format.pointer import Location, NamedProducer
from memq.limits import OBJECT_BYTES_MAX, SEQUENCE_END, TRAILER_BYTES
from memq.protocol.admin_messages import WirePiece


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """One batch of a staged object.

    `writers` has the writer's progress after this batch; it is empty if the writer asked not to be remembered.
    """

    location: Location
    writers: tuple[NamedProducer, ...]
    records: int
    raw_bytes: int
    least_ms: int
    greatest_ms: int
    slots: tuple[int, int]
    tag_bits: int
    checksum: int
    sequences: tuple[tuple[int, int, int], ...]  # producer id, first and next of each block
    settle: Callable[[MemqError | None], None]  # called with None when the pointer is in the queue, else with the error
    until_s: float  # monotonic s: no pointer is handed over later, because the sweep may delete the object


def check_bounds(piece: WirePiece) -> None:
    """Refuse a piece with impossible offsets or sizes. Raises: InvalidRequestError."""
    end = piece.offset + piece.length
    if not (0 <= piece.offset < end <= piece.index_offset < piece.object_bytes - TRAILER_BYTES < OBJECT_BYTES_MAX):
        raise InvalidRequestError(
            f"piece at {piece.offset}+{piece.length} of object '{piece.key[:120]}' of {piece.object_bytes} bytes"
        )
    if not piece.length <= piece.raw_bytes + (1 << 32) < 1 << 53:
        raise InvalidRequestError(f"piece of {piece.length} bytes has {piece.raw_bytes} raw bytes")


def staged_index(tail: Buffer, piece: WirePiece) -> ObjectIndex:
    """Read the index from an object's last bytes, from `index_offset` on.

    Raises: CorruptDataError, UnsupportedFormatError.
    """
    view = memoryview(tail)
    trailer = parse_trailer(view[-TRAILER_BYTES:], piece.object_bytes)
    if trailer.index_offset != piece.index_offset:
        raise CorruptDataError(
            f"object '{piece.key}' has its index at {trailer.index_offset}, not {piece.index_offset}"
        )
    return parse_index(view[:-TRAILER_BYTES], trailer)


def staged_batch(
    index: ObjectIndex,
    piece: WirePiece,
    store: str,
    target: tuple[str, str, int],
    writers: tuple[NamedProducer, ...],
    settle: Callable[[MemqError | None], None],
    until_s: float,
) -> StagedBatch:
    """Return the batch that a piece names; `target` is its cluster, topic id and partition.

    Raises: CorruptDataError when the index has no such batch, or the blocks do not fill it.
    """
    entry = _entry_of(index, piece, target)
    blocks = index.blocks_of(entry)
    if sum(block.length for block in blocks) != entry.length or any(not _is_sound(block) for block in blocks):
        raise CorruptDataError(f"blocks of object '{piece.key}' do not fit the batch at {entry.offset}")
    tag_bits = 0
    for block in blocks:
        tag_bits |= block.tag_bits
    end = piece.offset + piece.length
    return StagedBatch(
        location=Location(
            store=store,
            key=piece.key,
            offset=piece.offset,
            length=piece.length,
            index=piece.index_offset if piece.index_offset != end else 0,
        ),
        writers=writers,
        records=entry.records,
        raw_bytes=piece.raw_bytes,
        least_ms=min(block.least_ms for block in blocks),
        greatest_ms=max(block.greatest_ms for block in blocks),
        slots=(min(block.slot_first for block in blocks), max(block.slot_last for block in blocks)),
        tag_bits=tag_bits,
        checksum=batch_checksum(blocks),
        sequences=tuple((block.producer_id, block.first_sequence, block.next_sequence) for block in blocks),
        settle=settle,
        until_s=until_s,
    )


def _entry_of(index: ObjectIndex, piece: WirePiece, target: tuple[str, str, int]) -> BatchEntry:
    for entry in index.batches:
        home = (index.meta.cluster, index.meta.topics[entry.topic].id, entry.partition)
        if (entry.offset, entry.length) == (piece.offset, piece.length) and home == target and entry.blocks:
            return entry
    raise CorruptDataError(
        f"object '{piece.key}' has no batch of partition {target[2]} at {piece.offset}+{piece.length}"
    )


def _is_sound(block: BlockEntry) -> bool:
    return 0 < block.producer_id < SEQUENCE_END and block.next_sequence < SEQUENCE_END and block.count > 0
