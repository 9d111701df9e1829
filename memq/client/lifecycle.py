"""Base classes of public clients: start, use on one event loop or thread, and close.

A blocking client closes with `with`. `Background` has its core, which runs on the I/O thread: the client itself may be
garbage-collected. A client on the caller's event loop closes with `async with`, and stays on that loop.
"""

from __future__ import annotations

import asyncio
import warnings
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, Self, TypeVar

from memq.client.io_thread import IoThread, forked_error, io_thread
from memq.errors import InvalidRequestError, MemqError
from memq.kafka_words import KAFKA_METHODS


class OneProcess:
    """A client: its sockets and threads exist in one process only."""

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied, as Spark and multiprocessing do with what a function uses."""
        raise TypeError(
            f"this {type(self).__name__} of memq can't be pickled or copied: create it in the process that uses it"
        )


class KafkaHints:
    """A consumer or an admin: a method of Kafka's clients raises an AttributeError with memq's word.

    Not for producers: with `__getattr__` each load of an attribute takes 60 ns more, and `send` loads several.
    """

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self, name: str) -> NoReturn:
            """Raise Python's error for a name that is no attribute, with a hint for one of Kafka's clients."""
            error = AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'", name=name, obj=self)
            if hint := KAFKA_METHODS.get(name):
                error.add_note(f"hint: {hint}")
            raise error


class AsyncClosing(OneProcess, ABC):
    """A client on the caller's event loop, for `async with`."""

    _loop: asyncio.AbstractEventLoop | None = None

    def _check_loop(self) -> None:
        """Keep the event loop of the first use. Raises: InvalidRequestError on another one."""
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise InvalidRequestError(
                f"this {type(self).__name__} belongs to the event loop of its first use, and this is another one",
                hint="make a client in each event loop: every asyncio.run() has its own",
            )

    @abstractmethod
    async def close(self) -> None:
        """Finish, and let go of everything."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except MemqError:
            if error is None:  # else the caller's own error is the one to see
                raise


class Core(Protocol):
    """A client on an event loop."""

    async def close(self) -> None:
        """Finish, and let go of everything."""
        ...


CoreType = TypeVar("CoreType", bound=Core)
Result = TypeVar("Result")


class BlockingClient(OneProcess, ABC):
    """A sync client: `with` closes it, and one that is forgotten warns."""

    _closed = True  # for __del__, should __init__ raise
    _background: Background[Any]
    _interrupted_close_s: float | None = None  # after Ctrl-C

    @abstractmethod
    def _closing(self, timeout_s: float | None) -> Coroutine[Any, Any, None]:
        """Return the close of the core; None for the time that it takes by itself."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._finish(self._interrupted_close_s if isinstance(error, KeyboardInterrupt) else None)
        except MemqError:
            if error is None:  # else the caller's own error is the one to see
                raise

    def __del__(self) -> None:
        if self._closed or self._background.was_forked:
            return
        self._background.forgotten()  # first: where warnings are errors, the next line raises
        name = type(self).__name__
        warnings.warn(f"a memq.{name} was forgotten without close()", ResourceWarning, stacklevel=1, source=self)

    def _finish(self, timeout_s: float | None) -> bool:
        """Close the core and leave the thread; return False when that was done before."""
        if self._closed or self._background.was_forked:
            return False
        self._closed = True
        try:
            self._background.run(self._closing(timeout_s))
        finally:
            self._background.detach()
        return True


class Background(Generic[CoreType]):
    """A core and the thread that runs it, from its creation to `detach`. It must not hold the client.

    `what` is the client's name in errors: producer, consumer, admin.
    """

    def __init__(self, what: str, core: CoreType) -> None:
        self.io: IoThread = io_thread()
        self.core = core
        self.was_forked = False
        self._what = what
        self._closing: asyncio.Task[None] | None = None  # of a forgotten client
        self._number = self.io.add_client(self)

    def forked(self) -> None:
        """See `SyncClient.forked`."""
        self.was_forked = True

    async def at_exit(self) -> None:
        """See `SyncClient.at_exit`."""
        await self.core.close()

    def check_process(self) -> None:
        """Refuse the use in a child. Raises: ForkedError."""
        if self.was_forked:
            raise forked_error(self._what)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run on the I/O thread and return the result. Raises: ForkedError in a child; as `IoThread.run`."""
        if self.was_forked:
            work.close()
            raise forked_error(self._what)
        return self.io.run(work)

    def forgotten(self) -> None:
        """Close a client that was garbage-collected open."""
        self.io.call(self._close_later)

    def detach(self) -> None:
        """The client is closed: the thread may forget it."""
        self.io.remove_client(self._number)

    def _close_later(self) -> None:
        self._closing = asyncio.get_running_loop().create_task(self.at_exit())
        self._closing.add_done_callback(self._closed)

    def _closed(self, closing: asyncio.Task[None]) -> None:
        self.detach()
        if not closing.cancelled() and (error := closing.exception()) is not None:
            self._close_failed(error)

    def _close_failed(self, error: BaseException) -> None:
        """Handle an error while a forgotten client was closed; it can't be raised in the program."""
