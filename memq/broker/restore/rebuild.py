"""Rebuilds the pointer of each batch from the index of its object. Pure.

`PresentLog` decides from the remaining pointers of a log whether the log is lost, in use, or partly restored.

Theory. The object of a batch has all facts of its pointer, except its order in the queue. `skip` and the totals follow
from that order. The batches of a write partition were published in the order of epoch and batch sequence, so a restore
publishes them in this order again. An object without a pointer (an upload of a fenced owner) can't be distinguished
from others. Its producers sent the same sequences again. So each block is published where it first appears, and a batch
without new blocks is left out. Thus a block that was never acked may appear, once, as guarantee 3 allows. Equal
sequences alone do not make a copy: a later instance of a named producer uses the sequences of unacked records again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from memq.broker.partition.batch import producer_ranges
from memq.errors import CorruptDataError
from memq.format.batch import BlockPiece, cut_blocks, is_whole, numbered_entries
from memq.format.blocks.header import Buffer, scope_of
from memq.format.object import (
    BatchEntry,
    BlockEntry,
    ObjectIndex,
    ObjectTopic,
    batch_checksum,
    open_object,
    parse_trailer,
)
from memq.format.pointer import Location, NamedProducer, Pointer, bounded_ranges, read_pointer
from memq.format.staged_manifest import Manifest
from memq.limits import POINTER_RANGES_MAX, TRAILER_BYTES
from memq.notification import Entry
from memq.topic import Topic, Totals, writer_id

Identity = tuple[int, int, int]  # write partition, epoch, batch sequence


@dataclass(frozen=True, slots=True)
class FoundBatch:
    """One batch as index and headers describe it; `damaged` counts its blocks that are not sound.

    `named` has the progress of its named producers, or of the writer that staged it.
    """

    key: str
    broker: str
    entry: BatchEntry
    blocks: tuple[BlockEntry, ...]
    index_offset: int
    raw_bytes: int
    damaged: int
    named: tuple[NamedProducer, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchLocation:
    """The location of a batch: its own object, or, with `entry`, a part of an object of many batches.

    `broker` wrote such an object. A piece that `writer` has staged has an entry without the number of blocks, because
    the manifest does not have it. `producer` is the producer id of such a piece, 0 if the manifest of an earlier writer
    does not name it.
    """

    key: str
    partition: int
    epoch: int
    batch_sequence: int
    entry: BatchEntry | None = None
    index_offset: int = 0
    broker: str = ""
    writer: NamedProducer | None = None
    producer: int = 0

    def is_at(self, entry: BatchEntry) -> bool:
        """Whether an entry of the object's index describes this batch."""
        if self.entry is None:
            return (self.partition, self.epoch, self.batch_sequence) == (
                entry.partition,
                entry.epoch,
                entry.batch_sequence,
            )
        return (self.partition, self.entry.offset, self.entry.length) == (entry.partition, entry.offset, entry.length)


def staged_locations(manifest: Manifest, checksum: int) -> dict[ObjectTopic, list[BatchLocation]]:
    """Return the locations of a staged batch's pieces by topic, in order.

    They have no epoch and no batch sequence yet; `follow_on` sets both.
    """
    locations: dict[ObjectTopic, list[BatchLocation]] = {}
    for (topic, topic_id, partition), pieces in manifest.by_partition().items():
        for number, (staged, piece) in enumerate(pieces, 1):
            entry = BatchEntry(piece.offset, piece.length, manifest.created_ms, 0, piece.records, 0, 0, partition, 0)
            writer = NamedProducer(
                producer=writer_id(manifest.writer),
                epoch=0,
                last_sequence=number,
                batch_id=str(manifest.batch_id),
                manifest=checksum,
                pieces=len(pieces),
            )
            index_offset, producer = staged.index_offset, int(staged.producer, 16)
            location = BatchLocation(
                staged.key, partition, 0, 0, entry, index_offset, manifest.writer, writer, producer
            )
            locations.setdefault(ObjectTopic(topic, topic_id), []).append(location)
    return locations


