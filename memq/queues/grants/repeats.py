"""Grants whose answers were lost: a request that comes again gets its items, while their leases run.

The state has the identities of recent requests (`recent.py`), so this works also after a change of the owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator
from itertools import islice
from typing import NamedTuple

from memq.queues.block import QueueBlock
from memq.queues.decisions import GrantedBlock, GrantedItems, ItemState
from memq.queues.payloads import LOST, PayloadReader
from memq.queues.recent import RECENT_MAX
from memq.queues.scheduler import ItemScheduler, Moment


class Delivered(NamedTuple):
    """Granted items of one block, the grant's number, and the block's bytes; b"" if the worker has them.

    The leases began `past_ms` ago.
    """

    grant: int
    found: GrantedBlock
    data: bytes
    past_ms: int = 0


class RepeatedGrants:
    """Answers requests that come again. A request that came again leases nothing more: it may be late."""

    def __init__(
        self,
        scheduler: ItemScheduler,
        reader: PayloadReader,
        fresh: Callable[[], Awaitable[object]],
        now: Callable[[], Moment],
    ) -> None:
        self._scheduler = scheduler
        self._reader = reader
        self._fresh = fresh
        self._now = now
        self._open: dict[int, asyncio.Event] = {}  # requests with a grant on its way
        self._closed: dict[int, None] = {}  # requests that came again, the oldest first

    def begin(self, request: int) -> None:
        """Note that a request has a grant on its way."""
        if request:
            self._open[request] = asyncio.Event()

    def end(self, request: int) -> None:
        """Note that the grant of a request counts, or has failed."""
        if request in self._open:
            self._open.pop(request).set()

    def is_closed(self, request: int) -> bool:
        """Whether a request came again."""
        return request in self._closed

    async def find(self, request: int, known: Collection[int]) -> list[Delivered]:
        """Return the items that a request has leased and that are leased still.

        Raises: NotReadyError; StoreError if a payload can't be read now.
        """
        self._closed[request] = None
        for oldest in list(islice(self._closed, max(0, len(self._closed) - RECENT_MAX))):
            del self._closed[oldest]
        if request in self._open:
            await self._open[request].wait()
        await self._fresh()
        found: list[Delivered] = []
        for grant, id_ in self._scheduler.machine.grants.of(request):
            block = self._scheduler.machine.blocks.get(id_)
            leased = list(self._leased(block, grant)) if block is not None else ()
            if block is None or not leased:
                continue
            data = b""
            if id_ not in known:
                try:
                    data = await self._reader.read(block)
                except LOST:
                    continue  # the lease ends, and the next dequeue finds out whether the payload is lost
            left_s = min(left_s for _, left_s in leased)
            items = tuple(items for items, _ in leased)
            granted = GrantedBlock(block.topic, block.block, block.key, block.terms.lease_ms, items)
            found.append(Delivered(grant, granted, data, max(0, block.terms.lease_ms - int(left_s * 1_000))))
        return found

    def _leased(self, block: QueueBlock, grant: int) -> Iterator[tuple[GrantedItems, float]]:
        """Yield the items that are leased by a grant, and the seconds left of their leases."""
        for begin, end, status, left_s in self._scheduler.seen(block, self._now()):
            if status.state is ItemState.LEASED and status.grant == grant and left_s > 0:
                yield GrantedItems(begin, end, status.attempts, status.note), left_s
