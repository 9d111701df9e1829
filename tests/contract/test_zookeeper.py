"""Promises of the ZooKeeper coordinator alone, on a real server: sessions, rights, settings."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from kazoo.client import KazooClient
from msgspec.structs import replace

from memq.errors import (
    AlreadyExistsError,
    ClosedError,
    CorruptDataError,
    DeniedError,
    InvalidRequestError,
    TermFencedError,
    UnreachableError,
    VersionConflictError,
)
from memq.governor import Assignment, Coordinator, Load
from memq.governor.zookeeper.coordinator import RELEASES_AT_ONCE_MAX, ZookeeperCoordinator
from memq.governor.zookeeper.session import Node, Operation, SetData
from memq.runtime.clock import SystemClock
from memq.topic import Topic, TopicSettings
from memq_localstack.servers import Server, start_zookeeper
from tests.contract.coordinators import HANG_S, broker, open_zookeeper, path_of, topic
from tests.zookeeper_nodes import outsider

pytestmark = pytest.mark.thorough
Doors = Callable[..., ZookeeperCoordinator]


def over_zookeeper(scenario: Callable[[Doors, Server], Awaitable[None]]) -> Callable[[Path, Server], None]:
    """Make a test of a scenario that opens as many doors to one cluster as it likes."""

    def test(tmp_path: Path, zookeeper: Server) -> None:
        async def run() -> None:
            opened: list[ZookeeperCoordinator] = []

            def door(**section: str) -> ZookeeperCoordinator:
                chosen = {"session_timeout_ms": "1s", **section}
                opened.append(open_zookeeper(zookeeper.address, path_of(tmp_path), **chosen))
                return opened[-1]

            try:
                async with asyncio.timeout(HANG_S):
                    await scenario(door, zookeeper)
            finally:
                zookeeper.resume()
                for each in opened:
                    await each.close()

        asyncio.run(run())

    test.__name__ = scenario.__name__
    return test


async def _read_until_it_fails(coordinator: Coordinator, expected: Assignment) -> None:
    while True:
        assert await coordinator.assignment(expected.topic_id, 0) == expected


async def until(coordinator: Coordinator, holds: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something holds, looking after each change and each failure."""
    changed = asyncio.Event()

    async def notice() -> None:
        changed.set()

    end = coordinator.watch(notice)
    while True:
        changed.clear()
        try:
            if await holds():
                end()
                return
        except UnreachableError:
            await asyncio.sleep(0)
            continue
        await changed.wait()


def expire(coordinator: ZookeeperCoordinator, server: Server) -> None:
    """End a coordinator's session on purpose: ZooKeeper ends it when another client with its number says farewell."""
    double = KazooClient(server.address, client_id=coordinator.session.identity)
    double.start()
    double.stop()
    double.close()


def test_fields_of_a_newer_broker_stay_in_a_topic(tmp_path: Path, zookeeper: Server) -> None:
    path = f"{path_of(tmp_path)}/topics/clicks"

    async def alter() -> Topic:
        coordinator = open_zookeeper(zookeeper.address, path_of(tmp_path))
        try:
            (known,) = await coordinator.topics() or [topic()]
            if known.version == 1:
                await coordinator.create_topic(known)
            else:
                await coordinator.alter_topic(replace(known, settings=TopicSettings(retention_ms=0)))
            return (await coordinator.topics())[0]
        finally:
            await coordinator.close()

    made = asyncio.run(alter())
    with outsider(zookeeper) as client:
        body = json.loads(client.get(path)[0])
        body["settings"]["of_tomorrow"] = 5
        client.set(path, json.dumps(body).encode())
    assert asyncio.run(alter()) == replace(made, version=3, settings=TopicSettings(retention_ms=0))
    with outsider(zookeeper) as client:
        assert json.loads(client.get(path)[0])["settings"] == msgspec.to_builtins(TopicSettings(retention_ms=0)) | {
            "of_tomorrow": 5
        }


@over_zookeeper
async def test_doors_see_what_others_change(door: Doors, server: Server) -> None:
    one, two = door(), door()

    async def two_sees(brokers: int, topics: int, owned: int) -> None:
        async def holds() -> bool:
            owners = [entry for entry in await two.assignments() if entry.broker]
            return (len(await two.brokers()), len(await two.topics()), len(owners)) == (brokers, topics, owned)

        await until(two, holds)

    await one.register(broker("b1"))
    await two_sees(1, 0, 0)
    await one.create_topic(topic(partitions=2))
    await two_sees(1, 1, 0)
    first = (await one.assignments())[0]
    await one.set_assignment(replace(first, broker="b1", epoch=1))
    await two_sees(1, 1, 1)
    await one.close()
    await two_sees(0, 1, 1)
    with pytest.raises(ClosedError):
        await one.topics()


