"""The contract of the Coordinator port, over every coordinator; then promises of the standalone one."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from pathlib import Path

import pytest
from msgspec.structs import replace

from memq.errors import (
    AlreadyExistsError,
    ClosedError,
    CorruptDataError,
    InvalidNameError,
    InvalidRequestError,
    InvalidSettingError,
    NotFoundError,
    TermFencedError,
    UnreachableError,
    UnsupportedFormatError,
    VersionConflictError,
)
from memq.governor import Assignment, Coordinator, Load, MarkedCoordinator
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.governor.standalone import StandaloneCoordinator
from memq.runtime.clock import SystemClock
from memq.runtime.sqlite_file import checksum
from memq.topic import TopicSettings, equal_slots
from tests.contract.coordinators import broker, over_coordinators, topic

# ---- topics ----------------------------------------------------------------------------------


@over_coordinators
async def test_topics_come_back_as_they_were_made_by_name(coordinator: Coordinator) -> None:
    settings = TopicSettings(retention_bytes=1 << 40, seal_when_idle=False)
    names = ["b", "a.b", "A", "a0b", "a/b", "a_b", "a/a.b"]
    made = [topic(name, number, number, settings) for number, name in enumerate(names, 1)]
    for each in made:
        await coordinator.create_topic(each)
    assert list(await coordinator.topics()) == sorted(made, key=lambda each: each.name)
    assert await coordinator.current_topic("a/b") == made[4]
    assert await coordinator.current_topic("a") is None
    await coordinator.delete_topic(made[4])
    assert await coordinator.current_topic("a/b") is None
    assert await coordinator.deleted(made[4].id)
    assert await coordinator.current_topic("a/a.b") == made[6]
    assert coordinator.cluster == "test"


@over_coordinators
async def test_a_new_topic_has_unassigned_partitions_and_no_epoch(coordinator: Coordinator) -> None:
    await coordinator.create_topic(topic(number=2, partitions=2))
    await coordinator.create_topic(topic("views", number=1, partitions=1))
    assert list(await coordinator.assignments()) == [
        Assignment(topic_id=f"{number:032x}", partition=partition) for number, partition in ((1, 0), (2, 0), (2, 1))
    ]
    assert await coordinator.assignment(f"{2:032x}", 1) == Assignment(topic_id=f"{2:032x}", partition=1)


@over_coordinators
async def test_the_mark_of_the_store_changes_from_the_known_one_alone(coordinator: MarkedCoordinator) -> None:
    assert await coordinator.store_mark() == ""
    assert await coordinator.store_mark("b", before="a") == ""
    assert await coordinator.store_mark("a") == "a"
    assert await coordinator.store_mark("b") == "a"
    assert await coordinator.store_mark("b", before="a") == "b"
    await coordinator.create_topic(topic())
    assert await coordinator.store_mark() == "b"


def test_the_mark_of_the_store_outlives_the_process(tmp_path: Path) -> None:
    async def run() -> None:
        for known in ("", "mark"):
            coordinator = StandaloneCoordinator(tmp_path / "topics.sqlite", "test", SystemClock())
            assert await coordinator.store_mark() == known
            assert await coordinator.store_mark("mark") == "mark"
            await coordinator.close()

    asyncio.run(run())


@over_coordinators
async def test_a_name_or_an_id_is_not_used_twice(coordinator: Coordinator) -> None:
    await coordinator.create_topic(topic("clicks", 1))
    with pytest.raises(AlreadyExistsError, match="'clicks'"):
        await coordinator.create_topic(topic("clicks", 2))
    with pytest.raises(AlreadyExistsError, match="id"):
        await coordinator.create_topic(topic("views", 1))
    await coordinator.delete_topic(topic("clicks", 1))
    with pytest.raises(AlreadyExistsError, match="used before"):
        await coordinator.create_topic(topic("clicks", 1))
    await coordinator.create_topic(topic("clicks", 2))
    assert [each.id for each in await coordinator.topics()] == [f"{2:032x}"]


@over_coordinators
async def test_a_topic_made_again_begins_at_epoch_zero(coordinator: Coordinator) -> None:
    await coordinator.create_topic(topic(number=1, partitions=1))
    await coordinator.set_assignment(Assignment(topic_id=f"{1:032x}", partition=0, broker="b1", epoch=9))
    await coordinator.delete_topic(topic(number=1, partitions=1))
    await coordinator.create_topic(topic(number=2, partitions=1))
    assert list(await coordinator.assignments()) == [Assignment(topic_id=f"{2:032x}", partition=0)]
    with pytest.raises(NotFoundError):
        await coordinator.assignment(f"{1:032x}", 0)


@over_coordinators
async def test_bad_topics_are_refused(coordinator: Coordinator) -> None:
    good = topic(partitions=3)
    first, second, third = good.partitions
    for name in ("", "..", "a/b/c", "a/..", "_memq-x", "a/_memq-x", "x" * 250):
        with pytest.raises(InvalidNameError):
            await coordinator.create_topic(replace(good, name=name))
    with pytest.raises(InvalidSettingError, match="dedup_window_ms"):
        await coordinator.create_topic(replace(good, settings=TopicSettings(dedup_window_ms=1_000)))
    for odd in ("", "0", "G" * 32, "AB" * 16, "0" * 33):
        with pytest.raises(InvalidRequestError, match="32 hex digits"):
            await coordinator.create_topic(replace(good, id=odd))
    for parts in (
        (),
        (first, second),
        (first, third),
        (first, second, replace(third, partition=1)),
        (first, second, replace(third, slot_last=65_534)),
        (first, second, replace(third, slot_first=third.slot_first - 1)),
        (first, second, replace(third, read_partition=-1)),
        (replace(first, slot_last=-1), second, third),
    ):
        with pytest.raises(InvalidRequestError):
            await coordinator.create_topic(replace(good, partitions=parts))
    assert (list(await coordinator.topics()), list(await coordinator.assignments())) == ([], [])


@over_coordinators
async def test_altering_is_compare_and_set(coordinator: Coordinator) -> None:
    first = topic(partitions=2)
    await coordinator.create_topic(first)
    settings = TopicSettings(retention_ms=0)
    second = await coordinator.alter_topic(replace(first, settings=settings))
    assert second == replace(first, settings=settings, version=2)
    with pytest.raises(VersionConflictError, match="version 2, not 1"):
        await coordinator.alter_topic(first)
    with pytest.raises(InvalidSettingError):
        await coordinator.alter_topic(replace(second, settings=TopicSettings(ring_slots=1)))
    for absent in (replace(second, name="views"), replace(second, id="ab" * 16)):
        with pytest.raises(NotFoundError):
            await coordinator.alter_topic(absent)
    assert list(await coordinator.topics()) == [second]


@over_coordinators
async def test_partitions_are_added_and_never_taken(coordinator: Coordinator) -> None:
    first = topic(number=1, partitions=2)
    await coordinator.create_topic(first)
    held = await coordinator.set_assignment(Assignment(topic_id=first.id, partition=1, broker="b1", epoch=4))
    await coordinator.alter_topic(replace(first, partitions=equal_slots(3), map_version=2))
    assert list(await coordinator.assignments()) == [
        Assignment(topic_id=first.id, partition=0),
        held,
        Assignment(topic_id=first.id, partition=2),
    ]
    with pytest.raises(InvalidRequestError, match=r"would lose its partitions \[2\]"):
        await coordinator.alter_topic(replace(first, version=2))


@over_coordinators
async def test_deleting_is_compare_and_set(coordinator: Coordinator) -> None:
    first = topic()
    await coordinator.create_topic(first)
    second = await coordinator.alter_topic(first)
    with pytest.raises(VersionConflictError):
        await coordinator.delete_topic(first)
    await coordinator.delete_topic(second)
    with pytest.raises(NotFoundError):
        await coordinator.delete_topic(second)
    assert list(await coordinator.assignments()) == []


# ---- assignments -----------------------------------------------------------------------------


@over_coordinators
async def test_a_fresh_read_shows_a_topic_as_it_is_stored(coordinator: Coordinator) -> None:
    made = topic("clicks", 1)
    assert await coordinator.current_topic("clicks") is None
    await coordinator.create_topic(made)
    assert await coordinator.current_topic("clicks") == made
    altered = await coordinator.alter_topic(replace(made, settings=TopicSettings(retention_bytes=1 << 40)))
    assert await coordinator.current_topic("clicks") == altered
    assert await coordinator.current_topic("views") is None
    await coordinator.delete_topic(altered)
    assert await coordinator.current_topic("clicks") is None


@over_coordinators
async def test_a_deletion_is_shown_of_an_id_that_was_there_and_of_no_other(coordinator: Coordinator) -> None:
    made, other = topic("clicks", 1), topic("views", 2)
    assert not await coordinator.deleted(made.id), "as in a backup that is older than the topic"
    for each in (made, other):
        await coordinator.create_topic(each)
    await coordinator.alter_topic(replace(made, settings=TopicSettings(retention_bytes=1 << 40)))
    assert not await coordinator.deleted(made.id)
    await coordinator.delete_topic(next(each for each in await coordinator.topics() if each.id == made.id))
    assert await coordinator.deleted(made.id)
    await coordinator.create_topic(topic("clicks", 3))
    assert await coordinator.deleted(made.id), "another topic has its name now"
    assert not await coordinator.deleted(other.id)
    assert not await coordinator.deleted(f"{3:032x}")


@over_coordinators
async def test_assigning_is_compare_and_set(coordinator: Coordinator) -> None:
    await coordinator.create_topic(topic(partitions=1))
    (first,) = await coordinator.assignments()
    second = await coordinator.set_assignment(replace(first, broker="b1", session="s1", epoch=1))
    assert second == Assignment(
        topic_id=first.topic_id, partition=0, broker="b1", session="s1", epoch=1, version=first.version + 1
    )
    with pytest.raises(VersionConflictError):
        await coordinator.set_assignment(replace(first, broker="b2", epoch=1))
    with pytest.raises(InvalidRequestError, match="epochs only grow"):
        await coordinator.set_assignment(replace(second, epoch=0))
    with pytest.raises(NotFoundError):
        await coordinator.set_assignment(replace(second, partition=1))
    assert await coordinator.assignment(first.topic_id, 0) == second


@over_coordinators
async def test_one_of_many_racing_owners_wins(coordinator: Coordinator) -> None:
    await coordinator.create_topic(topic(partitions=1))
    (current,) = await coordinator.assignments()
    for epoch in range(1, 11):
        tries = [replace(current, broker=f"b{number}", epoch=epoch) for number in range(6)]
        results = await asyncio.gather(*map(coordinator.set_assignment, tries), return_exceptions=True)
        won = [result for result in results if isinstance(result, Assignment)]
        assert len(won) == 1
        assert sum(isinstance(result, VersionConflictError) for result in results) == 5
        current = await coordinator.assignment(current.topic_id, 0)
        assert current == won[0]


# ---- membership ------------------------------------------------------------------------------


@over_coordinators
async def test_brokers_come_and_go(coordinator: Coordinator) -> None:
    await coordinator.register(broker("b1"))
    await coordinator.register(broker("b1"))
    assert list(await coordinator.brokers()) == [broker("b1")]
    with pytest.raises(InvalidNameError):
        await coordinator.register(broker("a/b"))
    await coordinator.unregister(broker("b1"))
    await coordinator.unregister(broker("b1"))
    assert list(await coordinator.brokers()) == []


@over_coordinators
async def test_leaving_broker_releases_the_partitions_of_its_session(coordinator: Coordinator) -> None:
    await coordinator.register(broker("b1", "s1"))
    await coordinator.create_topic(topic(partitions=4))
    rows = list(await coordinator.assignments())
    owners = [("b1", "s1"), ("b1", ""), ("b2", "s1"), ("b1", "s0")]
    for row, (name, session) in zip(rows, owners, strict=True):
        await coordinator.set_assignment(replace(row, broker=name, session=session, epoch=3))
    await coordinator.unregister(broker("b1", "s1"))
    after = [(row.broker, row.session, row.epoch, row.version) for row in await coordinator.assignments()]
    assert after == [("", "", 3, 2), ("", "", 3, 2), ("b2", "", 3, 2), ("b1", "s0", 3, 1)]


@over_coordinators
async def test_a_late_farewell_of_an_older_session_takes_nothing_from_the_new_one(coordinator: Coordinator) -> None:
    await coordinator.register(broker("b1", "s1"))
    await coordinator.register(broker("b1", "s2"))
    await coordinator.create_topic(topic(partitions=3))
    for row, session in zip(list(await coordinator.assignments()), ("s1", "s2", ""), strict=True):
        await coordinator.set_assignment(replace(row, broker="b1", session=session))
    await coordinator.unregister(broker("b1", "s1"))
    assert list(await coordinator.brokers()) == [broker("b1", "s2")]
    assert [(row.broker, row.session) for row in await coordinator.assignments()] == [
        *(("", ""), ("b1", "s2"), ("b1", ""))
    ]


# ---- the governor ----------------------------------------------------------------------------


@over_coordinators
async def test_one_session_governs_until_it_goes(coordinator: Coordinator) -> None:
    one, two = broker("b1", "s1"), broker("b2", "s2")
    assert await coordinator.govern(one) == 0, "who is not registered does not govern"
    await coordinator.register(one)
    await coordinator.register(two)
    assert await coordinator.governor() == ""
    assert [await coordinator.govern(each) for each in (one, two, one)] == [1, 0, 1]
    assert await coordinator.governor() == "b1"
    assert await coordinator.govern(broker("b1", "older")) == 0
    await coordinator.register(replace(one, draining=True))
    assert await coordinator.govern(one) == 1, "a new entry of the same session changes nothing"
    await coordinator.unregister(one)
    assert await coordinator.governor() == ""
    assert [await coordinator.govern(each) for each in (one, two)] == [0, 2]


@over_coordinators
async def test_assignments_of_a_former_governor_are_refused(coordinator: Coordinator) -> None:
    await coordinator.create_topic(topic(partitions=1))
    (first,) = await coordinator.assignments()
    await coordinator.register(broker("b1", "s1"))
    term = await coordinator.govern(broker("b1", "s1"))
    second = await coordinator.set_assignment(replace(first, broker="b1"), term=term)
    with pytest.raises(VersionConflictError):
        await coordinator.set_assignment(replace(first, broker="b2"), term=term)
    await coordinator.unregister(broker("b1", "s1"))
    await coordinator.register(broker("b2", "s2"))
    assert await coordinator.govern(broker("b2", "s2")) == 2
    current = await coordinator.assignment(second.topic_id, 0)
    with pytest.raises(TermFencedError, match="term 1 of the governor has ended"):
        await coordinator.set_assignment(replace(current, broker="b1"), term=term)
    assert (await coordinator.set_assignment(replace(current, broker="b2"), term=2)).broker == "b2"


@over_coordinators
async def test_loads_are_what_live_brokers_reported_last(coordinator: Coordinator) -> None:
    one, two = broker("b1", "s1"), broker("b2", "s2")
    loads = [Load(topic_id=f"{number:032x}", partition=0, bytes_s=number * 100) for number in (3, 1, 2)]
    await coordinator.report(one, loads)
    assert list(await coordinator.loads()) == [], "nobody who is not there reports"
    await coordinator.register(one)
    await coordinator.register(two)
    await coordinator.report(one, loads)
    await coordinator.report(one, loads[:1])
    await coordinator.report(two, loads[1:])
    assert list(await coordinator.loads()) == [loads[1], loads[2], loads[0]]
    await coordinator.unregister(one)
    assert list(await coordinator.loads()) == [loads[1], loads[2]]


# ---- watching --------------------------------------------------------------------------------


class Watcher:
    """Reads the topics at each call, and can be waited for."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.called = asyncio.Event()
        self.calls = 0
        self.topics: list[str] = []

    async def __call__(self) -> None:
        self.calls += 1
        self.topics = [each.name for each in await self.coordinator.topics()]
        self.called.set()

    async def next_call(self) -> None:
        await self.called.wait()
        self.called.clear()


