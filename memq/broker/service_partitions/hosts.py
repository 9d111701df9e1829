"""The services of a broker: those of each service partition of `_memq_state` that it owns.

A service partition hosts one service of each kind, such as a group coordinator. A group is in the service partition
that its name hashes to. The owner of the partition opens its state log, with the machines of all kinds, and keeps it
open until the partition is assigned to another broker. Any broker takes the requests of clients: it forwards them to
the owner.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

import msgspec

from memq.broker.holds.releasing import UnitReleaser
from memq.broker.partition.opening import claim_epoch
from memq.broker.partition.storing import key_valid_s
from memq.broker.partitions import Partitions, not_owner
from memq.broker.service_partitions.machines import ServiceMachines
from memq.broker.service_partitions.pop_readers import PopReaders
from memq.broker.service_partitions.topic_places import TopicPlaces
from memq.broker.services import BROKER_PROGRAM, Services
from memq.broker.upkeep.deleted_topics import DeletedTopics
from memq.errors import (
    EpochFencedError,
    LogLostError,
    MemqError,
    MovedError,
    NotFoundError,
    NotReadyError,
    RetryableError,
    UnreachableError,
)
from memq.format.key import run_key, state_prefix
from memq.groups.coordinator import GroupCoordinator
from memq.groups.machine import GROUPS_MACHINE
from memq.holds.decisions import HOLDS_MACHINE
from memq.holds.keeper import HoldKeeper, KeeperParts
from memq.holds.machine import HoldMachine
from memq.protocol.link import Link, connect_link
from memq.queues.decisions import QUEUES_MACHINE
from memq.queues.keeper import QueueKeeper, QueueParts
from memq.queues.machine import QueueMachine
from memq.queues.payloads import RecentPayloads
from memq.queues.scheduler import ItemScheduler, Moment
from memq.runtime.clock import backoff_s
from memq.runtime.network import parse_address
from memq.runtime.tasks import TaskOwner, in_slices
from memq.state_log.state_log import StateLog, StateLogSettings
from memq.topic import STATE_TOPIC, PartitionKey, ReadPartition, Topic, TopicSettings, read_partitions, shard_id
from memq.transactions.coordinator import CheckSettings, TransactionCoordinator
from memq.transactions.machine import (
    TRANSACTIONS_MACHINE,
    TransactionMachine,
)

STATE_PARTITIONS = 8
PAYLOADS_SHARE = 8  # an eighth of the memory budget, on top of it, has payloads of queue items
BACKOFF_S_MAX = 2.0
SERVICE_PAUSE_S = 1.0  # before a service works again that has failed
LISTINGS = 3  # of the snapshots of an empty log: a new log in place of a lost one would lose its state
OPENING_TRIES = 5  # then the waiting requests get the error; the next one begins another opening


def shard_name(topic_id: str, partition: int) -> str:
    """Return the name that places the delayed records of a write partition in a service partition."""
    return f"{topic_id}/{partition}"


class Service(Protocol):
    """The service of one kind in one service partition, while its state log is open here."""

    async def run(self) -> None:
        """Work until cancelled. Raises: MemqError when the log has ended."""
        ...


Made = TypeVar("Made", bound=Service)


@dataclass(frozen=True, slots=True)
class OpenLog:
    """A state log that was just opened in `epoch`, and the tasks that run until it is closed."""

    topic: Topic
    partition: int
    epoch: int
    log: StateLog
    tasks: TaskOwner
    services: dict[str, Service] = field(default_factory=dict)  # by the name of their machines


@dataclass(frozen=True, slots=True)
class ServiceKind(Generic[Made]):
    """One kind of service: the name of its machine in the log, and how the service is made."""

    machine: str
    make: Callable[[OpenLog], Awaitable[Made]]


class ServiceHosts:
    """Opens, finds and closes the services. `failed` gets the error of a task that dies."""

    def __init__(self, services: Services, partitions: Partitions, failed: Callable[[BaseException], None]) -> None:
        self.groups: ServiceKind[GroupCoordinator] = ServiceKind(GROUPS_MACHINE, self._make_groups)
        self.holds: ServiceKind[HoldKeeper] = ServiceKind(HOLDS_MACHINE, self._make_keeper)
        self.transactions: ServiceKind[TransactionCoordinator] = ServiceKind(
            TRANSACTIONS_MACHINE, self._make_transactions
        )
        self.queues: ServiceKind[QueueKeeper] = ServiceKind(QUEUES_MACHINE, self._make_queues)
        self._services = services
        self._partitions = partitions
        self._failed = failed
        self._tasks = TaskOwner(failed, services.events)
        self._hosts: dict[PartitionKey, OpenLog] = {}
        self._opening: dict[PartitionKey, asyncio.Task[OpenLog | MemqError]] = {}
        self._closing: dict[PartitionKey, asyncio.Task[None]] = {}
        self._links: dict[str, Link] = {}
        self._connecting: dict[str, asyncio.Task[Link | MemqError]] = {}
        self._drained = False
        self._merging = asyncio.Semaphore(1)  # runs of delayed records
        self._payloads = RecentPayloads(services.settings.memory_bytes_max // PAYLOADS_SHARE)  # of queue items
        self._places = TopicPlaces(services)
        self.make_coordinator: Callable[..., GroupCoordinator] = GroupCoordinator  # the simulation observes it
        partitions.hosted = self.held
        partitions.refreshed = self._follow

    # ---- requests --------------------------------------------------------------------------------

    async def service_or_address(self, kind: ServiceKind[Made], name: str) -> Made | str:
        """Return the service that has a name, or the address of the broker that has it.

        Raises: NotReadyError while the service partition has no owner; as the coordinator port and the state log.
        """
        topic = await self._topic()
        return await self.service_in(kind, topic, zlib.crc32(name.encode()) % len(topic.partitions))

    def address_of(self, name: str) -> str:
        """Return the address of the broker that has a name's service partition; "" without an owner."""
        try:
            topic = self._partitions.topic(STATE_TOPIC)
        except NotFoundError:
            return ""
        return self._partitions.owners(topic)[zlib.crc32(name.encode()) % len(topic.partitions)].address

    def service_here(self, kind: ServiceKind[Made], name: str) -> Made | None:
        """Return the service that has a name if it is open here, without a wait; else None."""
        try:
            topic = self._partitions.topic(STATE_TOPIC)
        except NotFoundError:
            return None
        partition = zlib.crc32(name.encode()) % len(topic.partitions)
        host = self._hosts.get((topic.id, partition))
        if host is None or not host.log.is_owner or not self._partitions.owns(topic, partition):
            return None
        return host.services[kind.machine]  # type: ignore[return-value]  # `kind` made it

    async def service_in(self, kind: ServiceKind[Made], topic: Topic, partition: int) -> Made | str:
        """Return the service of a service partition, or the address of its owner.

        Raises: as `service_or_address`.
        """
        if not self._partitions.serving:
            raise NotReadyError(f"broker '{self._services.settings.broker_id}' is starting")
        if not self._partitions.owns(topic, partition):
            address = self._partitions.owners(topic)[partition].address
            if not address:
                raise not_owner(topic, partition, "")
            return address
        host = self._hosts.get((topic.id, partition))
        if host is None or not host.log.is_owner:
            opened = await asyncio.shield(self._opening_of(topic, partition))
            if isinstance(opened, MemqError):
                raise opened
            host = opened
        return host.services[kind.machine]  # type: ignore[return-value]  # `kind` made it

    async def service_or_link(self, kind: ServiceKind[Made], name: str, *, forwarded: bool) -> Made | Link:
        """Return the service that has a name, or a link to the broker that has it.

        Raises: as `service_or_address`; MovedError for a request that another broker has forwarded to this one.
        """
        home = await self.service_or_address(kind, name)
        if not isinstance(home, str):
            return home
        if forwarded:
            moved = MovedError(f"service partition of '{name}' is not at this broker")
            moved.address = home
            raise moved
        return await self.link(home)

    async def service_topic(self, *, create: bool) -> Topic | None:
        """Return the topic of the service partitions. None: the coordinator shows none, and it is not created.

        Raises: as `Partitions.current_topic`.
        """
        if create:
            return await self._topic()
        try:
            return await self._partitions.current_topic(STATE_TOPIC)
        except NotFoundError:
            return None

    async def look_again(self, tries: int) -> None:
        """Pause after so many tries, then read the owners of the service partitions again."""
        await asyncio.sleep(backoff_s(self._services.runtime.random, tries, base_s=0.05, most_s=BACKOFF_S_MAX))
        with suppress(RetryableError):
            await self._partitions.refresh()

    def open_here(self, kind: ServiceKind[Made]) -> list[Made]:
        """Return the services of a kind whose logs are open here."""
        hosts = [host for host in self._hosts.values() if host.log.is_owner]
        return [host.services[kind.machine] for host in hosts]  # type: ignore[misc]  # `kind` made them

    async def link(self, address: str) -> Link:
        """Return a link to another broker. Raises: as `connect_link`; NotReadyError at the end of this broker.

        All callers share one attempt to connect, and its error. A silent connection is replaced: after a fault of the
        network, a kernel may take minutes until it sends again.
        """
        known = self._links.get(address)
        if known is not None and known.open and not known.silent:
            return known
        if self._tasks.stopped:
            raise NotReadyError(f"broker '{self._services.settings.broker_id}' ends")
        connecting = self._connecting.get(address)
        if connecting is None:
            connecting = self._tasks.start(self._connect(address), f"connect to {address}")
            self._connecting[address] = connecting
            connecting.add_done_callback(lambda task: self._connecting.pop(address, None))
        found = await asyncio.shield(connecting)
        if isinstance(found, MemqError):
            raise found
        return found

    async def _connect(self, address: str) -> Link | MemqError:
        """Connect to another broker; return the error if that fails."""
        known = self._links.pop(address, None)
        if known is not None:
            known.abort(UnreachableError(f"broker {address} was silent for too long"))
        try:
            link = await connect_link(self._services.runtime, None, parse_address(address), client=BROKER_PROGRAM)
        except MemqError as error:
            if isinstance(error, UnreachableError) and error.refused:
                self._services.suspicions.report(address)
            return error
        self._links[address] = link
        return link

    async def _topic(self) -> Topic:
        """Return `_memq_state`; create it if it does not exist."""
        with suppress(NotFoundError):
            return self._partitions.topic(STATE_TOPIC)
        settings = TopicSettings(retention_ms=0)
        return await self._partitions.create(STATE_TOPIC, STATE_PARTITIONS, settings, exist_ok=True, internal=True)

    # ---- opening and closing ---------------------------------------------------------------------

    def _kinds(self) -> list[ServiceKind[Service]]:
        return [self.queues, self.groups, self.holds, self.transactions]  # type: ignore[list-item]  # each makes its own kind

    async def _make_groups(self, opened: OpenLog) -> GroupCoordinator:
        clock, machine = self._services.runtime.clock, opened.log.machine(GROUPS_MACHINE)
        made = self.make_coordinator(opened.log, machine, clock, opened.tasks, clock.monotonic())
        opened.tasks.start(DeletedTopics(self._services, self._partitions, made).run(), "forget deleted topics")
        return made

    async def _make_keeper(self, opened: OpenLog) -> HoldKeeper:
        services, machine = self._services, opened.log.machine(HOLDS_MACHINE)
        assert isinstance(machine, HoldMachine), "`ServiceMachines` made it"
        shard = shard_id(opened.topic.id, opened.partition, machine.life)
        parts = KeeperParts(
            cluster=services.settings.cluster,
            store=services.store,
            runtime=services.runtime,
            events=services.events,
            key_valid_s=key_valid_s(services.settings),
            merging=self._merging,
            window_ms=self._window_ms,
            append=UnitReleaser(services, self._partitions, self.link, shard, machine).release,
            counters=services.counters,
            shard=shard,
            run_key=self._run_key_of(opened),
        )
        return HoldKeeper(opened.log, machine, parts, opened.tasks)

    def _run_key_of(self, opened: OpenLog) -> Callable[[int], str]:
        """Return the function that makes the keys of runs of a log."""
        read = opened.topic.read_partition_of(opened.partition)
        return partial(run_key, self._services.settings.cluster, opened.topic.name, opened.topic.id, read.partition)

    async def _make_transactions(self, opened: OpenLog) -> TransactionCoordinator:
        log, keeper = opened.log, opened.services[HOLDS_MACHINE]
        machine, holds = log.machine(TRANSACTIONS_MACHINE), log.machine(HOLDS_MACHINE)
        assert isinstance(keeper, HoldKeeper), "made before"
        assert isinstance(machine, TransactionMachine), "`ServiceMachines` made it"
        assert isinstance(holds, HoldMachine), "`ServiceMachines` made it"
        services, settings = self._services, self._services.settings
        checks = CheckSettings(settings.transaction_check_tries, settings.transaction_check_interval_ms)
        parts = services.runtime.clock, services.counters, services.events
        return TransactionCoordinator(log, machine, holds, keeper, *parts, checks)

    async def _make_queues(self, opened: OpenLog) -> QueueKeeper:
        services, machine = self._services, opened.log.machine(QUEUES_MACHINE)
        assert isinstance(machine, QueueMachine), "`ServiceMachines` made it"
        parts = QueueParts(
            cluster=services.settings.cluster,
            store=services.store,
            runtime=services.runtime,
            events=services.events,
            key_valid_s=key_valid_s(services.settings),
            recent=self._payloads,
            begin=partial(self._begin, opened, QUEUES_MACHINE),
            counters=services.counters,
            number=opened.partition,
            run_key=self._run_key_of(opened),
            places=self._places,
        )
        clock = services.runtime.clock
        now = Moment(clock.wall_ms(), clock.monotonic())
        scheduler = await in_slices(ItemScheduler.in_slices(machine, now))
        keeper = QueueKeeper(opened.log, scheduler, parts, opened.tasks, opened.epoch)
        readers = PopReaders(services, self._partitions, keeper, opened.tasks)
        opened.tasks.start(readers.run(), f"pop groups {opened.partition}")
        return keeper

    def _window_ms(self) -> int:
        """Return for how long a block may come again: the longest dedup window of all topics."""
        return max((topic.settings.dedup_window_ms for topic in self._partitions.topics()), default=0)

    def _opening_of(self, topic: Topic, partition: int) -> asyncio.Task[OpenLog | MemqError]:
        """Return the task that opens a state log: the one that runs, or a new one."""
        key = (topic.id, partition)
        opening = self._opening.get(key)
        if opening is None:
            opening = self._tasks.start(self._open(topic, partition), f"open state log {partition}")
            self._opening[key] = opening
            opening.add_done_callback(lambda task: self._opening.pop(key, None))
        return opening

    async def _open(self, topic: Topic, partition: int) -> OpenLog | MemqError:
        """Open the state log of a service partition in a new epoch; return the error if that fails."""
        services, key = self._services, (topic.id, partition)
        tries, seen = 0, 0
        await self._end(key)
        while True:
            log = self._log(topic, partition)
            try:
                epoch = await claim_epoch(services, topic, partition, seen)
                await self._open_log(topic, partition, log, epoch)
                return await self._opened(topic, partition, epoch, log)
            except EpochFencedError:
                seen = max(seen, log.highest_epoch)
            except LogLostError as error:
                return self._lost(partition, error)
            except (MovedError, NotReadyError) as error:
                return error
            except RetryableError as error:
                tries += 1
                services.events.warning("state-log-retry", f"service partition {partition}, try {tries}: {error}")
                if tries == OPENING_TRIES:
                    return error
                await asyncio.sleep(backoff_s(services.runtime.random, tries, base_s=0.05, most_s=BACKOFF_S_MAX))
            except MemqError as error:
                return self._lost(partition, error)

    def _lost(self, partition: int, error: MemqError) -> MemqError:
        self._services.events.error("state-log-lost", f"service partition {partition}: {error}; {error.hint}")
        return error

    async def _open_log(self, topic: Topic, partition: int, log: StateLog, epoch: int) -> None:
        """Open a log; create it if the queue does not have it yet.

        Raises: LogLostError if the queue has no entry, and the store has a snapshot; NotReadyError in place of
        NotFoundError; as `StateLog.open`.
        """
        read = topic.read_partition_of(partition)
        try:
            if not await self._end_of(topic, read):
                await self._refuse_snapshots(topic, read)
            await log.open(epoch)
        except NotFoundError as error:
            raise NotReadyError(f"the queue does not show the log: {error}") from error

    async def _refuse_snapshots(self, topic: Topic, read: ReadPartition) -> None:
        """Raise LogLostError if the store has snapshots of an empty log. One listing may omit them."""
        prefix = state_prefix(self._services.settings.cluster, topic.name, topic.id, read.partition)
        for _ in range(LISTINGS):
            async for entry in self._services.store.list(prefix):
                raise LogLostError(
                    f"the queue has lost the log of service partition {read.partition}: it is empty, and the store has"
                    f" the snapshot '{entry.key}'",
                    hint="stop all brokers, and run memq restore: it makes the log again from the last snapshot",
                )

    async def _end_of(self, topic: Topic, read: ReadPartition) -> int:
        """Return the end of a log; create it if the queue does not have it.

        The broker that creates the topic may be about to create its logs, or have died.
        """
        queue = self._services.queue
        try:
            return (await queue.span(read)).end
        except NotFoundError:
            await queue.create(read_partitions(topic), topic.settings.stale_publish_ms)
            return (await queue.span(read)).end

    def _log(self, topic: Topic, partition: int) -> StateLog:
        services = self._services
        own = services.settings
        settings = StateLogSettings(cluster=own.cluster, broker=own.broker_id, key_valid_s=key_valid_s(own))
        parts = (services.queue, services.store, services.runtime, services.events)
        return StateLog(*parts, topic.read_partition_of(partition), settings, lambda: ServiceMachines().by_name())

    async def _opened(self, topic: Topic, partition: int, epoch: int, log: StateLog) -> OpenLog:
        """Make the services of a log, and begin them. Raises: MovedError if the log ends meanwhile."""
        opened = OpenLog(topic, partition, epoch, log, TaskOwner(self._failed, self._services.events))
        try:
            for kind in self._kinds():
                opened.services[kind.machine] = await kind.make(opened)
        except BaseException:
            await opened.tasks.stop()
            await log.close()
            raise
        self._hosts[topic.id, partition] = opened
        for name in opened.services:
            if name != QUEUES_MACHINE:  # its keeper begins with its first item
                self._begin(opened, name)
        self._services.events.info("state-log-opened", f"service partition {partition} in epoch {epoch}")
        return opened

    def _begin(self, opened: OpenLog, name: str) -> None:
        opened.tasks.start(self._run(opened, name), f"{name} {opened.partition}")

    async def _run(self, opened: OpenLog, name: str) -> None:
        """Let a service work until its log has ended: the next refresh or request opens it again."""
        while True:
            try:
                await opened.services[name].run()
            except MemqError as error:
                if not opened.log.is_owner:
                    return
                text = f"{name} of service partition {opened.partition}: {error!r}"
                self._services.events.warning("service-retry", text)
            await asyncio.sleep(SERVICE_PAUSE_S)

    def held(self) -> list[PartitionKey]:
        """Return the service partitions whose logs are open here."""
        return [*self._hosts, *self._opening, *self._closing]

    def _follow(self) -> None:
        """Close logs whose partitions belong to another broker now; open those of this broker.

        A new owner has work without any request: it expires members, and releases what is due.
        """
        for key, host in list(self._hosts.items()):
            if not self._partitions.owns(host.topic, key[1]) and key not in self._closing:
                task = self._tasks.start(self._release(key), f"release state log {key[1]}")
                self._closing[key] = task
                task.add_done_callback(lambda task, key=key: self._released(key))  # type: ignore[misc]
        if self._drained or self._partitions.draining or not self._partitions.serving:
            return
        with suppress(NotFoundError):
            topic = self._partitions.topic(STATE_TOPIC)
            for part in topic.partitions:
                known = self._hosts.get((topic.id, part.partition))
                if self._partitions.owns(topic, part.partition) and (known is None or not known.log.is_owner):
                    self._opening_of(topic, part.partition)

    def _released(self, key: PartitionKey) -> None:
        self._closing.pop(key, None)
        self._partitions.changed.set()

    async def _release(self, key: PartitionKey) -> None:
        """Close a log, and clear the session of its assignment, so that the next owner can open it."""
        host = await self._end(key)
        if host is None:
            return
        try:
            coordinator, session = self._services.coordinator, self._services.session
            current = await coordinator.assignment(*key)
            if current.session == session and current.epoch == host.epoch:
                await coordinator.set_assignment(msgspec.structs.replace(current, session=""))
        except MemqError as error:
            self._services.events.warning("release-failed", f"service partition {key[1]}: {error}")

    async def _end(self, key: PartitionKey) -> OpenLog | None:
        host = self._hosts.pop(key, None)
        if host is not None:
            await host.tasks.stop()
            await host.log.close()
        return host

    async def drain(self) -> None:
        """Close all logs, and release their partitions."""
        self._drained = True
        for key in list(self._hosts):
            await self._release(key)

    async def stop(self) -> None:
        """Close all logs at once."""
        await self._tasks.stop()
        for key in list(self._hosts):
            await self._end(key)
        for link in self._links.values():
            link.close()
