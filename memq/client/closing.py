"""The end of a client's `async with`: it is closed, and the program's own error comes first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from memq.errors import MemqError


class AsyncClosing(ABC):
    """A client on the caller's event loop, for `async with`."""

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
