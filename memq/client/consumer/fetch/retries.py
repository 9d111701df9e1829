"""Failures of a consumer: counts and logs them, waits, and raises those that do not pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from memq.errors import MemqError, RetryableError
from memq.runtime.clock import backoff_s
from memq.runtime.logs import EventLog
from memq.runtime.network import Runtime

_RETRY_S_BASE = 0.05
_RETRY_S_MAX = 2.0


class Retries:
    """Failures of polls and fetches. `changed` is called when `failure` is set for the user."""

    def __init__(self, runtime: Runtime, events: EventLog, changed: Callable[[], None]) -> None:
        self.failure: MemqError | None = None
        self.count = 0
        self._random = runtime.random
        self._events = events
        self._changed = changed

    def note(self, error: MemqError) -> None:
        """Note a failure after which the same is tried again."""
        self.count += 1
        self._events.warning("consumer.retry", f"{type(error).__name__}: {error}; trying again")
        if not isinstance(error, RetryableError):
            self.failure = error
            self._changed()

    async def back_off(self, error: MemqError, failures: int) -> None:
        """Note a failure, the `failures`-th in a row, and wait before the next try."""
        self.note(error)
        await self.pause(failures)

    async def pause(self, failures: int) -> None:
        """Wait before a try after `failures` that failed."""
        await asyncio.sleep(backoff_s(self._random, failures, base_s=_RETRY_S_BASE, most_s=_RETRY_S_MAX))
