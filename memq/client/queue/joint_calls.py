"""Calls of one client that share requests: those that come while others are on their way go together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from memq.errors import ClosedError
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner

REQUESTS_AT_ONCE = 2  # of one line: the next calls arrive while the broker answers the former ones

Line = TypeVar("Line")
Entry = TypeVar("Entry")
Result = TypeVar("Result")


class _Call(NamedTuple, Generic[Entry, Result]):
    entries: Sequence[Entry]
    weight: int
    began_s: float
    results: asyncio.Future[Sequence[Result]]


class _Waiting(Generic[Entry, Result]):
    """The calls of a line that have no request yet, and how many requests are on their way."""

    __slots__ = ("calls", "requests")

    def __init__(self) -> None:
        self.calls: deque[_Call[Entry, Result]] = deque()
        self.requests = 0

    def take(self, weight_max: int) -> list[_Call[Entry, Result]]:
        """Take the first calls up to a weight, at least one; those that were cancelled are dropped."""
        taken: list[_Call[Entry, Result]] = []
        weight = 0
        while self.calls and (not taken or weight + self.calls[0].weight <= weight_max):
            call = self.calls.popleft()
            if not call.results.done():
                taken.append(call)
                weight += call.weight
        return taken


class JointCalls(Generic[Line, Entry, Result]):
    """Joins calls of a line, such as the acks of one queue.

    A call goes at once if the line has fewer than two requests on their way. `send` gets the entries of all calls of a
    request, and when the first of these calls began; it returns the result of each entry. Its error is that of all.
    """

    def __init__(
        self,
        send: Callable[[Line, list[Entry], float], Awaitable[Sequence[Result]]],
        weight_max: int,
        now_s: Callable[[], float],
        events: EventLog,
    ) -> None:
        self._send = send
        self._weight_max = weight_max
        self._now_s = now_s
        self._lines: dict[Line, _Waiting[Entry, Result]] = {}
        self._tasks = TaskOwner(self._failed, events)

    async def call(self, line: Line, entries: Sequence[Entry], weight: int) -> Sequence[Result]:
        """Return the results of entries. A caller that is cancelled does not know them. Raises: as `send`."""
        if self._tasks.stopped:
            raise ClosedError("the queue client is closed")
        waiting = self._lines.get(line)
        if waiting is None:
            waiting = self._lines[line] = _Waiting()
        results: asyncio.Future[Sequence[Result]] = asyncio.get_running_loop().create_future()
        waiting.calls.append(_Call(entries, weight, self._now_s(), results))
        if waiting.requests < REQUESTS_AT_ONCE:
            waiting.requests += 1
            self._tasks.start(self._work(line, waiting), "send joint calls")
        return await results

    async def close(self) -> None:
        """End the calls that have no answer yet with ClosedError."""
        await self._tasks.stop()
        self._failed(ClosedError("the queue client was closed"))

    async def _work(self, line: Line, waiting: _Waiting[Entry, Result]) -> None:
        try:
            while calls := waiting.take(self._weight_max):
                await self._request(line, calls)
        finally:
            waiting.requests -= 1
            if not waiting.requests and not waiting.calls:
                self._lines.pop(line, None)

    async def _request(self, line: Line, calls: Sequence[_Call[Entry, Result]]) -> None:
        entries = [entry for call in calls for entry in call.entries]
        try:
            results = await self._send(line, entries, calls[0].began_s)
        except asyncio.CancelledError:
            _fail(calls, ClosedError("the queue client was closed, and the outcome is unknown"))
            raise
        except Exception as error:  # noqa: BLE001 - each caller gets it
            _fail(calls, error)
            return
        at = 0
        for call in calls:
            if not call.results.done():
                call.results.set_result(results[at : at + len(call.entries)])
            at += len(call.entries)

    def _failed(self, error: BaseException) -> None:
        """End all calls that wait."""
        for waiting in self._lines.values():
            _fail(waiting.calls, error)
        self._lines.clear()


def _fail(calls: Iterable[_Call[Entry, Result]], error: BaseException) -> None:
    for call in calls:
        if not call.results.done():
            call.results.set_exception(error)
