"""Promises of the SQLite queue alone: several processes, `kill -9`, group commit, errors of the file."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from memq.errors import (
    ClosedError,
    CorruptDataError,
    DeniedError,
    GenerationFencedError,
    MemqError,
    QueueError,
    UnsupportedFormatError,
)
from memq.notification import Publication, Span
from memq.notification.log_reader import all_entries
from memq.notification.sqlite import log
from memq.notification.sqlite.group_commit import Writer
from memq.notification.sqlite.queue import APPLICATION_ID, SCHEMA, SqliteQueue
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.sqlite_file import SqliteFile, checksum
from tests.contract.queues import HANG_S, STALE_MS, part

SPAWN = multiprocessing.get_context("spawn")
NOBODY = 65_534
ALL = 1 << 30


def open_queue(folder: Path, busy_timeout_ms: int = 10_000) -> SqliteQueue:
    return SqliteQueue(folder / "queue.sqlite", SystemClock(), poll_interval_ms=2, busy_timeout_ms=busy_timeout_ms)


def pointer(body: bytes, write: int = 0) -> Publication:
    return Publication(part(), write, 1, 0, body)


def start(target: Callable[..., None], *args: object) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    """Start a process; it gets the other end of the pipe as its last argument."""
    parent, child = SPAWN.Pipe()
    process = SPAWN.Process(target=target, args=(*args, child))
    process.start()
    child.close()
    return process, parent


# ---- waiting -------------------------------------------------------------------------------------


def test_publish_of_this_process_wakes_waiters_without_a_read_of_the_file(tmp_path: Path) -> None:
    async def work() -> None:
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock(), poll_interval_ms=600_000)
        await queue.create([part()], STALE_MS)
        for number in range(3):
            waiting = asyncio.create_task(queue.wait({part(): number}, HANG_S * 2))
            await asyncio.sleep(0)  # it waits from its first step on
            for _ in range(3):  # behind its own look
                await queue.span(part())
            assert not waiting.done()
            await queue.publish(pointer(b"%d" % number))
            async with asyncio.timeout(HANG_S):
                await waiting
        await queue.close()

    asyncio.run(work())


def test_publish_through_another_queue_on_the_file_wakes_waiters(tmp_path: Path) -> None:
    async def work() -> None:
        queue, other = open_queue(tmp_path), open_queue(tmp_path)
        await queue.create([part()], STALE_MS)
        async with asyncio.timeout(HANG_S):
            for number in range(2):  # the second time nobody has waited for a while
                waiting = asyncio.create_task(queue.wait({part(): number}, HANG_S * 2))
                for _ in range(5):  # behind its own look
                    await queue.span(part())
                assert not waiting.done()
                await other.publish(pointer(b"x"))
                await waiting
        await queue.close()
        await other.close()

    asyncio.run(work())


# ---- long deletions ------------------------------------------------------------------------------


def test_trimmed_entries_are_hidden_before_all_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trim takes many transactions: a reader between two of them sees the partition as it will be."""
    monkeypatch.setattr(log, "DELETE_ROWS_MAX", 2)
    file = SqliteFile(tmp_path / "q.sqlite", "queue file", APPLICATION_ID, SCHEMA, QueueError)
    with closing(file.connect()) as connection:
        log.create(connection, [part()], STALE_MS)
        for number in range(6):
            log.publish(connection, Publication(part(), 0, 1, 10 * number, b"%d" % number))
        assert log.trim(connection, part(), 5), "there is more to delete"
        assert log.span(connection, part()) == Span(5, 6)
        assert [entry.offset for entry in log.read(connection, part(), 0, ALL)] == [5]
        assert log.seek_time(connection, part(), 20) == 5
        while log.trim(connection, part(), 5):
            pass
        assert connection.execute("SELECT count(*) FROM entries").fetchone() == (1,)
        assert not log.trim(connection, part(), 3), "a trim never goes back"
        assert log.span(connection, part()) == Span(5, 6)


# ---- several processes -----------------------------------------------------------------------


def publish_some(folder: Path, name: int, count: int, pipe: Connection) -> None:
    async def run() -> list[int]:
        queue = open_queue(folder)  # all at once: the first one makes the file
        await queue.create([part()], STALE_MS)
        offsets = [await queue.publish(pointer(b"%d-%d" % (name, number), write=name)) for number in range(count)]
        await queue.close()
        return offsets

    pipe.recv()
    pipe.send(asyncio.run(run()))


