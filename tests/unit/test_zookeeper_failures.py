"""The coordinator on a ZooKeeper in memory: unanswered changes, races of each kind, and events that are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import pytest
from kazoo.exceptions import KazooException, NoAuthError
from kazoo.protocol.states import KazooState
from msgspec.structs import replace

from memq.errors import (
    AlreadyExistsError,
    InvalidNameError,
    InvalidSettingError,
    MemqError,
    UnreachableError,
    VersionConflictError,
)
from memq.governor.zookeeper import session as session_module
from memq.governor.zookeeper.coordinator import ZookeeperCoordinator
from memq.governor.zookeeper.mirror import REFRESH_S, gathered
from memq.governor.zookeeper.session import ZookeeperSession
from tests.brokers import events_of, log_lines
from tests.contract.coordinators import broker, topic
from tests.skipping_loop import run_skipping, skip
from tests.unit.zookeeper_fakes import InlinePool, NotedRandom, with_coordinator
from tests.zookeeper_in_memory import MemoryZookeeper, settled

GOVERNOR = "/memq/governor"
BROKER = "/memq/brokers/b1"
B1 = broker("b1", "s1")
Work = Callable[[ZookeeperCoordinator], Awaitable[object]]


@pytest.fixture(name="server")
def server_in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryZookeeper]:
    server = MemoryZookeeper()
    monkeypatch.setattr(session_module, "make_client", server.client)
    monkeypatch.setattr(session_module, "ThreadPool", InlinePool)
    yield server
    assert all(client.ended == 2 for client in server.clients), "each client is stopped and closed, once"


def before_commit(server: MemoryZookeeper, number: int, hook: Callable[[], object]) -> None:
    """Call `hook` before the transaction after the next `number` ones."""
    if number == 0:
        server.before_commit = hook
    else:
        server.before_commit = lambda: before_commit(server, number - 1, hook)


def swallow(server: MemoryZookeeper) -> None:
    """Leave the next transaction unanswered."""
    server.silent = True
    asyncio.get_running_loop().call_soon(setattr, server, "silent", False)


async def held_partition(one: ZookeeperCoordinator) -> None:
    await one.create_topic(topic(partitions=1))
    (row,) = await one.assignments()
    await one.set_assignment(replace(row, broker="b1", session="s1", epoch=1))


async def change_partition(one: ZookeeperCoordinator) -> None:
    (row,) = await one.assignments()
    await one.set_assignment(replace(row, broker="b2"))


UNANSWERED: dict[str, tuple[Work, Work, int]] = {
    "create_topic": (lambda one: one.topics(), lambda one: one.create_topic(topic()), 0),
    "set_assignment": (held_partition, change_partition, 0),
    "govern": (lambda one: one.register(B1), lambda one: one.govern(B1), 0),
    "register": (lambda one: one.topics(), lambda one: one.register(B1), 0),
    "leave": (lambda one: one.register(B1), lambda one: one.unregister(B1), 0),
    "release": (held_partition, lambda one: one.unregister(B1), 0),
}


@pytest.mark.parametrize(("prepare", "call", "number"), UNANSWERED.values(), ids=UNANSWERED)
def test_a_change_without_an_answer_is_an_error(
    prepare: Work, call: Work, number: int, server: MemoryZookeeper
) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        await prepare(one)
        before_commit(server, number, partial(swallow, server))
        with pytest.raises(UnreachableError, match="does not answer"):
            await call(one)

    with_coordinator(work)


def test_a_governor_that_is_not_removed_for_lack_of_an_answer_is_an_error(server: MemoryZookeeper) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        await one.register(B1)
        assert await one.govern(B1) == 1
        before_commit(server, 1, partial(swallow, server))
        with pytest.raises(UnreachableError, match="does not answer"):
            await one.unregister(B1)

    with_coordinator(work)


def test_a_release_of_a_single_assignment_without_an_answer_is_an_error(server: MemoryZookeeper) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        await held_partition(one)
        (path,) = (each for each in server.nodes if each.rpartition("/")[0].endswith(topic().id))

        def change() -> None:
            server.apply([("set", path, server.nodes[path][0], -1, 0)])
            before_commit(server, 0, change_again)

        def change_again() -> None:
            before_commit(server, 0, partial(swallow, server))
            server.apply([("set", path, server.nodes[path][0], -1, 0)])

        before_commit(server, 0, change)
        with pytest.raises(UnreachableError, match="does not answer"):
            await one.unregister(B1)

    with_coordinator(work)


# ---- races ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [False, True])
def test_a_node_that_another_session_makes_or_changes_meanwhile_is_replaced(
    known: bool, server: MemoryZookeeper
) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        await one.topics()
        entry = b'{"id":"b1","session":"s0","address":"here:1"}'
        if known:
            server.apply([("create", BROKER, entry, -1, 99)])
        operation = ("set", BROKER, entry, -1, 0) if known else ("create", BROKER, entry, -1, 99)
        before_commit(server, 0, lambda: server.apply([operation]))
        await one.register(B1)
        assert list(await one.brokers()) == [B1]
        await one.close()
        assert BROKER not in server.nodes, "it ends with its session"

    with_coordinator(work)


def test_a_governor_that_is_gone_already_is_left(server: MemoryZookeeper) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        await one.register(B1)
        assert await one.govern(B1) == 1
        before_commit(server, 1, lambda: server.apply([("delete", GOVERNOR, b"", -1, 0)]))
        await one.unregister(B1)
        assert await one.governor() == ""

    with_coordinator(work)


def test_another_broker_that_governs_first_is_no_error(server: MemoryZookeeper) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        await one.register(B1)
        other = b'{"id":"b2","session":"s2","term":1}'
        before_commit(server, 0, lambda: server.apply([("create", GOVERNOR, other, -1, 99)]))
        assert await one.govern(B1) == 0
        assert await one.governor() == "b2"

    with_coordinator(work)


def test_a_topic_that_another_broker_creates_meanwhile_exists_already(server: MemoryZookeeper) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        await one.topics()
        before_commit(server, 0, lambda: server.apply([("create", "/memq/topics/clicks", b"{}", -1, 0)]))
        with pytest.raises(AlreadyExistsError, match="topic 'clicks' exists already"):
            await one.create_topic(topic())

    with_coordinator(work)


@pytest.mark.parametrize("term", [0, 1])
def test_a_change_during_a_term_is_a_conflict_of_versions(term: int, server: MemoryZookeeper) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        await one.register(B1)
        assert await one.govern(B1) == 1
        await one.create_topic(topic(partitions=1))
        (row,) = await one.assignments()
        (path,) = (each for each in server.nodes if each.rpartition("/")[0].endswith(topic().id))
        before_commit(server, 0, lambda: server.apply([("set", path, b"{}", -1, 0)]))
        with pytest.raises(VersionConflictError):
            await one.set_assignment(replace(row, broker="b1"), term=term)

    with_coordinator(work)


def test_loads_of_a_broker_that_has_left_are_not_reported_again(server: MemoryZookeeper) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        await one.register(B1)
        await one.report(B1, [])
        await one.unregister(B1)
        await one.register(broker("b1", "s2"))
        server.clients[0].expire()
        await skip(10)
        assert BROKER in server.nodes
        assert "/memq/loads/b1" not in server.nodes

    with_coordinator(work)


# ---- lost events, and what others wrote ----------------------------------------------------------


def test_a_first_connection_is_not_tried_for_ever(server: MemoryZookeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stops(session: ZookeeperSession, *_: object) -> None:
        raise UnreachableError("it stops")

    monkeypatch.setattr(ZookeeperSession, "create_missing", stops)

    async def work(one: ZookeeperCoordinator) -> None:
        with pytest.raises(UnreachableError, match="it stops"):
            async with asyncio.timeout(300):
                await one.brokers()

    with_coordinator(work)


@pytest.mark.parametrize("reconnected", [False, True])
def test_changes_whose_events_are_lost_are_read_after_a_minute_or_a_reconnection(
    reconnected: bool, server: MemoryZookeeper
) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        await one.create_topic(topic(partitions=1))
        assert len(await one.topics()) == 1
        server.deaf = True
        server.apply([("delete", "/memq/topics/clicks", b"", -1, 0)])
        await skip(1)
        assert len(await one.topics()) == 1
        if reconnected:
            server.clients[0].take(KazooState.SUSPENDED)
            server.clients[0].take(KazooState.CONNECTED)
            await settled()
        else:
            await skip(REFRESH_S)
        assert list(await one.topics()) == []

    with_coordinator(work)


class Calls:
    """Counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    async def notice(self) -> None:
        self.count += 1


