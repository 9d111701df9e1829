"""Notifies watchers of a coordinator: one task each, so that a slow one delays no other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from memq.runtime.logs import EventLog


class Watchers:
    """The watchers of one coordinator.

    Changes during the run of a callback are merged into one further call.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._count = 0
        self._changed: dict[int, asyncio.Event] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._changed)

    def watch(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        """Call `callback` after changes from now on, until the caller calls the returned function."""
        self._count += 1
        number = self._count
        changed = self._changed[number] = asyncio.Event()
        self._tasks[number] = asyncio.get_running_loop().create_task(self._follow(number, changed, callback))
        return lambda: self._end(number)

    def changed(self) -> None:
        """Notify all watchers of a change."""
        for event in self._changed.values():
            event.set()

    async def close(self) -> None:
        """End all watchers, and wait for running callbacks, except one that itself calls `close`."""
        tasks = [task for task in self._tasks.values() if task is not asyncio.current_task()]
        for number in list(self._changed):
            self._end(number)
        if tasks:
            await asyncio.wait(tasks)

    def _end(self, number: int) -> None:
        event = self._changed.pop(number, None)
        task = self._tasks.get(number)
        if event is not None and task is not None:
            event.set()
            if task is not asyncio.current_task():
                task.cancel()

    async def _follow(self, number: int, changed: asyncio.Event, callback: Callable[[], Awaitable[None]]) -> None:
        try:
            while number in self._changed:
                await changed.wait()
                changed.clear()
                if number in self._changed:
                    await self._call(callback)
        finally:
            del self._tasks[number]

    async def _call(self, callback: Callable[[], Awaitable[None]]) -> None:
        try:
            await callback()
        except Exception as error:  # noqa: BLE001 - after a failure, this and other watchers still get the next change
            self._events.error("watcher-failed", f"a watcher of the coordinator failed: {error!r}", error)
