"""Ordered keys and dedupe keys of queues, in the machine and its scheduler; turns of keys and of queues."""

from __future__ import annotations

import random
import time

import pytest

from memq.format.held_object import HeldBlock, HeldLane, HoldId, Target
from memq.queues.agenda import SPARE, Agenda
from memq.queues.decisions import (
    AckDecision,
    CancelDecision,
    Dedupe,
    EnqueueDecision,
    FirstBlock,
    ItemOutcome,
    ItemRanges,
    ItemState,
    ItemTerms,
    NackDecision,
    RedriveDecision,
    dedupe_digest,
    encode_decision,
    ranges_of,
)
from memq.queues.keys import DedupeKeys
from memq.queues.machine import QueueMachine
from memq.queues.scheduler import Bounds, ItemScheduler
from tests.unit.queue_shard import PLAIN, Shard

ORDERED = ItemTerms(5, 4_000, 0, 0, "k", ordered=True)


def keyed(key: str, priority: int = 5) -> ItemTerms:
    return ItemTerms(priority, 4_000, 0, 0, key)


# ---- ordered keys --------------------------------------------------------------------------------


def test_one_item_of_an_ordered_key_is_leased_in_the_order_of_arrival_and_others_go_on() -> None:
    shard = Shard()
    shard.enqueue(1, count=2, terms=ORDERED)
    shard.enqueue(2, terms=ORDERED._replace(priority=0))
    shard.enqueue(3, terms=ORDERED._replace(key="other"))
    shard.enqueue(4)
    assert sorted(shard.dequeue()) == [(1, 0), (3, 0), (4, 0)]
    assert shard.dequeue() == []
    shard.change(NackDecision(shard.now.wall_ms + 1_000, b"", shard.lease(1)))
    assert shard.dequeue() == [], "an item that was given back comes before its followers"
    shard.wait(1)
    assert shard.dequeue() == [(1, 0)]
    shard.wait(4)
    assert sorted(shard.dequeue()) == [(1, 0), (3, 0), (4, 0)]
    shard.change(AckDecision(0, shard.lease(1)))
    assert shard.dequeue() == [(1, 1)]
    shard.change(AckDecision(0, shard.lease(1, 1)))
    assert shard.dequeue() == [(2, 0)], "its priority counts among keys, not within one"
    shard.change(AckDecision(0, shard.lease(2)))
    shard.change(AckDecision(0, shard.lease(3)))
    assert len(shard.machine.ordered) == 0


def test_a_dead_item_does_not_stop_its_key_and_is_first_again_when_it_was_sent_back() -> None:
    shard = Shard()
    for block in (1, 2, 3):
        shard.enqueue(block, terms=ORDERED._replace(attempts_max=1))
    assert shard.dequeue() == [(1, 0)]
    assert shard.change(NackDecision(shard.now.wall_ms, b"", shard.lease(1))) == (ItemOutcome.DEAD,)
    assert shard.dequeue() == [(2, 0)]
    assert shard.settle(RedriveDecision(shard.now.wall_ms, (ItemRanges(1, (0, 1)),))) == (ItemOutcome.RETURNED,)
    assert shard.dequeue() == [], "another item of the key is leased"
    shard.change(AckDecision(0, shard.lease(2)))
    assert shard.dequeue() == [(1, 0)]
    assert shard.settle(CancelDecision(0, (ItemRanges(3, (0, 1)),))) == (ItemOutcome.CANCELLED,)
    shard.change(AckDecision(0, shard.lease(1)))
    assert shard.dequeue() == []
    assert len(shard.machine.ordered) == 0


def test_a_new_owner_ends_an_item_that_was_given_back_and_its_ordered_key_continues() -> None:
    shard = Shard()
    shard.enqueue(1, terms=ORDERED._replace(expires_ms=shard.now.wall_ms + 2_000))
    shard.enqueue(2, terms=ORDERED)
    shard.dequeue()
    shard.change(NackDecision(shard.now.wall_ms + 1_000, b"", shard.lease(1)))
    shard.scheduler = ItemScheduler(shard.machine, shard.now)
    shard.wait(3)
    assert shard.dequeue() == [], "its life is over"
    (decision,) = shard.scheduler.ends(shard.now)
    shard.machine.apply(encode_decision(decision))
    shard.scheduler.ended(decision)
    assert shard.machine.totals == {"expired": 1}
    assert shard.dequeue() == [(2, 0)]


