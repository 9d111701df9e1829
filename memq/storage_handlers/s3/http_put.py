"""Puts over HTTP without TLS: the event loop sends the caller's memory with the caller's checksum.

obstore reads each body once more for its CRC64NVME, and its threads compete for the interpreter's lock. Here the server
compares the body with the crc32c that the broker combined from checked blocks. So a put reads the bytes only once, when
the socket takes them. TLS stays with obstore, because encryption would block the event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPException, HTTPResponse, IncompleteRead
from io import BytesIO
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit
from urllib.request import getproxies

from memq.errors import UnreachableError
from memq.limits import KIB
from memq.runtime.runtime import Runtime
from memq.storage_handlers.s3.answers import StoreAnswer, refused
from memq.storage_handlers.s3.data_path import PutOrder
from memq.storage_handlers.s3.settings import Bucket, open_session, region_of

if TYPE_CHECKING:
    import boto3

_REPLY_BYTES_MAX = 64 * KIB
_UNSIGNED = "UNSIGNED-PAYLOAD"  # the signed headers include the checksum
_CLOSED = "the server closed the connection without an answer"
_HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys that never expire, and the region for which they sign."""

    key_id: str
    secret: str
    token: str
    region: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete answer to a PUT. `reusable`: its end is certain, so another request may follow it."""

    status: int
    etag: str
    body: bytes
    reusable: bool


def open_http_put(bucket: Bucket, runtime: Runtime) -> HttpPut | None:
    """Return the puts of a bucket; None for TLS, for a proxy, and for keys that expire.

    Raises: InvalidSettingError, as `open_session`.
    """
    endpoint = urlsplit(bucket.settings.endpoint)
    if endpoint.scheme != "http" or "http" in getproxies():
        return None
    session = open_session(bucket)
    keys = _lasting_keys(session, region_of(bucket, session))
    return None if keys is None else HttpPut(bucket, keys, runtime)


def _lasting_keys(session: boto3.session.Session, region: str) -> Keys | None:
    """Return the session's keys if boto3 never renews them: to renew keys may block for seconds."""
    from botocore.credentials import Credentials
    from botocore.exceptions import BotoCoreError

    try:
        found = session.get_credentials()
    except (BotoCoreError, OSError, ValueError):  # the data path reports it
        return None
    if type(found) is not Credentials:
        return None
    return Keys(found.access_key, found.secret_key, found.token or "", region)


