"""The broker's end of a link, answered by a test frame by frame."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from memq.errors import (
    MemqError,
)
from memq.protocol.frames import Api, Frame, FrameReader, add_checksum, encode_frame
from memq.protocol.link import Link, connect_link
from memq.protocol.messages import HelloAnswer, encode_message, nack_of
from tests.skipping_loop import skipping_runtime


def no_login() -> None:
    """See `Network.login`."""


class Wire:
    """The other end: frames that came, and answers; what is said after the end is an error of the link."""

    def __init__(
        self, *, silent: bool = False, checksums: bool = True, version: int = 1, frame_checksums: bool = False
    ) -> None:
        self.checksums = checksums
        self.frame_checksums = frame_checksums
        self.version = version
        self.frames: list[Frame] = []
        self.aborts = 0
        self.flipped = (b"", b"")  # bytes of what it says that arrive as others
        self.after = b""  # arrives with the next frame that it says
        self.address: tuple[str, int, float] | None = None
        self._reader = FrameReader()
        self._silent = silent
        self._link: Link | None = None
        self.runtime = replace(
            skipping_runtime(),
            network=cast(Any, SimpleNamespace(connect=self.connect_to, token=str, login=no_login, encrypted=False)),
        )

    async def connect_to(self, host: str, port: int, make: Callable[[], Link], *, timeout_s: float) -> None:
        self.address = (host, port, timeout_s)
        self._link = make()
        self._link.connection_made(cast(asyncio.Transport, self))

    def write(self, data: bytes | memoryview) -> None:
        """Take what the link sends."""
        assert not self.aborts, "nothing is sent after the end"
        at = 0
        while at < len(data):
            room = self._reader.get_buffer()
            taken = bytes(data[at : at + len(room)])
            room[: len(taken)] = taken
            at += len(taken)
            for frame in self._reader.received(len(taken)):
                self.frames.append(frame._replace(body=bytes(frame.body)))
                if frame.api == Api.HELLO and not self._silent:
                    answer = HelloAnswer(
                        version=self.version,
                        broker="broker-2",
                        cluster="c-1",
                        frame_checksums=self.frame_checksums,
                    )
                    asyncio.get_running_loop().call_soon(self.say, Api.HELLO, 0, answer)

    def writelines(self, buffers: Iterable[bytes | memoryview]) -> None:
        """Take what the link sends."""
        for data in buffers:
            self.write(data)

    def is_closing(self) -> bool:
        """Whether nothing is sent any more."""
        return self.aborts > 0

    def abort(self) -> None:
        """End the connection."""
        self.aborts += 1
        if self.aborts == 1:
            assert self._link is not None
            asyncio.get_running_loop().call_soon(self._link.connection_lost, None)

    def close(self) -> None:
        """End the connection: nothing waits to be sent."""
        self.abort()

    def say(self, api: Api, argument: int, message: msgspec.Struct) -> None:
        """Send a frame to the link."""
        body = encode_message(message) if self.checksums else msgspec.json.encode(message)
        data = encode_frame(api, 0, argument, body.replace(*self.flipped))
        if self.frame_checksums and api not in (Api.HELLO, Api.READ):
            data = b"".join(add_checksum(data))
        self.say_bytes(data + self.after)

    def say_bytes(self, data: bytes) -> None:
        """Send these bytes to the link."""
        assert self._link is not None
        self._link.get_buffer(-1)[: len(data)] = data
        self._link.buffer_updated(len(data))

    def refuse(self, argument: int, error: MemqError) -> None:
        """Send an error to the link."""
        self.say(Api.ERROR, argument, nack_of(error))

    async def link(self) -> Link:
        """Connect."""
        return await connect_link(self.runtime, None, ("host-2", 77), client="memq-broker")
