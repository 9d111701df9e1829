"""A client on the caller's event loop: it stays on one, and hides no error of the program at its end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from memq.errors import InvalidRequestError, MemqError


class AsyncClosing(ABC):
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
