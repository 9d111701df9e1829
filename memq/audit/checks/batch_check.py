"""Compares one stored batch with its pointer: length, index, every block, every checksum. Pure.

Blocks are found by the index when it is whole, else by their own lengths, and what only the pointer knows of comes
last: each sequence that the pointer names ends in exactly one block, sound or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
from awscrt.checksums import crc32c

from memq.audit.account import apart
from memq.errors import CorruptDataError, MemqError, NotFoundError, UnsupportedFormatError
from memq.format.batch import BlockPiece, cut_blocks, numbered_entries, pointer_scope
from memq.format.blocks.header import BlockHeader, Buffer
from memq.format.object import BatchEntry, BlockEntry, ObjectIndex, open_object
from memq.format.pointer import Location, Pointer, read_pointer
from memq.format.ranges import RangeSet
from memq.notification import Entry

NO_NUMBER = -1


class BlockCheck(NamedTuple):
    """One block of a batch: half-open sequences of one producer. `cause` says why it can't be delivered.

    `number` is NO_NUMBER when only the pointer knows of it; `producer` is 0 when nobody knows whose it is.
    """

    number: int
    producer: int
    first: int
    next: int
    cause: MemqError | None = None
    header: BlockHeader | None = None

    @property
    def unread(self) -> bool:
        """Whether the block could not be read: it may be sound."""
        return self.cause is not None and not isinstance(self.cause, CorruptDataError)


@dataclass(frozen=True, slots=True)
class BatchCheck:
    """The content of one copy of a batch.

    `faults` are contradictions that by themselves hide no record.
    """

    key: str
    blocks: tuple[BlockCheck, ...]
    faults: tuple[str, ...] = ()
    complete: bool = True  # the blocks name every sequence that the batch can hold

    @property
    def damaged(self) -> int:
        """How many blocks can't be delivered."""
        return sum(block.cause is not None for block in self.blocks)


def check_batch(pointer: Pointer, location: Location, data: Buffer) -> BatchCheck:
    """Check the whole object `data` where `location` says that the batch of `pointer` lies."""
    view = memoryview(data)
    faults: list[str] = []
    scope = pointer_scope(pointer)
    entries = _entries(pointer, location, view, faults)
    batch = view[location.offset : location.offset + location.length]
    if len(batch) < location.length:
        faults.append(f"object ends at {len(view)}, the batch at {location.offset + location.length}")
    if entries is None:
        return _compared(pointer, location, cut_blocks(batch, scope, pointer.records), (), batch, faults)
    found = cut_blocks(view, scope, None, numbered_entries(entries))
    return _compared(pointer, location, found, entries, batch, faults)


def check_part(pointer: Pointer, location: Location, data: Buffer) -> BatchCheck:
    """Check the bytes of one batch of an object that topics share, without the object's index."""
    found = cut_blocks(data, pointer_scope(pointer), pointer.records)
    return _compared(pointer, location, found, (), memoryview(data), [])


def _compared(
    pointer: Pointer,
    location: Location,
    pieces: Iterable[BlockPiece],
    entries: Sequence[BlockEntry],
    batch: memoryview,
    faults: list[str],
) -> BatchCheck:
    """Compare the blocks that were found with the index, if there is one, and with the pointer."""
    found = [_checked(piece, entries[piece.number] if entries else None, faults) for piece in pieces]
    blocks, complete = _with_pointer(pointer, found, faults)
    headers = [block.header for block in blocks if block.header is not None]
    if headers and len(headers) == len(blocks):
        faults.extend(_untruths(pointer, headers, batch))
    return BatchCheck(location.key, tuple(blocks), tuple(faults), complete)


def missing_batch(pointer: Pointer, location: Location, cause: MemqError) -> BatchCheck:
    """Return the check of an object that can't be had: all that the pointer names shares the cause."""
    blocks = [
        BlockCheck(NO_NUMBER, entry.producer, first, next_, cause)
        for entry in pointer.producers
        for first, next_ in entry.ranges
    ]
    complete = pointer.producers_complete and bool(blocks)
    return BatchCheck(location.key, tuple(blocks or [BlockCheck(NO_NUMBER, 0, 0, 0, cause)]), (), complete)


def merge_copies(copies: Sequence[BatchCheck]) -> BatchCheck:
    """Return what readers get of a batch with several copies: they take the first that is whole.

    When none is whole they take what the soundest has; what is wrong with the others stays as faults.
    """
    if len(copies) == 1:
        return copies[0]
    best = min(copies, key=lambda copy: copy.damaged)
    faults = [f"object {copy.key}: {text}" for copy in copies for text in copy.faults]
    faults += [
        f"object {copy.key} block {block.number}: {block.cause}"
        for copy in copies
        if copy is not best
        for block in copy.blocks
        if block.cause is not None
    ]
    return replace(best, faults=tuple(faults))


# ---- the index -----------------------------------------------------------------------------------


def _entries(pointer: Pointer, location: Location, view: memoryview, faults: list[str]) -> list[BlockEntry] | None:
    """Return the index entries of the batch's blocks; None when the index can't be used."""
    try:
        index = open_object(view)
    except MemqError as error:
        faults.append(f"index: {error}")
        return None
    for batch in index.batches:
        if batch.offset == location.offset and batch.length == location.length:
            faults.extend(_differences(pointer, index, batch))
            return list(index.blocks_of(batch))
    faults.append(f"index has no batch at {location.offset}+{location.length}")
    return None


