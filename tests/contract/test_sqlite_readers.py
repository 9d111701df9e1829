"""Connections of a SQLite queue's readers, its polls for other writers, and rows of its groups."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memq.errors import NotFoundError, QueueError
from memq.notification.sqlite import log
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.clock import SystemClock
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import STALE_MS, committed, part


class CountedConnection(sqlite3.Connection):
    """Counts the connections; the next commit fails while `fails` is set."""

    made = 0
    fails = False

    def __init__(self, *args: Any, **options: Any) -> None:
        CountedConnection.made += 1
        super().__init__(*args, **options)

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        if sql == "COMMIT" and CountedConnection.fails:
            CountedConnection.fails = False
            raise sqlite3.OperationalError("disk I/O error")
        return super().execute(sql, *parameters)


@pytest.fixture(name="counted")
def counted_connections(monkeypatch: pytest.MonkeyPatch) -> type[CountedConnection]:
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=CountedConnection))
    monkeypatch.setattr(CountedConnection, "made", 0)
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
        counted.fails = True
        with pytest.raises(QueueError, match="disk i/o error"):
            await queue.span(part())
        with pytest.raises(NotFoundError):
            await queue.span(part())
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


def test_a_commit_without_positions_creates_its_group(tmp_path: Path) -> None:
    async def work() -> None:
        queue = SqliteQueue(tmp_path / "queue.sqlite", SystemClock())
        await queue.commit("g", "", -1, {})
        assert list(await queue.groups()) == ["g"]
        await queue.close()

    asyncio.run(work())


def test_a_deleted_group_leaves_no_row(tmp_path: Path) -> None:
    async def work() -> None:
        clock = ManualClock()
        queue = SqliteQueue(tmp_path / "queue.sqlite", clock)
        await queue.create([part()], STALE_MS)
        member = await queue.join("g", "m", [part()], 6_000)
        await queue.commit("g", "m", member.generation, {part(): committed(1)})
        await queue.heartbeat("g", "m", member.generation)
        clock.advance(6_000)
        await queue.delete_group("g")
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
            await queue.commit(group, "", -1, {part(0): committed(1), part(1): committed(1, partition=1)})
        with closing(sqlite3.connect(tmp_path / "queue.sqlite")) as file, file:
            file.execute("UPDATE groups SET body = 5 WHERE name = 'a'")
        await queue.drop([part(0)])
        assert await queue.committed("b", [part(0), part(1)]) == {part(1): committed(1, partition=1)}
        await queue.close()

    asyncio.run(work())
