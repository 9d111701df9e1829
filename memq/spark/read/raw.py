"""Reads objects by listing only, without a queue: pointers are rebuilt from indexes.

Pointers of an epoch are published in the order of its batches. The last batches of an epoch, at most as many as a ring
has slots, may follow a hole in the batch sequences. Their owner stored them and never published them: no pointer would
have named them. Retention leaves no such hole, because it removes the oldest first. Batches of a topic may be in shared
objects, by its setting or because they waited long. So a read of a topic's folder reads the shared objects too.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote, urlsplit, urlunsplit

from memq.errors import CorruptDataError, InvalidRequestError, InvalidSettingError, MemqError, NotFoundError
from memq.format.key import is_large_object, parse_object_key, shared_prefix, topic_of_folder
from memq.format.object import BatchEntry, ObjectIndex, Trailer
from memq.format.pointer import Location, Pointer, ProducerRanges
from memq.notification import Entry
from memq.runtime.runtime import Runtime
from memq.spark.options import ReadOptions
from memq.spark.read.planner import BatchPart, PartitionPlan, Split
from memq.spark.read.pruning import ReadFilter
from memq.spark.read.task import settings_of, splits_of
from memq.spark.stores import ANY, StoreUrls, TaskStores
from memq.storage_handlers import ObjectEntry, ObjectReader
from memq.storage_handlers.confirmed_reads import read_index
from memq.topic import Position, is_internal

READS_MAX = 16  # indexes that are read at once
RING_SLOTS_MAX = 256  # how many batches an owner may store beyond one that it has not
_FOR_EVER_MS = 1 << 60
_END = Position(0, 1 << 60)
Epoch = tuple[str, int, int]  # topic id, write partition, epoch
Order = tuple[str, int, int, int, str]  # the same and batch sequence, key


@dataclass(frozen=True, slots=True)
class RawBatch:
    """One batch as its object describes it, or the reason why the object can't be read."""

    key: str
    pointer: Pointer | None = None
    cause: MemqError | None = None

    @property
    def order(self) -> Order:
        """The order of the batch: by topic and partition, then by epoch and batch sequence."""
        if self.pointer is None:
            return ("", 0, 0, 0, self.key)
        found = self.pointer
        return (found.topic_id, found.partition, found.epoch, found.batch_sequence, self.key)

    @property
    def is_internal(self) -> bool:
        """Whether the batch is of one of memq's own topics, which are read by their folder only."""
        return self.pointer is not None and is_internal(self.pointer.topic)

    def is_of(self, topic: str) -> bool:
        """Whether the batch is of a topic; an unreadable shared object may have batches of any."""
        return self.pointer is None or self.pointer.topic == topic


async def plan_raw(options: ReadOptions, wanted: ReadFilter, runtime: Runtime) -> list[Split]:
    """Return the splits of the objects below `options.path`.

    Raises: InvalidSettingError for positions that only a queue knows; NotFoundError if no object is there;
    DeniedError, StoreError.
    """
    root, prefix = split_path(options.path)
    urls = StoreUrls({ANY: root}, options.config, options.profile)
    stores = TaskStores(urls, runtime)
    try:
        batches = [batch async for batch in _batches(stores.open(ANY), prefix)]
        topic = topic_of_folder(prefix)
        if topic is not None:
            shared = _batches(stores.open(ANY), shared_prefix(topic[0]))
            batches += [batch async for batch in shared if batch.is_of(topic[1])]
        if not batches:  # else a wrong name would look like a topic without records
            raise NotFoundError(
                f"no objects of memq exist below '{options.path[:200]}'",
                hint="name a store, or a folder of it such as CLUSTER/topics/TOPIC",
            )
        if topic is None:
            batches = [batch for batch in batches if not batch.is_internal]
    finally:
        await stores.close()
    parts = _parts(once(sorted(batches, key=lambda batch: batch.order)), options, wanted)
    return splits_of(parts, options, settings_of(options, urls, wanted))


def once(batches: Sequence[RawBatch]) -> list[RawBatch]:
    """Return the batches, in order, without those that also exist as a copy in a large object."""
    found: list[RawBatch] = []
    for batch in batches:
        last = found[-1] if found else None
        if last is None or last.pointer is None or last.order[:-1] != batch.order[:-1]:
            found.append(batch)
        elif not (is_large_object(last.key) or is_large_object(batch.key)):
            found.append(batch)  # stored again, since its pointer was late
    return found


def split_path(path: str) -> tuple[str, str]:
    """Return the store's address for `path`, and the prefix of its keys.

    Keys begin with the cluster, then `topics` or `shared`; a path without one of these is the store itself.
    """
    url = urlsplit(path if "://" in path or path.startswith("file:") else f"file:{path}")
    folders = unquote(url.path)
    parts = PurePosixPath(os.path.abspath(folders) if url.scheme == "file" else folders).parts
    at = max((number for number, part in enumerate(parts) if part in ("topics", "shared")), default=len(parts) + 1)
    folder = str(PurePosixPath(*parts[: at - 1])) if at > 1 else ""
    prefix = "/".join(parts[at - 1 :])
    return urlunsplit((url.scheme, url.netloc, folder, url.query, "")), f"{prefix}/" if prefix else ""


