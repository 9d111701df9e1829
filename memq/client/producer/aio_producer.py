"""The producer for asyncio: the machines of the sync one on the caller's loop, without threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from memq.client.arguments import check_timeout
from memq.client.closing import AsyncClosing
from memq.client.producer.base import BaseProducer
from memq.client.producer.core import Observe, ProducerCore, ProducerStats
from memq.client.producer.delivery import AsyncDelivery
from memq.client.producer.fields import BytesLike, HeadersLike, RecordColumns, RecordFields, check_fields, check_many
from memq.client.producer.open_block import Route
from memq.errors import BufferFullError
from memq.runtime.network import Address


class AsyncProducer(BaseProducer, AsyncClosing):
    """Sends records to topics. Arguments as those of `memq.Producer`.

    Use it as `async with`, on one event loop.
    """

    _waiters: list[asyncio.Future[None]]
    _yielded_at = 0  # of how many opened blocks the loop had its turn last

    def _open(self, addresses: Sequence[Address], observe: Observe | None) -> ProducerCore:
        self._waiters = []
        return ProducerCore(
            self._settings, self._runtime, addresses, AsyncDelivery, self._wake, self._room_made, observe=observe
        )

    async def send(
        self,
        topic: str,
        value: BytesLike | None,
        key: BytesLike | None = None,
        headers: HeadersLike | None = None,
        timestamp_ms: int | None = None,
        tag: str | None = None,
        partition: int | None = None,
    ) -> AsyncDelivery:
        """Put a record into the open block of its partition; waits for room in the buffer only.

        Returns the delivery of the block: await it for the Ack. A call that is cancelled has put nothing in.
        Raises: as `memq.Producer.send`.
        """
        loop_had_turn = self._yielded_at == self._buffer.opened_blocks
        if loop_had_turn and type(value) is bytes and headers is None and tag is None and partition is None:
            if type(key) is bytes:
                delivery = self._put_keyed(topic, value, key, timestamp_ms)
                if delivery is not None:
                    return cast(AsyncDelivery, delivery)
            elif key is None and timestamp_ms is None and type(topic) is str and topic in self._sticky:
                block = self._sticky[topic]
                room = block.room - (len(value) + 5)
                if room >= 0:  # the rule is that of BlockBuilder; there is one thread here
                    block.cells.append(value)
                    block.room = room
                    return cast(AsyncDelivery, block.delivery)
        if self._traces is None:
            return await self._put(topic, check_fields(value, key, headers, timestamp_ms, tag), partition)
        with self._traces.sending(topic) as sent:
            carried = sent.headers(headers)
            delivery = await self._put(topic, check_fields(value, key, carried, timestamp_ms, tag), partition)
            self._traces.taken(sent, (delivery,))
        return delivery

    async def _put(self, topic: str, fields: RecordFields, partition: int | None) -> AsyncDelivery:
        """Put a record in as soon as there is room for it.

        Nothing is awaited behind the put: who cancels a call, and sends again, has sent once.
        """
        buffer = self._buffer
        deadline_s: float | None = None
        if self._yielded_at != buffer.opened_blocks:
            self._yielded_at = buffer.opened_blocks
            await asyncio.sleep(0)  # once per block: a loop that only sends must let the blocks leave
        while True:
            route = await self._route(topic)
            try:
                return cast(AsyncDelivery, buffer.put(route, fields, partition))
            except BufferFullError as error:
                deadline_s = await self._wait_for_room(error, deadline_s)

    async def send_many(
        self,
        topic: str,
        values: Sequence[BytesLike | None],
        keys: Sequence[BytesLike | None] | None = None,
        timestamps_ms: Sequence[int] | None = None,
        tag: str | None = None,
    ) -> list[AsyncDelivery]:
        """Put many records in, and return the deliveries of their blocks.

        A call that is cancelled has put nothing in, unless it waited for room behind the first of them.
        Raises: as `memq.Producer.send_many`.
        """
        many = check_many(values, keys, timestamps_ms, tag)
        if self._traces is None:
            return await self._put_many(topic, many)
        with self._traces.sending(topic, len(many.values)) as sent:
            return await self._put_many(topic, many, partial(self._traces.taken, sent))

    async def _put_many(
        self, topic: str, many: RecordColumns | None, taken: Callable[[Sequence[AsyncDelivery]], None] | None = None
    ) -> list[AsyncDelivery]:
        """Put records in, as many at a time as there is room for.

        `taken` receives their blocks each time.
        """
        deliveries: list[AsyncDelivery] = []
        deadline_s: float | None = None
        while many is not None and many.values:
            await asyncio.sleep(0)
            route = await self._route(topic)
            known = len(deliveries)
            many = self._buffer.put_many(route, many, deliveries)
            if taken is not None:
                taken(deliveries[known:])
            if many is not None:
                deadline_s = await self._wait_for_room(self._buffer.full_error(), deadline_s)
        return deliveries

    async def flush(self, timeout: float | None = None) -> None:
        """Send what waits and return when all of it is acked or has failed.

        Raises: TimedOutError with the number of records still pending; nothing is dropped.
        """
        timeout_s = check_timeout(timeout)
        self._check_loop()
        await self._core.flush(timeout_s)

    async def close(self, timeout: float | None = None) -> None:
        """Flush for at most `timeout` seconds (the delivery timeout when None), then let go of everything.

        Raises: TimedOutError with the number of records that were given up; the first error of a record that
        failed and whose delivery the program has not read.
        """
        timeout_s = check_timeout(timeout)
        if self._closed:
            return
        self._check_loop()
        self._closed = True
        await self._core.close(timeout_s)
        self._core.raise_unseen()

    async def resume_points(self, topic: str) -> dict[int, int]:
        """Return, by partition, how many records of this name the topic held when this instance began.

        See `memq.Producer.resume_points`.
        """
        return (await self._route(topic)).resume_points()

    def stats(self) -> ProducerStats:
        """Return counters: what was acked, what failed, what is pending."""
        return self._core.stats()

    async def _route(self, topic: str) -> Route:
        self._check_loop()
        route = self._buffer.route(topic)
        return route if route is not None else await self._core.route(topic)

    async def _wait_for_room(self, error: BufferFullError, deadline_s: float | None) -> float:
        """Wait until memory was given back; return until when the caller may wait. Raises: BufferFullError."""
        loop = asyncio.get_running_loop()
        wait_s = self._settings.full_wait_s
        if deadline_s is None:
            deadline_s = loop.time() + (self._settings.delivery_timeout_s if wait_s is None else wait_s)
        if loop.time() >= deadline_s:
            raise error
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.append(waiter)
        self._buffer.waiting += 1
        try:
            async with asyncio.timeout_at(deadline_s):
                await waiter
        except TimeoutError:
            raise error from None
        finally:
            self._buffer.waiting -= 1
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        return deadline_s

    def _wake(self) -> None:
        asyncio.get_running_loop().call_soon(self._core.drain)

    def _room_made(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
