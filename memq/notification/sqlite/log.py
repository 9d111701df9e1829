"""Logs of pointers in SQLite: each function is one request on a connection.

**Rows.** An entry's row id is `partition id << 40 | offset`: one tree holds all logs, an append goes to the end of
its partition's range, and a read is one range scan. Offsets are dense from `begin` to `next`, since only `trim` takes
entries, from the front; `next` lies in the partition's row, so no offset is used twice. Partition ids are never
used again.

**Time.** Queue times are nearly, but not surely, in order. Each entry carries the greatest time up to it, which only
grows, so the first entry at or after a time is found by bisection, without an index that every publish would pay for.

**Damage.** Each row has a checksum (`memq.notification.sqlite.file`), that of an entry and an epoch continues the one
of its partition's name and id. An entry whose row is damaged or missing between `begin` and `next` is shown without a
body, as a pointer that the queue has lost: each reader has a rule for that. All other damage is a CorruptDataError: of
a partition's row and of an epoch, a missing epoch (`epochs` counts them), and entries behind the end, over which
nothing is appended. A damaged row of a partition is an error of that partition alone. Its epochs and entries prove what
it is called; a partition whose row is not found is missing when no damaged row may be the one.

**Long deletions** are cut into transactions of `DELETE_ROWS_MAX` rows, that others may get in between. What is to be
deleted is out of sight from the first one on; what was broken off continues with the next call of its kind.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Sequence
from contextlib import closing
from functools import lru_cache
from typing import Any, NamedTuple

from memq.errors import CorruptDataError, MemqError
from memq.notification import Entries, Entry, Publication, Span, check_epoch, missing_partition
from memq.notification.sqlite.file import COPY_HINT, NEVER, checksum, is_sound
from memq.topic import ReadPartition

RESTORE_HINT = f"{COPY_HINT}, or rebuild it with 'memq restore'"
DELETE_ROWS_MAX = 5_000
LOST_PER_READ_MAX = 1_000  # entries without a body that one read shows: each costs 100 bytes of memory
OFFSET_BITS = 40
PROOFS_MAX = 100  # entries that are read for one that proves what its partition is called
_ROWS = """SELECT id, topic, topic_id, partition, stale_publish_ms, begin, next, time_max, dropped, epochs, checksum
FROM partitions"""
_ROW = """SELECT id, stale_publish_ms, begin, next, time_max, dropped, epochs, checksum FROM partitions
WHERE topic = ? AND topic_id = ? AND partition = ? AND dropped = 0"""
_EPOCHS = "SELECT partition_id, write_partition, epoch, checksum FROM epochs WHERE partition_id = ?"
_EPOCH = f"{_EPOCHS} AND write_partition = ?"
_ENTRIES = "SELECT id, time_ms, time_max, body, checksum FROM entries WHERE id >= ? AND id < ? ORDER BY id"


class LogRow(NamedTuple):
    """One partition's row, without its checksum."""

    id: int
    topic: str
    topic_id: str
    partition: int
    stale_publish_ms: int
    begin: int = 0
    next: int = 0
    time_max: int = 0
    dropped: int = 0
    epochs: int = 0

    @property
    def identity(self) -> int:
        """Checksum of what identifies the partition; those of its rows continue it."""
        return _identity(self[:4])

    def entry_id(self, offset: int) -> int:
        """Return the row id of the entry at `offset`."""
        return self.id << OFFSET_BITS | offset

    def __str__(self) -> str:
        """Name the partition, for errors."""
        return f"partition {self.partition} of topic '{self.topic}'"


@lru_cache(maxsize=4_096)  # of those in use; each costs 300 bytes
def _identity(values: tuple[int | str, ...]) -> int:
    return checksum("log", values)


_SoundEntry = tuple[int, int, int, bytes]  # offset, time, greatest time up to it, body


def partitions(connection: sqlite3.Connection, topic: str | None) -> list[ReadPartition]:
    """Return the read partitions of all topics of this name; of all names for None.

    Those with damaged rows are among them: a read of one is the error. Raises: CorruptDataError for a damaged row whose
    entries do not prove what it is called.
    """
    found: list[LogRow] = []
    for values in connection.execute(f"{_ROWS} ORDER BY id").fetchall():
        row, fault = LogRow(*values[:-1]), _fault(values)
        if fault is not None and not _is_called(connection, row.id, row[1:4], without_rows=_is_unused(row)):
            raise fault
        if topic in (None, row.topic) and (fault is not None or not row.dropped):
            found.append(row)
    return [ReadPartition(row.topic, row.topic_id, row.partition) for row in found]


