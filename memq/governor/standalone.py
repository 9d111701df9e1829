"""The coordinator of one broker without a cluster: topics and assignments in a SQLite file.

Only one process opens the file (see `DataFolder`), so the whole state is also in memory. A change is committed with an
fsync before it is applied. The membership, one broker, is in memory only.

The file has topics, assignments, used ids, the mark of the store, and the rules of permissions. Each row has a checksum
(`memq.runtime.sqlite_file`). The row of a used id says whether its topic was deleted. Any other missing topic is
damage, because the sweep deletes the objects of deleted topics. An assignment without its topic is damage, too, and so
is a partition without its assignment: its epochs would begin again.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from memq.errors import CorruptDataError, MemqError, UnreachableError
from memq.governor import Assignment
from memq.governor.memory import LocalCoordinator
from memq.governor.registry import Registry, RegistryChange, check_topic, encode_topic
from memq.governor.watchers import Watchers
from memq.permissions import decode_rules, encode_rules
from memq.runtime.clock import Clock
from memq.runtime.logs import EventLog
from memq.runtime.sqlite_file import COPY_HINT, SqliteFile, add_checksums, checksum, is_sound
from memq.runtime.threads import ThreadPool
from memq.topic import PartitionKey, Topic

TOGETHER_MAX = 256  # changes that are stored at once
_APPLICATION_ID = 0x6D71_5431  # "mqT1"
_SCHEMA = (
    "CREATE TABLE topics (id TEXT PRIMARY KEY, body BLOB NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE used_ids (id TEXT PRIMARY KEY, deleted INTEGER NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE assignments (topic_id TEXT NOT NULL REFERENCES topics (id), partition INTEGER NOT NULL,
    body BLOB NOT NULL, checksum INTEGER NOT NULL, PRIMARY KEY (topic_id, partition)) WITHOUT ROWID""",
    "CREATE TABLE store_mark (id INTEGER PRIMARY KEY CHECK (id = 0), mark TEXT NOT NULL, checksum INTEGER NOT NULL)",
    """CREATE TABLE IF NOT EXISTS rules (id INTEGER PRIMARY KEY CHECK (id = 0), body BLOB NOT NULL,
    checksum INTEGER NOT NULL)""",
)
_COPIES = {
    "topics": "SELECT *, row_checksum(0, 'topics', id, body) FROM old_topics",
    "used_ids": """SELECT *, row_checksum(0, 'used_ids', id, deleted)
    FROM (SELECT *, id NOT IN (SELECT id FROM topics) AS deleted FROM old_used_ids)""",
    "assignments": "SELECT *, row_checksum(0, 'assignments', topic_id, partition, body) FROM old_assignments",
    "store_mark": "SELECT *, row_checksum(0, 'store_mark', id, mark) FROM old_store_mark",
}
_PUT = {
    "topics": "INSERT OR REPLACE INTO topics (id, body, checksum) VALUES (?, ?, ?)",
    "used_ids": "INSERT OR REPLACE INTO used_ids (id, deleted, checksum) VALUES (?, ?, ?)",
    "assignments": "INSERT OR REPLACE INTO assignments (topic_id, partition, body, checksum) VALUES (?, ?, ?, ?)",
    "store_mark": "INSERT OR REPLACE INTO store_mark (id, mark, checksum) VALUES (?, ?, ?)",
    "rules": "INSERT OR REPLACE INTO rules (id, body, checksum) VALUES (?, ?, ?)",
}
_ALL = {
    "topics": "SELECT id, body, checksum FROM topics ORDER BY id",
    "used_ids": "SELECT id, deleted, checksum FROM used_ids ORDER BY id",
    "assignments": "SELECT topic_id, partition, body, checksum FROM assignments ORDER BY topic_id, partition",
    "store_mark": "SELECT id, mark, checksum FROM store_mark",
    "rules": "SELECT id, body, checksum FROM rules",
}


def topics_file(path: Path) -> SqliteFile:
    """Return the description of the file at a path, not opened yet."""
    return SqliteFile(path, "topics file", _APPLICATION_ID, _SCHEMA, UnreachableError, 1_000, (_upgrade_1, _upgrade_2))


def _upgrade_1(connection: sqlite3.Connection) -> None:
    """Add a checksum to each row, and the table `store_mark`, which the oldest files lack."""
    connection.execute("CREATE TABLE IF NOT EXISTS store_mark (id INTEGER PRIMARY KEY, mark TEXT NOT NULL)")
    add_checksums(connection, _SCHEMA, _COPIES)


