"""The topics that a broker knows and the partitions that it owns: from names to processors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from memq.broker.partition.storing import SharedObjects
from memq.broker.partition.topic_processor import TopicProcessor
from memq.broker.services import Services
from memq.broker.spool.forwarding import Forwarder
from memq.errors import (
    AlreadyExistsError,
    DrainingError,
    InvalidRequestError,
    MemqError,
    MovedError,
    NotFoundError,
    NotReadyError,
    UnreachableError,
)
from memq.governor import Assignment, BrokerEntry
from memq.protocol.messages import Owner
from memq.runtime.clock import Clock, backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.runtime.waits import Waits
from memq.topic import (
    PartitionKey,
    ReadPartition,
    Topic,
    TopicSettings,
    Truncation,
    check_resource_name,
    equal_slots,
    is_state_topic,
    read_partitions,
)

STARTING_MS = 200  # retry interval for clients of a broker that is starting
NO_OWNER_MS = 200  # retry interval for clients of a partition without an owner
DROP_WAIT_S = 10.0  # how long the answer to a deletion waits for the drop of the logs; clients wait 30 s for it
DROP_RETRY_S = 0.1
DROP_RETRY_S_MAX = 10.0
CONFIRM_S = 2.0  # time-out for the coordinator to confirm a topic; clients wait 5 s for METADATA
CONFIRM_PAUSE_S = 5.0
CONFIRMED_AT_ONCE = 64
RetentionOrder = tuple[TopicSettings, tuple[Truncation, ...]]
PROGRESS_S = 5.0  # between two lines about a long drain
WAITS_LOGGED_S = 15.0  # between two lines about the causes


class DrainProgress:
    """Number of drained partitions out of `total`. A drain of a few seconds logs nothing."""

    def __init__(self, clock: Clock, events: EventLog, total: int, done_text: str) -> None:
        """`done_text` follows "3000 of 10000 " in the log."""
        self.done = 0
        self.total = total
        self._clock = clock
        self._events = events
        self._done_text = done_text
        self._logged_s = clock.monotonic()

    def reached(self, done: int) -> None:
        """Note how many are done by now."""
        self.done = done
        now_s = self._clock.monotonic()
        if now_s - self._logged_s >= PROGRESS_S:
            self._logged_s = now_s
            self._events.info("draining-progress", f"{done} of {self.total} {self._done_text}")

    async def log_waits(self, waits: Waits) -> None:
        """Log what the drain waits for, until cancelled."""
        while True:
            await asyncio.sleep(WAITS_LOGGED_S)
            why = waits.describe()
            if why:
                text = f"{self.done} of {self.total} {self._done_text}; the drain waits: {why}"
                self._events.warning("draining-waits", text)


class Partitions:
    """Follows the coordinator. A processor is opened when a producer first asks for its partition.

    `govern` lets the governor act, if this broker is the governor, so that a new topic gets owners at once.
    """

    def __init__(self, services: Services, sharing: SharedObjects, govern: Callable[[], Awaitable[object]]) -> None:
        self.processors: dict[PartitionKey, TopicProcessor] = {}
        self.serving = False  # once the broker has started: a start that fails must not have accepted blocks
        self.draining = False
        self.retention_due: dict[ReadPartition, tuple[RetentionOrder, int]] = {}  # next check, Unix ms
        self.changed = asyncio.Event()  # after a refresh, or the end of a released partition
        self._services = services
        self._govern = govern
        self._confirming = asyncio.Semaphore(CONFIRMED_AT_ONCE)
        self._silent_until_s = 0.0  # monotonic; until then the coordinator is not asked to confirm topics
        self._sharing = sharing
        self.forwarder = Forwarder(services, self.locate)
        self._topics: dict[str, Topic] = {}
        self._assignments: dict[PartitionKey, Assignment] = {}
        self._read: Sequence[Assignment] = ()
        self._owned: dict[PartitionKey, None] = {}
        self._held: dict[PartitionKey, None] = {}  # owned, or not released yet
        self._next_refresh: asyncio.Task[None] | None = None  # not begun yet: callers of `locate` share it
        self._refresh_turn = asyncio.Lock()
        self._addresses: dict[str, str] = {}
        self._brokers: dict[str, str] = {}
        self.heirs: list[str] = []  # the other brokers that take partitions
        self.namesake: BrokerEntry | None = None  # the live broker that took this one's id
        self.registered = True  # whether this broker's id was in the membership at the last refresh
        self.hosted: Callable[[], Sequence[PartitionKey]] = list  # service partitions whose logs are open here
        self.refreshed: Callable[[], None] = lambda: None  # called after each refresh
        self._reads = self._reads_applied = 0
        self._leaving = TaskOwner(self._leave_failed, services.events)
        self._left: dict[TopicProcessor, asyncio.Task[None]] = {}  # released, but still at work

    # ---- state of the coordinator ---------------------------------------------------------------

    async def refresh(self) -> None:
        """Read topics, brokers and assignments; release partitions of other owners.

        If two calls run at the same time, the answers to the earlier one never replace the answers to the later one.
        """
        coordinator = self._services.coordinator
        self._reads += 1
        number = self._reads
        topics = await coordinator.topics()
        brokers = await coordinator.brokers()
        assignments = await coordinator.assignments()
        if number < self._reads_applied:
            return
        self._reads_applied = number
        self._topics = {topic.name: topic for topic in topics}
        self._addresses = {broker.id: broker.address for broker in brokers}
        self._brokers = {broker.address: broker.zone for broker in brokers}
        others = [each for each in brokers if each.id == self._id and each.session != self._services.session]
        self.namesake = others[0] if others else None
        self.registered = any(each.id == self._id for each in brokers)
        self.heirs = [each.id for each in brokers if not each.draining and each.id != self._id]
        if assignments is not self._read:  # without a change, a coordinator may return the same list
            self._read = assignments
            self._take(assignments)
        self._services.limits.follow(topics, self._owned)
        for key, processor in list(self.processors.items()):
            self._follow(key, processor)
        for processor in self._left:
            if (processor.topic.id, processor.partition) not in self._assignments:
                processor.fail(_deleted(processor.topic))  # its drain would wait for ever
        self.refreshed()
        await self._release_strays()
        self.changed.set()

    @property
    def _id(self) -> str:
        return self._services.settings.broker_id

    def owns(self, topic: Topic, partition: int) -> bool:
        """Whether a write partition is assigned to this broker."""
        entry = self._assignments.get((topic.id, partition))
        return entry is not None and entry.broker == self._id

    def held(self) -> list[PartitionKey]:
        """Return the partitions that are assigned to this broker, opened by it, or still at work here."""
        return list(self._held | dict.fromkeys((left.topic.id, left.partition) for left in self._left))

    def _take(self, assignments: Sequence[Assignment]) -> None:
        ours, session = self._id, self._services.session
        self._assignments = {(entry.topic_id, entry.partition): entry for entry in assignments}
        self._owned = {key: None for key, entry in self._assignments.items() if ours == entry.broker}
        held = (key for key, entry in self._assignments.items() if ours == entry.broker or session == entry.session)
        self._held = dict.fromkeys(held)

    def _take_one(self, entry: Assignment) -> None:
        """Take an assignment to this broker."""
        key = (entry.topic_id, entry.partition)
        self._assignments[key] = entry
        self._owned[key] = self._held[key] = None

    def stored_bytes(self) -> dict[PartitionKey, int]:
        """Return how many bytes each open partition committed since its creation."""
        return {
            key: processor.own.totals.bytes for key, processor in self.processors.items() if processor.own is not None
        }

    async def _release_strays(self) -> None:
        """Clear this session in assignments of other brokers whose partitions are no longer at work here.

        A drain does this itself. But after a failure of the partition or its release, the next owner would wait.
        """
        strays = [self._assignments[key] for key in self._held if key not in self._owned]
        if not strays:
            return
        at_work = {(processor.topic.id, processor.partition): None for processor in self.at_work()}
        at_work |= dict.fromkeys(self.hosted())
        for entry in strays:
            key = (entry.topic_id, entry.partition)
            if key not in at_work:
                try:
                    await self._services.coordinator.set_assignment(msgspec.structs.replace(entry, session=""))
                except MemqError as error:
                    self._services.events.info(
                        "release-failed", f"partition {key[1]} of topic id {key[0][:8]}: {error}"
                    )

    def _follow(self, key: PartitionKey, processor: TopicProcessor) -> None:
        entry = self._assignments.get(key)
        if entry is None:
            del self.processors[key]
            self._finish(processor, processor.stop())  # `refresh` lets it fail as deleted
        elif entry.broker != self._id or _came_back(entry, processor):
            del self.processors[key]
            processor.moved_to = self._addresses.get(entry.broker, "")
            self._finish(processor, processor.drain())
        elif processor.failure is not None:
            del self.processors[key]  # the next stream opens it again
            self._finish(processor, processor.stop())
        else:
            processor.follow(self._topics.get(processor.topic.name, processor.topic))

    def _finish(self, processor: TopicProcessor, work: Coroutine[Any, Any, None]) -> None:
        task = self._leaving.start(work, _leaving(processor))
        self._left[processor] = task

        def done(task: asyncio.Task[None]) -> None:
            self._left.pop(processor, None)
            self.changed.set()

        task.add_done_callback(done)

    def _leave_failed(self, error: BaseException) -> None:
        self._services.events.error("drain-failed", repr(error), error)

    def at_work(self) -> list[TopicProcessor]:
        """Return the processors of all owned partitions, and of released ones that are not finished."""
        return [*self.processors.values(), *self._left]

    # ---- requests of connections ----------------------------------------------------------------

    def topics(self) -> list[Topic]:
        """Return all topics, by name."""
        return sorted(self._topics.values(), key=lambda topic: topic.name)

    def topic(self, name: str, topic_id: str = "") -> Topic:
        """Return a topic. Raises: NotFoundError, also when the id is that of an earlier topic of this name."""
        found = self._topics.get(name)
        if found is None:
            raise NotFoundError(f"topic {name[:60]!a} does not exist")
        if topic_id and topic_id != found.id:
            raise NotFoundError(
                f"topic '{name}' with id {topic_id[:8]} was deleted; the one of this name now is {found.id[:8]}",
                hint="ask for the metadata again",
            )
        return found

    async def current_topic(self, name: str, topic_id: str = "") -> Topic:
        """Return a topic; an unknown topic may have been created through another broker.

        Raises: NotFoundError when a fresh read of the coordinator agrees; NotReadyError when it contradicts what this
        broker has read; as the coordinator.
        """
        with suppress(NotFoundError):
            return self.topic(name, topic_id)
        await self.refresh()
        try:
            return self.topic(name, topic_id)
        except NotFoundError:
            found = await self._services.coordinator.current_topic(name)
            if found is None or (topic_id and found.id != topic_id):
                raise
        raise self._unread(name)

    async def confirm(self, names: Sequence[str], known: Mapping[str, str]) -> list[str]:
        """Compare topics with a fresh read of the coordinator, except those whose id is `known`.

        Returns the names for which the coordinator did not answer in time: its last answer is used for them.
        Raises: NotReadyError when the fresh read contradicts what this broker has read.
        """
        doubtful = [name for name in names if name in self._topics and self._topics[name].id != known.get(name)]
        ids = dict(zip(doubtful, await asyncio.gather(*map(self._current_id, doubtful)), strict=True))
        if any(topic_id is not None and self._contradicts(name, topic_id) for name, topic_id in ids.items()):
            await self.refresh()
        for name, topic_id in ids.items():
            if topic_id is not None and self._contradicts(name, topic_id):
                raise self._unread(name)
        return [name for name, topic_id in ids.items() if topic_id is None]

    async def _current_id(self, name: str) -> str | None:
        """Return the coordinator's current id of a name: "" for no topic, None without an answer.

        After a time-out the coordinator is not asked for CONFIRM_PAUSE_S, so that not every request waits for it.
        """
        clock = self._services.runtime.clock
        if clock.monotonic() < self._silent_until_s:
            return None
        try:
            async with asyncio.timeout(CONFIRM_S), self._confirming:
                found = await self._services.coordinator.current_topic(name)
        except MemqError:
            return None
        except TimeoutError:
            self._silent_until_s = clock.monotonic() + CONFIRM_PAUSE_S
            return None
        return "" if found is None else found.id

    def _contradicts(self, name: str, topic_id: str) -> bool:
        return name in self._topics and self._topics[name].id != topic_id

    def _unread(self, name: str) -> NotReadyError:
        return NotReadyError(
            f"broker '{self._id}' has not read topic '{name}' from the coordinator yet", retry_after_ms=STARTING_MS
        )

    def owners(self, topic: Topic) -> list[Owner]:
        """Return the owners of a topic's write partitions."""
        owners = []
        for part in topic.partitions:
            entry = self._assignments.get((topic.id, part.partition), Assignment(topic_id=topic.id, partition=0))
            address = self._addresses.get(entry.broker, "")
            owners.append(Owner(partition=part.partition, epoch=entry.epoch, broker=entry.broker, address=address))
        return owners

    def brokers(self) -> dict[str, str]:
        """Return the addresses of the live brokers, each with its zone."""
        return self._brokers

    def processor(self, topic: Topic, partition: int, *, to_end: bool = False) -> TopicProcessor:
        """Return the processor of an own partition; the first call opens it.

        `to_end`: also while the broker drains, for work that the drain must finish.
        Raises: NotFoundError (no such partition), MovedError with the owner's address, DrainingError, NotReadyError;
        InvalidRequestError for a state log: pointers of records would damage it.
        """
        if is_state_topic(topic.name):
            raise InvalidRequestError(f"topic '{topic.name}' has state logs, which take no records")
        if not self.serving:
            raise NotReadyError(f"broker '{self._id}' is starting", retry_after_ms=STARTING_MS)
        if not 0 <= partition < len(topic.partitions):
            raise NotFoundError(f"topic '{topic.name}' has {len(topic.partitions)} partitions, none is {partition}")
        key = (topic.id, partition)
        entry = self._assignments.get(key)
        if entry is None or entry.broker != self._id:
            raise not_owner(topic, partition, self._addresses.get(entry.broker, "") if entry is not None else "")
        if self.draining and not to_end:
            raise DrainingError(f"broker '{self._id}' is being drained")
        processor = self.processors.get(key)
        if processor is not None and processor.failure is not None:
            self._follow(key, processor)
            processor = None
        if processor is None:
            processor = self.processors[key] = TopicProcessor(
                self._services, self._sharing, self.forwarder.take, topic, partition
            )
            processor.start()
        return processor

    async def locate(self, topic: Topic, partition: int) -> TopicProcessor | str:
        """Return the processor of a partition of this broker, else its owner's address.

        The last broker that drains takes a partition without an owner, because no governor is left to assign it. While
        the coordinator is unreachable, its last answer is used. Raises: MovedError while the partition has no live
        owner; NotFoundError.
        """
        if self._next_refresh is None:
            self._next_refresh = self._leaving.start(self._refresh_once(), "look for owners")
        await asyncio.shield(self._next_refresh)
        entry = self._assignments.get((topic.id, partition))
        if entry is None:
            raise _deleted(topic)
        if entry.broker not in self._addresses and self.draining and not self.heirs:
            entry = await self._services.coordinator.set_assignment(msgspec.structs.replace(entry, broker=self._id))
            self._take_one(entry)
        if entry.broker == self._id:
            return self.processor(topic, partition, to_end=True)
        if entry.broker not in self._addresses:
            raise MovedError(f"partition {partition} of topic '{topic.name}' has no live owner")
        return self._addresses[entry.broker]

    async def _refresh_once(self) -> None:
        """Refresh once for all callers that wait: each would otherwise read everything."""
        async with self._refresh_turn:
            self._next_refresh = None
            with suppress(UnreachableError):
                await self.refresh()

    # ---- topics ---------------------------------------------------------------------------------

    async def create(
        self, name: str, partitions: int, settings: TopicSettings, *, exist_ok: bool, internal: bool = False
    ) -> Topic:
        """Create a topic, and assign its partitions.

        Raises: InvalidNameError, InvalidSettingError, AlreadyExistsError.
        """
        check_resource_name(name, internal=internal)
        self._services.spool.check(settings)
        runtime = self._services.runtime
        topic = Topic(
            name=name,
            id=f"{runtime.random.getrandbits(128):032x}",
            created_ms=runtime.clock.wall_ms(),
            settings=settings.check(),
            partitions=equal_slots(partitions),
        )
        try:
            await self._services.coordinator.create_topic(topic)
        except AlreadyExistsError:
            if not exist_ok:
                raise
        await self._govern()
        await self.refresh()
        found = self.topic(name)
        await self._services.queue.create(read_partitions(found), found.settings.stale_publish_ms)
        return found

    async def alter(self, current: Topic, settings: TopicSettings) -> Topic:
        """Change a topic's settings; `memq.topic.HOLDS` says when each of them takes effect."""
        self._services.spool.check(settings)
        altered = await self._services.coordinator.alter_topic(
            msgspec.structs.replace(current, settings=settings.check())
        )
        await self.refresh()
        await self._services.queue.create(read_partitions(altered), altered.settings.stale_publish_ms)
        return altered

    async def delete(self, topic: Topic) -> None:
        """Delete a topic and its pointers. The deletion is final once the coordinator has confirmed it."""
        await self._services.coordinator.delete_topic(topic)
        drop = self._leaving.start(self._drop_logs(topic), f"drop the logs of {topic.name}")
        await asyncio.wait([drop], timeout=DROP_WAIT_S)

    async def _drop_logs(self, topic: Topic) -> None:
        """Drop a topic's logs, and retry without limit; the sweep does it if this broker ends before."""
        with suppress(MemqError):
            await self.refresh()
        tries = 0
        while True:
            try:
                await self._services.queue.drop(read_partitions(topic))
            except MemqError as error:
                tries += 1
                self._services.events.warning("drop-failed", f"topic '{topic.name}' with id {topic.id}: {error}")
                random = self._services.runtime.random
                await asyncio.sleep(backoff_s(random, tries, base_s=DROP_RETRY_S, most_s=DROP_RETRY_S_MAX))
            else:
                return

    # ---- the end --------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Refuse new blocks, and return when all accepted ones are acked.

        Raises: the first error of a partition that was not drained, after all others were drained.
        """
        self.start_draining()
        ends: list[BaseException | None] = []
        while self.processors or self._left or len(self.forwarder):
            at_work, left = dict(self.processors), list(self._left.values())
            progress = self.progress(len(at_work), "partitions are drained and closed")
            works = [
                asyncio.create_task(_drain(processor, progress), name=_leaving(processor))
                for processor in at_work.values()
            ]
            waits = asyncio.create_task(progress.log_waits(self._services.waits), name="log of a drain's waits")
            try:
                ends += await asyncio.gather(*works, return_exceptions=True)
            finally:
                waits.cancel()
            for key, processor in at_work.items():
                if self.processors.get(key) is processor:
                    del self.processors[key]
            if left:
                await asyncio.wait(left)  # their errors are logged
            await self.forwarder.drain()
        for end in ends:
            if end is not None:
                raise end

    def progress(self, total: int, done_text: str) -> DrainProgress:
        """Return a log of how far the drain has come."""
        return DrainProgress(self._services.runtime.clock, self._services.events, total, done_text)

    def start_draining(self) -> None:
        """Refuse new blocks from now on, in all partitions."""
        self.draining = True
        for processor in self.processors.values():
            processor.start_draining()

    async def stop(self) -> None:
        """Stop at once."""
        await self.forwarder.stop()
        at_work = self.at_work()
        await self._leaving.stop()
        for processor in at_work:
            await processor.stop()


def not_owner(topic: Topic, partition: int, address: str) -> MovedError | NotReadyError:
    """Return the answer for a client at the wrong broker: the owner's address, or wait."""
    if not address:
        text = f"partition {partition} of topic '{topic.name}' has no owner now"
        return NotReadyError(text, retry_after_ms=NO_OWNER_MS)
    moved = MovedError(f"partition {partition} of topic '{topic.name}' is not at this broker")
    moved.address = address
    return moved


def _came_back(entry: Assignment, processor: TopicProcessor) -> bool:
    """Whether a partition went to another broker and back since its epoch was opened.

    Perhaps a later epoch was opened there, and released. The next stream opens it again. Until then the coordinator
    does not confirm this epoch.
    """
    own, ended = processor.own, processor.draining or processor.failure is not None
    return own is not None and not ended and entry.session == "" and entry.epoch >= own.epoch


def _deleted(topic: Topic) -> NotFoundError:
    return NotFoundError(f"topic '{topic.name}' was deleted")


def _leaving(processor: TopicProcessor) -> str:
    """Return the name of the task in which a partition is drained and released."""
    return f"leave {processor.topic.name}/{processor.partition}"


async def _drain(processor: TopicProcessor, progress: DrainProgress) -> None:
    try:
        await processor.drain()
    finally:
        progress.reached(progress.done + 1)
