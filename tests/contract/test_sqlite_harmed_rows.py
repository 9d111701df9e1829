"""Rows of `queue.sqlite` that are lost or changed: the queue raises memq's errors, and overwrites nothing."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from memq.errors import CorruptDataError, MemqError
from memq.notification import Entry
from memq.notification.sqlite.queue import SqliteQueue
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import HANG_S, STALE_MS, committed, part, publication
from tests.soak import SOAKING

ENTRIES = 6
GROUP = "billing"
WRONG: list[object] = [None, -1, 1 << 62, 1.5, "text", b"\x00\xff"]
WRONG += [0, 1, 7, 1 << 39, -(1 << 63), "", "0", b"", b"[]"] if SOAKING else []
COLUMNS = {
    "partitions": ("topic", "topic_id", "partition", "begin", "next", "time_max", "dropped"),
    "entries": ("id", "time_ms", "time_max", "body"),
    "epochs": ("partition_id", "write_partition", "epoch"),
    "groups": ("name", "body"),
    "heard": ("group_name", "member", "heard_ms"),
    "positions": ("group_name", "partition_id", "pointer_offset", "record_index", "records", "bytes"),
}
CASES = [(table, column) for table, columns in COLUMNS.items() for column in columns]
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
        member = await queue.join(GROUP, "m", [part(0)], 10_000)
        await queue.commit(GROUP, "m", member.generation, {part(0): committed(2)})

    opened(path, fill)


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


def calls(queue: SqliteQueue, clock: ManualClock) -> Iterator[Awaitable[object]]:
    """Yield one call of each method that reads or appends."""
    yield queue.span(part())
    yield queue.read(part(), 0, 1 << 20)
    yield queue.seek_time(part(), clock.wall_ms())
    yield queue.partitions()
    yield queue.committed(GROUP, [part()])
    yield queue.groups()
    yield queue.describe(GROUP)
    yield queue.heartbeat(GROUP, "m", 1)
    yield queue.commit(GROUP, "", -1, {part(1): committed(1)})
    yield queue.publish(publication(clock, b"new"))
    yield queue.wait({part(): 0}, 0.0)
    yield queue.trim(part(), 1)
    yield queue.check()


@pytest.mark.parametrize(("table", "column"), CASES, ids=lambda each: each)
def test_a_changed_row_is_an_error_of_memq_or_harmless(table: str, column: str, tmp_path: Path) -> None:
    filled(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    for number, value in enumerate(WRONG):
        path = tmp_path / f"{number}.sqlite"
        path.write_bytes(whole)
        first = f"SELECT rowid FROM {table} LIMIT 1" if table in ("partitions", "entries") else ""
        where = f"WHERE rowid = ({first})" if first else ""
        if not harm(path, f"UPDATE {table} SET {column} = ? {where}", value):
            continue

        async def test(queue: SqliteQueue, clock: ManualClock) -> None:
            for call in calls(queue, clock):
                with suppress(MemqError):
                    await call
            left = await queue.read(part(1), 0, 1 << 20)
            assert [each.body for each in left] == [body_of(offset) for offset in range(ENTRIES)], "the other log"

        opened(path, test)


def test_lost_rows_are_passed_over_and_no_offset_is_used_twice(tmp_path: Path) -> None:
    for lost in range(ENTRIES):
        path = tmp_path / f"{lost}.sqlite"
        filled(path)
        assert harm(path, "DELETE FROM entries WHERE id = ?", (1 << 40) + lost)

        async def test(queue: SqliteQueue, clock: ManualClock, lost: int = lost) -> None:
            left = [offset for offset in range(ENTRIES) if offset != lost]
            found = await queue.read(part(), 0, 1 << 20)
            assert [(each.offset, each.body) for each in found] == [(each, body_of(each)) for each in left]
            assert (await queue.span(part())).end == ENTRIES
            assert await queue.publish(publication(clock, b"new")) == ENTRIES

        opened(path, test)


def test_an_end_that_lies_before_entries_is_damage_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    filled(path)
    assert harm(path, "UPDATE partitions SET next = ? WHERE id = 1", ENTRIES - 2)

    async def test(queue: SqliteQueue, clock: ManualClock) -> None:
        for call in (queue.span(part()), queue.publish(publication(clock, b"new"))):
            with pytest.raises(CorruptDataError, match="ends at offset 4, and has entries after it"):
                await call
        assert (await queue.span(part(1))).end == ENTRIES

    opened(path, test)
    with closing(sqlite3.connect(path)) as file:
        rows = file.execute("SELECT body FROM entries WHERE id < ? ORDER BY id", (2 << 40,)).fetchall()
    assert [body for (body,) in rows] == [body_of(offset) for offset in range(ENTRIES)]


def test_a_body_of_another_type_is_an_unreadable_pointer(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    filled(path)
    assert harm(path, "UPDATE entries SET body = 17 WHERE id = ?", (1 << 40) + 2)

    async def test(queue: SqliteQueue, clock: ManualClock) -> None:
        found: list[Entry] = list(await queue.read(part(), 0, 1 << 20))
        assert [each.body for each in found] == [b"17" if each == 2 else body_of(each) for each in range(ENTRIES)]

    opened(path, test)
