"""Checks objects from end to end, and compares every pointer of a read partition with the store.

An object that is sound by itself may still be the wrong one: another's bytes under its key. So what the pointer says is
compared with the key, with the object's index and with the blocks: cluster, topic id, partition, epoch, batch sequence,
offset, length and checksums.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from memq.audit.checks.batch_check import check_batch
from memq.errors import CorruptDataError, InvalidRequestError, MemqError, NotFoundError
from memq.format.batch import BlockPiece, cut_blocks, numbered_entries
from memq.format.blocks.columns import BlockReader, verify_block
from memq.format.blocks.header import BlockHeader, Buffer, check_block
from memq.format.compaction_manifest import decode_compaction_manifest, decode_manifest_part
from memq.format.held_object import CANCELLED_LANE, held_object_index
from memq.format.key import DECIDED_KIND, HELD_KIND, LargeObjectKey, ObjectKey, kind_without_batches, parse_object_key
from memq.format.object import BlockEntry, ObjectIndex, open_object
from memq.format.packed_file import (
    KIND_AT,
    KIND_MANIFEST,
    KIND_PART,
    KIND_QUEUE_RUN_BLOCK,
    KIND_RUN_BLOCK,
    KIND_STATE_PART,
    KIND_SWEEP_LIST,
    MAGIC,
    decode_sweep_list,
)
from memq.format.pointer import Location, Pointer, read_pointer
from memq.format.staged_manifest import check_mark, decode_manifest
from memq.format.state_log.held_run import HELD_ROWS
from memq.format.state_log.queue_run import QUEUE_ROWS
from memq.format.state_log.run import open_run
from memq.format.state_log.snapshot import decode_part as decode_state_part
from memq.notification import Entry, PointerReader
from memq.notification.log_reader import entries_between, valid_span
from memq.queues.payloads import scope_of_target
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way
from memq.topic import ReadPartition

_PACKED: dict[int, Callable[[bytes], object]] = {
    KIND_MANIFEST: decode_compaction_manifest,
    KIND_PART: decode_manifest_part,
    KIND_SWEEP_LIST: decode_sweep_list,
    KIND_STATE_PART: decode_state_part,
    KIND_RUN_BLOCK: partial(open_run, HELD_ROWS),
    KIND_QUEUE_RUN_BLOCK: partial(open_run, QUEUE_ROWS),
}
Read = Callable[[Location], Awaitable[Buffer]]


@dataclass(frozen=True, slots=True)
class ObjectFinding:
    """Fault at a byte of an object. `code` is the error's: corrupt-data or unsupported-format."""

    offset: int
    code: str
    text: str


@dataclass(slots=True)
class ObjectVerdict:
    """The checks of one object and their findings."""

    index: ObjectIndex | None = None
    blocks: int = 0
    records: int = 0
    findings: list[ObjectFinding] = field(default_factory=list)

    def add(self, offset: int, error: MemqError) -> None:
        """Note a fault at `offset`."""
        self.findings.append(ObjectFinding(offset, error.code, str(error)))


def check_object(data: memoryview) -> ObjectVerdict:
    """Check a whole object. The verdict has the faults of each block; none is raised."""
    verdict = ObjectVerdict()
    try:
        verdict.index = open_object(data)
    except MemqError as error:
        verdict.add(len(data), error)
    for piece in _pieces(data, verdict.index):
        try:
            reader = piece.reader()
            if verdict.index is not None:
                _check_entry(verdict.index.blocks[piece.number], reader.header)
            verify_block(reader)
        except MemqError as error:
            verdict.add(piece.at, error)
        else:
            verdict.blocks += 1
            verdict.records += piece.records
    return verdict


def check_file(name: str, data: memoryview) -> ObjectVerdict:
    """Check one file of a store: an object, or another file, by its first bytes or its name.

    Nothing is raised: what is wrong is in the verdict.
    """
    if bytes(data[: len(MAGIC)]) == MAGIC:
        decode = _PACKED.get(data[KIND_AT] if len(data) > KIND_AT else 0, decode_compaction_manifest)
    elif "/commits/" in name:
        decode = partial(decode_manifest, name=name)
    elif kind_without_batches(name) == DECIDED_KIND:
        decode = check_mark
    elif kind_without_batches(name) == HELD_KIND:
        return check_held(data)
    else:
        return check_object(data)
    verdict = ObjectVerdict()
    try:
        decode(bytes(data))
    except MemqError as error:
        verdict.add(0, error)
    return verdict


