"""Logs in SQLite with many lost or damaged rows: reads are bounded, and damage of a partition concerns no other."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from memq.errors import CorruptDataError, QueueError
from memq.notification import Entry, Publication, Span
from memq.notification.sqlite import log
from memq.notification.sqlite.queue import APPLICATION_ID, SCHEMA
from memq.runtime.sqlite_file import SqliteFile, is_sound
from tests.contract.queues import STALE_MS, part

COUNT = 10
LOST_MAX = 4


@pytest.fixture(name="file")
def file_with_a_log(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """Yield a file in a transaction: `part(0)` has COUNT entries, 1 s apart, and `part(1)` one."""
    path = tmp_path / "queue.sqlite"
    with closing(SqliteFile(path, "queue file", APPLICATION_ID, SCHEMA, QueueError).connect()) as file:
        file.execute("BEGIN")
        log.create(file, [part(0), part(1)], STALE_MS)
        for number in range(COUNT):
            log.publish(file, Publication(part(0), 0, 1, 1_000 * number, b"%d" % number))
        log.publish(file, Publication(part(1), 0, 1, 0, b"other"))
        yield file


def expected_seek(lost: range, time_ms: int) -> int:
    """Return the first entry of the time, or the first lost one before it."""
    found = next((each for each in range(COUNT) if each not in lost and 1_000 * each >= time_ms), COUNT)
    while found - 1 in lost:
        found -= 1
    return found


@pytest.mark.parametrize("harm", ["DELETE FROM entries", "UPDATE entries SET body = 'x'"])
def test_each_run_of_lost_entries_is_read_in_bounded_answers(
    harm: str, file: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined: list[str] = []

    def counted(table: str, row: tuple[object, ...], of: int = 0) -> bool:
        examined.append(table)
        return is_sound(table, row, of)

    monkeypatch.setattr(log, "is_sound", counted)
    monkeypatch.setattr(log, "LOST_PER_READ_MAX", LOST_MAX)
    for lost in (range(first, end) for end in range(1, COUNT + 1) for first in range(end)):
        file.execute("SAVEPOINT harm")
        file.execute(f"{harm} WHERE id >= ? AND id < ?", ((1 << 40) + lost.start, (1 << 40) + lost.stop))
        shown: list[Entry] = []
        while len(shown) < COUNT:
            examined.clear()
            page = log.read(file, part(), len(shown), 1 << 20)
            assert page.next == len(shown) + len(page)
            assert sum(entry.lost for entry in page) <= LOST_MAX
            assert examined.count("entries") <= len(page) + 1
            shown += page
        assert [(each.offset, each.body) for each in shown] == [
            (each, b"" if each in lost else b"%d" % each) for each in range(COUNT)
        ]
        for time_ms in range(0, 1_000 * COUNT + 1, 500):
            found, expected = log.seek_time(file, part(), time_ms), expected_seek(lost, time_ms)
            assert found == expected or (found < expected and len(lost) >= LOST_MAX), "earlier is never wrong"
        file.execute("ROLLBACK TO harm")


@pytest.mark.parametrize("number", [-1, 0, (1 << 23) - 1, 1 << 23, 1 << 62])
def test_a_row_whose_id_can_have_no_entries_stops_the_list_of_partitions(number: int, file: sqlite3.Connection) -> None:
    file.execute("UPDATE partitions SET id = ? WHERE id = 1", (number,))
    with pytest.raises(CorruptDataError, match="in the queue is damaged"):
        log.partitions(file, None)
    assert log.span(file, part(1)) == Span(0, 1)


@pytest.mark.parametrize("column", ["next", "epochs"])
@pytest.mark.parametrize("first", [0, 1])
def test_a_damaged_row_of_a_used_partition_is_listed_while_an_epoch_or_an_entry_proves_its_name(
    column: str, first: int, file: sqlite3.Connection
) -> None:
    """When nothing proves it, its log may be one of any topic."""
    deletions = ["DELETE FROM entries WHERE id >= 2 << 40", "DELETE FROM epochs WHERE partition_id = 2"]
    file.execute(f"UPDATE partitions SET {column} = 0 WHERE id = 2")
    file.execute(deletions[first])
    assert log.partitions(file, None) == [part(0), part(1)]
    file.execute(deletions[1 - first])
    with pytest.raises(CorruptDataError, match="in the queue is damaged"):
        log.partitions(file, None)


def test_a_damaged_row_whose_entries_prove_its_name_keeps_no_similar_partition_from_being_created(
    file: sqlite3.Connection,
) -> None:
    file.execute("UPDATE partitions SET time_max = 7 WHERE id = 2")
    log.create(file, [part(2)], STALE_MS)
    assert log.span(file, part(2)) == Span(0, 0)
    with pytest.raises(CorruptDataError, match="the row of partition 1 of topic 'clicks'"):
        log.create(file, [part(1)], STALE_MS)


def test_a_partition_that_exists_gets_the_new_bound_of_late_publishes(file: sqlite3.Connection) -> None:
    log.create(file, [part(0), part(1)], STALE_MS + 1)
    assert [log.partition_row(file, part(number)).stale_publish_ms for number in (0, 1)] == [STALE_MS + 1] * 2
    assert log.span(file, part(0)) == Span(0, COUNT)
