"""The folder that one standalone broker owns: its lock, its identity, and the paths of its parts.

The files: `lock`, `cluster.json`, `topics.sqlite`, `queue.sqlite`, `objects/`, `tmp/`, and the broker's `spool/`.
No file contains an absolute path, so an operator can move or copy the whole folder while its broker is stopped.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from memq.errors import (
    CorruptDataError,
    DeniedError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    StoreError,
    UnsupportedFormatError,
)
from memq.runtime.private_files import FILE_MODE, FOLDER_MODE, ensure_private
from memq.storage_handlers.files import sync_folder
from memq.topic import check_name

LAYOUT_VERSION = 1
_LOCK_BYTES_MAX = 64
_SQLITE_HEAD = b"SQLite format 3\0"
_APPLICATION_ID = slice(68, 72)  # https://www.sqlite.org/fileformat.html, section 1.3; 0 until the first checkpoint
_LOCK = re.compile(rb"(\d{1,20}\n?)?\0*")  # a pid, or the part of it that a power loss leaves


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `cluster.json`: the cluster's name (first part of object keys) and the layout."""

    id: str
    layout: int


@dataclass(slots=True)
class DataFolder:
    """An open data folder: no other process can open it until `close` or the end of this process."""

    path: Path
    cluster: str
    _lock: int

    @classmethod
    def open(cls, path: Path, draw: random.Random, name: str = "memq", *, queue_gone: bool = False) -> DataFolder:
        """Open the folder at `path`; create the folder and its missing parts.

        The name of a new cluster is `name` and a random suffix from `draw`.
        With `queue_gone`, the queue's file may be missing although objects exist: the caller restores it.
        Raises: InvalidRequestError when another process holds the folder, with its pid, when `lock` is a file of
        another program, or when the folder lies in another data folder; DeniedError when it can't be written;
        CorruptDataError when a part is missing or damaged; UnsupportedFormatError when a newer memq made it; StoreError
        when the disk is full or fails.
        """
        _refuse_inner(path)
        try:
            _make_each([*reversed(path.parents), path])
            if not (path / "lock").exists():  # memq was never here: nothing is put into a folder that is refused
                _known_identity(path, queue_gone=queue_gone)
            lock = lock_folder(path)
        except OSError as error:
            raise _folder_error(path, error) from error
        try:
            _make_each([path / "objects", path / "tmp"])
            identity = _known_identity(path, queue_gone=queue_gone) or _new_identity(path, draw, name)
            return cls(path, identity.id, lock)
        except OSError as error:
            os.close(lock)
            raise _folder_error(path, error) from error
        except BaseException:
            os.close(lock)
            raise

    @property
    def topics(self) -> Path:
        """The coordinator's file."""
        return self.path / "topics.sqlite"

    @property
    def queue(self) -> Path:
        """The notification queue's file."""
        return self.path / "queue.sqlite"

    @property
    def objects(self) -> Path:
        """The root of the filesystem store."""
        return self.path / "objects"

    @property
    def tmp(self) -> Path:
        """The filesystem store's temporary files, on the same file system."""
        return self.path / "tmp"

    @property
    def spool(self) -> Path:
        """The broker's spool: blocks acked with ack=1, for topics with `ack1 = "disk"`."""
        return self.path / "spool"

    def close(self) -> None:
        """Release the lock of the folder."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _make_each(folders: Iterable[Path]) -> None:
    """Create folders that only their owner can open, and fsync the parent of each new one.

    Without the fsync, a power loss could remove it.
    """
    for folder in folders:
        if not folder.is_dir():
            with suppress(FileExistsError):
                folder.mkdir(FOLDER_MODE)
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
            sync_folder(folder.parent)


def _refuse_inner(path: Path) -> None:
    """Raise InvalidRequestError for a folder in another data folder, whose files it would be."""
    outer = next((each for each in path.absolute().parents if (each / "cluster.json").is_file()), None)
    if outer is not None and not (path / "cluster.json").is_file():
        raise InvalidRequestError(
            f"folder '{path}' lies in the data folder '{outer}'", hint="choose a folder outside of it with --data"
        )


def make_folder(path: Path, what: str = "data folder", setting: str = "--data") -> None:
    """Create a folder and its parents, each made durable by an fsync of its parent.

    `what` and `setting` are used in error messages.

    Raises: DeniedError, InvalidRequestError, StoreError.
    """
    try:
        _make_each([*reversed(path.parents), path])
    except OSError as error:
        raise _folder_error(path, error, what, setting) from error


def lock_folder(path: Path, what: str = "data folder", setting: str = "--data") -> int:
    """Lock the folder by flock, which the kernel releases when the process ends.

    The lock file contains the pid, for error messages. A file with other content is not memq's, and is not changed.

    Raises: InvalidRequestError when another process holds the lock, or the file is not memq's; DeniedError, StoreError.
    """
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, FILE_MODE)
    except OSError as error:
        raise _folder_error(path, error, what, setting) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _LOCK.fullmatch(os.pread(lock, _LOCK_BYTES_MAX, 0)):
            raise InvalidRequestError(
                f"{what} '{path}' has a file 'lock' that memq did not write",
                hint=f"choose another folder with {setting}, or move the file away",
            )
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d\n" % os.getpid(), 0)
    except BlockingIOError as error:
        holder = os.pread(lock, _LOCK_BYTES_MAX, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(lock)
        raise InvalidRequestError(
            f"{what} '{path}' is in use by the process with pid {holder}",
            hint=f"stop that process, or choose another folder with {setting}",
        ) from error
    except BaseException:
        os.close(lock)
        raise
    return lock


def _known_identity(path: Path, *, queue_gone: bool) -> Identity | None:
    """Return the identity of a folder with all its parts, None for a new folder; change nothing.

    Raises: OSError, CorruptDataError, UnsupportedFormatError.
    """
    try:
        found = read_identity(path)
    except FileNotFoundError as error:
        if _has_objects(path):
            raise _missing(path, "cluster.json") from error
        return None
    _check_parts(path, ("topics.sqlite",) if queue_gone else ("queue.sqlite", "topics.sqlite"))
    return found


def cluster_of(path: Path) -> str:
    """Return the name of a folder's cluster.

    Raises: as `not_a_data_folder` when it is none; else as `DataFolder.open`.
    """
    try:
        return read_identity(path).id
    except FileNotFoundError as error:
        raise not_a_data_folder(path) from error
    except OSError as error:
        raise _folder_error(path, error) from error


def not_a_data_folder(path: Path) -> InvalidRequestError:
    """Return the error for a folder without memq dev's files: NotFoundError if it does not exist."""
    hint = "name one with --data, or the parts of a cluster by --config"
    if not path.exists():
        return NotFoundError(f"data folder '{path}' does not exist", hint=hint)
    return InvalidRequestError(f"'{path}' is not a data folder of memq dev", hint=hint)


