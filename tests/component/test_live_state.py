"""The live audit's state in SQLite and PostgreSQL: one owner, atomic steps, and the view."""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from memq.audit.finding import IN_QUEUE, Kind
from memq.audit.live.partition import PartitionAudit
from memq.audit.live.partition_state import PartitionState
from memq.audit.live.report_partition import Client
from memq.audit.live.storage.database import Answer, Database, Execute, SqliteDatabase
from memq.audit.live.storage.state import decode_state
from memq.audit.live.storage.store import AuditStore, PartitionChanges
from memq.audit.live.view import AuditView, latencies
from memq.audit.minutes import QUEUE, MinuteRow
from memq.audit.pointer_facts import RunningTotals
from memq.errors import AuditStateError, GenerationFencedError, NotFoundError
from memq.format.ranges import RangeSet
from tests.component.live_reports import KEY, a_step
from tests.postgres import postgres_url
from tests.unit.audited import TOPIC
from tests.unit.live_audit_harness import MINUTE, PRODUCER, LiveAuditHarness, span


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


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(120):
            await work()

    asyncio.run(bounded())


def test_auditor_continues_with_the_state_that_another_stored(open_database: Callable[[], Database]) -> None:
    async def work() -> None:
        harness = LiveAuditHarness()
        harness.sent(span("sent", (0, 30)), span("acked", (0, 30)))
        harness.queue((PRODUCER, 0, 10))
        async with opened(open_database) as (store, _):
            assert await store.take_home(2, "one") == ("", {})
            assert await store.partition_state(KEY) is None
            await store.save(a_step("one", "2:7:0", harness))
        async with opened(open_database) as (store, view):
            position, clients = await store.take_home(2, "two")
            assert (position, clients) == ("2:7:0", harness.home.clients)
            books = await store.partition_state(KEY)
            assert books == harness.audit.state
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


def test_auditor_that_lost_the_home_stores_nothing(open_database: Callable[[], Database]) -> None:
    async def work() -> None:
        harness = LiveAuditHarness()
        harness.queue((PRODUCER, 0, 10))
        async with opened(open_database) as (store, view), opened(open_database) as (other, _):
            await store.take_home(2, "one")
            await other.take_home(2, "two")
            with pytest.raises(GenerationFencedError, match="given to another auditor"):
                await store.save(a_step("one", "2:7:0", harness))
            assert await view.version() == 0
            assert await store.partition_state(KEY) is None
            assert (await other.take_home(2, "two"))[0] == ""

    run(work)


def test_only_the_owner_of_a_home_notes_up_to_when_it_was_read(open_database: Callable[[], Database]) -> None:
    async def work() -> None:
        async with opened(open_database) as (store, _):
            await store.take_home(2, "one")
            assert await store.heard(2) == ("", 0)
            for topic_id, heard_ms in (("id", 5), ("made-again", 7)):
                await store.note_heard("one", topic_id, {2: heard_ms, 3: heard_ms})
                assert [await store.heard(home) for home in (2, 3)] == [(topic_id, heard_ms), ("", 0)]
            await store.take_home(2, "two")
            await store.note_heard("one", "id", {2: 9})
            assert await store.heard(2) == ("made-again", 7)

    run(work)