def _upgrade_2(connection: sqlite3.Connection) -> None:
    """Add the table `rules`."""
    connection.execute(_SCHEMA[-1])


def store_changes(connection: sqlite3.Connection, file: SqliteFile, changes: Sequence[RegistryChange]) -> None:
    """Commit changes, all or nothing. Raises: as `SqliteFile.error`; CorruptDataError."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        try:
            for change in changes:
                _write(connection, file, change)
            connection.execute("COMMIT")
        except (sqlite3.Error, MemqError):
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
    except sqlite3.Error as error:
        raise file.error(error) from error


def _write(connection: sqlite3.Connection, file: SqliteFile, change: RegistryChange) -> None:
    for topic in change.removed:
        connection.execute("DELETE FROM assignments WHERE topic_id = ?", (topic.id,))
        connection.execute("DELETE FROM topics WHERE id = ?", (topic.id,))
        _put(connection, "used_ids", topic.id, 1)
    for topic in change.stored:
        before = connection.execute("SELECT id, body, checksum FROM topics WHERE id = ?", (topic.id,)).fetchone()
        if before is not None and not is_sound("topics", before):
            raise _damaged(file, f"topic '{topic.name}'")
        _put(connection, "topics", topic.id, encode_topic(topic, before[1] if before else None))
        _put(connection, "used_ids", topic.id, 0)
    if change.mark:
        _put(connection, "store_mark", 0, change.mark)
    if change.rules is not None:
        _put(connection, "rules", 0, encode_rules(change.rules))
    for entry in change.assignments:
        _put(connection, "assignments", entry.topic_id, entry.partition, msgspec.json.encode(entry))


def _put(connection: sqlite3.Connection, table: str, *values: str | int | bytes) -> None:
    """Write one row; it replaces a row with the same key."""
    connection.execute(_PUT[table], (*values, checksum(table, values)))


def load_registry(connection: sqlite3.Connection, file: SqliteFile) -> Registry:
    """Return the content of the file. Raises: as `SqliteFile.error`; CorruptDataError."""
    try:
        topics = list(_rows(connection, file, "topics"))
        used_ids = {used: bool(deleted) for used, deleted in _rows(connection, file, "used_ids")}
        assignments = list(_rows(connection, file, "assignments"))
        marks = [mark for _, mark in _rows(connection, file, "store_mark")]
        bodies = [body for _, body in _rows(connection, file, "rules")]
    except sqlite3.Error as error:
        raise file.error(error) from error
    try:
        known = [check_topic(msgspec.json.decode(body, type=Topic)) for _, body in topics]
        assigned = [msgspec.json.decode(body, type=Assignment) for _, _, body in assignments]
    except (msgspec.MsgspecError, UnicodeDecodeError, MemqError) as error:
        raise _damaged(file, "a topic or assignment", str(error)) from error
    try:
        rules = [decode_rules(body) for body in bodies]
    except (msgspec.MsgspecError, UnicodeDecodeError, MemqError) as error:
        raise _damaged(file, "a rule of permissions", str(error)) from error
    _check_whole(file, known, assigned, used_ids)
    return Registry(known, assigned, used_ids, "".join(marks), rules[0] if rules else None)


def _rows(connection: sqlite3.Connection, file: SqliteFile, table: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a table without their checksums, in order of the key."""
    for row in connection.execute(_ALL[table]):
        if not is_sound(table, row):
            raise _damaged(file, f"a row of '{table}'")
        yield row[:-1]


def _check_whole(
    file: SqliteFile, topics: Sequence[Topic], assignments: Sequence[Assignment], used_ids: dict[str, bool]
) -> None:
    """Refuse a file that has lost rows. Raises: CorruptDataError."""
    known = {topic.id: topic for topic in topics}
    there = {used for used, deleted in used_ids.items() if not deleted}
    for lost in sorted(known.keys() ^ there):
        raise _damaged(file, f"topic id {lost}", "it is not deleted, and its topic or its id is missing")
    wanted = {(topic.id, partition.partition) for topic in topics for partition in topic.partitions}
    for topic_id, partition in sorted(wanted ^ {(entry.topic_id, entry.partition) for entry in assignments}):
        raise _damaged(file, f"partition {partition} of topic id {topic_id}", "it or its assignment is missing")


