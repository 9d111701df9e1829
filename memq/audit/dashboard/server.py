"""The dashboard: listens, serves the pages, and keeps them current until it is stopped."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Self, cast

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from memq.audit.dashboard.access.exposure import check_exposure, is_loopback, read_token, tls_of
from memq.audit.dashboard.access.guard import Guard
from memq.audit.dashboard.audited import LiveSource
from memq.audit.dashboard.objects import ObjectInspector
from memq.audit.dashboard.pages import Pages
from memq.audit.dashboard.poller import Poller
from memq.audit.dashboard.records import RecordReader
from memq.audit.dashboard.stream import Feed
from memq.audit.dashboard.view import About
from memq.client.admin.aio_admin import AsyncAdmin
from memq.runtime.logs import EventLog
from memq.runtime.network import Listener, ProtocolFactory, Runtime, SocketNetwork, format_address
from memq.settings import DashboardSettings

CONNECTIONS_MAX = 100
REQUEST_HEAD_BYTES_MAX = 16 * 1024
END_S = 2.0  # for answers that are under way at the stop

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
        self._objects = ObjectInspector(brokers, runtime, records)
        self._desk = Poller(self._admin, audit, self.feed, runtime, about)
        self._pages = Pages(self._desk, self.feed, records, self._objects)
        self._state = ServerState()
        self._listener: Listener | None = None

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
            limit_concurrency=CONNECTIONS_MAX,
            h11_max_incomplete_event_size=REQUEST_HEAD_BYTES_MAX,
        )
        config.load()

        def connection() -> H11Protocol:
            return H11Protocol(config, self._state, {})

        # It is no BufferedProtocol: a real loop takes either kind.
        factory = cast(ProtocolFactory, connection)
        self._listener = await SocketNetwork().listen(host, port, factory, self._tls)
        self._desk.start()
        self._events.info("dashboard.ready", self.url)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._listener is not None:
            self._listener.close()
        self.feed.close()
        await self._desk.stop()
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
            except Exception as error:  # noqa: BLE001  # of one request; the dashboard goes on
                self._events.error("dashboard.request-failed", repr(error), error)

        return logged
