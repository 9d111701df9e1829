"""The notification queue as one node sees it: in memory, behind calls that fail, hang and come late.

It notifies the monitor of ownership of each task's calls, their effects and their answers. The observer gets each
pointer with the offset up to which its owner has read: an owner must skip blocks that it has read there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from memq.errors import LogCutError, QueueError, QueueRefusedError
from memq.format.pointer import decode_pointer
from memq.groups import Membership
from memq.notification import FROM_THE_LOG, Entries, FormerGroup, FormerGroups, Publication, Span
from memq.notification.memory import MemoryQueue
from memq.simulation.ports.calls import Caller
from memq.simulation.ports.failing_partition import FailingPartition
from memq.simulation.ports.ownership_monitor import OwnershipMonitor, Task
from memq.simulation.world.loop import SimTask
from memq.simulation.world.node import EPOCH_MS, SimNode
from memq.topic import Committed, Position, ReadPartition, is_state_topic

NO_TASK: Task = (-1, -1)
PUBLISH_LIES = ("denied", "not-found", "denied-landed", "refused-landed")
READ_LIES = ("denied", "not-found")
ADMIN_LIES = ("denied", "denied-landed")
OWNERS_WORK = ("open", "publish", "forward", "leave")
CUT_S = 8.0  # a log whose end is below a proven one for so long was cut; with Kafka it is 120 s


class QueueObserver:
    """Notified of changes of the queue, and of requests to it, in the same step."""

    def published(
        self, publication: Publication, offset: int, node: SimNode, read_to: int, handed_over_s: float
    ) -> None:
        """A pointer of `node` is in the queue; its owner had read below `read_to` when it was handed over."""

    def trimmed(self, partition: ReadPartition, before: int) -> None:
        """The pointers below `before` were removed."""

    def cut(self, partition: ReadPartition, end: int) -> None:
        """The pointers from offset `end` on were lost, by a fault of the queue."""

    def dropped(self, partitions: Sequence[ReadPartition]) -> None:
        """The logs of a topic were deleted."""

    def committed(self, group: str, partition: ReadPartition, position: Position) -> None:
        """A group has stored a position."""

    def granted(self, group: str, member: str, membership: Membership, *, joined: bool) -> None:
        """A member was notified of its partitions."""

    def asked(
        self, group: str, member: str, generation: int, number: int, positions: list[tuple[ReadPartition, Position]]
    ) -> None:
        """A member requests that positions are stored, by its commit with this number."""

    def stored_by(
        self, group: str, member: str, generation: int, number: int, positions: list[tuple[ReadPartition, Position]]
    ) -> None:
        """The positions are stored that a member sent in a generation, by its commit with this number."""

    def fetched(self, group: str, partition: ReadPartition, position: Position | None) -> None:
        """A client fetched the position of a group; None when the group has stored nothing."""


class StateLogWatch(Protocol):
    """Notified of the entries of state logs."""

    def landed(self, partition: ReadPartition, offset: int, body: bytes) -> None:
        """An entry is in the log at `offset`."""


class SimQueue:
    """See `memq.notification.NotificationQueue`. `observer` is notified of all changes."""

    def __init__(
        self,
        caller: Caller,
        queue: MemoryQueue,
        observer: QueueObserver,
        monitor: OwnershipMonitor,
        failing: FailingPartition,
        grows: Callable[[SimNode, ReadPartition, int], None],
        state_logs: StateLogWatch,
    ) -> None:
        self._caller = caller
        self._queue = queue
        self._observer = observer
        self._monitor = monitor
        self._failing = failing
        self._grows = grows
        self._state_logs = state_logs
        self.former = SimFormerGroups(caller, queue.former)
        self._shown: dict[ReadPartition, int] = {}  # the greatest end that this process was shown
        self._proven: dict[ReadPartition, int] = {}  # the end that entries prove which this process read or published
        self._shown_s: dict[ReadPartition, float] = {}  # when this process last read an answer of the log
        self._sent: dict[ReadPartition, int] = {}  # publishes on their way
        self._lower_s: dict[ReadPartition, tuple[float, float]] = {}  # first and last answer below the proven end

    # ---- pointers ----------------------------------------------------------------------------

    @property
    def refuses_by_age(self) -> bool:
        """See `PointerWriter.refuses_by_age`."""
        return self._queue.refuses_by_age

    async def publish(self, publication: Publication) -> int:
        """See `PointerWriter.publish`."""
        await self._reach(publication.partition)
        if is_state_topic(publication.partition.topic):
            return await self._publish_state(publication)
        where, world, process = publication.partition, self._caller.node.world, self._caller.node.index
        pointer = decode_pointer(publication.body)
        publish = self._monitor.publishes(process, self._task(where), publication, pointer, world.now)

        async def land() -> int:
            if publish.handed_over_s <= self._monitor.log(where).cut_s:
                raise QueueError(f"the leader of {where.topic}/{where.partition} was lost")
            self._check_late_try(publication, world.now - publish.handed_over_s)
            offset = await self._queue.publish(publication)
            self._grows(self._caller.node, where, offset)
            self._shown[where] = max(self._shown.get(where, 0), offset + 1)
            self._monitor.lands(publish, publication, offset, EPOCH_MS + world.now * 1000, world.now)
            node, read_to = self._caller.node, publish.read_to
            self._observer.published(publication, offset, node, read_to, publish.handed_over_s)
            return offset

        what = f"publish {where.topic}/{publication.write_partition} epoch {publication.epoch}"
        self._sent[where] = self._sent.get(where, 0) + 1
        try:
            offset = await self._caller.call(what, land, lies=PUBLISH_LIES)
        except BaseException:
            self._monitor.fails(publish, world.now)
            raise
        finally:
            self._sent[where] -= 1
            self._shown_s[where] = world.now
        self._monitor.answers(publish, offset, world.now)
        self._prove(where, offset + 1)
        return offset

    async def _publish_state(self, publication: Publication) -> int:
        """Publish an entry of a state log: its rules need no clock, and no read before it."""
        where = publication.partition

        async def land() -> int:
            offset = await self._queue.publish(publication)
            self._state_logs.landed(where, offset, publication.body)
            return offset

        what = f"publish {where.topic}/{where.partition} epoch {publication.epoch}"
        return await self._caller.call(what, land, lies=PUBLISH_LIES)

    async def _read_state(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        what = f"read {partition.topic}/{partition.partition} {offset}"
        return await self._caller.call(what, lambda: self._queue.read(partition, offset, bytes_max), lies=READ_LIES)

    def _check_late_try(self, publication: Publication, late_s: float) -> None:
        """Refuse an owner's own try that lands later than S, if the queue does not refuse by age.

        SQLite is such a queue: it waits for its lock for 10 s, and writes nothing later. Correct totals depend on this.
        """
        log = self._monitor.log(publication.partition)
        own = log.highest.get(publication.write_partition) == publication.epoch
        if own and not self._queue.refuses_by_age and late_s > log.stale_s:
            raise QueueRefusedError(f"the call came {late_s:.3f} s late, {log.stale_s:g} s are allowed")

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`."""
        await self._reach(partition)
        if is_state_topic(partition.topic):
            return await self._read_state(partition, offset, bytes_max)
        now_s, task = self._caller.node.world.now, self._task(partition)
        reading = self._monitor.reads(task, partition, offset, now_s)
        short = self._ends_early()
        if bytes_max != FROM_THE_LOG and self._caller.lie("short-read"):
            bytes_max = 1

        async def happen() -> Entries:
            self._monitor.happens(reading)
            return await self._read(partition, offset, bytes_max, short=short)

        what = f"read {partition.topic}/{partition.partition} {offset}"
        entries = await self._caller.call(what, happen, lies=READ_LIES)
        self._shown_s[partition] = self._caller.node.world.now
        self._shown[partition] = max(self._shown.get(partition, 0), entries.next)
        if entries:
            self._prove(partition, entries.next)
        if bytes_max == FROM_THE_LOG:
            self._monitor.compares(task, partition, self._caller.node.world.now)
        else:
            self._monitor.shows(reading, entries, self._caller.node.world.now)
        return entries

    async def _reach(self, partition: ReadPartition) -> None:
        await self._failing.reach_log(partition, self._caller.node.world.now)

    def _task(self, partition: ReadPartition) -> Task:
        """Return the running task; report to the monitor the epoch for which it publishes or forwards."""
        task = asyncio.current_task()
        if not isinstance(task, SimTask):
            return NO_TASK
        number, (work, *of) = (self._caller.node.index, task.number), task.get_name().split(" ")
        if work in ("publish", "forward"):
            write_partition, epoch = int(of[0].rpartition("/")[2]), int(of[1])
            if work == "publish":
                self._monitor.works_for(number, partition, write_partition, epoch)
            else:
                self._monitor.forwards(number, partition, write_partition, epoch, self._caller.node.world.now)
        return number

    async def span(self, partition: ReadPartition) -> Span:
        """See `PointerReader.span`."""
        await self._reach(partition)
        if is_state_topic(partition.topic):
            what = f"span {partition.topic}/{partition.partition}"
            return await self._caller.call(what, lambda: self._queue.span(partition), lies=READ_LIES)
        self._monitor.asked(self._task(partition), partition, self._caller.node.world.now)
        short = self._ends_early()

        async def ask() -> Span:
            span = await self._queue.span(partition)
            self._check_end(partition, span)
            return Span(span.begin, self._early_end(partition, span)) if short else span

        return await self._caller.call(f"span {partition.topic}/{partition.partition}", ask, lies=READ_LIES)

    async def _read(self, partition: ReadPartition, offset: int, bytes_max: int, *, short: bool) -> Entries:
        self._check_end(partition, await self._queue.span(partition))
        entries = await self._queue.read(partition, offset, bytes_max)
        if not short:
            return entries
        end = max(offset, self._early_end(partition, await self._queue.span(partition)))
        return Entries([entry for entry in entries if entry.offset < end], min(entries.next, end))

    def _ends_early(self) -> bool:
        """Whether a lagging replica answers. Never true for owners: their publishes show them a later end."""
        task = asyncio.current_task()
        works_for_owner = task is not None and task.get_name().split(" ")[0] in OWNERS_WORK
        return not works_for_owner and bool(self._caller.lie("short-log"))

    def _early_end(self, partition: ReadPartition, span: Span) -> int:
        """Return an end that is too low, but not below one that this process knows, which the port excludes."""
        shown = self._shown.get(partition, span.begin)
        return max(span.begin, min(span.end, max(shown, span.end - 3)))

    def _known_end(self, partition: ReadPartition) -> int:
        """Return the end that is proven by entries which this process has read or published."""
        return self._proven.get(partition, 0)

    def relies_on(self, partition: ReadPartition, end: int) -> bool:
        """Whether an owner here may publish without a comparison, and knows an end above `end`.

        It compares its last known entry when its proof is older than a third of S, but not with each publish.
        """
        proof_s = self._shown_s.get(partition, 0.0) + self._monitor.log(partition).stale_s / 3
        young = bool(self._sent.get(partition)) or self._caller.node.world.now <= proof_s
        return young and self._known_end(partition) > end

    def _prove(self, partition: ReadPartition, end: int) -> None:
        self._proven[partition] = max(self._proven.get(partition, 0), end)

    def _check_end(self, partition: ReadPartition, span: Span) -> None:
        """Refuse an end below one that this process has proven, as the queue on Kafka does.

        Raises: QueueError; LogCutError when the end was lower for `CUT_S`.
        """
        now_s, proven = self._caller.node.world.now, self._known_end(partition)
        if span.end >= proven:
            self._lower_s.pop(partition, None)
            return
        since_s, last_s = self._lower_s.get(partition, (now_s, now_s))
        since_s = now_s if now_s > last_s + CUT_S else since_s
        self._lower_s[partition] = since_s, now_s
        text = f"{partition.topic}/{partition.partition}: the end is {span.end}, after it was {proven}"
        raise LogCutError(text) if now_s >= since_s + CUT_S else QueueError(text)

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        """See `PointerReader.seek_time`."""
        await self._reach(partition)

        async def seek() -> int:
            self._check_end(partition, await self._queue.span(partition))
            return await self._queue.seek_time(partition, time_ms)

        what = f"seek {partition.topic}/{partition.partition} {time_ms}"
        return await self._caller.call(what, seek, lies=READ_LIES)

    async def wait(self, ends: dict[ReadPartition, int], timeout_s: float) -> None:
        """See `PointerReader.wait`."""
        copied = dict(ends)
        await self._caller.call(f"wait {len(ends)}", lambda: self._queue.wait(copied, timeout_s), waits=True)

    # ---- partitions --------------------------------------------------------------------------

    async def create(self, partitions: Sequence[ReadPartition], stale_publish_ms: int) -> None:
        """See `PartitionAdmin.create`."""
        wanted = tuple(partitions)
        for partition in wanted:
            self._monitor.log(partition).stale_s = stale_publish_ms / 1000
        await self._caller.call(
            f"create {len(wanted)}", lambda: self._queue.create(wanted, stale_publish_ms), lies=ADMIN_LIES
        )

    async def trim(self, partition: ReadPartition, before: int) -> None:
        """See `PartitionAdmin.trim`."""
        asked_s = self._caller.node.world.now

        async def land() -> None:
            if is_state_topic(partition.topic):
                return await self._queue.trim(partition, before)
            if asked_s <= self._monitor.log(partition).cut_s:
                raise QueueError(f"the leader of {partition.topic}/{partition.partition} was lost")
            await self._queue.trim(partition, before)
            self._monitor.trims(partition, before)
            self._observer.trimmed(partition, before)
            return None

        await self._caller.call(f"trim {partition.topic} {before}", land, lies=ADMIN_LIES)

    async def drop(self, partitions: Sequence[ReadPartition]) -> None:
        """See `PartitionAdmin.drop`."""
        wanted = tuple(partitions)

        async def land() -> None:
            await self._queue.drop(wanted)
            for partition in wanted:
                self._monitor.drops(partition)
                self._proven.pop(partition, None)
            self._observer.dropped(wanted)

        await self._caller.call(f"drop {len(wanted)}", land, lies=ADMIN_LIES)

    async def check(self) -> None:
        """See `NotificationQueue.check`."""
        await self._caller.call("check", self._queue.check)

    async def close(self) -> None:
        """See `NotificationQueue.close`."""


class SimFormerGroups:
    """See `memq.notification.FormerGroups`."""

    def __init__(self, caller: Caller, former: FormerGroups) -> None:
        self._caller = caller
        self._former = former

    async def names(self) -> Sequence[str]:
        """See `FormerGroups.names`."""
        return await self._caller.call("names of former groups", self._former.names)

    async def read(self, group: str) -> FormerGroup:
        """See `FormerGroups.read`."""
        return await self._caller.call(f"read former group {group}", lambda: self._former.read(group))

    async def store(self, group: str, positions: Mapping[ReadPartition, Committed]) -> None:
        """See `FormerGroups.store`."""
        given = dict(positions)
        await self._caller.call(f"store former group {group}", lambda: self._former.store(group, given))

    async def remove(self, group: str) -> None:
        """See `FormerGroups.remove`."""
        await self._caller.call(f"remove former group {group}", lambda: self._former.remove(group))