def test_many_dead_items_of_an_ordered_key_are_sent_back_at_once() -> None:
    """One sort of the key for each of them took 20 s."""
    shard, dead, waiting = Shard(), 300, 50_000
    for block in range(1, dead + 1):
        shard.enqueue(block, terms=ORDERED._replace(attempts_max=1))
        assert shard.dequeue() == [(block, 0)]
        shard.change(NackDecision(shard.now.wall_ms, b"", shard.lease(block)))
    held = tuple(HeldBlock(HoldId(dead + 1 + at, 0), 1, 1, 0, 1) for at in range(waiting))
    lane = HeldLane(Target("jobs", "", 0), ORDERED.lane(), held)
    shard.machine.apply(encode_decision(EnqueueDecision("key", 0, (lane,))))
    began_s = time.process_time()
    shard.settle(RedriveDecision(shard.now.wall_ms, tuple(ItemRanges(block, (0, 1)) for block in range(1, dead + 1))))
    assert time.process_time() - began_s < 3
    for block in (1, 2, 3):
        assert shard.dequeue() == [(block, 0)]
        shard.change(AckDecision(0, shard.lease(block)))


def test_the_machine_refuses_a_grant_of_a_second_item_of_an_ordered_key() -> None:
    shard = Shard()
    shard.enqueue(1, count=3, terms=ORDERED)
    assert shard.grant(ItemRanges(1, (1, 3))) == []
    assert shard.grant(ItemRanges(1, (0, 3))) == [(1, 0)]
    again = QueueMachine()
    again.restore(shard.machine.snapshot())
    shard.machine = again
    assert shard.grant(ItemRanges(1, (1, 3))) == []
    assert shard.grant(ItemRanges(1, (0, 1))) == [(1, 0)], "its lease was over"


@pytest.mark.parametrize("seed", range(20))
def test_items_of_an_ordered_key_are_acked_in_the_order_of_arrival(seed: int) -> None:
    """Random nacks, ends of leases, and new owners; no item is lost."""
    draw, shard, acked = random.Random(seed), Shard(), dict[str, list[tuple[int, int]]]()
    for block in range(1, 13):
        shard.enqueue(block, count=draw.randrange(1, 4), terms=ORDERED._replace(key=f"k{block % 3}"))
    while shard.machine.items:
        for block, number in shard.dequeue(draw.randrange(1, 4)):
            key = shard.machine.blocks[block].terms.key
            what = draw.choice(["ack", "ack", "nack", "forget"])
            if what == "ack":
                shard.change(AckDecision(0, shard.lease(block, number)))
                acked.setdefault(key, []).append((block, number))
            elif what == "nack":
                shard.change(NackDecision(shard.now.wall_ms + draw.randrange(2_000), b"", shard.lease(block, number)))
        shard.wait(draw.choice([0.0, 0.5, 4.0]))
        if draw.random() < 0.1:
            state = shard.machine.snapshot()
            shard.machine = QueueMachine()
            shard.machine.restore(state)
            shard.scheduler = ItemScheduler(shard.machine, shard.now)
    assert all(found == sorted(found) for found in acked.values())
    assert len(shard.machine.ordered) == 0


# ---- dedupe keys ---------------------------------------------------------------------------------


def test_a_queue_takes_one_item_under_a_dedupe_key_within_its_window() -> None:
    machine = QueueMachine()

    def enqueue(block: int, at_ms: int, key: str = "d", queue: str = "jobs") -> object:
        terms = PLAIN._replace(dedupe=Dedupe(dedupe_digest(queue, key), at_ms, at_ms + 100))
        lane = HeldLane(Target(queue, "", 0), terms.lane(), (HeldBlock(HoldId(block, 0), 1, at_ms, 0, 10),))
        answers = machine.apply(encode_decision(EnqueueDecision("key", 0, (lane,))))
        assert isinstance(answers, tuple)
        return answers[0]

    assert enqueue(1, 1_000) is True
    assert enqueue(1, 1_050) is False, "the request came again"
    assert enqueue(2, 1_099) == FirstBlock(1)
    assert enqueue(3, 1_050, queue="other") is True
    assert enqueue(4, 1_050, key="e") is True
    assert machine.topics == {"jobs": 2, "other": 1}
    machine.apply(encode_decision(CancelDecision(1_060, (ItemRanges(1, (0, 1)),))))
    again = QueueMachine()
    again.restore(machine.snapshot())
    assert again.snapshot() == machine.snapshot()
    machine = again
    assert enqueue(5, 1_099) == FirstBlock(1), "also when it has ended, and with a snapshot"
    assert enqueue(1, 1_099) is False
    assert enqueue(2, 1_110) is False, "what was no first item never is one: a restore may find its object"
    assert machine.state_of(2, 0) is ItemState.CANCELLED
    assert enqueue(6, 1_100) is True, "the window is over"
    assert machine.firsts.count(1_150) == 1
    assert len(machine.firsts) == 3
    for number in (5, 1, 4, 2, 3):
        terms = PLAIN._replace(dedupe=Dedupe(bytes([number]) * 16, 1_200, 1_200 + 100 * number))
        lane = HeldLane(Target("jobs", "", 0), terms.lane(), (HeldBlock(HoldId(50 + number, 0), 1, 1_200, 0, 10),))
        machine.apply(encode_decision(EnqueueDecision("key", 0, (lane,))))
    assert [machine.firsts.count(at_ms) for at_ms in (1_200, 1_300, 1_350, 1_650, 1_700)] == [5, 4, 4, 1, 0]
    again = QueueMachine()
    again.restore(machine.snapshot())
    for at_ms, left in ((1_300, 4), (1_500, 2), (1_700, 0)):
        again.apply(encode_decision(EnqueueDecision("key", at_ms, ())))
        assert len(again.firsts) == left
    assert enqueue(7, 2_000, key="f") is True
    assert len(machine.firsts) == 1, "keys whose windows are over are forgotten"
    machine.apply(encode_decision(EnqueueDecision("key", 2_100, ())))
    assert len(machine.firsts) == 0