@over_zookeeper
async def test_a_broker_whose_session_was_lost_is_entered_again_and_governs_no_more(
    door: Doors, server: Server
) -> None:
    one, two = door(), door()
    await one.register(broker("b1", "s1"))
    await two.register(broker("b2", "s2"))
    await one.create_topic(topic(partitions=1))
    term = await one.govern(broker("b1", "s1"))
    assert (term, await two.govern(broker("b2", "s2"))) == (1, 0)
    await asyncio.to_thread(expire, one, server)

    async def governs() -> bool:
        return await two.govern(broker("b2", "s2")) == 2

    await until(two, governs)

    async def back() -> bool:
        return [entry.id for entry in await two.brokers()] == ["b1", "b2"]

    await until(two, back)
    current = await two.assignment(topic().id, 0)
    with pytest.raises(TermFencedError):
        await one.set_assignment(replace(current, broker="b1"), term=term)
    assert await one.govern(broker("b1", "s1")) == 0


@over_zookeeper
async def test_the_loads_of_a_broker_whose_session_was_lost_are_reported_again(door: Doors, server: Server) -> None:
    one, two = door(), door()
    loads = [Load(topic_id=topic().id, partition=0, bytes_s=100)]
    await one.register(broker("b1", "s1"))
    await one.report(broker("b1", "s1"), loads)
    number = one.session.number
    await asyncio.to_thread(expire, one, server)

    async def back() -> bool:
        return one.session.number != number and list(await two.loads()) == loads

    await until(two, back)


@over_zookeeper
async def test_an_id_that_another_session_took_is_not_taken_back(door: Doors, server: Server) -> None:
    one, two = door(), door()
    await one.register(broker("b1", "s1"))
    await two.register(broker("b1", "s2"))
    await asyncio.to_thread(expire, one, server)

    async def connected() -> bool:
        return await one.governor() == ""

    await until(one, connected)
    assert list(await two.brokers()) == [broker("b1", "s2")]
    await one.unregister(broker("b1", "s1"))
    assert list(await two.brokers()) == [broker("b1", "s2")]


@over_zookeeper
async def test_leaving_broker_releases_many_partitions_with_few_transactions(door: Doors, server: Server) -> None:
    count = 2 * RELEASES_AT_ONCE_MAX + 1
    one, two = door(), door()
    await one.register(broker("b1", "s1"))
    await one.create_topic(topic(partitions=count))
    for row in await one.assignments():
        await one.set_assignment(replace(row, broker="b1", session="s1", epoch=3))
    stale = list(await one.assignments())
    gone = replace(stale[RELEASES_AT_ONCE_MAX], broker="b2", session="s2", epoch=4)
    await two.set_assignment(gone)

    async def assignments() -> list[Assignment]:
        return stale

    # What it knows is older than what lies there.
    one.assignments = assignments  # type: ignore[method-assign]
    transactions = _transactions(one)
    await one.unregister(broker("b1", "s1"))
    free = [replace(row, broker="", session="", version=2) for row in stale]
    free[RELEASES_AT_ONCE_MAX] = replace(gone, version=2)
    assert list(await two.assignments()) == free, "what another one took meanwhile is his"
    # Of the three one failed: the hundred of it went one by one, but for the one that is another's.
    assert [len(each) for each in transactions if isinstance(each[0], SetData)] == [100, 100, *[1] * 99, 1]


def _transactions(coordinator: ZookeeperCoordinator) -> list[tuple[Operation, ...]]:
    """Note from now on what is handed to ZooKeeper at once."""
    noted: list[tuple[Operation, ...]] = []
    change = coordinator.session.change

    async def noting(*operations: Operation) -> None:
        noted.append(operations)
        await change(*operations)

    coordinator.session.change = noting  # type: ignore[method-assign]
    return noted


@over_zookeeper
async def test_known_assignment_is_set_without_a_read_and_hides_no_change(door: Doors, server: Server) -> None:
    one, two = door(), door()
    await one.create_topic(topic(partitions=1))
    (first,) = await one.assignments()
    reads: list[str] = []
    read = one.session.read

    async def noting(path: str, watch: Callable[[], None] | None = None) -> Node:
        reads.append(path)
        return await read(path, watch)

    one.session.read = noting  # type: ignore[method-assign]
    second = await one.set_assignment(replace(first, broker="b1", epoch=1))
    assert reads == []
    with pytest.raises(VersionConflictError):
        await one.set_assignment(replace(first, broker="b2"))
    (known,) = await one.assignments()
    assert known == second
    with pytest.raises(InvalidRequestError, match="epochs only grow"):
        await one.set_assignment(replace(known, epoch=0))
    await two.set_assignment(replace(second, broker="b2"))
    with pytest.raises(VersionConflictError):
        await one.set_assignment(replace(known, broker="b3"))
    assert (await one.assignment(first.topic_id, 0)).broker == "b2"


