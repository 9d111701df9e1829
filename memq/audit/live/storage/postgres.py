"""The live audit's state in PostgreSQL, shared by several auditors and their readers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import psycopg

from memq.audit.live.storage.database import LAYOUT, Answer, Execute, schema
from memq.errors import AuditStateError, DeniedError, UnsupportedFormatError
from memq.runtime.threads import ThreadPool

CONNECT_TIMEOUT_S = 10
_LOCK = 0x6D717561  # held while the tables are created


class PostgresDatabase:
    """A database at a URL `postgresql://USER@HOST/NAME`, or what else libpq takes. See `Database`.

    The tables are in the first schema of the search path, and are created if they do not exist.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._pool = ThreadPool("audit", 1)
        self._connection: psycopg.Connection[Any] | None = None

    async def run(self, work: Callable[[Execute], Answer]) -> Answer:
        """See `Database.run`."""
        return await self._pool.run(self._run, work)

    async def close(self) -> None:
        """See `Database.close`."""
        await self._pool.close()
        self._disconnect()

    def _run(self, work: Callable[[Execute], Answer]) -> Answer:
        try:
            connection = self._connect()
            with connection.transaction():
                return work(_executing(connection))
        except psycopg.errors.InsufficientPrivilege as error:
            raise DeniedError(f"audit state: {_text(error)}", hint="grant the user its tables") from error
        except psycopg.Error as error:
            if self._connection is not None and self._connection.broken:
                self._disconnect()
            raise AuditStateError(f"audit state in PostgreSQL: {_text(error)}") from error

    def _connect(self) -> psycopg.Connection[Any]:
        if self._connection is None:
            self._connection = psycopg.connect(self._url, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S)
            try:
                with self._connection.transaction():
                    _make(_executing(self._connection))
            except BaseException:
                self._disconnect()
                raise
        return self._connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _make(execute: Execute) -> None:
    """Create the tables, unless another auditor was faster."""
    execute("SELECT pg_advisory_xact_lock(?)", (_LOCK,))
    execute("CREATE TABLE IF NOT EXISTS audit_layout (number BIGINT NOT NULL)", ())
    found = execute("SELECT number FROM audit_layout", ())
    if not found:
        for statement in schema("BIGINT", "BYTEA"):
            execute(statement, ())
        execute("INSERT INTO audit_layout VALUES (?)", (LAYOUT,))
    elif found[0][0] != LAYOUT:
        raise UnsupportedFormatError(f"audit state has layout {found[0][0]}, this memq knows {LAYOUT}")


def _executing(connection: psycopg.Connection[Any]) -> Execute:
    def execute(statement: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        cursor = connection.execute(statement.replace("?", "%s").encode(), values)
        return cursor.fetchall() if cursor.description is not None else []

    return execute


def _text(error: psycopg.Error) -> str:
    return "; ".join(line.strip() for line in str(error).strip().lower().split("\n"))
