"""A toy cluster for tests of the simulation: an echo server, and clients that count the echoes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from memq.errors import UnreachableError
from memq.simulation.world.network import SimNetwork, Switch
from memq.simulation.world.node import SimNode

PORT = 7


class EchoProtocol(asyncio.BufferedProtocol):
    """Sends back what it gets, by reference to a fresh buffer; `reuse` plants the bug of one buffer for all."""

    def __init__(self, *, reuse: bool = False) -> None:
        self._reuse = reuse
        self._buffer = bytearray(4096)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        if not self._reuse:
            self._buffer = bytearray(4096)
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        assert self._transport is not None
        self._transport.write(memoryview(self._buffer)[:nbytes])

    def pause_writing(self) -> None:
        assert self._transport is not None
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        assert self._transport is not None
        self._transport.resume_reading()


class ClientProtocol(asyncio.BufferedProtocol):
    """Collects what comes back; `lost` is done when the connection is."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None
        self._buffer = bytearray(1000)
        self._wanted: deque[tuple[int, asyncio.Future[None]]] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self._buffer[:nbytes]
        while self._wanted and len(self.received) >= self._wanted[0][0]:
            future = self._wanted.popleft()[1]
            if not future.done():
                future.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set_result(exc)
        for _count, future in self._wanted:
            if not future.done():
                future.set_exception(UnreachableError(f"connection lost: {exc}"))

    async def until(self, count: int) -> None:
        """Wait until so many bytes came."""
        if len(self.received) < count:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._wanted.append((count, future))
            await future


def echo_server(switch: Switch, *, reuse: bool = False) -> Callable[[SimNode], Coroutine[Any, Any, None]]:
    """Return the main of an echo server on port 7 of its host."""

    async def main(node: SimNode) -> None:
        await SimNetwork(switch, node).listen("0.0.0.0", PORT, lambda: EchoProtocol(reuse=reuse))
        await asyncio.get_running_loop().create_future()

    return main


def echo_client(
    switch: Switch, host: str, rounds: int, done: list[str]
) -> Callable[[SimNode], Coroutine[Any, Any, None]]:
    """Return the main of a client that sends random buffers, compares what comes back, and adds its name to `done`."""

    async def main(node: SimNode) -> None:
        protocol = await SimNetwork(switch, node).connect(host, PORT, ClientProtocol)
        assert isinstance(protocol, ClientProtocol)
        assert protocol.transport is not None
        sent = bytearray()
        for _ in range(rounds):
            data = node.random.randbytes(node.random.choice([1, 10, 1_000, 5_000]))
            sent += data
            protocol.transport.write(data)
            if node.random.random() < 0.5:
                await protocol.until(len(sent))
        await protocol.until(len(sent))
        assert protocol.received == sent, f"{node.name} got other bytes than it sent"
        protocol.transport.close()
        assert await protocol.lost is None
        done.append(node.name)

    return main
