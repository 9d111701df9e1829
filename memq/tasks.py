"""The one owner of background tasks: starts them, learns of their end, and stops them in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class TaskOwner:
    """Owns tasks on the running loop. A task that dies takes its owner down through `failed`.

    Tasks are kept and cancelled in the order of their start, so that a run on virtual time repeats.
    """

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
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
        self._tasks.pop(task, None)
        if task.cancelled() or self._stopped:
            return
        error = task.exception()
        if error is not None:
            self._failed(error)

    async def stop(self) -> None:
        """Cancel all tasks and wait until they are gone. Stopping twice is fine."""
        self._stopped = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for task in tasks:
            try:
                await task
            except asyncio.CancelledError:
                if not task.cancelled():
                    raise  # the caller of stop is being cancelled, not the task
            except BaseException:  # noqa: BLE001, S110 - `failed` heard of it, or the stop is the reason
                pass
