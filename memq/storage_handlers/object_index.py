"""Reads the index of a stored object without its batches: by the size, or by a pointer.

Nothing is called damaged or missing on one fetch: `read_index` and `read_batch_entries` fetch again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from memq.errors import CorruptDataError, NotFoundError
from memq.format.batch import counts_all
from memq.format.blocks.header import Buffer
from memq.format.object import BlockEntry, ObjectIndex, Trailer, index_bytes, parse_index, parse_trailer
from memq.format.pointer import Location, Pointer
from memq.limits import INDEX_HEAD_BYTES, TRAILER_BYTES
from memq.runtime.logs import EventLog
from memq.storage_handlers import ObjectEntry, ObjectReader
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way

TAIL_BYTES = 16 << 10  # an index of 100 batches: most come with one request


async def read_index(store: ObjectReader, entry: ObjectEntry) -> tuple[ObjectIndex, Trailer]:
    """Return an object's index and its trailer, read again when it seems to be damaged.

    Raises: as the store, CorruptDataError, UnsupportedFormatError.
    """
    return await ConfirmedReads().read([Way(f"object '{entry.key}'", partial(_read_once, store, entry))])


async def _read_once(store: ObjectReader, entry: ObjectEntry) -> tuple[ObjectIndex, Trailer]:
    at = max(0, entry.size - TAIL_BYTES)
    tail = memoryview(await store.get_range(entry.key, at, entry.size - at) if entry.size else b"")
    trailer = parse_trailer(tail[-TRAILER_BYTES:], entry.size)
    if trailer.index_offset >= at:
        return parse_index(tail[trailer.index_offset - at : -TRAILER_BYTES], trailer), trailer
    return parse_index(await store.get_range(entry.key, trailer.index_offset, trailer.index_length), trailer), trailer


async def read_batch_entries(
    stores: Mapping[str, ObjectReader], pointer: Pointer, events: EventLog | None = None
) -> tuple[BlockEntry, ...]:
    """Return the entries of the blocks of a batch, by two ranged reads of a copy of it.

    `events` get what another fetch contradicted. Otherwise as `read_index`.
    """
    ways = [
        Way(f"object '{location.key}'", partial(_entries_once, stores[location.store], location, pointer))
        for location in pointer.locations
        if location.store in stores
    ]
    if not ways:
        raise NotFoundError(f"batch {pointer.batch_sequence} is in no store of this broker")
    return await ConfirmedReads(events).read(ways)


async def _entries_once(store: ObjectReader, location: Location, pointer: Pointer) -> tuple[BlockEntry, ...]:
    entries = (await index_at(store.get_range, location)).blocks_in(location.offset, location.length)
    if not counts_all(pointer, entries):
        raise CorruptDataError(f"object '{location.key}': its index has not the {pointer.records} records of a batch")
    return entries


async def index_at(read: Callable[[str, int, int], Awaitable[Buffer]], location: Location) -> ObjectIndex:
    """Return the index of the object that a pointer names, by two ranged reads.

    `read` takes key, offset and length. This is one fetch. Raises: as `read`, CorruptDataError, UnsupportedFormatError.
    """
    at = location.index_offset
    length = index_bytes(await read(location.key, at, INDEX_HEAD_BYTES))
    tail = memoryview(await read(location.key, at, length + TRAILER_BYTES))
    return parse_index(tail[:length], parse_trailer(tail[length:], at + length + TRAILER_BYTES))
