"""A sync client's state on the I/O thread: the client itself may be garbage-collected."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Generic, Protocol, TypeVar

from memq.client.io_thread import IoThread, forked_error, io_thread


class Core(Protocol):
    """A client on an event loop."""

    async def close(self) -> None:
        """Finish, and let go of everything."""
        ...


CoreType = TypeVar("CoreType", bound=Core)
Result = TypeVar("Result")


class Background(Generic[CoreType]):
    """A core and the thread that runs it, from its making to `leave`. It must not hold the client.

    `what` is the client's name in errors: producer, consumer, admin.
    """

    def __init__(self, what: str, core: CoreType) -> None:
        self.io: IoThread = io_thread()
        self.core = core
        self.was_forked = False
        self._what = what
        self._number = self.io.enter(self)

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

    def leave(self) -> None:
        """The client is closed: the thread may forget it."""
        self.io.leave(self._number)