def read_identity(path: Path) -> Identity:
    """Return the content of `cluster.json`. Raises: OSError, CorruptDataError, UnsupportedFormatError."""
    file = path / "cluster.json"
    body = file.read_bytes()
    try:
        found = msgspec.json.decode(body, type=Identity)
        check_name(found.id, "cluster")
    except (msgspec.MsgspecError, UnicodeDecodeError, MemqError) as error:
        raise CorruptDataError(f"'{file}' is damaged: {error}", hint="restore it; it names the cluster") from error
    if found.layout > LAYOUT_VERSION:
        raise UnsupportedFormatError(
            f"data folder '{path}' has layout {found.layout}, this memq knows {LAYOUT_VERSION}"
        )
    return found


def _new_identity(path: Path, draw: random.Random, name: str) -> Identity:
    """Name a new cluster. The file is renamed into place, so it is never partly written."""
    made = Identity(id=check_name(f"{name}-{draw.getrandbits(48):012x}", "cluster"), layout=LAYOUT_VERSION)
    temporary = path / "tmp" / "cluster.json"
    ensure_private(temporary)
    with temporary.open("wb") as file:
        file.write(msgspec.json.encode(made) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path / "cluster.json")
    sync_folder(path)
    return made


def _check_parts(path: Path, names: tuple[str, ...]) -> None:
    """Refuse a folder with objects but without one of the files `names`.

    Without the queue no pointer names the objects, and the sweep would delete all of them.
    """
    if not _has_objects(path):
        return
    for name in names:
        file = path / name
        if not file.exists() or not file.stat().st_size:
            raise _missing(path, name)
        if _lacks_log(file):
            raise CorruptDataError(
                f"data folder '{path}' holds objects, but '{name}-wal' is missing, without which '{name}' is empty",
                hint="copy the whole folder again, with its -wal files, while its broker is stopped"
                + ("; or move this file away, and rebuild it with memq restore --data DIR" * (name == "queue.sqlite")),
            )


def _lacks_log(file: Path) -> bool:
    """Whether a SQLite file has no tables, and no write-ahead log that may have them.

    The tables of a new file are in its log until the first checkpoint. SQLite opens the file without the log, as an
    empty one. A file that was checkpointed once is not noticed: an older state of it is a sound file.
    """
    with file.open("rb") as opened:
        head = opened.read(_APPLICATION_ID.stop)
    log = file.with_name(f"{file.name}-wal")
    begun = head.startswith(_SQLITE_HEAD) and not any(head[_APPLICATION_ID])
    return begun and not (log.exists() and log.stat().st_size)


def _has_objects(path: Path) -> bool:
    try:
        return any((path / "objects").iterdir())
    except FileNotFoundError:
        return False


def _missing(path: Path, name: str) -> CorruptDataError:
    hint = f"restore '{name}' from a copy, or start with another folder"
    if name == "queue.sqlite":
        hint = "rebuild it from the objects with memq restore --data DIR"
    elif name == "cluster.json":
        hint += "; if it never had one, memq broker made the folder, and opens it"
    return CorruptDataError(f"data folder '{path}' holds objects, but its '{name}' is missing or empty", hint=hint)


def _folder_error(path: Path, error: OSError, what: str = "data folder", setting: str = "--data") -> MemqError:
    reason = f"{error.strerror or error}" + (f": '{error.filename}'" if error.filename else "")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return DeniedError(
            f"{what} '{path}' can't be written: {reason}",
            hint=f"choose a writable folder with {setting}, or its owner",
        )
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL):
        return InvalidRequestError(f"{what} '{path}' can't be made: {reason}", hint=f"choose another {setting}")
    full = error.errno in (errno.EMFILE, errno.ENFILE)
    hint = "raise the limit on open files (ulimit -n)" if full else "check the disk"
    return StoreError(f"{what} '{path}' can't be opened: {reason}", hint=hint)
