"""Units of held records at their target: one batch, named by its pointer, and remembered for ever (H4)."""

from __future__ import annotations

from typing import Any, cast

import pytest

from memq.broker.ingest.slabs import Slab, SlabPool
from memq.broker.partition.append import BlockRun, ProducerState
from memq.broker.partition.batch import named_of
from memq.broker.partition.ownership import NamedProducers
from memq.broker.partition.ring import Ring, RingLimits, RingStream, SlotState, UnitNumber
from memq.format.pointer import NamedProducer
from memq.protocol.frames import AckLevel

SHARD = 77
LIMITS = RingLimits(
    slots=4, batch_bytes_max=1000, batch_blocks_max=8, batch_age_s_max=0.5, seal_when_idle=True, uploads_in_flight_max=2
)


def slab() -> Slab:
    leased = SlabPool(1 << 20, 1 << 16).lease(1 << 16)
    assert leased is not None
    return leased


def stream_of(producer_id: int) -> RingStream:
    nobody = cast(Any, None)
    return RingStream(1, nobody, nobody, ProducerState(producer_id), AckLevel.ALL, 0)


def runs(count: int, size: int) -> list[tuple[RingStream, BlockRun]]:
    memory = slab()
    return [(stream_of(number + 1), BlockRun([(memory, 0, size)], 0, 1, size)) for number in range(count)]


def extended(ring: Ring, count: int, size: int) -> None:
    for stream, run in runs(count, size):
        assert ring.extend(stream, run, 0.0)


@pytest.mark.parametrize(("count", "size"), [(3, 300), (6, 10), (20, 10), (1, 5_000), (4, 600)])
def test_a_unit_lies_in_one_batch(count: int, size: int) -> None:
    """Also one that is larger than a batch may be: limits may have been lowered since it was cut."""
    ring = Ring(LIMITS)
    extended(ring, 3, 50)
    assert ring.extend_unit(runs(count, size), UnitNumber(SHARD, 5, 9), 0.0)
    (slot,) = [slot for slot in ring if slot.units]
    assert (slot.units, slot.records) in [([UnitNumber(SHARD, 5, 9)], count), ([UnitNumber(SHARD, 5, 9)], count + 3)]
    assert ring.last_unit(SHARD) == 5
    assert ring.last_unit(SHARD + 1) == 0
    assert slot.bytes <= LIMITS.batch_bytes_max or slot.records == count
    full = slot.bytes >= LIMITS.batch_bytes_max or len(slot.extents) >= LIMITS.batch_blocks_max
    assert (slot.state is SlotState.SEALED) == full


def test_a_unit_is_refused_as_a_whole_by_a_full_ring() -> None:
    ring = Ring(LIMITS)
    for _ in range(LIMITS.slots - 1):
        extended(ring, 1, 1_000)
    extended(ring, 1, 900)
    assert not ring.extend_unit(runs(2, 100), UnitNumber(SHARD, 1), 0.0)
    assert ring.last_unit(SHARD) == 0
    assert sum(slot.records for slot in ring) == LIMITS.slots


def test_the_pointer_of_a_batch_names_the_last_unit_of_each_shard() -> None:
    ring = Ring(LIMITS)
    for shard, number in ((SHARD, 1), (SHARD + 1, 9), (SHARD, 2)):
        assert ring.extend_unit(runs(1, 10), UnitNumber(shard, number, 3 * number), 0.0)
    assert ring.open is not None
    assert named_of(ring.open) == (
        NamedProducer(producer=SHARD, epoch=0, last_sequence=2, records=6),
        NamedProducer(producer=SHARD + 1, epoch=0, last_sequence=9, records=27),
    )


def test_no_silence_makes_an_owner_forget_a_shard() -> None:
    names = NamedProducers()
    names.learn(NamedProducer(producer=SHARD, epoch=0, last_sequence=4, records=9), 1_000)
    names.learn(NamedProducer(producer=5, epoch=1, last_sequence=4), 1_000)
    names.learn(NamedProducer(producer=SHARD, epoch=0, last_sequence=3, records=8), 900)  # a late one
    names.forget(1_000_000)
    assert (names.last_unit(SHARD), names.last_unit(5), names.last_unit(6)) == (4, 0, 0)
    assert [(each.producer, each.records) for each in names.entries()] == [(SHARD, 9)]
    names.learn(NamedProducer(producer=SHARD, epoch=0, last_sequence=5, records=0), 1_100)  # of an earlier release
    assert [(each.last_sequence, each.records) for each in names.entries()] == [(5, 0)]
