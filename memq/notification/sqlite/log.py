"""Logs of pointers in SQLite: each function is one request on a connection.

**Rows.** An entry's row id is `partition id << 40 | offset`. So one tree has all logs, an append goes to the end of
its partition's range, and a read is one range scan. Offsets are dense from `begin` to `next`, since only `trim`
deletes entries, from the front. `next` is in the partition's row, so no offset is used twice. Partition ids are
never reused.

**Time.** Queue times are nearly in order, but not always. Each entry has the greatest time up to it, which never
decreases. So a bisection finds the first entry at or after a time, and publishes need not maintain an index.

**Damage.** Each row has a checksum (`memq.runtime.sqlite_file`). The checksum of an entry or an epoch continues
the one of its partition's name and id. If an entry's row is damaged, or missing between `begin` and `next`, a read
returns the entry without a body. It is a lost pointer, for which each reader has a rule. All other damage raises
CorruptDataError: a damaged row of a partition or an epoch, or a missing epoch (`epochs` counts them). An entry after
the end is damage, too: an append would use its offset again. A damaged row affects its partition only, because its
epochs and entries prove its name. A partition without a row is missing if no damaged row can be its own.

**Long deletions** are split into transactions of `DELETE_ROWS_MAX` rows, so that other writers get their turn. The
first transaction hides all rows to be deleted. The next deletion of the same kind continues an interrupted one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import lru_cache
from typing import Any, NamedTuple

from memq.errors import CorruptDataError, MemqError
from memq.notification import Entries, Entry, Publication, Span, check_epoch, missing_partition
from memq.runtime.sqlite_file import COPY_HINT, NEVER, checksum, is_sound
from memq.topic import ReadPartition

RESTORE_HINT = f"{COPY_HINT}, or rebuild it with 'memq restore'"
DELETE_ROWS_MAX = 5_000
LOST_PER_READ_MAX = 1_000  # entries without a body in one read: each takes 100 bytes of memory
OFFSET_BITS = 40
IDS = range((1 << 63 - OFFSET_BITS) - 1)  # of partitions: their entries have row ids of 63 bits
PROOFS_MAX = 100  # entries that are read to find one that proves the name of its partition
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
        """Checksum of the partition's id and name; the checksums of its rows continue it."""
        return _identity(self[:4])

    def entry_id(self, offset: int) -> int:
        """Return the row id of the entry at `offset`."""
        return self.id << OFFSET_BITS | offset

    def __str__(self) -> str:
        """Name the partition, for errors."""
        return f"partition {self.partition} of topic '{self.topic}'"


@lru_cache(maxsize=4_096)  # partitions in use; each takes 300 bytes
def _identity(values: tuple[int | str, ...]) -> int:
    return checksum("log", values)


_SoundEntry = tuple[int, int, int, bytes]  # offset, time, greatest time up to this entry, body


def partitions(connection: sqlite3.Connection, topic: str | None) -> list[ReadPartition]:
    """Return the read partitions of all topics of this name; of all names for None.

    Partitions with damaged rows are included: a read of them raises the error. Raises: CorruptDataError for a damaged
    row whose epochs and entries do not prove its name.
    """
    found: list[LogRow] = []
    for values in connection.execute(f"{_ROWS} ORDER BY id").fetchall():
        row, fault = _row(values), _fault(values)
        if fault is not None and not _is_called(connection, row.id, row[1:4], without_rows=_is_unused(row)):
            raise fault
        if topic in (None, row.topic) and (fault is not None or not row.dropped):
            found.append(row)
    return [ReadPartition(row.topic, row.topic_id, row.partition) for row in found]


def partition_row(connection: sqlite3.Connection, partition: ReadPartition) -> LogRow:
    """Return the partition's row.

    Raises: NotFoundError; CorruptDataError, also when a damaged row may be this partition's.
    """
    row = find_row(connection, partition)
    if row is None:
        raise missing_partition(partition)
    return row


def find_row(connection: sqlite3.Connection, partition: ReadPartition) -> LogRow | None:
    """Return the partition's row, None when there is none. Raises: CorruptDataError, as `partition_row`."""
    return next(find_rows(connection, (partition,)))


def find_rows(connection: sqlite3.Connection, partitions: Iterable[ReadPartition]) -> Iterator[LogRow | None]:
    """Yield the row of each partition, None when there is none: searched when it is requested.

    Only the first partition without a row costs a check of all rows. The caller may add rows meanwhile.
    Raises: CorruptDataError, as `partition_row`.
    """
    faults: list[tuple[LogRow, CorruptDataError]] | None = None
    for partition in partitions:
        key = (partition.topic, partition.topic_id, partition.partition)
        found = connection.execute(_ROW, key).fetchone()
        if found is not None:
            yield _checked((found[0], *key, *found[1:]))
            continue
        if faults is None:
            faults = _damaged_rows(connection)
        for row, fault in faults:
            if _may_be(connection, row, key):
                raise fault
        yield None


