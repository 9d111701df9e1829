"""The output of one connection: frames leave through it, and a client that does not read is seen."""

from __future__ import annotations

import asyncio

from memq.runtime.clock import Clock


class Outbox:
    """The writing half of a connection. `congested` while the client reads its answers too slowly."""

    def __init__(self, clock: Clock) -> None:
        self.transport: asyncio.Transport | None = None
        self.standing_since_s = 0.0  # while congested: when the client last read some of what waits for it
        self._clock = clock
        self._writable = asyncio.Event()
        self._writable.set()
        self._unsent_bytes_seen = 0

    @property
    def congested(self) -> bool:
        """Whether more waits than the socket likes to hold."""
        return not self._writable.is_set()

    @property
    def unsent_bytes(self) -> int:
        """Bytes that the socket has not taken yet."""
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def write(self, frame: bytes) -> None:
        """Send a frame; after the end it is dropped."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(frame)

    def stop(self) -> None:
        """The socket is full."""
        self._writable.clear()
        self.standing_since_s = self._clock.monotonic()
        self._unsent_bytes_seen = self.unsent_bytes

    def go_on(self) -> None:
        """The socket takes more, or the connection is gone: nobody waits any longer."""
        self._writable.set()

    async def writable(self) -> None:
        """Wait until the socket takes more, or the connection is closed."""
        await self._writable.wait()

    def look(self, now_s: float) -> None:
        """Notice whether the client has read since the last look, however little."""
        if self.unsent_bytes < self._unsent_bytes_seen:
            self.standing_since_s = now_s
        self._unsent_bytes_seen = self.unsent_bytes

    def stands(self, now_s: float, timeout_ms: int) -> bool:
        """Whether the client has not read for this long, although something waits for it."""
        return self.congested and now_s - self.standing_since_s > timeout_ms / 1000
