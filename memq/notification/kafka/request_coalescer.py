"""Combines concurrent questions to Kafka: callers wait for the next shared request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from memq.errors import ClosedError, MemqError
from memq.runtime.tasks import TaskOwner

Question = TypeVar("Question", bound=Hashable)
Found = TypeVar("Found")
REQUESTS_MAX = 4  # concurrent requests


class RequestCoalescer(Generic[Question, Found]):
    """Sends one request for the questions of many callers.

    A caller always gets the answer of a request that was sent after its question. An owner's proof that it has read to
    the end depends on this. `request` answers up to `asked_max` questions, no two of them with the same `subject`. An
    error is an answer, too.
    """

    def __init__(
        self,
        request: Callable[[Sequence[Question]], Coroutine[Any, Any, Mapping[Question, Found | MemqError]]],
        subject: Callable[[Question], Hashable],
        asked_max: int,
        tasks: TaskOwner,
        name: str,
    ) -> None:
        self._send = request
        self._subject = subject
        self._asked_max = asked_max
        self._tasks = tasks
        self._name = name
        self._waiting: dict[Question, asyncio.Future[Found | MemqError]] = {}
        self._coming = False  # whether a task exists that will take the waiting questions
        self._slots = asyncio.Semaphore(REQUESTS_MAX)

    async def ask(self, question: Question) -> Found:
        """Return the answer, or raise it if it is an error. Raises: ClosedError after the stop of the tasks."""
        if self._tasks.stopped:
            raise ClosedError("the queue is closed")
        answer = self._waiting.get(question)
        if answer is None:
            answer = self._waiting[question] = asyncio.get_running_loop().create_future()
            self._request_soon()
        try:
            found = await asyncio.shield(answer)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if answer.cancelled() and task is not None and not task.cancelling():  # the request, not the caller
                raise ClosedError("the queue is closed") from None
            raise
        if isinstance(found, MemqError):
            raise found
        return found

    def _request_soon(self) -> None:
        if not self._coming:
            self._coming = True
            self._tasks.start(self._request(), self._name).add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Cancel the questions that wait for a request which was stopped before it took them."""
        if task.cancelled():
            for waiting in self._waiting.values():
                waiting.cancel()

    async def _request(self) -> None:
        async with self._slots:
            asked = self._next()  # later callers share the next request
            try:
                for question, found in (await self._send(list(asked))).items():
                    asked[question].set_result(found)
            finally:
                for waiting in asked.values():
                    waiting.cancel()  # no effect on answered questions; the others wait for a request that failed

    def _next(self) -> dict[Question, asyncio.Future[Found | MemqError]]:
        """Take the first waiting question of each subject; leave the others to the next request."""
        first: dict[Hashable, Question] = {}
        for question in self._waiting:
            if len(first) == self._asked_max:
                break
            first.setdefault(self._subject(question), question)
        asked = {question: self._waiting.pop(question) for question in first.values()}
        self._coming = False
        if self._waiting:
            self._request_soon()
        return asked
