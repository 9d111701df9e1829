"""An object of held blocks: the blocks, an index of their holds, and a trailer. Bytes <-> values.

An object of cancelled holds has no blocks. One lane of its index names the holds.

The blocks lie one after the other, as their producers sealed them. The index says for each block its producer, its
sequences, its target, its lane and when it is due. A state log names the blocks by their ranges, so only a restore
reads the index.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import msgspec
from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, UnsupportedFormatError
from memq.format.blocks.header import Buffer
from memq.format.held_sequences import is_held
from memq.limits import FORMAT_VERSION, FORMAT_VERSIONS

MAGIC = b"mqH1"
CANCELLED_LANE = "cancelled"  # transactions and queues have other lanes
TRAILER = struct.Struct("<II I 4s")  # bytes and crc32c of the index, version, magic


class HoldId(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Identity of a hold: its producer, and the sequence of its first record."""

    producer: int
    first: int


class Target(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A write partition that gets held records."""

    topic: str
    topic_id: str
    partition: int


class HeldBlock(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One held block: its hold, the end `next` of its sequences, and its bytes in an object.

    It is due at `due_ms` (Unix ms). 0: it has no time, and a decision releases its lane, as that of a transaction.
    """

    id: HoldId
    next: int
    due_ms: int
    offset: int
    length: int

    @property
    def counted(self) -> int:
        """How many of its records are known as held by their sequences: all, or none of an earlier release."""
        return self.next - self.id.first if is_held(self.id.first) else 0


class HeldLane(msgspec.Struct, frozen=True, array_like=True):
    """Held blocks of one target and lane."""

    target: Target
    lane: str
    blocks: tuple[HeldBlock, ...]


class IndexedLane(HeldLane, frozen=True, array_like=True):
    """A lane in the index of an object, with the shard that holds it.

    Lanes of two shards may have the same name. 0: an earlier release has not said it.
    """

    shard: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[IndexedLane, ...]).decode


def held_object_end(lanes: Sequence[HeldLane], shard: int) -> bytes:
    """Return what follows the blocks: index and trailer."""
    index = _encode(tuple(IndexedLane(each.target, each.lane, each.blocks, shard) for each in lanes))
    return index + TRAILER.pack(len(index), crc32c(index), FORMAT_VERSION, MAGIC)


def cancelled_object(holds: Iterable[HoldId], shard: int) -> bytes:
    """Return an object that says that a shard has dropped these holds. Earlier releases pass over it."""
    blocks = tuple(HeldBlock(each, each.first + 1, 0, 0, 0) for each in holds)
    return held_object_end((HeldLane(Target("", "", 0), CANCELLED_LANE, blocks),), shard)


def held_object_index(data: Buffer) -> tuple[IndexedLane, ...]:
    """Return the index of a whole object.

    Raises: CorruptDataError; UnsupportedFormatError for a newer version.
    """
    view = memoryview(data)
    if len(view) < TRAILER.size:
        raise CorruptDataError(f"object of held blocks has {len(view)} bytes, its trailer alone has {TRAILER.size}")
    length, checksum, version, magic = TRAILER.unpack_from(view, len(view) - TRAILER.size)
    if magic != MAGIC:
        raise CorruptDataError(f"object of held blocks ends with {magic!r}, not with {MAGIC!r}")
    if version not in FORMAT_VERSIONS:
        raise UnsupportedFormatError(f"object of held blocks has version {version}")
    begin = len(view) - TRAILER.size - length
    if begin < 0 or crc32c(view[begin : begin + length]) != checksum:
        raise CorruptDataError(f"index of held blocks of {length} bytes has another checksum than {checksum:08x}")
    try:
        lanes: tuple[IndexedLane, ...] = _decode(view[begin : begin + length])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptDataError(f"index of held blocks can't be read: {error}") from error
    if any(block.offset + block.length > begin for lane in lanes for block in lane.blocks):
        raise CorruptDataError("index of held blocks names bytes that the object does not have")
    return lanes
