"""The message that a handler gets, and its answers other than "done": retry, park, dead letter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from memq.client.arguments import check_seconds, check_str
from memq.format.blocks.columns import RecordHeaders
from memq.topic import Position

AFTER_S_MAX = 7 * 86_400.0  # of a retry; the retry topic keeps its records for longer
CAUSE_CHARS_MAX = 1_000
Item = TypeVar("Item")


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A record for a handler. Its fields are those of the original record, also in a later attempt.

    `attempt` is 1 in the first call. `error` is the reason of the last retry, "" in the first call. Times in Unix ms.
    """

    topic: str
    position: Position
    value: bytes | None
    key: bytes | None
    headers: RecordHeaders
    timestamp_ms: int
    tag: str | None
    attempt: int = 1
    error: str = ""


class HandlerAnswer(Exception):  # noqa: N818 - an answer is no error
    """An answer of a handler, returned or raised. `reason` is its text for headers and logs."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(cut_cause(check_str("reason", reason)))

    @property
    def reason(self) -> str:
        """The reason, at most 1,000 characters."""
        return str(self.args[0])


class Retry(HandlerAnswer):
    """Call the handler again after `after` seconds; None: after the delay in the listener's table."""

    def __init__(self, after: float | None = None, reason: str = "") -> None:
        super().__init__(reason)
        if after is not None:
            check_seconds("after", after, 0, AFTER_S_MAX)
        self.after = after


class Park(HandlerAnswer):
    """Put the record aside, without further attempts: it waits among the dead letters, marked as parked."""


class DeadLetter(HandlerAnswer):
    """Give the record up at once: it becomes a dead letter with this reason."""


async def answer_of_call(call: Callable[[Item], Awaitable[object]], item: Item) -> object:
    """Call a handler; return its answer: what it returns or raises.

    Raises: CancelledError when the task of this call is cancelled.
    """
    try:
        return await call(item)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return error  # of something within the handler
    except Exception as error:  # noqa: BLE001  # whatever a handler raises is its answer
        return error


def cut_cause(text: str) -> str:
    """Return a text that fits into a header: at most 1,000 characters, valid Unicode."""
    text = text if len(text) <= CAUSE_CHARS_MAX else text[: CAUSE_CHARS_MAX - 1] + "…"
    return text.encode("utf-8", "replace").decode()


def cause_of(error: BaseException) -> str:
    """Return the text of an exception for a header."""
    text = str(error)
    return cut_cause(f"{type(error).__name__}: {text}" if text else type(error).__name__)
