"""Port to an SQL database for the live audit's state, and its SQLite implementation.

Statements are plain SQL that SQLite and PostgreSQL both accept, with `?` for values. Each piece of work is one
transaction: reports, verdicts and the position up to which reports were read are stored together or not at all.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from memq.errors import AuditStateError
from memq.runtime.sqlite_file import SqliteFile
from memq.runtime.threads import ThreadPool

Answer = TypeVar("Answer")
Execute = Callable[[str, Sequence[object]], list[tuple[Any, ...]]]
APPLICATION_ID = 0x6D717561  # "mqua"
LAYOUT = 1
_INTEGER, _BYTES = "BIGINT", "BLOB"
SCHEMA = """
CREATE TABLE audit_version (number {int} NOT NULL);
INSERT INTO audit_version VALUES (0);
CREATE TABLE homes (
    home {int} PRIMARY KEY, owner TEXT NOT NULL, position TEXT NOT NULL, clients {bytes} NOT NULL);
CREATE TABLE audits (
    topic_id TEXT, part {int}, topic TEXT NOT NULL, home {int} NOT NULL, books {bytes} NOT NULL, facts {bytes} NOT NULL,
    version {int} NOT NULL, PRIMARY KEY (topic_id, part));
CREATE INDEX audits_by_topic ON audits (topic);
CREATE TABLE minutes (
    topic_id TEXT, part {int}, minute {int}, topic TEXT NOT NULL, counts {bytes} NOT NULL,
    version {int} NOT NULL, PRIMARY KEY (topic_id, part, minute));
CREATE INDEX minutes_by_time ON minutes (minute);
CREATE INDEX minutes_by_version ON minutes (version);
CREATE TABLE findings (
    id TEXT PRIMARY KEY, topic_id TEXT NOT NULL, topic TEXT NOT NULL, minute {int} NOT NULL, grave {int} NOT NULL,
    body {bytes} NOT NULL, resolved_ms {int} NOT NULL, acknowledged_by TEXT NOT NULL, acknowledged_ms {int} NOT NULL,
    version {int} NOT NULL);
CREATE INDEX findings_by_version ON findings (version)
"""


def schema(integer: str, data: str) -> tuple[str, ...]:
    """Return the statements that create the tables, with the database's types for integers and bytes."""
    return tuple(SCHEMA.format(int=integer, bytes=data).split(";"))


class Database(Protocol):
    """Runs work on tables.

    Raises: AuditStateError (may pass), DeniedError, CorruptDataError, UnsupportedFormatError.
    """

    async def run(self, work: Callable[[Execute], Answer]) -> Answer:
        """Run `work` in one transaction, in a thread, and return its result.

        An error of it undoes the transaction.
        """
        ...

    async def close(self) -> None:
        """Close the connection."""
        ...


class SqliteDatabase:
    """A SQLite file, created if it does not exist. See `Database`."""

    def __init__(self, path: Path) -> None:
        self._file = SqliteFile(path, "audit state", APPLICATION_ID, schema(_INTEGER, _BYTES), AuditStateError)
        self._pool = ThreadPool("audit", 1)
        self._connection: sqlite3.Connection | None = None

    async def run(self, work: Callable[[Execute], Answer]) -> Answer:
        """See `Database.run`."""
        return await self._pool.run(self._run, work)

    async def close(self) -> None:
        """See `Database.close`."""
        await self._pool.close()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _run(self, work: Callable[[Execute], Answer]) -> Answer:
        if self._connection is None:
            self._connection = self._file.connect()
        connection = self._connection

        def execute(statement: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
            return connection.execute(statement, values).fetchall()

        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                answer = work(execute)
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise self._file.error(error) from error
        return answer
