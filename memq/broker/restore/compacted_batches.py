"""The batches in shared and large objects for a restore, and the facts that only their pointers had.

The new queue has new offsets, so the manifests of the old queue are invalid. Once the new queue is complete, each
manifest gets an empty successor. The successor names the parts as left: a repeated restore needs the facts in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace

from memq.broker.restore.rebuild import BatchLocation, FoundBatch, Identity, locations_in
from memq.compaction.reader import ManifestFiles
from memq.errors import CorruptDataError, NotFoundError, UnsupportedFormatError
from memq.format.compaction_manifest import CompactionManifest, LeftPart, PartRef
from memq.format.key import compaction_prefix, is_large_object
from memq.format.object import ObjectIndex, ObjectTopic
from memq.format.pointer import NamedProducer, Pointer, read_pointer
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.confirmed_reads import read_index
from memq.topic import ReadPartition, Topic, read_partitions

READS_AT_ONCE_MAX = 32  # manifests and parts of a topic: the confirmation of a deleted one takes 0.2 s


@dataclass(slots=True)
class CompactedBatches:
    """The batches of a topic in large objects, the named producers of their pointers, and faults by key.

    A staged batch among them is recognised by `producers`, or by `pieces` if its manifest names no producers.
    """

    locations: list[BatchLocation] = field(default_factory=list)
    named: dict[Identity, tuple[NamedProducer, ...]] = field(default_factory=dict)
    producers: dict[tuple[int, int], Identity] = field(default_factory=dict)  # the batch of a partition and a producer
    pieces: dict[tuple[int, int, str, int], None] = field(default_factory=dict)  # partition, writer, batch, number
    findings: list[tuple[str, str]] = field(default_factory=list)

    def take_piece(self, location: BatchLocation) -> bool:
        """Return whether these batches contain a staged piece; note its writer, if no pointer did.

        An object that a writer staged has one piece for each partition, and a producer of its own.
        """
        if location.writer is None:
            return False
        batch = self.producers.get((location.partition, location.producer))
        if batch is not None:
            self.named.setdefault(batch, (location.writer,))
        return batch is not None or _piece_of(location.partition, location.writer) in self.pieces

    def found(self, found: FoundBatch) -> FoundBatch:
        """Return a batch with the named producers of its old pointer."""
        entry = found.entry
        named = self.named.get((entry.partition, entry.epoch, entry.batch_sequence))
        return replace(found, named=named) if named and is_large_object(found.key) else found


async def locations_below(
    store: StorageHandler,
    prefix: str,
    findings: list[tuple[str, str]],
    moved: Callable[[int], None] = lambda count: None,
    take: Callable[[ObjectIndex], None] = lambda index: None,
) -> dict[ObjectTopic, list[BatchLocation]]:
    """Read the indexes of all objects below a prefix; return the locations of their batches by topic.

    An index that can't be read is added to `findings`; `take` is called with each other index. `moved` is called with
    1 after each object. Raises: as `ObjectReader`.
    """
    found: dict[ObjectTopic, list[BatchLocation]] = {}
    async for entry in store.list(prefix):
        try:
            index, trailer = await read_index(store, entry)
        except (CorruptDataError, UnsupportedFormatError) as error:
            findings.append((entry.key, str(error)))
        else:
            take(index)
            for topic, locations in locations_in(entry.key, index, trailer.index_offset).items():
                found.setdefault(topic, []).extend(locations)
        moved(1)
    return found


async def compacted_batches(cluster: str, store: StorageHandler, topic: Topic) -> CompactedBatches:
    """Read the indexes of all large objects of a topic, and its manifests. Raises: as `ObjectReader`."""
    batches = CompactedBatches()

    def take(index: ObjectIndex) -> None:
        for entry in index.batches:
            if index.meta.topics[entry.topic].id == topic.id:
                batch = (entry.partition, entry.epoch, entry.batch_sequence)
                for block in index.blocks_of(entry):
                    batches.producers[entry.partition, block.producer_id] = batch

    prefix = f"{compaction_prefix(cluster, topic.name, topic.id)}objects/"
    found = await locations_below(store, prefix, batches.findings, take=take)
    batches.locations += found.get(ObjectTopic(topic.name, topic.id), ())
    await _read_manifests(ManifestFiles(cluster, store), topic, batches)
    return batches


async def _read_manifests(files: ManifestFiles, topic: Topic, batches: CompactedBatches) -> None:
    turns = asyncio.Semaphore(READS_AT_ONCE_MAX)
    await _finish(_read_manifest(files, partition, batches, turns) for partition in read_partitions(topic))


async def _finish(reads: Iterable[Awaitable[None]]) -> None:
    """Wait for all reads, also after a failure: none may use the store later.

    Raises: the first failure.
    """
    for end in await asyncio.gather(*reads, return_exceptions=True):
        if end is not None:
            raise end


async def _read_manifest(
    files: ManifestFiles, partition: ReadPartition, batches: CompactedBatches, turns: asyncio.Semaphore
) -> None:
    try:
        async with turns:
            manifest = await files.highest(partition)
        if manifest is not None:
            parts = [_read_part(files, ref, batches, turns) for ref in manifest.parts]
            parts += [_read_part(files, each.part, batches, turns, absent_too=True) for each in manifest.left]
            await _finish(parts)
    except (CorruptDataError, UnsupportedFormatError) as error:
        batches.findings.append(
            (files.manifest_key(partition, 0), f"compacted part of partition {partition.partition}: {error}")
        )


async def _read_part(
    files: ManifestFiles,
    ref: PartRef,
    batches: CompactedBatches,
    turns: asyncio.Semaphore,
    *,
    absent_too: bool = False,
) -> None:
    """Read a part. With `absent_too`, it may be missing: the sweep deletes parts that were left.

    Raises: as `ManifestFiles`.
    """
    try:
        async with turns:
            part = await files.part(ref)
    except CorruptDataError as error:
        if absent_too and isinstance(error.__cause__, NotFoundError):
            return
        raise
    for entry in part.entries:
        _note(entry.body, batches)


def _note(body: bytes, batches: CompactedBatches) -> None:
    pointer = read_pointer(body, newer="return")  # an unreadable pointer's batch is in the listing
    if isinstance(pointer, Pointer) and pointer.kind == "data" and pointer.named:
        batches.named[pointer.partition, pointer.epoch, pointer.batch_sequence] = pointer.named
        staged = [each for each in pointer.named if each.batch_id]
        batches.pieces.update(dict.fromkeys(_piece_of(pointer.partition, each) for each in staged))


def _piece_of(partition: int, named: NamedProducer) -> tuple[int, int, str, int]:
    return partition, named.producer, named.batch_id, named.last_sequence


async def retire_manifests(
    cluster: str, store: StorageHandler, topic: Topic, partitions: Iterable[ReadPartition], now_ms: int
) -> None:
    """Give each read partition's manifest a successor without parts that names the old parts as left.

    `now_ms` (Unix ms) is the time at which the parts were left. Raises: as the store.
    """
    files = ManifestFiles(cluster, store)
    for partition in partitions:
        while True:
            manifest = await files.highest(partition)
            if manifest is None or not manifest.next:
                break
            empty = CompactionManifest(
                number=manifest.number + 1,
                cluster=cluster,
                topic=topic.name,
                topic_id=topic.id,
                partition=partition.partition,
                left=manifest.left + tuple(LeftPart(part=part, since_ms=now_ms) for part in manifest.parts),
            )
            if await files.publish(empty):
                break
