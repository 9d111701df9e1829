"""Waiters for entries by partition: shared by the queues of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from memq.topic import ReadPartition


@dataclass(frozen=True, slots=True)
class Waiter:
    """One call of `wait`: `reached` is done when one of the partitions has an entry at its offset."""

    ends: dict[ReadPartition, int]
    reached: asyncio.Future[None]

    def advance(self, partition: ReadPartition, end: int) -> None:
        """Wake when `partition`, whose next offset is `end`, has an awaited entry."""
        wanted = self.ends.get(partition)
        if wanted is not None and wanted < end and not self.reached.done():
            self.reached.set_result(None)

    def wake(self) -> None:
        """Wake without an entry: the caller reads again and gets the reason as an error."""
        if not self.reached.done():
            self.reached.set_result(None)

    def fail(self, error: Exception) -> None:
        """Wake with an error."""
        if not self.reached.done():
            self.reached.set_exception(error)


class Waiters:
    """All waiters of one queue, in order of `add`."""

    def __init__(self) -> None:
        self._waiters: dict[int, Waiter] = {}
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def add(self, ends: Mapping[ReadPartition, int]) -> tuple[int, Waiter]:
        """Return a new waiter, with the number by which the caller must remove it."""
        self._count += 1
        waiter = Waiter(dict(ends), asyncio.get_running_loop().create_future())
        self._waiters[self._count] = waiter
        return self._count, waiter

    def remove(self, number: int) -> None:
        """Remove a waiter; retrieve its error, so that asyncio does not log it as never retrieved."""
        waiter = self._waiters.pop(number)
        if waiter.reached.done() and not waiter.reached.cancelled():
            waiter.reached.exception()

    def advance(self, partition: ReadPartition, end: int) -> None:
        """Wake the waiters for entries of `partition` below `end`."""
        for waiter in list(self._waiters.values()):
            waiter.advance(partition, end)

    def wake(self, partition: ReadPartition) -> None:
        """Wake all waiters for `partition`, which was deleted or is not shown."""
        for waiter in list(self._waiters.values()):
            if partition in waiter.ends:
                waiter.wake()

    def fail(self, error: Exception) -> None:
        """Wake all with an error."""
        for waiter in list(self._waiters.values()):
            waiter.fail(error)

    def partitions(self) -> list[ReadPartition]:
        """Return all awaited partitions, each once."""
        return list(dict.fromkeys(partition for waiter in self._waiters.values() for partition in waiter.ends))


async def until_reached(waiter: Waiter, timeout_s: float) -> None:
    """Wait for the waiter, at most `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await waiter.reached
    except TimeoutError:
        return
