"""The live audit's state as bytes: stored after each step, and read by the next auditor. Pure."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from memq.audit.finding import Finding
from memq.audit.live.partition_state import PartitionState
from memq.audit.live.report_partition import Client
from memq.audit.minutes import MinuteRow
from memq.errors import CorruptDataError
from memq.format.ranges import RangeSet

Kept = TypeVar("Kept", PartitionState, MinuteRow, Finding, dict[int, Client])


def _flat(value: Any) -> Any:
    """Return a range set as a flat list; sequences are below 2^63, so every number fits."""
    if isinstance(value, RangeSet):
        return value.flat()
    raise NotImplementedError(f"{type(value).__name__} is not stored")


def _rounded(kind: type, value: Any) -> Any:
    if kind is RangeSet:
        return RangeSet.from_flat(value)
    raise NotImplementedError(f"{kind.__name__} is not stored")


_encode = msgspec.msgpack.Encoder(enc_hook=_flat).encode
_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind, dec_hook=_rounded)
    for kind in (PartitionState, MinuteRow, Finding, dict[int, Client])
}


def encode_state(value: Kept) -> bytes:
    """Return the value as bytes for this version of memq."""
    return _encode(value)


def decode_state(kind: type[Kept], data: bytes) -> Kept:
    """Return the value. Raises: CorruptDataError."""
    try:
        value: Kept = _DECODERS[kind].decode(data)
    except (msgspec.MsgspecError, ValueError, AssertionError) as error:
        raise CorruptDataError(
            f"state of the audit can't be read: {error}",
            hint="delete the auditor's database; the auditor then reads everything again",
        ) from error
    return value
