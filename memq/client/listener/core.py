"""The listener on one event loop: the core that `Listener` and `AsyncListener` share.

It fetches through two consumers, whose batches are settled in any order (`OpenRecords`): one of the topics, in the
group, and one of the retry topic, in a group `<group>.retry`. In one group, a member could get only retries.
A record is complete when its handler is done, or when its retry or its dead letter is stored, with acks=all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count

from memq.client.admin import AsyncAdmin
from memq.client.consumer.batch import TopicPartition, topic_partition_of
from memq.client.consumer.core import ConsumerCore, Observe
from memq.client.consumer.fetch.ready_batches import ReadyBatches
from memq.client.consumer.group.membership import AssignmentEvents
from memq.client.consumer.settings import BEGINNING
from memq.client.listener.answers import Message, answer_of_call
from memq.client.listener.calls import CallsCore
from memq.client.listener.open_records import NO_ANSWER, OpenPartition, OpenRecords, Work
from memq.client.listener.parked_keys import PARKED_CHECK_S, ParkedKeys
from memq.client.listener.retry_records import LetterNote, RetryNote
from memq.client.listener.retry_topics import RetryTopics
from memq.client.listener.settings import Again, GivenUp, ListenerSettings, outcome_of
from memq.errors import FencedError, InvalidRequestError, RetryableError, TooLargeError
from memq.limits import MIB
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.network import Address, format_address
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner

Call = Callable[[Message], Awaitable[object]]
RETRY_PREFETCH_BYTES_MAX = 8 * MIB
SENDING_MAX = 1_000  # retries and dead letters on their way
ENDED_CHECK_S = 1.0  # the group may give this member another partition
DUE_CHECK_S = 5.0  # the wall clock may be set
FOREIGN_DELAY_MS = 10_000  # a retry of a topic that this listener does not read
_RETRY_S_BASE = 0.05
_RETRY_S_MAX = 2.0


@dataclass(slots=True, eq=False)
class _ListenerSource:
    """One consumer, its batches, and the partitions that are paused."""

    consumer: ConsumerCore
    batches: ReadyBatches
    paused: set[TopicPartition] = field(default_factory=set)


@dataclass(slots=True)
class ListenerStats:
    """Counters of completed attempts since the start, the records at work now, and the time in handlers."""

    done: int = 0
    retried: int = 0
    dead_letters: int = 0
    parked: int = 0
    working: int = 0
    handler_s: float = 0.0


class ListenerCore(CallsCore[ListenerStats]):
    """One listener. `call` runs the handler; `end_calls` ends those that still run after the drain.

    `observe` makes the observer of the reads of a group, for the audit.
    """

    def __init__(
        self,
        settings: ListenerSettings,
        runtime: Runtime,
        addresses: Sequence[Address],
        call: Call,
        *,
        observe: Callable[[str], Observe] | None = None,
        end_calls: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        super().__init__("listener")
        self.settings = settings.check()
        self.counts = ListenerStats()
        self._runtime = runtime
        self._addresses = addresses
        self._call = call
        self._observe = observe
        self._end_calls = end_calls
        self._events = EventLog(runtime.clock)
        self._admin = AsyncAdmin(
            [format_address(address) for address in addresses],
            connect_timeout_ms=settings.consumer.connect_timeout_ms,
            runtime=runtime,
        )
        reads = settings.consumer
        self._topics = RetryTopics(
            settings.group,
            runtime,
            addresses,
            self._admin,
            audit=reads.audit,
            client_id=reads.client_id,
            zone=reads.zone,
            encryption=reads.encryption,
        )
        self._open = OpenRecords(self._topics.retry, ordered=settings.ordered, ahead=2 * settings.concurrency)
        self._parked = ParkedKeys(
            settings.group, self._admin, self._brokers, runtime, self._open.parked, reads.encryption
        )
        self._sources: list[_ListenerSource] = []
        self._starting = asyncio.Lock()
        self._started = False
        self._tasks = TaskOwner(self._fail, self._events)
        self._calls: dict[asyncio.Task[None], None] = {}
        self._running = self._sending = 0
        self._counting: asyncio.Task[None] | None = None  # stores the positions with tries that begin
        self._changed = asyncio.Event()  # for the dispatcher
        self._completed = asyncio.Event()  # for those that wait for running handlers

    @property
    def _brokers(self) -> list[str]:
        return [format_address(address) for address in self._addresses]

    # ---- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Make the group's topics, join the group, and begin; a second call does nothing.

        Raises: as the consumer; the error that has stopped the listener meanwhile.
        """
        self._check_open()
        async with self._starting:
            if not self._started:
                await self._begin()

    async def _begin(self) -> None:
        """Start the consumers, then all else. After an error, the next call continues.

        The first consumer finds out whether the topics exist: without them, the group gets no topics of its own.
        """
        if not self._sources:
            self._open_sources()
        reads, retries = self._sources
        await reads.consumer.start()
        await self._topics.make()
        await retries.consumer.start()
        self._started = True
        for source in self._sources:
            self._tasks.start(self._read(source), "listener reads")
        self._tasks.start(self._dispatch(), "listener dispatches")
        if self.settings.when_failing == "park":
            self._tasks.start(self._follow_parked(), "listener follows parked keys")

    def _open_sources(self) -> None:
        reads = self.settings.consumer
        retries = replace(
            reads,
            topics=(self._topics.retry,),
            group=self._topics.retry,
            start=BEGINNING,
            wanted=None,
            prefetch_bytes_max=min(reads.prefetch_bytes_max, RETRY_PREFETCH_BYTES_MAX),
        )
        for each in (reads, retries):
            batches = ReadyBatches(self._open.settle_floors)
            observe = self._observe(each.group or "") if self._observe is not None else None
            consumer = ConsumerCore(each, self._runtime, self._addresses, observe=observe, batches=batches)
            self._sources.append(_ListenerSource(consumer, batches))

    async def _close(self) -> None:
        """Let running handlers finish, for at most `drain_s`; commit; leave the group."""
        self.stop()
        self._changed.set()
        await self._idle(None)
        if self._end_calls is not None:
            await self._end_calls()
        for task in list(self._calls):
            task.cancel()
        if self._calls:
            await asyncio.wait(self._calls)
        await self._tasks.stop()
        self._open.close_all()
        try:
            for source in self._sources:
                await source.consumer.close()
        finally:
            await self._topics.close()
            await self._admin.close()

    def _report_failure(self, error: BaseException) -> None:
        text = f"group '{self.settings.group}' is handled here no more: {type(error).__name__}: {error}"
        self._events.error("listener.ended", text)

    # ---- reading --------------------------------------------------------------------------------

    async def _read(self, source: _ListenerSource) -> None:
        failures = 0
        while True:
            try:
                found = await source.consumer.next(None)
            except RetryableError as error:
                failures += 1
                self._events.warning("listener.read-retry", f"{type(error).__name__}: {error}; reading again")
                await asyncio.sleep(
                    backoff_s(self._runtime.random, failures, base_s=_RETRY_S_BASE, most_s=_RETRY_S_MAX)
                )
                continue
            failures = 0
            if found is None and source.consumer.ended:  # the topics are sealed
                await asyncio.sleep(ENDED_CHECK_S)
            if isinstance(found, AssignmentEvents):
                await self._change(source, found)
            elif found is not None:
                ready = source.batches.taken
                assert ready is not None, "`next` returned its batch"
                self._open.add(ready)
                source.batches.holding = not self._open.wants_more
                self._changed.set()

    async def _change(self, source: _ListenerSource, changes: AssignmentEvents) -> None:
        """Take a change of the assignment: records of released partitions finish first, if they are at work."""
        leaving = [topic_partition_of(partition) for partition in (*changes.revoked, *changes.lost)]
        closed = self._open.close(leaving)
        source.paused.difference_update(leaving)
        if changes.revoked:
            await self._idle(closed)
        await source.consumer.take(changes)
        self._open.drop(leaving)
        if changes.assigned and self.settings.when_failing == "park":
            await self._read_parked()

    async def _idle(self, partitions: Sequence[OpenPartition] | None) -> None:
        """Return when no record of these partitions, or of any, is at work; after `drain_s` in any case."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.drain_s):
                while self._calls if partitions is None else self._open.working(partitions):
                    self._completed.clear()
                    await self._completed.wait()

    # ---- handlers -------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        while not self._ended.is_set():
            self._changed.clear()
            self._start_calls()
            if self._open.beginning and (self._counting is None or self._counting.done()):
                self._counting = self._tasks.start(self._count_tries(), "listener counts tries")
            for source in self._sources:
                self._pause(source)
                if source.batches.holding and self._open.wants_more:
                    source.batches.holding = False
                    source.consumer.wakeup()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._due_s()):
                    await self._changed.wait()

    def _start_calls(self) -> None:
        loop = asyncio.get_running_loop()
        while self._running < self.settings.concurrency and self._sending < SENDING_MAX:
            work = self._open.take(self._runtime.clock.wall_ms())
            if work is None:
                return
            self._running += 1
            task = loop.create_task(self._work(work), name="listener handles a record")
            self._calls[task] = None
            task.add_done_callback(self._call_ended)

    async def _count_tries(self) -> None:
        """Store positions with the tries that begin; then their handlers are called (`OpenRecords`)."""
        for source in self._sources:
            topics = source.consumer.settings.topics
            works = [work for work in self._open.beginning if work.batch.partition.place.topic in topics]
            if not works:
                continue
            try:
                await source.consumer.commit(None)
            except FencedError:  # a partition was lost: the dispatcher tries the others again
                await asyncio.sleep(_RETRY_S_BASE)
            else:
                self._open.begun(works)
        self._changed.set()

    def _pause(self, source: _ListenerSource) -> None:
        """Pause the partitions that are stuck, and resume the others."""
        topics = source.consumer.settings.topics
        stuck = {place for place in self._open.stuck() if place.topic in topics}
        for place in sorted(stuck ^ source.paused):
            with suppress(InvalidRequestError):  # the partition was lost meanwhile
                source.consumer.pause(place.topic, place.partition, paused=place in stuck)
        source.paused = stuck

    def _due_s(self) -> float | None:
        due_ms = self._open.next_due_ms
        if due_ms is None or self._running >= self.settings.concurrency:
            return None
        return min(DUE_CHECK_S, max(0.0, (due_ms - self._runtime.clock.wall_ms()) / 1000))

    def _call_ended(self, task: asyncio.Task[None]) -> None:
        del self._calls[task]
        self._changed.set()
        self._completed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _work(self, work: Work) -> None:
        """Handle one record. Raises: errors that stop the listener."""
        try:
            try:
                outcome = await self._attempt(work)
            finally:
                self._running -= 1
                self._changed.set()
            self._sending += 1
            try:
                await self._settle(work, outcome)
            finally:
                self._sending -= 1
        except BaseException:
            self._open.abandon(work)
            raise

    async def _attempt(self, work: Work) -> Again | GivenUp | None:
        """Call the handler, and return what follows."""
        if work.fault:
            return GivenUp("dead", work.fault)
        if work.parked:
            return GivenUp("parked", "an earlier record of the key is parked", parks_key=True)
        if work.origin.topic not in self.settings.consumer.topics and work.origin.topic != self._topics.retry:
            self._events.warning(
                "listener.foreign-topic",
                f"a retry in '{self._topics.retry}' is of topic '{work.origin.topic}', which this listener does not "
                "read: all listeners of a group must have the same topics",
            )
            work.attempt -= 1
            return Again(FOREIGN_DELAY_MS / 1000, work.error)
        if work.unanswered and work.attempt > self.settings.tries and self.settings.when_failing != "block":
            work.attempt = self.settings.tries  # later ones were begun, but call no handler
            parks = self.settings.when_failing == "park"
            return GivenUp("parked" if parks else "dead", NO_ANSWER, parks_key=parks)
        record = work.record
        message = Message(
            topic=work.origin.topic,
            position=work.origin.position,
            value=record.value,
            key=record.key,
            headers=work.headers,
            timestamp_ms=work.origin.timestamp_ms,
            tag=record.tag,
            attempt=work.attempt,
            error=work.error,
        )
        began_s = self._runtime.clock.monotonic()
        try:
            answer = await answer_of_call(self._call, message)
        finally:
            self.counts.handler_s += self._runtime.clock.monotonic() - began_s
        return outcome_of(answer, work.attempt, self.settings)

    async def _settle(self, work: Work, outcome: Again | GivenUp | None) -> None:
        """Store what follows on an attempt; then the record is complete."""
        if outcome is None:
            self.counts.done += 1
        elif isinstance(outcome, Again):
            self.counts.retried += 1
            if not await self._send_again(work, outcome):
                return
        else:
            await self._give_up(work, outcome)
        self._open.complete(work)

    async def _send_again(self, work: Work, outcome: Again) -> bool:
        """Send a record to the retry topic; false if it is kept here for its next attempt.

        A record with an order is kept, so that its key waits: in the retry topic, another member could overtake it.
        """
        due_ms = self._runtime.clock.wall_ms() + round(outcome.delay_s * 1000)
        if work.key is None:
            note = RetryNote(work.origin, work.attempt + 1, due_ms, work.letter, outcome.error)
            try:
                await self._topics.send_retry(note, work.record.value, work.record.key, work.headers, work.record.tag)
            except TooLargeError:
                pass
            else:
                return True
        self._open.again(work, due_ms, outcome.error)
        return False

    async def _give_up(self, work: Work, outcome: GivenUp) -> None:
        now_ms = self._runtime.clock.wall_ms()
        attempts = work.attempt - int(work.parked)
        note = LetterNote(work.origin, outcome.state, attempts, now_ms, outcome.cause)
        at = await self._topics.send_letter(note, work.record.value, work.record.key, work.headers, work.record.tag)
        if outcome.parks_key and work.key is not None:
            self._parked.add(work.key, at)
        if outcome.state == "parked":
            self.counts.parked += 1
        else:
            self.counts.dead_letters += 1
        self._events.warning(
            "listener.gave-up",
            f"record at {work.origin.position} of topic '{work.origin.topic}' is {outcome.state} after "
            f"{attempts} attempts: {outcome.cause[:200]}",
        )
        observer = work.batch.partition.assigned.observer
        if observer is not None:
            observer.set_aside(work.record.position)

    async def _follow_parked(self) -> None:
        """While keys are parked, learn now and then which letters were sent back or purged."""
        while True:
            await asyncio.sleep(PARKED_CHECK_S)
            if self._open.parked:
                await self._read_parked(1)

    async def _read_parked(self, tries: int | None = None) -> None:
        """Read the parked keys; without a bound on tries, until it succeeds. Raises: errors that do not pass."""
        for failures in count(1):
            try:
                await self._parked.refresh()
            except RetryableError as error:
                text = f"the dead letters could not be read for parked keys: {type(error).__name__}: {error}"
                self._events.warning("listener.parked-unread", text)
            else:
                return
            if failures == tries:
                return
            await asyncio.sleep(backoff_s(self._runtime.random, failures, base_s=_RETRY_S_BASE, most_s=_RETRY_S_MAX))

    def stats(self) -> ListenerStats:
        """Return the counters."""
        return replace(self.counts, working=self._open.working())
