"""Opens memq's SQLite files, safe against power loss; translates SQLite's errors; checks rows.

The queue and the standalone coordinator keep their state by it. Damage that leaves another valid value is noticed when
the row is read. A row's checksum is the CRC-32C of its table's name and a list of its other columns, as MessagePack,
which keeps the types apart. It continues at the checksum of what the row belongs to (`of`), so that no row passes for
one of another partition. A row that was replaced as a whole by an older state of itself is not noticed.

Layout 1 had no checksums: `add_checksums` copies its tables. A value that no memq has written gets a checksum that
never matches, so the row is damaged after the copy, too.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, DeniedError, MemqError, RetryableError, UnsupportedFormatError
from memq.limits import MIB

COPY_HINT = "stop memq, keep the file, and restore it from a copy"
_DENIED = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
UPGRADE_SIZES = 3  # measured: the log takes 1.9 times the file, which then grows by 0.9
_WAL_TRIES_MAX = 200
_WAL_RETRY_S = 0.01
NEVER = -1  # matches no row
_KINDS: dict[str, type] = {"INTEGER": int, "TEXT": str, "BLOB": bytes}
_encode = msgspec.msgpack.Encoder().encode


def checksum(table: str, values: tuple[object, ...], of: int = 0) -> int:
    """Return the checksum of a row's other columns; `of` is that of what it belongs to."""
    try:
        found: int = crc32c(_encode((table, values)), of)
    except UnicodeEncodeError:  # text that is no UTF-8, see `SqliteFile.connect`
        return NEVER
    return found


def is_sound(table: str, row: tuple[Any, ...], of: int = 0) -> bool:
    """Whether the last column of a row is the checksum of the others."""
    return bool(checksum(table, row[:-1], of) == row[-1] != NEVER)


def add_checksums(connection: sqlite3.Connection, schema: Sequence[str], copies: dict[str, str]) -> None:
    """Replace tables of a layout without checksums by those of `schema`, in the caller's transaction.

    `copies` are the tables, each with the SELECT of its new rows. That SELECT reads the old table `old_NAME`, and calls
    `row_checksum(of, table, column, …)`. They are copied in this order.
    Raises: CorruptDataError for text that is no UTF-8.
    """
    for table in copies:
        connection.execute(f"ALTER TABLE {table} RENAME TO old_{table}")
    indexes = connection.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL").fetchall()
    for (index,) in indexes:
        connection.execute(f"DROP INDEX {index}")
    for statement in schema:
        connection.execute(statement)
    for table, select in copies.items():
        columns = connection.execute(f"PRAGMA table_info({table})").fetchall()
        kinds = tuple(_KINDS[kind] for _, _, kind, *_ in columns[:-1])
        connection.create_function("row_checksum", -1, partial(_checksum_of_old, table, kinds), deterministic=True)
        try:
            connection.execute(f"INSERT INTO {table} {select}")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:
                raise
            text = f"a row of table '{table}' can't be read: {error}"
            raise CorruptDataError(text, hint=COPY_HINT) from error
    for table in reversed(copies):
        connection.execute(f"DROP TABLE old_{table}")


def _checksum_of_old(table: str, kinds: tuple[type, ...], of: int, name: str, *values: object) -> int:
    """Return the checksum of a row of an earlier layout; NEVER when memq has not written it so."""
    fits = name != table or tuple(map(type, values)) == kinds
    sound = fits and not any(isinstance(value, int) and value < 0 for value in values)
    return checksum(name, values, of) if sound else NEVER


