"""A run: held blocks that are due late, sorted by due time, in an object. Bytes <-> values.

An object of a run has blocks, their index and a trailer. A block is a packed file (`memq.format.packed_file`) with up
to RUN_BLOCK_HOLDS holds, and so is the index. The index says for each block its bytes, its checksum and its last hold,
so one ranged read gets the holds of a time. The state names the object with length and checksum of its index. So bytes
of another object are found, also if they are whole.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from awscrt.checksums import crc32c

from memq.errors import CorruptDataError
from memq.format.blocks.header import Buffer
from memq.format.held_object import HeldBlock, HoldId, Target
from memq.format.packed_file import KIND_RUN_BLOCK, KIND_RUN_INDEX, pack_file, unpack_file
from memq.limits import RUN_BLOCK_HOLDS

MAGIC = b"mqR1"
TRAILER = struct.Struct("<I 4s")  # bytes of the index, magic
_NAME = "run of held blocks"

RunPlace = tuple[int, int, int]  # due time (Unix ms), producer and first sequence: the order of a run
BEFORE_ALL: RunPlace = (0, 0, 0)


class RunEntry(NamedTuple):
    """One hold of a run: its block, its target, and the object that has the block."""

    block: HeldBlock
    target: Target
    key: str

    @property
    def place(self) -> RunPlace:
        """Its place in the order of a run."""
        return place_of(self.block)


class RunTarget(msgspec.Struct, frozen=True, array_like=True):
    """A target of a run: how many holds it has there, and the place of the first one."""

    target: Target
    count: int
    first: RunPlace


class RunBlockEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One block of a run's object: its bytes, their CRC-32C, its holds, and the place of the last one."""

    offset: int
    length: int
    checksum: int
    count: int
    last: RunPlace


class RunIndex(msgspec.Struct, frozen=True, array_like=True):
    """The index of a run's object. Blocks name targets by their number here."""

    targets: tuple[RunTarget, ...]
    blocks: tuple[RunBlockEntry, ...]


class HeldRun(msgspec.Struct, frozen=True, array_like=True):
    """The name of a run's object, as a state has it.

    Runs of a higher `level` were made from several runs. The objects of one run have the same `group`.
    """

    key: str
    level: int
    group: int
    count: int
    size: int
    index_bytes: int
    checksum: int  # CRC-32C of the index
    first: RunPlace
    last: RunPlace


class _Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    due_ms: int
    producer: int
    first: int
    next: int
    target: int
    key: int
    offset: int
    length: int


