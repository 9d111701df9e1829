"""A proxy before a real S3 server that errs on demand: before a request, after it, or in the body.

Signatures hold: requests are sent on as they came, with the host that they were signed for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

from tests.s3_faults import refusal

Phase = Literal["before", "after", "body"]
Harm = Literal["answer", "close", "changed", "short", "cut", "hang", "trickle"]
METHODS = ("PUT", "GET", "HEAD", "DELETE", "LIST")
TRICKLE_S = 0.1  # between two bytes
_HEAD_BYTES_MAX = 64 * 1024


@dataclass(frozen=True)
class PlannedFault:
    """The fault of one request.

    `before`: nothing is done, `after`: it is done; then it is refused with status and code (`answer`), or the
    connection ends (`close`). `body`: a byte of the answer is wrong, bytes are missing, or the connection ends in it.
    `hang`: nothing comes (of the body: no second half) while the client waits. `trickle`: the body comes byte by byte.
    """

    phase: Phase
    harm: Harm
    status: int = 0
    code: str = ""

    def __str__(self) -> str:
        return "-".join(str(part) for part in (self.phase, self.harm, self.status, self.code) if part)


REFUSALS = [
    *(PlannedFault(phase, "answer", 500, "InternalError") for phase in ("before", "after")),
    *(PlannedFault(phase, "answer", 503, "SlowDown") for phase in ("before", "after")),
    *(PlannedFault(phase, "answer", 400, code) for phase in ("before", "after") for code in ("", "RequestTimeout")),
    *(PlannedFault(phase, "answer", status) for phase in ("before", "after") for status in (403, 404)),
    *(PlannedFault(phase, "close") for phase in ("before", "after")),
]
OF_BODIES = [PlannedFault("body", harm) for harm in ("short", "cut", "changed")]
HANGS = [PlannedFault(phase, "hang") for phase in ("before", "after")]
HANGS_OF_BODIES = [PlannedFault("body", harm) for harm in ("hang", "trickle")]


def harms_of(method: str) -> list[PlannedFault]:
    """Return all that requests of a method can meet.

    The answer to a HEAD has no body: its 403 and 404 are the truth as far as a client can know.
    """
    if method == "HEAD":
        return [harm for harm in REFUSALS if harm.status not in (403, 404)]
    return [*REFUSALS, *OF_BODIES] if method == "GET" else list(REFUSALS)


@dataclass
class FaultProxy:
    """The proxy. `choose` returns the fault of a request, by its method and whether it requests a range."""

    upstream: tuple[str, int]
    choose: Callable[[str, bool], PlannedFault | None] = lambda method, ranged: None
    endpoint: str = ""
    met: dict[tuple[str, str], int] = field(default_factory=dict)  # by method and harm, how often
    _harmed: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection until it ends."""
        try:
            while await self._serve_one(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # one of the two sides left
        finally:
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, headers = await _read_head(reader)
        if headers.pop("expect", ""):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        method, target, _ = first.split(" ")
        kind = "LIST" if method == "GET" and "list-type=2" in target else method
        harm = self.choose(kind, "range" in headers)
        if harm is not None:
            self.met[kind, str(harm)] = self.met.get((kind, str(harm)), 0) + 1
        answer = None if harm is not None and harm.phase == "before" else await self._forward(first, headers, body)
        if harm is not None and harm.harm in ("hang", "trickle"):
            if harm.phase == "body" and answer is not None:
                await _answer_slowly(reader, writer, answer, trickle=harm.harm == "trickle")
            await reader.read()  # until the client leaves
            return False
        if harm is None:
            assert answer is not None
            return _answer(writer, method, *answer)
        if harm.harm == "close":
            return False
        if harm.harm == "answer":
            status, _, text = refusal(harm.status, harm.code)
            return _answer(writer, method, f"HTTP/1.1 {status} Refused", {}, text)
        assert answer is not None
        line, found, content = answer
        if not line.startswith("HTTP/1.1 20") or not content:
            return _answer(writer, method, line, found, content)
        self._harmed += 1  # two harms in a row differ, as on a real way: equal ones are taken for what is stored
        if harm.harm == "changed":
            content = content[:-1] + bytes([content[-1] ^ 1 + self._harmed % 255])
        if harm.harm == "short":
            content = content[: -1 - self._harmed % len(content)]
        return _answer(writer, method, line, found, content, cut=harm.harm == "cut")

    async def _forward(self, first: str, headers: dict[str, str], body: bytes) -> tuple[str, dict[str, str], bytes]:
        """Have the server do it, on a connection of its own."""
        reader, writer = await asyncio.open_connection(*self.upstream)  # noqa: TID251 - a proxy for tests
        try:
            sent = {**headers, "connection": "close"}
            lines = [first, *(f"{name}: {value}" for name, value in sent.items())]
            writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body)
            await writer.drain()
            line, found = await _read_head(reader)
            while line.startswith("HTTP/1.1 100"):
                line, found = await _read_head(reader)
            return line, found, b"" if first.startswith("HEAD") else await _read_body(reader, found)
        finally:
            writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    assert len(head) < _HEAD_BYTES_MAX
    first, *lines = head.split("\r\n")
    return first, {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if headers.pop("transfer-encoding", "") != "chunked":
        return await reader.readexactly(int(headers.get("content-length", "0")))
    parts: list[bytes] = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    return b"".join(parts)


def _answer(
    writer: asyncio.StreamWriter, method: str, line: str, headers: dict[str, str], body: bytes, *, cut: bool = False
) -> bool:
    """Write an answer; say whether the connection continues."""
    kept = {name: value for name, value in headers.items() if name not in ("connection", "content-length")}
    length = headers.get("content-length", "0") if method == "HEAD" else str(len(body))
    lines = [line, *(f"{name}: {value}" for name, value in kept.items())]
    if not line.startswith("HTTP/1.1 204"):
        lines.append(f"content-length: {length}")
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
    if method != "HEAD":
        writer.write(body[: len(body) // 2] if cut else body)
    return not cut


async def _answer_slowly(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    answer: tuple[str, dict[str, str], bytes],
    *,
    trickle: bool,
) -> None:
    """Write an answer whose body stops in its middle, or comes byte by byte, while the client waits."""
    line, headers, body = answer
    _answer(writer, "GET", line, headers, body, cut=True)
    for at in range(len(body) // 2, len(body) if trickle else 0):
        with suppress(TimeoutError):
            async with asyncio.timeout(TRICKLE_S):
                await reader.read()
            return  # the client left
        writer.write(body[at : at + 1])


@asynccontextmanager
async def harming_proxy(endpoint: str) -> AsyncIterator[FaultProxy]:
    """Run a proxy before the server at `endpoint` (http://HOST:PORT) on a free port while the block runs."""
    host, _, port = endpoint.removeprefix("http://").partition(":")
    proxy = FaultProxy((host, int(port)))
    running: dict[asyncio.Task[None], asyncio.WriteTransport] = {}

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(proxy.serve(reader, writer))
        running[task] = writer.transport
        task.add_done_callback(running.pop)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=1 << 20)  # noqa: TID251 - a server for tests
    own_host, own_port = server.sockets[0].getsockname()
    proxy.endpoint = f"http://{own_host}:{own_port}"
    try:
        yield proxy
    finally:
        server.close()
        tasks = dict(running)
        for task, transport in tasks.items():
            task.cancel()
            transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()
