"""One entry of the queue with the content of its batch, as values and as bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from memq.audit.checks.batch_check import BatchCheck, BlockCheck
from memq.errors import CorruptDataError, MemqError, NotFoundError, UnsupportedFormatError
from memq.format.blocks.header import BlockHeader
from memq.format.pointer import Pointer, decode_pointer
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


class _BlockRow(msgspec.Struct, array_like=True, frozen=True):
    number: int
    producer: int
    first: int
    next: int
    cause: str | None
    unread: bool
    header: tuple[int, ...] | None = None


class _Row(msgspec.Struct, array_like=True, frozen=True):
    offset: int
    time_ms: int
    body: bytes
    object_bytes: tuple[int, ...] = ()
    expired: str = ""
    key: str = ""
    blocks: list[_BlockRow] | None = None  # None: there is no check
    faults: tuple[str, ...] = ()
    complete: bool = True


_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Row)


def encode_checked(checked: CheckedEntry) -> bytes:
    """Return the entry as bytes for another process of the same version."""
    entry, check = checked.entry, checked.check
    row = _Row(entry.offset, entry.time_ms, bytes(entry.body), checked.object_bytes)
    if checked.expired:
        row = msgspec.structs.replace(row, expired=str(checked.error))
    if check is not None:
        blocks = [_block_row(block) for block in check.blocks]
        row = msgspec.structs.replace(row, key=check.key, blocks=blocks, faults=check.faults, complete=check.complete)
    return _ENCODER.encode(row)


def decode_checked(data: bytes) -> CheckedEntry:
    """Return the entry; of a block's cause are left its text, and whether it is damage."""
    row = _DECODER.decode(data)
    entry = Entry(row.offset, row.time_ms, row.body)
    if row.expired:
        return CheckedEntry(entry, error=NotFoundError(row.expired))
    try:
        pointer = decode_pointer(row.body)
    except MemqError as error:
        return CheckedEntry(entry, error=error)
    check = None
    if row.blocks is not None:
        check = BatchCheck(row.key, tuple(map(_block_check, row.blocks)), row.faults, row.complete)
    return CheckedEntry(entry, pointer, check, row.object_bytes)


def _block_row(block: BlockCheck) -> _BlockRow:
    cause = None if block.cause is None else str(block.cause)
    return _BlockRow(block.number, block.producer, block.first, block.next, cause, block.unread, block.header)


def _block_check(row: _BlockRow) -> BlockCheck:
    cause: MemqError | None = None
    if row.cause is not None:
        cause = UnsupportedFormatError(row.cause) if row.unread else CorruptDataError(row.cause)
    header = None if row.header is None else BlockHeader(*row.header)
    return BlockCheck(row.number, row.producer, row.first, row.next, cause, header)
