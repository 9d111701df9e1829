"""Reads a read partition for an owner: pointers come with all their producers."""

from __future__ import annotations

from functools import partial

import msgspec

from memq.broker.partition.batch import producer_ranges
from memq.broker.services import Services
from memq.errors import DeniedError, MemqError, RetryableError
from memq.format.pointer import Pointer, pointer_mark, read_pointer, unskipped
from memq.notification import FROM_THE_LOG, Entries, Entry
from memq.notification.log_reader import page_before
from memq.notification.stored_blocks import BlockSearch
from memq.storage_handlers.confirmed_reads import read_batch_entries
from memq.topic import ReadPartition

READ_BYTES = 1 << 20


class PointerResolver:
    """One read partition; `name` identifies it in the log.

    Producers that did not fit into a pointer come from the index of its object. Blocks that readers skip are left out:
    a cut of the log may have taken their first copies.
    """

    def __init__(self, services: Services, partition: ReadPartition, name: str) -> None:
        self._services = services
        self._partition = partition
        self._name = name

    async def read(self, offset: int, end: int) -> Entries:
        """Return some entries from `offset` on, none only at the end. See `page_before`, also for errors."""
        return await page_before(self._services.queue, self._partition, offset, end, READ_BYTES)

    async def has_changed(self, offset: int, mark: int) -> bool:
        """Whether the log now has another pointer at an offset than the one with `mark`; 0: unknown, so False.

        A log may be cut, and filled again up to `offset` or beyond. Then it has new pointers below what is read next.
        Ask after each read: an unchanged entry shows that the log had no other entries below it at that read.
        """
        if not mark:
            return False
        found = await self._services.queue.read(self._partition, offset, FROM_THE_LOG)
        pointer = read_pointer(found[0].body, newer="return") if found and found[0].offset == offset else None
        return isinstance(pointer, Pointer) and pointer_mark(pointer) != mark

    async def pointer(self, entry: Entry) -> Pointer | None:
        """Return the pointer of an entry with all its producers, None when it is damaged.

        Raises: RetryableError; DeniedError, since a store that rotates its keys denies access for a while. If the owner
        continued without producers that it can read later, a repeated block would pass as new.
        """
        pointer = read_pointer(entry.body, newer="raise")
        if not isinstance(pointer, Pointer):
            self._services.counters.damaged_pointers += 1
            self._services.events.error("pointer-damaged", f"{self._name} offset {entry.offset}: {pointer}")
            return None
        if not pointer.locations or (pointer.producers_complete and not pointer.skip):
            return pointer
        try:
            blocks = await read_batch_entries(self._services.stores, pointer, self._services.events)
        except (RetryableError, DeniedError):
            raise
        except MemqError as error:
            self._services.events.error("index-unread", f"{self._name} object {pointer.locations[0].key}: {error}")
            return pointer
        shown = unskipped(pointer, blocks)
        ranges = producer_ranges((block.producer_id, block.first_sequence, block.next_sequence) for block in shown)
        return msgspec.structs.replace(pointer, producers=tuple(ranges))


def search_of(services: Services, read: ReadPartition, partition: int, name: str) -> BlockSearch:
    """Return a search for the blocks of one write partition in the queue, by their objects' indexes."""
    index_of = partial(read_batch_entries, services.stores)
    return BlockSearch(services.queue, read, partition, index_of, services.events, name)
