"""The blocking half of the file store: durable writes, reads, ordered walks, folders.

All code here runs in a thread. It raises `OSError` unconverted; the handler converts it to errors of memq.

A file is durable only when the name of every folder above it is durable in its parent. To sync the whole chain with
each object would cost one fsync per level, so durable folders are remembered. A folder that is removed and created
again is not durable. So a put pins the folders of its object while it relies on them, and a removal skips pinned ones.
Another process does not know these pins. Where it may remove folders, each put syncs the whole chain.

A failed fsync may discard data, so that the next one of the same folder succeeds but has written nothing. Therefore a
sync counts only when no overlapping sync has failed. A folder whose own name was part of a failed sync is not used
again by this process, unless it is removed and created again.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import re
import stat
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, NotFoundError, ObjectExistsError
from memq.kernel.blocks import fill
from memq.limits import KIB, MIB
from memq.runtime.private_files import FILE_MODE, FOLDER_MODE
from memq.storage_handlers import Buffer, ObjectEntry, check_size

DIRECT_BYTES_MIN = 256 * KIB  # a smaller file takes few pages, and the padding of a direct write costs more
_ALIGNMENT = 4 * KIB  # of memory, offset and length; no disk has larger sectors
_CHUNK_BYTES = MIB  # stays in a core's cache until its checksum is computed
_FLAG: int = getattr(os, "O_DIRECT", 0)  # Linux
_DOUBT = "a sync of this folder's name failed before: it may be gone after a loss of power"
NAMING_TRIES_MAX = 10  # of one file; each further one needs another removal of its folder, or a missing root
KNOWN_FOLDERS_MAX = 65_536  # about 10 MB; at the bound all are forgotten, which costs one fsync per level and folder


class DirectFiles:
    """Opens large files for writes around the page cache, as long as the file system takes them.

    The writer of an object does not read it again. In the page cache the object takes fresh pages. On a virtual
    machine, whose host must provide the pages, the kernel's copy into them costs 0.7 to 3 CPU-s/GB. That is several
    times the rest of a put. A copy into reused memory and a direct write from there cost 0.2 CPU-s/GB.

    Any number of threads may write. Each concurrent write needs one chunk of memory, which is kept for later writes.
    """

    def __init__(self) -> None:
        self.refused = _FLAG == 0
        self._chunks: deque[mmap.mmap] = deque()

    def suit(self, buffers: Sequence[Buffer]) -> bool:
        """Whether these buffers, the bytes of one file, are to be written directly."""
        if self.refused:
            return False
        sizes = itertools.accumulate(memoryview(buffer).nbytes for buffer in buffers)
        return any(size >= DIRECT_BYTES_MIN for size in sizes)  # the first buffers of many decide

    def write(self, path: str, buffers: Sequence[Buffer]) -> tuple[int, int] | None:
        """Write an existing file, and return its size and the crc32c of the written bytes.

        The result is None when the file system has no direct writes; then nothing is written. Raises: OSError.
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
        size = checksum = number = at = 0
        with chunk:
            while number < len(buffers):
                filled, number, at = fill(chunk, buffers, number, at)
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


def _write_chunk(handle: int, data: memoryview, offset: int) -> None:
    """Write all of `data`; after a partial write, continue at its last whole sector. Raises: OSError."""
    while data:
        written = os.pwrite(handle, data, offset) // _ALIGNMENT * _ALIGNMENT
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data, offset = data[written:], offset + written


try:
    import fcntl
except ImportError:  # Windows, where clients may read a shared folder
    fcntl = None  # type: ignore[assignment]

_BUFFERS_PER_WRITE = 512  # below IOV_MAX, which is 1,024 on Linux and macOS
_COMPARE_BYTES = 1 << 20
_TEMPORARY = re.compile("[0-9]+-[0-9]+")  # process id and number, as `_create_temporary` names a file
_FULL_SYNC: int | None = getattr(fcntl, "F_FULLFSYNC", None)  # macOS only


