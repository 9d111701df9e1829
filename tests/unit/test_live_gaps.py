"""The live audit where the queue was not read, or not to its end: nothing that may be there is lost."""

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
from tests.unit.live_desk import GROUP, MINUTE, PRODUCER, Desk, span

LATE_MS = active_ms(TOPIC.settings) + 1
HELD_MS = int(FORWARD_S_MAX * 1000)
LOST = ("lost", "queue", "", PRODUCER)


def retention_took(desk: Desk) -> None:
    desk.offset = 5
    desk.audit.begin_at(5)


def a_newer_version_wrote(desk: Desk) -> None:
    desk.audit.pass_blindly(desk.offset, desk.now_ms, UnsupportedFormatError("version 9"))
    desk.offset += 1


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("new", [False, True], ids=["known", "new"])
@pytest.mark.parametrize("gap", [retention_took, a_newer_version_wrote])
def test_what_may_be_in_pointers_that_were_not_read_is_not_lost(
    gap: Callable[[Desk], None],
    new: bool,
    level: int,
) -> None:
    desk = Desk()
    if not new:
        desk.queue((PRODUCER, 0, 10))
        desk.settle()
    desk.totals = desk.totals.plus(10, 1)
    gap(desk)
    desk.sent(span("sent", (10, 30), level=level), span("acked", (10, 30), level=level))
    desk.queue((PRODUCER, 20, 30))
    for later_ms in (0, LATE_MS, HELD_MS):
        desk.settle(later_ms)
    assert desk.found() == []
    assert desk.found(grave=False) == [("unproven hole", "queue", "", PRODUCER, ((10, 20),))]
    assert desk.word() == "unknown"


@pytest.mark.parametrize("producer", [PRODUCER, 6], ids=["known", "new"])
@pytest.mark.parametrize("gap", [retention_took, a_newer_version_wrote])
def test_below_an_end_only_what_came_behind_the_pointers_that_were_not_read_is_lost(
    gap: Callable[[Desk], None], producer: int
) -> None:
    desk = Desk()
    desk.queue((PRODUCER, 0, 10))
    desk.settle()
    gap(desk)
    desk.queue((producer, 20, 30))
    desk.settle(LATE_MS)
    assert desk.word() == "unknown"
    desk.queue((producer, 40, 50))
    desk.queue((producer, 60, 70))
    desk.end(70, producer=producer, acks=2)
    for later_ms in (LATE_MS, HELD_MS):
        desk.settle(later_ms)
    assert desk.found(grave=False) == [("lost", "queue", "", producer, ((50, 60),))]


def test_what_retention_took_before_the_first_audit_is_not_lost_and_what_is_acked_later_may_be() -> None:
    desk = Desk()
    desk.audit.begin_at(5)
    desk.sent(span("sent", (0, 10)), span("acked", (0, 10)))
    desk.settle()
    assert (desk.found(), desk.word()) == ([], "unknown")
    desk.offset, desk.totals = 5, desk.totals.plus(10, 1)
    desk.queue((PRODUCER, 10, 20))
    later = MINUTE + LATE_MS // 60_000 + 1
    desk.sent(span("sent", (10, 30), minute=later), span("acked", (10, 30), minute=later))
    desk.settle(LATE_MS)
    assert desk.found() == [(*LOST, ((20, 30),))]


# ---- an end that is too low ------------------------------------------------------------------------


def test_what_is_acked_is_lost_only_behind_an_end_that_was_proved_after_it_was_missing() -> None:
    desk = Desk()
    desk.queue((PRODUCER, 0, 10))
    desk.sent(span("sent", (0, 20)), span("acked", (0, 20)))
    desk.audit.settle(desk.now_ms)
    asked = desk.audit.ends.missing()
    assert (asked, desk.audit.take_findings()) == ({PRODUCER: ((10, 20),)}, [])
    desk.sent(span("sent", (20, 30)), span("acked", (20, 30)))
    desk.audit.ends.confirm(asked)
    desk.audit.settle(desk.now_ms)
    assert [each.ranges for each in desk.audit.take_findings()] == [((10, 20),)]
    assert desk.audit.ends.missing() == {PRODUCER: ((20, 30),)}
    desk.audit.settle(desk.now_ms)
    assert desk.audit.take_findings() == [], "a proof counts once"
    desk.queue((PRODUCER, 20, 30))
    desk.audit.settle(desk.now_ms)
    assert (desk.audit.take_findings(), desk.audit.ends.missing()) == ([], {})


