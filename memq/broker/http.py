"""The HTTP port of a broker: `/healthz`, `/readyz` with the check behind it, and `/metrics`.

A connection has one small request and one answer, and is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import h11
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from memq.errors import MemqError, UnreachableError
from memq.runtime.logs import EventLog
from memq.runtime.network import Address, BoundPort, Network, connection_to_close, host_of
from memq.runtime.tasks import TaskOwner

REQUEST_BYTES_MAX = 16 * 1024
REQUEST_TIMEOUT_S = 10.0
CONNECTIONS_MAX = 100
TEXT = "text/plain; charset=utf-8"
Page = tuple[int, str, bytes]  # status, content type, body
READY_S = 1.5  # a broker reports the loss of store or queue within 2 s, including the network


class Readiness:
    """Runs `check`, one at a time for all requests.

    A lost part may hang instead of failing. So a request waits for `READY_S` at most, and then fails. The check
    continues in the background: it ends by its own time-outs, and a new check would hang, too.
    """

    def __init__(self, check: Callable[[], Awaitable[None]], tasks: TaskOwner, events: EventLog) -> None:
        self._check = check
        self._tasks = tasks
        self._outage = events.outage("not-ready", "ready-again")
        self._checking: asyncio.Task[MemqError | None] | None = None

    async def prove(self) -> None:
        """Return when store and queue answer. Raises: the MemqError of the part that does not.

        Takes `READY_S` at most.
        """
        if self._checking is None or self._checking.done():
            self._checking = self._tasks.start(self._found(), "readiness")
        await asyncio.wait((self._checking,), timeout=READY_S)
        error: MemqError | None = UnreachableError(f"store or queue did not answer within {READY_S:g} s")
        if self._checking.done():
            error = self._checking.result()
        if error is not None:
            self._outage.failed(str(error))
            raise error
        self._outage.passed()

    async def _found(self) -> MemqError | None:
        try:
            await self._check()
        except MemqError as error:
            return error
        return None


class HttpPort:
    """Serves `/healthz`, `/readyz` and `/metrics`; `check` raises the failing part's error."""

    def __init__(
        self, network: Network, check: Callable[[], Awaitable[None]], registry: CollectorRegistry, events: EventLog
    ) -> None:
        self._network = network
        self._registry = registry
        self._listener: BoundPort | None = None
        self._tasks = TaskOwner(lambda error: events.error("http-failed", repr(error), error), events)
        self._readiness = Readiness(check, self._tasks, events)
        self._connections: dict[_HttpConnection, str] = {}  # oldest first, with the peer's host

    async def start(self, host: str, port: int) -> Address:
        """Listen; return the address. Raises: UnreachableError."""
        self._listener = await self._network.listen(host, port, self.connection)
        return self._listener.address

    @property
    def scheme(self) -> str:
        """`https` if its connections have TLS, else `http`."""
        return "https" if self._network.encrypted else "http"

    def connection(self) -> asyncio.BufferedProtocol:
        """Return the protocol of a new connection."""
        return _HttpConnection(self)

    async def stop(self) -> None:
        """Close the port and all connections."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.close()
        await self._tasks.stop()

    def joined(self, connection: _HttpConnection, host: str) -> None:
        """Take a connection. If there are too many, close the oldest one of the host that has most.

        One without a request goes first. So peers that send half requests do not keep a health check out.
        """
        if len(self._connections) >= CONNECTIONS_MAX:
            connection_to_close(self._connections, lambda each: not each.asked).close()
        self._connections[connection] = host

    def left(self, connection: _HttpConnection) -> None:
        """Forget a connection."""
        self._connections.pop(connection, None)

    def answer(self, connection: _HttpConnection, method: bytes, target: bytes) -> None:
        """Start to answer a request."""
        self._tasks.start(self._answer(connection, method, target.split(b"?")[0]), "http")

    async def _answer(self, connection: _HttpConnection, method: bytes, path: bytes) -> None:
        if method not in (b"GET", b"HEAD"):
            page = (405, TEXT, b"only GET and HEAD\n")
        elif path == b"/healthz":
            page = (200, TEXT, b"alive\n")
        elif path == b"/readyz":
            page = await self._ready()
        elif path == b"/metrics":
            page = (200, CONTENT_TYPE_LATEST, generate_latest(self._registry))
        else:
            page = (404, TEXT, b"there is /healthz, /readyz and /metrics\n")
        connection.answer(page, with_body=method != b"HEAD")

    async def _ready(self) -> Page:
        try:
            await self._readiness.prove()
        except MemqError as error:
            return 503, TEXT, f"not ready: {error}\n".encode()
        return 200, TEXT, b"ready\n"


class _HttpConnection(asyncio.BufferedProtocol):
    """One connection: bytes into h11, one request out of it."""

    def __init__(self, port: HttpPort) -> None:
        self._port = port
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)
        self._buffer = bytearray(4096)
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.asked = False  # whether a request is here

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the time-out of the connection."""
        self._transport = cast(asyncio.Transport, transport)
        self._deadline = asyncio.get_running_loop().call_later(2 * REQUEST_TIMEOUT_S, self._transport.abort)
        self._port.joined(self, host_of(transport.get_extra_info("peername")))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where received bytes go."""
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes; answer the first complete request."""
        if self.asked:
            return
        try:
            self._http.receive_data(bytes(self._buffer[:nbytes]))
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self.asked = True
            self.answer((400, TEXT, f"bad request: {error}\n".encode()), with_body=True)
            return
        if isinstance(event, h11.Request):
            self.asked = True
            self._port.answer(self, event.method, event.target)

    def eof_received(self) -> bool:
        """Keep the connection open for the answer to a request; close it without one.

        TLS has no half-open state.
        """
        encrypted = self._transport is not None and self._transport.get_extra_info("sslcontext") is not None
        return self.asked and not encrypted

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._port.left(self)

    def answer(self, page: Page, *, with_body: bool) -> None:
        """Send the answer and close."""
        if self._transport is None or self._transport.is_closing():
            return
        status, content_type, body = page
        head = (
            f"HTTP/1.1 {status} {_reason(status)}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self._transport.write(head.encode() + (body if with_body else b""))
        self._transport.close()

    def close(self) -> None:
        """Close at once."""
        self._port.left(self)
        if self._transport is not None:
            self._transport.abort()


def _reason(status: int) -> str:
    """Return the reason phrase of a status."""
    return {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}[
        status
    ]
