"""Rows of `topics.sqlite` that are lost or changed, and files of layout 1, without checksums."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest

from memq.errors import CorruptDataError, MemqError
from memq.governor.registry import Registry
from memq.governor.standalone import StandaloneCoordinator, load_registry, topics_file
from memq.permissions import AccessRule, RuleSet
from memq.runtime.clock import SystemClock
from memq.topic import TopicSettings
from tests.contract.coordinators import topic

TABLES = {
    "topics": ("id", "body", "checksum"),
    "used_ids": ("id", "deleted", "checksum"),
    "assignments": ("topic_id", "partition", "body", "checksum"),
    "store_mark": ("id", "mark", "checksum"),
    "rules": ("id", "body", "checksum"),
}
RULES = RuleSet(
    version=1, rules=(AccessRule(effect="deny", principal="mallory", permission="read", kind="topic", name="clicks"),)
)
CLICKS, VIEWS, GONE = topic("clicks", 1), topic("views", 2, partitions=1), topic("gone", 3)
# Rows that may be missing, by table and key, and why that does no harm.
HARMLESS_LOSSES = {
    ("used_ids", GONE.id): "a topic that is not known as deleted keeps its objects",
    (
        "store_mark",
        0,
    ): "the next start takes the mark of its store: only a wrong setting of the store at the same time is not noticed",
    ("rules", 0): "without rules nothing is allowed",
}
# Of layout 1, as version 0.1.0.dev of 24 November 2026 made it before its first broker marked the store.
LAYOUT_1 = (
    "PRAGMA journal_mode = WAL",
    "CREATE TABLE topics (id TEXT PRIMARY KEY, body BLOB NOT NULL) WITHOUT ROWID",
    "CREATE TABLE used_ids (id TEXT PRIMARY KEY) WITHOUT ROWID",
    """CREATE TABLE assignments (topic_id TEXT NOT NULL REFERENCES topics (id), partition INTEGER NOT NULL,
    body BLOB NOT NULL, PRIMARY KEY (topic_id, partition)) WITHOUT ROWID""",
    "PRAGMA application_id = 1836143665",
    "PRAGMA user_version = 1",
)
MARK = "CREATE TABLE store_mark (id INTEGER PRIMARY KEY CHECK (id = 0), mark TEXT NOT NULL)"


def with_coordinator(path: Path, work: Callable[[StandaloneCoordinator], Awaitable[None]]) -> None:
    async def run() -> None:
        coordinator = StandaloneCoordinator(path, "test", SystemClock())
        try:
            await work(coordinator)
        finally:
            await coordinator.close()

    asyncio.run(run())


async def fill(coordinator: StandaloneCoordinator) -> None:
    """Make two topics, of which one partition has an epoch, delete a third one, and mark the store."""
    for each in (CLICKS, VIEWS, GONE):
        await coordinator.create_topic(each)
    await coordinator.delete_topic((await coordinator.topics())[1])
    assignment = await coordinator.assignment(CLICKS.id, 1)
    await coordinator.set_assignment(msgspec.structs.replace(assignment, broker="b1", epoch=15))
    await coordinator.store_mark("5" * 32)
    await coordinator.rules.replace(RULES)


def content(registry: Registry) -> tuple[object, ...]:
    deleted = [registry.deleted(each.id) for each in (CLICKS, VIEWS, GONE)]
    return registry.topics(), registry.assignments(), deleted, registry.mark, registry.rules


def loaded(file: sqlite3.Connection, path: Path) -> object:
    try:
        return content(load_registry(file, topics_file(path)))
    except MemqError as error:
        return type(error), error.hint


def others(value: object, same_column: list[object]) -> list[object]:
    """Return valid values of the type that a column could have instead, those of other rows among them."""
    made: list[object] = []
    if isinstance(value, int):
        made = [value + 1, value ^ 1, 0]
    elif isinstance(value, bytes):
        made = [
            value.replace(b":15,", b":14,"),
            value.replace(b":0,", b":1,"),
            value.replace(b"clicks", b"clocks"),
            b"{}",
        ]
    elif isinstance(value, str):
        made = [value[:-1] + chr(ord(value[-1]) ^ 1), ""]
    return [each for each in dict.fromkeys([*made, *same_column]) if each != value]


def rows_of(file: sqlite3.Connection, table: str) -> list[tuple[object, ...]]:
    return file.execute(f"SELECT {', '.join(TABLES[table])} FROM {table} ORDER BY 1, 2").fetchall()


def only(table: str) -> str:
    return " AND ".join(f"{column} = ?" for column in TABLES[table])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with_coordinator(tmp_path / "topics.sqlite", fill)
    return tmp_path / "topics.sqlite"


def harmed(path: Path) -> sqlite3.Connection:
    """Return a connection that lets a row be changed as the disk would: references are not looked at."""
    file = sqlite3.connect(path, isolation_level=None)
    file.execute("PRAGMA ignore_check_constraints = ON")
    file.execute("BEGIN")
    return file


REFUSED = (CorruptDataError, "stop memq, keep the file, and restore it from a copy")


def test_another_valid_value_of_any_column_is_damage(path: Path) -> None:
    tried = 0
    with closing(harmed(path)) as file:
        for table, columns in TABLES.items():
            rows = rows_of(file, table)
            for row in rows:
                for at, column in enumerate(columns):
                    for value in others(row[at], [each[at] for each in rows]):
                        file.execute("SAVEPOINT harm")
                        with suppress(sqlite3.IntegrityError):  # the key of another row
                            file.execute(f"UPDATE {table} SET {column} = ? WHERE {only(table)}", (value, *row))
                            assert loaded(file, path) == REFUSED, (table, row, column, value)
                            tried += 1
                        file.execute("ROLLBACK TO harm")
    assert tried > 50, "the loops found rows"


def test_a_lost_row_is_damage_or_harmless(path: Path) -> None:
    unnoticed: dict[tuple[str, object], None] = {}
    with closing(harmed(path)) as file:
        for table in TABLES:
            for row in rows_of(file, table):
                file.execute("SAVEPOINT harm")
                file.execute(f"DELETE FROM {table} WHERE {only(table)}", row)
                if loaded(file, path) != REFUSED:
                    unnoticed[table, row[0]] = None
                file.execute("ROLLBACK TO harm")
    assert unnoticed.keys() == HARMLESS_LOSSES.keys()


def test_a_topic_that_is_lost_with_its_assignments_is_not_a_deleted_one(path: Path) -> None:
    with closing(harmed(path)) as file:
        file.execute("DELETE FROM assignments WHERE topic_id = ?", (VIEWS.id,))
        file.execute("DELETE FROM topics WHERE id = ?", (VIEWS.id,))
        assert loaded(file, path) == REFUSED


def test_a_topic_whose_row_is_damaged_meanwhile_is_not_changed_before_it_is_restored(path: Path) -> None:
    def rewrite(body: bytes) -> bytes:
        """Change a row behind the coordinator's back; fails when that holds the lock of writers."""
        with closing(sqlite3.connect(path, timeout=0)) as file, file:
            ((before,),) = file.execute("SELECT body FROM topics WHERE id = ?", (CLICKS.id,)).fetchall()
            file.execute("UPDATE topics SET body = ? WHERE id = ?", (body, CLICKS.id))
        return bytes(before)

    async def alter(coordinator: StandaloneCoordinator) -> None:
        known = (await coordinator.topics())[0]
        altered = msgspec.structs.replace(known, settings=TopicSettings(retention_ms=0))
        sound = rewrite(b"{}")
        with pytest.raises(CorruptDataError, match="topic 'clicks' in topics file"):
            await coordinator.alter_topic(altered)
        with pytest.raises(CorruptDataError):
            await coordinator.create_topic(topic("new", 9))
        assert rewrite(sound) == b"{}"
        assert (await coordinator.alter_topic(altered)).settings.retention_ms == 0
        assert [each.name for each in await coordinator.topics()] == ["clicks", "views"]

    with_coordinator(path, alter)


