"""The live audit's state as the dashboard reads it: verdicts, minutes, clients, findings."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from memq.audit.dashboard import audited, poller
from memq.audit.dashboard.audited import LiveSource
from memq.audit.dashboard.poller import Poller
from memq.audit.dashboard.stream import Feed
from memq.audit.dashboard.view import About
from memq.audit.finding import Finding, Kind
from memq.audit.live import view
from memq.audit.live.partition_state import PartitionState
from memq.audit.live.report_partition import Client
from memq.audit.live.storage.database import Answer, Execute, SqliteDatabase
from memq.audit.live.storage.store import AuditStore, PartitionChanges, Step
from memq.audit.live.view import AuditView, doubted
from memq.audit.minutes import MINUTE_MS, QUEUE, WORDS, MinuteRow, gravest
from memq.cli import main
from memq.client.admin import AsyncAdmin
from memq.errors import AuditStateError, NotFoundError
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime

NOW = SystemClock().wall_ms() // MINUTE_MS


def row(records: int, **wrong: int) -> MinuteRow:
    found = MinuteRow()
    for name in ("sent", "acked", "committed"):
        found.side(QUEUE).count(name, records)
    for name, count in wrong.items():
        found.side(QUEUE).count(name, count)
    return found


def lost(topic: str, records: int) -> Finding:
    place = {"topic": topic, "topic_id": f"id-{topic}", "partition": 0, "producer": 1}
    return Finding(id="aa", kind=Kind.LOST, minute=NOW, records=records, **place)  # type: ignore[arg-type]


def changes(topic: str, rows: dict[int, MinuteRow], *findings: Finding) -> PartitionChanges:
    return PartitionChanges(topic, PartitionState(), rows, list(findings))


def test_topics_come_in_portions_and_findings_hold_until_they_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audited, "TOPICS_MAX", 2)

    async def run() -> None:
        database = SqliteDatabase(tmp_path / "audit.sqlite")
        store, source = AuditStore(database), LiveSource(database, SystemClock())
        await store.take_home(0, "me")
        client = Client("consumer", "group", "host", 1, 0, 0, heard_ms=5, skew_ms=-3, silent=True)
        step = Step(0, "me", 1, "", {7: client})
        for topic in ("a", "b", "c"):
            step.changes[f"id-{topic}", 0] = changes(topic, {NOW - 1: row(10), NOW: row(5), NOW - 100: row(99)})
        step.changes["id-a", 0].findings.append(lost("a", 3))
        await store.save(step)

        first = await source.news(0)
        assert len(first.topics) == 2
        assert [finding.id for finding in first.findings] == ["aa"]
        second = await source.news(first.version)
        assert (second.version, list(second.findings)) == (first.version, [])
        report = first.topics | second.topics
        assert {name: (each.word, each.lost, each.committed) for name, each in report.items()} == {
            "a": ("lost", 3, {NOW - 1: 10, NOW: 5}),
            "b": ("ok", 0, {NOW - 1: 10, NOW: 5}),
            "c": ("ok", 0, {NOW - 1: 10, NOW: 5}),
        }
        assert [each.minute async for each in source.minutes("b", NOW - 200, NOW)] == [NOW - 100, NOW - 1]
        (heard,) = await source.clients()
        assert (heard.number, heard.client) == (7, client)
        assert (await source.finding("aa")).records == 3
        with pytest.raises(NotFoundError, match="finding 'bb' does not exist"):
            await source.finding("bb")

        over = lost("a", 0)
        over.resolved_ms = 1
        step = Step(0, "me", 2, "", {})
        step.changes["id-a", 0] = changes("a", {}, over)
        await store.save(step)
        third = await source.news(first.version)
        assert third.topics["a"].lost == 0
        assert third.topics["a"].word == "ok"
        await database.close()

    asyncio.run(run())


class FailingDatabase(SqliteDatabase):
    """Fails in the work whose number is in `fails`."""

    fails = -1
    runs = 0

    async def run(self, work: Callable[[Execute], Answer]) -> Answer:
        self.runs += 1
        if self.runs == self.fails:
            raise AuditStateError("locked")
        return await super().run(work)


async def state_of_topics(path: Path, *topics: str) -> FailingDatabase:
    """Return a state in which auditors have stored a verdict on each topic, and a finding on the first one."""
    database = FailingDatabase(path / "audit.sqlite")
    store = AuditStore(database)
    await store.take_home(0, "me")
    step = Step(0, "me", 1, "", {})
    for topic in topics:
        step.changes[f"id-{topic}", 0] = changes(topic, {NOW: row(5)})
    step.changes[f"id-{topics[0]}", 0].findings.append(lost(topics[0], 3))
    await store.save(step)
    return database


@pytest.mark.parametrize("fails", range(1, 6))
def test_a_state_that_fails_for_a_moment_costs_no_topic_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int
) -> None:
    """No change of an idle topic would bring it back."""
    monkeypatch.setattr(audited, "TOPICS_MAX", 2)

    async def run() -> None:
        database = await state_of_topics(tmp_path, "a", "b", "c", "d")
        source, version = LiveSource(database, SystemClock()), 0
        seen: set[str] = set()
        database.fails = database.runs + fails
        for _ in range(4):
            with suppress(AuditStateError):
                news = await source.news(version)
                version = news.version
                seen |= news.topics.keys()
        assert seen == {"a", "b", "c", "d"}
        await database.close()

    asyncio.run(run())


def test_an_acknowledgement_in_the_middle_of_a_round_disturbs_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        database = await state_of_topics(tmp_path, "a", "b", "c")
        feed, source = Feed("run"), LiveSource(database, SystemClock())
        about = About(cluster="", audited=True, acknowledge=True, contents=False)
        poller = Poller(AsyncAdmin("127.0.0.1:1"), source, feed, Runtime(), about)
        await asyncio.gather(poller.poll_audit(), poller.acknowledge("aa", "mia"), poller.poll_audit())
        shown = feed.board.get("finding", "aa")
        assert isinstance(shown, dict)
        assert shown["acknowledged_by"] == "mia"
        await database.close()

    asyncio.run(run())


def test_a_finding_that_holds_stays_on_the_board_before_those_that_are_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(poller, "FINDINGS_MAX", 2)

    async def run() -> None:
        database = await state_of_topics(tmp_path, "a")
        step = Step(0, "me", 2, "", {})
        step.changes["id-a", 0] = changes("a", {})
        for id_ in ("bb", "cc"):
            step.changes["id-a", 0].findings.append(replace(lost("a", 0), id=id_, resolved_ms=1))
        await AuditStore(database).save(step)
        feed, about = Feed("run"), About(cluster="", audited=True, acknowledge=True, contents=False)
        poller = Poller(AsyncAdmin("127.0.0.1:1"), LiveSource(database, SystemClock()), feed, Runtime(), about)
        await poller.poll_audit()
        shown = [id_ for id_ in ("aa", "bb", "cc") if feed.board.get("finding", id_) is not None]
        assert shown == ["aa", "cc"]
        await database.close()

    asyncio.run(run())


def test_sums_of_topics_have_all_minutes_however_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "ROWS_MAX", 2)

    async def run() -> None:
        database = await state_of_topics(tmp_path, "a", "b", "c")
        step = Step(0, "me", 2, "", {})
        for topic in ("a", "b"):
            step.changes[f"id-{topic}", 0] = changes(topic, {NOW - 1: row(7), NOW - 60: row(1), NOW - 61: row(100)})
        await AuditStore(database).save(step)
        found = await AuditView(database).topics(NOW - 60, NOW + 1)
        assert {each.topic: each.row.side(QUEUE)["committed"] for each in found} == {"a": 13, "b": 13, "c": 5}
        assert [each.row.side(QUEUE)["committed"] for each in await AuditView(database).topics(NOW, NOW)] == [0] * 3
        await database.close()

    asyncio.run(run())


def test_verdicts_of_an_audit_that_is_behind_are_not_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without an auditor they stayed ok, and `memq auditor show` returned 0."""
    state = f"sqlite:{tmp_path / 'audit.sqlite'}"

    async def run(age_ms: int) -> tuple[str, list[object]]:
        database = await state_of_topics(tmp_path, "a")
        now_ms = SystemClock().wall_ms()
        step = Step(0, "me", 2, "", {})
        step.changes["id-a", 0] = changes("a", {}, replace(lost("a", 0), resolved_ms=1))
        await AuditStore(database).save(step)
        await AuditStore(database).note_heard("me", "id", {0: now_ms - age_ms})
        feed, about = Feed("run"), About(cluster="", audited=True, acknowledge=True, contents=False)
        poller = Poller(AsyncAdmin("127.0.0.1:1"), LiveSource(database, SystemClock()), feed, Runtime(), about)
        trouble = await poller.poll_progress()
        await database.close()
        words = [doubted(word, trouble) for word in ("ok", "in flight", "unknown", "lost")]
        return trouble, [*words]

    for age_ms, word, code in ((1_000, "ok", 0), (70_000, "unknown", 1)):
        (tmp_path / "audit.sqlite").unlink(missing_ok=True)
        trouble, words = asyncio.run(run(age_ms))
        assert ("the audit is behind" in trouble) == (word == "unknown")
        assert words[0] == word
        assert words[2:] == ["unknown", "lost"]
        assert main(["auditor", "show", "--json", "--audit-state", state]) == code
        shown = capsys.readouterr()
        (topic,) = json.loads(shown.out)
        assert (topic["sides"][""]["verdict"], bool(topic["behind"])) == (word, word == "unknown")
        assert ("the audit is behind" in shown.err) == (word == "unknown")


