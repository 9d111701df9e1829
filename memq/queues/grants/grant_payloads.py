"""Reads the payloads of items that are granted. Items whose payload can't be read are set aside."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress

from memq.errors import MemqError, RetryableError, StoreError
from memq.queues.block import QueueBlock
from memq.queues.decisions import EndDecision, ItemRanges, LeasedItems
from memq.queues.machine import QueueMachine
from memq.queues.payloads import LOST, PayloadReader
from memq.queues.scheduler import ItemScheduler
from memq.runtime.clock import Clock
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner


class GrantPayloads:
    """The payloads of one shard. `end` decides on ends, `wake` notes that items may be ready again."""

    def __init__(
        self,
        scheduler: ItemScheduler,
        reader: PayloadReader,
        events: EventLog,
        clock: Clock,
        tasks: TaskOwner,
        end: Callable[[EndDecision], Awaitable[None]],
        wake: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._machine: QueueMachine = scheduler.machine
        self._reader = reader
        self._events = events
        self._clock = clock
        self._tasks = tasks
        self._end = end
        self._wake = wake
        self._unread: dict[int, list[ItemRanges]] = {}  # by block: items whose payload can't be read now

    async def of(self, items: Sequence[ItemRanges]) -> dict[int, bytes]:
        """Return the bytes of the blocks of items, from memory or from the store.

        Blocks that can't be read now are read again after this request. No worker gets their items meanwhile. A block
        that has moved into a run since its items were chosen has no bytes in the result: its items are not granted.
        Raises: StoreError, NotReadyError if none can be read.
        """
        known = self._machine.blocks
        blocks = {each.block: known[each.block] for each in items if each.block in known}
        data = await asyncio.gather(*(self._reader.read(block) for block in blocks.values()), return_exceptions=True)
        found = dict(zip(blocks, data, strict=True))
        for each in items:
            if isinstance(found.get(each.block), MemqError):
                self._set_aside(each, blocks[each.block])
        readable = {id_: payload for id_, payload in found.items() if isinstance(payload, bytes)}
        for error in found.values():
            if isinstance(error, BaseException) and (not readable or not isinstance(error, MemqError)):
                raise error if not isinstance(error, LOST) else StoreError(f"a payload can't be read now: {error}")
        return readable

    def _set_aside(self, items: ItemRanges, block: QueueBlock) -> None:
        """Do not grant items until their payload is read, or proved to be lost."""
        self._scheduler.hold([items])
        unread = self._unread.setdefault(items.block, [])
        unread.append(items)
        if len(unread) == 1:
            self._tasks.start(self._read_again(block, unread), "read a payload of queue items again")

    async def _read_again(self, block: QueueBlock, items: Sequence[ItemRanges]) -> None:
        error = await self._reader.loss_of(block)
        if error is not None:
            await self._bury(items, error)
        del self._unread[block.block.id.producer]
        self._scheduler.released(items)
        self._wake()

    async def _bury(self, items: Sequence[ItemRanges], error: BaseException) -> None:
        """Make items whose payload is lost dead: their state and their object are kept."""
        self._events.error("queue-block-lost", f"the payload of queue items can't be read: {error}")
        leases = [lease for each in items for lease in self._latest(each)]
        with suppress(RetryableError):
            await self._end(EndDecision(self._clock.wall_ms(), dead=True, leases=tuple(leases)))

    def _latest(self, items: ItemRanges) -> Iterator[LeasedItems]:
        """Yield items that are in the state, with their latest grants."""
        block = self._machine.blocks.get(items.block)
        for pair in items.pairs() if block is not None else ():
            for begin, end, status in block.ranges(*pair) if block is not None else ():
                yield LeasedItems(ItemRanges(items.block, (begin, end)), status.grant)
