"""A Kafka with a second door, whose produce requests can be held: handed over by Kafka's client, and not yet there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from localstack.ports import HOST, free_ports
from localstack.servers import Server, start_kafka

PRODUCE = 0  # the api key of a request that appends
HANG_S = 120.0


class Door:
    """Hands on what clients say to a listener of Kafka, request by request, and what it answers."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._gate = asyncio.Event()
        self._gate.set()
        self._held = threading.Event()
        self._handed_on = threading.Event()
        self._ended = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()], name="kafka-door")
        self._thread.start()
        assert self._ready.wait(HANG_S)

    @property
    def address(self) -> str:
        """Where clients come in."""
        return f"{HOST}:{self.port}"

    def hold(self) -> None:
        """Hold produce requests from now on, and return when there is one; what comes behind it waits, too."""
        self._loop.call_soon_threadsafe(self._gate.clear)
        assert self._held.wait(HANG_S), f"no produce request within {HANG_S:.0f} s"

    def let_go(self) -> None:
        """Hand on what is held, and return when Kafka's socket has the first of it."""
        self._loop.call_soon_threadsafe(self._gate.set)
        assert self._handed_on.wait(HANG_S), f"nothing was handed on within {HANG_S:.0f} s"
        self._held.clear()
        self._handed_on.clear()

    def close(self) -> None:
        """End it and its connections."""
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, HOST, 0)  # noqa: TID251 - not memq's own traffic
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._ended.wait()
        server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            answers, requests = await asyncio.open_connection(HOST, self._target)  # noqa: TID251 - as above
            back = asyncio.create_task(_copy(answers, writer))
            try:
                await self._hand_on(reader, requests)
            finally:
                requests.close()
                await asyncio.wait([back])
                writer.close()

    async def _hand_on(self, reader: asyncio.StreamReader, requests: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                size = await reader.readexactly(4)
                body = await reader.readexactly(int.from_bytes(size))
                held = int.from_bytes(body[:2]) == PRODUCE and not self._gate.is_set()
                if held:
                    self._held.set()
                    await self._gate.wait()
                requests.write(size + body)
                await requests.drain()
                if held:
                    self._handed_on.set()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


@dataclass(frozen=True)
class HeldKafka:
    """The server, and the door beside its own."""

    server: Server
    door: Door


@contextmanager
def held_kafka(folder: Path) -> Iterator[HeldKafka]:
    """Run a Kafka that sends who comes through the door there again."""
    (inner,) = free_ports(1)
    door = Door(inner)
    settings = {
        "listeners": f"PLAINTEXT://{HOST}:{{port}},DOOR://{HOST}:{inner},CONTROLLER://{HOST}:{{controller_port}}",
        "advertised.listeners": f"PLAINTEXT://{HOST}:{{port}},DOOR://{door.address}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,DOOR:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
    }
    try:
        with start_kafka(folder, settings=settings) as server:
            yield HeldKafka(server, door)
    finally:
        door.close()