def _damaged_rows(connection: sqlite3.Connection) -> list[tuple[LogRow, CorruptDataError]]:
    rows = connection.execute(f"{_ROWS} ORDER BY id").fetchall()
    return [(_row(values), fault) for values in rows if (fault := _fault(values)) is not None]


def _may_be(connection: sqlite3.Connection, row: LogRow, key: tuple[str, str, int]) -> bool:
    """Whether a damaged row may belong to a partition without a row, which then must not be created again."""
    if _is_called(connection, row.id, key):
        return True
    if _is_called(connection, row.id, row[1:4]):
        return False  # its name is another one
    return sum(one != other for one, other in zip(row[1:4], key, strict=True)) < 2  # never opened: no proof of a name


def _is_unused(row: LogRow) -> bool:
    """Whether a damaged row has names of the right types, and belongs to a partition never opened."""
    return tuple(map(type, row[1:4])) == (str, str, int) and not (row.next or row.epochs)


def _is_called(
    connection: sqlite3.Connection, number: int, names: tuple[Any, ...], *, without_rows: bool = False
) -> bool:
    """Whether an epoch or an entry proves the topic, topic id and number of the partition with a row id.

    `without_rows` is the result for a partition without both, which was never opened.
    """
    identity = checksum("log", (number, *names))
    epochs = connection.execute(_EPOCHS, (number,)).fetchall()
    if any(is_sound("epochs", each, identity) for each in epochs):
        return True
    if number not in IDS:
        return False
    bounds = (number << OFFSET_BITS, number + 1 << OFFSET_BITS)
    entries = connection.execute(f"{_ENTRIES} LIMIT {PROOFS_MAX}", bounds).fetchall()
    if not epochs and not entries:
        return without_rows
    return any(is_sound("entries", each, identity) for each in entries)


def log_rows(connection: sqlite3.Connection, numbers: Sequence[int]) -> dict[int, LogRow]:
    """Return the rows of existing partitions, by id. Raises: CorruptDataError."""
    found = (connection.execute(f"{_ROWS} WHERE id = ? AND dropped = 0", (number,)).fetchone() for number in numbers)
    return {row[0]: _checked(row) for row in found if row is not None}


def damaged(name: str, why: str = "its checksum is wrong") -> CorruptDataError:
    """Return the error for a damaged row of the queue's file."""
    return CorruptDataError(f"{name} in the queue is damaged: {why}", hint=RESTORE_HINT)


def _checked(found: tuple[Any, ...]) -> LogRow:
    fault = _fault(found)
    if fault is not None:
        raise fault
    return _row(found)


def _row(found: tuple[Any, ...]) -> LogRow:
    return LogRow(*found[:-1])


def _fault(found: tuple[Any, ...]) -> CorruptDataError | None:
    """Return the damage of a partition's row, or None."""
    row = _row(found)
    if not is_sound("partitions", found):
        return damaged(f"the row of {row}")
    if not row.begin <= row.next < 1 << OFFSET_BITS:
        return damaged(f"the row of {row}", f"{row.begin} to {row.next} is no range of offsets")
    return None


def _store(connection: sqlite3.Connection, row: LogRow) -> None:
    """Write the columns that can change, except `dropped`, which is in an index."""
    connection.execute(
        """UPDATE partitions SET stale_publish_ms = ?, begin = ?, next = ?, time_max = ?, epochs = ?, checksum = ?
        WHERE id = ?""",
        (row.stale_publish_ms, row.begin, row.next, row.time_max, row.epochs, checksum("partitions", row), row.id),
    )


def _check_end(connection: sqlite3.Connection, row: LogRow) -> None:
    """Raise CorruptDataError when entries exist after the end: an append would use their offsets again."""
    behind = (row.entry_id(row.next), (row.id + 1) << OFFSET_BITS)
    if connection.execute("SELECT 1 FROM entries WHERE id >= ? AND id < ? LIMIT 1", behind).fetchone():
        raise damaged(f"the log of {row}", f"it ends at offset {row.next}, and has entries after it")


