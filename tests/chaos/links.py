"""Links: TCP connections to a real server through this process, which cuts, delays, swallows, flips or refuses them.

All links share one thread and one loop. A mode is set from any thread and holds for all connections of the link.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator

from memq_localstack.ports import HOST

CHUNK_BYTES = 64 * 1024
HANG_S = 30.0
TEAR_RATE = 0.02  # of the chunks of a torn link
FLIP_RATE = 0.05  # of the chunks of a flipping link
MODES = ("pass", "cut", "silent", "deaf", "slow", "torn", "flip", "400", "403", "404", "503")
_CODES = {"400": "RequestTimeout", "403": "AccessDenied", "404": "NoSuchKey", "503": "SlowDown"}
TURNS_TO_CLOSE = 3  # of the loop, until the sockets of aborted transports are closed
_METHODS = (b"GET ", b"PUT ", b"HEAD ", b"POST ", b"DELETE ")


class Link:
    """One link: a port of its own that leads to `target`, and the mode it is in.

    Modes: `cut` ends and refuses connections; `silent` passes nothing on, either way; `deaf` passes requests on and
    swallows the answers; `slow` delays each chunk by up to half a second; `torn` ends a connection now and then in the
    middle; `flip` changes one bit in some chunks of the answers; a number is the HTTP status that answers each request.
    """

    def __init__(self, name: str, target: int, loop: asyncio.AbstractEventLoop, draw: random.Random) -> None:
        self.name = name
        self.port = 0
        self.met = dict.fromkeys(MODES, 0)  # chunks that passed, or were hurt, in each mode
        self._target = target
        self._loop = loop
        self._draw = draw
        self._mode = "pass"
        self._changed = asyncio.Event()
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """HOST:PORT for clients."""
        return f"{HOST}:{self.port}"

    @property
    def connections(self) -> int:
        """How many sockets it holds: of clients, and to the server."""
        return len(self._connections)

    def set(self, mode: str) -> None:
        """Switch the mode of all connections. Safe from any thread."""
        assert mode in MODES, mode
        self._loop.call_soon_threadsafe(self._switch, mode)

    async def serve(self, port: int) -> asyncio.Server:
        """Listen on `port` (0: any)."""
        server = await asyncio.start_server(self._accept, HOST, port)  # noqa: TID251 - not memq's own traffic
        self.port = server.sockets[0].getsockname()[1]
        return server

    def _switch(self, mode: str) -> None:
        self._mode = mode
        self._changed.set()
        self._changed = asyncio.Event()
        if mode == "cut":
            self.abort()

    def abort(self) -> None:
        """End all connections, also those that wait for the server."""
        for writer in tuple(self._connections):
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._mode == "cut":
            writer.transport.abort()
            return
        self._connections.add(writer)
        task = self._loop.create_task(self._connected(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, requests = await asyncio.open_connection(HOST, self._target)  # noqa: TID251 - as above
        except OSError:
            self._connections.discard(writer)
            writer.transport.abort()
            return
        self._connections.add(requests)
        ways = [
            asyncio.create_task(self._pass_on(reader, requests, writer, "up")),
            asyncio.create_task(self._pass_on(answers, writer, requests, "down")),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for each in (writer, requests):
                self._connections.discard(each)
                each.transport.abort() if self._mode in ("cut", "torn") else each.close()

    async def _pass_on(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, back: asyncio.StreamWriter, way: str
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                while self._mode == "silent":
                    self.met["silent"] += 1
                    await self._changed.wait()
                mode = self._mode
                self.met[mode] += 1
                if mode == "slow":
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), self._draw.uniform(0.0, 0.5))
                elif mode == "torn" and self._draw.random() < TEAR_RATE:
                    sink.write(data[: self._draw.randrange(len(data))])
                    await sink.drain()
                    return
                elif mode == "deaf" and way == "down":
                    await self._changed.wait()  # the bytes are lost, and with them the connection
                    return
                elif mode in _CODES and way == "up" and data.startswith(_METHODS):
                    back.write(refusal(mode))
                    await back.drain()
                    return
                elif mode == "flip" and way == "down" and self._draw.random() < FLIP_RATE:
                    data = flipped(data, self._draw)
                sink.write(data)
                await sink.drain()


def refusal(status: str) -> bytes:
    """Return an S3 error answer that ends its connection."""
    code = _CODES[status]
    body = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>chaos</Message></Error>'.encode()
    head = f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body


def flipped(data: bytes, draw: random.Random) -> bytes:
    """Return the bytes with one bit changed."""
    at = draw.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]


class Links:
    """All links of a run, by name."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._loop = asyncio.new_event_loop()
        self._by_name: dict[str, Link] = {}
        self._servers: list[asyncio.Server] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="links")

    def __getitem__(self, name: str) -> Link:
        return self._by_name[name]

    def __iter__(self) -> Iterator[Link]:
        return iter(self._by_name.values())

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, name: str, target: int, port: int = 0) -> Link:
        """Make a link to a port of this machine."""
        link = Link(name, target, self._loop, random.Random(f"{self._seed}/{name}"))
        server = asyncio.run_coroutine_threadsafe(link.serve(port), self._loop).result(HANG_S)
        self._servers.append(server)
        self._by_name[name] = link
        return link

    def turn(self) -> None:
        """Wait for one turn of the loop."""
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(HANG_S)

    def close(self) -> None:
        """End all links and the thread."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(HANG_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(HANG_S)
        self._loop.close()

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for link in self._by_name.values():
            link.abort()
        for _ in range(TURNS_TO_CLOSE):
            await asyncio.sleep(0)
