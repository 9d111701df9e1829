"""The owner of background tasks: a dead task is reported once, before or in the stop."""

from __future__ import annotations

import asyncio
import logging

import pytest

from memq.errors import StoreError
from memq.runtime.clock import SystemClock
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from tests.brokers import log_lines


class Scenario:
    """An owner, and what its tasks died of."""

    def __init__(self) -> None:
        self.deaths: list[BaseException] = []
        self.owner = TaskOwner(self.deaths.append, EventLog(SystemClock()))


async def die_when_cancelled(error: BaseException) -> None:
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        raise error


async def wait() -> None:
    await asyncio.get_running_loop().create_future()


def test_a_task_that_dies_is_reported_to_the_owner(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> list[BaseException]:
        case = Scenario()

        async def die() -> None:
            raise StoreError("gone")

        await asyncio.wait([case.owner.start(die(), "dies")])
        await case.owner.stop()
        return case.deaths

    assert [str(error) for error in asyncio.run(scenario())] == ["gone"]
    assert not log_lines(caplog, logging.DEBUG)


def test_failure_during_a_stop_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> list[BaseException]:
        case = Scenario()
        case.owner.start(wait(), "waits")
        case.owner.start(die_when_cancelled(ZeroDivisionError("half done")), "cleans up")
        case.owner.start(wait(), "waits too")
        await asyncio.sleep(0)
        await case.owner.stop()
        assert not len(case.owner)
        return case.deaths

    with caplog.at_level(logging.DEBUG, "memq"):
        assert asyncio.run(scenario()) == []
    assert log_lines(caplog, logging.DEBUG) == [
        "task.failed-in-stop: 'cleans up' failed in the stop: ZeroDivisionError('half done')"
    ]
    assert caplog.records[0].exc_info


def test_a_stop_that_is_cancelled_says_so() -> None:
    async def scenario() -> None:
        case = Scenario()
        held = asyncio.Event()

        async def linger() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                await held.wait()

        case.owner.start(linger(), "lingers")
        await asyncio.sleep(0)
        stop = asyncio.create_task(case.owner.stop())
        await asyncio.sleep(0)
        stop.cancel()
        await asyncio.wait([stop])
        assert stop.cancelled()
        held.set()
        await case.owner.stop()

    asyncio.run(scenario())


def test_a_second_stop_waits_for_what_tasks_do_at_their_end() -> None:
    async def scenario() -> list[str]:
        case = Scenario()
        held, ends = asyncio.Event(), list[str]()

        async def release() -> None:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                await held.wait()
                ends.append("released")

        case.owner.start(release(), "releases")
        await asyncio.sleep(0)
        stops = []
        for _ in range(2):
            stops.append(asyncio.create_task(case.owner.stop()))
            for _ in range(3):
                await asyncio.sleep(0)
        assert not any(stop.done() for stop in stops)
        held.set()
        await asyncio.gather(*stops)
        return ends

    assert asyncio.run(scenario()) == ["released"]