def follow_on(locations: list[BatchLocation], staged: list[BatchLocation]) -> list[BatchLocation]:
    """Return the staged pieces of a partition as batches of a further epoch, after the others."""
    epoch = 1 + max((location.epoch for location in locations), default=0)
    found: list[BatchLocation] = []
    for number, location in enumerate(staged):
        assert location.entry is not None, f"'{location.key}' is not staged"
        entry = location.entry._replace(epoch=epoch, batch_sequence=number)
        found.append(replace(location, epoch=epoch, batch_sequence=number, entry=entry))
    return found


def at_least(found: FoundBatch, time_ms: int) -> FoundBatch:
    """Return the batch as if it had been sealed at `time_ms` or later."""
    entry = found.entry
    return replace(found, entry=entry._replace(appended_ms=max(entry.appended_ms, time_ms)))


def locations_in(key: str, index: ObjectIndex, index_offset: int) -> dict[ObjectTopic, list[BatchLocation]]:
    """Return the locations of an object's batches by topic."""
    locations: dict[ObjectTopic, list[BatchLocation]] = {}
    for entry in index.batches:
        identity = (entry.partition, entry.epoch, entry.batch_sequence)
        location = BatchLocation(key, *identity, entry, index_offset, index.meta.broker)
        locations.setdefault(index.meta.topics[entry.topic], []).append(location)
    return locations


def find_batch(location: BatchLocation, data: Buffer, topic: Topic) -> FoundBatch:
    """Read the batch at `location` from its whole object, and check its blocks.

    Raises: CorruptDataError when trailer or index are damaged or have no such batch; UnsupportedFormatError.
    """
    index = open_object(data)
    index_offset = parse_trailer(memoryview(data)[-TRAILER_BYTES:], len(data)).index_offset
    for entry in index.batches:
        if index.meta.topics[entry.topic].id == topic.id and location.is_at(entry):
            blocks = index.blocks_of(entry)
            pieces = cut_blocks(data, scope_of(topic.id_bytes, entry.partition), None, numbered_entries(blocks))
            return _found(location, location.entry or entry, blocks, pieces, index.meta.broker, index_offset)
    raise CorruptDataError(f"object '{location.key}' holds other batches than its key names")


def find_shared_batch(location: BatchLocation, data: Buffer, topic: Topic) -> FoundBatch:
    """Read the batch at `location` of a shared object from its own bytes alone.

    Raises: CorruptDataError when a block is damaged: then only the index has the sequences of the blocks.
    """
    assert location.entry is not None, f"'{location.key}' is no shared object"
    pieces = list(cut_blocks(data, scope_of(topic.id_bytes, location.partition), location.entry.records))
    if not is_whole(pieces) or (location.writer is None and len(pieces) != location.entry.blocks):
        raise CorruptDataError(f"object '{location.key}': the blocks of a batch do not fit its index")
    blocks = tuple(piece.entry() for piece in pieces)
    return _found(location, location.entry, blocks, pieces, location.broker, location.index_offset)


def _found(
    location: BatchLocation,
    entry: BatchEntry,
    blocks: tuple[BlockEntry, ...],
    pieces: Iterable[BlockPiece],
    broker: str,
    index_offset: int,
) -> FoundBatch:
    raw, damaged = 0, 0
    named: dict[int, NamedProducer] = {}
    for block, piece in zip(blocks, pieces, strict=True):
        header = piece.header
        if header is None:
            raw, damaged = raw + block.length, damaged + 1
            continue
        raw += header.raw_length
        if header.producer_epoch:
            named[header.producer_id] = NamedProducer(
                producer=header.producer_id, epoch=header.producer_epoch, last_sequence=header.next_sequence
            )
    names = tuple(named.values()) if location.writer is None else (location.writer,)
    entry = entry._replace(blocks=len(blocks))
    return FoundBatch(location.key, location.broker or broker, entry, blocks, index_offset, raw, damaged, names)


