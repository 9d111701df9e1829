"""Sends records to the owners under a repeatable identity: at least once; a plain retry, once.

Blocks are cut by the records alone, and the producer id and the sequences are given. Whoever sends the same records in
the same order again sends the same blocks, and owners and readers drop them for the dedup window of the topic. The
records of a task that runs again may come in another order: then its blocks bear sequences that other blocks have. The
owner compares checksums and refuses them, and they are sent once more under the identity of the next order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from memq.client.arguments import runtime_of
from memq.client.bulk.block_cutter import Cut, RecordCutter
from memq.client.bulk.copier import FixedIdentityWriter
from memq.client.link_pool import bootstrap_addresses
from memq.client.producer.fields import BytesLike, HeadersLike, check_fields, check_many, check_size
from memq.errors import IdentityConflictError
from memq.limits import PRODUCER_ID_END
from memq.runtime.network import Runtime

ORDERS_MAX = 16  # so many orders of its records a task may meet within the dedup window


@dataclass(frozen=True, slots=True)
class DirectIdentity:
    """One task of one batch of a writer.

    `stream` is what stays with the checkpoint, or with the job, that it is of.
    """

    writer: str
    stream: str
    batch_id: int
    task: int

    def producer_id(self, order: int = 0) -> int:
        """Return the producer id of the records in the order that was met as number `order`, from 0."""
        named = f"memq direct 2\n{self.writer}\n{self.stream}\n{self.batch_id}\n{self.task}\n{order}"
        return int.from_bytes(hashlib.sha256(named.encode()).digest()[:8], "big") % (PRODUCER_ID_END - 1) + 1


class DirectWriter:
    """One task's side. `finish` returns when all is in the queue."""

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
        self._writers: list[FixedIdentityWriter] = []  # by order; the last one sends
        self._begin_order()

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
        size = fields.size
        route = await self._writers[-1].route(topic)
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
        """Send many records, the fast way; block boundaries are the same as with `add`.

        Arguments and errors as those of `memq.Producer.send_many`.
        """
        many = check_many(values, keys, timestamps_ms, tag)
        if not many.values:
            return
        route = await self._writers[-1].route(topic)
        sizes = many.sizes(0, len(many.values))
        check_size(max(sizes), route.topic)
        for cut in self._cutter.add_many(topic, route.map, many, sizes):
            await self._send(cut)

    async def finish(self) -> None:
        """Send what is left; return when all of it is in the queue.

        Raises: what became of a block that is not.
        """
        for cut in self._cutter.end():
            await self._send(cut)
        while True:
            try:
                await self._writers[-1].drain()
                break
            except IdentityConflictError as error:
                await self._change_order(error)
        for writer in self._writers:
            await writer.close()

    async def abandon(self) -> None:
        """Close everything at once; blocks in flight may still arrive."""
        for writer in self._writers:
            await writer.abandon()

    def _begin_order(self) -> None:
        producer_id = self._identity.producer_id(len(self._writers))
        writer = FixedIdentityWriter(
            self._bootstrap, self._runtime, producer_id, codec=self._codec, kind="spark-writer"
        )
        self._writers.append(writer)

    async def _send(self, cut: Cut) -> None:
        while True:
            try:
                await self._writers[-1].put(cut)
                return
            except IdentityConflictError as error:
                await self._change_order(error)

    async def _change_order(self, error: IdentityConflictError) -> None:
        """Send the refused blocks, and all that follows, under the identity of the next order.

        Blocks that an earlier attempt sent in this order are known there. Raises: the error of another block; the
        refusal, after ORDERS_MAX orders.
        """
        again = await self._writers[-1].take_refused()
        if len(self._writers) >= ORDERS_MAX:
            raise error
        self._begin_order()
        for cut in again:
            await self._send(cut)