@over_coordinators
async def test_watchers_are_called_after_every_kind_of_change(coordinator: Coordinator) -> None:
    seen: list[tuple[int, int, int]] = []
    called = asyncio.Event()

    async def look() -> None:
        versions = sum(each.version for each in await coordinator.topics())
        owned = sum(entry.version for entry in await coordinator.assignments())
        seen.append((len(await coordinator.brokers()), versions, owned))
        called.set()

    async def shown(*expected: int) -> None:
        while not seen or seen[-1] != expected:
            await called.wait()
            called.clear()

    coordinator.watch(look)
    await coordinator.register(broker())
    await shown(1, 0, 0)
    await coordinator.create_topic(topic(partitions=1))
    await shown(1, 1, 0)
    altered = await coordinator.alter_topic(topic(partitions=1))
    await shown(1, 2, 0)
    await coordinator.set_assignment((await coordinator.assignments())[0])
    await shown(1, 2, 1)
    await coordinator.unregister(broker())
    await shown(0, 2, 1)
    await coordinator.delete_topic(altered)
    await shown(0, 0, 0)


@over_coordinators
async def test_changes_during_a_call_are_merged_and_not_lost(coordinator: Coordinator) -> None:
    calls: list[int] = []
    inside, go, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        calls.append(len(await coordinator.topics()))
        inside.set()
        await go.wait()
        if calls[-1] == 6:
            done.set()

    coordinator.watch(slow)
    await coordinator.create_topic(topic("t0", 1))
    await inside.wait()
    for number in range(1, 6):
        await coordinator.create_topic(topic(f"t{number}", number + 1))
    go.set()
    await done.wait()
    assert calls[0] == 1
    assert set(calls[1:]) == {6}


