"""A queue that retries temporary failures: a fault on the way to Kafka leaves no effect, or an error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import ParamSpec, TypeVar

from memq.errors import EpochFencedError, NotFoundError, RetryableError
from memq.notification import Entries, FormerGroup, NotificationQueue, Publication, Span
from memq.topic import Committed, ReadPartition

P = ParamSpec("P")
T = TypeVar("T")
PAUSE_S = 0.02
ALL = 1 << 30


class RetryingQueue:
    """See `memq.notification.NotificationQueue`. Only errors that may pass are tried again; any other one is a fault.

    A publish that went wrong is looked for before the next try, as owners do.
    """

    def __init__(self, queue: NotificationQueue) -> None:
        self._queue = queue
        self.former = RetryingFormerGroups(queue)

    @property
    def refuses_by_age(self) -> bool:
        return self._queue.refuses_by_age

    async def publish(self, publication: Publication) -> int:
        start: int | None = None
        while True:
            try:
                if start is None:
                    start = (await self.span(publication.partition)).end
                return await self._queue.publish(publication)
            except EpochFencedError:
                raise
            except RetryableError:
                landed = await self._landed(publication, start or 0)
                if landed is not None:
                    return landed

    async def _landed(self, publication: Publication, start: int) -> int | None:
        """Return where a publication lies behind `start`; publications of a scenario differ, or are not at once."""
        while entries := await self.read(publication.partition, start, ALL):
            for entry in entries:
                if (entry.time_ms, entry.body) == (publication.time_ms, publication.body):
                    return entry.offset
            start = entries.next
        return None

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        return await again(self._queue, self._queue.read, partition, offset, bytes_max)

    async def span(self, partition: ReadPartition) -> Span:
        return await again(self._queue, self._queue.span, partition)

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        return await again(self._queue, self._queue.seek_time, partition, time_ms)

    async def wait(self, ends: dict[ReadPartition, int], timeout_s: float) -> None:
        await again(self._queue, self._queue.wait, ends, timeout_s)

    async def create(self, partitions: Sequence[ReadPartition], stale_publish_ms: int) -> None:
        await again(self._queue, self._queue.create, partitions, stale_publish_ms)

    async def trim(self, partition: ReadPartition, before: int) -> None:
        await again(self._queue, self._queue.trim, partition, before)

    async def drop(self, partitions: Sequence[ReadPartition]) -> None:
        await again(self._queue, self._queue.drop, partitions)

    async def check(self) -> None:
        await again(self._queue, self._queue.check)

    async def close(self) -> None:
        await self._queue.close()


class RetryingFormerGroups:
    """See `memq.notification.FormerGroups`."""

    def __init__(self, queue: NotificationQueue) -> None:
        self._queue = queue

    async def names(self) -> Sequence[str]:
        return await again(self._queue, self._queue.former.names)

    async def read(self, group: str) -> FormerGroup:
        return await again(self._queue, self._queue.former.read, group)

    async def store(self, group: str, positions: Mapping[ReadPartition, Committed]) -> None:
        await again(self._queue, self._queue.former.store, group, positions)

    async def remove(self, group: str) -> None:
        tried: list[str] = []

        async def remove() -> None:
            """Remove the group; that it is not there is what an earlier try has done."""
            with suppress(*([NotFoundError] if tried else [])):
                tried.append(group)
                await self._queue.former.remove(group)

        await again(self._queue, remove)


async def again(queue: NotificationQueue, call: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call until it does not raise what may pass; the test's time limit ends it."""
    while True:
        try:
            return await call(*args, **kwargs)
        except RetryableError:
            with suppress(RetryableError):  # what fails for one that waits may fail for all
                await queue.wait({}, PAUSE_S)
