"""A connection to a broker, for clients and other brokers: sends frames, returns answers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol, TypeVar, cast

import msgspec

from memq.errors import (
    DamagedMessageError,
    ForeignProtocolError,
    MemqError,
    NotReadyError,
    ProtocolError,
    ThrottledError,
    TimedOutError,
    UnreachableError,
)
from memq.format.blocks.header import Buffer
from memq.format.sealed_json import is_sealed
from memq.limits import VERSION
from memq.protocol.connection import ConnectionState, Conversation, Side
from memq.protocol.frames import (
    HELLO_BODY_START,
    HELLO_MAGIC,
    VERSIONS,
    Api,
    Frame,
    FrameReader,
    add_checksum,
    as_damage,
    check_version,
    encode_forward,
    encode_frame,
    encode_with_blocks,
    split_blocks,
    take_checksum,
)
from memq.protocol.messages import (
    Authenticate,
    Forward,
    Hello,
    HelloAnswer,
    Nack,
    Open,
    ReadRequest,
    decode_message,
    encode_message,
    error_of,
)
from memq.runtime.network import Address, format_address, tls_reason
from memq.runtime.runtime import Runtime
from memq.runtime.waits import Waits, time_before
from memq.scram import NONCE_BYTES, ScramClient

Answer = TypeVar("Answer", bound=msgspec.Struct)
_STREAM_APIS = frozenset({Api.ACK, Api.NACK, Api.THROTTLE, Api.REDIRECT})
CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 30.0
SILENT_S = 10.0  # a broker whose queue is slow answers something in this time
LOST_AT_ONCE_HINT = "check that a broker runs there; one with TLS needs ca_file, and perhaps a certificate"
STUCK_S, STUCK_BYTES_PER_S = 5.0, 10_000  # a frame that arrives more slowly for so long has a wrong length


def broker_name(address: Address) -> str:
    """Return a broker for messages."""
    return f"broker {format_address(address)}"


class LinkOwner(Protocol):
    """The user of a link with streams: gets unrequested frames. The methods must not raise."""

    def stream_frame(self, frame: Frame) -> None:
        """Take a stream's ACK, NACK, THROTTLE or REDIRECT, or the answer to `Link.open_stream`."""
        ...

    def draining(self) -> None:
        """The broker drains: it acks the blocks that it holds, and takes no new ones."""
        ...

    def writable(self) -> None:
        """The socket takes bytes again after `Link.congested` was true."""
        ...

    def lost(self, error: MemqError) -> None:
        """The connection is closed: called once after a successful `connect_link`, after requests failed."""
        ...


class _PendingRequest(NamedTuple):
    """A request that has no answer yet."""

    api: Api
    answer: asyncio.Future[Frame]