def test_processes_that_publish_at_once_share_one_dense_log(tmp_path: Path) -> None:
    started = [start(publish_some, tmp_path, name, 60) for name in range(4)]
    for _, pipe in started:
        pipe.send("go")
    offsets = [pipe.recv() for _, pipe in started]
    for process, _ in started:
        process.join()

    async def read() -> list[bytes]:
        queue = open_queue(tmp_path)
        found = [entry.body for entry in await queue.read(part(), 0, ALL)]
        await queue.close()
        return found

    bodies = asyncio.run(read())
    assert sorted(offset for own in offsets for offset in own) == list(range(240))
    assert [bodies[offset] for offset in offsets[2]] == [b"2-%d" % number for number in range(60)]


def test_a_publish_of_another_process_wakes_waiting_readers(tmp_path: Path) -> None:
    process, pipe = start(publish_some, tmp_path, 0, 5)

    async def scenario() -> None:
        queue = open_queue(tmp_path)
        await queue.create([part()], STALE_MS)
        waiting = asyncio.create_task(queue.wait({part(): 4}, 3_600))
        await queue.span(part())
        pipe.send("go")
        async with asyncio.timeout(HANG_S):
            await waiting
        assert (await queue.span(part())).end == 5
        await queue.close()

    asyncio.run(scenario())
    pipe.recv()
    process.join()


def publish_until_killed(folder: Path, pipe: Connection) -> None:
    async def one(queue: SqliteQueue, name: int) -> None:
        number = 0
        while True:
            body = b"%d-%d" % (name, number)
            pipe.send((await queue.publish(pointer(body)), body))
            number += 1

    async def run() -> None:
        queue = open_queue(folder)
        await queue.create([part()], STALE_MS)
        await asyncio.gather(*(one(queue, name) for name in range(5)))

    asyncio.run(run())


def test_entries_answered_before_a_kill_remain(tmp_path: Path) -> None:
    async def read() -> dict[int, bytes]:
        queue = open_queue(tmp_path)
        found = {entry.offset: entry.body for entry in await queue.read(part(), 0, ALL)}
        assert list(found) == list(range((await queue.span(part())).end))
        await queue.close()
        return found

    answered: dict[int, bytes] = {}
    for _ in range(3):
        process, pipe = start(publish_until_killed, tmp_path)
        for _ in range(100):
            offset, body = pipe.recv()
            assert offset not in answered
            answered[offset] = body
        process.kill()
        try:
            while True:  # what it said before it died
                offset, body = pipe.recv()
                answered[offset] = body
        except EOFError:
            process.join()
        found = asyncio.run(read())
        assert {offset: found.get(offset) for offset in answered} == answered


# ---- group commit ----------------------------------------------------------------------------


class Transactions:
    """Counts the transactions of a queue's writer."""

    def __init__(self) -> None:
        self.count = 0

    def attach(self, connection: sqlite3.Connection) -> None:
        connection.set_trace_callback(self._note)

    def _note(self, statement: str) -> None:
        self.count += statement == "COMMIT"


def plain_file(folder: Path) -> SqliteFile:
    return SqliteFile(folder / "x.sqlite", "test file", 5, ("CREATE TABLE t (n INTEGER UNIQUE)",), QueueError)


def insert(number: int) -> Callable[[sqlite3.Connection], int]:
    def job(connection: sqlite3.Connection) -> int:
        connection.execute("INSERT INTO t VALUES (?)", (number,))
        return number

    return job


def stored(connection: sqlite3.Connection) -> list[int]:
    return [number for (number,) in connection.execute("SELECT n FROM t ORDER BY n")]


def test_waiting_writes_are_committed_together(tmp_path: Path) -> None:
    async def scenario() -> int:
        writer = Writer(plain_file(tmp_path), EventLog(SystemClock()))
        transactions = Transactions()
        await writer.run(transactions.attach)
        before = transactions.count
        first, go = threading.Event(), threading.Event()
        loop = asyncio.get_running_loop()
        running = asyncio.Event()

        def block(connection: sqlite3.Connection) -> None:
            loop.call_soon_threadsafe(running.set)
            first.set()
            go.wait()

        blocked = asyncio.create_task(writer.run(block))
        await running.wait()
        jobs = [asyncio.create_task(writer.run(insert(number))) for number in range(100)]
        await asyncio.sleep(0)
        go.set()
        await blocked
        assert await asyncio.gather(*jobs) == list(range(100))
        assert await writer.run(stored) == list(range(100))
        await writer.close()
        return transactions.count - before

    assert asyncio.run(scenario()) == 3  # the one that blocked, the hundred, and the look


