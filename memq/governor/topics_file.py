"""The file of the standalone coordinator: topics, assignments, used ids, and the mark of the store.

Each row has a checksum (`memq.notification.sqlite.rows`). A deletion is a row, too: the id of a topic says that it was
deleted. A topic that is missing otherwise is damage, since the objects of a deleted topic are swept; so are an
assignment without its topic and a partition without its assignment, whose epochs would begin again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from memq.errors import CorruptDataError, MemqError, UnreachableError
from memq.governor import Assignment
from memq.governor.registry import Registry, RegistryChange, check_topic, encode_topic
from memq.notification.sqlite.file import COPY_HINT, SqliteFile
from memq.notification.sqlite.rows import add_checksums, checksum, is_sound
from memq.topic import Topic

_APPLICATION_ID = 0x6D71_5431  # "mqT1"
_SCHEMA = (
    "CREATE TABLE topics (id TEXT PRIMARY KEY, body BLOB NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE used_ids (id TEXT PRIMARY KEY, deleted INTEGER NOT NULL, checksum INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE assignments (topic_id TEXT NOT NULL REFERENCES topics (id), partition INTEGER NOT NULL,
    body BLOB NOT NULL, checksum INTEGER NOT NULL, PRIMARY KEY (topic_id, partition)) WITHOUT ROWID""",
    "CREATE TABLE store_mark (id INTEGER PRIMARY KEY CHECK (id = 0), mark TEXT NOT NULL, checksum INTEGER NOT NULL)",
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
}
_ALL = {
    "topics": "SELECT id, body, checksum FROM topics ORDER BY id",
    "used_ids": "SELECT id, deleted, checksum FROM used_ids ORDER BY id",
    "assignments": "SELECT topic_id, partition, body, checksum FROM assignments ORDER BY topic_id, partition",
    "store_mark": "SELECT id, mark, checksum FROM store_mark",
}


def topics_file(path: Path) -> SqliteFile:
    """Return the file at a path, to be opened."""
    return SqliteFile(path, "topics file", _APPLICATION_ID, _SCHEMA, UnreachableError, 1_000, (_upgrade_1,))


def _upgrade_1(connection: sqlite3.Connection) -> None:
    """Give each row a checksum. A file that no broker has used since stores have marks lacks their table."""
    connection.execute("CREATE TABLE IF NOT EXISTS store_mark (id INTEGER PRIMARY KEY, mark TEXT NOT NULL)")
    add_checksums(connection, _SCHEMA, _COPIES)


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
    for entry in change.assignments:
        _put(connection, "assignments", entry.topic_id, entry.partition, msgspec.json.encode(entry))


def _put(connection: sqlite3.Connection, table: str, *values: str | int | bytes) -> None:
    """Write one row, in place of one with its key."""
    connection.execute(_PUT[table], (*values, checksum(table, values)))


def load_registry(connection: sqlite3.Connection, file: SqliteFile) -> Registry:
    """Return all that the file holds. Raises: as `SqliteFile.error`; CorruptDataError."""
    try:
        topics = list(_rows(connection, file, "topics"))
        used_ids = {used: bool(deleted) for used, deleted in _rows(connection, file, "used_ids")}
        assignments = list(_rows(connection, file, "assignments"))
        marks = [mark for _, mark in _rows(connection, file, "store_mark")]
    except sqlite3.Error as error:
        raise file.error(error) from error
    try:
        known = [check_topic(msgspec.json.decode(body, type=Topic)) for _, body in topics]
        assigned = [msgspec.json.decode(body, type=Assignment) for _, _, body in assignments]
    except (msgspec.MsgspecError, MemqError) as error:
        raise _damaged(file, "a topic or assignment", str(error)) from error
    _check_whole(file, known, assigned, used_ids)
    return Registry(known, assigned, used_ids, "".join(marks))


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
