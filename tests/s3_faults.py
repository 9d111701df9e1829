"""An S3 server in memory that errs on demand, on the loop of the test.

It checks the checksums that come with a PUT, keeps what it was asked, and meets planned faults one request each.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from base64 import b64decode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest
from awscrt.checksums import crc32c, crc64nvme

from tests.s3_servers import BUCKET, S3Place

_Done = Literal["answer", "page", "close", "lost", "stall", "stall-done", "late"]
_Body = Literal["short", "cut", "changed", "other", "omit", "repeat", "endless", "slow"]
Kind = _Done | _Body
_HEAD_BYTES_MAX = 64 * 1024
PAGE = b"<html><p>Welcome</p></html>"
_REASONS = {200: "OK", 204: "No Content", 206: "Partial Content"}
_START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Fault:
    """What happens to one request.

    `answer`: refused with status and code, nothing done. `page`: a proxy's page with status 200, nothing done; it may
    have an ETag.
    `close`: the connection ends, nothing done. `lost`: done, and the connection ends without an answer. `stall`:
    nothing done, no answer while the client waits. `stall-done`: done, no answer. `cut`: the body ends early, with
    the connection. `short`: fewer bytes, as if they were all. `changed`: a byte is wrong. `other`: the bytes and
    marks of another object, where there is one. `omit`, `repeat`: a listing without its first entry, or with it
    twice. `endless`: a listing without its part that names the next page. `late`: refused, and yet done with the next
    request that comes. `slow`: the body comes in pieces, with pauses between.
    """

    kind: Kind
    status: int = 0
    code: str = ""
    etag: str = ""


@dataclass(frozen=True)
class Asked:
    """One request as it came."""

    method: str
    key: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes


@dataclass
class Stored:
    """One object."""

    body: bytes
    marks: dict[str, str]
    written: datetime


@dataclass
class FaultyS3:
    """The server. `faults` are met in order by the requests of a method; `always` by all of them, after that."""

    endpoint: str = ""
    objects: dict[str, Stored] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    always: dict[str, Fault] = field(default_factory=dict)
    put_if_absent: bool = True
    etag: str = ""  # of all objects; empty: of the form of S3, by their bytes
    shows_checksums: bool = True  # in answers to a PUT with a CRC32C
    page_keys_max: int = 1_000
    page_each_second: Fault | None = None  # each second request meets it
    writes: int = 0
    came: asyncio.Event = field(default_factory=asyncio.Event)  # a request has come
    delay: Callable[[str], float] = lambda method: 0.0  # seconds between what a request does and its answer
    late: list[Asked] = field(default_factory=list)  # what is done with the next request
    puts_under_way: int = 0
    puts_under_way_most: int = 0

    def plan(self, method: str, *faults: Fault) -> None:
        """Let the next requests of a method meet faults."""
        self.faults.setdefault(method, []).extend(faults)

    def count(self, method: str) -> int:
        """Return how many requests of a method have come; LIST is a GET of the bucket."""
        return sum(asked.method == method for asked in self.asked)

    def next_fault(self, method: str) -> Fault | None:
        """Return what the next request of a method meets."""
        if self.page_each_second is not None and len(self.asked) % 2:
            return self.page_each_second
        planned = self.faults.get(method)
        return planned.pop(0) if planned else self.always.get(method)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection until it ends."""
        try:
            while await self._serve_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left
        finally:
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        asked = await _read_request(reader, writer)
        self.asked.append(asked)
        self.came.set()
        while self.late:
            self.act(self.late.pop(0))
        fault = self.next_fault(asked.method) or Fault("answer")
        if fault.kind == "close":
            return False
        if fault.kind == "stall":
            await reader.read()  # until the client leaves
            return False
        if fault.kind == "late":
            self.late.append(asked)
        if fault.kind == "page":
            status, headers, body = 200, {"Content-Type": "text/html"}, PAGE
            headers |= {"ETag": fault.etag} if fault.etag else {}
        elif fault.status:
            status, headers, body = refusal(fault.status, fault.code)
        else:
            status, headers, body = self.act(self._instead(asked) if fault.kind == "other" else asked)
        if delay_s := self.delay(asked.method):
            await self._hold(asked.method, delay_s)
        if fault.kind == "lost":
            return False
        if fault.kind == "stall-done":
            await reader.read()
            return False
        body = _spoilt(fault.kind, body)
        pauses = SLOW_PIECES if fault.kind == "slow" else 0
        await _write_answer(writer, asked.method, status, headers, body, cut=fault.kind == "cut", pauses=pauses)
        return fault.kind != "cut"

    def _instead(self, asked: Asked) -> Asked:
        """Return the same question about another object."""
        return replace(asked, key=next((key for key in self.objects if key != asked.key), asked.key))

    async def _hold(self, method: str, delay_s: float) -> None:
        put = method == "PUT"
        self.puts_under_way += put
        self.puts_under_way_most = max(self.puts_under_way_most, self.puts_under_way)
        try:
            await passing(delay_s)
        finally:
            self.puts_under_way -= put

    def act(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        """Do what a sound server does."""
        match asked.method:
            case "PUT":
                return self._put(asked)
            case "GET" | "HEAD":
                return self._get(asked)
            case "DELETE":
                self.objects.pop(asked.key, None)
                return 204, {}, b""
            case "LIST":
                return 200, {}, self._listing(asked)
        return refusal(501, "NotImplemented")

    def _put(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        if not _fits_checksum(asked):
            return refusal(400, "BadDigest")
        if self.put_if_absent and asked.headers.get("if-none-match") == "*" and asked.key in self.objects:
            return refusal(412, "PreconditionFailed")
        marks = {name: value for name, value in asked.headers.items() if name.startswith("x-amz-meta-")}
        self.writes += 1
        self.objects[asked.key] = Stored(asked.body, marks, _START + timedelta(seconds=self.writes))
        headers = {"ETag": self._etag(asked.body)}
        if self.shows_checksums and (sent := asked.headers.get("x-amz-checksum-crc32c")):
            headers["x-amz-checksum-crc32c"] = sent
        return 200, headers, b""

    def _etag(self, body: bytes) -> str:
        return self.etag or f'"{crc32c(body):032x}"'

    def _get(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        stored = self.objects.get(asked.key)
        if stored is None:
            return refusal(404, "NoSuchKey")
        written = stored.written.strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {"ETag": self._etag(stored.body), "Last-Modified": written, **stored.marks}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", asked.headers.get("range", ""))
        if wanted is None:
            return 200, headers, stored.body
        first, last = int(wanted[1]), min(int(wanted[2]), len(stored.body) - 1)
        if first >= len(stored.body):
            return refusal(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {first}-{last}/{len(stored.body)}"
        return 206, headers, stored.body[first : last + 1]

    def _listing(self, asked: Asked) -> bytes:
        prefix, most = asked.query.get("prefix", [""])[0], int(asked.query.get("max-keys", ["1000"])[0])
        after = asked.query.get("continuation-token", asked.query.get("start-after", [""]))[0]
        keys = sorted(key for key in self.objects if key.startswith(prefix) and key > after)
        shown = keys[: min(most, self.page_keys_max)]
        more = len(keys) > len(shown)
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key].body)}</Size><ETag>1</ETag>"
            f"<LastModified>{self.objects[key].written:%Y-%m-%dT%H:%M:%S.000Z}</LastModified></Contents>"
            for key in shown
        )
        token = f"<NextContinuationToken>{shown[-1]}</NextContinuationToken>" if more else ""
        head = f"<IsTruncated>{str(more).lower()}</IsTruncated><KeyCount>{len(shown)}</KeyCount>{token}"
        return f"<ListBucketResult>{head}{contents}</ListBucketResult>".encode()


