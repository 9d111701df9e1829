"""The live audit when its topic `_memq_audit` is missing, or was deleted and created again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

import memq
from memq.audit.live import group_reports, service
from memq.audit.live.group_reports import GroupReports, Page
from memq.audit.live.service import LiveAudit, keep_auditing, live_audit
from memq.audit.live.storage.database import Database, SqliteDatabase
from memq.audit.live.storage.store import AuditStore
from memq.audit.live.view import AuditView, TopicSummary
from memq.audit.minutes import QUEUE
from memq.broker.broker import Broker
from memq.broker.start_steps import audit_topic_settings
from memq.errors import NotFoundError
from memq.format.pointer import decode_pointer
from memq.format.report import AUDIT_TOPIC
from memq.notification import Entry
from memq.notification.memory import MemoryQueue
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime
from memq.topic import Position
from tests.brokers import run, running_broker

KEEP_MS = 86_400_000

RECORDS = 20


class Behind(GroupReports):
    """Reports of which those from pointer `limit` on are on their way to the auditor."""

    limit = 0
    _next = Position(0, 0, 0)

    async def poll(self, timeout_s: float) -> Page | None:
        if self._next.pointer_offset >= Behind.limit:
            return None
        page = await super().poll(timeout_s)
        if page is not None:
            self._next = Position.parse(page.next)
        return page

    async def seek(self, home: int, position: str) -> bool:
        self._next = Position.parse(position or "0:0:0")
        return await super().seek(home, position)


@asynccontextmanager
async def producing(broker: Broker) -> AsyncIterator[None]:
    """Send records to `clicks`; inside, their client reports until it gets rid of its reports."""
    async with memq.aio.Producer(broker.address, linger_ms=1) as producer:
        for number in range(RECORDS):
            await producer.send("clicks", b"%d" % number)
        await producer.flush()
        yield


async def produce(broker: Broker) -> None:
    async with producing(broker):
        pass


async def until(audit: LiveAudit, database: Database, records: int) -> TopicSummary:
    """Let the auditor work until it knows that so many records of `clicks` were sent."""
    while True:
        await audit.step()
        summary = await the_topic(database)
        if summary is not None and summary.row.side(QUEUE)["sent"] >= records:
            return summary


async def the_topic(database: Database) -> TopicSummary | None:
    found = [each for each in await AuditView(database).topics(0, 1 << 40) if each.topic == "clicks"]
    return found[0] if found else None


async def make_audit_topic_again(broker: Broker) -> None:
    await broker.partitions.delete(broker.partitions.topic(AUDIT_TOPIC))
    await broker.partitions.create(AUDIT_TOPIC, 1, audit_topic_settings(KEEP_MS), exist_ok=False, internal=True)


def _has_reports(entry: Entry) -> bool:
    return decode_pointer(entry.body).kind == "data"


def began_again(caplog: pytest.LogCaptureFixture) -> int:
    return sum(getattr(each, "event", "") == "audit.began-again" for each in caplog.records)


def test_an_audit_topic_that_was_made_again_is_read_from_its_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The auditor ended at every start, and its verdict stayed ok."""

    async def work() -> None:
        database = SqliteDatabase(tmp_path / "audit.sqlite")
        async with running_broker(audit=True, audit_interval_ms=100, audit_partitions=1) as broker:
            for _ in range(3):
                await produce(broker)
            async with live_audit(broker.address, database, KEEP_MS, Runtime()) as audit:
                summary = await until(audit, database, 3 * RECORDS)
                await audit.step()
            assert (summary.row.word(), began_again(caplog)) == ("ok", 0)
            await make_audit_topic_again(broker)
            async with producing(broker):
                for _ in range(2):
                    async with live_audit(broker.address, database, KEEP_MS, Runtime()) as audit:
                        summary = await until(audit, database, 4 * RECORDS)
                        await audit.step()
                    assert (summary.row.side(QUEUE)["sent"], summary.row.word()) == (4 * RECORDS, "unknown")
                    assert began_again(caplog) == 1
        await database.close()

    run(work())


