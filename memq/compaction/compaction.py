"""Compaction of a read partition: large objects, then the manifest, then the pointers leave.

Theory. Each step leaves a log that is whole, so whoever is killed leaves nothing to repair: objects and parts that no
manifest names go with the sweep, pointers that a manifest has and the queue too are the same in both, and leave with
the next run or with retention. What is put is named within half the sweep's safety age, or not at all: a sweep that
listed it before may be about to delete it (`memq.broker.upkeep.sweep`). The originals are named by the parts for that
age, since readers may still be at them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from msgspec.structs import replace

from memq.compaction.copying import BatchCopier, Copied
from memq.compaction.files import ColdFiles
from memq.compaction.plan import ColdRule, cold_spans, following, without
from memq.errors import NotReadyError
from memq.format.cold import ColdManifest
from memq.notification import PointerReader, Span
from memq.runtime.clock import Clock
from memq.topic import ReadPartition, TopicSettings

OBJECTS_MAX = 16  # of one manifest of a plain compaction
Copy = Callable[[ReadPartition, Sequence[Span]], Awaitable[Sequence[Copied]]]


class TrimmedQueue(PointerReader, Protocol):
    """A queue whose oldest pointers can be taken."""

    async def trim(self, partition: ReadPartition, before: int) -> None:
        """See `PartitionAdmin.trim`."""
        ...


async def manifest_of(files: ColdFiles, partition: ReadPartition) -> ColdManifest:
    """Return the manifest that holds, or what comes before the first one."""
    return await files.highest(partition) or ColdManifest(
        number=0,
        cluster=files.cluster,
        topic=partition.topic,
        topic_id=partition.topic_id,
        partition=partition.partition,
    )


async def leave_queue(queue: TrimmedQueue, partition: ReadPartition, manifest: ColdManifest) -> None:
    """Have the pointers leave the queue that a manifest has which is, or was, the highest."""
    if (await queue.span(partition)).begin < manifest.next:
        await queue.trim(partition, manifest.next)


async def publish_parts(
    files: ColdFiles, manifest: ColdManifest, copied: Sequence[Copied], clock: Clock, named_within_ms: int
) -> ColdManifest | None:
    """Make the parts visible that were copied behind a manifest.

    The result is None when another compaction or retention was faster.
    Where they do not follow on its end, retention has taken what lay between, and so all that is older: its parts go.
    Raises: NotReadyError when it took too long to name what was copied first.
    """
    parts = tuple(sorted((each.part for each in copied), key=lambda part: part.first))
    now_ms = clock.wall_ms()
    if now_ms - min(part.created_ms for part in parts) >= named_within_ms:
        raise NotReadyError(
            f"copying took over {named_within_ms} ms, and a sweep may delete objects that no manifest names",
            hint="run it again, with fewer objects at once",
        )
    if parts[0].first > manifest.next:
        taken = without(manifest, len(manifest.parts), now_ms, 2 * named_within_ms)
        manifest = replace(taken, number=manifest.number)
    successor = following(manifest, parts)
    return successor if await files.publish(successor) else None


async def compact(
    queue: TrimmedQueue,
    files: ColdFiles,
    copier: BatchCopier,
    partition: ReadPartition,
    settings: TopicSettings,
    rule: ColdRule,
    clock: Clock,
    *,
    named_within_ms: int,
) -> list[Copied]:
    """Compact a read partition in this process, and return what was done.

    Two at once, or killed ones, do no harm.

    Raises: NotReadyError when retention was faster; as stores and queue.
    """
    done: list[Copied] = []
    now_ms = clock.wall_ms()  # of all rounds: else each would find a little more
    while True:
        manifest = await manifest_of(files, partition)
        await leave_queue(queue, partition, manifest)
        copied: list[Copied] = []
        async for span in cold_spans(queue, partition, manifest.next, settings, rule, now_ms):
            copied.append(await copier.copy(partition, span))
            if len(copied) == OBJECTS_MAX:
                break
        if not copied:
            return done
        if await publish_parts(files, manifest, copied, clock, named_within_ms):
            done += copied
