"""One node's view of the notification queue: the in-memory queue behind calls that fail, hang and come late.

It also watches how owners use it (DESIGN's rule of publishing): one publish in flight, and after one that went wrong
none before the queue was read to its end. What owners have read goes with their pointers to the checker: they must
leave out what they know. Owners are told from consumers' polls, and one epoch from the next, by the names of their
tasks: one opens, and says its epoch with the first pointer; those that publish have the epoch in their name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from memq.notification import Entries, GroupState, Membership, Publication, Span
from memq.notification.memory import MemoryQueue
from memq.topic import Committed, Position, ReadPartition
from tests.simulation.calls import Caller
from tests.simulation.node import Node

Owner = tuple[ReadPartition, int, int]  # read partition, write partition, epoch
Reading = asyncio.Task[object] | int  # who reads as an owner: a task that opens, or an epoch


class QueueObserver(Protocol):
    """Who is told what landed in the queue, and what was asked of it, in the same step."""

    def published(self, publication: Publication, offset: int, node: Node, read_to: int, handed_over_s: float) -> None:
        """A pointer of `node` is in the queue; its owner had read below `read_to` when it was handed over."""
        ...

    def trimmed(self, partition: ReadPartition, before: int) -> None:
        """The pointers below `before` are gone."""
        ...

    def committed(self, group: str, partition: ReadPartition, position: Position) -> None:
        """A group has stored a position."""
        ...

    def fetched(self, group: str, partition: ReadPartition, position: Position | None) -> None:
        """Somebody asked where a group stands; None when it has stored nothing."""
        ...


class SimQueue:
    """See `memq.notification.NotificationQueue`. `observer` is told what happens there."""

    def __init__(self, caller: Caller, queue: MemoryQueue, observer: QueueObserver) -> None:
        self._caller = caller
        self._queue = queue
        self._observer = observer
        self._in_flight: dict[Owner, None] = {}
        self._unread: dict[Owner, int] = {}  # when a publish went wrong, counted in calls
        self._read_to: dict[tuple[ReadPartition, Reading], int] = {}  # what the owners here have read
        self._opening: dict[asyncio.Task[object], int] = {}  # which epoch a task has opened last
        self._calls = 0

    # ---- pointers ----------------------------------------------------------------------------

    @property
    def refuses_by_age(self) -> bool:
        """See `PointerWriter.refuses_by_age`."""
        return self._queue.refuses_by_age

    async def publish(self, publication: Publication) -> int:
        """See `PointerWriter.publish`."""
        where = publication.partition
        what = f"publish {where.topic}/{publication.write_partition} epoch {publication.epoch}"
        owner = (where, publication.write_partition, publication.epoch)
        self._begin(owner, what)
        task = _reading()
        if isinstance(task, asyncio.Task) and (where, task) in self._read_to:
            self._opening[task] = publication.epoch
            self._note_read(where, publication.epoch, self._read_to[where, task])
        read_to, handed_over_s = self._read_to.get((where, publication.epoch), 0), self._caller.node.world.now

        async def land() -> int:
            offset = await self._queue.publish(publication)
            self._observer.published(publication, offset, self._caller.node, read_to, handed_over_s)
            return offset

        try:
            return await self._caller.call(what, land)
        except BaseException:
            self._calls += 1
            self._unread[owner] = self._calls
            raise
        finally:
            self._in_flight.pop(owner, None)

    def _begin(self, owner: Owner, what: str) -> None:
        node = self._caller.node
        if owner in self._in_flight and node.alive:
            node.world.fail(f"{node.name} has two of '{what}' in flight")
        if owner in self._unread and node.alive:
            node.world.fail(f"{node.name} does '{what}' after an error, without reading to the end")
        self._in_flight[owner] = None

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`."""
        self._calls += 1
        begun = self._calls
        entries = await self._caller.call(
            f"read {partition.topic}/{partition.partition} {offset}",
            lambda: self._queue.read(partition, offset, bytes_max),
        )
        reading = _reading()
        if entries and reading is not None:
            self._note_read(partition, reading, entries[-1].offset + 1)
            if isinstance(reading, asyncio.Task) and reading in self._opening:
                self._note_read(partition, self._opening[reading], entries[-1].offset + 1)
        if not entries:
            for owner in [one for one, when in self._unread.items() if one[0] == partition and when < begun]:
                del self._unread[owner]
        return entries

    def _note_read(self, partition: ReadPartition, reading: Reading, before: int) -> None:
        key = (partition, reading)
        self._read_to[key] = max(self._read_to.get(key, 0), before)

    async def span(self, partition: ReadPartition) -> Span:
        """See `PointerReader.span`."""
        return await self._caller.call(
            f"span {partition.topic}/{partition.partition}", lambda: self._queue.span(partition)
        )

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        """See `PointerReader.seek_time`."""
        return await self._caller.call(
            f"seek {partition.topic}/{partition.partition} {time_ms}",
            lambda: self._queue.seek_time(partition, time_ms),
        )

    async def wait(self, ends: dict[ReadPartition, int], timeout_s: float) -> None:
        """See `PointerReader.wait`."""
        copied = dict(ends)
        await self._caller.call(f"wait {len(ends)}", lambda: self._queue.wait(copied, timeout_s), waits=True)

    # ---- groups ------------------------------------------------------------------------------

    async def join(
        self, group: str, member: str, partitions: Sequence[ReadPartition], session_timeout_ms: int
    ) -> Membership:
        """See `Groups.join`."""
        wanted = tuple(partitions)
        return await self._caller.call(
            f"join {group} {member}", lambda: self._queue.join(group, member, wanted, session_timeout_ms)
        )

    async def heartbeat(
        self, group: str, member: str, generation: int, released: Sequence[ReadPartition] = ()
    ) -> Membership:
        """See `Groups.heartbeat`."""
        given = tuple(released)
        return await self._caller.call(
            f"heartbeat {group} {member}", lambda: self._queue.heartbeat(group, member, generation, given)
        )

    async def leave(self, group: str, member: str) -> None:
        """See `Groups.leave`."""
        await self._caller.call(f"leave {group} {member}", lambda: self._queue.leave(group, member))

    async def commit(self, group: str, member: str, generation: int, positions: dict[ReadPartition, Committed]) -> None:
        """See `Groups.commit`."""
        copied = dict(positions)

        async def land() -> None:
            await self._queue.commit(group, member, generation, copied)
            for partition, committed in copied.items():
                self._observer.committed(group, partition, committed.position)

        await self._caller.call(f"commit {group} {member}", land)

    async def committed(self, group: str, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, Committed]:
        """See `Groups.committed`."""
        wanted = tuple(partitions)

        async def land() -> dict[ReadPartition, Committed]:
            stored = await self._queue.committed(group, wanted)
            for partition in wanted:
                found = stored.get(partition)
                self._observer.fetched(group, partition, None if found is None else found.position)
            return stored

        return await self._caller.call(f"committed {group}", land)

    async def groups(self) -> Sequence[str]:
        """See `Groups.groups`."""
        return await self._caller.call("groups", self._queue.groups)

    async def describe(self, group: str) -> GroupState:
        """See `Groups.describe`."""
        return await self._caller.call(f"describe {group}", lambda: self._queue.describe(group))

    async def delete_group(self, group: str) -> None:
        """See `Groups.delete_group`."""
        await self._caller.call(f"delete group {group}", lambda: self._queue.delete_group(group))

    # ---- partitions --------------------------------------------------------------------------

    async def create(self, partitions: Sequence[ReadPartition], stale_publish_ms: int) -> None:
        """See `PartitionAdmin.create`."""
        wanted = tuple(partitions)
        await self._caller.call(f"create {len(wanted)}", lambda: self._queue.create(wanted, stale_publish_ms))

    async def trim(self, partition: ReadPartition, before: int) -> None:
        """See `PartitionAdmin.trim`."""

        async def land() -> None:
            await self._queue.trim(partition, before)
            self._observer.trimmed(partition, before)

        await self._caller.call(f"trim {partition.topic} {before}", land)

    async def drop(self, partitions: Sequence[ReadPartition]) -> None:
        """See `PartitionAdmin.drop`."""
        wanted = tuple(partitions)
        await self._caller.call(f"drop {len(wanted)}", lambda: self._queue.drop(wanted))

    async def check(self) -> None:
        """See `NotificationQueue.check`."""
        await self._caller.call("check", self._queue.check)

    async def close(self) -> None:
        """See `NotificationQueue.close`."""


def _reading() -> Reading | None:
    """Return who reads or publishes now: the epoch of a task that publishes, a task that opens, None for others."""
    task = asyncio.current_task()
    name = "" if task is None else task.get_name()
    if name.startswith("publish "):
        return int(name.rpartition(" ")[2])
    return task if name.startswith("open ") else None