def check_held(data: memoryview) -> ObjectVerdict:
    """Check an object of held blocks: its index, and each block. None of the faults is raised."""
    verdict = ObjectVerdict()
    try:
        lanes = held_object_index(data)
    except MemqError as error:
        verdict.add(len(data), error)
        return verdict
    for lane in lanes:
        if lane.lane == CANCELLED_LANE:
            continue  # it names holds without blocks
        scope = scope_of_target(lane.target)
        for held in lane.blocks:
            piece = data[held.offset : held.offset + held.length]
            try:
                header = check_block(piece, scope)
                if (header.producer_id, header.first_sequence, header.next_sequence) != (
                    held.id.producer,
                    held.id.first,
                    held.next,
                ):
                    raise CorruptDataError(f"{header.describe()} is not the block that the index names: {held}")
                verify_block(BlockReader(piece, header))
            except MemqError as error:
                verdict.add(held.offset, error)
            else:
                verdict.blocks += 1
                verdict.records += header.count
    return verdict


def readable_blocks(data: memoryview) -> Iterator[tuple[int, BlockReader | MemqError]]:
    """Yield offset and reader of each block, or its error; by the index, or by a scan without one."""
    index: ObjectIndex | None = None
    try:
        index = open_object(data)
    except MemqError as error:
        yield len(data), error
    for piece in _pieces(data, index):
        yield piece.at, piece.cause or piece.reader()


def _pieces(data: memoryview, index: ObjectIndex | None) -> Iterator[BlockPiece]:
    return cut_blocks(data, run=None if index is None else numbered_entries(index.blocks))


def _check_entry(entry: BlockEntry, header: BlockHeader) -> None:
    if BlockEntry.from_header(header, entry.offset) != entry:
        raise CorruptDataError(f"{header.describe()} is not the block that the index names: {entry}")


@dataclass(frozen=True, slots=True)
class NamedFinding:
    """Fault at an offset of the queue, with the object's key; "" when no pointer could be read.

    Why.
    """

    offset: int
    key: str
    error: MemqError


@dataclass(frozen=True, slots=True)
class NamedBatch:
    """One entry of the queue that was checked.

    `data` is the object of its first copy, None when it can't be read.
    """

    findings: tuple[NamedFinding, ...]
    key: str = ""
    data: Buffer | None = None
    records: int = 0


