"""One bounded GET request by HTTPS, for documents that an operator names.

Redirects are not followed, and proxies are not used: the certificate that is checked is that of the named host.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import ssl
from typing import cast
from urllib.parse import SplitResult, urlsplit

from memq.errors import CorruptDataError, InvalidSettingError, MemqError, TooLargeError, UnreachableError
from memq.limits import KIB
from memq.runtime.network import SocketNetwork
from memq.runtime.tls import Contexts

PORT = 443
_PIECE_BYTES = 16 * KIB


def https_url(name: str, url: str) -> SplitResult:
    """Return the parts of the URL in a setting. Raises: InvalidSettingError."""
    parts = urlsplit("")
    try:
        parts = urlsplit(url)
        sound = parts.scheme == "https" and parts.hostname and parts.port != 0 and parts.username is None
    except ValueError:
        sound = False
    if not sound or not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidSettingError(f"{name} is no URL of HTTPS", hint="write https://HOST/PATH, without a user")
    return parts


def https_context(ca_file: str) -> ssl.SSLContext:
    """Return a context that checks certificates and hosts, by the authorities in a file.

    "" names the authorities of the system.

    Raises: InvalidSettingError.
    """
    try:
        return ssl.create_default_context(cafile=ca_file or None)  # TLS 1.2 or later
    except (OSError, ValueError) as error:
        raise InvalidSettingError(f"can't read the authorities in '{ca_file}'", hint="it is a PEM file") from error


async def https_get(url: SplitResult, contexts: Contexts, *, bytes_max: int, timeout_s: float) -> bytes:
    """Return the content at a URL, which answers with status 200.

    Raises: UnreachableError; TooLargeError over `bytes_max` bytes with the head; CorruptDataError for another status,
    and for bytes that are no whole answer of HTTP.
    """
    host = url.hostname or ""
    received = _Received(bytes_max)
    try:
        async with asyncio.timeout(timeout_s):
            await SocketNetwork(client=contexts).connect(host, url.port or PORT, lambda: received, timeout_s=timeout_s)
            path = (url.path or "/") + (f"?{url.query}" if url.query else "")
            head = f"GET {path} HTTP/1.1\r\nHost: {url.netloc}\r\nAccept: application/json\r\nConnection: close\r\n\r\n"
            received.send(head.encode("ascii"))
            return _content(await received.whole)
    except TimeoutError as error:
        raise UnreachableError(f"'{host}' did not answer in {timeout_s:g} s") from error
    finally:
        received.abort()


def _content(answer: bytes) -> bytes:
    """Return the body of an answer of HTTP. Raises: CorruptDataError."""
    parsed = http.client.HTTPResponse(cast("object", _Answer(answer)), method="GET")  # type: ignore[arg-type]
    try:
        parsed.begin()
        if parsed.status != http.client.OK:
            raise CorruptDataError(f"the answer has status {parsed.status}, 200 is wanted")
        return parsed.read()
    except (http.client.HTTPException, ValueError, OSError) as error:
        raise CorruptDataError(f"the answer is no whole answer of HTTP: {type(error).__name__}") from error


class _Answer:
    """Received bytes, as `http.client` reads a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


class _Received(asyncio.BufferedProtocol):
    """Collects the bytes of a connection until its end, at most `bytes_max`."""

    def __init__(self, bytes_max: int) -> None:
        self.whole: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._data = bytearray()
        self._bytes_max = bytes_max
        self._piece = bytearray(_PIECE_BYTES)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._piece

    def buffer_updated(self, nbytes: int) -> None:
        self._data += memoryview(self._piece)[:nbytes]
        if len(self._data) > self._bytes_max:
            self._end(TooLargeError(f"the answer has more than {self._bytes_max} bytes"))
            self.abort()

    def eof_received(self) -> bool:
        self._end(None)
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(UnreachableError(f"the connection is lost: {exc}") if exc else None)

    def send(self, data: bytes) -> None:
        assert self._transport is not None, "no connection"
        self._transport.write(data)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self.whole.cancel()

    def _end(self, error: MemqError | None) -> None:
        if self.whole.done():
            return
        if error is None:
            self.whole.set_result(bytes(self._data))
        else:
            self.whole.set_exception(error)
