"""Feeds a consumer's cursors: one long poll for all partitions, batches fetched in parallel."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from memq.backoff import backoff_s
from memq.client.fetcher import Fetcher
from memq.client.flow import Counts, Delivery, FlowState, PartitionFlow, Slot
from memq.client.ledger import CommitLedger
from memq.client.pieces import NumberedEntry, missing_batch
from memq.client.places import Places, window_ms
from memq.client.read_tally import ReadTally
from memq.client.record import TopicPartition, place_of
from memq.errors import CorruptDataError, MemqError, NotFoundError, QueueError, RetryableError, StoreError
from memq.limits import POLL_BYTES_MAX
from memq.logs import EventLog
from memq.network import Runtime
from memq.notification import Entries
from memq.notification.remote import Polled, RemoteQueue
from memq.notification.stored_blocks import BlockSearch
from memq.tasks import TaskOwner
from memq.topic import Committed, ReadPartition, Topic, TopicSettings, Totals

FETCHES_MAX = 32
LOOK_BACKS_MAX = 8
POLL_WAIT_MS = 2_000
MISSING_S = 30.0  # how long a missing object is asked for again where it would be passed over
_RETRY_S_BASE = 0.05
_RETRY_S_MAX = 2.0


@dataclass(slots=True)
class Assigned:
    """One partition that is read: its flow, what may be committed of it, and the tasks that work for it."""

    flow: PartitionFlow
    settings: TopicSettings
    writers: list[int]  # the write partitions whose pointers go here
    grant: int = 0  # of the partition to this member: all that is read under an older one is void
    ledger: CommitLedger = field(default_factory=CommitLedger)
    tasks: dict[asyncio.Task[None], None] = field(default_factory=dict)
    removed: bool = False
    compared: Slot | None = None  # the batch whose blocks are being compared
    tally: ReadTally | None = None  # what the audit is to be told of it, where it wants to know

    @property
    def place(self) -> TopicPartition:
        """The partition as users name it."""
        return place_of(self.flow.partition)


class Reading:
    """The partitions that a consumer reads, and the background work that keeps them fed.

    `changed` is called when something may be deliverable, or `failure` was set: an error that the user is to see.
    After it was seen, reading goes on where it was.
    """

    def __init__(
        self,
        runtime: Runtime,
        queue: RemoteQueue,
        fetcher: Fetcher,
        tasks: TaskOwner,
        prefetch_bytes_max: int,
        changed: Callable[[], None],
    ) -> None:
        self.failure: MemqError | None = None
        self.removed_counts = Counts()  # of partitions that are not read any more
        self.stored: dict[ReadPartition, Committed] = {}  # the last that is known to be stored of each
        self.retries = 0  # of polls and fetches that failed and were tried again
        self._runtime = runtime
        self._queue = queue
        self._places = Places(queue)
        self._fetcher = fetcher
        self._tasks = tasks
        self._prefetch_bytes_max = prefetch_bytes_max
        self._changed = changed
        self._events = EventLog(runtime.clock)
        self._assigned: dict[ReadPartition, Assigned] = {}
        self._turn: list[ReadPartition] = []  # whose batch comes next
        self._fetches = 0
        self._polled: dict[ReadPartition, int] = {}
        self._kicked = asyncio.Event()
        self._looking_back = asyncio.Semaphore(LOOK_BACKS_MAX)

    # ---- what the consumer calls -----------------------------------------------------------------

    def start(self) -> None:
        """Start to poll."""
        self._tasks.start(self._poll(), "consumer polls")

    @property
    def assigned(self) -> dict[ReadPartition, Assigned]:
        """The partitions that are read, in the order they came."""
        return self._assigned

    def add(self, flow: PartitionFlow, topic: Topic, grant: int = 0) -> Assigned:
        """Read a partition, in place of what was read of it before."""
        self.remove(flow.partition)
        writers = topic.writers_of(flow.partition)
        assigned = self._assigned[flow.partition] = Assigned(flow, topic.settings, writers, grant)
        self._turn.append(flow.partition)
        self._work(assigned, self._begin(assigned), "consumer looks back")
        return assigned

    def keep(self, granted: Mapping[ReadPartition, int]) -> None:
        """Stop reading what is not among `granted`, or was read under another grant than the one of now."""
        for partition, assigned in list(self._assigned.items()):
            if granted.get(partition) != assigned.grant:
                self.remove(partition)

    def remove(self, partition: ReadPartition) -> None:
        """Stop reading a partition; what was fetched of it is dropped."""
        assigned = self._assigned.pop(partition, None)
        if assigned is not None:
            assigned.removed = True
            self.removed_counts.add(assigned.flow.counts)
            self._turn.remove(partition)
            self._polled.pop(partition, None)  # what the poll under way brings of it is not wanted any more
            for task in list(assigned.tasks):
                task.cancel()
            self._advance()

    def pause(self, partition: ReadPartition, *, paused: bool) -> None:
        """Stop or go on delivering; a paused partition holds no bytes."""
        flow = self._assigned[partition].flow
        flow.paused = paused
        if paused:
            flow.drop_fetched()
        self._advance()

    def deliver(self, *, whole: bool = False) -> tuple[Assigned, Delivery] | None:
        """Return the next records of the partition whose turn it is; None when nothing is ready.

        With `whole` nothing that is damaged is met.
        """
        for partition in list(self._turn):
            assigned = self._assigned[partition]
            if not assigned.flow.deliverable:
                continue
            before = assigned.flow.position
            delivery = assigned.flow.deliver(whole=whole)
            self._tell(assigned)
            if delivery is None and assigned.flow.position != before:
                assigned.ledger.passed(assigned.flow.behind)
            self._advance()
            if delivery is not None:
                self._turn.remove(partition)
                self._turn.append(partition)
                return assigned, delivery
        return None

    def _tell(self, assigned: Assigned) -> None:
        """Tell the audit what the flow did before the records that it delivers."""
        seen = assigned.flow.take_seen()
        for conflict in seen.conflicts:
            where = f"topic '{assigned.flow.partition.topic}' at {conflict.position}"
            self._events.error("consumer.identity-conflict", f"{where}, delivered all the same: {conflict.error}")
        moved, tally = assigned.flow.take_moved_start(), assigned.tally
        if tally is None:
            return
        if moved is not None:
            tally.begin(moved, "start", tally)
        if seen.copies:
            tally.leave_out(seen.copies, self._runtime.clock.wall_ms())

    @property
    def ended(self) -> bool:
        """Whether every partition was delivered to its end; false when there is none."""
        flows = [assigned.flow for assigned in self._assigned.values()]
        return bool(flows) and all(flow.state is FlowState.ENDED for flow in flows)

    # ---- polling ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Start what can be started now: fetches, and a poll for who is not in the one under way."""
        self._fetch_more()
        self._compare_more()
        wanted = self._wanted()
        if any(partition not in self._polled for partition in wanted):
            self._kicked.set()

    def _wanted(self) -> dict[ReadPartition, int]:
        offsets = {partition: assigned.flow.poll_offset for partition, assigned in self._assigned.items()}
        return {partition: offset for partition, offset in offsets.items() if offset is not None}

    async def _poll(self) -> None:
        failures = 0
        while True:
            self._kicked.clear()
            self._polled = self._wanted()
            if not self._polled:
                await self._kicked.wait()
                continue
            try:
                await self._poll_once(self._polled)
                failures = 0
            except MemqError as error:
                failures += 1
                self._polled = {}
                await self._back_off(error, failures)

    async def _poll_once(self, offsets: dict[ReadPartition, int]) -> None:
        """Poll until a partition is wanted that is not among `offsets`."""
        loop = asyncio.get_running_loop()
        poll = loop.create_task(self._queue.poll(offsets, POLL_WAIT_MS, POLL_BYTES_MAX))
        kick = loop.create_task(self._kicked.wait())
        try:
            await asyncio.wait((poll, kick), return_when=asyncio.FIRST_COMPLETED)
            if poll.done():
                for polled in poll.result():
                    await self._take_polled(polled, offsets)
        finally:
            kick.cancel()
            poll.cancel()
        self._changed()
        self._fetch_more()

    async def _take_polled(self, polled: Polled, offsets: dict[ReadPartition, int]) -> None:
        assigned, offset = self._assigned.get(polled.partition), offsets.get(polled.partition)
        if assigned is None or offset is None or assigned.flow.poll_offset != offset:
            return  # it was given back, or sought elsewhere, while the poll was under way
        flow, entries = assigned.flow, polled.entries  # an answer for many partitions may have had no room for this one
        if _first_of(entries) > offset:
            # Offsets need not be dense, but nearly always are: what lies between was passed over by this answer alone.
            again = await self._queue.read(polled.partition, offset, POLL_BYTES_MAX)
            entries = min(entries, again, key=_first_of)
        before = Totals()
        first = flow.misses(polled.span, entries)
        if first is not None:
            first = await self._places.first_left(polled.partition, offset, polled.span)
            if first is None:
                raise QueueError(f"the queue took back that '{polled.partition.topic}' begins behind offset {offset}")
            before = await self._places.totals_before(polled.partition, first, assigned.settings, assigned.writers)
        if assigned.removed or flow.poll_offset != offset:
            return
        if first is not None:
            flow.take_gap(first, before)
        flow.take_entries(entries)

    async def _back_off(self, error: MemqError, failures: int) -> None:
        """Wait before the next try; the user sees what does not pass by itself."""
        self.retries += 1
        self._events.warning("consumer.retry", f"{type(error).__name__}: {error}; trying again")
        if not isinstance(error, RetryableError):
            self.failure = error
            self._changed()
        await asyncio.sleep(backoff_s(self._runtime.random, failures, base_s=_RETRY_S_BASE, most_s=_RETRY_S_MAX))

    # ---- work for one partition ----------------------------------------------------------------------

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
                    await self._places.look_back(
                        assigned.flow, assigned.settings, assigned.writers, self._fetcher.index_of
                    )
                break
            except MemqError as error:
                failures += 1
                await self._back_off(error, failures)
        assigned.flow.begin()
        self._advance()
        self._changed()

    def _fetch_more(self) -> None:
        """Start fetches in turn while there is room: at least one, whatever its size."""
        held = sum(assigned.flow.held_bytes for assigned in self._assigned.values())
        started = True
        while started:
            started = False
            for partition in self._turn:
                assigned = self._assigned[partition]
                slot = assigned.flow.next_fetch()
                if slot is None:
                    continue
                if self._fetches >= FETCHES_MAX or (held and held + slot.bytes > self._prefetch_bytes_max):
                    return
                held += slot.bytes
                started = True
                self._fetches += 1
                assigned.flow.start_fetch(slot)
                task = self._work(assigned, self._fetch(assigned, slot), "consumer fetches")
                task.add_done_callback(self._fetch_ended)

    def _fetch_ended(self, _task: asyncio.Task[None]) -> None:
        """Count a fetch out: here, since a task that is cancelled before its first step runs no `finally`."""
        self._fetches -= 1
        if not self._tasks.stopped:
            self._advance()

    def _compare_more(self) -> None:
        """Look up what blocks seem to be copies of; one batch at a time in each partition."""
        for assigned in self._assigned.values():
            slot = assigned.flow.comparing
            if slot is not None and slot.claims and assigned.compared is not slot:
                assigned.compared = slot
                self._work(assigned, self._compare(assigned, slot), "consumer compares")

    async def _compare(self, assigned: Assigned, slot: Slot) -> None:
        flow, failures = assigned.flow, 0
        assert slot.pointer is not None
        search = BlockSearch(
            self._queue,
            flow.partition,
            slot.pointer.partition,
            self._fetcher.index_of,
            self._events,
            str(flow.partition),
        )
        while slot.claims:
            try:
                begin = await self._queue.seek_time(flow.partition, slot.time_ms - window_ms(assigned.settings))
                slot.compare(await search.find(slot.claims, begin, slot.offset))
            except MemqError as error:
                failures += 1
                await self._back_off(error, failures)
        assigned.compared = None
        self._changed()

    async def _fetch(self, assigned: Assigned, slot: Slot) -> None:
        failures = 0
        while slot.fetching:
            try:
                await self._fetch_once(assigned, slot)
            except MemqError as error:
                failures += 1
                await self._back_off(error, failures)
        self._changed()

    def _look_again(self, assigned: Assigned, slot: Slot, error: NotFoundError) -> None:
        """Raise StoreError for `MISSING_S`, where a missing object would be passed over: no later answer corrects that.

        The queue still has the pointer, so retention has not taken the object. A store whose outage is answered with
        404 on all ways would else cost a group sound records. Whoever stops at damage may try again as it likes.
        """
        now_s = self._runtime.clock.monotonic()
        if slot.missing_since_s is None:
            slot.missing_since_s = now_s
            place = f"topic '{assigned.flow.partition.topic}' at offset {slot.offset}"
            self._events.warning("consumer.object-missing", f"{place}: {error}; asking again for {MISSING_S:g} s")
        if assigned.flow.pass_damage and now_s < slot.missing_since_s + MISSING_S:
            raise StoreError(f"an object that the queue names is missing: {error}")

    async def _fetch_once(self, assigned: Assigned, slot: Slot) -> None:
        pointer = slot.pointer
        assert pointer is not None
        before: Sequence[NumberedEntry] = ()
        try:
            if slot.part is None:
                pieces = await self._fetcher.fetch(pointer)
            else:
                part = await self._fetcher.fetch_records(pointer, *slot.part)
                pieces, before = part.pieces, part.before
        except NotFoundError as error:
            ahead = await self._queue.read(assigned.flow.partition, slot.offset, 1)
            if not ahead or ahead[0].offset != slot.offset:
                span = await self._queue.span(assigned.flow.partition)
                first = await self._places.first_left(assigned.flow.partition, slot.offset, span)
                if first is None:  # it was there, and retention did not take it
                    raise QueueError(f"the pointer at offset {slot.offset} is not shown any more") from error
                assigned.flow.expire(slot, first)  # retention took pointer and object
                return
            if assigned.flow.move(slot, ahead[0]):
                return
            self._look_again(assigned, slot, error)
            pieces = missing_batch(pointer, CorruptDataError(f"its object is missing: {error}"))
        assigned.flow.fetched(slot, pieces, before)


def _first_of(entries: Entries) -> int:
    """Return the first offset of an answer, or where reading continues after it."""
    return entries[0].offset if entries else entries.next
