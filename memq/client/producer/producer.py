"""The public producers: `Producer` for threads, `AsyncProducer` for an event loop.

`Producer` does its I/O on the process's one I/O thread, and seals blocks on further threads. `AsyncProducer` has no
threads.
"""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Self, cast

from memq.client.arguments import check_timeout
from memq.client.io_thread import on_io_thread
from memq.client.lifecycle import AsyncClosing, BlockingClient
from memq.client.producer.background import ProducerBackground
from memq.client.producer.core import Observe, ProducerCore, ProducerStats
from memq.client.producer.delayed import CancelOutcome, DeliverAfter, DeliverAt
from memq.client.producer.delivery import Ack, AsyncDelivery, Delivery
from memq.client.producer.fields import BytesLike, HeadersLike, RecordColumns, RecordFields, check_fields, check_many
from memq.client.producer.open_block import Route, native
from memq.client.producer.sender import BaseProducer, Sender
from memq.client.transactions.transaction import AsyncTransaction, Transaction
from memq.errors import BufferFullError, InvalidSettingError
from memq.runtime.network import Address


class Producer(Sender, BaseProducer, BlockingClient):
    """Sends records to topics. Thread-safe.

    Args:
        brokers: `HOST:PORT`, several with commas or as a list; None: the environment variable MEMQ_BROKERS.
        acks: when a block counts as acked. "all": it is stored, and its pointer is in the queue; 1: the broker has
            checked it and holds it; 0: it is written to the socket.
        codec: compression of blocks: "zstd", "lz4" or "none".
        linger_ms: time for which an open block waits for more records while other blocks are in flight.
        block_bytes: size before compression at which a block is sealed.
        pending_bytes_max: bound on all bytes that are not acked, open blocks included.
        when_full: at that bound: "block" (wait), "raise" (BufferFullError), or the seconds to wait before that error.
        delivery_timeout_ms: age at which a block is given up; at most the topic's setting of that name.
        metadata_timeout_ms: time for which the first record of a topic waits for the cluster's answer.
        connect_timeout_ms: time in which the first record must reach a broker; later restarts have no such bound.
        client_id: name of this client at brokers, for limits and logs; "": the name of its host.
        zone: zone in which this client runs; it prefers brokers of this zone for requests that any broker can answer.
        on_ack: called with the Ack or the error of every block, on the I/O thread; its own exceptions are logged,
            and the first one is written to stderr.
        name: name that outlives restarts; None: none. A new instance fences older ones; `resume_points` returns the
            number of its records in each partition, also days later. Needs acks="all". The instance ends with the
            first block that fails; the next one sends that block again, and it is stored once.
        audit: report sent and acked records to the audit, if the cluster asks for reports.
        transactional_id: name of a transactional producer, the same at each restart: a new instance fences older ones,
            and rolls their open transaction back. Such a producer sends records in `transaction()` only.
        transaction_group: the group whose positions its transactions move, if any.
        transaction_timeout_ms: a transaction that is open for longer is rolled back.
        transaction_checker: called with an `UndecidedTransaction` of the producer group that was prepared and not
            decided in time; returns a `CheckAnswer`. `Producer` calls it in a thread. With it, `prepare()` is needed.
        producer_group: name of the producers that decide for each other; None: the transactional id.
        encryption: keys with which all blocks are encrypted: a `memq.Encryption`, or its first argument, as
            "file:keys.json"; None: blocks are plain.
        tracer_provider: of OpenTelemetry, for spans of sent records (extra `[otel]`); None: no spans, no cost.
        tls: certificates for connections to brokers; None: by the variables `MEMQ_TLS_…`, else without TLS.
        runtime: clock, randomness and network; default: those of the system.

    Raises: InvalidSettingError, InvalidRequestError. The first record opens the first connection.
    """

    _background: ProducerBackground
    _interrupted_close_s = 0.4

    def _open(self, addresses: Sequence[Address], observe: Observe | None) -> ProducerCore:
        checker = self._settings.transaction_checker
        if inspect.iscoroutinefunction(checker):
            raise InvalidSettingError("transaction_checker is a coroutine function", hint="use memq.aio.Producer")
        self._background = ProducerBackground(self._settings, self._runtime, addresses, observe)
        if checker is not None:
            self._background.io.call(self._background.core.checks.start)
        return self._background.core

    def _send_slowly(
        self,
        topic: str,
        value: BytesLike | None,
        key: BytesLike | None,
        headers: HeadersLike | None,
        timestamp_ms: int | None,
        tag: str | None,
        partition: int | None,
        deliver_at: DeliverAt = None,
        deliver_after: DeliverAfter = None,
        subject: str | None = None,
    ) -> Delivery:
        due_ms, headers = self._due_ms(deliver_at, deliver_after), self._named_headers(headers, subject)
        if self._traces is None:
            return self._put(topic, check_fields(value, key, headers, timestamp_ms, tag), partition, due_ms)
        with self._traces.sending(topic) as sent:
            carried = sent.headers(headers)
            delivery = self._put(topic, check_fields(value, key, carried, timestamp_ms, tag), partition, due_ms)
            self._traces.taken(sent, (delivery,))
        return delivery

    def _put(self, topic: str, fields: RecordFields, partition: int | None, due_ms: int | None = None) -> Delivery:
        """Add a record as soon as it has room."""
        self._check_plain()
        deadline_s: float | None = None
        while True:
            route = self._route(topic)
            seen = self._buffer.releases
            try:
                return cast(Delivery, self._put_once(route, fields, partition, due_ms))
            except BufferFullError as error:
                deadline_s = self._wait_for_room(error, seen, deadline_s)

    def send_many(
        self,
        topic: str,
        values: Sequence[BytesLike | None],
        keys: Sequence[BytesLike | None] | None = None,
        timestamps_ms: Sequence[int] | None = None,
        tag: str | None = None,
        *,
        deliver_at: DeliverAt | Sequence[DeliverAt] = None,
        deliver_after: DeliverAfter | Sequence[DeliverAfter] = None,
    ) -> list[Delivery]:
        """Add many records and return the deliveries of their blocks. The fastest call: 60 ns a record.

        All records get the same `tag`; keys and timestamps have the length of `values`. `deliver_at` and
        `deliver_after` delay the records: one for all, or one for each. Each delayed record has a delivery. Raises: as
        `send`, and
        InvalidRequestError for columns of different lengths. After TypeError and TooLargeError no record was added.
        After BufferFullError some blocks were added: `stats` and `on_ack` report them.
        """
        self._check_plain()
        many = check_many(values, keys, timestamps_ms, tag)
        due_ms = self._due_times(deliver_at, deliver_after, len(many.values))
        if self._traces is None:
            return self._put_many(topic, many, due_ms)
        with self._traces.sending(topic, len(many.values)) as sent:
            return self._put_many(topic, many, due_ms, partial(self._traces.taken, sent))

    def _put_many(
        self,
        topic: str,
        many: RecordColumns | None,
        due_ms: Sequence[int] | None,
        taken: Callable[[Sequence[Delivery]], None] | None = None,
    ) -> list[Delivery]:
        """Add records, as many at a time as the buffer has room for; delayed ones one by one.

        `taken` receives their blocks each time.
        """
        deliveries: list[Delivery] = []
        if many is not None and due_ms is not None:
            for fields, at_ms in zip(many.rows(), due_ms, strict=True):
                deliveries.append(self._put(topic, fields, None, at_ms))
                if taken is not None:
                    taken(deliveries[-1:])
            return deliveries
        deadline_s: float | None = None
        while many is not None and many.values:
            route = self._route(topic)
            known = len(deliveries)
            seen = self._buffer.releases
            many = self._buffer.put_many(route, many, deliveries)
            if taken is not None:
                taken(deliveries[known:])
            if many is not None:
                deadline_s = self._wait_for_room(self._buffer.full_error(), seen, deadline_s)
        return deliveries

    def cancel(self, delivery: Delivery | Ack, timeout: float | None = None) -> CancelOutcome:
        """Cancel a delayed record, by its delivery or its Ack, and return its end.

        The answer is exact: after CANCELLED no reader gets the record, also not if it was due meanwhile. Any producer
        can cancel a record by its Ack. It first waits for the ack, at most `timeout` seconds.
        Raises: InvalidRequestError for a record that was not delayed; the error of the delivery; TimedOutError;
        OutcomeUnknownError when no broker answers.
        """
        if not isinstance(delivery, Ack | Delivery):
            raise TypeError(f"delivery must be a Delivery or an Ack, not {type(delivery).__name__}")
        ack = delivery if isinstance(delivery, Ack) else delivery.result(timeout)
        return self._background.io.run(self._core.delayed.cancel(ack))

    def transaction(self, note: bytes | str = b"", *, visible: bool = False) -> Transaction:
        """Return a transaction for one `with` block: its end commits, and an exception rolls back.

        `note`, at most 1 KiB, is for the checker. With `visible`, the end waits until readers can get all records.
        The block begins it. Raises there: InvalidRequestError without `transactional_id`, or while another is open;
        ProducerFencedError after another instance has begun; TimedOutError.
        """
        return Transaction(self._core.transactions, self._background.run, self._route, note, visible=visible)

    def flush(self, timeout: float | None = None) -> None:
        """Send all pending records and return when each is acked or has failed.

        Raises: TimedOutError with the number of records still pending; nothing is dropped.
        """
        self._background.run(self._core.flush(check_timeout(timeout)))

    def close(self, timeout: float | None = None) -> None:
        """Flush for at most `timeout` seconds (the delivery timeout if None), then release all resources.

        Within the same time (2 s more if None) each partition's owner gets the producer's last sequence, so that an
        audit can prove which records were sent last. It is no error if an owner does not answer.

        A second call has no effect. Raises: TimedOutError with the number of records that were given up; without an
        `on_ack` also the first error of a failed record whose delivery the program has not read.
        """
        self._finish(check_timeout(timeout))

    def _closing(self, timeout_s: float | None) -> Coroutine[Any, Any, None]:
        return self._core.close(timeout_s)

    def _finish(self, timeout_s: float | None) -> bool:
        ended = super()._finish(timeout_s)
        if ended:
            self._core.raise_unseen()
        return ended

    def resume_points(self, topic: str) -> dict[int, int]:
        """Return by partition the number of records of this name in the topic when this instance began.

        A source that sends its records to one partition in order continues at that number. Without a name: 0.
        Raises: as `send`; ProducerFencedError.
        """
        return self._route(topic).resume_points()

    def stats(self) -> ProducerStats:
        """Return counters of acked, failed and pending records."""
        self._background.check_process()
        return self._core.stats()

    def _route(self, topic: str) -> Route:
        route = self._buffer.route(topic)
        return route if route is not None else self._background.io.run(self._core.route(topic))

    def _wait_for_room(self, error: BufferFullError, seen: int, deadline_s: float | None) -> float:
        """Wait until memory was given back since `seen`; return until when the caller may wait.

        Raises: BufferFullError; at once on the I/O thread, which is the one that would make room.
        """
        clock, wait_s = self._runtime.clock, self._settings.full_wait_s
        if deadline_s is None:
            deadline_s = clock.monotonic() + (self._settings.delivery_timeout_s if wait_s is None else wait_s)
        buffer = self._buffer
        with self._background.room:
            buffer.waiting += 1
            try:
                left_s = deadline_s - clock.monotonic()
                if left_s <= 0 or on_io_thread():
                    raise error
                if not self._background.room.wait_for(lambda: buffer.releases != seen, left_s):
                    raise error
            finally:
                buffer.waiting -= 1
        return deadline_s


