"""The list of objects that no pointer names: a sweep writes it down for a later one. A packed file."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from memq.errors import CorruptDataError, UnsupportedFormatError
from memq.format.blocks.header import Buffer
from memq.format.packed_file import KIND_SWEEP_LIST, pack_file, unpack_file
from memq.format.pointer import Number, Text, Time

LISTED_MAX = 10_000  # objects of one list: with the longest keys their JSON is 11 MB
Key = Annotated[str, Meta(max_length=1_024)]


class ListedObject(NamedTuple):
    """One object that a pass found: its key, size in bytes, time of writing in Unix ms, and why it may go."""

    key: Key
    size: Number
    modified_ms: Time
    why: Text


class SweepList(msgspec.Struct, frozen=True, kw_only=True):
    """Objects that a pass found below `prefix` at `since_ms`, or, if `kept`, that an operator keeps."""

    cluster: Text
    prefix: Key
    since_ms: Number
    kept: bool
    objects: Annotated[tuple[ListedObject, ...], Meta(max_length=LISTED_MAX)]
    requires: tuple[Text, ...] = ()


_FILE = "list of a sweep"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(SweepList).decode


def encode_sweep_list(found: SweepList) -> bytes:
    """Return the list's bytes. Raises: TooLargeError."""
    return pack_file(KIND_SWEEP_LIST, _encode(found), _FILE, "cut the list")


def decode_sweep_list(data: Buffer) -> SweepList:
    """Read a list. Raises: CorruptDataError, UnsupportedFormatError."""
    try:
        found = _decode(unpack_file(KIND_SWEEP_LIST, data, _FILE))
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{_FILE} can't be read: {error}") from error
    if found.requires:
        raise UnsupportedFormatError(f"{_FILE} requires {list(found.requires)[:8]}")
    for each in found.objects:
        if not each.key.startswith(found.prefix):
            raise CorruptDataError(f"{_FILE} of '{found.prefix}' has '{each.key}'")
    return found
