"""The rules of delayed records accept what the log decided, and find a record that nobody cancelled."""

from __future__ import annotations

from typing import NoReturn

import pytest

from memq.client.producer.delayed import CancelOutcome
from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.format.state_log.entry import OpenedState, StateDecision, StateDecisions, StateEntry, encode_state_entry
from memq.holds.machine import HOLDS_MACHINE, DropDecision, HoldDecision, HoldsDecision, encode_decision
from memq.simulation.ports.groups import StateLogs
from memq.simulation.world.node import EPOCH_MS
from memq.topic import ReadPartition
from tests.simulation.delay_rules import DelayRules
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
