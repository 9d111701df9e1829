"""Opens the partitions of a consumer: finds the start of each one, and begins to read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from memq.client.consumer.assigned import Assigned, ConsumerObserver, ReadObserver
from memq.client.consumer.batch import topic_partition_of
from memq.client.consumer.fetch.fetch_scheduler import FetchScheduler
from memq.client.consumer.fetch.partition_cursor import PartitionCursor
from memq.client.consumer.offset_resolver import OffsetResolver
from memq.client.consumer.settings import ConsumerSettings, Point, point_of
from memq.errors import InvalidRequestError, MemqError, NotFoundError, QueueError, RetryableError
from memq.format.report import BeginReason
from memq.groups import Groups
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.topic import Committed, Position, ReadPartition, Topic, TopicSettings, Totals

OPENED_AT_ONCE = 16
_RETRY_S = 0.2
_STALE_RETRIES = 7  # 9 s in all
_STALE_RETRY_S_MAX = 2.0


class Opener:
    """Opens `wanted` partitions that are not read yet, in the background, after each `kick`.

    A partition starts at the stored position of the group, else at the start of the settings. `take_position` returns
    the position that came with a grant; the group is asked for the others. The end of a partition is fixed at its first
    opening. Each partition is opened by a task of its own: a log that fails delays no other.
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        groups: Groups,
        resolver: OffsetResolver,
        reading: FetchScheduler,
        topics: Mapping[str, Topic],
        wanted: Callable[[], Mapping[ReadPartition, int]],
        changed: Callable[[], None],
        observer: ConsumerObserver | None,
        tasks: TaskOwner,
        events: EventLog,
    ) -> None:
        self.failure: MemqError | None = None
        self.take_position: Callable[[ReadPartition, int], Committed | None] = lambda partition, grant: None
        self._settings = settings
        self._groups = groups
        self._resolver = resolver
        self._reading = reading
        self._topics = topics
        self._wanted = wanted
        self._changed = changed
        self._observer = observer
        self._events = events
        self._observers: dict[ReadPartition, ReadObserver] = {}  # the last one of each partition, read or not
        self._ends: dict[ReadPartition, Position] = {}
        self._tasks = tasks
        self._opening: dict[ReadPartition, int] = {}  # the grants under which partitions are being opened
        self._at_once = asyncio.Semaphore(OPENED_AT_ONCE)
        self._kicked = asyncio.Event()

    def kick(self) -> None:
        """Check the wanted partitions again."""
        self._kicked.set()

    async def run(self) -> None:
        """Open wanted partitions until cancelled."""
        while True:
            self._kicked.clear()
            try:
                await self._open_missing()
            except MemqError as error:
                await self._back_off(error)
                continue
            self._changed()
            await self._kicked.wait()

    async def _back_off(self, error: MemqError) -> None:
        """Log a failure, and wait before the next try; the user gets an error that does not pass."""
        self._events.warning("consumer.retry", f"{type(error).__name__}: {error}; trying again")
        if not isinstance(error, RetryableError):
            self.failure = error
        self._changed()
        await asyncio.sleep(_RETRY_S)

    async def seek(self, partition: ReadPartition, to: Point) -> None:
        """Continue to read a partition from another point.

        Raises: InvalidRequestError if the partition is given to another member meanwhile; as `start_at`.
        """
        assigned = self._reading.assigned[partition]
        point = point_of(to, topic_partition_of(partition))
        position = await self._start_at(point, partition, assigned.settings)
        if assigned.removed:
            raise InvalidRequestError(
                f"partition {partition.partition} of topic '{partition.topic}' was assigned to another member",
                hint="poll until on_assigned was called with it, then seek again",
            )
        paused = assigned.cursor.paused
        self._read(partition, position, _known_before(point), "seek", assigned.grant, position.mark)
        if paused:
            self._reading.pause(partition, paused=True)

    async def _open_missing(self) -> None:
        missing = {
            partition: grant
            for partition, grant in self._wanted().items()
            if partition not in self._reading.assigned and self._opening.get(partition) != grant
        }
        if not missing:
            return
        came = {partition: self.take_position(partition, grant) for partition, grant in missing.items()}
        stored = {partition: committed for partition, committed in came.items() if committed is not None}
        if len(stored) < len(missing):
            stored |= await self._committed([partition for partition in missing if partition not in stored])
        for partition, grant in missing.items():
            self._opening[partition] = grant
            self._tasks.start(self._open_soon(partition, grant, stored.get(partition)), "consumer opens a partition")

    async def _open_soon(self, partition: ReadPartition, grant: int, stored: Committed | None) -> None:
        """Open a partition; retry while it is wanted under `grant`."""
        try:
            while self._wanted().get(partition) == grant:
                try:
                    stored = await self._confirmed(partition, stored)
                    async with self._at_once:
                        await self._open(partition, grant, stored)
                    return
                except MemqError as error:
                    await self._back_off(error)
        finally:
            if self._opening.get(partition) == grant:
                del self._opening[partition]
            self._changed()

    async def _confirmed(self, partition: ReadPartition, stored: Committed | None) -> Committed | None:
        """Return the stored position of a partition: `stored`, or a new answer if that is outdated.

        A position before one that this member knows to be stored is outdated: this asks again, within bounds, since
        only a reset of the group goes back.
        """
        for tries in range(_STALE_RETRIES):
            if not self._goes_back(partition, stored):
                return stored
            await asyncio.sleep(min(_RETRY_S * 2**tries, _STALE_RETRY_S_MAX))
            stored = (await self._committed([partition])).get(partition)
        if self._goes_back(partition, stored):
            known = self._reading.stored.pop(partition).position
            self._events.warning(
                "consumer.position-back",
                f"group '{self._settings.group_name}' in topic '{partition.topic}': {known} was stored, now it is "
                f"{stored.position if stored is not None else 'nothing'}; reading from there",
            )
        return stored

    def _goes_back(self, partition: ReadPartition, found: Committed | None) -> bool:
        known = self._reading.stored.get(partition)
        return known is not None and (found is None or found.position < known.position)

    async def _committed(self, partitions: list[ReadPartition]) -> dict[ReadPartition, Committed]:
        if self._settings.group_name is None:
            return {}
        try:
            return await self._groups.committed(self._settings.group_name, partitions)
        except NotFoundError as error:  # that no position is stored is an empty answer, and never an error
            raise QueueError(f"positions of group '{self._settings.group_name}': {error}") from error

    async def _open(self, partition: ReadPartition, grant: int, stored: Committed | None) -> None:
        """Read a partition from `stored` on, which was asked for under `grant`.

        A partition that was given back meanwhile is left alone, also when it is here again: what is stored may have
        moved since. Each change of grants kicks, so it is opened in the next round with a position asked for then.
        """
        if self._wanted().get(partition) != grant:
            return  # its topic may be gone, too
        settings = self._topics[partition.topic].settings
        named = topic_partition_of(partition)
        if self._settings.end is not None and partition not in self._ends:
            end = point_of(self._settings.end, named)
            self._ends[partition] = await self._resolver.position_of(end, partition, settings)
        known: Totals | None
        mark = 0
        if stored is not None:
            position, known, mark = stored.position, stored.totals, stored.mark
        else:
            start = point_of(self._settings.start, named)
            position, known = await self._start_at(start, partition, settings), _known_before(start)
            mark = position.mark
        if self._wanted().get(partition) == grant:
            assigned = self._read(partition, position, known, "start" if stored is None else "stored", grant, mark)
            if stored is not None:
                assigned.cursor.progress.cover(stored.covered)
                assigned.ledger.stored(stored)
                self._reading.stored[partition] = stored

    async def _start_at(
        self, point: str | int | Position, partition: ReadPartition, settings: TopicSettings
    ) -> Position:
        """Return where a reader starts, with its mark: the log may be cut before the reader has looked back."""
        skip = self._settings.on_expired == "skip"
        position = await self._resolver.start_at(point, partition, settings, pass_expired=skip)
        return await self._resolver.marked(partition, position)

    def _read(
        self,
        partition: ReadPartition,
        position: Position,
        known: Totals | None,
        reason: BeginReason,
        grant: int,
        mark: int = 0,
    ) -> Assigned:
        topic = self._topics[partition.topic]
        cursor = PartitionCursor(
            partition,
            position,
            window_ms=topic.settings.reader_window_ms,
            end=self._ends.get(partition),
            pass_damage=self._settings.on_damaged != "fail",
            pass_expired=self._settings.on_expired == "skip",
            known=known,
            mark=mark,
            wanted=self._settings.wanted,
        )
        assigned = self._reading.add(cursor, topic, grant)
        if self._observer is not None:
            commits = self._settings.group_name is not None
            assigned.observer = self._observer.reading(topic, assigned.writers, commits=commits)
        if assigned.observer is not None:
            assigned.observer.begin(position, reason, self._observers.get(partition))
            self._observers[partition] = assigned.observer
        return assigned


def _known_before(point: str | int | Position) -> Totals | None:
    """Return the argument `known` of `PartitionCursor` for a start without a stored position."""
    return Totals() if isinstance(point, Position) else None
