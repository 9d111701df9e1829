"""The interface of the S3 store to the libraries that send requests, without retries or policy."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from memq.storage_handlers import ObjectEntry
from memq.storage_handlers.s3.answers import StoreAnswer

CRC_MARK = "memq-crc32c"  # metadata of an object: crc32c of its bytes, 8 hex digits
_S3_ETAG = re.compile(r'"?[0-9a-fA-F]{32}(-[0-9]+)?"?\Z')
_ETAGS_MAX = 1_000
_HEADS = 2
_PAGE_TYPE = "text/html"
_RELEASE_WAIT_S_MAX = 0.05


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
        """Write an object if its key is free. The server checks a checksum.

        An answer that does not prove the object is confirmed by a HEAD.
        """
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


class PutAnswers:
    """Decides whether an answer to a PUT proves that the object is stored.

    The status proves nothing, because a proxy's page also has the status 200, and some pages have an ETag. The checksum
    in the answer proves it, if the server sends one and the library shows it. If not, an ETag is accepted that has the
    form of S3's and that no other object had: with SSE-KMS it is not the MD5, which would also double the CPU time.
    So the first page with such an ETag passes, unless the setting `confirm_puts` asks for a HEAD each time.
    """

    def __init__(self, *, believes_etags: bool = True) -> None:
        self._shows_checksums = False
        self._believes_etags = believes_etags
        self._owners: OrderedDict[str, int | None] = OrderedDict()  # by ETag: the object's crc32c; None for a page

    async def confirm(self, path: DataPath, order: PutOrder, etag: str, shown: int | None = None) -> None:
        """Return if the object is stored; `shown` is the crc32c in the answer.

        If the answer proves nothing, a HEAD decides.

        A second HEAD is cheaper than a second PUT: the answer to the first may be a page, too.
        Raises: StoreAnswer, which asks for another try.
        """
        if shown is not None:
            self._shows_checksums = True
        if shown == order.checksum or self._is_new(etag, order.checksum):
            return
        error = ""
        for _ in range(_HEADS):
            try:
                found = await path.head(order.key)
            except StoreAnswer as answer:
                error = str(answer)
            else:
                if found == ObjectHead(order.size, order.checksum):
                    return
                error = f"{found.size} bytes of another object"
        self._owners[etag] = None
        raise StoreAnswer(0, "", f"success of a PUT, with ETag {etag[:80]}, but a HEAD got: {error[:200]}")

    def _is_new(self, etag: str, checksum: int) -> bool:
        """Whether an ETag is one of S3, and of no other object."""
        owner = self._owners.setdefault(etag, checksum)
        while len(self._owners) > _ETAGS_MAX:
            self._owners.popitem(last=False)
        return (
            self._believes_etags
            and not self._shows_checksums
            and owner == checksum
            and _S3_ETAG.match(etag) is not None
        )


def head_of(size: int, metadata: Mapping[str, str], kind: str) -> ObjectHead:
    """Return an object's size, and its checksum from its metadata; `kind` is the answer's Content-Type.

    Raises: StoreAnswer for a proxy's page, which also has the status 200. No object without a mark is HTML.
    """
    text = metadata.get(CRC_MARK, "")
    if not text and kind.startswith(_PAGE_TYPE):
        raise StoreAnswer(0, "", "a page in HTML, which is not S3's")
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
                wait_s = min(max(2 * wait_s, 0.0005), _RELEASE_WAIT_S_MAX)
    if cancelled is not None:
        raise cancelled
