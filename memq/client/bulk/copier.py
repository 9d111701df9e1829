"""Sends blocks under a given identity (producer id, sequences) that outlives the process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

from memq.client.bulk.block_cutter import BLOCK_BYTES_MAX, Cut
from memq.client.observers.report_carrier import reporting
from memq.client.producer.core import ProducerCore
from memq.client.producer.delivery import AsyncDelivery
from memq.client.producer.open_block import Route
from memq.client.producer.settings import ProducerSettings
from memq.errors import BufferFullError, IdentityConflictError, MemqError
from memq.format.report import Kind
from memq.limits import MIB
from memq.runtime.network import Address, Runtime

BLOCKS_IN_FLIGHT_MAX = 16


class FixedIdentityWriter:
    """The one writer of a producer id. `acked`: the sequence behind the last block that was found acked."""

    def __init__(
        self,
        bootstrap: Sequence[Address],
        runtime: Runtime,
        producer_id: int,
        acked: int = 0,
        *,
        codec: str = "zstd",
        kind: Kind = "producer",
    ) -> None:
        self.acked = acked
        settings = ProducerSettings(codec=codec, pending_bytes_max=BLOCKS_IN_FLIGHT_MAX * (BLOCK_BYTES_MAX + 32 * MIB))
        self._core = ProducerCore(
            settings,
            runtime,
            bootstrap,
            AsyncDelivery,
            self._wake,
            lambda: None,
            producer_id=producer_id,
            observe=reporting(kind, ""),
        )
        self._closed = False
        self._pending: deque[tuple[AsyncDelivery, Cut]] = deque()

    async def route(self, topic: str) -> Route:
        """Return the way of a topic's records. Raises: NotFoundError, UnreachableError."""
        return self._core.buffer.route(topic) or await self._core.route(topic)

    async def put(self, cut: Cut) -> None:
        """Send a block; waits while many are in flight.

        Raises: the error of an earlier block, or TooLargeError; the block is not sent then.
        """
        while self._pending and (len(self._pending) >= BLOCKS_IN_FLIGHT_MAX or self._pending[0][0].done()):
            await self._settle()
        while True:
            route = await self.route(cut.topic)
            try:
                delivery = self._core.buffer.put_block(route, cut.partition, cut.first, cut.builder)
            except BufferFullError:
                if not self._pending:
                    raise
                await self._settle()
                continue
            self._pending.append((cast(AsyncDelivery, delivery), cut))
            return

    async def drain(self) -> None:
        """Wait until all blocks are acked. Raises: the error of one that is not."""
        while self._pending:
            await self._settle()

    async def take_refused(self) -> list[Cut]:
        """Wait for all blocks; return those whose sequences other records have. Raises: any other error."""
        refused: list[Cut] = []
        while self._pending:
            try:
                await self._settle()
            except IdentityConflictError:
                refused.append(self._pending.popleft()[1])
        return refused

    async def close(self) -> None:
        """Report the end, and close all connections."""
        self._closed = True
        await self._core.close()

    async def abandon(self) -> None:
        """Close at once, unless it is closed; blocks in flight may still arrive."""
        if self._closed:
            return
        for delivery, _ in self._pending:
            delivery.observed = True
        with suppress(MemqError):
            await self._core.close(0.0)

    async def _settle(self) -> None:
        delivery, cut = self._pending[0]
        await delivery
        self._pending.popleft()
        self.acked = cut.next

    def _wake(self) -> None:
        asyncio.get_running_loop().call_soon(self._core.drain)