class ObjectFiles:
    """The files of one store: objects below `root`, temporary files in `tmp`. `shared`: see `Folders`."""

    def __init__(self, root: Path, tmp: Path, *, shared: bool = False) -> None:
        self.root = root
        self.tmp = tmp
        self._folders = Folders(root, shared=shared)
        self._direct = DirectFiles()
        self._numbers = itertools.count()

    def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        """Write a temporary file, sync it, link it to its name if that is free, sync the name.

        The checksum is computed from the written bytes. If they changed in memory before, no object is made.
        Raises: CorruptDataError then; ObjectExistsError; OSError.
        """
        temporary, handle = self._create_temporary()
        try:
            try:
                size, found = self._write(temporary, handle, buffers)
                if found != checksum:
                    raise CorruptDataError(
                        f"object '{key}' not stored: its bytes have crc32c {found:08x}, not {checksum:08x}"
                    )
                sync_file(handle)
            finally:
                os.close(handle)
            self._name(temporary, key, size, checksum)
        finally:
            with suppress(OSError):  # the next start sweeps files that are left
                os.unlink(temporary)

    def _write(self, temporary: str, handle: int, buffers: Sequence[Buffer]) -> tuple[int, int]:
        """Write the file; return size and crc32c.

        After a write through the page cache, the crc32c is computed last, to detect bytes that changed meanwhile.
        """
        if self._direct.suit(buffers):
            written = self._direct.write(temporary, buffers)
            if written is not None:
                return written
        return write_all(handle, buffers), joined_crc(buffers)

    def _create_temporary(self) -> tuple[str, int]:
        while True:
            path = f"{self.tmp}/{os.getpid()}-{next(self._numbers)}"
            try:
                return path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
            except FileExistsError:  # of an earlier process with this pid
                continue

    def _name(self, temporary: str, key: str, size: int, checksum: int) -> None:
        """Give a file its name; make the folders again if another process has removed them meanwhile."""
        tries = 0
        while True:
            try:
                self._link(temporary, key, size, checksum)
            except FileNotFoundError:
                tries += 1
                if tries == NAMING_TRIES_MAX:
                    raise
                self._folders.forget(key.rpartition("/")[0])
            else:
                return

    def _link(self, temporary: str, key: str, size: int, checksum: int) -> None:
        path, folder, mark = f"{self.root}/{key}", key.rpartition("/")[0], self._folders.mark()
        with self._folders.pinned(folder):
            try:
                os.link(temporary, path)
            except FileExistsError:
                if not same_content(path, size, checksum):
                    raise ObjectExistsError(f"another object has the key '{key}'") from None
                # The sync below may have failed for the put that made this name. A sync after a failed one may succeed
                # without having written anything: only a new name is certainly written.
                os.rename(temporary, path)
            self._folders.sync(folder)
        self._folders.check(mark)

    def delete(self, key: str) -> None:
        """Remove the file and the folders that it leaves empty.

        Nothing is synced: if a power loss restores the object, no pointer names it, and it is swept again.
        """
        path = self.root / key
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return
        except (IsADirectoryError, PermissionError):  # macOS raises the latter for a folder
            if not path.is_dir():
                raise
            return
        self._folders.prune(key.rpartition("/")[0])

    def get(self, key: str) -> bytes:
        """Return the whole file."""
        with self._open(key) as file:
            return read_exactly(file, key, 0, check_size(key, os.fstat(file.fileno()).st_size))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Return a part of the file. Raises: CorruptDataError if the file is shorter."""
        with self._open(key) as file:
            size = os.fstat(file.fileno()).st_size
            if offset + length > size:
                raise CorruptDataError(f"object '{key}' has {size} bytes, asked for {length} from {offset}")
            return read_exactly(file, key, offset, length)

    def size(self, key: str) -> int:
        """Return the size of the file in bytes. Raises: NotFoundError."""
        try:
            status = (self.root / key).stat()
        except (FileNotFoundError, NotADirectoryError):
            status = None
        if status is None or stat.S_ISDIR(status.st_mode):
            raise NotFoundError(f"object '{key}' does not exist")
        return status.st_size

    def _open(self, key: str) -> FileIO:
        try:
            return FileIO(self.root / key)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise NotFoundError(f"object '{key}' does not exist") from None

    def walk(self, prefix: str) -> Iterator[ObjectEntry]:
        """Yield the objects whose key starts with `prefix`, by key; may omit objects deleted meanwhile."""
        folder, _, name = prefix.rpartition("/")
        return self._walk(f"{folder}/" if folder else "", name)

    def _walk(self, folder: str, start: str) -> Iterator[ObjectEntry]:
        """Sort a folder by its name with the slash, because the key `a-b` comes before `a/b`."""
        try:
            with os.scandir(self.root / folder) as found:
                names = sorted(
                    f"{each.name}/" if each.is_dir() else each.name for each in found if each.name.startswith(start)
                )
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in names:
            if name.endswith("/"):
                yield from self._walk(f"{folder}{name}", "")
                continue
            with suppress(FileNotFoundError):
                status = (self.root / folder / name).stat()
                yield ObjectEntry(f"{folder}{name}", status.st_size, status.st_mtime_ns // 1_000_000)

    def sweep_temporary(self) -> tuple[int, int]:
        """Remove the temporary files of puts of all processes; return their number and bytes.

        Files with other names stay: the operator may have chosen a folder that already has files.
        """
        number = size = 0
        with os.scandir(self.tmp) as found:
            for each in found:
                if _TEMPORARY.fullmatch(each.name) and each.is_file(follow_symlinks=False):
                    size += each.stat().st_size
                    os.unlink(each.path)
                    number += 1
        return number, size


def write_all(handle: int, buffers: Sequence[Buffer]) -> int:
    """Write all buffers, without joining them, and return the number of bytes."""
    views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    total = sum(len(view) for view in views)
    first = 0
    while first < len(views):
        written = os.writev(handle, views[first : first + _BUFFERS_PER_WRITE])
        while first < len(views) and written >= len(views[first]):
            written -= len(views[first])
            first += 1
        if written:
            views[first] = views[first][written:]
    return total


def joined_crc(buffers: Sequence[Buffer]) -> int:
    """Return the crc32c of the joined buffers."""
    value = 0
    for buffer in buffers:
        value = crc32c(buffer, value)
    return value


def same_content(path: Path | str, size: int, checksum: int) -> bool:
    """Whether a file holds `size` bytes with this crc32c."""
    with FileIO(path) as file:
        if os.fstat(file.fileno()).st_size != size:
            return False
        value = 0
        while chunk := file.read(_COMPARE_BYTES):
            value = crc32c(chunk, value)
        return value == checksum


def read_exactly(file: FileIO, key: str, offset: int, length: int) -> bytes:
    """Read `length` bytes from `offset`.

    Linux returns at most 2 GiB per call, so several may be necessary. Raises: CorruptDataError when the file ends
    early.
    """
    file.seek(offset)
    parts: list[bytes] = []
    while length:
        part = file.read(length)
        if not part:
            raise CorruptDataError(f"object '{key}' ends {length} bytes early")
        parts.append(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def sync_file(handle: int) -> None:
    """Make written bytes survive the loss of power; on macOS, fsync alone leaves them in the disk's cache."""
    if _FULL_SYNC is None:
        os.fsync(handle)
    else:
        fcntl.fcntl(handle, _FULL_SYNC)


