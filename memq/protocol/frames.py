"""Frames, a 16-byte prefix and a body: bytes to frames and back, without I/O.

Their tables are in docs/formats.md.

The body of a FORWARD is a length, JSON of that length, which names the partition of the block, and the block.

Frame checksums. A changed bit in a prefix can give an answer to another request, and one in an ACK can ack records that
are not stored. So if both HELLOs have `frame_checksums`, all later frames end with a CRC-32C of prefix and body,
except those whose bodies are large and checked by their content: WRITE, FORWARD, and the answer to READ.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import msgspec
from awscrt.checksums import crc32c

from memq.errors import (
    DamagedMessageError,
    ForeignProtocolError,
    MemqError,
    ProtocolError,
    TooLargeError,
    UnsupportedVersionError,
)
from memq.format.blocks.header import Buffer
from memq.limits import BLOCK_BYTES_MAX, CONTROL_BODY_BYTES_MAX, FRAME_PREFIX_BYTES, KIB, READ_BYTES_MAX
from memq.protocol.messages import Forward, decode_message, encode_message

PREFIX = struct.Struct("<IBBHQ")  # body length, api, flags, stream, argument
WRITE_PREFIX = struct.Struct("<IBBHq")  # a WRITE's argument is signed
ACK = struct.Struct("<IBBHQII")  # a whole frame without positions: prefix, epoch, number of positions
_POSITION = struct.Struct("<QQQQ")
_CHECKSUM_BYTES = 4
ACK_POSITIONS_MAX = 1_024  # in one ACK; further records are acked without a position
HELLO_MAGIC = int.from_bytes(b"memqP1\r\n", "little")
HELLO_BODY_START = b"\r\n"  # with the end of the magic an empty line: a server of HTTP answers at once, not after 10 s
HELLO_BODY_BYTES_MAX = 4 * KIB
VERSIONS = (1, 1)  # least and greatest protocol version that this package speaks
_LENGTH = struct.Struct("<H")
_HEAD_LENGTH = struct.Struct("<I")
HAS_BLOCKS = 1  # flag of a request or an answer: the bytes of blocks follow its JSON
HEAD_BYTES_MAX = 1 * KIB  # of the head (length and JSON) of a FORWARD: a frame has room for it and the largest block


def encode_forward(request: int, message: Forward, block_bytes: int) -> bytes:
    """Build a FORWARD up to its block, which has `block_bytes` bytes: frame prefix and head of the body."""
    head = encode_message(msgspec.structs.replace(message, request=request))
    assert _LENGTH.size + len(head) <= HEAD_BYTES_MAX, f"head of {len(head)} bytes"
    prefix = encode_prefix(Api.FORWARD, 0, request, _LENGTH.size + len(head) + block_bytes)
    return prefix + _LENGTH.pack(len(head)) + head


def decode_forward(body: Buffer, *, checksum_wanted: bool = False) -> tuple[Forward, int]:
    """Return the head of a FORWARD's body, and the offset of the block in the body.

    Raises: ProtocolError; as `decode_message`.
    """
    if len(body) < _LENGTH.size:
        raise ProtocolError(f"FORWARD has a body of {len(body)} bytes")
    start = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    if start > min(len(body), HEAD_BYTES_MAX):
        raise ProtocolError(f"FORWARD's head ends at {start}, its body at {len(body)}")
    return decode_message(bytes(body[_LENGTH.size : start]), Forward, checksum_wanted=checksum_wanted), start


class Api(IntEnum):
    """The type of a frame."""

    HELLO = 1
    OPEN = 2
    CLOSE = 3
    WRITE = 4
    ACK = 5
    NACK = 6
    THROTTLE = 7
    DRAINING = 8
    REDIRECT = 9
    METADATA = 10
    READ = 11
    POLL = 12
    COMMIT = 13
    JOIN = 14
    HEARTBEAT = 15
    ADMIN = 16
    FORWARD = 17
    ERROR = 18
    AUTHENTICATE = 19


class AckLevel(IntEnum):
    """The promise of an ack: none, checked and held by the broker, or stored with a queued pointer."""

    NONE = 0
    ONE = 1
    ALL = 2


BODY_BYTES_MAX: dict[int, int] = {int(api): CONTROL_BODY_BYTES_MAX for api in Api} | {
    Api.HELLO: HELLO_BODY_BYTES_MAX,
    Api.WRITE: BLOCK_BYTES_MAX,
    Api.FORWARD: BLOCK_BYTES_MAX + KIB,
    Api.READ: READ_BYTES_MAX,
    Api.ACK: ACK.size - FRAME_PREFIX_BYTES + ACK_POSITIONS_MAX * _POSITION.size,
    Api.AUTHENTICATE: HELLO_BODY_BYTES_MAX,
    Api.NACK: 64 * KIB,
    Api.THROTTLE: 4 * KIB,
    Api.DRAINING: 4 * KIB,
    Api.REDIRECT: 4 * KIB,
}


class AckPosition(NamedTuple):
    """The position of records `first` up to `next` of a stream: in a pointer's batch, from an index on."""

    first: int
    next: int
    pointer_offset: int
    record_index: int


