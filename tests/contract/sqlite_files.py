"""Files of a SQLite queue that tests fill, change behind its back, and open again."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.sqlite_file import checksum
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import HANG_S, STALE_MS, committed, part, publication

ENTRIES = 6
GROUP = "billing"
Test = Callable[[SqliteQueue, ManualClock], Awaitable[None]]


def body_of(offset: int) -> bytes:
    return b"pointer %d" % offset


def filled(path: Path) -> None:
    """Make a queue with entries, a group with a member and a position."""

    async def fill(queue: SqliteQueue, clock: ManualClock) -> None:
        await queue.create([part(0), part(1)], STALE_MS)
        for number in range(ENTRIES):
            for partition in (part(0), part(1)):
                await queue.publish(publication(clock, body_of(number), partition=partition))
            clock.advance(1)
        await queue.former.store(GROUP, {part(0): committed(2)})

    opened(path, fill)
    with closing(sqlite3.connect(path)) as file, file:
        put_member(file, GROUP, "m", 0)


def put_member(
    file: sqlite3.Connection,
    group: str,
    member: str,
    joined_ms: int,
    heard_ms: int | None = None,
    *,
    positions: int = 1,
    session_ms: int = 10_000,
) -> None:
    """Put the only member of a group into a file, as an earlier release did."""
    log = {"topic": part().topic, "topic_id": part().topic_id, "partition": 0}
    row = {"session_timeout_ms": session_ms, "heard_ms": joined_ms, "joined": 1, "wanted": [log], "commits": 4}
    row["holds"] = [{"partition": log, "since": 1, "revoking": 0}]
    values = (group, json.dumps({"generation": 1, "members": {member: row}}).encode(), positions)
    file.execute("INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?)", (*values, checksum("groups", values)))
    if heard_ms is not None:
        heard = (group, member, heard_ms)
        file.execute("INSERT INTO heard VALUES (?, ?, ?, ?)", (*heard, checksum("heard", heard)))


def opened(path: Path, test: Test) -> None:
    async def run() -> None:
        clock = ManualClock()
        queue = SqliteQueue(path, clock)
        try:
            async with asyncio.timeout(HANG_S):
                await test(queue, clock)
        finally:
            await queue.close()

    asyncio.run(run())


def harm(path: Path, statement: str, *values: object) -> bool:
    """Change the file behind the queue's back; return whether SQLite let it."""
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA ignore_check_constraints = ON")
        try:
            file.execute(statement, values)
        except sqlite3.Error:
            return False
        file.commit()
        return True
