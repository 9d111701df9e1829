"""A network in memory: connections without sockets, whose clients a test drives, on any event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import msgspec

from memq.errors import UnreachableError
from memq.protocol.frames import HELLO_MAGIC, VERSIONS, Api, Frame, FrameReader, encode_frame
from memq.protocol.messages import Hello, Nack, decode_message, encode_message
from memq.runtime.network import Address, ProtocolFactory, parse_address
from memq.runtime.runtime import Runtime
from tests.skipping_loop import skipping_runtime

FULL_BYTES = 64 * 1024  # that wait in a socket before its protocol is asked to pause, as in asyncio


class Wire(asyncio.Transport):
    """The broker's end of a connection. While its client is `deaf`, what is written waits."""

    def __init__(self, protocol: asyncio.BufferedProtocol, peer: Address) -> None:
        super().__init__({"peername": peer})
        self.protocol = protocol
        self.waiting = bytearray()
        self.taken = bytearray()
        self.deaf = self.full = self.aborted = self.lost = False
        self.reading = True
        self._closing = False

    def write(self, data: Any) -> None:
        """See `asyncio.WriteTransport`."""
        assert not self._closing, "written behind the end"
        self.waiting += data
        self.take(0 if self.deaf else len(self.waiting))

    def take(self, size: int) -> None:
        """Let the client take so many bytes."""
        self.taken += self.waiting[:size]
        del self.waiting[:size]
        if not self.full and len(self.waiting) > FULL_BYTES:
            self.full = True
            self.protocol.pause_writing()
        elif self.full and len(self.waiting) <= FULL_BYTES // 4:
            self.full = False
            self.protocol.resume_writing()
        if self._closing and not self.waiting:
            self._end()

    def get_write_buffer_size(self) -> int:
        """See `asyncio.WriteTransport`."""
        return len(self.waiting)

    def pause_reading(self) -> None:
        """See `asyncio.ReadTransport`."""
        self.reading = False

    def resume_reading(self) -> None:
        """See `asyncio.ReadTransport`."""
        self.reading = True

    def is_closing(self) -> bool:
        """See `asyncio.BaseTransport`."""
        return self._closing

    def close(self) -> None:
        """End when the client has taken what waits."""
        self.reading, self._closing = False, True
        if not self.waiting:
            self._end()

    def abort(self) -> None:
        """End at once."""
        self.aborted = True
        self.waiting.clear()
        self.close()

    def _end(self) -> None:
        if not self.lost:
            self.lost = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


class Client:
    """A client at the other end of a wire."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def say(self, *data: bytes) -> None:
        """Send bytes, as one read of the broker each where they find room."""
        for piece in data:
            assert not self.say_some(piece), "the broker does not read"

    def say_some(self, data: bytes) -> bytes:
        """Send as many bytes as the broker reads now; return the rest."""
        while data and self.wire.reading:
            buffer = memoryview(self.wire.protocol.get_buffer(-1))
            size = min(len(data), len(buffer))
            buffer[:size] = data[:size]
            self.wire.protocol.buffer_updated(size)
            data = data[size:]
        return data

    def greet(self, client_id: str = "") -> Client:
        """Say HELLO and take the answer."""
        hello = Hello(least_version=VERSIONS[0], greatest_version=VERSIONS[1], client_id=client_id)
        self.say(encode_frame(Api.HELLO, 0, HELLO_MAGIC, encode_message(hello)))
        (answer,) = self.heard()
        assert answer.api == Api.HELLO
        return self

    def is_gone(self) -> bool:
        """Whether the broker has ended the connection, and all that it wrote was taken."""
        return self.wire.lost

    def is_aborted(self) -> bool:
        """Whether the broker has ended the connection without waiting for what was not taken."""
        return self.wire.aborted

    def ask(self, api: Api, message: msgspec.Struct, *, stream: int = 0, number: int = 1) -> None:
        """Send a request."""
        self.say(encode_frame(api, stream, number, encode_message(message)))

    def heard(self) -> list[Frame]:
        """Return the frames that it took since the last look."""
        reader, data = FrameReader(), bytes(self.wire.taken)
        self.wire.taken.clear()
        found = []
        while data:
            buffer = reader.get_buffer()
            size = min(len(data), len(buffer))
            buffer[:size] = data[:size]
            found += reader.received(size)
            data = data[size:]
        return found

    def error(self) -> Nack:
        """Return the last frame that it took, an error."""
        frame = self.heard()[-1]
        assert frame.api in (Api.ERROR, Api.NACK), Api(frame.api).name
        return decode_message(frame.body, Nack)


@dataclass
class Listener:
    """A bound port."""

    address: Address
    factory: ProtocolFactory
    close: Callable[[], None]


class MemoryNetwork:
    """A `Network` in memory; `listeners` are the ports that are bound."""

    def __init__(self) -> None:
        self.listeners: dict[Address, Listener] = {}
        self._ports, self._peers = count(4001), count(50_001)

    @property
    def encrypted(self) -> bool:
        """See `memq.runtime.network.Network`."""
        return False

    def token(self) -> str:
        """See `memq.runtime.network.Network`."""
        return ""

    def login(self) -> None:
        """See `memq.runtime.network.Network`."""
        return

    async def listen(self, host: str, port: int, factory: ProtocolFactory) -> Listener:
        """See `Network.listen`."""
        address = (host, port or next(self._ports))

        def close() -> None:
            self.listeners.pop(address, None)

        self.listeners[address] = Listener(address, factory, close)
        return self.listeners[address]

    async def connect(
        self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float = 10.0
    ) -> asyncio.BufferedProtocol:
        """See `Network.connect`: brokers reach nobody here."""
        raise UnreachableError(f"nobody is reached at {host}:{port}")

    def call(self, address: str) -> Client:
        """Connect to a port that is bound."""
        protocol = self.listeners[parse_address(address)].factory()
        wire = Wire(protocol, ("10.0.0.9", next(self._peers)))
        protocol.connection_made(wire)
        return Client(wire)


def memory_runtime() -> tuple[Runtime, MemoryNetwork]:
    """Return a runtime on virtual time whose network is in memory."""
    network = MemoryNetwork()
    return replace(skipping_runtime(), network=network), network
