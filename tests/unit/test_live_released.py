"""The live audit and held records: in flight until due, cancelled, rolled back; lost by counts and by units."""

from __future__ import annotations

from typing import Any

import pytest

from memq.audit.finding import Finding
from memq.audit.held import HeldAnswer, Sought
from memq.audit.live.questions import held_minutes
from memq.audit.live.questions.held_minutes import LOST_COMMITTED, LOST_HELD, UNPROVEN_BLIND, UNPROVEN_HELD
from memq.audit.live.storage.state import encode_state
from memq.audit.minutes import active_ms
from memq.audit.released import ReleaseAnswer, ShardCounts
from memq.errors import UnsupportedFormatError
from memq.format.held_sequences import delayed_sequence, transactional_sequence
from memq.format.pointer import NamedProducer
from memq.format.report import HeldSpan, ReportPart
from memq.topic import CLOCK_ERROR_MS
from tests.unit.audited import TOPIC, Run, pointer
from tests.unit.blocks import NOW_MS
from tests.unit.live_audit_harness import GROUP, MINUTE, READER, SENDER, LiveAuditHarness

SHARD = 77
LATER_MS = active_ms(TOPIC.settings) + 120_000
BEGUN = transactional_sequence(NOW_MS)


def delayed(producer: int, due_ms: int = NOW_MS) -> Run:
    return producer, delayed_sequence(due_ms), delayed_sequence(due_ms) + 1


def unit(number: int, records: int) -> NamedProducer:
    return NamedProducer(producer=SHARD, epoch=0, last_sequence=number, records=records)


class HeldHarness(LiveAuditHarness):
    """A harness whose producer reports held records, and whose shard answers."""

    def __init__(self) -> None:
        super().__init__()
        self.shard()

    def reported(self, *counts: tuple[Any, int], minute: int = MINUTE, **fields: Any) -> None:
        held = tuple(HeldSpan(stage=stage, minute=minute, records=records) for stage, records in counts)
        part = ReportPart(topic=TOPIC.name, topic_id=TOPIC.id, partition=0, held=held)
        self.report(SENDER, "producer", "", part, fields)

    def read_held(self, *counts: tuple[Any, int], kind: str = "consumer", group: str = GROUP) -> None:
        held = tuple(HeldSpan(stage=stage, minute=MINUTE, records=records) for stage, records in counts)
        part = ReportPart(topic=TOPIC.name, topic_id=TOPIC.id, partition=0, held=held)
        self.report(READER, kind, group, part, {"last": True})

    def shard(self, *word: int, next_ms: int = 0, error: str = "") -> None:
        """Let the shard say how many units and records it released, has done and dropped."""
        shards = (ShardCounts(0, SHARD, *word),) if word else ()
        answer = ReleaseAnswer(shards, next_ms={0: next_ms} if next_ms else {}, error=error)
        self.answer = HeldAnswer(released=answer)

    def holding(self) -> list[Finding]:
        return sorted((each for each in self.findings.values() if not each.resolved_ms), key=str)

    def causes(self) -> list[tuple[str, int, int, str]]:
        return [(each.kind.value, each.minute, each.records, each.cause) for each in self.holding()]


def test_delayed_and_transactional_records_of_which_all_is_well_are_ok() -> None:
    harness = HeldHarness()
    harness.publish(pointer(kind="opened"))
    harness.queue(delayed(1), (9, BEGUN, BEGUN + 4), named=(unit(1, 5),), sealed_ms=NOW_MS)
    harness.reported(("held", 3), ("cancelled", 2), ("committed", 4), ("rolled-back", 6), last=True)
    harness.read_held(("fetched", 5), ("processed", 4), ("passed", 1))
    harness.settle(LATER_MS)
    row = harness.rows[MINUTE]
    assert (harness.causes(), harness.word(), harness.word(GROUP)) == ([], "ok", "ok")
    names = ("sent", "cancelled", "rolled-back", "committed")
    assert [row.side("")[name] for name in names] == [7, 2, 6, 5]
    assert [row.side(GROUP)[name] for name in ("fetched", "processed", "passed")] == [5, 4, 1]
    assert harness.audit.state.streams == {}, "no held record has a producer of its own"
    assert harness.audit.state.held.delayed == harness.audit.state.held.committed == {}
    assert harness.audit.state.held.queued == 5