def test_a_job_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    def refuse_early(connection: sqlite3.Connection) -> None:
        raise GenerationFencedError("refused before the first write")

    def refuse_late(connection: sqlite3.Connection) -> None:
        insert(70)(connection)
        raise GenerationFencedError("refused after a write")

    def crash(connection: sqlite3.Connection) -> None:
        insert(80)(connection)
        raise ZeroDivisionError

    def overflow(connection: sqlite3.Connection) -> None:
        insert(1 << 70)(connection)

    async def scenario() -> None:
        writer = Writer(plain_file(tmp_path), EventLog(SystemClock()))
        jobs = [insert(1), refuse_early, insert(2), refuse_late, crash, insert(1), overflow, insert(3)]
        results = await asyncio.gather(*(writer.run(job) for job in jobs), return_exceptions=True)
        assert [result for result in results if isinstance(result, int)] == [1, 2, 3]
        assert [type(result).__name__ for result in results if not isinstance(result, int)] == [
            *("GenerationFencedError", "GenerationFencedError", "ZeroDivisionError", "QueueError", "OverflowError")
        ]
        assert await writer.run(stored) == [1, 2, 3]
        await writer.close()

    asyncio.run(scenario())


def test_closing_finishes_what_waits_and_refuses_what_comes(tmp_path: Path) -> None:
    async def scenario() -> list[int]:
        writer = Writer(plain_file(tmp_path), EventLog(SystemClock()))
        jobs = [asyncio.create_task(writer.run(insert(number))) for number in range(300)]
        await asyncio.sleep(0)
        jobs[5].cancel()
        await writer.close()
        results = await asyncio.gather(*jobs, return_exceptions=True)
        assert [result for result in results if isinstance(result, int)] == [
            number for number in range(300) if number != 5
        ]
        with pytest.raises(ClosedError, match="test file"):
            await writer.run(insert(999))
        connection = plain_file(tmp_path).connect()
        found = stored(connection)
        connection.close()
        return found

    assert asyncio.run(scenario()) == [number for number in range(300) if number != 5]


# ---- the file --------------------------------------------------------------------------------


def refused(folder: Path) -> MemqError:
    with pytest.raises(MemqError) as caught:
        open_queue(folder)
    assert "queue.sqlite" in str(caught.value)
    return caught.value


def make(folder: Path, entries: int = 0) -> Path:
    async def run() -> None:
        queue = open_queue(folder)
        await queue.create([part()], STALE_MS)
        await asyncio.gather(*(queue.publish(pointer(bytes(700))) for _ in range(entries)))
        await queue.close()

    asyncio.run(run())
    return folder / "queue.sqlite"


def test_a_file_that_is_no_database_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "queue.sqlite").write_bytes(b"not a database, but long enough to have a header" * 100)
    assert isinstance(refused(tmp_path), CorruptDataError)


def test_every_connection_syncs_each_commit(tmp_path: Path) -> None:
    for _ in range(2):  # the one that makes the file, and one that finds it
        connection = plain_file(tmp_path).connect()
        settings = ("journal_mode", "synchronous", "fullfsync")
        assert [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in settings] == ["wal", 2, 1]
        connection.close()


def test_a_database_of_something_else_is_not_touched(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "queue.sqlite")
    connection.execute("CREATE TABLE other (n INTEGER)")
    connection.close()
    error = refused(tmp_path)
    assert isinstance(error, CorruptDataError)
    assert "another program" in str(error)


def test_another_file_of_memq_is_something_else(tmp_path: Path) -> None:
    plain_file(tmp_path).connect().close()
    (tmp_path / "x.sqlite").rename(tmp_path / "queue.sqlite")
    error = refused(tmp_path)
    assert isinstance(error, CorruptDataError)
    assert "another file of memq" in str(error)
    assert error.hint == "name another file, or move this one away"


def test_a_newer_file_is_unsupported_and_not_corrupt(tmp_path: Path) -> None:
    connection = sqlite3.connect(make(tmp_path))
    connection.execute("PRAGMA user_version = 3")
    connection.close()
    error = refused(tmp_path)
    assert isinstance(error, UnsupportedFormatError)
    assert "layout 3, this memq knows 2" in str(error)


