"""Retention takes what is too old or too much, pointers first; the sweep what no pointer names, after a safety age."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass

from memq.broker.partitions import Partitions
from memq.broker.services import Services
from memq.errors import CorruptDataError, MemqError, NotFoundError
from memq.format.key import shared_prefix, topic_prefix
from memq.format.pointer import Pointer, decode_pointer
from memq.format.totals import contended_ms
from memq.notification import Entry
from memq.storage_handlers import ObjectEntry
from memq.topic import CLOCK_ERROR_MS, ReadPartition, Topic, TopicSettings, read_partitions

READ_BYTES = 1 << 20
SWEPT_KEYS_MAX = 100_000  # old objects of one prefix that are looked at together; about 30 MB


@dataclass(frozen=True, slots=True)
class Expired:
    """What retention takes of a read partition: entries below `before`, and the objects that they alone named.

    `holding` are write partitions whose last pointers keep more from it than is wanted.
    """

    before: int
    keys: tuple[str, ...]
    holding: tuple[int, ...]


def expired(entries: Iterable[tuple[Entry, Pointer | None]], settings: TopicSettings, now_ms: int) -> Expired:
    """Decide what of a partition's entries (all of them, in order) is too old or too much. Pure.

    The last pointer of each write partition stays, with what settles its totals (`memq.format.totals`): these and the
    epoch are what the next opening needs. So does what is younger than the dedup window, however much it is: an
    opening rebuilds the window from it. Damaged entries (None) go with what is around them.
    """
    window_ms = now_ms - settings.dedup_window_ms - CLOCK_ERROR_MS
    known = list(entries)
    bounds = _bounds(known, contended_ms(settings.stale_publish_ms))
    bytes_behind = sum(pointer.stored_bytes for _, pointer in known if pointer is not None)
    wanted = 0
    for entry, pointer in known:
        bytes_behind -= pointer.stored_bytes if pointer is not None else 0
        too_old = settings.retention_ms > 0 and entry.time_ms < now_ms - settings.retention_ms
        too_much = 0 < settings.retention_bytes <= bytes_behind and entry.time_ms < window_ms
        if not (too_old or too_much):
            break
        wanted += 1
    taken = min(wanted, min(bounds.values(), default=0))
    kept = {key for _, pointer in known[taken:] for key in _keys(pointer)}
    keys = dict.fromkeys(key for _, pointer in known[:taken] for key in _keys(pointer) if key not in kept)
    holding = tuple(partition for partition, bound in bounds.items() if bound < wanted)
    return Expired(known[taken][0].offset if known else 0, tuple(keys), holding)


def _bounds(known: list[tuple[Entry, Pointer | None]], settled_ms: int) -> dict[int, int]:
    """Return, per write partition, the index of the first entry that is as young as its last pointers want."""
    last_ms: dict[int, int] = {}
    for entry, pointer in known:
        if pointer is not None:
            last_ms[pointer.partition] = max(entry.time_ms, last_ms.get(pointer.partition, entry.time_ms))
    return {
        partition: next(n for n, (entry, _) in enumerate(known) if entry.time_ms >= time_ms - settled_ms)
        for partition, time_ms in last_ms.items()
    }


def _keys(pointer: Pointer | None) -> list[str]:
    return [] if pointer is None else [place.key for place in pointer.locations]


async def retire(services: Services, partitions: Partitions) -> None:
    """Apply retention to what this broker owns of every topic; what fails of one is logged, and done the next time."""
    for topic in partitions.topics():
        for partition in read_partitions(topic):
            if not partitions.looks_after(topic, partition):
                continue
            try:
                await _retire_partition(services, partitions, topic, partition)
            except MemqError as error:
                text = f"topic '{topic.name}' partition {partition.partition}: {error}"
                services.events.warning("retention-failed", text)


async def _retire_partition(services: Services, partitions: Partitions, topic: Topic, partition: ReadPartition) -> None:
    settings, now_ms = topic.settings, services.runtime.clock.wall_ms()
    span = await services.queue.span(partition)
    if span.begin >= span.end:
        return
    first = await services.queue.read(partition, span.begin, 1)
    nothing_old = not settings.retention_ms or not first or first[0].time_ms >= now_ms - settings.retention_ms
    if nothing_old and not settings.retention_bytes:
        return  # the usual case costs one small read
    known = [item async for item in _pointers(services, partition)]
    found = expired(known, settings, now_ms)
    await _restate(partitions, topic, found.holding)
    if found.before <= span.begin:
        return
    await services.queue.trim(partition, found.before)
    services.counters.retired_pointers += found.before - span.begin
    for key in found.keys:
        if key.startswith(shared_prefix(services.settings.cluster)):
            continue  # other topics may name it: the sweep takes it when none does
        await services.store.delete(key)
        services.counters.retired_objects += 1
    taken = f"{found.before - span.begin} pointers, {len(found.keys)} objects"
    services.events.info("retired", f"topic '{topic.name}' partition {partition.partition}: {taken}")


async def _restate(partitions: Partitions, topic: Topic, holding: Iterable[int]) -> None:
    """Have `opened` published again behind last pointers that are too old, so that the next round can take them."""
    for partition in holding:
        processor = partitions.processors.get((topic.id, partition))
        if processor is not None:
            await processor.restate()


async def _pointers(services: Services, partition: ReadPartition) -> AsyncIterator[tuple[Entry, Pointer | None]]:
    offset = 0
    while entries := await services.queue.read(partition, offset, READ_BYTES):
        for entry in entries:
            try:
                yield entry, decode_pointer(entry.body)
            except CorruptDataError as error:
                text = f"topic '{partition.topic}' offset {entry.offset}: {error}"
                services.events.error("pointer-damaged", text)
                yield entry, None
        offset = entries[-1].offset + 1


async def sweep(services: Services, partitions: Partitions, age_ms: int) -> tuple[int, int]:
    """Delete the objects of this cluster that are older than `age_ms` and that no pointer names.

    The listing comes first and the pointers last, so that a pointer that is published meanwhile counts. What a ring
    holds is left alone, however old it is: what it held before the pointers were read, for that may have been
    published behind the reading, and what it holds at the delete.
    Return how many objects and bytes went. Raises: MemqError of queue and store.
    """
    objects = bytes_ = 0
    async for prefix, entries in _old_objects(services, age_ms):
        kept = partitions.pending_keys()
        unnamed = await _unnamed(services, prefix, {entry.key for entry in entries} - kept)
        for entry in entries:
            if entry.key in unnamed and entry.key not in partitions.pending_keys():
                await services.store.delete(entry.key)
                objects, bytes_ = objects + 1, bytes_ + entry.size
    services.counters.swept_objects += objects
    services.counters.swept_bytes += bytes_
    return objects, bytes_


async def _old_objects(services: Services, age_ms: int) -> AsyncIterator[tuple[str, list[ObjectEntry]]]:
    """Yield the objects older than `age_ms`, of one topic or of the shared ones at a time: a listing comes by key."""
    bound_ms = services.runtime.clock.wall_ms() - age_ms
    prefix, entries = "", list[ObjectEntry]()
    async for entry in services.store.list(f"{services.settings.cluster}/"):
        if entry.modified_ms > bound_ms:
            continue
        if not entry.key.startswith(prefix) or not prefix or len(entries) == SWEPT_KEYS_MAX:
            if entries:
                yield prefix, entries
            prefix, entries = _prefix_of(entry.key, services.settings.cluster), []
        if prefix:
            entries.append(entry)
    if entries:
        yield prefix, entries


def _prefix_of(key: str, cluster: str) -> str:
    """Return the prefix that a key is swept with: a topic's, or that of shared objects; "" for what is neither."""
    if key.startswith(shared_prefix(cluster)):
        return shared_prefix(cluster)
    return "/".join(key.split("/")[:4]) + "/" if key.startswith(f"{cluster}/topics/") else ""


