"""The dashboard over HTTP: access control, pages and their queries, and the listener.

Theory. A page of another site, open in the same browser, can send requests to a listener on loopback. It must not be
able to read answers or to change anything: so the Host header must name this machine (else a name of that page's own
may point here), nothing is said of cross-origin sharing, and what changes something must come from a page of ours.
Beyond loopback a token is asked for as the password of basic authentication, which browsers keep for one origin; the
user's name is free, and says who acknowledged a finding.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from importlib.resources import files
from types import TracebackType
from typing import Self, cast, overload

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from memq.audit.dashboard.audited import LiveSource
from memq.audit.dashboard.exposure import check_exposure, read_token, tls_of
from memq.audit.dashboard.history import SPANS
from memq.audit.dashboard.poller import Poller
from memq.audit.dashboard.records import TAIL_RECORDS_S_MAX, ObjectInspector, Query, RecordReader
from memq.audit.dashboard.stream import Feed, Seats, tail_events
from memq.audit.dashboard.view import About
from memq.audit.dashboard.waiting import LetterReader
from memq.audit.finding import csv_of
from memq.client.admin import AsyncAdmin
from memq.errors import (
    CorruptDataError,
    DeniedError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    RetryableError,
)
from memq.protocol.connection import ANONYMOUS
from memq.runtime.logs import EventLog
from memq.runtime.network import (
    BoundPort,
    ProtocolFactory,
    SocketNetwork,
    connection_to_close,
    format_address,
    host_of,
    is_loopback,
)
from memq.runtime.runtime import Runtime
from memq.settings import DashboardSettings
from memq.topic import check_resource_name

USER_CHARS_MAX = 100
_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
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
CONNECTIONS_MAX = 100
REQUEST_HEAD_BYTES_MAX = 16 * 1024
END_S = 2.0  # for answers that are under way at the stop


class Guard:
    """Wraps the pages: refuses who may not ask, and adds the headers of safety to every answer.

    `loopback` says that the listener is; `token` is "" where nobody is asked for one.
    """

    def __init__(self, app: ASGIApp, *, loopback: bool, token: str) -> None:
        self._app = app
        self._loopback = loopback
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
            await send(message)

        await (self._refusal(scope) or self._app)(scope, receive, send_safely)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._loopback and host.rsplit(":", 1)[0].lower() not in _NAMES and host.lower() not in _NAMES:
            return _refused(421, "this host name is not the dashboard's; open it as http://127.0.0.1:PORT")
        if self._token:
            user = _user_of(headers.get("authorization", ""), self._token)
            if user is None:
                challenge = {"WWW-Authenticate": 'Basic realm="memq", charset="UTF-8"'}
                return _refused(401, "any user name, and the token as the password", challenge)
            scope["user_name"] = user
        if scope["method"] not in ("GET", "HEAD") and not _is_ours(headers, host):
            return _refused(403, "what changes something must come from a page of the dashboard")
        return None


def _refused(status: int, text: str, headers: Mapping[str, str] | None = None) -> PlainTextResponse:
    return PlainTextResponse(f"{text}\n", status, headers)


def _user_of(authorization: str, token: str) -> str | None:
    """Return the user's name when the password, or the bearer's token, is the right one."""
    scheme, _, given = authorization.partition(" ")
    user = ANONYMOUS.name
    if scheme.lower() == "basic":
        try:
            user, _, given = base64.b64decode(given, validate=True).decode().partition(":")
        except ValueError:  # no base64, no ASCII, or no UTF-8 in it
            return None
    elif scheme.lower() != "bearer":
        return None
    return (user[:USER_CHARS_MAX] or ANONYMOUS.name) if hmac.compare_digest(given.encode(), token.encode()) else None


def _is_ours(headers: Headers, host: str) -> bool:
    """Whether a page of this origin sent the request.

    Browsers say so; other clients must send JSON, which forms can't.
    """
    origin = headers.get("origin")
    same = origin is None or origin.partition("://")[2].lower() == host.lower()
    fetch_site = headers.get("sec-fetch-site", "same-origin")
    return same and fetch_site == "same-origin" and headers.get("content-type", "") == "application/json"


class Pages:
    """Answers requests from poller, feed, readers of records and letters, and object inspector."""

    def __init__(
        self, poller: Poller, feed: Feed, records: RecordReader, letters: LetterReader, objects: ObjectInspector
    ) -> None:
        self._poller = poller
        self._feed = feed
        self._records = records
        self._letters = letters
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
                    ("/api/topics/{topic:path}", self._topic, "GET"),
                    ("/api/search", self._search, "GET"),
                    ("/api/tail", self._tail, "GET"),
                    ("/api/letters", self._dead_letters, "GET"),
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
        check_resource_name(name, internal=True)
        return _json(await self._poller.topic_page(name, span, request.query_params.get("group")))

    async def _search(self, request: Request) -> Response:
        asked = request.query_params
        query = Query(
            topic=asked.get("topic", ""),
            key=_key(asked["key"]) if asked.get("key") else None,
            tags=asked.get("tags") or None,
            where=asked.get("where") or None,
            first_ms=_number(request, "first_ms", None),
            end_ms=_number(request, "end_ms", None),
        )
        check_resource_name(query.topic, internal=True)
        with self._searches.one():
            return _json(await self._records.search(query))

    async def _tail(self, request: Request) -> Response:
        topic = request.query_params.get("topic", "")
        check_resource_name(topic, internal=True)
        rate = min(max(_number(request, "rate", 10), 1), TAIL_RECORDS_S_MAX)
        await self._poller.topic(topic)
        tags, where = (request.query_params.get(name) or None for name in ("tags", "where"))
        return _stream(tail_events(self._records.tail(topic, rate, tags, where), self._feed), self._feed.tails)

    async def _dead_letters(self, request: Request) -> Response:
        group = request.query_params.get("group", "")
        with self._searches.one():
            return _json(await self._letters.page(group))

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
        found = await self._poller.findings()
        answer = (
            _json([each.to_json() for each in found])
            if kind == "json"
            else Response(csv_of(found), media_type="text/csv")
        )
        answer.headers["Content-Disposition"] = f'attachment; filename="findings.{kind}"'
        return answer

    async def _verify(self, request: Request) -> Response:
        with self._checks.one():
            return _json(await self._objects.verify(await self._poller.finding(request.path_params["finding"])))

    async def _acknowledge(self, request: Request) -> Response:
        user = str(request.scope.get("user_name", ANONYMOUS.name))  # set by the guard
        await self._poller.acknowledge(request.path_params["finding"], user)
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
    """Sends events, and closes their source when the browser disconnects."""

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
    """Return a key as it was typed: text, or bytes as hex digits after 0x."""
    if text.startswith("0x"):
        try:
            return bytes.fromhex(text[2:])
        except ValueError:
            pass
    return text.encode()


class _Connection(H11Protocol):
    """One connection to a browser; a new one over CONNECTIONS_MAX closes another.

    `hosts` are all connections, oldest first, with their hosts.
    """

    def __init__(self, config: Config, state: ServerState, hosts: dict[_Connection, str]) -> None:
        super().__init__(config, state, {})
        self._hosts = hosts

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its base
        """Take a connection."""
        super().connection_made(transport)
        if len(self._hosts) >= CONNECTIONS_MAX:
            other = connection_to_close(self._hosts, _Connection.is_idle)
            del self._hosts[other]
            other.transport.abort()
        self._hosts[self] = host_of(transport.get_extra_info("peername"))

    def is_idle(self) -> bool:
        """Whether no answer to a request is under way."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._hosts.pop(self, None)
        super().connection_lost(exc)