def partition_row(connection: sqlite3.Connection, partition: ReadPartition) -> LogRow:
    """Return the partition's row.

    Raises: NotFoundError; CorruptDataError, also when another row is damaged that may be the one.
    """
    row = find_row(connection, partition)
    if row is None:
        raise missing_partition(partition)
    return row


def find_row(connection: sqlite3.Connection, partition: ReadPartition) -> LogRow | None:
    """Return the partition's row, None when there is none. Raises: CorruptDataError, as `partition_row`."""
    key = (partition.topic, partition.topic_id, partition.partition)
    found = connection.execute(_ROW, key).fetchone()
    if found is not None:
        return _checked((found[0], *key, *found[1:]))
    for values in connection.execute(f"{_ROWS} ORDER BY id").fetchall():
        fault = _fault(values)
        if fault is not None and _may_be(connection, LogRow(*values[:-1]), key):
            raise fault
    return None


def _may_be(connection: sqlite3.Connection, row: LogRow, key: tuple[str, str, int]) -> bool:
    """Whether a damaged row may be that of a partition that is not found, and must not be made again."""
    if _is_called(connection, row.id, key):
        return True
    if _is_called(connection, row.id, row[1:4]):
        return row[1:4] == key  # its mark of a deletion, by which it is looked up, may be the damage
    return sum(one != other for one, other in zip(row[1:4], key, strict=True)) < 2  # never opened


def _is_unused(row: LogRow) -> bool:
    """Whether a damaged row says, by values of the right types, that its partition was never opened."""
    return tuple(map(type, row[1:4])) == (str, str, int) and not (row.next or row.epochs)


def _is_called(
    connection: sqlite3.Connection, number: int, names: tuple[Any, ...], *, without_rows: bool = False
) -> bool:
    """Whether an epoch or an entry proves the topic, topic id and number of the partition with a row id.

    `without_rows` is the answer for one that has neither: it was never opened.
    """
    identity = checksum("log", (number, *names))
    epochs = connection.execute(_EPOCHS, (number,)).fetchall()
    if any(is_sound("epochs", each, identity) for each in epochs):
        return True
    if not 0 <= number < 1 << 63 - OFFSET_BITS:
        return False
    bounds = (number << OFFSET_BITS, (number + 1 << OFFSET_BITS) - 1)
    entries = connection.execute(f"{_ENTRIES} LIMIT {PROOFS_MAX}", bounds).fetchall()
    if not epochs and not entries:
        return without_rows
    return any(is_sound("entries", each, identity) for each in entries)


def log_rows(connection: sqlite3.Connection, numbers: Sequence[int]) -> dict[int, LogRow]:
    """Return the rows of those partitions that are there, by id. Raises: CorruptDataError."""
    found = (connection.execute(f"{_ROWS} WHERE id = ? AND dropped = 0", (number,)).fetchone() for number in numbers)
    return {row[0]: _checked(row) for row in found if row is not None}


def damaged(name: str, why: str = "its checksum is wrong") -> CorruptDataError:
    """Return the error of a row of the queue's file."""
    return CorruptDataError(f"{name} in the queue is damaged: {why}", hint=RESTORE_HINT)


def _checked(found: tuple[Any, ...]) -> LogRow:
    fault = _fault(found)
    if fault is not None:
        raise fault
    return LogRow(*found[:-1])


def _fault(found: tuple[Any, ...]) -> CorruptDataError | None:
    """Return what is wrong with a partition's row."""
    row = LogRow(*found[:-1])
    if not is_sound("partitions", found):
        return damaged(f"the row of {row}")
    if not row.begin <= row.next < 1 << OFFSET_BITS:
        return damaged(f"the row of {row}", f"{row.begin} to {row.next} is no range of offsets")
    return None


def _store(connection: sqlite3.Connection, row: LogRow) -> None:
    """Write what can change of a partition's row, but for `dropped`: that one is in an index."""
    connection.execute(
        """UPDATE partitions SET stale_publish_ms = ?, begin = ?, next = ?, time_max = ?, epochs = ?, checksum = ?
        WHERE id = ?""",
        (row.stale_publish_ms, row.begin, row.next, row.time_max, row.epochs, checksum("partitions", row), row.id),
    )


