"""A snapshot of a state log: the state of all machines below an offset.

Bytes <-> values.

The snapshot's bytes are a head and the state of each machine. They are cut into parts of STATE_PART_BYTES_MAX. Each
part is a packed file (`memq.format.packed_file`), so it is either whole or damaged. The entry that names the snapshot
(`memq.format.state_log.entry.StateSnapshot`) has length and checksum of all bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, TooLargeError, UnsupportedFormatError
from memq.format.blocks.header import Buffer
from memq.format.packed_file import KIND_STATE_PART, pack_file, unpack_file
from memq.format.state_log.entry import StateSnapshot
from memq.limits import FORMAT_VERSION, FORMAT_VERSIONS, STATE_NAME_BYTES_MAX, STATE_PART_BYTES_MAX, STATE_PARTS_MAX

MAGIC = b"mqN1"
HEAD = struct.Struct("<4s B3x I I Q Q")  # magic, version, zero, machines, epoch, offset, number
MACHINE = struct.Struct("<HQ")  # name length, state length
_NAME = "snapshot of a state log"


@dataclass(frozen=True, slots=True)
class SavedState:
    """The state by machine that counted below `offset` of a log.

    `number` is the next one of epoch `epoch`.
    """

    offset: int
    epoch: int
    number: int
    machines: Mapping[str, bytes]


def encode_snapshot(saved: SavedState, key: str) -> tuple[StateSnapshot, list[bytes]]:
    """Return the content of the entry that names the snapshot, and the bytes of its parts.

    Raises: TooLargeError for more than STATE_PARTS_MAX parts.
    """
    pieces = [HEAD.pack(MAGIC, FORMAT_VERSION, len(saved.machines), saved.epoch, saved.offset, saved.number)]
    for machine, state in saved.machines.items():
        name = machine.encode()
        pieces += (MACHINE.pack(len(name), len(state)), name, state)
    raw = memoryview(b"".join(pieces))
    count = -(-len(raw) // STATE_PART_BYTES_MAX)
    if count > STATE_PARTS_MAX:
        raise TooLargeError(f"{_NAME} has {len(raw)} bytes, {STATE_PARTS_MAX * STATE_PART_BYTES_MAX} are allowed")
    parts = [
        pack_file(KIND_STATE_PART, bytes(raw[at : at + STATE_PART_BYTES_MAX]), f"part of a {_NAME}", "")
        for at in range(0, len(raw), STATE_PART_BYTES_MAX)
    ]
    return StateSnapshot(saved.offset, saved.number, saved.epoch, len(raw), crc32c(raw), count, key), parts


def snapshot_of(key: str, pieces: Sequence[bytes]) -> StateSnapshot:
    """Return the content of the entry that would name a stored snapshot, from all its pieces.

    Raises: CorruptDataError; `decode_snapshot` finds all other faults.
    """
    raw = b"".join(pieces)
    if len(raw) < HEAD.size:
        raise CorruptDataError(f"{_NAME} '{key}' has {len(raw)} bytes")
    *_, epoch, offset, number = HEAD.unpack_from(raw)
    return StateSnapshot(offset, number, epoch, len(raw), crc32c(raw), len(pieces), key)


def decode_part(data: Buffer) -> bytes:
    """Return the piece of a snapshot in one part. Raises: CorruptDataError, UnsupportedFormatError."""
    return bytes(unpack_file(KIND_STATE_PART, data, f"part of a {_NAME}"))


def decode_snapshot(named: StateSnapshot, pieces: Sequence[bytes]) -> SavedState:
    """Return the state from all pieces of a snapshot. Raises: CorruptDataError, UnsupportedFormatError."""
    raw = memoryview(b"".join(pieces))
    if len(raw) != named.size or crc32c(raw) != named.checksum:
        raise CorruptDataError(f"{_NAME} '{named.key}' has not the {named.size} bytes that its entry names")
    if len(raw) < HEAD.size or bytes(raw[:4]) != MAGIC:
        raise CorruptDataError(f"{_NAME} '{named.key}' has {len(raw)} bytes, and starts with {bytes(raw[:4])!r}")
    _, version, machines, *place = HEAD.unpack_from(raw)
    if version not in FORMAT_VERSIONS:
        raise UnsupportedFormatError(f"{_NAME} '{named.key}' has version {version}")
    if place != [named.epoch, named.offset, named.number]:
        raise CorruptDataError(f"{_NAME} '{named.key}' is of epoch, offset and number {place}")
    found: dict[str, bytes] = {}
    at = HEAD.size
    for _ in range(machines):
        name_length, length = MACHINE.unpack(_piece(raw, at, MACHINE.size))
        at += MACHINE.size
        if not 0 < name_length <= STATE_NAME_BYTES_MAX:
            raise CorruptDataError(f"{_NAME} '{named.key}' has a machine's name of {name_length} bytes")
        try:
            name = bytes(_piece(raw, at, name_length)).decode()
        except UnicodeDecodeError as error:
            raise CorruptDataError(f"{_NAME} '{named.key}' has a name that is no UTF-8: {error}") from error
        if name in found:
            raise CorruptDataError(f"{_NAME} '{named.key}' has machine '{name}' twice")
        found[name] = bytes(_piece(raw, at + name_length, length))
        at += name_length + length
    if at != len(raw):
        raise CorruptDataError(f"{_NAME} '{named.key}' has {len(raw) - at} bytes too many")
    return SavedState(named.offset, named.epoch, named.number, found)


def _piece(raw: memoryview, at: int, size: int) -> memoryview:
    if at + size > len(raw):
        raise CorruptDataError(f"{_NAME} lacks {at + size - len(raw)} bytes")
    return raw[at : at + size]
