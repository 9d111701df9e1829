"""Reads the index of an object that lies in the store, without its batches."""

from __future__ import annotations

from functools import partial

from memq.format.object import ObjectIndex, Trailer, parse_index, parse_trailer
from memq.limits import TRAILER_BYTES
from memq.storage_handlers import ObjectEntry, ObjectReader
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way

TAIL_BYTES = 16 << 10  # an index of 100 batches: most come with one request


async def read_index(store: ObjectReader, entry: ObjectEntry) -> tuple[ObjectIndex, Trailer]:
    """Return an object's index and its trailer, read again when it seems to be damaged.

    Raises: as the store, CorruptDataError, UnsupportedFormatError.
    """
    return await ConfirmedReads().read([Way(f"object '{entry.key}'", partial(_read_once, store, entry))])


async def _read_once(store: ObjectReader, entry: ObjectEntry) -> tuple[ObjectIndex, Trailer]:
    tail_bytes = min(entry.size, TAIL_BYTES) if entry.size > TRAILER_BYTES else 0
    tail = memoryview(await store.get_range(entry.key, entry.size - tail_bytes, tail_bytes) if tail_bytes else b"")
    trailer = parse_trailer(tail[-TRAILER_BYTES:], entry.size)
    if trailer.index_length + TRAILER_BYTES <= tail_bytes:
        return parse_index(tail[-TRAILER_BYTES - trailer.index_length : -TRAILER_BYTES], trailer), trailer
    return parse_index(await store.get_range(entry.key, trailer.index_offset, trailer.index_length), trailer), trailer
