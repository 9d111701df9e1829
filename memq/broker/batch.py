"""From a sealed slot to its object and its pointer. Pure: the bytes of the blocks are only pointed at."""

from __future__ import annotations

from dataclasses import dataclass

from awscrt.checksums import crc32c

from memq.broker.ring import Slot
from memq.format.block import BlockHeader, parse_header
from memq.format.key import object_key
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.pointer import Adopted, Location, Pointer, ProducerEnd, ProducerRanges, bounded_ranges
from memq.format.ranges import RangeSet
from memq.limits import POINTER_RANGES_MAX
from memq.topic import Topic, Totals


@dataclass(frozen=True, slots=True)
class Origin:
    """Who writes: cluster, broker, topic, partition and epoch of every object and pointer of one ring."""

    cluster: str
    broker: str
    store: str
    topic: Topic
    partition: int
    epoch: int


@dataclass(frozen=True, slots=True)
class SealedBatch:
    """One batch as an object: its key, its bytes as buffers, its checksums, and what its pointer says."""

    key: str
    buffers: list[bytes | memoryview]
    checksum: int  # crc32c of the whole object
    batch_checksum: int  # crc32c of the blocks alone
    headers: list[BlockHeader]
    object_bytes: int


def build_batch(slot: Slot, origin: Origin) -> SealedBatch:
    """Lay out the object of a sealed slot: its blocks as received, then index and trailer."""
    views = slot.views()
    headers = [parse_header(view) for view in views]
    offset, entries = 0, []
    for header in headers:
        entries.append(BlockEntry.from_header(header, offset))
        offset += header.length
    assert offset == slot.bytes, f"batch {slot.number} holds {offset} bytes, counted {slot.bytes}"
    batch = BatchEntry(
        offset=0,
        length=slot.bytes,
        appended_ms=slot.sealed_ms,
        batch_sequence=slot.number,
        records=slot.records,
        first_block=0,
        blocks=len(entries),
        partition=origin.partition,
        epoch=origin.epoch,
    )
    meta = ObjectMeta(
        cluster=origin.cluster,
        broker=origin.broker,
        topics=(ObjectTopic(origin.topic.name, origin.topic.id),),
        created_ms=slot.sealed_ms,
    )
    index = encode_index(meta, [batch], entries, slot.bytes)
    body_checksum = 0
    for view in views:
        body_checksum = crc32c(view, body_checksum)
    key = object_key(
        origin.cluster,
        origin.topic.name,
        origin.topic.id,
        origin.partition,
        origin.epoch,
        slot.number,
        slot.sealed_ms,
    )
    buffers: list[bytes | memoryview] = [*views, index]
    return SealedBatch(key, buffers, crc32c(index, body_checksum), body_checksum, headers, slot.bytes + len(index))


def data_pointer(
    slot: Slot,
    sealed: SealedBatch,
    origin: Origin,
    totals: Totals,
    adopted: tuple[Adopted, ...],
    skip: tuple[int, ...],
) -> Pointer:
    """Return the pointer of a stored batch."""
    headers = sealed.headers
    tag_bits = 0
    for header in headers:
        tag_bits |= header.tag_bits
    producers, complete = bounded_ranges(producer_ranges(headers), POINTER_RANGES_MAX)
    return control_pointer(
        "data",
        origin,
        totals,
        adopted,
        slot.sealed_ms,
        batch_sequence=slot.number,
        locations=(Location(store=origin.store, key=sealed.key, offset=0, length=slot.bytes),),
        records=slot.records,
        raw_bytes=sum(header.raw_length for header in headers),
        stored_bytes=slot.bytes,
        least_ms=min(header.least_ms for header in headers),
        greatest_ms=max(header.greatest_ms for header in headers),
        skip=skip,
        producers=producers,
        producers_complete=complete,
        slots=(min(h.slot_first for h in headers), max(h.slot_last for h in headers)),
        tag_bits=tag_bits,
        checksum=sealed.batch_checksum,
    )


def control_pointer(
    kind: str, origin: Origin, totals: Totals, adopted: tuple[Adopted, ...], sealed_ms: int, **fields: object
) -> Pointer:
    """Return a pointer of any kind with what all kinds have in common."""
    return Pointer(
        kind=kind,
        cluster=origin.cluster,
        topic=origin.topic.name,
        topic_id=origin.topic.id,
        partition=origin.partition,
        epoch=origin.epoch,
        totals=totals,
        adopted=adopted,
        broker=origin.broker,
        sealed_ms=sealed_ms,
        **fields,  # type: ignore[arg-type]  # the struct checks its fields' names, the encoder their types
    )


def ended_pointer(origin: Origin, totals: Totals, ends: tuple[ProducerEnd, ...], now_ms: int) -> Pointer:
    """Return the pointer that says where producers ended, so that an audit can prove their tails."""
    return control_pointer("ended", origin, totals, (), now_ms, ended=ends)


def producer_ranges(headers: list[BlockHeader]) -> list[ProducerRanges]:
    """Return the sequence ranges of a batch, merged, by producer in the order of their first block."""
    ranges: dict[int, RangeSet] = {}
    for header in headers:
        ranges.setdefault(header.producer_id, RangeSet()).add(header.first_sequence, header.next_sequence)
    return [ProducerRanges(producer=producer, ranges=tuple(found)) for producer, found in ranges.items()]