def _differences(pointer: Pointer, index: ObjectIndex, batch: BatchEntry) -> Iterator[str]:
    """Say where pointer and index differ."""
    stated = {
        "topic id": (pointer.topic_id, index.meta.topics[batch.topic].id),
        "partition": (pointer.partition, batch.partition),
        "epoch": (pointer.epoch, batch.epoch or pointer.epoch),  # 0: its writer staged it, and did not know them
        "batch sequence": (pointer.batch_sequence, batch.batch_sequence if batch.epoch else pointer.batch_sequence),
        "records": (pointer.records, batch.records),
        "stored bytes": (pointer.stored_bytes, batch.length),
    }
    for name, (expected, found) in stated.items():
        if expected != found:
            yield f"pointer says {name} {expected}, the index {found}"


# ---- the blocks ----------------------------------------------------------------------------------


def _checked(piece: BlockPiece, entry: BlockEntry | None, faults: list[str]) -> BlockCheck:
    """Return a block with its sequences: its own, those of its entry when it is damaged, or none."""
    header = piece.header
    if header is None:
        claim = (entry.producer_id, entry.first_sequence, entry.next_sequence) if entry is not None else (0, 0, 0)
        return BlockCheck(piece.number, *claim, piece.cause)
    if entry is not None and piece.entry() != entry:
        faults.append(f"block {piece.number}: {header.describe()} is not what the index says: {entry}")
    return BlockCheck(piece.number, header.producer_id, header.first_sequence, header.next_sequence, header=header)


# ---- what the pointer says -----------------------------------------------------------------------


def _with_pointer(pointer: Pointer, found: list[BlockCheck], faults: list[str]) -> tuple[list[BlockCheck], bool]:
    """Give unidentified blocks the sequences that only the pointer names.

    Return the blocks, and whether all these sequences were given to a block.
    """
    held: dict[int, RangeSet] = {}
    for block in found:
        if block.producer:
            held.setdefault(block.producer, RangeSet()).add(block.first, block.next)
    anonymous = [block for block in found if not block.producer]
    cause = anonymous[0].cause if anonymous else CorruptDataError("no block has the records that the pointer names")
    number = anonymous[0].number if anonymous else NO_NUMBER
    named = {entry.producer: RangeSet(entry.ranges) for entry in pointer.producers}
    absent = [
        BlockCheck(number, producer, *piece, cause)
        for producer, ranges in named.items()
        for piece in apart(ranges, held.get(producer, RangeSet()))
    ]
    if pointer.producers_complete:
        faults.extend(_unnamed(held, named))
    if absent:
        found = [block for block in found if block.producer] + absent
    return found, not anonymous or pointer.producers_complete


def _unnamed(held: dict[int, RangeSet], named: dict[int, RangeSet]) -> Iterator[str]:
    for producer, ranges in held.items():
        beyond = apart(ranges, named.get(producer, RangeSet()))
        if beyond:
            yield f"blocks hold sequences of producer {producer:016x} that the pointer lacks: {beyond[:3]}"


def _untruths(pointer: Pointer, headers: Sequence[BlockHeader], batch: memoryview) -> Iterator[str]:
    """Say what the pointer states wrongly of a batch whose blocks are all sound.

    Readers pass over whole batches by times, slots and tags: what is too narrow there hides records.
    """
    tag_bits = 0
    for header in headers:
        tag_bits |= header.tag_bits
    stated: dict[str, tuple[object, object]] = {
        "records": (pointer.records, sum(header.count for header in headers)),
        "raw bytes": (pointer.raw_bytes, sum(header.raw_length for header in headers)),
        "least time": (pointer.least_ms, min(header.least_ms for header in headers)),
        "greatest time": (pointer.greatest_ms, max(header.greatest_ms for header in headers)),
        "slots": (
            pointer.slots,
            (min(header.slot_first for header in headers), max(header.slot_last for header in headers)),
        ),
        "tag bits": (pointer.tag_bits, tag_bits),
        "checksum": (pointer.checksum, crc32c(batch)),
    }
    for name, (expected, found) in stated.items():
        if expected != found:
            yield f"pointer says {name} {expected}, the blocks {found}"


@dataclass(slots=True)
class CheckedEntry:
    """An entry of the queue, and what its batch holds; a pointer without a batch has no check.

    With an `error` instead of a pointer it is an entry that can't be read, or, without a body, what retention took
    between the span's question and the read.
    """

    entry: Entry
    pointer: Pointer | None = None
    check: BatchCheck | None = None
    object_bytes: tuple[int, ...] = ()
    error: MemqError | None = None

    @property
    def expired(self) -> bool:
        """Whether retention took entries from here on while the audit ran."""
        return isinstance(self.error, NotFoundError)


def _kept(error: Any) -> tuple[int, str]:
    """Return kind and text of an error."""
    return next((at for at, kind in enumerate(_KEPT) if isinstance(error, kind)), -1), str(error)


def _restored(kind: type, kept: Any) -> MemqError:
    return _KEPT[kept[0]](kept[1])


_KEPT = (CorruptDataError, NotFoundError, UnsupportedFormatError)  # the last for all that may be sound
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_kept)
_DECODER = msgspec.msgpack.Decoder(CheckedEntry, dec_hook=_restored)


def encode_checked(checked: CheckedEntry) -> bytes:
    """Return the entry as bytes for another process of the same version, which decodes the pointer again."""
    return _ENCODER.encode(replace(checked, pointer=None, error=checked.error if checked.expired else None))


def decode_checked(data: bytes) -> CheckedEntry:
    """Return the entry; of a block's cause are left its text, and whether it is damage."""
    checked = _DECODER.decode(data)
    return checked if checked.expired else decoded(checked.entry, checked)


def decoded(entry: Entry, known: CheckedEntry | None = None) -> CheckedEntry:
    """Return an entry with its pointer and what is `known` of it, or with the error of its pointer."""
    pointer = read_pointer(entry.body, newer="return")
    if isinstance(pointer, Pointer):
        return replace(known or CheckedEntry(entry), pointer=pointer)
    return CheckedEntry(entry, error=pointer)