class HttpPut:
    """Keeps idle connections to the server of one bucket, at most `connections_max`."""

    def __init__(self, bucket: Bucket, keys: Keys, runtime: Runtime) -> None:
        settings = bucket.settings
        endpoint = urlsplit(settings.endpoint)
        host = endpoint.netloc.removesuffix(":80")
        self._address = (endpoint.hostname or "", endpoint.port or 80)
        self._folder = endpoint.path.rstrip("/") + "/"
        if bucket.path_style:
            self._folder += f"{bucket.name}/"
        else:
            host = f"{bucket.name}.{host}"
            self._address = (f"{bucket.name}.{self._address[0]}", self._address[1])
        self._headers = {"host": host, "if-none-match": "*", "x-amz-content-sha256": _UNSIGNED}
        optional = {
            "x-amz-security-token": keys.token,
            "x-amz-server-side-encryption": settings.sse,
            "x-amz-server-side-encryption-aws-kms-key-id": settings.sse_kms_key_id,
            "x-amz-storage-class": settings.storage_class,
        }
        self._headers |= {name: value for name, value in optional.items() if value}
        self._keys = keys
        self._runtime = runtime
        self._connect_s = settings.connect_timeout_ms / 1000
        self._idle_max = settings.connections_max
        self._idle: list[_Connection] = []

    async def put(self, order: PutOrder) -> None:
        """See `DataPath.put`. A cancelled call ends its connection."""
        reply = await self._exchange(self._head(order), order.views)
        if reply.status != 200:
            raise refused(reply.status, reply.body.decode(errors="replace"))
        if not reply.etag:
            raise StoreAnswer(0, "", "an answer without ETag, which is not S3's")

    def close(self) -> None:
        """End the idle connections."""
        while self._idle:
            self._idle.pop().abort()

    async def _exchange(self, head: bytes, views: Sequence[memoryview]) -> Reply:
        """Send a request on an idle connection or a new one.

        The server may close an idle connection in the moment of its use. Then the caller retries, and counts it.
        """
        connection = self._idle.pop() if self._idle else await self._connect()
        try:
            reply = await connection.exchange(head, views)
        except BaseException:
            connection.abort()
            raise
        if reply.reusable and connection.is_quiet and len(self._idle) < self._idle_max:
            self._idle.append(connection)
        else:
            connection.abort()
        return reply

    async def _connect(self) -> _Connection:
        network = self._runtime.network
        try:
            found = await network.connect(*self._address, lambda: _Connection(self._idle), timeout_s=self._connect_s)
        except UnreachableError as error:
            raise StoreAnswer(0, "", str(error)[:300]) from error
        return cast(_Connection, found)

    def _head(self, order: PutOrder) -> bytes:
        headers = self._headers | {f"x-amz-meta-{name}": value for name, value in order.marks.items()}
        headers["x-amz-checksum-crc32c"] = b64encode(order.checksum.to_bytes(4, "big")).decode()
        path = f"{self._folder}{order.key}"
        headers["authorization"] = sign_put(path, headers, self._keys, self._runtime.clock.wall_ms())
        headers |= {"content-length": str(order.size), "content-type": "application/octet-stream"}
        lines = [f"PUT {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join(lines).encode("latin-1") + _HEAD_END


def sign_put(path: str, headers: dict[str, str], keys: Keys, now_ms: int) -> str:
    """Add the date to `headers`, and return AWS Signature Version 4 over path and headers.

    Keys of objects and names of buckets have only characters that need no escape (`check_key`).
    """
    moment = f"{datetime.fromtimestamp(now_ms / 1000, UTC):%Y%m%dT%H%M%SZ}"
    headers["x-amz-date"] = moment
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    canonical = f"PUT\n{path}\n\n{lines}\n{names}\n{_UNSIGNED}"
    scope = f"{moment[:8]}/{keys.region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{keys.secret}".encode()
    for part in (*scope.split("/"), text):
        key = hmac.digest(key, part.encode(), "sha256")
    return f"AWS4-HMAC-SHA256 Credential={keys.key_id}/{scope}, SignedHeaders={names}, Signature={key.hex()}"


def read_reply(data: bytes, *, ended: bool) -> Reply | None:
    """Return the answer in `data`, or None while it is incomplete.

    Raises: StoreAnswer for bytes that are no answer, and for an incomplete one after the end of the connection.
    """
    if _HEAD_END in data:
        response = HTTPResponse(cast(Any, _Received(data)), method="PUT")
        try:
            response.begin()
            if ended or response.chunked or response.length is not None:
                body = response.read()
                reusable = not (response.will_close or response.chunked or ended)
                return Reply(response.status, response.getheader("ETag") or "", body, reusable)
        except IncompleteRead:
            pass
        except HTTPException as error:
            raise StoreAnswer(0, "", f"an answer that is not HTTP: {error!r}"[:300]) from error
    if ended and not data:
        raise StoreAnswer(0, "", _CLOSED)
    if ended or len(data) > _REPLY_BYTES_MAX:
        raise StoreAnswer(0, "", f"an answer that has no end in {len(data)} bytes")
    return None


class _Received:
    """Received bytes, as `HTTPResponse` reads them."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> BytesIO:
        return BytesIO(self._data)


class _Connection(asyncio.BufferedProtocol):
    """One connection, with at most one request at a time. It leaves the list `idle` when it is lost."""

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(8 * KIB)
        self._received = b""
        self._reply: asyncio.Future[Reply] | None = None

    @property
    def is_quiet(self) -> bool:
        """Whether the connection is open and has sent all bytes."""
        transport = self._transport
        return transport is not None and not transport.is_closing() and not transport.get_write_buffer_size()

    async def exchange(self, head: bytes, views: Sequence[memoryview]) -> Reply:
        """Send a request, and wait for its answer. Raises: StoreAnswer."""
        if self._transport is None:
            raise StoreAnswer(0, "", _CLOSED)
        self._received, self._reply = b"", asyncio.get_running_loop().create_future()
        self._transport.writelines([head, *views])
        return await self._reply

    def abort(self) -> None:
        """End the connection at once; nothing more is sent."""
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.BufferedProtocol ----------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> bytearray:
        """Return where received bytes go."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Read the answer as soon as it is complete. Bytes that no request waits for end the connection."""
        if self._reply is None or self._reply.done():
            self.abort()
            return
        self._received += self._buffer[:nbytes]
        self._settle(ended=False)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the running request."""
        self._transport = None
        if self in self._idle:
            self._idle.remove(self)
        if self._reply is not None and not self._reply.done():
            self._settle(ended=True)

    def _settle(self, *, ended: bool) -> None:
        assert self._reply is not None, "bytes arrive for a request"
        try:
            reply = read_reply(self._received, ended=ended)
        except StoreAnswer as answer:
            self._reply.set_exception(answer)
            return
        if reply is not None:
            self._reply.set_result(reply)
