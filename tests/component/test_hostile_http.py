"""The ports of broker, exporters and dashboard under hostile requests: a corpus, and generated ones."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from memq.broker.http import HttpPort
from memq.broker.metrics import CounterCollector, Counters
from memq.cli.exporter import RoundCollector
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.network import Address, SocketNetwork
from memq.testing import Cluster
from tests.dashboards import Served, WrittenAudit, served
from tests.hostile_http import check, corpus, requests
from tests.soak import SOAKING

HANG_S = 60
AT_ONCE = 20
SOUND = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n%s\r\n"
LISTS = st.lists(requests, min_size=1, max_size=AT_ONCE)
PROFILE = settings(deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test whose server logged an error: an answer that the client did not read may have been a 500."""
    yield
    errors = [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.ERROR]
    assert not errors


async def alive() -> None:
    """Nothing is in the way."""


@asynccontextmanager
async def http_port(kind: str) -> AsyncIterator[Address]:
    registry = CollectorRegistry()
    counters = CounterCollector(Counters(acks=7), {"open_connections": lambda: 3})
    registry.register(counters if kind == "broker" else RoundCollector("lag"))
    port = HttpPort(SocketNetwork(), alive, registry, EventLog(SystemClock()))
    try:
        yield await port.start("127.0.0.1", 0)
    finally:
        await port.stop()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        cluster.create_topic("clicks")
        yield cluster


@pytest.fixture(scope="module", params=["open", "token"])
def dashboard(
    request: pytest.FixtureRequest, cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, bytes]]:
    """A dashboard, and a sound request to it."""
    options: dict[str, str] = {}
    headers = b""
    if request.param == "token":
        file: Path = tmp_path_factory.mktemp("token") / "token"
        file.write_text("a-token-of-a-test")
        file.chmod(0o600)
        options["dashboard_token_file"] = str(file)
        headers = b"Authorization: Basic " + base64.b64encode(b"ann:a-token-of-a-test") + b"\r\n"
    with served(cluster.address, WrittenAudit(), dashboard_contents=True, **options) as pages:
        yield pages, SOUND % (b"/", headers)


def try_on_port(kind: str, hostile: list[bytes]) -> None:
    async def work() -> None:
        async with asyncio.timeout(HANG_S), http_port(kind) as address:
            for at in range(0, len(hostile), AT_ONCE):
                await check(address, hostile[at : at + AT_ONCE], SOUND % (b"/metrics", b""))

    asyncio.run(work())


def try_on_dashboard(dashboard: tuple[Served, bytes], hostile: list[bytes]) -> None:
    pages, sound = dashboard
    place = urlsplit(pages.url)
    assert place.hostname is not None
    assert place.port is not None
    authorization = next((line for line in sound.split(b"\r\n") if line.startswith(b"Authorization")), b"")

    async def work() -> None:
        async with asyncio.timeout(HANG_S):
            for at in range(0, len(hostile), AT_ONCE):
                some = hostile[at : at + AT_ONCE]
                if authorization:  # half of them pass the guard
                    host = b"Host: 127.0.0.1"
                    some = [
                        data if number % 2 else data.replace(host, host + b"\r\n" + authorization, 1)
                        for number, data in enumerate(some)
                    ]
                await check((str(place.hostname), int(place.port or 0)), some, sound)

    asyncio.run(work())


@pytest.mark.parametrize("kind", ["broker", "exporter"])
def test_the_corpus_gets_no_500_from_a_port(kind: str) -> None:
    try_on_port(kind, list(corpus()))


def test_the_corpus_gets_no_500_from_the_dashboard(dashboard: tuple[Served, bytes]) -> None:
    try_on_dashboard(dashboard, list(corpus()))


@pytest.mark.parametrize("kind", ["broker", "exporter"])
@settings(PROFILE, max_examples=8)
@given(hostile=LISTS)
def test_generated_requests_get_no_500_from_a_port(kind: str, hostile: list[bytes]) -> None:
    try_on_port(kind, hostile)


@settings(PROFILE, max_examples=8)
@given(hostile=LISTS)
def test_generated_requests_get_no_500_from_the_dashboard(
    dashboard: tuple[Served, bytes], hostile: list[bytes]
) -> None:
    try_on_dashboard(dashboard, hostile)


@pytest.mark.soak
@pytest.mark.skipif(not SOAKING, reason="an hour: make soak")
@pytest.mark.parametrize("kind", ["broker", "exporter"])
@settings(PROFILE, max_examples=5_000)
@given(hostile=LISTS)
def test_many_generated_requests_get_no_500_from_a_port(kind: str, hostile: list[bytes]) -> None:
    try_on_port(kind, hostile)


@pytest.mark.soak
@pytest.mark.skipif(not SOAKING, reason="an hour: make soak")
@settings(PROFILE, max_examples=5_000)
@given(hostile=LISTS)
def test_many_generated_requests_get_no_500_from_the_dashboard(
    dashboard: tuple[Served, bytes], hostile: list[bytes]
) -> None:
    try_on_dashboard(dashboard, hostile)