class Link(asyncio.BufferedProtocol):
    """A connection to one broker, after `connect_link`. Not thread-safe: it lives on one event loop."""

    def __init__(self, runtime: Runtime, address: Address, waits: Waits | None = None) -> None:
        self.address = address
        self.congested = False
        self.broker = ""
        self.cluster = ""
        self.audit_ms = 0  # interval at which the cluster wants audit reports from clients; 0: none
        self._name = format_address(address)
        self._waits = waits or Waits(runtime.clock)
        self._runtime = runtime
        self._owner: LinkOwner | None = None  # once `connect_link` has succeeded
        self._reader = FrameReader()
        self._conversation = Conversation()
        self._transport: asyncio.Transport | None = None
        self._requests: dict[int, _PendingRequest] = {}
        self._opens: dict[int, int] = {}  # request id -> stream
        self._request_id = 0
        self.heard_s = 0.0  # monotonic time of the last whole frame from the broker
        self._received_bytes = 0
        self._ready_at = 0.0
        self.silent = False  # whether requests got no answers, and nothing was heard for SILENT_S
        self._unheard_s = math.inf  # when the first request was sent since the last frame
        self.checksums = False  # whether the broker sends a checksum with each message
        self._frame_checksums = False  # whether both sides send one with each frame
        self._failure: MemqError | None = None
        self._reads: dict[int, None] = {}  # the READs without an answer: theirs alone have no checksum

    # ---- calls of the owner --------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether the connection can be used."""
        return self._conversation.state in (ConnectionState.READY, ConnectionState.DRAINING)

    def clock_ms(self, monotonic_s: float) -> int:
        """Return a monotonic time as ms since the HELLO answer was read; may be negative."""
        return int((monotonic_s - self._ready_at) * 1000)

    def write(self, *buffers: Buffer) -> None:
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
        body = encode_message(message)
        frame = await self._exchange(api, lambda number: self._frame(api, stream, number, body), timeout_s=timeout_s)
        return decode_message(frame.body, answer, checksum_wanted=self.checksums)

    async def request_with_blocks(
        self,
        api: Api,
        message: msgspec.Struct,
        answer: type[Answer],
        *,
        blocks: bytes = b"",
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> tuple[Answer, memoryview]:
        """Send a request, with the bytes of blocks behind it; return its answer, and the blocks behind that.

        Raises: as `request`.
        """
        body = encode_message(message)

        def frame_of(number: int) -> bytes:
            return self._with_blocks(api, number, body, blocks) if blocks else self._frame(api, 0, number, body)

        frame = await self._exchange(api, frame_of, timeout_s=timeout_s)
        json, found = split_blocks(frame)
        return decode_message(json, answer, checksum_wanted=self.checksums), found

    async def read(self, request: ReadRequest, *, timeout_s: float = REQUEST_TIMEOUT_S) -> bytes | bytearray:
        """Return the bytes of an object's range, read by the broker. Raises: as `request`."""
        body = encode_message(request)
        frame = await self._exchange(
            Api.READ, lambda number: self._frame(Api.READ, 0, number, body), timeout_s=timeout_s
        )
        return cast(bytes | bytearray, frame.body)

    async def forward(self, message: Forward, block: memoryview) -> None:
        """Hand a block over to its owner, and return when its pointer is in the queue.

        The caller keeps the block until then.
        Raises: as `request`; after UnreachableError or TimedOutError, the caller can't know if the owner has the block.
        """
        await self._exchange(
            Api.FORWARD, lambda number: encode_forward(number, message, len(block)), block, timeout_s=REQUEST_TIMEOUT_S
        )

    def open_stream(self, stream: int, message: Open) -> int:
        """Send an OPEN and return its request id.

        The link passes the answer, OPEN or ERROR with that argument, to `LinkOwner.stream_frame`. So the answer keeps
        its order among the frames of the stream, which a future would lose.
        """
        self._request_id += 1
        self._opens[self._request_id] = stream
        self.write(self._frame(Api.OPEN, stream, self._request_id, encode_message(message)))
        return self._request_id

    def abort(self, error: MemqError) -> None:
        """Drop the connection at once; waiting requests fail with `error`."""
        self._fail(error)

    def close(self) -> None:
        """Close after all written bytes are sent."""
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
        try:
            self._received_bytes += nbytes
            frames = self._reader.received(nbytes)
            if frames:
                self.heard_s, self.silent, self._unheard_s = self._runtime.clock.monotonic(), False, math.inf
            for frame in frames:
                self._take(frame)
        except MemqError as error:
            self._fail(as_damage(error) if self._frame_checksums else error)

    def pause_writing(self) -> None:
        """The socket's send buffer is full."""
        self.congested = True

    def resume_writing(self) -> None:
        """The socket takes bytes again."""
        self.congested = False
        if self._owner is not None:
            self._owner.writable()

    def eof_received(self) -> bool:
        """Close this side after the broker has closed its side."""
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all waiting requests, and notify the owner."""
        was_open = self.open
        self._conversation.close()
        reason = f": {tls_reason(exc) or exc}" if exc else ""
        hint = "" if self.heard_s else LOST_AT_ONCE_HINT
        self._failure = error = self._failure or UnreachableError(
            f"connection to {self._name} is lost{reason}", hint=hint
        )
        for waiting in self._requests.values():
            if not waiting.answer.done():
                waiting.answer.set_exception(error)
        if was_open and self._owner is not None:
            self._owner.lost(error)

    # ---- inside ------------------------------------------------------------------------------

    async def _hello(self, client: str, client_id: str, timeout_s: float) -> None:
        hello = Hello(
            least_version=VERSIONS[0],
            greatest_version=VERSIONS[1],
            client=f"{client}/{VERSION}",
            client_id=client_id,
            frame_checksums=True,
            token=self._runtime.network.token(),
        )
        login, nonce = self._runtime.network.login(), self._runtime.random.randbytes(NONCE_BYTES).hex()
        scram = ScramClient(login.user, login.password, nonce) if login is not None else None
        if scram is not None:
            hello.scram = scram.first()
        self._conversation.sent(Side.CLIENT, Api.HELLO)
        self.write(encode_frame(Api.HELLO, 0, HELLO_MAGIC, encode_message(hello, HELLO_BODY_START)))
        if scram is not None:
            asked = await self._answer_of(0, Api.AUTHENTICATE, timeout_s)
            proof = Authenticate(scram=scram.final(decode_message(asked.body, Authenticate).scram))
            self._conversation.sent(Side.CLIENT, Api.AUTHENTICATE)
            self.write(encode_frame(Api.AUTHENTICATE, 0, 0, encode_message(proof)))
        frame = await self._answer_of(0, Api.HELLO, timeout_s)
        answer = decode_message(frame.body, HelloAnswer)
        if scram is not None:
            scram.check(answer.scram)
        check_version(answer.version, answer.version)
        self.checksums = is_sealed(frame.body)
        self.broker, self.cluster, self.audit_ms = answer.broker, answer.cluster, answer.audit_ms

    def _frame(self, api: Api, stream: int, argument: int, body: bytes) -> bytes:
        frame = encode_frame(api, stream, argument, body)
        return b"".join(add_checksum(frame)) if self._frame_checksums else frame

    def _with_blocks(self, api: Api, argument: int, body: bytes, blocks: bytes) -> bytes:
        frame = encode_with_blocks(api, argument, body, len(blocks))
        return b"".join(add_checksum(frame, blocks)) if self._frame_checksums else frame + blocks

    async def _exchange(self, api: Api, frame_of: Callable[[int], bytes], *more: memoryview, timeout_s: float) -> Frame:
        """Send the frame that `frame_of` makes for a request id, then its rest, `more`; return the answer."""
        if self._failure is not None or not self.open:
            raise self._failure or UnreachableError(f"connection to {self._name} is closed")
        self._request_id += 1
        if api == Api.READ:
            self._reads[self._request_id] = None
        self.write(frame_of(self._request_id))
        for buffer in more:  # not joined: that would copy a block
            self.write(buffer)
        return await self._answer_of(self._request_id, api, timeout_s)

    async def _answer_of(self, number: int, api: Api, timeout_s: float) -> Frame:
        answer: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._requests[number] = _PendingRequest(api, answer)
        sent_s, received_bytes = self._runtime.clock.monotonic(), self._received_bytes
        self._unheard_s = min(self._unheard_s, sent_s)
        try:
            with self._waits.on(broker_name(self.address), api.name) as wait:
                try:
                    async with asyncio.timeout(timeout_s):
                        return await answer
                except MemqError:
                    wait.answered = self.open  # an ERROR of the broker is an answer, a lost connection is not
                    raise
                except TimeoutError as error:
                    self.silent = self._runtime.clock.monotonic() - self._unheard_s >= SILENT_S
                    text = f"{self._name} did not answer {api.name} in {timeout_s:g} s"
                    raise TimedOutError(text + self._silence(timeout_s)) from error
        finally:
            self._requests.pop(number, None)
            if not answer.done() or answer.cancelled():
                self._check_progress(sent_s, self._received_bytes - received_bytes)
            del answer  # its error has this frame in its traceback: only the garbage collector would free both

    def _check_progress(self, since_s: float, received_bytes: int) -> None:
        """Drop the connection if the broker's answers have become the rest of a frame whose length is wrong.

        A changed bit in a length makes a frame of up to 16 MiB. Then no request on this connection gets an answer.
        """
        seconds = self._runtime.clock.monotonic() - since_s
        is_stuck = self._reader.partial and self.heard_s <= since_s and seconds >= STUCK_S
        if is_stuck and received_bytes < seconds * STUCK_BYTES_PER_S:
            text = f"{self._name} sent {received_bytes} bytes of a frame in {seconds:.0f} s, and not its end"
            self._fail(DamagedMessageError(text, hint="the connection is opened again"))

    def _take(self, frame: Frame) -> None:
        """Take a frame.

        Raises: ProtocolError; DamagedMessageError; the broker's error when it refuses the whole connection.
        """
        self._conversation.sent(Side.BROKER, frame.api)
        if self._frame_checksums and not (frame.api == Api.READ and frame.argument in self._reads):
            frame = take_checksum(frame)
        if frame.api in (Api.READ, Api.ERROR):
            self._reads.pop(frame.argument, None)
        if frame.api in _STREAM_APIS:
            self._take_of_stream(frame)
        elif frame.argument in self._opens and frame.api in (Api.OPEN, Api.ERROR):
            self._take_of_stream(frame._replace(stream=self._opens.pop(frame.argument)))
        elif frame.api == Api.DRAINING:
            if self._owner is not None:
                self._owner.draining()
        elif frame.api == Api.HELLO:
            self._ready_at = self.heard_s
            with suppress(MemqError):  # `_hello` raises it
                self._frame_checksums = decode_message(frame.body, HelloAnswer).frame_checksums
            self._take_answer(0, frame)
        elif frame.api == Api.ERROR and frame.argument == 0:
            raise self._error_in(frame)
        else:
            self._take_answer(frame.argument, frame)

    def _take_of_stream(self, frame: Frame) -> None:
        if self._owner is None:
            raise ProtocolError(f"{self._name} sends {frame.api} of stream {frame.stream}: this link has none")
        self._owner.stream_frame(frame)

    def _take_answer(self, number: int, frame: Frame) -> None:
        waiting = self._requests.get(number)
        if waiting is None and not 0 < number <= self._request_id:
            raise ProtocolError(f"{self._name} answers request {number}, which was not sent: {frame.api}")
        if waiting is None or waiting.answer.done():
            return  # the request has timed out
        if frame.api == Api.ERROR:
            waiting.answer.set_exception(self._error_in(frame))
        elif frame.api == waiting.api:
            waiting.answer.set_result(frame)
        else:
            raise ProtocolError(f"asked {waiting.api.name}, {self._name} answered {frame.api}")

    def _silence(self, seconds: float) -> str:
        """Return the time of the broker's last frame as text, when it is `seconds` ago or more; else ""."""
        if not self.heard_s or self._runtime.clock.monotonic() - self.heard_s < seconds:
            return ""
        return f", silent since {time_before(self._runtime.clock, self.heard_s)}"

    def _error_in(self, frame: Frame) -> MemqError:
        return error_of(decode_message(frame.body, Nack, checksum_wanted=self.checksums))

    def _fail(self, error: MemqError) -> None:
        self._failure = self._failure or error
        if self._transport is not None:
            self._transport.abort()


async def connect_link(
    runtime: Runtime,
    owner: LinkOwner | None,
    address: Address,
    *,
    client: str = "memq-python",
    client_id: str = "",
    timeout_s: float = CONNECT_TIMEOUT_S,
    waits: Waits | None = None,
) -> Link:
    """Connect to a broker and exchange HELLO, with the names of the program and of the client.

    Without `owner`, the link has requests, but no streams. `waits` records the requests that wait for an answer.
    Raises: UnreachableError, TimedOutError, UnsupportedVersionError; `owner.lost` is not called then.
    """
    link = Link(runtime, address, waits)
    await runtime.network.connect(address[0], address[1], lambda: link, timeout_s=timeout_s)
    try:
        await link._hello(client, client_id, timeout_s)
        if link._failure is not None:  # by a frame directly after the HELLO
            raise link._failure
        link._owner = owner
    except BaseException as error:
        link._conversation.close()
        link._fail(UnreachableError(f"no HELLO from {format_address(address)}"))
        if isinstance(error, ProtocolError):  # not a broker: the caller may try others, as for a dead broker
            text = f"{format_address(address)} does not speak memq's protocol: {error}"
            if not isinstance(error, ForeignProtocolError):
                raise UnreachableError(text) from error
            foreign = UnreachableError(text, hint=error.hint)
            foreign.foreign = True
            raise foreign from error
        if isinstance(error, DamagedMessageError):
            raise UnreachableError(f"{format_address(address)} was not understood: {error}") from error
        if isinstance(error, NotReadyError):  # it can't identify this client yet
            raise UnreachableError(f"{format_address(address)} is not ready: {error}") from error
        if isinstance(error, ThrottledError):  # it has too many connections, or too many logins failed
            raise UnreachableError(f"{format_address(address)} refuses for now: {error}", hint=error.hint) from error
        raise
    return link
