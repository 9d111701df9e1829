"""The least that any broker does with files: receive, take one checksum, write around the page cache, sync.

No frames, no index, no put-if-absent, no pointer: the rest of a broker's CPU is its own.
"""

from __future__ import annotations

import itertools
import mmap
import os
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path

from awscrt.checksums import crc32c

from benchmarks.children.commands import answer, options
from memq.limits import KIB, MIB

READ_BYTES = MIB  # as large as a slab
FILE_BYTES = 8 * MIB  # the greatest batch
ALIGNMENT = 4 * KIB


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    memory = memoryview(mmap.mmap(-1, FILE_BYTES))
    paths = (Path(options()["folder"], str(number)) for number in itertools.count())
    answer(address=f"127.0.0.1:{listener.getsockname()[1]}")
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)  # the parent closes it
    selector.register(listener, selectors.EVENT_READ)
    while all(key.fd != 0 for key, _ in selector.select()):
        connection, _ = listener.accept()
        with connection:
            receive(connection, memory, paths)


def receive(connection: socket.socket, memory: memoryview, paths: Iterator[Path]) -> None:
    """Store what comes until the sender ends, a file for each memory full; its sender waits meanwhile."""
    received = True
    while received:
        filled, received = 0, False
        while filled < FILE_BYTES:
            count = connection.recv_into(memory[filled : filled + READ_BYTES])
            if not count:
                break
            crc32c(memory[filled : filled + count])
            filled += count
            received = filled == FILE_BYTES
        if filled:
            store(next(paths), memory[: -(-filled // ALIGNMENT) * ALIGNMENT])


def store(path: Path, data: memoryview) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_DIRECT", 0), 0o644)
    try:
        os.pwrite(handle, data, 0)
        os.fsync(handle)
    finally:
        os.close(handle)


if __name__ == "__main__":
    main()
