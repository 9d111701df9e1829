"""Hostile requests to the ports that speak HTTP: none may crash a port, hang over a deadline, or get the status 500."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from hypothesis import strategies as st

from memq.runtime.network import Address

CORPUS = Path(__file__).parent / "golden" / "hostile_http.json"
ANSWER_S = 0.5  # for an answer, then the client closes its side
CLOSE_S_MAX = 5.0  # after the client has closed its side
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
ALLOWED = frozenset({100, 200, 307, 400, 401, 403, 404, 405, 413, 414, 421, 431, 501, 502, 503})
PATHS = (
    b"/",
    b"/healthz",
    b"/readyz",
    b"/metrics",
    b"/assets/app.js",
    b"/api/events",
    b"/api/topics/clicks",
    b"/api/search",
    b"/api/tail",
    b"/api/letters",
    b"/api/object",
    b"/api/block",
    b"/api/findings",
    b"/api/findings/x/verify",
    b"/api/findings/x/acknowledge",
)
FIELDS = ("topic", "span", "group", "key", "tags", "where", "first_ms", "end_ms", "rate", "block", "first", "format")
VALUES = (
    b"",
    b"0",
    b"-1",
    b"9999999999999999",
    b"1" * 400,
    b"%00",
    b"%ff%fe",
    b"%F0%9F%98%80",
    b"%",
    b"%zz",
    b"..%2f..%2fetc%2fpasswd",
    b"clicks",
    b"_memq_audit",
    b"json",
    b"0x",
    b"0xzz",
    b"value.a == 1",
    b"((((((((((((((((",
    b"\xff",
    b"memq/topics/clicks/00000000/aa/2026-01-01/00/00000-0000000001-0000000000000000",
)
HEADERS = (
    b"Host: 127.0.0.1",
    b"Host: ",
    b"Host: evil.example",
    b"Host: [::1",
    b"Host: 127.0.0.1\r\nHost: localhost",
    b"Range: bytes=0-",
    b"Range: bytes=-1",
    b"Range: bytes=5-1,0-0,0-0",
    b"Range: bytes=0-99999999999999999999",
    b"Content-Length: 5",
    b"Content-Length: -1",
    b"Content-Length: 99999999999999999999999",
    b"Content-Length: 1\r\nContent-Length: 2",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked\r\nContent-Length: 3",
    b"Accept-Encoding: gzip;q=nan, *;q=9",
    b"Authorization: Basic \xff\xfe",
    b"Authorization: Basic !!!!",
    b"Authorization: Basic /////w==",
    b"Authorization: Bearer \xc3\xa9",
    b"Authorization: ",
    b"Connection: close",
    b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x",
    b"Connection: upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA",
    b"Expect: 100-continue",
    b"Expect: nonsense",
    b"Last-Event-ID: \xff",
    b"Last-Event-ID: x-99999999999999999999",
    b"Content-Type: application/json",
    b"Origin: http://evil.example",
    b"Sec-Fetch-Site: cross-site",
    b"Cookie: " + b"a=b; " * 100,
    b"X: " + b"y" * 20_000,
    b" folded: x",
    b"no colon",
    b"nul\x00: x",
    b"bare: \rx",
    b": empty",
)
_value = st.one_of(st.sampled_from(VALUES), st.binary(max_size=20))


def _target(path: bytes, query: Sequence[tuple[str, bytes]], suffix: bytes) -> bytes:
    fields = b"&".join(name.encode() + b"=" + value for name, value in query)
    return path + suffix + (b"?" + fields if query else b"")


def _request(method: bytes, target: bytes, version: bytes, headers: Sequence[bytes], end: bytes, body: bytes) -> bytes:
    return end.join([b" ".join((method, target, version)), *headers, b"", b""]) + body


_targets = st.builds(
    _target,
    st.sampled_from(PATHS),
    st.lists(st.tuples(st.sampled_from(FIELDS), _value), max_size=4),
    st.sampled_from([b"", b"", b"", b"/", b"/..", b"%2f", b"//", b"\\", b"#x", b";x"]),
)
_requests = st.builds(
    _request,
    st.sampled_from(
        [b"GET", b"GET", b"GET", b"HEAD", b"POST", b"PUT", b"OPTIONS", b"CONNECT", b"PRI", b"get", b"G\x00T"]
    ),
    st.one_of(_targets, st.sampled_from([b"*", b"http://evil.example/", b"", b"x", b"/" + b"a" * 20_000])),
    st.sampled_from([b"HTTP/1.1", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"HTTP/9", b""]),
    st.lists(st.sampled_from(HEADERS), max_size=5).map(lambda more: [b"Host: 127.0.0.1", *more]),
    st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r"]),
    st.one_of(st.just(b""), st.sampled_from([b"{}", b"5\r\nhello\r\n0\r\n\r\n", b"fffffffffffffffff\r\n", b"-1\r\n"])),
)


@st.composite
def _changed(draw: st.DrawFn) -> bytes:
    """Change a few bytes of a request, cut it, or repeat it."""
    data = bytearray(draw(_requests))
    for _ in range(draw(st.integers(0, 3))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    cut = draw(st.sampled_from([len(data), len(data), draw(st.integers(1, len(data)))]))
    return bytes(data[:cut]) * draw(st.sampled_from([1, 1, 1, 2, 20]))


requests = st.one_of(_requests, _changed())


def corpus() -> Iterator[bytes]:
    """Yield the kept requests: bytes as latin-1."""
    for text in json.loads(CORPUS.read_text(encoding="utf-8")):
        yield text.encode("latin-1")


async def status_of(address: Address, data: bytes, pieces: int = 1) -> int:
    """Send bytes in pieces; return the status of the first answer, 0 without one.

    The port must close in CLOSE_S_MAX once the client has closed its side.
    """
    reader, writer = await asyncio.open_connection(*address)  # noqa: TID251 - a bare peer
    answer = bytearray()
    try:
        size = -(-len(data) // pieces) or 1
        for at in range(0, len(data), size):
            writer.write(data[at : at + size])
            await writer.drain()
        with suppress(TimeoutError):  # a stream of events never ends
            async with asyncio.timeout(ANSWER_S):
                while more := await reader.read(1 << 16):
                    answer += more
        writer.write_eof()
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                while await reader.read(1 << 16):
                    pass
        except TimeoutError:
            raise AssertionError(f"{data[:200]!r} keeps its connection open for {CLOSE_S_MAX:g} s") from None
    except OSError:  # the port has closed the connection
        pass
    finally:
        writer.close()
    found = STATUS.match(answer)
    assert found or not answer, f"{data[:200]!r} got {bytes(answer[:200])!r}"
    return int(found[1]) if found else 0


async def check(address: Address, hostile: Sequence[bytes], sound: bytes) -> None:
    """Send requests at the same time; each has a status that is allowed, and a sound request is answered after them."""
    statuses = await asyncio.gather(*(status_of(address, data, 1 + number % 3) for number, data in enumerate(hostile)))
    for data, status in zip(hostile, statuses, strict=True):
        assert status in ALLOWED or not status, f"{data[:200]!r} got the status {status}"
    assert await sound_status(address, sound) == 200


async def sound_status(address: Address, sound: bytes) -> int:
    """Return the status of a sound request, whose answer may be late on a busy machine."""
    reader, writer = await asyncio.open_connection(*address)  # noqa: TID251 - a bare peer
    writer.write(sound)
    try:
        found = STATUS.match(await asyncio.wait_for(reader.readline(), CLOSE_S_MAX))
    finally:
        writer.close()
    return int(found[1]) if found else 0
