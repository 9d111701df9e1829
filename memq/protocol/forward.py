"""A FORWARD's body: who the block is for, as JSON behind its length, and then the block itself."""

from __future__ import annotations

import struct

from memq.errors import ProtocolError
from memq.limits import KIB
from memq.protocol.frames import Api, encode_prefix
from memq.protocol.messages import Forward, decode_message, encode_message

_LENGTH = struct.Struct("<H")
HEAD_BYTES_MAX = 1 * KIB  # of the JSON and its length: a frame has that much room next to its block


def encode_forward(request: int, message: Forward, block_bytes: int) -> bytes:
    """Build what goes before a block of that many bytes: the frame's prefix and the head of its body."""
    head = encode_message(message)
    assert _LENGTH.size + len(head) <= HEAD_BYTES_MAX, f"head of {len(head)} bytes"
    prefix = encode_prefix(Api.FORWARD, 0, request, _LENGTH.size + len(head) + block_bytes)
    return prefix + _LENGTH.pack(len(head)) + head


def decode_forward(body: bytes | bytearray | memoryview) -> tuple[Forward, int]:
    """Return the head of a FORWARD's body, and where in it the block begins. Raises: ProtocolError."""
    if len(body) < _LENGTH.size:
        raise ProtocolError(f"FORWARD has a body of {len(body)} bytes")
    start = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    if start > min(len(body), HEAD_BYTES_MAX):
        raise ProtocolError(f"FORWARD's head ends at {start}, its body at {len(body)}")
    return decode_message(bytes(body[_LENGTH.size : start]), Forward), start
