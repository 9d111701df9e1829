"""Names the records of damages that consumers report without sequences, from log and index. A shell."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from memq.audit.checks.object_reads import named, read_entries, read_headers
from memq.client.consumer.fetch.fetcher import ReadRange
from memq.errors import MemqError, QueueError, RetryableError, StoreError
from memq.format.object import BlockEntry
from memq.format.pointer import Pointer, read_pointer
from memq.format.report import ReportedDamage
from memq.notification.remote import RemoteQueue
from memq.topic import ReadPartition

NAME_TRIES = 3  # rounds in which pointer and index of a damage are asked for
NAME_S = 5.0  # for both


class DamageNames:
    """Looks up damages; a log that does not answer is asked NAME_TRIES times for each page of reports."""

    def __init__(self, queue: RemoteQueue, read: ReadRange) -> None:
        self._queue = queue
        self._read = read
        self._unnamed: Counter[ReadPartition] = Counter()  # how often damages of this page could not be named, by log

    def forget(self) -> None:
        """End a page of reports: for the next page, all logs are asked again."""
        self._unnamed.clear()

    async def find(self, log: ReadPartition, damage: ReportedDamage) -> list[ReportedDamage]:
        """Return a damage of a log with its producers and sequences from the batch's index.

        After NAME_TRIES tries the damage stays without them, because all other reports wait for it. Raises:
        RetryableError; then the page comes again in the next round.
        """
        if self._unnamed[log] >= NAME_TRIES:
            return [damage]
        try:
            async with asyncio.timeout(NAME_S):
                return await self._looked_up(log, damage)
        except TimeoutError as error:
            failed: RetryableError = StoreError(f"a damage in {log} could not be named within {NAME_S:g} s")
            failed.__cause__ = error
        except RetryableError as error:
            failed = error
        self._unnamed[log] += 1
        if self._unnamed[log] >= NAME_TRIES:
            return [damage]
        raise failed

    async def _looked_up(self, log: ReadPartition, damage: ReportedDamage) -> list[ReportedDamage]:
        pointer = await self._pointer_at(log, damage.offset)
        if pointer is None:
            return [damage]
        try:
            entries = await read_entries(self._read, pointer.locations[0])
        except RetryableError:
            raise
        except MemqError:
            entries = await self._headers(pointer, damage.block)
        return named(damage, pointer, entries)

    async def _headers(self, pointer: Pointer, count: int) -> Sequence[BlockEntry]:
        try:
            return await read_headers(self._read, pointer.locations[0], count)
        except RetryableError:
            raise
        except MemqError:
            return ()

    async def _pointer_at(self, log: ReadPartition, offset: int) -> Pointer | None:
        """Return the pointer that a reader reported; None if retention removed it.

        Raises: QueueError while the log does not show it; as `RemoteQueue.read`.
        """
        entries = await self._queue.read(log, offset, 1)
        if not entries or entries[0].offset != offset:
            if (await self._queue.span(log)).begin > offset:
                return None
            raise QueueError(f"{log} does not show pointer {offset}, which a reader has read")
        pointer = read_pointer(entries[0].body, newer="return")
        return pointer if isinstance(pointer, Pointer) and pointer.locations else None
