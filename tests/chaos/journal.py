"""Journals of client processes: lines of text, fsynced every tenth of a second, which the judge reads.

| line | meaning |
|---|---|
| `S topic partition count` | a producer has handed records up to, not with, number `count` to memq |
| `A topic partition producer first records at` | from sequence `first` on acked at `at` ms; `producer` in hex |
| `U topic partition code` | a block failed; `code` is the error's |
| `F topic partition first` | a producer begins at number `first` of its name |
| `D topic partition first next ranges` | a reader got a batch: positions, ranges `worker:first-last` in order |
| `C topic partition next begun ended` | a commit up to `next` returned; monotonic times in ms |
| `N` | the last reader begins, maybe again |
| `R code` | a call failed with an error after which a user tries again; nothing was passed over |
| `X text` | something that must not happen |
| `E` | the client ended in order: everything that it sent is settled |
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

SYNC_S = 0.1
COPIES = "copies"  # the topic that Spark writes; a value there is `partition:value` of the record that was copied


class Journal:
    """Appends lines; a thread of its own makes them durable. Safe from any thread."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sync, name="journal")
        self._thread.start()

    def write(self, *words: object) -> None:
        """Append one line; a process that is killed after this call has written it."""
        self._file.write((" ".join(map(str, words)) + "\n").encode())

    def close(self) -> None:
        """Make the rest durable."""
        self._end.set()
        self._thread.join()
        os.fsync(self._file.fileno())
        self._file.close()

    def _sync(self) -> None:
        while not self._end.wait(SYNC_S):
            os.fsync(self._file.fileno())


def lines_of(path: Path) -> Iterator[list[str]]:
    """Yield the words of each whole line; a last line that a kill cut off is left out."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield line.decode().split(" ")


def value_of(worker: str, number: int, size: int) -> bytes:
    """Return the value of a worker's record: its name, its number in the partition, and bytes that follow from both."""
    head = f"{worker} {number} "
    filler = f"{number * 2654435761 % (1 << 32):08x}"
    return (head + filler * ((size - len(head)) // len(filler) + 1)).encode()[: max(size, len(head))]


def parse_value(value: bytes) -> tuple[str, int]:
    """Return the worker and the number that a value names; -1 for a value that names none."""
    worker, _, rest = value.partition(b" ")
    number = rest.partition(b" ")[0]
    return worker.decode(errors="replace"), int(number) if number.isdigit() else -1