@over_coordinators
async def test_a_watcher_that_ended_is_not_called(coordinator: Coordinator) -> None:
    ended, going = Watcher(coordinator), Watcher(coordinator)
    end = coordinator.watch(ended)
    coordinator.watch(going)
    end()
    end()
    await coordinator.register(broker())
    await going.next_call()
    assert ended.calls == 0


@over_coordinators
async def test_a_watcher_may_end_itself(coordinator: Coordinator) -> None:
    other = Watcher(coordinator)

    async def once() -> None:
        calls.append(1)
        end()
        await asyncio.sleep(0)
        calls.append(2)

    calls: list[int] = []
    end = coordinator.watch(once)
    coordinator.watch(other)
    for session in ("s1", "s2", "s3"):
        await coordinator.register(broker(session=session))
        await other.next_call()
    assert calls == [1, 2]


def test_a_watcher_that_fails_is_reported_and_called_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        coordinator = MemoryCoordinator(MemoryCluster())
        other = Watcher(coordinator)

        async def fail() -> None:
            calls.append(1)
            raise ZeroDivisionError

        calls: list[int] = []
        coordinator.watch(fail)
        coordinator.watch(other)
        for session in ("s1", "s2"):
            await coordinator.register(broker(session=session))
            await other.next_call()
        assert calls == [1, 1]
        await coordinator.close()

    with caplog.at_level(logging.ERROR, "memq"):
        asyncio.run(scenario())
    assert [getattr(record, "event", "") for record in caplog.records] == ["watcher-failed"] * 2


