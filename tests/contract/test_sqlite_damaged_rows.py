"""Rows of `queue.sqlite` that are lost or changed: the queue notices each, and overwrites nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import pytest

from memq.errors import CorruptDataError, MemqError, QueueError
from memq.format.pointer import read_pointer
from memq.notification import Entry, FormerGroup, Publication, Span, missing_partition
from memq.notification.log_reader import valid_seek
from memq.notification.sqlite import former_groups as groups
from memq.notification.sqlite import log
from memq.notification.sqlite.queue import APPLICATION_ID, SCHEMA, SqliteQueue
from memq.runtime.sqlite_file import SqliteFile, checksum
from memq.topic import ReadPartition
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import STALE_MS, committed, part, publication
from tests.contract.sqlite_files import ENTRIES, GROUP, body_of, filled, harm, opened, put_member
from tests.soak import SOAKING

WRONG: list[object] = [None, -1, 1 << 62, 1.5, "text", b"\x00\xff"]
WRONG += [0, 1, 7, 1 << 39, -(1 << 63), "", "0", b"", b"[]"] if SOAKING else []
COLUMNS = {
    "partitions": (
        *("id", "topic", "topic_id", "partition", "stale_publish_ms"),
        *("begin", "next", "time_max", "dropped", "epochs", "checksum"),
    ),
    "entries": ("id", "time_ms", "time_max", "body", "checksum"),
    "epochs": ("partition_id", "write_partition", "epoch", "checksum"),
    "groups": ("name", "body", "positions", "checksum"),
    "heard": ("group_name", "member", "heard_ms", "checksum"),
    "positions": ("group_name", "partition_id", "pointer_offset", "record_index", "records", "bytes", "checksum"),
}
CASES = [(table, column) for table, columns in COLUMNS.items() for column in columns]


def calls(queue: SqliteQueue, clock: ManualClock) -> Iterator[Awaitable[object]]:
    """Yield one call of each method that reads or appends."""
    yield queue.span(part())
    yield queue.read(part(), 0, 1 << 20)
    yield queue.seek_time(part(), clock.wall_ms())
    yield queue.partitions()
    yield queue.former.names()
    yield queue.former.read(GROUP)
    yield queue.former.store(GROUP, {part(1): committed(1, partition=1)})
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


def test_lost_rows_are_shown_without_bytes_and_no_offset_is_used_twice(tmp_path: Path) -> None:
    for lost in range(ENTRIES):
        path = tmp_path / f"{lost}.sqlite"
        filled(path)
        assert harm(path, "DELETE FROM entries WHERE id = ?", (1 << 40) + lost)

        async def test(queue: SqliteQueue, clock: ManualClock, lost: int = lost) -> None:
            found = await queue.read(part(), 0, 1 << 20)
            bodies = [b"" if each == lost else body_of(each) for each in range(ENTRIES)]
            assert [(each.offset, each.body) for each in found] == list(enumerate(bodies))
            assert found.next == (await queue.span(part())).end == ENTRIES
            assert await queue.publish(publication(clock, b"new")) == ENTRIES

        opened(path, test)


def test_an_end_that_lies_before_entries_is_damage_and_nothing_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    filled(path)
    with closing(sqlite3.connect(path)) as file, file:  # an older state of the row, sound by itself
        columns = ", ".join(COLUMNS["partitions"][:-1])
        row = log.LogRow(*file.execute(f"SELECT {columns} FROM partitions WHERE id = 1").fetchone())
        older = row._replace(next=ENTRIES - 2)
        file.execute(
            "UPDATE partitions SET next = ?, checksum = ? WHERE id = 1", (older.next, checksum("partitions", older))
        )

    async def test(queue: SqliteQueue, clock: ManualClock) -> None:
        for call in (queue.span(part()), queue.publish(publication(clock, b"new"))):
            with pytest.raises(CorruptDataError, match="ends at offset 4, and has entries after it"):
                await call
        assert (await queue.span(part(1))).end == ENTRIES

    opened(path, test)
    with closing(sqlite3.connect(path)) as file:
        rows = file.execute("SELECT body FROM entries WHERE id < ? ORDER BY id", (2 << 40,)).fetchall()
    assert [body for (body,) in rows] == [body_of(offset) for offset in range(ENTRIES)]


def test_a_damaged_row_is_a_lost_pointer(tmp_path: Path) -> None:
    path = tmp_path / "queue.sqlite"
    filled(path)
    assert harm(path, "UPDATE entries SET body = 17 WHERE id = ?", (1 << 40) + 2)
    assert harm(path, "UPDATE entries SET time_ms = time_ms + 1 WHERE id = ?", (1 << 40) + 4)

    async def test(queue: SqliteQueue, clock: ManualClock) -> None:
        found = await queue.read(part(), 0, 1 << 20)
        assert [each.body for each in found] == [b"" if each in (2, 4) else body_of(each) for each in range(ENTRIES)]
        assert [found[lost].time_ms - found[lost + 1].time_ms for lost in (2, 4)] == [0, 0], "the time of the next one"
        pointer = read_pointer(found[2].body, newer="raise")
        assert isinstance(pointer, CorruptDataError)
        assert "the queue has lost the pointer" in str(pointer)

    opened(path, test)


def test_a_log_that_lost_all_rows_is_read_in_bounded_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "LOST_PER_READ_MAX", 4)
    for statement in ("DELETE FROM entries WHERE id < ?", "UPDATE entries SET body = 'x' WHERE id < ?"):
        path = tmp_path / f"{statement[:6]}.sqlite"
        filled(path)
        assert harm(path, statement, 2 << 40)

        async def test(queue: SqliteQueue, clock: ManualClock) -> None:
            shown: list[Entry] = []
            while page := await queue.read(part(), len(shown), 1 << 20):
                assert len(page) <= 4
                assert page.next == page[-1].offset + 1
                shown += page
            assert [(each.offset, each.body) for each in shown] == [(each, b"") for each in range(ENTRIES)]
            assert {each.time_ms for each in shown} == {ManualClock().wall_ms() + ENTRIES - 1}, (
                "no entry has a later one"
            )
            assert await queue.seek_time(part(), 0) == 0

        opened(path, test)


@pytest.mark.parametrize("gone", [(3,), (0,), (9,), (4, 5, 6), (0, 2, 4, 6, 8), range(10)], ids=str)
def test_a_seek_takes_entries_that_are_lost_for_entries_of_the_time(gone: Sequence[int], tmp_path: Path) -> None:
    async def test(queue: SqliteQueue, clock: ManualClock) -> None:
        await queue.create([part()], STALE_MS)
        for number in range(10):
            await queue.publish(Publication(part(), 0, 1, 1_000 * number, b"%d" % number))
        assert all(harm(path, "DELETE FROM entries WHERE id = ?", (1 << 40) + number) for number in gone)
        shown = await queue.read(part(), 0, 1 << 20)
        assert [(entry.offset, entry.lost) for entry in shown] == [(number, number in gone) for number in range(10)]
        for time_ms in range(-500, 10_000, 500):
            expected = next((entry.offset for entry in shown if not entry.lost and entry.time_ms >= time_ms), 10)
            while expected - 1 in gone:
                expected -= 1
            assert await valid_seek(queue, part(), time_ms) == expected, "and the entry before it is older"

    path = tmp_path / "queue.sqlite"
    opened(path, test)


def test_waiter_of_a_damaged_partition_is_woken_to_read_it(tmp_path: Path) -> None:
    with closing(full_file(tmp_path)) as file:
        file.execute("UPDATE partitions SET time_max = time_max + 1 WHERE partition = 0")
        assert log.ends(file, [part(0), part(1)]) == {part(0): None, part(1): ENTRIES}


# ---- every column of every row -------------------------------------------------------------------

TIMES = range(990, 1_080, 10)
LATE_MS = 60_000  # after all sessions of the full file
# Changes that some calls take for sound, and why they do no harm. A row is its table and its number by key.
HARMLESS_COLUMNS = {
    (
        "groups",
        1,
        "name",
    ): "a list of the groups notices it, and there are no positions",
    ("heard", 0, "group_name"): "the heartbeat counts as not heard: the session of the member ends early",
}
HARMLESS_LOSSES = {
    ("heard", 0): "the member was heard when it joined: its session ends early",
    ("groups", 1): "a group without positions has nothing but members, which are not moved",
}


def full_file(folder: Path, topic: str = "clicks") -> sqlite3.Connection:
    """Return a queue file in a transaction: two logs, one of them trimmed, two epochs, two groups, three positions."""
    file = SqliteFile(folder / f"{topic}.sqlite", "queue file", APPLICATION_ID, SCHEMA, QueueError).connect()
    file.execute("BEGIN")
    one, two = part(0, topic), part(1, topic)
    log.create(file, [one, two], STALE_MS)
    for number in range(ENTRIES):
        for log_of in (one, two):
            entry = Publication(log_of, number % 2, 5 + number, 1_000 + 10 * number, body_of(number))
            log.publish(file, entry)
    log.trim(file, two, 2)
    groups.store(file, GROUP, {one: committed(2), two: committed(3, partition=1, records=7)}, 0)
    put_member(file, GROUP, "m", 1_000, 3_000, positions=2)
    put_member(file, "ledger", "m", 1_000, positions=0)
    return file


def stores(file: sqlite3.Connection) -> object:
    groups.store(file, GROUP, {part(0): committed(4)}, LATE_MS)
    return groups.read(file, GROUP, LATE_MS)


def replaces(file: sqlite3.Connection) -> object:
    groups.remove(file, "ledger")
    groups.store(file, "ledger", {part(1): committed(4, partition=1)}, LATE_MS)
    return groups.read(file, "ledger", LATE_MS), groups.names(file)


def sought(file: sqlite3.Connection, partition: ReadPartition, time_ms: int) -> list[Entry]:
    """Return what a reader that starts at a time gets of it."""
    found = log.read(file, partition, log.seek_time(file, partition, time_ms), 1 << 20)
    return [entry for entry in found if entry.time_ms >= time_ms]


def published(at: int, write: int, epoch: int) -> Callable[[sqlite3.Connection], object]:
    def call(file: sqlite3.Connection) -> object:
        offset = log.publish(file, Publication(part(at), write, epoch, 2_000, b"new"))
        return offset, log.span(file, part(at)), log.read(file, part(at), 0, 1 << 20), sought(file, part(at), 2_000)

    return call


def created(file: sqlite3.Connection) -> object:
    log.create(file, [part(0), part(2)], STALE_MS)
    return log.partitions(file, None), log.span(file, part()), log.span(file, part(2))


def trimmed(file: sqlite3.Connection) -> object:
    log.trim(file, part(), 3)
    return log.span(file, part()), log.read(file, part(), 0, 1 << 20)


def dropped(file: sqlite3.Connection) -> object:
    groups.forget(file, [part(1)])
    log.hide(file, [part(1)])
    while log.delete_hidden(file):
        pass
    rows = file.execute("SELECT count(*) FROM entries WHERE id >= ?", (2 << 40,)).fetchone()
    return rows, log.partitions(file, "clicks"), groups.read(file, GROUP, 4_000), log.read(file, part(), 0, 1 << 20)


def swept(file: sqlite3.Connection) -> object:
    """Go on with a drop that was broken off: there is none, so nothing may go."""
    log.delete_hidden(file)
    return [log.read(file, part(at), 0, 1 << 20) for at in (0, 1)]


CALLS: dict[str, Callable[[sqlite3.Connection], object]] = {
    "span 0": lambda file: log.span(file, part(0)),
    "span 1": lambda file: log.span(file, part(1)),
    "read 0": lambda file: log.read(file, part(0), 0, 1 << 20),
    "read 1": lambda file: log.read(file, part(1), 0, 1 << 20),
    "seek": lambda file: [sought(file, part(at), time_ms) for at in (0, 1) for time_ms in TIMES],
    "partitions": lambda file: (log.partitions(file, None), log.partitions(file, "clicks")),
    "names": groups.names,
    "read group": lambda file: [groups.read(file, GROUP, now_ms) for now_ms in (12_999, 13_000)],
    "read another": lambda file: groups.read(file, "ledger", 2_000),
    "store": stores,
    "store early": lambda file: groups.store(file, GROUP, {part(0): committed(4)}, 12_999),
    "replace": replaces,
    **{f"publish {at} {write}": published(at, write, 10) for at in (0, 1) for write in (0, 1)},
    **{f"publish {at} {write} late": published(at, write, 8) for at in (0, 1) for write in (0, 1)},
    "publish first": published(0, 2, 1),
    "create": created,
    "trim": trimmed,
    "drop": dropped,
    "continue a drop": swept,
}


def answer(call: Callable[[sqlite3.Connection], object], file: sqlite3.Connection) -> object:
    """Return what a call answers, or raises; all that it changes is undone."""
    file.execute("SAVEPOINT call")
    try:
        return call(file)
    except MemqError as error:
        if isinstance(error, CorruptDataError):
            return CorruptDataError if error.hint == log.RESTORE_HINT else "another hint"
        return f"{type(error).__name__}: {error}"
    finally:
        file.execute("ROLLBACK TO call")


def judge(found: object, sound: object) -> str:
    """Say "same", "noticed", or "wrong" about an answer, given that of the sound file."""
    if found is CorruptDataError:
        return "noticed"
    if not isinstance(found, list | tuple) or not isinstance(sound, list | tuple):
        return "same" if found == sound else "wrong"
    if any(isinstance(each, Entry) for each in (*found, *sound)):
        shown = {entry.offset: entry for entry in found}
        missing = any(entry.offset not in shown for entry in sound)
        changed = [entry for entry in found if entry not in sound]
        if missing or not all(entry.lost for entry in changed):
            return "wrong"
        return "noticed" if changed else "same"
    verdicts = {judge(*each) for each in zip(found, sound, strict=False)}
    if len(found) != len(sound):
        return "wrong"
    return next((each for each in ("wrong", "noticed") if each in verdicts), "same")


def judged(file: sqlite3.Connection, sound: dict[str, object]) -> dict[str, str]:
    return {name: judge(answer(call, file), sound[name]) for name, call in CALLS.items()}


def others(value: object, same_column: list[object]) -> list[object]:
    """Return valid values of the type that a column could have instead, those of other rows among them."""
    if isinstance(value, int):
        made: list[object] = [value ^ 1, value ^ 1 << 8, 0]
    elif isinstance(value, bytes):
        made = [value[:-1] + bytes([value[-1] ^ 1]), value.replace(b"1", b"2"), b""]
    else:
        assert isinstance(value, str)
        made = [value[:-1] + chr(ord(value[-1]) ^ 1), value[:-1]]
    return [each for each in dict.fromkeys([*made, *same_column[:1], *same_column[-1:]]) if each != value]


def rows_of(file: sqlite3.Connection, table: str) -> list[tuple[object, ...]]:
    """Return all rows in order of their keys."""
    return file.execute(f"SELECT {', '.join(COLUMNS[table])} FROM {table} ORDER BY 1, 2").fetchall()


def only(table: str) -> str:
    """Return the condition that one row of a table meets."""
    return " AND ".join(f"{column} = ?" for column in COLUMNS[table])


def test_the_full_file_answers_what_was_put_in(tmp_path: Path) -> None:
    """The answers that those of harmed files are compared with."""
    entries = [[Entry(each, 1_000 + 10 * each, body_of(each)) for each in range(begin, ENTRIES)] for begin in (0, 2)]
    new = Entry(ENTRIES, 2_000, b"new")
    positions = {part(0): committed(2), part(1): committed(3, partition=1, records=7)}
    with closing(full_file(tmp_path)) as file:
        sound = {name: answer(call, file) for name, call in CALLS.items()}
    assert [sound["span 0"], sound["span 1"]] == [Span(0, ENTRIES), Span(2, ENTRIES)]
    assert [sound["read 0"], sound["read 1"]] == entries
    assert sound["partitions"] == ([part(0), part(1)],) * 2
    assert sound["names"] == [GROUP, "ledger"]
    assert sound["read group"] == [FormerGroup(GROUP, 1, ("m",), positions), FormerGroup(GROUP, 1, (), positions)]
    assert sound["read another"] == FormerGroup("ledger", 1, ("m",), {})
    assert sound["store"] == FormerGroup(GROUP, 1, (), {**positions, part(0): committed(4)})
    assert "the group has 1 active members" in str(sound["store early"])
    assert sound["replace"] == (FormerGroup("ledger", 0, (), {part(1): committed(4, partition=1)}), [GROUP, "ledger"])
    assert sound["publish 0 0"] == (ENTRIES, Span(0, ENTRIES + 1), [*entries[0], new], [new])
    assert str(sound["publish 0 0 late"]).startswith("EpochFencedError")
    assert sound["create"] == ([part(0), part(1), part(2)], Span(0, ENTRIES), Span(0, 0))
    assert sound["trim"] == (Span(3, ENTRIES), entries[0][3:])
    state = FormerGroup(GROUP, 1, ("m",), {part(0): positions[part(0)]})
    assert sound["drop"] == ((0,), [part(0)], state, entries[0])
    assert sound["continue a drop"] == entries


@pytest.mark.parametrize("table", COLUMNS)
def test_another_valid_value_of_any_column_is_noticed_or_harmless(table: str, tmp_path: Path) -> None:
    unnoticed: dict[tuple[str, int, str], None] = {}
    with closing(full_file(tmp_path)) as file:
        sound = {name: answer(call, file) for name, call in CALLS.items()}
        assert CorruptDataError not in sound.values()
        rows = rows_of(file, table)
        for number, row in enumerate(rows):
            for column, name in enumerate(COLUMNS[table]):
                for value in others(row[column], [each[column] for each in rows]):
                    file.execute("SAVEPOINT harm")
                    with suppress(sqlite3.IntegrityError):  # the key of another row
                        file.execute(f"UPDATE {table} SET {name} = ? WHERE {only(table)}", (value, *row))
                        verdicts = judged(file, sound)
                        if "wrong" in verdicts.values() or "noticed" not in verdicts.values():
                            unnoticed[table, number, name] = None
                    file.execute("ROLLBACK TO harm")
    assert unnoticed.keys() == {key for key in HARMLESS_COLUMNS if key[0] == table}


@pytest.mark.parametrize(
    ("table", "column", "call"),
    [
        ("partitions", "topic", "span 0"),
        ("groups", "name", "names"),
        ("groups", "body", "read group"),
        ("heard", "member", "read group"),
    ],
    ids=lambda each: each,
)
def test_text_that_is_no_utf8_is_damage_of_its_row_and_no_failure_of_the_file(
    table: str, column: str, call: str, tmp_path: Path
) -> None:
    with closing(full_file(tmp_path)) as file:
        (key, *_), *_ = rows_of(file, table)
        file.execute(f"UPDATE {table} SET {column} = CAST(x'ff41' AS TEXT) WHERE {COLUMNS[table][0]} = ?", (key,))
        assert answer(CALLS[call], file) is CorruptDataError
        assert answer(CALLS["read 1"], file) == log.read(file, part(1), 2, 1 << 20)


def test_a_row_with_the_content_of_another_is_noticed(tmp_path: Path) -> None:
    """All columns but the key, the checksum among them: a page that was written to the wrong place."""
    keys = {"partitions": 1, "entries": 1, "epochs": 2, "groups": 1, "heard": 2, "positions": 2}
    with closing(full_file(tmp_path)) as file:
        sound = {name: answer(call, file) for name, call in CALLS.items()}
        for table, columns in COLUMNS.items():
            key, rows = keys[table], rows_of(file, table)
            content = ", ".join(f"{column} = ?" for column in columns[key:])
            for row, other in ((row, other) for row in rows for other in rows if row[key:] != other[key:]):
                file.execute("SAVEPOINT harm")
                with suppress(sqlite3.IntegrityError):  # two rows of one partition
                    file.execute(f"UPDATE {table} SET {content} WHERE {only(table)}", (*other[key:], *row))
                    verdicts = judged(file, sound)
                    assert "wrong" not in verdicts.values(), (table, row, other, verdicts)
                    assert "noticed" in verdicts.values(), (table, row, other)
                file.execute("ROLLBACK TO harm")


@pytest.mark.parametrize("table", ["entries", "epochs", "positions"])
def test_a_row_of_another_topic_is_noticed_though_all_its_columns_are_the_same(table: str, tmp_path: Path) -> None:
    """A page of another file, or of a partition that had the id before."""
    with closing(full_file(tmp_path, "views")) as file:
        strange = rows_of(file, table)
    with closing(full_file(tmp_path)) as file:
        sound = {name: answer(call, file) for name, call in CALLS.items()}
        for row, other in zip(rows_of(file, table), strange, strict=True):
            assert row[:-1] == other[:-1]
            file.execute("SAVEPOINT harm")
            file.execute(f"UPDATE {table} SET checksum = ? WHERE {only(table)}", (other[-1], *row))
            verdicts = judged(file, sound)
            assert "wrong" not in verdicts.values(), (row, verdicts)
            assert "noticed" in verdicts.values(), row
            file.execute("ROLLBACK TO harm")


def test_a_lost_row_is_noticed_or_harmless(tmp_path: Path) -> None:
    unnoticed: dict[tuple[str, int], None] = {}
    with closing(full_file(tmp_path)) as file:
        sound = {name: answer(call, file) for name, call in CALLS.items()}
        for table in COLUMNS:
            for number, row in enumerate(rows_of(file, table)):
                file.execute("SAVEPOINT harm")
                file.execute(f"DELETE FROM {table} WHERE {only(table)}", row)
                verdicts = judged(file, sound)
                if table == "partitions":
                    said = f"NotFoundError: {missing_partition(part(number))}"
                    assert answer(CALLS[f"span {number}"], file) == said
                elif "wrong" in verdicts.values() or "noticed" not in verdicts.values():
                    unnoticed[table, number] = None
                file.execute("ROLLBACK TO harm")
    assert unnoticed.keys() == HARMLESS_LOSSES.keys()


NAMES = {"topic": "other", "topic_id": "0c" * 16, "partition": 9}
REST: dict[str, object] = {"stale_publish_ms": 1, "begin": 3, "next": 2, "time_max": 0, "dropped": 1, "epochs": 0}


@pytest.mark.parametrize("column", [*NAMES, *REST, "checksum"])
def test_a_damaged_row_of_a_partition_is_an_error_of_that_partition_alone(column: str, tmp_path: Path) -> None:
    path, new = tmp_path / "queue.sqlite", ReadPartition("new", "0d" * 16, 0)
    filled(path)
    value = {**NAMES, **REST, "checksum": 7}[column]
    assert harm(path, f"UPDATE partitions SET {column} = ? WHERE topic = ? AND partition = 1", value, part().topic)

    async def test(queue: SqliteQueue, clock: ManualClock) -> None:
        assert await queue.span(part(0)) == Span(0, ENTRIES)
        assert await queue.publish(publication(clock, b"new")) == ENTRIES
        await queue.create([new], STALE_MS)
        assert await queue.span(new) == Span(0, 0)
        await queue.drop([new])
        with pytest.raises(CorruptDataError) as caught:
            await queue.span(part(1))
        assert "in the queue is damaged" in str(caught.value)
        assert "memq restore" in caught.value.hint
        if column not in NAMES:
            assert f"the row of partition 1 of topic '{part().topic}'" in str(caught.value)
            assert await queue.partitions() == [part(0), part(1)]
        else:
            with pytest.raises(CorruptDataError, match="in the queue is damaged"):
                await queue.partitions()  # it may be one of any topic
        for again in (part(1), ReadPartition(part().topic, part().topic_id, 1)):
            with pytest.raises(CorruptDataError):
                await queue.create([again], STALE_MS)  # its offsets would be used twice

    opened(path, test)


def test_a_damaged_row_that_nothing_names_stops_what_it_may_be_alone(tmp_path: Path) -> None:
    """It was never opened: it has neither epochs nor entries."""
    path, (one, other) = tmp_path / "queue.sqlite", (ReadPartition("one", each * 16, 0) for each in ("0a", "0b"))

    async def fill(queue: SqliteQueue, clock: ManualClock) -> None:
        await queue.create([one], STALE_MS)

    async def test(queue: SqliteQueue, clock: ManualClock) -> None:
        with pytest.raises(CorruptDataError):
            await queue.create([other], STALE_MS)  # of which one value differs
        new = ReadPartition("new", "0c" * 16, 0)
        await queue.create([new], STALE_MS)
        assert await queue.partitions() == [one, new], "nothing is lost of it"
        await queue.publish(publication(clock, partition=new))
        assert await queue.partitions() == [one, new], "the entries of the next row say nothing about it"

    opened(path, fill)
    assert harm(path, "UPDATE partitions SET stale_publish_ms = 1")
    opened(path, test)
    assert harm(path, "UPDATE partitions SET topic = x'00ff' WHERE id = 1")
    opened(path, lambda queue, clock: refused(queue))


async def refused(queue: SqliteQueue) -> None:
    with pytest.raises(CorruptDataError):
        await queue.partitions()


def test_a_damaged_group_keeps_no_topic_from_being_deleted(tmp_path: Path) -> None:
    async def drop(queue: SqliteQueue, clock: ManualClock) -> None:
        await queue.drop([part(1)])
        with pytest.raises(CorruptDataError):
            await queue.former.read(GROUP)

    filled(tmp_path / "queue")
    assert harm(tmp_path / "queue", "UPDATE groups SET body = 5")
    opened(tmp_path / "queue", drop)
