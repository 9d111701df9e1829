"""Files of layout 1, without checksums: they are opened, and each sound row gets a checksum."""

from __future__ import annotations

import asyncio
import json
import resource
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from memq.errors import CorruptDataError, EpochFencedError, QueueError
from memq.notification import FormerGroup, Publication, Span
from memq.notification.sqlite.queue import APPLICATION_ID, SCHEMA, UPGRADES, SqliteQueue
from memq.runtime.clock import SystemClock
from memq.runtime.sqlite_file import SqliteFile
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import STALE_MS, committed, part

# As version 0.1.0.dev of 24 November 2026 made it, with what it had written after a trim of partition 1, a drop of
# partition 2, and a commit of a group that has a member.
LAYOUT_1 = """
PRAGMA journal_mode = WAL;
CREATE TABLE partitions (id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, topic_id TEXT NOT NULL,
    partition INTEGER NOT NULL, stale_publish_ms INTEGER NOT NULL, begin INTEGER NOT NULL DEFAULT 0,
    next INTEGER NOT NULL DEFAULT 0, time_max INTEGER NOT NULL DEFAULT 0, dropped INTEGER NOT NULL DEFAULT 0);
CREATE UNIQUE INDEX partitions_there ON partitions (topic, topic_id, partition) WHERE dropped = 0;
CREATE TABLE entries (id INTEGER PRIMARY KEY, time_ms INTEGER NOT NULL, time_max INTEGER NOT NULL, body BLOB NOT NULL);
CREATE TABLE epochs (partition_id INTEGER NOT NULL, write_partition INTEGER NOT NULL, epoch INTEGER NOT NULL,
    PRIMARY KEY (partition_id, write_partition)) WITHOUT ROWID;
CREATE TABLE groups (name TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE heard (group_name TEXT NOT NULL, member TEXT NOT NULL, heard_ms INTEGER NOT NULL,
    PRIMARY KEY (group_name, member)) WITHOUT ROWID;
CREATE TABLE positions (group_name TEXT NOT NULL, partition_id INTEGER NOT NULL, pointer_offset INTEGER NOT NULL,
    record_index INTEGER NOT NULL, records INTEGER NOT NULL, bytes INTEGER NOT NULL,
    PRIMARY KEY (group_name, partition_id)) WITHOUT ROWID;
INSERT INTO partitions VALUES (1, 'clicks', '{id}', 0, 30000, 0, 4, 40, 0),
    (2, 'clicks', '{id}', 1, 30000, 2, 3, 20, 0);
UPDATE sqlite_sequence SET seq = 3;
INSERT INTO entries VALUES (1 << 40, 10, 10, x'61'), ((1 << 40) + 1, 40, 40, x'62'), ((1 << 40) + 2, 30, 40, x'63'),
    ((1 << 40) + 3, 40, 40, x'64'), ((2 << 40) + 1, 5, 5, x'78'), ((2 << 40) + 2, 20, 20, x'65');
INSERT INTO epochs VALUES (1, 0, 7), (1, 2, 3), (2, 1, 9);
INSERT INTO groups VALUES ('billing', CAST('{group}' AS BLOB)), ('empty', x'7b7d');
INSERT INTO heard VALUES ('billing', 'm', 2000000);
INSERT INTO positions VALUES ('billing', 1, 2, 5, 70, 900), ('billing', 2, 3, 0, 0, 0);
PRAGMA application_id = 1836142897;
PRAGMA user_version = 1;
"""
CLOCK = SystemClock()
LOG = {"topic": "clicks", "topic_id": part().topic_id, "partition": 0}
MEMBER = {"session_timeout_ms": 10_000, "heard_ms": 1_000_000, "joined": 2, "wanted": [LOG]}
MEMBER["holds"] = [{"partition": LOG, "since": 2, "revoking": 0}]
GROUP = json.dumps({"generation": 3, "members": {"m": MEMBER}})
POSITIONS = {part(0): committed(2, index=5, records=70, size=900), part(1): committed(3, partition=1)}


def old_file(folder: Path, *harms: str) -> Path:
    path = folder / "queue.sqlite"
    with closing(sqlite3.connect(path)) as file:
        file.executescript(LAYOUT_1.format(id=part().topic_id, group=GROUP))
        for harm in harms:
            file.execute(harm)
        file.commit()
    return path


def upgraded(path: Path, test: Callable[[SqliteQueue, ManualClock], Awaitable[None]]) -> None:
    async def run() -> None:
        clock = ManualClock()
        queue = SqliteQueue(path, clock)
        try:
            await test(queue, clock)
        finally:
            await queue.close()

    asyncio.run(run())


async def shown(queue: SqliteQueue, number: int = 0) -> list[tuple[int, int, bytes]]:
    return [(each.offset, each.time_ms, each.body) for each in await queue.read(part(number), 0, 1 << 20)]


