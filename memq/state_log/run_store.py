"""Stores and reads the runs of a service partition: of held records (H6), and of queue items.

Parts lie: an object that answers 404, short or with other bytes is fetched again. If that does not help, the caller
gets the error, and asks later. No entry is ever passed over because its run can't be read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic

from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, MemqError, NotReadyError, StoreError
from memq.format.state_log.run import (
    BEFORE_ALL,
    Entry,
    NamedRun,
    RunBlockEntry,
    RunIndex,
    RunPlace,
    RunRows,
    RunWriter,
    decode_run_block,
    decode_run_index,
)
from memq.limits import RUN_BLOCK_HOLDS
from memq.runtime.logs import EventLog
from memq.storage_handlers import ObjectReader, StorageHandler
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way

OBJECT_HOLDS = 32_768  # entries in one object of a run, which is about 1 MB: it is in memory until it is stored
INDEXES_MAX = 32  # that stay in memory, 10 kB each
STORE_TIMEOUT_S = 60.0
TRAILER_BYTES = 8


class RunReader(Generic[Entry]):
    """Reads runs whose entries have the format `rows`; remembers some indexes, and the last block.

    Raises: as `ConfirmedReads.read`.
    """

    def __init__(self, store: ObjectReader, rows: RunRows[Entry], events: EventLog | None = None) -> None:
        self._store = store
        self._rows = rows
        self._events = events
        self._indexes: dict[str, RunIndex] = {}
        self._last: tuple[str, int, list[Entry]] = ("", 0, [])

    async def index(self, run: NamedRun) -> RunIndex:
        """Return the index of a run's object."""
        known = self._indexes.get(run.key)
        if known is not None:
            return known

        async def once() -> RunIndex:
            at = run.size - TRAILER_BYTES - run.index_bytes
            return decode_run_index(run, await self._get(run.key, at, run.index_bytes))

        found = await ConfirmedReads(self._events).read([Way(f"run '{run.key}'", once)])
        self._indexes[run.key] = found
        if len(self._indexes) > INDEXES_MAX:
            del self._indexes[next(iter(self._indexes))]
        return found

    async def block(self, run: NamedRun, index: RunIndex, entry: RunBlockEntry) -> list[Entry]:
        """Return the entries of one block in their order."""
        if self._last[:2] == (run.key, entry.offset):
            return self._last[2]

        async def once() -> list[Entry]:
            return decode_run_block(self._rows, index, entry, await self._get(run.key, entry.offset, entry.length))

        found = await ConfirmedReads(self._events).read([Way(f"run '{run.key}'", once)])
        self._last = (run.key, entry.offset, found)
        return found

    async def _get(self, key: str, at: int, length: int) -> bytes:
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                return await self._store.get_range(key, at, length)
        except TimeoutError as error:
            raise StoreError(f"run '{key}' was not read in {STORE_TIMEOUT_S:g} s") from error

    async def blocks(self, run: NamedRun, beyond: RunPlace) -> AsyncIterator[list[Entry]]:
        """Yield the entries beyond a place in their order, block by block."""
        index = await self.index(run)
        for entry in index.blocks:
            if entry.last > beyond:
                found = await self.block(run, index, entry)
                yield [each for each in found if each.place > beyond]


class RunOutput(Generic[Entry]):
    """Stores entries that come in the order of a run, in objects with OBJECT_HOLDS entries each.

    An object is read back before a state may name it, because its entries leave memory and log.
    Raises: NotReadyError when the store does not take an object, or changes it.
    """

    def __init__(
        self, store: StorageHandler, rows: RunRows[Entry], key: Callable[[], str], level: int = 0, group: int = 0
    ) -> None:
        self.runs: list[NamedRun] = []
        self._rows = rows
        self._store = store
        self._key = key
        self._place = (level, group)
        self._writer = RunWriter(rows)
        self._waiting: list[Entry] = []

    async def add(self, entries: Sequence[Entry]) -> None:
        """Add entries; full blocks are encoded, and other tasks run between them."""
        self._waiting += entries
        while len(self._waiting) >= RUN_BLOCK_HOLDS:
            await self._cut()

    async def finish(self) -> tuple[NamedRun, ...]:
        """Store what is left, and return the names of all objects."""
        if self._waiting:
            await self._cut()
        if self._writer.count:
            await self._put()
        return tuple(self.runs)

    async def _cut(self) -> None:
        self._writer.add(self._waiting[:RUN_BLOCK_HOLDS])
        del self._waiting[:RUN_BLOCK_HOLDS]
        await asyncio.sleep(0)
        if self._writer.count >= OBJECT_HOLDS:
            await self._put()

    async def _put(self) -> None:
        run, buffers = self._writer.finish(self._key(), *self._place)
        checksum = 0
        for buffer in buffers:
            checksum = crc32c(buffer, checksum)
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await self._store.put(run.key, buffers, checksum)
                stored = await self._store.get(run.key)
        except (MemqError, TimeoutError) as error:
            raise NotReadyError(f"the store does not take the run '{run.key}': {error!r}") from error
        if (len(stored), crc32c(stored)) != (run.size, checksum):
            raise NotReadyError(f"run '{run.key}' was stored with another content")
        self.runs.append(run)
        self._writer = RunWriter(self._rows)


async def check_run(reader: RunReader[Entry], run: NamedRun) -> None:
    """Read a whole run. Raises: as `RunReader`; CorruptDataError if entries are missing."""
    count = 0
    async for entries in reader.blocks(run, BEFORE_ALL):
        count += len(entries)
    if count != run.count:
        raise CorruptDataError(f"run '{run.key}' has {count} entries, and its state names {run.count}")
