"""Object stores: the ports for reading and writing immutable objects, one file per handler."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from memq.errors import InvalidRequestError, TooLargeError
from memq.limits import OBJECT_BYTES_MAX

Buffer = bytes | bytearray | memoryview
CHECK_PREFIX = "memq-check/"  # keys that `StorageHandler.check` writes and deletes
KEPT_CHECK = f"{CHECK_PREFIX}kept"  # a process without the right to delete leaves this one object, and uses it again
KEY_CHARS_MAX = 1_024  # the limit of S3

# One grammar for names, keys, znodes, metrics and logs. It excludes characters with a special meaning in some file
# system (backslash, colon, NUL, wildcards), and parts that are longer than a file name may be.
_PART = re.compile(r"[A-Za-z0-9._-]{1,255}\Z")


@dataclass(frozen=True, slots=True)
class ObjectEntry:
    """One object of a listing: key, size in bytes, time of writing in Unix ms."""

    key: str
    size: int
    modified_ms: int


class ObjectReader(Protocol):
    """Reads objects.

    Promises: every reader reads an object whole and unchanged as soon as its put has returned.
    A listing is in the order of the keys, or (SeaweedFS) of the names of folders and objects in them. The content of
    one folder is never interrupted by other objects.
    Non-promises: a listing need not show an object whose put has not returned.
    Raises: NotFoundError for a missing key; StoreError for failures that may pass;
    CorruptDataError when the object is shorter than the requested range;
    DeniedError for missing permissions; InvalidRequestError for a key that breaks the grammar.
    """

    async def get(self, key: str, *, checked: bool = True) -> bytes:
        """Return the whole object; TooLargeError over OBJECT_BYTES_MAX.

        If `checked`, a store that keeps checksums compares the bytes with the object's checksum, and raises
        CorruptDataError. Callers that examine damaged objects need the bytes without this check.
        """
        ...

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`; fewer are an error, never a short answer."""
        ...

    async def size(self, key: str) -> int:
        """Return the object's size in bytes."""
        ...

    def list(self, prefix: str = "") -> AsyncIterator[ObjectEntry]:
        """Yield the objects whose key starts with `prefix`, folder by folder."""
        ...


class ObjectWriter(Protocol):
    """Writes and deletes objects.

    Promises: `put` is put-if-absent: when two puts race, one wins and no bytes of the other are stored. When `put`
    returns, the object survives the loss of power. A second put of the same bytes under the same key
    succeeds, so a put whose answer was lost can be repeated. `delete` of a missing object succeeds.
    Non-promises: after StoreError or a cancelled call the object may exist or appear later. A second put of the same
    bytes need not renew the time of writing.
    Raises: ObjectExistsError when the key has other bytes; StoreError for failures that may pass (also a
    full disk); DeniedError for missing permissions.
    """

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        """Store the joined `buffers` under `key`; `checksum` is their crc32c.

        The caller must not change the buffers until the call ends, also when it is cancelled. The implementation
        raises a cancellation only after its own threads have ended their reads.
        """
        ...

    async def delete(self, key: str) -> None:
        """Delete one object."""
        ...


class StorageHandler(ObjectReader, ObjectWriter, Protocol):
    """Reads and writes objects; `close` ends its threads and connections."""

    @property
    def url(self) -> str:
        """The location of the objects, for operators and for direct clients: `file:///…`, `memory:`."""
        ...

    async def check(self, *, deletes: bool = True) -> None:
        """Prove that objects can be written and read, and if `deletes` listed and deleted.

        Raises: as `ObjectReader` and `ObjectWriter`.
        """
        ...

    async def close(self) -> None:
        """End threads and connections."""
        ...


@dataclass(frozen=True, slots=True)
class Count:
    """One number that a store counts: `memq.observe.metrics` has it as `memq_store_` and its name."""

    name: str
    value: float


@runtime_checkable
class CountingStore(Protocol):
    """A store that counts its requests, for a registry of metrics."""

    def counts(self) -> Iterable[Count]:
        """Return the numbers of this moment."""
        ...


def check_key(key: str) -> str:
    """Return `key` when each of its parts between slashes is a name, and none is `.` or `..`.

    Raises: InvalidRequestError, with the key shortened when it is long.
    """
    if not 1 <= len(key) <= KEY_CHARS_MAX:
        raise InvalidRequestError(f"key {_shown(key)} has {len(key)} characters, 1 to {KEY_CHARS_MAX} are allowed")
    for part in key.split("/"):
        _check_part(part, key)
    return key


def check_size(key: str, size: int) -> int:
    """Return the size of an object that is to be read whole. Raises: TooLargeError."""
    if size > OBJECT_BYTES_MAX:
        raise TooLargeError(
            f"'{key}' has {size} bytes, an object has at most {OBJECT_BYTES_MAX}", hint="no broker wrote it"
        )
    return size


def check_prefix(prefix: str) -> str:
    """Return `prefix` when keys can start with it: the last part may be empty or cut anywhere.

    Raises: InvalidRequestError.
    """
    if len(prefix) > KEY_CHARS_MAX:
        raise InvalidRequestError(
            f"prefix {_shown(prefix)} has {len(prefix)} characters, at most {KEY_CHARS_MAX} are allowed"
        )
    *folders, last = prefix.split("/")
    for part in folders:
        _check_part(part, prefix)
    if last.strip("."):
        _check_part(last, prefix)
    return prefix


class ListedKeys:
    """Entries of a listing, page by page, without repeats from the same page or the last two.

    Their order is that of the server: some servers list by key, others folder by folder.
    """

    def __init__(self) -> None:
        self._pages: deque[frozenset[str]] = deque(maxlen=2)

    def new(self, page: Sequence[ObjectEntry]) -> list[ObjectEntry]:
        """Return the entries of a page that are no repeats."""
        known = {key for keys in self._pages for key in keys}
        found: dict[str, ObjectEntry] = {}
        for entry in page:
            if entry.key not in known:
                found.setdefault(entry.key, entry)
        self._pages.append(frozenset(entry.key for entry in page))
        return list(found.values())


def _check_part(part: str, key: str) -> None:
    if not _PART.match(part) or part in (".", ".."):
        raise InvalidRequestError(
            f"key {_shown(key)} has a part that is not allowed: {_shown(part)}",
            hint="parts between slashes are 1 to 255 of A-Z a-z 0-9 . _ -, neither '.' nor '..'",
        )


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 80 else text[:77] + "...")
