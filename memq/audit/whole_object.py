"""Reads whole objects by ranges alone, the one way that every store and every broker offers."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from memq.errors import CorruptDataError
from memq.format.block import Buffer
from memq.format.object import index_bytes
from memq.format.pointer import Location
from memq.limits import INDEX_HEAD_BYTES, MIB, TRAILER_BYTES
from memq.storage_handlers.cut_objects import ReadPart, reaches, readable_bytes

OBJECT_BYTES_MAX = 512 * MIB  # the largest batch has 256 MiB, the largest index 64 MiB and its meta


class ReadRange(Protocol):
    """Reads a range of an object of a named store.

    Raises: NotFoundError; CorruptDataError when the object is shorter than the range; DeniedError; RetryableError.
    """

    async def __call__(self, store: str, key: str, offset: int, length: int) -> Buffer:
        """Return `length` bytes from `offset`."""
        ...


async def read_whole(read: ReadRange, location: Location) -> Buffer:
    """Return the whole object that `location` names, however long it really is.

    A sound object takes three reads: the head of the index behind the batch tells the length, the bytes are there,
    and no byte follows. Only another one is measured.
    Raises: as `ReadRange`; CorruptDataError over OBJECT_BYTES_MAX.
    """
    part = partial(read, location.store, location.key)
    size = await _stated_size(read, location)
    if size and not await reaches(part, size + 1):
        try:
            return await part(0, size)
        except CorruptDataError:
            pass  # it is shorter than it says
    size = await _measure(part, location.key)
    return await part(0, size) if size else b""


async def _stated_size(read: ReadRange, location: Location) -> int:
    """Return the length that the index behind the batch states; 0 when there is none."""
    at = location.offset + location.length
    try:
        head = await read(location.store, location.key, at, INDEX_HEAD_BYTES)
        size = at + index_bytes(head) + TRAILER_BYTES
    except CorruptDataError:
        return 0
    return size if size <= OBJECT_BYTES_MAX else 0


async def _measure(read: ReadPart, key: str) -> int:
    """Return the object's length, whatever it says of itself: double until it does not reach that far, then halve."""
    low, high = 0, 1 << 10
    while await reaches(read, high):
        low, high = high, high * 2
        if low > OBJECT_BYTES_MAX:
            raise CorruptDataError(f"object '{key}' has over {low} bytes, {OBJECT_BYTES_MAX} are allowed")
    return await readable_bytes(read, low, high)
