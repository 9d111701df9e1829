"""One broker: connects its parts, listens, owns its connections, drains and closes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from memq.broker.api.group_migration import GroupMigrator
from memq.broker.api.requests import Requests
from memq.broker.failure_detector import FailureDetector
from memq.broker.identity.tokens import Tokens
from memq.broker.ingest.connection import Connection
from memq.broker.ingest.intake import Intake
from memq.broker.ingest.quotas import NO_CLIENT_LIMITS, ClientLimits, Quotas
from memq.broker.ingest.slabs import SLAB_BYTES, SlabPool
from memq.broker.metrics import Counters, Traffic
from memq.broker.partition.recent_batch_cache import RecentBatchCache
from memq.broker.partition.storing import SharedObjects
from memq.broker.partitions import Partitions
from memq.broker.service_partitions.hosts import ServiceHosts
from memq.broker.services import Services
from memq.broker.spool import SpoolDisk
from memq.broker.spool.held_records import HeldRecords
from memq.broker.spool.replay import Replay
from memq.broker.spool.writer import Spool
from memq.broker.start_steps import make_audit_topic, start_step
from memq.broker.upkeep.idle_topics import IdleTopics
from memq.broker.upkeep.sealing import Sealing
from memq.broker.upkeep.share_rounds import ShareRounds
from memq.errors import (
    CorruptDataError,
    FencedError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    NotReadyError,
    ProtocolError,
    StoreError,
)
from memq.governor import BrokerEntry, Coordinator, Load
from memq.governor.governor import Governor
from memq.notification import NotificationQueue
from memq.protocol.frames import Api, encode_frame
from memq.protocol.messages import Draining, encode_message
from memq.runtime.network import Address, BoundPort, format_address, parse_address
from memq.runtime.runtime import Runtime
from memq.runtime.tasks import TaskOwner, bunches
from memq.settings import BrokerSettings
from memq.storage_handlers import StorageHandler
from memq.topic import ReadPartition, read_partitions

if TYPE_CHECKING:
    from memq.broker.broker_traces import BrokerTraces

T = TypeVar("T")

HOUSEKEEPING_S = 1.0
KEPT_PARTITIONS_MAX = 200  # partitions checked in one round: a check of thousands of idle ones took a tenth of a core
RECENT_BATCHES_SHARE = 4  # a quarter of the memory budget keeps published batches for READ
UNSENT_SHARE = 8  # an eighth of the memory budget, in addition to it, may wait in sockets of slow clients
DRAIN_RETRY_MS = 500
HAND_OVER_S = (
    30.0  # time-out for other brokers to take partitions; for a broker that leaves, each taken one restarts it
)
LOADS_INTERVAL_S = 10.0
REGISTER_AGAIN_S = 3.0  # from the notice that this broker is no member to its registration
AUDIT_TOPIC_S = 10.0  # how long a start waits for the audit topic, which only the audit needs
# Each opening notifies of a change, and 10,000 rounds of governor and partitions would take 8 minutes. So a pause
# follows each round: ROUND_PAUSE_FACTOR times as long as the round, at most ROUND_PAUSE_S_MAX.
ROUND_PAUSE_FACTOR = 4
ROUND_PAUSE_S_MAX = 1.0


class Broker:
    """A broker on the parts that it is given; `start` makes it reachable, `drain` and `close` end it.

    `stores` are the cluster's stores by name; new objects go to the first one. `governs`: it may become the governor.
    `client_limits` apply at this broker. `spool_disk` is for topics with `ack1 = "disk"`; the broker closes it.
    `traces` gets uploads and publishes. `alone`: no other process uses the queue.
    `tokens` checks those of clients.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        runtime: Runtime,
        stores: dict[str, StorageHandler],
        queue: NotificationQueue,
        coordinator: Coordinator,
        *,
        governs: bool = True,
        client_limits: ClientLimits = NO_CLIENT_LIMITS,
        spool_disk: SpoolDisk | None = None,
        traces: BrokerTraces | None = None,
        slab_bytes: int = SLAB_BYTES,
        alone: bool = False,
        tokens: Tokens | None = None,
    ) -> None:
        pool = SlabPool(settings.memory_bytes_max, slab_bytes)
        recent_batches = RecentBatchCache(settings.memory_bytes_max // RECENT_BATCHES_SHARE, pool.release)
        pool.reclaim = recent_batches.reclaim
        pool.freed = self._memory_freed
        counters = Counters()
        spool = Spool(spool_disk, settings, runtime, counters, pool.release, self._task_failed)
        self.services = Services(
            settings=settings,
            session=f"{runtime.random.getrandbits(64):016x}",
            runtime=runtime,
            stores=stores,
            store_name=next(iter(stores)),
            queue=queue,
            coordinator=coordinator,
            pool=pool,
            recent_batches=recent_batches,
            limits=Quotas(runtime.clock, client_limits),
            spool=spool,
            counters=counters,
            traces=traces,
            tokens=tokens,
        )
        self.governor: Governor | None = None
        if governs:
            self.governor = Governor(coordinator, self.services.planner, self.services.events, runtime.clock)
        self._sharing = SharedObjects(self.services, self._task_failed)
        self.partitions = Partitions(self.services, self._sharing, self.govern)
        if self.governor is not None:
            self.governor.refresh = self.partitions.refresh
        self._failure_detector = FailureDetector(self.services, self.governor, self._act_early)
        self.replay = Replay(self.services, self.partitions.forwarder, self.partitions.topics)
        self.intake = Intake(pool)
        self.intake.starving = self._memory_short
        self.address = ""
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        self._tasks = TaskOwner(self._task_failed, self.services.events)
        held = HeldRecords(self.partitions, self.replay)
        self.idle_topics = IdleTopics(self.services, self.partitions)
        self.sealing = Sealing(self.services, self.partitions, held)
        self.hosts = ServiceHosts(self.services, self.partitions, self._task_failed)
        migrator = GroupMigrator(self.services, alone=alone)
        self.requests = Requests(self.services, self.partitions, self.hand_over, held, self.hosts, migrator)
        self._listener: BoundPort | None = None
        self._unwatch: Callable[[], None] = lambda: None
        self._refresh = asyncio.Event()
        self._ungoverned = self.services.events.outage("governor-failed", "governor-back")
        self._unrefreshed = self.services.events.outage("refresh-failed", "refresh-back")
        self._entry = BrokerEntry(id=settings.broker_id, session=self.services.session, address="")
        self._loads: list[Load] | None = None  # as they were reported last

    async def start(self, http_address: str = "") -> None:
        """Listen, register, and read the assignment. Raises: MemqError of the part that fails."""
        settings, services = self.services.settings, self.services
        for lost in await self._step("compare queue and store", lambda: services.lost_queue.check(self._unanswered)):
            services.events.error("log-lost", f"{lost}; {lost.hint}")
        if services.spool.disk is not None:
            await self.replay.find(services.spool.disk)
            services.spool.start()
        # Quotas and users are stored with the rules.
        if services.permissions.enforced or settings.quotas or services.runtime.network.encrypted:
            services.permissions.changed = self._rules_changed
            self._tasks.start(services.permissions.follow(), "follow permissions")
        if services.tokens is not None:
            self._tasks.start(services.tokens.follow(), "follow keys of tokens")
        if settings.quotas:
            self._tasks.start(ShareRounds(services, self.hosts.link).run(), "share quotas")
        self._listener = await services.runtime.network.listen(settings.host, settings.port, self._accept)
        services.groups.address = self._listener.address
        self.address = _public_address(settings.advertise, self._listener.address)
        self._entry = BrokerEntry(
            id=settings.broker_id,
            session=services.session,
            address=self.address,
            http_address=http_address,
            zone=settings.zone,
            capacity_bytes_s=settings.capacity_bytes_s,
            host=services.runtime.host,
            pid=services.runtime.pid,
            state_logs=True,
        )
        await self._step("register", self._register)
        # The watch begins before the first read: else a change in between is noticed only at the next report of loads.
        self._unwatch = services.coordinator.watch(self._coordinator_changed)
        await self.govern()
        await self._step("read assignments", self.partitions.refresh)
        await self._create_logs()
        self.partitions.serving = True
        self._tasks.start(self._follow_coordinator(), "follow coordinator")
        if services.spool.disk is not None:
            self._tasks.start(self.replay.run(services.spool.disk), "replay spool")
        self._tasks.start(self._keep_house(), "keep house")
        self._tasks.start(self._report_loads(), "report loads")
        self._tasks.start(self._stay_registered(), "register again")
        self._tasks.start(self.sealing.run(lambda: self.governs), "end sealed topics")
        self._tasks.start(self.idle_topics.run(lambda: self.governs), "expire idle topics")
        if settings.early_takeover:
            self._tasks.start(self._failure_detector.run(), "check suspicions")
        if settings.audit:
            making = self._tasks.start(make_audit_topic(services, self.partitions), "make audit topic")
            await asyncio.wait([making], timeout=AUDIT_TOPIC_S)

    def _unanswered(self, partition: ReadPartition, error: MemqError) -> None:
        where, events = f"topic '{partition.topic}' partition {partition.partition}", self.services.events
        if isinstance(error, CorruptDataError):
            events.error("log-damaged", f"{where} is not opened: {error}; {error.hint}")
        else:
            events.warning("log-unanswered", f"{where} is compared with the store when it is opened: {error}")

    async def _step(self, name: str, step: Callable[[], Awaitable[T]]) -> T:
        return await start_step(self.services.runtime, self.services.events, name, step)

    async def _create_logs(self) -> None:
        """Create the missing logs of topics in the queue; skip damaged logs.

        Many topics at the same time, because the queue can then ask for them together: one by one, 10,000 topics took
        minutes. Raises: MemqError of the first topic that fails.
        """
        queue = self.services.queue
        for bunch in bunches(self.partitions.topics()):
            works = (queue.create(read_partitions(topic), topic.settings.stale_publish_ms) for topic in bunch)
            for topic, end in zip(bunch, await asyncio.gather(*works, return_exceptions=True), strict=True):
                if isinstance(end, NotFoundError) and await self.services.coordinator.deleted(topic.id):
                    continue  # the topic was deleted meanwhile
                if isinstance(end, CorruptDataError):
                    continue  # `_unanswered` has logged it; other topics are not affected
                if end is not None:
                    raise end

    async def govern(self) -> bool:
        """Let the governor act, if this broker is the governor; return False when that failed."""
        if self.governor is None:
            return True
        try:
            await self.governor.act(self._entry)
        except MemqError as error:
            self.services.counters.coordinator_failures += 1
            self._ungoverned.failed(str(error))
            return False
        self._ungoverned.passed()
        return True

    @property
    def governs(self) -> bool:
        """Whether this broker was the governor at its last check."""
        return self.governor is not None and self.governor.term > 0

    async def hand_over(self, *, leaves: bool = False) -> None:
        """Give up all partitions: drain each one, so that its next owner opens it.

        Raises: InvalidRequestError when no other broker takes partitions; UnreachableError; TimeoutError after
        HAND_OVER_S, with `leaves` only when no partition was taken within that time.
        After an InvalidRequestError this broker takes partitions again. With `leaves` it does not: other leaving
        brokers would hand theirs to it.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(HAND_OVER_S) as limit:
            await self._enter(draining=True)
            await self.partitions.refresh()
            self._refresh.set()
            progress = self.partitions.progress(
                len(self.partitions.at_work()), "partitions are closed for others to open"
            )
            least = progress.total + len(self.partitions.held())
            while True:
                self.partitions.changed.clear()
                held = self.partitions.held()
                at_work = len(self.partitions.at_work())
                if leaves and at_work + len(held) < least:
                    limit.reschedule(loop.time() + HAND_OVER_S)
                least = min(least, at_work + len(held))
                progress.reached(max(progress.total - at_work, 0))
                if not self.partitions.heirs:
                    if not leaves:
                        await self._enter(draining=False)
                    raise InvalidRequestError(
                        f"no other broker has taken the {len(held)} partitions of broker '{self._entry.id}'",
                        hint="start another broker first",
                    )
                if not held:
                    return
                await self.partitions.changed.wait()

    async def _register(self) -> None:
        """Register, and compare the clock with the coordinator's: a clock that is ahead deletes nothing."""
        services = self.services
        asked_ms = services.runtime.clock.wall_ms()
        stored_ms = await services.coordinator.register(self._entry)
        if stored_ms is not None:
            services.deletion_clock.compare(stored_ms, asked_ms, "the coordinator")

    async def _enter(self, *, draining: bool) -> None:
        """Register again: a broker that is `draining` gets no partitions."""
        self._entry = msgspec.structs.replace(self._entry, draining=draining)
        await self._register()

    async def drain(self) -> None:
        """Hand over partitions, refuse new blocks, finish and ack the rest; connections stay until `close`.

        If no other broker takes the partitions, or that takes too long, this broker drains and releases them.
        """
        if self.partitions.heirs:
            try:
                await self.hand_over(leaves=True)
            except (MemqError, TimeoutError) as error:
                self.services.events.warning("hand-over-failed", f"{len(self.partitions.held())} partitions: {error!r}")
        if self._listener is not None:
            self._listener.close()
        frame = encode_frame(Api.DRAINING, 0, 0, encode_message(Draining(retry_after_ms=DRAIN_RETRY_MS)))
        for reader in list(self.intake.readers):
            if isinstance(reader, Connection) and reader.ready:
                reader.send(frame)
        await self.partitions.drain()
        if self.replay.at_work:  # the replay opens partitions again, for blocks that it forwards to this broker
            await self.replay.wait()
            await self.partitions.drain()
        await self.services.spool.settle()
        await self.hosts.drain()

    async def close(self) -> None:
        """Stop at once: close connections; pending blocks stay unacked."""
        self._unwatch()
        if self._listener is not None:
            self._listener.close()
        for reader in list(self.intake.readers):
            if isinstance(reader, Connection):
                reader.close()
        self.services.groups.close()
        await self.requests.stop()
        await self._tasks.stop()  # first, because these tasks refresh the partitions
        await self.hosts.stop()
        await self.partitions.stop()
        await self._sharing.stop()
        await self.services.planner.close()
        await self.services.spool.stop()
        self.services.recent_batches.clear()
        try:
            await self.services.coordinator.unregister(self._entry)
        except MemqError as error:
            self.services.events.warning("unregister-failed", str(error))

    def held_blocks(self) -> list[str]:
        """Describe accepted blocks that are not in the queue yet."""
        lines = [line for processor in self.partitions.at_work() for line in processor.held_blocks()]
        return lines + self.partitions.forwarder.describe()

    async def check(self) -> None:
        """Prove that store and queue answer, both at once, and that uploads and publishes do not fail.

        The check of uploads and publishes is needed because a probe is small: a full disk may have room for it, but for
        no batch. Raises: the first error.
        """
        store = self.services.store.check(deletes=self.services.settings.delete_objects)
        for found in await asyncio.gather(store, self.services.queue.check(), return_exceptions=True):
            if found is not None:
                raise found
        failing = self.services.waits.describe(failing=True)
        if failing:
            raise StoreError(failing, hint="repair what it names; the broker tries again without end")

    # ---- inside ------------------------------------------------------------------------------------

    def _accept(self) -> Connection:
        return Connection(self.services, self.intake, self.requests)

    def _task_failed(self, error: BaseException) -> None:
        self.services.events.error("broker-failed", repr(error), error)
        self.failure = error
        self.failed.set()

    def _memory_freed(self) -> None:
        asyncio.get_running_loop().call_soon(self.intake.feed)

    def _memory_short(self) -> None:
        self.services.events.info(
            "reading-paused", f"{self.services.pool.leased_bytes} bytes are held, no more are read"
        )
        for processor in self.partitions.at_work():
            processor.hurry()

    def _rules_changed(self) -> None:
        if self.services.settings.quotas:
            self.services.quotas.follow(self.services.permissions.quotas)
        for reader in list(self.intake.readers):
            if isinstance(reader, Connection) and reader.ready:
                self.requests.follow_limits(reader)
                self.requests.recheck(reader)

    async def _coordinator_changed(self) -> None:
        self._refresh.set()

    async def _follow_coordinator(self) -> None:
        while True:
            await self._refresh.wait()
            self._refresh.clear()
            started_s = self.services.runtime.clock.monotonic()
            governed = await self.govern()
            try:
                await self.partitions.refresh()
            except MemqError as error:
                self.services.counters.coordinator_failures += 1
                self._unrefreshed.failed(str(error))
                governed = False
            else:
                self._unrefreshed.passed()
                self._check_id()  # only after a fresh read: an old one may show this broker's previous run
            took_s = self.services.runtime.clock.monotonic() - started_s
            await asyncio.sleep(min(ROUND_PAUSE_FACTOR * took_s, ROUND_PAUSE_S_MAX))
            if not governed:
                await asyncio.sleep(HOUSEKEEPING_S)
                self._refresh.set()

    def _check_id(self) -> None:
        """Raise FencedError when another broker took this one's id."""
        namesake = self.partitions.namesake
        if namesake is not None:
            raise FencedError(
                f"another broker at {namesake.address} runs under the id '{namesake.id}'",
                hint="give each broker a broker_id of its own",
            )

    async def _act_early(self) -> bool:
        """Assign the partitions of a suspect, and take its own ones at once."""
        acted = await self.govern()
        self._refresh.set()
        return acted

    async def _stay_registered(self) -> None:
        """Register again after an early takeover: this broker is alive, but others could not connect to it.

        It waits until the governor has assigned its partitions, which clients can't reach here.
        """
        services = self.services
        missing_since_s: float | None = None
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            now_s = services.runtime.clock.monotonic()
            if self.partitions.registered or missing_since_s is None:
                missing_since_s = None if self.partitions.registered else now_s
            elif now_s - missing_since_s >= REGISTER_AGAIN_S:
                missing_since_s, self._loads = None, None
                try:
                    await self._register()
                except MemqError as error:
                    services.events.info("register-failed", str(error))
                else:
                    services.events.warning("registered-again", "other brokers had taken over the partitions")
                    self._refresh.set()

    async def _report_loads(self) -> None:
        """Report the partitions' loads for the balance, and refresh, because a call of the watch may be lost."""
        clock, coordinator, traffic = self.services.runtime.clock, self.services.coordinator, Traffic()
        while True:
            loads = traffic.sample(self.partitions.stored_bytes(), clock.monotonic())
            if loads != self._loads:
                try:
                    await coordinator.report(self._entry, loads)
                    self._loads = loads
                except MemqError as error:
                    self.services.events.info("report-failed", str(error))
            await asyncio.sleep(LOADS_INTERVAL_S)
            self._refresh.set()

    async def _keep_house(self) -> None:
        """Every second: close overdue connections, forget silent producers, return spare memory."""
        services, first = self.services, 0
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            now_s, settings = services.runtime.clock.monotonic(), services.settings
            readers = list(self.intake.readers)
            connections = [each for each in readers if isinstance(each, Connection) and not _is_quiet(each, now_s)]
            for connection in connections:
                _close_overdue(connection, now_s, settings)
            self.intake.partial.park_slow(now_s)
            services.counters.slow_frames += self.intake.partial.shed(now_s)
            _shed(connections, settings.memory_bytes_max // UNSENT_SHARE)
            at_work = self.partitions.at_work()
            first = first if first < len(at_work) else 0
            for processor in at_work[first : first + KEPT_PARTITIONS_MAX]:
                processor.forget_silent(services.deletion_clock.wall_ms())
            first += KEPT_PARTITIONS_MAX
            services.pool.trim(4 * services.pool.slab_bytes)


def _public_address(advertise: str, bound: Address) -> str:
    """Return the advertised address: `advertise` (with the real port for 0), or the listening one."""
    host, port = parse_address(advertise) if advertise else bound
    return format_address((host, port or bound[1]))


def _is_quiet(connection: Connection, now_s: float) -> bool:
    """Whether nothing is incomplete or over: HELLO, a frame, unread answers, a token, the end.

    Most connections are quiet.
    """
    return (
        connection.ready
        and connection.half_since_s is None
        and connection.leaving_since_s is None
        and not connection.outbox.congested
        and now_s < connection.token_ends_s
    )


def _close_overdue(connection: Connection, now_s: float, settings: BrokerSettings) -> None:
    """Close a connection without HELLO, with an incomplete frame, or with unread answers, after its time."""
    if not connection.ready and now_s - connection.opened_s > settings.hello_timeout_ms / 1000:
        connection.refuse(ProtocolError(f"no HELLO within {settings.hello_timeout_ms} ms"))
    since_s = connection.half_since_s
    if since_s is not None and not connection.paused and now_s - since_s > settings.frame_timeout_ms / 1000:
        connection.refuse(ProtocolError(f"a frame was not complete within {settings.frame_timeout_ms} ms"))
    if now_s >= connection.token_ends_s:
        connection.refuse(NotReadyError("the token of this connection has ended", hint="connect again with a new one"))
    connection.outbox.note_progress(now_s)
    if connection.outbox.is_stuck(now_s, settings.frame_timeout_ms):
        connection.abort()  # the client does not read, so it would not read an error either
    if connection.leaving_since_s is not None and now_s - connection.leaving_since_s > settings.frame_timeout_ms / 1000:
        connection.abort()  # the client does not read the error


def _shed(connections: list[Connection], bytes_max: int) -> None:
    """Abort the connections that have read nothing for longest, while more than `bytes_max` bytes wait."""
    slow = [connection for connection in connections if connection.outbox.congested]
    unsent = sum(connection.outbox.unsent_bytes for connection in slow)
    for connection in sorted(slow, key=lambda each: each.outbox.standing_since_s):
        if unsent <= bytes_max:
            return
        unsent -= connection.outbox.unsent_bytes
        connection.abort()
