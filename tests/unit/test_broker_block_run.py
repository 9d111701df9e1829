"""A run of blocks contains plainly valid blocks, up to its bounds, and ends before any other."""

from __future__ import annotations

from typing import Any, cast

from memq.broker.ingest.intake import sound_run
from memq.broker.ingest.slabs import Slab, SlabPool
from memq.broker.partition.append import BlockRun, ProducerState
from memq.broker.partition.ring import RingStream
from memq.limits import BLOCK_RECORDS_MAX, KIB, SEQUENCE_END
from memq.protocol.frames import AckLevel
from tests.brokers import PRODUCER, block_of, write_frame
from tests.unit.peers import TOPIC, HoldingPartition

SLAB = 64 * KIB


def frames(*blocks: bytes, sent_ms: int = 0) -> tuple[Slab, int]:
    """Return a slab with WRITE frames one after another, and where they end."""
    slab = SlabPool(SLAB, SLAB).lease(SLAB)
    assert slab is not None
    data = b"".join(write_frame(block, first_sent_ms=sent_ms) for block in blocks)
    slab.view[: len(data)] = data
    return slab, len(data)


def sound(
    slab: Slab,
    end: int,
    *,
    sequence: int = 0,
    known: int = 0,
    oldest_ms: float = 0,
    blocks: int = 9,
    size: int = SLAB,
    number: int = 1,
    producer: int = PRODUCER,
    epoch: int = 0,
) -> BlockRun:
    """Check them as those of a stream at `sequence`, whose producer is known up to `known`."""
    state = ProducerState(producer)
    state.next = known
    home = HoldingPartition().appender
    stream = RingStream(number, cast(Any, None), home, state, AckLevel.NONE, sequence, epoch)
    return sound_run(stream, slab, 0, end, oldest_ms=oldest_ms, blocks_max=blocks, bytes_max=size)


def test_a_run_takes_the_blocks_that_follow_on_each_other() -> None:
    blocks = [block_of(TOPIC, first, [b"a", b"b"]) for first in (0, 2, 6)]
    slab, end = frames(*blocks)
    run = sound(slab, end)
    size = len(blocks[0])
    extents = [(slab, number * (16 + size) + 16, (number + 1) * (16 + size)) for number in range(2)]
    assert run == BlockRun(extents, 0, 4, 2 * size), "sequences are missing before the third"
    assert sound(slab, end - 1, sequence=6).extents == []
    assert len(sound(slab, 2 * (16 + size) - 1).extents) == 1, "the second is only half there"


def test_a_run_ends_at_its_bounds() -> None:
    slab, end = frames(*(block_of(TOPIC, first, [b"a"]) for first in range(4)))
    frame = end // 4
    assert [len(sound(slab, end, blocks=count).extents) for count in (0, 1, 3, 4, 5)] == [0, 1, 3, 4, 4]
    sizes = (1, frame, frame + 1, 2 * frame, 2 * frame + 1)
    assert [len(sound(slab, end, size=size).extents) for size in sizes] == [1, 1, 2, 2, 3]


def test_a_run_takes_nothing_that_was_sent_before_or_too_long_ago() -> None:
    slab, end = frames(block_of(TOPIC, 3, [b"a"]), sent_ms=50)
    assert sound(slab, end, sequence=3, known=3, oldest_ms=50).next == 4
    assert sound(slab, end, sequence=3, known=4, oldest_ms=50) == BlockRun([], 3, 3, 0)
    assert sound(slab, end, sequence=3, oldest_ms=50.5) == BlockRun([], 3, 3, 0)


def test_the_last_sequences_of_all_are_judged_one_by_one() -> None:
    first_of_them = SEQUENCE_END - 65_536 * BLOCK_RECORDS_MAX
    for first, taken in ((first_of_them - 1, 1), (first_of_them, 0)):
        slab, end = frames(block_of(TOPIC, first, [b"a"]))
        assert len(sound(slab, end, sequence=first).extents) == taken


def test_a_run_ends_before_a_damaged_block() -> None:
    slab, end = frames(block_of(TOPIC, 0, [b"a"]))
    slab.view[end - 1] ^= 1
    assert sound(slab, end) == BlockRun([], 0, 0, 0)


def test_a_run_is_of_its_stream() -> None:
    slab, end = frames(block_of(TOPIC, 0, [b"a"]))
    assert sound(slab, end).next == 1
    assert [sound(slab, end, **{name: 2}).next for name in ("number", "producer", "epoch")] == [0, 0, 0]
