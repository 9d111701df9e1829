"""A notification queue in memory, for tests, the simulation and `memq.testing`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from memq.errors import NotFoundError, QueueRefusedError
from memq.notification import (
    Entries,
    Entry,
    FormerGroup,
    Publication,
    Span,
    active_members,
    check_epoch,
    check_position,
    check_publication,
    missing_partition,
)
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
    """Keeps logs in dictionaries; all users of this instance see the same queue.

    `refuse` is the rule for stale publications: "epoch" as in SQLite, or "age" as in Kafka: the queue compares the
    queue time with the wall clock, and ignores epochs. No threads; only `wait` waits. `logs` is the content of the
    queue: tests read and damage it.
    """

    def __init__(self, clock: Clock, refuse: Literal["epoch", "age"] = "epoch") -> None:
        self._clock = clock
        self._refuse = refuse
        self.logs: dict[ReadPartition, Log] = {}
        self._waiters = Waiters()
        self.former = MemoryFormerGroups(self.log)

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
        self.former.forget(partitions)
        for partition in partitions:
            self.logs.pop(partition, None)
            self._waiters.wake(partition)

    async def check(self) -> None:
        """See `NotificationQueue.check`. It never fails."""

    async def close(self) -> None:
        """See `NotificationQueue.close`. Has no effect: other users may share this queue."""


class MemoryFormerGroups:
    """See `memq.notification.FormerGroups`. `groups` is the content; `log` raises for a missing partition."""

    def __init__(self, log: Callable[[ReadPartition], Log]) -> None:
        self._log = log
        self.groups: dict[str, FormerGroup] = {}

    async def names(self) -> Sequence[str]:
        """See `FormerGroups.names`."""
        return sorted(self.groups)

    async def read(self, group: str) -> FormerGroup:
        """See `FormerGroups.read`."""
        found = self.groups.get(check_group(group))
        if found is None:
            raise NotFoundError(f"group '{group}' is not in the queue")
        return found

    async def store(self, group: str, positions: Mapping[ReadPartition, Committed]) -> None:
        """See `FormerGroups.store`."""
        found = self.groups.get(check_group(group)) or FormerGroup(group, 0, (), {})
        if found.members:
            raise active_members("positions can't be set", len(found.members))
        for partition, committed in positions.items():
            check_position(partition, committed)
            self._log(partition)
        self.groups[group] = replace(found, committed=dict(sorted({**found.committed, **positions}.items())))

    async def remove(self, group: str) -> None:
        """See `FormerGroups.remove`. Members are ignored."""
        await self.read(group)
        del self.groups[group]

    def forget(self, partitions: Sequence[ReadPartition]) -> None:
        """Remove the positions of all groups in deleted partitions."""
        for name, group in self.groups.items():
            left = {each: committed for each, committed in group.committed.items() if each not in partitions}
            self.groups[name] = replace(group, committed=left)
