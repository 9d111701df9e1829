"""Sends records to the owners under a repeatable identity: at least once; a plain retry, once.

Blocks are cut by the records alone, and the producer id and the sequences are given. Whoever sends the same records in
the same order again sends the same blocks, and owners and readers drop them for the dedup window of the topic. The
records of a task that runs again may come in another order: then its blocks bear sequences that other blocks have. The
owner compares checksums and refuses them, and they are sent once more under the identity of the next order.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import NamedTuple, cast

from memq.client.arguments import runtime_of
from memq.client.bulk.import_plan import BLOCK_BYTES_MAX, Cut, Cutter
from memq.client.link_pool import bootstrap_addresses
from memq.client.observers.report_carrier import ReportCarrier
from memq.client.producer.core import ProducerCore
from memq.client.producer.delivery import AsyncDelivery
from memq.client.producer.fields import BytesLike, HeadersLike, RecordColumns, check_fields, check_many, check_size
from memq.client.producer.open_block import Route
from memq.client.producer.settings import ProducerSettings
from memq.errors import BufferFullError, IdentityConflictError, MemqError
from memq.limits import MIB, PRODUCER_ID_END
from memq.runtime.network import Runtime

BLOCKS_IN_FLIGHT_MAX = 16
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


@dataclass(slots=True)
class _Home:
    """One partition: its open block, and the sequence of its next record."""

    topic: str
    partition: int
    cutter: Cutter = field(default_factory=Cutter)
    next: int = 0

    def take(self, many: RecordColumns, start: int, end: int, ends: Sequence[int]) -> int:
        """See `Cutter.extend`."""
        next_ = self.cutter.extend(self.next, many, start, end, ends)
        self.next += next_ - start
        return next_


class _Sent(NamedTuple):
    """One block on its way."""

    home: _Home
    cut: Cut
    delivery: AsyncDelivery


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
        self._settings = ProducerSettings(
            codec=codec, pending_bytes_max=BLOCKS_IN_FLIGHT_MAX * (BLOCK_BYTES_MAX + 32 * MIB)
        )
        self._runtime = runtime_of(runtime)
        self._bootstrap = bootstrap_addresses(brokers)
        self._order = 0
        self._core = self._make_core()
        self._earlier: list[ProducerCore] = []  # of the orders before
        self._homes: dict[tuple[str, int], _Home] = {}
        self._turns: dict[str, int] = {}  # by topic the place whose turn it is to get records without a key
        self._pending: deque[_Sent] = deque()

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
        """Send many records, the fast way; block boundaries are the same as with `add`.

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
        """Send what is left; return when all of it is in the queue.

        Raises: what became of a block that is not.
        """
        for home in self._homes.values():
            await self._end(home)
        while self._pending:
            await self._settle()
        for core in (*self._earlier, self._core):
            await core.close()

    async def abandon(self) -> None:
        """Let go of everything at once; what is under way may still arrive."""
        for sent in self._pending:
            sent.delivery.observed = True
        for core in (*self._earlier, self._core):
            with suppress(MemqError):
                await core.close(0.0)

    def _make_core(self) -> ProducerCore:
        return ProducerCore(
            self._settings,
            self._runtime,
            self._bootstrap,
            AsyncDelivery,
            self._wake,
            lambda: None,
            producer_id=self._identity.producer_id(self._order),
            carrier=ReportCarrier,
            kind="spark-writer",
        )

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

    async def _add_in_turn(self, route: Route, many: RecordColumns, ends: Sequence[int]) -> None:
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

    async def _extend(self, home: _Home, many: RecordColumns, ends: Sequence[int]) -> None:
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
            await self._settle()
        while True:
            route = await self._route(home.topic)
            try:
                delivery = self._core.buffer.put_block(route, home.partition, cut.first, cut.columns)
            except BufferFullError:
                if not self._pending:
                    raise
                await self._settle()
                continue
            self._pending.append(_Sent(home, cut, cast(AsyncDelivery, delivery)))
            return

    async def _settle(self) -> None:
        """Wait for the oldest block. Raises: what became of it."""
        sent = self._pending.popleft()
        try:
            await sent.delivery
        except IdentityConflictError as error:
            await self._change_order(sent, error)

    async def _change_order(self, refused: _Sent, error: IdentityConflictError) -> None:
        """Send what was refused, and all that follows, under the identity of the next order.

        What an earlier attempt has sent in this order is known there. Raises: what became of another block; the
        refusal, after ORDERS_MAX orders.
        """
        again = [refused]
        while self._pending:
            sent = self._pending.popleft()
            try:
                await sent.delivery
            except IdentityConflictError:
                again.append(sent)
        if self._order + 1 >= ORDERS_MAX:
            raise error
        self._order += 1
        self._earlier.append(self._core)
        self._core = self._make_core()
        for sent in again:
            await self._send(sent.home, sent.cut)

    def _wake(self) -> None:
        for core in (*self._earlier, self._core):
            asyncio.get_running_loop().call_soon(core.drain)
