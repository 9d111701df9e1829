"""The coordinator on a ZooKeeper in memory: what other brokers do between its reads and its changes, and its cache."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from kazoo.protocol.states import KazooState
from msgspec.structs import replace

from memq.errors import ClosedError, DeniedError, InvalidRequestError, InvalidSettingError, VersionConflictError
from memq.governor import Assignment
from memq.governor.zookeeper import security
from memq.governor.zookeeper import session as session_module
from memq.governor.zookeeper.coordinator import ZookeeperCoordinator
from memq.governor.zookeeper.mirror import DecodedNodes, Mirror, MirroredValue
from memq.governor.zookeeper.security import check_tools
from memq.governor.zookeeper.session import (
    CreateNode,
    KazooLog,
    Node,
    SetData,
    ZookeeperSession,
    make_client,
)
from memq.governor.zookeeper.settings import ZookeeperAddress, ZookeeperSettings, check_together
from tests.brokers import log_lines
from tests.contract.coordinators import broker, topic
from tests.unit.zookeeper_fakes import FakeSession, entered, run, with_fake_session
from tests.unit.zookeeper_fakes import broker as entry
from tests.zookeeper_in_memory import MODIFIED_MS, MemoryZookeeper, settled


@pytest.fixture(name="server")
def server_in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryZookeeper]:
    server = MemoryZookeeper()
    monkeypatch.setattr(session_module, "make_client", server.client)
    yield server
    assert all(client.ended == 2 for client in server.clients), "each client is stopped and closed, once"


def commits(server: MemoryZookeeper) -> list[str]:
    return [kinds for kind, kinds in server.requests if kind == "commit"]


# ---- membership ----------------------------------------------------------------------------------


def test_a_node_of_an_older_session_is_replaced_and_one_of_this_session_is_changed(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator) -> None:
        await one.register(broker("b1", "s1"))
        server.requests.clear()
        await one.register(broker("b1", "s1"))
        await two.register(broker("b1", "s2"))
        assert commits(server) == ["set", "delete create"]
        await one.close()
        assert list(await two.brokers()) == [broker("b1", "s2")], "it does not end with the older session"

    run(scenario, server.coordinator(), server.coordinator())


def test_a_node_that_is_removed_while_it_is_replaced_is_made(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator) -> None:
        await one.register(broker("b1", "s1"))
        await two.topics()
        server.before_commit = lambda: server.apply([("delete", "/memq/brokers/b1", b"", -1, 0)])
        await two.register(broker("b1", "s2"))
        assert list(await two.brokers()) == [broker("b1", "s2")]

    run(scenario, server.coordinator(), server.coordinator())


def test_a_connection_that_comes_back_with_its_session_enters_nobody_again(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        await one.register(broker("b1", "s1"))
        called: list[int] = []

        async def notice() -> None:
            called.append(1)

        one.watch(notice)
        await settled(100)
        assert called == [], "the first read is no change, whatever this broker did before"
        server.requests.clear()
        server.clients[0].take(KazooState.SUSPENDED)
        server.clients[0].take(KazooState.CONNECTED)
        while not called:
            await settled()
        assert commits(server) == []

    run(scenario, server.coordinator())


def test_tries_to_enter_a_broker_again_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(coordinator: ZookeeperCoordinator, session: FakeSession) -> None:
        await coordinator.register(entry())
        session.finds.extend([DeniedError("no rights")] * 3)
        session.lose()
        assert await entered(coordinator) == [entry()]

    with caplog.at_level(logging.WARNING, "memq"):
        with_fake_session(monkeypatch, work)
    found = [line.partition(", ")[2].partition(":")[0] for line in log_lines(caplog)]
    assert found == ["try 1", "try 2", "try 3"]


def test_a_broker_that_leaves_needs_no_assignment_of_a_topic_that_is_deleted_meanwhile(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        await one.register(broker("b1", "s1"))
        made = topic(partitions=2)
        await one.create_topic(made)
        for row in await one.assignments():
            await one.set_assignment(replace(row, broker="b1", session="s1", epoch=1))
        stale = list(await one.assignments())
        await one.delete_topic(made)

        async def assignments() -> list[Assignment]:
            return stale

        one.assignments = assignments  # type: ignore[method-assign]
        await one.unregister(broker("b1", "s1"))
        assert list(await one.brokers()) == []

    run(scenario, server.coordinator())


def test_a_broker_whose_term_another_one_began_does_not_govern(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        await one.register(broker("b1", "s1"))
        terms = [path for path in server.nodes if "term" in path]
        server.before_commit = lambda: server.apply([("set", terms[0], b"", -1, 0)])
        assert await one.govern(broker("b1", "s1")) == 0
        assert await one.govern(broker("b1", "s1")) == 2

    run(scenario, server.coordinator())


def test_closing_leaves_no_task(server: MemoryZookeeper) -> None:
    async def work() -> None:
        one = server.coordinator()
        await one.register(broker("b1"))

        async def nothing() -> None:
            """Nothing to do."""

        one.watch(nothing)
        await settled()
        assert one.session.identity == (1, b"password")
        await one.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert one.session.identity == (0, b"")

    asyncio.run(work())


# ---- topics and assignments ----------------------------------------------------------------------


def test_a_topic_of_which_a_partition_is_left_is_not_deleted(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        made = topic(partitions=2)
        await one.create_topic(made)
        assert not await one.deleted(made.id)
        first, second = sorted(path for path in server.nodes if path.rpartition("/")[0].endswith(made.id))
        server.apply([("delete", "/memq/topics/clicks", b"", -1, 0), ("delete", first, b"", -1, 0)])
        assert not await one.deleted(made.id), "one absent partition proves nothing"
        server.apply([("delete", second, b"", -1, 0)])
        assert await one.deleted(made.id)

    run(scenario, server.coordinator())


def test_an_assignment_that_is_changed_during_the_change_is_a_conflict(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        made = topic(partitions=1)
        await one.create_topic(made)
        (row,) = await one.assignments()
        (path,) = (path for path in server.nodes if path.rpartition("/")[0].endswith(made.id))
        server.before_commit = lambda: server.apply([("set", path, b"{}", -1, 0)])
        with pytest.raises(VersionConflictError, match=f"partition 0 of topic id {made.id} was changed meanwhile"):
            await one.set_assignment(replace(row, broker="b1"))

    run(scenario, server.coordinator())


def test_reads_that_decide_wait_for_the_newest_changes(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        made = topic(partitions=1)
        await one.create_topic(made)
        for read in (one.assignment(made.id, 0), one.current_topic("clicks"), one.store_mark()):
            server.requests.clear()
            await read
            assert [kind for kind, _ in server.requests][:2] == ["sync", "get"]
            assert len({path for _, path in server.requests}) == 1

    run(scenario, server.coordinator())


def test_changes_of_topics_and_assignments_reach_the_watchers(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator) -> None:
        called: list[int] = []

        async def notice() -> None:
            called.append(1)

        two.watch(notice)
        await settled(200)
        assert called == []
        await one.create_topic(topic(partitions=1))
        while not called:
            await settled()
        await settled(200)
        called.clear()
        (row,) = await one.assignments()
        await one.set_assignment(replace(row, broker="b1"))
        while not called:
            await settled()

    run(scenario, server.coordinator(), server.coordinator())


def test_a_mark_that_another_broker_stored_meanwhile_is_returned_though_it_is_no_text(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        assert await one.store_mark() == ""
        path = next(path for kind, path in server.requests if kind == "sync")
        server.before_commit = lambda: server.apply([("create", path, b"\xff", -1, 0)])
        assert await one.store_mark("mine") == "\N{REPLACEMENT CHARACTER}"

    run(scenario, server.coordinator())


Call = Callable[[ZookeeperCoordinator], Awaitable[object]]
CALLS: dict[str, Call] = {
    "alter_topic": lambda one: one.alter_topic(topic()),
    "assignment": lambda one: one.assignment("ab" * 16, 0),
    "assignments": lambda one: one.assignments(),
    "brokers": lambda one: one.brokers(),
    "create_topic": lambda one: one.create_topic(topic()),
    "current_topic": lambda one: one.current_topic("clicks"),
    "delete_topic": lambda one: one.delete_topic(topic()),
    "deleted": lambda one: one.deleted("ab" * 16),
    "govern": lambda one: one.govern(broker("b1")),
    "governor": lambda one: one.governor(),
    "loads": lambda one: one.loads(),
    "register": lambda one: one.register(broker("b1")),
    "report": lambda one: one.report(broker("b1"), []),
    "store_mark": lambda one: one.store_mark(),
    "topics": lambda one: one.topics(),
    "unregister": lambda one: one.unregister(broker("b1")),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_call_answers_for_another_cluster_or_after_the_end(call: Call, server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator, other: ZookeeperCoordinator) -> None:
        await one.topics()
        with pytest.raises(InvalidRequestError, match="belongs to cluster 'test', not 'other'"):
            await call(other)
        await one.close()
        with pytest.raises(ClosedError):
            await call(one)

    run(scenario, server.coordinator(), server.coordinator("other"))


# ---- the cache -----------------------------------------------------------------------------------


def test_the_stamp_of_a_mirror_grows_with_each_read_and_each_loss(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        mirror = Mirror(one.session, lambda: None)
        assert mirror.stamp() is None, "there is no connection"
        await one.session.create_missing(["/a", "/a/x"])
        stamps = [mirror.stamp()]

        async def after(work: Awaitable[object]) -> None:
            await work
            await settled()
            stamps.append(mirror.stamp())

        await after(mirror.node("/a"))
        await after(mirror.children("/a"))
        await after(one.session.change(SetData("/a", b"new")))
        await after(one.session.change(CreateNode("/a/y")))
        mirror.forget("/a")
        stamps.append(mirror.stamp())
        mirror.clear()
        stamps.append(mirror.stamp())
        assert stamps == sorted({stamp for stamp in stamps if stamp is not None})
        assert len(stamps) == 7

    run(scenario, server.coordinator())


def test_a_cleared_mirror_reads_nodes_and_children_again(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        mirror = Mirror(one.session, lambda: None)
        await one.session.create_missing(["/a", "/a/x"])
        assert (await mirror.children("/a"), await mirror.node("/a/y")) == (["x"], None)
        server.deaf = True
        await one.session.change(CreateNode("/a/y"))
        assert (await mirror.children("/a"), await mirror.node("/a/y")) == (["x"], None)
        mirror.clear()
        assert await mirror.children("/a") == ["x", "y"]
        assert await mirror.node("/a/y") is not None

    run(scenario, server.coordinator())


def test_a_value_during_whose_reading_the_mirror_changed_is_read_again(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        await one.session.start()
        mirror = Mirror(one.session, lambda: None)
        value: MirroredValue[int] = MirroredValue(mirror)
        reads = 0

        async def read() -> int:
            nonlocal reads
            reads += 1
            if reads == 1:
                mirror.forget("/a")
            return reads

        assert [await value.value(read) for _ in range(4)] == [1, 2, 2, 2]
        mirror.forget("/a")
        assert await value.value(read) == 3

    run(scenario, server.coordinator())


def test_a_read_without_a_watch_sets_none(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, failure: failures.append(failure))
        await one.session.create_missing(["/a"])
        await one.session.find("/a")
        await one.session.children("/a")
        await one.session.change(SetData("/a", b"new"), CreateNode("/a/x"))
        await settled()
        assert failures == []

    run(scenario, server.coordinator())


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("installed", [True, False])
def test_sasl_needs_its_package(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr(security, "find_spec", lambda name: object() if installed else None)
    check_tools(ZookeeperSettings())
    settings = ZookeeperSettings(sasl_mechanism="PLAIN")
    if installed:
        check_tools(settings)
        return
    with pytest.raises(InvalidSettingError, match="needs the package pure-sasl"):
        check_tools(settings)


def test_a_client_connects_for_ever_with_the_settings_that_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def refuse(**options: Any) -> None:
        made.append(options)
        raise ValueError("enough")

    monkeypatch.setattr(session_module, "KazooClient", refuse)
    sasl = {"sasl_mechanism": "PLAIN", "sasl_username": "u", "sasl_password": "p"}
    settings = ZookeeperSettings(session_timeout_ms=3_500, **sasl)  # type: ignore[arg-type]
    with pytest.raises(InvalidSettingError, match="enough"):
        make_client(ZookeeperAddress("h:1", "/x"), settings, logging.getLogger("test"))
    (options,) = made
    assert options["connection_retry"] == {"max_tries": -1, "delay": 0.1, "max_delay": session_module.RETRY_DELAY_S_MAX}
    assert (options["hosts"], options["timeout"]) == ("h:1", 3.5)
    assert {name: options["sasl_options"][name] for name in ("mechanism", "username", "password")} == {
        "mechanism": "PLAIN",
        "username": "u",
        "password": "p",
    }


def test_credentials_of_digest_alone_need_a_colon() -> None:
    for auth in ("digest:u:p", "custom:word", "custom:a:b", ""):
        assert check_together(ZookeeperSettings(auth=auth)).auth == auth
    for auth in ("digest:u", "digest:", ":word", "word"):
        with pytest.raises(InvalidSettingError, match="auth"):
            check_together(ZookeeperSettings(auth=auth))


def test_the_log_of_a_client_keeps_its_last_warning_and_passes_errors_on(caplog: pytest.LogCaptureFixture) -> None:
    log = KazooLog()
    log.logger.info("an information")
    assert log.last == ""
    log.logger.warning("a warning of %s", "kazoo")
    assert log.last == "a warning of kazoo"
    assert caplog.records == []
    log.logger.error("an error")
    assert log.last == "an error"
    assert [record.getMessage() for record in caplog.records] == ["an error"]


def test_values_of_missing_nodes_are_left_out_and_known_ones_are_not_decoded_again() -> None:
    decoded: list[str] = []

    def decode(path: str, node: Node) -> bytes:
        decoded.append(path)
        return node.data

    values = DecodedNodes(decode)
    one, two = Node(b"1", 0, 0), Node(b"2", 0, 0)
    assert values.values(["/a", "/b", "/c"], [one, None, two]) == [b"1", b"2"]
    assert values.values(["/a", "/c"], [one, Node(b"3", 1, 0)]) == [b"1", b"3"]
    assert decoded == ["/a", "/c", "/c"]


def test_a_known_node_is_read_once(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        mirror = Mirror(one.session, lambda: None)
        await one.session.create_missing(["/a"])
        assert mirror.known("/a") is None
        server.requests.clear()
        for _ in range(2):
            assert await mirror.node("/a") == Node(b"", 0, 0, MODIFIED_MS)
            assert await mirror.children("/a") == []
        assert server.requests == [("get", "/memq/a"), ("children", "/memq/a")]
        assert mirror.known("/a") == Node(b"", 0, 0, MODIFIED_MS)
        server.clients[0].take(KazooState.SUSPENDED)
        await settled()
        assert mirror.known("/a") is None

    run(scenario, server.coordinator())


def test_a_topic_is_altered_at_its_own_version(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        made = topic(partitions=1)
        await one.create_topic(made)
        second = await one.alter_topic(made)
        third = await one.alter_topic(second)
        assert (second.version, third.version) == (made.version + 1, made.version + 2)
        path = "/memq/topics/clicks"
        server.before_commit = lambda: server.apply([("set", path, server.nodes[path][0], -1, 0)])
        with pytest.raises(VersionConflictError):
            await one.alter_topic(third)

    run(scenario, server.coordinator())


def test_own_changes_reach_the_watchers_though_their_events_are_lost(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        called: list[int] = []

        async def notice() -> None:
            called.append(1)

        await one.topics()
        one.watch(notice)
        await settled(200)
        server.deaf = True
        await one.create_topic(topic(partitions=1))
        while not called:
            await settled()

    run(scenario, server.coordinator())


def test_a_topic_whose_first_partition_exists_is_not_deleted_whatever_a_list_says(
    server: MemoryZookeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_children(session: object, path: str, watch: object = None) -> list[str]:
        return []

    async def scenario(one: ZookeeperCoordinator) -> None:
        made = topic(partitions=1)
        await one.create_topic(made)
        server.apply([("delete", "/memq/topics/clicks", b"", -1, 0)])
        monkeypatch.setattr(ZookeeperSession, "children", no_children)
        assert not await one.deleted(made.id)

    run(scenario, server.coordinator())


def test_loads_are_reported_before_a_broker_is_entered_again(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        await one.register(broker("b1", "s1"))
        await one.report(broker("b1", "s1"), [])
        server.requests.clear()
        server.clients[0].expire()
        while "/memq/brokers/b1" not in server.nodes:
            await settled()
        own = [path for path in server.nodes if path.endswith("/b1")]
        assert [path.split("/")[2] for path in own] == ["loads", "brokers"]
        assert server.requests[0] == ("sync", "/memq/brokers/b1"), "another server may lag"

    run(scenario, server.coordinator())