logging.getLogger("uvicorn").addHandler(logging.NullHandler())


class Dashboard:
    """Serves the pages about the cluster of `brokers`, and about what `audit` found.

    Use it as `async with`.
    Entering raises InvalidSettingError for settings that would expose it, UnreachableError when the port is taken.
    """

    def __init__(
        self,
        brokers: str,
        settings: DashboardSettings,
        *,
        audit: LiveSource | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        check_exposure(settings)
        self._settings = settings
        self._token, self._tls = read_token(settings), tls_of(settings)
        runtime = runtime or Runtime()
        self._events = EventLog(runtime.clock)
        about = About(
            cluster="",
            audited=audit is not None,
            acknowledge=audit is not None and settings.dashboard_acknowledge,
            contents=settings.dashboard_contents,
        )
        self.feed = Feed(f"{runtime.random.getrandbits(48):012x}")
        self._admin = AsyncAdmin(brokers, runtime=runtime)
        records = RecordReader(brokers, runtime, contents=settings.dashboard_contents)
        letters = LetterReader(brokers, runtime, contents=settings.dashboard_contents)
        self._objects = ObjectInspector(brokers, runtime, records)
        self._poller = Poller(self._admin, audit, self.feed, runtime, about)
        self._pages = Pages(self._poller, self.feed, records, letters, self._objects)
        self._state = ServerState()
        self._listener: BoundPort | None = None

    @property
    def url(self) -> str:
        """Where browsers find it."""
        assert self._listener is not None, "the dashboard was not started"
        return f"http{'s' if self._tls else ''}://{format_address(self._listener.address)}/"

    async def __aenter__(self) -> Self:
        host, port = self._settings.dashboard_host, self._settings.dashboard_port
        guard = Guard(self._pages.application(), loopback=is_loopback(host), token=self._token)
        config = Config(
            self._logged(guard),
            http=H11Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=REQUEST_HEAD_BYTES_MAX,
        )
        config.load()

        hosts: dict[_Connection, str] = {}

        def connection() -> H11Protocol:
            return _Connection(config, self._state, hosts)

        # It is no BufferedProtocol: a real loop takes either kind.
        factory = cast(ProtocolFactory, connection)
        self._listener = await SocketNetwork(server=self._tls).listen(host, port, factory)
        self._poller.start()
        self._events.info("dashboard.ready", self.url)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listener is not None:
            self._listener.close()
        self.feed.close()
        await self._poller.stop()
        for connection in list(self._state.connections):
            connection.shutdown()
        tasks = list(self._state.tasks)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=END_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
        for connection in list(self._state.connections):  # whose browser does not read what it asked for
            connection.transport.abort()
        await self._objects.close()
        await self._admin.close()

    def _logged(self, app: ASGIApp) -> ASGIApp:
        """Return the application so that its failures are logged as memq's own."""

        async def logged(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await app(scope, receive, send)
            except Exception as error:  # noqa: BLE001  # of one request; the dashboard continues
                self._events.error("dashboard.request-failed", repr(error), error)

        return logged
