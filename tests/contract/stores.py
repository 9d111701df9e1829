"""Every storage handler of the contract suite; a new one is one line here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from memq.storage_handlers import StorageHandler
from memq.storage_handlers.filesystem import FilesystemHandler
from memq.storage_handlers.memory import MemoryHandler
from tests.contract.manual_clock import ManualClock


def open_filesystem(folder: Path) -> FilesystemHandler:
    (folder / "objects").mkdir(exist_ok=True)
    (folder / "tmp").mkdir(exist_ok=True)
    return FilesystemHandler(folder / "objects", folder / "tmp")


STORES: dict[str, Callable[[Path], StorageHandler]] = {
    "memory": lambda folder: MemoryHandler(ManualClock()),
    "filesystem": open_filesystem,
}

Scenario = Callable[[StorageHandler], Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {}  # by name: the tests on real servers run them over stores of their own

HANG_S = 120  # a wake-up that was lost is a failure, not a build that never ends


def over_stores(scenario: Scenario) -> Callable[[str, Path], None]:
    """Make a test of a scenario, once per handler."""
    SCENARIOS[scenario.__name__] = scenario

    @pytest.mark.parametrize("kind", list(STORES))
    def test(kind: str, tmp_path: Path) -> None:
        run_scenario(scenario, lambda: STORES[kind](tmp_path))

    test.__name__ = scenario.__name__
    return test


def run_scenario(scenario: Scenario, open_store: Callable[[], StorageHandler]) -> None:
    """Run a scenario on a store of its own, and close that."""

    async def run() -> None:
        store = open_store()
        try:
            async with asyncio.timeout(HANG_S):
                await scenario(store)
        finally:
            await store.close()

    asyncio.run(run())
