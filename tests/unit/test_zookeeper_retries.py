"""Pauses and tries of the coordinator on ZooKeeper, clients that replace others, and nodes that others remove first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from kazoo.exceptions import ConfigurationError
from kazoo.protocol.states import KazooState, KeeperState

from memq.errors import InvalidSettingError, MemqError, UnreachableError
from memq.governor.zookeeper import session as session_module
from memq.governor.zookeeper.coordinator import ZookeeperCoordinator
from memq.governor.zookeeper.mirror import Mirror
from memq.governor.zookeeper.security import check_tools
from memq.governor.zookeeper.session import CreateNode, ZookeeperSession, make_client
from memq.governor.zookeeper.settings import ZookeeperAddress, ZookeeperSettings
from memq.runtime.logs import EventLog
from tests.brokers import events_of, log_lines
from tests.contract.coordinators import broker
from tests.skipping_loop import LoopClock, run_skipping, skip
from tests.tls import server_context
from tests.unit.zookeeper_fakes import InlinePool, NotedRandom, with_coordinator
from tests.zookeeper_in_memory import MemoryZookeeper, settled

ADDRESS = ZookeeperAddress("nowhere:2181", "/memq")
SESSION_S = 10.0


@pytest.fixture(name="server")
def server_in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryZookeeper]:
    server = MemoryZookeeper()
    monkeypatch.setattr(session_module, "make_client", server.client)
    monkeypatch.setattr(session_module, "ThreadPool", InlinePool)
    yield server
    assert all(client.ended == 2 for client in server.clients), "each client is stopped and closed, once"


def test_the_pauses_of_a_first_connection_double(server: MemoryZookeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = NotedRandom()
    fails = 4

    async def stops(session: ZookeeperSession, *_: object) -> None:
        nonlocal fails
        fails -= 1
        if fails > 0:
            raise UnreachableError("it stops")
        await create_missing(session, *_)  # type: ignore[arg-type]

    create_missing = ZookeeperSession.create_missing
    monkeypatch.setattr(ZookeeperSession, "create_missing", stops)

    async def work(one: ZookeeperCoordinator) -> None:
        assert list(await one.brokers()) == []

    with_coordinator(work, chance)
    assert chance.bounds == [0.2, 0.4, 0.8]


def test_a_cluster_name_whose_storing_is_not_answered_is_stored_again(server: MemoryZookeeper) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        def swallow() -> None:
            server.silent = True
            asyncio.get_running_loop().call_soon(setattr, server, "silent", False)

        server.before_commit = swallow
        assert list(await one.brokers()) == []
        assert server.nodes["/memq/cluster"][0] == b"test"

    with_coordinator(work)


def test_failed_reads_of_changes_are_counted_from_one(
    server: MemoryZookeeper, caplog: pytest.LogCaptureFixture
) -> None:
    chance = NotedRandom()
    calls: list[int] = []

    async def called() -> None:
        calls.append(1)

    async def work(one: ZookeeperCoordinator) -> None:
        await one.topics()
        one.watch(called)
        await skip(1)
        for client in server.clients:
            client.take(KazooState.SUSPENDED)
        server.apply([("create", "/memq/brokers/x", b"{}", -1, 0)])
        await skip(1)
        server.clients[0].take(KazooState.CONNECTED)

    with_coordinator(work, chance)
    tries = [line.partition(": ")[2].partition(":")[0] for line in log_lines(caplog) if "read-failed" in line]
    assert tries == [f"try {number}" for number in range(1, len(tries) + 1)]
    assert len(tries) >= 2
    assert chance.bounds[:2] == [0.2, 0.4]


def test_a_governor_whose_node_was_replaced_meanwhile_leaves(server: MemoryZookeeper) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        await one.register(broker("b1", "s1"))
        assert await one.govern(broker("b1", "s1")) == 1
        path = "/memq/governor"

        def replace_governor() -> None:
            server.apply([("set", path, server.nodes[path][0], -1, 0)])

        def leave_broker() -> None:
            server.before_commit = replace_governor

        server.before_commit = leave_broker
        await one.unregister(broker("b1", "s1"))
        assert "/memq/brokers/b1" not in server.nodes
        assert path in server.nodes

    with_coordinator(work)


def test_a_changed_node_has_other_children(server: MemoryZookeeper) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        mirror = Mirror(one.session, lambda: None)
        await one.session.create_missing(["/a", "/a/x"])
        assert await mirror.children("/a") == ["x"]
        server.deaf = True
        await one.session.change(CreateNode("/a/y"))
        mirror.forget("/a")
        assert await mirror.children("/a") == ["x", "y"]

    with_coordinator(work)


# ---- the session ---------------------------------------------------------------------------------


def with_session(server: MemoryZookeeper, work: Callable[[ZookeeperSession], Awaitable[None]]) -> None:
    async def run() -> None:
        settings = ZookeeperSettings(session_timeout_ms=int(SESSION_S * 1000))
        session = ZookeeperSession(ADDRESS, settings, EventLog(LoopClock()), lambda lost: None)
        try:
            await session.start()
            await work(session)
        finally:
            await session.close()

    run_skipping(run())


def test_a_client_that_reconnects_by_itself_gets_no_replacement(server: MemoryZookeeper) -> None:
    async def work(session: ZookeeperSession) -> None:
        server.clients[0].take(KazooState.SUSPENDED)
        await settled()
        server.clients[0].take(KazooState.CONNECTED)
        await skip(3 * SESSION_S)
        assert session.up
        assert len(server.clients) == 1

    with_session(server, work)


def test_a_client_is_replaced_after_two_sessions_without_a_connection(
    server: MemoryZookeeper, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(session: ZookeeperSession) -> None:
        server.clients[0].take(KazooState.SUSPENDED)
        await skip(1)
        server.clients[0].take(KazooState.LOST)
        await skip(SESSION_S - 1.5)
        assert len(server.clients) == 1
        await skip(1)
        assert len(server.clients) == 2
        await skip(SESSION_S - 1)
        assert session.number == server.clients[0].number
        await skip(1)
        assert (session.up, session.number) == (True, server.clients[1].number)

    with caplog.at_level(logging.WARNING, "memq"):
        with_session(server, work)
    assert events_of(caplog) == ["zookeeper-suspended", "zookeeper-lost", "zookeeper-renewed"]


@pytest.mark.parametrize("state", [KeeperState.AUTH_FAILED, KeeperState.CLOSED])
def test_a_client_whose_credentials_were_refused_is_replaced_until_they_are_taken(
    server: MemoryZookeeper, state: str
) -> None:
    """Kazoo gives such a client up: with two of them a broker was never connected again."""

    async def work(session: ZookeeperSession) -> None:
        server.silent = True
        server.clients[0].take(KazooState.LOST)
        await skip(SESSION_S + 0.5)
        server.clients[1].client_state = state
        await skip(SESSION_S)
        assert [client.ended for client in server.clients] == [0, 2, 0]
        server.clients[2].connect()
        await skip(SESSION_S)
        assert (session.up, session.number) == (True, server.clients[2].number)

    with_session(server, work)


# ---- settings ------------------------------------------------------------------------------------


def test_a_client_that_kazoo_refuses_to_make_is_an_invalid_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise ConfigurationError("no such option")

    monkeypatch.setattr(session_module, "KazooClient", refuse)
    with pytest.raises(InvalidSettingError, match="can't be reached as the settings say: no such option") as caught:
        make_client(ADDRESS, ZookeeperSettings(), logging.getLogger("test"))
    assert isinstance(caught.value, MemqError)


def test_a_key_of_tls_may_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    server_context(tmp_path, "here")
    text = (tmp_path / "server-here.pem").read_text(encoding="utf-8")
    certificate, mark, key = text.partition("-----BEGIN PRIVATE KEY")
    cert_file, key_file = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert_file.write_text(certificate, encoding="utf-8")
    key_file.write_text(mark + key, encoding="utf-8")
    check_tools(ZookeeperSettings(tls=True, tls_cert_file=str(cert_file), tls_key_file=str(key_file)))
    check_tools(ZookeeperSettings(tls=True, tls_cert_file=str(tmp_path / "server-here.pem")))
    with pytest.raises(InvalidSettingError, match="tls_cert_file"):
        check_tools(ZookeeperSettings(tls=True, tls_cert_file=str(cert_file)))
