"""Groups that an earlier release kept in the queue: refused until they are moved, and moved once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from memq.broker.api.group_migration import GroupMigrator
from memq.broker.broker import Broker
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.group_migration import GroupMigration, migrate_groups
from memq.errors import InvalidRequestError, NotFoundError, QueueError
from memq.governor import BrokerEntry
from memq.governor.memory import MemoryCoordinator
from memq.groups import OUTSIDE_GENERATION
from memq.notification import FormerGroup
from memq.topic import Committed, Position, ReadPartition, Totals
from tests.brokers import run
from tests.component.cluster_rig import Rig, rig
from tests.component.test_service_hosts import filled, member_at, read_of


@asynccontextmanager
async def upgraded(**settings: Any) -> AsyncIterator[tuple[Rig, list[Broker], list[ReadPartition]]]:
    """Yield two brokers whose queue has the groups "report" (positions in two partitions) and "other"."""
    async with rig() as cluster:
        brokers = [await cluster.start(name, **settings) for name in ("a", "b")]
        for broker in brokers:
            await broker.partitions.refresh()
        logs = await filled(brokers[0])
        await cluster.queue.former.store("report", positions_in(logs))
        await cluster.queue.former.store("other", {logs[3]: Committed(Position(3, 1), Totals(3, 30))})
        yield cluster, brokers, logs


def positions_in(logs: Sequence[ReadPartition]) -> dict[ReadPartition, Committed]:
    """Return positions before the first record of partition 0, and behind the last one of partition 1."""
    return {
        logs[0]: Committed(Position(0, 0), Totals(0, 0)),
        logs[1]: Committed(Position(1, 1_000, 2), Totals(1_002, 9_000), 77),
    }


async def migrated(broker: Broker, *, dry_run: bool = False) -> list[GroupMigration]:
    return [one async for one in migrate_groups(broker.address, dry_run=dry_run)]


def test_a_group_keeps_its_positions_totals_and_marks_when_it_is_moved() -> None:
    async def work() -> None:
        async with upgraded() as (cluster, brokers, logs):
            moved = await migrated(brokers[1])
            assert [(one.group, one.positions, one.error) for one in moved] == [("other", 1, None), ("report", 2, None)]
            assert await cluster.queue.former.names() == []
            for broker in brokers:
                member = await member_at(broker)
                assert await member.groups() == ["other", "report"]
                assert await member.committed("report", logs) == positions_in(logs)
            assert await migrated(brokers[0]) == []

    run(work())


def test_a_member_reads_on_from_the_position_that_was_moved() -> None:
    async def work() -> None:
        async with upgraded() as (cluster, brokers, logs):
            pointers = len(cluster.queue.logs[logs[0]].entries)
            end = {log: Committed(Position(log.partition, pointers), Totals(5, 50)) for log in logs[1:]}
            await cluster.queue.former.store("report", end)
            await migrated(brokers[0])
            assert await read_of(brokers[1], "report") == list(range(0, 20, 4))

    run(work())


def test_a_broker_answers_no_group_while_the_queue_has_groups() -> None:
    async def work() -> None:
        async with upgraded() as (_, brokers, logs):
            member = await member_at(brokers[0])
            for ask in (
                member.groups(),
                member.committed("report", logs),
                member.join("new", "m", logs, 6_000),
                member.commit("new", "", OUTSIDE_GENERATION, {logs[0]: Committed(Position(0, 1), Totals())}),
            ):
                with pytest.raises(InvalidRequestError, match="2 groups of an earlier release, first 'other'") as error:
                    await ask
                assert "memq group migrate" in error.value.hint
            with pytest.raises(InvalidRequestError):
                async with AsyncConsumer(brokers[1].address, ["clicks"], group="report", end="end") as consumer:
                    await anext(aiter(consumer))

    run(work())


def test_a_broker_is_not_deceived_by_one_list_without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with upgraded() as (cluster, brokers, logs):
            names = cluster.queue.former.names
            answers: list[list[str]] = [[]]

            async def lists() -> Sequence[str]:
                return answers.pop() if answers else await names()

            monkeypatch.setattr(cluster.queue.former, "names", lists)
            with pytest.raises(InvalidRequestError, match="earlier release"):
                await (await member_at(brokers[0])).committed("report", logs)
            assert not answers

    run(work())


def test_a_dry_run_shows_groups_and_changes_nothing() -> None:
    async def work() -> None:
        async with upgraded() as (cluster, brokers, _):
            cluster.queue.former.groups["joined"] = FormerGroup("joined", 1, ("m",), {})
            shown = await migrated(brokers[0], dry_run=True)
            assert [(one.group, one.positions, one.members) for one in shown] == [
                ("joined", 0, ("m",)),
                ("other", 1, ()),
                ("report", 2, ()),
            ]
            assert await cluster.queue.former.names() == ["joined", "other", "report"]
            assert all(not broker.hosts.held() for broker in brokers)

    run(work())


def test_a_group_with_members_is_refused_and_the_others_are_moved() -> None:
    async def work() -> None:
        async with upgraded() as (cluster, brokers, logs):
            left = cluster.queue.former.groups["report"]
            cluster.queue.former.groups["report"] = replace(left, members=("m",))
            moved = {one.group: one.error for one in await migrated(brokers[0])}
            assert moved["other"] is None
            assert isinstance(moved["report"], InvalidRequestError)
            assert "1 active members in the queue, first 'm'" in str(moved["report"])
            assert "stop its consumers" in moved["report"].hint
            assert await cluster.queue.former.names() == ["report"]
            cluster.queue.former.groups["report"] = left
            assert [one.error for one in await migrated(brokers[0])] == [None]
            assert await (await member_at(brokers[1])).committed("report", logs) == positions_in(logs)

    run(work())


def test_a_broker_of_an_earlier_release_forbids_the_move() -> None:
    async def work() -> None:
        async with upgraded() as (cluster, brokers, _):
            old = BrokerEntry(id="old", session="1" * 16, address="127.0.0.1:1")
            coordinator = MemoryCoordinator(cluster.shared)
            await coordinator.register(old)
            moved = await migrated(brokers[0])
            assert ["broker 'old' is of an earlier release" in str(one.error) for one in moved] == [True, True]
            assert await cluster.queue.former.names() == ["other", "report"]
            with pytest.raises(InvalidRequestError, match="2 groups of an earlier release"):
                await (await member_at(brokers[0])).groups()
            await coordinator.unregister(old)
            assert [one.error for one in await migrated(brokers[0])] == [None, None]

    run(work())


def test_a_broker_answers_no_group_while_one_of_an_earlier_release_can_make_groups() -> None:
    async def work() -> None:
        async with rig() as cluster:
            broker = await cluster.start("a")
            coordinator = MemoryCoordinator(cluster.shared)
            old = BrokerEntry(id="old", session="1" * 16, address="127.0.0.1:1")
            await coordinator.register(old)
            with pytest.raises(InvalidRequestError, match="broker 'old' is of an earlier release"):
                await (await member_at(broker)).groups()
            await coordinator.unregister(old)
            assert await (await member_at(broker)).groups() == []

    run(work())


@pytest.mark.parametrize("imports", [True, False])
def test_a_move_that_ended_early_is_repeated(monkeypatch: pytest.MonkeyPatch, *, imports: bool) -> None:
    """Before the group is on its state log, or before it is removed from the queue."""

    async def work() -> None:
        async with upgraded() as (cluster, brokers, logs):
            for broker in brokers:
                coordinator = await broker.hosts.service_or_address(broker.hosts.groups, "report")
                if isinstance(coordinator, str):
                    continue
                part, name = (coordinator, "import_group") if imports else (cluster.queue.former, "remove")
                with monkeypatch.context() as patch:
                    patch.setattr(part, name, ended)
                    with pytest.raises(QueueError, match="the broker ended"):
                        await GroupMigrator(broker.services, alone=False).move("report", coordinator)
            assert await cluster.queue.former.names() == ["other", "report"]
            with pytest.raises(InvalidRequestError, match="earlier release"):
                await (await member_at(brokers[0])).committed("report", logs)
            assert [one.error for one in await migrated(brokers[0])] == [None, None]
            assert await (await member_at(brokers[1])).committed("report", logs) == positions_in(logs)

    run(work())


def test_a_group_that_changes_while_it_is_moved_stays_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with upgraded() as (cluster, brokers, logs):
            changed = positions_in(logs) | {logs[2]: Committed(Position(2, 4), Totals(4, 40))}
            read, reads = cluster.queue.former.read, []

            async def read_and_commit(group: str) -> FormerGroup:
                found = await read(group)
                reads.append(group)
                if reads.count("report") == 2:
                    await cluster.queue.former.store("report", changed)
                return found

            monkeypatch.setattr(cluster.queue.former, "read", read_and_commit)
            assert [one.error for one in await migrated(brokers[0])] == [None, None]  # the client asks again
            assert reads.count("report") > 3
            assert await (await member_at(brokers[1])).committed("report", logs) == changed

    run(work())


def test_a_group_that_is_not_in_the_queue_is_not_found() -> None:
    async def work() -> None:
        async with upgraded() as (_, brokers, _logs):
            member = await member_at(brokers[0])
            for dry_run in (True, False):
                with pytest.raises(NotFoundError, match="'unknown'"):
                    await member.move_group("unknown", dry_run=dry_run)

    run(work())


# ---- inside ----------------------------------------------------------------------------------------


async def ended(*_: object) -> None:
    raise QueueError("the broker ended")