# ---- layout 1 ------------------------------------------------------------------------------------


def old_file(path: Path, marked: bool) -> tuple[object, ...]:
    """Make a file of layout 1 with what `fill` makes; return its content."""
    with_coordinator(path.with_name("new.sqlite"), fill)
    with closing(sqlite3.connect(path.with_name("new.sqlite"))) as new, closing(sqlite3.connect(path)) as old, old:
        for statement in (*LAYOUT_1, *([MARK] if marked else [])):
            old.execute(statement)
        for table, columns in TABLES.items():
            kept = [column for column in columns if column not in ("checksum", "deleted")]
            if table != "rules" and (marked or table != "store_mark"):
                rows = new.execute(f"SELECT {', '.join(kept)} FROM {table}").fetchall()
                old.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(kept))})", rows)
        connection = topics_file(path.with_name("new.sqlite")).connect()
        with closing(connection):
            return content(load_registry(connection, topics_file(path)))


@pytest.mark.parametrize("marked", [True, False])
def test_a_file_of_layout_1_holds_the_same_after_it_was_opened(tmp_path: Path, marked: bool) -> None:
    path = tmp_path / "topics.sqlite"
    topics, assignments, deleted, mark, _ = old_file(path, marked)
    for _ in range(2):  # upgraded, and as it was left
        with closing(topics_file(path).connect()) as file:
            assert file.execute("PRAGMA user_version").fetchone() == (3,)
            assert loaded(file, path) == (topics, assignments, deleted, mark if marked else "", RuleSet())

    async def change(coordinator: StandaloneCoordinator) -> None:
        await coordinator.create_topic(topic("new", 9))
        await coordinator.delete_topic(next(each for each in await coordinator.topics() if each.name == "clicks"))

    with_coordinator(path, change)
    with closing(topics_file(path).connect()) as file:
        registry = load_registry(file, topics_file(path))
        assert [each.name for each in registry.topics()] == ["new", "views"]
        assert registry.deleted(CLICKS.id)


def test_a_file_of_layout_2_has_no_rules_and_takes_some(path: Path) -> None:
    with closing(sqlite3.connect(path)) as file, file:
        before = loaded(file, path)
        file.execute("DROP TABLE rules")
        file.execute("PRAGMA user_version = 2")

    async def change(coordinator: StandaloneCoordinator) -> None:
        assert await coordinator.rules.read() == RuleSet()
        assert await coordinator.rules.replace(RULES) == RULES

    with_coordinator(path, change)
    with closing(topics_file(path).connect()) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (3,)
        assert loaded(file, path) == before


def test_a_topic_that_was_lost_before_the_upgrade_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "topics.sqlite"
    old_file(path, marked=True)
    with closing(sqlite3.connect(path)) as file, file:
        file.execute("DELETE FROM topics WHERE id = ?", (VIEWS.id,))
    with closing(topics_file(path).connect()) as connection:
        assert loaded(connection, path) == REFUSED