def test_dedupe_keys_whose_windows_are_over_are_counted_without_the_others() -> None:
    firsts, ends = DedupeKeys(), list(range(1_000, 61_000))
    random.Random(1).shuffle(ends)
    for block, until_ms in enumerate(ends):
        firsts.add(Dedupe(block.to_bytes(16, "little"), 0, until_ms), block)
    assert [firsts.count(now_ms) for now_ms in (999, 1_000, 1_499, 61_000)] == [60_000, 59_999, 59_500, 0]
    began_s = time.process_time()
    assert {firsts.count(1_009) for _ in range(1_000)} == {59_990}
    assert time.process_time() - began_s < 1, "each enqueue read all keys"


# ---- turns ---------------------------------------------------------------------------------------


def test_keys_take_turns_and_priority_is_first() -> None:
    shard = Shard()
    shard.enqueue(1, count=50, terms=keyed("noisy"))
    shard.enqueue(2, count=2, terms=keyed("a"))
    shard.enqueue(3, count=2, terms=keyed("b"))
    shard.enqueue(4, terms=keyed("noisy", priority=1))
    peeked = shard.scheduler.peek("jobs", 60, shard.now)
    assert peeked[:5] == [(4, 0), (2, 0), (3, 0), (1, 0), (2, 1)]
    assert len(peeked) == 55
    assert shard.scheduler.peek("jobs", 3, shard.now) == peeked[:3]
    assert [each for _ in range(55) for each in shard.dequeue(1)] == peeked, "a peek changes nothing"


def test_the_queue_that_waited_longest_is_first() -> None:
    """An answer has room for one block: the order of names starved the others."""
    shard = Shard()
    wanted = {"a": 10, "b": 10, "c": 10}
    block = 0
    served: list[str] = []
    for _ in range(9):
        for queue in wanted:
            block += 1
            shard.enqueue(block, topic=queue)
        (item,) = shard.scheduler.take(wanted, Bounds(1), shard.now)
        served.append(shard.machine.blocks[item.block].topic)
        shard.scheduler.released([item])
    assert sorted(served) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3


