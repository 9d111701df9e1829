"""The face of the check-back for programs: what a checker is asked, and what it says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from memq.errors import TooLargeError
from memq.limits import TRANSACTION_NOTE_BYTES_MAX


class CheckAnswer(Enum):
    """The end of a transaction, as a checker knows it. UNKNOWN: not yet, the group is asked again."""

    COMMIT = "commit"
    ABORT = "abort"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class UndecidedTransaction:
    """A prepared transaction of the producer group that was not decided in time.

    `id` is unique. `began_ms` is when its producer began it, by that producer's clock (Unix ms). `note` is what the
    program gave with `transaction(note=…)`. `tries` is the number of this question, from 1.
    """

    id: str
    transactional_id: str
    producer_group: str
    topics: tuple[str, ...]
    began_ms: int
    note: bytes
    tries: int


TransactionChecker: TypeAlias = Callable[[UndecidedTransaction], CheckAnswer | Awaitable[CheckAnswer]]


def checked_note(note: bytes | str) -> bytes:
    """Return a note as bytes. Raises: TypeError, TooLargeError."""
    if not isinstance(note, bytes | str):
        raise TypeError(f"note must be bytes or str, not {type(note).__name__}")
    data = note.encode() if isinstance(note, str) else note
    if len(data) > TRANSACTION_NOTE_BYTES_MAX:
        raise TooLargeError(f"a note of {len(data)} bytes, {TRANSACTION_NOTE_BYTES_MAX} are allowed")
    return data
