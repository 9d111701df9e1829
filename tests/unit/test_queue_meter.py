"""Counts and rates of queues."""

from __future__ import annotations

import pytest

from memq.broker.metrics import Counters
from memq.queues import meter
from memq.queues.decisions import ItemOutcome, ItemRanges, LeasedItems, OutcomeRun
from memq.queues.meter import CountedBlock, QueueCounts, QueueEvents, QueueMeter
from tests.contract.manual_clock import ManualClock

NOTHING = QueueCounts(0, 0, 0, 0, 0)


def test_the_queues_that_were_used_last_have_counts_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "QUEUES_COUNTED_MAX", 2)
    counters = Counters()
    made = QueueMeter(counters, ManualClock(), 0)
    for queue in ("a", "b", "a", "c"):
        made.enqueued(queue, 2)
    assert made.events == {"a": QueueEvents(enqueued=4), "c": QueueEvents(enqueued=2)}
    assert counters.queue_enqueued_items == 8, "all count in the sum"


def test_rates_are_those_between_two_counts() -> None:
    clock = ManualClock()
    made = QueueMeter(Counters(), clock, 0)
    made.enqueued("jobs", 5)
    made.take(NOTHING, 0.0)
    assert made.rates("jobs") == QueueEvents(), "nothing is known of the time before"
    clock.advance(2_000)
    made.enqueued("jobs", 10)
    leases = [LeasedItems(ItemRanges(1, (0, 4)), 1), LeasedItems(ItemRanges(2, (0, 1)), 1)]
    outcomes = OutcomeRun(ItemOutcome.ACKED, 3), OutcomeRun(ItemOutcome.DEAD, 1), OutcomeRun(ItemOutcome.ACKED, 1)
    made.changed(leases, outcomes, {1: CountedBlock("jobs", 1)})
    made.take(NOTHING, 0.0)
    assert made.rates("jobs") == QueueEvents(enqueued=5, acked=1.5, dead=0.5)
    assert made.rates("other") == QueueEvents()
    clock.advance(2_000)
    made.take(NOTHING, 0.0)
    assert made.rates("jobs") == QueueEvents()
