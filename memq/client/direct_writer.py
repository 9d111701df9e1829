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
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import cast

from memq.client.arguments import runtime_of
from memq.client.delivery import AsyncDelivery
from memq.client.fields import BytesLike, HeadersLike, Many, check_fields, check_many, check_size
from memq.client.import_plan import BLOCK_BYTES_MAX, Cut, Cutter
from memq.client.link_pool import bootstrap_addresses
from memq.client.open_block import Route
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


@dataclass(slots=True)
class _Home:
    """One partition: its open block, and the sequence of its next record."""

    topic: str
    partition: int
    cutter: Cutter = field(default_factory=Cutter)
    next: int = 0

    def take(self, many: Many, start: int, end: int, ends: Sequence[int]) -> int:
        """See `Cutter.extend`."""
        next_ = self.cutter.extend(self.next, many, start, end, ends)
        self.next += next_ - start
        return next_


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
            runtime_of(runtime),
            bootstrap_addresses(brokers),
            AsyncDelivery,
            self._wake,
            lambda: None,
            producer_id=producer_id,
            carrier=ReportCarrier,
            kind="spark-writer",
        )
        self._homes: dict[tuple[str, int], _Home] = {}
        self._turns: dict[str, int] = {}  # by topic the place whose turn it is to get records without a key
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
        size = fields.size
        route = await self._route(topic)
        check_size(size, route.topic)
        if partition is None:
            home = self._home(route, self._turn(route) if key is None else route.map.place_of_key(fields.key or b""))
        else:
            home = self._home(route, route.map.place_of(partition))
        cut = home.cutter.add(home.next, fields, size)
        home.next += 1
        if cut is not None:
            await self._send(home, cut)
            if key is None and partition is None:
                self._next_turn(route)

    async def add_many(
        self,
        topic: str,
        values: Sequence[BytesLike | None],
        keys: Sequence[BytesLike | None] | None = None,
        timestamps_ms: Sequence[int] | None = None,
        tag: str | None = None,
    ) -> None:
        """Send many records, the fast way in: in the same blocks as by `add`, whichever records come in one call.

        Arguments and errors as those of `memq.Producer.send_many`.
        """
        many = check_many(values, keys, timestamps_ms, tag)
        if not many.values:
            return
        route = await self._route(topic)
        sizes = many.sizes(0, len(many.values))
        check_size(max(sizes), route.topic)
        if many.keys is None:
            await self._add_in_turn(route, many, list(accumulate(sizes)))
        elif len(route.buffers) == 1:
            await self._extend(self._home(route, 0), many, list(accumulate(sizes)))
        elif None in many.keys:  # whose turn it is follows from all records before
            for value, key, time_ms in zip(many.values, many.keys, many.timestamps_ms or repeat(None), strict=False):
                await self.add(topic, value, key, None, time_ms, tag)
        else:
            rows: dict[int, list[int]] = {}
            for row, place in enumerate(map(route.map.place_of_key, cast(Sequence[bytes], many.keys))):
                rows.setdefault(place, []).append(row)
            for place, chosen in rows.items():
                ends = list(accumulate(map(sizes.__getitem__, chosen)))
                await self._extend(self._home(route, place), many.pick(chosen), ends)

    async def finish(self) -> None:
        """Send what is left; return when all of it is in the queue. Raises: what became of a block that is not."""
        for home in self._homes.values():
            await self._end(home)
        while self._pending:
            await self._pending.popleft()
        await self._core.close()

    async def abandon(self) -> None:
        """Let go of everything at once; what is under way may still arrive."""
        for delivery in self._pending:
            delivery.observed = True
        with suppress(MemqError):
            await self._core.close(0.0)

    async def _route(self, topic: str) -> Route:
        return self._core.buffer.route(topic) or await self._core.route(topic)

    def _home(self, route: Route, place: int) -> _Home:
        topic, partition = route.topic.name, route.map.partitions[place]
        home = self._homes.get((topic, partition))
        if home is None:
            home = self._homes[topic, partition] = _Home(topic, partition)
        return home

    def _turn(self, route: Route) -> int:
        return self._turns.setdefault(route.topic.name, 0) % len(route.buffers)

    def _next_turn(self, route: Route) -> None:
        self._turns[route.topic.name] = route.map.next_place(self._turn(route), lambda _: False)

    async def _add_in_turn(self, route: Route, many: Many, ends: Sequence[int]) -> None:
        """Add records without a key. The first one of a new block is still of the turn before."""
        done = 0
        while True:
            home = self._home(route, self._turn(route))
            done = home.take(many, done, len(ends), ends)
            if done == len(ends):
                return
            await self._end(home)
            done = home.take(many, done, done + 1, ends)
            self._next_turn(route)

    async def _extend(self, home: _Home, many: Many, ends: Sequence[int]) -> None:
        """Add records of one partition."""
        done = 0
        while (done := home.take(many, done, len(ends), ends)) < len(ends):
            await self._end(home)

    async def _end(self, home: _Home) -> None:
        cut = home.cutter.end()
        if cut is not None:
            await self._send(home, cut)

    async def _send(self, home: _Home, cut: Cut) -> None:
        while len(self._pending) >= BLOCKS_IN_FLIGHT_MAX:
            await self._pending.popleft()
        while True:
            route = await self._route(home.topic)
            try:
                delivery = self._core.buffer.put_block(route, home.partition, cut.first, cut.columns)
            except BufferFullError:
                if not self._pending:
                    raise
                await self._pending.popleft()
                continue
            self._pending.append(cast(AsyncDelivery, delivery))
            return

    def _wake(self) -> None:
        asyncio.get_running_loop().call_soon(self._core.drain)
