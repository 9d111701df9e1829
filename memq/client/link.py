"""One broker connection: frames out, answers matched to requests, stream frames to their owner."""

from __future__ import annotations

import asyncio
from typing import Protocol, TypeVar, cast

import msgspec

from memq import __version__
from memq.errors import MemqError, ProtocolError, TimedOutError, UnreachableError
from memq.protocol.connection import ConnectionState, Conversation, Side
from memq.protocol.frames import HELLO_MAGIC, VERSIONS, Api, Frame, FrameReader, encode_frame
from memq.protocol.messages import (
    Hello,
    HelloAnswer,
    Nack,
    Open,
    ReadRequest,
    decode_message,
    encode_message,
    error_of,
)
from memq.runtime.network import Address, Runtime, format_address

Answer = TypeVar("Answer", bound=msgspec.Struct)
_STREAM_APIS = frozenset({Api.ACK, Api.NACK, Api.THROTTLE, Api.REDIRECT})
REQUEST_TIMEOUT_S = 30.0


class LinkOwner(Protocol):
    """The user of a link: gets unrequested frames. The methods must not raise."""

    def stream_frame(self, frame: Frame) -> None:
        """Take a stream's ACK, NACK, THROTTLE or REDIRECT, or the answer to `Link.open_stream`."""
        ...

    def draining(self) -> None:
        """The broker leaves: it acks what it holds and takes nothing new."""
        ...

    def writable(self) -> None:
        """The socket takes bytes again after `Link.congested` was true."""
        ...

    def lost(self, error: MemqError) -> None:
        """The connection is closed: called once after a successful `connect_link`, after requests failed."""
        ...