class Troubled:
    """A database of which each piece of work fails twice: in its middle, and after it is done."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def run(self, work: Callable[[Execute], Answer]) -> Answer:
        def broken(execute: Execute) -> Answer:
            work(execute)
            raise AuditStateError("in its middle")

        with pytest.raises(AuditStateError, match="in its middle"):
            await self._database.run(broken)
        await self._database.run(work)  # its answer is lost
        return await self._database.run(work)

    async def close(self) -> None:
        await self._database.close()


def test_a_step_that_is_saved_again_is_stored_once(open_database: Callable[[], Database]) -> None:
    async def work() -> None:
        harness = LiveAuditHarness()
        async with opened(lambda: Troubled(open_database())) as (store, view):
            await store.take_home(2, "one")
            for position, first, end in (("2:6:0", 0, 10), ("2:7:0", 10, 15)):
                harness.sent(span("sent", (first, end)), span("acked", (first, end)))
                harness.queue((PRODUCER, first, end))
                await store.save(a_step("one", position, harness))
            (minute,) = [each async for each in view.minutes("clicks", MINUTE, MINUTE + 1)]
            assert minute.row.side(QUEUE)["committed"] == 15
            assert await store.take_home(2, "one") == ("2:7:0", harness.home.clients)

    run(work)


def test_all_minutes_of_many_partitions_are_read(
    open_database: Callable[[], Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One statement read the first rows of all partitions by time: the newest minutes were missing."""
    monkeypatch.setattr("memq.audit.live.view.ROWS_MAX", 6)
    harness = LiveAuditHarness()
    rows = {minute: MinuteRow() for minute in (MINUTE, MINUTE + 2)}

    async def work() -> None:
        async with opened(open_database) as (store, view):
            await store.take_home(2, "one")
            step = a_step("one", "2:7:0", harness)
            for id_, part in (*(("earlier", part) for part in range(2)), *((TOPIC.id, part) for part in range(5))):
                step.changes[id_, part] = PartitionChanges(TOPIC.name, harness.audit.state, rows, [])
            step.changes["other", 0] = PartitionChanges("other", harness.audit.state, rows, [])
            await store.save(step)
            for first, minutes in ((MINUTE, [MINUTE, MINUTE + 2]), (MINUTE + 1, [MINUTE + 2])):
                found = [each async for each in view.minutes("clicks", first, MINUTE + 3)]
                places = [(TOPIC.id, part) for part in range(5)] + [("earlier", part) for part in range(2)]
                wanted = [(*place, minute) for place in places for minute in minutes]
                assert sorted((each.topic_id, each.partition, each.minute) for each in found) == sorted(wanted)

    run(work)


def test_rows_are_added_up_and_findings_kept_with_their_acknowledgement(open_database: Callable[[], Database]) -> None:
    async def work() -> None:
        harness = LiveAuditHarness()
        async with opened(open_database) as (store, view):
            await store.take_home(2, "one")
            harness.sent(span("sent", (0, 30)), span("acked", (0, 30)))
            harness.queue((PRODUCER, 0, 10))
            await store.save(a_step("one", "2:7:0", harness))
            seen = await view.version()
            (finding,) = await view.findings("clicks")
            assert (finding.kind.value, finding.ranges, finding.records) == ("lost", ((10, 30),), 20)
            await store.acknowledge(finding.id, "ada", 5)
            with pytest.raises(NotFoundError, match=r"finding .* does not exist"):
                await store.acknowledge("nobody", "ada", 5)

            harness.queue((PRODUCER, 10, 20))
            await store.save(a_step("one", "2:8:0", harness))
            (minute,) = [each async for each in view.minutes("clicks", MINUTE, MINUTE + 1, since=seen)]
            assert minute.row.side("").counts == {"sent": 30, "acked": 30, "committed": 20, "lost": 10}
            assert (minute.row.word(), minute.partition, [*minute.row.sides]) == ("lost", 0, [QUEUE])
            changed = await view.changes(seen)
            assert changed.topics == (("clicks", TOPIC.id),)
            assert [(each.ranges, each.acknowledged_by) for each in changed.findings] == [(((20, 30),), "ada")]
            assert await view.changes(changed.version) == type(changed)(changed.version)

            (summary,) = await view.topics(MINUTE, MINUTE + 1)
            assert (summary.row.word(), summary.findings, summary.partitions[0].records) == ("lost", 1, 20)
            harness.queue((PRODUCER, 20, 30))
            await store.save(a_step("one", "2:9:0", harness))
            assert await view.findings() == []
            assert [each.resolved_ms for each in await view.findings(all_=True)] == [harness.now_ms]
            await store.prune(harness.now_ms + 3_600_000)
            assert await view.findings(all_=True) == []
            assert [each async for each in view.minutes("clicks", 0, MINUTE + 100)] == []

    run(work)


