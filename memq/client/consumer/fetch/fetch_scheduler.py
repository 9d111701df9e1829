"""Feeds a consumer's cursors: one long poll for all partitions, batches fetched in parallel.

An object that fails or hangs delays its own partition alone. A partition whose next batch can't be fetched holds no
bytes, and asks for that batch alone until it comes. What a partition holds that gets nothing for `SLOW_S` is not
counted against the others, up to the same bounds once more: the byte budget, or one batch that is larger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memq.client.consumer.assigned import Assigned
from memq.client.consumer.fetch.content_opener import must_open, open_content
from memq.client.consumer.fetch.copy_search import CopySearch
from memq.client.consumer.fetch.cursor_outcomes import Counts, ReadyRange, Seen
from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.client.consumer.fetch.partition_cursor import CursorState, PartitionCursor
from memq.client.consumer.fetch.pointer_slot import PointerSlot
from memq.client.consumer.fetch.polling import Polling, Retries
from memq.client.consumer.offset_resolver import OffsetResolver
from memq.client.consumer.record_filter import wanted_part
from memq.errors import CorruptDataError, MemqError, NotFoundError, QueueError, StoreError
from memq.format.batch import NumberedEntry, missing_batch
from memq.format.object import BlockEntry
from memq.format.pointer import Pointer
from memq.limits import MIB, POLL_BLOCKS_BYTES_MAX
from memq.notification.log_reader import valid_seek
from memq.notification.remote import RemoteQueue
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.topic import Committed, ReadPartition, Topic

if TYPE_CHECKING:
    from memq.encryption.encryption import Encryption

FETCHES_MAX = 32
LOOK_BACKS_MAX = 8
STALL_FAILURES = 5  # of a fetch, 0.8 s to 1.5 s, until its partition releases the batches after it
STALLED_FETCHES_MAX = 8
SLOW_S = 5.0
FILTERED_BYTES_MAX = 4 * MIB  # unpacked, that are filtered before other work of the loop has its turn
MISSING_S = 30.0  # how long a missing object is asked for again where it would be passed over


class FetchScheduler:
    """The partitions that a consumer reads, and the background work that keeps them fed.

    `changed` is called when something may be deliverable, or `failure` was set: an error that the user is to see.
    After it was seen, reading continues where it was.
    """

    def __init__(
        self,
        runtime: Runtime,
        queue: RemoteQueue,
        fetcher: BatchFetcher,
        tasks: TaskOwner,
        prefetch_bytes_max: int,
        changed: Callable[[], None],
        encryption: Encryption | None = None,
    ) -> None:
        self.removed_counts = Counts()  # of partitions that are not read any more
        self.stored: dict[ReadPartition, Committed] = {}  # the last that is known to be stored of each
        self._runtime = runtime
        self._queue = queue
        self._resolver = OffsetResolver(queue)
        self._fetcher = fetcher
        self._encryption = encryption
        self._tasks = tasks
        self._prefetch_bytes_max = prefetch_bytes_max
        self._changed = changed
        self._events = EventLog(runtime.clock)
        self._assigned: dict[ReadPartition, Assigned] = {}
        self._turn: list[ReadPartition] = []  # whose batch comes next
        self._fetches = 0
        self._retries = Retries(runtime, self._events, changed)
        self._polling = Polling(queue, self._assigned, self._retries, self, self._answered)
        self._looking_back = asyncio.Semaphore(LOOK_BACKS_MAX)
        self._stalled_fetches = asyncio.Semaphore(STALLED_FETCHES_MAX)

    # ---- what the consumer calls -----------------------------------------------------------------

    def start(self) -> None:
        """Start to poll."""
        self._polling.start(self._tasks)

    @property
    def failure(self) -> MemqError | None:
        """The last error that does not pass by itself, until the user has seen it."""
        return self._retries.failure

    @failure.setter
    def failure(self, failure: MemqError | None) -> None:
        self._retries.failure = failure

    @property
    def retries(self) -> int:
        """How many polls and fetches failed and were tried again."""
        return self._retries.count

    @property
    def assigned(self) -> dict[ReadPartition, Assigned]:
        """The partitions that are read, in the order they came."""
        return self._assigned

    def add(self, cursor: PartitionCursor, topic: Topic, grant: int = 0) -> Assigned:
        """Read a partition, replacing an earlier reading of it."""
        self.remove(cursor.partition)
        writers = topic.writers_of(cursor.partition)
        assigned = self._assigned[cursor.partition] = Assigned(cursor, topic.settings, writers, grant)
        assigned.first_read = cursor.position.pointer_offset + (cursor.position.record_index > 0)
        self._turn.append(cursor.partition)
        self._work(assigned, self._begin(assigned), "consumer looks back")
        return assigned

    def follow(self, topics: Mapping[str, Topic]) -> None:
        """Take the present write partitions of topics, so that lost records of all of them are counted."""
        for partition, assigned in self._assigned.items():
            topic = topics.get(partition.topic)
            if topic is not None and topic.id == partition.topic_id:
                assigned.writers = topic.writers_of(partition)

    def keep(self, granted: Mapping[ReadPartition, int]) -> None:
        """Stop reading partitions that are not in `granted`, or have another grant now."""
        for partition, assigned in list(self._assigned.items()):
            if granted.get(partition) != assigned.grant:
                self.remove(partition)

    def remove(self, partition: ReadPartition) -> None:
        """Stop reading a partition and drop its fetched batches."""
        assigned = self._assigned.pop(partition, None)
        if assigned is not None:
            assigned.removed = True
            self.removed_counts.add(assigned.cursor.counts)
            self._turn.remove(partition)
            self._polling.forget(partition)
            for task in list(assigned.tasks):
                task.cancel()
            self._advance()

    def pause(self, partition: ReadPartition, *, paused: bool) -> None:
        """Pause or resume a partition; a paused one holds no bytes."""
        cursor = self._assigned[partition].cursor
        cursor.paused = paused
        if paused:
            cursor.drop_fetched()
        self._advance()

    def deliver(self, *, whole: bool = False) -> tuple[Assigned, ReadyRange] | None:
        """Return the next records of the partition whose turn it is; None when nothing is ready.

        With `whole` no partition delivers a damaged batch (`PartitionCursor.deliver`).
        """
        for partition in list(self._turn):
            assigned = self._assigned[partition]
            if not assigned.cursor.deliverable:
                continue
            delivery = self._deliver(assigned, whole=whole)
            self._advance()
            if delivery is not None:
                self._turn.remove(partition)
                self._turn.append(partition)
                return assigned, delivery
        return None

    def _deliver(self, assigned: Assigned, *, whole: bool) -> ReadyRange | None:
        """Return the next wanted records of a partition; None when none is ready, or after many unwanted ones."""
        left = FILTERED_BYTES_MAX
        while True:
            before = assigned.cursor.position
            found = assigned.cursor.deliver(whole=whole)
            seen = assigned.cursor.take_seen()
            delivery = found
            if found is not None and assigned.cursor.wanted is not None:
                left -= sum(part.piece.header.raw_length for part in found.slices if part.piece.header is not None)
                delivery = wanted_part(found, assigned.cursor.wanted, assigned.cursor.counts, seen.left_out)
            self._report_events(assigned, seen)
            if delivery is not None:
                return delivery
            if assigned.cursor.position != before:
                assigned.ledger.passed(assigned.cursor.behind)
            if found is None:
                return None
            if left <= 0:
                asyncio.get_running_loop().call_soon(self._changed)  # other work of the loop has its turn before
                return None

    def _report_events(self, assigned: Assigned, seen: Seen) -> None:
        """Report the cursor's events to the audit, before the records that it delivers."""
        for conflict in seen.conflicts:
            where = f"topic '{assigned.cursor.partition.topic}' at {conflict.position}"
            self._events.error("consumer.identity-conflict", f"{where}, delivered all the same: {conflict.error}")
        moved, observer = assigned.cursor.take_moved_start(), assigned.observer
        if observer is None:
            return
        if moved is not None:
            observer.begin(moved, "start", observer)
        if seen.copies:
            observer.drop_copies(seen.copies, self._runtime.clock.wall_ms())
        if seen.left_out:
            observer.leave_out(seen.left_out, self._runtime.clock.wall_ms())

    @property
    def ended(self) -> bool:
        """Whether every partition was delivered to its end; false when there is none."""
        cursors = [assigned.cursor for assigned in self._assigned.values()]
        return bool(cursors) and all(cursor.state is CursorState.ENDED for cursor in cursors)

    # ---- blocks that come with their pointers --------------------------------------------------------

    def blocks_bytes_max(self) -> int:
        """See `BlocksTaker.blocks_bytes_max`: the room that the prefetch limit leaves now."""
        if not self._fetcher.takes_blocks:
            return 0
        return max(0, min(POLL_BLOCKS_BYTES_MAX, self._prefetch_bytes_max - self._held_bytes()))

    def take_blocks(self, assigned: Assigned, blocks: Mapping[int, memoryview]) -> None:
        """See `BlocksTaker.take_blocks`. Bytes that are not the whole batch count as its first fetch.

        Only those of the next batch are taken: a later one would hold bytes for which the next one waits.
        """
        while not assigned.stalled and (slot := assigned.cursor.next_fetch()) is not None:
            data = blocks.get(slot.offset)
            if slot.unwanted or data is None or self._held_bytes() + slot.bytes > self._prefetch_bytes_max:
                return
            assert slot.pointer is not None
            pieces = self._fetcher.cut_sent(slot.pointer, data)
            if pieces is None or must_open(pieces, self._encryption):  # which are opened in the background
                slot.sent = data
                return
            assigned.cursor.start_fetch(slot)
            assigned.cursor.fetched(slot, pieces)

    def _held_bytes(self) -> int:
        return sum(assigned.cursor.held_bytes for assigned in self._assigned.values())

    # ---- work for one partition ----------------------------------------------------------------------

    def _advance(self) -> None:
        """Start what can be started now: fetches, comparisons, polls."""
        self._fetch_more()
        self._compare_more()
        self._polling.advance()

    def _answered(self) -> None:
        self._changed()
        self._advance()

    def _work(self, assigned: Assigned, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = self._tasks.start(work, name)
        assigned.tasks[task] = None
        task.add_done_callback(lambda done: assigned.tasks.pop(done, None))
        return task

    async def _begin(self, assigned: Assigned) -> None:
        failures = 0
        while True:
            try:
                async with self._looking_back:
                    await self._resolver.look_back(
                        assigned.cursor, assigned.settings, assigned.writers, self._fetcher.index_of
                    )
                break
            except MemqError as error:
                failures += 1
                await self._retries.back_off(error, failures)
        assigned.cursor.begin()
        self._advance()
        self._changed()

    def _fetch_more(self) -> None:
        """Start fetches in turn while there is room: at least one, whatever its size."""
        slow = [partition for partition, assigned in self._assigned.items() if self._is_slow(assigned)]
        slow_bytes = [self._assigned[partition].cursor.held_bytes for partition in slow]
        slow_fetches = sum(self._assigned[partition].fetches for partition in slow)
        held = self._held_bytes()
        held -= min(sum(slow_bytes), max([self._prefetch_bytes_max, *slow_bytes]))
        fetches_max = FETCHES_MAX + min(slow_fetches, FETCHES_MAX)
        started = True
        while started:
            started = False
            for partition in self._turn:
                assigned = self._assigned[partition]
                slot = assigned.cursor.next_fetch()
                if slot is None or partition in slow:
                    continue
                if self._fetches >= fetches_max or (held and held + slot.bytes > self._prefetch_bytes_max):
                    return
                held += slot.bytes
                started = True
                self._start_fetch(assigned, slot)

    def _is_slow(self, assigned: Assigned) -> bool:
        """Whether other partitions do not wait for this one: it is stalled, or no fetch ended for `SLOW_S`."""
        since_s = self._runtime.clock.monotonic() - assigned.fetched_s
        return assigned.stalled or (assigned.fetches > 0 and since_s >= SLOW_S)

    def _start_fetch(self, assigned: Assigned, slot: PointerSlot) -> None:
        self._fetches += 1
        if assigned.fetches == 0:
            assigned.fetched_s = self._runtime.clock.monotonic()
        assigned.fetches += 1
        assigned.cursor.start_fetch(slot)
        late = asyncio.get_running_loop().call_later(SLOW_S, self._fetch_is_late)

        def ended(_task: asyncio.Task[None]) -> None:
            """Count a fetch out: here, since a task that is cancelled before its first step runs no `finally`."""
            late.cancel()
            self._fetches -= 1
            assigned.fetches -= 1
            assigned.fetched_s = self._runtime.clock.monotonic()
            if not self._tasks.stopped:
                self._advance()

        self._work(assigned, self._fetch(assigned, slot), "consumer fetches").add_done_callback(ended)

    def _fetch_is_late(self) -> None:
        if not self._tasks.stopped:
            self._advance()

    def _compare_more(self) -> None:
        """Search for the originals of apparent copies, for one batch at a time in each partition."""
        for assigned in self._assigned.values():
            slot = assigned.cursor.comparing
            if slot is not None and slot.claims and assigned.compared is not slot:
                assigned.compared = slot
                self._work(assigned, self._compare(assigned, slot), "consumer compares")

    async def _compare(self, assigned: Assigned, slot: PointerSlot) -> None:
        cursor, failures = assigned.cursor, 0
        assert slot.pointer is not None
        search = CopySearch(self._queue, assigned, slot.pointer.partition, self._fetcher, self._runtime.clock)
        while slot.claims:
            try:
                since_ms = slot.time_ms - assigned.settings.reader_window_ms
                begin = await valid_seek(self._queue, cursor.partition, since_ms)
                slot.compare(await search.find(slot.claims, begin, slot.offset, slot.is_compared))
            except MemqError as error:
                failures += 1
                await self._retries.back_off(error, failures)
        assigned.compared = None
        self._changed()

    async def _fetch(self, assigned: Assigned, slot: PointerSlot) -> None:
        failures = 0
        while _is_wanted(slot):
            try:
                await self._fetch_once(assigned, slot)
            except MemqError as error:
                failures += 1
                if failures == STALL_FAILURES and _is_wanted(slot) and not assigned.stalled:
                    assigned.stalled = True
                    assigned.cursor.drop_fetched()
                    self._work(assigned, self._fetch_stalled(assigned, failures), "consumer fetches one batch")
                    self._retries.note(error)
                    return
                await self._retries.back_off(error, failures)
        self._changed()

    async def _fetch_stalled(self, assigned: Assigned, failures: int) -> None:
        """Fetch the next batch of a partition that holds none, until it comes; others continue meanwhile."""
        cursor = assigned.cursor
        while (slot := cursor.next_fetch()) is not None:
            await self._retries.pause(failures)
            if cursor.next_fetch() is not slot:
                continue
            cursor.start_fetch(slot)
            try:
                async with self._stalled_fetches:
                    await self._fetch_once(assigned, slot)
                break
            except MemqError as error:
                failures += 1
                cursor.drop_fetched()
                self._retries.note(error)
        assigned.stalled = False
        self._advance()
        self._changed()

    def _hold(self, assigned: Assigned, slot: PointerSlot, size: int) -> None:
        """Count the blocks that are fetched of a batch, not all of it: others may have the room."""
        if slot.fetching and not self._tasks.stopped:
            assigned.cursor.hold(slot, size)
            self._advance()

    def _check_missing(self, assigned: Assigned, slot: PointerSlot, error: NotFoundError) -> None:
        """Raise StoreError until an object has been missing for `MISSING_S`: a skip can't be undone.

        The queue still has the pointer, so retention has not taken the object. A store may answer 404 during an
        outage, and then a group would skip sound records. A consumer that stops at damage gets the error at once.
        """
        if not assigned.cursor.pass_damage:
            return
        now_s = self._runtime.clock.monotonic()
        if slot.missing_since_s is None:
            slot.missing_since_s = now_s
            where = f"topic '{assigned.cursor.partition.topic}' at offset {slot.offset}"
            self._events.warning("consumer.object-missing", f"{where}: {error}; asking again for {MISSING_S:g} s")
        if now_s < slot.missing_since_s + MISSING_S:
            raise StoreError(f"an object that the queue names is missing: {error}")

    async def _fetch_once(self, assigned: Assigned, slot: PointerSlot) -> None:
        pointer = slot.pointer
        assert pointer is not None
        before: Sequence[NumberedEntry] = ()
        passed: Sequence[NumberedEntry] | None = None
        sent, slot.sent = slot.sent, None
        try:
            if slot.unwanted:
                await self._identify(assigned, slot, pointer)
                return
            if slot.part is None:
                pieces = await self._fetcher.fetch(pointer, sent)
            else:
                wanted = assigned.cursor.wanted
                excludes = wanted.excludes if wanted is not None and wanted.tag_bits else None
                part = await self._fetcher.fetch_records(
                    pointer, *slot.part, excludes, lambda size: self._hold(assigned, slot, size)
                )
                pieces, before, passed = part.pieces, part.before, part.passed
        except NotFoundError as error:
            ahead = await self._queue.read(assigned.cursor.partition, slot.offset, 1)
            if not ahead or ahead[0].offset != slot.offset:
                span = await self._queue.span(assigned.cursor.partition)
                first = await self._resolver.first_left(assigned.cursor.partition, slot.offset, span)
                if first is None:  # it was there, and retention did not take it
                    raise QueueError(f"the pointer at offset {slot.offset} is not shown any more") from error
                assigned.cursor.expire(slot, first)  # retention took pointer and object
                return
            if slot.move(ahead[0], assigned.cursor.partition):
                return
            self._check_missing(assigned, slot, error)
            pieces = missing_batch(pointer, CorruptDataError(f"its object is missing: {error}"))
        opened = await open_content(pieces, pointer, self._encryption)
        assigned.cursor.fetched(slot, opened, before, passed)

    async def _identify(self, assigned: Assigned, slot: PointerSlot, pointer: Pointer) -> None:
        """Read from the index which blocks an unwanted batch has, if the audit or the cursor counts by it."""
        entries: Sequence[BlockEntry] | None = ()
        if assigned.observer is not None or slot.needs_index:
            try:
                entries = await self._fetcher.index_of(pointer)
            except CorruptDataError:
                entries = None
        assigned.cursor.identify(slot, entries)


def _is_wanted(slot: PointerSlot) -> bool:
    """Whether a batch is still being fetched; false if it was dropped meanwhile."""
    return slot.fetching
