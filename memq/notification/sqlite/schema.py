"""The tables of the queue's file, and the way from its earlier layout to them."""

from __future__ import annotations

import sqlite3

from memq.notification.sqlite.rows import add_checksums

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
    """Give each row a checksum. Rows of partitions that are not there are left out: nothing has read them."""
    used = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'partitions'").fetchall()
    add_checksums(connection, SCHEMA, _COPIES)
    connection.execute("DELETE FROM sqlite_sequence")
    connection.executemany("INSERT INTO sqlite_sequence (name, seq) VALUES ('partitions', ?)", used)


UPGRADES = (_upgrade_1,)
