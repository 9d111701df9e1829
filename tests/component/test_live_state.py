"""The live audit's state, in SQLite and in PostgreSQL: one owner at a time, all of a step or nothing, and the view."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from memq.audit.live.partition_state import PartitionState
from memq.audit.live.report_partition import Client
from memq.audit.live.storage.database import Database, SqliteDatabase
from memq.audit.live.storage.store import AuditStore, PartitionChanges, Step
from memq.audit.live.view import AuditView, latencies
from memq.audit.minutes import MinuteRow
from memq.errors import GenerationFencedError, NotFoundError
from tests.postgres import postgres_url
from tests.unit.audited import TOPIC
from tests.unit.live_desk import MINUTE, PRODUCER, Desk, span

KEY = (TOPIC.id, 0)


@pytest.fixture(params=["sqlite", "postgres"])
def open_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Database]]:
    """Return what opens the database, again and again."""
    if request.param == "sqlite":
        yield lambda: SqliteDatabase(tmp_path / "audit.sqlite")
        return
    from memq.audit.live.storage.postgres import PostgresDatabase

    with postgres_url() as url:
        yield lambda: PostgresDatabase(url)


@asynccontextmanager
async def opened(open_database: Callable[[], Database]) -> AsyncIterator[tuple[AuditStore, AuditView]]:
    database = open_database()
    try:
        yield AuditStore(database), AuditView(database)
    finally:
        await database.close()


def a_step(owner: str, position: str, desk: Desk) -> Step:
    """Judge at a desk, and return what an auditor stores of that."""
    desk.audit.settle(desk.now_ms)
    changes = PartitionChanges(TOPIC.name, desk.audit.books, desk.audit.take_rows(), desk.audit.take_findings())
    return Step(2, owner, position, desk.home.clients, {KEY: changes})


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await work()

    asyncio.run(bounded())


def test_what_one_stored_another_goes_on_with(open_database: Callable[[], Database]) -> None:
    async def work() -> None:
        desk = Desk()
        desk.sent(span("sent", (0, 30)), span("acked", (0, 30)))
        desk.queue((PRODUCER, 0, 10))
        async with opened(open_database) as (store, _):
            assert await store.take_home(2, "one") == ("", {})
            assert await store.books(KEY) is None
            await store.save(a_step("one", "2:7:0", desk))
        async with opened(open_database) as (store, view):
            position, clients = await store.take_home(2, "two")
            assert (position, clients) == ("2:7:0", desk.home.clients)
            books = await store.books(KEY)
            assert books == desk.audit.books
            assert [(heard.home, heard.number) for heard in await view.clients()] == [(2, 100)]

    run(work)


def test_auditors_of_one_state_are_one_group(open_database: Callable[[], Database]) -> None:
    async def work() -> None:
        async with opened(open_database) as (one, _), opened(open_database) as (other, _):
            names = await asyncio.gather(one.group("g-1"), other.group("g-2"))
            assert names[0] == names[1]
            assert names[0] in ("g-1", "g-2")
        async with opened(open_database) as (later, _):
            assert await later.group("g-3") == names[0]

    run(work)


def test_who_lost_the_home_stores_nothing(open_database: Callable[[], Database]) -> None:
    async def work() -> None:
        desk = Desk()
        desk.queue((PRODUCER, 0, 10))
        async with opened(open_database) as (store, view), opened(open_database) as (other, _):
            await store.take_home(2, "one")
            await other.take_home(2, "two")
            with pytest.raises(GenerationFencedError, match="given to another auditor"):
                await store.save(a_step("one", "2:7:0", desk))
            assert await view.version() == 0
            assert await store.books(KEY) is None
            assert (await other.take_home(2, "two"))[0] == ""

    run(work)


def test_rows_are_added_up_and_findings_kept_with_their_acknowledgement(open_database: Callable[[], Database]) -> None:
    async def work() -> None:
        desk = Desk()
        async with opened(open_database) as (store, view):
            await store.take_home(2, "one")
            desk.sent(span("sent", (0, 30)), span("acked", (0, 30)))
            desk.queue((PRODUCER, 0, 10))
            await store.save(a_step("one", "2:7:0", desk))
            seen = await view.version()
            (finding,) = await view.findings("clicks")
            assert (finding.kind, finding.ranges, finding.records) == ("lost", ((10, 30),), 20)
            await store.acknowledge(finding.id, "ada", 5)
            with pytest.raises(NotFoundError, match="there is no finding"):
                await store.acknowledge("nobody", "ada", 5)

            desk.queue((PRODUCER, 10, 20))
            await store.save(a_step("one", "2:8:0", desk))
            (minute,) = await view.minutes("clicks", MINUTE, MINUTE + 1, since=seen)
            assert minute.row.side("").counts == {"sent": 30, "acked": 30, "committed": 20, "lost": 10}
            assert (minute.word(), minute.partition, minute.groups) == ("lost", 0, [])
            changed = await view.changes(seen)
            assert changed.topics == (("clicks", TOPIC.id),)
            assert [(each.ranges, each.acknowledged_by) for each in changed.findings] == [(((20, 30),), "ada")]
            assert await view.changes(changed.version) == type(changed)(changed.version)

            (summary,) = await view.topics(MINUTE, MINUTE + 1)
            assert (summary.word(), summary.findings, summary.partitions[0].records) == ("lost", 1, 20)
            desk.queue((PRODUCER, 20, 30))
            await store.save(a_step("one", "2:9:0", desk))
            assert await view.findings() == []
            assert [each.resolved_ms for each in await view.findings(all_=True)] == [desk.now_ms]
            await store.prune(desk.now_ms + 3_600_000)
            assert await view.findings(all_=True) == []
            assert await view.minutes("clicks", 0, MINUTE + 100) == []

    run(work)


def test_latencies_come_from_the_histograms() -> None:
    row = MinuteRow()
    row.side("g").time("fetched", [(0, 10), (4, 80), (10, 10)])
    found = latencies([row, row])
    assert found[("g", "fetched")] == {0.5: 12.0, 0.9: 16.0, 0.99: pytest.approx(972.8)}


def test_state_that_is_no_state_is_damage() -> None:
    from memq.audit.live.storage.state import decode_state
    from memq.errors import CorruptDataError

    with pytest.raises(CorruptDataError, match="can't be read"):
        decode_state(PartitionState, b"\xc1")
    with pytest.raises(CorruptDataError, match="can't be read"):
        decode_state(dict[int, Client], b"")
