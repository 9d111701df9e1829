"""The interface of the S3 store to the libraries that send requests, without retries or policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from memq.storage_handlers import ObjectEntry

CRC_MARK = "memq-crc32c"  # metadata of an object: crc32c of its bytes, 8 hex digits
_LET_GO_S_MAX = 0.05


@dataclass(frozen=True, slots=True)
class ObjectHead:
    """Facts of an object without its bytes. `checksum` is None when others wrote it."""

    size: int
    checksum: int | None


@dataclass(frozen=True, slots=True)
class PutOrder:
    """One object to write: its bytes, their number and crc32c."""

    key: str
    views: Sequence[memoryview]
    size: int
    checksum: int

    @property
    def marks(self) -> dict[str, str]:
        """The metadata that goes with it."""
        return {CRC_MARK: f"{self.checksum:08x}"}


class DataPath(Protocol):
    """One library that speaks S3 to one bucket; keys are whole, with the prefix.

    Raises: StoreAnswer for every answer that is no success. A cancelled call soon stops sending.
    """

    async def open(self) -> None:
        """Prepare to send, on the running loop; a repeated call costs nothing."""
        ...

    async def put(self, order: PutOrder) -> None:
        """Write an object if its key is free. The server checks a checksum."""
        ...

    async def get(self, key: str) -> tuple[bytes, ObjectHead]:
        """Read an object. Raises: TooLargeError before its bytes come."""
        ...

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Read `length` (not 0) bytes from `offset`; fewer if the object ends or the server errs."""
        ...

    async def head(self, key: str) -> ObjectHead:
        """Return an object's size and checksum."""
        ...

    def pages(self, prefix: str, after: str) -> AsyncIterator[Sequence[ObjectEntry]]:
        """List the objects whose keys begin with `prefix` and sort after `after`, a page at a time."""
        ...

    async def delete(self, key: str) -> None:
        """Delete an object; succeeds for a missing one."""
        ...

    async def close(self) -> None:
        """End the connections."""
        ...


def found_of(size: int, metadata: Mapping[str, str]) -> ObjectHead:
    """Return an object's size, and its checksum from its metadata."""
    text = metadata.get(CRC_MARK, "")
    try:
        checksum = int(text, 16) if len(text) == 8 else None
    except ValueError:
        checksum = None
    return ObjectHead(size, checksum)


def cut_parts(views: Sequence[memoryview], part_bytes: int) -> Iterator[list[memoryview]]:
    """Cut buffers into parts of `part_bytes`, without a copy; the last one may be shorter, none is empty."""
    part: list[memoryview] = []
    room = part_bytes
    for view in views:
        while len(view):
            part.append(view[:room])
            room -= len(part[-1])
            view = view[len(part[-1]) :]
            if not room:
                yield part
                part, room = [], part_bytes
    if part:
        yield part


async def release_views(views: Sequence[memoryview]) -> None:
    """Wait until no thread reads the views, and release them; a cancellation is raised then.

    Theory: a library sends from the caller's memory, in its own threads, and may read it shortly after a cancellation.
    The release of a view raises BufferError while a thread uses it, so a successful release proves that the memory is
    free. Measured: at once after an answer, 1 ms after the cancellation of a 64 MiB request.
    """
    cancelled: asyncio.CancelledError | None = None
    wait_s = 0.0
    for view in views:
        while True:
            try:
                view.release()
                break
            except BufferError:
                try:
                    await asyncio.sleep(wait_s)
                except asyncio.CancelledError as error:
                    cancelled = error
                wait_s = min(max(2 * wait_s, 0.0005), _LET_GO_S_MAX)
    if cancelled is not None:
        raise cancelled