def test_a_file_of_layout_1_holds_the_same_after_it_was_opened(tmp_path: Path) -> None:
    path = old_file(tmp_path)

    async def test(queue: SqliteQueue, clock: ManualClock) -> None:
        clock.advance(1_005_000)
        assert await queue.partitions() == [part(0), part(1)]
        assert (await queue.span(part(0)), await queue.span(part(1))) == (Span(0, 4), Span(2, 3))
        assert await shown(queue) == [(0, 10, b"a"), (1, 40, b"b"), (2, 30, b"c"), (3, 40, b"d")]
        assert await shown(queue, 1) == [(2, 20, b"e")]
        assert [await queue.seek_time(part(), time_ms) for time_ms in (10, 11, 40, 41)] == [0, 1, 1, 4]
        assert await queue.former.read("billing") == FormerGroup("billing", 3, ("m",), POSITIONS)
        assert await queue.former.names() == ["billing", "empty"]

    for _ in range(2):  # upgraded, and as it was left
        upgraded(path, test)
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (2,)
        tables = "SELECT name FROM sqlite_master WHERE type = 'table' AND name LIKE 'old%'"
        assert file.execute(tables).fetchall() == []


def test_an_upgraded_file_is_written_on(tmp_path: Path) -> None:
    path = old_file(tmp_path)

    async def test(queue: SqliteQueue, clock: ManualClock) -> None:
        clock.advance(1_005_000)
        with pytest.raises(EpochFencedError):
            await queue.publish(Publication(part(), 0, 6, 50, b"late"))
        for write in (0, 1, 2):
            assert await queue.publish(Publication(part(), write, 7, 50, b"new")) == 4 + write
        clock.advance(10_000)  # the end of the member's session
        await queue.former.store("billing", {part(0): committed(4)})
        assert (await queue.former.read("billing")).committed == {**POSITIONS, part(0): committed(4)}
        await queue.create([part(0), part(3)], STALE_MS)
        await queue.drop([part(0)])
        assert (await queue.former.read("billing")).committed == {part(1): POSITIONS[part(1)]}
        assert await queue.partitions() == [part(1), part(3)]

    upgraded(path, test)
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT id FROM partitions").fetchall() == [(2,), (4,)], "id 3 was used before"


def test_rows_that_were_damaged_before_the_upgrade_are_damaged_after_it(tmp_path: Path) -> None:
    path = old_file(
        tmp_path,
        "UPDATE entries SET body = 'text' WHERE id = (1 << 40) + 1",
        "UPDATE entries SET time_ms = -1 WHERE id = (1 << 40) + 2",
        "DELETE FROM entries WHERE id = (1 << 40) + 3",
        "UPDATE partitions SET begin = 1.5 WHERE id = 2",
        "UPDATE positions SET records = 'x' WHERE partition_id = 1",
    )

    async def test(queue: SqliteQueue, clock: ManualClock) -> None:
        assert await shown(queue) == [(0, 10, b"a"), (1, 40, b""), (2, 40, b""), (3, 40, b"")]
        assert await queue.partitions() == [part(0), part(1)]
        for call in (queue.span(part(1)), queue.former.read("billing")):
            with pytest.raises(CorruptDataError, match="damaged"):
                await call

    upgraded(path, test)


@pytest.mark.parametrize("harm", ["begin = 4", f"next = {1 << 40}"])
def test_a_range_that_was_impossible_before_the_upgrade_is_damage_after_it(harm: str, tmp_path: Path) -> None:
    """Its checksum is right: only its numbers show it."""
    path = old_file(tmp_path, f"UPDATE partitions SET {harm} WHERE id = 2")

    async def test(queue: SqliteQueue, clock: ManualClock) -> None:
        with pytest.raises(CorruptDataError, match="is no range of offsets"):
            await queue.span(part(1))
        assert await queue.span(part(0)) == Span(0, 4)

    upgraded(path, test)


def test_an_upgrade_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = old_file(tmp_path, "UPDATE groups SET name = CAST(x'ff' AS TEXT) WHERE name = 'empty'")
    with closing(sqlite3.connect(path)) as file:
        before = dump(file)
        with pytest.raises(CorruptDataError, match="a row of table 'groups' can't be read"):
            SqliteQueue(path, ManualClock())
        assert dump(file) == before
        assert file.execute("PRAGMA user_version").fetchone() == (1,)


@contextmanager
def files_of(size: int) -> Iterator[None]:
    """Bound the size of files: the full disk that every machine has."""
    bounds = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, bounds[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, bounds)


def test_an_upgrade_on_a_full_disk_changes_nothing_and_says_how_much_it_needs(tmp_path: Path) -> None:
    path, count = old_file(tmp_path), 2_000
    with closing(sqlite3.connect(path)) as file:
        rows = [((1 << 40) + 4 + number, 40, 40, b"x" * 300) for number in range(count)]
        file.executemany("INSERT INTO entries (id, time_ms, time_max, body) VALUES (?, ?, ?, ?)", rows)
        file.execute("UPDATE partitions SET next = ? WHERE id = 1", (4 + count,))
        file.commit()
        before = dump(file)
    size = path.stat().st_size
    said: list[QueueError] = []
    for share in (0.001, 0.01, 0.1, 0.5, 1.0, 1.5):
        with files_of(int(share * size)), pytest.raises(QueueError) as caught:
            SqliteQueue(path, ManualClock())
        said.append(caught.value)
        with closing(sqlite3.connect(path)) as file:
            assert dump(file) == before
            assert file.execute("PRAGMA user_version").fetchone() == (1,)
    assert f"queue file '{path}' was not upgraded from layout 1 to 2, and is as it was: " in str(said[-1])
    assert f"the disk has {3 * size / 2**20:.1f} MiB free" in said[-1].hint

    async def test(queue: SqliteQueue, clock: ManualClock) -> None:
        assert await queue.span(part(0)) == Span(0, 4 + count)
        assert len(await shown(queue)) == 4 + count

    with files_of(3 * size):
        upgraded(path, test)


