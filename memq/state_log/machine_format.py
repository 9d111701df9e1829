"""The bytes of the decisions and of the state of one machine, as MessagePack."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from memq.errors import CorruptDataError, UnsupportedFormatError


class Versioned(Protocol):
    """A saved state; it has its version."""

    @property
    def version(self) -> int:
        """The version of the state's format."""
        ...


Decision = TypeVar("Decision")
Saved = TypeVar("Saved", bound=Versioned)
Item = TypeVar("Item")


class MachineFormat(Generic[Decision, Saved]):
    """The format of one machine: a union of decisions, and a saved state of versions 1 to `version`.

    `decision` and `snapshot` are the names of the two in errors.
    """

    def __init__(self, decisions: Any, state: type[Saved], version: int, *, decision: str, snapshot: str) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode_decision = msgspec.msgpack.Decoder(decisions).decode
        self._decode_state = msgspec.msgpack.Decoder(state).decode
        self._version = version
        self._decision = decision
        self._snapshot = snapshot

    def encode_decision(self, decision: Decision) -> bytes:
        """Return the bytes of a decision."""
        return self._encode(decision)

    def decode_decision(self, body: bytes) -> Decision:
        """Return a decision. Raises: CorruptDataError."""
        try:
            decision: Decision = self._decode_decision(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptDataError(f"{self._decision} can't be read: {error}") from error
        return decision

    def encode_state(self, state: Saved) -> bytes:
        """Return the bytes of a saved state."""
        return self._encode(state)

    def decode_state(self, body: bytes) -> Saved:
        """Return a saved state. Raises: UnsupportedFormatError for a newer version; CorruptDataError."""
        try:
            saved = self._decode_state(body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptDataError(f"{self._snapshot} can't be read: {error}") from error
        if not 1 <= saved.version <= self._version:
            raise UnsupportedFormatError(f"{self._snapshot} has version {saved.version}, above {self._version}")
        return saved

    def decode_items(self, decoder: msgspec.msgpack.Decoder[Item], items: Iterable[msgspec.Raw]) -> Iterator[Item]:
        """Yield the values that a saved state has as bytes. Raises: CorruptDataError."""
        try:
            yield from map(decoder.decode, items)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CorruptDataError(f"{self._snapshot} can't be read: {error}") from error