class Link(asyncio.BufferedProtocol):
    """A connection to one broker, after `connect_link`. Not thread-safe: it lives on one event loop."""

    def __init__(self, runtime: Runtime, owner: LinkOwner, address: Address, client_id: str) -> None:
        self.address = address
        self.congested = False
        self.broker = ""
        self.cluster = ""
        self.audit_ms = 0  # how often its cluster wants to be told what a client does; 0: not at all
        self._runtime = runtime
        self._owner = owner
        self._client_id = client_id
        self._reader = FrameReader()
        self._conversation = Conversation()
        self._transport: asyncio.Transport | None = None
        self._requests: dict[int, asyncio.Future[Frame]] = {}
        self._opens: dict[int, int] = {}  # request id -> stream
        self._request_id = 0
        self.heard_s = 0.0  # monotonic time of the last bytes from the broker
        self._ready_at = 0.0
        self._failure: MemqError | None = None

    # ---- what owners call ----------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether the connection can be used."""
        return self._conversation.state in (ConnectionState.READY, ConnectionState.DRAINING)

    def clock_ms(self, monotonic_s: float) -> int:
        """Return a monotonic time as ms since the HELLO answer was read; may be negative."""
        return int((monotonic_s - self._ready_at) * 1000)

    def write(self, *buffers: bytes | bytearray | memoryview) -> None:
        """Send bytes that form whole frames. They are dropped after a loss, which `lost` reports."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(buffers)

    async def request(
        self,
        api: Api,
        message: msgspec.Struct,
        answer: type[Answer],
        *,
        stream: int = 0,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> Answer:
        """Send a request and return its answer.

        Raises: the error that the broker named; TimedOutError; UnreachableError when the connection is lost.
        """
        frame = await self._exchange(api, message, stream, timeout_s)
        return decode_message(frame.body, answer)

    async def read(self, request: ReadRequest, *, timeout_s: float = REQUEST_TIMEOUT_S) -> bytes | bytearray:
        """Return the bytes of an object's range, read by the broker. Raises: as `request`."""
        frame = await self._exchange(Api.READ, request, 0, timeout_s)
        return cast(bytes | bytearray, frame.body)

    def open_stream(self, stream: int, message: Open) -> int:
        """Send an OPEN and return its request id.

        The answer, OPEN or ERROR with that argument, comes by `LinkOwner.stream_frame`: in its place among
        the stream's other frames, which a future would lose.
        """
        self._request_id += 1
        self._opens[self._request_id] = stream
        self.write(encode_frame(Api.OPEN, stream, self._request_id, encode_message(message)))
        return self._request_id

    def abort(self, error: MemqError) -> None:
        """Drop the connection at once; what waits fails with `error`."""
        self._fail(error)

    def close(self) -> None:
        """Close after what was written has been sent."""
        if self._transport is not None:
            self._transport.close()

    # ---- asyncio.BufferedProtocol ----------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where received bytes go."""
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Take received bytes."""
        self.heard_s = self._runtime.clock.monotonic()
        try:
            for frame in self._reader.received(nbytes):
                self._take(frame)
        except MemqError as error:
            self._fail(error)

    def pause_writing(self) -> None:
        """The socket's send buffer is full."""
        self.congested = True

    def resume_writing(self) -> None:
        """The socket takes bytes again."""
        self.congested = False
        self._owner.writable()

    def eof_received(self) -> bool:
        """The broker closed its side: so does this one."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all waiting requests, and notify the owner."""
        was_open = self.open
        self._conversation.close()
        name = format_address(self.address)
        error = self._failure or UnreachableError(f"connection to {name} is lost" + (f": {exc}" if exc else ""))
        for future in self._requests.values():
            if not future.done():
                future.set_exception(error)
        if was_open:
            self._owner.lost(error)

    # ---- inside ------------------------------------------------------------------------------

    async def _hello(self, timeout_s: float) -> None:
        future = self._expect(0)
        self._conversation.said(Side.CLIENT, Api.HELLO)
        hello = Hello(
            least_version=VERSIONS[0],
            greatest_version=VERSIONS[1],
            client=f"memq-python/{__version__}",
            client_id=self._client_id,
        )
        self.write(encode_frame(Api.HELLO, 0, HELLO_MAGIC, encode_message(hello)))
        frame = await self._wait(0, future, timeout_s, Api.HELLO)
        answer = decode_message(frame.body, HelloAnswer)
        self.broker, self.cluster, self.audit_ms = answer.broker, answer.cluster, answer.audit_ms

    async def _exchange(self, api: Api, message: msgspec.Struct, stream: int, timeout_s: float) -> Frame:
        if not self.open:
            raise self._failure or UnreachableError(f"connection to {format_address(self.address)} is closed")
        self._request_id += 1
        number = self._request_id
        future = self._expect(number)
        self.write(encode_frame(api, stream, number, encode_message(message)))
        frame = await self._wait(number, future, timeout_s, api)
        if frame.api != api:
            raise ProtocolError(f"asked {api.name}, the broker answered {frame.api}")
        return frame

    def _expect(self, number: int) -> asyncio.Future[Frame]:
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._requests[number] = future
        return future

    async def _wait(self, number: int, future: asyncio.Future[Frame], timeout_s: float, api: Api) -> Frame:
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            name = format_address(self.address)
            raise TimedOutError(f"{name} did not answer {api.name} in {timeout_s:g} s") from error
        finally:
            self._requests.pop(number, None)

    def _take(self, frame: Frame) -> None:
        self._conversation.said(Side.BROKER, frame.api)
        if frame.api in _STREAM_APIS:
            self._owner.stream_frame(frame)
        elif frame.argument in self._opens and frame.api in (Api.OPEN, Api.ERROR):
            self._owner.stream_frame(frame._replace(stream=self._opens.pop(frame.argument)))
        elif frame.api == Api.DRAINING:
            self._owner.draining()
        elif frame.api == Api.HELLO:
            self._ready_at = self.heard_s
            self._answer(0, frame)
        elif frame.api == Api.ERROR:
            self._take_error(frame)
        else:
            self._answer(frame.argument, frame)

    def _take_error(self, frame: Frame) -> None:
        error = error_of(decode_message(frame.body, Nack))
        future = self._requests.get(frame.argument)
        if future is None and frame.argument == 0:
            self._fail(error)  # the connection as a whole was refused
        elif future is not None and not future.done():
            future.set_exception(error)

    def _answer(self, number: int, frame: Frame) -> None:
        future = self._requests.get(number)
        if future is not None and not future.done():  # else the request has timed out
            future.set_result(frame)

    def _fail(self, error: MemqError) -> None:
        self._failure = error
        if self._transport is not None:
            self._transport.abort()


async def connect_link(
    runtime: Runtime, owner: LinkOwner, address: Address, *, client_id: str = "", timeout_s: float = 10.0
) -> Link:
    """Connect to a broker and say HELLO, with the name that this client goes by, if it has one.

    Raises: UnreachableError, TimedOutError, UnsupportedVersionError; `owner.lost` is not called then.
    """
    link = Link(runtime, owner, address, client_id)
    await runtime.network.connect(address[0], address[1], lambda: link, timeout_s=timeout_s)
    try:
        await link._hello(timeout_s)
    except BaseException as error:
        link._conversation.close()
        link._fail(UnreachableError(f"no HELLO from {format_address(address)}"))
        if isinstance(error, ProtocolError):  # no broker is there: others may be asked, as beside one that is dead
            raise UnreachableError(f"{format_address(address)} does not speak memq's protocol: {error}") from error
        raise
    return link
