"""The network: the port `Network`, its implementation on TCP sockets, and addresses.

No other file of the package opens sockets. The simulation has its own implementation of the port.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import re
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar, cast

from memq.errors import DeniedError, InvalidRequestError, MemqError, UnreachableError
from memq.runtime.tls import Contexts, Login, Tls, followed_client, login_of, tls_of_environment, token_of

HANDSHAKE_S = 10.0  # for the handshake of TLS; an end of TLS that gets no answer takes no longer either
FILES_HINT = "raise the limit on open files of this process (ulimit -n)"
Address = tuple[str, int]
ProtocolFactory = Callable[[], asyncio.BufferedProtocol]
RefusedHandshake = Callable[[str, str], None]
ConnectionT = TypeVar("ConnectionT")


class BoundPort(Protocol):
    """A bound port. `close` refuses new connections; open connections stay open."""

    @property
    def address(self) -> Address:
        """The address that is bound, with the real port."""
        ...

    def close(self) -> None:
        """Stop accepting."""
        ...


class Network(Protocol):
    """Streams of bytes between addresses, by asyncio's transports and buffered protocols.

    Promises: bytes arrive in order and unchanged, or the connection is lost.
    Non-promises: a lost connection may be noticed late or never; written bytes may be lost with it.
    Raises: UnreachableError when no process listens at the address, or none answers within the time-out. Only in the
    first case is its attribute `refused` True.
    """

    @property
    def encrypted(self) -> bool:
        """Whether its listeners have TLS."""
        ...

    def token(self) -> str:
        """Return the token by which this side identifies itself to brokers; "" without one."""
        ...

    def login(self) -> Login | None:
        """Return the user and password by which this side logs in to brokers; None without them."""
        ...

    async def listen(self, host: str, port: int, factory: ProtocolFactory) -> BoundPort:
        """Bind `host:port` (port 0: any free one) and make a protocol for each connection."""
        ...

    async def connect(
        self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float = 10.0
    ) -> asyncio.BufferedProtocol:
        """Connect and return the protocol, after its `connection_made`."""
        ...


class SocketListener:
    """A listening TCP socket of the running event loop.

    With `tls`, `refused` gets the peer and the error of each handshake that fails. The event loop itself drops these
    errors. So the listener accepts without TLS, and begins the handshake itself.
    """

    def __init__(
        self, factory: ProtocolFactory, tls: ssl.SSLContext | None = None, refused: RefusedHandshake = lambda *_: None
    ) -> None:
        self._factory = factory
        self._tls = tls
        self._refused = refused
        self._server: asyncio.Server | None = None
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._address = ("", 0)
        self._closed = False

    async def bind(self, host: str, port: int) -> None:
        """Listen. Raises: OSError, ValueError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._protocol, host, port, backlog=4096)
        bound = self._server.sockets[0].getsockname()
        self._address = bound[0], bound[1]

    @property
    def address(self) -> Address:
        """See `BoundPort.address`."""
        return self._address

    @property
    def sockets(self) -> Sequence[socket.socket]:
        """The listening sockets, for their options; none before `bind`."""
        return self._server.sockets if self._server is not None else ()

    def close(self) -> None:
        """See `BoundPort.close`.

        asyncio leaves a connection open that it has accepted and not yet given to the server when that is closed.
        So this accepts no more, and closes the server in the next turn of the loop; such a connection is aborted.
        """
        if self._server is None or self._closed:
            return
        self._closed = True
        loop = self._server.get_loop()
        for listening in self._server.sockets:
            with suppress(NotImplementedError):  # of a loop without readers, on Windows
                loop.remove_reader(listening)
        loop.call_soon(self._server.close)
        for handshake in self._handshakes:
            handshake.cancel()

    def _protocol(self) -> asyncio.BaseProtocol:
        if self._closed:
            return _Accepted(lambda accepted: accepted.close())
        return self._factory() if self._tls is None else _Accepted(self._begin)

    def _begin(self, accepted: socket.socket) -> None:
        handshake = asyncio.get_running_loop().create_task(self._shake_hands(accepted))
        self._handshakes[handshake] = None
        handshake.add_done_callback(self._handshakes.pop)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        """Make the protocol of a connection after its handshake of TLS."""
        peer = peer_text(accepted.getpeername()) if _is_connected(accepted) else "a peer that left"
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._factory,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=HANDSHAKE_S,
            )
        except OSError as error:
            accepted.close()
            if not isinstance(error, ConnectionResetError):  # a check of the port sends nothing, and closes
                self._refused(peer, tls_reason(error) or f"no end after {HANDSHAKE_S:g} s")


