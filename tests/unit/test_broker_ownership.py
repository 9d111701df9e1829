"""An owner's knowledge from the queue: state, totals, proofs, late pointers, higher epochs."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from memq.broker.ingest.slabs import Slab
from memq.broker.partition.ownership import ADOPTED_MAX, SUCCESSORS, Ownership, Phase
from memq.broker.partition.ring import Ring, RingLimits, RingStream
from memq.broker.spool.unpublished_blocks import UnpublishedBlock, UnpublishedBlocks
from memq.format.blocks.header import parse_header
from memq.format.pointer import NamedProducer, Pointer, ProducerRanges
from memq.format.ranges import RangeSet
from memq.protocol.frames import AckLevel
from memq.topic import Topic, Totals, equal_slots
from tests.brokers import block_of
from tests.unit.peers import append_to

TOPIC_ID = "0" * 31 + "1"


def owner(epoch: int) -> Ownership:
    """An owner that opened at monotonic 100 s, wall clock 1,000,000 ms, with S = 3 s."""
    own = Ownership(
        partition=0,
        epoch=epoch,
        opened_s=100.0,
        opened_wall_ms=1_000_000,
        stale_publish_s=3.0,
        dedup_window_ms=60_000,
    )
    own.proof_s = own.opened_s
    return own


def pointer(kind: str, epoch: int, batch: int = 0, first: int = 0, next_: int = 0, before: int = 0) -> Pointer:
    """A pointer of producer 7 with sequences `first` to `next_`, ten bytes each, `before` records before it."""
    ranges = (ProducerRanges(7, ((first, next_),)),) if next_ else ()
    return Pointer(
        kind=kind,
        cluster="c",
        topic="t",
        topic_id=TOPIC_ID,
        partition=0,
        epoch=epoch,
        batch_sequence=batch,
        records=next_ - first,
        stored_bytes=10 * (next_ - first),
        producers=ranges,
        totals=Totals(before, 10 * before),
    )


@pytest.mark.parametrize("old", list(Phase))
@pytest.mark.parametrize("new", list(Phase))
def test_phases_change_only_as_the_table_allows(old: Phase, new: Phase) -> None:
    own = owner(1)
    own.phase = old
    if new in SUCCESSORS[old]:
        own.become(new)
    else:
        with pytest.raises(AssertionError):
            own.become(new)


def test_the_tail_rebuilds_producers_and_totals() -> None:
    own = owner(3)
    own.meet(0, 1, pointer("opened", 1))
    own.meet(1, 2, pointer("data", 1, 0, 0, 10))
    own.meet(2, 3, pointer("data", 1, 1, 10, 30, before=10))
    own.state()
    assert own.totals == Totals(30, 300)
    assert own.producer(7).queued.covers(0, 30)
    assert own.producer(7).next == 30
    assert own.highest_epoch == 1


def test_late_pointers_before_the_opening_are_adopted_once() -> None:
    own = owner(3)
    own.meet(0, 1, pointer("data", 1, 0, 0, 10))
    own.meet(1, 2, pointer("opened", 2, before=10))
    own.meet(2, 3, pointer("data", 1, 1, 10, 15, before=10))  # late: a lower epoch behind a higher one
    own.state()
    adopted = own.next_adopted()
    assert [entry.offset for entry in adopted] == [2]
    assert own.totals_with(adopted) == Totals(15, 150)
    stated = Pointer(
        kind="opened",
        cluster="c",
        topic="t",
        topic_id=TOPIC_ID,
        partition=0,
        epoch=3,
        totals=own.totals_with(adopted),
        adopted=adopted,
    )
    own.published(3, stated, 4)
    assert own.totals == Totals(15, 150)
    assert own.next_adopted() == ()
    reader = owner(4)  # the next owner reads the same totals out of the queue
    for offset, found in enumerate(
        (
            pointer("data", 1, 0, 0, 10),
            pointer("opened", 2, before=10),
            pointer("data", 1, 1, 10, 15, before=10),
            stated,
        )
    ):
        reader.meet(offset, offset, found)
    reader.state()
    assert reader.totals == Totals(15, 150)
    assert reader.next_adopted() == ()


def test_pointers_between_the_own_ones_are_joined_and_adopted() -> None:
    own = owner(2)
    own.state()
    own.published(0, pointer("opened", 2), 1)
    own.become(Phase.OWNING)
    own.published(2, pointer("data", 2, 0, 0, 5), 2)  # offset 1 is somebody else's
    assert own.unread
    own.meet(1, 1, pointer("data", 1, 4, 5, 8))
    own.meet(2, 2, pointer("data", 2, 0, 0, 5))  # the own one is not counted twice
    assert own.read_to == 3
    assert [entry.offset for entry in own.next_adopted()] == [1]
    assert own.totals == Totals(5, 50)
    assert own.producer(7).queued.covers(0, 8)


def test_an_own_try_that_landed_is_recognised_and_counted_once() -> None:
    own = owner(2)
    own.state()
    own.published(0, pointer("opened", 2), 1)
    own.meet(1, 1, pointer("data", 2, 0, 0, 5))
    assert list(own.landed) == [0]
    own.meet(2, 1, pointer("data", 2, 0, 0, 5))  # and the try before that one landed as well
    own.take_landed(0)
    assert own.totals == Totals(5, 50)
    assert [entry.offset for entry in own.next_adopted()] == [2]


def test_a_landed_try_has_counted_what_it_adopted() -> None:
    own = owner(2)
    own.state()
    own.meet(0, 1, pointer("data", 1, 7, 0, 3))  # a late one
    adopted = own.next_adopted()
    tried = msgspec.structs.replace(pointer("data", 2, 0, 3, 5), adopted=adopted, totals=own.totals_with(adopted))
    own.meet(1, 1, tried)  # its answer was lost, and it was there
    own.take_landed(0)
    assert own.next_adopted() == ()
    assert own.totals == Totals(5, 50)


def test_a_try_that_lands_behind_its_repetition_is_late_for_the_next_owner() -> None:
    own = owner(3)
    own.meet(0, 1, pointer("data", 1, 0, 0, 10))
    own.meet(1, 2, pointer("data", 1, 1, 10, 30, before=10))
    own.meet(2, 3, pointer("data", 1, 0, 0, 10))
    own.state()
    assert own.totals == Totals(30, 300)
    assert [entry.offset for entry in own.next_adopted()] == [2]


def test_a_higher_epoch_fences_whatever_the_phase() -> None:
    for phase in (Phase.OPENING, Phase.OWNING):
        own = owner(2)
        own.phase = phase
        own.meet(0, 1, pointer("opened", 3))
        assert own.phase is Phase.FENCED
        own.meet(1, 1, pointer("opened", 4))
        assert own.highest_epoch == 4


def test_entries_of_other_write_partitions_only_move_the_reading_on() -> None:
    own = owner(2)
    other = Pointer(kind="opened", cluster="c", topic="t", topic_id=TOPIC_ID, partition=1, epoch=9)
    own.meet(0, 1, other)
    assert (own.read_to, own.phase, own.highest_epoch) == (1, Phase.OPENING, 0)


def test_the_queue_time_is_the_moment_of_the_last_proof() -> None:
    own = owner(1)
    assert own.queue_time_ms() == 1_000_000
    own.prove(101.5)
    assert own.queue_time_ms() == 1_001_500
    own.prove(101.0)  # an older proof changes nothing
    assert own.queue_time_ms() == 1_001_500
    assert not own.needs_proof(102.5)
    assert own.needs_proof(102.6)


@pytest.mark.parametrize("opening", [True, False])
def test_an_owner_counts_all_late_pointers_at_once_in_a_bounded_list(opening: bool) -> None:
    own, late = owner(2), ADOPTED_MAX + 10
    if opening:
        own.meet(0, 1, pointer("opened", 2))  # a batch of epoch 1 after it is late
    else:
        own.state()
    for offset in range(1, late + 1):
        own.meet(offset, 1, pointer("data", 1, offset, offset, offset + 1))
    if opening:
        own.state()
    adopted = own.next_adopted()
    assert [entry.offset for entry in adopted] == list(range(1, ADOPTED_MAX + 1))
    assert [entry.records for entry in adopted] == [1] * (ADOPTED_MAX - 1) + [11]
    assert own.totals_with(adopted) == Totals(late, 10 * late)
    data = pointer("data", 2, 0, late, late + 1)
    own.published(own.read_to, msgspec.structs.replace(data, adopted=adopted, totals=own.totals_with(adopted)), 1)
    assert (own.totals, own.next_adopted()) == (Totals(late + 1, 10 * late + 10), ())


def test_an_owner_counts_late_pointers_that_it_met_after_a_try_that_landed() -> None:
    own, late = owner(2), ADOPTED_MAX + 10
    own.state()
    for offset in range(ADOPTED_MAX):
        own.meet(offset, 1, pointer("data", 1, offset, offset, offset + 1))
    tried = pointer("data", 2, 0, late, late + 1, before=ADOPTED_MAX)
    tried = msgspec.structs.replace(tried, adopted=own.next_adopted())
    for offset in range(ADOPTED_MAX, late):
        own.meet(offset, 1, pointer("data", 1, offset, offset, offset + 1))
    own.meet(late, 1, tried)
    own.take_landed(0)
    (last,) = own.next_adopted()
    assert last.offset == ADOPTED_MAX - 1
    assert own.totals_with([last]) == Totals(late + 1, 10 * late + 10)


def test_silent_producers_are_forgotten_and_those_with_a_stream_are_not() -> None:
    own = owner(2)
    own.meet(0, 1_000, pointer("data", 1, 0, 0, 5))
    own.producer(8).streams = 1
    own.forget(61_000)
    assert sorted(own.producers) == [7, 8]
    own.forget(61_001)
    assert sorted(own.producers) == [8]


def test_a_producer_with_blocks_in_the_ring_or_with_a_name_is_not_forgotten() -> None:
    own = owner(2)
    for producer in (7, 8, 9):
        own.join([ProducerRanges(producer, ((0, 1),))], 1_000)
    own.learn([NamedProducer(producer=8, epoch=1, last_sequence=1)], 1_000)
    own.forget(90_000, busy={9})
    assert sorted(own.producers) == [8, 9]
    own.forget(90_000, busy={8}, retention_ms=10_000)
    assert sorted(own.producers) == [8], "the name is in use"
    own.forget(11_000, retention_ms=10_000)
    assert len(own.named) == 1
    own.forget(11_001, retention_ms=10_000)
    assert len(own.named) == 0


def test_a_producer_was_last_seen_with_its_youngest_pointer() -> None:
    own = owner(2)
    own.join([ProducerRanges(7, ((0, 1),))], 5_000)
    own.join([ProducerRanges(7, ((1, 2),))], 4_000)
    assert own.producer(7).seen_ms == 5_000


def test_an_entry_is_taken_once() -> None:
    own = owner(2)
    own.state()
    for _ in range(2):
        own.meet(0, 1, pointer("data", 1, 0, 0, 5))
    assert [entry.offset for entry in own.next_adopted()] == [0]


def test_no_end_lies_before_an_own_pointer_that_was_not_met() -> None:
    own = owner(2)
    own.state()
    assert own.known_end() == 0
    own.published(0, pointer("opened", 2), 1)
    assert (own.known_end(), own.unread) == (1, False), "nothing can lie before it"
    own.published(3, pointer("data", 2, 0, 0, 5), 2)
    own.published(5, pointer("data", 2, 1, 5, 6), 2)
    assert own.known_end() == 6
    for offset in (1, 2):
        own.meet(offset, 1, pointer("data", 1, offset, 10 * offset, 10 * offset + 1))
    own.meet(3, 2, pointer("data", 2, 0, 0, 5))
    own.meet(4, 2, pointer("opened", 1))
    own.meet(5, 2, pointer("data", 2, 1, 5, 6))
    assert (own.known_end(), own.read_to) == (6, 6)
    own.meet(6, 2, pointer("opened", 1))
    assert own.known_end() == 7, "the own pointers were met"


def test_a_pointer_that_went_below_what_was_read_leaves_nothing_to_read() -> None:
    own = owner(2)
    own.state()
    own.meet(0, 1, pointer("opened", 1))
    own.published(0, pointer("data", 2, 0, 0, 5), 2)
    assert (own.unread, own.known_end(), own.read_to) == (False, 1, 1)
    assert own.totals == Totals(5, 50)


def test_opened_is_said_again_when_half_the_window_is_over_and_there_are_names() -> None:
    own = owner(2)
    own.state()
    own.published(0, pointer("opened", 2), own.queue_time_ms())
    own.prove(own.opened_s + 60)
    assert (own.must_republish_opened(), own.named_since_ms()) == (False, 0)
    own.learn([NamedProducer(producer=8, epoch=1, last_sequence=1)], 1_000)
    assert (own.must_republish_opened(), own.named_since_ms()) == (True, 1_000_000)
    own.published(1, pointer("opened", 2), own.queue_time_ms() - 30_000)
    assert not own.must_republish_opened()
    own.published(2, pointer("data", 2, 0, 0, 1), own.queue_time_ms())
    own.prove(own.proof_s + 0.001)
    assert own.must_republish_opened()


def test_a_tail_that_is_read_from_further_back_begins_with_nothing() -> None:
    own = owner(3)
    own.meet(5, 1, pointer("data", 1, 0, 0, 10))
    own.learn([NamedProducer(producer=8, epoch=1, last_sequence=1)], 1_000)
    own.restart(2)
    assert (own.read_to, list(own.producers), len(own.named)) == (2, [], 0)
    own.meet(2, 1, pointer("data", 1, 0, 0, 3))
    own.state()
    assert own.totals == Totals(3, 30)


def test_an_own_batch_that_landed_once_more_is_counted_as_the_copy_that_it_is() -> None:
    """It was counted when it was published: taken for an own try, its copy would be missing in all later totals."""
    own = owner(2)
    own.state()
    batch = pointer("data", 2, 0, 0, 10)
    own.published(0, batch, 1)
    own.meet(1, 2, batch)
    assert not own.landed
    assert [entry.offset for entry in own.next_adopted()] == [1]
    assert own.totals_with(own.next_adopted()) == Totals(20, 200)


def test_a_late_pointer_does_not_move_the_end_of_its_producer_back() -> None:
    """A block that begins below that end is looked up: else a copy of what the queue holds would be taken as new."""
    own = owner(2)
    own.meet(0, 1, pointer("data", 1, 0, 10, 20))
    own.meet(1, 2, pointer("data", 1, 1, 0, 5))
    assert own.producer(7).next == 20
    assert list(own.producer(7).queued) == [(0, 5), (10, 20)]


def test_a_lost_epoch_holds_what_it_acked_with_1_until_no_publish_of_it_can_land() -> None:
    """Of acks=all nothing is held; what a batch promised for a copy is, whoever sent it."""
    topic = Topic(name="t", id=TOPIC_ID, created_ms=1, partitions=equal_slots(1))
    own, slab, ring = owner(4), Slab(1 << 16), Ring(RingLimits(4, 1 << 20, 100, 1.0, True, 2))
    own.read_to, own.handed_over_s = 9, 111.0
    at, released = 0, list[Slab]()
    for producer, acks in ((7, AckLevel.ONE), (8, AckLevel.ALL), (9, AckLevel.ALL)):
        stream = RingStream(1, cast(Any, None), cast(Any, None), own.producer(producer), acks, 0)
        for first in range(2):
            block = block_of(topic, first, [b"v"], producer=producer)
            slab.view[at : at + len(block)] = block
            append_to(ring, stream, first, 1, slab, at, at + len(block), 0.0)
            at += len(block)
    assert ring.open is not None
    ring.open.promised.append((9, 1, 2))
    held = UnpublishedBlocks.of_epoch(topic, 3, own, list(ring), released.append)
    assert [(block.producer_id, block.first) for block in held.blocks] == [(7, 0), (7, 1), (9, 1)]
    assert (held.epoch, held.read_to, held.settled_s, held.partition) == (4, 9, 114.0, 3)
    assert held.describe()[1] == (
        "topic 't' partition 3, of a lost epoch: producer 0000000000000007 sequences 1 to 1, acks=one"
    )
    references = slab.references
    held.release(next(iter(held.blocks)))
    assert (len(held), released, references) == (2, [slab], 4), "one of the ring, and one of each block"


def test_a_held_block_is_known_by_what_the_lost_epoch_knew_and_what_is_met_since() -> None:
    topic = Topic(name="t", id=TOPIC_ID, created_ms=1, partitions=equal_slots(1))
    slab, block = Slab(1 << 16), block_of(topic, 3, [b"a", b"b"], producer=7)
    slab.view[: len(block)] = block
    queued = RangeSet()
    queued.add(3, 4)
    held = UnpublishedBlocks(topic, 0, 5, 0.0, lambda _: None)
    held.add(UnpublishedBlock(parse_header(slab.view, 0), slab, 0, len(block)), queued)
    held.meet(4, pointer("data", 1, 0, 4, 5))
    held.meet(5, msgspec.structs.replace(pointer("data", 1, 0, 4, 5), partition=1))
    held.meet(6, pointer("opened", 1))
    held.meet(7, None)
    assert (held.queued(), held.read_to) == ([], 8)
    held.meet(8, pointer("data", 1, 1, 4, 5))
    assert held.queued() == list(held.blocks)


def test_a_block_next_to_what_the_queue_holds_is_held() -> None:
    topic = Topic(name="t", id=TOPIC_ID, created_ms=1, partitions=equal_slots(1))
    slab, block = Slab(1 << 16), block_of(topic, 3, [b"v"], producer=7)
    slab.view[: len(block)] = block
    held = UnpublishedBlocks(topic, 0, 0, 0.0, lambda _: None)
    held.add(UnpublishedBlock(parse_header(slab.view, 0), slab, 0, len(block)))
    held.meet(0, pointer("data", 1, 0, 0, 3))
    assert held.queued() == []
    held.meet(1, pointer("data", 1, 1, 3, 4))
    assert held.queued() == list(held.blocks)
    assert held.read_to == 2
