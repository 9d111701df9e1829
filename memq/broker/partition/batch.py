"""Builds object and pointer of a sealed slot, without a copy of the blocks' bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from awscrt.checksums import combine_crc32c, crc32c

from memq.broker.partition.ring import BatchSlot
from memq.format.blocks.latency import latency_of
from memq.format.key import object_key
from memq.format.object import BatchEntry, ObjectMeta, ObjectTopic, encode_packed_index
from memq.format.pointer import (
    Adopted,
    Location,
    NamedProducer,
    Pointer,
    ProducerEnd,
    ProducerRanges,
    bounded_ranges,
)
from memq.format.ranges import RangeSet
from memq.kernel.header_table import HeaderTable, table_of
from memq.limits import POINTER_RANGES_MAX
from memq.topic import Topic, Totals


@dataclass(frozen=True, slots=True)
class Origin:
    """The writer in objects and pointers of one ring: cluster, broker, topic, partition, epoch."""

    cluster: str
    broker: str
    store: str
    topic: Topic
    partition: int
    epoch: int


@dataclass(slots=True)
class SealedBatch:
    """One sealed batch: views of its blocks, data of its index and pointer, and its location once known."""

    origin: Origin
    entry: BatchEntry  # as if the batch were the first of its object
    blocks: list[memoryview]  # the bytes of the blocks, one view each, without a copy
    headers: HeaderTable
    spans: list[tuple[int, int, int]]  # producer id, first and next sequence of each run of blocks
    key: str = ""  # of the object
    offset: int = 0  # of the batch in the object
    index: int = 0  # offset of the object's index; 0 when the index directly follows the batch

    @property
    def checksum(self) -> int:
        """The crc32c of the blocks."""
        return self.headers.checksum


@dataclass(frozen=True, slots=True)
class ObjectBody:
    """One object to put: its key, its buffers, and crc32c and number of all bytes."""

    key: str
    buffers: list[bytes | memoryview]
    checksum: int
    bytes: int


def seal_batch(slot: BatchSlot, origin: Origin) -> SealedBatch:
    """Return the batch of a sealed slot, with its blocks as received."""
    views, headers = table_of(slot.extents)
    found = sum(map(len, views))
    assert found == slot.bytes, f"batch {slot.number} holds {found} bytes, counted {slot.bytes}"
    entry = BatchEntry(
        offset=0,
        length=slot.bytes,
        appended_ms=slot.sealed_ms,
        batch_sequence=slot.number,
        records=slot.records,
        first_block=0,
        blocks=len(headers),
        partition=origin.partition,
        epoch=origin.epoch,
    )
    return SealedBatch(origin, entry, views, headers, sequences_of(slot))


def own_object(sealed: SealedBatch) -> ObjectBody:
    """Return the object of one batch, under the batch's own key."""
    origin, entry = sealed.origin, sealed.entry
    name = (origin.cluster, origin.topic.name, origin.topic.id, origin.partition, origin.epoch)
    return object_of([sealed], object_key(*name, entry.batch_sequence, entry.appended_ms), entry.appended_ms)


def object_of(batches: list[SealedBatch], key: str, created_ms: int) -> ObjectBody:
    """Return the object of several batches, of any topics: one after another, then index and trailer.

    Sets the key, the offset and the offset of the index in each batch.
    """
    topics: dict[ObjectTopic, int] = {}
    entries: list[BatchEntry] = []
    packed = bytearray()
    buffers: list[bytes | memoryview] = []
    offset, first_block, checksum = 0, 0, 0
    for batch in batches:
        topic = batch.origin.topic
        number = topics.setdefault(ObjectTopic(topic.name, topic.id), len(topics))
        entries.append(batch.entry._replace(offset=offset, first_block=first_block, topic=number))
        packed += batch.headers.entries(offset)
        buffers += batch.blocks
        batch.key, batch.offset = key, offset
        checksum = combine_crc32c(checksum, batch.checksum, batch.entry.length)
        offset, first_block = offset + batch.entry.length, first_block + batch.entry.blocks
    for batch in batches[:-1]:
        batch.index = offset
    batches[-1].index = 0
    origin = batches[0].origin
    meta = ObjectMeta(cluster=origin.cluster, broker=origin.broker, topics=tuple(topics), created_ms=created_ms)
    index = encode_packed_index(meta, entries, packed, offset)
    return ObjectBody(key, [*buffers, index], crc32c(index, checksum), offset + len(index))