SLOW_PIECES = 4
SLOW_PAUSE_S = 0.02


def _spoilt(kind: Kind, body: bytes) -> bytes:
    """Return a body as a fault of its kind leaves it."""
    match kind:
        case "changed":
            return bytes([body[0] ^ 1]) + body[1:]
        case "short":
            return body[:-1]
        case "omit":
            return re.sub(rb"<Contents>.*?</Contents>", b"", body, count=1)
        case "endless":
            return re.sub(rb"<IsTruncated>.*?(?=<Contents>|</List)", b"", body)
        case "repeat":
            return re.sub(rb"(<Contents>.*?</Contents>)", rb"\1\1", body, count=1)
    return body


ACCEPT_TURNS = 3  # of the loop, until the server knows of a connection that it accepted


@asynccontextmanager
async def faulty_s3(tls: ssl.SSLContext | None = None) -> AsyncIterator[FaultyS3]:
    """Serve on a free port while the block runs; clients of this process trust its endpoint."""
    store = FaultyS3()
    running: dict[asyncio.Task[None], asyncio.WriteTransport] = {}
    over = False

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if over:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(store.serve(reader, writer))
        running[task] = writer.transport
        task.add_done_callback(running.pop)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=1 << 20, ssl=tls)  # noqa: TID251 - a server for tests
    host, port = server.sockets[0].getsockname()
    store.endpoint = f"{'https' if tls else 'http'}://{host}:{port}"
    closed = asyncio.create_task(server.wait_closed())  # begun before the close, it waits for handshakes, too
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("MEMQ_S3_TRUSTED_ENDPOINTS", store.endpoint)
            yield store
    finally:
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)
        server.close()
        over = True
        tasks = dict(running)
        for task, transport in tasks.items():
            task.cancel()
            transport.abort()  # a task that has not begun does nothing when it is cancelled; TLS waits for a goodbye
        await asyncio.gather(*tasks, return_exceptions=True)
        await closed


