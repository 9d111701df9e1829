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

    Raises: StoreAnswer for everything that is no success. A cancelled call sends nothing more, soon.
    """

    async def open(self) -> None:
        """Make ready to send, on the running loop; a second time costs nothing."""
        ...

    async def put(self, order: PutOrder) -> None:
        """Write an object where nothing lies under its key. The server checks a checksum."""
        ...

    async def get(self, key: str) -> tuple[bytes, ObjectHead]:
        """Read an object. Raises: TooLargeError before its bytes come."""
        ...

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Read at most `length` (not 0) bytes from `offset`; fewer where the object ends, or the server erred."""
        ...

    async def head(self, key: str) -> ObjectHead:
        """Return an object's size and checksum."""
        ...

    def pages(self, prefix: str, after: str) -> AsyncIterator[Sequence[ObjectEntry]]:
        """List what begins with `prefix` and comes behind the key `after`, a page at a time."""
        ...

    async def delete(self, key: str) -> None:
        """Delete an object; what is not there is deleted."""
        ...

    async def close(self) -> None:
        """End the connections."""
        ...


def found_of(size: int, metadata: Mapping[str, str]) -> ObjectHead:
    """Read the mark out of an object's metadata."""
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


async def let_go(views: Sequence[memoryview]) -> None:
    """Wait until no thread reads the views, and release them; a cancellation is raised then.

    Theory: a library sends from our memory, in threads of its own, and a cancelled request may be read for a moment
    longer. A view that is exported can't be released, and says so: that is the proof that the memory is free again.
    Measured: at once after an answer, 1 ms after the cancellation of a 64 MiB request.
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
