"""`memq auditor metrics`: the state of the audit as Prometheus reads it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from memq.audit.live.storage.database import SqliteDatabase
from memq.audit.live.storage.store import AuditStore
from memq.audit.live.view import AuditView
from memq.cli import main
from memq.cli.exporter import audit_metrics
from tests.component.live_reports import a_step
from tests.integration.exporters import exporter, scraped
from tests.unit.audited import TOPIC
from tests.unit.live_audit_harness import MINUTE, PRODUCER, LiveAuditHarness, span


async def judged(database: SqliteDatabase) -> None:
    """Store what is judged of 30 records that were acked, of which the queue has ten."""
    harness = LiveAuditHarness()
    harness.sent(span("sent", (0, 30)), span("acked", (0, 30)))
    harness.queue((PRODUCER, 0, 10))
    store = AuditStore(database)
    await store.take_home(2, "one")
    await store.save(a_step("one", "2:7:0", harness))
    await store.note_heard("one", TOPIC.id, {2: 5_000})


def test_lost_records_are_a_finding_of_their_topic(tmp_path: Path) -> None:
    async def work() -> dict[tuple[str, ...], float]:
        database = SqliteDatabase(tmp_path / "audit.sqlite")
        try:
            await judged(database)
            view = AuditView(database)
            topics = await view.topics(MINUTE - 5, MINUTE + 5)
            clients = [each.client for each in await view.clients()]
            metrics = audit_metrics(topics, await view.findings(), clients, await view.heard_ms())
        finally:
            await database.close()
        return {(each.name, *each.labels.values()): each.value for metric in metrics for each in metric.samples}

    found = asyncio.run(work())
    assert found["memq_audit_findings", TOPIC.name, "lost", ""] == 1
    assert found["memq_audit_findings", TOPIC.name, "doubled", ""] == 0
    assert found["memq_audit_records", TOPIC.name, "acked", ""] == 30
    assert found["memq_audit_records", TOPIC.name, "committed", ""] == 10
    assert found["memq_audit_verdict_records", TOPIC.name, "", "lost", ""] == 20
    assert found["memq_audit_clients",] == 1
    assert found["memq_audit_reports_read_time_seconds",] == 5


def test_findings_of_a_topic_that_no_auditor_knows_are_not_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelt name looked like a topic without findings."""

    async def work() -> None:
        database = SqliteDatabase(tmp_path / "audit.sqlite")
        try:
            await judged(database)
        finally:
            await database.close()

    asyncio.run(work())
    state = ("--audit-state", f"sqlite:{tmp_path / 'audit.sqlite'}")
    assert main(["auditor", "findings", TOPIC.name, *state]) == 1
    assert "lost" in capsys.readouterr().out
    assert main(["auditor", "findings", f"{TOPIC.name}s", *state]) == 3
    assert "no auditor has seen records of topic" in capsys.readouterr().err


def test_the_command_serves_what_the_state_holds(tmp_path: Path) -> None:
    async def work() -> None:
        database = SqliteDatabase(tmp_path / "audit.sqlite")
        try:
            await judged(database)
        finally:
            await database.close()

    asyncio.run(work())
    command = ("auditor", "metrics", "--audit-state", f"sqlite:{tmp_path / 'audit.sqlite'}")
    with exporter(*command) as address:
        found = scraped(address)
    assert found[f'memq_audit_findings{{kind="lost",namespace="",topic="{TOPIC.name}"}}'] == 1
    assert found["memq_audit_rounds_total"] >= 1
