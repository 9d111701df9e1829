"""The one owner of background tasks: starts them, learns of their end, and stops them in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from memq.runtime.logs import EventLog


class TaskOwner:
    """Owns tasks on the running loop. A task that dies takes its owner down through `failed`.

    What goes wrong in a task that is being stopped changes nothing any more: it is logged to `events`.
    Tasks are kept and cancelled in the order of their start, so that a run on virtual time repeats.
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
        """Whether nothing may be started any more."""
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
        """Cancel all tasks and wait until they are gone. Stopping twice is fine."""
        self._stopped = True
        tasks = list(self._tasks)
        assert asyncio.current_task() not in tasks, "a task can't wait for its own end"
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)  # a cancellation of this wait is the caller's, not one more of the tasks
        for task in tasks:
            self._done(task)
