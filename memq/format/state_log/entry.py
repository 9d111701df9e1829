"""An entry of a state log: a head, then `opened`, decisions or the name of a snapshot.

Bytes <-> values.

`memq.state_log` says which entries count. An entry is the body of one publication of the queue, so its
length is that of the publication, and at most POINTER_BYTES_MAX. Each entry has one of three contents:

- `OpenedState`: an owner begins an epoch.
- `StateDecisions`: what the owner decided, in order. Each decision is of one machine, and opaque here. An entry without
  decisions proves only that its owner still had the log when it was published.
- `StateSnapshot`: an object in the store has the state below an offset of the log.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, TooLargeError, UnsupportedFormatError
from memq.format.blocks.header import Buffer
from memq.limits import FORMAT_VERSION, FORMAT_VERSIONS, POINTER_BYTES_MAX, STATE_KEY_BYTES_MAX, STATE_NAME_BYTES_MAX

MAGIC = b"mqL1"
HEAD = struct.Struct("<4sI BBH I Q")  # magic, checksum | version, kind, flags, epoch, number
OPENED = struct.Struct("<QH")  # nonce, owner length
DECISION = struct.Struct("<HI")  # machine length, body length
SNAPSHOT = struct.Struct("<QQ I Q I I H")  # offset, number, epoch, bytes, checksum, parts, key length
CHECKED_FROM = 8  # the checksum covers the entry from here to its end
KINDS = {"opened": 1, "decisions": 2, "snapshot": 3}
U32_END = 1 << 32
U64_END = 1 << 64


@dataclass(frozen=True, slots=True)
class OpenedState:
    """The begin of an epoch.

    The random `nonce` identifies its opener; `owner` is the broker, for operators.
    """

    nonce: int
    owner: str


class StateDecision(NamedTuple):
    """One decision: the machine that applies it, and its bytes."""

    machine: str
    body: bytes


@dataclass(frozen=True, slots=True)
class StateDecisions:
    """The decisions of one entry, in order; perhaps none."""

    decisions: tuple[StateDecision, ...]


@dataclass(frozen=True, slots=True)
class StateSnapshot:
    """The name of a stored snapshot: the state that counted below `offset`.

    The next entry after this state has number `number` of epoch `epoch`, unless a higher epoch is opened. The bytes of
    the snapshot (see `snapshot.py`) have length `size` and crc32c `checksum`. They are in `parts` objects, whose keys
    start with `key`.
    """

    offset: int
    number: int
    epoch: int
    size: int
    checksum: int
    parts: int
    key: str


Content = OpenedState | StateDecisions | StateSnapshot


@dataclass(frozen=True, slots=True)
class StateEntry:
    """One entry: epoch of its owner, its number in that epoch (0 for `opened`, too), and its content."""

    epoch: int
    number: int
    content: Content


def encode_state_entry(entry: StateEntry) -> bytes:
    """Return the entry's bytes. Raises: TooLargeError over POINTER_BYTES_MAX."""
    kind, body = _encode_content(entry.content)
    assert 0 < entry.epoch < U32_END, f"epoch {entry.epoch}"
    assert 0 <= entry.number < U64_END, f"number {entry.number}"
    rest = HEAD.pack(MAGIC, 0, FORMAT_VERSION, kind, 0, entry.epoch, entry.number)[CHECKED_FROM:] + body
    if CHECKED_FROM + len(rest) > POINTER_BYTES_MAX:
        text = f"entry of a state log has {CHECKED_FROM + len(rest)} bytes, {POINTER_BYTES_MAX} are allowed"
        raise TooLargeError(text, hint="decide less at once")
    checksum: int = crc32c(rest)
    return MAGIC + checksum.to_bytes(4, "little") + rest


def decision_bytes(machine: str, body: bytes) -> int:
    """Return how many bytes a decision adds to its entry. Raises: TooLargeError if no entry can have it."""
    size = DECISION.size + len(machine.encode()) + len(body)
    if not machine or len(machine.encode()) > STATE_NAME_BYTES_MAX or HEAD.size + size > POINTER_BYTES_MAX:
        raise TooLargeError(
            f"decision of machine {machine[:60]!a} has {size} bytes, {POINTER_BYTES_MAX - HEAD.size} are allowed"
        )
    return size