def _check_end(connection: sqlite3.Connection, row: LogRow) -> None:
    """Raise CorruptDataError when entries lie behind the end: what is appended would take their offsets."""
    behind = (row.entry_id(row.next), (row.id + 1) << OFFSET_BITS)
    if connection.execute("SELECT 1 FROM entries WHERE id >= ? AND id < ? LIMIT 1", behind).fetchone():
        raise damaged(f"the log of {row}", f"it ends at offset {row.next}, and has entries after it")


def publish(connection: sqlite3.Connection, publication: Publication) -> int:
    """Append an entry and return its offset.

    Raises: EpochFencedError, NotFoundError, CorruptDataError, all before the first write.
    """
    row = partition_row(connection, publication.partition)
    _check_end(connection, row)
    identity = row.identity
    highest = _highest_epoch(connection, row, identity, publication.write_partition)
    check_epoch(publication, highest or 0)
    if highest is None or publication.epoch > highest:
        epoch = (row.id, publication.write_partition, publication.epoch)
        connection.execute(
            "INSERT OR REPLACE INTO epochs (partition_id, write_partition, epoch, checksum) VALUES (?, ?, ?, ?)",
            (*epoch, checksum("epochs", epoch, identity)),
        )
    time_max = max(row.time_max, publication.time_ms)
    entry = (row.entry_id(row.next), publication.time_ms, time_max, publication.body)
    connection.execute(
        "INSERT INTO entries (id, time_ms, time_max, body, checksum) VALUES (?, ?, ?, ?, ?)",
        (*entry, checksum("entries", entry, identity)),
    )
    epochs = row.epochs + (highest is None)
    _store(connection, LogRow(*row[:6], row.next + 1, time_max, row.dropped, epochs))
    return row.next


def _highest_epoch(connection: sqlite3.Connection, row: LogRow, identity: int, write_partition: int) -> int | None:
    """Return the highest epoch of a write partition, None when it has none. Raises: CorruptDataError."""
    found = connection.execute(_EPOCH, (row.id, write_partition)).fetchone()
    rows = connection.execute(_EPOCHS, (row.id,)).fetchall() if found is None else [found]
    if not all(is_sound("epochs", each, identity) for each in rows):
        raise damaged(f"an epoch of {row}")
    if found is None and len(rows) != row.epochs:
        raise damaged(f"the log of {row}", f"it has the epochs of {len(rows)} write partitions, and had {row.epochs}")
    return None if found is None else int(found[2])