def test_a_delayed_record_is_in_flight_until_it_is_due() -> None:
    harness = HeldHarness()
    due_ms = NOW_MS + 86_400_000
    minute = due_ms // 60_000
    harness.reported(("held", 2), minute=minute, last=True)
    harness.settle(LATER_MS)
    assert (harness.word(minute=minute), harness.audit.sought(again=True)) == ("in flight", [])
    harness.now_ms = due_ms
    harness.queue(delayed(1, due_ms), delayed(2, due_ms), named=(unit(1, 2),), sealed_ms=due_ms)
    harness.settle()
    assert (harness.word(minute=minute), harness.causes()) == ("ok", [])


def test_a_due_record_that_does_not_come_is_lost_once_its_shard_has_nothing_left() -> None:
    harness = HeldHarness()
    harness.reported(("held", 3), last=True)
    harness.queue(delayed(1), named=(unit(1, 1),), sealed_ms=NOW_MS)
    for word, more in (((2, 3, 1, 1), {}), ((1, 1, 1, 1), {"next_ms": NOW_MS}), ((1, 1, 1, 1), {"error": "away"})):
        harness.shard(*word, **more)
        harness.settle(LATER_MS)
        assert (harness.causes(), harness.word()) == ([], "in flight")
    harness.shard(1, 1, 1, 1, next_ms=(MINUTE + 1) * 60_000)
    harness.settle()
    assert harness.causes() == [("lost", MINUTE, 2, LOST_HELD)]
    assert harness.word() == "lost"
    harness.shard(error="away")
    harness.queue(delayed(2), named=(unit(2, 2),), sealed_ms=NOW_MS)
    harness.settle()
    assert harness.causes() == [("lost", MINUTE, 1, LOST_HELD)]
    harness.reported(("cancelled", 1), number=1)
    harness.settle()
    assert (harness.causes(), harness.word()) == ([], "ok")


def test_a_cancel_that_no_client_reports_is_no_loss() -> None:
    harness = HeldHarness()
    harness.publish(pointer(kind="opened"))
    harness.reported(("held", 4), ("cancelled", 1), last=True)
    harness.shard(0, 0, 0, 0, 3)  # one of them is reported
    harness.settle(LATER_MS)
    assert harness.causes() == [("lost", MINUTE, 1, LOST_HELD), ("unproven hole", MINUTE, 2, UNPROVEN_HELD)]


def test_a_committed_transaction_that_does_not_come_is_lost() -> None:
    harness = HeldHarness()
    harness.publish(pointer(kind="opened"))
    harness.reported(("committed", 4), ("rolled-back", 3), ("unsure", 2), last=True)
    harness.shard(0, 0, 0, 0, 9, next_ms=NOW_MS)  # what is delayed or cancelled is nothing to it
    harness.settle(LATER_MS)
    assert harness.causes() == [("lost", MINUTE, 4, LOST_COMMITTED)]


def test_records_whose_pointers_were_not_read_are_unproven() -> None:
    harness = HeldHarness()
    harness.publish(pointer(kind="opened"))
    harness.reported(("held", 1), last=True)
    harness.audit.take_unsupported(harness.offset, NOW_MS + 60_000, UnsupportedFormatError("newer"))
    harness.shard(1, 1, 1, 1)
    harness.settle(LATER_MS)
    assert harness.causes() == [("unproven hole", MINUTE, 1, UNPROVEN_BLIND)]


def test_a_unit_without_a_record_is_a_loss_at_its_pointer_and_only_there() -> None:
    harness = HeldHarness()
    harness.publish(pointer(kind="opened", epoch=2))
    at = harness.queue(delayed(2), named=(unit(2, 2),), sealed_ms=NOW_MS, epoch=2)
    harness.reported(("held", 2), last=True)
    harness.shard(2, 2, 2, 2)
    harness.settle(LATER_MS)
    assert [(each.kind.value, each.offset, each.records) for each in harness.holding()] == [("lost", at, 1)]
    harness.queue(delayed(1), named=(unit(1, 1),), sealed_ms=NOW_MS)  # a late pointer
    harness.settle()
    assert harness.causes() == []


