"""The scheduler of queue items: their order, and the ends of delays, leases and lives."""

from __future__ import annotations

import math

from memq.queues.decisions import (
    AckDecision,
    CancelDecision,
    ExtendDecision,
    ItemOutcome,
    ItemRanges,
    ItemTerms,
    NackDecision,
    encode_decision,
)
from memq.queues.scheduler import ENDS_AT_ONCE_MAX, Bounds, ItemScheduler, Moment
from tests.unit.queue_shard import Shard, ended


def test_priority_is_first_then_the_due_time_then_arrival() -> None:
    shard = Shard()
    shard.enqueue(1)
    shard.enqueue(2, terms=ItemTerms(1, 4_000, 0, 0), after_ms=500)
    shard.enqueue(3, terms=ItemTerms(1, 4_000, 0, 0))
    shard.enqueue(4, terms=ItemTerms(1, 4_000, 0, 0))
    shard.enqueue(5, topic="other")
    assert shard.dequeue(1) == [(3, 0)]
    shard.wait(0.5)
    assert [shard.dequeue(1) for _ in range(4)] == [[(4, 0)], [(2, 0)], [(1, 0)], []]
    assert shard.dequeue(topic="other") == [(5, 0)]


def test_no_item_comes_before_it_is_due() -> None:
    shard = Shard()
    shard.enqueue(1, after_ms=3_000)
    assert not shard.scheduler.is_ready(["jobs"], shard.now)
    assert shard.scheduler.wait_s(shard.now) == 3
    shard.wait(2.999)
    assert shard.dequeue() == []
    shard.wait(0.001)
    assert shard.scheduler.is_ready(["other", "jobs"], shard.now)
    assert shard.dequeue() == [(1, 0)]
    assert shard.change(NackDecision(shard.now.wall_ms + 60_000, b"", shard.lease(1))) == (ItemOutcome.RETURNED,)
    shard.wait(59)
    assert shard.dequeue() == []
    shard.wait(1)
    assert shard.dequeue() == [(1, 0)]


def test_a_clock_that_is_set_back_takes_no_item_that_was_due() -> None:
    shard = Shard()
    shard.enqueue(1, after_ms=5_000)
    shard.wait(5)
    assert shard.scheduler.is_ready(["jobs"], shard.now)
    shard.now = Moment(shard.now.wall_ms - 3_000, shard.now.steady_s + 0.1)
    assert shard.dequeue() == []
    assert shard.scheduler.wait_s(shard.now) == 3
    shard.wait(3)
    assert shard.dequeue() == [(1, 0)]


def test_a_life_ends_after_a_clock_was_set_back() -> None:
    """The end was due by the clock while a worker had the item, and not when its lease was over."""
    shard = Shard()
    shard.enqueue(1, terms=ItemTerms(5, 4_000, 0, shard.now.wall_ms + 3_000))
    assert shard.dequeue() == [(1, 0)]
    shard.wait(3.5)
    assert not shard.scheduler.is_ready(["jobs"], shard.now)
    assert shard.scheduler.ends(shard.now) == []
    shard.now = Moment(shard.now.wall_ms - 2_000, shard.now.steady_s + 0.6)
    shard.scheduler.pass_time(shard.now)
    shard.wait(2)
    assert shard.dequeue() == []
    assert len(shard.scheduler.ends(shard.now)) == 1


def test_an_item_comes_again_when_its_lease_is_over_and_an_extension_moves_that() -> None:
    shard = Shard()
    shard.enqueue(1, count=2)
    assert shard.dequeue() == [(1, 0), (1, 1)]
    shard.wait(3)
    assert shard.change(ExtendDecision(10_000, shard.lease(1))) == (ItemOutcome.EXTENDED,)
    shard.wait(1)
    assert shard.dequeue() == [(1, 1)]
    shard.wait(8.9)
    assert shard.dequeue() == [(1, 1)]
    shard.wait(0.1)
    assert shard.dequeue() == [(1, 0)]
    shard.change(AckDecision(0, shard.lease(1)))
    shard.change(AckDecision(0, shard.lease(1, 1)))
    assert shard.scheduler.wait_s(shard.now) <= 4
    shard.wait(60)
    assert shard.dequeue() == []
    assert shard.scheduler.wait_s(shard.now) == math.inf


def test_a_late_extension_takes_an_item_that_nobody_has() -> None:
    """Its lease was over, and the item was ready again: the end of a lease is no decision (Q4)."""
    shard = Shard()
    shard.enqueue(1)
    shard.dequeue()
    shard.wait(5)
    assert shard.scheduler.is_ready(["jobs"], shard.now)
    assert shard.change(ExtendDecision(4_000, shard.lease(1))) == (ItemOutcome.EXTENDED,)
    assert shard.dequeue() == []
    shard.wait(4)
    assert shard.dequeue() == [(1, 0)]


def test_an_item_with_a_decision_on_its_way_is_not_granted() -> None:
    shard = Shard()
    shard.enqueue(1, count=2)
    shard.dequeue()
    items = [ItemRanges(1, (0, 1))]
    shard.scheduler.hold(items)
    shard.wait(4)
    assert shard.dequeue() == [(1, 1)]
    shard.scheduler.released(items)  # it failed
    assert shard.dequeue() == [(1, 0)]


def test_a_new_owner_begins_all_leases_again() -> None:
    shard = Shard()
    shard.enqueue(1, count=3)
    shard.dequeue(2)
    shard.wait(3)
    shard.scheduler = ItemScheduler(shard.machine, shard.now)
    assert shard.dequeue() == [(1, 2)]
    shard.wait(3.9)
    assert shard.dequeue() == []
    shard.wait(0.1)
    assert shard.dequeue() == [(1, 0), (1, 1), (1, 2)]


