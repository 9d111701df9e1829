"""Folders of the file store: created durably, and removed when empty.

A file is safe only when every folder above it is named, durably, in its parent. Syncing the whole chain with each
object would cost one fsync per level, so what was synced is remembered. Removal would make that memory a lie: a folder
that is removed and made again is a new one. So removing and relying on a folder exclude each other: a put pins the
folders of its object for as long as it relies on them, and whoever removes passes over what is pinned.

An fsync that fails may forget what it was to write, so that the next one of the same folder succeeds and has written
nothing. A sync is therefore believed only when none that overlapped it has failed. A folder whose own name was part of
a failed sync is not relied on again by this process, unless it is removed and made again.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_DOUBT = "a sync of this folder's name failed before: it may be gone after a loss of power"
KNOWN_FOLDERS_MAX = 65_536  # about 10 MB; forgetting all costs one fsync per level and folder


class Folders:
    """The folders below `root`, for threads of one process. Only one process may remove folders.

    They are named as in keys, from the root on: with objects for paths a put took 200 µs of Python, and takes 135.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._lock = threading.Lock()
        self._durable: dict[str, None] = {}
        self._doubtful: dict[str, None] = {}
        self._pinned: dict[str, int] = {}
        self._naming = threading.Lock()  # one thread at a time syncs the names of new folders
        self._ended = threading.Condition(self._lock)
        self._begun = 0
        self._failed = 0
        self._under_way: dict[int, None] = {}  # syncs, by the order in which they began

    @contextmanager
    def pinned(self, folder: str) -> Iterator[None]:
        """Make `folder`, with all above it, and keep it until the block ends.

        Durable are they behind the block.
        What the block names in `folder` it makes durable itself, before that: one sync of the innermost folder brings
        the new ones along where the file system has one journal, and the others then cost next to nothing. Synced one
        by one as they were made, three new folders cost 550 µs of CPU, half of what a whole put of 300 KiB does.
        """
        chain = _chain(folder)
        with self._lock:
            for each in chain:
                self._pinned[each] = self._pinned.get(each, 0) + 1
            new = [each for each in chain if each not in self._durable]
        try:
            for each in reversed(new):
                with suppress(FileExistsError):
                    os.mkdir(f"{self._root}/{each}")
            yield
            if new:
                with self._naming:
                    self._sync_names(new)
        finally:
            with self._lock:
                for each in chain:
                    self._pinned[each] -= 1
                    if not self._pinned[each]:
                        del self._pinned[each]

    def mark(self) -> int:
        """Return a mark for `check`, before a name is made."""
        return self._failed

    def sync(self, folder: str) -> None:
        """Make the names in `folder` survive the loss of power, as far as this sync knows: see `check`."""
        with self._lock:
            number = self._begun
            self._begun += 1
            self._under_way[number] = None
        failed = True
        try:
            sync_folder(f"{self._root}/{folder}")
            failed = False
        finally:
            with self._lock:
                if failed:
                    self._failed += 1
                    new = [each for each in self._pinned if each not in self._durable and _above(each) == folder]
                    self._doubtful.update(dict.fromkeys(new))
                del self._under_way[number]
                self._ended.notify_all()

    def check(self, mark: int) -> None:
        """Wait for the syncs that have begun. Raises: OSError when one has failed since the mark."""
        with self._lock:
            end = self._begun
            self._ended.wait_for(lambda: all(number >= end for number in self._under_way))
            if self._failed != mark:  # it may have been of the same name
                raise OSError(errno.EIO, "a sync of another object failed meanwhile")

    def _sync_names(self, new: Sequence[str]) -> None:
        for each in new:
            if each in self._doubtful:
                raise OSError(errno.EIO, _DOUBT, each)
            if each not in self._durable:  # else another thread was faster
                self.sync(_above(each))
        self._remember(new)

    def prune(self, folder: str) -> None:
        """Remove `folder` and those above it, up to the first that is not empty or is pinned."""
        for each in _chain(folder):
            with self._lock:
                if each in self._pinned or not self._remove(each):
                    return

    def _remember(self, folders: Sequence[str]) -> None:
        with self._lock:
            if len(self._durable) + len(folders) > KNOWN_FOLDERS_MAX:
                self._durable.clear()
            self._durable.update(dict.fromkeys(folders))

    def _remove(self, folder: str) -> bool:
        self._durable.pop(folder, None)
        try:
            os.rmdir(f"{self._root}/{folder}")
        except OSError:  # not empty, gone, or not ours to remove: an empty folder harms nobody
            return False
        self._doubtful.pop(folder, None)
        return True


def _chain(folder: str) -> list[str]:
    """Return `folder` and those above it, without the root, innermost first."""
    chain = []
    while folder:
        chain.append(folder)
        folder = _above(folder)
    return chain


def _above(folder: str) -> str:
    return folder.rpartition("/")[0]


def sync_folder(folder: Path | str) -> None:
    """Make the names in `folder` survive the loss of power."""
    handle = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
