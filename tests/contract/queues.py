"""Every notification queue of the contract suite; a new one is one line here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import pytest

from memq.errors import ClosedError
from memq.groups import Groups
from memq.notification import NotificationQueue, Publication
from memq.notification.memory import MemoryQueue
from memq.notification.sqlite.queue import SqliteQueue
from memq.topic import Committed, Position, ReadPartition, Totals
from tests.contract.loopback_queue import LoopbackQueue
from tests.contract.manual_clock import ManualClock
from tests.contract.state_log_queue import StateLogQueue

STALE_MS = 30_000
HANG_S = 120  # a wake-up that was lost is a failure, not a build that never ends


class GroupedQueue(NotificationQueue, Groups, Protocol):
    """A queue with groups: on a state log, directly or through a broker's handlers."""


@dataclass(frozen=True)
class Kind:
    """One implementation, and by which rule it refuses what is stale."""

    open: Callable[[Path, ManualClock], NotificationQueue]
    refuses: Literal["epoch", "age"]


QUEUES: dict[str, Kind] = {
    "memory": Kind(lambda folder, clock: MemoryQueue(clock), "epoch"),
    "memory-age": Kind(lambda folder, clock: MemoryQueue(clock, refuse="age"), "age"),
    "sqlite": Kind(lambda folder, clock: SqliteQueue(folder / "queue.sqlite", clock, poll_interval_ms=2), "epoch"),
    "state-log": Kind(lambda folder, clock: StateLogQueue(clock), "epoch"),
    "remote": Kind(lambda folder, clock: LoopbackQueue(StateLogQueue(clock), clock), "epoch"),
}

Scenario = Callable[[NotificationQueue, ManualClock], Awaitable[None]]
GroupScenario = Callable[[GroupedQueue, ManualClock], Awaitable[None]]


def over_queues(scenario: Scenario) -> Callable[[str, Path], None]:
    """Make a test of a scenario, once per queue."""
    test = _over(scenario, list(QUEUES))
    test.everywhere = True  # type: ignore[attr-defined]
    return test


def over_groups(scenario: GroupScenario) -> Callable[[str, Path], None]:
    """Make a test of a scenario, once per queue with groups."""
    return _over(scenario, ["state-log", "remote"])


def over_queues_that_refuse(rule: Literal["epoch", "age"]) -> Callable[[Scenario], Callable[[str, Path], None]]:
    """Make a test of a scenario, once per queue of this rule."""
    return lambda scenario: _over(scenario, [name for name, kind in QUEUES.items() if kind.refuses == rule])


def _over(scenario: Callable[[Any, ManualClock], Awaitable[None]], kinds: list[str]) -> Callable[[str, Path], None]:
    @pytest.mark.parametrize("kind", kinds)
    def test(kind: str, tmp_path: Path) -> None:
        async def run() -> None:
            clock = ManualClock()
            queue = QUEUES[kind].open(tmp_path, clock)
            try:
                async with asyncio.timeout(HANG_S):
                    await scenario(queue, clock)
            finally:
                await queue.close()

        asyncio.run(run())

    test.__name__ = scenario.__name__
    test.scenario = scenario  # type: ignore[attr-defined]  # the suites on real servers take it from here
    return test


def scenarios_of(module: ModuleType, without: Collection[str] = ()) -> list[Scenario]:
    """Return the scenarios of a contract module that run over every queue, but for those named in `without`."""
    tests = [getattr(module, name) for name in dir(module) if name.startswith("test_")]
    found = [test.scenario for test in tests if getattr(test, "everywhere", False)]
    left = [scenario for scenario in found if scenario.__name__ not in without]
    assert len(found) - len(left) == len(without), "a scenario that is left out is not there"
    return left


def part(number: int = 0, topic: str = "clicks", topic_id: str = "0a" * 16) -> ReadPartition:
    return ReadPartition(topic, topic_id, number)


def publication(
    clock: ManualClock,
    body: bytes = b"pointer",
    *,
    partition: ReadPartition | None = None,
    write: int = 0,
    epoch: int = 1,
    age_ms: int = 0,
) -> Publication:
    return Publication(partition or part(), write, epoch, clock.wall_ms() - age_ms, body)


async def check_close_ends_a_wait(queue: NotificationQueue, steps: int, *, followed: bool) -> None:
    """Close a queue in which a wait for `part(0)` has run for `steps` turns of the loop: the wait ends, too."""
    if followed:
        await queue.wait({part(0): 0}, 0.001)
    waiting = asyncio.create_task(queue.wait({part(0): 0}, 600))
    for _ in range(steps):
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await queue.close()
        with pytest.raises(ClosedError):
            await waiting


def committed(offset: int, *, index: int = 0, partition: int = 0, records: int = 0, size: int = 0) -> Committed:
    return Committed(Position(partition, offset, index), Totals(records, size))
