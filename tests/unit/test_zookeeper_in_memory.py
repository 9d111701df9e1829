"""The coordinator on a ZooKeeper in memory: the contract of the port, lost sessions, transactions, the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
from kazoo.exceptions import (
    AuthFailedError,
    BadArgumentsError,
    BadVersionError,
    InvalidACLError,
    MarshallingError,
    NoAuthError,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    OperationTimeoutError,
)
from kazoo.protocol.states import KazooState
from msgspec.structs import replace

from memq.errors import (
    AlreadyExistsError,
    ClosedError,
    CorruptDataError,
    DeniedError,
    InvalidNameError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    TermFencedError,
    TooLargeError,
    UnreachableError,
    VersionConflictError,
)
from memq.governor import Assignment, MarkedCoordinator
from memq.governor.zookeeper import session as session_module
from memq.governor.zookeeper.coordinator import RELEASES_AT_ONCE_MAX, ZookeeperCoordinator
from memq.governor.zookeeper.mirror import Mirror
from memq.governor.zookeeper.session import CreateNode, Node, SetData
from memq.topic import TopicSettings
from tests.brokers import events_of
from tests.contract import test_coordinator
from tests.contract.coordinators import broker, topic
from tests.unit.zookeeper_fakes import run
from tests.zookeeper_in_memory import MODIFIED_MS, MemoryZookeeper, settled

Scenario = Callable[[MarkedCoordinator], Awaitable[None]]
CONTRACT = {name: each.scenario for name, each in vars(test_coordinator).items() if hasattr(each, "scenario")}


@pytest.fixture(name="server")
def server_in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryZookeeper]:
    server = MemoryZookeeper()
    monkeypatch.setattr(session_module, "make_client", server.client)
    yield server
    assert all(client.ended == 2 for client in server.clients), "each client is stopped and closed, once"


@pytest.mark.parametrize("scenario", CONTRACT.values(), ids=CONTRACT)
def test_the_contract(scenario: Scenario, server: MemoryZookeeper) -> None:
    run(scenario, server.coordinator())


def test_a_broker_whose_session_was_lost_is_entered_again_and_governs_no_more(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator) -> None:
        await one.register(broker("b1", "s1"))
        await two.register(broker("b2", "s2"))
        await one.create_topic(topic(partitions=1))
        assert (await one.govern(broker("b1", "s1")), await two.govern(broker("b2", "s2"))) == (1, 0)
        assert (await one.govern(broker("b1", "s1")), await one.governor()) == (1, "b1")
        server.clients[0].expire()
        await settled(60)
        assert [entry.id for entry in await two.brokers()] == ["b1", "b2"]
        assert await two.govern(broker("b2", "s2")) == 2
        await settled()
        current = await two.assignment(topic().id, 0)
        with pytest.raises(TermFencedError, match="term 1 of the governor has ended, the last one is 2"):
            await one.set_assignment(replace(current, broker="b1"), term=1)
        assert (await one.govern(broker("b1", "s1")), await one.governor()) == (0, "b2")
        assert (await two.set_assignment(replace(current, broker="b2"), term=2)).version == 1

    run(scenario, server.coordinator(), server.coordinator())


def test_leaving_broker_releases_many_partitions_with_few_transactions(server: MemoryZookeeper) -> None:
    count = 2 * RELEASES_AT_ONCE_MAX + 1

    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator) -> None:
        await one.register(broker("b1", "s1"))
        await one.create_topic(topic(partitions=count))
        for row in await one.assignments():
            await one.set_assignment(replace(row, broker="b1", session="s1", epoch=3))
        stale = list(await one.assignments())
        gone = replace(stale[RELEASES_AT_ONCE_MAX], broker="b2", session="s2", epoch=4)
        await two.set_assignment(gone)

        async def assignments() -> list[Assignment]:
            return stale

        one.assignments = assignments  # type: ignore[method-assign]
        server.requests.clear()
        await one.unregister(broker("b1", "s1"))
        free = [replace(row, broker="", session="", version=2) for row in stale]
        free[RELEASES_AT_ONCE_MAX] = replace(gone, version=2)
        assert list(await two.assignments()) == free, "the partition that another broker took stays its own"
        puts = [kinds.count("set") for kind, kinds in server.requests if kind == "commit" and "set" in kinds]
        assert puts == [100, 100, *[1] * 99, 1]
        assert list(await two.brokers()) == []

    run(scenario, server.coordinator(), server.coordinator())


def test_known_assignment_is_not_read_again_and_hides_no_change(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator) -> None:
        await one.create_topic(topic(partitions=1))
        (first,) = await one.assignments()
        server.requests.clear()
        second = await one.set_assignment(replace(first, broker="b1", epoch=1))
        assert server.requests == [("commit", "set")]
        with pytest.raises(VersionConflictError, match="has version 1, not 0"):
            await one.set_assignment(replace(first, broker="b2"))
        (known,) = await one.assignments()
        assert known == second
        server.requests.clear()
        assert await one.assignments() is await one.assignments()
        assert server.requests == []
        with pytest.raises(InvalidRequestError, match="epoch 0 is below 1: epochs only grow"):
            await one.set_assignment(replace(known, epoch=0))
        await two.set_assignment(replace(second, broker="b2"))
        with pytest.raises(VersionConflictError):
            await one.set_assignment(replace(known, broker="b3"))
        assert (await one.assignment(first.topic_id, 0)).broker == "b2"
        await settled()
        assert [entry.broker for entry in await one.assignments()] == ["b2"]

    run(scenario, server.coordinator(), server.coordinator())


def test_topics_are_changed_at_their_version_alone(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        made = topic(partitions=1)
        await one.create_topic(made)
        altered = await one.alter_topic(replace(made, settings=TopicSettings(retention_ms=0)))
        assert altered.version == made.version + 1
        for change in (one.alter_topic, one.delete_topic):
            with pytest.raises(VersionConflictError, match="topic 'clicks' has version 2, not 1"):
                await change(made)
        await one.delete_topic(altered)
        assert await one.current_topic("clicks") is None

    run(scenario, server.coordinator())


def test_a_path_belongs_to_one_cluster(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator, other: ZookeeperCoordinator) -> None:
        await one.topics()
        assert server.nodes["/memq/cluster"][0] == b"test"
        with pytest.raises(InvalidRequestError, match="belongs to cluster 'test', not 'other'"):
            await other.topics()

    run(scenario, server.coordinator(), server.coordinator("other"))


def test_foreign_content_of_a_node_is_named(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        await one.create_topic(topic(partitions=1))
        server.apply([("set", "/memq/topics/clicks", b"nonsense", -1, 0)])
        await settled()
        with pytest.raises(CorruptDataError, match="/topics/clicks holds no Topic"):
            await one.topics()

    run(scenario, server.coordinator())


@pytest.mark.parametrize(
    "content",
    [
        b"nonsense",
        b'{"version":1,"rules":[],"quotas":[{"name":"ann","records_s":-1}]}',
        b'{"version":1,"rules":[{"effect":"allow","principal":"","permission":"read","kind":"topic","name":"x"}]}',
    ],
)
def test_rules_that_are_not_sound_are_named(server: MemoryZookeeper, content: bytes) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        await one.topics()
        server.apply([("create", "/memq/rules", content, -1, 0)])
        with pytest.raises(CorruptDataError, match="/rules holds no rules that are sound"):
            await one.rules.read()

    run(scenario, server.coordinator())


def test_a_damaged_list_of_early_takeovers_ends_no_membership(
    server: MemoryZookeeper, caplog: pytest.LogCaptureFixture
) -> None:
    """The members are those of the sessions. Only the governor empties the node; early takeovers then work again."""
    node, one_ms = "/memq/takeovers", 1_760_000_000_000

    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator) -> None:
        governor, other = broker("b1", "s1"), replace(broker("b2", "s2"), host="here")
        await one.register(governor)
        await two.register(other)
        assert await one.govern(governor) == 1
        assert await one.take_over(other, term=1, now_ms=one_ms)
        server.apply([("set", node, b"nonsense", -1, 0)])
        await settled()
        assert [list(await each.brokers()) for each in (one, two)] == [[governor, other]] * 2
        assert [await each.governor() for each in (one, two)] == ["b1", "b1"]
        await two.register(other)
        assert await two.govern(other) == 0
        assert server.nodes[node][0] == b"nonsense"
        assert events_of(caplog) == ["takeovers-damaged"] * 2, "one line for each coordinator"
        assert await one.govern(governor) == 1
        assert server.nodes[node][0] == b""
        await settled()
        assert await one.take_over(other, term=1, now_ms=one_ms)
        assert [list(await each.brokers()) for each in (one, two)] == [[governor]] * 2
        assert await one.govern(governor) == 1
        assert list(await one.brokers()) == [governor], "a sound node stays"
        assert events_of(caplog) == ["takeovers-damaged"] * 2

    run(scenario, server.coordinator(), server.coordinator())


def test_an_early_takeover_replaces_a_damaged_list(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        governor, other = broker("b1", "s1"), replace(broker("b2", "s2"), host="here")
        for each in (governor, other):
            await one.register(each)
        assert await one.govern(governor) == 1
        server.apply([("set", "/memq/takeovers", b"{}", -1, 0)])
        assert await one.take_over(other, term=1, now_ms=1_760_000_000_000)
        assert list(await one.brokers()) == [governor]

    run(scenario, server.coordinator())


def test_without_a_connection_calls_fail_at_once_and_nothing_is_asked(
    server: MemoryZookeeper, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        await one.register(broker("b1"))
        await one.create_topic(topic(partitions=1))
        (first,) = await one.assignments()
        (client,) = server.clients
        client.take(KazooState.SUSPENDED)
        await settled()
        server.requests.clear()
        with pytest.raises(UnreachableError):
            await one.session.start()
        for read in (one.brokers, one.topics, one.assignments, one.governor, one.loads):
            with pytest.raises(UnreachableError, match="ZooKeeper at nowhere:2181 does not answer"):
                await read()
        with pytest.raises(UnreachableError):
            await one.set_assignment(replace(first, broker="b1"))
        assert server.requests == []
        client.take(KazooState.CONNECTED)
        await settled()
        assert [entry.id for entry in await one.brokers()] == ["b1"]
        assert (await one.set_assignment(replace(first, broker="b1"))).version == 1
        await one.close()
        with pytest.raises(ClosedError):
            await one.topics()

    run(scenario, server.coordinator())
    assert events_of(caplog) == ["zookeeper-suspended"]


def test_a_server_that_answers_nothing_is_named_in_time(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        await one.topics()
        server.silent = True
        with pytest.raises(UnreachableError, match="ZooKeeper at nowhere:2181 does not answer"):
            await one.loads()

    run(scenario, server.coordinator(session_timeout_ms=20))


def test_a_first_connection_that_does_not_come_is_named_in_time(server: MemoryZookeeper) -> None:
    server.silent = True

    async def scenario(one: ZookeeperCoordinator) -> None:
        with pytest.raises(UnreachableError, match="ZooKeeper at nowhere:2181 does not answer"):
            await one.session.start()

    run(scenario, server.coordinator(connect_timeout_ms=20))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (NoAuthError(), DeniedError),
        (AuthFailedError(), DeniedError),
        (InvalidACLError(), DeniedError),
        (BadArgumentsError(), InvalidRequestError),
        (NoChildrenForEphemeralsError(), InvalidRequestError),
        (MarshallingError(), TooLargeError),
        (BadVersionError(), VersionConflictError),
        (NotEmptyError(), VersionConflictError),
        (NodeExistsError(), AlreadyExistsError),
        (NoNodeError(), NotFoundError),
        (OperationTimeoutError(), UnreachableError),
        (ValueError("an answer that can't be read"), UnreachableError),
    ],
    ids=repr,
)
def test_each_error_of_kazoo_is_one_of_memq(error: Exception, kind: type[MemqError], server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        await one.session.start()
        server.refusal = error
        with pytest.raises(MemqError, match="/memq/x") as caught:
            await one.session.children("/x")
        assert type(caught.value) is kind

    run(scenario, server.coordinator())


def test_own_changes_are_seen_though_their_events_are_lost(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        assert (list(await one.topics()), list(await one.brokers()), await one.governor()) == ([], [], "")
        server.deaf = True
        await one.register(broker("b1", "s1"))
        await one.create_topic(topic(partitions=1))
        assert [each.name for each in await one.topics()] == ["clicks"]
        assert list(await one.brokers()) == [broker("b1", "s1")]
        (first,) = await one.assignments()
        after = await one.set_assignment(replace(first, broker="b1"))
        assert list(await one.assignments()) == [after]
        assert (await one.govern(broker("b1", "s1")), await one.governor()) == (1, "b1")
        await one.unregister(broker("b1", "s1"))
        assert (list(await one.brokers()), await one.governor()) == ([], "")

    run(scenario, server.coordinator())


def test_a_refresh_finds_the_changes_whose_events_were_lost(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        changes: list[int] = []
        mirror = Mirror(one.session, lambda: changes.append(1))
        await one.session.create_missing(["/a", "/a/x", "/b"])
        assert await mirror.children("/a") == ["x"]
        assert [node.data for node in await mirror.nodes(["/a", "/b"]) if node is not None] == [b"", b""]
        await mirror.refresh()
        assert changes == []
        server.deaf = True
        await one.session.change(CreateNode("/a/y"), SetData("/b", b"new"))
        assert await mirror.children("/a") == ["x"]
        stamp = mirror.stamp()
        await mirror.refresh()
        assert len(changes) == 2
        assert mirror.stamp() != stamp
        assert await mirror.children("/a") == ["x", "y"]
        assert await mirror.node("/b") == Node(b"new", 1, 0, MODIFIED_MS)

    run(scenario, server.coordinator())


def test_names_are_checked_before_the_first_connection(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        with pytest.raises(InvalidNameError):
            await one.register(broker("b/1"))
        with pytest.raises(InvalidNameError):
            await one.create_topic(topic("no topic"))
        assert server.clients == []

    run(scenario, server.coordinator())


def test_a_cluster_whose_name_is_no_text_is_another_one(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        await one.session.change(CreateNode("/cluster", b"\xff"))  # the first call connects
        with pytest.raises(InvalidRequestError, match="belongs to cluster"):
            await one.topics()

    server.apply([("create", "/memq", b"", -1, 0)])
    run(scenario, server.coordinator())


@pytest.mark.parametrize("gone", [False, True])
def test_a_node_that_another_session_replaced_or_removed_is_left(gone: bool, server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        path = "/memq/brokers/b1"
        await one.register(broker("b1", "s1"))
        operation = ("delete", path, b"", -1, 0) if gone else ("set", path, server.nodes[path][0], -1, 0)
        server.before_commit = lambda: server.apply([operation])
        await one.unregister(broker("b1", "s1"))
        assert len(await one.brokers()) == int(not gone)

    run(scenario, server.coordinator())


def test_broker_that_left_is_not_entered_again_after_a_lost_session(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator) -> None:
        for session in ("s1", "s2"):
            await one.register(broker("b1", session))
        await one.unregister(broker("b1", "s1"))  # of an older session: the newer one stays
        server.clients[0].expire()
        await settled(60)
        assert list(await one.brokers()) == [broker("b1", "s2")]
        await one.unregister(broker("b1", "s2"))
        server.clients[0].expire()
        await settled(60)
        assert list(await one.brokers()) == []

    run(scenario, server.coordinator())


def test_loads_of_the_same_session_are_replaced_and_those_of_an_older_one_removed(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator) -> None:
        done: list[str] = []
        for each in (one, one, two):
            await each.register(broker("b1", "s1"))
            server.requests.clear()
            await each.report(broker("b1", "s1"), [])
            done += [kinds for kind, kinds in server.requests if kind == "commit"]
        assert done == ["create", "set", "delete create"]

    run(scenario, server.coordinator(), server.coordinator())


def test_watchers_are_called_when_another_broker_governs(server: MemoryZookeeper) -> None:
    async def scenario(one: ZookeeperCoordinator, two: ZookeeperCoordinator) -> None:
        await one.register(broker("b1", "s1"))
        governors: list[str] = []
        called = asyncio.Event()

        async def notice() -> None:
            governors.append(await two.governor())
            called.set()

        two.watch(notice)
        await settled(200)  # the first read sets the watches, and is no change
        assert await one.govern(broker("b1", "s1")) == 1
        while "b1" not in governors:
            await called.wait()
            called.clear()

    run(scenario, server.coordinator(), server.coordinator())
