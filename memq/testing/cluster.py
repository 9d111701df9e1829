"""One broker in a thread of this process, on a store and queue in memory that fail chosen calls."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from memq.broker.broker import Broker
from memq.broker.spool.files import MemorySpool
from memq.client.admin import Admin
from memq.client.arguments import check_kind
from memq.client.consumer.batch import Record
from memq.client.consumer.consumer import Consumer
from memq.client.io_thread import new_event_loop
from memq.errors import (
    ClosedError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    QueueError,
    StoreError,
    UnknownSettingError,
)
from memq.format.batch import cut_batch
from memq.format.pointer import Location, Pointer, decode_pointer
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.groups import Membership
from memq.groups.coordinator import GroupCoordinator
from memq.groups.waiting import AnswerHeartbeat
from memq.limits import BLOCK_HEADER_BYTES
from memq.notification import Entries, Publication
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import Clock
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings, did_you_mean, parse_value, rules_of
from memq.storage_handlers import Buffer
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import Committed, Position, ReadPartition, is_internal, is_state_topic

STORE_NAME = "memory"
_START_S_MAX = 30.0
Result = TypeVar("Result")
CALLS = (
    "store.put",
    "store.get",
    "store.delete",
    "queue.publish",
    "queue.read",
    "groups.join",
    "groups.heartbeat",
    "groups.commit",
)
FAILURES_MAX = 10_000


class Cluster:
    """A cluster for tests; its data ends with `close`. `settings` are settings of the broker, by name.

    The first send to a topic creates it with one partition. Clients send no audit reports unless `audit=True` is set,
    because a report could use up a failure that the test has planned.
    """

    def __init__(self, **settings: int | str | bool) -> None:
        values = {"host": "127.0.0.1", "port": 0, "http_port": -1, "cluster": "test", "audit": False} | settings
        known = rules_of(BrokerSettings)
        for name in values:
            if name not in known:
                raise UnknownSettingError(f"a broker has no setting '{name[:60]}'", hint=did_you_mean(name, known))
        checked = {name: parse_value(name, value, "Cluster()") for name, value in values.items()}
        self._settings = BrokerSettings(**checked)  # type: ignore[arg-type]  # parse_value knows their types
        self._runtime = Runtime()
        self.faults = Faults()
        self.store = FaultyStore(self._runtime.clock, self.faults)
        self._queue = FaultyQueue(self._runtime.clock, self.faults)
        self._shared = MemoryCluster(self._settings.cluster, self._runtime.clock)
        self._spool = MemorySpool()
        self._runs = False
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._run, name="memq-test-cluster", daemon=True)
        self._started = threading.Event()
        self._thread.start()
        self._started.wait(_START_S_MAX)
        self._closed = False
        try:
            self._broker = self._call(self._start(self._settings))
        except BaseException:
            self._end()
            raise

    @property
    def address(self) -> str:
        """The `HOST:PORT` to which clients connect."""
        return self._broker.address

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the broker, without a drain, and its thread. May be called twice."""
        if self._closed:
            return
        try:
            self._call(self._broker.close())
        finally:
            self._end()

    # ---- for the test --------------------------------------------------------------------------

    def create_topic(
        self, name: str, *, partitions: int | None = None, settings: dict[str, int | bool | str] | None = None
    ) -> None:
        """Create a topic. Raises: as `memq.Admin.create_topic`."""
        self._check_open()
        with Admin(self.address) as admin:
            admin.create_topic(name, partitions=partitions, settings=settings or {})

    def records(self, topic: str) -> list[Record]:
        """Return all records that are readable now, ordered by partition and offset.

        Raises: NotFoundError, CorruptDataError, ClosedError.
        """
        self._check_open()
        with Consumer(self.address, topic, end="end") as consumer:
            found = [record for batch in consumer for record in batch]
        return sorted(found, key=lambda record: (record.partition, record.offset))

    def fail(self, call: str, times: int = 1, error: MemqError | None = None) -> None:
        """Let the next `times` calls of `call` fail, for example of `store.put` or `queue.publish`.

        `CALLS` of this module has all names. Without `error` a call raises StoreError or QueueError, which clients
        and brokers retry. Raises: InvalidRequestError for an unknown name.
        """
        self.faults.plan(call, times, error)

    def damage(self, position: Position, topic: str | None = None) -> None:
        """Flip a bit in the payload of the block that has the record at `position`.

        `topic` may be None if the cluster has only one topic. Raises: NotFoundError if no record has this position,
        or its object is removed.
        """
        self._call(self._damage(position, topic))

    def remove_object(self, position: Position, topic: str | None = None) -> None:
        """Delete the object that has the record at `position`. Raises: as `damage`."""
        self._call(self._remove_object(position, topic))

    def stop_broker(self) -> None:
        """Kill the broker: it does not drain, and its connections are cut. Store and queue remain."""
        self._call(self._stop())

    def start_broker(self) -> None:
        """Start a broker on the same store and queue, at the port of the stopped one.

        Raises: InvalidRequestError while a broker runs; UnreachableError when another process has the port.
        """
        self._call(self._restart())

    # ---- inside --------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._started.set)
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._closed:
            work.close()  # else Python warns that it was never awaited
        self._check_open()
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the test cluster is closed")

    def _end(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self, settings: BrokerSettings) -> Broker:
        coordinator = MemoryCoordinator(self._shared)
        broker = Broker(
            settings, self._runtime, {STORE_NAME: self.store}, self._queue, coordinator, spool_disk=self._spool
        )
        broker.hosts.make_coordinator = partial(FaultyGroups, self.faults)
        try:
            await broker.start()
        except BaseException:
            await broker.close()
            raise
        self._runs = True
        return broker

    async def _stop(self) -> None:
        self._runs = False
        await self._broker.close()

    async def _restart(self) -> None:
        if self._runs:
            raise InvalidRequestError("the broker runs", hint="stop it first: stop_broker()")
        port = int(self._broker.address.rpartition(":")[2])
        self._broker = await self._start(dataclasses.replace(self._settings, port=port))

    async def _damage(self, position: Position, topic: str | None) -> None:
        pointer, location = await self._pointer_at(position, topic)
        stored = self.store.objects.get(location.key)
        if stored is None:
            raise NotFoundError(f"the object at {position} is removed")
        body = bytearray(stored)
        for piece in cut_batch(pointer, bytes(body[location.offset : location.offset + location.length])):
            if piece.first <= position.record_index < piece.first + piece.records:
                body[location.offset + piece.at + (BLOCK_HEADER_BYTES + len(piece.data)) // 2] ^= 1
                self.store.objects[location.key] = bytes(body)
                self._broker.services.recent_batches.clear()
                return
        raise NotFoundError(f"batch {pointer.batch_sequence} has {pointer.records} records, none at {position}")

    async def _remove_object(self, position: Position, topic: str | None) -> None:
        _, location = await self._pointer_at(position, topic)
        await self.store.delete(location.key)
        self._broker.services.recent_batches.clear()

    async def _pointer_at(self, position: Position, topic: str | None) -> tuple[Pointer, Location]:
        if not isinstance(position, Position):
            raise TypeError(f"position must be a memq.Position, as records have it, not {type(position).__name__}")
        there = await self._broker.services.coordinator.topics()
        topics = [each for each in there if each.name == topic or (topic is None and not is_internal(each.name))]
        if topic is not None and not topics:
            raise NotFoundError(f"topic '{topic}' does not exist")
        if len(topics) != 1:
            raise InvalidRequestError(
                f"this cluster has {len(topics)} topics", hint="name one: damage(position, topic)"
            )
        partition = ReadPartition(topics[0].name, topics[0].id, position.read_partition)
        entries = await self._queue.read(partition, position.pointer_offset, 1)
        if not entries or entries[0].offset != position.pointer_offset:
            raise NotFoundError(f"no pointer is at {position} of topic '{topics[0].name}'")
        pointer = decode_pointer(entries[0].body)
        if not pointer.locations:
            raise NotFoundError(f"the pointer at {position} is of kind '{pointer.kind}' and holds no records")
        return pointer, pointer.locations[0]


class Faults:
    """Planned failures by name of the call; each is raised once."""

    def __init__(self) -> None:
        self._planned: dict[str, deque[MemqError]] = {call: deque() for call in CALLS}

    def plan(self, call: str, times: int, error: MemqError | None) -> None:
        """Let the next `times` calls fail. Raises: InvalidRequestError for a name that is not in CALLS.

        TypeError.
        """
        if error is not None and not isinstance(error, MemqError):
            raise TypeError(f"error must be a MemqError, as a failed call raises it, not {type(error).__name__}")
        check_kind("times", times, int)
        planned = self._planned.get(call)
        if planned is None:
            raise InvalidRequestError(f"call '{call}' can't be made to fail", hint=f"use one of {', '.join(CALLS)}")
        if not 0 <= times <= FAILURES_MAX:
            raise InvalidRequestError(f"times = {times} is outside 0 to {FAILURES_MAX}")
        kind = StoreError if call.startswith("store.") else QueueError
        planned.extend(error or kind(f"{call} fails as planned") for _ in range(times))

    def left(self, call: str) -> int:
        """Return the number of planned failures that no call has raised yet."""
        return len(self._planned[call])

    def meet(self, call: str) -> None:
        """Raise the next planned failure of a call, if any."""
        if self._planned[call]:
            raise self._planned[call].popleft()


class FaultyStore(MemoryHandler):
    """The memory store with planned failures; a failing call has no effect."""

    def __init__(self, clock: Clock, faults: Faults) -> None:
        super().__init__(clock)
        self._faults = faults

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        """See `ObjectWriter.put`."""
        self._faults.meet("store.put")
        await super().put(key, buffers, checksum)

    async def get(self, key: str, *, checked: bool = True) -> bytes:
        """See `ObjectReader.get`."""
        self._faults.meet("store.get")
        return await super().get(key, checked=checked)

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `ObjectReader.get_range`."""
        self._faults.meet("store.get")
        return await super().get_range(key, offset, length)

    async def delete(self, key: str) -> None:
        """See `ObjectWriter.delete`."""
        self._faults.meet("store.delete")
        await super().delete(key)


class FaultyQueue(MemoryQueue):
    """The memory queue with planned failures; a failing call has no effect. None is in the logs of groups."""

    def __init__(self, clock: Clock, faults: Faults) -> None:
        super().__init__(clock)
        self._faults = faults

    async def publish(self, publication: Publication) -> int:
        """See `PointerWriter.publish`."""
        if not is_state_topic(publication.partition.topic):
            self._faults.meet("queue.publish")
        return await super().publish(publication)

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`."""
        if not is_state_topic(partition.topic):
            self._faults.meet("queue.read")
        return await super().read(partition, offset, bytes_max)


class FaultyGroups(GroupCoordinator):
    """A group coordinator with planned failures; a failing call has no effect."""

    def __init__(self, faults: Faults, *parts: Any) -> None:
        super().__init__(*parts)
        self._faults = faults

    async def join(
        self, group: str, member: str, partitions: Sequence[ReadPartition], session_timeout_ms: int
    ) -> Membership:
        """See `Groups.join`."""
        self._faults.meet("groups.join")
        return await super().join(group, member, partitions, session_timeout_ms)

    async def heartbeat(
        self, group: str, member: str, generation: int, released: Sequence[ReadPartition] = ()
    ) -> Membership:
        """See `Groups.heartbeat`."""
        self._faults.meet("groups.heartbeat")
        return await super().heartbeat(group, member, generation, released)

    def keep_heartbeat(self, group: str, member: str, generation: int, wait_ms: int, answer: AnswerHeartbeat) -> bool:
        """See `GroupCoordinator.keep_heartbeat`."""
        self._faults.meet("groups.heartbeat")
        return super().keep_heartbeat(group, member, generation, wait_ms, answer)

    async def commit(
        self, group: str, member: str, generation: int, positions: Mapping[ReadPartition, Committed], number: int = 0
    ) -> None:
        """See `Groups.commit`."""
        self._faults.meet("groups.commit")
        await super().commit(group, member, generation, positions, number)
