"""The live audit on a queue that was not read to its end: no record that may exist is lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memq.audit.live import partition
from memq.audit.live.questions.end_questions import EndQuestions
from memq.audit.minutes import active_ms
from memq.errors import UnsupportedFormatError
from memq.format.ranges import RangeSet
from memq.limits import FORWARD_S_MAX
from tests.unit.audited import TOPIC
from tests.unit.live_audit_harness import GROUP, MINUTE, PRODUCER, LiveAuditHarness, span

LATE_MS = active_ms(TOPIC.settings) + 1
HELD_MS = int(FORWARD_S_MAX * 1000)
LOST = ("lost", "queue", "", PRODUCER)


def retention_took(harness: LiveAuditHarness) -> None:
    harness.offset = 5
    harness.audit.begin_at(5)


def a_newer_version_wrote(harness: LiveAuditHarness) -> None:
    harness.audit.take_unsupported(harness.offset, harness.now_ms, UnsupportedFormatError("version 9"))
    harness.offset += 1


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("new", [False, True], ids=["known", "new"])
@pytest.mark.parametrize("gap", [retention_took, a_newer_version_wrote])
def test_records_possibly_in_unread_pointers_are_not_lost(
    gap: Callable[[LiveAuditHarness], None],
    new: bool,
    level: int,
) -> None:
    harness = LiveAuditHarness()
    if not new:
        harness.queue((PRODUCER, 0, 10))
        harness.settle()
    harness.totals = harness.totals.plus(10, 1)
    gap(harness)
    harness.sent(span("sent", (10, 30), level=level), span("acked", (10, 30), level=level))
    harness.queue((PRODUCER, 20, 30))
    for later_ms in (0, LATE_MS, HELD_MS):
        harness.settle(later_ms)
    assert harness.found() == []
    assert harness.found(grave=False) == [("unproven hole", "queue", "", PRODUCER, ((10, 20),))]
    assert harness.word() == "unknown"


@pytest.mark.parametrize("producer", [PRODUCER, 6], ids=["known", "new"])
@pytest.mark.parametrize("gap", [retention_took, a_newer_version_wrote])
def test_below_an_end_only_what_came_behind_the_pointers_that_were_not_read_is_lost(
    gap: Callable[[LiveAuditHarness], None], producer: int
) -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 10))
    harness.settle()
    gap(harness)
    harness.queue((producer, 20, 30))
    harness.settle(LATE_MS)
    assert harness.word() == "unknown"
    harness.queue((producer, 40, 50))
    harness.queue((producer, 60, 70))
    harness.end(70, producer=producer, acks=2)
    for later_ms in (LATE_MS, HELD_MS):
        harness.settle(later_ms)
    assert harness.found(grave=False) == [("lost", "queue", "", producer, ((50, 60),))]


def test_records_expired_before_the_audit_are_not_lost_and_later_ones_may_be() -> None:
    harness = LiveAuditHarness()
    harness.audit.begin_at(5)
    harness.sent(span("sent", (0, 10)), span("acked", (0, 10)))
    harness.settle()
    assert (harness.found(), harness.word()) == ([], "unknown")
    harness.offset, harness.totals = 5, harness.totals.plus(10, 1)
    harness.queue((PRODUCER, 10, 20))
    later = MINUTE + LATE_MS // 60_000 + 1
    harness.sent(span("sent", (10, 30), minute=later), span("acked", (10, 30), minute=later))
    harness.settle(LATE_MS)
    assert harness.found() == [(*LOST, ((20, 30),))]


# ---- an end that is too low ------------------------------------------------------------------------


def test_acked_records_are_lost_only_after_a_later_proof_of_the_end() -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 10))
    harness.sent(span("sent", (0, 20)), span("acked", (0, 20)))
    harness.audit.settle(harness.now_ms)
    asked = harness.audit.ends.missing()
    assert (asked, harness.audit.take_findings()) == ({PRODUCER: ((10, 20),)}, [])
    harness.sent(span("sent", (20, 30)), span("acked", (20, 30)))
    harness.audit.ends.confirm(asked)
    harness.audit.settle(harness.now_ms)
    assert [each.ranges for each in harness.audit.take_findings()] == [((10, 20),)]
    assert harness.audit.ends.missing() == {PRODUCER: ((20, 30),)}
    harness.audit.settle(harness.now_ms)
    assert harness.audit.take_findings() == [], "a proof counts once"
    harness.queue((PRODUCER, 20, 30))
    harness.audit.settle(harness.now_ms)
    assert (harness.audit.take_findings(), harness.audit.ends.missing()) == ([], {})


def test_a_record_that_is_missing_waits_for_a_proof_after_a_restart_too() -> None:
    harness = LiveAuditHarness()
    harness.sent(span("sent", (0, 10)), span("acked", (0, 10)))
    harness.audit.settle(harness.now_ms)
    assert harness.audit.waits
    after = partition.PartitionAudit(TOPIC, 0, harness.audit.state)
    after.settle(harness.now_ms)
    assert (after.ends.missing(), after.waits) == ({PRODUCER: ((0, 10),)}, True)


def test_a_producer_that_is_forgotten_needs_no_end() -> None:
    ends = EndQuestions()
    assert ends.decide(PRODUCER, [(0, 10)], RangeSet([(4, 6)])) == [(4, 6)]
    assert ends.missing() == {PRODUCER: ((0, 4), (6, 10))}
    ends.forget(PRODUCER)
    assert ends.missing() == {}


# ---- a log that can't be read ----------------------------------------------------------------------


def test_while_the_queue_can_not_be_read_reports_wait_and_minutes_are_unknown() -> None:
    harness = LiveAuditHarness()
    harness.sent(span("sent", (0, 10)), span("acked", (0, 10)))
    harness.queue((PRODUCER, 0, 10))
    harness.settle()
    assert harness.word() == "ok"
    harness.sent(span("sent", (10, 20)), span("acked", (10, 20)), next_ms=harness.now_ms + 10**9)
    harness.sent(span("sent", (20, 30), minute=MINUTE + 7), next_ms=harness.now_ms + 10**9)
    for later_ms in (0, 60_000, LATE_MS):
        harness.settle(later_ms, unread=True)
        assert harness.found(grave=False) == []
        assert [harness.word(minute=minute) for minute in (MINUTE, MINUTE + 7)] == ["unknown"] * 2
    assert harness.word(minute=harness.now_ms // 60_000) == "unknown", (
        "nothing is known of the time in which it was not read"
    )
    assert harness.rows[MINUTE].side("").counts["sent"] == 10
    harness.queue((PRODUCER, 10, 20))
    harness.settle()
    assert (harness.found(), harness.word()) == ([], "ok")
    assert harness.word(minute=harness.now_ms // 60_000) == "ok"
    assert harness.found(grave=False) == [("unproven hole", "queue", "", PRODUCER, ((20, 30),))]
    assert harness.rows[MINUTE + 7].side("")["silent"] == 0


def test_reports_ahead_of_the_queue_are_judged_after_its_read() -> None:
    harness = LiveAuditHarness()
    harness.queue((PRODUCER, 0, 10))
    harness.read(span("processed", (0, 5)), begin="0:0:0", committed="0:1:0")
    harness.sent(span("sent", (0, 20)), span("acked", (0, 20)))
    harness.settle(unread=True)
    harness.settle(unread=True)
    assert harness.found() == []
    harness.settle()
    assert harness.found() == [("lost", "consumer", GROUP, PRODUCER, ((5, 10),)), (*LOST, ((10, 20),))]


def test_only_so_many_reports_wait_and_what_the_oldest_said_stays_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "WAITING_REPORTS_MAX", 2)
    harness = LiveAuditHarness()
    for first in (0, 10, 20):
        harness.queue((PRODUCER, first, first + 10))
    harness.read(span("processed", (0, 10)), begin="0:0:0", committed="0:1:0")
    harness.settle()
    harness.read(span("processed", (10, 20), minute=MINUTE + 1))
    harness.settle(unread=True)
    for number in range(2):
        harness.sent(span("sent", (20 + number, 21 + number), minute=MINUTE + 2))
    harness.read(committed="0:3:0")
    harness.settle(unread=True)
    harness.settle()
    assert harness.found() == [], "the report that is given up may have contained it"
    assert {(kind, group) for kind, _, group, _, _ in harness.found(grave=False)} == {("unproven hole", GROUP)}
    assert harness.rows[MINUTE + 1].side(GROUP)["silent"] == 1
    assert harness.word(GROUP, MINUTE + 1) == "unknown"
    assert harness.rows[MINUTE + 2].side("")["silent"] == 1
