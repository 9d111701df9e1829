"""Opens memq's SQLite files, safe against power loss; translates SQLite's errors; checks rows.

The queue and the standalone coordinator keep their state in such files. SQLite does not notice a damaged value, so each
row has a checksum, which is checked at each read. It is the CRC-32C of the table's name and a list of the other
columns, as MessagePack, which distinguishes types. It continues the checksum of the row's parent (`of`), so that a row
is never taken for one of another partition. A whole row that was replaced by its own older state is not noticed.

Layout 1 had no checksums: `add_checksums` copies its tables. A value that memq never writes gets a checksum that
never matches, so the row is damaged after the copy, too.
"""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from awscrt.checksums import crc32c

from memq.errors import (
    CorruptDataError,
    DeniedError,
    InvalidRequestError,
    MemqError,
    RetryableError,
    UnsupportedFormatError,
)
from memq.limits import MIB
from memq.runtime.private_files import ensure_private

IN_MEMORY = ":memory:"  # SQLite's name of a database without a file
COPY_HINT = "stop memq, keep the file, and restore it from a copy"
MOVE_HINT = "move it away first if it is beyond repair"  # of a restore
_DENIED = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH)
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_NO_ROOM = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
UPGRADE_SIZES = 3  # free space for an upgrade: the log takes 1.9 times the file, which then grows by 0.9 (measured)
WAL_TRIES_MAX = 200
WAL_RETRY_S = 0.01
NEVER = -1  # matches no row
_KINDS: dict[str, type] = {"INTEGER": int, "TEXT": str, "BLOB": bytes}
_encode = msgspec.msgpack.Encoder().encode


def checksum(table: str, values: tuple[object, ...], of: int = 0) -> int:
    """Return the checksum of a row's other columns; `of` is the checksum of its parent."""
    try:
        found: int = crc32c(_encode((table, values)), of)
    except UnicodeEncodeError:  # text that is not UTF-8, see `SqliteFile.connect`
        return NEVER
    return found


def is_sound(table: str, row: tuple[Any, ...], of: int = 0) -> bool:
    """Whether the last column of a row is the checksum of the others."""
    return bool(checksum(table, row[:-1], of) == row[-1] != NEVER)


def add_checksums(connection: sqlite3.Connection, schema: Sequence[str], copies: dict[str, str]) -> None:
    """Replace tables of a layout without checksums by those of `schema`, in the caller's transaction.

    `copies` has the tables in the order in which they are copied, each with the SELECT of its new rows. That SELECT
    reads the old table `old_NAME`, and calls `row_checksum(of, table, column, …)`.
    Raises: CorruptDataError for a row that can't be read.
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
    """Return the checksum of a row of an earlier layout; NEVER for values that memq does not write."""
    fits = name != table or tuple(map(type, values)) == kinds
    sound = fits and not any(isinstance(value, int) and value < 0 for value in values)
    return checksum(name, values, of) if sound else NEVER


@dataclass(frozen=True, slots=True)
class SqliteFile:
    """A kind of file: `application_id` identifies it, `schema` creates its latest layout.

    `upgrades[n - 1]` brings layout n to the next one. `failed` is the class of errors that a retry may solve. A
    connection waits up to `busy_timeout_ms` for a lock that another one holds.
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
        """Open the file, and create it if it does not exist: WAL, and an fsync with every commit.

        A file of an earlier layout is upgraded to the latest one, in one transaction. The connection begins no
        transactions by itself, and one thread at a time may use it. Text that is not UTF-8 is read with surrogates,
        so that it counts as damage of its row, not as a failure of the file.
        Raises: CorruptDataError, UnsupportedFormatError, DeniedError, or `failed`.
        """
        if str(self.path) != IN_MEMORY:
            ensure_private(self.path)  # SQLite gives its log the mode of the file
        try:
            connection = sqlite3.connect(
                self.path, timeout=self.busy_timeout_ms / 1_000, isolation_level=None, check_same_thread=False
            )
            connection.text_factory = _text
            try:
                self._prepare(connection)
            except BaseException:
                connection.close()
                raise
        except sqlite3.Error as error:
            raise self.error(error) from error
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        known = (_number(connection, "PRAGMA application_id"), _number(connection, "PRAGMA user_version"))
        if known != (self.application_id, self.version):
            self._make(connection)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA fullfsync = ON")  # macOS: also flush the disk's own cache
        connection.execute("PRAGMA foreign_keys = ON")

    def _make(self, connection: sqlite3.Connection) -> None:
        """Create or upgrade the tables. If several processes open the file, the first one does it."""
        _enter_wal(connection)
        connection.execute("BEGIN IMMEDIATE")
        version = _number(connection, "PRAGMA user_version")
        application_id = _number(connection, "PRAGMA application_id")
        empty = not _number(connection, "SELECT count(*) FROM sqlite_master")
        if application_id != self.application_id and not (empty and version == 0):
            raise CorruptDataError(
                f"{self.what} '{self.path}' is a SQLite file of another program, or another file of memq",
                hint="name another file, or move this one away",
            )
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
        """Return the error of an upgrade that failed for lack of disk space, and was rolled back."""
        size = UPGRADE_SIZES * self.path.stat().st_size
        return self.failed(
            f"{self.what} '{self.path}' was not upgraded from layout {version} to {self.version}, and is as it was:"
            f" {str(error).lower()}",
            hint=f"make sure that the disk has {size / MIB:.1f} MiB free, {UPGRADE_SIZES} times its size; start again",
        )

    def error(self, error: sqlite3.Error) -> MemqError:
        """Return memq's error for an error of SQLite, for `raise ... from`."""
        return _failure(error, f"{self.what} '{self.path}'", self.path, self.failed)


