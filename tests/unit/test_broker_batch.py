"""From a sealed slot to its object and pointer: columns have the same values as the headers."""

from __future__ import annotations

import pytest
from awscrt.checksums import crc32c

from memq.broker.ingest.slabs import Slab
from memq.broker.partition.batch import (
    Origin,
    SealedBatch,
    data_pointer,
    ended_pointer,
    ends_that_fit,
    object_of,
    own_object,
    seal_batch,
    staged_pointer,
)
from memq.broker.partition.ring import BatchSlot, Ring, RingLimits
from memq.broker.partition.staged_batch import StagedBatch
from memq.format.blocks.header import BlockHeader, check_block
from memq.format.blocks.latency import latency_of
from memq.format.object import open_object
from memq.format.pointer import Adopted, Location, NamedProducer, Pointer, ProducerEnd, ProducerRanges
from memq.kernel.blocks_pure_python import COMBINED_BYTES_MIN
from memq.limits import POINTER_RANGES_MAX
from memq.topic import Topic, Totals, equal_slots
from tests.unit.sealed_batches import ORIGIN, SLOT_TOPIC, filled_slot


@pytest.mark.parametrize("cell_bytes", [7, COMBINED_BYTES_MIN // 3])
@pytest.mark.parametrize("producers", [[1], [1, 1, 1], [1, 2, 1, 3, 2, 2], list(range(1, 10))])
def test_a_batch_is_its_blocks_an_index_and_true_checksums(producers: list[int], cell_bytes: int) -> None:
    slot, body = filled_slot(producers, cell_bytes)
    sealed = seal_batch(slot, ORIGIN)
    made = own_object(sealed)
    whole = b"".join(made.buffers)
    assert whole[: len(body)] == body
    assert (made.bytes, sealed.checksum, made.checksum) == (len(whole), crc32c(body), crc32c(whole))
    index = open_object(whole)
    headers = [check_block(whole[entry.offset : entry.offset + entry.length]) for entry in index.blocks]
    assert [entry.producer_id for entry in index.blocks] == producers
    assert [sealed.headers[number] for number in range(len(sealed.headers))] == headers
    assert sealed.headers.sequences() == [(h.producer_id, h.first_sequence, h.next_sequence) for h in headers]
    assert index.batches[0].records == slot.records == sum(entry.count for entry in index.blocks)
    check_pointer(slot, sealed, headers)


def check_pointer(slot: BatchSlot, sealed: SealedBatch, headers: list[BlockHeader]) -> None:
    pointer: Pointer = data_pointer(slot, sealed, ORIGIN, Totals(), (), (), 1_100)
    assert pointer.latency == latency_of([h.base_ms for h in headers], [h.count for h in headers], 1_100)
    assert pointer.records == sum(header.count for header in headers)
    assert (pointer.least_ms, pointer.greatest_ms) == (1_000, 999 + len(headers))
    tag_bits = 0
    for header in headers:
        tag_bits |= header.tag_bits
    assert pointer.tag_bits == tag_bits
    named = {part.producer: part.ranges for part in pointer.producers}
    for producer, ranges in named.items():
        mine = [header for header in headers if header.producer_id == producer]
        assert ranges == ((mine[0].first_sequence, mine[-1].next_sequence),)
    assert list(named) == list(dict.fromkeys(header.producer_id for header in headers))


def test_bytes_that_changed_after_they_were_checked_do_not_pass_the_store() -> None:
    """The object's checksum is made of the verified ones: it does not bless what lies in memory by now."""
    slot, body = filled_slot([1, 2, 1], COMBINED_BYTES_MIN)
    slab: Slab = slot.extents[1][0]
    slab.view[slot.extents[1][2] - 1] ^= 1
    sealed = seal_batch(slot, ORIGIN)
    made = own_object(sealed)
    assert sealed.checksum == crc32c(body)
    assert crc32c(b"".join(made.buffers)) != made.checksum


def test_batches_of_several_topics_lie_one_after_another_and_each_is_found() -> None:
    other = Topic(name="views", id="0" * 31 + "2", created_ms=1, partitions=equal_slots(8))
    origins = [ORIGIN, Origin("c", "b", "main", other, 5, 9), Origin("c", "b", "main", SLOT_TOPIC, 0, 3)]
    slots = [filled_slot(producers) for producers in ([1, 2], [3], [4, 4, 4])]
    batches = [seal_batch(slot, origin) for (slot, _), origin in zip(slots, origins, strict=True)]
    made = object_of(batches, "shared/1", 1_234)
    whole = b"".join(made.buffers)
    bodies = [body for _, body in slots]
    assert (made.key, made.bytes, made.checksum) == ("shared/1", len(whole), crc32c(whole))
    assert whole.startswith(b"".join(bodies))
    index = open_object(whole)
    assert (index.meta.cluster, index.meta.broker, index.meta.created_ms) == ("c", "b", 1_234)
    assert [topic.name for topic in index.meta.topics] == ["clicks", "views"]
    ends = [len(b"".join(bodies[:count])) for count in range(4)]
    assert [(entry.offset, entry.length) for entry in index.batches] == [
        (ends[number], len(body)) for number, body in enumerate(bodies)
    ]
    assert [(entry.topic, entry.partition, entry.epoch) for entry in index.batches] == [(0, 0, 3), (1, 5, 9), (0, 0, 3)]
    assert [(entry.first_block, entry.blocks) for entry in index.batches] == [(0, 2), (2, 1), (3, 3)]
    for entry, body, batch in zip(index.batches, bodies, batches, strict=True):
        blocks = [whole[block.offset : block.offset + block.length] for block in index.blocks_of(entry)]
        assert b"".join(blocks) == body
        assert (batch.key, batch.offset) == ("shared/1", entry.offset)
    assert [batch.index for batch in batches] == [ends[3], ends[3], 0], "the last one ends where the index begins"


ADOPTED = (Adopted(offset=9, epoch=2, batch_sequence=4, records=3, bytes=500),)
TOTALS = Totals(10, 2_000)


def test_a_pointer_says_where_its_batch_lies_and_who_wrote_it() -> None:
    slot, body = filled_slot([1, 2, 1])
    slot.runs[1].stream.producer_epoch = 6
    sealed = seal_batch(slot, ORIGIN)
    own_object(sealed)
    sealed.offset, sealed.index = 7, 99
    pointer = data_pointer(slot, sealed, ORIGIN, TOTALS, ADOPTED, (1,), 1_100, 55)
    place = Location(store="main", key=sealed.key, offset=7, length=len(body), index=99)
    assert (pointer.kind, pointer.locations, pointer.batch_sequence) == ("data", (place,), slot.number)
    assert (pointer.cluster, pointer.broker, pointer.topic, pointer.topic_id) == ("c", "b", "clicks", SLOT_TOPIC.id)
    assert (pointer.partition, pointer.epoch, pointer.sealed_ms) == (0, 3, 1_700_000_000_000)
    assert (pointer.totals, pointer.adopted, pointer.skip, pointer.named_ms) == (TOTALS, ADOPTED, (1,), 55)
    assert (pointer.stored_bytes, pointer.raw_bytes) == (len(body), sealed.headers.raw_bytes)
    assert (pointer.checksum, pointer.slots) == (crc32c(body), sealed.headers.slots)
    assert pointer.latency == sealed.headers.latency(1_100, (1,)) != sealed.headers.latency(1_100, ())
    assert pointer.producers_complete
    assert pointer.named == (NamedProducer(producer=2, epoch=6, last_sequence=slot.runs[1].next),)


def test_a_pointer_of_a_staged_batch_says_what_its_writer_s_object_says() -> None:
    ring = Ring(RingLimits(4, 1 << 21, 1000, 1.0, True, 2))
    place = Location(store="main", key="staged/1", offset=7, length=500, index=900)
    writers = (NamedProducer(producer=8, epoch=2, last_sequence=40),)
    batch = StagedBatch(
        place, writers, 12, 2_000, 1_000, 1_050, (5, 60), 0b1011, 77, ((8, 0, 10), (9, 3, 5)), print, 1e9
    )
    assert ring.add_staged(batch, 1.0, 1_060)
    (slot,) = ring
    pointer = staged_pointer(slot, ORIGIN, TOTALS, ADOPTED, (1,), 1_100, 55)
    assert (pointer.kind, pointer.locations, pointer.batch_sequence) == ("data", (place,), slot.number)
    assert (pointer.topic_id, pointer.epoch, pointer.sealed_ms) == (SLOT_TOPIC.id, 3, slot.sealed_ms)
    assert (pointer.totals, pointer.adopted, pointer.skip, pointer.named_ms) == (TOTALS, ADOPTED, (1,), 55)
    assert (pointer.records, pointer.raw_bytes, pointer.stored_bytes) == (12, 2_000, 500)
    assert (pointer.least_ms, pointer.greatest_ms) == (1_000, 1_050)
    assert pointer.latency == latency_of([1_000], [12], 1_100)
    assert (pointer.slots, pointer.tag_bits, pointer.checksum) == ((5, 60), 0b1011, 77)
    assert (pointer.named, pointer.producers_complete) == (writers, True)
    assert pointer.producers == (
        ProducerRanges(producer=8, ranges=((0, 10),)),
        ProducerRanges(producer=9, ranges=((3, 5),)),
    )


def end_of(producer: int, burned: int) -> ProducerEnd:
    ranges = tuple((10 * number, 10 * number + 1) for number in range(burned))
    return ProducerEnd(producer=producer, next_sequence=10 * burned + 1, burned=ranges)


def test_ends_of_producers_go_into_one_pointer_as_long_as_there_is_room() -> None:
    full = POINTER_RANGES_MAX
    assert ends_that_fit([end_of(1, 0)] * full) == full
    assert ends_that_fit([end_of(1, 0)] * (full + 1)) == full
    assert ends_that_fit([end_of(1, full - 2), end_of(2, 0), end_of(3, 0)]) == 2
    assert ends_that_fit([end_of(1, full - 1), end_of(2, 0)]) == 1
    assert ends_that_fit([end_of(1, full)]) == 1, "one goes in any case"
    ends = (end_of(1, 2), end_of(2, 0))
    pointer = ended_pointer(ORIGIN, TOTALS, ADOPTED, ends, 1_100, 55)
    assert (pointer.kind, pointer.ended, pointer.sealed_ms, pointer.named_ms) == ("ended", ends, 1_100, 55)
    assert (pointer.totals, pointer.adopted, pointer.epoch, pointer.broker) == (TOTALS, ADOPTED, 3, "b")
