"""The records of an open block while they have one shape, and the lock-free path into them.

memq-native has compiled classes of the same names, which `memq.client.producer` uses if it is installed. A compiled
class adds a record and checks `closed` in one step under the GIL, so it needs no `take_late`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

# Shapes of records: only a value; value and key; value, key and timestamp; anything.
MIXED, PLAIN, KEYED, TIMED = range(4)
ONCE_COST = 16  # bytes of raw per block: number of headers, number of names, rounding of two bitmaps
# Bytes of raw per record and column. A value has its length and, rounded up, its share of two null bitmaps.
VALUE_COST, KEY_COST, TIMESTAMP_COST = 5, 4, 8
ROW_COSTS = {
    PLAIN: VALUE_COST,
    KEYED: VALUE_COST + KEY_COST,
    TIMED: VALUE_COST + KEY_COST + TIMESTAMP_COST,
}
_WIDTHS = {PLAIN: 1, KEYED: 2, TIMED: 3}  # cells of a row

Cells = Sequence[bytes | None]


class Rows:
    """Records of one shape that wait for their block.

    Rows are cells of one list, so a thread adds a record in one step. So threads may add rows without a lock, which
    would cost half of a `send`. The rule relies on the GIL: each step is atomic, and all threads see the steps in
    order.

    - The adding thread checks that `shape` is the record's shape, and that `room` suffices for its bytes and
      `row_cost`. It calls `cells.extend(row)`, where `row` has value, key and timestamp as far as the shape has them,
      or `cells.append(value)`. It sets `room`, then reads `closed`. If this is true, it calls `take_late` under the
      lock.
    - The closing thread holds the lock. It sets `closed`, then reads the number of cells: these belong to the block.

    Any other row was added after `closed` was set. So the thread that added it sees `closed`, and removes the row from
    `cells` by identity. If two threads add the same objects, each may remove the other's row, which is the same record.
    `room`, the rest of `limit`, may lose an update between threads; it only decides when to seal.
    The list has cells, not tuples: a column is a slice, at a sixth of the cost of picking it out of tuples. Also, the
    garbage collector does not run every 700 records.
    """

    __slots__ = ("_limit", "_taken", "_width", "cells", "closed", "delivery", "room", "row_cost", "shape")

    column_bytes = 0  # of keys, lengths and timestamps; only compiled rows have room for them in front of the values

    def __init__(self, shape: int, limit: int, delivery: Any = None, front: int = 0) -> None:
        self.shape = shape
        self.row_cost = ROW_COSTS[shape]  # bytes of a row in addition to those of its cells
        self.delivery = delivery
        self.room = limit - ONCE_COST
        self.cells: list[Any] = []
        self.closed = False
        self._limit = limit
        self._width = _WIDTHS[shape]
        self._taken = 0  # rows, when closed

    @property
    def count(self) -> int:
        """How many records wait."""
        return self._taken if self.closed else len(self.cells) // self._width

    def grow(self, limit: int) -> None:
        """Raise the raw size up to which `room` counts."""
        self.room += limit - self._limit
        self._limit = limit

    def append(self, value: bytes | None, key: bytes | None, timestamp_ms: int | None, size: int) -> bool:
        """Add a record of the rows' shape, whose value and key have `size` bytes; False if it can't be a row."""
        self.room -= size + self.row_cost
        self.cells.extend((value, key, timestamp_ms)[: self._width])
        return True

    def extend(
        self, values: Cells, keys: Cells | None = None, timestamps_ms: Sequence[int] | None = None, size: int = 0
    ) -> bool:
        """Add records with checked values and keys of `size` bytes; False if they can't be rows."""
        self.room -= size + self.row_cost * len(values)
        if keys is None:
            self.cells.extend(values)
        elif timestamps_ms is None:
            self.cells.extend(chain.from_iterable(zip(values, keys, strict=True)))
        else:
            self.cells.extend(chain.from_iterable(zip(values, keys, timestamps_ms, strict=True)))
        return True

    def close(self) -> None:
        """End the adding of rows without the lock."""
        if not self.closed:
            self.closed = True
            self._taken = len(self.cells) // self._width

    def take_late(self, row: tuple[object, ...]) -> bool:
        """Remove a row that was added after `close`; false when it was added in time."""
        cells, width = self.cells, len(row)
        for at in range(self._taken * width, len(cells), width):
            if all(cell is own for cell, own in zip(cells[at : at + width], row, strict=True)):
                del cells[at : at + width]
                return True
        return False

    def columns(self) -> tuple[list[bytes | None], list[bytes | None] | None, list[int | None] | None]:
        """Return values, keys and timestamps of closed rows; the last two are None if the shape lacks them."""
        width, end = self._width, self._taken * self._width
        keys = self.cells[1:end:width] if width > 1 else None
        times = self.cells[2:end:width] if width > 2 else None
        return self.cells[0:end:width], keys, times

    def seal(self, *_fields: object) -> tuple[Any, int] | None:
        """Return the sealed block and its memory in bytes; None here: `BlockBuilder` seals columns."""
        return None


class OpenRows:
    """Holds the rows of one partition's open block while records may be added to them."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: Rows | None = None


class Lane:
    """The lock-free path into the open blocks of one topic.

    `firsts` are the first hash slots of the partitions, ascending; `partitions` has the open rows of each. `keyless`
    are the rows for records without a key; None: these need the lock. `current` is False once another lane has
    replaced this one. A thread reads it after it has added a record.
    """

    __slots__ = ("current", "firsts", "keyless", "partitions")

    def __init__(self, firsts: list[int], partitions: list[OpenRows]) -> None:
        self.firsts = firsts
        self.partitions = partitions
        self.keyless: Rows | None = None
        self.current = True

    def end(self) -> None:
        """Accept no more records."""
        self.current = False
        self.keyless = None
