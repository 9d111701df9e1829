"""Retention deletes pointers that are too old or too many, then the objects that only they named.

Retention removes compacted pointers in whole parts, the oldest of a manifest first. The sweep deletes their objects
after its safety age, so that readers have time to read the new manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from memq.broker.partitions import Partitions
from memq.broker.services import Services
from memq.broker.sweep.broker_sweep import sweep
from memq.broker.sweep.log_reading import keys_of, whole_log
from memq.compaction.compaction import leave_queue
from memq.compaction.plan import RepeatedBatches, TailNeeds, window_since_ms, without
from memq.errors import MemqError, QueueError
from memq.format.compaction_manifest import CompactionManifest
from memq.format.key import is_large_object, shared_prefix, staged_prefix
from memq.format.pointer import Pointer
from memq.limits import TIME_MS_END
from memq.notification import Entry
from memq.topic import CLOCK_ERROR_MS, ReadPartition, Topic, TopicSettings, Truncation, is_state_topic, read_partitions

NEVER_MS = TIME_MS_END
NO_OFFSET = 1 << 62  # greater than any offset
MANIFEST_SEARCH_S = 600.0  # interval between searches for a manifest; each is a listing


@dataclass(frozen=True, slots=True)
class Expired:
    """The part of a read partition that retention removes: entries below `before`, and their objects.

    `holding` are write partitions whose last pointers keep entries that retention would remove.
    """

    before: int
    keys: tuple[str, ...]
    holding: tuple[int, ...]


def expired(
    entries: Iterable[tuple[Entry, Pointer | None]],
    settings: TopicSettings,
    now_ms: int,
    moved: int = 0,
    order: Truncation | None = None,
    unread: int = NO_OFFSET,
) -> Expired:
    """Decide which of a partition's entries (all of them, in order) are too old or too much. Pure.

    The next opening needs the last pointer of each write partition, the pointers that settle its totals
    (`memq.format.totals`), and the last `opened` that names producers: they stay. Entries younger than the dedup window
    stay, too, however many they are: an opening rebuilds the window from them. All pointers of one batch are removed
    together (`RepeatedBatches`). Damaged entries (None) are removed together with their neighbours. Entries below
    offset `moved` were compacted, and their parts have expired: they are removed, and the sweep deletes their objects.
    An operator's `order` to truncate removes entries as a bound in bytes does. From offset `unread` on, entries that
    are younger than `retention_groups_ms_max` stay for the groups that retention waits for.
    """
    window_ms = window_since_ms(settings, now_ms)
    known = list(entries)
    bounds = _bounds(known, settings)
    bytes_behind = sum(pointer.stored_bytes for _, pointer in known if pointer is not None)
    wanted = 0
    for entry, pointer in known:
        bytes_behind -= pointer.stored_bytes if pointer is not None else 0
        too_old = settings.retention_ms > 0 and entry.time_ms < now_ms - settings.retention_ms
        settled = entry.time_ms < window_ms
        too_much = 0 < settings.retention_bytes <= bytes_behind and settled
        ordered = order is not None and order.covers(entry.offset, entry.time_ms) and settled
        waits = entry.offset >= unread and entry.time_ms >= now_ms - settings.retention_groups_ms_max
        if entry.offset >= moved and not (ordered or ((too_old or too_much) and not waits)):
            break
        wanted += 1
    taken = _trim_count(known, min(wanted, min(bounds.values(), default=0)))
    kept = {key for _, pointer in known[taken:] for key in keys_of(pointer)}
    gone = (
        key for entry, pointer in known[:taken] if entry.offset >= moved for key in keys_of(pointer) if key not in kept
    )
    keys = dict.fromkeys(key for key in gone if not is_large_object(key))  # a manifest may name those
    holding = tuple(partition for partition, bound in bounds.items() if bound < wanted)
    return Expired(known[taken][0].offset if known else 0, tuple(keys), holding)


def _bounds(known: list[tuple[Entry, Pointer | None]], settings: TopicSettings) -> dict[int, int]:
    """Return, per write partition, the index of the first entry as young as its last pointers require."""
    needs = TailNeeds()
    for entry, pointer in known:
        if pointer is not None:
            needs.take(entry, pointer)
    return {
        partition: next(n for n, (entry, _) in enumerate(known) if entry.time_ms >= since_ms)
        for partition, since_ms in needs.since_ms(settings).items()
    }


def _trim_count(known: list[tuple[Entry, Pointer | None]], count: int) -> int:
    """Return the greatest number of entries, at most `count`, after which the log may be trimmed."""
    repeated = RepeatedBatches()
    for entry, pointer in known:
        repeated.note(entry, pointer)
    return max((n for n, item in enumerate(known[:count], 1) if repeated.take(*item)), default=0)


async def retire(services: Services, partitions: Partitions) -> None:
    """Apply retention to the read partitions of every topic whose first writer this broker owns.

    A failure is logged, and the next round retries. A partition is checked only when its first pointer can be too old.
    Otherwise, with thousands of partitions, the checks of each round took a fifth of a core.
    """
    due, now_ms = partitions.retention_due, services.deletion_clock.wall_ms()
    partitions.retention_due = {}
    for topic in partitions.topics():
        if is_state_topic(topic.name):
            continue  # its owners trim their logs themselves
        first: dict[int, int] = {}  # read partition -> its first write partition, whose owner applies retention
        for part in topic.partitions:
            first.setdefault(part.read_partition, part.partition)
        for partition in read_partitions(topic):
            if not partitions.owns(topic, first.get(partition.partition, -1)):
                continue
            known, due_ms = due.get(partition, (None, 0))
            try:
                if known != (topic.settings, topic.truncations) or due_ms <= now_ms:
                    due_ms = await _retire_partition(services, partitions, topic, partition)
                partitions.retention_due[partition] = ((topic.settings, topic.truncations), due_ms)
            except MemqError as error:
                text = f"topic '{topic.name}' partition {partition.partition}: {error}"
                services.events.warning("retention-failed", text)


async def _retire_partition(services: Services, partitions: Partitions, topic: Topic, partition: ReadPartition) -> int:
    """Remove expired pointers, and return the time of the next check (Unix ms)."""
    settings, now_ms = topic.settings, services.deletion_clock.wall_ms()
    order = topic.truncation_of(partition)

    def damaged(text: str) -> None:
        services.counters.damaged_pointers += 1
        services.events.error("pointer-damaged", text)

    span = await services.queue.span(partition)
    first = await services.queue.read(partition, span.begin, 1) if span.begin < span.end else []
    compacted = await services.pointers.manifest(partition, span.begin, MANIFEST_SEARCH_S) if span.begin else None
    oldest_ms = min(first[0].time_ms if first else now_ms, first_old_ms(compacted))
    due_ms = oldest_ms + settings.retention_ms + 1 if settings.retention_ms else NEVER_MS
    first_left = compacted.begin if compacted is not None else span.begin
    if order is not None and first_left < order.before and oldest_ms <= order.time_ms:
        due_ms = min(due_ms, oldest_ms + settings.dedup_window_ms + CLOCK_ERROR_MS + 1)
    if not settings.retention_bytes and due_ms > now_ms:
        return due_ms  # the usual case costs one small read
    if not first:
        return now_ms
    wanted = settings.waits_for if settings.retention_groups else ()
    groups = await services.groups.first_unread(wanted, partition) if wanted else {}
    unread = min(groups.values(), default=NO_OFFSET)
    since_ms = now_ms - settings.retention_groups_ms_max
    if order is None and first_left >= unread and oldest_ms >= since_ms:
        return now_ms  # a group has committed nothing of what is left
    span, known = await whole_log(services.queue, partition, damaged)
    begin = span.begin
    if compacted is not None:
        younger = [item for item in known if item[0].offset >= compacted.next]
        compacted = await retire_compacted(services, partition, compacted, settings, younger, order, unread)
        if compacted.parts:
            return now_ms  # the entries in the queue are younger
        begin = max((await services.queue.span(partition)).begin, compacted.next)
    found = expired(known, settings, now_ms, compacted.next if compacted is not None else 0, order, unread)
    await _republish_opened(partitions, topic, found.holding)
    if found.before <= begin:
        return now_ms
    if found.before > unread and not (order is not None and found.before <= order.before):
        _tell_cut(services, partition, groups, found.before)
    await services.queue.trim(partition, found.before)
    services.recent_pointers.forget(partition)  # else readers would get from memory what retention took
    services.counters.retired_pointers += found.before - begin
    deleted = await _delete_unnamed(services, partition, found, damaged) if services.settings.delete_objects else 0
    taken = f"{found.before - begin} pointers, {deleted} objects"
    services.events.info("retired", f"topic '{topic.name}' partition {partition.partition}: {taken}")
    return now_ms


def _tell_cut(services: Services, partition: ReadPartition, groups: Mapping[str, int], before: int) -> None:
    """Log that retention has waited for groups as long as it may."""
    services.counters.retention_cuts += 1
    behind = ", ".join(f"'{group}' at {offset}" for group, offset in groups.items() if offset < before)
    services.events.warning(
        "retention-cut",
        f"topic '{partition.topic}' partition {partition.partition}: pointers below {before} are older than"
        f" retention_groups_ms_max, and go before these groups have committed them: {behind}",
    )


async def _delete_unnamed(
    services: Services, partition: ReadPartition, found: Expired, damaged: Callable[[str], None]
) -> int:
    """Delete the objects that only the trimmed pointers named, and return how many.

    The rest of the log is read again after the trim: a copy of a pointer that the first reading missed still names its
    object. Objects without this proof are left to the sweep. Raises: QueueError when the trim had no effect.
    """
    left, known = await whole_log(services.queue, partition, damaged)
    if left.begin < found.before:
        raise QueueError(
            f"the queue shows offset {left.begin} after a trim to {found.before}: {len(found.keys)} objects are left"
        )
    named = {key for _, pointer in known for key in keys_of(pointer)}
    others = (shared_prefix(services.settings.cluster), staged_prefix(services.settings.cluster))
    deleted = 0
    for key in found.keys:
        if key in named or key.startswith(others):
            continue  # other topics may name shared objects: the sweep deletes them when none does
        await services.store.delete(key)
        services.counters.retired_objects += 1
        deleted += 1
    return deleted


async def _republish_opened(partitions: Partitions, topic: Topic, holding: Iterable[int]) -> None:
    """Publish `opened` again in partitions whose last pointers are too old: the next round removes those."""
    for partition in holding:
        processor = partitions.processors.get((topic.id, partition))
        if processor is not None:
            await processor.republish_opened()


async def run_upkeep(services: Services, partitions: Partitions, *, sweeps: bool = True) -> None:
    """Run one round of retention, and of the sweep if `sweeps`.

    Errors are logged; the next round retries.
    """
    try:
        await retire(services, partitions)
        if sweeps:
            await sweep(services, services.settings.sweep_age_ms)
    except Exception as error:  # noqa: BLE001 - a fault in one round must not end retention until the next start
        trace = None if isinstance(error, MemqError) else error
        services.events.warning("housekeeping-failed", str(error) or repr(error), trace)


async def trim_compacted(services: Services, topic: Topic) -> None:
    """Remove a topic's pointers from the queue if manifests have them. Raises: as store and queue."""
    for partition in read_partitions(topic):
        manifest = await services.manifests.highest(partition)
        if manifest is not None:
            await leave_queue(services.queue, services.manifests, partition, manifest)
            services.pointers.forget(partition)


