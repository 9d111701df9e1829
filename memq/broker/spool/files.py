"""The spool's disk: a folder of files, appended to and fsynced in a thread; in memory for tests."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from memq.broker.data_folder import lock_folder, make_folder
from memq.errors import SpoolError
from memq.limits import FORWARD_S_MAX
from memq.runtime.private_files import FILE_MODE, FOLDER_MODE
from memq.runtime.threads import ThreadPool
from memq.storage_handlers import Buffer
from memq.storage_handlers.files import sync_file, sync_folder, write_all

T = TypeVar("T")

SUFFIX = ".spool"
ASIDE = "aside"
_WHAT, _SETTING = "spool folder", "--spool"


class SpoolFiles:
    """See `memq.broker.spool.SpoolDisk`. The folder is locked until `close`, or until the process ends."""

    def __init__(self, folder: Path) -> None:
        """Make the folder and lock it. Raises: DeniedError, InvalidRequestError, StoreError."""
        make_folder(folder, _WHAT, _SETTING)
        self._lock = lock_folder(folder, _WHAT, _SETTING)
        self._folder = folder
        self._threads = ThreadPool("spool", 1)
        self._open: tuple[str, int] | None = None  # the segment that is appended to, and its handle

    async def sizes(self) -> dict[str, int]:
        """See `SpoolDisk.sizes`."""
        return await self._threads.run(self._do, "be listed", lambda: sizes_in(self._folder))

    async def read(self, name: str) -> bytes:
        """See `SpoolDisk.read`."""
        return await self._threads.run(self._do, f"be read: '{name}'", lambda: self._read(name))

    async def append(self, name: str, buffers: Sequence[Buffer]) -> None:
        """See `SpoolDisk.append`."""
        await self._threads.run(self._do, f"be written: '{name}'", lambda: self._append(name, buffers))

    async def remove(self, name: str) -> None:
        """See `SpoolDisk.remove`."""
        await self._threads.run(self._do, f"be cleared: '{name}'", lambda: self._remove(name))

    async def set_aside(self, name: str) -> str:
        """See `SpoolDisk.set_aside`."""
        return await self._threads.run(self._do, f"set aside '{name}'", lambda: self._set_aside(name))

    async def close(self) -> None:
        """See `SpoolDisk.close`."""
        await self._threads.close()
        self._close_open()
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    # ---- in the thread -----------------------------------------------------------------------------

    def _do(self, what: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except OSError as error:
            raise _spool_error(self._folder, what, error) from error

    def _append(self, name: str, buffers: Sequence[Buffer]) -> None:
        """Append and fsync. After an error, the segment's content is unknown, and it is not used again."""
        new = self._open is None or self._open[0] != name
        if new:
            self._close_open()
            handle = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, FILE_MODE)
            self._open = (name, handle)
        assert self._open is not None
        write_all(self._open[1], buffers)
        sync_file(self._open[1])
        if new:
            sync_folder(self._folder)

    def _read(self, name: str) -> bytes:
        """Read from the disk, not from the page cache.

        With the cache, a second read would repeat the read errors of the first one.
        """
        with (self._folder / name).open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):  # macOS has none
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return file.readall()

    def _remove(self, name: str) -> None:
        """Remove without a sync: if a power loss brings a segment back, its blocks are found in the queue."""
        self._close_open(name)
        with suppress(FileNotFoundError):
            (self._folder / name).unlink()

    def _set_aside(self, name: str) -> str:
        self._close_open(name)
        aside = self._folder / ASIDE
        aside.mkdir(FOLDER_MODE, exist_ok=True)
        with suppress(FileNotFoundError):  # moved by an earlier try, whose sync failed
            (self._folder / name).replace(aside / name)
        (aside / name).stat()
        sync_folder(aside)
        sync_folder(self._folder)
        return str(aside / name)

    def _close_open(self, name: str | None = None) -> None:
        if self._open is not None and name in (None, self._open[0]):
            handle, self._open = self._open[1], None
            os.close(handle)


def _spool_error(folder: Path, what: str, error: OSError) -> SpoolError:
    text = f"spool '{folder}' can't {what}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SpoolError(text, hint="free space on the broker's disk, or give its setting spool a larger one")
    return SpoolError(
        text, hint="check the broker's disk; until it works acks=all continues, and so does ack1 = memory"
    )


def sizes_in(folder: Path) -> dict[str, int]:
    """Return the segments in a folder with their sizes, oldest first; none without the folder."""
    found: dict[str, int] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with suppress(FileNotFoundError):  # its broker may remove it just now
            found[path.name] = path.stat().st_size
    return found


def inspect_spool(folder: Path, bytes_max: int, now_ms: int) -> tuple[str, str]:
    """Inspect a broker's spool from another process, also while the broker runs.

    Return its content and its faults, as text.
    """
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} can't be written", "give the folder to the broker's user, or set spool to another one"
    found, aside = sizes_in(folder), len(sizes_in(folder / ASIDE))
    held, free = sum(found.values()), shutil.disk_usage(existing).free
    text = f"{folder}: {len(found)} segments with {held} bytes, {free} bytes free"
    if aside:
        return f"{text}, {aside} segments set aside", f"read {folder / ASIDE}: docs/spool.md says what to do"
    old = [name for name in found if now_ms - _written_ms(folder / name, now_ms) > FORWARD_S_MAX * 1000]
    if old:
        text = f"{text}, {len(old)} segments wait for over {FORWARD_S_MAX:g} s, the oldest is {old[0]}"
        return (
            text,
            "the events given-up and spool-undecided name their blocks; the next start of the broker brings them",
        )
    if free < bytes_max - held:
        return text, f"spool_bytes_max is {bytes_max}: free some space, or lower it"
    return text, ""


def _written_ms(path: Path, now_ms: int) -> int:
    try:
        return path.stat().st_mtime_ns // 1_000_000
    except FileNotFoundError:
        return now_ms


class MemorySpool:
    """A `SpoolDisk` that survives its broker, and nothing else."""

    def __init__(self) -> None:
        self.segments: dict[str, bytearray] = {}
        self.aside: dict[str, bytearray] = {}

    async def sizes(self) -> dict[str, int]:
        """See `SpoolDisk.sizes`."""
        return {name: len(data) for name, data in sorted(self.segments.items())}

    async def read(self, name: str) -> bytes:
        """See `SpoolDisk.read`."""
        return bytes(self.segments[name])

    async def append(self, name: str, buffers: Sequence[Buffer]) -> None:
        """See `SpoolDisk.append`."""
        data = self.segments.setdefault(name, bytearray())
        for buffer in buffers:
            data += buffer

    async def remove(self, name: str) -> None:
        """See `SpoolDisk.remove`."""
        self.segments.pop(name, None)

    async def set_aside(self, name: str) -> str:
        """See `SpoolDisk.set_aside`."""
        self.aside[name] = self.segments.pop(name)
        return name

    async def close(self) -> None:
        """See `SpoolDisk.close`."""
