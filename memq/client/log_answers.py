"""Answers of several logs of the queue. A log that fails or hangs hides its own answer only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Self, TypeVar

from memq.errors import MemqError, OverLimitError, QueueError, ThrottledError
from memq.topic import ReadPartition

LOGS_AT_ONCE_MAX = 16  # logs that are asked at the same time; one that hangs takes one of these slots
LOG_S = 15.0  # for all requests about one log; a broker ends each of them after 5 s
THROTTLED_PAUSE_S = 0.1
Key = TypeVar("Key")
Value = TypeVar("Value")


class LogAnswers(dict[Key, Value]):
    """Values of the logs that answered, by partition. `unknown` has the error of each other log.

    `answers[key]` raises that error for an unknown partition. Check `unknown` before you add values up.
    """

    def __init__(self, found: Mapping[Key, Value | MemqError]) -> None:
        super().__init__({key: value for key, value in found.items() if not isinstance(value, MemqError)})
        self.unknown = {key: value for key, value in found.items() if isinstance(value, MemqError)}

    def __missing__(self, key: Key) -> Value:
        """Raise the error of an unknown partition, KeyError for one that was not asked for."""
        raise self.unknown.get(key) or KeyError(key)

    def __repr__(self) -> str:
        """Return known answers and errors as text."""
        return f"{type(self).__name__}({super().__repr__()}, unknown={self.unknown!r})"

    def one_known(self) -> Self:
        """Return the answers. Raises: the first error when all logs failed."""
        if self.unknown and not self:
            raise next(iter(self.unknown.values()))
        return self


async def ask_logs(
    logs: Iterable[ReadPartition], ask: Callable[[ReadPartition], Awaitable[Value]]
) -> dict[ReadPartition, Value | MemqError]:
    """Return the answer of each log, or its error: some at the same time, each within LOG_S.

    A broker that has too many requests of this client, or holds it to a limit, is asked again: that says nothing about
    the log.
    """
    turns = asyncio.Semaphore(LOGS_AT_ONCE_MAX)

    async def answer_of(log: ReadPartition) -> Value | MemqError:
        throttled: ThrottledError | OverLimitError | None = None
        async with turns:
            try:
                async with asyncio.timeout(LOG_S):
                    while True:
                        try:
                            return await ask(log)
                        except (ThrottledError, OverLimitError) as error:
                            throttled = error
                        await asyncio.sleep(max(THROTTLED_PAUSE_S, throttled.retry_after_ms / 1000))
            except MemqError as error:
                return error
            except TimeoutError:
                if throttled is not None:
                    return throttled
                name = f"partition {log.partition} of topic '{log.topic}'"
                return QueueError(f"the log of {name} did not answer within {LOG_S:g} s")

    asked = list(logs)
    return dict(zip(asked, await asyncio.gather(*map(answer_of, asked)), strict=True))