def test_a_running_auditor_continues_with_the_topic_that_was_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`memq auditor` ended."""
    monkeypatch.setattr(service, "RETRY_S", 0.0)
    monkeypatch.setattr(service, "TOPICS_EVERY_ROUNDS", 1)
    began: list[None] = []

    async def work() -> None:
        database = SqliteDatabase(tmp_path / "audit.sqlite")
        async with running_broker(audit=True, audit_interval_ms=100, audit_partitions=1) as broker:
            await produce(broker)
            ready = partial(began.append, None)
            running = asyncio.create_task(keep_auditing(broker.address, database, KEEP_MS, Runtime(), ready))
            while not (found := await the_topic(database)) or found.row.side(QUEUE)["sent"] < RECORDS:
                assert not running.done()
            while not (await AuditStore(database).heard(0))[0] or not began:
                assert not running.done()
            await make_audit_topic_again(broker)
            async with producing(broker):
                while (found := await the_topic(database)) is None or found.row.side(QUEUE)["sent"] < 2 * RECORDS:
                    assert not running.done()
            assert (found.row.word(), began_again(caplog)) == ("unknown", 1)
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
        await database.close()
        assert len(began) == 1

    run(work())


@pytest.mark.parametrize("running", [False, True])
def test_an_audit_topic_that_lost_its_end_is_read_from_its_beginning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    """Reports are counted once, though they are read a second time."""
    monkeypatch.setattr(group_reports, "BEYOND_S", 0.1)
    monkeypatch.setattr(group_reports, "BEYOND_TRIES", 2)

    async def work() -> None:
        database = SqliteDatabase(tmp_path / "audit.sqlite")
        async with running_broker(audit=True, audit_interval_ms=100, audit_partitions=1) as broker:
            queue = broker.services.queue
            assert isinstance(queue, MemoryQueue)
            for _ in range(3):
                await produce(broker)
            async with AsyncExitStack() as stack:
                opened = live_audit(broker.address, database, KEEP_MS, Runtime())
                audit = await stack.enter_async_context(opened)
                assert (await until(audit, database, 3 * RECORDS)).row.word() == "ok"
                await audit.step()
                if not running:
                    await stack.aclose()
                (log,) = [log for part, log in queue.logs.items() if part.topic == AUDIT_TOPIC]
                del log.entries[1:]
                for part in list(queue.logs):
                    broker.services.recent_pointers.forget(part)  # as an owner that has noticed it
                if not running:
                    opened = live_audit(broker.address, database, KEEP_MS, Runtime())
                    audit = await stack.enter_async_context(opened)
                    await audit.step()
                else:
                    task = asyncio.create_task(audit.run())
                    while not began_again(caplog):
                        await AuditView(database).version()
                    task.cancel()
                    with suppress(asyncio.CancelledError):
                        await task
                while not (summary := await the_topic(database)) or summary.row.word() == "ok":
                    await audit.step()
            assert (summary.row.side(QUEUE)["sent"], summary.row.word()) == (3 * RECORDS, "unknown")
            assert began_again(caplog) == 1
        await database.close()

    run(work())


def test_an_auditor_states_only_the_time_up_to_which_it_has_read_all_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took a moment without a report for the end; in a busy log it has never read the last report."""
    monkeypatch.setattr(service, "GroupReports", Behind)
    monkeypatch.setattr(service, "NOTE_S", 0.0)
    clock = SystemClock()

    async def work() -> None:
        database = SqliteDatabase(tmp_path / "audit.sqlite")
        store = AuditStore(database)
        async with running_broker(audit=True, audit_interval_ms=100, audit_partitions=1) as broker:
            queue = broker.services.queue
            assert isinstance(queue, MemoryQueue)
            (log,) = [log for part, log in queue.logs.items() if part.topic == AUDIT_TOPIC]
            while len(offsets := [at for at, each in enumerate(log.entries) if _has_reports(each)]) < 2:
                await produce(broker)
            async with live_audit(broker.address, database, KEEP_MS, Runtime()) as audit:
                Behind.limit = offsets[1]
                await until(audit, database, 1)
                await audit.step()
                assert await store.heard(0) == ("", 0)
                Behind.limit, before_ms = len(log.entries), clock.wall_ms()
                while len(log.entries) == Behind.limit:
                    await produce(broker)
                while not (heard := await store.heard(0))[1]:
                    await audit.step()
                assert heard[1] <= before_ms
                Behind.limit = 1 << 40
                while (await store.heard(0))[1] <= before_ms:
                    await audit.step()
        await database.close()

    run(work())


@pytest.mark.parametrize("audits", [True, False])
def test_an_auditor_without_its_topic_says_whether_the_cluster_audits(tmp_path: Path, audits: bool) -> None:
    async def work() -> None:
        database = SqliteDatabase(tmp_path / "audit.sqlite")
        async with running_broker(audit=audits) as broker:
            if audits:
                await broker.partitions.delete(broker.partitions.topic(AUDIT_TOPIC))
            with pytest.raises(NotFoundError) as missing:
                async with live_audit(broker.address, database, KEEP_MS, Runtime()):
                    pass
        await database.close()
        assert ("the cluster does not audit" in str(missing.value)) == (not audits)
        assert ("was deleted" in str(missing.value)) == audits

    run(work())


@pytest.mark.parametrize("running", [False, True])
def test_reports_that_come_after_a_cut_of_their_topic_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    """The topic had grown again over the auditor's position: it passed over the new reports, or stopped there."""
    monkeypatch.setattr(service, "CLOCK_ERROR_MS", 0)  # within that time, reports may have been counted before

    async def work() -> None:
        database = SqliteDatabase(tmp_path / "audit.sqlite")
        async with running_broker(audit=True, audit_interval_ms=100, audit_partitions=1) as broker:
            queue = broker.services.queue
            assert isinstance(queue, MemoryQueue)
            (log,) = [log for part, log in queue.logs.items() if part.topic == AUDIT_TOPIC]
            for _ in range(3):
                await produce(broker)
            async with AsyncExitStack() as stack:
                audit = await stack.enter_async_context(live_audit(broker.address, database, KEEP_MS, Runtime()))
                assert (await until(audit, database, 3 * RECORDS)).row.word() == "ok"
                await audit.step()
                if not running:
                    await stack.aclose()
                end = log.end
                del log.entries[1:]
                while log.end <= end:
                    await produce(broker)
                sent = 3 * RECORDS
                if running:
                    task = asyncio.create_task(audit.run())
                    stack.callback(task.cancel)
                    while not began_again(caplog):
                        assert not task.done()
                        await AuditView(database).version()
                else:
                    audit = await stack.enter_async_context(live_audit(broker.address, database, KEEP_MS, Runtime()))
                    await audit.step()
                    task = asyncio.create_task(audit.run())
                    stack.callback(task.cancel)
                while (summary := await the_topic(database)) is None or summary.row.side(QUEUE)["sent"] <= sent:
                    assert not task.done()
                assert summary.row.word() == "unknown"
            assert began_again(caplog) == 1
        await database.close()

    run(work())
