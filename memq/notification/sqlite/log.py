"""Logs of pointers in SQLite: each function is one request on a connection.

The schema of the queue's file is here too.

**Rows.** An entry's row id is `partition id << 40 | offset`: one tree holds all logs, an append goes to the end of
its partition's range, and a read is one range scan. Offsets are dense from `begin` to `next`, since only `trim` takes
entries, from the front; `next` lives in the partition's row, so no offset is used twice. Partition ids are never
used again.

**Time.** Queue times are nearly, but not surely, in order. Each entry carries the greatest time up to it, which only
grows, so the first entry at or after a time is found by bisection, without an index that every publish would pay for.

**Damage.** Rows have no checksum. A value of the wrong type or range raises CorruptDataError; a body that is no blob is
returned as text, which no reader takes for a pointer. Entries behind the end are damage: nothing is appended over them.
A missing row is passed over: sweep and audit find it by the batch sequences of the pointers around it.

**Long deletions** are cut into transactions of `DELETE_ROWS_MAX` rows, that others may get in between. What is to be
deleted is out of sight from the first one on; what was broken off continues with the next call of its kind.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from memq.errors import CorruptDataError
from memq.notification import Entries, Entry, Publication, Span
from memq.notification.refusals import check_epoch, missing_partition
from memq.topic import ReadPartition

APPLICATION_ID = 0x6D71_5131  # "mqQ1"
COPY_HINT = "stop memq, keep the file, and restore it from a copy, or rebuild it with 'memq restore'"
DELETE_ROWS_MAX = 5_000
_OFFSET_BITS = 40

SCHEMA = (
    """CREATE TABLE partitions (id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, topic_id TEXT NOT NULL,
    partition INTEGER NOT NULL, stale_publish_ms INTEGER NOT NULL, begin INTEGER NOT NULL DEFAULT 0,
    next INTEGER NOT NULL DEFAULT 0, time_max INTEGER NOT NULL DEFAULT 0, dropped INTEGER NOT NULL DEFAULT 0)""",
    "CREATE UNIQUE INDEX partitions_there ON partitions (topic, topic_id, partition) WHERE dropped = 0",
    """CREATE TABLE entries (id INTEGER PRIMARY KEY, time_ms INTEGER NOT NULL, time_max INTEGER NOT NULL,
    body BLOB NOT NULL)""",
    """CREATE TABLE epochs (partition_id INTEGER NOT NULL, write_partition INTEGER NOT NULL, epoch INTEGER NOT NULL,
    PRIMARY KEY (partition_id, write_partition)) WITHOUT ROWID""",
    "CREATE TABLE groups (name TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID",
    """CREATE TABLE heard (group_name TEXT NOT NULL, member TEXT NOT NULL, heard_ms INTEGER NOT NULL,
    PRIMARY KEY (group_name, member)) WITHOUT ROWID""",
    """CREATE TABLE positions (group_name TEXT NOT NULL, partition_id INTEGER NOT NULL, pointer_offset INTEGER NOT NULL,
    record_index INTEGER NOT NULL, records INTEGER NOT NULL, bytes INTEGER NOT NULL,
    PRIMARY KEY (group_name, partition_id)) WITHOUT ROWID""",
)


class LogRow(NamedTuple):
    """One partition's row."""

    id: int
    begin: int
    next: int
    time_max: int

    def entry_id(self, offset: int) -> int:
        """Return the row id of the entry at `offset`."""
        return self.id << _OFFSET_BITS | offset


def partitions(connection: sqlite3.Connection, topic: str | None) -> list[ReadPartition]:
    """Return the read partitions of all topics of this name; of all names for None."""
    found = connection.execute(
        "SELECT topic, topic_id, partition FROM partitions WHERE (? IS NULL OR topic = ?) AND dropped = 0 ORDER BY id",
        (topic, topic),
    )
    return [ReadPartition(*each) for each in found]


