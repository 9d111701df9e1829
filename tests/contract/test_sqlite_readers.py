"""Connections of a SQLite queue's readers, its polls for other writers, and groups without positions."""

from __future__ import annotations

import asyncio
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memq.errors import NotFoundError, QueueError
from memq.notification.sqlite import log
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.clock import SystemClock
from tests.contract.queues import STALE_MS, part


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
