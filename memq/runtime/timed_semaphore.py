"""Bounds the number of concurrent operations of a kind; stuck ones do not block the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager

from memq.topic import Topic

PARTITIONS_AT_ONCE_MAX = 1_000  # that a queue is asked for: it joins what is asked at once


class TimedSemaphore:
    """At most `at_once` works have a turn.

    One that takes longer than `longest_s` continues next to the following one.
    """

    def __init__(self, at_once: int, longest_s: float) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._longest_s = longest_s

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, in the order of asking, and have it."""
        await self._free.acquire()
        held = True

        def end() -> None:
            nonlocal held
            if held:
                held = False
                self._free.release()

        timer = asyncio.get_running_loop().call_later(self._longest_s, end)
        try:
            yield
        finally:
            timer.cancel()
            end()


def bunches(topics: Iterable[Topic]) -> Iterator[list[Topic]]:
    """Yield topics in their order, as many together as have PARTITIONS_AT_ONCE_MAX read partitions.

    One at least.
    """
    bunch: list[Topic] = []
    partitions = 0
    for topic in topics:
        partitions += topic.read_partitions
        if bunch and partitions > PARTITIONS_AT_ONCE_MAX:
            yield bunch
            bunch, partitions = [], topic.read_partitions
        bunch.append(topic)
    if bunch:
        yield bunch