def partition_row(connection: sqlite3.Connection, partition: ReadPartition) -> LogRow:
    """Return the partition's row, or raise NotFoundError."""
    found = connection.execute(
        """SELECT id, begin, next, time_max FROM partitions
        WHERE topic = ? AND topic_id = ? AND partition = ? AND dropped = 0""",
        (partition.topic, partition.topic_id, partition.partition),
    ).fetchone()
    if found is None:
        raise missing_partition(partition)
    name = f"the row of {_name(partition)}"
    row = LogRow(*(whole_number(each, name) for each in found))
    if not row.begin <= row.next < 1 << _OFFSET_BITS:
        raise CorruptDataError(f"{name} says {row.begin} to {row.next}, which is no range of offsets", hint=COPY_HINT)
    return row


def whole_number(value: object, name: str) -> int:
    """Return a value of the file. Raises: CorruptDataError when it is no number, or less than 0."""
    if not isinstance(value, int) or value < 0:
        raise CorruptDataError(f"{name} in the queue is damaged: {value!r:.60} is no number", hint=COPY_HINT)
    return value


def _name(partition: ReadPartition) -> str:
    return f"partition {partition.partition} of topic '{partition.topic}'"


def _check_end(connection: sqlite3.Connection, partition: ReadPartition, row: LogRow) -> None:
    """Raise CorruptDataError when entries lie behind the end: what is appended would take their offsets."""
    behind = (row.entry_id(row.next), (row.id + 1) << _OFFSET_BITS)
    if connection.execute("SELECT 1 FROM entries WHERE id >= ? AND id < ? LIMIT 1", behind).fetchone():
        text = f"{_name(partition)} ends at offset {row.next}, and has entries after it"
        raise CorruptDataError(f"the queue is damaged: {text}", hint=COPY_HINT)


def publish(connection: sqlite3.Connection, publication: Publication) -> int:
    """Append an entry and return its offset.

    Raises: EpochFencedError, NotFoundError, CorruptDataError, all before the first write.
    """
    row = partition_row(connection, publication.partition)
    _check_end(connection, publication.partition, row)
    highest = connection.execute(
        "SELECT epoch FROM epochs WHERE partition_id = ? AND write_partition = ?",
        (row.id, publication.write_partition),
    ).fetchone()
    if highest is not None:
        whole_number(highest[0], "an epoch")
    check_epoch(publication, highest[0] if highest else 0)
    if highest is None or publication.epoch > highest[0]:
        connection.execute(
            "INSERT OR REPLACE INTO epochs (partition_id, write_partition, epoch) VALUES (?, ?, ?)",
            (row.id, publication.write_partition, publication.epoch),
        )
    time_max = max(row.time_max, publication.time_ms)
    connection.execute(
        "INSERT INTO entries (id, time_ms, time_max, body) VALUES (?, ?, ?, ?)",
        (row.entry_id(row.next), publication.time_ms, time_max, publication.body),
    )
    connection.execute("UPDATE partitions SET next = next + 1, time_max = ? WHERE id = ?", (time_max, row.id))
    return row.next