def read(connection: sqlite3.Connection, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
    """Return entries from `offset` on, see `PointerReader.read`."""
    row = partition_row(connection, partition)
    found: list[Entry] = []
    next_, size = min(max(offset, row.begin), row.next), 0
    with closing(_sound_entries(connection, row, next_, row.next)) as entries:
        for at, time_ms, _, body in entries:
            lost = range(next_, min(at, next_ + LOST_PER_READ_MAX))
            found += [Entry(each, time_ms, b"") for each in lost]
            next_, size = lost.stop, size + len(body)
            if next_ < at or at == row.next or (found and size > bytes_max):
                break
            found.append(Entry(at, time_ms, body))
            next_ += 1
    return Entries(found, next_ if found else max(offset, row.next))


def _sound_entries(connection: sqlite3.Connection, row: LogRow, first: int, end: int) -> Generator[_SoundEntry]:
    """Yield the entries from `first` up to `end` whose rows are sound, and then the end, without a body.

    Of very many damaged rows together the end is the last one; its time is one that no entry exceeds. Close it: an
    open statement would keep its view of the file, and the log from being reset.
    """
    identity, zero, unsound = row.identity, row.entry_id(0), 0
    with closing(connection.execute(_ENTRIES, (zero + first, zero + end))) as rows:
        for found in rows:
            if is_sound("entries", found, identity):
                unsound = 0
                yield found[0] - zero, found[1], found[2], found[3]
                continue
            unsound += 1
            if unsound == LOST_PER_READ_MAX:
                end = found[0] - zero
                break
    yield end, row.time_max, row.time_max, b""


def span(connection: sqlite3.Connection, partition: ReadPartition) -> Span:
    """Return what the partition holds."""
    row = partition_row(connection, partition)
    _check_end(connection, row)
    return Span(row.begin, row.next)


def seek_time(connection: sqlite3.Connection, partition: ReadPartition, time_ms: int) -> int:
    """Return the least offset at or after a queue time, see `PointerReader.seek_time`.

    An entry that the queue has lost may be of that time: its offset is returned when those before it are earlier. Run
    it in one transaction.
    """
    row = partition_row(connection, partition)
    low, high = row.begin, row.next
    while low < high:
        middle = (low + high) // 2
        with closing(_sound_entries(connection, row, middle, high)) as entries:
            _, _, time_max, body = next(entries)  # or the next one that is sound
        low, high = (low, middle) if not body or time_max >= time_ms else (middle + 1, high)
    # The entry that raised the greatest time may have been trimmed: then the first that is left is not it.
    with closing(_sound_entries(connection, row, low, row.next)) as entries:
        for offset, (there, entry_ms, _, body) in enumerate(entries, low):
            if there > offset or not body or entry_ms >= time_ms:
                return offset
    raise AssertionError("the last entry has no body")


def ends(connection: sqlite3.Connection, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, int | None]:
    """Return the next offset of each partition, None for a missing or damaged one: a read says which."""
    found: dict[ReadPartition, int | None] = {}
    for partition in partitions:
        try:
            found[partition] = partition_row(connection, partition).next
        except MemqError:
            found[partition] = None
    return found


def create(connection: sqlite3.Connection, partitions: Sequence[ReadPartition], stale_publish_ms: int) -> None:
    """Make partitions; one that is there keeps its entries and gets the new `stale_publish_ms`."""
    for each in partitions:
        row = find_row(connection, each)
        if row is None:
            made = connection.execute(
                """INSERT INTO partitions (topic, topic_id, partition, stale_publish_ms, checksum)
                VALUES (?, ?, ?, ?, ?)""",
                (each.topic, each.topic_id, each.partition, stale_publish_ms, NEVER),
            )
            row = LogRow(made.lastrowid or 0, each.topic, each.topic_id, each.partition, stale_publish_ms)
        _store(connection, row._replace(stale_publish_ms=stale_publish_ms))


def trim(connection: sqlite3.Connection, partition: ReadPartition, before: int) -> bool:
    """Put what lies below `before` out of sight and delete some of it; return whether there may be more."""
    row = partition_row(connection, partition)
    begin = min(max(before, row.begin), row.next)
    _store(connection, row._replace(begin=begin))
    return _delete_entries(connection, row.entry_id(0), row.entry_id(begin))


def hide(connection: sqlite3.Connection, partitions: Sequence[ReadPartition]) -> None:
    """Put partitions out of sight; `delete_hidden` deletes them."""
    for partition in partitions:
        row = find_row(connection, partition)
        if row is not None:
            connection.execute("UPDATE partitions SET dropped = 1 WHERE id = ?", (row.id,))
            _store(connection, row._replace(dropped=1))


def delete_hidden(connection: sqlite3.Connection) -> bool:
    """Delete some of what `hide` hid; return whether there may be more."""
    hidden = connection.execute(f"{_ROWS} WHERE dropped = 1 ORDER BY id").fetchall()
    row = next((LogRow(*values[:-1]) for values in hidden if _fault(values) is None), None)
    if row is None:
        return False
    if not _delete_entries(connection, row.entry_id(0), (row.id + 1) << OFFSET_BITS):
        connection.execute("DELETE FROM epochs WHERE partition_id = ?", (row.id,))
        connection.execute("DELETE FROM partitions WHERE id = ?", (row.id,))
    return True


def _delete_entries(connection: sqlite3.Connection, first: int, end: int) -> bool:
    """Delete at most `DELETE_ROWS_MAX` rows from `first` up to, not with, `end`.

    Return whether there may be more.
    """
    last = connection.execute(
        "SELECT id FROM entries WHERE id >= ? AND id < ? ORDER BY id LIMIT 1 OFFSET ?",
        (first, end, DELETE_ROWS_MAX - 1),
    ).fetchone()
    connection.execute("DELETE FROM entries WHERE id >= ? AND id < ?", (first, last[0] + 1 if last else end))
    return last is not None
