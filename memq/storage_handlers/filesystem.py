"""Objects as files: the store of the embedded default, put-if-absent, safe against power loss."""

from __future__ import annotations

import errno
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import ParamSpec, TypeVar

from awscrt.checksums import crc32c

from memq.errors import DeniedError, InvalidRequestError, MemqError, StoreError
from memq.runtime.runtime import Runtime
from memq.runtime.threads import ThreadPool
from memq.storage_handlers import CHECK_PREFIX, KEPT_CHECK, Buffer, ObjectEntry, check_key, check_prefix
from memq.storage_handlers.files import ObjectFiles

P = ParamSpec("P")
T = TypeVar("T")

_LIST_PAGE = 1_000
_PROBE = b"memq was here"
_REFUSALS: dict[int, tuple[type[MemqError], str]] = {
    errno.ENOSPC: (StoreError, "the disk is full: make room; the request is tried again"),
    errno.EDQUOT: (StoreError, "the disk quota is used up: make room; the request is tried again"),
    errno.EFBIG: (StoreError, "a limit on the size of files is in the way (ulimit -f)"),
    errno.EMFILE: (StoreError, "too many open files: raise the limit (ulimit -n)"),
    errno.EIO: (StoreError, "the disk fails: check the system's log"),
    errno.EACCES: (DeniedError, "give memq the right to write the data folder and all in it"),
    errno.EPERM: (DeniedError, "give memq the right to write there, on a file system that has hard links"),
    errno.EROFS: (DeniedError, "the file system is read-only: mount it writable, or choose another folder"),
    errno.ENOENT: (
        StoreError,
        "the folder of the store is gone: bring it back or mount it again; the request is tried again",
    ),
    errno.EXDEV: (InvalidRequestError, "put the folder for temporary files on the file system of the objects"),
    errno.ENOTDIR: (InvalidRequestError, "a part of the key is an object: keys can't be both object and folder"),
    errno.EISDIR: (InvalidRequestError, "the key is a folder: keys can't be both object and folder"),
}


@dataclass(frozen=True, slots=True)
class TempSweep:
    """The result of `sweep_temp`."""

    files: int
    bytes: int


class FilesystemHandler:
    """Stores each object as the file `root/key`, through a temporary file in `tmp`.

    Blocking calls run in at most `threads_max` threads. Any number of processes may read, put and check; only
    one may delete. In all others the handler is `shared`: puts sync all folders. `chance` draws the keys of checks.
    """

    def __init__(
        self,
        root: Path,
        tmp: Path,
        threads_max: int = 4,
        chance: random.Random | None = None,
        *,
        shared: bool = False,
    ) -> None:
        self._root = root
        self._files = ObjectFiles(root, tmp, shared=shared)
        self._pool = ThreadPool("filesystem store", threads_max)
        self._chance = chance or Runtime().random

    @property
    def url(self) -> str:
        """See `StorageHandler.url`."""
        return self._root.resolve().as_uri()

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        """See `ObjectWriter.put`."""
        check_key(key)
        await self._run(f"object '{key}' not stored", self._files.put, key, buffers, checksum)

    async def delete(self, key: str) -> None:
        """See `ObjectWriter.delete`. Also removes folders that become empty."""
        check_key(key)
        await self._run(f"object '{key}' not deleted", self._files.delete, key)

    async def get(self, key: str, *, checked: bool = True) -> bytes:
        """See `ObjectReader.get`. There are no checksums."""
        check_key(key)
        return await self._run(f"object '{key}' not read", self._files.get, key)

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `ObjectReader.get_range`."""
        check_key(key)
        return await self._run(f"object '{key}' not read", self._files.get_range, key, offset, length)

    async def size(self, key: str) -> int:
        """See `ObjectReader.size`."""
        check_key(key)
        return await self._run(f"object '{key}' not read", self._files.size, key)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectEntry]:
        """See `ObjectReader.list`.

        It holds at most 1,000 entries, and the names of the open folders, in memory.
        """
        walk = self._files.walk(check_prefix(prefix))
        while page := await self._run(f"objects under '{prefix}' not listed", _next_page, walk):
            for entry in page:
                yield entry

    async def check(self, *, deletes: bool = True) -> None:
        """See `StorageHandler.check`. Each check has a key of its own: several processes may check at once."""
        key = f"{CHECK_PREFIX}{self._chance.getrandbits(64):016x}" if deletes else KEPT_CHECK
        try:
            await self.put(key, [_PROBE], crc32c(_PROBE))
            if await self.get(key) != _PROBE:
                raise StoreError(
                    f"object '{key}' was read back with other bytes", hint="the disk fails: check the system's log"
                )
            if deletes:
                async for _ in self.list(key):
                    pass
        finally:
            if deletes:
                await self.delete(key)

    async def sweep_temp(self) -> TempSweep:
        """Remove the temporary files of interrupted puts.

        The caller does so only at start, under the lock of the data folder: the files of running puts would go, too.
        """
        files, size = await self._run("temporary files not swept", self._files.sweep_temporary)
        return TempSweep(files, size)

    async def close(self) -> None:
        """See `StorageHandler.close`."""
        await self._pool.close()

    async def _run(self, failure: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with _refusals(failure):
            return await self._pool.run(function, *args, **kwargs)


def _next_page(walk: Iterator[ObjectEntry]) -> Sequence[ObjectEntry]:
    return tuple(islice(walk, _LIST_PAGE))


@contextmanager
def _refusals(failure: str) -> Iterator[None]:
    """Convert errors of the operating system to errors of memq."""
    try:
        yield
    except OSError as error:
        kind, hint = _REFUSALS.get(error.errno or 0, (StoreError, ""))
        raise kind(f"{failure}: {(error.strerror or str(error)).lower()}", hint=hint) from error
