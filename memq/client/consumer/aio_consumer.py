"""The consumer for asyncio: on the caller's event loop, without threads."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from typing import Self

from memq.client.arguments import check_timeout
from memq.client.closing import AsyncClosing
from memq.client.consumer.base import BaseConsumer
from memq.client.consumer.batch import Batch
from memq.client.consumer.core import ConsumerStats
from memq.client.consumer.group.membership import AssignmentEvents
from memq.client.consumer.offset_resolver import Lag
from memq.client.consumer.record import TopicPartition
from memq.client.consumer.settings import Point
from memq.client.log_answers import LogAnswers
from memq.topic import Position


class AsyncConsumer(BaseConsumer, AsyncClosing):
    """Reads topics. Arguments as those of `memq.Consumer`; callbacks may be coroutine functions.

    Use it as `async with`, on one event loop and from one task; `wakeup` is for others, also in other threads.
    """

    def _open(self) -> None:
        """The core runs on the loop of the first use."""

    async def __aenter__(self) -> Self:
        self._check_loop()
        try:
            await self._core.start()
        except BaseException:
            await self._core.close()
            raise
        return self

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
        self._check_loop()
        traces = self._traces
        if traces is not None:
            traces.done()
        batch = self._core.next_at_hand()
        if batch is None:
            batch = await self._next(self._deadline_s(timeout_s))
        if traces is not None and batch is not None:
            traces.handed(batch)
        return batch

    async def _next(self, deadline_s: float | None) -> Batch | None:
        while True:
            found = await self._core.next(self._left_s(deadline_s))
            if not isinstance(found, AssignmentEvents):
                return found
            for callback, places in self._calls(found):
                result = callback(places)
                if inspect.isawaitable(result):
                    await result
            await self._core.take(found)

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
