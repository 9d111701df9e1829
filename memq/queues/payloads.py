"""The payloads of queue items: in memory, and read from the store."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from memq.errors import CorruptDataError, MemqError, NotFoundError, NotReadyError, ThrottledError
from memq.format.blocks.header import check_block
from memq.queues.block import QueueBlock
from memq.queues.decisions import queue_scope
from memq.runtime.logs import EventLog
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way, check_missing

READ_TIMEOUT_S = 20.0
READ_PAUSE_S, READ_PAUSE_S_MAX = 1.0, 30.0  # between reads of a payload that the store does not give
LOST = (NotFoundError, CorruptDataError)


class RecentPayloads:
    """The bytes of blocks of items in memory: those on their way into the store, and recent ones.

    Recent ones save reads of the store. They make room for those on their way, which alone may have `bytes_max` bytes.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0
        self._arriving_bytes = 0

    def reserve(self, count: int) -> None:
        """Count bytes as on their way, until `release`. Raises: ThrottledError at the bound."""
        if self._arriving_bytes and self._arriving_bytes + count > self._bytes_max:
            text = f"{self._arriving_bytes} bytes of items are on their way into the store"
            raise ThrottledError(f"{text}, {self._bytes_max} are allowed")
        self._arriving_bytes += count
        self._shrink()

    def release(self, count: int) -> None:
        """Give back what `reserve` has counted."""
        self._arriving_bytes -= count

    def get(self, block: int) -> bytes | None:
        """Return the bytes of a block, None if they are not here."""
        return self._blocks.get(block)

    def keep(self, block: int, data: bytes) -> None:
        """Keep a block; the oldest ones go at the bound."""
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


class PayloadReader:
    """Reads blocks of items, of which `recent` has some."""

    def __init__(self, store: StorageHandler, events: EventLog, recent: RecentPayloads) -> None:
        self._store = store
        self._events = events
        self._recent = recent

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
                data = bytes(await self._store.get_range(block.key, block.block.offset, block.block.length))
        except TimeoutError as error:
            raise NotReadyError(f"the store does not answer for object '{block.key}'") from error
        header = check_block(data, queue_scope(block.topic))
        if header.producer_id != id_:
            raise CorruptDataError(f"object '{block.key}' has block {header.producer_id:016x} in place of {id_:016x}")
        self._recent.keep(id_, data)
        return data

    async def loss_of(self, block: QueueBlock) -> MemqError | None:
        """Read a block until it is known what the store has; return the error of one that is lost.

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
        """Whether a payload that reads found missing or damaged is lost: listings lack it, too."""
        if isinstance(error, NotFoundError):
            try:
                await check_missing(self._store, block.key)
            except MemqError:
                return False
        return True
