"""The dashboard over HTTP: static files, queries of the pages, and the one request with an effect."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from importlib.resources import files
from typing import overload

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from memq.audit.dashboard.access.guard import user_of
from memq.audit.dashboard.history import SPANS
from memq.audit.dashboard.objects import ObjectInspector
from memq.audit.dashboard.poller import Poller
from memq.audit.dashboard.records import TAIL_RECORDS_S_MAX, Query, RecordReader
from memq.audit.dashboard.stream import Feed, Seats, tail_events
from memq.audit.finding import csv_of
from memq.errors import (
    CorruptDataError,
    DeniedError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    RetryableError,
)
from memq.topic import check_name

SEARCHES_MAX = 2  # at once: each reads megabytes
CHECKS_MAX = 4  # objects that are fetched and checked at once, each up to OBJECT_BYTES_MAX
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_STATUS: tuple[tuple[type[MemqError], int], ...] = (
    (NotFoundError, 404),
    (InvalidRequestError, 400),
    (DeniedError, 403),
    (RetryableError, 503),
    (CorruptDataError, 502),
)
Answer = Callable[[Request], Awaitable[Response]]


class Pages:
    """Answers requests out of the desk, its feed, and what reads records and objects."""

    def __init__(self, desk: Poller, feed: Feed, records: RecordReader, objects: ObjectInspector) -> None:
        self._desk = desk
        self._feed = feed
        self._records = records
        self._objects = objects
        self._searches = Seats(SEARCHES_MAX, "searches")
        self._checks = Seats(CHECKS_MAX, "checks of objects")
        self._static = load_static()

    def application(self) -> Starlette:
        """Return the routes."""
        routes = [
            Route("/", self._index),
            Route("/assets/{name}", self._asset),
            *(
                Route(path, _answering(ask), methods=[method])
                for path, ask, method in (
                    ("/api/events", self._events, "GET"),
                    ("/api/topics/{topic}", self._topic, "GET"),
                    ("/api/search", self._search, "GET"),
                    ("/api/tail", self._tail, "GET"),
                    ("/api/object", self._object, "GET"),
                    ("/api/block", self._block, "GET"),
                    ("/api/findings", self._findings, "GET"),
                    ("/api/findings/{finding}/verify", self._verify, "GET"),
                    ("/api/findings/{finding}/acknowledge", self._acknowledge, "POST"),
                )
            ),
        ]
        return Starlette(routes=routes)

    # ---- files ---------------------------------------------------------------------------------------

    async def _index(self, request: Request) -> Response:
        return self._file("index.html")

    async def _asset(self, request: Request) -> Response:
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> Response:
        found = self._static.get(name)
        if found is None:
            return Response("there is no such page\n", 404, media_type="text/plain")
        kind, body = found
        return Response(body, media_type=kind)

    # ---- what pages ask for --------------------------------------------------------------------------

    async def _events(self, request: Request) -> Response:
        return _stream(self._feed.events(request.headers.get("last-event-id", "")), self._feed.streams)

    async def _topic(self, request: Request) -> Response:
        span = _number(request, "span", 60)
        if span not in SPANS:
            raise InvalidRequestError(f"span = {span} is none of {', '.join(map(str, SPANS))} minutes")
        name = request.path_params["topic"]
        check_name(name, internal=True)
        return _json(await self._desk.topic_page(name, span, request.query_params.get("group")))

    async def _search(self, request: Request) -> Response:
        asked = request.query_params
        query = Query(
            topic=asked.get("topic", ""),
            key=_key(asked["key"]) if asked.get("key") else None,
            tag=asked.get("tag") or None,
            first_ms=_number(request, "first_ms", None),
            end_ms=_number(request, "end_ms", None),
        )
        check_name(query.topic, internal=True)
        with self._searches.one():
            return _json(await self._records.search(query))

    async def _tail(self, request: Request) -> Response:
        topic = request.query_params.get("topic", "")
        check_name(topic, internal=True)
        rate = min(max(_number(request, "rate", 10), 1), TAIL_RECORDS_S_MAX)
        await self._desk.topic(topic)
        return _stream(tail_events(self._records.tail(topic, rate), self._feed), self._feed.tails)

    async def _object(self, request: Request) -> Response:
        with self._checks.one():
            return _json(await self._objects.page(request.query_params.get("key", "")))

    async def _block(self, request: Request) -> Response:
        key = request.query_params.get("key", "")
        with self._checks.one():
            return _json(await self._objects.block(key, _number(request, "block", 0), _number(request, "first", 0)))

    async def _findings(self, request: Request) -> Response:
        kind = request.query_params.get("format", "json")
        if kind not in ("csv", "json"):
            raise InvalidRequestError(f"format = '{kind[:60]}' is neither csv nor json")
        found = await self._desk.findings()
        answer = (
            _json([each.to_json() for each in found])
            if kind == "json"
            else Response(csv_of(found), media_type="text/csv")
        )
        answer.headers["Content-Disposition"] = f'attachment; filename="findings.{kind}"'
        return answer

    async def _verify(self, request: Request) -> Response:
        with self._checks.one():
            return _json(await self._objects.verify(await self._desk.finding(request.path_params["finding"])))

    async def _acknowledge(self, request: Request) -> Response:
        await self._desk.acknowledge(request.path_params["finding"], user_of(request.scope))
        return _json({})


def load_static() -> dict[str, tuple[str, bytes]]:
    """Return the files of the pages by name, with their types."""
    found = {}
    for file in files("memq.audit.dashboard").joinpath("assets").iterdir():
        kind = _TYPES.get("." + file.name.rpartition(".")[2])
        if kind is not None:
            found[file.name] = (kind, file.read_bytes())
    return found


def _answering(ask: Answer) -> Answer:
    """Return an endpoint that answers errors as JSON, with a status that says what to do."""

    async def answer(request: Request) -> Response:
        try:
            return await ask(request)
        except MemqError as error:
            status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
            return _json({"error": str(error), "hint": error.hint, "code": error.code}, status)

    return answer


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


class EventStream(StreamingResponse):
    """Sends events, and closes what they come from as soon as nobody listens any more."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until either side ends it."""
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


def _stream(events: AsyncGenerator[bytes, None], seats: Seats) -> Response:
    """Return an event stream that holds a seat as long as it lasts.

    Raises: ThrottledError when none is free.
    """
    seats.check()
    return EventStream(seats.taken(events))


@overload
def _number(request: Request, name: str, default: int) -> int: ...
@overload
def _number(request: Request, name: str, default: None) -> int | None: ...
def _number(request: Request, name: str, default: int | None) -> int | None:
    text = request.query_params.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 16):
        raise InvalidRequestError(f"{name} = '{text[:60]}' is no number")
    return int(text)


def _key(text: str) -> bytes:
    """Return a key as it was typed: text, or bytes as hex digits behind 0x."""
    if text.startswith("0x"):
        try:
            return bytes.fromhex(text[2:])
        except ValueError:
            pass
    return text.encode()
