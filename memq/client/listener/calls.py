"""Bases of listeners and workers, which call a handler: their core, and both faces."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Generic, Self, TypeVar

from memq.client.lifecycle import AsyncClosing, BlockingClient
from memq.errors import ClosedError

Stats = TypeVar("Stats")


class CallsCore(ABC, Generic[Stats]):
    """The core of a client that calls a handler, on an event loop. `kind` names the client in errors."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._ended = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    @abstractmethod
    async def start(self) -> None:
        """Begin in the background; a second call does nothing.

        Raises: the error that has stopped it; ClosedError.
        """

    @abstractmethod
    def stats(self) -> Stats:
        """Return counters since the start."""

    @abstractmethod
    async def _close(self) -> None:
        """Let running handlers finish, for at most `drain_s`; then release everything."""

    def _check_open(self) -> None:
        """Raise the error that has stopped it. Raises: ClosedError after `close`."""
        if self._failure is not None:
            raise self._failure
        if self._closing is not None:
            raise ClosedError(f"the {self._kind} is closed")

    async def run(self) -> None:
        """Work until `stop`, `close`, or an error; then finish as `close`. Raises: that error; as `start`."""
        try:
            await self.start()
            await self._ended.wait()
        finally:
            await self.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Let `run` return."""
        self._ended.set()

    async def close(self) -> None:
        """Let running handlers finish, for at most `drain_s`. May be called twice."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), name=f"{self._kind} closes")
        await asyncio.shield(self._closing)

    def _fail(self, error: BaseException) -> None:
        """Stop because of an error; `run` raises the first one, and so does another `start`."""
        if self._failure is None:
            self._failure = error
            self._report_failure(error)
        self.stop()

    def _report_failure(self, error: BaseException) -> None:
        """Log the error that stops it."""


class BlockingCalls(BlockingClient, Generic[Stats]):
    """A client whose handler runs in threads, or in processes."""

    _core: CallsCore[Stats]

    def start(self) -> None:
        """Begin in the background.

        Raises: UnreachableError, NotFoundError, DeniedError, ClosedError, ForkedError.
        """
        self._background.run(self._core.start())

    def run(self) -> None:
        """Work until `stop`, Ctrl-C or an error; then finish as `close`.

        Raises: the error that stopped it, such as CorruptDataError or PositionExpiredError; as `start`.
        """
        self._background.run(self._core.run())

    def stop(self) -> None:
        """Let `run` return. Any thread may call it, also a handler."""
        self._background.check_process()
        self._background.io.call(self._core.stop)

    def stats(self) -> Stats:
        """Return counters since the start."""
        self._background.check_process()
        return self._core.stats()

    def close(self) -> None:
        """Let running handlers finish, for at most `drain_s`; then disconnect. May be called twice.

        A record or item whose handler has not finished comes again.
        """
        self._finish(None)

    def _closing(self, timeout_s: float | None) -> Coroutine[Any, Any, None]:
        return self._core.close()


class AsyncCalls(AsyncClosing, Generic[Stats]):
    """A client whose handler runs in tasks."""

    _core: CallsCore[Stats]

    async def __aenter__(self) -> Self:
        self._check_loop()
        return self

    async def start(self) -> None:
        """Begin in the background. Raises: as the blocking client."""
        self._check_loop()
        await self._core.start()

    async def run(self) -> None:
        """Work until `stop`, a cancellation or an error; then finish as `close`.

        Raises: as the blocking client.
        """
        self._check_loop()
        await self._core.run()

    def stop(self) -> None:
        """Let `run` return."""
        self._core.stop()

    def stats(self) -> Stats:
        """Return the counters."""
        return self._core.stats()

    async def close(self) -> None:
        """Let running handlers finish, for at most `drain_s`; then cancel them, and disconnect."""
        await self._core.close()
