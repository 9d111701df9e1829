"""The object store as one node sees it: in memory, behind calls that fail, hang and come late.

A put reads the caller's buffers by reference, piece by piece, until its request has arrived. A caller that changes a
buffer before the call has ended is detected, because the checksum comes with the call.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from awscrt.checksums import crc32c

from memq.errors import CorruptDataError, MemqError, RetryableError, StoreError
from memq.simulation.ports.calls import Caller
from memq.simulation.ports.failing_partition import FailingPartition
from memq.simulation.world.node import SimNode
from memq.storage_handlers import Buffer, ObjectEntry
from memq.storage_handlers.memory import MemoryHandler

SICK_SHARE = 4
WRITE_LIES = ("denied", "denied-landed")
READ_LIES = ("denied", "not-found")
WRONG_ENTRY_RATE = 0.3  # of a listing that omits or repeats
HEALED_AT_LISTING_RATE = 0.1


class PutBody:
    """The buffers of one put, read during the call; `settled` is done when no code reads them."""

    def __init__(self, buffers: Sequence[Buffer], draw: Callable[[], float]) -> None:
        self._left = deque(memoryview(buffer).cast("B") for buffer in buffers if len(buffer))
        self._draw = draw
        self._parts: list[bytes] = []
        self._abandoned = False
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def complete(self) -> bool:
        """Whether all was read."""
        return not self._abandoned and not self._left

    def read(self, *, whole: bool) -> None:
        """Read a drawn part of the rest, or the whole rest."""
        wanted = sum(map(len, self._left))
        if not whole:
            wanted = int(wanted * self._draw())
        while wanted > 0 and self._left:
            view = self._left.popleft()
            part = bytes(view[:wanted])
            self._parts.append(part)
            wanted -= len(part)
            if len(part) < len(view):
                self._left.appendleft(view[len(part) :])
        if whole:
            self._settle()

    def abandon(self) -> None:
        """Read nothing more."""
        self._abandoned = True
        self._left.clear()
        self._settle()

    def _settle(self) -> None:
        loop = self.settled.get_loop()
        loop.call_soon(lambda: None if self.settled.done() else self.settled.set_result(None))

    def bytes(self) -> bytes:
        """Return the bytes that were read."""
        return b"".join(self._parts)


@dataclass(slots=True)
class Sickness:
    """A part of the store refuses puts until `until_s` (virtual): keys whose crc32 leaves `remainder`."""

    until_s: float = 0.0
    remainder: int = 0

    def has(self, key: str, now_s: float) -> bool:
        """Whether a key can't be put now."""
        return now_s < self.until_s and zlib.crc32(key.encode()) % SICK_SHARE == self.remainder


class SimStore:
    """See `memq.storage_handlers.StorageHandler`. `stored` and `deleted` get the keys of changed objects."""

    def __init__(
        self,
        caller: Caller,
        handler: MemoryHandler,
        stored: Callable[[str], None],
        deleted: Callable[[str], None],
        sickness: Sickness,
        failing_partition: FailingPartition,
    ) -> None:
        self._caller = caller
        self._handler = handler
        self._stored = stored
        self._deleted = deleted
        self._sickness = sickness
        self._failing_partition = failing_partition

    @property
    def url(self) -> str:
        """See `StorageHandler.url`."""
        return self._handler.url

    @property
    def node(self) -> SimNode:
        """The node that uses this store."""
        return self._caller.node

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        """See `ObjectWriter.put`. A cancellation waits until the buffers are read."""
        await self._failing_partition.reach_object(key, self.node.world.now)
        body = PutBody(buffers, self._caller.draw)

        async def land() -> None:
            data = body.bytes()
            if crc32c(data) != checksum:
                self._caller.node.world.fail(f"{self.node.name} changed the bytes of '{key}' while they were put")
                return
            if self._sickness.has(key, self.node.world.now):
                raise StoreError(f"object '{key}' is in a part of the store that fails")
            await self._handler.put(key, [data], checksum)
            self._stored(key)

        try:
            await self._caller.call(f"put {key}", land, payload=body, lies=WRITE_LIES)
        finally:
            await _settled(body.settled)

    async def delete(self, key: str) -> None:
        """See `ObjectWriter.delete`."""

        async def land() -> None:
            await self._handler.delete(key)
            self._deleted(key)

        await self._caller.call(f"delete {key}", land, lies=WRITE_LIES)

    async def get(self, key: str, *, checked: bool = True) -> bytes:
        """See `ObjectReader.get`."""
        return await self._read(key, f"get {key}", lambda: self._handler.get(key))

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See `ObjectReader.get_range`."""
        what = f"get {key} {offset}+{length}"
        arrived = await self._read(key, what, lambda: self._handler.get_range(key, offset, length))
        if len(arrived) < length:
            raise CorruptDataError(f"object '{key}' ends after {len(arrived)} of {length} bytes from {offset}")
        return arrived

    async def _read(self, key: str, what: str, read: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
        """Return the arriving bytes; count a wrong answer that seems right in the node's `misread`."""
        await self._failing_partition.reach_object(key, self.node.world.now)
        try:
            body = await self._caller.call(what, read, lies=READ_LIES)
        except RetryableError:
            raise
        except MemqError:
            self.node.misread[key] += 1
            raise
        arrived = self._on_the_way(key, body)
        self.node.misread[key] += arrived != body
        return arrived

    def _on_the_way(self, key: str, body: bytes) -> bytes:
        """Return the arriving bytes of an object; possibly flipped, too few, or of another object."""
        lie = self._caller.lie("flipped", "short", "foreign")
        if not lie or not body:
            return body
        at = int(self._caller.draw() * len(body))
        if lie == "short":
            return body[:at]
        if lie == "flipped":
            return body[:at] + bytes([body[at] ^ 1 << int(self._caller.draw() * 8)]) + body[at + 1 :]
        others = [each for each in self._handler.objects if each != key]
        other = self._handler.objects[others[int(self._caller.draw() * len(others))]] if others else b""
        return (other * (len(body) // len(other) + 1))[: len(body)] if other else body

    async def size(self, key: str) -> int:
        """See `ObjectReader.size`."""
        await self._failing_partition.reach_object(key, self.node.world.now)
        return await self._caller.call(f"size {key}", lambda: self._handler.size(key), lies=READ_LIES)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectEntry]:
        """See `ObjectReader.list`."""

        async def collect() -> list[ObjectEntry]:
            if self._caller.draw() < HEALED_AT_LISTING_RATE:
                self._sickness.until_s = 0.0  # the worst moment: waiting puts arrive during a sweep
            return [entry async for entry in self._handler.list(prefix)]

        lie, draw = self._caller.lie("list-omits", "list-repeats"), self._caller.draw
        for entry in await self._caller.call(f"list {prefix}", collect, lies=("denied",)):
            if lie == "list-omits" and draw() < WRONG_ENTRY_RATE:
                continue
            yield entry
            if lie == "list-repeats" and draw() < WRONG_ENTRY_RATE:
                yield entry

    async def check(self, *, deletes: bool = True) -> None:
        """See `StorageHandler.check`."""
        await self._caller.call("check", self._handler.check)

    async def close(self) -> None:
        """See `StorageHandler.close`."""


async def _settled(settled: asyncio.Future[None]) -> None:
    """Wait until the buffers are read, through cancellations, which are raised then."""
    cancelled: asyncio.CancelledError | None = None
    while not settled.done():
        try:
            await asyncio.shield(settled)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