class AsyncProducer(BaseProducer, AsyncClosing):
    """Sends records to topics. Arguments as those of `memq.Producer`.

    Use it as `async with`, on one event loop. A loop that ends before `close` or `flush` loses the records that are
    pending: `send` waits for room in the buffer, and not for the ack. A RuntimeWarning says how many these are.
    """

    _waiters: list[asyncio.Future[None]]
    _yielded_at = 0  # of how many opened blocks the loop had its turn last

    async def __aenter__(self) -> Self:
        if self._settings.transaction_checker is not None:
            self._check_loop()
            self._core.checks.start()
        return self

    def __del__(self) -> None:
        if self._loop is None or not self._loop.is_closed() or self._closed:
            return
        records = self._core.stats().pending_records
        if records:
            warnings.warn(
                f"memq.aio.Producer was not closed: {records} record{'s'[: records > 1]} without an ack may be lost;"
                " use it as `async with`",
                RuntimeWarning,
                source=self,
                stacklevel=2,
            )

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
        *,
        deliver_at: DeliverAt = None,
        deliver_after: DeliverAfter = None,
        subject: str | None = None,
    ) -> AsyncDelivery:
        """Add a record to the open block of its partition; wait only for room in the buffer.

        Returns the delivery of the block: await it for the Ack. A cancelled call has added nothing.
        Raises: as `memq.Producer.send`.
        """
        if deliver_at is not None or deliver_after is not None or subject is not None:
            arguments = (topic, value, key, headers, timestamp_ms, tag, partition)
            return await self._send_slowly(*arguments, deliver_at, deliver_after, subject)
        loop_had_turn = self._yielded_at == self._buffer.opened_blocks
        if loop_had_turn and type(value) is bytes and headers is None and tag is None and partition is None:
            if native is not None:
                delivery = self._put_plain(topic, value, key, timestamp_ms)
                if delivery is not None:
                    return cast(AsyncDelivery, delivery)
            elif type(key) is bytes:
                delivery = self._put_keyed(topic, value, key, timestamp_ms)
                if delivery is not None:
                    return cast(AsyncDelivery, delivery)
            elif key is None and timestamp_ms is None and type(topic) is str and topic in self._lanes:
                rows = self._lanes[topic].keyless
                if rows is not None:
                    room = rows.room - (len(value) + 5)
                    if room >= 0:  # the rule is that of `memq.kernel.rows`; there is one thread here
                        rows.cells.append(value)
                        rows.room = room
                        return cast(AsyncDelivery, rows.delivery)
        return await self._send_slowly(topic, value, key, headers, timestamp_ms, tag, partition)

    async def _send_slowly(
        self,
        topic: str,
        value: BytesLike | None,
        key: BytesLike | None,
        headers: HeadersLike | None,
        timestamp_ms: int | None,
        tag: str | None,
        partition: int | None,
        deliver_at: DeliverAt = None,
        deliver_after: DeliverAfter = None,
        subject: str | None = None,
    ) -> AsyncDelivery:
        due_ms, headers = self._due_ms(deliver_at, deliver_after), self._named_headers(headers, subject)
        if self._traces is None:
            return await self._put(topic, check_fields(value, key, headers, timestamp_ms, tag), partition, due_ms)
        with self._traces.sending(topic) as sent:
            carried = sent.headers(headers)
            delivery = await self._put(topic, check_fields(value, key, carried, timestamp_ms, tag), partition, due_ms)
            self._traces.taken(sent, (delivery,))
        return delivery

    async def _put(
        self, topic: str, fields: RecordFields, partition: int | None, due_ms: int | None = None
    ) -> AsyncDelivery:
        """Add a record as soon as it has room.

        Nothing is awaited after the record is added. So a caller that cancels and sends again has sent it once.
        """
        self._check_plain()
        buffer = self._buffer
        deadline_s: float | None = None
        if self._yielded_at != buffer.opened_blocks:
            self._yielded_at = buffer.opened_blocks
            await asyncio.sleep(0)  # once per block: a program that only sends must let the loop write the blocks
        while True:
            route = await self._route(topic)
            try:
                return cast(AsyncDelivery, self._put_once(route, fields, partition, due_ms))
            except BufferFullError as error:
                deadline_s = await self._wait_for_room(error, deadline_s)

    async def send_many(
        self,
        topic: str,
        values: Sequence[BytesLike | None],
        keys: Sequence[BytesLike | None] | None = None,
        timestamps_ms: Sequence[int] | None = None,
        tag: str | None = None,
        *,
        deliver_at: DeliverAt | Sequence[DeliverAt] = None,
        deliver_after: DeliverAfter | Sequence[DeliverAfter] = None,
    ) -> list[AsyncDelivery]:
        """Add many records and return the deliveries of their blocks.

        A cancelled call has added nothing, unless it waited for room after it had added some records.
        Raises: as `memq.Producer.send_many`.
        """
        self._check_plain()
        many = check_many(values, keys, timestamps_ms, tag)
        due_ms = self._due_times(deliver_at, deliver_after, len(many.values))
        if self._traces is None:
            return await self._put_many(topic, many, due_ms)
        with self._traces.sending(topic, len(many.values)) as sent:
            return await self._put_many(topic, many, due_ms, partial(self._traces.taken, sent))

    async def _put_many(
        self,
        topic: str,
        many: RecordColumns | None,
        due_ms: Sequence[int] | None,
        taken: Callable[[Sequence[AsyncDelivery]], None] | None = None,
    ) -> list[AsyncDelivery]:
        """Add records, as many at a time as the buffer has room for; delayed ones one by one.

        `taken` receives their blocks each time.
        """
        deliveries: list[AsyncDelivery] = []
        if many is not None and due_ms is not None:
            for fields, at_ms in zip(many.rows(), due_ms, strict=True):
                deliveries.append(await self._put(topic, fields, None, at_ms))
                if taken is not None:
                    taken(deliveries[-1:])
            return deliveries
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

    async def cancel(self, delivery: AsyncDelivery | Ack) -> CancelOutcome:
        """Cancel a delayed record, and return its end. See `memq.Producer.cancel`."""
        self._check_loop()
        if not isinstance(delivery, Ack | AsyncDelivery):
            raise TypeError(f"delivery must be an AsyncDelivery or an Ack, not {type(delivery).__name__}")
        ack = delivery if isinstance(delivery, Ack) else await delivery
        return await self._core.delayed.cancel(ack)

    def transaction(self, note: bytes | str = b"", *, visible: bool = False) -> AsyncTransaction:
        """Return a transaction for one `async with` block. See `memq.Producer.transaction`."""
        return AsyncTransaction(self._core.transactions, self._route, note, visible=visible)

    async def flush(self, timeout: float | None = None) -> None:
        """Send all pending records and return when each is acked or has failed.

        Raises: TimedOutError with the number of records still pending; nothing is dropped.
        """
        timeout_s = check_timeout(timeout)
        self._check_loop()
        await self._core.flush(timeout_s)

    async def close(self, timeout: float | None = None) -> None:
        """Flush for at most `timeout` seconds (the delivery timeout if None), then release all resources.

        Within the same time (2 s more if None) each partition's owner gets the producer's last sequence, so that an
        audit can prove which records were sent last. It is no error if an owner does not answer.

        Raises: TimedOutError with the number of records that were given up; the first error of a failed record
        whose delivery the program has not read.
        """
        timeout_s = check_timeout(timeout)
        if self._closed:
            return
        self._check_loop()
        self._closed = True
        await self._core.close(timeout_s)
        self._core.raise_unseen()

    async def resume_points(self, topic: str) -> dict[int, int]:
        """Return by partition the number of records of this name in the topic when this instance began.

        See `memq.Producer.resume_points`.
        """
        return (await self._route(topic)).resume_points()

    def stats(self) -> ProducerStats:
        """Return counters of acked, failed and pending records."""
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
