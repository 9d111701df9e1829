"""A run: sorted blocks of a state, in an object. Bytes <-> values.

An object of a run has blocks, their index and a trailer. A block is a packed file (`memq.format.packed_file`) with up
to RUN_BLOCK_HOLDS entries, and so is the index. The index says for each block its bytes, its checksum and its last
entry, so one ranged read gets the entries of a place. The state names the object with length and checksum of its index.
So bytes of another object are found, also if they are whole.

`RunRows` encodes the entries of a block: `held_run.py` those of delayed records, `queue_run.py` those of queue items.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec
from awscrt.checksums import crc32c

from memq.errors import CorruptDataError
from memq.format.blocks.header import Buffer
from memq.format.held_object import Target
from memq.format.packed_file import KIND_RUN_INDEX, pack_file, unpack_file
from memq.limits import RUN_BLOCK_HOLDS

MAGIC = b"mqR1"
TRAILER = struct.Struct("<I 4s")  # bytes of the index, magic
NAME = "run of held blocks"

RunPlace = tuple[int, int, int]  # the order of a run: due time (Unix ms), and two numbers that depend on its kind
BEFORE_ALL: RunPlace = (0, 0, 0)


class PlacedEntry(Protocol):
    """An entry of a run."""

    @property
    def place(self) -> RunPlace:
        """Its place in the order of the run."""
        ...

    @property
    def target(self) -> Target:
        """Its target."""
        ...


Entry = TypeVar("Entry", bound=PlacedEntry)


class RunTarget(msgspec.Struct, frozen=True, array_like=True):
    """A target of a run: how many entries it has there, and the place of the first one."""

    target: Target
    count: int
    first: RunPlace


class RunRows(Protocol[Entry]):
    """Encodes and decodes the entries of one block. `kind` is that of the packed file."""

    @property
    def kind(self) -> int:
        """See above."""
        ...

    def encode(self, entries: Sequence[Entry], number_of: Callable[[Target], int]) -> bytes:
        """Return the bytes of entries; `number_of` returns the number of a target in the index."""
        ...

    def decode(self, data: Buffer, targets: Sequence[RunTarget]) -> list[Entry]:
        """Return the entries. Raises: MsgspecError, UnicodeDecodeError, IndexError."""
        ...


class RunBlockEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One block of a run's object: its bytes, their CRC-32C, its entries, and the place of the last one."""

    offset: int
    length: int
    checksum: int
    count: int
    last: RunPlace


class RunIndex(msgspec.Struct, frozen=True, array_like=True):
    """The index of a run's object. Blocks name targets by their number here."""

    targets: tuple[RunTarget, ...]
    blocks: tuple[RunBlockEntry, ...]


class NamedRun(msgspec.Struct, frozen=True, array_like=True):
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


_encode = msgspec.msgpack.Encoder().encode
_decode_index = msgspec.msgpack.Decoder(RunIndex).decode


class RunWriter(Generic[Entry]):
    """Makes one object of a run, block by block: `add` gets the entries of each block in their order."""

    def __init__(self, rows: RunRows[Entry]) -> None:
        self.count = self.bytes = 0
        self._rows = rows
        self._pieces: list[bytes] = []
        self._entries: list[RunBlockEntry] = []
        self._targets: dict[Target, int] = {}
        self._counts: list[int] = []
        self._firsts: list[RunPlace] = []

    def add(self, entries: Sequence[Entry]) -> None:
        """Add a block, behind all others."""
        assert 0 < len(entries) <= RUN_BLOCK_HOLDS, f"{len(entries)} entries in a block"
        assert not self._entries or self._entries[-1].last < entries[0].place, "blocks are in order"
        for each in entries:
            number = self._targets.setdefault(each.target, len(self._targets))
            if number == len(self._counts):
                self._counts.append(0)
                self._firsts.append(each.place)
            self._counts[number] += 1
        raw = self._rows.encode(entries, self._targets.__getitem__)
        data = pack_file(self._rows.kind, raw, f"block of a {NAME}", "")
        self._entries.append(RunBlockEntry(self.bytes, len(data), crc32c(data), len(entries), entries[-1].place))
        self._pieces.append(data)
        self.bytes += len(data)
        self.count += len(entries)

    def finish(self, key: str, level: int, group: int) -> tuple[NamedRun, list[bytes]]:
        """Return the name of the object, and its bytes."""
        assert self._entries, "a run has entries"
        known = zip(self._targets, self._counts, self._firsts, strict=True)
        index = RunIndex(tuple(RunTarget(*each) for each in known), tuple(self._entries))
        data = pack_file(KIND_RUN_INDEX, _encode(index), f"index of a {NAME}", "")
        size = self.bytes + len(data) + TRAILER.size
        place = (min(self._firsts), self._entries[-1].last)
        run = NamedRun(key, level, group, self.count, size, len(data), crc32c(data), *place)
        return run, [*self._pieces, data, TRAILER.pack(len(data), MAGIC)]


def decode_run_index(run: NamedRun, data: Buffer) -> RunIndex:
    """Return the index of a run's object. Raises: CorruptDataError, UnsupportedFormatError."""
    if len(data) != run.index_bytes or crc32c(data) != run.checksum:
        raise CorruptDataError(f"index of the {NAME} '{run.key}' has not the bytes that the state names")
    return _index_in(data)


def _index_in(data: Buffer) -> RunIndex:
    try:
        found: RunIndex = _decode_index(unpack_file(KIND_RUN_INDEX, data, f"index of a {NAME}"))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptDataError(f"index of a {NAME} can't be read: {error}") from error
    return found


def decode_run_block(rows: RunRows[Entry], index: RunIndex, entry: RunBlockEntry, data: Buffer) -> list[Entry]:
    """Return the entries of one block in their order. Raises: CorruptDataError, UnsupportedFormatError."""
    if len(data) != entry.length or crc32c(data) != entry.checksum:
        raise CorruptDataError(f"block of a {NAME} has not the bytes that the index names")
    try:
        return rows.decode(unpack_file(rows.kind, data, f"block of a {NAME}"), index.targets)
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError) as error:
        raise CorruptDataError(f"block of a {NAME} can't be read: {error}") from error


def open_run(rows: RunRows[Entry], data: Buffer) -> list[Entry]:
    """Return all entries of a whole object, whose name is not known.

    Raises: CorruptDataError, UnsupportedFormatError.
    """
    view = memoryview(data)
    if len(view) < TRAILER.size:
        raise CorruptDataError(f"{NAME} has {len(view)} bytes, its trailer alone has {TRAILER.size}")
    length, magic = TRAILER.unpack_from(view, len(view) - TRAILER.size)
    end = len(view) - TRAILER.size
    if magic != MAGIC or length > end:
        raise CorruptDataError(f"{NAME} of {len(view)} bytes ends with {magic!r} and an index of {length} bytes")
    index = _index_in(view[end - length : end])
    found: list[Entry] = []
    at = 0
    for entry in index.blocks:
        if entry.offset != at:
            raise CorruptDataError(f"{NAME} has a block at {entry.offset}, and not at {at}")
        at += entry.length
        found += decode_run_block(rows, index, entry, view[entry.offset : at])
    if at != end - length:
        raise CorruptDataError(f"{NAME} has {end - length - at} bytes between its blocks and its index")
    return found
