"""Retention of compacted parts: the oldest part of a manifest is removed when too old or too much.

Its objects go with the sweep, when readers have had its safety age to learn of the new manifest.
"""

from __future__ import annotations

from collections.abc import Sequence

from memq.broker.services import Services
from memq.compaction.compaction import leave_queue
from memq.compaction.plan import window_since_ms, without
from memq.format.cold import ColdManifest
from memq.format.pointer import Pointer
from memq.limits import TIME_MS_END
from memq.notification import Entry
from memq.topic import ReadPartition, Topic, TopicSettings, read_partitions

COLD_LOOK_S = 600.0  # how often retention looks for a manifest: each time is a listing


async def trim_cold(services: Services, topic: Topic) -> None:
    """Have the pointers of a topic leave the queue that manifests have. Raises: as store and queue."""
    for partition in read_partitions(topic):
        manifest = await services.cold.highest(partition)
        if manifest is not None:
            await leave_queue(services.queue, partition, manifest)
            services.pointers.forget(partition)


def first_old_ms(manifest: ColdManifest | None) -> int:
    """Return the queue time by which the first cold part is judged."""
    return manifest.parts[0].greatest_ms if manifest is not None and manifest.parts else TIME_MS_END


async def retire_cold(
    services: Services,
    partition: ReadPartition,
    manifest: ColdManifest,
    settings: TopicSettings,
    younger: Sequence[tuple[Entry, Pointer | None]],
) -> ColdManifest:
    """Take the parts that are too old or too much, and return the manifest then.

    `younger` are the queue's entries.
    What the manifest has leaves the queue, if its compaction was killed before. Raises: as store and queue.
    """
    await leave_queue(services.queue, partition, manifest)
    now_ms = services.runtime.clock.wall_ms()
    behind = sum(pointer.stored_bytes for _, pointer in younger if pointer)
    count = expired_parts(manifest, behind, settings, now_ms)
    if not count:
        return manifest
    successor = without(manifest, count, now_ms, services.settings.sweep_age_ms)
    services.pointers.forget(partition)
    if not await services.cold.publish(successor):
        return manifest  # a compaction was faster: the next round reads what it has made
    gone = sum(part.entries for part in manifest.parts[:count])
    services.counters.retired_pointers += gone
    services.events.info("retired", f"topic '{partition.topic}' partition {partition.partition}: {gone} cold pointers")
    return successor


def expired_parts(manifest: ColdManifest, bytes_behind: int, settings: TopicSettings, now_ms: int) -> int:
    """Return how many parts are too old or too much; `bytes_behind` are stored bytes of younger batches.

    Pure.
    """
    window_ms = window_since_ms(settings, now_ms)
    bytes_behind += sum(part.bytes for part in manifest.parts)
    count = 0
    for part in manifest.parts:
        bytes_behind -= part.bytes
        too_old = settings.retention_ms > 0 and part.greatest_ms < now_ms - settings.retention_ms
        too_much = 0 < settings.retention_bytes <= bytes_behind and part.greatest_ms < window_ms
        if not (too_old or too_much):
            break
        count += 1
    return count
