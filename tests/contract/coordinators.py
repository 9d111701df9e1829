"""Every coordinator of the contract suite; a new one is one line here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from memq.governor import BrokerEntry, MarkedCoordinator
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.governor.standalone import StandaloneCoordinator
from memq.governor.zookeeper import open_from_settings
from memq.governor.zookeeper.coordinator import ZookeeperCoordinator
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime
from memq.settings import PartSettings
from memq.topic import Topic, TopicSettings, equal_slots
from memq_localstack.servers import Server

# Each with what it opens on: an empty folder, and the address of a real ZooKeeper.
COORDINATORS: dict[str, Callable[[Path, Callable[[], str]], MarkedCoordinator]] = {
    "memory": lambda folder, server: MemoryCoordinator(MemoryCluster("test")),
    "standalone": lambda folder, server: StandaloneCoordinator(folder / "topics.sqlite", "test", SystemClock()),
    "zookeeper": lambda folder, server: open_zookeeper(server(), path_of(folder)),
}

HANG_S = 120  # a wake-up that was lost is a failure, not a build that never ends


def open_zookeeper(server: str, path: str, *, cluster: str = "test", **section: str) -> ZookeeperCoordinator:
    """Open a coordinator on a real server, below a path of its own."""
    parts = PartSettings(
        coordinator=f"zookeeper://{server}{path}",
        sections={"zookeeper": {name: (value, "test") for name, value in section.items()}},
    )
    return open_from_settings(parts, Runtime(), cluster)


def path_of(folder: Path) -> str:
    """Return a path in ZooKeeper that no other test has."""
    return f"/{folder.parent.name}/{folder.name}"


def over_coordinators(
    scenario: Callable[[MarkedCoordinator], Awaitable[None]],
) -> Callable[[str, Path, pytest.FixtureRequest], None]:
    """Make a test of a scenario, once per coordinator."""
    kinds = [pytest.param(kind, marks=pytest.mark.thorough if kind == "zookeeper" else ()) for kind in COORDINATORS]

    @pytest.mark.parametrize("kind", kinds)
    def test(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
        async def run() -> None:
            coordinator = COORDINATORS[kind](tmp_path, server)
            try:
                async with asyncio.timeout(HANG_S):
                    await scenario(coordinator)
            finally:
                await coordinator.close()

        def server() -> str:
            running: Server = request.getfixturevalue("zookeeper")
            return running.address

        asyncio.run(run())

    test.__name__ = scenario.__name__
    test.scenario = scenario  # type: ignore[attr-defined]  # the suite behind a proxy takes it from here
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
