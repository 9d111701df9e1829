"""Cuts a stored batch into checked blocks, sound or damaged, with their offsets. Pure.

Consumer, audit, compaction, restore and trace all convert stored bytes to blocks here.
The length of a block leads to the next block, so a damaged block may hide those after it. Then the index of the
object gives the offset and the record count of each block. Without an index, the rest of the batch is one damaged
piece. Record indexes count the stored records, so they stay correct after damage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from memq.errors import CorruptDataError, MemqError
from memq.format.blocks.columns import BlockReader
from memq.format.blocks.header import MAGIC, BlockHeader, Buffer, check_block, parse_header, scope_of
from memq.format.object import INDEX_MAGIC, BlockEntry
from memq.format.pointer import Pointer, is_named, named_ranges


class BlockPiece(NamedTuple):
    """One block of a batch: its number, the record index of its first record, its records and its bytes.

    `header` is None when the block is damaged or of a newer version. Then `cause` has the error, and `records` is the
    number of lost records. `at` is the byte offset of the block. Like the offsets of entries, it counts from the start
    of the batch, or of the object.
    """

    number: int
    first: int
    records: int
    header: BlockHeader | None
    data: memoryview
    cause: MemqError | None = None
    at: int = 0

    def sound(self) -> BlockHeader:
        """Return the header. Raises: `cause`."""
        if self.header is None:
            assert self.cause is not None, "a block without a header has a cause"
            raise self.cause
        return self.header

    def entry(self) -> BlockEntry:
        """Return the block's entry in an index. Raises: `cause`."""
        return BlockEntry.from_header(self.sound(), self.at)

    def reader(self) -> BlockReader:
        """Return a reader of the records. Raises: `cause`."""
        return BlockReader(self.data, self.sound())


def cut_batch(pointer: Pointer, data: Buffer, index: Sequence[BlockEntry] | None = None) -> list[BlockPiece]:
    """Cut the bytes of a batch into pieces; blocks that the pointer does not name are damaged.

    `index` has the entries of the batch's blocks, with offsets from the start of `data`. The entries give the offsets
    of the blocks, unless they have another number of records than the pointer.
    `data` may be shorter than the batch: missing bytes are damage.
    """
    run = numbered_entries(index) if index is not None and counts_all(pointer, index) else None
    return _of_pointer(pointer, cut_blocks(data, pointer_scope(pointer), pointer.records, run))


def cut_run(pointer: Pointer, data: Buffer, run: Sequence[NumberedEntry]) -> list[BlockPiece]:
    """Cut the bytes of blocks that lie side by side in a batch into pieces, by their entries."""
    return _of_pointer(pointer, cut_blocks(data, pointer_scope(pointer), None, run, run[0].entry.offset))


def pointer_scope(pointer: Pointer) -> int:
    """Return the scope of the blocks that a pointer names."""
    return scope_of(bytes.fromhex(pointer.topic_id), pointer.partition)


def cut_blocks(
    data: Buffer,
    scope: int | None = None,
    records: int | None = None,
    run: Iterable[NumberedEntry] | None = None,
    start: int = 0,
) -> Iterator[BlockPiece]:
    """Cut blocks of one scope into pieces: by their entries `run`, else by their headers.

    An entry's offset minus `start` is an offset in `data`. Without `run`, `data` is a batch with `records` records.
    Without `run` and `records`, `data` is an object. Its blocks end at the index, or at damage after which no block
    can be found.
    """
    view = memoryview(data)
    return _cut_by_headers(view, records, scope) if run is None else _cut_entries(view, run, start, scope)


class NumberedEntry(NamedTuple):
    """A block's entry in the index, with its number in the batch and the record index of its first record."""

    number: int
    first: int
    entry: BlockEntry


def numbered_entries(entries: Sequence[BlockEntry]) -> list[NumberedEntry]:
    """Number the entries of a batch."""
    firsts = accumulate((entry.count for entry in entries), initial=0)
    return [NumberedEntry(*item) for item in zip(range(len(entries)), firsts, entries, strict=False)]


