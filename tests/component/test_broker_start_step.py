"""A start waits for a coordinator that stops in the middle, and ends if it does not return."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from memq.broker import start_steps
from memq.errors import UnreachableError
from memq.governor.memory import MemoryCoordinator
from memq.runtime.logs import EventLog
from memq.topic import TopicSettings
from tests.brokers import log_lines
from tests.component.cluster_rig import rig
from tests.skipping_loop import LongestWait, run_skipping, skip, skipping_runtime

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
    monkeypatch.setattr(start_steps, "START_STEP_S", 0.0)

    async def work() -> None:
        async with rig() as cluster:
            one = cluster.made("one")
            failing(one.services.coordinator, "register", 100, monkeypatch)
            with pytest.raises(UnreachableError, match="ZooKeeper does not answer"):
                await one.start()

    asyncio.run(work())


def test_each_try_of_a_step_is_named_and_waits_twice_as_long_until_its_time_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked_s: list[float] = []

    async def work() -> None:
        runtime = replace(skipping_runtime(), random=LongestWait())

        async def step() -> str:
            asked_s.append(runtime.clock.monotonic())
            raise UnreachableError("ZooKeeper does not answer")

        with pytest.raises(UnreachableError):
            await start_steps.start_step(runtime, EventLog(runtime.clock), "register", step)

    run_skipping(work())
    pauses_s = [later - first for first, later in pairwise(asked_s)]
    assert pauses_s == pytest.approx([0.2, 0.4, 0.8, *[start_steps.BACKOFF_S_MAX] * (len(pauses_s) - 3)])
    assert asked_s[-2] < start_steps.START_STEP_S <= asked_s[-1]
    text = "start-retry: register, try {}: ZooKeeper does not answer"
    assert log_lines(caplog)[:5] == [text.format(number) for number in range(1, 6)]


@pytest.mark.parametrize(
    ("takes_s", "logged"), [(1.9, []), (9.0, ["start-waits: coordinator zk: no answer for 2 s; the start waits"])]
)
def test_a_start_logs_that_it_waits_for_its_first_answer(
    takes_s: float, logged: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        async def step() -> str:
            await skip(takes_s)
            return "answer"

        assert await start_steps.first_answer(EventLog(skipping_runtime().clock), "coordinator zk", step) == "answer"
        await skip(9)

    run_skipping(work())
    assert log_lines(caplog) == logged