def test_doors_to_one_memory_cluster_see_each_other() -> None:
    async def scenario() -> None:
        shared = MemoryCluster()
        one, two = MemoryCoordinator(shared), MemoryCoordinator(shared)
        watcher = Watcher(two)
        two.watch(watcher)
        await one.create_topic(topic())
        await watcher.next_call()
        await one.register(broker("b1"))
        await watcher.next_call()
        shared.expire(broker("b1", "older"))
        assert list(await two.brokers()) == [broker("b1")]
        shared.expire(broker("b1"))
        await watcher.next_call()
        assert list(await two.brokers()) == []
        await one.close()
        await two.register(broker("b2"))
        await watcher.next_call()
        await two.close()

    asyncio.run(scenario())


# ---- the standalone coordinator's file -------------------------------------------------------


def open_standalone(folder: Path) -> StandaloneCoordinator:
    return StandaloneCoordinator(folder / "topics.sqlite", "test", SystemClock())


def test_everything_but_the_broker_is_there_after_a_restart(tmp_path: Path) -> None:
    async def first() -> Assignment:
        coordinator = open_standalone(tmp_path)
        await coordinator.register(broker())
        for number in (1, 2):
            await coordinator.create_topic(topic(f"t{number}", number, partitions=2))
        await coordinator.delete_topic(topic("t1", 1, partitions=2))
        opened = Assignment(topic_id=f"{2:032x}", partition=1, broker="b1", session="s1", epoch=7)
        opened = await coordinator.set_assignment(opened)
        await coordinator.close()
        return opened

    async def second(opened: Assignment) -> None:
        coordinator = open_standalone(tmp_path)
        assert list(await coordinator.topics()) == [topic("t2", 2, partitions=2)]
        assert list(await coordinator.assignments()) == [Assignment(topic_id=f"{2:032x}", partition=0), opened]
        assert list(await coordinator.brokers()) == []
        with pytest.raises(AlreadyExistsError, match="used before"):
            await coordinator.create_topic(topic("t1", 1))
        await coordinator.close()
        with pytest.raises(ClosedError):
            await coordinator.create_topic(topic("t3", 3))

    asyncio.run(second(asyncio.run(first())))