def read(connection: sqlite3.Connection, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
    """Return entries from `offset` on, see `PointerReader.read`."""
    row = partition_row(connection, partition)
    found: list[Entry] = []
    size = 0
    start = row.entry_id(min(max(offset, row.begin), row.next))
    rows = connection.execute(
        "SELECT id, time_ms, body FROM entries WHERE id >= ? AND id < ? ORDER BY id", (start, row.entry_id(row.next))
    )
    for number, time_ms, value in rows:
        body = value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")  # no pointer then
        size += len(body)
        if found and size > bytes_max:
            rows.close()  # else the statement would keep its view of the file, and the log from being reset
            break
        found.append(Entry(number - row.entry_id(0), whole_number(time_ms, "the time of an entry"), body))
    return Entries(found, found[-1].offset + 1 if found else max(offset, row.next))


def span(connection: sqlite3.Connection, partition: ReadPartition) -> Span:
    """Return what the partition holds."""
    row = partition_row(connection, partition)
    _check_end(connection, partition, row)
    return Span(row.begin, row.next)


def seek_time(connection: sqlite3.Connection, partition: ReadPartition, time_ms: int) -> int:
    """Return the least offset at or after a queue time, see `PointerReader.seek_time`.

    Run it in one transaction.
    """
    row = partition_row(connection, partition)
    low, high = row.begin, row.next
    while low < high:
        middle = (low + high) // 2
        there = connection.execute(  # or the next one, should somebody have taken it out of the file
            "SELECT time_max FROM entries WHERE id >= ? AND id < ? ORDER BY id LIMIT 1",
            (row.entry_id(middle), row.entry_id(high)),
        ).fetchone()
        reached = there is None or whole_number(there[0], "the time of an entry") >= time_ms
        low, high = (low, middle) if reached else (middle + 1, high)
    # The entry that raised the greatest time may have been trimmed: then the first that is left is not it.
    found = connection.execute(
        "SELECT id FROM entries WHERE id >= ? AND id < ? AND time_ms >= ? ORDER BY id LIMIT 1",
        (row.entry_id(low), row.entry_id(row.next), time_ms),
    ).fetchone()
    return row.next if found is None else int(found[0]) - row.entry_id(0)


def ends(connection: sqlite3.Connection, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, int | None]:
    """Return the next offset of each partition, None for one that is not there."""
    found: dict[ReadPartition, int | None] = {}
    for partition in partitions:
        row = connection.execute(
            "SELECT next FROM partitions WHERE topic = ? AND topic_id = ? AND partition = ? AND dropped = 0",
            (partition.topic, partition.topic_id, partition.partition),
        ).fetchone()
        found[partition] = row and whole_number(row[0], f"the row of {_name(partition)}")
    return found


def create(connection: sqlite3.Connection, partitions: Sequence[ReadPartition], stale_publish_ms: int) -> None:
    """Make partitions; one that is there keeps its entries and gets the new `stale_publish_ms`."""
    connection.executemany(
        """INSERT INTO partitions (topic, topic_id, partition, stale_publish_ms) VALUES (?, ?, ?, ?)
        ON CONFLICT (topic, topic_id, partition) WHERE dropped = 0
        DO UPDATE SET stale_publish_ms = excluded.stale_publish_ms""",
        [(each.topic, each.topic_id, each.partition, stale_publish_ms) for each in partitions],
    )


def trim(connection: sqlite3.Connection, partition: ReadPartition, before: int) -> bool:
    """Put what lies below `before` out of sight and delete some of it; return whether there may be more."""
    row = partition_row(connection, partition)
    begin = min(max(before, row.begin), row.next)
    connection.execute("UPDATE partitions SET begin = ? WHERE id = ?", (begin, row.id))
    return _delete_entries(connection, row.entry_id(0), row.entry_id(begin))


def hide(connection: sqlite3.Connection, partitions: Sequence[ReadPartition]) -> None:
    """Put partitions out of sight, with the groups' positions in them; `delete_hidden` deletes them."""
    for partition in partitions:
        found = connection.execute(
            "SELECT id FROM partitions WHERE topic = ? AND topic_id = ? AND partition = ? AND dropped = 0",
            (partition.topic, partition.topic_id, partition.partition),
        ).fetchone()
        if found:
            connection.execute("UPDATE partitions SET dropped = 1 WHERE id = ?", found)
            connection.execute("DELETE FROM positions WHERE partition_id = ?", found)


def delete_hidden(connection: sqlite3.Connection) -> bool:
    """Delete some of what `hide` hid; return whether there may be more."""
    hidden = connection.execute("SELECT id FROM partitions WHERE dropped = 1 ORDER BY id LIMIT 1").fetchone()
    if hidden is None:
        return False
    (number,) = hidden
    if not _delete_entries(connection, number << _OFFSET_BITS, (number + 1) << _OFFSET_BITS):
        connection.execute("DELETE FROM epochs WHERE partition_id = ?", hidden)
        connection.execute("DELETE FROM partitions WHERE id = ?", hidden)
    return True


def _delete_entries(connection: sqlite3.Connection, first: int, end: int) -> bool:
    """Delete at most `DELETE_ROWS_MAX` rows from `first` up to, not with, `end`.

    Return whether there may be more.
    """
    last = connection.execute(
        "SELECT id FROM entries WHERE id >= ? AND id < ? ORDER BY id LIMIT 1 OFFSET ?",
        (first, end, DELETE_ROWS_MAX - 1),
    ).fetchone()
    connection.execute("DELETE FROM entries WHERE id >= ? AND id < ?", (first, last[0] + 1 if last else end))
    return last is not None