def test_watchers_are_called_for_changes_after_they_watch(server: MemoryZookeeper) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        await one.create_topic(topic(partitions=1))
        first, second = Calls(), Calls()
        leave = one.watch(first.notice)
        await skip(10)
        assert first.count == 0
        leave()
        server.apply([("set", "/memq/topics/clicks", server.nodes["/memq/topics/clicks"][0], -1, 0)])
        await skip(10)
        one.watch(second.notice)
        await skip(10)
        before = second.count
        server.apply([("set", "/memq/topics/clicks", server.nodes["/memq/topics/clicks"][0], -1, 0)])
        await skip(10)
        assert (first.count, second.count) == (0, before + 1)

    with_coordinator(work)


def test_a_broker_that_begins_to_govern_notices_it_though_the_event_is_lost(server: MemoryZookeeper) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        await one.register(B1)
        calls = Calls()
        one.watch(calls.notice)
        await skip(10)
        server.deaf = True
        assert await one.govern(B1) == 1
        await skip(10)
        assert calls.count == 1

    with_coordinator(work)


def test_names_and_marks_that_are_no_text_are_read(server: MemoryZookeeper) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        made = topic(partitions=1)
        await one.create_topic(made)
        await one.delete_topic(made)
        (path,) = (each for each in server.nodes if each.endswith(made.id))
        server.apply([("set", path, b"\xff", -1, 0)])
        assert await one.deleted(made.id)
        server.requests.clear()
        assert await one.store_mark("first") == "first"
        mark = next(path for kind, path in server.requests if kind == "sync")
        server.apply([("set", mark, b"\xff", -1, 0)])
        assert await one.store_mark() == "\N{REPLACEMENT CHARACTER}"

    with_coordinator(work)


