"""The first and second SIGTERM or SIGINT of a serving process."""

from __future__ import annotations

import asyncio
import signal


class Signals:
    """Catches both signals from the start on, until `close`. Made on the running loop."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._caught)

    def _caught(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    def close(self) -> None:
        """Give the signals back."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)
