"""Writes large files around the page cache, where the file system can do that.

An object is written once and not read again by who wrote it. In the page cache it takes fresh pages, and the kernel's
copy into them costs several times what all else costs: 0.7 to 3 CPU-s/GB on a virtual machine, where the host has to
give them, against 0.2 for a copy into memory that is used again and a write straight from it.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence

from awscrt.checksums import crc32c

from memq.limits import KIB, MIB
from memq.storage_handlers import Buffer

DIRECT_BYTES_MIN = 256 * KIB  # below it the pages are few, and the padded write is not
_ALIGNMENT = 4 * KIB  # of memory, offset and length; no disk has larger sectors
_CHUNK_BYTES = MIB  # it stays in a core's cache until its checksum is taken
_FLAG: int = getattr(os, "O_DIRECT", 0)  # Linux


class DirectFiles:
    """Opens files for direct writes, as long as the file system takes them.

    Any number of threads may write.
    Memory: one chunk for each thread that writes at once, kept for the next.
    """

    def __init__(self) -> None:
        self.refused = _FLAG == 0
        self._chunks: deque[mmap.mmap] = deque()

    def suit(self, buffers: Sequence[Buffer]) -> bool:
        """Whether these buffers, the bytes of one file, are to be written directly."""
        return not self.refused and sum(memoryview(buffer).nbytes for buffer in buffers) >= DIRECT_BYTES_MIN

    def write(self, path: str, buffers: Sequence[Buffer]) -> tuple[int, int] | None:
        """Write a file that is there, and return its size and the crc32c of what was written.

        The result is None when the file system has no direct writes: nothing was written. Raises: OSError.
        """
        try:
            handle = os.open(path, os.O_WRONLY | _FLAG)
        except OSError as error:
            self._refuse(error)
            return None
        chunk = self._chunks.pop() if self._chunks else mmap.mmap(-1, _CHUNK_BYTES)
        try:
            return self._write(handle, memoryview(chunk), buffers)
        finally:
            os.close(handle)
            self._chunks.append(chunk)

    def _write(self, handle: int, chunk: memoryview, buffers: Sequence[Buffer]) -> tuple[int, int] | None:
        size = checksum = 0
        with chunk:
            for filled in _fill(chunk, buffers):
                checksum = crc32c(chunk[:filled], checksum)
                padded = -(-filled // _ALIGNMENT) * _ALIGNMENT
                try:
                    _write_chunk(handle, chunk[:padded], size)
                except OSError as error:
                    if size:
                        raise
                    self._refuse(error)
                    return None
                size += filled
        if size % _ALIGNMENT:
            os.ftruncate(handle, size)
        return size, checksum

    def _refuse(self, error: OSError) -> None:
        """Remember that the file system has no direct writes. Raises: any other error."""
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise error
        self.refused = True


def _fill(chunk: memoryview, buffers: Sequence[Buffer]) -> Iterator[int]:
    """Copy all buffers, one after another, into `chunk`.

    Yield how much is in it when it is full, and at the end.
    """
    filled = 0
    for view in (memoryview(buffer).cast("B") for buffer in buffers):
        at = 0
        while at < len(view):
            piece = view[at : at + len(chunk) - filled]
            chunk[filled : filled + len(piece)] = piece
            filled, at = filled + len(piece), at + len(piece)
            if filled == len(chunk):
                yield filled
                filled = 0
    if filled:
        yield filled


def _write_chunk(handle: int, data: memoryview, offset: int) -> None:
    """Write all of it; what a signal or a full disk left is written again from the last whole sector."""
    while data:
        written = os.pwrite(handle, data, offset) // _ALIGNMENT * _ALIGNMENT
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data, offset = data[written:], offset + written