async def passing(delay_s: float) -> None:
    """Return after that time: for a peer that takes its time or has a pace, never to wait for something."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    timer = loop.call_later(delay_s, over.set_result, None)
    try:
        await over
    finally:
        timer.cancel()


def place_of(server: FaultyS3, **settings: object) -> S3Place:
    """Return how to open a store on it, with times that suit a test."""
    return S3Place(server.endpoint, settings={"deadline_ms": 20_000, "request_timeout_ms": 5_000, **settings})


def refusal(status: int, code: str) -> tuple[int, dict[str, str], bytes]:
    """Return S3's answer that something is wrong."""
    return status, {}, f"<Error><Code>{code}</Code><Message>as planned</Message></Error>".encode()


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    assert len(head) < _HEAD_BYTES_MAX
    first, *lines = head.split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    parts = urlsplit(target)
    bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
    assert bucket == BUCKET
    listing = method == "GET" and not key
    return Asked("LIST" if listing else method, key, parse_qs(parts.query), headers, body)


async def _write_answer(
    writer: asyncio.StreamWriter,
    method: str,
    status: int,
    headers: dict[str, str],
    body: bytes,
    *,
    cut: bool,
    pauses: int = 0,
) -> None:
    lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Refused')}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if status != 204:
        lines.append(f"Content-Length: {len(body)}")
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    if method != "HEAD":
        whole = body[: len(body) // 2] if cut else body
        size = -(-len(whole) // (pauses + 1))
        for at in range(0, len(whole), max(size, 1)):
            await passing(SLOW_PAUSE_S if at else 0)
            writer.write(whole[at : at + size])
    await writer.drain()


def _fits_checksum(asked: Asked) -> bool:
    """Whether the body fits the checksum that came with it; one must come."""
    sent32, sent64 = asked.headers.get("x-amz-checksum-crc32c"), asked.headers.get("x-amz-checksum-crc64nvme")
    if sent32 is not None:
        return bool(int.from_bytes(b64decode(sent32), "big") == crc32c(asked.body))
    if sent64 is not None:
        return bool(int.from_bytes(b64decode(sent64), "big") == crc64nvme(asked.body))
    return False
