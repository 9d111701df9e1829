"""Packed files in the store, a 16-byte head and packed bytes, and one kind of them: lists of a sweep.

Manifests and parts of compacted partitions (`memq.format.compaction_manifest`), parts of snapshots of a state log
and pieces of runs (`memq.format.state_log`) are the other kinds. Those of state logs are no JSON. The codec bounds
the unpacked size. Magic and checksum protect every byte: a file is either whole or damaged.
"""

from __future__ import annotations

import struct
from typing import Annotated, NamedTuple

import msgspec
from awscrt.checksums import crc32c
from msgspec import Meta

from memq.errors import CorruptDataError, TooLargeError, UnsupportedFormatError
from memq.format.blocks.codec import compress, decompress
from memq.format.blocks.header import CODEC_ZSTD, CODECS, Buffer
from memq.format.pointer import Number, Text, Time
from memq.limits import COMPACTION_RAW_BYTES_MAX, FORMAT_VERSION, FORMAT_VERSIONS

MAGIC = b"mqC1"
# magic, checksum | version, kind, codec, 0 | raw length
HEAD = struct.Struct("<4sI BBB1x I")
KIND_MANIFEST, KIND_PART, KIND_SWEEP_LIST, KIND_STATE_PART, KIND_RUN_BLOCK, KIND_RUN_INDEX = 1, 2, 3, 4, 5, 6
KIND_QUEUE_RUN_BLOCK = 7
KIND_AT = 9  # offset of the kind in the head
CHECKED_FROM = 8  # the checksum covers the file from here to its end
LISTED_MAX = 10_000  # objects of one list: with the longest keys their JSON is 11 MB
Key = Annotated[str, Meta(max_length=1_024)]


def pack_file(kind: int, raw: bytes, name: str, hint: str) -> bytes:
    """Return a file with content of this kind; `name` is for its error. Raises: TooLargeError."""
    if len(raw) > COMPACTION_RAW_BYTES_MAX:
        raise TooLargeError(f"{name} has {len(raw)} bytes, {COMPACTION_RAW_BYTES_MAX} are allowed", hint=hint)
    codec, payload = compress(raw, CODEC_ZSTD)
    checked = HEAD.pack(MAGIC, 0, FORMAT_VERSION, kind, codec, len(raw))[CHECKED_FROM:] + payload
    checksum: int = crc32c(checked)
    return MAGIC + checksum.to_bytes(4, "little") + checked


def unpack_file(kind: int, data: Buffer, name: str) -> Buffer:
    """Return the content of a file of this kind; `name` is for errors.

    Raises: CorruptDataError, UnsupportedFormatError.
    """
    view = memoryview(data)
    if len(view) < HEAD.size:
        raise CorruptDataError(f"{name} has {len(view)} bytes, its head alone has {HEAD.size}")
    magic, checksum, version, found, codec, raw_length = HEAD.unpack_from(view)
    if magic != MAGIC:
        raise CorruptDataError(f"{name} starts with {magic!r}, not with {MAGIC!r}")
    if crc32c(view[CHECKED_FROM:]) != checksum:
        raise CorruptDataError(f"{name} of {len(view)} bytes has another checksum than {checksum:08x}")
    if version not in FORMAT_VERSIONS or codec not in CODECS.values():
        raise UnsupportedFormatError(f"{name} has version {version} and codec {codec}")
    if found != kind or raw_length > COMPACTION_RAW_BYTES_MAX:
        raise CorruptDataError(f"{name} has kind {found} and {raw_length} raw bytes")
    return decompress(view[HEAD.size :], codec, raw_length)


class ListedObject(NamedTuple):
    """One object that a sweep found: key, size in bytes, write time in Unix ms, reason for its deletion."""

    key: Key
    size: Number
    modified_ms: Time
    why: Text


class SweepList(msgspec.Struct, frozen=True, kw_only=True):
    """Objects that a sweep found below `prefix` at `since_ms`, or, if `kept`, that an operator keeps."""

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