class _Block(msgspec.Struct, frozen=True, array_like=True):
    keys: tuple[str, ...]
    rows: tuple[_Row, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode_block = msgspec.msgpack.Decoder(_Block).decode
_decode_index = msgspec.msgpack.Decoder(RunIndex).decode


def place_of(block: HeldBlock) -> RunPlace:
    """Return the place of a held block in the order of a run."""
    return block.due_ms, block.id.producer, block.id.first


class RunWriter:
    """Makes one object of a run, block by block: `add` gets the holds of each block in their order."""

    def __init__(self) -> None:
        self.count = self.bytes = 0
        self._pieces: list[bytes] = []
        self._entries: list[RunBlockEntry] = []
        self._targets: dict[Target, int] = {}
        self._counts: list[int] = []
        self._firsts: list[RunPlace] = []

    def add(self, holds: Sequence[RunEntry]) -> None:
        """Add a block, behind all others."""
        assert 0 < len(holds) <= RUN_BLOCK_HOLDS, f"{len(holds)} holds in a block"
        assert not self._entries or self._entries[-1].last < holds[0].place, "blocks are in order"
        keys: dict[str, int] = {}
        rows: list[_Row] = []
        for block, target, key in holds:
            number = self._targets.setdefault(target, len(self._targets))
            if number == len(self._counts):
                self._counts.append(0)
                self._firsts.append(place_of(block))
            self._counts[number] += 1
            at = keys.setdefault(key, len(keys))
            rows.append(
                _Row(
                    block.due_ms, block.id.producer, block.id.first, block.next, number, at, block.offset, block.length
                )
            )
        data = pack_file(KIND_RUN_BLOCK, _encode(_Block(tuple(keys), tuple(rows))), f"block of a {_NAME}", "")
        self._entries.append(RunBlockEntry(self.bytes, len(data), crc32c(data), len(rows), holds[-1].place))
        self._pieces.append(data)
        self.bytes += len(data)
        self.count += len(rows)

    def finish(self, key: str, level: int, group: int) -> tuple[HeldRun, list[bytes]]:
        """Return the name of the object, and its bytes."""
        assert self._entries, "a run has holds"
        known = zip(self._targets, self._counts, self._firsts, strict=True)
        index = RunIndex(tuple(RunTarget(*each) for each in known), tuple(self._entries))
        data = pack_file(KIND_RUN_INDEX, _encode(index), f"index of a {_NAME}", "")
        size = self.bytes + len(data) + TRAILER.size
        place = (min(self._firsts), self._entries[-1].last)
        run = HeldRun(key, level, group, self.count, size, len(data), crc32c(data), *place)
        return run, [*self._pieces, data, TRAILER.pack(len(data), MAGIC)]


def decode_run_index(run: HeldRun, data: Buffer) -> RunIndex:
    """Return the index of a run's object. Raises: CorruptDataError, UnsupportedFormatError."""
    if len(data) != run.index_bytes or crc32c(data) != run.checksum:
        raise CorruptDataError(f"index of the {_NAME} '{run.key}' has not the bytes that the state names")
    return _index_in(data)


def _index_in(data: Buffer) -> RunIndex:
    try:
        found: RunIndex = _decode_index(unpack_file(KIND_RUN_INDEX, data, f"index of a {_NAME}"))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptDataError(f"index of a {_NAME} can't be read: {error}") from error
    return found


def decode_run_block(index: RunIndex, entry: RunBlockEntry, data: Buffer) -> list[RunEntry]:
    """Return the holds of one block in their order. Raises: CorruptDataError, UnsupportedFormatError."""
    if len(data) != entry.length or crc32c(data) != entry.checksum:
        raise CorruptDataError(f"block of a {_NAME} has not the bytes that the index names")
    try:
        found: _Block = _decode_block(unpack_file(KIND_RUN_BLOCK, data, f"block of a {_NAME}"))
        return [
            RunEntry(
                HeldBlock(HoldId(row.producer, row.first), row.next, row.due_ms, row.offset, row.length),
                index.targets[row.target].target,
                found.keys[row.key],
            )
            for row in found.rows
        ]
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError) as error:
        raise CorruptDataError(f"block of a {_NAME} can't be read: {error}") from error


def open_run(data: Buffer) -> list[RunEntry]:
    """Return all holds of a whole object, whose name is not known.

    Raises: CorruptDataError, UnsupportedFormatError.
    """
    view = memoryview(data)
    if len(view) < TRAILER.size:
        raise CorruptDataError(f"{_NAME} has {len(view)} bytes, its trailer alone has {TRAILER.size}")
    length, magic = TRAILER.unpack_from(view, len(view) - TRAILER.size)
    end = len(view) - TRAILER.size
    if magic != MAGIC or length > end:
        raise CorruptDataError(f"{_NAME} of {len(view)} bytes ends with {magic!r} and an index of {length} bytes")
    index = _index_in(view[end - length : end])
    found: list[RunEntry] = []
    at = 0
    for entry in index.blocks:
        if entry.offset != at:
            raise CorruptDataError(f"{_NAME} has a block at {entry.offset}, and not at {at}")
        at += entry.length
        found += decode_run_block(index, entry, view[entry.offset : at])
    if at != end - length:
        raise CorruptDataError(f"{_NAME} has {end - length - at} bytes between its blocks and its index")
    return found
