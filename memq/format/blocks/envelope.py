"""The envelope of an encrypted block: its bytes, and those that its tag protects. Pure; no keys here.

The payload of a block with codec ENVELOPE is a head, a key id, a wrapped data key, and the encrypted payload with its
tag. Brokers, audits and compaction copy such blocks as they are. docs/formats.md has the layout.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, TooLargeError, UnsupportedFormatError
from memq.format.blocks.builder import SealedBlock
from memq.format.blocks.header import (
    CHECKED_FROM,
    CODEC_LZ4,
    ENVELOPE,
    MAGIC,
    UNPREFIXED,
    BlockHeader,
    Buffer,
    parse_header,
)
from memq.limits import (
    BLOCK_HEADER_BYTES,
    BLOCK_RAW_BYTES_MAX,
    ENVELOPE_KEY_ID_BYTES_MAX,
    ENVELOPE_VERSION,
    ENVELOPE_WRAPPED_KEY_BYTES_MAX,
    FORMAT_VERSION,
)

# version, codec | flags | key id length, wrapped key length | nonce
HEAD = struct.Struct("<BBHHH12s")
NONCE_BYTES, TAG_BYTES = 12, 16
SUBJECT, SUBJECT_KEY, FORGOTTEN = "memq-subject", "memq-subject-key", "memq-forgotten"  # reserved names of headers
SUBJECTS = 1  # some records may have keys of subjects
_FLAGS_KNOWN = 1
_DOMAIN = b"mqA1"  # begins the associated data of a block; that of other things begins otherwise
_PLACE = struct.Struct("<4s16sI")


class Envelope(NamedTuple):
    """A parsed envelope. `sealed` is the encrypted payload with its tag; `head` are the bytes before it."""

    codec: int  # of the payload inside
    flags: int
    nonce: bytes
    key_id: str
    wrapped_key: bytes
    head: bytes
    sealed: memoryview


def encode_envelope_head(codec: int, flags: int, nonce: bytes, key_id: str, wrapped_key: bytes) -> bytes:
    """Return the head of an envelope, with key id and wrapped data key."""
    name = key_id.encode()
    assert 0 < len(name) <= ENVELOPE_KEY_ID_BYTES_MAX, f"key id of {len(name)} bytes"
    assert 0 < len(wrapped_key) <= ENVELOPE_WRAPPED_KEY_BYTES_MAX, f"wrapped key of {len(wrapped_key)} bytes"
    return HEAD.pack(ENVELOPE_VERSION, codec, flags, len(name), len(wrapped_key), nonce) + name + wrapped_key


def parse_envelope(buffer: Buffer, header: BlockHeader) -> Envelope:
    """Read the envelope of a sound block.

    Raises: CorruptDataError; UnsupportedFormatError for a newer one.
    """
    payload = memoryview(buffer)[BLOCK_HEADER_BYTES : header.length]
    if len(payload) < HEAD.size:
        raise CorruptDataError(f"{header.describe()}: an envelope of {len(payload)} bytes is cut")
    version, codec, flags, name_length, key_length, nonce = HEAD.unpack_from(payload)
    if version != ENVELOPE_VERSION or codec > CODEC_LZ4 or flags & ~_FLAGS_KNOWN:
        raise UnsupportedFormatError(
            f"{header.describe()}: envelope has version {version}, codec {codec} and flags {flags:#x}"
        )
    sealed_at = HEAD.size + name_length + key_length
    if (
        not 0 < name_length <= ENVELOPE_KEY_ID_BYTES_MAX
        or not 0 < key_length <= ENVELOPE_WRAPPED_KEY_BYTES_MAX
        or len(payload) < sealed_at + TAG_BYTES
        or header.raw_length < sealed_at + TAG_BYTES + 4 * header.count
    ):
        raise CorruptDataError(
            f"{header.describe()}: a key id of {name_length} and a key of {key_length} bytes do not fit an envelope "
            f"of {len(payload)} bytes for {header.raw_length}"
        )
    try:
        key_id = str(payload[HEAD.size : HEAD.size + name_length], "utf-8")
    except UnicodeDecodeError as error:
        raise CorruptDataError(f"{header.describe()}: its key id is not UTF-8: {error.reason}") from error
    wrapped_key = bytes(payload[HEAD.size + name_length : sealed_at])
    return Envelope(codec, flags, nonce, key_id, wrapped_key, bytes(payload[:sealed_at]), payload[sealed_at:])


class Enveloping(NamedTuple):
    """An envelope before its payload is encrypted; the payload is still plain."""

    start: bytes  # the block's bytes from CHECKED_FROM to the encrypted payload
    associated_data: bytes
    payload: memoryview

    def finish(self, sealed: bytes) -> SealedBlock:
        """Return the block with its encrypted payload."""
        checksum = crc32c(sealed, crc32c(self.start))
        data = b"".join((MAGIC, checksum.to_bytes(4, "little"), self.start, sealed))
        return SealedBlock(parse_header(data), data, len(data))


def begin_envelope(block: SealedBlock, topic_id: bytes, partition: int, head: bytes) -> Enveloping:
    """Begin the envelope of a plain block. Raises: TooLargeError if the block has no room for it."""
    header, over = block.header, len(head) + TAG_BYTES
    if header.raw_length + over > BLOCK_RAW_BYTES_MAX:
        raise TooLargeError(
            f"block of {header.raw_length} bytes has no room for an envelope of {over} bytes: "
            f"{BLOCK_RAW_BYTES_MAX} are allowed",
            hint="send smaller records",
        )
    outer = header._replace(
        codec=ENVELOPE, payload_length=header.payload_length + over, raw_length=header.raw_length + over
    )
    fields = UNPREFIXED.pack(FORMAT_VERSION, *outer[1:])
    payload = memoryview(block.data)[BLOCK_HEADER_BYTES : header.length]
    return Enveloping(fields + head, _associated(topic_id, partition, fields, head), payload)


def associated_data(buffer: Buffer, envelope: Envelope, topic_id: bytes, partition: int) -> bytes:
    """Return the bytes that a tag protects in addition: place, header, and head."""
    fields = bytes(memoryview(buffer)[CHECKED_FROM:BLOCK_HEADER_BYTES])
    return _associated(topic_id, partition, fields, envelope.head)


def open_envelope(header: BlockHeader, envelope: Envelope, payload: bytes) -> tuple[BlockHeader, bytes]:
    """Return the plain block of a decrypted payload: its header, and its bytes with a right checksum.

    Raises: CorruptDataError for a payload that fits no plain block.
    """
    over = len(envelope.head) + TAG_BYTES
    inner = header._replace(codec=envelope.codec, payload_length=len(payload), raw_length=header.raw_length - over)
    fields = UNPREFIXED.pack(FORMAT_VERSION, *inner[1:])
    checksum = crc32c(payload, crc32c(fields))
    data = b"".join((MAGIC, checksum.to_bytes(4, "little"), fields, payload))
    return parse_header(data), data


def _associated(topic_id: bytes, partition: int, fields: bytes, head: bytes) -> bytes:
    assert len(topic_id) == 16, f"topic id of {len(topic_id)} bytes"
    return _PLACE.pack(_DOMAIN, topic_id, partition) + fields + head
