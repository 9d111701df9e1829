"""Objects after the last batch that a log shows of their epoch: does another batch have their records?

Theory. Such an object has two possible causes. Its owner died before it published the batch: then the producers sent
the records again, and a later batch has them, or nobody got an ack. Or the log was cut after the ack, for example
by an unclean election of Kafka. The numbers of batches and epochs are the same in both cases. The sequences of the
producers are not: if a pointer of the log names all sequences of the object, or the producer stated that it gave
them up, the object has nothing that readers miss. Otherwise it may be the only copy of acked records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from memq.broker.sweep.log_reading import LogReading
from memq.errors import CorruptDataError, NotFoundError, UnsupportedFormatError
from memq.format.key import decided_key, manifest_prefix, writer_of
from memq.format.object import BlockEntry
from memq.format.pointer import Pointer, unskipped
from memq.format.ranges import Range, RangeSet
from memq.format.staged_manifest import decode_manifest
from memq.notification import PointerReader
from memq.storage_handlers import ObjectEntry, ObjectReader
from memq.storage_handlers.confirmed_reads import read_batch_entries, read_index
from memq.topic import Topic


async def unproven_objects(
    store: ObjectReader,
    queue: PointerReader,
    topic: Topic,
    partition: int,
    entries: Sequence[ObjectEntry],
    note: Callable[[str], None],
) -> list[ObjectEntry]:
    """Return the objects with records of a write partition that no batch of its log has.

    An object of a newer version is one of them. If the log can't be read to its end, the result may have
    objects whose records are in the part that was not read. Raises: StoreError, QueueError.
    """
    blocks: dict[str, Sequence[BlockEntry]] = {}
    found: list[ObjectEntry] = []
    for entry in entries:
        try:
            index, _ = await read_index(store, entry)
        except (CorruptDataError, NotFoundError):
            continue  # without an index, no restore can make a pointer to the object either
        except UnsupportedFormatError:
            found.append(entry)
            continue
        mine = [
            batch
            for batch in index.batches
            if batch.partition == partition and index.meta.topics[batch.topic].id == topic.id
        ]
        blocks[entry.key] = [block for batch in mine for block in index.blocks_of(batch)]
    known = _Sequences(block.producer_id for each in blocks.values() for block in each)
    await known.read(store, LogReading(queue, topic.read_partition_of(partition), note), partition)
    return found + [entry for entry in entries if any(not known.cover(block) for block in blocks.get(entry.key, ()))]


async def committed_objects(
    store: ObjectReader, cluster: str, entries: Sequence[ObjectEntry], note: Callable[[str], None]
) -> set[str]:
    """Return the keys of those staged objects that commits have named, and of the commits' manifests.

    A commit puts its manifest before the first pointer. So an object without a manifest was never committed. If a
    manifest can't be read, it may name all objects of its writer. A transaction has committed an atomic batch if its
    mark exists. Raises: StoreError.
    """
    staged: dict[str, set[str]] = {}
    for entry in entries:
        staged.setdefault(writer_of(entry.key), set()).add(entry.key)
    found = set[str]()
    for writer, keys in staged.items():
        async for entry in store.list(manifest_prefix(cluster, writer)):
            try:
                manifest = decode_manifest(await store.get(entry.key), entry.key)
            except NotFoundError:
                continue
            except (CorruptDataError, UnsupportedFormatError) as error:
                note(f"the staged objects of writer '{writer}' without a pointer are kept: {error}")
                found |= {entry.key, *keys}
                continue
            named = keys.intersection(each.key for each in manifest.objects)
            if named and manifest.is_atomic:
                if not await is_decided(store, entry.key):
                    continue
                found.add(decided_key(entry.key))
            if named:
                found |= {entry.key, *named}
    return found


async def is_decided(store: ObjectReader, manifest: str) -> bool:
    """Whether the transaction of a manifest is committed: its mark exists. Raises: StoreError."""
    mark = decided_key(manifest)
    async for entry in store.list(mark):
        if entry.key == mark:
            return True
    try:
        await store.get(mark)
    except NotFoundError:
        return False
    return True


class _Sequences:
    """The sequences of some producers that a log accounts for."""

    def __init__(self, producers: Iterable[int]) -> None:
        self._known = {producer: RangeSet() for producer in producers}

    def cover(self, block: BlockEntry) -> bool:
        """Whether the log accounts for all records of a block."""
        return self._known[block.producer_id].covers(block.first_sequence, block.next_sequence)

    async def read(self, store: ObjectReader, reading: LogReading, partition: int) -> None:
        """Take all pointers of a write partition."""
        async for _entry, pointer in reading.entries():
            if pointer is None or pointer.partition != partition:
                continue
            for end in pointer.ended:
                self._add(end.producer, end.burned)
            if pointer.skip or not pointer.producers_complete:
                await self._read_index(store, pointer)
                continue
            for each in pointer.producers:
                self._add(each.producer, each.ranges)

    async def _read_index(self, store: ObjectReader, pointer: Pointer) -> None:
        """Take the sequences that readers get from a batch; none if its index can't be read.

        A pointer may have no room for all, and it also names those of skipped blocks: the log had them before it.
        """
        try:
            blocks = await read_batch_entries({each.store: store for each in pointer.locations}, pointer)
        except (CorruptDataError, NotFoundError, UnsupportedFormatError):
            return
        for block in unskipped(pointer, blocks):
            self._add(block.producer_id, [(block.first_sequence, block.next_sequence)])

    def _add(self, producer: int, ranges: Iterable[Range]) -> None:
        known = self._known.get(producer)
        if known is not None:
            for first, next_ in ranges:
                known.add(first, next_)
