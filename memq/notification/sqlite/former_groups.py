"""Groups that an earlier release kept in SQLite, until they are moved to state logs.

Each function is one request on a connection, in the caller's transaction. A group's membership is one row of JSON. The
time of a member's last heartbeat is a row of its own. A refused request changes nothing.

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
from memq.notification import FormerGroup, active_members, check_position
from memq.notification.sqlite.log import LogRow, damaged, find_rows, log_rows, partition_row
from memq.runtime.sqlite_file import checksum, is_sound
from memq.topic import Committed, Position, ReadPartition, Totals, check_group

T = TypeVar("T")
NO_MEMBERS = b'{"generation":0,"members":{}}'


class Run(Protocol):
    """Runs a function on a connection of the file, in one transaction."""

    async def __call__(self, function: Callable[[sqlite3.Connection], T], /) -> T:
        """Return the result of the function."""
        ...


class FormerMember(msgspec.Struct):
    """The part of a member's row that shows whether it is active; times are monotonic ms of the machine."""

    session_timeout_ms: int
    heard_ms: int

    def is_active(self, now_ms: int) -> bool:
        """Whether its session has not ended.

        Stored times may be in the future, after a restart of the machine.
        """
        return abs(now_ms - self.heard_ms) < self.session_timeout_ms


class FormerMembership(msgspec.Struct):
    """The part of a group's row that is still read."""

    generation: int = 0
    members: dict[str, FormerMember] = {}

    def active(self, now_ms: int) -> tuple[str, ...]:
        """Return the names of the active members, sorted."""
        return tuple(sorted(name for name, member in self.members.items() if member.is_active(now_ms)))


@dataclass(slots=True)
class _Stored:
    """A group: its row of JSON, what it says, and its number of positions."""

    body: bytes
    membership: FormerMembership
    positions: int


def names(connection: sqlite3.Connection) -> Sequence[str]:
    """Return the names of all groups, sorted.

    Raises: CorruptDataError, also for positions without their group.
    """
    of_none = "SELECT group_name FROM positions WHERE group_name NOT IN (SELECT name FROM groups) LIMIT 1"
    for (name,) in connection.execute(of_none).fetchall():
        raise _missing(name)
    rows = connection.execute("SELECT name, body, positions, checksum FROM groups ORDER BY name")
    return [_checked(row) for row in rows]


def read(connection: sqlite3.Connection, name: str, now_ms: int) -> FormerGroup:
    """Return a group with its active members. Raises: CorruptDataError, also if a position is missing."""
    stored = _existing(connection, name)
    positions = _positions(connection, name, stored.positions)
    return FormerGroup(name, stored.membership.generation, stored.membership.active(now_ms), positions)


def store(connection: sqlite3.Connection, name: str, positions: Mapping[ReadPartition, Committed], now_ms: int) -> None:
    """Set positions, all or none, of a group without active members; create it if it is missing."""
    stored = _load(connection, name) or _Stored(NO_MEMBERS, FormerMembership(), 0)
    if members := stored.membership.active(now_ms):
        raise active_members("positions can't be set", len(members))
    rows = [_position_row(name, partition_row(connection, each), committed) for each, committed in positions.items()]
    has = "SELECT 1 FROM positions WHERE group_name = ? AND partition_id = ?"
    stored.positions += sum(connection.execute(has, row[:2]).fetchone() is None for row in rows)
    _save(connection, name, stored)
    connection.executemany(
        """INSERT OR REPLACE INTO positions
        (group_name, partition_id, pointer_offset, record_index, records, bytes, checksum)
        VALUES (?, ?, ?, ?, ?, ?, ?)""",
        rows,
    )


def remove(connection: sqlite3.Connection, name: str) -> None:
    """Remove a group with its positions."""
    _existing(connection, name)
    connection.execute("DELETE FROM groups WHERE name = ?", (name,))
    connection.execute("DELETE FROM heard WHERE group_name = ?", (name,))
    connection.execute("DELETE FROM positions WHERE group_name = ?", (name,))


def forget(connection: sqlite3.Connection, partitions: Sequence[ReadPartition]) -> None:
    """Remove the positions of all groups in deleted partitions.

    A damaged group keeps its rows: all its requests fail until the file is restored, with it or without it.
    """
    ids = [row.id for row in find_rows(connection, partitions) if row is not None]
    for (name,) in connection.execute("SELECT name FROM groups ORDER BY name").fetchall():
        try:
            stored = _existing(connection, name)
        except CorruptDataError:
            continue
        delete, before = "DELETE FROM positions WHERE group_name = ? AND partition_id = ?", stored.positions
        for number in ids:
            stored.positions -= connection.execute(delete, (name, number)).rowcount
        if stored.positions != before:
            _save(connection, name, stored)


def _position_row(name: str, row: LogRow, committed: Committed) -> tuple[str | int, ...]:
    position, totals = committed.position, committed.totals
    values = (name, row.id, position.pointer_offset, position.record_index, totals.records, totals.bytes)
    return (*values, checksum("positions", values, row.identity))


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


def _missing(name: str) -> CorruptDataError:
    return damaged(f"group '{name}'", "it has positions, and no membership")


def _existing(connection: sqlite3.Connection, name: str) -> _Stored:
    stored = _load(connection, name)
    if stored is None:
        raise NotFoundError(f"group '{name}' is not in the queue")
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
        membership = msgspec.json.decode(row[1], type=FormerMembership)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise damaged(f"the membership of group '{name}'", str(error)) from error
    for heard in connection.execute(
        "SELECT group_name, member, heard_ms, checksum FROM heard WHERE group_name = ?", (name,)
    ):
        if not is_sound("heard", heard):
            raise damaged(f"a heartbeat of group '{name}'")
        if heard[1] in membership.members:
            membership.members[heard[1]].heard_ms = heard[2]
    return _Stored(row[1], membership, row[2])


def _save(connection: sqlite3.Connection, name: str, stored: _Stored) -> None:
    row = (name, stored.body, stored.positions)
    connection.execute(
        "INSERT OR REPLACE INTO groups (name, body, positions, checksum) VALUES (?, ?, ?, ?)",
        (*row, checksum("groups", row)),
    )


class SqliteFormerGroups:
    """See `memq.notification.FormerGroups`. `read` and `write` run a function in a transaction.

    `now_ms`: the monotonic time of the machine. It is taken in the transaction: a wait for the lock may be long.
    """

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
        return await self._read(lambda file: read(file, group, self._now_ms()))

    async def store(self, group: str, positions: Mapping[ReadPartition, Committed]) -> None:
        """See `FormerGroups.store`."""
        check_group(group)
        kept = dict(positions)
        for partition, committed in kept.items():
            check_position(partition, committed)
        await self._write(lambda file: store(file, group, kept, self._now_ms()))

    async def remove(self, group: str) -> None:
        """See `FormerGroups.remove`. Members are ignored."""
        check_group(group)
        await self._write(lambda file: remove(file, group))
