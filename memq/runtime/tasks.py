"""The owner of background tasks; bounds on concurrent operations and bytes in flight."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from memq.runtime.logs import EventLog
from memq.topic import Topic

Found = TypeVar("Found")
PARTITIONS_AT_ONCE_MAX = 1_000  # read partitions in concurrent requests to a queue, which merges them


async def in_slices(steps: Iterator[Found | None]) -> Found:
    """Return the value of the last one of some steps; the others are None, and other tasks run after each."""
    for step in steps:
        if step is not None:
            return step
        await asyncio.sleep(0)
    raise AssertionError("the last step has a value")


class TaskOwner:
    """Owns tasks on the running loop.

    The error of a task that dies is passed to `failed`, which closes the part that has this `TaskOwner`. An error that
    a task raises during the stop is only logged to `events`.
    The tasks are cancelled in the order of their start, so that the simulation repeats a run exactly.
    """

    def __init__(self, failed: Callable[[BaseException], None], events: EventLog) -> None:
        self._failed = failed
        self._events = events
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._stopped = False

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called: no task may be started any more."""
        return self._stopped

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run `work` as a task until it ends or the owner stops."""
        assert not self._stopped, f"task '{name}' started after the stop"
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        if task not in self._tasks:
            return  # the stop was faster
        del self._tasks[task]
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if self._stopped:
            self._events.error("task.failed-in-stop", f"'{task.get_name()}' failed in the stop: {error!r}", error)
        else:
            self._failed(error)

    async def stop(self) -> None:
        """Cancel all tasks and wait until they have ended. A second call only waits."""
        tasks = list(self._tasks)
        assert asyncio.current_task() not in tasks, "a task can't wait for its own end"
        for task in tasks if not self._stopped else ():
            task.cancel()  # once: another cancellation would end what a task does at its own end
        self._stopped = True
        if tasks:
            await asyncio.wait(tasks)  # unlike `gather`, it does not cancel the tasks again if the caller is cancelled
        for task in tasks:
            self._done(task)


class TimedSemaphore:
    """Bounds concurrent operations to `at_once`.

    An operation that takes longer than `longest_s` continues, but no longer counts: the next one starts.
    """

    def __init__(self, at_once: int, longest_s: float) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._longest_s = longest_s

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a free slot, in order of the calls, and hold it for the time of the block."""
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
    """Yield topics in their order, in bunches of at most PARTITIONS_AT_ONCE_MAX read partitions.

    A topic with more read partitions is a bunch of its own.
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


class ByteBudget:
    """Lends up to `bytes_max` bytes at once; a single request for more gets the whole budget."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.lent_bytes = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def lend(self, count: int) -> AsyncIterator[None]:
        """Hold `count` bytes of the budget for the time of the block. A request for 0 bytes never waits."""
        count = min(count, self.bytes_max)
        if count == 0:
            yield
            return
        if self._waiting or self.lent_bytes + count > self.bytes_max:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((count, future))
            try:
                await future  # `_give_back` has added the bytes to `lent_bytes`
            except asyncio.CancelledError:
                self._give_back(count if future.done() and not future.cancelled() else 0)
                raise
        else:
            self.lent_bytes += count
        try:
            yield
        finally:
            self._give_back(count)

    @contextmanager
    def lend_spare(self, count: int) -> Iterator[int]:
        """Hold up to `count` bytes for the time of the block, as many as are free now; yield how many."""
        spare = 0 if self._waiting else max(0, min(count, self.bytes_max - self.lent_bytes))
        self.lent_bytes += spare
        try:
            yield spare
        finally:
            self._give_back(spare)

    def _give_back(self, count: int) -> None:
        """Take bytes back and wake the waiters that now fit, in order; drop waiters that were cancelled."""
        self.lent_bytes -= count
        while self._waiting:
            wanted, future = self._waiting[0]
            if not future.done():
                if self.lent_bytes + wanted > self.bytes_max:
                    return
                self.lent_bytes += wanted
                future.set_result(None)
            self._waiting.popleft()
