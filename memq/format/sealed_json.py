"""JSON with a checksum, in files and messages: a changed bit can leave valid JSON with other content.

The last field of the document is `"checksum"`: the CRC-32C of the document without that field. Files of earlier writers
have no such field. They are read, too; the caller confirms them by a second read that returns the same bytes.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from awscrt.checksums import crc32c

from memq.errors import CorruptDataError
from memq.format.blocks.header import Buffer

T = TypeVar("T")

_SEAL = re.compile(rb',"checksum":"([0-9a-f]{8})"\}\Z')
_SEAL_BYTES = 23
_decode_any = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def seal(document: bytes) -> bytes:
    """Return a JSON object, which has at least one field, with its checksum as the last field."""
    return document[:-1] + b',"checksum":"%08x"}' % crc32c(document)


def is_sealed(data: Buffer) -> bool:
    """Whether a document ends with a checksum, right or wrong."""
    return _SEAL.search(bytes(data[-_SEAL_BYTES:])) is not None


def check_seal(data: Buffer, name: str, hint: str = "") -> bool:
    """Check the checksum of a document, and return whether it has one; `name` and `hint` are for errors.

    Raises: CorruptDataError.
    """
    found = _SEAL.search(bytes(data[-_SEAL_BYTES:]))
    if found is None:
        return False
    checksum, named = crc32c(b"}", crc32c(data[:-_SEAL_BYTES])), int(found[1], 16)
    if checksum != named:
        raise CorruptDataError(f"{name} of {len(data)} bytes has checksum {checksum:08x}, not {named:08x}", hint=hint)
    return True


def open_sealed(data: Buffer, decoder: msgspec.json.Decoder[T], fields: frozenset[str], name: str, hint: str = "") -> T:
    """Return the content of a file, after a check of its checksum.

    A file without a checksum, of an earlier writer, may have only `fields`; `name` and `hint` are for errors.
    Raises: CorruptDataError.
    """
    text = f"{name} of {len(data)} bytes"
    sealed = check_seal(data, name, hint)
    try:
        content = decoder.decode(data)
        strange = set() if sealed else _decode_any(data).keys() - fields
    except (ValueError, RecursionError) as error:
        raise CorruptDataError(f"{text}, CRC-32C {crc32c(data):08x}, can't be read: {error}", hint=hint) from error
    if strange:
        raise CorruptDataError(f"{text}, CRC-32C {crc32c(data):08x}, has no checksum, but '{min(strange)}'", hint=hint)
    return content
