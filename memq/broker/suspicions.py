"""Suspicions: brokers whose ports refused a connection, reported by clients and by this broker."""

from __future__ import annotations

import asyncio

ADDRESSES_MAX = 1_000  # that wait to be asked; further reports are dropped, and their senders report again


class Suspicions:
    """The reported addresses that wait for a check, oldest first, each once."""

    def __init__(self) -> None:
        self._waiting: dict[str, None] = {}
        self._reported = asyncio.Event()

    def report(self, address: str) -> None:
        """Note that a connection to a broker was refused."""
        if len(self._waiting) < ADDRESSES_MAX:
            self._waiting[address] = None
            self._reported.set()

    async def next(self) -> str:
        """Wait for a report, and take the oldest one."""
        while not self._waiting:
            self._reported.clear()
            await self._reported.wait()
        address = next(iter(self._waiting))
        del self._waiting[address]
        return address