def test_a_change_that_was_not_stored_has_not_happened(tmp_path: Path) -> None:
    """And what another hand stored meanwhile is read again before the next change."""

    async def scenario() -> None:
        coordinator = open_standalone(tmp_path)
        await coordinator.register(broker())
        await coordinator.create_topic(topic("t1", 1))
        holder = sqlite3.connect(tmp_path / "topics.sqlite", isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(UnreachableError, match="locked"):
            await coordinator.create_topic(topic("t2", 2))
        assert [each.name for each in await coordinator.topics()] == ["t1"]
        for table in ("assignments", "topics", "used_ids"):
            holder.execute(f"DELETE FROM {table}")
        holder.execute("COMMIT")
        holder.close()
        await coordinator.create_topic(topic("t3", 3))
        assert [each.name for each in await coordinator.topics()] == ["t3"]
        assert list(await coordinator.brokers()) == [broker()]
        await coordinator.close()

    asyncio.run(scenario())


def test_a_change_whose_caller_went_away_is_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        coordinator = open_standalone(tmp_path)
        task = asyncio.create_task(coordinator.create_topic(topic("t1", 1, partitions=3)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await coordinator.create_topic(topic("t2", 2, partitions=3))
        names = [each.name for each in await coordinator.topics()]
        assert names in (["t2"], ["t1", "t2"])
        assert len(await coordinator.assignments()) == 3 * len(names)
        await coordinator.close()
        again = open_standalone(tmp_path)
        assert [each.name for each in await again.topics()] == names
        await again.close()

    asyncio.run(scenario())


def test_a_damaged_or_newer_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "topics.sqlite").write_bytes(b"x" * 4_096)
    with pytest.raises(CorruptDataError, match=r"topics\.sqlite"):
        open_standalone(tmp_path)
    (tmp_path / "topics.sqlite").unlink()
    asyncio.run(open_standalone(tmp_path).close())
    file = sqlite3.connect(tmp_path / "topics.sqlite", isolation_level=None)
    row = ("x", '{"name": ".."}')
    file.execute("INSERT INTO topics VALUES (?, ?, ?)", (*row, checksum("topics", row)))
    with pytest.raises(CorruptDataError, match="a topic or assignment in topics file"):
        open_standalone(tmp_path)
    file.execute("PRAGMA user_version = 4")
    file.close()
    with pytest.raises(UnsupportedFormatError, match="layout 4"):
        open_standalone(tmp_path)
