"""Files below one folder as a failing disk keeps them: which bytes and names survive a loss of power.

Only what an fsync confirmed survives. An fsync that fails may leave the page cache clean, so a later one that succeeds
proves nothing of what the failed one was for: those bytes are zeros after a loss of power, those names are gone.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class FailingFiles:
    """Watches all fsyncs below `root`, while `installed`; `fail_share` of them fail with EIO."""

    def __init__(self, root: Path, draw: random.Random, fail_share: float = 0.0) -> None:
        self.root = root
        self.fail_share = fail_share
        self.failed = 0
        self.read_only = False
        self._draw = draw
        self._fsync = os.fsync
        self._open = os.open
        self._lock = threading.Lock()
        self._kept: list[int] = []  # handles, so that no inode is used again
        self._bytes: dict[int, bytes] = {}
        self._lost_bytes: dict[int, list[tuple[int, int]]] = {}
        self._names: dict[str, dict[str, int]] = {}
        self._lost_names: dict[str, set[tuple[str, int]]] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Stand between memq and the operating system."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", self.fsync)
            patch.setattr(os, "open", self.open)
            yield
        for handle in self._kept:
            os.close(handle)
        self._kept = []

    def open(self, path: str | Path, flags: int, mode: int = 0o777, **options: int | None) -> int:
        """Open a file; for writing only while the disk is not read-only."""
        if self.read_only and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and self._is_below(os.fspath(path)):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return self._open(path, flags, mode, **options)

    def fsync(self, handle: int) -> None:
        """Note what survives from now on, or fail."""
        path = os.readlink(f"/proc/self/fd/{handle}")
        if not self._is_below(path):
            self._fsync(handle)
            return
        with self._lock:
            fails = self.read_only or self._draw.random() < self.fail_share
            status = os.fstat(handle)
            if stat.S_ISDIR(status.st_mode):
                self._sync_names(path, fails=fails)
            else:
                self._kept.append(os.dup(handle))
                self._sync_bytes(status.st_ino, Path(path).read_bytes(), fails=fails)
            self.failed += fails
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def lose_power(self, into: Path) -> None:
        """Write what has survived below another folder."""
        self._restore(str(self.root), into)

    # ---- inside --------------------------------------------------------------------------------

    def _is_below(self, path: str) -> bool:
        return Path(path).is_relative_to(self.root)

    def _sync_bytes(self, inode: int, data: bytes, *, fails: bool) -> None:
        lost = self._lost_bytes.setdefault(inode, [])
        if fails:
            lost.append((len(self._bytes.get(inode, b"")), len(data)))
            return
        kept = bytearray(data)
        for start, end in lost:
            kept[start:end] = bytes(end - start)
        self._bytes[inode] = bytes(kept)

    def _sync_names(self, path: str, *, fails: bool) -> None:
        with os.scandir(path) as found:
            now = {entry.name: entry.inode() for entry in found}
        lost = self._lost_names.setdefault(path, set())
        if fails:
            lost |= now.items() - self._names.get(path, {}).items()
        else:
            self._names[path] = {name: inode for name, inode in now.items() if (name, inode) not in lost}

    def _restore(self, path: str, into: Path) -> None:
        into.mkdir(exist_ok=True)
        for name, inode in self._names.get(path, {}).items():
            below = f"{path}/{name}"
            if Path(below).is_dir():
                self._restore(below, into / name)
            else:
                (into / name).write_bytes(self._bytes.get(inode, b""))
