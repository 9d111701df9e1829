"""Reads the pointers of all audited partitions up to their ends. A failing log delays no other. Shell.

A round polls all partitions in one request. A log that fails, or whose objects fail, is excluded from the next rounds
and polled separately until it answers. If the index of an object did not answer, this index must answer, too. Nothing
of such a log is judged until it was read up to an end again.

A log may be cut and grow again. `LogContinuity` shows when to compare the log with the last pointer that was
read. After a cut, the log is read again from its first changed pointer, or from its end if that is not known.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from memq.audit.checks.object_reads import read_entries
from memq.audit.live.partition import OBJECTS_MAX, PartitionAudit
from memq.client.consumer.fetch.fetcher import ReadRange
from memq.client.consumer.offset_resolver import OffsetResolver
from memq.client.consumer.progress import LogContinuity
from memq.errors import (
    DeniedError,
    MemqError,
    NotFoundError,
    PositionLostError,
    QueueError,
    RetryableError,
    StoreError,
    UnsupportedFormatError,
)
from memq.format.pointer import Location, Pointer, read_pointer
from memq.limits import KIB, POLL_BYTES_MAX
from memq.notification import Entry
from memq.notification.log_reader import entries_between, first_of, first_run, valid_span
from memq.notification.remote import Polled, RemoteQueue
from memq.runtime.clock import Clock
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.topic import Position, ReadPartition

INDEXES_S_MAX = 5.0  # for the indexes that one answer of a log needs; then it is set apart, and continues there
STUCK_AT_ONCE_MAX = 16  # indexes that are asked apart at the same time
LOG_BYTES = 64 * KIB  # of pointers of a log that is asked apart
Audits = Mapping[ReadPartition, Sequence[PartitionAudit]]


class LogFollower:
    """Passes pointers to audits. `read` reads the indexes of objects."""

    def __init__(self, queue: RemoteQueue, read: ReadRange, events: EventLog, clock: Clock) -> None:
        self._queue = queue
        self._resolver = OffsetResolver(queue)
        self._clock = clock
        self._continuity: dict[ReadPartition, LogContinuity] = {}
        self._doubtful: dict[ReadPartition, None] = {}  # logs that ended before what was read of them
        self._read = read
        self._events = events
        self._tasks = TaskOwner(self._probe_died, events)
        self._died: BaseException | None = None
        self._sick: dict[ReadPartition, int] = {}  # logs that are left out, with the offset to ask for
        self._stuck: dict[ReadPartition, Location] = {}  # the batch whose index did not answer, of logs in `_sick`
        self._healed: dict[ReadPartition, None] = {}  # logs that answered again, and are still to be read to their ends

    async def close(self) -> None:
        """End running requests."""
        await self._tasks.stop()

    def lacks(self, log: ReadPartition) -> bool:
        """Whether the last round could not read a log up to its end."""
        return log in self._sick or log in self._healed

    async def follow(
        self,
        audits: Audits,
        due: Iterable[ReadPartition],
        least: Mapping[ReadPartition, int] | None = None,
        judged: Iterable[ReadPartition] = (),
    ) -> None:
        """Read the logs that are `due`, and those that answer again, up to their present ends.

        `least` has proved lower bounds of some ends. The logs in `judged` lack records that will be reported. They are
        compared with the pointers that were read before, because they may have been cut.

        Raises: RetryableError when no broker answers; the error that ended the task for failing logs.
        """
        if self._died is not None:
            raise self._died
        for known in (self._sick, self._stuck, self._healed, self._continuity, self._doubtful):
            for gone in [log for log in known if log not in audits]:
                known.pop(gone)
        self._doubtful.update(dict.fromkeys(log for log in judged if log in audits))
        open_ = {log: audits[log] for log in [*due, *self._healed] if log not in self._sick}
        ends: dict[ReadPartition, int] = {}
        while open_:
            offsets = {log: _next_of(found) for log, found in open_.items()}
            advanced = False
            answer = await self._poll(offsets)
            for each in answer:
                ends.setdefault(each.partition, max(each.span.end, (least or {}).get(each.partition, 0)))
            taken = (self._take(audits[each.partition], each, ends) for each in answer)
            for polled, error in zip(answer, await asyncio.gather(*taken), strict=True):
                log, offset = polled.partition, offsets[polled.partition]
                if error is not None:
                    self._set_apart(log, _next_of(audits[log]), error)
                advanced = advanced or error is not None or _next_of(audits[log]) > offset
                if error is not None or _next_of(audits[log]) >= ends[log]:
                    del open_[log]
                    self._healed.pop(log, None)
            if not advanced and open_:
                for log in list(open_):
                    self._set_apart(log, offsets[log], QueueError("an answer of the queue left it out"))
                break
        if self._sick and not len(self._tasks):
            self._tasks.start(self._ask_apart(), "audit asks sick logs")

    # ---- inside --------------------------------------------------------------------------------------

    async def _poll(self, offsets: dict[ReadPartition, int]) -> list[Polled]:
        """Request several logs, and cut each answer at its first hole.

        A log whose answer begins with a hole is requested again, as in `memq.notification.log_reader`. Entries that one
        answer omits may exist, also before the beginning of the log in that answer.
        """
        answer = await self._ask(offsets)
        doubtful = {each.partition: offsets[each.partition] for each in answer if _begins_with_hole(each, offsets)}
        if doubtful:
            second = {each.partition: each for each in await self._ask(doubtful)}
            answer = [_fuller(each, second.get(each.partition)) for each in answer]
        return [msgspec.structs.replace(each, entries=first_run(each.entries)) for each in answer]

    async def _ask(self, offsets: dict[ReadPartition, int]) -> list[Polled]:
        """Request several logs; if the whole request fails, each log has the error."""
        try:
            return await self._queue.poll(offsets, 0, POLL_BYTES_MAX)
        except (QueueError, DeniedError, NotFoundError) as error:
            return [Polled.failed(log, offset, error) for log, offset in offsets.items()]

    async def _take(
        self, audits: Sequence[PartitionAudit], polled: Polled, ends: Mapping[ReadPartition, int]
    ) -> MemqError | None:
        """Pass the entries of an answer to the log's audits; return its error, or that of a needed object."""
        if polled.error is not None:
            return polled.error
        pointers = [read_pointer(entry.body, newer="return") for entry in polled.entries]
        try:
            if not await self._continues_or_rewinds(audits, polled, pointers):
                return QueueError("it was cut; it is read again from the cut")
            async with asyncio.timeout(INDEXES_S_MAX):
                for audit in audits:
                    audit.begin_at(min(polled.span.begin, first_of(polled.entries)))
                    await self._take_entries(audit, polled, pointers)
        except RetryableError as error:
            return error
        except TimeoutError:
            return StoreError(f"indexes of objects were not read within {INDEXES_S_MAX:g} s")
        continuity = self._continuity[polled.partition]
        for entry, pointer in zip(polled.entries, pointers, strict=True):
            continuity.take(entry.offset, pointer if isinstance(pointer, Pointer) else None)
        end = ends[polled.partition]
        if not polled.entries and polled.entries.next >= end:  # offsets need not be dense: this end is reached
            for audit in audits:
                if audit.state.next_offset < end:
                    audit.state.next_offset, audit.state.mark = end, 0
        return None

    async def _continues_or_rewinds(
        self, audits: Sequence[PartitionAudit], polled: Polled, pointers: Sequence[Pointer | MemqError]
    ) -> bool:
        """Whether an answer continues the pointers that were read of its log. After a cut, rewind its audits.

        Raises: QueueError while the log ends before these pointers: a replica may lag, or the log was cut.
        """
        log, offset = polled.partition, _next_of(audits)
        known = self._continuity.get(log)
        if known is None or known.reached.pointer_offset != offset:
            mark = next(audit.state.mark for audit in audits if audit.state.next_offset == offset)
            known = self._continuity[log] = LogContinuity(Position(log.partition, offset), mark)
        new = [each if isinstance(each, Pointer) else None for each in pointers]
        if polled.span.end < offset:
            self._doubtful[log] = None
        elif log not in self._doubtful and not known.is_broken_by(new):
            return True
        try:
            await self._resolver.check_continuity(log, known)
        except PositionLostError:
            await self._rewind(log, audits)
            return False
        self._doubtful.pop(log, None)
        return True

    async def _rewind(self, log: ReadPartition, audits: Sequence[PartitionAudit]) -> None:
        """Let audits continue at the first pointer of the log that differs from the one that they have read."""
        span = await valid_span(self._queue, log)
        keys = {offset: key for audit in audits for offset, key in audit.state.objects.items()}
        knows_all = all(len(audit.state.objects) < OBJECTS_MAX for audit in audits)
        resume, time_ms = span.begin if knows_all else span.end, 0
        first = max(span.begin, min(keys, default=span.end))
        async for entries in entries_between(self._queue, log, first, span.end):
            for entry in entries:
                pointer = read_pointer(entry.body, newer="return")
                locations = pointer.locations if isinstance(pointer, Pointer) else ()
                if locations and locations[0].key == keys.get(entry.offset):
                    resume, time_ms = entry.offset + 1, entry.time_ms
        for audit in audits:
            audit.cut_at(min(resume, audit.state.next_offset), time_ms, self._clock.wall_ms())
        del self._continuity[log]
        self._doubtful.pop(log, None)
        self._events.warning(
            "audit.log-cut",
            f"partition {log.partition} of topic '{log.topic}' was cut, and is read again from offset {resume}: "
            "the minutes since the last pointer that is left are unknown",
        )

    async def _take_entries(
        self, audit: PartitionAudit, polled: Polled, pointers: Sequence[Pointer | MemqError]
    ) -> None:
        for entry, pointer in zip(polled.entries, pointers, strict=True):
            if entry.offset < audit.state.next_offset:
                continue
            if not isinstance(pointer, Pointer):
                newer = isinstance(pointer, UnsupportedFormatError)
                (audit.take_unsupported if newer else audit.take_unreadable)(entry.offset, entry.time_ms, pointer)
                continue
            blocks = None
            if audit.needs_blocks(pointer):
                self._stuck[polled.partition] = pointer.locations[0]
                blocks = await self._blocks(audit, entry, pointer)
                del self._stuck[polled.partition]
            audit.take_pointer(entry.offset, entry.time_ms, pointer, blocks)

    async def _blocks(self, audit: PartitionAudit, entry: Entry, pointer: Pointer) -> Sequence[tuple[int, int, int]]:
        """Return the blocks of a batch from its index.

        If the index can't be read, return the sequences that only this pointer names.
        """
        try:
            entries = await read_entries(self._read, pointer.locations[0])
        except RetryableError:
            raise
        except MemqError as error:
            if not pointer.producers_complete:
                audit.take_unsupported(entry.offset, entry.time_ms, error)
            return audit.unseen(pointer)
        skip = frozenset(pointer.skip)
        return [
            (block.producer_id, block.first_sequence, block.next_sequence)
            for number, block in enumerate(entries)
            if number not in skip
        ]

    # ---- sick logs -----------------------------------------------------------------------------------

    def _set_apart(self, log: ReadPartition, offset: int, error: MemqError) -> None:
        self._sick[log] = offset
        self._healed.pop(log, None)
        self._events.warning("audit.log-failed", f"partition {log.partition} of topic '{log.topic}': {error}")

    async def _ask_apart(self) -> None:
        """Poll all failing logs once. A log that fails again comes last in the next poll: its time is limited."""
        asked = dict(self._sick)
        try:
            answer = await self._queue.poll(asked, 0, min(LOG_BYTES * len(asked), POLL_BYTES_MAX))
        except MemqError:
            return
        for polled in answer:
            log, end = polled.partition, polled.span.end
            if log in self._sick and polled.error is not None:
                self._sick[log] = self._sick.pop(log)
                continue
            reads = bool(polled.entries) or asked[log] <= end <= max(asked[log], polled.entries.next)
            if reads and log in self._sick and log not in self._stuck:
                self._heal(log)
        await self._ask_stuck()

    async def _ask_stuck(self) -> None:
        """Read some of the indexes that did not answer. Those that fail again come last in the next call."""
        asked = [(log, self._stuck[log]) for log in self._sick if log in self._stuck][:STUCK_AT_ONCE_MAX]
        for (log, location), answers in zip(asked, await asyncio.gather(*map(self._answers, asked)), strict=True):
            if log not in self._sick or self._stuck.get(log) != location:
                continue  # it was left meanwhile, and may have come back
            if answers:
                del self._stuck[log]
                self._heal(log)
            else:
                self._sick[log] = self._sick.pop(log)

    async def _answers(self, stuck: tuple[ReadPartition, Location]) -> bool:
        """Whether the store gives a final answer about the index of a batch."""
        try:
            async with asyncio.timeout(INDEXES_S_MAX):
                await read_entries(self._read, stuck[1])
        except (RetryableError, TimeoutError):
            return False
        except MemqError:
            pass
        return True

    def _heal(self, log: ReadPartition) -> None:
        del self._sick[log]
        self._healed[log] = None
        self._events.info("audit.log-answers", f"partition {log.partition} of topic '{log.topic}'")

    def _probe_died(self, error: BaseException) -> None:
        self._died = error


def _begins_with_hole(polled: Polled, offsets: Mapping[ReadPartition, int]) -> bool:
    return polled.error is None and first_of(polled.entries) > offsets[polled.partition]


def _fuller(one: Polled, other: Polled | None) -> Polled:
    """Return the second answer, unless the first one begins earlier."""
    if other is None or (other.error is None and first_of(one.entries) < first_of(other.entries)):
        return one
    return other


def _next_of(audits: Sequence[PartitionAudit]) -> int:
    return min(audit.state.next_offset for audit in audits)
