"""Bases of the clients that call a handler: listeners and workers, for threads and for an event loop."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Generic, Protocol, Self, TypeVar

from memq.client.lifecycle import AsyncClosing, BlockingClient

Stats = TypeVar("Stats")
Stats_co = TypeVar("Stats_co", covariant=True)


class CallsCore(Protocol[Stats_co]):
    """The core of such a client, on an event loop."""

    async def start(self) -> None:
        """Begin in the background."""
        ...

    async def run(self) -> None:
        """Work until `stop`, or an error; then finish as `close`."""
        ...

    def stop(self) -> None:
        """Let `run` return."""
        ...

    async def close(self) -> None:
        """Let running handlers finish. May be called twice."""
        ...

    def stats(self) -> Stats_co:
        """Return counters since the start."""
        ...


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