def test_a_record_that_is_missing_waits_for_a_proof_after_a_restart_too() -> None:
    desk = Desk()
    desk.sent(span("sent", (0, 10)), span("acked", (0, 10)))
    desk.audit.settle(desk.now_ms)
    assert desk.audit.waits
    after = partition.PartitionAudit(TOPIC, 0, desk.audit.books)
    after.settle(desk.now_ms)
    assert (after.ends.missing(), after.waits) == ({PRODUCER: ((0, 10),)}, True)


def test_a_producer_that_is_forgotten_needs_no_end() -> None:
    ends = EndQuestions()
    assert ends.decide(PRODUCER, [(0, 10)], RangeSet([(4, 6)])) == [(4, 6)]
    assert ends.missing() == {PRODUCER: ((0, 4), (6, 10))}
    ends.forget(PRODUCER)
    assert ends.missing() == {}


# ---- a log that can't be read ----------------------------------------------------------------------


def test_while_the_queue_can_not_be_read_reports_wait_and_minutes_are_unknown() -> None:
    desk = Desk()
    desk.sent(span("sent", (0, 10)), span("acked", (0, 10)))
    desk.queue((PRODUCER, 0, 10))
    desk.settle()
    assert desk.word() == "ok"
    desk.sent(span("sent", (10, 20)), span("acked", (10, 20)), next_ms=desk.now_ms + 10**9)
    desk.sent(span("sent", (20, 30), minute=MINUTE + 7), next_ms=desk.now_ms + 10**9)
    for later_ms in (0, 60_000, LATE_MS):
        desk.settle(later_ms, unread=True)
        assert desk.found(grave=False) == []
        assert [desk.word(minute=minute) for minute in (MINUTE, MINUTE + 7)] == ["unknown"] * 2
    assert desk.word(minute=desk.now_ms // 60_000) == "unknown", "nothing is known of the time in which it was not read"
    assert desk.rows[MINUTE].side("").counts["sent"] == 10
    desk.queue((PRODUCER, 10, 20))
    desk.settle()
    assert (desk.found(), desk.word()) == ([], "ok")
    assert desk.word(minute=desk.now_ms // 60_000) == "ok"
    assert desk.found(grave=False) == [("unproven hole", "queue", "", PRODUCER, ((20, 30),))]
    assert desk.rows[MINUTE + 7].side("")["silent"] == 0


def test_what_waits_for_the_queue_is_judged_once_it_was_read() -> None:
    desk = Desk()
    desk.queue((PRODUCER, 0, 10))
    desk.read(span("processed", (0, 5)), begin="0:0:0", committed="0:1:0")
    desk.sent(span("sent", (0, 20)), span("acked", (0, 20)))
    desk.settle(unread=True)
    desk.settle(unread=True)
    assert desk.found() == []
    desk.settle()
    assert desk.found() == [("lost", "consumer", GROUP, PRODUCER, ((5, 10),)), (*LOST, ((10, 20),))]


def test_only_so_many_reports_wait_and_what_the_oldest_said_stays_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "TOLD_MAX", 2)
    desk = Desk()
    for first in (0, 10, 20):
        desk.queue((PRODUCER, first, first + 10))
    desk.read(span("processed", (0, 10)), begin="0:0:0", committed="0:1:0")
    desk.settle()
    desk.read(span("processed", (10, 20), minute=MINUTE + 1))
    desk.settle(unread=True)
    for number in range(2):
        desk.sent(span("sent", (20 + number, 21 + number), minute=MINUTE + 2))
    desk.read(committed="0:3:0")
    desk.settle(unread=True)
    desk.settle()
    assert desk.found() == [], "the report that is given up may have contained it"
    assert {(kind, group) for kind, _, group, _, _ in desk.found(grave=False)} == {("unproven hole", GROUP)}
    assert desk.rows[MINUTE + 1].side(GROUP)["silent"] == 1
    assert desk.word(GROUP, MINUTE + 1) == "unknown"
    assert desk.rows[MINUTE + 2].side("")["silent"] == 1
