"""This broker's connection to another one, by which it hands over blocks: requests out, answers in."""

from __future__ import annotations

import asyncio
from typing import cast

from memq import __version__
from memq.errors import MemqError, ProtocolError, TimedOutError, UnreachableError
from memq.protocol.connection import Conversation, Side
from memq.protocol.forward import encode_forward
from memq.protocol.frames import HELLO_MAGIC, VERSIONS, Api, Frame, FrameReader, encode_frame
from memq.protocol.messages import Forward, Hello, HelloAnswer, Nack, decode_message, encode_message, error_of
from memq.runtime.network import Runtime, parse_address
from memq.topic import Topic

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 30.0


class Peer(asyncio.BufferedProtocol):
    """A connection after `connect_peer`. It keeps no block: the caller does, until `forward` has returned."""

    def __init__(self, runtime: Runtime, address: str) -> None:
        self.address = address
        self.broker = self.cluster = ""
        self._clock = runtime.clock
        self._reader = FrameReader()
        self._conversation = Conversation()
        self._transport: asyncio.Transport | None = None
        self._answers: dict[int, asyncio.Future[Frame]] = {}
        self._requests = 0
        self._ready_s = 0.0
        self._failure: MemqError | None = None

    async def hello(self) -> None:
        """Begin the conversation.

        Raises: UnreachableError, TimedOutError, UnsupportedVersionError, ProtocolError.
        """
        hello = Hello(least_version=VERSIONS[0], greatest_version=VERSIONS[1], client=f"memq-broker/{__version__}")
        frame = encode_frame(Api.HELLO, 0, HELLO_MAGIC, encode_message(hello))
        answer = decode_message((await self._ask(Api.HELLO, 0, [frame], CONNECT_TIMEOUT_S)).body, HelloAnswer)
        self.broker, self.cluster = answer.broker, answer.cluster

    async def forward(self, topic: Topic, partition: int, block: memoryview, absent_s: float) -> None:
        """Hand a block over, and return when its pointer is in the queue.

        It was absent there at `absent_s` (monotonic).
        Raises: what the peer answers; UnreachableError, TimedOutError: it may have the block or not.
        """
        self._requests += 1
        absent_ms = int((absent_s - self._ready_s) * 1000)
        message = Forward(topic=topic.name, topic_id=topic.id, partition=partition, absent_ms=absent_ms)
        head = encode_forward(self._requests, message, len(block))
        await self._ask(Api.FORWARD, self._requests, [head, block], ANSWER_TIMEOUT_S)

    def close(self) -> None:
        """Close at once."""
        self._fail(UnreachableError(f"the connection to {self.address} was closed here"))

    # ---- asyncio.BufferedProtocol ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where received bytes go."""
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Take received bytes."""
        try:
            for frame in self._reader.received(nbytes):
                self._take(frame)
        except MemqError as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what waits for an answer."""
        text = f"connection to {self.address} is lost" + (f": {exc}" if exc else "")
        self._fail(UnreachableError(text))

    # ---- inside ------------------------------------------------------------------------------------

    async def _ask(self, api: Api, number: int, buffers: list[bytes | memoryview], timeout_s: float) -> Frame:
        if self._failure is not None or self._transport is None:
            raise self._failure or UnreachableError(f"{self.address} is not connected")
        self._conversation.said(Side.CLIENT, api)
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._answers[number] = future
        for buffer in buffers:  # not joined: that would copy the block
            self._transport.write(buffer)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise TimedOutError(f"{self.address} did not answer {api.name} in {timeout_s:g} s") from error
        finally:
            self._answers.pop(number, None)

    def _take(self, frame: Frame) -> None:
        """Take a frame. Raises: ProtocolError; the peer's error when it refuses the whole connection."""
        self._conversation.said(Side.BROKER, frame.api)
        if frame.api == Api.DRAINING:
            return  # what it can't take any more it refuses
        if frame.api == Api.HELLO:
            self._ready_s = self._clock.monotonic()
            self._answer(0, frame)
            return
        error = error_of(decode_message(frame.body, Nack)) if frame.api == Api.ERROR else None
        if error is not None and frame.argument == 0:
            raise error
        if frame.api not in (Api.FORWARD, Api.ERROR) or not 0 < frame.argument <= self._requests:
            raise ProtocolError(f"{self.address} answers request {frame.argument}, which was not sent: {frame.api}")
        self._answer(frame.argument, error or frame)

    def _answer(self, number: int, answer: Frame | MemqError) -> None:
        future = self._answers.get(number)
        if future is None or future.done():
            return  # the request has timed out: its caller knows nothing, and brings the block again
        if isinstance(answer, MemqError):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _fail(self, error: MemqError) -> None:
        self._failure = self._failure or error
        for future in self._answers.values():
            if not future.done():
                future.set_exception(self._failure)
        if self._transport is not None:
            self._transport.abort()


async def connect_peer(runtime: Runtime, address: str) -> Peer:
    """Connect to a broker and say HELLO. Raises: as `Peer.hello`."""
    host, port = parse_address(address)
    peer = Peer(runtime, address)
    await runtime.network.connect(host, port, lambda: peer, timeout_s=CONNECT_TIMEOUT_S)
    try:
        await peer.hello()
    except BaseException:
        peer.close()
        raise
    return peer
