"""Sends blocks under a given identity (producer id, sequences) that outlives the process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

from memq.client.bulk.import_plan import BLOCK_BYTES_MAX, Cut
from memq.client.observers.report_carrier import ReportCarrier
from memq.client.producer.core import ProducerCore
from memq.client.producer.delivery import AsyncDelivery
from memq.client.producer.settings import ProducerSettings
from memq.errors import MemqError
from memq.limits import MIB
from memq.runtime.network import Address, Runtime

BLOCKS_IN_FLIGHT_MAX = 8


class FixedIdentityWriter:
    """The one writer of a producer id. `acked`: the sequence behind all that is in the queue."""

    def __init__(
        self, bootstrap: Sequence[Address], runtime: Runtime, topic: str, partition: int, producer_id: int, acked: int
    ) -> None:
        self.acked = acked
        self._topic = topic
        self._partition = partition
        settings = ProducerSettings(pending_bytes_max=BLOCKS_IN_FLIGHT_MAX * (BLOCK_BYTES_MAX + 32 * MIB))
        self._core = ProducerCore(
            settings,
            runtime,
            bootstrap,
            AsyncDelivery,
            self._wake,
            lambda: None,
            producer_id=producer_id,
            carrier=ReportCarrier,
        )
        self._closed = False
        self._pending: deque[tuple[AsyncDelivery, int]] = deque()

    async def put(self, cut: Cut) -> None:
        """Send a block; waits while many are under way.

        Raises: what became of an earlier block, TooLargeError.
        """
        while len(self._pending) >= BLOCKS_IN_FLIGHT_MAX:
            await self._settle()
        route = await self._core.route(self._topic)
        delivery = self._core.buffer.put_block(route, self._partition, cut.first, cut.columns)
        self._pending.append((cast(AsyncDelivery, delivery), cut.next))
        while self._pending and self._pending[0][0].done():
            await self._settle()

    async def drain(self) -> None:
        """Wait until all blocks are acked. Raises: what became of one that is not."""
        while self._pending:
            await self._settle()

    async def close(self) -> None:
        """Report the end, and let go of everything."""
        self._closed = True
        await self._core.close()

    async def abandon(self) -> None:
        """Let go of everything at once, unless it is closed; what is under way may still arrive."""
        if self._closed:
            return
        for delivery, _ in self._pending:
            delivery.observed = True
        with suppress(MemqError):
            await self._core.close(0.0)

    async def _settle(self) -> None:
        delivery, next_ = self._pending[0]
        await delivery
        self._pending.popleft()
        self.acked = next_

    def _wake(self) -> None:
        asyncio.get_running_loop().call_soon(self._core.drain)