def failing_at(prefix: str, code: int) -> type[sqlite3.Connection]:
    """Return connections on which each statement with this prefix fails."""

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
            if sql.startswith(prefix):
                error = sqlite3.OperationalError("the statement failed")
                error.sqlite_errorcode = code
                raise error
            return super().execute(sql, *parameters)

    return Connection


@pytest.mark.parametrize(
    ("prefix", "code", "old", "says_room"),
    [
        ("INSERT INTO entries", sqlite3.SQLITE_FULL, True, True),
        ("PRAGMA user_version =", sqlite3.SQLITE_IOERR_WRITE, True, True),
        ("PRAGMA user_version =", sqlite3.SQLITE_BUSY, True, False),
        ("PRAGMA user_version =", sqlite3.SQLITE_FULL, False, False),
    ],
)
def test_an_opening_that_fails_changes_nothing_holds_no_lock_and_names_the_cause(
    prefix: str, code: int, old: bool, says_room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables and the number of their layout are one transaction."""
    path = old_file(tmp_path) if old else tmp_path / "queue.sqlite"
    file = SqliteFile(path, "queue file", APPLICATION_ID, SCHEMA, QueueError, upgrades=UPGRADES)
    with closing(sqlite3.connect(path)) as plain:
        before = dump(plain)
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=failing_at(prefix, code)))
        with pytest.raises(QueueError, match="the statement failed") as caught:
            file.connect()
    assert ("was not upgraded from layout 1 to 2, and is as it was" in str(caught.value)) is says_room
    with closing(sqlite3.connect(path, timeout=0)) as plain:  # while the error keeps the frames of the call
        plain.execute("BEGIN IMMEDIATE")
        assert dump(plain) == before
    with closing(file.connect()) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (2,)


def dump(file: sqlite3.Connection) -> list[object]:
    file.text_factory = bytes
    tables = [name.decode() for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return [(table, file.execute(f"SELECT * FROM {table}").fetchall()) for table in sorted(tables)]


def test_several_openers_upgrade_once(tmp_path: Path) -> None:
    path = old_file(tmp_path)
    upgrades: list[int] = []

    def counted(connection: sqlite3.Connection) -> None:
        upgrades.append(1)
        UPGRADES[0](connection)

    file = SqliteFile(path, "queue file", APPLICATION_ID, SCHEMA, QueueError, upgrades=(counted,))
    with ThreadPoolExecutor(4) as pool:
        for connection in pool.map(lambda _: file.connect(), range(4)):
            connection.close()
    assert len(upgrades) == 1


def test_an_earlier_version_that_has_the_file_open_can_write_no_row_without_a_checksum(tmp_path: Path) -> None:
    path = old_file(tmp_path)
    with closing(sqlite3.connect(path)) as earlier:
        earlier.execute("SELECT * FROM entries").fetchall()
        upgraded(path, lambda queue, clock: queue.check())
        with pytest.raises(sqlite3.IntegrityError, match="checksum"):
            earlier.execute("INSERT INTO entries (id, time_ms, time_max, body) VALUES (?, 9, 9, x'66')", (9,))


@pytest.mark.parametrize(
    ("code", "failures", "tries"),
    [(sqlite3.SQLITE_BUSY, 2, 3), (sqlite3.SQLITE_BUSY, 3, 3), (sqlite3.SQLITE_IOERR, 1, 1)],
    ids=["passes", "stays", "another error"],
)
def test_an_opener_waits_for_the_lock_of_another_one_and_not_for_ever(
    code: int, failures: int, tries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried_s: list[float] = []

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
            if "journal_mode" in sql:
                tried_s.append(CLOCK.monotonic())
                if len(tried_s) <= failures:
                    error = sqlite3.OperationalError("failed")
                    error.sqlite_errorcode = code
                    raise error
            return super().execute(sql, *arguments)

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Connection))
    monkeypatch.setattr("memq.runtime.sqlite_file.WAL_TRIES_MAX", 3)
    monkeypatch.setattr("memq.runtime.sqlite_file.WAL_RETRY_S", 0.03)
    file = SqliteFile(tmp_path / "queue.sqlite", "queue file", APPLICATION_ID, SCHEMA, QueueError)
    if failures < tries:
        file.connect().close()
    else:
        with pytest.raises(QueueError):
            file.connect()
    assert len(tried_s) == tries
    assert all(later - earlier >= 0.03 for earlier, later in pairwise(tried_s))
