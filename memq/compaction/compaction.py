"""Compaction of a read partition: large objects, then the manifest, then the pointers leave.

Theory. Each step leaves a whole log, so a killed compaction leaves nothing to repair. The sweep deletes objects and
parts that no manifest names. Pointers that are both in a manifest and in the queue are equal, and leave the queue with
the next run or with retention. A compaction names its objects and parts within half the sweep's safety age, or never.
After that age, a sweep may be about to delete them (`memq.broker.sweep.sweep`). The parts name the original objects
for the safety age, because readers may still read them.

Blocks are checked and then copied, but never opened. A damaged or missing batch is not copied: its pointer goes into
the part unchanged, and the damage is reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from awscrt.checksums import crc32c
from msgspec.structs import replace

from memq.compaction.plan import (
    CompactionRule,
    copied_location,
    entries_of,
    following,
    spans_to_compact,
    trim_offset,
    without,
)
from memq.compaction.reader import ManifestFiles, is_overwritten
from memq.errors import CorruptDataError, InvalidRequestError, MemqError, NotFoundError, NotReadyError, TooLargeError
from memq.format.batch import cut_batch
from memq.format.blocks.header import Buffer
from memq.format.compaction_manifest import (
    CompactionManifest,
    ManifestEntry,
    ManifestPart,
    PartRef,
    encode_manifest_part,
)
from memq.format.key import large_object_key, manifest_part_key
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.pointer import Location, Pointer, encode_pointer
from memq.limits import COMPACTION_BLOCKS_MAX
from memq.notification import Entry, PointerReader, Span
from memq.notification.log_reader import valid_span
from memq.runtime.clock import Clock
from memq.runtime.runtime import Runtime
from memq.storage_handlers import ObjectReader, StorageHandler
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way
from memq.storage_handlers.files import joined_crc
from memq.topic import ReadPartition, TopicSettings

OBJECTS_MAX = 16  # of one manifest of a plain compaction
READS_MAX = 8
WRITER = "compaction"  # `broker` in the meta of a large object


@dataclass(frozen=True, slots=True)
class Copied:
    """A stored part that no manifest names yet, and the faults found in it, by key."""

    part: PartRef
    findings: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class _LargeObject:
    """A large object before it is stored: its bytes, and the entries of its index."""

    buffers: list[Buffer] = field(default_factory=list)
    bytes: int = 0
    batches: list[BatchEntry] = field(default_factory=list)
    blocks: list[BlockEntry] = field(default_factory=list)

    def add(self, pointer: Pointer, data: Buffer, blocks: Sequence[BlockEntry]) -> int:
        """Append a batch; return its byte offset."""
        start = self.bytes
        self.batches.append(
            BatchEntry(
                offset=start,
                length=len(data),
                appended_ms=pointer.sealed_ms,
                batch_sequence=pointer.batch_sequence,
                records=pointer.records,
                first_block=len(self.blocks),
                blocks=len(blocks),
                partition=pointer.partition,
                epoch=pointer.epoch,
            )
        )
        self.blocks += [block._replace(offset=start + block.offset) for block in blocks]
        self.buffers.append(data)
        self.bytes += len(data)
        return start


class BatchCopier:
    """Copies batches of a cluster. `open_store` returns the stores that pointers name.

    `store` is the name and handler of the store for large objects and parts.
    """

    def __init__(
        self,
        cluster: str,
        queue: PointerReader,
        open_store: Callable[[str], ObjectReader],
        store: tuple[str, StorageHandler],
        runtime: Runtime,
    ) -> None:
        self._cluster = cluster
        self._queue = queue
        self._open_store = open_store
        self._store_name, self._store = store
        self._runtime = runtime

    async def copy(self, partition: ReadPartition, span: Span) -> Copied:
        """Store one large object and its part.

        A repetition after a crash stores others; the sweep deletes those of the first call.

        Raises: NotReadyError when retention was faster: the caller plans again; as stores and queue.
        """
        entries = [item async for item in self._entries(partition, span)]
        if not entries or entries[0][0].offset != span.begin:
            raise NotReadyError(f"retention removed pointers from offset {span.begin} of topic '{partition.topic}' on")
        created_ms, object_id = self._runtime.clock.wall_ms(), self._runtime.random.getrandbits(64)
        name = (self._cluster, partition.topic, partition.topic_id)
        key = large_object_key(*name, object_id, created_ms)
        large, copied, findings = _LargeObject(), dict[int, int](), list[tuple[str, str]]()
        async for entry, pointer, found in self._batches(entries):
            if isinstance(found, MemqError):
                await self._expect(partition, entry)
                findings.append((pointer.locations[0].key, f"{found}; it stays as it is"))
            elif len(large.blocks) + len(found[1]) <= COMPACTION_BLOCKS_MAX:
                copied[entry.offset] = large.add(pointer, *found)
        topic = ObjectTopic(partition.topic, partition.topic_id)
        bodies = self._bodies(entries, copied, key, large.bytes)
        if copied:
            meta = ObjectMeta(cluster=self._cluster, broker=WRITER, topics=(topic,), created_ms=created_ms)
            large.buffers.append(encode_index(meta, large.batches, large.blocks, large.bytes))
            await self._store.put(key, large.buffers, joined_crc(large.buffers))
        part_key = manifest_part_key(*name, object_id, created_ms)
        return Copied(await self._put_part(part_key, entries, bodies, created_ms), tuple(findings))

    async def _entries(self, partition: ReadPartition, span: Span) -> AsyncIterator[tuple[Entry, Pointer | None]]:
        async for entry, pointer in entries_of(self._queue, partition, span):
            if pointer is not None and pointer.cluster != self._cluster:
                raise InvalidRequestError(
                    f"topic '{partition.topic}' is of cluster '{pointer.cluster}', not of '{self._cluster}'",
                    hint="its readers would not find the manifest; name the cluster's own store and queue",
                )
            yield entry, pointer

    async def _batches(
        self, entries: Sequence[tuple[Entry, Pointer | None]]
    ) -> AsyncIterator[tuple[Entry, Pointer, tuple[Buffer, list[BlockEntry]] | MemqError]]:
        """Yield each batch to copy, in order, with its blocks or with the error of its read."""
        wanted = [(entry, pointer) for entry, pointer in entries if pointer is not None and copied_location(pointer)]
        for at in range(0, len(wanted), READS_MAX):
            group = wanted[at : at + READS_MAX]
            found = await asyncio.gather(*(self._read(pointer) for _, pointer in group))
            for (entry, pointer), batch in zip(group, found, strict=True):
                yield entry, pointer, batch

    async def _read(self, pointer: Pointer) -> tuple[Buffer, list[BlockEntry]] | MemqError:
        location = pointer.locations[0]

        async def read() -> tuple[Buffer, list[BlockEntry]]:
            data = await self._open_store(location.store).get_range(location.key, location.offset, location.length)
            return data, checked_blocks(pointer, data)

        try:
            return await ConfirmedReads().read([Way(f"object '{location.key}'", read)])
        except (CorruptDataError, NotFoundError) as error:
            return error

    async def _expect(self, partition: ReadPartition, entry: Entry) -> None:
        """Raise NotReadyError when retention has just removed the pointer of an unreadable batch."""
        ahead = await self._queue.read(partition, entry.offset, 1)
        if not ahead or ahead[0].offset != entry.offset:
            raise NotReadyError(f"retention removed the pointer at offset {entry.offset} of topic '{partition.topic}'")

    def _bodies(
        self, entries: Sequence[tuple[Entry, Pointer | None]], copied: dict[int, int], key: str, index: int
    ) -> list[tuple[ManifestEntry, Pointer | None]]:
        """Return the entries as the part has them, each with its pointer."""
        found: list[tuple[ManifestEntry, Pointer | None]] = []
        for entry, pointer in entries:
            body = entry.body
            if pointer is not None and entry.offset in copied:
                at, length = copied[entry.offset], pointer.locations[0].length
                behind = 0 if at + length == index else index
                location = Location(store=self._store_name, key=key, offset=at, length=length, index=behind)
                moved = replace(pointer, locations=(location,))
                try:
                    body = encode_pointer(moved)
                except TooLargeError:
                    moved = pointer  # the new key is a few bytes longer: the batch stays in its old object
                pointer = moved
            found.append((ManifestEntry(entry.offset, entry.time_ms, body), pointer))
        return found

    async def _put_part(
        self,
        key: str,
        entries: Sequence[tuple[Entry, Pointer | None]],
        bodies: Sequence[tuple[ManifestEntry, Pointer | None]],
        created_ms: int,
    ) -> PartRef:
        objects = dict.fromkeys(each.key for _, pointer in bodies if pointer for each in pointer.locations)
        named = dict.fromkeys(each.key for _, pointer in entries if pointer for each in pointer.locations)
        originals = tuple(each for each in named if each not in objects)
        data = encode_manifest_part(ManifestPart(tuple(entry for entry, _ in bodies), originals))
        await self._store.put(key, [data], crc32c(data))
        return PartRef(
            key=key,
            first=bodies[0][0].offset,
            next=bodies[-1][0].offset + 1,
            entries=len(bodies),
            bytes=sum(pointer.stored_bytes for _, pointer in bodies if pointer),
            greatest_ms=max(entry.time_ms for entry, _ in bodies),
            created_ms=created_ms,
            objects=tuple(objects),
        )


def checked_blocks(pointer: Pointer, data: Buffer) -> list[BlockEntry]:
    """Return index entries of a batch's blocks, made from their headers; offsets count from its start.

    Raises: CorruptDataError for a damaged block, or when the blocks do not match the pointer.
    """
    return [piece.entry() for piece in cut_batch(pointer, data)]


Copy = Callable[[ReadPartition, Sequence[Span]], Awaitable[Sequence[Copied]]]


class TrimmedQueue(PointerReader, Protocol):
    """A queue whose oldest pointers can be removed."""

    async def trim(self, partition: ReadPartition, before: int) -> None:
        """See `PartitionAdmin.trim`."""
        ...


async def manifest_of(files: ManifestFiles, partition: ReadPartition) -> CompactionManifest:
    """Return the highest manifest, or an empty one with number 0 when there is none."""
    return await files.highest(partition) or CompactionManifest(
        number=0,
        cluster=files.cluster,
        topic=partition.topic,
        topic_id=partition.topic_id,
        partition=partition.partition,
    )


async def leave_queue(
    queue: TrimmedQueue, files: ManifestFiles, partition: ReadPartition, manifest: CompactionManifest
) -> None:
    """Remove from the queue the pointers that `manifest`, which is or was the highest, has.

    The last ones stay for now if the queue has a later pointer of their batches (`RepeatedBatches`). All stay if the
    queue has other pointers at their offsets (`is_overwritten`). Raises: as `trim_offset` and `trim`.
    """
    begin = (await queue.span(partition)).begin
    if begin < manifest.next and not await is_overwritten(queue, files, partition, manifest):
        before = await trim_offset(queue, partition, manifest.next)
        if begin < before:
            await queue.trim(partition, before)


async def publish_parts(
    queue: PointerReader,
    files: ManifestFiles,
    manifest: CompactionManifest,
    copied: Sequence[Copied],
    clock: Clock,
    named_within_ms: int,
) -> CompactionManifest | None:
    """Publish the successor of `manifest`, which has the copied parts at its end, and return it.

    The result is None when another compaction or retention was faster.
    If the parts do not follow directly on `manifest`, and the queue begins after it, retention has removed the entries
    between, and so all older ones. Then the successor leaves out the parts of `manifest`.
    Raises: NotReadyError when the oldest copy was made `named_within_ms` ago or earlier; as the queue.
    """
    parts = tuple(sorted((each.part for each in copied), key=lambda part: part.first))
    now_ms = clock.wall_ms()
    if now_ms - min(part.created_ms for part in parts) >= named_within_ms:
        raise NotReadyError(
            f"copying took over {named_within_ms} ms, and a sweep may delete objects that no manifest names",
            hint="run it again, with fewer objects at once",
        )
    if parts[0].first > manifest.next and await _begin_of(queue, manifest) > manifest.next:
        taken = without(manifest, len(manifest.parts), now_ms, 2 * named_within_ms)
        manifest = replace(taken, number=manifest.number)
    successor = following(manifest, parts)
    return successor if await files.publish(successor) else None


async def _begin_of(queue: PointerReader, manifest: CompactionManifest) -> int:
    """Return where the queue begins, the lower one of two answers.

    It moves by retention and trims only, so an entry that the queue has lost gives up nothing before it.
    """
    partition = ReadPartition(manifest.topic, manifest.topic_id, manifest.partition)
    return min([(await valid_span(queue, partition)).begin for _ in range(2)])


Leave = Callable[[CompactionManifest], Awaitable[object]]  # removes the pointers of a manifest from the queue


async def compact(
    queue: PointerReader,
    files: ManifestFiles,
    copier: BatchCopier,
    partition: ReadPartition,
    settings: TopicSettings,
    rule: CompactionRule,
    clock: Clock,
    leave: Leave,
    *,
    named_within_ms: int,
) -> AsyncIterator[list[Copied]]:
    """Compact a read partition in this process, and yield the copied parts of each manifest.

    Concurrent and killed compactions do no harm.

    Raises: NotReadyError when retention was faster, or when copying took over `named_within_ms`; as stores and queue.
    """
    now_ms = clock.wall_ms()  # the same for all rounds: else each would find a few more entries
    while True:
        manifest = await manifest_of(files, partition)
        await leave(manifest)
        copied: list[Copied] = []
        async for span in spans_to_compact(queue, partition, manifest.next, settings, rule, now_ms):
            copied.append(await copier.copy(partition, span))
            if len(copied) == OBJECTS_MAX:
                break
        if not copied:
            return
        if await publish_parts(queue, files, manifest, copied, clock, named_within_ms):
            yield copied