@over_zookeeper
async def test_list_of_assignments_is_kept_until_a_change(door: Doors, server: Server) -> None:
    one, two = door(), door()
    await one.create_topic(topic(partitions=3))

    async def kept() -> Sequence[Assignment]:
        while True:
            found = await one.assignments()
            if await one.assignments() is found:
                return found

    first = (await kept())[0]
    after = await one.set_assignment(replace(first, broker="b1"))
    assert (await one.assignments())[0] == after
    await kept()
    await two.set_assignment(replace(after, broker="b2"))

    async def one_sees(owner: str, topics: int) -> None:
        async def holds() -> bool:
            return ((await one.assignments())[0].broker, len(await one.topics())) == (owner, topics)

        await until(one, holds)

    await one_sees("b2", 1)
    await kept()
    await two.create_topic(topic("views", 2))
    await one_sees("b2", 2)
    assert len(await kept()) == 5
    await asyncio.to_thread(expire, one, server)
    await two.set_assignment(replace(await two.assignment(first.topic_id, 0), broker="b3"))
    await one_sees("b3", 2)


@over_zookeeper
async def test_a_change_between_the_first_watch_and_its_first_read_is_reported(door: Doors, server: Server) -> None:
    one = door()
    await one.create_topic(topic())
    called = asyncio.Event()

    async def notice() -> None:
        called.set()

    asyncio.get_running_loop().call_soon(one.session.connected, False)  # comes before the task that `watch` begins
    one.watch(notice)
    await called.wait()


@over_zookeeper
async def test_nothing_is_read_for_watchers_that_left_and_later_watchers_are_notified(
    door: Doors, server: Server
) -> None:
    one, two = door(), door()
    calls: list[int] = []
    called = asyncio.Event()

    async def notice() -> None:
        calls.append(len(await one.topics()))
        called.set()

    end = one.watch(notice)
    await one.create_topic(topic(partitions=1))
    while 1 not in calls:
        await called.wait()
        called.clear()
    end()
    await two.delete_topic((await two.topics())[0])
    before = list(calls)
    one.watch(notice)
    while 0 not in calls[len(before) :]:
        await called.wait()
        called.clear()
    seen = len(calls)  # before: the watch may call while the registration still waits for its answer
    await two.register(broker("b9"))
    while len(calls) == seen:
        await called.wait()
        called.clear()


@over_zookeeper
async def test_while_it_is_away_everything_fails_in_time_and_continues_afterwards(door: Doors, server: Server) -> None:
    one = door()
    await one.register(broker("b1"))
    await one.create_topic(topic(partitions=1))
    (first,) = await one.assignments()
    server.pause()  # a signal: it may answer once or twice more
    with pytest.raises(UnreachableError):
        await _read_until_it_fails(one, first)
    with pytest.raises(UnreachableError):
        await one.set_assignment(replace(first, broker="b1"))
    for read in (one.brokers, one.topics, one.assignments, one.governor, one.loads):
        with pytest.raises(UnreachableError, match="ZooKeeper at"):
            await read()
    server.resume()

    async def back() -> bool:
        return [entry.id for entry in await one.brokers()] == ["b1"]

    await until(one, back)
    (current,) = await one.assignments()
    assert (await one.set_assignment(replace(current, broker="b1", epoch=1))).epoch == 1


@over_zookeeper
async def test_a_registration_returns_the_time_of_zookeepers_machine(door: Doors, server: Server) -> None:
    one, clock = door(), SystemClock()
    for _ in range(2):  # a new node, and a changed one
        before_ms = clock.wall_ms()
        stored_ms = await one.register(broker("b1"))
        assert stored_ms is not None
        assert before_ms - 1_000 <= stored_ms <= clock.wall_ms() + 1_000


@over_zookeeper
async def test_the_event_loop_continues_while_kazoo_waits(door: Doors, server: Server) -> None:
    """Only the loop's own ticks wake the server: did anything on the loop wait for it, it would wait in vain."""
    one, late = door(session_timeout_ms="30s"), door(session_timeout_ms="30s", connect_timeout_ms="60s")
    await one.create_topic(topic(partitions=1))

    async def alter() -> object:
        (found,) = await one.topics()
        return await one.alter_topic(replace(found, settings=TopicSettings(retention_ms=0)))

    async def register() -> None:
        await one.register(broker("b1"))

    works: list[Callable[[], Awaitable[object]]] = [alter, register, one.loads, late.brokers]
    for work in works:
        ticked = asyncio.Event()
        server.pause()
        _tick(50, server, ticked)
        while not ticked.is_set():  # a signal: it may answer once or twice more
            await work()


