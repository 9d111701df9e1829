"""Connections of a SQLite queue's readers, its polls for other writers, and rows of its groups."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memq.errors import ClosedError, InvalidRequestError, NotFoundError, QueueError
from memq.notification import Span
from memq.notification.sqlite import former_groups, log
from memq.notification.sqlite.queue import APPLICATION_ID, SCHEMA, SqliteQueue
from memq.runtime.clock import SystemClock
from memq.runtime.sqlite_file import SqliteFile, write_log_into
from tests.contract.queues import HANG_S, STALE_MS, committed, part
from tests.contract.sqlite_files import put_member

POLL = "PRAGMA data_version"


class CountedConnection(sqlite3.Connection):
    """Counts the connections and the polls; the next commit or poll fails while `fails` has it."""

    made = 0
    polls = 0
    fails = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        CountedConnection.made += 1
        super().__init__(*args, **options)

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        CountedConnection.polls += sql == POLL
        if sql == CountedConnection.fails:
            CountedConnection.fails = ""
            raise sqlite3.OperationalError("disk I/O error") if sql == "COMMIT" else MemoryError("no memory")
        return super().execute(sql, *parameters)


@pytest.fixture(name="counted")
def counted_connections(monkeypatch: pytest.MonkeyPatch) -> type[CountedConnection]:
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=CountedConnection))
    monkeypatch.setattr(CountedConnection, "made", 0)
    monkeypatch.setattr(CountedConnection, "polls", 0)
    return CountedConnection


def test_reads_that_find_nothing_keep_their_connection(tmp_path: Path, counted: type[CountedConnection]) -> None:
    async def work() -> None:
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock(), readers_max=1)
        for _ in range(2):
            with pytest.raises(NotFoundError):
                await queue.span(part())
        made = counted.made
        for _ in range(5):
            with pytest.raises(NotFoundError):
                await queue.span(part())
        assert counted.made == made
        counted.fails = "COMMIT"
        with pytest.raises(QueueError, match="disk i/o error"):
            await queue.span(part())
        with pytest.raises(NotFoundError):
            await queue.span(part())
        await queue.close()

    asyncio.run(work())


def test_reads_keep_their_connection_and_one_that_failed_holds_no_lock(
    tmp_path: Path, counted: type[CountedConnection]
) -> None:
    async def work() -> None:
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock(), readers_max=1)
        await queue.create([part()], STALE_MS)
        await queue.span(part())
        made = counted.made
        for _ in range(5):
            assert await queue.span(part()) == Span(0, 0)
        assert counted.made == made
        counted.fails = "COMMIT"
        with pytest.raises(QueueError) as caught:
            await queue.span(part())
        write_log_into(tmp_path / "queue.sqlite", "queue file", QueueError)  # raises while a connection reads
        assert "disk i/o error" in str(caught.value)
        await queue.close()

    asyncio.run(work())


@pytest.mark.parametrize("failing", [False, True])
def test_a_closed_queue_leaves_a_complete_file_no_thread_and_no_task(
    failing: bool, tmp_path: Path, counted: type[CountedConnection]
) -> None:
    async def work() -> None:
        before = threading.enumerate()
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock(), poll_interval_ms=1)
        await queue.create([part()], STALE_MS)
        if failing:
            counted.fails = POLL
            with pytest.raises(QueueError, match="is not followed any more: no memory"):
                await queue.wait({part(): 0}, HANG_S * 2)
        await queue.wait({part(): 0}, 0.02)
        await queue.close()
        assert os.listdir(tmp_path) == ["queue.sqlite"], "without SQLite's log"
        assert not [each.name for each in threading.enumerate() if each not in before]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(work())


def test_the_file_is_polled_once_in_each_interval_of_a_wait(tmp_path: Path, counted: type[CountedConnection]) -> None:
    async def work() -> None:
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock(), poll_interval_ms=600_000)
        await queue.create([part()], STALE_MS)
        await queue.wait({part(): 0}, 0.05)
        assert counted.polls == 1
        await queue.close()

    asyncio.run(work())


def test_the_file_is_not_polled_after_a_wait(tmp_path: Path, counted: type[CountedConnection]) -> None:
    async def work() -> None:
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock(), poll_interval_ms=1)
        await queue.create([part()], STALE_MS)
        await queue.wait({part(): 0}, 0.02)
        polls = counted.polls
        for _ in range(200):  # many intervals
            await queue.span(part())
        assert counted.polls <= polls + 1
        await queue.close()

    asyncio.run(work())


@pytest.mark.parametrize("poll_interval_ms", [2, 600_000])
def test_a_drop_by_this_queue_or_another_one_wakes_a_wait(poll_interval_ms: int, tmp_path: Path) -> None:
    async def work() -> None:
        path = tmp_path / "queue.sqlite"
        queue = SqliteQueue(path, SystemClock(), poll_interval_ms=poll_interval_ms, readers_max=1)
        other = SqliteQueue(path, SystemClock())
        await queue.create([part()], STALE_MS)
        waiting = asyncio.create_task(queue.wait({part(): 0}, HANG_S * 2))
        await asyncio.sleep(0)  # it waits from its first step on
        for _ in range(5):  # the one reader thread has read its end before
            await queue.span(part())
        assert not waiting.done()
        await (queue if poll_interval_ms > HANG_S else other).drop([part()])
        async with asyncio.timeout(HANG_S):
            await waiting
        await queue.close()
        await other.close()

    asyncio.run(work())


def test_a_close_ends_a_wait_that_has_read_the_end_of_its_log(tmp_path: Path) -> None:
    async def work() -> None:
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock(), readers_max=1)
        await queue.create([part()], STALE_MS)
        waiting = asyncio.create_task(queue.wait({part(): 0}, HANG_S * 2))
        await asyncio.sleep(0)  # it waits from its first step on
        for _ in range(5):  # the one reader thread has read its end before
            await queue.span(part())
        await queue.close()
        async with asyncio.timeout(HANG_S):
            with pytest.raises(ClosedError, match="the queue is closed"):
                await waiting

    asyncio.run(work())


def test_a_check_needs_the_write_lock(tmp_path: Path) -> None:
    async def work() -> None:
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock(), busy_timeout_ms=20)
        with closing(sqlite3.connect(tmp_path / "queue.sqlite")) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(QueueError, match="locked"):
                await queue.check()
        await queue.check()
        await queue.close()

    asyncio.run(work())


def test_a_wait_without_commits_reads_the_ends_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    ends = log.ends

    def counted(*parts: Any) -> Any:
        reads.append(1)
        return ends(*parts)

    monkeypatch.setattr(log, "ends", counted)

    async def work() -> None:
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock(), poll_interval_ms=1)
        await queue.create([part()], STALE_MS)
        await queue.wait({part(): 0}, 0.1)
        assert len(reads) <= 2
        await queue.close()

    asyncio.run(work())


@pytest.mark.parametrize(("now_ms", "members"), [(12_999, ("m",)), (13_000, ()), (-6_999, ("m",)), (-7_000, ())])
def test_a_member_is_active_for_its_session_after_its_last_heartbeat(
    now_ms: int, members: tuple[str, ...], tmp_path: Path
) -> None:
    """After a restart of the machine, its monotonic clock is before the stored times."""
    made = SqliteFile(tmp_path / "queue.sqlite", "queue file", APPLICATION_ID, SCHEMA, QueueError)
    with closing(made.connect()) as file:
        log.create(file, [part()], STALE_MS)
        put_member(file, "g", "m", 1_000, 3_000, positions=0)
        assert former_groups.read(file, "g", now_ms).members == members
        if members:
            with pytest.raises(InvalidRequestError, match="positions can't be set: the group has 1 active members"):
                former_groups.store(file, "g", {part(): committed(1)}, now_ms)
        else:
            former_groups.store(file, "g", {part(): committed(1)}, now_ms)
        assert former_groups.read(file, "g", now_ms).committed == ({} if members else {part(): committed(1)})


def test_a_group_with_a_member_that_is_removed_leaves_no_row(tmp_path: Path) -> None:
    async def work() -> None:
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock())
        await queue.create([part()], STALE_MS)
        await queue.former.store("g", {part(): committed(1)})
        with closing(sqlite3.connect(tmp_path / "queue.sqlite")) as file, file:
            put_member(file, "g", "m", 1_000, 3_000)
        await queue.former.remove("g")
        await queue.close()

    asyncio.run(work())
    with closing(sqlite3.connect(tmp_path / "queue.sqlite")) as file:
        for table in ("groups", "heard", "positions"):
            assert file.execute(f"SELECT * FROM {table}").fetchall() == []


def test_a_dropped_topic_leaves_the_groups_after_a_damaged_one(tmp_path: Path) -> None:
    async def work() -> None:
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock())
        await queue.create([part(0), part(1)], STALE_MS)
        for group in ("a", "b"):
            await queue.former.store(group, {part(0): committed(1), part(1): committed(1, partition=1)})
        with closing(sqlite3.connect(tmp_path / "queue.sqlite")) as file, file:
            file.execute("UPDATE groups SET body = 5 WHERE name = 'a'")
        await queue.drop([part(0)])
        assert (await queue.former.read("b")).committed == {part(1): committed(1, partition=1)}
        await queue.close()

    asyncio.run(work())