class Run:
    """Workers in virtual time; returns how long the items of the quiet keys waited."""

    def __init__(self, seed: int, *, noisy: int, workers: int = 8, seconds: float = 60.0, work_s: float = 0.2) -> None:
        self.draw, self.shard = random.Random(seed), Shard()
        self.noisy, self.workers, self.seconds, self.work_s = noisy, workers, seconds, work_s

    def dwell_s(self, load: float = 0.6, keys: int = 20) -> list[float]:
        """Let `keys` quiet keys use a share of the workers; return the waits of their items."""
        shard, draw, waits = self.shard, self.draw, list[float]()
        began_s, block = shard.now.steady_s, 1
        arrived: dict[int, float] = {}
        if self.noisy:
            for block in range(1, self.noisy // 100 + 1):
                shard.enqueue(block, count=100, terms=keyed("noisy")._replace(lease_ms=60_000))
        rate = load * self.workers / self.work_s
        due_s, busy = began_s + draw.expovariate(rate), list[tuple[float, int, int]]()
        while due_s < began_s + self.seconds:
            next_s = min([due_s, *(until_s for until_s, _, _ in busy)])
            shard.wait(next_s - shard.now.steady_s)
            if next_s == due_s:
                block += 1
                arrived[block] = next_s
                shard.enqueue(block, terms=keyed(f"k{draw.randrange(keys)}")._replace(lease_ms=60_000))
                due_s += draw.expovariate(rate)
            for done in [each for each in busy if each[0] <= next_s]:
                busy.remove(done)
                shard.change(AckDecision(0, shard.lease(done[1], done[2])))
            for id_, number in shard.dequeue(self.workers - len(busy)) if len(busy) < self.workers else ():
                busy.append((next_s + draw.uniform(0.5, 1.5) * self.work_s, id_, number))
                if id_ in arrived:
                    waits.append(next_s - arrived[id_])
        return waits


def p99(values: list[float]) -> float:
    return sorted(values)[len(values) * 99 // 100]


def test_a_noisy_key_with_most_of_the_backlog_delays_others_at_most_twofold() -> None:
    """Its backlog is far above nine tenths of all; the time from enqueue to ack counts."""
    alone, crowded = Run(1, noisy=0), Run(1, noisy=20_000)
    without, with_it = ([each + 0.2 for each in run.dwell_s()] for run in (alone, crowded))
    assert len(with_it) == pytest.approx(len(without), rel=0.1), "none of them is left behind"
    assert p99(with_it) <= 2 * p99(without), (p99(with_it), p99(without))
    assert crowded.shard.machine.totals["acked"] > alone.shard.machine.totals["acked"] * 1.3, "no worker is idle"


# ---- memory --------------------------------------------------------------------------------------


def test_an_agenda_keeps_no_more_stale_entries_than_live_ones() -> None:
    live: set[int] = set()
    agenda: Agenda[tuple[int, int]] = Agenda(lambda entry: entry[1] in live)
    for number in range(10 * SPARE):
        live = {number, number - 1}
        agenda.push((number % 7, number))
        agenda.trim(len(live))
        assert len(agenda) <= SPARE + 4
    assert [each for each in agenda.until(9) if each[1] in live] == sorted((n % 7, n) for n in live)


@pytest.mark.parametrize(("end", "queues"), [("ack", 100_000), ("cancel", 10_000), ("ttl", 10_000)])
def test_a_hundred_thousand_queues_leave_no_memory_when_they_are_emptied(end: str, queues: int) -> None:
    shard, now_ms = Shard(), 10_000
    expires_ms = now_ms + (1_000 if end == "ttl" else 10**10)

    def enqueue(first: int) -> None:
        lanes = tuple(
            HeldLane(
                Target(f"q{number}", "", 0),
                ItemTerms(
                    *(5, 43_200_000, 0, expires_ms, f"k{number}"),
                    ordered=number % 2 == 0,
                    dedupe=Dedupe(number.to_bytes(16, "big"), now_ms, now_ms + 300_000),
                ).lane(),
                (HeldBlock(HoldId(number, 0), 1, now_ms, 0, 100),),
            )
            for number in range(first, first + 1_000)
        )
        shard.machine.apply(encode_decision(EnqueueDecision("key", 0, lanes)))
        for lane in lanes:
            shard.scheduler.enqueued(lane.blocks[0].id.producer, shard.now)

    for first in range(1, queues + 1, 1_000):
        enqueue(first)
    assert len(shard.machine.topics) == queues
    if end == "ttl":
        shard.wait(2)
        shard.scheduler.pass_time(shard.now)
        while ends := shard.scheduler.ends(shard.now):
            for each in ends:
                shard.machine.apply(encode_decision(each))
                shard.scheduler.ended(each)
    for first in range(1, queues + 1, 250) if end != "ttl" else ():
        numbers = range(first, first + 250)
        if end == "ack":
            assert shard.dequeue_many({f"q{number}": 1 for number in numbers}) == [(number, 0) for number in numbers]
            shard.change(AckDecision(now_ms, tuple(lease for number in numbers for lease in shard.lease(number))))
        else:
            shard.settle(CancelDecision(now_ms, tuple(ranges_of(number, [0]) for number in numbers)))
    machine = shard.machine
    assert (machine.topics, machine.blocks, machine.objects, machine.dead, len(machine.ordered)) == ({}, {}, {}, {}, 0)
    assert (len(machine.firsts), machine.ended_blocks) == (queues, queues), "they are known for minutes"
    later_ms = now_ms + 900_000
    machine.apply(encode_decision(EnqueueDecision("key", later_ms, ())))
    assert (len(machine.firsts), machine.ended_blocks) == (0, 0)
    assert len(machine.snapshot()) < 300
    shard.scheduler.pass_time(shard.now)
    assert shard.scheduler.entries < 5_000