class Frame(NamedTuple):
    """One received frame; `body` may be a view that is valid only until the receiver returns."""

    api: int
    flags: int
    stream: int
    argument: int
    body: Buffer


def encode_prefix(api: int, stream: int, argument: int, length: int, flags: int = 0) -> bytes:
    """Build the prefix of a frame whose body has `length` bytes.

    Raises: TooLargeError when `length` is over the bound of `api`.
    """
    if length > BODY_BYTES_MAX[api]:
        raise TooLargeError(f"{Api(api).name} body of {length} bytes is over {BODY_BYTES_MAX[api]}")
    return PREFIX.pack(length, api, flags, stream, argument)


def encode_frame(api: int, stream: int, argument: int, body: bytes = b"", flags: int = 0) -> bytes:
    """Build a control frame. Raises: as `encode_prefix`."""
    return encode_prefix(api, stream, argument, len(body), flags) + body


def encode_ack(level: int, stream: int, next_sequence: int, epoch: int, positions: Sequence[AckPosition] = ()) -> bytes:
    """Build an ACK frame: all records below `next_sequence` of the stream are acked at `level`."""
    named = positions[:ACK_POSITIONS_MAX]
    length = ACK.size - FRAME_PREFIX_BYTES + len(named) * _POSITION.size
    head = ACK.pack(length, Api.ACK, level, stream, next_sequence, epoch, len(named))
    return head + b"".join(_POSITION.pack(*position) for position in named) if named else head


def decode_positions(body: Buffer) -> list[AckPosition]:
    """Return the positions in the body of an ACK. Raises: ProtocolError."""
    head = ACK.size - FRAME_PREFIX_BYTES
    if len(body) < head or len(body) != head + int.from_bytes(body[4:8], "little") * _POSITION.size:
        raise ProtocolError(f"the {len(body)} bytes of an ACK do not fit its number of positions")
    return [AckPosition(*position) for position in _POSITION.iter_unpack(body[head:])]


def add_checksum(frame: bytes, body: bytes = b"") -> tuple[bytes, ...]:
    """Return a frame, given as prefix and body or as one piece, with its checksum, in pieces."""
    length = len(frame) - FRAME_PREFIX_BYTES + len(body) + _CHECKSUM_BYTES
    head = length.to_bytes(4, "little") + frame[4:]
    checksum = crc32c(body, crc32c(head)).to_bytes(_CHECKSUM_BYTES, "little")
    return (head, body, checksum) if body else (head + checksum,)


def take_checksum(frame: Frame) -> Frame:
    """Return the frame without its checksum. Raises: DamagedMessageError for a wrong one."""
    api, flags, stream, argument, _ = frame
    body = memoryview(frame.body)  # not copied: blocks may follow its message
    checksum = crc32c(body[:-_CHECKSUM_BYTES], crc32c(PREFIX.pack(len(body), api, flags, stream, argument)))
    if checksum.to_bytes(_CHECKSUM_BYTES, "little") != body[-_CHECKSUM_BYTES:]:
        raise DamagedMessageError(f"damaged on its way: frame of api {api} with {len(body)} bytes has a wrong checksum")
    return Frame(api, flags, stream, argument, body[:-_CHECKSUM_BYTES])


def as_damage(error: MemqError) -> MemqError:
    """Return a ProtocolError of a connection with checksums as damage, another error as it is.

    Both sides speak the protocol there, so the cause is a changed bit: a prefix is read before its checksum.
    """
    return DamagedMessageError(f"damaged on its way: {error}") if isinstance(error, ProtocolError) else error


def encode_with_blocks(api: int, argument: int, message: bytes, blocks_bytes: int) -> bytes:
    """Build a frame with blocks up to its blocks: frame prefix, length of the message, message.

    Raises: as `encode_prefix`.
    """
    length = _HEAD_LENGTH.size + len(message) + blocks_bytes
    return encode_prefix(api, 0, argument, length, HAS_BLOCKS) + _HEAD_LENGTH.pack(len(message)) + message


def split_blocks(frame: Frame) -> tuple[Buffer, memoryview]:
    """Return the message of a frame, and the blocks after it. Raises: ProtocolError."""
    body = memoryview(frame.body)
    if not frame.flags & HAS_BLOCKS:
        return frame.body, body[len(body) :]
    end = _HEAD_LENGTH.size + _HEAD_LENGTH.unpack_from(body)[0] if len(body) >= _HEAD_LENGTH.size else len(body) + 1
    if end > len(body):
        raise ProtocolError(f"the message of a frame with blocks ends at {end}, its body at {len(body)}")
    return body[_HEAD_LENGTH.size : end], body[end:]


def check_prefix(length: int, api: int) -> None:
    """Refuse an unknown api or a length over its bound, before anything is allocated.

    Raises: ProtocolError.
    """
    bound = BODY_BYTES_MAX.get(api)
    if bound is None:
        raise ProtocolError(f"unknown api {api} in a frame prefix")
    if length > bound + _CHECKSUM_BYTES:
        raise ProtocolError(f"{Api(api).name} frame declares {length} bytes, {bound} are allowed")


