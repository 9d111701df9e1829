"""Sends records to the owners under a repeatable identity: at least once; a repetition in order, once.

Blocks are cut by the records alone, and the producer id and the sequences are given. A repetition with the same
records in the same order sends the same blocks; owners and readers drop them within the dedup window of the topic. A
task that runs again may have its records in another order. Then its blocks have sequences that other blocks have. The
owner compares checksums and refuses them, and the writer sends them again under the identity of the next order.

`FixedIdentityWriter` sends blocks under such an identity (producer id, sequences), for imports, too.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from memq.client.arguments import runtime_of
from memq.client.bulk.block_cutter import BLOCK_BYTES_MAX, Cut, RecordCutter
from memq.client.link_pool import bootstrap_addresses
from memq.client.observers.reporter import reporting
from memq.client.producer.core import ProducerCore
from memq.client.producer.delivery import AsyncDelivery
from memq.client.producer.fields import BytesLike, HeadersLike, check_fields, check_many, check_size
from memq.client.producer.open_block import Route
from memq.client.producer.settings import ProducerSettings
from memq.errors import IdentityConflictError, MemqError
from memq.format.report import Kind
from memq.limits import MIB, PRODUCER_ID_END
from memq.runtime.network import Address
from memq.runtime.runtime import Runtime

ORDERS_MAX = 16  # so many orders of its records a task may meet within the dedup window
BLOCKS_IN_FLIGHT_MAX = 16


class FixedIdentityWriter:
    """The only writer of a producer id. `acked`: the sequence after the last acked block."""

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
        # The buffer is never full: it has room for all blocks in flight at their greatest.
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
        self._pending: deque[tuple[AsyncDelivery, Cut]] = deque()

    async def route(self, topic: str) -> Route:
        """Return the route of a topic's records. Raises: NotFoundError, UnreachableError."""
        return self._core.buffer.route(topic) or await self._core.route(topic)

    async def put(self, cut: Cut) -> None:
        """Send a block; wait while too many are in flight.

        Raises: the error of an earlier block, or as `route`. Then the block is not sent.
        """
        while self._pending and (len(self._pending) >= BLOCKS_IN_FLIGHT_MAX or self._pending[0][0].done()):
            await self._settle()
        route = await self.route(cut.topic)
        delivery = self._core.buffer.put_block(route, cut.partition, cut.first, cut.builder)
        self._pending.append((cast(AsyncDelivery, delivery), cut))

    async def drain(self) -> None:
        """Wait until all blocks are acked. Raises: the error of a block that failed."""
        while self._pending:
            await self._settle()

    async def take_refused(self) -> list[Cut]:
        """Wait for all blocks; return those refused for other records. Raises: any other error."""
        refused: list[Cut] = []
        while self._pending:
            try:
                await self._settle()
            except IdentityConflictError:
                refused.append(self._pending.popleft()[1])
        return refused

    async def close(self) -> None:
        """Report the end, and close all connections."""
        await self._core.close()

    async def abandon(self) -> None:
        """Close at once; blocks in flight may still arrive."""
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


@dataclass(frozen=True, slots=True)
class DirectIdentity:
    """One task of one batch of a writer.

    `stream` identifies the checkpoint of the stream, or the job, to which the batch belongs.
    """

    writer: str
    stream: str
    batch_id: int
    task: int

    def producer_id(self, order: int = 0) -> int:
        """Return the producer id of the records in order number `order`, from 0."""
        named = f"memq direct 2\n{self.writer}\n{self.stream}\n{self.batch_id}\n{self.task}\n{order}"
        return int.from_bytes(hashlib.sha256(named.encode()).digest()[:8], "big") % (PRODUCER_ID_END - 1) + 1


class DirectWriter:
    """The writer of one task. `finish` returns when the queue has all records."""

    def __init__(
        self,
        brokers: str | Sequence[str] | None,
        identity: DirectIdentity,
        *,
        codec: str = "zstd",
        runtime: Runtime | None = None,
    ) -> None:
        self._identity = identity
        self._codec = codec
        self._runtime = runtime_of(runtime)
        self._bootstrap = bootstrap_addresses(brokers)
        self._cutter = RecordCutter()
        self._writers: list[FixedIdentityWriter] = []  # by order
        self._last = self._begin_order()  # the one that sends

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
        """Add a record to its block. Arguments and errors as those of `memq.Producer.send`."""
        fields = check_fields(value, key, headers, timestamp_ms, tag)
        size = fields.size
        route = await self._last.route(topic)
        check_size(size, route.topic)
        cut = self._cutter.add(topic, route.map, fields, size, partition)
        if cut is not None:
            await self._send(cut)

    async def add_many(
        self,
        topic: str,
        values: Sequence[BytesLike | None],
        keys: Sequence[BytesLike | None] | None = None,
        timestamps_ms: Sequence[int] | None = None,
        tag: str | None = None,
    ) -> None:
        """Add many records with one fast call; block boundaries are the same as with `add`.

        Arguments and errors as those of `memq.Producer.send_many`.
        """
        many = check_many(values, keys, timestamps_ms, tag)
        if not many.values:
            return
        route = await self._last.route(topic)
        sizes = many.sizes(0, len(many.values))
        check_size(max(sizes), route.topic)
        for cut in self._cutter.add_many(topic, route.map, many, sizes):
            await self._send(cut)

    async def finish(self) -> None:
        """Send the remaining records; return when the queue has all of them.

        Raises: the error of a block that failed.
        """
        for cut in self._cutter.end():
            await self._send(cut)
        while True:
            try:
                await self._last.drain()
                break
            except IdentityConflictError as error:
                await self._change_order(error)
        for writer in self._writers:
            await writer.close()

    async def abandon(self) -> None:
        """Close everything at once; blocks in flight may still arrive."""
        for writer in self._writers:
            await writer.abandon()

    def _begin_order(self) -> FixedIdentityWriter:
        producer_id = self._identity.producer_id(len(self._writers))
        writer = FixedIdentityWriter(
            self._bootstrap, self._runtime, producer_id, codec=self._codec, kind="spark-writer"
        )
        self._writers.append(writer)
        return writer

    async def _send(self, cut: Cut) -> None:
        while True:
            try:
                await self._last.put(cut)
                return
            except IdentityConflictError as error:
                await self._change_order(error)

    async def _change_order(self, error: IdentityConflictError) -> None:
        """Send the refused blocks, and all that follows, under the identity of the next order.

        Blocks that an earlier attempt sent in this order are known there. Raises: the error of another block; the
        refusal, after ORDERS_MAX orders.
        """
        again = await self._last.take_refused()
        if len(self._writers) >= ORDERS_MAX:
            raise error
        self._last = self._begin_order()
        for cut in again:
            await self._send(cut)
