"""Remarks of the governor about the balance are logged once, then every minute while they apply."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest

from memq.errors import MemqError, TermFencedError, UnreachableError, VersionConflictError
from memq.governor import Assignment
from memq.governor.governor import Governor, Planner
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.governor.planning import AssignmentChange, AssignmentPlan, ClusterView
from memq.runtime.logs import OUTAGE_INTERVAL_S, EventLog
from tests.contract.manual_clock import ManualClock
from tests.unit.governor_views import broker


def test_a_note_whose_figures_change_is_said_once_then_every_minute(caplog: pytest.LogCaptureFixture) -> None:
    numbers, notes = count(1), ["broker 'one' is over its capacity"]

    def planned(view: ClusterView) -> AssignmentPlan:
        return AssignmentPlan(notes=tuple(f"{note}: {next(numbers)} bytes/s" for note in notes))

    async def work() -> None:
        clock, door, one = ManualClock(), MemoryCoordinator(MemoryCluster()), broker("one")
        await door.register(one)
        governor = Governor(door, Planner(planned), EventLog(clock), clock)

        async def said(acts: int) -> list[str]:
            caplog.clear()
            for _ in range(acts):
                await governor.act(one)
                clock.advance(1_000)
            return [record.getMessage() for record in caplog.records if "governor-note" in record.getMessage()]

        first = "governor-note: broker 'one' is over its capacity: 1 bytes/s"
        assert await said(30) == [first]
        notes.append("2 partitions have no owner")
        assert await said(20) == ["governor-note: 2 partitions have no owner: 32 bytes/s"]
        clock.advance(int(OUTAGE_INTERVAL_S) * 1_000 - 50_000)
        assert [line.split(":")[1] for line in await said(5)] == [" broker 'one' is over its capacity"]
        notes.clear()
        assert await said(1) == []
        notes.append("broker 'one' is over its capacity")
        assert len(await said(3)) == 1, "it had passed"

    with caplog.at_level("WARNING", "memq"):
        asyncio.run(work())


def test_a_governor_that_another_one_follows_changes_nothing_more_and_any_other_error_is_raised() -> None:
    changes = [AssignmentChange(Assignment(topic_id="0a" * 16, partition=part), "", "no owner") for part in range(2)]

    async def work() -> None:
        clock, door, one = ManualClock(), MemoryCoordinator(MemoryCluster()), broker("one")
        await door.register(one)
        planner = Planner(lambda view: AssignmentPlan(changes=tuple(changes)))
        governor = Governor(door, planner, EventLog(clock), clock)
        error: list[MemqError] = []

        async def refuse(assignment: Assignment, *, term: int | None = None) -> Assignment:
            raise error[0]

        door.set_assignment = refuse  # type: ignore[method-assign]
        error[:] = [TermFencedError("term 2 has begun")]
        assert await governor.act(one) == 0
        assert governor.term == 0, "it does not govern any more"
        error[:] = [UnreachableError("not now")]
        with pytest.raises(UnreachableError):
            await governor.act(one)
        error[:] = [VersionConflictError("another change came first")]
        assert await governor.act(one) == 0
        assert governor.term > 0, "its change arrives as one more event"

    asyncio.run(work())