def copy_database(source: Path, target: Path, what: str, failed: type[RetryableError]) -> None:
    """Copy the content of a SQLite file, its log included, into a new file.

    Raises: CorruptDataError for a damaged source; DeniedError; `failed`, for example when the disk is full.
    """
    ensure_private(target)
    try:
        with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
            old.backup(new)
    except sqlite3.Error as error:
        raise _failure(error, f"{what} '{source}', copied to '{target}'", target, failed, MOVE_HINT) from error


def copy_closed(source: Path, folder: Path, failed: type[RetryableError]) -> Path:
    """Copy a SQLite file and its log out of a folder that can't be written; return the copy.

    SQLite opens such a file while its `-shm` exists. Without it, no process has the file open, so files can be copied.
    Raises: OSError; `failed` if a process opens the file meanwhile.
    """
    copy = folder / source.name
    shutil.copyfile(source, copy)
    with suppress(FileNotFoundError):
        shutil.copyfile(f"{source}-wal", f"{copy}-wal")
    if Path(f"{source}-shm").exists():
        raise failed(f"'{source}' was opened by another process while it was copied", hint="try again")
    return copy


def write_log_into(path: Path, what: str, failed: type[RetryableError]) -> None:
    """Write SQLite's log of a file into the file, with an fsync: the file is then complete without it.

    SQLite tries this when the last connection closes, and reports no failure. Raises: as `copy_database`.
    """
    try:
        with closing(sqlite3.connect(path, timeout=0)) as connection:
            busy = _number(connection, "PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        raise _failure(error, f"{what} '{path}'", path, failed, MOVE_HINT) from error
    if busy:
        raise failed(f"{what} '{path}' is in use by another program", hint="end that program, and try again")


def _failure(
    error: sqlite3.Error, name: str, path: Path, failed: type[RetryableError], damage_hint: str = COPY_HINT
) -> MemqError:
    code = _code(error)
    text = f"{name}: {str(error).lower()}"
    if code in _DAMAGED:
        return CorruptDataError(text, hint=damage_hint)
    if code == sqlite3.SQLITE_CANTOPEN and path.is_dir():
        return InvalidRequestError(text, hint=f"'{path}' is a folder: name a file")
    if code == sqlite3.SQLITE_CANTOPEN and not path.parent.is_dir():
        return failed(text, hint=f"the folder '{path.parent}' does not exist: make it, or name another file")
    if code in (*_DENIED, sqlite3.SQLITE_CANTOPEN):
        return DeniedError(text, hint=f"give memq the right to write '{path.parent}' and the files in it")
    if code == sqlite3.SQLITE_FULL:
        return failed(text, hint="the disk is full: make room; the request is tried again")
    return failed(text)


def _enter_wal(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log.

    Two processes may do so at the same time, and SQLite's busy time-out does not cover this statement.
    """
    pause = threading.Event()
    for last in range(WAL_TRIES_MAX, 0, -1):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or last == 1:
                raise
            pause.wait(WAL_RETRY_S)
        else:
            return


def _code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)) & 0xFF


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _number(connection: sqlite3.Connection, query: str) -> int:
    with closing(connection.execute(query)) as rows:
        return int(rows.fetchone()[0])