def _damaged(file: SqliteFile, name: str, why: str = "its checksum is wrong") -> CorruptDataError:
    return CorruptDataError(f"{name} in {file.what} '{file.path}' is damaged: {why}", hint=COPY_HINT)


@dataclass(frozen=True, slots=True)
class _Request:
    """A change that waits for its turn: `decide` makes it, `done` gets the result."""

    decide: Callable[[Registry], RegistryChange]
    done: asyncio.Future[RegistryChange]


class StandaloneCoordinator(LocalCoordinator):
    """Topics and assignments in the file at `path`, which is created if it does not exist.

    Raises at construction: CorruptDataError, UnsupportedFormatError, DeniedError, UnreachableError.
    """

    def __init__(self, path: Path, cluster: str, clock: Clock) -> None:
        self._file = topics_file(path)
        self._connection = self._file.connect()
        try:
            registry = load_registry(self._connection, self._file)
        except BaseException:
            self._connection.close()
            raise
        super().__init__(cluster, registry, Watchers(EventLog(clock)))
        self._in_doubt = False  # a commit failed or was cancelled: the state must be read from the file again
        self._turn = asyncio.Lock()
        self._waiting: deque[_Request] = deque()
        self._pool = ThreadPool("coordinator", 1)

    async def close(self) -> None:
        """See `Coordinator.close`; closing twice is fine."""
        await self.watchers.close()
        await self._pool.close()
        self._connection.close()

    async def _change(self, decide: Callable[[Registry], RegistryChange]) -> RegistryChange:
        """Decide on the current state, store the change, and only then apply it.

        Waiting changes may be stored in one transaction.
        """
        request = _Request(decide, asyncio.get_running_loop().create_future())
        request.done.add_done_callback(_ignore_error)
        self._waiting.append(request)
        try:
            async with self._turn:
                while not request.done.done():
                    await self._store_waiting()
            return await request.done
        finally:
            request.done.cancel()  # the request of a cancelled caller is dropped

    async def _store_waiting(self) -> None:
        """Store waiting changes with one fsync where possible: thousands of partitions may open at once."""
        if self._in_doubt:
            await self._reload()
        together = self._next_together()
        if not together:
            return
        changes = [change for _, change in together]
        self._in_doubt = True
        try:
            await self._pool.run(store_changes, self._connection, self._file, changes)
        except MemqError as error:
            _refuse(together, error)
            return
        except BaseException as error:
            _refuse(together, UnreachableError(f"a change was left incomplete: {error!r}", hint="try again"))
            raise
        for request, change in together:
            self._registry.apply(change)
            if not request.done.done():
                request.done.set_result(change)
        self._in_doubt = False
        self._changed()

    def _next_together(self) -> list[tuple[_Request, RegistryChange]]:
        """Decide waiting requests in order: many for different partitions, or one for something else."""
        together: list[tuple[_Request, RegistryChange]] = []
        touched: dict[PartitionKey, None] = {}
        while self._waiting and len(together) < TOGETHER_MAX:
            request = self._waiting[0]
            change = self._decided(request)
            if change is None:
                self._waiting.popleft()
                continue
            changed = [(entry.topic_id, entry.partition) for entry in change.assignments]
            alone = bool(change.stored or change.removed or change.mark or change.rules)
            if together and (alone or any(partition in touched for partition in changed)):
                break
            together.append((self._waiting.popleft(), change))
            if alone:
                break
            touched.update(dict.fromkeys(changed))
        return together

    def _decided(self, request: _Request) -> RegistryChange | None:
        """Return the change of a request; None when its caller was cancelled, or the request is refused."""
        try:
            return None if request.done.done() else request.decide(self._registry)
        except MemqError as error:
            request.done.set_exception(error)
            return None

    async def _reload(self) -> None:
        loaded = await self._pool.run(load_registry, self._connection, self._file)
        for broker in self._registry.brokers():
            loaded.register(broker)
        self._registry = loaded  # terms begin at 0 again, harmlessly: no other process governs
        self._in_doubt = False
        self._changed()

    def _changed(self) -> None:
        self.watchers.changed()


def _refuse(requests: Sequence[tuple[_Request, RegistryChange]], error: MemqError) -> None:
    for request, _ in requests:
        if not request.done.done():
            request.done.set_exception(error)


def _ignore_error(done: asyncio.Future[RegistryChange]) -> None:
    """Retrieve the error of a request whose caller was cancelled: else asyncio logs it as never retrieved."""
    if not done.cancelled():
        done.exception()
