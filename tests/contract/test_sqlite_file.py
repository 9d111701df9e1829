"""A SQLite file: settings, errors by their code, copies; its writer, and a wait on a file that fails."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memq.errors import ClosedError, CorruptDataError, DeniedError, InvalidRequestError, MemqError, QueueError
from memq.notification.sqlite.group_commit import Writer
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.sqlite_file import SqliteFile, copy_database, write_log_into
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import HANG_S, STALE_MS, part

SCHEMA = ("CREATE TABLE t (n INTEGER)",)
RIGHT, ROOM = "the right to write", "make room"


def test_a_database_in_memory_makes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with closing(SqliteFile(Path(":memory:"), "it", 5, SCHEMA, QueueError).connect()):
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("code", "folder", "kind", "hint"),
    [
        (sqlite3.SQLITE_READONLY, True, DeniedError, RIGHT),
        (sqlite3.SQLITE_READONLY, False, DeniedError, RIGHT),
        (sqlite3.SQLITE_READONLY_DIRECTORY, True, DeniedError, RIGHT),
        (sqlite3.SQLITE_PERM, True, DeniedError, RIGHT),
        (sqlite3.SQLITE_CANTOPEN, True, DeniedError, RIGHT),
        (sqlite3.SQLITE_CANTOPEN, False, QueueError, "none' does not exist: make it"),
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


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    """The hint asked for a right to write that the user has."""
    with pytest.raises(InvalidRequestError, match="unable to open database file") as caught:
        SqliteFile(tmp_path, "test file", 5, SCHEMA, QueueError).connect()
    assert caught.value.hint == f"'{tmp_path}' is a folder: name a file"


class WeakDefaults(sqlite3.Connection):
    """A connection of a build of SQLite that syncs less by default."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.execute("PRAGMA synchronous = OFF")


def test_a_connection_syncs_and_waits_as_it_should_and_commits_each_statement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=WeakDefaults))
    file = SqliteFile(tmp_path / "x", "test file", 5, SCHEMA, QueueError, busy_timeout_ms=70)
    with closing(file.connect()) as one, closing(file.connect()) as other:
        for connection in (one, other):
            settings = ("synchronous", "busy_timeout")
            assert [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in settings] == [2, 70]
        one.execute("INSERT INTO t VALUES (1)")
        assert other.execute("SELECT n FROM t").fetchall() == [(1,)]


def test_a_file_is_complete_without_its_log_only_when_no_program_reads_it(tmp_path: Path) -> None:
    path, copy, alone = tmp_path / "x", tmp_path / "copy", tmp_path / "alone"
    file = SqliteFile(path, "test file", 5, SCHEMA, QueueError)

    def rows(path: Path) -> list[tuple[int]]:
        with closing(sqlite3.connect(path)) as connection:
            return connection.execute("SELECT n FROM t").fetchall()

    with closing(file.connect()) as writer, closing(file.connect()) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT n FROM t").fetchall()
        writer.execute("INSERT INTO t VALUES (1)")
        with pytest.raises(QueueError, match="in use by another program") as caught:
            write_log_into(path, "test file", QueueError)
        assert "end that program" in caught.value.hint
        copy_database(path, copy, "test file", QueueError)
        assert rows(copy) == [(1,)], "with the row that is in the log alone"
        reader.execute("COMMIT")
        write_log_into(path, "test file", QueueError)
        alone.write_bytes(path.read_bytes())
        assert rows(alone) == [(1,)]


# ---- the writer ----------------------------------------------------------------------------------


def insert(number: int) -> Callable[[sqlite3.Connection], None]:
    def job(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO t VALUES (?)", (number,))

    return job


def stored(connection: sqlite3.Connection) -> list[int]:
    return [number for (number,) in connection.execute("SELECT n FROM t ORDER BY n")]


def with_writer(folder: Path, scenario: Callable[[Writer], Awaitable[None]]) -> None:
    async def in_time() -> None:
        file = SqliteFile(folder / "x", "test file", 5, SCHEMA, QueueError)
        async with asyncio.timeout(30):
            await scenario(Writer(file, EventLog(SystemClock())))

    asyncio.run(in_time())


def test_an_error_of_the_file_fails_all_jobs_of_its_transaction_and_no_later_one(tmp_path: Path) -> None:
    def damaged(connection: sqlite3.Connection) -> None:
        raise sqlite3.DatabaseError("database disk image is malformed")

    def missing(connection: sqlite3.Connection) -> None:
        connection.execute("SELECT n FROM missing")

    async def scenario(writer: Writer) -> None:
        for job, text in ((damaged, "malformed"), (missing, "no such table")):
            jobs = [writer.run(each) for each in (insert(1), job, insert(2))]
            for result in await asyncio.gather(*jobs, return_exceptions=True):
                assert isinstance(result, QueueError)
                assert text in str(result)
            assert await writer.run(stored) == []
        await writer.close()

    with_writer(tmp_path, scenario)


def test_a_caller_that_is_cancelled_while_its_job_runs_harms_no_other(tmp_path: Path) -> None:
    async def scenario(writer: Writer) -> None:
        entered, gate = threading.Event(), threading.Event()

        def blocked(connection: sqlite3.Connection) -> None:
            insert(1)(connection)
            entered.set()
            gate.wait()

        first, second = asyncio.create_task(writer.run(blocked)), asyncio.create_task(writer.run(insert(2)))
        await asyncio.to_thread(entered.wait)
        first.cancel()
        await asyncio.wait([first])
        gate.set()
        await second
        assert await writer.run(stored) == [1, 2]
        await writer.close()

    with_writer(tmp_path, scenario)


@pytest.mark.parametrize("used", [False, True])
def test_a_closed_writer_leaves_no_task_and_may_be_closed_twice(used: bool, tmp_path: Path) -> None:
    async def scenario(writer: Writer) -> None:
        if used:
            await writer.run(insert(1))
        await writer.close()
        await writer.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with_writer(tmp_path, scenario)


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


@pytest.mark.parametrize("committing", [False, True])
def test_a_close_after_the_cancellation_of_all_tasks_ends(tmp_path: Path, committing: bool) -> None:
    """`asyncio.run` cancels all tasks after Ctrl-C, also the writer's own one. Then the program closes its parts."""

    async def scenario() -> None:
        writer = Writer(SqliteFile(tmp_path / "x", "test file", 5, SCHEMA, QueueError), EventLog(SystemClock()))
        await writer.run(lambda connection: None)
        job = asyncio.create_task(writer.run(lambda connection: 7))
        await asyncio.sleep(0)
        if committing:
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {asyncio.current_task(), job}:
            task.cancel()
        async with asyncio.timeout(10):
            await writer.close()
        (result,) = await asyncio.gather(job, return_exceptions=True)
        assert result == 7 or isinstance(result, ClosedError)

    asyncio.run(scenario())


def test_a_wait_ends_with_the_error_of_a_file_that_can_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"

    async def scenario() -> None:
        queue = SqliteQueue(path, ManualClock(), poll_interval_ms=2)
        await queue.create([part()], STALE_MS)
        waiting = asyncio.create_task(queue.wait({part(): 0}, HANG_S * 2))
        await asyncio.sleep(0)  # it waits from its first step on
        for _ in range(5):  # behind its own read of the end
            await queue.span(part())
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