def test_lives_and_attempts_end() -> None:
    shard = Shard()
    shard.enqueue(1, count=2, terms=ItemTerms(5, 4_000, 0, shard.now.wall_ms + 2_000))
    shard.enqueue(2, terms=ItemTerms(5, 4_000, 1, 0))
    assert shard.dequeue(1) == [(1, 0)]
    assert shard.dequeue(2) == [(1, 1), (2, 0)]
    shard.change(NackDecision(shard.now.wall_ms, b"", shard.lease(1, 1)))
    shard.wait(2)
    assert shard.dequeue() == []
    (decision,) = shard.scheduler.ends(shard.now)
    assert (decision.dead, [list(each.items) for each in decision.leases]) == (False, [[1]])
    assert shard.scheduler.ends(shard.now) == [], "it is on its way"
    shard.machine.apply(encode_decision(decision))
    shard.scheduler.ended(decision)
    shard.wait(2)
    shard.scheduler.pass_time(shard.now)
    ends = shard.scheduler.ends(shard.now)
    assert [(each.dead, each.leases[0].items.block) for each in ends] == [(False, 1), (True, 2)]
    for each in ends:
        shard.machine.apply(encode_decision(each))
        shard.scheduler.ended(each)
    assert shard.machine.totals == {"expired": 2, "dead": 1}
    assert not shard.scheduler.has_ends()


def test_one_decision_ends_a_bounded_number_of_items() -> None:
    shard = Shard()
    for block in (1, 2, 3):
        shard.enqueue(block, count=700, terms=ItemTerms(5, 4_000, 0, shard.now.wall_ms + 2_000))
    shard.wait(2)
    shard.scheduler.pass_time(shard.now)
    assert [len(ended(shard)) for _ in range(4)] == [ENDS_AT_ONCE_MAX, ENDS_AT_ONCE_MAX, 100, 0]
    assert shard.machine.totals == {"expired": 2_100}


def test_items_that_no_queue_has_leave_no_memory() -> None:
    shard = Shard()
    shard.enqueue(1, count=2)
    entries = shard.scheduler.entries
    for ranges in (ItemRanges(1, (2, 9)), ItemRanges(7, (0, 3))):
        assert set(shard.settle(CancelDecision(0, (ranges,)))) == {ItemOutcome.UNKNOWN}
    assert shard.scheduler.entries == entries


def test_an_answer_has_the_blocks_that_fit_and_at_least_one() -> None:
    shard = Shard()
    for block in (1, 2, 3):
        shard.enqueue(block, count=2)
    assert shard.dequeue(3, bytes_max=10) == [(1, 0), (1, 1)]
    assert shard.dequeue(3, bytes_max=200) == [(2, 0), (2, 1), (3, 0)]
    assert shard.dequeue(3, bytes_max=10) == [(3, 1)]


def test_an_extended_lease_never_gets_shorter() -> None:
    shard = Shard()
    shard.enqueue(1)
    assert shard.dequeue() == [(1, 0)]
    shard.wait(1)
    assert shard.change(ExtendDecision(1_000, shard.lease(1))) == (ItemOutcome.EXTENDED,)
    shard.wait(3.9)
    assert shard.dequeue() == [], "its 4 s count from the extension on"
    assert shard.machine.blocks[1].status(0).lease_ms == 4_000
    shard.wait(0.1)
    assert shard.dequeue() == [(1, 0)]


def test_a_grant_that_counts_though_its_request_has_failed_is_over_at_once() -> None:
    shard = Shard()
    shard.enqueue(1, count=2)
    items = shard.scheduler.take({"jobs": 2}, Bounds(10_000), shard.now)
    assert shard.grant(*items) == [(1, 0), (1, 1)]
    shard.scheduler.granted(items, (), shard.now.steady_s)  # no worker has the items, and no lease would end
    assert shard.dequeue() == [(1, 0), (1, 1)]


def test_queues_share_the_bound_of_a_request() -> None:
    shard = Shard()
    for block, (topic, count) in enumerate([("a", 100), ("b", 100), ("c", 2), ("d", 100)], 1):
        shard.enqueue(block, topic=topic, count=count)
    wanted = {"a": 50, "b": 50, "c": 50, "d": 5, "none": 50}

    def taken(items_max: int) -> dict[int, int]:
        items = shard.scheduler.take(wanted, Bounds(10_000, items_max), shard.now)
        shard.scheduler.released(items)
        return {each.block: len(each) for each in items}

    assert taken(40) == {1: 17, 2: 16, 3: 2, 4: 5}
    assert sum(taken(1_000).values()) == 107
    assert sorted(block for _ in range(4) for block in taken(1)) == [1, 2, 3, 4], "each has its turn"
    assert taken(0) == {}


def test_items_that_are_delivered_at_most_once_have_a_bound() -> None:
    shard, once = Shard(), ItemTerms(4, 0, 0, 0)
    shard.enqueue(1, count=4, terms=once)
    shard.enqueue(2, count=4)
    shard.enqueue(3, count=4, topic="other")

    def taken(once_max: int) -> list[tuple[int, int]]:
        items = shard.scheduler.take({"jobs": 6, "other": 1}, Bounds(10_000, 100, once_max), shard.now)
        shard.scheduler.released(items)
        return sorted((each.block, len(each)) for each in items)

    assert taken(3) == [(1, 3), (3, 1)], "later items wait for those before them"
    assert taken(6) == [(1, 4), (2, 2), (3, 1)]
    assert taken(0) == [(3, 1)]
    assert shard.scheduler.is_ready(["jobs"], shard.now)
    assert not shard.scheduler.is_ready(["jobs"], shard.now, once=False)
    assert shard.scheduler.is_ready(["jobs", "other"], shard.now, once=False)
