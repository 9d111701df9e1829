"""Checks one object from end to end: trailer, index, each block's checksum, columns and header."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from memq.errors import CorruptDataError, MemqError
from memq.format.batch import BlockPiece, cut_blocks, numbered_entries
from memq.format.blocks.columns import BlockReader, verify_block
from memq.format.blocks.header import BlockHeader
from memq.format.cold import decode_cold_manifest, decode_cold_part
from memq.format.manifest import decode_manifest
from memq.format.object import BlockEntry, ObjectIndex, open_object
from memq.format.packed_file import KIND_AT, KIND_MANIFEST, KIND_PART, KIND_SWEEP_LIST, MAGIC
from memq.format.sweep_list import decode_sweep_list

_PACKED: dict[int, Callable[[bytes], object]] = {
    KIND_MANIFEST: decode_cold_manifest,
    KIND_PART: decode_cold_part,
    KIND_SWEEP_LIST: decode_sweep_list,
}


@dataclass(frozen=True, slots=True)
class ObjectFinding:
    """Fault at a byte of an object. `code` is the error's: corrupt-data or unsupported-format."""

    offset: int
    code: str
    text: str


@dataclass(slots=True)
class ObjectVerdict:
    """The checks of one object and their findings."""

    index: ObjectIndex | None = None
    blocks: int = 0
    records: int = 0
    findings: list[ObjectFinding] = field(default_factory=list)

    def add(self, offset: int, error: MemqError) -> None:
        """Note what is wrong at `offset`."""
        self.findings.append(ObjectFinding(offset, error.code, str(error)))


def check_object(data: memoryview) -> ObjectVerdict:
    """Check a whole object. Nothing is raised: what is wrong is in the verdict, block by block."""
    verdict = ObjectVerdict()
    try:
        verdict.index = open_object(data)
    except MemqError as error:
        verdict.add(len(data), error)
    for piece in _pieces(data, verdict.index):
        try:
            reader = piece.reader()
            if verdict.index is not None:
                _check_entry(verdict.index.blocks[piece.number], reader.header)
            verify_block(reader)
        except MemqError as error:
            verdict.add(piece.at, error)
        else:
            verdict.blocks += 1
            verdict.records += piece.records
    return verdict


def check_file(name: str, data: memoryview) -> ObjectVerdict:
    """Check one file of a store: an object, or another file, by its first bytes or its name.

    Nothing is raised: what is wrong is in the verdict.
    """
    if bytes(data[: len(MAGIC)]) == MAGIC:
        decode = _PACKED.get(data[KIND_AT] if len(data) > KIND_AT else 0, decode_cold_manifest)
    elif "/commits/" in name:
        decode = partial(decode_manifest, name=name)
    else:
        return check_object(data)
    verdict = ObjectVerdict()
    try:
        decode(bytes(data))
    except MemqError as error:
        verdict.add(0, error)
    return verdict


def readable_blocks(data: memoryview) -> Iterator[tuple[int, BlockReader | MemqError]]:
    """Yield place and reader of each block, or its error; by the index, or by a scan when that is lost."""
    index: ObjectIndex | None = None
    try:
        index = open_object(data)
    except MemqError as error:
        yield len(data), error
    for piece in _pieces(data, index):
        yield piece.at, piece.cause or piece.reader()


def _pieces(data: memoryview, index: ObjectIndex | None) -> Iterator[BlockPiece]:
    return cut_blocks(data, run=None if index is None else numbered_entries(index.blocks))


def _check_entry(entry: BlockEntry, header: BlockHeader) -> None:
    if BlockEntry.from_header(header, entry.offset) != entry:
        raise CorruptDataError(f"{header.describe()} is not the block that the index names: {entry}")
