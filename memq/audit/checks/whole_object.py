"""Reads whole objects: at once where a store opens here, by ranges alone through a broker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from memq.client.consumer.fetch.fetcher import ReadRange
from memq.errors import CorruptDataError, UnsupportedFormatError
from memq.format.blocks.header import Buffer
from memq.format.object import index_bytes, parse_trailer
from memq.format.pointer import Location
from memq.limits import INDEX_HEAD_BYTES, OBJECT_BYTES_MAX, TRAILER_BYTES
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.confirmed_reads import ReadPart, reaches, readable_bytes


class ReadObject(Protocol):
    """Reads what a location names, as it lies there: damage is for the audit to find.

    Raises: NotFoundError; DeniedError; RetryableError; CorruptDataError when a batch is not all there;
    CorruptDataError or TooLargeError when a whole object is over OBJECT_BYTES_MAX.
    """

    async def __call__(self, location: Location, *, whole: bool) -> Buffer:
        """Return the bytes of the whole object, however many there are, or those of the batch alone."""
        ...


def store_reader(open_store: Callable[[str], StorageHandler]) -> ReadObject:
    """Return a reader of objects straight from the stores that `open_store` opens by name."""

    async def read(location: Location, *, whole: bool) -> Buffer:
        store = open_store(location.store)
        if whole:
            return await store.get(location.key, checked=False)
        return await store.get_range(location.key, location.offset, location.length)

    return read


async def read_by_ranges(read: ReadRange, location: Location) -> Buffer:
    """Return the whole object that `location` names.

    A sound object takes two reads: the batches with the head of the index behind it, which tells the length, and the
    rest, whose trailer must say the same. Only another one is measured. What was added behind a sound object is not
    seen: the question for one more byte would cost two requests of S3 for each object.
    Raises: as `ReadObject`.
    """
    part = partial(read, location.store, location.key)
    whole = await _read_stated(part, location.index_offset + INDEX_HEAD_BYTES)
    if whole is not None:
        return whole
    size = await _measure(part, location.key)
    return await part(0, size) if size else b""


async def _read_stated(part: Callable[[int, int], Awaitable[Buffer]], known: int) -> Buffer | None:
    """Return the object, whose index's head ends at `known`, if it is as long as index and trailer say.

    Else None.
    """
    try:
        start = memoryview(await part(0, known))
        size = known - INDEX_HEAD_BYTES + index_bytes(start[-INDEX_HEAD_BYTES:]) + TRAILER_BYTES
        if size > OBJECT_BYTES_MAX:
            return None
        rest = memoryview(await part(known, size - known))
        parse_trailer(rest[-TRAILER_BYTES:], size)
    except (CorruptDataError, UnsupportedFormatError):
        return None
    return b"".join((start, rest))


async def _measure(read: ReadPart, key: str) -> int:
    """Return the object's length by reads alone: double until a read fails, then halve."""
    low, high = 0, 1 << 10
    while await reaches(read, high):
        low, high = high, high * 2
        if low > OBJECT_BYTES_MAX:
            raise CorruptDataError(f"object '{key}' has over {low} bytes, {OBJECT_BYTES_MAX} are allowed")
    return await readable_bytes(read, low, high)