class NamedObjects:
    """Checks read partitions of one cluster. `read` returns whole objects, straight from the store."""

    def __init__(self, cluster: str, queue: PointerReader, read: Read) -> None:
        self._cluster = cluster
        self._queue = queue
        self._read = read
        self._confirmed = ConfirmedReads()
        self._last: tuple[str, str, Buffer] | None = None  # one object of many batches has them next to each other

    async def check(self, partition: ReadPartition) -> AsyncIterator[NamedBatch]:
        """Yield what each entry names, in order. Raises: as `PointerReader`; as `read` for what may pass."""
        span = await valid_span(self._queue, partition)
        expected = span.begin
        async for page in entries_between(self._queue, partition, span.begin, span.end):
            for entry in page:
                if entry.lost:
                    continue  # a hole, as an offset that is not shown
                if entry.offset > expected and (await self._queue.span(partition)).begin <= expected:
                    yield _lost(expected, entry.offset)
                expected = entry.offset + 1
                yield await self._checked(partition, entry)
        if expected < span.end and (await self._queue.span(partition)).begin <= expected:
            yield _lost(expected, span.end)

    async def _checked(self, partition: ReadPartition, entry: Entry) -> NamedBatch:
        pointer = read_pointer(entry.body, newer="return")
        if not isinstance(pointer, Pointer):
            return NamedBatch((NamedFinding(entry.offset, "", pointer),))
        if pointer.kind != "data":
            return NamedBatch(())
        errors = [CorruptDataError(text) for text in self._strange(partition, pointer)]
        findings = [NamedFinding(entry.offset, pointer.locations[0].key, error) for error in errors]
        first: Buffer | None = None
        for location in pointer.locations:
            try:
                data, found = await self._proven(pointer, location)
            except NotFoundError as error:
                if (await self._queue.span(partition)).begin > entry.offset:
                    return NamedBatch(())  # retention was faster
                missing = CorruptDataError(f"the object is missing: {error}")
                findings.append(NamedFinding(entry.offset, location.key, missing))
                continue
            except CorruptDataError as error:
                findings.append(NamedFinding(entry.offset, location.key, error))
                continue
            first = data if first is None else first
            findings += [NamedFinding(entry.offset, location.key, CorruptDataError(text)) for text in found]
        return NamedBatch(tuple(findings), pointer.locations[0].key, first, pointer.records)

    async def _proven(self, pointer: Pointer, location: Location) -> tuple[Buffer, list[str]]:
        """Return an object and its faults, on which two fetches agree."""

        async def read() -> tuple[Buffer, list[str]]:
            data = await self._object(location)
            found = list(self._untrue(pointer, location, data))
            if found:
                self._last = None  # the next fetch is another one
            return data, found

        way = Way(f"object '{location.key}'", read)
        return await self._confirmed.read([way], lambda one: not one[1], lambda one, other: one[1] == other[1])

    async def _object(self, location: Location) -> Buffer:
        if self._last is None or self._last[:2] != (location.store, location.key):
            self._last = (location.store, location.key, await self._read(location))
        return self._last[2]

    def _strange(self, partition: ReadPartition, pointer: Pointer) -> Iterator[str]:
        """Say what of a pointer does not belong into this log."""
        stated = (pointer.cluster, pointer.topic, pointer.topic_id)
        here = (self._cluster, partition.topic, partition.topic_id)
        if stated != here:
            yield f"the pointer is of cluster '{stated[0]}', topic '{stated[1]}' with id {stated[2]}"

    def _untrue(self, pointer: Pointer, location: Location, data: Buffer) -> Iterator[str]:
        """Say what of an object is not as key and pointer say."""
        yield from self._misplaced(pointer, location.key)
        index_at, size = location.index_offset, len(data)
        if not location.offset + location.length <= index_at < size:
            yield f"the object has {size} bytes, the pointer says that its index begins at {index_at}"
        try:
            cluster = open_object(data).meta.cluster
        except MemqError:
            pass  # `check_batch` says so
        else:
            if cluster != self._cluster:
                yield f"the object is of cluster '{cluster}'"
        check = check_batch(pointer, location, data)
        yield from check.faults
        for block in check.blocks:
            if block.cause is not None:
                yield f"block {block.number}: {block.cause}"

    def _misplaced(self, pointer: Pointer, key: str) -> Iterator[str]:
        """Say what of a key is not as the pointer says.

        Keys of shared and staged objects say nothing of batches.
        """
        try:
            named = parse_object_key(key)
        except InvalidRequestError:
            return  # a staged object, or what an earlier version wrote
        if named.cluster != self._cluster:
            yield f"the key is of cluster '{named.cluster}'"
        if isinstance(named, ObjectKey | LargeObjectKey):
            topic, name, topic_id = (named.topic, named.topic_id), pointer.topic, pointer.topic_id[:8]
            if topic != (name, topic_id):
                yield f"the key is of topic '{topic[0]}' with id {topic[1]}, the pointer of '{name}' with {topic_id}"
        if isinstance(named, ObjectKey):
            batch = (named.partition, named.epoch, named.batch_sequence)
            if batch != (pointer.partition, pointer.epoch, pointer.batch_sequence):
                yield f"the key is of partition {batch[0]}, epoch {batch[1]} and batch {batch[2]}"


def _lost(first: int, next_: int) -> NamedBatch:
    text = f"the queue has lost the pointers at offsets {first} to {next_ - 1}"
    return NamedBatch((NamedFinding(first, "", CorruptDataError(text)),))
