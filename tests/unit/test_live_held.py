"""The live audit and held records: in flight while a broker has one, unknown in doubt, then lost."""

from __future__ import annotations

import pytest

from memq.audit.account import HeldWord
from memq.audit.held import HELD_MS, HeldAnswer, HeldQuestions, Sought
from memq.audit.minutes import active_ms
from memq.format.ranges import RangeSet
from tests.unit.audited import TOPIC, pointer
from tests.unit.live_audit_harness import PRODUCER, LiveAuditHarness, span

LATE_MS = active_ms(TOPIC.settings) + 1
LOST = ("lost", "queue", "", PRODUCER)


def test_records_that_a_broker_holds_are_in_flight() -> None:
    harness = LiveAuditHarness()
    harness.sent(span("sent", (0, 10), level=1), span("acked", (0, 10), level=1), last=True)
    harness.answer = HeldAnswer({(0, PRODUCER): RangeSet([(0, 10)])}, frozenset({"one"}))
    harness.settle(LATE_MS + HELD_MS)
    assert (harness.found(grave=False), harness.word()) == ([], "in flight")
    harness.queue((PRODUCER, 0, 4))
    harness.answer = HeldAnswer({(0, PRODUCER): RangeSet([(4, 6)])}, frozenset({"one"}))
    harness.settle()
    assert harness.found() == [(*LOST, ((6, 10),))]
    harness.queue((PRODUCER, 4, 10))
    harness.settle()
    assert (harness.found(), harness.word()) == ([], "ok")


@pytest.mark.parametrize("ended", [False, True])
def test_records_that_a_silent_broker_may_hold_are_unknown(ended: bool) -> None:
    harness = LiveAuditHarness()
    harness.publish(pointer(kind="opened", broker="one"))
    if not ended:
        harness.sent(span("sent", (0, 10), level=1), span("acked", (0, 10), level=1))
    else:
        harness.end(10)
    harness.answer = HeldAnswer(failed={"one": "it did not answer"})
    for _ in range(2):  # the second time by an auditor that has not asked yet
        harness.settle(LATE_MS + HELD_MS)
        assert harness.found(grave=False) == [("unproven hole", "queue", "", PRODUCER, ((0, 10),))]
    assert harness.word() == "unknown"
    harness.answer = HeldAnswer(answered=frozenset({"one"}))
    harness.settle()
    assert harness.found(grave=False) == [(*LOST, ((0, 10),))]
    harness.answer = HeldAnswer(error="away")
    harness.settle()
    assert harness.found(grave=False) == [(*LOST, ((0, 10),))], "what was nowhere is nowhere"


def test_brokers_are_not_asked_for_records_acked_with_all() -> None:
    harness = LiveAuditHarness()
    harness.answer = HeldAnswer(error="away")
    harness.end(10, acks=2)
    harness.sent(span("sent", (0, 5), producer=6), span("acked", (0, 5), producer=6), client=101)
    harness.settle(LATE_MS + HELD_MS)
    assert harness.found() == [(*LOST, ((0, 10),)), ("lost", "queue", "", 6, ((0, 5),))]
    assert harness.audit.sought(again=True) == []


def test_unsettled_records_are_asked_for_again_and_new_ones_at_once() -> None:
    questions = HeldQuestions()
    nothing = RangeSet(), RangeSet()
    questions.begin(5)
    assert questions.decide(5, [(0, 10)], *nothing) == ([], [])
    assert questions.sought(3, again=False) == [Sought(3, 5, ((0, 10),))]
    questions.take(5, HeldWord(RangeSet([(0, 10)]), RangeSet([(0, 4)])))
    questions.begin(5)
    assert questions.decide(5, [(0, 10)], *nothing) == ([(4, 10)], [])
    assert questions.sought(3, again=False) == []
    assert questions.sought(3, again=True) == [Sought(3, 5, ((0, 4),))]
    questions.begin(5)
    questions.decide(5, [(0, 12)], *nothing)
    assert questions.sought(3, again=False) == [Sought(3, 5, ((0, 4), (10, 12)))]
    questions.forget(5)
    assert questions.sought(3, again=True) == []


@pytest.mark.parametrize("acks", [1, 2])
def test_records_lost_below_an_end_stay_lost_if_their_producer_ends_again(acks: int) -> None:
    """A new instance of a named producer continues after the first end."""
    harness = LiveAuditHarness()
    harness.publish(pointer(kind="opened", broker="one"))
    harness.answer = HeldAnswer(answered=frozenset({"one"}))
    harness.queue((PRODUCER, 0, 4))
    harness.end(10, acks=acks)
    harness.settle(LATE_MS + HELD_MS)
    assert harness.found() == [(*LOST, ((4, 10),))]
    harness.queue((PRODUCER, 10, 20))
    harness.end(25, acks=acks)
    first, second = (*LOST, ((4, 10),)), (*LOST, ((20, 25),))
    for later_ms in (0, LATE_MS):
        harness.settle(later_ms)
        assert first in harness.found()
    harness.settle(HELD_MS)
    assert harness.found() == [first, second]
    harness.queue((PRODUCER, 4, 10))
    harness.settle()
    assert harness.found() == [second]