def data_pointer(
    slot: BatchSlot,
    sealed: SealedBatch,
    origin: Origin,
    totals: Totals,
    adopted: tuple[Adopted, ...],
    skip: tuple[int, ...],
    now_ms: int,
    named_ms: int = 0,
) -> Pointer:
    """Return the pointer of a stored batch, to be handed to the queue at `now_ms`."""
    headers = sealed.headers
    producers, complete = bounded_ranges(producer_ranges(sequences_of(slot)), POINTER_RANGES_MAX)
    return control_pointer(
        "data",
        origin,
        totals,
        adopted,
        slot.sealed_ms,
        batch_sequence=slot.number,
        locations=(
            Location(store=origin.store, key=sealed.key, offset=sealed.offset, length=slot.bytes, index=sealed.index),
        ),
        records=slot.records,
        raw_bytes=headers.raw_bytes,
        stored_bytes=slot.bytes,
        least_ms=headers.least_ms,
        greatest_ms=headers.greatest_ms,
        latency=headers.latency(now_ms, skip),
        skip=skip,
        producers=producers,
        producers_complete=complete,
        slots=headers.slots,
        tag_bits=headers.tag_bits,
        checksum=sealed.checksum,
        named=named_of(slot),
        named_ms=named_ms,
    )


def staged_pointer(
    slot: BatchSlot,
    origin: Origin,
    totals: Totals,
    adopted: tuple[Adopted, ...],
    skip: tuple[int, ...],
    now_ms: int,
    named_ms: int,
) -> Pointer:
    """Return the pointer of a batch that a writer staged, with the writer's progress.

    The pointer has one latency for the whole batch, because the times of the blocks are only in the object.
    """
    staged = slot.staged
    assert staged is not None, f"batch {slot.number} is not staged"
    producers, complete = bounded_ranges(producer_ranges(staged.sequences), POINTER_RANGES_MAX)
    return control_pointer(
        "data",
        origin,
        totals,
        adopted,
        slot.sealed_ms,
        batch_sequence=slot.number,
        locations=(staged.location,),
        records=staged.records,
        raw_bytes=staged.raw_bytes,
        stored_bytes=slot.bytes,
        least_ms=staged.least_ms,
        greatest_ms=staged.greatest_ms,
        latency=latency_of([staged.least_ms], [staged.records], now_ms),
        skip=skip,
        producers=producers,
        producers_complete=complete,
        slots=staged.slots,
        tag_bits=staged.tag_bits,
        checksum=staged.checksum,
        named=staged.writers,
        named_ms=named_ms,
    )


def control_pointer(
    kind: str, origin: Origin, totals: Totals, adopted: tuple[Adopted, ...], sealed_ms: int, **fields: object
) -> Pointer:
    """Return a pointer of any kind, with the fields that all kinds have."""
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


def ended_pointer(
    origin: Origin,
    totals: Totals,
    adopted: tuple[Adopted, ...],
    ends: tuple[ProducerEnd, ...],
    now_ms: int,
    named_ms: int = 0,
) -> Pointer:
    """Return the pointer that says where producers ended, so that an audit can prove their tails."""
    return control_pointer("ended", origin, totals, adopted, now_ms, ended=ends, named_ms=named_ms)


def named_of(slot: BatchSlot) -> tuple[NamedProducer, ...]:
    """Return the progress after a batch of each named producer, and of each shard, with blocks in it."""
    found: dict[int, NamedProducer] = {}
    for shard, number, records in slot.units:
        found[shard] = NamedProducer(producer=shard, epoch=0, last_sequence=number, records=records)
    for run in slot.runs:
        stream = run.stream
        if stream.producer_epoch:
            found[stream.producer_id] = NamedProducer(
                producer=stream.producer_id, epoch=stream.producer_epoch, last_sequence=run.next
            )
    return tuple(found.values())


def sequences_of(slot: BatchSlot) -> list[tuple[int, int, int]]:
    """Return producer id, first and next sequence of each run of a batch."""
    return [(run.stream.producer_id, run.first, run.next) for run in slot.runs]


def ends_that_fit(ends: list[ProducerEnd]) -> int:
    """Return how many of `ends` fit into one pointer: each counts as one range plus its burned ranges."""
    room = POINTER_RANGES_MAX
    for number, end in enumerate(ends):
        room -= 1 + len(end.burned)
        if room < 0 and number:
            return number
    return len(ends)


def producer_ranges(sequences: Iterable[tuple[int, int, int]]) -> list[ProducerRanges]:
    """Merge (producer id, first, next) into ranges by producer, in the order of first appearance."""
    ranges: dict[int, RangeSet] = {}
    for producer, first, next_ in sequences:
        ranges.setdefault(producer, RangeSet()).add(first, next_)
    return [ProducerRanges(producer=producer, ranges=tuple(found)) for producer, found in ranges.items()]
