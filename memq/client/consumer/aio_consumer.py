"""The consumer for asyncio: on the caller's event loop, without threads."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from memq.client.arguments import check_callbacks, check_timeout, check_tracer_provider, runtime_of
from memq.client.consumer.batch import Batch
from memq.client.consumer.core import ConsumerCore, ConsumerStats
from memq.client.consumer.fetch.fetcher import BatchFetcher, MakeFetcher, ReadMode
from memq.client.consumer.group.membership import AssignmentEvents
from memq.client.consumer.offset_resolver import Lag
from memq.client.consumer.record import TopicPartition, place_of
from memq.client.consumer.settings import ConsumerSettings, OnDamaged, OnExpired, Point, topics_of
from memq.client.link_pool import CONNECT_TIMEOUT_MS, bootstrap_addresses
from memq.client.log_answers import LogAnswers
from memq.errors import MemqError
from memq.limits import MIB
from memq.runtime.network import Runtime
from memq.topic import Position

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from memq.client.observers.consumer_traces import ConsumerTraces

OnPartitions = Callable[[list[TopicPartition]], Awaitable[object] | object]


class AsyncConsumer:
    """Reads topics. Arguments as those of `memq.Consumer`; callbacks may be coroutine functions.

    Use it as `async with`, on one event loop and from one task; `wakeup` is for others, also in other threads.
    """

    def __init__(
        self,
        brokers: str | Sequence[str] | None,
        topics: str | Sequence[str],
        *,
        group: str | None = None,
        start: Point = "beginning",
        end: Point | None = None,
        auto_commit: bool = True,
        auto_commit_interval_ms: int = 1_000,
        session_timeout_ms: int = 10_000,
        prefetch_bytes_max: int = 64 * MIB,
        on_damaged: OnDamaged = "fail",
        on_expired: OnExpired = "fail",
        read: ReadMode = "auto",
        s3: Mapping[str, object] | None = None,
        connect_timeout_ms: int = CONNECT_TIMEOUT_MS,
        client_id: str = "",
        zone: str = "",
        on_assigned: OnPartitions | None = None,
        on_revoked: OnPartitions | None = None,
        on_lost: OnPartitions | None = None,
        audit: bool = True,
        tracer_provider: TracerProvider | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        settings = ConsumerSettings(
            topics=topics_of(topics),
            group=group,
            start=start,
            end=end,
            auto_commit=auto_commit,
            auto_commit_interval_ms=auto_commit_interval_ms,
            session_timeout_ms=session_timeout_ms,
            prefetch_bytes_max=prefetch_bytes_max,
            on_damaged=on_damaged,
            on_expired=on_expired,
            read=read,
            connect_timeout_ms=connect_timeout_ms,
            s3=s3,
            client_id=client_id,
            zone=zone,
            audit=audit,
        )
        check_callbacks(on_assigned=on_assigned, on_revoked=on_revoked, on_lost=on_lost)
        check_tracer_provider(tracer_provider)
        self._runtime = runtime_of(runtime)
        make_fetcher: MakeFetcher = BatchFetcher
        self._traces: ConsumerTraces | None = None
        if tracer_provider is not None:
            from memq.client.observers.consumer_traces import ConsumerTraces

            self._traces = ConsumerTraces(tracer_provider, self._runtime.clock, group)
            self.poll = self._traced_poll  # type: ignore[method-assign]  # who has no traces pays nothing for them
            make_fetcher = self._traces.fetcher
        self._core = ConsumerCore(settings, self._runtime, bootstrap_addresses(brokers), make_fetcher)
        self._callbacks = (on_lost, on_revoked, on_assigned)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._core.start()
        except BaseException:
            await self._core.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except MemqError:
            if error is None:  # else the caller's own error is the one to see
                raise

    async def __aiter__(self) -> AsyncIterator[Batch]:
        """Yield batches; ends at `end`, and after `wakeup`."""
        while True:
            batch = await self.poll()
            if batch is None:
                return
            yield batch

    async def poll(self, timeout: float | None = None) -> Batch | None:
        """Return the next batch; the one before it is done by this. The callbacks run in here.

        None after `timeout` seconds, at the `end` that was asked for, and after `wakeup`. The first call may take
        longer: it connects. Raises: as `memq.Consumer.poll`.
        """
        timeout_s = check_timeout(timeout)
        self._loop = asyncio.get_running_loop()
        batch = self._core.next_at_hand()
        if batch is not None:
            return batch
        clock = self._runtime.clock
        deadline_s = None if timeout_s is None else clock.monotonic() + timeout_s
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - clock.monotonic())
            found = await self._core.next(left_s)
            if not isinstance(found, AssignmentEvents):
                return found
            for callback, places in zip(self._callbacks, told(found), strict=True):
                if callback is not None and places:
                    result = callback(places)
                    if inspect.isawaitable(result):
                        await result
            await self._core.take(found)

    async def _traced_poll(self, timeout: float | None = None) -> Batch | None:
        """See `poll`; a batch is processed until the next one is asked for, or the consumer is closed."""
        assert self._traces is not None, "this is the poll of a traced consumer"
        self._traces.done()
        batch = await AsyncConsumer.poll(self, timeout)
        if batch is not None:
            self._traces.handed(batch)
        return batch

    async def commit(self, batch: Batch | None = None) -> None:
        """Store that all through `batch` is done; without it, every batch that is done.

        Raises: as `memq.Consumer.commit`.
        """
        await self._core.commit(batch)

    async def seek(self, topic: str, partition: int, to: Point) -> None:
        """Continue from another position. Raises: InvalidRequestError when the partition is not assigned."""
        await self._core.seek(topic, partition, to)

    def pause(self, topic: str, partition: int) -> None:
        """Deliver nothing of a partition until `resume`. Raises: as `seek`."""
        self._core.pause(topic, partition, paused=True)

    def resume(self, topic: str, partition: int) -> None:
        """Deliver from a partition again. Raises: as `seek`."""
        self._core.pause(topic, partition, paused=False)

    def position(self) -> dict[TopicPartition, Position]:
        """Return what comes next in each partition that is read."""
        return self._core.positions()

    async def committed(self) -> dict[TopicPartition, Position]:
        """Return what the group has stored. Raises: InvalidRequestError without a group; RetryableError."""
        return await self._core.committed()

    async def lag(self) -> LogAnswers[TopicPartition, Lag]:
        """Return how much lies between each position and the end of its partition now.

        A partition whose log does not answer is not in the mapping: `unknown` there has its error.
        Raises: the first error when all logs fail.
        """
        return await self._core.lag()

    def stats(self) -> ConsumerStats:
        """Return counters: what was delivered, passed over, retried."""
        return self._core.stats()

    def wakeup(self) -> None:
        """Let the poll under way, else the next one, return None; from any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._core.wakeup)
        else:
            self._core.wakeup()  # nothing is under way before the first use

    async def close(self) -> None:
        """Commit what is done when auto-commit is on, leave the group, disconnect. Closing twice is fine."""
        if self._traces is not None:
            self._traces.done()
        await self._core.close()


def told(changes: AssignmentEvents) -> tuple[list[TopicPartition], ...]:
    """Return the arguments of the callbacks on_lost, on_revoked and on_assigned, in this order."""
    return tuple(
        [place_of(partition) for partition in part] for part in (changes.lost, changes.revoked, changes.assigned)
    )
