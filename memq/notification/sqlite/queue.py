"""The queue of the embedded default: one SQLite file, durable, for several processes.

`SCHEMA` has the tables of the file, `UPGRADES` the conversions from earlier layouts.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from memq.errors import ClosedError, MemqError, QueueError
from memq.notification import Entries, Publication, Span, check_publication
from memq.notification.sqlite import former_groups, log
from memq.notification.sqlite.group_commit import Writer
from memq.notification.waiters import Waiters, until_reached
from memq.runtime.clock import Clock
from memq.runtime.logs import EventLog
from memq.runtime.sqlite_file import SqliteFile, add_checksums
from memq.runtime.tasks import TaskOwner
from memq.runtime.threads import ThreadPool
from memq.topic import ReadPartition

P = ParamSpec("P")
T = TypeVar("T")
APPLICATION_ID = 0x6D71_5131  # "mqQ1"

SCHEMA = (
    """CREATE TABLE partitions (id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, topic_id TEXT NOT NULL,
    partition INTEGER NOT NULL, stale_publish_ms INTEGER NOT NULL, begin INTEGER NOT NULL DEFAULT 0,
    next INTEGER NOT NULL DEFAULT 0, time_max INTEGER NOT NULL DEFAULT 0, dropped INTEGER NOT NULL DEFAULT 0,
    epochs INTEGER NOT NULL DEFAULT 0, checksum INTEGER NOT NULL)""",
    "CREATE UNIQUE INDEX partitions_there ON partitions (topic, topic_id, partition) WHERE dropped = 0",
    """CREATE TABLE entries (id INTEGER PRIMARY KEY, time_ms INTEGER NOT NULL, time_max INTEGER NOT NULL,
    body BLOB NOT NULL, checksum INTEGER NOT NULL)""",
    """CREATE TABLE epochs (partition_id INTEGER NOT NULL, write_partition INTEGER NOT NULL, epoch INTEGER NOT NULL,
    checksum INTEGER NOT NULL, PRIMARY KEY (partition_id, write_partition)) WITHOUT ROWID""",
    """CREATE TABLE groups (name TEXT PRIMARY KEY, body BLOB NOT NULL, positions INTEGER NOT NULL,
    checksum INTEGER NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE heard (group_name TEXT NOT NULL, member TEXT NOT NULL, heard_ms INTEGER NOT NULL,
    checksum INTEGER NOT NULL, PRIMARY KEY (group_name, member)) WITHOUT ROWID""",
    """CREATE TABLE positions (group_name TEXT NOT NULL, partition_id INTEGER NOT NULL, pointer_offset INTEGER NOT NULL,
    record_index INTEGER NOT NULL, records INTEGER NOT NULL, bytes INTEGER NOT NULL, checksum INTEGER NOT NULL,
    PRIMARY KEY (group_name, partition_id)) WITHOUT ROWID""",
)

_COPIES = {
    "partitions": """SELECT *, row_checksum(0, 'partitions', id, topic, topic_id, partition, stale_publish_ms, begin,
        next, time_max, dropped, epochs)
    FROM (SELECT *, (SELECT count(*) FROM old_epochs WHERE partition_id = p.id) AS epochs FROM old_partitions p)""",
    "entries": """SELECT e.*, row_checksum(row_checksum(0, 'log', p.id, topic, topic_id, partition),
        'entries', e.id, time_ms, e.time_max, body)
    FROM old_partitions p JOIN old_entries e ON e.id >= p.id << 40 AND e.id < (p.id + 1) << 40""",
    "epochs": """SELECT e.*, row_checksum(row_checksum(0, 'log', p.id, topic, topic_id, partition),
        'epochs', partition_id, write_partition, epoch)
    FROM old_epochs e JOIN old_partitions p ON p.id = partition_id""",
    "heard": "SELECT *, row_checksum(0, 'heard', group_name, member, heard_ms) FROM old_heard",
    "positions": """SELECT o.*, row_checksum(row_checksum(0, 'log', p.id, topic, topic_id, partition),
        'positions', group_name, partition_id, pointer_offset, record_index, records, bytes)
    FROM old_positions o JOIN old_partitions p ON p.id = partition_id AND dropped = 0""",
    "groups": """SELECT *, row_checksum(0, 'groups', name, body, positions)
    FROM (SELECT *, (SELECT count(*) FROM positions WHERE group_name = name) AS positions FROM old_groups)""",
}


def _upgrade_1(connection: sqlite3.Connection) -> None:
    """Add a checksum to each row. Rows without their partition are dropped: no query has read them."""
    used = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'partitions'").fetchall()
    add_checksums(connection, SCHEMA, _COPIES)
    connection.execute("DELETE FROM sqlite_sequence")
    connection.executemany("INSERT INTO sqlite_sequence (name, seq) VALUES ('partitions', ?)", used)


UPGRADES = (_upgrade_1,)


class SqliteQueue:
    """Logs in the file at `path`, which is created if it does not exist.

    It belongs to one event loop.
    Every commit is an fsync; publishes that wait together share one. Publishes of this process wake its waiters at
    once, those of other processes within `poll_interval_ms`. If another process holds a lock for longer than
    `busy_timeout_ms`, calls raise QueueError. The monotonic clock must be the machine's: rows of an
    earlier release hold times of members by it.
    Raises at construction: CorruptDataError, UnsupportedFormatError, DeniedError, QueueError.
    """

    def __init__(
        self,
        path: Path,
        clock: Clock,
        *,
        poll_interval_ms: int = 25,
        busy_timeout_ms: int = 10_000,
        readers_max: int = 2,
    ) -> None:
        events = EventLog(clock)
        self._clock = clock
        self._poll_interval_s = poll_interval_ms / 1_000
        self._file = SqliteFile(path, "queue file", APPLICATION_ID, SCHEMA, QueueError, busy_timeout_ms, UPGRADES)
        self._writer = Writer(self._file, events)
        self._pool = ThreadPool("queue", readers_max)
        self._readers: deque[sqlite3.Connection] = deque()
        self._watcher: sqlite3.Connection | None = None
        self._waiters = Waiters()
        self._waited = asyncio.Event()
        self._tasks = TaskOwner(self._fail, events)
        self._closed = False
        self.former = former_groups.SqliteFormerGroups(self._read, self._write, self._now_ms)

    # ---- pointers ----------------------------------------------------------------------------

    @property
    def refuses_by_age(self) -> bool:
        """See `PointerWriter.refuses_by_age`."""
        return False

    async def publish(self, publication: Publication) -> int:
        """See `PointerWriter.publish`."""
        check_publication(publication)
        offset = await self._writer.run(partial(log.publish, publication=publication))
        self._waiters.advance(publication.partition, offset + 1)
        return offset

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        """See `PointerReader.read`."""
        return await self._read(log.read, partition, offset, bytes_max)

    async def span(self, partition: ReadPartition) -> Span:
        """See `PointerReader.span`."""
        return await self._read(log.span, partition)

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        """See `PointerReader.seek_time`."""
        return await self._read(log.seek_time, partition, time_ms)

    async def partitions(self, topic: str | None = None) -> list[ReadPartition]:
        """See `TopicFinder.partitions`; None: of all topics, also those missing from the coordinator."""
        return await self._read(log.partitions, topic)

    async def wait(self, ends: dict[ReadPartition, int], timeout_s: float) -> None:
        """See `PointerReader.wait`."""
        number, waiter = self._waiters.add(ends)
        try:
            for partition in ends:
                waiter.advance(partition, (await self.span(partition)).end)
            if self._closed:
                raise ClosedError("the queue is closed")
            if not len(self._tasks):
                self._tasks.start(self._follow(), "queue file's other writers")
            self._waited.set()
            await until_reached(waiter, timeout_s)
        finally:
            self._waiters.remove(number)

    async def _follow(self) -> None:
        """Notice commits of other processes while a caller waits."""
        seen = -1
        while True:
            await self._waited.wait()
            if not self._waiters:
                self._waited.clear()
                continue
            try:
                version = await self._pool.run(self._data_version)
                if version != seen:
                    await self._advance()
                seen = version
            except MemqError as error:
                self._waiters.fail(error)
            await asyncio.sleep(self._poll_interval_s)

    async def _advance(self) -> None:
        """Wake the waiters whose entries have arrived. Later callers of `wait` read the ends themselves."""
        for partition, end in (await self._read(log.ends, self._waiters.partitions())).items():
            if end is None:
                self._waiters.wake(partition)
            else:
                self._waiters.advance(partition, end)

    def _fail(self, error: BaseException) -> None:
        self._waiters.fail(QueueError(f"{self._file.what} '{self._file.path}' is not followed any more: {error}"))

    # ---- partitions --------------------------------------------------------------------------

    async def create(self, partitions: Sequence[ReadPartition], stale_publish_ms: int) -> None:
        """See `PartitionAdmin.create`. Existing partitions keep their entries."""
        await self._write(lambda file: log.create(file, partitions, stale_publish_ms))

    async def trim(self, partition: ReadPartition, before: int) -> None:
        """See `PartitionAdmin.trim`."""
        while await self._write(lambda file: log.trim(file, partition, before)):
            pass

    async def drop(self, partitions: Sequence[ReadPartition]) -> None:
        """See `PartitionAdmin.drop`. Missing partitions are ignored."""

        def hide(file: sqlite3.Connection) -> None:
            former_groups.forget(file, partitions)
            log.hide(file, partitions)

        await self._write(hide)
        for partition in partitions:
            self._waiters.wake(partition)
        while await self._write(log.delete_hidden):
            pass

    # ---- the file ----------------------------------------------------------------------------

    async def check(self) -> None:
        """See `NotificationQueue.check`. Acquires the write lock once."""
        await self._write(lambda file: file.execute("SELECT 1 FROM partitions LIMIT 1").fetchone())

    async def close(self) -> None:
        """See `NotificationQueue.close`; closing twice is fine. Calls of `wait` raise ClosedError."""
        self._closed = True
        self._waiters.fail(ClosedError("the queue is closed"))
        await self._writer.close()
        await self._tasks.stop()
        await self._pool.close()
        if self._watcher is not None:
            self._watcher.close()
        for connection in self._readers:
            connection.close()

    def _now_ms(self) -> int:
        return int(self._clock.monotonic() * 1_000)

    async def _write(self, job: Callable[[sqlite3.Connection], T]) -> T:
        return await self._writer.run(job)

    async def _read(
        self, function: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        return await self._pool.run(self._read_now, lambda connection: function(connection, *args, **kwargs))

    def _read_now(self, function: Callable[[sqlite3.Connection], T]) -> T:
        """Run a reader in one read transaction. A connection that failed is closed."""
        connection = self._take_reader()
        try:
            connection.execute("BEGIN")
            try:
                result = function(connection)
            except MemqError:
                connection.execute("COMMIT")
                self._readers.append(connection)
                raise
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            connection.close()
            raise self._file.error(error) from error
        self._readers.append(connection)
        return result

    def _take_reader(self) -> sqlite3.Connection:
        """Return an idle connection, or a new one: at most one per thread exists."""
        try:
            return self._readers.pop()
        except IndexError:
            return self._file.connect()

    def _data_version(self) -> int:
        """Return a number that changes when another connection commits."""
        try:
            if self._watcher is None:
                self._watcher = self._file.connect()
            return int(self._watcher.execute("PRAGMA data_version").fetchone()[0])
        except sqlite3.Error as error:
            raise self._file.error(error) from error
