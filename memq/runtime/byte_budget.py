"""A bound on bytes that are under way: who wants more than is left waits, first come first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteBudget:
    """Lends up to `bytes_max` bytes at once; a single wish above that gets all of it."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.lent_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def lend(self, count: int) -> AsyncIterator[None]:
        """Hold `count` bytes of the budget for the time of the block; who wants none waits for none."""
        count = min(count, self.bytes_max)
        if count == 0:
            yield
            return
        if self._waiting or self.lent_bytes + count > self.bytes_max:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((count, future))
            try:
                await future  # the bytes are counted by whoever wakes this one
            except asyncio.CancelledError:
                self._give_back(count if future.done() and not future.cancelled() else 0)
                raise
        else:
            self.lent_bytes += count
        try:
            yield
        finally:
            self._give_back(count)

    def _give_back(self, count: int) -> None:
        """Take bytes back and wake the next waiter, also when a waiter in front of it gave up."""
        self.lent_bytes -= count
        while self._waiting:
            wanted, future = self._waiting[0]
            if not future.done():
                if self.lent_bytes + wanted > self.bytes_max:
                    return
                self.lent_bytes += wanted
                future.set_result(None)
            self._waiting.popleft()