@over_zookeeper
async def test_the_first_call_waits_for_a_server_that_stops_after_the_connection(door: Doors, server: Server) -> None:
    """It stops for longer than the session: that ends, and the next one is waited for."""
    one = door(session_timeout_ms="1500ms")
    await one.session.start()
    server.pause()
    _tick(200, server, asyncio.Event())
    assert list(await one.brokers()) == []
    await one.create_topic(topic())


def _tick(left: int, server: Server, ticked: asyncio.Event) -> None:
    """Tick on the loop; at the last one wake the server."""
    if left:
        asyncio.get_running_loop().call_later(0.01, _tick, left - 1, server, ticked)
    else:
        ticked.set()
        server.resume()


@over_zookeeper
async def test_it_survives_a_server_that_is_killed(door: Doors, server: Server) -> None:
    one = door()
    await one.register(broker("b1"))
    await one.create_topic(topic(partitions=1))
    server.kill()
    with pytest.raises(UnreachableError):
        await one.create_topic(topic("views", 2))
    await asyncio.to_thread(server.restart)

    async def back() -> bool:
        return len(await one.brokers()) == 1 and len(await one.topics()) == 1

    await until(one, back)
    await one.create_topic(topic("views", 2))


def test_it_finds_back_to_a_server_that_was_set_back_to_an_old_backup(tmp_path: Path) -> None:
    """That one has seen less than its clients, and turns them away for it."""
    with start_zookeeper(tmp_path / "server") as server:
        data, backup = server.folder / "data", tmp_path / "backup"

        def set_back() -> None:
            server.stop()
            shutil.rmtree(data)
            shutil.copytree(backup, data)
            server.start()

        async def run() -> None:
            one = open_zookeeper(server.address, "/memq", session_timeout_ms="1s")
            try:
                await one.register(broker("b1"))
                await asyncio.to_thread(server.stop)
                shutil.copytree(data, backup)
                await asyncio.to_thread(server.start)

                async def back() -> bool:
                    return [entry.id for entry in await one.brokers()] == ["b1"]

                await until(one, back)
                await one.create_topic(topic())
                await asyncio.to_thread(set_back)

                async def set_back_and_back() -> bool:
                    return await back() and list(await one.topics()) == []

                await until(one, set_back_and_back)

                async def created() -> bool:
                    with suppress(AlreadyExistsError):  # by a try whose answer was lost
                        await one.create_topic(topic())
                    return [found.name for found in await one.topics()] == [topic().name]

                await until(one, created)
            finally:
                await one.close()

        asyncio.run(run())


@over_zookeeper
async def test_a_path_belongs_to_one_cluster(door: Doors, server: Server) -> None:
    one = door()
    await one.topics()
    other = open_zookeeper(server.address, one.address.path, cluster="other")
    with pytest.raises(InvalidRequestError, match="belongs to cluster 'test', not 'other'"):
        await other.topics()
    await other.close()


@over_zookeeper
async def test_nodes_of_their_creator_are_closed_to_others(door: Doors, server: Server) -> None:
    mine = door(auth="digest:memq:secret", acl="creator")
    await mine.create_topic(topic(partitions=1))
    with pytest.raises(DeniedError, match="denies access to node"):
        await door().topics()
    again = door(auth="digest:memq:secret", acl="creator")
    assert [each.name for each in await again.topics()] == ["clicks"]


@over_zookeeper
async def test_foreign_content_of_a_node_is_named(door: Doors, server: Server) -> None:
    one = door()
    await one.create_topic(topic(partitions=1))
    path = f"{one.address.path}/topics/clicks"

    def spoil() -> None:
        client = KazooClient(server.address)
        client.start()
        client.set(path, b"nonsense")
        client.stop()
        client.close()

    await asyncio.to_thread(spoil)
    with pytest.raises(CorruptDataError, match="/topics/clicks holds no Topic"):
        await door().topics()


@over_zookeeper
async def test_a_topic_with_as_many_partitions_as_there_may_be(door: Doors, server: Server) -> None:
    one, two = door(session_timeout_ms="30s"), door(session_timeout_ms="30s")
    await one.create_topic(topic(partitions=4_096))
    assert len(await two.assignments()) == 4_096
    await two.delete_topic(topic(partitions=4_096))
    assert list(await two.assignments()) == []


def test_unreachable_zookeeper_is_reported_in_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        coordinator = open_zookeeper("127.0.0.1:1", "/memq", connect_timeout_ms="300ms")
        with pytest.raises(UnreachableError, match=r"ZooKeeper at 127\.0\.0\.1:1 does not answer"):
            await coordinator.topics()
        await coordinator.close()

    asyncio.run(scenario())
