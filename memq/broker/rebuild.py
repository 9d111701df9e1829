"""Pointers from objects: what each object's index says is the pointer that its batch had. Pure.

Theory. A pointer holds nothing that its object does not say, but for its place in the queue and what `skip` and the
totals owe to it. Within a write partition batches were published by epoch and batch sequence, so taken in that order
they have their places again. What lay there without a pointer (an upload of an owner that was fenced) can't be told
from what had one; its producers sent the same sequences again, so each block is named where it first appears, and a
batch of nothing new is left out. A block that nobody acked may so appear, once, as guarantee 3 allows.
"""

from __future__ import annotations

from dataclasses import dataclass

from awscrt.checksums import combine_crc32c, crc32c

from memq.broker.batch import producer_ranges
from memq.errors import CorruptDataError, MemqError
from memq.format.block import CHECKED_FROM, MAGIC, Buffer, check_block
from memq.format.key import ObjectKey
from memq.format.object import BatchEntry, BlockEntry, ObjectIndex, open_object
from memq.format.pointer import Location, Pointer, bounded_ranges
from memq.format.ranges import RangeSet
from memq.limits import POINTER_RANGES_MAX
from memq.topic import Topic, Totals


@dataclass(frozen=True, slots=True)
class FoundBatch:
    """One batch of an object of a topic, as its index tells it; `damaged` counts its blocks that do not hold."""

    key: str
    broker: str
    entry: BatchEntry
    blocks: tuple[BlockEntry, ...]
    raw_bytes: int
    damaged: int


def find_batch(key: str, named: ObjectKey, data: Buffer, topic: Topic) -> FoundBatch:
    """Read the one batch of an object whose key says `named`, and check its blocks.

    Raises: CorruptDataError, UnsupportedFormatError when trailer or index do not hold, or say another batch.
    """
    view = memoryview(data)
    index = open_object(view)
    if len(index.batches) != 1 or not _agree(index, named, topic):
        raise CorruptDataError(f"object '{key}' holds other batches than its key says")
    entry = index.batches[0]
    blocks = index.blocks_of(entry)
    raw, damaged = 0, 0
    for block in blocks:
        try:
            raw += check_block(view[block.offset : block.offset + block.length]).raw_length
        except MemqError:
            raw, damaged = raw + block.length, damaged + 1
    return FoundBatch(key, index.meta.broker, entry, blocks, raw, damaged)


def _agree(index: ObjectIndex, named: ObjectKey, topic: Topic) -> bool:
    entry = index.batches[0]
    place = (entry.partition, entry.epoch, entry.batch_sequence)
    whose = index.meta.topics[entry.topic]
    return place == (named.partition, named.epoch, named.batch_sequence) and whose.id == topic.id


def batch_checksum(blocks: tuple[BlockEntry, ...]) -> int:
    """Return the crc32c of a batch's bytes as they were written, from the checksums of its blocks."""
    value = 0
    for block in blocks:
        start = MAGIC + block.checksum.to_bytes(CHECKED_FROM - len(MAGIC), "little")
        value = combine_crc32c(crc32c(start, value), block.checksum, block.length - CHECKED_FROM)
    return value


class Rebuilder:
    """The pointers of one topic, in order: what lies before each, and which blocks were named already."""

    def __init__(self, topic: Topic, cluster: str, store: str) -> None:
        self._topic = topic
        self._cluster = cluster
        self._store = store
        self._named: dict[tuple[int, int], RangeSet] = {}  # by write partition and producer
        self._totals: dict[int, Totals] = {}

    def pointer(self, found: FoundBatch) -> Pointer | None:
        """Return the pointer of the next batch of its partition; None when all its blocks were named already."""
        entry, blocks = found.entry, found.blocks
        skip = tuple(
            number
            for number, block in enumerate(blocks)
            if self._ranges(entry.partition, block.producer_id).covers(block.first_sequence, block.next_sequence)
        )
        if len(skip) == len(blocks):
            return None
        sequences = [(block.producer_id, block.first_sequence, block.next_sequence) for block in blocks]
        producers, complete = bounded_ranges(producer_ranges(sequences), POINTER_RANGES_MAX)
        tag_bits = 0
        for block in blocks:
            tag_bits |= block.tag_bits
        pointer = Pointer(
            kind="data",
            cluster=self._cluster,
            topic=self._topic.name,
            topic_id=self._topic.id,
            partition=entry.partition,
            epoch=entry.epoch,
            batch_sequence=entry.batch_sequence,
            locations=(Location(store=self._store, key=found.key, offset=entry.offset, length=entry.length),),
            records=entry.records,
            raw_bytes=found.raw_bytes,
            stored_bytes=entry.length,
            least_ms=min(block.least_ms for block in blocks),
            greatest_ms=max(block.greatest_ms for block in blocks),
            totals=self._totals.get(entry.partition, Totals()),
            skip=skip,
            producers=producers,
            producers_complete=complete,
            slots=(min(block.slot_first for block in blocks), max(block.slot_last for block in blocks)),
            tag_bits=tag_bits,
            checksum=batch_checksum(blocks),
            broker=found.broker,
            sealed_ms=entry.appended_ms,
        )
        for producer, first, next_ in sequences:
            self._ranges(entry.partition, producer).add(first, next_)
        self._totals[entry.partition] = pointer.totals.plus(pointer.records, pointer.stored_bytes)
        return pointer

    def _ranges(self, partition: int, producer: int) -> RangeSet:
        return self._named.setdefault((partition, producer), RangeSet())
