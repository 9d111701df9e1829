"""The ring: its table of states, when it seals, and that it publishes only its head."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memq.broker.ingest.slabs import Slab, SlabPool
from memq.broker.partition.append import Partition, ProducerState, Stream
from memq.broker.partition.ring import (
    FAST_BYTES_S,
    FAST_S_MAX,
    GAP_S_MAX,
    GOAL_GROWS,
    GROUP_S_MAX,
    SUCCESSORS,
    WORTH_SHARE,
    BatchSlot,
    Ring,
    RingLimits,
    RingStream,
    SlotState,
)
from memq.broker.partition.staged_batch import StagedBatch
from memq.errors import MemqError
from memq.format.pointer import Location
from memq.protocol.frames import AckLevel, AckPosition
from tests.unit.peers import append_to

WORTH = 1000 // WORTH_SHARE
LIMITS = RingLimits(
    slots=4, batch_bytes_max=1000, batch_blocks_max=8, batch_age_s_max=0.5, seal_when_idle=True, uploads_in_flight_max=2
)

LARGE = replace(LIMITS, batch_bytes_max=8_000_000, batch_blocks_max=4_096)


class Nobody:
    """A sink that takes everything."""

    def send_ack(
        self, stream: Stream, level: int, next_sequence: int, epoch: int, positions: Sequence[AckPosition] = ()
    ) -> None:
        """Take it."""

    def send_throttle(self, stream: Stream, first: int, error: MemqError) -> None:
        raise AssertionError("nothing is held back here")

    def send_redirect(self, stream: Stream, address: str) -> None:
        """Take it."""


def stream_of(producer_id: int = 1, acks: int = AckLevel.ALL) -> RingStream:
    """A stream of a producer, without a partition behind it."""
    return RingStream(1, Nobody(), cast(Partition, None), ProducerState(producer_id), acks, 0)


def slab() -> Slab:
    """One slab of a small pool."""
    leased = SlabPool(1 << 20, 1 << 16).lease(1 << 16)
    assert leased is not None
    return leased


@pytest.mark.parametrize(("old", "new"), list(product(SlotState, SlotState)))
def test_slots_change_state_only_as_the_table_allows(old: SlotState, new: SlotState) -> None:
    slot = BatchSlot(0, 0.0)
    slot.state = old
    if new in SUCCESSORS[old]:
        slot.become(new)
        assert slot.state is new
    else:
        with pytest.raises(AssertionError):
            slot.become(new)


def test_every_state_but_free_leads_to_free() -> None:
    for state in SlotState:
        reached, todo = {state}, [state]
        while todo:
            for after in SUCCESSORS[todo.pop()] - reached:
                reached.add(after)
                todo.append(after)
        assert SlotState.FREE in reached


def test_a_batch_is_sealed_by_bytes_and_not_one_block_later() -> None:
    ring, stream, memory = Ring(LIMITS), stream_of(), slab()
    assert append_to(ring, stream, 0, 1, memory, 0, 999, 0.0)
    assert len(ring.batches) == 0
    assert append_to(ring, stream, 1, 1, memory, 999, 1000, 0.0)
    assert ring.open is None
    assert [batch.bytes for batch in ring.batches] == [1000]


def test_a_staged_batch_comes_behind_the_blocks_that_came_before_it() -> None:
    ring, stream, memory = Ring(LIMITS), stream_of(), slab()
    append_to(ring, stream, 0, 1, memory, 0, 10, 0.0)
    location = Location(store="main", key="k", offset=0, length=70)
    staged = StagedBatch(location, (), 5, 70, 0, 0, (0, 0), 0, 0, (), lambda error: None, 1e9)
    assert ring.add_staged(staged, 1.0, 1_000)
    assert ring.open is None
    append_to(ring, stream, 1, 1, memory, 10, 20, 1.0)
    assert [(slot.number, slot.records) for slot in ring] == [(0, 1), (1, 5), (2, 1)]
    assert ring.plan(1.0).publish is None, "the first batch is not stored"
    assert not any(slot.staged for slot in ring.plan(2.0).uploads)
    while ring.add_staged(staged, 1.0, 1_000):
        pass
    assert len(ring) == LIMITS.slots


def test_a_run_ends_where_sequences_are_missing() -> None:
    """Burned sequences lie between: a run over them would say that the batch holds them."""
    ring, stream, memory = Ring(LIMITS), stream_of(), slab()
    append_to(ring, stream, 0, 10, memory, 0, 10, 0.0)
    append_to(ring, stream, 10, 5, memory, 10, 20, 0.0)
    append_to(ring, stream, 20, 5, memory, 20, 30, 0.0)
    slot = ring.open
    assert slot is not None
    assert [(run.first, run.next) for run in slot.runs] == [(0, 15), (20, 25)]
    assert slot.acks() == {stream: 25}
    assert ring.find(1, 15, 20) is None


def test_a_batch_is_sealed_by_blocks() -> None:
    ring, stream, memory = Ring(LIMITS), stream_of(), slab()
    for number in range(LIMITS.batch_blocks_max):
        assert append_to(ring, stream, number, 1, memory, number, number + 1, 0.0)
    assert ring.open is None


def test_a_free_slot_takes_what_pays_for_its_upload_and_a_busy_ring_seals_by_age() -> None:
    ring, stream, memory = Ring(LIMITS), stream_of(), slab()
    append_to(ring, stream, 0, 1, memory, 0, 10, 0.0)
    assert [slot.number for slot in ring.plan(GAP_S_MAX).uploads] == [0]  # nothing is on its way
    append_to(ring, stream, 1, 1, memory, 0, WORTH - 1, 0.0)
    assert ring.plan(0.0).wake_s == 0.5  # one is, and this one is not worth another upload next to it
    append_to(ring, stream, 2, 1, memory, 0, 1, 0.0)
    assert [slot.number for slot in ring.plan(0.01).uploads] == [1]
    append_to(ring, stream, 3, 1, memory, 0, WORTH, 1.0)
    assert ring.plan(1.2).wake_s == 1.5  # no upload slot is free: the open batch grows
    assert ring.open is not None
    assert ring.plan(1.5).uploads == []
    assert ring.open is None  # came of age


def test_batch_that_waits_for_another_is_uploaded_after_its_publish() -> None:
    ring, stream, memory = Ring(LIMITS), stream_of(), slab()
    append_to(ring, stream, 0, 1, memory, 0, 10, 0.0)
    (first,) = ring.plan(GAP_S_MAX).uploads
    append_to(ring, stream, 1, 1, memory, 0, 10, GAP_S_MAX)
    ring.stored(first, 0.1)
    assert ring.plan(0.1).uploads == []
    ring.published(1.0)
    assert [slot.number for slot in ring.plan(0.1).uploads] == [1]


def test_an_idle_ring_waits_a_moment_for_blocks_that_are_coming_in() -> None:
    ring, stream, memory = Ring(LIMITS), stream_of(), slab()
    append_to(ring, stream, 0, 1, memory, 0, 10, 0.0)
    assert ring.plan(0.0, growing=True).uploads == []
    assert ring.plan(GROUP_S_MAX * 0.99, growing=True).uploads == []
    append_to(ring, stream, 1, 1, memory, 10, 20, 0.001)
    slot = ring.open
    assert slot is not None
    assert ring.plan(0.001 + GAP_S_MAX).uploads == [slot]
    assert len(slot.extents) == 2
    ring.stored(slot, 0.5)
    ring.published(1.0)
    append_to(ring, stream, 2, 1, memory, 0, 10, 1.0)
    assert ring.plan(1.0, growing=True).uploads == []
    assert ring.plan(1.0 + GROUP_S_MAX / 2, growing=True).uploads == []
    assert ring.plan(1.0 + GAP_S_MAX, growing=True).uploads != []  # however many more come


def test_blocks_that_keep_coming_hold_an_idle_ring_up_for_no_longer_than_a_group() -> None:
    ring = Ring(LIMITS)
    append_to(ring, stream_of(), 0, 1, slab(), 0, 10, 0.0)
    assert len(ring.plan(GROUP_S_MAX, growing=True).uploads) == 1


def fill(ring: Ring, stream: Stream, size: int, now_s: float) -> None:
    """Add one block of `size` bytes."""
    assert append_to(ring, stream, round(now_s * 1e6), 1, slab(), 0, size, now_s)


def test_a_batch_that_fills_up_fast_waits_until_it_is_full() -> None:
    ring, stream, step_s, size = Ring(LARGE), stream_of(), GAP_S_MAX / 2, LARGE.batch_bytes_max // 5
    for number in range(4):
        fill(ring, stream, size, number * step_s)
        plan = ring.plan(number * step_s)
        assert plan.uploads == []
        assert plan.wake_s == number * step_s + GAP_S_MAX, "when nothing more comes it goes"
    fill(ring, stream, size, 4 * step_s)
    assert [slot.bytes for slot in ring.plan(4 * step_s).uploads] == [5 * size]


def test_a_batch_that_fills_up_slowly_goes_at_once() -> None:
    ring, stream = Ring(LARGE), stream_of()
    fill(ring, stream, 10_000, 0.0)
    assert ring.plan(0.0).wake_s == 10_000 / FAST_BYTES_S
    assert len(ring.plan(10_000 / FAST_BYTES_S).uploads) == 1


def test_producers_that_fill_their_batches_keep_full_ones() -> None:
    ring, stream, full = Ring(LARGE), stream_of(), LARGE.batch_bytes_max
    fill(ring, stream, full, 0.0)
    (slot,) = ring.plan(0.0).uploads
    ring.stored(slot, 0.0)
    ring.published(GAP_S_MAX)
    fill(ring, stream, full // 4, GAP_S_MAX)
    assert ring.plan(GAP_S_MAX).uploads == [], "none of them waited in vain"


def test_no_batch_waits_for_long_however_fast_it_fills_up() -> None:
    ring, stream, size = Ring(LARGE), stream_of(), int(FAST_BYTES_S * GAP_S_MAX)
    for number in range(8):
        fill(ring, stream, size, number * GAP_S_MAX * 0.99)
    assert ring.plan(FAST_S_MAX * 0.99).uploads == []
    assert [len(slot.extents) for slot in ring.plan(FAST_S_MAX).uploads] == [8]


BEGIN_S = 100.0


def waited_in_vain(ring: Ring, stream: Stream, burst: int) -> BatchSlot:
    """Give a ring a batch that came fast, and then no more: return it when it went."""
    fill(ring, stream, burst, BEGIN_S)
    assert ring.plan(BEGIN_S + GAP_S_MAX / 2).uploads == []
    (slot,) = ring.plan(BEGIN_S + GAP_S_MAX).uploads
    return slot


@pytest.mark.parametrize(
    ("burst", "wanted"), [(6_000_000, 1_500_000), (2_000_000, LARGE.batch_bytes_max // WORTH_SHARE)]
)
def test_producers_that_wait_for_acks_get_a_quarter_of_what_they_send_at_once(burst: int, wanted: float) -> None:
    """A quarter of it, but at least what is worth an upload; what suffices grows again."""
    ring, stream, now_s = Ring(LARGE), stream_of(), BEGIN_S + 1
    ring.stored(waited_in_vain(ring, stream, burst), BEGIN_S)
    ring.published(now_s)
    for _ in range(3):
        fill(ring, stream, math.ceil(wanted) - 1, now_s)
        assert ring.plan(now_s).uploads == []
        fill(ring, stream, 1, now_s)
        (slot,) = ring.plan(now_s).uploads
        ring.stored(slot, now_s)
        ring.published(now_s)
        wanted *= GOAL_GROWS  # it suffices


def test_producers_that_send_within_a_gap_after_their_acks_waited_for_them() -> None:
    ring, stream = Ring(LARGE), stream_of()
    fill(ring, stream, 6_000_000, 0.0)
    (slot,) = ring.plan(GAP_S_MAX).uploads
    ring.stored(slot, GAP_S_MAX)
    ring.published(GAP_S_MAX)
    fill(ring, stream, 1_500_000, 2 * GAP_S_MAX)
    assert len(ring.plan(2 * GAP_S_MAX).uploads) == 1


@pytest.mark.parametrize("acked", [False, True])
def test_producers_that_only_paused_still_get_full_batches(acked: bool) -> None:
    """They continue before they are acked, or long after that."""
    ring, stream, burst = Ring(LARGE), stream_of(), LARGE.batch_bytes_max // 2
    slot = waited_in_vain(ring, stream, burst)
    if acked:
        ring.stored(slot, BEGIN_S)
        ring.published(BEGIN_S + 0.5)
    fill(ring, stream, burst + 1, BEGIN_S + 1)
    assert ring.plan(BEGIN_S + 1).uploads == []


def test_a_full_ring_takes_nothing() -> None:
    ring, stream, memory = Ring(LIMITS), stream_of(), slab()
    for number in range(LIMITS.slots):
        assert append_to(ring, stream, number, 1, memory, 0, 1000, 0.0)
    assert ring.room() == (0, 0)
    assert not append_to(ring, stream, 9, 1, memory, 0, 10, 0.0)
    assert len(ring) == LIMITS.slots


@pytest.mark.parametrize("sealed", range(LIMITS.slots))
def test_the_batch_in_the_last_free_slot_grows_instead_of_being_sealed_by_age(sealed: int) -> None:
    ring, stream, memory = Ring(replace(LIMITS, seal_when_idle=False)), stream_of(), slab()
    for number in range(sealed):
        assert append_to(ring, stream, number, 1, memory, 0, 1000, 0.0)
    append_to(ring, stream, sealed, 1, memory, 0, 10, 0.0)
    due_s = LIMITS.batch_age_s_max
    assert ring.plan(due_s - 0.1).wake_s == due_s
    assert ring.plan(due_s).wake_s is None, "it is sealed, or waits for a free slot and not for a time"
    assert (ring.open is not None) == (sealed == LIMITS.slots - 1)


def test_a_batch_holds_one_reference_on_each_slab() -> None:
    ring, stream = Ring(LIMITS), stream_of()
    one, two = slab(), slab()
    for number, memory in enumerate((one, one, two, two, two)):
        append_to(ring, stream, number, 1, memory, 0, 10, 0.0)
    assert ring.open is not None
    assert ring.open.drop_blocks() == [one, two]
    assert (one.references, two.references) == (2, 2), "the pool's lease is the other one"


@pytest.mark.parametrize(
    ("claim", "some"),
    [
        ((1, 10, 20), True),
        ((1, 19, 30), True),
        ((1, 20, 30), False),
        ((1, 0, 10), False),
        ((1, 0, 11), True),
        ((2, 10, 20), False),
    ],
)
def test_sequences_overlap_with_those_of_the_same_producer_alone(claim: tuple[int, int, int], some: bool) -> None:
    ring = Ring(LIMITS)
    append_to(ring, stream_of(1), 10, 10, slab(), 0, 10, 0.0)
    assert ring.overlaps(*claim) is some


def test_only_the_head_is_published_and_one_at_a_time() -> None:
    ring, stream, memory = Ring(LIMITS), stream_of(), slab()
    append_to(ring, stream, 0, 1, memory, 0, 1000, 0.0)
    append_to(ring, stream, 1, 1, memory, 0, 1000, 0.0)
    first, second = ring.plan(0.0).uploads
    ring.stored(second, 0.0)
    assert ring.plan(0.0).publish is None
    ring.stored(first, 0.0)
    assert ring.plan(0.0, may_publish=False).publish is None
    assert ring.plan(0.0).publish is first
    assert ring.plan(0.0).publish is None  # one is under way
    assert ring.published(1.0) is first
    assert ring.plan(0.0).publish is second


def test_acks_cover_duplicates_only_with_the_batch_that_they_wait_for() -> None:
    ring, memory = Ring(LIMITS), slab()
    stream, other, one = stream_of(1), stream_of(1), stream_of(2, AckLevel.ONE)
    append_to(ring, stream, 0, 5, memory, 0, 10, 0.0)
    append_to(ring, one, 0, 7, memory, 0, 10, 0.0)
    slot = ring.find(1, 0, 5)
    assert slot is ring.open
    assert slot is not None
    slot.later_acks.append((other, 5, list))
    assert slot.acks() == {stream: 5, other: 5}
    slot.later_acks += [(other, 3, list), (stream, 4, list)]
    assert slot.acks() == {stream: 5, other: 5}, "an ack covers all below it"
    assert ring.find(1, 0, 6) is None


def test_giving_up_empties_the_ring_from_the_head_on() -> None:
    ring, stream, memory = Ring(LIMITS), stream_of(), slab()
    append_to(ring, stream, 0, 1, memory, 0, 1000, 0.0)
    append_to(ring, stream, 1, 1, memory, 0, 10, 0.0)
    ring.plan(0.0)
    assert [slot.number for slot in ring.give_up()] == [0, 1]
    assert len(ring) == 0


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 80))
def test_whatever_happens_blocks_are_published_once_and_in_order(seed: int, steps: int) -> None:
    """Random appends, uploads that end in any order, and publishes: every block comes out once, in order."""
    draw, ring, stream, memory = random.Random(seed), Ring(LIMITS), stream_of(), slab()
    storing: list[BatchSlot] = []
    taken, out, head = 0, 0, None
    for step in range(steps):
        now = step * 0.1
        if draw.random() < 0.5 and append_to(ring, stream, taken, 1, memory, 0, draw.choice((10, 400, 1000)), now):
            taken += 1
        if storing and draw.random() < 0.5:
            ring.stored(storing.pop(draw.randrange(len(storing))), now)
        plan = ring.plan(now)
        storing += plan.uploads
        assert len(storing) <= LIMITS.uploads_in_flight_max
        assert len(ring) <= LIMITS.slots + 1
        if plan.publish is not None:
            assert head is None
            head = plan.publish
        if head is not None and draw.random() < 0.7:
            assert ring.published(1.0) is head
            assert [run.first for run in head.runs] == [out]
            out = head.runs[-1].next
            head = None
    assert out <= taken
    assert out + sum(slot.records for slot in ring) == taken


# ---- altered limits ------------------------------------------------------------------------------


def test_altered_limits_hold_for_the_open_batch() -> None:
    ring, stream, memory = Ring(LARGE), stream_of(), slab()
    append_to(ring, stream, 0, 1, memory, 0, 999, 0.0)
    ring.alter(replace(LARGE, batch_bytes_max=1_000))
    assert (len(ring.batches), ring.room()) == (0, (4_095, 1))
    append_to(ring, stream, 1, 1, memory, 999, 1_000, 0.0)
    assert len(ring.batches) == 1
    for altered in (replace(LARGE, batch_bytes_max=10), replace(LARGE, batch_blocks_max=1)):
        ring = Ring(LARGE)
        append_to(ring, stream, 0, 1, memory, 0, 10, 0.0)
        ring.alter(altered)
        assert (ring.open, [batch.bytes for batch in ring.batches]) == (None, [10]), "it had reached the new limit"


def test_an_altered_age_and_an_altered_idle_rule_hold_for_the_open_batch() -> None:
    slow = replace(LIMITS, seal_when_idle=False, batch_age_s_max=600.0)
    ring, stream, memory = Ring(slow), stream_of(), slab()
    append_to(ring, stream, 0, 1, memory, 0, 10, 0.0)
    assert ring.plan(1.0).wake_s == 600.0
    ring.alter(replace(slow, batch_age_s_max=2.0))
    assert ring.plan(1.0).wake_s == 2.0
    ring.alter(replace(slow, seal_when_idle=True))
    assert [slot.number for slot in ring.plan(1.0).uploads] == [0]


def test_more_uploads_begin_at_once_and_fewer_when_some_have_ended() -> None:
    ring, stream, memory = Ring(LIMITS), stream_of(), slab()
    for number in range(4):
        append_to(ring, stream, number, 1, memory, 0, 1_000, 0.0)
    assert [slot.number for slot in ring.plan(0.0).uploads] == [0, 1]
    ring.alter(replace(LIMITS, uploads_in_flight_max=3))
    assert [slot.number for slot in ring.plan(0.0).uploads] == [2]
    ring.alter(replace(LIMITS, uploads_in_flight_max=1))
    for slot in list(ring.batches)[:3]:
        assert ring.plan(0.0).uploads == []
        ring.stored(slot, 0.0)
    assert [slot.number for slot in ring.plan(0.0).uploads] == [3]


def test_a_ring_with_fewer_slots_than_it_uses_takes_nothing_until_they_are_free() -> None:
    ring, stream, memory = Ring(LIMITS), stream_of(), slab()
    for number in range(3):
        append_to(ring, stream, number, 1, memory, 0, 1_000, 0.0)
    append_to(ring, stream, 3, 1, memory, 0, 10, 0.0)
    ring.alter(replace(LIMITS, slots=2))
    assert append_to(ring, stream, 4, 1, memory, 0, 10, 0.0), "the open batch has its slot already"
    ring.seal()
    for left in (4, 3, 2):
        assert len(ring) == left
        assert not append_to(ring, stream, 5, 1, memory, 0, 10, 0.0)
        slot = next(iter(ring.plan(0.0).uploads), ring.batches[0])
        if slot.state is SlotState.STORING:
            ring.stored(ring.batches[0], 0.0)
        ring.published(0.0)
    assert append_to(ring, stream, 5, 1, memory, 0, 10, 0.0)


def test_a_greater_batch_is_waited_for_at_once() -> None:
    small = replace(LARGE, batch_bytes_max=100_000)
    ring, stream, memory = Ring(small), stream_of(), slab()
    ring.alter(LARGE)
    append_to(ring, stream, 0, 1, memory, 0, 200_000, 0.0)
    assert ring.plan(0.001).wake_s == pytest.approx(200_000 / FAST_BYTES_S), "it was full before"


def test_positions_of_records_are_known_with_the_pointer_and_go_to_who_asks_for_them() -> None:
    ring, memory = Ring(LIMITS), slab()
    asks, silent = stream_of(1), stream_of(2)
    asks.positions = True
    for number, (stream, first, count) in enumerate([(asks, 10, 3), (silent, 0, 2), (asks, 13, 4), (asks, 17, 1)]):
        assert append_to(ring, stream, first, count, memory, 50 * number, 50 * number + 50, 0.0)
    slot = ring.open
    assert slot is not None
    assert slot.positions() == {}
    assert slot.positions_of(1, 0, 99) == []
    slot.pointer_offset = 7
    lie = [AckPosition(10, 13, 7, 0), AckPosition(13, 18, 7, 5)]
    assert slot.positions() == {asks: lie}
    again = stream_of(1)
    slot.later_acks = [(again, 13, lambda: lie[:1]), (silent, 2, lambda: lie)]
    assert slot.positions() == {asks: lie}
    again.positions = True
    assert slot.positions() == {asks: lie, again: lie[:1]}
    found = [
        slot.positions_of(1, first, next_)
        for first, next_ in ((10, 11), (12, 13), (13, 14), (17, 18), (0, 10), (18, 20))
    ]
    assert found == [lie[:1], lie[:1], lie[1:], lie[1:], [], []]
    assert slot.positions_of(1, 12, 14) == lie
    assert slot.positions_of(2, 0, 2) == [AckPosition(0, 2, 7, 3)]
