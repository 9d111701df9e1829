"""Records whose value and headers have the key of a subject, inside an encrypted block.

A program names the subject in the header SUBJECT, as `send(…, subject=…)` does. The stored record has the header
SUBJECT_KEY with the id of the subject's key, and an envelope as its value. Readers keep that header: a record that is
sent again, such as a retry or a dead letter, has the key of its subject again.
"""

from __future__ import annotations

import struct

from memq.encryption.cipher import Cipher, new_nonce
from memq.encryption.subjects import SubjectKeys
from memq.errors import CorruptDataError, InvalidRequestError, UnsupportedFormatError
from memq.format.blocks.builder import BlockBuilder, Headers
from memq.format.blocks.columns import BlockReader
from memq.format.blocks.envelope import FORGOTTEN, NONCE_BYTES, SUBJECT, SUBJECT_KEY, TAG_BYTES
from memq.format.blocks.header import TIMESTAMP, BlockHeader
from memq.format.subject_keys import KEY_ID_BYTES

_OWN = "memq-"  # begins the names of headers that memq gives
_RESERVED = frozenset((SUBJECT, SUBJECT_KEY, FORGOTTEN))
VERSION = 1
_DOMAIN = b"mqR1"
_LENGTH = struct.Struct("<I")
_NULL = 0xFFFF_FFFF
_SEALED_AT = 1 + NONCE_BYTES

Content = tuple[bytes | None, Headers]


def seal_record(value: bytes | None, headers: Headers, topic_id: bytes, subjects: SubjectKeys) -> Content:
    """Return value and headers as stored: encrypted if a header names a subject, or its key.

    A record of a subject that was forgotten meanwhile stays forgotten.
    Raises: InvalidRequestError for two subjects; as `SubjectKeys`.
    """
    named = [(name, text) for name, text in headers if name in (SUBJECT, SUBJECT_KEY)]
    if not named:
        return value, headers
    name, text = named[0]
    if len(named) > 1 or not text:
        raise InvalidRequestError("a record has one subject, with a name of at least one character")
    if name == SUBJECT:
        key_id, cipher = subjects.key_for(text.decode())
    else:
        key_id = _key_id(text)
        found = subjects.key(key_id)
        if found is None:
            return _forgotten(headers, key_id)
        cipher = found
    kept = [pair for pair in headers if not pair[0].startswith(_OWN)]
    sealed, own = seal_content(cipher, new_nonce(), encode_content(value, kept), topic_id, key_id)
    return sealed, (*_own(headers), *own)


def seal_content(cipher: Cipher, nonce: bytes, content: bytes, topic_id: bytes, key_id: bytes) -> Content:
    """Return value and headers of a record with the encrypted content."""
    sealed = cipher.seal(nonce, content, _DOMAIN + topic_id + key_id)
    return bytes((VERSION,)) + nonce + sealed, ((SUBJECT_KEY, key_id.hex().encode()),)


def open_record(value: bytes | None, headers: Headers, topic_id: bytes, subjects: SubjectKeys) -> Content:
    """Return value and headers as sent, with SUBJECT_KEY; only FORGOTTEN without its key.

    Raises: as `SubjectKeys`; CorruptDataError.
    """
    text = next((text for name, text in headers if name == SUBJECT_KEY), None)
    if text is None:
        return value, headers
    key_id = _key_id(text)
    cipher = subjects.key(key_id)
    if cipher is None:
        return _forgotten(headers, key_id)
    if value is None or len(value) < _SEALED_AT + TAG_BYTES:
        raise CorruptDataError("a record with the key of a subject has no envelope")
    if value[0] != VERSION:
        raise UnsupportedFormatError(f"the envelope of a record has version {value[0]}, known is {VERSION}")
    data = cipher.open(value[1:_SEALED_AT], value[_SEALED_AT:], _DOMAIN + topic_id + key_id)
    if data is None:
        raise CorruptDataError(f"a record does not fit the key {key_id.hex()} of its subject")
    opened, kept = decode_content(data)
    return opened, (*_own(headers), *kept, (SUBJECT_KEY, text))


def open_records(reader: BlockReader, topic_id: bytes, subjects: SubjectKeys) -> tuple[BlockHeader, bytes] | None:
    """Return a plain block with its records opened; None if none has the key of a subject.

    Raises: as `open_record`.
    """
    if SUBJECT_KEY not in reader.layout().names:
        return None
    header, builder = reader.header, BlockBuilder()
    timed = bool(header.flags & TIMESTAMP)
    for stored, key, stored_headers, time_ms, tag in reader.records():
        value, headers = open_record(stored, stored_headers, topic_id, subjects)
        builder.append(value, key, headers, time_ms if timed else None, tag)
    made = builder.seal(
        producer_id=header.producer_id,
        first_sequence=header.first_sequence,
        scope=header.scope,
        now_ms=header.base_ms,
        codec="none",
        slot_range=(header.slot_first, header.slot_last),
        producer_epoch=header.producer_epoch,
    )
    return made.header, bytes(made.data)


def _own(headers: Headers) -> Headers:
    """Return the headers of memq itself, such as the origin of a retry: they come first."""
    return [pair for pair in headers if pair[0].startswith(_OWN) and pair[0] not in _RESERVED]


def _forgotten(headers: Headers, key_id: bytes) -> Content:
    return None, (*_own(headers), (FORGOTTEN, key_id.hex().encode()))


def _key_id(text: bytes | None) -> bytes:
    try:
        key_id = bytes.fromhex((text or b"").decode())
    except ValueError:
        key_id = b""
    if len(key_id) != KEY_ID_BYTES:
        raise CorruptDataError(f"the header {SUBJECT_KEY} has no key id: {(text or b'')[:40]!r}")
    return key_id


def encode_content(value: bytes | None, headers: Headers) -> bytes:
    """Return value and headers as bytes: a length before each, and the number of headers first."""
    pieces = [_LENGTH.pack(len(headers))]
    for name, content in headers:
        pieces += (_cell(name.encode()), _cell(content))
    return b"".join((*pieces, _cell(value)))


def _cell(content: bytes | None) -> bytes:
    return _LENGTH.pack(_NULL) if content is None else _LENGTH.pack(len(content)) + content


def decode_content(data: bytes) -> Content:
    """Read what `encode_content` has made. Raises: CorruptDataError."""
    at = 0

    def take(size: int) -> bytes:
        nonlocal at
        at += size
        if at > len(data):
            raise CorruptDataError(f"the content of a record is cut at {len(data)} bytes")
        return data[at - size : at]

    def cell() -> bytes | None:
        (size,) = _LENGTH.unpack(take(_LENGTH.size))
        return None if size == _NULL else take(size)

    try:
        (count,) = _LENGTH.unpack(take(_LENGTH.size))
        headers = []
        for _ in range(min(count, len(data))):
            name = cell() or b""
            headers.append((name.decode(), cell()))
        value = cell()
    except UnicodeDecodeError as error:
        raise CorruptDataError("a header's name is not UTF-8") from error
    if at != len(data):
        raise CorruptDataError(f"the content of a record has {len(data) - at} bytes more than its cells")
    return value, tuple(headers)
