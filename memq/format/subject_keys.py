"""The file with the keys of subjects: a head with one wrapped key, and a slot for each subject. Pure.

A slot is overwritten in place when its subject is forgotten. docs/formats.md has the layout.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, UnsupportedFormatError
from memq.limits import ENVELOPE_KEY_ID_BYTES_MAX, ENVELOPE_WRAPPED_KEY_BYTES_MAX, FORMAT_VERSION, FORMAT_VERSIONS

MAGIC = b"mqU1"
HEAD = struct.Struct("<4sIB3xHH")  # magic, checksum | version | key id length, wrapped key length
SLOT = struct.Struct("<B3xI16s32s60s12x")  # state | checksum | key id, hash of the subject, wrapped key
SLOTS_AT = 4096
FORGETS_AT = SLOTS_AT - 8  # u64: a reader whose number differs reads all slots again
KEY, FORGOTTEN = 1, 2
KEY_ID_BYTES, HASH_BYTES, WRAPPED_BYTES = 16, 32, 60
_CHECKED_FROM = 8
assert SLOT.size == 128


class Slot(NamedTuple):
    """The key of a subject: its id, the keyed hash of the name, and the wrapped key; b"": forgotten."""

    number: int
    key_id: bytes
    subject: bytes
    wrapped: bytes


def encode_head(key_id: str, wrapped: bytes) -> bytes:
    """Return the head of a new file, up to the slots."""
    name = key_id.encode()
    rest = HEAD.pack(b"", 0, FORMAT_VERSION, len(name), len(wrapped))[_CHECKED_FROM:] + name + wrapped
    checksum: int = crc32c(rest)
    return (MAGIC + checksum.to_bytes(4, "little") + rest).ljust(SLOTS_AT, b"\0")


def decode_head(head: bytes) -> tuple[str, bytes]:
    """Return key id and wrapped key of a head. Raises: CorruptDataError, UnsupportedFormatError."""
    if len(head) < SLOTS_AT:
        raise CorruptDataError(f"a head of {len(head)} bytes is cut")
    magic, checksum, version, name_length, key_length = HEAD.unpack_from(head)
    end = HEAD.size + name_length + key_length
    if magic != MAGIC:
        raise CorruptDataError(f"it is no file of keys of subjects: it starts with {magic!r}")
    if version not in FORMAT_VERSIONS:
        raise UnsupportedFormatError(f"it has version {version}, known are {list(FORMAT_VERSIONS)}")
    if (
        not 0 < name_length <= ENVELOPE_KEY_ID_BYTES_MAX
        or not 0 < key_length <= ENVELOPE_WRAPPED_KEY_BYTES_MAX
        or crc32c(head[_CHECKED_FROM:end]) != checksum
    ):
        raise CorruptDataError("its head is damaged")
    try:
        return head[HEAD.size : HEAD.size + name_length].decode(), head[HEAD.size + name_length : end]
    except UnicodeDecodeError as error:
        raise CorruptDataError("its key id is not UTF-8") from error


def encode_slot(key_id: bytes, subject: bytes, wrapped: bytes) -> bytes:
    """Return a slot with a key."""
    return _packed(KEY, key_id, subject, wrapped)


def encode_forgotten(key_id: bytes) -> bytes:
    """Return the slot of a subject that was forgotten: the id of its key alone."""
    return _packed(FORGOTTEN, key_id, bytes(HASH_BYTES), bytes(WRAPPED_BYTES))


def decode_slots(data: bytes, first: int) -> list[Slot]:
    """Return the slots in `data`, the first of which has the number `first`.

    A last slot that is cut or does not match its checksum is left out: a crash leaves it, and no record has its key.
    Raises: CorruptDataError.
    """
    found: list[Slot] = []
    for at in range(0, len(data) - SLOT.size + 1, SLOT.size):
        state, checksum, key_id, subject, wrapped = SLOT.unpack_from(data, at)
        if crc32c(data[at + _CHECKED_FROM : at + SLOT.size]) != checksum or state not in (KEY, FORGOTTEN):
            if at + 2 * SLOT.size > len(data):
                break
            raise CorruptDataError(f"its slot {first + len(found)} is damaged")
        found.append(Slot(first + len(found), key_id, subject, wrapped if state == KEY else b""))
    return found


def _packed(state: int, key_id: bytes, subject: bytes, wrapped: bytes) -> bytes:
    rest = SLOT.pack(state, 0, key_id, subject, wrapped)
    checksum: int = crc32c(rest[_CHECKED_FROM:])
    return rest[:4] + checksum.to_bytes(4, "little") + rest[_CHECKED_FROM:]