def first_old_ms(manifest: CompactionManifest | None) -> int:
    """Return the greatest queue time of the first part of a manifest; retention compares its age."""
    return manifest.parts[0].greatest_ms if manifest is not None and manifest.parts else TIME_MS_END


async def retire_compacted(
    services: Services,
    partition: ReadPartition,
    manifest: CompactionManifest,
    settings: TopicSettings,
    younger: Sequence[tuple[Entry, Pointer | None]],
    order: Truncation | None = None,
    unread: int = NO_OFFSET,
) -> CompactionManifest:
    """Remove the parts that are too old, too much or truncated, and return the resulting manifest.

    `younger` are the queue's entries. Pointers that the manifest has are first removed from the queue, in case their
    compaction was killed before. Raises: as store and queue.
    """
    await leave_queue(services.queue, services.manifests, partition, manifest)
    now_ms = services.deletion_clock.wall_ms()
    behind = sum(pointer.stored_bytes for _, pointer in younger if pointer)
    count = expired_parts(manifest, behind, settings, now_ms, order, unread)
    if not count:
        return manifest
    successor = without(manifest, count, now_ms, services.settings.sweep_age_ms)
    services.pointers.forget(partition)
    if not await services.manifests.publish(successor):
        return manifest  # a compaction was faster: the next round reads its manifest
    gone = sum(part.entries for part in manifest.parts[:count])
    services.counters.retired_pointers += gone
    services.events.info(
        "retired", f"topic '{partition.topic}' partition {partition.partition}: {gone} compacted pointers"
    )
    return successor


def expired_parts(
    manifest: CompactionManifest,
    bytes_behind: int,
    settings: TopicSettings,
    now_ms: int,
    order: Truncation | None = None,
    unread: int = NO_OFFSET,
) -> int:
    """Return how many parts are too old, too much or truncated.

    `bytes_behind` are stored bytes of younger batches.

    Pure.
    """
    window_ms = window_since_ms(settings, now_ms)
    bytes_behind += sum(part.bytes for part in manifest.parts)
    count = 0
    for part in manifest.parts:
        bytes_behind -= part.bytes
        too_old = settings.retention_ms > 0 and part.greatest_ms < now_ms - settings.retention_ms
        too_much = 0 < settings.retention_bytes <= bytes_behind and part.greatest_ms < window_ms
        ordered = order is not None and order.covers(part.next - 1, part.greatest_ms) and part.greatest_ms < window_ms
        waits = part.next > unread and part.greatest_ms >= now_ms - settings.retention_groups_ms_max
        if not (ordered or ((too_old or too_much) and not waits)):
            break
        count += 1
    return count