class _Accepted(asyncio.Protocol):
    """An accepted connection, before any byte is read: `take` gets its socket."""

    def __init__(self, take: Callable[[socket.socket], None]) -> None:
        self._take = take

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`. The transport closes its own descriptor, and the connection stays open."""
        accepted = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        accepted.setblocking(False)
        cast(asyncio.Transport, transport).abort()
        self._take(accepted)


def _is_connected(accepted: socket.socket) -> bool:
    with suppress(OSError):
        return bool(accepted.getpeername())
    return False


class SocketNetwork:
    """TCP by the running event loop, with TLS if it has contexts.

    `server` is that of its listeners, `client` returns that of each connection that it makes. `refused` gets peer and
    reason of each handshake that its listeners refuse.
    """

    def __init__(
        self,
        *,
        server: ssl.SSLContext | None = None,
        client: Contexts | None = None,
        token: Callable[[], str] = str,
        login: Callable[[], Login | None] = lambda: None,
        refused: RefusedHandshake = lambda *_: None,
    ) -> None:
        self._server = server
        self._refused = refused
        self._client = client
        self._token = token
        self._login = login

    @property
    def encrypted(self) -> bool:
        """See `Network.encrypted`."""
        return self._server is not None

    def token(self) -> str:
        """See `Network.token`. It is read again for each connection. Raises: InvalidSettingError."""
        return self._token()

    def login(self) -> Login | None:
        """See `Network.login`. It is read again for each connection. Raises: InvalidSettingError."""
        return self._login()

    async def listen(self, host: str, port: int, factory: ProtocolFactory) -> SocketListener:
        """See `Network.listen`. The backlog admits thousands of clients at once."""
        listener = SocketListener(factory, self._server, self._refused)
        try:
            await listener.bind(host, port)
        except (OSError, ValueError) as error:
            raise _listen_error(format_address((host, port)), error) from error
        return listener

    async def connect(
        self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float = 10.0
    ) -> asyncio.BufferedProtocol:
        """See `Network.connect`."""
        loop, where = asyncio.get_running_loop(), format_address((host, port))
        tls = self._client() if self._client is not None else None
        try:
            async with asyncio.timeout(timeout_s):
                limit_s = HANDSHAKE_S if tls else None
                _, protocol = await loop.create_connection(factory, host, port, ssl=tls, ssl_shutdown_timeout=limit_s)
        except TimeoutError as error:
            raise UnreachableError(f"{where} did not answer in {timeout_s:g} s") from error
        except ssl.SSLError as error:
            raise _handshake_error(where, error) from error
        except (OSError, ValueError) as error:
            full = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)  # of this process
            hint = FILES_HINT if full else ""
            unreachable = UnreachableError(f"can't reach {where[:300]}: {_cause(error)}", hint=hint)
            unreachable.refused = _is_refused(error)
            raise unreachable from error
        return protocol


def client_network(tls: Tls | None = None) -> SocketNetwork:
    """Return the network of a client: TLS by `tls`, else by the variables `MEMQ_TLS_…`, else none.

    Raises: InvalidSettingError when the files can't be loaded.
    """
    tls = tls or tls_of_environment()
    if tls is None:
        return SocketNetwork()
    return SocketNetwork(client=followed_client(tls), token=lambda: token_of(tls), login=lambda: login_of(tls))


def tls_reason(error: Exception | None) -> str:
    """Return the reason of an error of TLS as text; "" for another error."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or str(error)).lower().replace("_", " ") if isinstance(error, ssl.SSLError) else ""


def _handshake_error(where: str, error: ssl.SSLError) -> UnreachableError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return UnreachableError(
            f"the certificate of {where} is refused: {error.verify_message}",
            hint="ca_file names the authority that made it, and the certificate names the host",
        )
    if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNEXPECTED_MESSAGE", "RECORD_LAYER_FAILURE"):
        return UnreachableError(f"{where} does not speak TLS", hint="connect without TLS, or give the broker [tls]")
    return UnreachableError(f"no TLS with {where}: {tls_reason(error)}")


def _is_refused(error: OSError | ValueError) -> bool:
    """Whether all addresses of the host refused: asyncio merges the errors of several into one text."""
    numbers = re.findall(r"\[Errno (-?\d+)\]", str(error))
    return bool(numbers) and all(int(number) == errno.ECONNREFUSED for number in numbers)


def _cause(error: OSError | ValueError) -> str:
    """Return the operating system's text for the error, without the event loop's additions.

    A ValueError means that asyncio rejected the host name: a part of it is empty or has 64 letters, or it has a NUL.
    """
    if isinstance(error, ValueError):
        return "no host has such a name"
    if error.errno is not None and error.errno > 0:  # errors of name look-ups have negative numbers
        return os.strerror(error.errno)
    return error.strerror or str(error)


def _listen_error(where: str, error: OSError | ValueError) -> MemqError:
    """Return the error with its reason and hint. The event loop's own text would repeat the address."""
    number = error.errno if isinstance(error, OSError) else None
    kind: type[MemqError] = UnreachableError
    if number == errno.EADDRINUSE:
        kind = InvalidRequestError
        reason, hint = "another process listens there", "choose another port, or 0 for any free one"
    elif number == errno.EACCES:
        kind = DeniedError
        reason, hint = "this user may not listen there", "choose a port from 1024 on"
    elif number == errno.EADDRNOTAVAIL:
        reason, hint = "this machine has no such address", "choose one of this machine's, or 0.0.0.0"
    else:
        reason, hint = _cause(error), "choose another address or port"
    return kind(f"can't listen on {where[:300]}: {reason}", hint=hint)


def parse_address(text: str, default_port: int = 9876) -> Address:
    """Parse `host`, `host:port` or `[v6]:port`.

    Raises: UnreachableError when the port is not a number from 0 to 65535, or the text has a scheme, a path or a blank.
    So it does for a port alone.
    """
    if "/" in text:
        raise UnreachableError(f"bad address '{text[:120]}'", hint="write HOST:PORT, without a scheme or a path")
    host, separator, port = text.strip().rpartition(":")
    if len((host if separator else port).split()) > 1:
        raise UnreachableError(f"bad address '{text[:120]}'", hint="write HOST:PORT, several with commas between them")
    if not separator and port.isdigit():  # the system takes 9876 for the address 0.0.38.148
        raise UnreachableError(f"address '{text[:120]}' has no host", hint="write HOST:PORT, as 127.0.0.1:9876")
    if not separator or (host.count(":") and not host.endswith("]")):
        return text.strip().strip("[]"), default_port
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise UnreachableError(f"bad port '{port[:20]}' in address '{text[:120]}'", hint="write HOST:PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def peer_text(name: object) -> str:
    """Return the peer's name from a transport's `peername`: an address, or other text of the network."""
    if isinstance(name, tuple) and len(name) >= 2:
        return format_address((str(name[0]), int(name[1])))
    return str(name)


def host_of(name: object) -> str:
    """Return the peer's host from a transport's `peername`, or other text of the network."""
    return str(name[0]) if isinstance(name, tuple) and name else str(name)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def connection_to_close(connections: Mapping[ConnectionT, str], is_idle: Callable[[ConnectionT], bool]) -> ConnectionT:
    """Return the connection that makes room for a new one.

    `connections` has the host of each, oldest first, and is not empty. It is the oldest one of the host that has most,
    and an idle one if there is any. So peers that connect and ask nothing do not keep others out.
    """
    counts = Counter(connections.values())
    found = [each for each in connections if is_idle(each)] or list(connections)
    return max(found, key=lambda each: counts[connections[each]])  # the first of several


def format_address(address: Address) -> str:
    """Write an address as `host:port`, with brackets around an IPv6 host."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
