"""Every coordinator that the contract suite runs over: a new one is one line here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from memq.clock import SystemClock
from memq.governor import BrokerEntry, Coordinator
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.governor.standalone import StandaloneCoordinator
from memq.topic import Topic, TopicSettings, equal_slots

COORDINATORS: dict[str, Callable[[Path], Coordinator]] = {
    "memory": lambda folder: MemoryCoordinator(MemoryCluster("test")),
    "standalone": lambda folder: StandaloneCoordinator(folder / "topics.sqlite", "test", SystemClock()),
}

HANG_S = 120  # a wake-up that was lost is a failure, not a build that never ends


def over_coordinators(scenario: Callable[[Coordinator], Awaitable[None]]) -> Callable[[str, Path], None]:
    """Make a test of a scenario, once per coordinator."""

    @pytest.mark.parametrize("kind", list(COORDINATORS))
    def test(kind: str, tmp_path: Path) -> None:
        async def run() -> None:
            coordinator = COORDINATORS[kind](tmp_path)
            try:
                async with asyncio.timeout(HANG_S):
                    await scenario(coordinator)
            finally:
                await coordinator.close()

        asyncio.run(run())

    test.__name__ = scenario.__name__
    return test


def topic(name: str = "clicks", number: int = 1, partitions: int = 2, settings: TopicSettings | None = None) -> Topic:
    return Topic(
        name=name,
        id=f"{number:032x}",
        created_ms=1_000,
        settings=settings or TopicSettings(),
        partitions=equal_slots(partitions),
    )


def broker(name: str = "b1", session: str = "s1") -> BrokerEntry:
    return BrokerEntry(id=name, session=session, address="127.0.0.1:9876")
