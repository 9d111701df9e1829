"""Checksums of rows in memq's SQLite files.

Damage that leaves another valid value is noticed when the row is read.

A row's checksum is the CRC-32C of its table's name and a list of its other columns, as MessagePack, which keeps the
types apart. It continues at the checksum of what the row belongs to (`of`), so that no row passes for one of another
partition. A row that was replaced as a whole by an older state of itself is not noticed.

Layout 1 had no checksums: `add_checksums` copies its tables. A value that no memq has written gets a checksum that
never matches, so the row is damaged after the copy, too.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from awscrt.checksums import crc32c

from memq.errors import CorruptDataError
from memq.notification.sqlite.file import COPY_HINT

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
