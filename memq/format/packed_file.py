"""Files in the store that are not objects: a 16-byte head, and JSON packed by a block codec.

The codec bounds what comes out, and the checksum covers all but itself: a file is whole, or it is damage.
"""

from __future__ import annotations

import struct

from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, TooLargeError, UnsupportedFormatError
from memq.format.blocks.codec import compress, decompress
from memq.format.blocks.header import CODEC_ZSTD, CODECS, Buffer
from memq.limits import COLD_RAW_BYTES_MAX, FORMAT_VERSION, FORMAT_VERSIONS

MAGIC = b"mqC1"
# magic, checksum | version, kind, codec, 0 | raw length
HEAD = struct.Struct("<4sI BBB1x I")
KIND_MANIFEST, KIND_PART, KIND_SWEEP_LIST = 1, 2, 3
KIND_AT = 9  # the byte that says the kind
CHECKED_FROM = 8  # the checksum covers the file from here to its end


def pack_file(kind: int, raw: bytes, name: str, hint: str) -> bytes:
    """Return a file with JSON of this kind; `name` is for its error. Raises: TooLargeError."""
    if len(raw) > COLD_RAW_BYTES_MAX:
        raise TooLargeError(f"{name} has {len(raw)} bytes, {COLD_RAW_BYTES_MAX} are allowed", hint=hint)
    codec, payload = compress(raw, CODEC_ZSTD)
    checked = HEAD.pack(MAGIC, 0, FORMAT_VERSION, kind, codec, len(raw))[CHECKED_FROM:] + payload
    checksum: int = crc32c(checked)
    return MAGIC + checksum.to_bytes(4, "little") + checked


def unpack_file(kind: int, data: Buffer, name: str) -> Buffer:
    """Return the JSON of a file of this kind; `name` is for errors.

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
    if found != kind or raw_length > COLD_RAW_BYTES_MAX:
        raise CorruptDataError(f"{name} has kind {found} and {raw_length} raw bytes")
    return decompress(view[HEAD.size :], codec, raw_length)
