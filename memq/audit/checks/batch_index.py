"""Reads the blocks of a batch from its object's index, where the pointer alone is not enough."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec

from memq.audit.account import apart
from memq.client.consumer.fetch.fetcher import ReadRange
from memq.errors import CorruptDataError, NotFoundError, UnsupportedFormatError
from memq.format.blocks.header import parse_header
from memq.format.object import BlockEntry
from memq.format.pointer import Location, Pointer
from memq.format.ranges import RangeSet
from memq.format.report import ReportedDamage
from memq.limits import BLOCK_HEADER_BYTES
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way, index_at

HEADERS_MAX = 10_000  # of one batch that are read one by one
Run = tuple[int, int, int]  # producer, first sequence, one above the last


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
    damage, which then goes on to the end of the batch. Where that does not add up it is left as it is.
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