def test_a_topic_with_an_invalid_name_is_refused_before_the_first_connection(server: MemoryZookeeper) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        errors: list[type[MemqError]] = []
        for call in (one.create_topic, one.alter_topic):
            try:
                await call(topic("no topic"))
            except MemqError as error:
                errors.append(type(error))
        assert errors == [InvalidNameError] * 2
        assert server.clients == []

    with_coordinator(work)


# ---- sessions ------------------------------------------------------------------------------------


def test_tries_to_enter_a_broker_again_have_growing_pauses(server: MemoryZookeeper) -> None:
    chance = NotedRandom()

    async def work(one: ZookeeperCoordinator) -> None:
        await one.register(B1)
        server.refusal = NoAuthError()
        server.clients[0].expire()
        await skip(0.5)
        server.refusal = None
        await skip(10)
        assert list(await one.brokers()) == [B1]

    with_coordinator(work, chance)
    assert chance.bounds[:3] == [0.1, 0.2, 0.4]
    assert len(chance.bounds) == 3


def test_the_first_failed_read_of_changes_is_the_first_try(
    server: MemoryZookeeper, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        await one.topics()
        server.refusal = NoAuthError()
        one.watch(Calls().notice)
        await skip(0.1)
        server.refusal = None
        await skip(5)

    with_coordinator(work)
    assert "try 1: " in log_lines(caplog)[0]


def test_all_works_end_before_the_error_of_one_is_raised() -> None:
    done: list[str] = []

    async def fail() -> None:
        raise UnreachableError("away")

    async def last() -> None:
        await skip(1)
        done.append("last")

    async def work() -> None:
        with pytest.raises(UnreachableError, match="away"):
            await gathered([fail(), last()])
        assert done == ["last"]

    run_skipping(work())


def test_a_client_without_a_session_has_the_number_0(server: MemoryZookeeper) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        assert one.session.identity == (0, b"")
        server.silent = True
        with pytest.raises(UnreachableError):
            await one.session.start()
        assert (one.session.number, one.session.up) == (0, False)

    with_coordinator(work)


def test_a_client_that_was_begun_in_vain_is_ended_when_the_old_one_reconnects(server: MemoryZookeeper) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        await one.topics()
        server.silent = True
        server.clients[0].take(KazooState.SUSPENDED)
        while len(server.clients) < 2:
            await skip(1)
        server.silent = False
        server.clients[0].take(KazooState.CONNECTED)
        await settled()
        assert [client.ended for client in server.clients] == [0, 2]

    with_coordinator(work)


def test_a_client_whose_end_fails_is_logged(server: MemoryZookeeper, caplog: pytest.LogCaptureFixture) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        await one.topics()
        stop = server.clients[0].stop

        def fail() -> None:
            stop()
            raise KazooException("it hangs")

        server.clients[0].stop = fail  # type: ignore[method-assign]

    with_coordinator(work)
    assert events_of(caplog) == ["zookeeper-close-failed"]


def test_tools_are_checked_before_the_first_connection(server: MemoryZookeeper) -> None:
    async def run() -> None:
        one = server.coordinator(tls=True, tls_ca_file="/nowhere/ca.pem")
        with pytest.raises(InvalidSettingError, match="tls_ca_file"):
            await one.topics()
        await one.close()

    run_skipping(run())
    assert server.clients == []


def test_a_node_whose_read_fails_is_not_absent(server: MemoryZookeeper, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(session: ZookeeperSession, path: str, watch: object = None) -> None:
        raise UnreachableError("away")

    async def work(one: ZookeeperCoordinator) -> None:
        await one.topics()
        monkeypatch.setattr(ZookeeperSession, "read", away)
        with pytest.raises(UnreachableError, match="away"):
            await one.session.find("/nothing")

    with_coordinator(work)


def test_an_error_of_the_operating_system_names_its_node(server: MemoryZookeeper) -> None:
    async def work(one: ZookeeperCoordinator) -> None:
        await one.topics()
        server.refusal = OSError("a broken pipe")
        with pytest.raises(UnreachableError, match=r"did not answer for node /memq/x: .*a broken pipe"):
            await one.session.children("/x")

    with_coordinator(work)
