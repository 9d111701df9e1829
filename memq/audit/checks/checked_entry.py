"""One entry of the queue with the content of its batch, as values and as bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from memq.audit.checks.batch_check import BatchCheck
from memq.errors import CorruptDataError, MemqError, NotFoundError, UnsupportedFormatError
from memq.format.pointer import Pointer, read_pointer
from memq.notification import Entry


@dataclass(slots=True)
class CheckedEntry:
    """An entry of the queue, and what its batch holds; a pointer without a batch has no check.

    With an `error` instead of a pointer it is an entry that can't be read, or, without a body, what retention took
    between the span's question and the read.
    """

    entry: Entry
    pointer: Pointer | None = None
    check: BatchCheck | None = None
    object_bytes: tuple[int, ...] = ()
    error: MemqError | None = None

    @property
    def expired(self) -> bool:
        """Whether retention took entries from here on while the audit ran."""
        return isinstance(self.error, NotFoundError)


def _kept(error: Any) -> tuple[int, str]:
    """Return what is kept of an error: of which kind it is, and its text."""
    return next((at for at, kind in enumerate(_KEPT) if isinstance(error, kind)), -1), str(error)


def _restored(kind: type, kept: Any) -> MemqError:
    return _KEPT[kept[0]](kept[1])


_KEPT = (CorruptDataError, NotFoundError, UnsupportedFormatError)  # the last for all that may be sound
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_kept)
_DECODER = msgspec.msgpack.Decoder(CheckedEntry, dec_hook=_restored)


def encode_checked(checked: CheckedEntry) -> bytes:
    """Return the entry as bytes for another process of the same version, which decodes the pointer again."""
    return _ENCODER.encode(replace(checked, pointer=None, error=checked.error if checked.expired else None))


def decode_checked(data: bytes) -> CheckedEntry:
    """Return the entry; of a block's cause are left its text, and whether it is damage."""
    checked = _DECODER.decode(data)
    return checked if checked.expired else decoded(checked.entry, checked)


def decoded(entry: Entry, known: CheckedEntry | None = None) -> CheckedEntry:
    """Return an entry with its pointer and what is `known` of it, or with the error of its pointer."""
    pointer = read_pointer(entry.body, newer="return")
    if isinstance(pointer, Pointer):
        return replace(known or CheckedEntry(entry), pointer=pointer)
    return CheckedEntry(entry, error=pointer)