async def _batches(store: ObjectReader, prefix: str) -> AsyncIterator[RawBatch]:
    """Yield the batches of all objects below, a few objects at once."""
    turn: list[ObjectEntry] = []
    async for entry in store.list(prefix):
        try:
            parse_object_key(entry.key)
        except InvalidRequestError:
            continue  # not memq's
        turn.append(entry)
        if len(turn) == READS_MAX:
            for batch in await _read_all(store, turn):
                yield batch
            turn = []
    for batch in await _read_all(store, turn):
        yield batch


async def _read_all(store: ObjectReader, entries: Sequence[ObjectEntry]) -> list[RawBatch]:
    found = await asyncio.gather(*(read_one(store, entry) for entry in entries))
    return [batch for batches in found for batch in batches]


async def read_one(store: ObjectReader, entry: ObjectEntry) -> list[RawBatch]:
    """Return the batches of an object by its index, or one with the cause of its damage."""
    try:
        index, trailer = await read_index(store, entry)
    except CorruptDataError as error:
        return [RawBatch(entry.key, cause=CorruptDataError(f"object '{entry.key}': {error}"))]
    return [RawBatch(entry.key, _pointer_of(entry.key, index, trailer, batch)) for batch in index.batches]


def _pointer_of(key: str, index: ObjectIndex, trailer: Trailer, batch: BatchEntry) -> Pointer:
    """Return the content of the batch's pointer, as far as a reader needs it."""
    blocks, topic = index.blocks_of(batch), index.meta.topics[batch.topic]
    tag_bits = 0
    for block in blocks:
        tag_bits |= block.tag_bits
    return Pointer(
        kind="data",
        cluster=index.meta.cluster,
        topic=topic.name,
        topic_id=topic.id,
        partition=batch.partition,
        epoch=batch.epoch,
        batch_sequence=batch.batch_sequence,
        locations=(
            Location(store="raw", key=key, offset=batch.offset, length=batch.length, index=trailer.index_offset),
        ),
        records=batch.records,
        least_ms=min(block.least_ms for block in blocks),
        greatest_ms=max(block.greatest_ms for block in blocks),
        tag_bits=tag_bits,
        sealed_ms=batch.appended_ms,
        producers=tuple(
            ProducerRanges(block.producer_id, ((block.first_sequence, block.next_sequence),)) for block in blocks
        ),
    )


def _parts(batches: Sequence[RawBatch], options: ReadOptions, wanted: ReadFilter) -> list[BatchPart]:
    """Return the batches to read, each numbered within its partition in place of an offset."""
    low_ms, high_ms = _time_of("start", options.start, -_FOR_EVER_MS), _time_of("end", options.end, _FOR_EVER_MS)
    orphans = find_orphans(batches)
    plans: dict[tuple[str, int], tuple[PartitionPlan, int]] = {}
    parts: list[BatchPart] = []
    for batch in batches:
        pointer = batch.pointer
        if pointer is None:
            parts.append(BatchPart(0, 0, None, cause=batch.cause))
            continue
        partition = (pointer.topic_id, pointer.partition)
        if partition not in plans:
            start = Position(pointer.partition, 0)
            plan = PartitionPlan(start, _END, _FOR_EVER_MS, wanted, dedup=options.dedup, keep_earlier=True)
            plans[partition] = plan, 0
        plan, number = plans[partition]
        plans[partition] = plan, number + 1
        part = plan.take(Entry(number, 0, b""), pointer, orphan=batch.order in orphans)
        if part and low_ms <= pointer.sealed_ms < high_ms and wanted.has(pointer.topic, pointer.partition):
            parts.append(part)
    return parts


def _time_of(name: str, point: object, otherwise: int) -> int:
    if isinstance(point, int):
        return point
    if isinstance(point, Mapping) or point != {"start": "beginning", "end": "end"}[name]:
        raise InvalidSettingError(
            f"option '{name}' = {point!r} needs a queue, and 'path' reads objects alone", hint="give a time"
        )
    return otherwise


def find_orphans(batches: Sequence[RawBatch]) -> frozenset[Order]:
    """Return the order of each batch that no pointer would have named."""
    epochs: dict[Epoch, dict[int, list[Order]]] = {}
    for batch in batches:
        if batch.pointer is not None:
            found = batch.pointer
            numbers = epochs.setdefault((found.topic_id, found.partition, found.epoch), {})
            numbers.setdefault(found.batch_sequence, []).append(batch.order)
    return frozenset(order for numbers in epochs.values() for order in _behind_hole(numbers))


def _behind_hole(numbers: Mapping[int, Sequence[Order]]) -> list[Order]:
    """Return the batches after the first hole in the last RING_SLOTS_MAX batch sequences."""
    last = max(numbers)
    holes = [number for number in range(max(min(numbers), last - RING_SLOTS_MAX), last) if number not in numbers]
    return [order for number, orders in numbers.items() if holes and number > holes[0] for order in orders]
