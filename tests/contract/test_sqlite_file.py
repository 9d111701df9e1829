"""Errors of a SQLite file by their code, the end of its writer, and a wait on a file that fails."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memq.errors import ClosedError, CorruptDataError, DeniedError, MemqError, QueueError
from memq.notification.sqlite.file import SqliteFile
from memq.notification.sqlite.group_commit import Writer
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import HANG_S, STALE_MS, part

SCHEMA = ("CREATE TABLE t (n INTEGER)",)
RIGHT, ROOM = "the right to write", "make room"


@pytest.mark.parametrize(
    ("code", "folder", "kind", "hint"),
    [
        (sqlite3.SQLITE_READONLY, True, DeniedError, RIGHT),
        (sqlite3.SQLITE_READONLY, False, DeniedError, RIGHT),
        (sqlite3.SQLITE_READONLY_DIRECTORY, True, DeniedError, RIGHT),
        (sqlite3.SQLITE_PERM, True, DeniedError, RIGHT),
        (sqlite3.SQLITE_CANTOPEN, True, DeniedError, RIGHT),
        (sqlite3.SQLITE_CANTOPEN, False, QueueError, "check the notification queue"),
        (sqlite3.SQLITE_FULL, True, QueueError, ROOM),
        (sqlite3.SQLITE_IOERR_WRITE, True, QueueError, "check the notification queue"),
        (sqlite3.SQLITE_CORRUPT, True, CorruptDataError, "copy"),
        (sqlite3.SQLITE_NOTADB, True, CorruptDataError, "copy"),
        (None, True, QueueError, "check the notification queue"),
    ],
)
def test_an_error_of_sqlite_is_the_one_of_its_code(
    code: int | None, folder: bool, kind: type[MemqError], hint: str, tmp_path: Path
) -> None:
    file = SqliteFile(tmp_path / ("." if folder else "none") / "x", "test file", 5, SCHEMA, QueueError)
    error = sqlite3.OperationalError("It Failed")
    if code is not None:
        error.sqlite_errorcode = code
    found = file.error(error)
    assert type(found) is kind
    assert str(found) == f"test file '{file.path}': it failed"
    assert hint in found.hint


class NoMemoryAtCommit(sqlite3.Connection):
    """A connection whose commit fails in Python, not in SQLite, while `armed`."""

    armed = False

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        if sql == "COMMIT" and self.armed:
            raise MemoryError("no memory")
        return super().execute(sql, *parameters)


def test_the_end_of_a_writer_fails_the_jobs_that_run_and_those_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=NoMemoryAtCommit))
    entered, gate = threading.Event(), threading.Event()

    def blocked(connection: sqlite3.Connection) -> None:
        assert isinstance(connection, NoMemoryAtCommit)
        connection.armed = True
        entered.set()
        gate.wait()

    async def scenario() -> None:
        file = SqliteFile(tmp_path / "x", "test file", 5, SCHEMA, QueueError)
        writer = Writer(file, EventLog(SystemClock()))
        first = asyncio.create_task(writer.run(blocked))
        await asyncio.to_thread(entered.wait)
        second = asyncio.create_task(writer.run(lambda connection: None))
        await asyncio.sleep(0)  # it waits for the next transaction now
        gate.set()
        with pytest.raises(ClosedError, match="the writer of test file died: no memory"):
            await second
        await asyncio.wait([first])
        with pytest.raises(ClosedError):
            await writer.run(lambda connection: None)
        await writer.close()

    async def in_time() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(in_time())


def test_a_wait_ends_with_the_error_of_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"

    async def scenario() -> None:
        queue = SqliteQueue(path, ManualClock(), poll_interval_ms=2)
        await queue.create([part()], STALE_MS)
        waiting = asyncio.create_task(queue.wait({part(): 0}, HANG_S * 2))
        await asyncio.sleep(0)  # it waits from its first step on
        with closing(sqlite3.connect(path)) as other:
            other.execute("DROP TABLE partitions")
            other.commit()
        with pytest.raises(QueueError, match="no such table: partitions"):
            await waiting
        await queue.close()

    async def in_time() -> None:
        async with asyncio.timeout(30):
            await scenario()

    asyncio.run(in_time())