async def _unnamed(services: Services, prefix: str, keys: set[str]) -> set[str]:
    """Return those of `keys`, all of one prefix, that no pointer names: all of a topic that was deleted.

    None of them when a pointer is damaged or a partition of the queue is gone: nobody knows what was named, so nothing
    of the topic is swept, and nothing that topics share.
    """
    cluster = services.settings.cluster
    known = await services.coordinator.topics()  # not what was known: another broker may have made a topic meanwhile
    for topic in known:
        if prefix not in (topic_prefix(cluster, topic.name, topic.id), shared_prefix(cluster)):
            continue
        for partition in read_partitions(topic):
            try:
                async for _, pointer in _pointers(services, partition):
                    if pointer is None:
                        services.events.warning("not-swept", f"a pointer of topic '{topic.name}' is damaged")
                        return set()
                    keys.difference_update(_keys(pointer))
            except NotFoundError as error:
                services.events.warning("not-swept", f"topic '{topic.name}': {error}")
                return set()
    return keys


async def look_after(services: Services, partitions: Partitions, *, sweeps: bool = True) -> None:
    """One round of retention, and of the sweep when it is due; errors are logged, the next round tries again."""
    try:
        await retire(services, partitions)
        objects, bytes_ = await sweep(services, partitions, services.settings.sweep_age_ms) if sweeps else (0, 0)
        if objects:
            services.events.info("swept", f"{objects} unnamed objects, {bytes_} bytes")
    except MemqError as error:
        services.events.warning("housekeeping-failed", str(error))
