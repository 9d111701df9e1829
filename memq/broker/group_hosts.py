"""The group coordinators of a broker: one for each service partition of `_memq_state` that it owns.

A group is in the service partition that its name hashes to. The owner of that partition opens its state log with the
first request, and keeps it open until the partition is assigned to another broker. Any broker takes the requests of
members: it forwards them to the owner.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from memq.broker.partition.opening import claim_epoch
from memq.broker.partitions import Partitions, not_owner
from memq.broker.services import Services
from memq.errors import (
    EpochFencedError,
    InvalidSettingError,
    LogLostError,
    MemqError,
    MovedError,
    NotFoundError,
    NotReadyError,
    RetryableError,
    UnreachableError,
)
from memq.format.key import state_prefix
from memq.groups.coordinator import MACHINE, GroupCoordinator
from memq.groups.machine import GroupMachine
from memq.protocol.link import Link, connect_link
from memq.runtime.clock import backoff_s
from memq.runtime.network import parse_address
from memq.runtime.tasks import TaskOwner
from memq.state_log.state_log import StateLog, StateLogSettings
from memq.topic import STATE_TOPIC, PartitionKey, Topic, TopicSettings, read_partitions

STATE_PARTITIONS = 8
BACKOFF_S_MAX = 2.0
OPENING_TRIES = 5  # then the waiting requests get the error; the next one begins another opening
PROGRAM = "memq-broker"  # in the HELLO of a broker: its requests are not forwarded again


@dataclass(slots=True)
class _Host:
    """An open state log with its coordinator, and the tasks of both."""

    topic: Topic
    epoch: int
    log: StateLog
    coordinator: GroupCoordinator
    tasks: TaskOwner


class GroupHosts:
    """Opens, finds and closes the coordinators of groups. `failed` gets the error of a task that dies."""

    def __init__(self, services: Services, partitions: Partitions, failed: Callable[[BaseException], None]) -> None:
        self._services = services
        self._partitions = partitions
        self._failed = failed
        self._tasks = TaskOwner(failed, services.events)
        self._hosts: dict[PartitionKey, _Host] = {}
        self._opening: dict[PartitionKey, asyncio.Task[_Host | MemqError]] = {}
        self._closing: dict[PartitionKey, asyncio.Task[None]] = {}
        self._links: dict[str, Link] = {}
        self._connecting: dict[str, asyncio.Lock] = {}
        self.make_coordinator: Callable[..., GroupCoordinator] = GroupCoordinator  # the simulation observes it
        partitions.hosted = self.held
        partitions.refreshed = self._follow

    # ---- requests --------------------------------------------------------------------------------

    async def home(self, group: str) -> GroupCoordinator | str:
        """Return the coordinator of a group, or the address of the broker that has it.

        Raises: NotReadyError while the service partition has no owner; as the coordinator port and the state log.
        """
        topic = await self._topic()
        return await self.host(topic, zlib.crc32(group.encode()) % len(topic.partitions))

    async def host(self, topic: Topic, partition: int) -> GroupCoordinator | str:
        """Return the coordinator of a service partition, or the address of its owner. Raises: as `home`."""
        if not self._partitions.serving:
            raise NotReadyError(f"broker '{self._services.settings.broker_id}' is starting")
        if not self._partitions.owns(topic, partition):
            address = self._partitions.owners(topic)[partition].address
            if not address:
                raise not_owner(topic, partition, "")
            return address
        key = (topic.id, partition)
        host = self._hosts.get(key)
        if host is None or not host.log.is_owner:
            opening = self._opening.get(key)
            if opening is None:
                opening = self._tasks.start(self._open(topic, partition), f"open state log {partition}")
                self._opening[key] = opening
                opening.add_done_callback(lambda task: self._opening.pop(key, None))
            opened = await asyncio.shield(opening)
            if isinstance(opened, MemqError):
                raise opened
            host = opened
        return host.coordinator

    async def homes(self) -> list[GroupCoordinator | str]:
        """Return all coordinators here, and the addresses of the brokers that have others. Raises: as `home`."""
        topic = await self._topic()
        found = [await self.host(topic, part.partition) for part in topic.partitions]
        return list(dict.fromkeys(found))

    async def link(self, address: str) -> Link:
        """Return a link to another broker. Raises: RetryableError."""
        async with self._connecting.setdefault(address, asyncio.Lock()):
            link = self._links.get(address)
            if link is None or not link.open:
                try:
                    link = await connect_link(self._services.runtime, None, parse_address(address), client=PROGRAM)
                except UnreachableError as error:
                    if error.refused:
                        self._services.suspicions.report(address)
                    raise
                self._links[address] = link
            return link

    async def _topic(self) -> Topic:
        """Return `_memq_state`; create it if it does not exist.

        Raises: InvalidSettingError if the queue has groups: their members would begin as new ones.
        """
        with suppress(NotFoundError):
            return self._partitions.topic(STATE_TOPIC)
        names = {name for _ in range(2) for name in await self._services.queue.groups()}  # one answer may be wrong
        if names:
            raise InvalidSettingError(
                f"groups = state-log is for new clusters: the queue has {len(names)} groups, first '{min(names)}'",
                hint="set groups = queue in all brokers, or delete these groups first",
            )
        settings = TopicSettings(retention_ms=0)
        return await self._partitions.create(STATE_TOPIC, STATE_PARTITIONS, settings, exist_ok=True, internal=True)

    # ---- opening and closing ---------------------------------------------------------------------

    async def _open(self, topic: Topic, partition: int) -> _Host | MemqError:
        """Open the state log of a service partition in a new epoch; return the error if that fails."""
        services, key = self._services, (topic.id, partition)
        tries, seen = 0, 0
        await self._end(key)
        while True:
            machine = GroupMachine()
            log = self._log(topic, partition, machine)
            try:
                epoch = await claim_epoch(services, topic, partition, seen)
                await self._open_log(topic, partition, log, epoch)
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
            else:
                return self._opened(topic, partition, epoch, log, machine)

    def _lost(self, partition: int, error: MemqError) -> MemqError:
        self._services.events.error("state-log-lost", f"service partition {partition}: {error}; {error.hint}")
        return error

    async def _open_log(self, topic: Topic, partition: int, log: StateLog, epoch: int) -> None:
        """Open a log; create it if the queue does not have it yet.

        The broker that created the topic may have died before it created the logs. Raises: LogLostError if the queue
        has no entry, and the store has a snapshot; NotReadyError in place of NotFoundError; as `StateLog.open`.
        """
        services, read = self._services, topic.read_partition_of(partition)
        try:
            if not (await services.queue.span(read)).end:
                prefix = state_prefix(services.settings.cluster, topic.name, topic.id, read.partition)
                async for entry in services.store.list(prefix):
                    raise LogLostError(
                        f"the queue has lost the log of service partition {partition}: it is empty, and the store has"
                        f" the snapshot '{entry.key}'",
                        hint=f"restore the queue from a backup; without one, delete '{prefix}': its groups begin again",
                    )
            await log.open(epoch)
        except NotFoundError as error:
            await services.queue.create(read_partitions(topic), topic.settings.stale_publish_ms)
            raise NotReadyError(f"the queue had no log yet: {error}") from error

    def _log(self, topic: Topic, partition: int, machine: GroupMachine) -> StateLog:
        services = self._services
        settings = StateLogSettings(cluster=services.settings.cluster, broker=services.settings.broker_id)
        parts = (services.queue, services.store, services.runtime, services.events)
        return StateLog(*parts, topic.read_partition_of(partition), settings, lambda: {MACHINE: machine})

    def _opened(self, topic: Topic, partition: int, epoch: int, log: StateLog, machine: GroupMachine) -> _Host:
        clock = self._services.runtime.clock
        tasks = TaskOwner(self._failed, self._services.events)
        coordinator = self.make_coordinator(log, machine, clock, tasks, clock.monotonic())
        host = self._hosts[topic.id, partition] = _Host(topic, epoch, log, coordinator, tasks)
        tasks.start(self._expire(coordinator), f"expire members {partition}")
        self._services.events.info("state-log-opened", f"service partition {partition} in epoch {epoch}")
        return host

    async def _expire(self, coordinator: GroupCoordinator) -> None:
        with suppress(MemqError):  # the log has ended: the next request opens it again
            await coordinator.run()

    def held(self) -> list[PartitionKey]:
        """Return the service partitions whose logs are open here."""
        return [*self._hosts, *self._opening, *self._closing]

    def _follow(self) -> None:
        """Close the logs whose partitions belong to another broker now."""
        for key, host in list(self._hosts.items()):
            if not self._partitions.owns(host.topic, key[1]) and key not in self._closing:
                task = self._tasks.start(self._release(key), f"release state log {key[1]}")
                self._closing[key] = task
                task.add_done_callback(lambda task, key=key: self._released(key))  # type: ignore[misc]

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

    async def _end(self, key: PartitionKey) -> _Host | None:
        host = self._hosts.pop(key, None)
        if host is not None:
            await host.tasks.stop()
            await host.log.close()
        return host

    async def drain(self) -> None:
        """Close all logs, and release their partitions."""
        for key in list(self._hosts):
            await self._release(key)

    async def stop(self) -> None:
        """Close all logs at once."""
        await self._tasks.stop()
        for key in list(self._hosts):
            await self._end(key)
        for link in self._links.values():
            link.close()
