"""A dashboard for tests: on its own loop in a thread, on a free port, with an audit state that a test writes."""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from memq.audit.dashboard.audited import AuditedHour, AuditNews, LiveSource
from memq.audit.dashboard.server import Dashboard
from memq.audit.finding import Finding
from memq.audit.live.view import Minute, ReportingClient
from memq.audit.minutes import QUEUE, CountSide, MinuteRow
from memq.errors import NotFoundError
from memq.settings import DashboardSettings

WAIT_S = 120.0


@dataclass
class WrittenAudit(LiveSource):
    """An audit whose hours a test writes. `named` are findings that no page has heard of."""

    hours: dict[str, AuditedHour] = field(default_factory=dict)
    found: dict[str, Finding] = field(default_factory=dict)
    rows: dict[str, list[Minute]] = field(default_factory=dict)
    named: dict[str, Finding] = field(default_factory=dict)
    heard: list[ReportingClient] = field(default_factory=list)
    number: int = 1

    async def news(self, since: int) -> AuditNews:
        if since >= self.number:
            return AuditNews(self.number, {}, ())
        return AuditNews(self.number, dict(self.hours), list(self.found.values()))

    async def minutes(self, topic: str, first: int, end: int, *, since: int = -1) -> AsyncIterator[Minute]:
        for row in self.rows.get(topic, []):
            if first <= row.minute < end:
                yield row

    async def finding(self, id_: str) -> Finding:
        if id_ not in self.named:
            raise NotFoundError(f"there is no finding '{id_}'")
        return self.named[id_]

    async def findings(self, topic: str = "", *, all_: bool = False, limit: int = 0) -> list[Finding]:
        return list(self.named.values())

    async def clients(self) -> list[ReportingClient]:
        return self.heard

    async def behind(self, now_ms: int) -> str:
        return ""

    async def acknowledge(self, finding: str, who: str) -> None:
        if finding not in self.found:
            raise NotFoundError(f"there is no finding '{finding}'")
        self.found[finding] = msgspec.structs.replace(self.found[finding], acknowledged_by=who, acknowledged_ms=1)
        self.number += 1


def stored_minute(
    partition: int,
    number: int,
    counts: dict[str, int],
    latency: dict[str, dict[int, int]] | None = None,
    side: str = QUEUE,
) -> Minute:
    """Return a minute with one side, as auditors store it."""
    return Minute("clicks", "", partition, number, MinuteRow({side: CountSide(counts, latency or {})}))


class Served:
    """A dashboard that runs."""

    def __init__(self, dashboard: Dashboard, loop: asyncio.AbstractEventLoop) -> None:
        self.dashboard = dashboard
        self.url = dashboard.url
        self._loop = loop

    def call(self, work: Callable[[], object]) -> None:
        """Do something on the dashboard's loop, and announce what changed."""

        async def run() -> None:
            work()
            self.dashboard.feed.announce()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(WAIT_S)

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """Ask for a page, and return the answer with its body."""
        place = urlsplit(self.url)
        assert place.hostname is not None
        kind = http.client.HTTPSConnection if tls is not None else http.client.HTTPConnection
        options: dict[str, Any] = {"context": tls} if tls is not None else {}
        connection = kind(place.hostname, place.port, timeout=WAIT_S, **options)
        try:
            connection.request(method, path, headers=dict(headers or {}))
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        """Ask for JSON, which must be there."""
        answer, body = self.ask(path)
        assert answer.status == 200, body
        return json.loads(body)


@contextmanager
def served(address: str, audit: LiveSource | None = None, **settings: int | str | bool) -> Iterator[Served]:
    """Serve a dashboard of the cluster at an address, on loopback and a free port."""
    chosen = DashboardSettings(**{"dashboard_port": 0} | settings)  # type: ignore[arg-type]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="test-dashboard", daemon=True)
    thread.start()

    async def make() -> Dashboard:
        return await Dashboard(address, chosen, audit=audit).__aenter__()

    try:
        dashboard = asyncio.run_coroutine_threadsafe(make(), loop).result(WAIT_S)
        try:
            yield Served(dashboard, loop)
        finally:
            asyncio.run_coroutine_threadsafe(dashboard.__aexit__(None, None, None), loop).result(WAIT_S)
    finally:
        asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result(WAIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        loop.close()


@contextmanager
def lines(url: str, path: str, last_id: str = "") -> Iterator[Iterator[str]]:
    """Listen to an event stream: its lines, comments as well, without their ends."""
    place = urlsplit(url)
    assert place.hostname is not None
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=WAIT_S)
    try:
        connection.request("GET", path, headers={"Last-Event-ID": last_id} if last_id else {})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        yield (line.decode().rstrip("\n") for line in answer)
    finally:
        connection.close()


@contextmanager
def events(url: str, path: str, last_id: str = "") -> Iterator[Iterator[tuple[str, Any]]]:
    """Listen to an event stream: the id and the data of each event."""
    with lines(url, path, last_id) as found:
        yield _events(found)


def _events(found: Iterator[str]) -> Iterator[tuple[str, Any]]:
    id_ = ""
    for line in found:
        kind, _, text = line.partition(": ")
        if kind == "id":
            id_ = text
        elif kind == "data":
            yield id_, json.loads(text)
