"""Readiness of a broker: a probe of store and queue that answers in bounded time, on request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from memq.errors import MemqError, UnreachableError
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner

READY_S = 1.5  # a broker that loses store or queue says so within 2 s, the way there and back included


class Readiness:
    """Runs `check` for those who ask, one at a time for all of them.

    A part that is away may hang as well as refuse. So a check has `READY_S`; after that the verdict is known, and the
    check continues alone: what it hangs on has its own time, and a new one would hang behind it.
    """

    def __init__(self, check: Callable[[], Awaitable[None]], tasks: TaskOwner, events: EventLog) -> None:
        self._check = check
        self._tasks = tasks
        self._outage = events.outage("not-ready", "ready-again")
        self._checking: asyncio.Task[MemqError | None] | None = None

    async def prove(self) -> None:
        """Return when store and queue answer. Raises: the MemqError of the one that does not.

        In `READY_S` at most.
        """
        if self._checking is None or self._checking.done():
            self._checking = self._tasks.start(self._found(), "readiness")
        await asyncio.wait((self._checking,), timeout=READY_S)
        error: MemqError | None = UnreachableError(f"store or queue did not answer within {READY_S:g} s")
        if self._checking.done():
            error = self._checking.result()
        if error is not None:
            self._outage.failed(str(error))
            raise error
        self._outage.passed()

    async def _found(self) -> MemqError | None:
        try:
            await self._check()
        except MemqError as error:
            return error
        return None