class Folders:
    """The folders below `root`, for threads of one process.

    If they are `shared`, another process may remove empty ones and make them again, so none is remembered as durable.
    Folders are strings as in keys, relative to the root: a put takes 135 µs of Python; with `Path` objects it took 200.
    """

    def __init__(self, root: Path, *, shared: bool) -> None:
        self._root = str(root)
        self._shared = shared
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
        """Make `folder`, with all above it, and keep it until the `with` block ends.

        The folders are durable after the block. The block itself must sync the names that it makes in `folder`. On a
        file system with one journal, that sync also writes the new folders, and their own syncs then cost almost
        nothing. Three new folders, each synced when it was made, cost 550 µs of CPU, half of a put of 300 KiB.
        """
        chain = _chain(folder)
        with self._lock:
            for each in chain:
                self._pinned[each] = self._pinned.get(each, 0) + 1
            new = [each for each in chain if each not in self._durable]
        try:
            for each in reversed(new):
                with suppress(FileExistsError):
                    os.mkdir(f"{self._root}/{each}", FOLDER_MODE)
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
        """Return a mark for `check`. The caller takes it before it makes a name."""
        return self._failed

    def sync(self, folder: str) -> None:
        """Make the names in `folder` survive the loss of power, unless `check` reports a failed sync."""
        with self._lock:
            number = self._begun
            self._begun += 1
            self._under_way[number] = None
        failed, begun = True, False
        try:
            with _opened_folder(f"{self._root}/{folder}") as handle:
                begun = True
                os.fsync(handle)
            failed = False
        finally:
            with self._lock:
                if failed:
                    self._failed += 1
                if failed and begun:  # without an fsync nothing is lost: the next sync writes the names
                    new = [each for each in self._pinned if each not in self._durable and _above(each) == folder]
                    self._doubtful.update(dict.fromkeys(new))
                del self._under_way[number]
                self._ended.notify_all()

    def check(self, mark: int) -> None:
        """Wait for the syncs that have begun. Raises: OSError when one has failed since `mark`."""
        with self._lock:
            end = self._begun
            self._ended.wait_for(lambda: all(number >= end for number in self._under_way))
            if self._failed != mark:  # the failed sync may have included the same name
                raise OSError(errno.EIO, "a sync of another object failed meanwhile")

    def _sync_names(self, new: Sequence[str]) -> None:
        for each in new:
            if each in self._doubtful:
                raise OSError(errno.EIO, _DOUBT, each)
            if each not in self._durable:  # another thread may have synced it
                self.sync(_above(each))
        self._remember(new)

    def prune(self, folder: str) -> None:
        """Remove `folder` and those above it, up to the first that is not empty or is pinned."""
        for each in _chain(folder):
            with self._lock:
                if each in self._pinned or not self._remove(each):
                    return

    def forget(self, folder: str) -> None:
        """Make `folder` and those above it again at the next use: another process has removed some of them."""
        with self._lock:
            for each in _chain(folder):
                self._durable.pop(each, None)

    def _remember(self, folders: Sequence[str]) -> None:
        if self._shared:
            return
        with self._lock:
            if len(self._durable) + len(folders) > KNOWN_FOLDERS_MAX:
                self._durable.clear()
            self._durable.update(dict.fromkeys(folders))

    def _remove(self, folder: str) -> bool:
        self._durable.pop(folder, None)
        try:
            os.rmdir(f"{self._root}/{folder}")
        except OSError:  # not empty, missing or not permitted: an empty folder does no harm
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
    with _opened_folder(folder) as handle:
        os.fsync(handle)


@contextmanager
def _opened_folder(folder: Path | str) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        yield handle
    finally:
        os.close(handle)
