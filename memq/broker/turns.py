"""Bounds how many works of one kind go at once, without letting those that get stuck hold up the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """At most `at_once` works have a turn. One that takes longer than `longest_s` goes on beside the next."""

    def __init__(self, at_once: int, longest_s: float) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._longest_s = longest_s

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn, in the order of asking, and have it."""
        await self._free.acquire()
        held = True

        def end() -> None:
            nonlocal held
            if held:
                held = False
                self._free.release()

        timer = asyncio.get_running_loop().call_later(self._longest_s, end)
        try:
            yield
        finally:
            timer.cancel()
            end()