_HTTP_STARTS = (b"GET ", b"HEAD", b"POST", b"PUT ", b"DELE", b"OPTI", b"PATC", b"CONN", b"TRAC", b"PRI ")


_SERVER_HINT = "give the address in the line 'memq ready: HOST:PORT'; metrics and the dashboard have ports of their own"


def _foreign(protocol: str) -> ForeignProtocolError:
    return ForeignProtocolError(f"this port speaks memq's protocol, but the first bytes are {protocol}")


def check_hello_start(start: bytes) -> None:
    """Check the first bytes of a connection: 4 are enough to detect HTTP or TLS, 16 to accept a HELLO.

    Raises: ForeignProtocolError, which names the detected protocol; ProtocolError for a HELLO that is too long.
    """
    if start[:4] in _HTTP_STARTS:
        raise _foreign("HTTP")
    if start[:2] == b"\x16\x03":
        raise _foreign("TLS")
    if len(start) >= 8 and start[0] == 0 and start[4] == 0 and start[5] <= 0x60 and start[6] == 0:
        raise _foreign("Kafka")  # big-endian size, api key 0 to 96, api version
    if len(start) < FRAME_PREFIX_BYTES:
        return
    length, api, _, _, argument = PREFIX.unpack_from(start)
    if api != Api.HELLO or argument != HELLO_MAGIC:
        raise _foreign(f"unknown ({start[:16].hex()})")
    if length > HELLO_BODY_BYTES_MAX:
        raise ProtocolError(f"HELLO frame declares {length} bytes, {HELLO_BODY_BYTES_MAX} are allowed")


def check_answer_start(start: bytes | bytearray) -> None:
    """Check the first bytes that a server sends: 5 are enough to detect HTTP or an alert of TLS.

    Raises: ForeignProtocolError, which names the detected protocol.
    """
    if start[:5] == b"HTTP/":
        raise ForeignProtocolError("its answer is HTTP", hint=_SERVER_HINT)
    if start[:2] == b"\x15\x03" and start[3:5] == b"\0\2":
        raise ForeignProtocolError("its answer is TLS", hint=_SERVER_HINT)


class FrameReader:
    """Received bytes in, frames out: for the side that gets control frames and READ's answers.

    The caller writes into `get_buffer()` and calls `received(count)`. A frame that is larger than the shared buffer
    gets its own, so most of it is received without a copy. The shared buffer is allocated for the first bytes: a
    refused connection needs none.
    """

    def __init__(self, buffer_bytes: int = 64 * KIB) -> None:
        self._buffer_bytes = buffer_bytes
        self._shared = bytearray()
        self._filled = 0
        self._large: bytearray | None = None
        self._large_prefix: tuple[int, int, int, int] = (0, 0, 0, 0)
        self._large_filled = 0
        self._begun = False  # the first bytes are checked

    def get_buffer(self) -> memoryview:
        """Return where the next bytes go; never empty."""
        if self._large is not None:
            return memoryview(self._large)[self._large_filled :]
        if not self._shared:
            self._shared = bytearray(self._buffer_bytes)
        return memoryview(self._shared)[self._filled :]

    @property
    def partial(self) -> bool:
        """Whether a frame has begun and is not complete."""
        return self._large is not None or self._filled > 0

    def received(self, count: int) -> list[Frame]:
        """Take `count` bytes that were written into the buffer; return the frames that are complete now.

        Bodies are copies, or buffers that belong to the caller. Raises: ProtocolError; as `check_answer_start`.
        """
        if self._large is not None:
            self._large_filled += count
            if self._large_filled < len(self._large):
                return []
            frame = Frame(*self._large_prefix, self._large)
            self._large = None
            return [frame]
        self._filled += count
        if not self._begun:
            check_answer_start(self._shared[:16])
            self._begun = self._filled >= FRAME_PREFIX_BYTES
        return self._take_frames()

    def _take_frames(self) -> list[Frame]:
        frames: list[Frame] = []
        buffer, at, end = self._shared, 0, self._filled
        while end - at >= FRAME_PREFIX_BYTES:
            length, api, flags, stream, argument = PREFIX.unpack_from(buffer, at)
            check_prefix(length, api)
            start = at + FRAME_PREFIX_BYTES
            if start + length > end:
                if FRAME_PREFIX_BYTES + length > len(buffer):
                    self._large = bytearray(length)
                    self._large_prefix = (api, flags, stream, argument)
                    self._large[: end - start] = buffer[start:end]
                    self._large_filled = end - start
                    at = end
                break
            frames.append(Frame(api, flags, stream, argument, bytes(buffer[start : start + length])))
            at = start + length
        if at:
            buffer[: end - at] = buffer[at:end]
            self._filled = end - at
        return frames


def check_version(least: int, greatest: int) -> int:
    """Return the greatest protocol version that both sides speak. Raises: UnsupportedVersionError."""
    version = min(VERSIONS[1], greatest)
    if version < max(VERSIONS[0], least):
        raise UnsupportedVersionError(
            f"the peer speaks protocol versions {least} to {greatest}, this side {VERSIONS[0]} to {VERSIONS[1]}"
        )
    return version
