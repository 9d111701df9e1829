"""Sends records straight to the owners under an identity that is made again: what is sent twice is there once.

Blocks are cut by the records alone, and the producer id and the sequences are given, so whoever sends the same records
in the same order again sends the same blocks. Owners and readers know them for the dedup window of the topic.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

from memq.client.delivery import AsyncDelivery
from memq.client.fields import BytesLike, HeadersLike, check_fields
from memq.client.import_plan import BLOCK_BYTES_MAX, Cut, Cutter
from memq.client.link_pool import bootstrap_addresses
from memq.client.producer_core import ProducerCore
from memq.client.producer_settings import ProducerSettings
from memq.client.report_carrier import ReportCarrier
from memq.errors import BufferFullError, MemqError
from memq.limits import MIB, PRODUCER_ID_END
from memq.network import Runtime

BLOCKS_IN_FLIGHT_MAX = 16


def direct_id(writer: str, batch_id: int, task: int) -> int:
    """Return the producer id of one task of one batch of a writer."""
    digest = hashlib.sha256(f"memq direct {writer} {batch_id} {task}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % (PRODUCER_ID_END - 1) + 1


class DirectWriter:
    """One task's side. `finish` returns when all is in the queue."""

    def __init__(
        self,
        brokers: str | Sequence[str] | None,
        producer_id: int,
        *,
        codec: str = "zstd",
        runtime: Runtime | None = None,
    ) -> None:
        settings = ProducerSettings(codec=codec, pending_bytes_max=BLOCKS_IN_FLIGHT_MAX * (BLOCK_BYTES_MAX + 32 * MIB))
        self._core = ProducerCore(
            settings,
            runtime or Runtime(),
            bootstrap_addresses(brokers),
            AsyncDelivery,
            self._wake,
            lambda: None,
            producer_id=producer_id,
            carrier=ReportCarrier,
            kind="spark-writer",
        )
        self._cutters: dict[tuple[str, int], Cutter] = {}
        self._next: dict[tuple[str, int], int] = {}
        self._turns: dict[str, int] = {}
        self._pending: deque[AsyncDelivery] = deque()

    async def add(
        self,
        topic: str,
        value: BytesLike | None,
        key: BytesLike | None = None,
        headers: HeadersLike | None = None,
        timestamp_ms: int | None = None,
        tag: str | None = None,
        partition: int | None = None,
    ) -> None:
        """Send a record, with the others of its block. Arguments and errors as those of `memq.Producer.send`."""
        fields = check_fields(value, key, headers, timestamp_ms, tag)
        route = self._core.buffer.route(topic) or await self._core.route(topic)
        keyless = key is None and partition is None
        if partition is None:
            place = self._turns.setdefault(topic, 0) if key is None else route.map.place_of_key(cast(bytes, fields.key))
            partition = route.map.partitions[place % len(route.map.partitions)]
        home = (topic, partition)
        sequence = self._next[home] = self._next.get(home, -1) + 1
        cutter = self._cutters.get(home)
        if cutter is None:  # `setdefault` would make one for each record
            cutter = self._cutters[home] = Cutter()
        cut = cutter.add(sequence, fields)
        if cut is not None:
            await self._send(home, cut)
            if keyless:
                self._turns[topic] = route.map.next_place(self._turns[topic], lambda _: False)

    async def finish(self) -> None:
        """Send what is left; return when all of it is in the queue. Raises: what became of a block that is not."""
        for home, cutter in self._cutters.items():
            cut = cutter.end()
            if cut is not None:
                await self._send(home, cut)
        while self._pending:
            await self._pending.popleft()
        await self._core.close()

    async def abandon(self) -> None:
        """Let go of everything at once; what is under way may still arrive."""
        for delivery in self._pending:
            delivery.observed = True
        with suppress(MemqError):
            await self._core.close(0.0)

    async def _send(self, home: tuple[str, int], cut: Cut) -> None:
        topic, partition = home
        while len(self._pending) >= BLOCKS_IN_FLIGHT_MAX:
            await self._pending.popleft()
        while True:
            route = self._core.buffer.route(topic) or await self._core.route(topic)
            try:
                delivery = self._core.buffer.put_block(route, partition, cut.first, cut.records)
            except BufferFullError:
                if not self._pending:
                    raise
                await self._pending.popleft()
                continue
            self._pending.append(cast(AsyncDelivery, delivery))
            return

    def _wake(self) -> None:
        asyncio.get_running_loop().call_soon(self._core.drain)