class Rebuilder:
    """Makes the pointers of one topic, in order; remembers the totals, and the blocks that were published."""

    def __init__(self, topic: Topic, cluster: str, store: str) -> None:
        self._topic = topic
        self._cluster = cluster
        self._store = store
        self._blocks: dict[tuple[int, ...], None] = {}  # of the last dedup window, which has all copies
        self._ages: deque[tuple[int, tuple[int, ...]]] = deque()
        self._totals: dict[int, Totals] = {}
        self._names_ms: dict[int, int] = {}  # by write partition: time of the first named producer (Unix ms)

    def pointer(self, found: FoundBatch) -> Pointer | None:
        """Return the pointer of the next batch of its partition; None when it has no new blocks."""
        entry, blocks = found.entry, found.blocks
        skip = tuple(number for number, block in enumerate(blocks) if _identity(entry, block) in self._blocks)
        if len(skip) == len(blocks):
            return None
        self._remember(found)
        sequences = [(block.producer_id, block.first_sequence, block.next_sequence) for block in blocks]
        producers, complete = bounded_ranges(producer_ranges(sequences), POINTER_RANGES_MAX)
        tag_bits = 0
        for block in blocks:
            tag_bits |= block.tag_bits
        end = entry.offset + entry.length
        location = Location(
            store=self._store,
            key=found.key,
            offset=entry.offset,
            length=entry.length,
            index=found.index_offset if found.index_offset != end else 0,
        )
        if found.named:
            self._names_ms.setdefault(entry.partition, entry.appended_ms)
        pointer = Pointer(
            kind="data",
            cluster=self._cluster,
            topic=self._topic.name,
            topic_id=self._topic.id,
            partition=entry.partition,
            epoch=entry.epoch,
            batch_sequence=entry.batch_sequence,
            locations=(location,),
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
            named=found.named,
            named_ms=self._names_ms.get(entry.partition, 0),
        )
        self._totals[entry.partition] = pointer.totals.plus(pointer.records, pointer.stored_bytes)
        return pointer

    def _remember(self, found: FoundBatch) -> None:
        now_ms = found.entry.appended_ms
        while self._ages and self._ages[0][0] < now_ms - 2 * self._topic.settings.dedup_window_ms:
            del self._blocks[self._ages.popleft()[1]]
        for identity in dict.fromkeys(_identity(found.entry, block) for block in found.blocks):
            if identity not in self._blocks:
                self._blocks[identity] = None
                self._ages.append((now_ms, identity))


def _identity(entry: BatchEntry, block: BlockEntry) -> tuple[int, ...]:
    return entry.partition, block.producer_id, block.first_sequence, block.next_sequence, block.checksum


@dataclass(slots=True)
class PresentLog:
    """The pointers at the beginning of a log that may be lost: none, part of a restore, or all.

    An owner publishes `opened` first, and its epoch is above all earlier ones. So a log was never lost if it begins
    with `opened` and no object has a lower epoch. A restored log has all batches of lower epochs before `opened`. A log
    that retention has trimmed has been in use for a long time. A log without `opened` has pointers of a restore alone.
    The field `opened` has the first epoch of each write partition.
    """

    trimmed: bool = False
    batches: set[Identity] = field(default_factory=set)
    opened: dict[int, int] = field(default_factory=dict)

    @property
    def in_use(self) -> bool:
        """Whether an owner has opened the log: then no pointer can be put before its `opened`."""
        return self.trimmed or bool(self.opened)

    def should_have(self, locations: Iterable[BatchLocation]) -> list[BatchLocation]:
        """Return those of the batches whose pointers must precede the first opening.

        Staged batches are left out, because they have no epoch.
        """
        return [
            location
            for location in locations
            if not self.trimmed
            and location.writer is None
            and location.epoch < self.opened.get(location.partition, math.inf)
        ]

    def has(self, location: BatchLocation) -> bool:
        """Whether the log has the pointer of a batch."""
        return (location.partition, location.epoch, location.batch_sequence) in self.batches

    def has_pointer(self, pointer: Pointer) -> bool:
        """Whether the log has a pointer of the same batch."""
        return (pointer.partition, pointer.epoch, pointer.batch_sequence) in self.batches

    def note(self, entry: Entry) -> None:
        """Take the next entry of the log; a damaged one is ignored.

        Raises: UnsupportedFormatError for a newer version: its batch would otherwise get a second pointer.
        """
        pointer = read_pointer(entry.body, newer="raise")
        if not isinstance(pointer, Pointer):
            return
        if pointer.kind == "data":
            self.batches.add((pointer.partition, pointer.epoch, pointer.batch_sequence))
        elif pointer.kind == "opened":
            self.opened.setdefault(pointer.partition, pointer.epoch)