def test_delayed_records_that_are_not_due_are_shown_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = f"sqlite:{tmp_path / 'audit.sqlite'}"

    async def run() -> None:
        database = await state_of_topics(tmp_path, "a")
        step = Step(0, "me", 2, "", {})
        waiting = MinuteRow()
        for name, records in (("sent", 1_500), ("cancelled", 200)):
            waiting.side(QUEUE).count(name, records)
        step.changes["id-a", 0] = changes("a", {NOW + 90: waiting}, replace(lost("a", 0), resolved_ms=1))
        await AuditStore(database).save(step)
        await AuditStore(database).note_heard("me", "id", {0: SystemClock().wall_ms()})
        await database.close()

    asyncio.run(run())
    assert main(["auditor", "show", "--json", "--audit-state", state]) == 0
    (topic,) = json.loads(capsys.readouterr().out)
    assert (topic["sides"][""]["verdict"], topic["not_due"]) == ("ok", 1_300)
    assert main(["auditor", "show", "--audit-state", state]) == 0
    assert "topic 'a': 1,300 delayed records are in flight until they are due" in capsys.readouterr().err


def test_minutes_of_a_topic_are_read_by_their_key(tmp_path: Path) -> None:
    """By time it would be rows of all topics: at 1,000 topics, a thousand times as many."""

    async def run() -> list[str]:
        database = SqliteDatabase(tmp_path / "audit.sqlite")
        values = ("a", "", 0, "b", 9, 0, 10, -1)
        plan = await database.run(lambda execute: execute(f"EXPLAIN QUERY PLAN {view.MINUTES_QUERY}", values))
        await database.close()
        return [str(each[3]) for each in plan]

    plan = asyncio.run(run())
    assert any("SEARCH a USING" in each and "topic=?" in each for each in plan), plan
    assert any("SEARCH m USING" in each and "topic_id=? AND part=? AND minute>?" in each for each in plan), plan


def test_the_overview_sorts_topics_by_the_gravity_that_the_audit_uses() -> None:
    page = (Path(audited.__file__).parent / "assets" / "overview.js").read_text()
    listed = re.search(r"WORDS = \[(.*?)\]", page)
    assert listed
    shown = json.loads(f"[{listed[1]}]")
    assert set(shown) == {*WORDS.values(), "ok"}
    assert all(gravest((graver, word)) == graver for graver, word in pairwise(shown))