@dataclass(frozen=True, slots=True)
class SqliteFile:
    """A kind of file: `application_id` identifies it, `schema` creates its latest layout.

    `upgrades` bring an earlier layout to the next one, the first those of layout 1. `failed` is the error of what may
    pass, `busy_timeout_ms` how long a connection waits for another's lock.
    """

    path: Path
    what: str
    application_id: int
    schema: Sequence[str]
    failed: type[RetryableError]
    busy_timeout_ms: int = 10_000
    upgrades: Sequence[Callable[[sqlite3.Connection], None]] = ()

    @property
    def version(self) -> int:
        """The number of the latest layout."""
        return len(self.upgrades) + 1

    def connect(self) -> sqlite3.Connection:
        """Open the file, making it when it is not there: WAL, and an fsync with every commit.

        A file of an earlier layout is brought to the latest one, in one transaction. The connection begins no
        transaction by itself, and any one thread at a time may use it. Text that is no UTF-8 is read with surrogates,
        so that it is damage of its row and not a failure of the file.
        Raises: CorruptDataError, UnsupportedFormatError, DeniedError, or `failed`.
        """
        try:
            connection = sqlite3.connect(
                self.path, timeout=self.busy_timeout_ms / 1_000, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise self.error(error) from error
        connection.text_factory = _text
        try:
            self._prepare(connection)
        except sqlite3.Error as error:
            connection.close()
            raise self.error(error) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        known = (_number(connection, "PRAGMA application_id"), _number(connection, "PRAGMA user_version"))
        if known != (self.application_id, self.version):
            self._make(connection)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = ON")  # macOS: past the disk's own cache, too
        connection.execute("PRAGMA foreign_keys = ON")

    def _make(self, connection: sqlite3.Connection) -> None:
        """Make an empty file ours, or one of an earlier layout. Of several processes the first one does it."""
        _enter_wal(connection)
        connection.execute("BEGIN IMMEDIATE")
        version = _number(connection, "PRAGMA user_version")
        application_id = _number(connection, "PRAGMA application_id")
        empty = not _number(connection, "SELECT count(*) FROM sqlite_master")
        if application_id != self.application_id and not (empty and version == 0):
            raise CorruptDataError(f"{self.what} '{self.path}' is a SQLite file of another program")
        if version > self.version:
            raise UnsupportedFormatError(
                f"{self.what} '{self.path}' has layout {version}, this memq knows {self.version}"
            )
        if version == 0:
            for statement in self.schema:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {self.application_id:d}")
        try:
            for upgrade in self.upgrades[version - 1 :] if version else ():
                upgrade(connection)
            connection.execute(f"PRAGMA user_version = {self.version:d}")
            connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if version in (0, self.version) or _code(error) not in _NO_ROOM:
                raise
            raise self._no_upgrade(version, error) from error

    def _no_upgrade(self, version: int, error: sqlite3.Error) -> MemqError:
        """Return the error of an upgrade that the disk did not take: its transaction is rolled back."""
        size = UPGRADE_SIZES * self.path.stat().st_size
        return self.failed(
            f"{self.what} '{self.path}' was not upgraded from layout {version} to {self.version}, and is as it was:"
            f" {str(error).lower()}",
            hint=f"make sure that the disk has {size / MIB:.1f} MiB free, {UPGRADE_SIZES} times its size; start again",
        )

    def error(self, error: sqlite3.Error) -> MemqError:
        """Return memq's error for one of SQLite's; the caller raises it from that."""
        code = _code(error)
        text = f"{self.what} '{self.path}': {str(error).lower()}"
        if code in _DAMAGED:
            return CorruptDataError(text, hint=COPY_HINT)
        if code in _DENIED or (code == sqlite3.SQLITE_CANTOPEN and self.path.parent.is_dir()):
            return DeniedError(text, hint=f"give memq the right to write '{self.path.parent}' and the files in it")
        if code == sqlite3.SQLITE_FULL:
            return self.failed(text, hint="the disk is full: make room; the request is tried again")
        return self.failed(text)


def copy_database(source: Path, target: Path, what: str) -> None:
    """Copy all that a SQLite file holds, its log included, into a new file. Raises: CorruptDataError."""
    try:
        with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
            old.backup(new)
    except sqlite3.DatabaseError as error:
        raise CorruptDataError(
            f"{what} '{source}': {str(error).lower()}", hint="move it away first if it is beyond repair"
        ) from error


def _enter_wal(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log.

    Two first openers can meet here, and SQLite's own waiting does not cover it.
    """
    pause = threading.Event()
    for last in range(_WAL_TRIES_MAX, 0, -1):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or last == 1:
                raise
            pause.wait(_WAL_RETRY_S)
        else:
            return


def _code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)) & 0xFF


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _number(connection: sqlite3.Connection, query: str) -> int:
    with closing(connection.execute(query)) as rows:
        return int(rows.fetchone()[0])
