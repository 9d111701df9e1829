"""Reads of an audit: whole objects, and the blocks of a batch from the index of its object."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from memq.audit.account import apart
from memq.client.consumer.fetch.fetcher import ReadRange
from memq.errors import CorruptDataError, NotFoundError, UnsupportedFormatError
from memq.format.blocks.header import Buffer, parse_header
from memq.format.object import BlockEntry, index_bytes, parse_trailer
from memq.format.pointer import Location, Pointer
from memq.format.ranges import RangeSet
from memq.format.report import ReportedDamage
from memq.limits import BLOCK_HEADER_BYTES, INDEX_HEAD_BYTES, OBJECT_BYTES_MAX, TRAILER_BYTES
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.confirmed_reads import ConfirmedReads, ReadPart, Way, index_at, reaches, readable_bytes

HEADERS_MAX = 10_000  # of one batch that are read one by one
Run = tuple[int, int, int]  # producer, first sequence, one above the last


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

    A sound object takes two reads: the batches with the head of the index after it, which tells the length, and the
    rest, whose trailer must say the same. Only another one is measured. What was added after a sound object is not
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


async def read_entries(read: ReadRange, location: Location) -> Sequence[BlockEntry]:
    """Return the index entries of a batch's blocks, read again when they seem to be damaged or missing.

    Raises: NotFoundError; CorruptDataError when the index is damaged or knows no such batch; DeniedError;
    RetryableError.
    """

    async def once() -> Sequence[BlockEntry]:
        index = await index_at(partial(read, location.store), location)
        for batch in index.batches:
            if (batch.offset, batch.length) == (location.offset, location.length):
                return index.blocks_of(batch)
        raise CorruptDataError(f"index of object '{location.key}' has no batch at {location.offset}+{location.length}")

    return await ConfirmedReads().read([Way(f"object '{location.key}'", once)])


async def read_headers(read: ReadRange, location: Location, count: int) -> Sequence[BlockEntry]:
    """Return the entries of a batch's first `count` blocks from their own headers, as far as present.

    That is what tells of an object whose end is gone, and its index with it. Raises: DeniedError; RetryableError.
    """
    found: list[BlockEntry] = []
    at = 0
    while len(found) < min(count, HEADERS_MAX) and at < location.length:
        try:
            header = parse_header(await read(location.store, location.key, location.offset + at, BLOCK_HEADER_BYTES))
        except (CorruptDataError, NotFoundError, UnsupportedFormatError):
            break
        found.append(BlockEntry.from_header(header, at))
        at += header.length
    return found


def named(damage: ReportedDamage, pointer: Pointer, entries: Sequence[BlockEntry]) -> list[ReportedDamage]:
    """Return a damage that does not say whose records it is about as one, or several, that do.

    `entries` are the blocks of the batch that `pointer` names, as the index has them; without an index those before the
    damage, which then continues to the end of the batch. Where that does not add up it is left as it is.
    """
    if damage.producer or damage.first < damage.next:
        return [damage]
    if damage.records >= pointer.records:  # nothing of the batch could be read
        pieces = _all_but(pointer, ())
    elif damage.block < len(entries):
        pieces = _from_block(damage, pointer, entries)
    else:
        pieces = _all_but(pointer, entries)
        if len(entries) != damage.block or sum(next_ - first for _, first, next_ in pieces) != damage.records:
            return [damage]
    return [
        msgspec.structs.replace(damage, producer=producer, first=first, next=next_, records=next_ - first)
        for producer, first, next_ in pieces
    ]


def _from_block(damage: ReportedDamage, pointer: Pointer, entries: Sequence[BlockEntry]) -> list[Run]:
    """Return the content of the blocks with a damage's records: several if an object ends too soon."""
    pieces: list[Run] = []
    records, skipped = 0, frozenset(pointer.skip)
    for number in range(damage.block, len(entries)):
        entry = entries[number]
        if number not in skipped:
            pieces.append((entry.producer_id, entry.first_sequence, entry.next_sequence))
        records += entry.count
        if records >= damage.records:
            break
    return pieces


def _all_but(pointer: Pointer, entries: Sequence[BlockEntry]) -> list[Run]:
    """Return what a pointer names, without what some of its blocks hold."""
    there: dict[int, RangeSet] = {}
    for entry in entries:
        there.setdefault(entry.producer_id, RangeSet()).add(entry.first_sequence, entry.next_sequence)
    return [
        (known.producer, *piece)
        for known in pointer.producers
        for piece in apart(known.ranges, there.get(known.producer, RangeSet()))
    ]
