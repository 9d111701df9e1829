"""The live audit next to a broker in this process: reports, findings, restarts, several auditors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from memq.audit.finding import Finding, Kind
from memq.audit.live.group_reports import GroupReports
from memq.audit.live.questions.damage_names import NAME_TRIES, DamageNames
from memq.audit.live.service import live_audit
from memq.audit.live.storage.database import Database, SqliteDatabase
from memq.audit.live.view import AuditView
from memq.audit.minutes import MinuteRow
from memq.broker.api.reader_requests import ReaderRequests
from memq.cli import main
from memq.cli.cluster.embedded_services import database_at, embedded_auditor
from memq.client.admin import AsyncAdmin
from memq.client.broker_router import BrokerRouter
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.link_pool import LinkPool, bootstrap_addresses
from memq.client.observers.reporter import ReportCarrier
from memq.errors import FencedError, MemqError, NotFoundError, QueueError, RetryableError
from memq.format.pointer import encode_pointer
from memq.format.report import (
    AUDIT_TOPIC,
    Report,
    ReportedDamage,
    ReportPart,
    ReportSpan,
    encode_report,
    home_of,
)
from memq.notification import Entries, Entry, Span
from memq.notification.memory import MemoryQueue
from memq.notification.remote import RemoteQueue
from memq.protocol.messages import PollEntries
from memq.runtime.runtime import Runtime
from memq.testing import Cluster
from memq.topic import AUDIT_GROUP, Position, ReadPartition, Topic
from tests.component.live_reports import (
    KEEP_MS,
    RECORDS,
    WAIT_S,
    all_of,
    consume,
    counts,
    produce,
    until,
    with_database,
)
from tests.postgres import postgres_url
from tests.skipping_loop import run_skipping
from tests.unit.audited import TOPIC, data_pointer

POINTER = data_pointer([(1, 0, 10)])
TOPICS = AsyncAdmin.topics


@pytest.fixture
def cluster() -> Cluster:
    """Return a cluster whose clients report often."""
    return Cluster(audit=True, audit_interval_ms=100)


async def findings(database: Database) -> list[Finding]:
    return await AuditView(database).findings()


def test_a_damaged_block_is_named_traced_and_verified(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = f"sqlite:{tmp_path / 'audit.sqlite'}"
    with cluster:
        produce(cluster)
        sent = cluster.records("clicks")
        place, sound = sent[120].position, sent[250]
        cluster.damage(Position.parse(str(place)), "clicks")
        read = consume(cluster)
        assert read < RECORDS

        async def work(database: Database) -> None:
            async with live_audit(cluster.address, database, KEEP_MS, Runtime()) as audit:
                summary = await until([audit], database, all_of(RECORDS))
            assert (summary.row.word(), summary.row.word("g")) == ("corrupt", "corrupt")

        with_database(state, work)
        assert main(["auditor", "findings", "--json", "--audit-state", state]) == 1
        (finding,) = json.loads(capsys.readouterr().out)
        ((first, next_),) = finding["ranges"]
        assert (finding["kind"], finding["records"], next_ - first) == ("corrupt", RECORDS - read, RECORDS - read)
        assert finding["offset"] == place.pointer_offset

        assert main(["auditor", "verify", finding["id"], "--audit-state", state, "-b", cluster.address]) == 1
        assert "1 of 1 blocks are damaged" in capsys.readouterr().out
        named = ["--producer", finding["producer"], "--seq", str(first)]
        assert main(["trace", "clicks", *named, "-b", cluster.address, "--json"]) == 0
        (sighting,) = json.loads(capsys.readouterr().out)
        assert (sighting["object"], sighting["sequence"]) == (finding["object"], first)
        assert sighting["groups"] == {"g": True}
        assert "checksum" in sighting["damage"]

        assert main(["trace", "clicks", "--key", "k3", "-b", cluster.address]) == 0
        output = capsys.readouterr().out
        assert output.count("record:") == (RECORDS - (RECORDS - read)) // 10
        assert "g: past it" in output
        assert "Z or up to 50 s later, in epoch 1" in output, "a queue time is that of a proof: before it was sealed"
        assert main(["trace", "clicks", str(sound.position), "-b", cluster.address, "--json"]) == 0
        (sighting,) = json.loads(capsys.readouterr().out)
        assert (sighting["position"], sighting["damage"]) == (str(sound.position), "")
        assert sighting["queue_late_ms"] == 50_000
        assert main(["trace", "clicks", "0:99999:0", "-b", cluster.address]) == 3
        cluster.remove_object(sound.position, "clicks")
        gone = ["--producer", sighting["producer"], "--seq", str(sighting["sequence"])]
        assert main(["trace", "clicks", *gone, "-b", cluster.address, "--json"]) == 0
        (unread,) = json.loads(capsys.readouterr().out)
        assert [unread[name] for name in ("sequence", "object", "block")] == [
            *map(sighting.get, ("sequence", "object")),
            -1,
        ]
        assert unread["damage"]
        assert main(["trace", "clicks", "-b", cluster.address]) != 0

        assert main(["auditor", "acknowledge", finding["id"], "--by", "ada", "--audit-state", state]) == 0
        capsys.readouterr()
        assert main(["auditor", "findings", "--csv", "--audit-state", state]) == 1
        assert ",ada," in capsys.readouterr().out
        assert main(["auditor", "show", "--audit-state", state]) == 1
        heads, *rows = capsys.readouterr().out.splitlines()
        assert heads.endswith("p99 ms")
        assert any("corrupt" in row for row in rows)
        assert main(["auditor", "show", "--json", "--audit-state", state]) == 1
        (shown,) = json.loads(capsys.readouterr().out)
        took_ms = {side: set(output["latency_ms"]) for side, output in shown["sides"].items()}
        assert took_ms == {"": {"sent", "acked", "committed"}, "g": {"fetched", "processed"}}
        assert list(shown["sides"]["g"]["latency_ms"]["processed"]) == ["p50", "p90", "p99"]


def test_an_auditor_that_comes_later_says_the_same(cluster: Cluster, tmp_path: Path) -> None:
    """One audits from the beginning, step by step, and is cut off in between; the other one comes when all is over."""
    with cluster:

        async def steps(database: Database) -> None:
            for records in (RECORDS, 2 * RECORDS):
                await asyncio.to_thread(produce, cluster)
                await asyncio.to_thread(consume, cluster)
                async with live_audit(cluster.address, database, KEEP_MS, Runtime()) as audit:
                    await until([audit], database, all_of(records))

        async def later(database: Database) -> None:
            async with live_audit(cluster.address, database, KEEP_MS, Runtime()) as audit:
                await until([audit], database, all_of(2 * RECORDS))

        first, second = f"sqlite:{tmp_path / 'first'}", f"sqlite:{tmp_path / 'second'}"
        with_database(first, steps)
        with_database(second, later)

        async def compare(one: Database) -> None:
            other = database_at(second)()
            try:
                views = [AuditView(each).minutes("clicks", 0, 1 << 40) for each in (one, other)]
                here, there = [[(each.minute, each.row) async for each in view] for view in views]
            finally:
                await other.close()
            assert here == there
            assert await findings(one) == []

        with_database(first, compare)


def test_a_home_that_goes_to_another_auditor_while_its_state_is_read_is_let_go() -> None:
    async def work() -> None:
        async def find(_: str) -> Topic:
            return TOPIC

        pool = LinkPool(Runtime(), bootstrap_addresses("127.0.0.1:1"))
        consumer = AsyncConsumer("127.0.0.1:1", [AUDIT_TOPIC], group=AUDIT_GROUP)
        try:
            with pytest.raises(FencedError, match="not assigned"):
                await GroupReports(consumer, RemoteQueue(BrokerRouter(pool)), TOPIC, find).seek(0, "")
        finally:
            await consumer.close()
            await pool.close()

    asyncio.run(work())


@pytest.mark.parametrize("restarts", [False, True])
def test_a_log_that_fails_makes_the_minutes_of_its_partition_unknown_and_no_others(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    sick = asyncio.Event()
    span = MemoryQueue.span

    async def failing(queue: MemoryQueue, partition: ReadPartition) -> Span:
        if sick.is_set() and (partition.topic, partition.partition) == ("clicks", 1):
            raise QueueError("no leader")
        return await span(queue, partition)

    async def known(database: Database) -> dict[int, MinuteRow]:
        found: dict[int, MinuteRow] = {0: MinuteRow(), 1: MinuteRow()}
        async for minute in AuditView(database).minutes("clicks", 0, 1 << 40):
            found[minute.partition].add(minute.row)
        return found

    async def work(database: Database) -> None:
        async with live_audit(cluster.address, database, KEEP_MS, Runtime()) as audit:
            await until([audit], database, all_of(RECORDS))
            half = {number: row.side("")["committed"] for number, row in (await known(database)).items()}
            assert all(half.values())
            monkeypatch.setattr(MemoryQueue, "span", failing)
            sick.set()
            await asyncio.to_thread(produce, cluster)
            rows = await known(database)
            async with asyncio.timeout(WAIT_S):
                wanted = [2 * half[0]] * 2
                while [rows[0].side("")[name] for name in ("sent", "committed")] != wanted or rows[1].word("") == "ok":
                    await audit.step()
                    rows = await known(database)
            assert (rows[0].word(""), rows[1].word("")) == ("ok", "unknown")
            assert rows[1].side("")["committed"] == rows[1].side("")["sent"] == half[1]
            if not restarts:
                sick.clear()
                await until([audit], database, lambda summary: counts(summary)[:2] == (2 * RECORDS,) * 2)
        async with live_audit(cluster.address, database, KEEP_MS, Runtime()) as audit:
            if restarts:
                await audit.step()
                assert (await known(database))[1].word("") == "unknown", "what was reported is stored, and not judged"
                sick.clear()
            summary = await until([audit], database, lambda summary: counts(summary)[:2] == (2 * RECORDS,) * 2)
        assert (summary.findings, summary.row.word()) == (0, "ok")

    with cluster:
        cluster.create_topic("clicks", partitions=2)
        produce(cluster)
        assert consume(cluster) == RECORDS
        with_database(f"sqlite:{tmp_path / 'audit.sqlite'}", work)


def test_an_end_that_the_queue_shows_too_low_makes_no_acked_record_a_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    low_ends: dict[int, int] = {}
    prepare = ReaderRequests.prepare_poll

    async def lowered(requests: ReaderRequests, ask: PollEntries) -> list[Span | MemqError]:
        found = list(await prepare(requests, ask))
        for at, (part, span) in enumerate(zip(ask.partitions, found, strict=True)):
            log = part.partition
            if log.topic == "clicks" and log.partition in low_ends and isinstance(span, Span):
                found[at] = Span(span.begin, low_ends[log.partition])
        return found

    monkeypatch.setattr(ReaderRequests, "prepare_poll", lowered)
    cluster = Cluster(audit=True, audit_interval_ms=100)

    async def work(database: Database) -> None:
        async with live_audit(cluster.address, database, KEEP_MS, Runtime()) as audit:
            summary = await until([audit], database, lambda summary: counts(summary)[:2] == (RECORDS,) * 2)
            low_ends.update({number: facts.next_offset for number, facts in summary.partitions.items()})
            await asyncio.to_thread(produce, cluster)
            await until([audit], database, lambda summary: summary.row.side("")["acked"] == 2 * RECORDS)
            for _ in range(4):
                await audit.step()
            assert await AuditView(database).findings(all_=True) == []
            low_ends.clear()
            summary = await until([audit], database, lambda summary: counts(summary)[:2] == (2 * RECORDS,) * 2)
            assert (summary.findings, summary.row.word()) == (0, "ok")
            assert await AuditView(database).findings(all_=True) == []

    with cluster:
        cluster.create_topic("clicks", partitions=2)
        produce(cluster)
        with_database(f"sqlite:{tmp_path / 'audit.sqlite'}", work)


def test_acked_records_without_pointer_are_lost_after_a_proof_of_the_end(tmp_path: Path) -> None:
    cluster = Cluster(audit=True, audit_interval_ms=100, audit_partitions=1)

    async def work(database: Database) -> None:
        async with live_audit(cluster.address, database, KEEP_MS, Runtime()) as audit:
            summary = await until([audit], database, lambda summary: counts(summary)[:2] == (RECORDS,) * 2)
            acked = ReportSpan(stage="acked", producer=7, minute=1, ranges=((0, 3),), level=2)
            part = ReportPart(topic="clicks", topic_id=summary.topic_id, partition=0, spans=(acked,))
            report = Report(
                client=7, kind="producer", number=0, since_ms=1, until_ms=1, next_ms=1, last=True, parts=(part,)
            )
            await send(encode_report(report), home_of(summary.topic_id, 0, 1))
            await until([audit], database, lambda summary: summary.findings == 1)
            (found,) = await findings(database)
            assert (found.kind, found.producer, found.ranges) == (Kind.LOST, 7, ((0, 3),))

    async def send(body: bytes, home: int) -> None:
        pool = LinkPool(Runtime(), bootstrap_addresses(cluster.address))
        carrier = ReportCarrier(Runtime(), pool)
        await carrier.homes()
        carrier.send(home, body)
        await carrier.close(10.0)
        await pool.close()

    with cluster:
        cluster.create_topic("clicks", partitions=2)
        produce(cluster)
        with_database(f"sqlite:{tmp_path / 'audit.sqlite'}", work)


def test_a_home_whose_log_fails_delays_the_partitions_of_no_other_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(audit=True, audit_interval_ms=100, audit_partitions=2)
    sick = asyncio.Event()
    span = MemoryQueue.span

    async def failing(queue: MemoryQueue, partition: ReadPartition) -> Span:
        if sick.is_set() and (partition.topic, partition.partition) == (AUDIT_TOPIC, 1):
            raise QueueError("no leader")
        return await span(queue, partition)

    async def work(database: Database) -> None:
        async with live_audit(cluster.address, database, KEEP_MS, Runtime()) as audit:
            await until([audit], database, all_of(RECORDS))
            before = await committed(database)
            homes = {number: home_of(topic_id, number, 2) for topic_id, number in before}
            assert set(homes.values()) == {0, 1}
            monkeypatch.setattr(MemoryQueue, "span", failing)
            sick.set()
            await asyncio.to_thread(produce, cluster)
            wanted = {key: 2 * records for key, records in before.items() if homes[key[1]] == 0}
            async with asyncio.timeout(WAIT_S):
                while wanted.items() - (await committed(database)).items():
                    await audit.step()
            sick.clear()
            await until([audit], database, lambda summary: counts(summary)[:2] == (2 * RECORDS,) * 2)

    async def committed(database: Database) -> dict[tuple[str, int], int]:
        found: dict[tuple[str, int], int] = {}
        async for minute in AuditView(database).minutes("clicks", 0, 1 << 40):
            key = (minute.topic_id, minute.partition)
            found[key] = found.get(key, 0) + minute.row.side("")["committed"]
        return found

    with cluster:
        cluster.create_topic("clicks", partitions=6)
        produce(cluster)
        assert consume(cluster) == RECORDS
        with_database(f"sqlite:{tmp_path / 'audit.sqlite'}", work)


@pytest.mark.parametrize("part", ["log", "object"])
@pytest.mark.parametrize("hangs", [False, True])
def test_a_damage_that_can_not_be_named_stops_the_reports_for_three_rounds_alone(part: str, hangs: bool) -> None:
    asked = 0

    async def fail() -> None:
        nonlocal asked
        asked += 1
        if hangs:
            await asyncio.get_running_loop().create_future()
        raise QueueError("no leader")

    class Queue:
        async def read(self, *_: Any) -> list[Entry]:
            if part == "log":
                await fail()
            return [Entry(7, 1, encode_pointer(data_pointer([(1, 0, 10)])))]

    async def read(*_: Any) -> Any:
        await fail()

    async def work() -> None:
        names, log = DamageNames(cast("Any", Queue()), cast("Any", read)), TOPIC.read_partition_of(0)
        damage = ReportedDamage(object="c/x", block=1, offset=7, records=5, cause="checksum")
        for _ in range(NAME_TRIES - 1):
            with pytest.raises(RetryableError, match="within 5 s" if hangs else "no leader"):
                await names.find(log, damage)
        for _ in range(5):
            assert await names.find(log, damage) == [damage]
        assert asked == NAME_TRIES, "the other damages of this log are not asked for"
        names.forget()
        with pytest.raises(RetryableError):
            await names.find(log, damage)

    run_skipping(work())


@pytest.mark.parametrize("gone", [False, True])
def test_a_damage_keeps_no_name_when_its_pointer_is_gone_and_is_asked_for_again_while_the_log_does_not_show_it(
    gone: bool,
) -> None:
    answers = [Entries((), 7), Entries([Entry(8, 1, b"")], 9), Entries([Entry(7, 1, encode_pointer(POINTER))], 8)]

    class Queue:
        async def read(self, *_: Any) -> Entries:
            return answers.pop(0)

        async def span(self, *_: Any) -> Span:
            return Span(8 if gone else 0, 9)

    async def read(*_: Any) -> Any:
        raise NotFoundError("no such object")

    async def work() -> None:
        names, log = DamageNames(cast("Any", Queue()), cast("Any", read)), TOPIC.read_partition_of(0)
        damage = ReportedDamage(object="c/x", block=0, offset=7, records=10, cause="gone")
        if gone:
            assert await names.find(log, damage) == [damage]
        else:
            for _ in range(2):
                with pytest.raises(QueueError, match="does not show pointer 7"):
                    await names.find(log, damage)
            assert [(each.producer, each.next) for each in await names.find(log, damage)] == [(1, 10)]

    run_skipping(work())


def test_several_auditors_share_one_state(cluster: Cluster) -> None:
    """Two share the homes; one is cut off without a word, and the other continues with what it has stored."""
    with cluster, postgres_url() as url:

        async def work(database: Database) -> None:
            second = database_at(url)()
            async with AsyncExitStack() as stack:
                stack.push_async_callback(second.close)
                audits = [
                    await stack.enter_async_context(live_audit(cluster.address, each, KEEP_MS, Runtime()))
                    for each in (database, second)
                ]
                await asyncio.to_thread(produce, cluster)
                await asyncio.to_thread(consume, cluster)
                await until(audits, database, all_of(RECORDS))
            async with live_audit(cluster.address, database, KEEP_MS, Runtime()) as left:
                await asyncio.to_thread(produce, cluster)
                await asyncio.to_thread(consume, cluster)
                summary = await until([left], database, all_of(2 * RECORDS))
            assert (summary.findings, summary.row.word("g")) == (0, "ok")

        with_database(url, work)


def test_the_auditor_next_to_a_broker_begins_again_when_its_state_could_not_be_opened(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder, again = tmp_path / "later", asyncio.Event()
    calls: list[Callable[[], None]] = [lambda: None, folder.mkdir]

    def open_state() -> Database:
        if calls:
            calls.pop(0)()
        if not calls:
            again.set()
        return SqliteDatabase(folder / "audit.sqlite")

    async def work() -> None:
        auditing = asyncio.create_task(embedded_auditor(open_state, KEEP_MS)(cluster.address))
        async with asyncio.timeout(WAIT_S):
            await again.wait()
        await asyncio.to_thread(produce, cluster)
        database = SqliteDatabase(folder / "audit.sqlite")
        await until([], database, lambda summary: summary.row.side("")["acked"] == RECORDS)
        await database.close()
        async with AsyncAdmin(cluster.address) as admin:
            (name,) = await admin.groups(internal=True)
            assert (await admin.groups(), name.startswith("_memq_auditor-")) == ([], True)
        auditing.cancel()
        await asyncio.wait([auditing])
        assert auditing.cancelled()

    with cluster:
        asyncio.run(work())