def publish(connection: sqlite3.Connection, publication: Publication) -> int:
    """Append an entry and return its offset.

    Raises, always before the first write: EpochFencedError, NotFoundError, CorruptDataError.
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
    """Return the highest epoch of a write partition, None if it has none. Raises: CorruptDataError."""
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

    LOST_PER_READ_MAX consecutive damaged rows count as damage up to the end. The time of the end is one that no
    entry exceeds. Close the generator: an open statement keeps its view of the file, and SQLite can't reset its log.
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
                break
    yield end, row.time_max, row.time_max, b""


def span(connection: sqlite3.Connection, partition: ReadPartition) -> Span:
    """Return the span of the partition, see `PointerReader.span`."""
    row = partition_row(connection, partition)
    _check_end(connection, row)
    return Span(row.begin, row.next)


def seek_time(connection: sqlite3.Connection, partition: ReadPartition, time_ms: int) -> int:
    """Return the least offset at or after a queue time, see `PointerReader.seek_time`.

    A lost entry may have that time, so its offset is returned if the entries before it are earlier. Call this in one
    transaction.
    """
    row = partition_row(connection, partition)
    low, high = row.begin, row.next
    while low < high:
        middle = (low + high) // 2
        with closing(_sound_entries(connection, row, middle, high)) as entries:
            _, _, time_max, body = next(entries)  # the entry at `middle`, or the next sound one
        low, high = (low, middle) if not body or time_max >= time_ms else (middle + 1, high)
    # The greatest time may be that of a trimmed entry: then the entry at `low` may be too early.
    with closing(_sound_entries(connection, row, low, row.next)) as entries:
        for offset, (there, entry_ms, _, body) in enumerate(entries, low):
            if there > offset or not body or entry_ms >= time_ms:
                return offset
    raise AssertionError("the last entry has no body")


def ends(connection: sqlite3.Connection, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, int | None]:
    """Return the next offset of each partition; None for a missing or damaged one: a read raises why."""
    found: dict[ReadPartition, int | None] = {}
    for partition in partitions:
        try:
            found[partition] = partition_row(connection, partition).next
        except MemqError:
            found[partition] = None
    return found


def create(connection: sqlite3.Connection, partitions: Sequence[ReadPartition], stale_publish_ms: int) -> None:
    """Create partitions; an existing one keeps its entries and gets the new `stale_publish_ms`."""
    for each, found in zip(partitions, find_rows(connection, partitions), strict=True):
        row = found or _insert(connection, each, stale_publish_ms)
        _store(connection, row._replace(stale_publish_ms=stale_publish_ms))


def _insert(connection: sqlite3.Connection, partition: ReadPartition, stale_publish_ms: int) -> LogRow:
    """Add a partition's row, which gets its checksum when it is stored."""
    names = (partition.topic, partition.topic_id, partition.partition)
    made = connection.execute(
        "INSERT INTO partitions (topic, topic_id, partition, stale_publish_ms, checksum) VALUES (?, ?, ?, ?, ?)",
        (*names, stale_publish_ms, NEVER),
    )
    return LogRow(made.lastrowid or 0, *names, stale_publish_ms)


def trim(connection: sqlite3.Connection, partition: ReadPartition, before: int) -> bool:
    """Hide the entries below `before` and delete some of them; return whether more may be left."""
    row = partition_row(connection, partition)
    begin = min(max(before, row.begin), row.next)
    _store(connection, row._replace(begin=begin))
    return _delete_entries(connection, row.entry_id(0), row.entry_id(begin))


def hide(connection: sqlite3.Connection, partitions: Sequence[ReadPartition]) -> None:
    """Hide partitions; `delete_hidden` deletes them."""
    for row in find_rows(connection, partitions):
        if row is not None:
            connection.execute("UPDATE partitions SET dropped = 1 WHERE id = ?", (row.id,))
            _store(connection, row._replace(dropped=1))


def delete_hidden(connection: sqlite3.Connection) -> bool:
    """Delete some rows of hidden partitions; return whether more may be left."""
    hidden = connection.execute(f"{_ROWS} WHERE dropped = 1 ORDER BY id").fetchall()
    row = next((_row(values) for values in hidden if _fault(values) is None), None)
    if row is None:
        return False
    if not _delete_entries(connection, row.entry_id(0), (row.id + 1) << OFFSET_BITS):
        connection.execute("DELETE FROM epochs WHERE partition_id = ?", (row.id,))
        connection.execute("DELETE FROM partitions WHERE id = ?", (row.id,))
    return True


def _delete_entries(connection: sqlite3.Connection, first: int, end: int) -> bool:
    """Delete at most `DELETE_ROWS_MAX` rows from `first` up to `end` (exclusive).

    Return whether more may be left.
    """
    last = connection.execute(
        "SELECT id FROM entries WHERE id >= ? AND id < ? ORDER BY id LIMIT 1 OFFSET ?",
        (first, end, DELETE_ROWS_MAX - 1),
    ).fetchone()
    connection.execute("DELETE FROM entries WHERE id >= ? AND id < ?", (first, last[0] + 1 if last else end))
    return last is not None
