"""Groups in SQLite: each function is one request on a connection, in the caller's transaction.

A group's membership is one row of JSON, written only after a commit that has a number, or a change of its generation
or of its number of positions. The time of a member's last heartbeat is a row of its own, since it changes often. A
refused request changes nothing.

**Damage.** Each row has a checksum (`memq.runtime.sqlite_file`). The checksum of a position continues the one of
its partition's name and id. A group counts its positions: otherwise a missing one would mean "nothing committed", and
its consumers would start as new ones. Positions without their group are damage, too.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from memq.errors import CorruptDataError, NotFoundError
from memq.notification import FormerGroup, GroupState, Membership
from memq.notification.groups import OUTSIDE_GENERATION, Group
from memq.notification.sqlite.log import LogRow, damaged, find_rows, log_rows, partition_row
from memq.runtime.sqlite_file import checksum, is_sound
from memq.topic import Committed, Position, ReadPartition, Totals, check_group

T = TypeVar("T")


class Run(Protocol):
    """Runs a function on a connection of the file, in one transaction."""

    async def __call__(self, function: Callable[[sqlite3.Connection], T], /) -> T:
        """Return the result of the function."""
        ...


@dataclass(slots=True)
class _Stored:
    """A group and its number of positions; `was`: generation and number in the file, (-1, 0) if new."""

    group: Group
    positions: int
    was: tuple[int, int]


def join(
    connection: sqlite3.Connection,
    name: str,
    member: str,
    partitions: Sequence[ReadPartition],
    session_timeout_ms: int,
    now_ms: int,
) -> Membership:
    """Join the group; create it if it does not exist."""
    stored = _load(connection, name) or _new()
    membership = stored.group.join(member, partitions, session_timeout_ms, now_ms)
    _save(connection, name, stored)
    return membership


def heartbeat(
    connection: sqlite3.Connection,
    name: str,
    member: str,
    generation: int,
    released: Sequence[ReadPartition],
    now_ms: int,
) -> Membership:
    """Note the heartbeat of a member."""
    stored = _existing(connection, name)
    membership = stored.group.heartbeat(member, generation, released, now_ms)
    _save(connection, name, stored)
    _note_heartbeat(connection, name, member, now_ms)
    return membership


def leave(connection: sqlite3.Connection, name: str, member: str, now_ms: int) -> None:
    """Remove a member."""
    stored = _load(connection, name)
    if stored is not None:
        stored.group.leave(member, now_ms)
        _save(connection, name, stored)


def commit(
    connection: sqlite3.Connection,
    name: str,
    member: str,
    generation: int,
    positions: Mapping[ReadPartition, Committed],
    now_ms: int,
    number: int = 0,
) -> None:
    """Store positions, all or none. A commit from outside creates a missing group."""
    stored = _load(connection, name) or _new()
    stored.group.check_commit(member, generation, positions, now_ms, number)
    rows = [_position_row(name, partition_row(connection, each), committed) for each, committed in positions.items()]
    has = "SELECT 1 FROM positions WHERE group_name = ? AND partition_id = ?"
    stored.positions += sum(connection.execute(has, row[:2]).fetchone() is None for row in rows)
    _save(connection, name, stored, numbered=number > 0)
    connection.executemany(
        """INSERT OR REPLACE INTO positions
        (group_name, partition_id, pointer_offset, record_index, records, bytes, checksum)
        VALUES (?, ?, ?, ?, ?, ?, ?)""",
        rows,
    )


def _position_row(name: str, row: LogRow, committed: Committed) -> tuple[str | int, ...]:
    position, totals = committed.position, committed.totals
    values = (name, row.id, position.pointer_offset, position.record_index, totals.records, totals.bytes)
    return (*values, checksum("positions", values, row.identity))


def committed(connection: sqlite3.Connection, name: str) -> dict[ReadPartition, Committed]:
    """Return all positions of a group, by partition. Raises: CorruptDataError, also if one is missing."""
    stored = _load(connection, name)
    return {} if stored is None else _positions(connection, name, stored.positions)


def _positions(connection: sqlite3.Connection, name: str, count: int) -> dict[ReadPartition, Committed]:
    found = connection.execute(
        """SELECT group_name, partition_id, pointer_offset, record_index, records, bytes, checksum
        FROM positions WHERE group_name = ?""",
        (name,),
    ).fetchall()
    if len(found) != count:
        raise damaged(f"group '{name}'", f"it has {len(found)} positions, and had {count}")
    logs = log_rows(connection, [number for _, number, *_ in found])
    positions: dict[ReadPartition, Committed] = {}
    for position in found:
        _, number, offset, index, records, size, _ = position
        log = logs.get(number)
        if log is None or not is_sound("positions", position, log.identity):
            raise damaged(f"a position of group '{name}'")
        at = Position(log.partition, offset, index)
        positions[ReadPartition(log.topic, log.topic_id, log.partition)] = Committed(at, Totals(records, size))
    return {partition: positions[partition] for partition in sorted(positions)}


def names(connection: sqlite3.Connection) -> Sequence[str]:
    """Return the names of all groups, sorted.

    Raises: CorruptDataError, also for positions without their group.
    """
    of_none = "SELECT group_name FROM positions WHERE group_name NOT IN (SELECT name FROM groups) LIMIT 1"
    for (name,) in connection.execute(of_none).fetchall():
        raise _missing(name)
    rows = connection.execute("SELECT name, body, positions, checksum FROM groups ORDER BY name")
    return [_checked(row) for row in rows]


def describe(connection: sqlite3.Connection, name: str, now_ms: int) -> GroupState:
    """Return the current members and positions; write nothing."""
    stored = _existing(connection, name)
    stored.group.expire(now_ms)
    positions = _positions(connection, name, stored.positions)
    return GroupState(name, stored.group.generation, stored.group.held(), positions)


def delete(connection: sqlite3.Connection, name: str, now_ms: int) -> None:
    """Delete a group without members."""
    group = _existing(connection, name).group
    group.expire(now_ms)
    group.check_no_members(f"group '{name}' can't be deleted")
    _remove(connection, name)


def _remove(connection: sqlite3.Connection, name: str) -> None:
    connection.execute("DELETE FROM groups WHERE name = ?", (name,))
    connection.execute("DELETE FROM heard WHERE group_name = ?", (name,))
    connection.execute("DELETE FROM positions WHERE group_name = ?", (name,))


def forget(connection: sqlite3.Connection, partitions: Sequence[ReadPartition]) -> None:
    """Remove deleted partitions from all members of all groups, with the positions in them.

    A damaged group keeps its rows: all its requests fail until the file is restored, with it or without it.
    """
    ids = [row.id for row in find_rows(connection, partitions) if row is not None]
    for (name,) in connection.execute("SELECT name FROM groups ORDER BY name").fetchall():
        try:
            stored = _existing(connection, name)
        except CorruptDataError:
            continue
        stored.group.forget(partitions)
        for number in ids:
            gone = connection.execute("DELETE FROM positions WHERE group_name = ? AND partition_id = ?", (name, number))
            stored.positions -= gone.rowcount
        _save(connection, name, stored)


def _missing(name: str) -> CorruptDataError:
    return damaged(f"group '{name}'", "it has positions, and no membership")


def _new() -> _Stored:
    return _Stored(Group(), 0, (-1, 0))


def _existing(connection: sqlite3.Connection, name: str) -> _Stored:
    stored = _load(connection, name)
    if stored is None:
        raise NotFoundError(f"group '{name}' does not exist", hint="memq group list shows the groups")
    return stored


def _checked(row: tuple[Any, ...]) -> str:
    """Return the name in a row of `groups`. Raises: CorruptDataError."""
    if not is_sound("groups", row):
        raise damaged(f"the membership of group '{row[0]}'")
    return str(row[0])


def _load(connection: sqlite3.Connection, name: str) -> _Stored | None:
    row = connection.execute("SELECT name, body, positions, checksum FROM groups WHERE name = ?", (name,)).fetchone()
    if row is None:
        if connection.execute("SELECT 1 FROM positions WHERE group_name = ? LIMIT 1", (name,)).fetchone():
            raise _missing(name)
        return None
    _checked(row)
    try:
        group = msgspec.json.decode(row[1], type=Group)
    except msgspec.MsgspecError as error:
        raise damaged(f"the membership of group '{name}'", str(error)) from error
    for heard in connection.execute(
        "SELECT group_name, member, heard_ms, checksum FROM heard WHERE group_name = ?", (name,)
    ):
        if not is_sound("heard", heard):
            raise damaged(f"a heartbeat of group '{name}'")
        if heard[1] in group.members:
            group.members[heard[1]].heard_ms = heard[2]
    return _Stored(group, row[2], (group.generation, row[2]))


def _save(connection: sqlite3.Connection, name: str, stored: _Stored, *, numbered: bool = False) -> None:
    """Write the group if it has changed, or a commit has a number."""
    if (stored.group.generation, stored.positions) == stored.was and not numbered:
        return
    row = (name, msgspec.json.encode(stored.group), stored.positions)
    connection.execute(
        "INSERT OR REPLACE INTO groups (name, body, positions, checksum) VALUES (?, ?, ?, ?)",
        (*row, checksum("groups", row)),
    )
    connection.execute("DELETE FROM heard WHERE group_name = ?", (name,))


def _note_heartbeat(connection: sqlite3.Connection, name: str, member: str, now_ms: int) -> None:
    row = (name, member, now_ms)
    connection.execute(
        "INSERT OR REPLACE INTO heard (group_name, member, heard_ms, checksum) VALUES (?, ?, ?, ?)",
        (*row, checksum("heard", row)),
    )


class SqliteFormerGroups:
    """See `memq.notification.FormerGroups`. `read` and `write` run a function in a transaction."""

    def __init__(self, read: Run, write: Run, now_ms: Callable[[], int]) -> None:
        self._read = read
        self._write = write
        self._now_ms = now_ms

    async def names(self) -> Sequence[str]:
        """See `FormerGroups.names`."""
        return await self._read(names)

    async def read(self, group: str) -> FormerGroup:
        """See `FormerGroups.read`."""
        check_group(group)
        found = await self._read(lambda file: describe(file, group, self._now_ms()))
        return FormerGroup(group, found.generation, tuple(found.members), found.committed)

    async def store(self, group: str, positions: Mapping[ReadPartition, Committed]) -> None:
        """See `FormerGroups.store`."""
        check_group(group)
        kept = dict(positions)
        await self._write(lambda file: commit(file, group, "", OUTSIDE_GENERATION, kept, self._now_ms()))

    async def remove(self, group: str) -> None:
        """See `FormerGroups.remove`. Members are ignored."""
        check_group(group)

        def remove(file: sqlite3.Connection) -> None:
            _existing(file, group)
            _remove(file, group)

        await self._write(remove)