def test_an_unreported_cancel_does_not_use_up_a_loss_at_a_pointer() -> None:
    harness = HeldHarness()
    harness.publish(pointer(kind="opened", epoch=2))
    at = harness.queue(delayed(2), named=(unit(2, 4),), sealed_ms=NOW_MS, epoch=2)
    harness.reported(("held", 2), ("committed", 3), last=True)
    harness.shard(2, 4, 2, 4, 1)
    for _ in range(2):
        harness.settle(LATER_MS)
        found = [(each.kind.value, each.offset, each.records) for each in harness.holding()]
        assert found == [("lost", at, 3), ("unproven hole", -1, 1)]
    harness.shard(error="away")
    harness.settle()
    assert len(harness.holding()) == 2, "what was judged stays"


def test_a_pointer_that_comes_again_has_copies() -> None:
    harness = HeldHarness()
    harness.reported(("held", 2), last=True)
    harness.queue(delayed(1), named=(unit(1, 1),), sealed_ms=NOW_MS)
    harness.queue(delayed(1), named=(unit(1, 1),), sealed_ms=NOW_MS)
    harness.queue(delayed(1), delayed(2), named=(unit(1, 1), unit(2, 2)), sealed_ms=NOW_MS)
    harness.settle()
    row = harness.rows[MINUTE].side("")
    assert (row["committed"], row["copies"], harness.causes()) == (2, 2, [])


def test_records_that_no_shard_released_or_that_come_early_are_named() -> None:
    harness = HeldHarness()
    due_ms = NOW_MS + CLOCK_ERROR_MS
    one = harness.queue(delayed(1, due_ms), (9, BEGUN, BEGUN + 2), named=(unit(1, 1),), sealed_ms=NOW_MS)
    two = harness.queue(delayed(2, due_ms + 1), named=(unit(2, 2),), sealed_ms=NOW_MS)
    harness.settle()
    found = sorted((each.kind.value, each.offset, each.records) for each in harness.holding())
    assert found == [("early", two, 1), ("not released", one, 2)]
    assert harness.word() == "doubled"


def test_an_auditor_that_did_not_count_from_the_beginning_claims_nothing() -> None:
    harness = HeldHarness()
    harness.publish(pointer(kind="opened"))
    harness.audit.state.released.begun = False  # as in the state of an earlier release
    harness.queue(delayed(2), named=(unit(2, 2),), sealed_ms=NOW_MS)
    harness.reported(("held", 5), last=True)
    harness.shard(2, 2, 2, 2)
    harness.settle(LATER_MS)
    assert harness.causes() == [("unproven hole", MINUTE, 4, UNPROVEN_BLIND)]


def test_records_that_spark_tasks_fetched_count_as_processed_and_those_of_no_group_do_not() -> None:
    harness = HeldHarness()
    harness.queue((9, BEGUN, BEGUN + 4), named=(unit(1, 4),), sealed_ms=NOW_MS)
    harness.read_held(("fetched", 4), kind="spark-task", group="s")
    harness.home.clients.clear()
    harness.settle()
    assert harness.rows[MINUTE].side("s").counts == {"processed": 4}
    other = HeldHarness()
    other.read_held(("fetched", 4), group="")
    other.settle()
    assert other.rows == {}


def test_shards_are_asked_once_and_again_only_in_some_rounds() -> None:
    harness = HeldHarness()
    harness.reported(("held", 1), last=True)
    audit = harness.audit
    audit.settle(NOW_MS + LATER_MS)
    held = [Sought(0, 0, ())]
    assert (audit.waits, audit.sought(again=False), audit.sought(again=False), audit.sought(again=True)) == (
        *(True, held),
        *([], held),
    )


def test_the_latest_of_very_many_minutes_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_minutes, "MINUTES_MAX", 2)
    harness = HeldHarness()
    for minute in range(3):
        harness.reported(("held", 1), minute=MINUTE + minute)
    harness.settle()
    assert list(harness.audit.state.held.delayed) == [MINUTE, MINUTE + 1]


def test_very_many_delayed_records_take_no_entry_each() -> None:
    harness = HeldHarness()
    count = 0
    for number in range(1, 41):
        runs = [delayed(count + each + 1, NOW_MS + each) for each in range(500)]
        count += len(runs)
        harness.reported(("held", len(runs)))
        harness.queue(*runs, named=(unit(number, count),), sealed_ms=NOW_MS + 500)
    harness.settle(LATER_MS)
    assert (harness.causes(), harness.audit.state.held.queued) == ([], 20_000)
    assert len(encode_state(harness.audit.state)) < 10_000, "bytes of the state"