def test_latencies_come_from_the_histograms() -> None:
    row = MinuteRow()
    row.side("g").time("fetched", [(0, 10), (4, 80), (10, 10)])
    found = latencies([row, row])
    assert found[("g", "fetched")] == {0.5: 12.0, 0.9: 16.0, 0.99: pytest.approx(972.8)}


def test_state_that_is_no_state_is_damage() -> None:
    from memq.errors import CorruptDataError

    with pytest.raises(CorruptDataError, match="can't be read"):
        decode_state(PartitionState, b"\xc1")
    with pytest.raises(CorruptDataError, match="can't be read"):
        decode_state(dict[int, Client], b"")


# Books of a version with other types, which has 10 of 30 records that were acked with all in the queue.
STORED = (
    b"c-"
    b"m!B%We}f6m=HeWQ7E5qkI5WCh3FrC)gpDBaeMEF`2Qael%s*06SEamLG^9V<%LI{s0o{2ej*M*dg&3;bx{U%9SOL@7U*_bMF0kD&fG!s^2$Y"
    b"8}mH}4&vNg64Ll^`FlX-NhT!6%rd}1AvEyw1yh9pv&xlFC^l$#t1QjT+cJSvNK%@C8p&obRs+q=c<m@q#*~xx$ZKFA?YqSYQPl`BF38%e$eT"
    b"<sFvlmibx%ms%j&{y>V92gskUUnArt$6r0{y+$|V`_NnlEASJ;Vn5()5$Pn?$c<7>Ug%-"
    b"QoVAo))Zl{69zfV^MI*QH3AQ#~~ALv4>aCIJE20GT#@0t3`A2^Kd*UCs;&J0Y!-"
    b"vf+wQYc>KpoP?C_L+px4P{@=!xZ@XcA)N&?zG$4ie2Oo^hzcuYdi<$o@`pTXw&qS28D%SBsRLtHLawF8)GmFhl`G6);54Tx@WXi@X(5OipY7"
    b"1CT@Kyt-p<D6Za;!w<nd?0|4Yw?_+pkRV^_YWP*zh=TJ(T<hMgIjd3A^dziLO_-p1zE_Vb-"
    b"xnlKLihv!9stw9+|5?>3f<jo7MxMQH#%8Kz6twbZZdEzyd>8kn7R>`O{@S}3DJrZ`%rdjr^Eo57&cA<o{puI|71GCdI$rKwBU-"
    b"xGDtuM5(@xxA@YA`C>hpNxt5g3OGokOGI<jwTo#A*_1a5E-XFLKEDI+bqIsa@#YXzfti=|#Qm^{9)h6GgZ%)}x!~-hE!j%&LsvjO5{89PDO#"
)


def test_an_upgrade_reads_what_was_stored_before_it() -> None:
    books = decode_state(PartitionState, zlib.decompress(base64.b85decode(STORED)))
    (finding,) = books.findings.values()
    assert (finding.kind, finding.ranges, finding.stage, finding.grave) == (Kind.LOST, ((10, 30),), IN_QUEUE, True)
    harness = LiveAuditHarness()
    harness.audit = PartitionAudit(TOPIC, 0, books)
    assert (books.totals, books.epoch, books.streams[PRODUCER].account.delivered) == (
        RunningTotals(0, 10), 1, RangeSet([(0, 10)])
    )  # fmt: skip
    harness.offset = books.next_offset
    harness.queue((PRODUCER, 10, 30))
    harness.audit.settle(harness.now_ms)
    assert [(each.id, each.resolved_ms > 0) for each in harness.audit.take_findings()] == [(finding.id, True)]
    row = decode_state(MinuteRow, STORED_ROW)
    assert (row.word(QUEUE), row.side(QUEUE).counts) == ("lost", {"sent": 30, "acked": 30, "committed": 10, "lost": 20})


STORED_ROW = (
    b"\x81\xa5sides\x81\xa0\x82\xa6counts\x84\xa4sent\x1e\xa5acked\x1e\xa9committed\n\xa4lost\x14"
    b"\xa7latency\x83\xa9committed\x80\xa4sent\x80\xa5acked\x80"
)
