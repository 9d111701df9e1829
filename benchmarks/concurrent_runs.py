"""Runs that start one after another and end together."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self


class ConcurrentRuns:
    """Context that closes its stack of runs at its end."""

    _stack: ExitStack

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
