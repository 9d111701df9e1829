"""The core of consumers on one event loop. Policy lives in its machines."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from memq.client.arguments import check_kind
from memq.client.broker_router import BrokerRouter
from memq.client.consumer.assigned import Assigned, ConsumerObserver
from memq.client.consumer.batch import Batch, Damage, TopicPartition, behind, topic_partition_of
from memq.client.consumer.dead_letters import DeadLetters
from memq.client.consumer.fetch.cursor_outcomes import Counts, ReadyRange
from memq.client.consumer.fetch.fetch_scheduler import FetchScheduler
from memq.client.consumer.fetch.fetcher import BatchFetcher, MakeFetcher
from memq.client.consumer.fetch.ready_batches import ReadyBatch, ReadyBatches
from memq.client.consumer.group.membership import AssignmentEvents
from memq.client.consumer.group.owner import GroupOwner
from memq.client.consumer.group.session import Committer, GroupSession
from memq.client.consumer.offset_resolver import Lag, OffsetResolver
from memq.client.consumer.opener import Opener
from memq.client.consumer.settings import END, ConsumerSettings, Point, check_point, named_partitions
from memq.client.consumer.stream_ends import StreamEnds
from memq.client.link_pool import LinkPool
from memq.client.log_answers import LogAnswers, ask_logs
from memq.client.metadata import ClusterMetadata
from memq.client.owner_requests import SPANS_S_MAX, OwnerRequests
from memq.client.stores import OpenStores
from memq.errors import ClosedError, GenerationFencedError, InvalidRequestError, MemqError, NotFoundError
from memq.groups.remote import RemoteGroups
from memq.notification import Span
from memq.notification.remote import RemoteQueue
from memq.protocol.messages import TopicMetadata
from memq.runtime.logs import EventLog
from memq.runtime.network import Address
from memq.runtime.process import keep_freed_blocks
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner
from memq.storage_handlers.confirmed_reads import ConfirmedReads
from memq.topic import Committed, Position, ReadPartition, Topic, Totals, read_partitions

START_S_MAX = 10.0
REFRESH_S = 30.0
GONE_TRIES = 2
GONE_RETRY_S = 0.2  # doubled for each try
CLOSE_S_MAX = 5.0
Observe = Callable[[Runtime, LinkPool, TaskOwner], ConsumerObserver]  # makes the observer of a consumer
AHEAD_SHARE = 16  # batches that are made ahead hold a sixteenth of what may be prefetched, and one more


@dataclass(frozen=True, slots=True)
class ConsumerStats:
    """Counters since the start: those of `Counts`, and of retries, commits and dead letters.

    `transit_errors` are answers of a store that another fetch of the same bytes has contradicted.
    """

    counts: Counts
    retries: int
    commits: int
    dead_letters: int
    transit_errors: int


class ConsumerCore:
    """One consumer. `next` is for one caller at a time.

    It returns batches, and changes that the caller must take.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        runtime: Runtime,
        addresses: Sequence[Address],
        make_fetcher: MakeFetcher = BatchFetcher,
        observe: Observe | None = None,
        batches: ReadyBatches | None = None,
    ) -> None:
        keep_freed_blocks()
        self.settings = settings.check()
        self._runtime = runtime
        self._events = EventLog(runtime.clock)
        self._pool = LinkPool(runtime, addresses, client_id=settings.client_id, zone=settings.zone, owner="consumer")
        self._metadata = ClusterMetadata(runtime, self._pool)
        any_broker = BrokerRouter(self._pool, self._metadata.holders)
        self._queue = RemoteQueue(any_broker, any_broker.with_blocks)
        self._group_owner = GroupOwner(self._pool, any_broker, runtime.clock)
        self._groups = RemoteGroups(self._group_owner)
        self._owners = OwnerRequests(runtime, self._pool, self._metadata, SPANS_S_MAX)
        self._resolver = OffsetResolver(self._queue, owner_spans=self._owner_spans)
        self._stores = OpenStores(self._metadata, runtime, settings.s3, required=settings.read == "direct")
        self._dead_letters = DeadLetters(runtime, addresses, settings.encryption)
        self._topics: dict[str, Topic] = {}
        self._changed = asyncio.Event()
        self._stale = asyncio.Event()  # the known topics must be refreshed now
        self._tasks = TaskOwner(self._die, self._events)
        self._confirmed = ConfirmedReads(self._events)
        reader = partial(self._stores.reader, waits=self._pool.waits)
        fetcher = make_fetcher(settings.read, any_broker.read, reader, self._confirmed)
        fetcher.near = any_broker.near
        bounds = settings.prefetch_bytes_max, self._changed.set, settings.encryption
        self._reading = FetchScheduler(runtime, self._queue, fetcher, self._tasks, *bounds)
        self._observer = observe(runtime, self._pool, self._tasks) if observe is not None else None
        self._opener = Opener(
            settings,
            self._groups,
            self._resolver,
            self._reading,
            self._topics,
            self._wanted,
            self._changed.set,
            self._observer,
            self._tasks,
            self._events,
        )
        parts = (self._reading, self._resolver, self._topics, self._changed.set, self._tasks, self._events)
        self._stream_ends = StreamEnds(*parts, self._stale.set)
        self._ready_batches = batches or ReadyBatches()
        self._group: GroupSession | None = None
        self._committer: Committer | None = None
        if settings.group_name is not None:
            place = runtime, self._groups, settings.group_name, settings.session_timeout_ms, self._group_changed
            self._group = GroupSession(*place, alone=settings.broadcast is not None)
            self._opener.take_position = self._group.state.take_position
            self._committer = Committer(self._reading, self._group, self._ready_batches, runtime, self._events)
        self._delivery: tuple[Assigned, ReadyRange] | None = None  # waits for its dead letters
        self._late_damage: deque[tuple[Batch, Damage]] = deque()
        self._late_counts = Counts()
        self._notified: tuple[ReadPartition, ...] = ()  # the user is being notified that it has them
        self._woken = False
        self._started = False
        self._closed = False
        self._fatal: BaseException | None = None

    # ---- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Connect, learn of the topics, and start to read; the second call does nothing.

        Raises: UnreachableError, NotFoundError, ClosedError.
        """
        self._check()
        if self._started:
            return
        await self._pool.reach(self.settings.connect_timeout_ms / 1000)
        for name in self.settings.topics:
            topic = (await self._metadata.topic(name, timeout_s=START_S_MAX)).topic
            for point in (self.settings.start, self.settings.end or END):
                named_partitions(topic, point)
            self._topics[name] = topic
        self._started = True
        self._reading.start()
        self._tasks.start(self._opener.run(), "consumer opens partitions")
        self._tasks.start(self._refresh(), "consumer refreshes metadata")
        if self._group is not None and self._committer is not None:
            self._group.share(self._partitions())
            self._tasks.start(self._group.run(), "consumer group session")
            if self.settings.auto_commit:
                self._tasks.start(self._committer.run(self.settings.auto_commit_interval_ms), "consumer commits")

    async def close(self, timeout_s: float = CLOSE_S_MAX) -> None:
        """Commit finished batches if auto-commit is on, leave the group, and disconnect.

        A second call does nothing. The commit and the leave take at most `timeout_s` each. Raises: an error of the
        commit that does not pass, after the consumer has left the group: a member that stayed would hold its
        partitions, and read nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._changed.set()
        try:
            if self._committer is not None and self.settings.auto_commit and self._fatal is None:
                await self._committer.commit_at_close(timeout_s)
        finally:
            await self._close_parts(timeout_s)

    async def _close_parts(self, timeout_s: float) -> None:
        await self._tasks.stop()
        if self._group is not None and self._started:
            await self._group.leave(timeout_s)
        await self._dead_letters.close()
        if self._observer is not None:
            await self._observer.close(timeout_s)
        await self._metadata.close()
        await self._group_owner.close()
        await self._pool.close()
        await self._stores.close()

    # ---- batches -----------------------------------------------------------------------------------

    def next_at_hand(self) -> Batch | None:
        """Return the next batch if one is prepared and nothing is more urgent, else None.

        The call finishes the batch before it. Only this method may be called on the user's own thread.
        """
        if self._closed or self._ready_batches.urgent or self._reading.failure is not None:
            return None
        self._ready_batches.finish()
        return self._ready_batches.take()

    def ask(self) -> None:
        """Note that the user begins to ask for a batch; called in the user's thread."""
        self._ready_batches.ask()

    async def interrupted(self) -> None:
        """The user has no answer to what was asked last, though there may have been one: it comes again."""
        self._ready_batches.take_back()

    async def next(self, timeout_s: float | None) -> Batch | AssignmentEvents | None:
        """Return the next batch.

        Changes of the assignment come first: the caller reports them and then takes them by `take`.
        The call finishes the batch before it. It returns None after `timeout_s`, at the end, and after `wakeup`.
        `next_at_hand` may then have more batches.
        Raises: CorruptDataError before a damaged block; errors of the cluster that do not pass. Any other exception
        ends the consumer.
        """
        self._check(failures=True)
        await self.start()
        try:
            async with asyncio.timeout(timeout_s):
                await self._send_late_damage()
                self._ready_batches.finish()
                self._ready_batches.settle()
                return await self._next()
        except TimeoutError:
            return None
        except (MemqError, asyncio.CancelledError):
            raise
        except BaseException as error:  # a batch that was taken meanwhile may be lost: nothing after it is committed
            self._die(error)
            raise

    async def _next(self) -> Batch | AssignmentEvents | None:
        while True:
            self._changed.clear()
            self._ready_batches.urgent = stale = self._stale.is_set()
            self._check(failures=True)
            found: Batch | AssignmentEvents | None = self._new_changes()
            if found is None and not (stale or self._woken or self._ready_batches.holding):
                found = self._ready_batches.take() or await self._next_batch()
            if found:
                if isinstance(found, Batch):
                    self._make_ahead()
                return found
            self._stream_ends.follow()
            if self._woken or self.ended:
                self._woken = False
                return None
            await self._changed.wait()

    @property
    def ended(self) -> bool:
        """Whether all assigned partitions were delivered up to the `end` of the settings, or of sealed topics."""
        everything_open = self._wanted().keys() <= self._reading.assigned.keys()
        nothing_left = self._delivery is None and not self._ready_batches.waiting
        return self._started and nothing_left and everything_open and self._reading.ended

    def wakeup(self) -> None:
        """Let `next` return None, also before prepared batches: the one under way, else the one that comes."""
        self._woken = True
        self._wake()

    async def take(self, changes: AssignmentEvents) -> None:
        """Note that the user got `changes`: revoked partitions are committed (auto-commit) and returned."""
        if self._group is None or self._committer is None:
            return
        for partition in changes.lost:
            self._group.state.confirm_lost(partition)
        if changes.revoked:
            if self.settings.auto_commit:
                await self._committer.commit_quietly(changes.revoked)
            for partition in changes.revoked:
                self._reading.remove(partition)
                self._group.state.confirm_revoked(partition)
            self._group.kick()
        for partition in changes.assigned:
            self._group.state.confirm_assigned(partition)
        self._notified = ()

    # ---- positions ---------------------------------------------------------------------------------

    def positions(self) -> dict[TopicPartition, Position]:
        """Return the position of the next record in each assigned partition."""
        return {assigned.topic_partition: self._here(assigned)[0] for _, assigned in self._known()}

    async def committed(self) -> dict[TopicPartition, Position]:
        """Return the stored positions of the group in the partitions of the topics. Raises: as `commit`."""
        self._need_group()
        await self.start()
        stored = await self._groups.committed(self.settings.group_name or "", self._partitions())
        return {topic_partition_of(key): value.marked_position for key, value in stored.items()}

    async def lag(self) -> LogAnswers[TopicPartition, Lag]:
        """Return how much lies between each position and the end of its partition now.

        Raises: the first error when all logs fail.
        """
        await self.start()
        read = dict(self._reading.assigned)
        found = await ask_logs(read, lambda key: self._lag(key, read[key]))
        return LogAnswers({topic_partition_of(key): lag for key, lag in found.items()}).one_known()

    async def _lag(self, partition: ReadPartition, assigned: Assigned) -> Lag:
        topic = self._topic_of(partition)
        position, totals = self._here(assigned)
        if totals is None:
            totals = await self._resolver.totals_of(assigned.cursor, topic.settings, topic.writers_of(partition))
        return await self._resolver.lag(topic, partition, position, totals, self._runtime.clock)

    def _here(self, assigned: Assigned) -> tuple[Position, Totals | None]:
        """Return the next position of a partition, and the totals before its pointer if known."""
        return self._ready_batches.ahead_of(assigned) or (assigned.cursor.behind.marked_position, None)

    async def seek(self, topic: str, partition: int, to: Point) -> None:
        """Continue from another position; prefetched data is dropped.

        Raises: InvalidRequestError when the partition is not assigned or `to` lies in another one; TypeError.
        """
        check_point(to, "to", (topic,))
        if isinstance(to, Position) and to.read_partition != partition:
            raise InvalidRequestError(f"position {to} belongs to partition {to.read_partition}, not to {partition}")
        key, assigned = self._find(topic, partition)
        if self._delivery is not None and self._delivery[0] is assigned:
            self._delivery = None
        await self._opener.seek(key, to)
        self._reading.failure = None  # it may be of the position before; another log's error comes with its next try

    def pause(self, topic: str, partition: int, *, paused: bool) -> None:
        """Pause or resume a partition. Raises: InvalidRequestError when it is not assigned."""
        self._reading.pause(self._find(topic, partition)[0], paused=paused)

    # ---- commits -----------------------------------------------------------------------------------

    async def commit(self, batch: Batch | None) -> None:
        """Store the position after `batch`, or after the finished batches of all partitions.

        All batches of its partition before `batch` count as finished, and none after it is committed.
        Raises: InvalidRequestError without a group; GenerationFencedError when another member has the partition. What
        passes is tried again for as long as this one is in its group.
        """
        committer, only = await self.finish(batch)
        await committer.commit_surely(only)
        if only is not None and batch is not None and not only[0].ledger.is_stored(batch.next):
            raise _given_back(batch)  # a commit leaves out partitions that the member lost between two tries

    async def finish(self, batch: Batch | None) -> tuple[Committer, tuple[Assigned, Committed] | None]:
        """Finish `batch`, or all that were read; return what commits, and the only position to commit."""
        if not (batch is None or isinstance(batch, Batch)):
            raise TypeError(f"batch must be one that this consumer returned, not {type(batch).__name__}")
        self._check()
        committer, only = self._need_group(), None
        if batch is not None:
            only = self._find_handed(batch), behind(batch)
            only[0].ledger.finish(batch.next)
        else:
            self._ready_batches.settle_finished()
        await self._send_late_damage()
        return committer, only

    def stats(self) -> ConsumerStats:
        """Return the counters."""
        total = Counts()
        parts = [assigned.cursor.counts for assigned in self._reading.assigned.values()]
        for part in (self._late_counts, self._reading.removed_counts, *parts):
            total.add(part)
        total.records -= self._ready_batches.records_kept
        commits = self._committer.commits if self._committer is not None else 0
        return ConsumerStats(
            total, self._reading.retries, commits, self._dead_letters.sent, self._confirmed.transit_errors
        )

    # ---- inside: batches ------------------------------------------------------------------------------

    def _check(self, *, failures: bool = False) -> None:
        """Raise the error that stops this consumer; with `failures` also one of a partition or the group.

        Only a poll raises those. In a seek or a commit, the caller would take them for errors of its own partition.
        """
        if self._closed:
            raise ClosedError("the consumer is closed")
        if self._fatal is not None:
            raise self._fatal
        for source in (self._reading, self._opener, self._group) if failures else ():
            if source is not None and source.failure is not None:
                failure, source.failure = source.failure, None
                if isinstance(failure, NotFoundError):
                    for name in self.settings.topics:
                        self._metadata.doubt(name)
                    self._stale.set()  # a topic is gone: the others must continue
                    self._ready_batches.urgent = True  # its fetched batches must not come after this error
                raise failure
        if self._started and not self._topics:
            self._stale.set()
            raise NotFoundError(f"none of the topics {', '.join(self.settings.topics)} exists any more")

    def _die(self, error: BaseException) -> None:
        """A background task died: nothing works any more."""
        self._fatal = error
        self._wake()

    def _wake(self) -> None:
        """Wake the caller of `next`, also before prepared batches."""
        self._ready_batches.urgent = True
        self._changed.set()

    def _new_changes(self) -> AssignmentEvents | None:
        """Return changes for the user: assigned partitions only when they are open."""
        if self._group is None:
            return None
        changes = self._group.state.changes()
        self._notified = tuple(partition for partition in changes.assigned if partition in self._reading.assigned)
        return AssignmentEvents(changes.lost, changes.revoked, self._notified) or None

    def _log_damage(self, damage: Damage) -> None:
        self._events.warning("consumer.damage", f"skipped {damage}")

    async def _next_batch(self) -> Batch | None:
        """Return the next batch that has records, or damage that was skipped."""
        found = self._delivery or self._reading.deliver()
        if found is None:
            return None
        assigned, delivery = found
        if delivery.failure is not None:
            self._report_to_audit(assigned, delivery)
            raise delivery.failure
        batch = self._batch_of(assigned, delivery)
        for damage in batch.damaged:
            self._log_damage(damage)
        if batch.damaged and self.settings.on_damaged == "dead-letter":
            self._delivery = found  # it comes again when this is cut short
            await self._dead_letters.send(assigned.topic_partition, batch.damaged)
            self._delivery = None
        self._hand(assigned, delivery, batch)
        return self._ready_batches.take()

    def _make_ahead(self) -> None:
        """Build batches from whole, ready data while they are small compared with the prefetch limit."""
        left = self.settings.prefetch_bytes_max // AHEAD_SHARE
        while left > 0 and self._delivery is None:
            found = self._reading.deliver(whole=True)
            if found is None:
                return
            assigned, delivery = found
            left -= sum(len(part.piece.data) for part in delivery.slices)
            self._hand(assigned, delivery, self._batch_of(assigned, delivery))

    def _hand(self, assigned: Assigned, delivery: ReadyRange, batch: Batch) -> None:
        entry = assigned.ledger.hand(delivery.behind)
        self._report_to_audit(assigned, delivery)
        self._ready_batches.add(ReadyBatch(assigned, batch, delivery.totals, entry))

    def _report_to_audit(self, assigned: Assigned, delivery: ReadyRange) -> None:
        if assigned.observer is not None:
            assigned.observer.deliver(delivery, self._runtime.clock.wall_ms())

    def _batch_of(self, assigned: Assigned, delivery: ReadyRange) -> Batch:
        first, source = delivery.first, assigned.topic_partition
        key = delivery.pointer.locations[0].key if delivery.pointer is not None else ""
        damaged: list[Damage] = []
        for piece in delivery.damaged:
            assert piece.cause is not None
            position = Position(source.partition, first.pointer_offset, piece.first)
            damaged.append(Damage(key, piece.number, position, piece.records, bytes(piece.data), piece.cause))
        policy = self.settings.on_damaged
        span, writer = (first, delivery.behind.marked_position), delivery.pointer.partition if delivery.pointer else 0
        return Batch(source, span, delivery.slices, damaged, key, self._report, writer, delivery.behind, policy)

    def _report(self, batch: Batch, damage: Damage) -> None:
        """A payload turned out to be damaged while the user read it, in whatever thread.

        The next question must reach the I/O side: before its batch is done, and may be committed, this is dealt with.
        """
        self._late_damage.append((batch, damage))
        self._ready_batches.urgent = True

    async def _send_late_damage(self) -> None:
        while self._late_damage:
            batch, damage = self._late_damage[0]
            if self.settings.on_damaged == "dead-letter":
                await self._dead_letters.send(TopicPartition(batch.topic, batch.partition), [damage])
            self._late_damage.popleft()
            self._log_damage(damage)
            for assigned in self._reading.assigned.values():
                if assigned.observer is not None and assigned.topic_partition == (batch.topic, batch.partition):
                    assigned.observer.note_damage(batch.write_partition, damage)
            self._late_counts.damaged_blocks += 1
            self._late_counts.damaged_records += damage.records

    # ---- inside: partitions ----------------------------------------------------------------------------

    def _partitions(self) -> list[ReadPartition]:
        return [partition for topic in self._topics.values() for partition in read_partitions(topic)]

    def _wanted(self) -> dict[ReadPartition, int]:
        """Return the partitions to read, with their grants: all of known topics, or those of the group."""
        granted = dict.fromkeys(self._partitions(), 0) if self._group is None else self._group.state.granted
        return {partition: grant for partition, grant in granted.items() if self._exists(partition)}

    async def _owner_spans(self, partition: ReadPartition) -> Sequence[Span]:
        """See `OwnerRequests.spans`: of all owners that write to a read partition."""
        return await self._owners.spans(partition, self._topic_of(partition).writers_of(partition))

    def _exists(self, partition: ReadPartition) -> bool:
        """Whether its topic is there, as far as is known, and not another one of the same name."""
        topic = self._topics.get(partition.topic)
        return topic is not None and topic.id == partition.topic_id

    def _topic_of(self, partition: ReadPartition) -> Topic:
        """Return the topic of a partition. Raises: NotFoundError when it was deleted meanwhile."""
        if not self._exists(partition):
            raise NotFoundError(f"topic '{partition.topic}' does not exist any more")
        return self._topics[partition.topic]

    def _group_changed(self) -> None:
        """Drop fetched batches of released or lost partitions, and of deleted topics."""
        self._reading.keep(self._wanted())
        if self._delivery is not None and self._delivery[0].removed:
            self._delivery = None
        self._opener.kick()
        self._wake()

    def _known(self) -> list[tuple[ReadPartition, Assigned]]:
        """Return the open partitions that the user has, as far as the user was notified.

        A pause or a seek before the notice would be one of the assignment before, but have its effect on the new one.
        """
        known = None if self._group is None else {*self._group.state.held, *self._notified}
        return [(key, found) for key, found in self._reading.assigned.items() if known is None or key in known]

    def _find(self, topic: str, partition: int) -> tuple[ReadPartition, Assigned]:
        check_kind("partition", partition, int)
        self._check()
        for key, assigned in self._known():
            if (key.topic, key.partition) == (topic, partition):
                return key, assigned
        raise InvalidRequestError(
            f"partition {partition} of topic '{topic}' is not assigned to this consumer",
            hint="poll until on_assigned was called with it",
        )

    def _find_handed(self, batch: Batch) -> Assigned:
        partition = TopicPartition(batch.topic, batch.partition)
        for assigned in self._reading.assigned.values():
            if assigned.topic_partition == partition and assigned.ledger.knows(batch.next):
                return assigned
        raise _given_back(batch)

    def _need_group(self) -> Committer:
        if self._committer is None:
            raise InvalidRequestError(
                "a consumer without a group commits nothing", hint="pass group='…' or broadcast='…'"
            )
        return self._committer

    async def _look_up(self, name: str) -> TopicMetadata | None:
        """Ask for a topic.

        The result is None when brokers answered three times that it does not exist: a broker that has just started may
        not know it.
        A consumer that believed it once would lose its position, and start again at its configured start.
        """
        found = await self._metadata.refresh(name)
        for number in range(GONE_TRIES if name in self._topics else 0):
            if found is not None:
                break
            await asyncio.sleep(GONE_RETRY_S * 2**number)
            found = await self._metadata.refresh(name)
        return found

    async def _refresh(self) -> None:
        """Learn of new partitions, of topics that were created again, and of those that are gone."""
        while True:
            self._stale.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._stale.wait()
            for name in self.settings.topics:
                try:
                    found = await self._look_up(name)
                except MemqError:
                    continue  # the old knowledge holds until a broker answers
                self._topics.pop(name, None)
                if found is not None:
                    self._topics[name] = found.topic
            self._reading.follow(self._topics)
            if self._group is not None:
                self._group.share(self._partitions())
            self._group_changed()


def _given_back(batch: Batch) -> GenerationFencedError:
    what = "was delivered before its partition was released or lost, before a seek, or by another consumer"
    return GenerationFencedError(f"{batch!r} {what}")
