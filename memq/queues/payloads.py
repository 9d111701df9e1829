"""The payloads of queue items: in memory, and read from the store."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import NamedTuple, Protocol

from memq.errors import CorruptDataError, MemqError, NotFoundError, NotReadyError, ThrottledError
from memq.format.blocks.header import BlockHeader, check_block, scope_of
from memq.format.held_object import Target
from memq.queues.block import QueueBlock
from memq.queues.decisions import queue_scope
from memq.queues.pop.groups import block_id, place_of
from memq.runtime.logs import EventLog
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way, check_missing

READ_TIMEOUT_S = 20.0
READ_PAUSE_S, READ_PAUSE_S_MAX = 1.0, 30.0  # between reads of a payload that the store does not give
LOST = (NotFoundError, CorruptDataError)


class RecentPayloads:
    """A cache of the bytes of recent blocks, and the count of bytes that are being stored.

    Both together have at most `bytes_max` bytes. Bytes that are being stored replace cached ones.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0
        self._arriving_bytes = 0

    def reserve(self, count: int) -> None:
        """Count bytes as being stored, until `release`. Raises: ThrottledError at the bound."""
        if self._arriving_bytes and self._arriving_bytes + count > self._bytes_max:
            text = f"{self._arriving_bytes} bytes of items are on their way into the store"
            raise ThrottledError(f"{text}, {self._bytes_max} are allowed")
        self._arriving_bytes += count
        self._shrink()

    def release(self, count: int) -> None:
        """Give back what `reserve` has counted."""
        self._arriving_bytes -= count

    def get(self, block: int) -> bytes | None:
        """Return the bytes of a block; None if they are not in the cache."""
        return self._blocks.get(block)

    def keep(self, block: int, data: bytes) -> None:
        """Add a block to the cache. At the bound, the oldest blocks are dropped."""
        self.drop(block)
        self._blocks[block] = data
        self._bytes += len(data)
        self._shrink()

    def _shrink(self) -> None:
        while self._blocks and self._bytes + self._arriving_bytes > self._bytes_max:
            self.drop(next(iter(self._blocks)))

    def drop(self, block: int) -> None:
        """Forget a block."""
        self._bytes -= len(self._blocks.pop(block, b""))


class Place(NamedTuple):
    """The location of the bytes of a block: an object of a store, and an offset."""

    store: StorageHandler
    key: str
    offset: int


class StreamPlaces(Protocol):
    """Finds the blocks of plain topics, which compaction may move."""

    async def find(self, block: QueueBlock, *, again: bool = False) -> Place:
        """Return the present location of a block; with `again`, without the use of cached answers.

        Raises: NotReadyError if its pointer was deleted or replaced, so that its items will end or get another place;
        as the queue.
        """
        ...


class PayloadReader:
    """Reads blocks of items, from `recent` or the store. `places` finds blocks of plain topics."""

    def __init__(
        self, store: StorageHandler, events: EventLog, recent: RecentPayloads, places: StreamPlaces | None = None
    ) -> None:
        self._store = store
        self._events = events
        self._recent = recent
        self._places = places

    async def read(self, block: QueueBlock) -> bytes:
        """Return the bytes of a block.

        Raises: as the store; CorruptDataError; NotReadyError without an answer.
        """
        id_ = block.block.id.producer
        known = self._recent.get(id_)
        if known is not None:
            return known
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                data = await self._stored(block)
        except TimeoutError as error:
            raise NotReadyError(f"the store does not answer for object '{block.key}'") from error
        self._recent.keep(id_, data)
        return data

    async def _stored(self, block: QueueBlock) -> bytes:
        place = await self._place_of(block)
        try:
            data = await _get(place, block)
        except NotFoundError:
            if not block.is_stream:
                raise
            place = await self._place_of(block, again=True)
            data = await _get(place, block)
        header = check_block(data, scope_of_target(block.target))
        if not _is_of(header, block):
            raise CorruptDataError(
                f"object '{place.key}' has {header.describe()} in place of block {block.number:016x}"
            )
        return data

    async def _place_of(self, block: QueueBlock, *, again: bool = False) -> Place:
        if not block.is_stream:
            return Place(self._store, block.key, block.block.offset)
        if self._places is None:
            raise NotReadyError(f"nothing finds the blocks of '{block.topic}' here")
        return await self._places.find(block, again=again)

    async def loss_of(self, block: QueueBlock) -> MemqError | None:
        """Read a block until it is read, or several answers prove its loss; return the error of a loss.

        One answer proves neither damage nor absence.
        """
        reads, pause_s = ConfirmedReads.patient(self._events), READ_PAUSE_S
        while block.left:
            try:
                await reads.read([Way(f"object '{block.key}'", lambda: self.read(block))])
            except LOST as error:
                if await self._is_lost(block, error):
                    return error
            except MemqError as error:
                self._events.warning("queue-block-unread", f"queue items wait for their payload: {error}")
            else:
                break
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, READ_PAUSE_S_MAX)
        return None

    async def _is_lost(self, block: QueueBlock, error: MemqError) -> bool:
        """Whether a payload is lost that reads found missing or damaged; a listing must lack it, too."""
        if isinstance(error, NotFoundError):
            try:
                place = await self._place_of(block, again=True)
                await check_missing(place.store, place.key)
            except MemqError:
                return False
        return True


async def _get(place: Place, block: QueueBlock) -> bytes:
    return bytes(await place.store.get_range(place.key, place.offset, block.block.length))


def scope_of_target(target: Target) -> int:
    """Return the scope of the blocks of a queue, or of a write partition."""
    return scope_of(bytes.fromhex(target.topic_id), target.partition) if target.topic_id else queue_scope(target.topic)


def _is_of(header: BlockHeader, block: QueueBlock) -> bool:
    """Whether the block that was read is the one that the state names."""
    if not block.is_stream:
        return header.producer_id == block.number
    life = place_of(block.key).life
    parts = life, block.target, header.producer_id, header.first_sequence, header.next_sequence
    return block.number in (block_id(*parts), block_id(*parts, header.checksum))