def decode_state_entry(data: Buffer) -> StateEntry:
    """Read an entry. Raises: CorruptDataError; UnsupportedFormatError for a newer version, kind or flag."""
    view = memoryview(data)
    if not HEAD.size <= len(view) <= POINTER_BYTES_MAX:
        text = f"entry of a state log has {len(view)} bytes, {HEAD.size} to {POINTER_BYTES_MAX} are allowed"
        raise CorruptDataError(text)
    magic, checksum, version, kind, flags, epoch, number = HEAD.unpack_from(view)
    if magic != MAGIC:
        raise CorruptDataError(f"entry of a state log starts with {magic!r}, not with {MAGIC!r}")
    if crc32c(view[CHECKED_FROM:]) != checksum:
        raise CorruptDataError(f"entry of {len(view)} bytes has another checksum than {checksum:08x}")
    if version not in FORMAT_VERSIONS or kind not in _DECODERS or flags:
        raise UnsupportedFormatError(f"entry of a state log has version {version}, kind {kind} and flags {flags}")
    if not epoch:
        raise CorruptDataError("entry of a state log has epoch 0")
    content = _DECODERS[kind](_BodyReader(view[HEAD.size :]))
    if number and isinstance(content, OpenedState):
        raise CorruptDataError(f"'opened' of epoch {epoch} has number {number}")
    return StateEntry(epoch, number, content)


# ---- contents --------------------------------------------------------------------------------


def _encode_content(content: Content) -> tuple[int, bytes]:
    if isinstance(content, OpenedState):
        owner = content.owner.encode()
        assert len(owner) <= STATE_NAME_BYTES_MAX, f"owner of {len(owner)} bytes"
        return KINDS["opened"], OPENED.pack(content.nonce, len(owner)) + owner
    if isinstance(content, StateDecisions):
        pieces: list[bytes] = []
        for machine, body in content.decisions:
            name = machine.encode()
            assert 0 < len(name) <= STATE_NAME_BYTES_MAX, f"machine name of {len(name)} bytes"
            pieces += (DECISION.pack(len(name), len(body)), name, body)
        return KINDS["decisions"], b"".join(pieces)
    key = content.key.encode()
    assert 0 < len(key) <= STATE_KEY_BYTES_MAX, f"key of {len(key)} bytes"
    assert content.parts > 0, f"snapshot '{content.key}' has no part"
    numbers = (content.offset, content.number, content.epoch, content.size, content.checksum, content.parts)
    return KINDS["snapshot"], SNAPSHOT.pack(*numbers, len(key)) + key


class _BodyReader:
    """Takes pieces from the body of an entry in order. Raises: CorruptDataError at its end."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._view) - self._at

    def numbers(self, layout: struct.Struct) -> tuple[int, ...]:
        return layout.unpack(self.take(layout.size))

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise CorruptDataError(f"entry of a state log lacks {size - self.left} bytes")
        self._at += size
        return bytes(self._view[self._at - size : self._at])

    def text(self, size: int, least: int, most: int) -> str:
        if not least <= size <= most:
            raise CorruptDataError(f"entry of a state log has a name of {size} bytes, {least} to {most} are allowed")
        try:
            return self.take(size).decode()
        except UnicodeDecodeError as error:
            raise CorruptDataError(f"entry of a state log has a name that is no UTF-8: {error}") from error

    def end(self) -> None:
        if self.left:
            raise CorruptDataError(f"entry of a state log has {self.left} bytes too many")


def _decode_opened(body: _BodyReader) -> OpenedState:
    nonce, length = body.numbers(OPENED)
    owner = body.text(length, 0, STATE_NAME_BYTES_MAX)
    body.end()
    return OpenedState(nonce, owner)


def _decode_decisions(body: _BodyReader) -> StateDecisions:
    found: list[StateDecision] = []
    while body.left:
        name_length, length = body.numbers(DECISION)
        machine = body.text(name_length, 1, STATE_NAME_BYTES_MAX)
        found.append(StateDecision(machine, body.take(length)))
    return StateDecisions(tuple(found))


def _decode_snapshot(body: _BodyReader) -> StateSnapshot:
    offset, number, epoch, size, checksum, parts, length = body.numbers(SNAPSHOT)
    key = body.text(length, 1, STATE_KEY_BYTES_MAX)
    found = StateSnapshot(offset, number, epoch, size, checksum, parts, key)
    body.end()
    if not (found.epoch and found.parts):
        raise CorruptDataError(f"snapshot '{found.key[:120]}' has epoch {found.epoch} and {found.parts} parts")
    return found


_DECODERS: dict[int, Callable[[_BodyReader], Content]] = {
    KINDS["opened"]: _decode_opened,
    KINDS["decisions"]: _decode_decisions,
    KINDS["snapshot"]: _decode_snapshot,
}
