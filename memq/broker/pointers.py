"""Reads all pointers of a read partition once, as they are: what retention and the sweep want of them are the keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from memq.errors import CorruptDataError
from memq.format.pointer import Pointer, decode_pointer
from memq.notification import Entry, PointerReader
from memq.topic import ReadPartition

READ_BYTES = 1 << 20


async def pointers_of(
    queue: PointerReader, partition: ReadPartition, damaged: Callable[[str], None]
) -> AsyncIterator[tuple[Entry, Pointer | None]]:
    """Yield each entry with its pointer; None for a damaged one, and `damaged` is told what is wrong.

    Raises: QueueError, NotFoundError, UnsupportedFormatError for a pointer of a newer version.
    """
    offset = 0
    while entries := await queue.read(partition, offset, READ_BYTES):
        for entry in entries:
            try:
                yield entry, decode_pointer(entry.body)
            except CorruptDataError as error:
                damaged(f"topic '{partition.topic}' offset {entry.offset}: {error}")
                yield entry, None
        offset = entries[-1].offset + 1


def keys_of(pointer: Pointer | None) -> list[str]:
    """Return the keys of the objects that a pointer names."""
    return [] if pointer is None else [place.key for place in pointer.locations]
