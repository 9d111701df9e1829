"""Groups in SQLite: each function is one request on a connection, in the caller's transaction.

A group's membership is one row of JSON, written only when its generation changed; when a member was heard is a row of
its own, since that changes with every heartbeat. Nothing is kept of a request that is refused.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

import msgspec

from memq.errors import CorruptDataError, NotFoundError
from memq.notification import GroupState, Membership
from memq.notification.groups import Group
from memq.notification.sqlite.log import partition_row, whole_number
from memq.topic import Committed, Position, ReadPartition, Totals


def join(
    connection: sqlite3.Connection,
    name: str,
    member: str,
    partitions: Sequence[ReadPartition],
    session_timeout_ms: int,
    now_ms: int,
) -> Membership:
    """Enter the group, making it when it is not there."""
    group = _load(connection, name) or Group()
    before = group.generation
    membership = group.join(member, partitions, session_timeout_ms, now_ms)
    _save(connection, name, group, before)
    return membership


def heartbeat(
    connection: sqlite3.Connection,
    name: str,
    member: str,
    generation: int,
    released: Sequence[ReadPartition],
    now_ms: int,
) -> Membership:
    """Note that a member lives."""
    group = _existing(connection, name)
    before = group.generation
    membership = group.heartbeat(member, generation, released, now_ms)
    _save(connection, name, group, before)
    if group.generation == before:
        _hear(connection, name, member, now_ms)
    return membership


def leave(connection: sqlite3.Connection, name: str, member: str, now_ms: int) -> None:
    """Take a member out."""
    group = _load(connection, name)
    if group is not None:
        before = group.generation
        group.leave(member, now_ms)
        _save(connection, name, group, before)


def commit(
    connection: sqlite3.Connection,
    name: str,
    member: str,
    generation: int,
    positions: Mapping[ReadPartition, Committed],
    now_ms: int,
) -> None:
    """Store positions, all or none."""
    group = _load(connection, name)
    if group is None:
        group, before = Group(), -1  # so that it is saved: a commit from outside makes the group
    else:
        before = group.generation
    group.check_commit(member, generation, positions, now_ms)
    rows = [
        (
            name,
            partition_row(connection, partition).id,
            committed.position.pointer_offset,
            committed.position.record_index,
            committed.totals.records,
            committed.totals.bytes,
        )
        for partition, committed in positions.items()
    ]
    _save(connection, name, group, before)
    connection.executemany(
        """INSERT OR REPLACE INTO positions (group_name, partition_id, pointer_offset, record_index, records, bytes)
        VALUES (?, ?, ?, ?, ?, ?)""",
        rows,
    )


def committed(connection: sqlite3.Connection, name: str) -> dict[ReadPartition, Committed]:
    """Return all positions of a group, by partition."""
    rows = connection.execute(
        """SELECT topic, topic_id, partition, pointer_offset, record_index, records, bytes
        FROM positions JOIN partitions ON partitions.id = partition_id
        WHERE group_name = ? AND dropped = 0 ORDER BY topic, topic_id, partition""",
        (name,),
    )
    stored: dict[ReadPartition, Committed] = {}
    for topic, topic_id, partition, *numbers in rows:
        offset, index, records, size = (whole_number(each, f"a position of group '{name}'") for each in numbers)
        position = Position(partition, offset, index)
        stored[ReadPartition(topic, topic_id, partition)] = Committed(position, Totals(records, size))
    return stored


def names(connection: sqlite3.Connection) -> Sequence[str]:
    """Return the names of all groups, sorted."""
    return [name for (name,) in connection.execute("SELECT name FROM groups ORDER BY name")]


def describe(connection: sqlite3.Connection, name: str, now_ms: int) -> GroupState:
    """Return members and positions as they are now; changes nothing."""
    group = _existing(connection, name)
    group.expire(now_ms)
    return GroupState(name, group.generation, group.held(), committed(connection, name))


def delete(connection: sqlite3.Connection, name: str, now_ms: int) -> None:
    """Delete a group without members."""
    group = _existing(connection, name)
    group.expire(now_ms)
    group.check_no_members(f"group '{name}' can't be deleted")
    connection.execute("DELETE FROM groups WHERE name = ?", (name,))
    connection.execute("DELETE FROM heard WHERE group_name = ?", (name,))
    connection.execute("DELETE FROM positions WHERE group_name = ?", (name,))


def forget(connection: sqlite3.Connection, partitions: Sequence[ReadPartition]) -> None:
    """Take partitions that are no more from all groups' members."""
    for name in names(connection):
        group = _existing(connection, name)
        before = group.generation
        group.forget(partitions)
        _save(connection, name, group, before)


def _existing(connection: sqlite3.Connection, name: str) -> Group:
    group = _load(connection, name)
    if group is None:
        raise NotFoundError(f"group '{name}' does not exist", hint="memq group list shows the groups")
    return group


def _load(connection: sqlite3.Connection, name: str) -> Group | None:
    row = connection.execute("SELECT body FROM groups WHERE name = ?", (name,)).fetchone()
    if row is None:
        return None
    try:
        group = msgspec.json.decode(row[0], type=Group)
    except (msgspec.MsgspecError, TypeError) as error:  # a number, or text with half a surrogate
        raise CorruptDataError(f"the membership of group '{name}' in the queue is damaged: {error}") from error
    for member, heard_ms in connection.execute("SELECT member, heard_ms FROM heard WHERE group_name = ?", (name,)):
        if member in group.members:
            group.members[member].heard_ms = whole_number(heard_ms, f"a heartbeat of group '{name}'")
    return group


def _save(connection: sqlite3.Connection, name: str, group: Group, generation_before: int) -> None:
    if group.generation == generation_before:
        return
    connection.execute("INSERT OR REPLACE INTO groups (name, body) VALUES (?, ?)", (name, msgspec.json.encode(group)))
    connection.execute("DELETE FROM heard WHERE group_name = ?", (name,))


def _hear(connection: sqlite3.Connection, name: str, member: str, now_ms: int) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO heard (group_name, member, heard_ms) VALUES (?, ?, ?)", (name, member, now_ms)
    )
