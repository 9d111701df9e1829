"""A start whose coordinator stops in the middle waits for it; one that does not come back ends the start."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from memq.broker import start_step
from memq.errors import UnreachableError
from memq.governor.memory import MemoryCoordinator
from memq.topic import TopicSettings
from tests.unit.test_broker_cluster import rig

CALLS = ["topics", "register", "brokers", "assignments"]


def failing(coordinator: Any, call: str, left: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first calls of one kind fail as while ZooKeeper does not answer."""
    real = getattr(coordinator, call)
    failures = iter(range(int(left)))

    async def away(*arguments: object) -> object:
        if next(failures, None) is not None:
            raise UnreachableError("ZooKeeper does not answer")
        return await real(*arguments)

    monkeypatch.setattr(coordinator, call, away)


@pytest.mark.parametrize("call", CALLS)
def test_a_start_waits_for_a_coordinator_that_stops_in_the_middle(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with rig() as cluster:
            await (await cluster.start("one")).partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            two = cluster.made("two")
            assert isinstance(two.services.coordinator, MemoryCoordinator)
            failing(two.services.coordinator, call, 2, monkeypatch)
            await two.start()
            assert two.partitions.serving
            assert two.partitions.topic("clicks").name == "clicks"

    asyncio.run(work())


def test_a_coordinator_that_stays_away_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_step, "START_STEP_S", 0.0)

    async def work() -> None:
        async with rig() as cluster:
            one = cluster.made("one")
            failing(one.services.coordinator, "register", 100, monkeypatch)
            with pytest.raises(UnreachableError, match="ZooKeeper does not answer"):
                await one.start()

    asyncio.run(work())
