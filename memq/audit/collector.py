"""Reads what an audit needs, pointers in pages and objects a few at a time, and hands it to the machine in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from memq.audit.auditor import Auditor
from memq.audit.batch_check import BatchCheck, check_batch, check_part, merge_copies, missing_batch
from memq.audit.verdict import THROUGH_STORE, Verdict
from memq.audit.whole_object import ReadObject
from memq.errors import CorruptDataError, MemqError, NotFoundError, RetryableError, TooLargeError
from memq.format.key import shared_prefix
from memq.format.pointer import Location, Pointer, decode_pointer
from memq.limits import MIB, POLL_BYTES_MAX
from memq.notification import Entry, PointerReader, Span
from memq.topic import ReadPartition, Topic, read_partitions

Answer = TypeVar("Answer")
READS_MAX = 4  # objects that are read at once
READ_BYTES_MAX = 64 * MIB  # of batches that are read at once; a larger one is read alone
TRIES = 4
RETRY_S = 0.1  # doubled for each try


async def audit(
    topic: Topic,
    queue: PointerReader,
    read: ReadObject,
    now_ms: int,
    *,
    through: str = THROUGH_STORE,
    moved: Callable[[int], None] | None = None,
) -> Verdict:
    """Audit a topic from the beginning of its queue to its end as it is now (`now_ms`, Unix ms).

    `through` says in the coverage how `read` reads. `moved` is told how many pointers were dealt with.
    What can't be read is in the verdict; no error of queue or store is raised. Raises: TooLargeError for more
    producers or epochs than fit.
    """
    return await Collector(topic, queue, read, through, moved or (lambda count: None)).run(now_ms)


class Collector:
    """One audit on its way."""

    def __init__(
        self, topic: Topic, queue: PointerReader, read: ReadObject, through: str, moved: Callable[[int], None]
    ) -> None:
        self._topic = topic
        self._queue = queue
        self._read = read
        self._moved = moved
        self._auditor = Auditor(topic, through=through)
        self._hopeless = False

    async def run(self, now_ms: int) -> Verdict:
        """Read everything and return the verdict."""
        for partition in read_partitions(self._topic):
            try:
                await self._read_partition(partition)
            except TooLargeError:
                raise  # the auditor's own bound
            except MemqError as error:
                self._auditor.fail_partition(partition.partition, error)
        return self._auditor.verdict(now_ms)

    # ---- pointers ----------------------------------------------------------------------------------

    async def _read_partition(self, partition: ReadPartition) -> None:
        span = await self._patiently(lambda: self._queue.span(partition))
        self._auditor.open_partition(partition.partition, span)
        group: list[tuple[Entry, Pointer]] = []
        async for entry in self._entries(partition, span):
            try:
                pointer = decode_pointer(entry.body)
            except MemqError as error:
                await self._take(partition, group)
                group = []
                self._auditor.take_unreadable(partition.partition, entry.offset, error)
                continue
            if len(group) == READS_MAX or sum(map(_bytes_of, group)) + _bytes_of((entry, pointer)) > READ_BYTES_MAX:
                await self._take(partition, group)
                group = []
            group.append((entry, pointer))
        await self._take(partition, group)

    async def _entries(self, partition: ReadPartition, span: Span) -> AsyncIterator[Entry]:
        """Yield what `span` holds, in pages; say so when retention was faster."""
        first = span.begin
        while first < span.end:
            page = await self._read_page(partition, first)
            entries = [entry for entry in page if first <= entry.offset < span.end]
            behind = entries[0].offset if entries else span.end
            if behind > first:
                await self._note_expired(partition, first, behind)
            for entry in entries:
                yield entry
            first = entries[-1].offset + 1 if entries else span.end
            self._moved(len(entries))

    async def _read_page(self, partition: ReadPartition, offset: int) -> Sequence[Entry]:
        return await self._patiently(lambda: self._queue.read(partition, offset, POLL_BYTES_MAX))

    async def _note_expired(self, partition: ReadPartition, first: int, next_: int) -> None:
        """Offsets need not be dense; when retention took some since the start, what they held is not known."""
        if (await self._queue.span(partition)).begin > first:
            error = NotFoundError(f"retention took pointers {first} to {next_ - 1} while the audit ran")
            self._auditor.fail_partition(partition.partition, error)

    # ---- objects -----------------------------------------------------------------------------------

    async def _take(self, partition: ReadPartition, group: Sequence[tuple[Entry, Pointer]]) -> None:
        """Read the batches of a few pointers at once, and hand them over in order."""
        reads = (self._check(partition, entry, pointer) for entry, pointer in group if pointer.kind == "data")
        checks = iter(await asyncio.gather(*reads))
        for entry, pointer in group:
            if pointer.kind == "data":
                self._auditor.take_batch(partition.partition, entry.offset, entry.time_ms, pointer, next(checks))
            else:
                self._auditor.take_control(partition.partition, entry.offset, entry.time_ms, pointer)

    async def _check(self, partition: ReadPartition, entry: Entry, pointer: Pointer) -> BatchCheck:
        return merge_copies([await self._check_copy(partition, entry, pointer, copy) for copy in pointer.locations])

    async def _check_copy(
        self, partition: ReadPartition, entry: Entry, pointer: Pointer, location: Location
    ) -> BatchCheck:
        cause: MemqError
        try:
            if location.key.startswith(shared_prefix(pointer.cluster)):
                check = await self._check_part(pointer, location)
                if check is not None:
                    return check
            data = await self._patiently(lambda: self._read(location, whole=True))
        except NotFoundError as error:
            cause = CorruptDataError("its object is missing")
            cause.__cause__ = error
            if (await self._patiently(lambda: self._queue.span(partition))).begin > entry.offset:
                cause = NotFoundError("retention took the object while the audit ran")
            return missing_batch(pointer, location, cause)
        except MemqError as error:
            return missing_batch(pointer, location, error)
        self._auditor.count_object(len(data))
        return check_batch(pointer, location, data)

    async def _check_part(self, pointer: Pointer, location: Location) -> BatchCheck | None:
        """Check a batch of a shared object by its own bytes; None when it is damaged, and only the index tells how.

        The whole object would be read once for each of the batches, thousands, that share it.
        """
        try:
            data = await self._patiently(lambda: self._read(location, whole=False))
        except CorruptDataError:
            return None
        check = check_part(pointer, location, data)
        if check.damaged:
            return None
        self._auditor.count_object(len(data))
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


def _bytes_of(item: tuple[Entry, Pointer]) -> int:
    return sum(location.length for location in item[1].locations)