def _of_pointer(pointer: Pointer, pieces: Iterable[BlockPiece]) -> list[BlockPiece]:
    """Return the pieces; a sound block of another batch becomes a damaged piece.

    A store may return bytes of another object. Without this check, the reader would drop these sound blocks as copies
    and report no damage. The ranges of the pointer do not include the blocks that it skips: these are not checked.
    """
    names, skip = named_ranges(pointer), frozenset(pointer.skip)
    return [
        piece if piece.header is None or piece.number in skip or is_named(names, piece.header) else _stray(piece)
        for piece in pieces
    ]


def _stray(piece: BlockPiece) -> BlockPiece:
    assert piece.header is not None
    cause = CorruptDataError(f"{piece.header.describe()} is not one that the pointer names")
    return piece._replace(header=None, cause=cause)


def counts_all(pointer: Pointer, index: Sequence[BlockEntry]) -> bool:
    """Whether the entries of a batch's blocks have all of its records; those of another object hide some."""
    return sum(entry.count for entry in index) == pointer.records


def missing_batch(pointer: Pointer, cause: MemqError) -> list[BlockPiece]:
    """Return the one damaged piece that a whole lost batch is."""
    return [BlockPiece(0, 0, pointer.records, None, memoryview(b""), cause)]


def is_whole(pieces: Sequence[BlockPiece]) -> bool:
    """Whether no piece is damaged."""
    return all(piece.cause is None for piece in pieces)


def entries_of_batch(entries: Sequence[BlockEntry], offset: int, length: int) -> list[BlockEntry]:
    """Return the index entries of the blocks that lie in `length` bytes from `offset`, counted from there."""
    first = bisect_left(entries, offset, key=lambda entry: entry.offset)
    behind = bisect_left(entries, offset + length, key=lambda entry: entry.offset)
    inside = [entry for entry in entries[first:behind] if entry.offset + entry.length <= offset + length]
    return [entry._replace(offset=entry.offset - offset) for entry in inside]


def _cut_entries(view: memoryview, run: Iterable[NumberedEntry], start: int, scope: int | None) -> Iterator[BlockPiece]:
    for number, first, entry in run:
        block = view[entry.offset - start : entry.offset - start + entry.length]
        try:
            header = check_block(block, scope)
            if header.count != entry.count:
                raise CorruptDataError(f"block has {header.count} records, the index says {entry.count}")
        except MemqError as error:
            yield BlockPiece(number, first, entry.count, None, block, error, entry.offset)
        else:
            yield BlockPiece(number, first, entry.count, header, block, None, entry.offset)


def _cut_by_headers(view: memoryview, records: int | None, scope: int | None) -> Iterator[BlockPiece]:
    at = first = number = 0
    while at < len(view) and (records is not None or view[at : at + 4] != INDEX_MAGIC):
        header: BlockHeader | None = None
        end = len(view)
        try:
            header = parse_header(view, at)
            end = at + header.length
            check_block(view[at:end], scope)
            if records is not None and header.count > records - first:
                raise CorruptDataError(f"{header.describe()} is beyond record {records}, the end of its batch")
        except MemqError as error:
            lost = 0 if records is None else records - first
            # The damage ends where a sound header leads to another block, the index or the end.
            if header is not None and (end == len(view) or view[end : end + 4] in (MAGIC, INDEX_MAGIC)):
                lost = min(lost, header.count)
            else:
                end = len(view)
            yield BlockPiece(number, first, lost, None, view[at:end], error, at)
            first += lost
        else:
            yield BlockPiece(number, first, header.count, header, view[at:end], None, at)
            first += header.count
        at, number = end, number + 1
    if records is not None and first < records:
        cause = CorruptDataError(f"batch ends after {first} of {records} records")
        yield BlockPiece(number, first, records - first, None, view[len(view) :], cause, len(view))
