"""Polls a consumer's pointers: one long poll for all answering partitions, one poll for the others.

A log that fails or hangs delays its own partition alone. A partition goes apart when its log fails, or when its answer
passes over offsets, so that other answers must confirm it. It returns to the long poll with its next sound answer.

`Retries` counts and logs failures of polls and fetches, waits, and raises those that do not pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from memq.client.consumer.assigned import Assigned
from memq.client.consumer.fetch.partition_cursor import PartitionCursor
from memq.client.consumer.offset_resolver import OffsetResolver
from memq.client.consumer.progress import cut_error
from memq.errors import MemqError, QueueError, RetryableError
from memq.limits import POLL_BYTES_MAX
from memq.notification.log_reader import first_of, first_run
from memq.notification.remote import Polled, RemoteQueue
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.topic import ReadPartition, Totals

POLL_WAIT_MS = 2_000
SHORT_S = 60.0  # how long a log may end before what was read of it: a lagging replica shows such an end for a moment
LOG_BYTES = 64 << 10  # of pointers: about 200; the broker holds that much memory for a log that hangs
_RETRY_S_BASE = 0.05
_RETRY_S_MAX = 2.0


class Retries:
    """Failures of polls and fetches. `changed` is called when `failure` is set for the user."""

    def __init__(self, runtime: Runtime, events: EventLog, changed: Callable[[], None]) -> None:
        self.failure: MemqError | None = None
        self.count = 0
        self._random = runtime.random
        self._events = events
        self._changed = changed

    def note(self, error: MemqError) -> None:
        """Note a failure after which the same is tried again."""
        self.count += 1
        self._events.warning("consumer.retry", f"{type(error).__name__}: {error}; trying again")
        if not isinstance(error, RetryableError):
            self.failure = error
            self._changed()

    async def back_off(self, error: MemqError, failures: int) -> None:
        """Note a failure, the `failures`-th in a row, and wait before the next try."""
        self.note(error)
        await self.pause(failures)

    async def pause(self, failures: int) -> None:
        """Wait before a try after `failures` that failed."""
        await asyncio.sleep(backoff_s(self._random, failures, base_s=_RETRY_S_BASE, most_s=_RETRY_S_MAX))


@dataclass(slots=True)
class _Poll:
    """One of the two polls. `kicked` ends a poll, so that the next one includes more partitions."""

    wait_ms: int
    polled: dict[ReadPartition, int] = field(default_factory=dict)  # the partitions and offsets of the current poll
    kicked: asyncio.Event = field(default_factory=asyncio.Event)


class BlocksTaker(Protocol):
    """Takes the blocks that a broker sends with new pointers."""

    def blocks_bytes_max(self) -> int:
        """Return how many bytes of blocks are wanted now."""
        ...

    def take_blocks(self, assigned: Assigned, blocks: Mapping[int, memoryview]) -> None:
        """Take the bytes of batches, by the offsets of their pointers, which the cursor already has."""
        ...


class Polling:
    """Polls pointers for each cursor of `assigned`; calls `advanced` after each answer."""

    def __init__(
        self,
        queue: RemoteQueue,
        assigned: Mapping[ReadPartition, Assigned],
        retries: Retries,
        blocks: BlocksTaker,
        advanced: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._blocks = blocks
        self._resolver = OffsetResolver(queue)
        self._assigned = assigned
        self._retries = retries
        self._advanced = advanced
        self._common = _Poll(POLL_WAIT_MS)
        self._apart = _Poll(0)
        self._short_s: dict[ReadPartition, float] = {}  # by log: since when it ends before what was read of it
        self._failing: dict[
            ReadPartition, None
        ] = {}  # the partitions that are polled apart, the least recent failure first

    def start(self, tasks: TaskOwner) -> None:
        """Start both polls."""
        tasks.start(self._run(self._common), "consumer polls")
        tasks.start(self._run(self._apart), "consumer polls apart")

    def advance(self) -> None:
        """Begin a new poll if the current one lacks a partition that needs pointers."""
        for poll in (self._common, self._apart):
            if any(partition not in poll.polled for partition in self._wanted(poll)):
                poll.kicked.set()

    def forget(self, partition: ReadPartition) -> None:
        """Ignore the answers of current polls for a partition."""
        self._failing.pop(partition, None)
        self._short_s.pop(partition, None)
        for poll in (self._common, self._apart):
            poll.polled.pop(partition, None)

    def _wanted(self, poll: _Poll) -> dict[ReadPartition, int]:
        """Return the partitions to poll with their offsets, in the order in which the broker shall answer."""
        partitions = list(self._failing)
        if poll is self._common:
            partitions = [partition for partition in self._assigned if partition not in self._failing]
        offsets = {partition: self._assigned[partition].cursor.poll_offset for partition in partitions}
        return {partition: offset for partition, offset in offsets.items() if offset is not None}

    async def _run(self, poll: _Poll) -> None:
        failures = 0
        while True:
            poll.kicked.clear()
            poll.polled = self._wanted(poll)
            if not poll.polled:
                await poll.kicked.wait()
                continue
            error = await self._poll_once(poll, poll.polled)
            failures = 0 if error is None else failures + 1
            if error is not None:
                await self._retries.back_off(error, failures)

    async def _poll_once(self, poll: _Poll, offsets: dict[ReadPartition, int]) -> MemqError | None:
        """Poll until a partition outside `offsets` needs pointers; return the error that delays the next poll."""
        loop = asyncio.get_running_loop()
        bytes_max = min(LOG_BYTES * len(offsets), POLL_BYTES_MAX)
        blocks_bytes_max = self._blocks.blocks_bytes_max() if poll is self._common else 0
        answer = loop.create_task(
            self._queue.poll(offsets, poll.wait_ms, bytes_max, blocks_bytes_max, self._tag_bits(offsets))
        )
        kick = loop.create_task(poll.kicked.wait())
        error: MemqError | None = None
        try:
            await asyncio.wait((answer, kick), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                take = self._take_common if poll is self._common else self._take_apart
                for polled in answer.result():
                    error = await take(polled, offsets) or error
                left_out = [partition for partition in offsets if partition in self._failing]
                if poll is self._apart and error is None and left_out and len(left_out) == len(offsets):
                    error = QueueError("an answer left all partitions out")
        except MemqError as failed:
            error = failed
            for partition in offsets:
                self._short_s.pop(partition, None)
        finally:
            kick.cancel()
            answer.cancel()
        self._advanced()
        return error

    def _tag_bits(self, offsets: Mapping[ReadPartition, int]) -> int:
        """Return the tag bits that readers of these partitions want; 0 if one of them wants all."""
        found = 0
        for partition in offsets:
            wanted = self._assigned[partition].cursor.wanted
            if wanted is None or not wanted.tag_bits:
                return 0
            found |= wanted.tag_bits
        return found

    def _asked(self, partition: ReadPartition, offsets: Mapping[ReadPartition, int]) -> tuple[Assigned, int] | None:
        """Return the partition and requested offset of an answer; None if it left or moved meanwhile."""
        assigned, offset = self._assigned.get(partition), offsets.get(partition)
        if assigned is None or offset is None or assigned.cursor.poll_offset != offset:
            return None
        return assigned, offset

    async def _take_common(self, polled: Polled, offsets: Mapping[ReadPartition, int]) -> None:
        """Take entries that continue at the requested offset; poll the partition apart in all other cases."""
        asked = self._asked(polled.partition, offsets)
        if asked is None:
            return
        assigned, offset = asked
        assigned.ended = polled.ended and not polled.entries
        if polled.error is not None:
            self._retries.note(polled.error)
        cursor, is_short = assigned.cursor, polled.error is None and _ends_before(assigned.cursor, polled)
        if not is_short:
            self._short_s.pop(polled.partition, None)
        doubtful = polled.error is not None or _passes_over(cursor, polled, offset) or is_short
        if doubtful or not cursor.take_entries(first_run(polled.entries), compared=False):
            self._failing[polled.partition] = None
        elif polled.blocks:
            self._blocks.take_blocks(assigned, polled.blocks)

    async def _take_apart(self, polled: Polled, offsets: Mapping[ReadPartition, int]) -> MemqError | None:
        """Take the answer, and what confirms it; return the error of a partition that fails again."""
        partition, entries, error = polled.partition, polled.entries, polled.error
        asked = self._asked(partition, offsets)
        if asked is None:
            return None
        assigned, offset = asked
        if error is None and not entries and entries.next <= offset < polled.span.end:
            return None  # the answer had no room or no time for it: it keeps its turn
        self._failing.pop(partition, None)
        if error is not None:
            self._short_s.pop(partition, None)
        else:
            try:
                await self._confirm(assigned, polled, offset)
            except MemqError as failed:
                if not _is_still_at(assigned, offset):
                    return None  # a seek was faster: the error is of the position before it
                error = failed
        if error is not None and not assigned.removed:
            self._failing[partition] = None
        return error

    async def _confirm(self, assigned: Assigned, polled: Polled, offset: int) -> None:
        """Take the entries of a partition from `offset` on; two answers must agree on skipped ones.

        An answer without entries is compared, too: a log that was cut may have grown to the same end.
        Raises: PositionLostError if the log is not the one that was read before.
        """
        cursor, entries = assigned.cursor, polled.entries
        self._check_end(cursor, polled)
        if first_of(entries) > offset:
            # Offsets need not be dense, but nearly always are: what lies between was passed over by this answer alone.
            again = await self._queue.read(polled.partition, offset, POLL_BYTES_MAX)
            entries = min(entries, again, key=first_of)
        before = Totals()
        first = cursor.misses(polled.span, entries)
        if first is not None:
            first = await self._resolver.first_left(polled.partition, offset, polled.span)
            if first is None:
                raise QueueError(
                    f"the queue no longer reports that '{polled.partition.topic}' begins after offset {offset}"
                )
            before = await self._resolver.totals_before(polled.partition, first, assigned.settings, assigned.writers)
        if not _is_still_at(assigned, offset):
            return
        if first is not None:
            cursor.take_gap(first, before)
        entries = first_run(entries)
        if not entries or _ends_before(cursor, polled) or not cursor.take_entries(entries, compared=False):
            await self._resolver.check_continuity(polled.partition, cursor.continuity)
            if _is_still_at(assigned, offset):
                cursor.take_entries(entries)

    def _check_end(self, cursor: PartitionCursor, polled: Polled) -> None:
        """Raise PositionLostError for a log that ends before what was read of it for `SHORT_S`.

        Its new records would reach the reader only after the log has grown over the reader's position.
        """
        if not _ends_before(cursor, polled):
            self._short_s.pop(polled.partition, None)
            return
        now_s = asyncio.get_running_loop().time()
        if now_s - self._short_s.setdefault(polled.partition, now_s) >= SHORT_S:
            raise cut_error(polled.partition, cursor.continuity.reached, polled.span.end)


def _passes_over(cursor: PartitionCursor, polled: Polled, offset: int) -> bool:
    return first_of(polled.entries) > offset or cursor.misses(polled.span, polled.entries) is not None


def _is_still_at(assigned: Assigned, offset: int) -> bool:
    return not assigned.removed and assigned.cursor.poll_offset == offset


def _ends_before(cursor: PartitionCursor, polled: Polled) -> bool:
    """Whether the log ends before what was read of it."""
    return polled.span.end < cursor.continuity.reached.pointer_offset
