"""The rules of delayed records accept what the log decided, and find a record that nobody cancelled."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NoReturn

import pytest

from memq.client.producer.delayed import CancelOutcome
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.state_log.entry import OpenedState, StateDecision, StateDecisions, StateEntry, encode_state_entry
from memq.holds.decisions import HOLDS_MACHINE, DropDecision, HoldDecision, HoldsDecision, encode_decision
from memq.simulation.ports.groups import StateLogs
from memq.simulation.world.node import EPOCH_MS
from memq.topic import ReadPartition
from tests.simulation.delay_rules import DelayRules
from tests.simulation.group_rules import GroupRules
from tests.simulation.reader import FindingError

LOG = ReadPartition("_memq_state", "1" * 32, 0)
HOLD = HoldId(7, 0)
LANE = HeldLane(Target("t", "0" * 32, 0), "", (HeldBlock(HOLD, 1, EPOCH_MS, 0, 100),))
RECORD = b"producer-0.1.1 0 1 value"


def fail(text: str) -> NoReturn:
    raise FindingError(text)


class Decided:
    """A held record, its rules and the state log that decides about it."""

    def __init__(self) -> None:
        self.states = StateLogs(lambda: fail("no group is here"), fail)
        self.rules = DelayRules(self.states, fail, lambda: 1.0, 0, calm=False)
        self._offset = 0
        self.states.landed(LOG, 0, encode_state_entry(StateEntry(1, 0, OpenedState(5, "broker-0"))))
        self.decide(HoldDecision("key", 0, (LANE,)))
        self.rules.sent(RECORD, EPOCH_MS)
        self.rules.held(RECORD, HOLD)

    def decide(self, decision: HoldsDecision) -> None:
        content = StateDecisions((StateDecision(HOLDS_MACHINE, encode_decision(decision)),))
        self._offset += 1
        self.states.landed(LOG, self._offset, encode_state_entry(StateEntry(1, self._offset - 1, content)))


@pytest.fixture
def decided() -> Decided:
    return Decided()


def test_the_rules_miss_a_record_until_it_lands(decided: Decided) -> None:
    assert decided.rules.missing() == [RECORD]


def test_the_rules_miss_no_record_whose_cancel_lost_its_answer(decided: Decided) -> None:
    decided.rules.cancelling(RECORD)
    assert decided.rules.missing() == [RECORD]
    decided.decide(DropDecision(1_000, (HOLD,)))
    assert decided.rules.missing() == []
    decided.decide(HoldDecision("other", 2_000, ()))  # the machine forgets what ended before
    assert decided.states.state_of(HOLD) is None
    assert decided.rules.missing() == []


def test_the_rules_miss_a_record_that_was_dropped_without_a_cancel(decided: Decided) -> None:
    decided.decide(DropDecision(1_000, (HOLD,)))
    assert decided.rules.missing() == [RECORD]


def test_the_rules_find_a_cancel_that_no_log_has(decided: Decided) -> None:
    decided.rules.cancelling(RECORD)
    with pytest.raises(FindingError, match="no log dropped it"):
        decided.rules.cancelled(RECORD, CancelOutcome.CANCELLED)


@pytest.mark.parametrize(
    ("ends", "found", "text"),
    [
        (True, {0: 1}, ""),
        (True, {}, ""),
        (True, None, ""),
        (True, {0: 2}, "0 to 1 delayed records wait in partition 0, the answer was 2"),
        (False, {0: 1}, ""),
        (False, {}, "1 to 1 delayed records wait in partition 0, the answer was 0"),
    ],
)
def test_the_rules_find_a_count_that_no_moment_of_a_question_had(
    decided: Decided, *, ends: bool, found: dict[int, int] | None, text: str
) -> None:
    """The record waits at first; at the end it does not, if it `ends`."""
    question = decided.rules.ask_counts()
    if ends:
        decided.decide(DropDecision(1_000, (HOLD,)))
    with pytest.raises(FindingError, match=text) if text else nullcontext():
        decided.rules.counted(question, LANE.target.topic_id, found)
    decided.rules.counted(question, LANE.target.topic_id, {0: 99})  # it was answered


def test_the_rules_find_a_former_member_that_takes_a_batch() -> None:
    found: list[str] = []
    now_s = 0.0
    rules = GroupRules({}, found.append, lambda: now_s, lambda _source, _value: None)
    for now_s, consumer in ((1.0, "a"), (5.0, "b")):  # noqa: B007 - the rules ask for the time
        rules.assign(consumer, "g", LOG)
        rules.take(consumer, "g", LOG, 0.0)
    rules.take("a", "g", LOG, 6.0)  # its process was paused after it was asked for the batch
    rules.take("a", "other", LOG, 0.0)
    assert found == []
    rules.take("a", "g", LOG, 0.0)
    assert [text.partition(" takes")[0] for text in found] == ["a"]
    now_s = 7.0
    rules.assign("a", "g", LOG)
    rules.take("a", "g", LOG, 0.0)
    assert len(found) == 1