def test_damaged_pages_are_corrupt_when_they_are_met(tmp_path: Path) -> None:
    path = make(tmp_path, entries=500)
    with path.open("r+b") as file:
        size = path.stat().st_size
        for page in range(8, size // 4_096):
            file.seek(page * 4_096)
            file.write(b"\xff" * 4_096)

    async def scenario() -> None:
        queue = open_queue(tmp_path)
        with pytest.raises(CorruptDataError, match="malformed"):
            await queue.read(part(), 0, ALL)
        with pytest.raises(CorruptDataError):
            await queue.publish(pointer(b"x"))
        await queue.close()

    asyncio.run(scenario())


def test_a_damaged_group_is_corrupt_and_the_log_continues(tmp_path: Path) -> None:
    connection = sqlite3.connect(make(tmp_path))
    row = ("report", '{"generation": "many"}', 0)
    connection.execute("INSERT INTO groups VALUES (?, ?, ?, ?)", (*row, checksum("groups", row)))
    connection.commit()
    connection.close()

    async def scenario() -> None:
        queue = open_queue(tmp_path)
        with pytest.raises(CorruptDataError, match="'report'"):
            await queue.former.read("report")
        assert await queue.publish(pointer(b"x")) == 0
        await queue.close()

    asyncio.run(scenario())


def test_a_lock_that_is_held_too_long_may_pass(tmp_path: Path) -> None:
    holder = sqlite3.connect(make(tmp_path), isolation_level=None)

    async def scenario() -> None:
        queue = open_queue(tmp_path, busy_timeout_ms=20)
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(QueueError, match="locked"):
            await queue.publish(pointer(b"x"))
        assert (await queue.span(part())).end == 0, "readers are not in the way of a writer"
        holder.execute("ROLLBACK")
        assert await queue.publish(pointer(b"x")) == 0
        await queue.close()

    asyncio.run(scenario())
    holder.close()


def publish_over_limit(folder: Path, pipe: Connection) -> None:
    """A limit on the size of files is the full disk that every machine has."""

    async def run() -> list[str]:
        queue = open_queue(folder)
        await queue.create([part()], STALE_MS)
        await queue.publish(pointer(b"before"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        with pytest.raises(QueueError) as caught:
            await asyncio.gather(*(queue.publish(pointer(bytes(50_000))) for _ in range(20)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        end = (await queue.span(part())).end
        offset = await queue.publish(pointer(b"after"))
        await queue.close()
        return [str(caught.value), str(offset - end)]

    pipe.send(asyncio.run(run()))


def test_a_disk_that_takes_no_more_may_pass(tmp_path: Path) -> None:
    process, pipe = start(publish_over_limit, tmp_path)
    message, gap = pipe.recv()
    process.join()
    assert "disk" in message
    assert gap == "0"


def publish_over_many_limits(folder: Path, pipe: Connection) -> None:
    """Let the disk be full again and again, at another byte of the log each time, also when the file is opened."""

    def limit(size: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    async def run() -> tuple[dict[int, int], int]:
        acked: dict[int, int] = {}
        failed = number = 0
        queue = open_queue(folder)
        await queue.create([part()], STALE_MS)
        for size in range(40_000, 400_000, 9_001):
            limit(size)
            if size % 3 == 0:
                await queue.close()
                limit(resource.RLIM_INFINITY)
                queue = open_queue(folder)
                limit(size)
            for _ in range(3):
                bodies = range(number, number + 8)
                number += 8
                works = [queue.publish(pointer(b"%d" % body + bytes(5_000))) for body in bodies]
                for body, found in zip(bodies, await asyncio.gather(*works, return_exceptions=True), strict=True):
                    if isinstance(found, int):
                        acked[found] = body
                    else:
                        assert isinstance(found, QueueError), repr(found)
                        failed += 1
            limit(resource.RLIM_INFINITY)
        await queue.close()
        return acked, failed

    pipe.send(asyncio.run(run()))


def test_full_disk_fails_publishes_and_keeps_the_acked_ones(tmp_path: Path) -> None:
    process, pipe = start(publish_over_many_limits, tmp_path)
    acked, failed = pipe.recv()
    process.join()

    async def stored() -> dict[int, int]:
        queue = open_queue(tmp_path)
        pages = [page async for page in all_entries(queue, part())]
        await queue.close()
        return {entry.offset: int(entry.body.rstrip(bytes(1))) for page in pages for entry in page}

    assert asyncio.run(stored()) == acked, "what failed is not there either: SQLite rolls back"
    assert len(acked) > 50
    assert failed > 50


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can reach, which pytest's own are not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def open_without_rights(folder: Path, pipe: Connection) -> None:
    if os.getuid() == 0:
        os.setuid(NOBODY)
    with pytest.raises(MemqError) as caught:
        open_queue(folder)
    pipe.send([type(caught.value), str(caught.value), caught.value.hint])


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_without_rights_is_denied_with_a_hint(open_folder: Path, there: bool) -> None:
    if there:
        make(open_folder).chmod(0o444)
    open_folder.chmod(0o555)
    process, pipe = start(open_without_rights, open_folder)
    kind, message, hint = pipe.recv()
    process.join()
    assert kind is DeniedError
    assert "queue.sqlite" in message
    assert "give memq the right to write" in hint


def test_interrupted_drop_is_completed_by_the_next_one(tmp_path: Path) -> None:
    connection = sqlite3.connect(make(tmp_path, entries=20))
    log.hide(connection, [part()])
    connection.commit()

    async def scenario() -> None:
        queue = open_queue(tmp_path)
        await queue.create([part(1)], STALE_MS)
        await queue.drop([part(1)])
        await queue.close()

    asyncio.run(scenario())
    counts = [
        connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        for table in ("partitions", "entries", "epochs")
    ]
    connection.close()
    assert counts == [0, 0, 0]
