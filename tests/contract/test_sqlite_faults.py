"""The contracts of queue and coordinator over SQLite files whose commits fail, whether they have landed or not."""

from __future__ import annotations

import asyncio
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from memq.errors import QueueError, UnreachableError
from memq.governor.standalone import StandaloneCoordinator
from memq.notification.log_reader import all_entries
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.clock import SystemClock
from tests.contract import test_former_groups, test_queue_log
from tests.contract.coordinators import topic
from tests.contract.manual_clock import ManualClock
from tests.contract.queues import HANG_S, STALE_MS, Scenario, part, publication, scenarios_of
from tests.integration.retrying_coordinator import RetryingCoordinator
from tests.integration.retrying_queue import RetryingQueue
from tests.soak import SOAKING

SLOW = [
    "test_a_long_trim_takes_all",
    "test_many_publishes_at_once_get_one_offset_each",
    "test_seeking_a_time_finds_the_first_entry_at_or_after_it",
]
STEP = 1 if SOAKING else 3  # `make check` has a third of the scenarios
CODES = {
    "disk I/O error": sqlite3.SQLITE_IOERR_FSYNC,
    "database or disk is full": sqlite3.SQLITE_FULL,
    "database is locked": sqlite3.SQLITE_BUSY,
}
FAULTS = [(text, landed) for text in CODES for landed in (False, True) if not (landed and "locked" in text)]
EVERY = 3  # commits, of which one fails
PUBLISHES = 30


class Faults:
    """The faults of all connections of a test: `met` counts them."""

    def __init__(self, text: str, *, landed: bool) -> None:
        self._text = text
        self._landed = landed
        self._commits = 0
        self.met = 0
        self.on = True

    def commit(self, connection: sqlite3.Connection, run: Any) -> sqlite3.Cursor:
        self._commits += self.on
        if not self.on or self._commits % EVERY:
            return run()  # type: ignore[no-any-return]
        self.met += 1
        if self._landed:
            run()
        error = sqlite3.OperationalError(self._text)
        error.sqlite_errorcode = CODES[self._text]
        raise error


@pytest.fixture(params=FAULTS, ids=lambda each: f"{each[0]}-{'landed' if each[1] else 'lost'}".replace(" ", "-"))
def faults(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Let commits fail on all connections that are made from now on."""
    text, landed = request.param
    found = Faults(text, landed=landed)

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
            run = partial(super().execute, sql, *arguments)
            return found.commit(self, run) if sql == "COMMIT" else run()

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Connection))
    return found


def over(scenario: Scenario, path: Path, faults: Faults) -> None:
    async def run() -> None:
        clock = ManualClock()
        faults.on = False  # a new file is made in one transaction, which fails as a whole
        queue = SqliteQueue(path, clock, poll_interval_ms=2)
        faults.on = True
        try:
            async with asyncio.timeout(HANG_S):
                await scenario(RetryingQueue(queue), clock)
        finally:
            await queue.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "scenario", scenarios_of(test_queue_log, without=SLOW)[::STEP], ids=lambda scenario: scenario.__name__
)
def test_the_log(scenario: Scenario, tmp_path: Path, faults: Faults) -> None:
    over(scenario, tmp_path / "queue.sqlite", faults)


@pytest.mark.parametrize("scenario", scenarios_of(test_former_groups), ids=lambda scenario: scenario.__name__)
def test_groups(scenario: Scenario, tmp_path: Path, faults: Faults) -> None:
    over(scenario, tmp_path / "queue.sqlite", faults)


def test_acked_pointers_survive_a_start_and_failures_are_queue_errors(tmp_path: Path, faults: Faults) -> None:
    path = tmp_path / "queue.sqlite"
    acked: dict[int, bytes] = {}
    failed: list[bytes] = []

    async def publish() -> None:
        clock = ManualClock()
        faults.on = False
        queue = SqliteQueue(path, clock)
        await queue.create([part()], STALE_MS)
        faults.on = True
        for number in range(PUBLISHES):
            body = b"%d" % number
            try:
                acked[await queue.publish(publication(clock, body))] = body
            except QueueError:
                failed.append(body)
        await queue.close()

    async def stored() -> dict[int, bytes]:
        queue = SqliteQueue(path, ManualClock())
        try:
            return {entry.offset: entry.body async for page in all_entries(queue, part()) for entry in page}
        finally:
            await queue.close()

    asyncio.run(publish())
    faults.on = False
    found = asyncio.run(stored())
    assert {offset: found[offset] for offset in acked} == acked
    assert len(failed) == faults.met == PUBLISHES // EVERY
    assert set(found.values()) - set(acked.values()) <= set(failed), "only what failed may be there besides"
    assert sorted(found) == list(range(len(found)))


def test_topics(tmp_path: Path, faults: Faults) -> None:
    """A change that failed is an error that may pass; the file decides whether it has happened."""
    path = tmp_path / "topics.sqlite"

    async def run() -> None:
        faults.on = False
        inner = StandaloneCoordinator(path, "test", SystemClock())
        faults.on = True
        coordinator = RetryingCoordinator(inner, lambda: faults.met)
        for number in range(1, 10):
            await coordinator.create_topic(topic(f"t{number}", number))
        made = list(await coordinator.topics())
        assert [each.name for each in made] == [f"t{number}" for number in range(1, 10)]
        for each in made[:3]:
            await coordinator.delete_topic(each)
        await inner.close()
        faults.on = False
        again = StandaloneCoordinator(path, "test", SystemClock())
        assert list(await again.topics()) == made[3:]
        assert [await again.deleted(each.id) for each in made] == [True] * 3 + [False] * 6
        await again.close()

    asyncio.run(run())
    assert faults.met


def test_a_change_that_failed_is_not_shown_unless_it_landed(tmp_path: Path, faults: Faults) -> None:
    async def run() -> None:
        faults.on = False
        coordinator = StandaloneCoordinator(tmp_path / "topics.sqlite", "test", SystemClock())
        faults.on = True
        shown = 0
        for number in range(1, 2 * EVERY + 1):
            try:
                await coordinator.create_topic(topic(f"t{number}", number))
                shown += 1
            except UnreachableError:
                assert await coordinator.current_topic(f"t{number}") is None, "until the file was read again"
        assert shown == 2 * EVERY - faults.met
        await coordinator.close()

    asyncio.run(run())
