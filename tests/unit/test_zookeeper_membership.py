"""A broker whose session with ZooKeeper is lost is entered again, whatever ZooKeeper answers meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
from kazoo.protocol.states import KazooState

from memq.errors import (
    ClosedError,
    CorruptDataError,
    DeniedError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    TooLargeError,
    UnreachableError,
)
from memq.governor.zookeeper import layout
from memq.governor.zookeeper import session as session_module
from memq.governor.zookeeper.coordinator import ZookeeperCoordinator
from memq.governor.zookeeper.session import Node, ZookeeperSession
from memq.governor.zookeeper.settings import ZookeeperSettings
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from tests.brokers import events_of, until
from tests.skipping_loop import skip
from tests.unit.zookeeper_fakes import ADDRESS, FakeSession, broker, entered, with_fake_session


def test_a_session_that_is_lost_while_a_broker_is_entered_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node was made, and went with the session before `register` returned: nobody made it again."""

    async def work(coordinator: ZookeeperCoordinator, session: FakeSession) -> None:
        async def lose() -> None:
            session.lose()

        session.after.append(lose)
        session.after.append(lose)  # the first change names the cluster
        await coordinator.register(broker())
        assert await entered(coordinator) == [broker()]

    with_fake_session(monkeypatch, work)


@pytest.mark.parametrize("draining", [None, False], ids=["not entered before", "entered before"])
def test_broker_that_was_not_registered_is_not_entered_again(
    monkeypatch: pytest.MonkeyPatch, draining: bool | None
) -> None:
    """But what was before: the session may be lost in the call that fails."""

    async def work(coordinator: ZookeeperCoordinator, session: FakeSession) -> None:
        async def lost() -> None:
            session.lose()
            raise UnreachableError("the session is lost")

        first = [] if draining is None else [broker(draining=draining)]
        for each in first:
            await coordinator.register(each)
        assert await entered(coordinator) == first
        session.before.append(lost)
        with pytest.raises(UnreachableError):
            await coordinator.register(broker(draining=True))
        assert await entered(coordinator) == first
        session.lose()
        assert await entered(coordinator) == first

    with_fake_session(monkeypatch, work)


@pytest.mark.parametrize(
    "error",
    [
        DeniedError("no rights"),
        NotFoundError("no node"),
        InvalidRequestError("no such path"),
        TooLargeError("large"),
        CorruptDataError("no entry"),
        UnreachableError("away"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("times", [1, 5])
def test_no_wrong_answer_keeps_a_broker_out(
    monkeypatch: pytest.MonkeyPatch, error: MemqError, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(coordinator: ZookeeperCoordinator, session: FakeSession) -> None:
        await coordinator.register(broker())
        session.finds.extend([error] * times)
        session.lose()
        assert await entered(coordinator) == [broker()]

    with_fake_session(monkeypatch, work)
    assert events_of(caplog) == ["zookeeper-enter-retry"] * times


def test_a_coordinator_that_was_closed_meanwhile_enters_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(coordinator: ZookeeperCoordinator, session: FakeSession) -> None:
        await coordinator.register(broker())
        session.finds.append(ClosedError("closed"))
        session.lose()
        assert await entered(coordinator) == []

    with_fake_session(monkeypatch, work)
    assert events_of(caplog) == []


@pytest.mark.parametrize("answers", [1, 2])
def test_an_id_counts_as_taken_when_two_answers_say_so(
    monkeypatch: pytest.MonkeyPatch, answers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One may be older than the broker's own registration, of a server that lags."""

    async def work(coordinator: ZookeeperCoordinator, session: FakeSession) -> None:
        await coordinator.register(broker())
        session.finds.extend([Node(layout.encode(broker("s0")), 0, 77)] * answers)
        session.lose()
        assert await entered(coordinator) == ([broker()] if answers == 1 else [])

    with_fake_session(monkeypatch, work)
    assert events_of(caplog) == ([] if answers == 1 else ["broker-id-taken"])


def test_broker_that_leaves_while_it_is_entered_again_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(coordinator: ZookeeperCoordinator, session: FakeSession) -> None:
        gate, begun = asyncio.Event(), asyncio.Event()

        async def held() -> None:
            begun.set()
            await gate.wait()

        await coordinator.register(broker())
        session.before.append(held)
        session.lose()
        await begun.wait()
        leaving = asyncio.create_task(coordinator.unregister(broker()))
        await skip(1)
        gate.set()
        await leaving
        assert await entered(coordinator) == []

    with_fake_session(monkeypatch, work)


# ---- the session -----------------------------------------------------------------------------------


class FakeClient:
    """A kazoo client whose listener the test calls."""

    def __init__(self) -> None:
        self.connected = False
        self.client_id = (7, b"")
        self.client_state = ""
        self.listeners: list[Callable[[str], None]] = []

    def add_listener(self, listener: Callable[[str], None]) -> None:
        self.listeners.append(listener)

    def start_async(self) -> None:
        """It connects when the test says so."""

    def stop(self) -> None:
        """It has no threads."""

    def close(self) -> None:
        """It has no threads."""

    def take(self, state: str) -> None:
        self.connected = state == KazooState.CONNECTED
        for listener in self.listeners:
            listener(state)


def test_a_client_that_can_not_begin_now_is_begun_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process without a thread to spare was never connected again to a ZooKeeper that was set back."""
    monkeypatch.setattr(session_module, "RETRY_DELAY_S_MAX", 0.005)
    clients: list[FakeClient] = []
    tries = 0

    def make(*_: object) -> FakeClient:
        nonlocal tries
        tries += 1
        if tries == 2:
            raise RuntimeError("can't start new thread")
        clients.append(FakeClient())
        return clients[-1]

    monkeypatch.setattr(session_module, "make_client", make)

    async def run() -> None:
        losses: list[bool] = []
        settings = ZookeeperSettings(session_timeout_ms=10)
        session = ZookeeperSession(ADDRESS, settings, EventLog(SystemClock()), losses.append)
        starting = asyncio.create_task(session.start())
        await until(lambda: bool(clients))
        clients[0].take(KazooState.CONNECTED)
        await starting
        clients[0].take(KazooState.LOST)
        await until(lambda: len(clients) == 2)
        clients[1].take(KazooState.CONNECTED)
        await until(lambda: losses == [True, True])
        assert session.up
        await session.close()

    async def in_time() -> None:
        async with asyncio.timeout(30):
            await run()

    with caplog.at_level(logging.WARNING, "memq"):
        asyncio.run(in_time())
    assert events_of(caplog) == ["zookeeper-lost", "zookeeper-renewed"]
