"""A notification queue in memory, for tests, the simulation and `memq.testing`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from memq.errors import NotFoundError, QueueRefusedError
from memq.notification import (
    Entries,
    Entry,
    FormerGroup,
    GroupState,
    Membership,
    Publication,
    Span,
    check_epoch,
    check_publication,
    missing_partition,
)
from memq.notification.groups import OUTSIDE_GENERATION, Group
from memq.notification.waiters import Waiters, until_reached
from memq.runtime.clock import Clock
from memq.topic import Committed, ReadPartition, check_group

AHEAD_MS_MAX = 10_000  # for "age", as memq sets Kafka's message.timestamp.after.max.ms


@dataclass(slots=True)
class Log:
    """One read partition: entries from offset `begin` on, and the highest epoch of each write partition."""

    stale_publish_ms: int
    begin: int = 0
    entries: list[Entry] = field(default_factory=list)
    epochs: dict[int, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        """The offset of the next entry."""
        return self.begin + len(self.entries)


class MemoryQueue:
    """Keeps logs and groups in dictionaries; all users of this instance see the same queue.

    `refuse` is the rule for stale publications: "epoch" as in SQLite, or "age" as in Kafka: the queue compares the
    queue time with the wall clock, and ignores epochs. No threads; only `wait` waits. `logs` is the content of the
    queue: tests read and damage it.
    """

    def __init__(self, clock: Clock, refuse: Literal["epoch", "age"] = "epoch") -> None:
        self._clock = clock
        self._refuse = refuse
        self.logs: dict[ReadPartition, Log] = {}
        self._groups: dict[str, Group] = {}
        self._positions: dict[str, dict[ReadPartition, Committed]] = {}
        self._waiters = Waiters()
        self.former = MemoryFormerGroups(self, self._groups)

    # ---- pointers ----------------------------------------------------------------------------

    @property
    def refuses_by_age(self) -> bool:
        """See `PointerWriter.refuses_by_age`."""
        return self._refuse == "age"

    async def publish(self, publication: Publication) -> int:
        """See `PointerWriter.publish`."""
        log = self.log(publication.partition)
        check_publication(publication)
        if self._refuse == "age":
            self._check_age(publication, log.stale_publish_ms)
        else:
            check_epoch(publication, log.epochs.get(publication.write_partition, 0))
            log.epochs[publication.write_partition] = publication.epoch
        offset = log.end
        log.entries.append(Entry(offset, publication.time_ms, bytes(publication.body)))
        self._waiters.advance(publication.partition, log.end)
        return offset

    def _check_age(self, publication: Publication, stale_publish_ms: int) -> None:
        age_ms = self._clock.wall_ms() - publication.time_ms
        if not -AHEAD_MS_MAX <= age_ms <= stale_publish_ms:
            raise QueueRefusedError(
                f"queue time {publication.time_ms} is {age_ms} ms old, "
                f"{-AHEAD_MS_MAX} to {stale_publish_ms} are allowed"
            )

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`."""
        log = self.log(partition)
        found: list[Entry] = []
        size = 0
        for index in range(max(offset - log.begin, 0), len(log.entries)):
            entry = log.entries[index]
            size += len(entry.body)
            if found and size > bytes_max:
                break
            found.append(entry)
        return Entries(found, found[-1].offset + 1 if found else max(offset, log.end))

    async def span(self, partition: ReadPartition) -> Span:
        """See `PointerReader.span`."""
        log = self.log(partition)
        return Span(log.begin, log.end)

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        """See `PointerReader.seek_time`."""
        log = self.log(partition)
        return next((entry.offset for entry in log.entries if entry.time_ms >= time_ms), log.end)

    async def wait(self, ends: dict[ReadPartition, int], timeout_s: float) -> None:
        """See `PointerReader.wait`."""
        if any(self.log(partition).end > offset for partition, offset in ends.items()):
            return
        number, waiter = self._waiters.add(ends)
        try:
            await until_reached(waiter, timeout_s)
        finally:
            self._waiters.remove(number)

    def log(self, partition: ReadPartition) -> Log:
        """Return the log of a partition; raise NotFoundError if there is none."""
        log = self.logs.get(partition)
        if log is None:
            raise missing_partition(partition)
        return log

    # ---- groups ------------------------------------------------------------------------------

    async def join(
        self, group: str, member: str, partitions: Sequence[ReadPartition], session_timeout_ms: int
    ) -> Membership:
        """See `Groups.join`."""
        check_group(group)
        entered = self._groups.get(group) or Group()
        membership = entered.join(member, partitions, session_timeout_ms, self._now_ms())
        self._groups[group] = entered
        return membership

    async def heartbeat(
        self, group: str, member: str, generation: int, released: Sequence[ReadPartition] = ()
    ) -> Membership:
        """See `Groups.heartbeat`."""
        return self._group(group).heartbeat(member, generation, released, self._now_ms())

    async def leave(self, group: str, member: str) -> None:
        """See `Groups.leave`."""
        check_group(group)
        if group in self._groups:
            self._groups[group].leave(member, self._now_ms())

    async def commit(
        self, group: str, member: str, generation: int, positions: dict[ReadPartition, Committed], number: int = 0
    ) -> None:
        """See `Groups.commit`."""
        check_group(group)
        target = self._groups.get(group) or Group()
        target.check_commit(member, generation, positions, self._now_ms(), number)
        for partition in positions:
            self.log(partition)
        self._groups[group] = target
        self._positions.setdefault(group, {}).update(positions)

    async def committed(self, group: str, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, Committed]:
        """See `Groups.committed`."""
        stored = self._positions.get(check_group(group), {})
        return {partition: stored[partition] for partition in partitions if partition in stored}

    async def groups(self) -> Sequence[str]:
        """See `Groups.groups`."""
        return sorted(self._groups)

    async def describe(self, group: str) -> GroupState:
        """See `Groups.describe`."""
        found = self._group(group)
        found.expire(self._now_ms())
        return GroupState(group, found.generation, found.held(), dict(sorted(self._positions.get(group, {}).items())))

    async def delete_group(self, group: str) -> None:
        """See `Groups.delete_group`."""
        found = self._group(group)
        found.expire(self._now_ms())
        found.check_no_members(f"group '{group}' can't be deleted")
        del self._groups[group]
        self._positions.pop(group, None)

    def _group(self, name: str) -> Group:
        found = self._groups.get(check_group(name))
        if found is None:
            raise NotFoundError(f"group '{name}' does not exist", hint="memq group list shows the groups")
        return found

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1_000)

    # ---- partitions --------------------------------------------------------------------------

    async def create(self, partitions: Sequence[ReadPartition], stale_publish_ms: int) -> None:
        """See `PartitionAdmin.create`. Existing partitions keep their entries."""
        for partition in partitions:
            self.logs.setdefault(partition, Log(stale_publish_ms)).stale_publish_ms = stale_publish_ms

    async def trim(self, partition: ReadPartition, before: int) -> None:
        """See `PartitionAdmin.trim`."""
        log = self.log(partition)
        count = min(max(before - log.begin, 0), len(log.entries))
        del log.entries[:count]
        log.begin += count

    async def drop(self, partitions: Sequence[ReadPartition]) -> None:
        """See `PartitionAdmin.drop`. Missing partitions are ignored."""
        for group in self._groups.values():
            group.forget(partitions)
        for partition in partitions:
            self.logs.pop(partition, None)
            for positions in self._positions.values():
                positions.pop(partition, None)
            self._waiters.wake(partition)

    async def check(self) -> None:
        """See `NotificationQueue.check`. It never fails."""

    async def close(self) -> None:
        """See `NotificationQueue.close`. Has no effect: other users may share this queue."""


class MemoryFormerGroups:
    """See `memq.notification.FormerGroups`."""

    def __init__(self, queue: MemoryQueue, groups: dict[str, Group]) -> None:
        self._queue = queue
        self._groups = groups

    async def names(self) -> Sequence[str]:
        """See `FormerGroups.names`."""
        return sorted(self._groups)

    async def read(self, group: str) -> FormerGroup:
        """See `FormerGroups.read`."""
        found = await self._queue.describe(group)
        return FormerGroup(group, found.generation, tuple(found.members), found.committed)

    async def store(self, group: str, positions: Mapping[ReadPartition, Committed]) -> None:
        """See `FormerGroups.store`."""
        await self._queue.commit(group, "", OUTSIDE_GENERATION, dict(positions))

    async def remove(self, group: str) -> None:
        """See `FormerGroups.remove`. Members are ignored."""
        await self.read(group)
        self._groups[group].members.clear()
        await self._queue.delete_group(group)
