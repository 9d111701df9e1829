"""Reads pointers in pages and objects a few at a time, and checks each batch for an audit.

It keeps nothing from one pointer to the next, so that a span can be cut into pieces that are checked side by side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from memq.audit.checks.batch_check import (
    BatchCheck,
    CheckedEntry,
    check_batch,
    check_part,
    decoded,
    merge_copies,
    missing_batch,
)
from memq.audit.checks.object_reads import ReadObject
from memq.errors import CorruptDataError, MemqError, NotFoundError, RetryableError
from memq.format.blocks.header import Buffer
from memq.format.key import has_many_batches
from memq.format.pointer import Location, Pointer
from memq.limits import MIB
from memq.notification import Entry, PointerReader, Span
from memq.notification.log_reader import page_before, valid_span
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way
from memq.topic import ReadPartition, Topic

Answer = TypeVar("Answer")
READS_MAX = 4  # objects that are read at once
READ_BYTES_MAX = 64 * MIB  # of batches that are read at once; a larger one is read alone
TRIES = 4
RETRY_S = 0.1  # doubled for each try


class Checker:
    """Checks pieces of read partitions."""

    def __init__(self, queue: PointerReader, read: ReadObject) -> None:
        self._queue = queue
        self._read = read
        self._confirmed = ConfirmedReads()
        self._hopeless = False

    async def span(self, partition: ReadPartition) -> Span:
        """Return what the queue holds of a partition. Raises: as `PointerReader.span`, after some tries."""
        return await self._patiently(partial(valid_span, self._queue, partition))

    async def check(self, partition: ReadPartition, piece: Span) -> AsyncIterator[CheckedEntry]:
        """Yield all entries of a piece, in order. Raises: as `PointerReader.read`, after some tries."""
        group: list[CheckedEntry] = []
        async for checked in self._entries(partition, piece):
            full = len(group) == READS_MAX or sum(map(_bytes_of, group)) + _bytes_of(checked) > READ_BYTES_MAX
            if full or checked.error is not None:
                await self._fill(partition, group)
                for each in group:
                    yield each
                group = []
            group.append(checked)
        await self._fill(partition, group)
        for each in group:
            yield each

    # ---- pointers ----------------------------------------------------------------------------------

    async def _entries(self, partition: ReadPartition, piece: Span) -> AsyncIterator[CheckedEntry]:
        """Yield what `piece` holds, read in pages; say so when retention was faster."""
        first = piece.begin
        while first < piece.end:
            page = await self._patiently(partial(page_before, self._queue, partition, first, piece.end))
            entries = [entry for entry in page if first <= entry.offset < piece.end]
            behind = entries[0].offset if entries else min(page.next, piece.end)
            if behind > first and (await self._queue.span(partition)).begin > first:
                # Offsets need not be dense; but this is a hole that was none when the audit began.
                error = NotFoundError(f"retention removed pointers {first} to {behind - 1} while the audit ran")
                yield CheckedEntry(Entry(first, 0, b""), error=error)
            for entry in entries:
                yield decoded(entry)
            first = page.next

    # ---- objects -----------------------------------------------------------------------------------

    async def _fill(self, partition: ReadPartition, group: Sequence[CheckedEntry]) -> None:
        """Read and check the batches of a few pointers at once."""
        await asyncio.gather(
            *(
                self._check(partition, checked, checked.pointer)
                for checked in group
                if checked.pointer is not None and checked.pointer.kind == "data"
            )
        )

    async def _check(self, partition: ReadPartition, checked: CheckedEntry, pointer: Pointer) -> None:
        copies = [await self._check_copy(partition, checked, pointer, copy) for copy in pointer.locations]
        checked.check = merge_copies(copies)

    async def _check_copy(
        self, partition: ReadPartition, checked: CheckedEntry, pointer: Pointer, location: Location
    ) -> BatchCheck:
        cause: MemqError
        try:
            if has_many_batches(location.key):
                check = await self._check_part(checked, pointer, location)
                if check is not None:
                    return check
            data, check = await self._read_batch(pointer, location)
        except NotFoundError as error:
            cause = CorruptDataError("its object is missing")
            cause.__cause__ = error
            if (await self.span(partition)).begin > checked.entry.offset:
                cause = NotFoundError("retention removed the object while the audit ran")
            return missing_batch(pointer, location, cause)
        except MemqError as error:
            return missing_batch(pointer, location, error)
        checked.object_bytes += (len(data),)
        return check

    async def _read_batch(self, pointer: Pointer, location: Location) -> tuple[Buffer, BatchCheck]:
        """Read and check a batch; what seems to be damaged or missing is read again. Raises: as `ReadObject`."""

        async def read() -> tuple[Buffer, BatchCheck]:
            data = await self._patiently(lambda: self._read(location, whole=True))
            return data, check_batch(pointer, location, data)

        return await self._confirmed.read(
            [Way(f"object '{location.key}'", read)],
            lambda found: not (found[1].damaged or found[1].faults),
            lambda one, other: one[0] == other[0],
        )

    async def _check_part(self, checked: CheckedEntry, pointer: Pointer, location: Location) -> BatchCheck | None:
        """Check one batch of an object of many by its own bytes.

        The result is None if the batch is damaged: only the index shows where.
        The whole object would be read once for each of the batches, thousands, that share it.
        """
        try:
            data = await self._patiently(lambda: self._read(location, whole=False))
        except CorruptDataError:
            return None
        check = check_part(pointer, location, data)
        if check.damaged:
            return None
        checked.object_bytes += (len(data),)
        return check

    async def _patiently(self, ask: Callable[[], Awaitable[Answer]]) -> Answer:
        """Ask again when it may pass; not any more when the last question failed to the end."""
        for number in range(TRIES):
            try:
                answer = await ask()
            except RetryableError:
                if number == TRIES - 1 or self._hopeless:
                    self._hopeless = True
                    raise
                await asyncio.sleep(RETRY_S * 2**number)
            else:
                self._hopeless = False
                return answer
        raise AssertionError("the last try returns or raises")


async def check_one(topic: Topic, queue: PointerReader, read: ReadObject, partition: int, offset: int) -> CheckedEntry:
    """Fetch and check the batch of one pointer of a write partition again.

    An entry with an error when there is none.

    Raises: as `PointerReader.read`, after some tries.
    """
    checker, log = Checker(queue, read), topic.read_partition_of(partition)
    if offset < (await checker.span(log)).end:
        async for checked in checker.check(log, Span(offset, offset + 1)):
            return checked
    return CheckedEntry(Entry(offset, 0, b""), error=NotFoundError(f"the pointer at offset {offset} no longer exists"))


def _bytes_of(checked: CheckedEntry) -> int:
    return sum(location.length for location in checked.pointer.locations) if checked.pointer is not None else 0
