"""Fills a lost queue, of a cluster or a data folder, from the objects: one pointer for each batch.

Each read partition is restored separately. A partition that owners use is only checked, never changed.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from awscrt.checksums import crc32c

from memq.broker.assembly import opened_parts
from memq.broker.data_folder import DataFolder
from memq.broker.process import STORE_NAME
from memq.broker.restore.compacted_batches import CompactedBatches, compacted_batches, locations_below, retire_manifests
from memq.broker.restore.rebuild import (
    BatchLocation,
    FoundBatch,
    PresentLog,
    Rebuilder,
    at_least,
    find_batch,
    find_shared_batch,
    follow_on,
    staged_locations,
)
from memq.broker.restore.state_logs import StateLogRestorer
from memq.broker.restore.unknown_topics import LOST_TEXT, unknown_objects
from memq.broker.sweep.unproven_objects import is_decided
from memq.broker.upkeep.truncation import without_lost_orders
from memq.errors import (
    CorruptDataError,
    InvalidRequestError,
    MemqError,
    NotFoundError,
    QueueError,
    QueueRefusedError,
    UnsupportedFormatError,
)
from memq.format.key import ObjectKey, compaction_prefix, parse_object_key, shared_prefix, staged_prefix, topic_prefix
from memq.format.object import ObjectTopic
from memq.format.pointer import Pointer, encode_pointer
from memq.format.staged_manifest import Manifest, manifest_under
from memq.governor import Coordinator
from memq.governor.standalone import StandaloneCoordinator
from memq.notification import NotificationQueue, Publication
from memq.notification.log_reader import entries_between, valid_span
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.clock import Clock
from memq.runtime.runtime import Runtime
from memq.runtime.sqlite_file import copy_database, write_log_into
from memq.settings import PartSettings
from memq.storage_handlers import StorageHandler
from memq.storage_handlers.confirmed_reads import ConfirmedReads, Way, read_sealed
from memq.storage_handlers.files import sync_folder
from memq.storage_handlers.filesystem import FilesystemHandler
from memq.topic import Committed, Position, ReadPartition, Topic, Totals, is_state_topic, read_partitions

T = TypeVar("T")

ANY_AGE_MS = 1 << 53
LocationsByPartition = dict[int, list[BatchLocation]]  # by write partition
LocationsByTopic = dict[ObjectTopic, list[BatchLocation]]
OPENED_TEXT = (
    "it was opened in the new queue before all was restored: remove it there, and restore before brokers start"
)


@dataclass(slots=True)
class Restored:
    """The results of a topic.

    `copies` counts batches without new records; `findings` are pairs of an object and its fault. `intact` counts read
    partitions whose log owners use: their batches were neither restored nor counted. The consumer groups in `groups`
    had positions in a lost log, and start at the beginning of the new log.
    """

    topic: str
    objects: int = 0  # each batch of a shared object counts as one
    pointers: int = 0  # published pointers; in a dry run those that a restore would publish
    intact: int = 0
    held: int = 0  # in the queue already, from an earlier run
    records: int = 0
    bytes: int = 0
    copies: int = 0
    damaged_blocks: int = 0
    findings: list[tuple[str, str]] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)


class Restorer:
    """Restores topics of one cluster from one store into one queue.

    No broker of the cluster may run meanwhile.
    """

    def __init__(
        self,
        cluster: str,
        store_name: str,
        store: StorageHandler,
        queue: NotificationQueue,
        clock: Clock,
        *,
        dry_run: bool = False,
        moved: Callable[[int], None] = lambda count: None,
    ) -> None:
        """`moved` receives the number of finished objects."""
        self._cluster = cluster
        self._store_name = store_name
        self._store = store
        self._reads = ConfirmedReads()
        self._queue = queue
        self._clock = clock
        self._dry_run = dry_run
        self._moved = moved
        self._shared: LocationsByTopic | None = None
        self._staged: LocationsByTopic | None = None  # in the order of their commits
        self._compacted = CompactedBatches()
        self._renumbered: dict[ReadPartition, Topic] = {}  # read partitions whose logs are made again

    async def restore_all(self, coordinator: Coordinator) -> list[Restored]:
        """Restore all topics of the coordinator, and return the result of each.

        Objects of a topic that it does not know, and that was not deleted, are counted in a result with a finding.
        Raises: InvalidRequestError when a broker runs or starts meanwhile, or when the coordinator knows no topic and
        the store has such objects, except in a dry run; MemqError of the parts.
        """
        await _check_stopped(coordinator)
        topics = await coordinator.topics()
        results: list[Restored] = []
        for topic in topics:
            if is_state_topic(topic.name):
                continue  # its logs have no pointers
            results.append(await self.restore(await self._without_lost_orders(coordinator, topic)))
            await _check_stopped(coordinator)  # a paused broker may have returned
        for topic in topics:  # positions of groups follow the logs
            if is_state_topic(topic.name):
                results.append(await self._restore_states(topic, coordinator))
                await _check_stopped(coordinator)
        others = Restored("")
        shared, staged = await self._of_many(others)
        batches = Counter({topic: len(locations) for topic, locations in shared.items()})
        batches += Counter({topic: len(locations) for topic, locations in staged.items()})
        unknown = await unknown_objects(self._cluster, self._store, coordinator, topics, batches)
        if unknown and not topics and not self._dry_run:
            raise InvalidRequestError(
                f"the coordinator knows no topic, and the store has {unknown.total()} objects of"
                f" {', '.join(sorted(topic.name for topic in unknown))[:1_000]}; nothing was restored",
                hint="check the settings coordinator and cluster; --dry-run counts the objects of each topic",
            )
        for lost, count in unknown.items():
            finding = (f"topic '{lost.name}' with id {lost.id}", LOST_TEXT.format(count=count))
            results.append(Restored(lost.name, objects=count, findings=[finding]))
        return [*results, others] if others.findings else results

    async def _without_lost_orders(self, coordinator: Coordinator, topic: Topic) -> Topic:
        """Withdraw the orders to truncate logs that the queue has lost: the offsets in them are of those logs."""
        kept = await without_lost_orders(self._queue, topic)
        return topic if kept == topic or self._dry_run else await coordinator.alter_topic(kept)

    async def _restore_states(self, topic: Topic, coordinator: Coordinator) -> Restored:
        """Restore the state logs of a topic, with the positions in logs that were made again."""
        parts = (self._cluster, self._store, self._queue, self._clock)
        states = StateLogRestorer(*parts, dry_run=self._dry_run)
        known = await coordinator.assignments()
        epochs = {each.partition: each.epoch for each in known if each.topic_id == topic.id}
        found = await states.restore(topic, epochs, self._renumbered, await coordinator.topics())
        return Restored(
            topic.name,
            objects=found.restored,
            pointers=found.restored,
            intact=found.intact,
            findings=found.findings,
            groups=found.groups,
        )

    async def restore(self, topic: Topic) -> Restored:
        """Publish the lost pointers of a topic's objects, and return the result.

        A call after an interrupted one continues where that one ended. A dry run publishes and creates nothing. A read
        partition that a broker opened before its restore is a finding: no pointer can be put before the opening.
        Raises: MemqError of store and queue.
        """
        result = Restored(topic.name)
        locations = await self._locations(topic, result)
        lost = await self._lost(topic, locations, result)
        self._renumbered |= dict.fromkeys(lost, topic)
        if not lost or self._dry_run:
            await self._restore(topic, locations, lost, result)
            return result
        partitions = read_partitions(topic)
        await self._queue.create(partitions, ANY_AGE_MS)  # pointers keep their times, however old they are
        try:
            lost = await self._lost_still(topic, lost)
            await self._rewind(lost, result)
            await self._restore(topic, locations, lost, result)
        finally:
            await self._queue.create(partitions, topic.settings.stale_publish_ms)  # as every broker's start does
        await retire_manifests(self._cluster, self._store, topic, lost, self._clock.wall_ms())
        return result

    async def _lost(
        self, topic: Topic, locations: LocationsByPartition, result: Restored
    ) -> dict[ReadPartition, PresentLog]:
        """Return the read partitions to restore, with the present log of each."""
        lost: dict[ReadPartition, PresentLog] = {}
        for partition in read_partitions(topic):
            try:
                held = await held_in(self._queue, partition, topic.writers_of(partition))
            except NotFoundError:
                held = PresentLog()
            except UnsupportedFormatError as error:
                result.findings.append((f"topic '{topic.name}' partition {partition.partition}", str(error)))
                continue
            if not held.in_use:
                lost[partition] = held
            elif await self._is_whole(topic, partition, held, locations):
                result.intact += 1
            else:
                result.findings.append((f"topic '{topic.name}' partition {partition.partition}", OPENED_TEXT))
        return lost

    async def _lost_still(self, topic: Topic, lost: dict[ReadPartition, PresentLog]) -> dict[ReadPartition, PresentLog]:
        """Read the logs again after their creation, and return them.

        A single "not found" is no proof, and pointers that are published into a log in use would double its batches.
        Raises: QueueError when a log that was not found before is in use.
        """
        found = {partition: await held_in(self._queue, partition, topic.writers_of(partition)) for partition in lost}
        for partition, held in found.items():
            if held.in_use:
                raise QueueError(
                    f"topic '{topic.name}' partition {partition.partition}: the queue has its log, and did not show"
                    " it before; nothing of the topic was restored",
                    hint="run memq restore again",
                )
        return found

    async def _rewind(self, lost: Iterable[ReadPartition], result: Restored) -> None:
        """Set the positions that groups have in lost logs to the beginning: a new log has other offsets.

        A group that continued at an old offset would skip records. Raises: InvalidRequestError when it has members.
        """
        begins = {partition: (await valid_span(self._queue, partition)).begin for partition in lost}
        for group in await self._queue.former.names():
            found = (await self._queue.former.read(group)).committed
            at = {partition: Position(partition.partition, begin) for partition, begin in begins.items()}
            stale = {
                partition: Committed(at[partition], Totals())
                for partition, committed in found.items()
                if partition in at and committed.position != at[partition]
            }
            if stale:
                result.groups.append(group)
                await self._queue.former.store(group, stale)

    async def _is_whole(
        self, topic: Topic, partition: ReadPartition, held: PresentLog, locations: LocationsByPartition
    ) -> bool:
        """Whether a log in use has all batches that belong before its first opening.

        Reads objects only if a batch has no pointer: it may be a copy.
        """
        earlier = [held.should_have(locations.get(writer, ())) for writer in topic.writers_of(partition)]
        if all(held.has(location) for each in earlier for location in each):
            return True
        rebuilder = Rebuilder(topic, self._cluster, self._store_name)
        async for found in self._in_order(topic, earlier, Restored(topic.name)):
            pointer = rebuilder.pointer(found)
            if pointer is not None and not held.has_pointer(pointer):
                return False
        return True

    async def _restore(
        self, topic: Topic, locations: LocationsByPartition, lost: dict[ReadPartition, PresentLog], result: Restored
    ) -> None:
        for partition in read_partitions(topic):
            rebuilder = Rebuilder(topic, self._cluster, self._store_name)  # of each: time begins again with it
            writers = [locations.pop(writer, []) for writer in topic.writers_of(partition)]
            if partition not in lost:
                continue
            async for found in self._in_order(topic, writers, result):
                await self._take(partition, rebuilder.pointer(found), lost[partition], result)
        for stray in locations.values():
            result.findings += [(location.key, "the topic has no such partition") for location in stray]

    async def _locations(self, topic: Topic, result: Restored) -> LocationsByPartition:
        """Locate the topic's batches by write partition, in the order of epoch and batch sequence."""
        shared, every_staged = await self._of_many(result)
        of_topic = ObjectTopic(topic.name, topic.id)
        locations: LocationsByPartition = {}
        self._compacted = await compacted_batches(self._cluster, self._store, topic)
        result.findings += self._compacted.findings
        for location in (*self._compacted.locations, *shared.get(of_topic, ())):
            locations.setdefault(location.partition, []).append(location)
        compacted = compaction_prefix(self._cluster, topic.name, topic.id)
        async for entry in self._store.list(topic_prefix(self._cluster, topic.name, topic.id)):
            if entry.key.startswith(compacted):
                continue
            try:
                named = parse_object_key(entry.key)
            except InvalidRequestError as error:
                result.findings.append((entry.key, str(error)))
                continue
            if isinstance(named, ObjectKey):
                location = BatchLocation(entry.key, named.partition, named.epoch, named.batch_sequence)
                locations.setdefault(named.partition, []).append(location)
        for found in locations.values():
            found.sort(key=lambda location: (location.epoch, location.batch_sequence))
        staged: LocationsByPartition = {}
        for location in every_staged.get(of_topic, ()):
            if self._compacted.take_piece(location):
                continue
            staged.setdefault(location.partition, []).append(location)
        for partition, pieces in staged.items():
            own = locations.setdefault(partition, [])
            own += follow_on(own, pieces)
        return locations

    async def _of_many(self, result: Restored) -> tuple[LocationsByTopic, LocationsByTopic]:
        """Return the locations of the batches in shared and in staged objects; list each kind once."""
        if self._shared is None:
            self._shared = await locations_below(
                self._store, shared_prefix(self._cluster), result.findings, self._moved
            )
        if self._staged is None:
            self._staged = await self._staged_locations(result)
        return self._shared, self._staged

    async def _staged_locations(self, result: Restored) -> LocationsByTopic:
        """Locate the pieces of all staged batches that have a manifest.

        Such a batch was committed, or its commit had begun. That of a transaction counts if it was committed.
        """
        manifests: list[tuple[Manifest, int]] = []
        async for entry in self._store.list(staged_prefix(self._cluster)):
            if "/commits/" in entry.key:
                try:
                    manifest, body = await read_sealed(self._store, entry.key, manifest_under, self._reads)
                    if not manifest.is_atomic or await is_decided(self._store, entry.key):
                        manifests.append((manifest, crc32c(body)))
                except (CorruptDataError, UnsupportedFormatError) as error:
                    result.findings.append((entry.key, str(error)))
        manifests.sort(key=lambda each: (each[0].created_ms, each[0].writer, each[0].batch_id))
        found: LocationsByTopic = {}
        for manifest, checksum in manifests:
            for topic, locations in staged_locations(manifest, checksum).items():
                found.setdefault(topic, []).extend(locations)
        return found

    async def _in_order(
        self, topic: Topic, writers: list[list[BatchLocation]], result: Restored
    ) -> AsyncIterator[FoundBatch]:
        """Yield the batches of one read partition: each writer's in its order, the writers merged by time."""
        streams = [self._batches(topic, locations, result) for locations in writers]
        heads: list[tuple[int, int, FoundBatch]] = []
        for number, stream in enumerate(streams):
            async for found in stream:
                heapq.heappush(heads, (found.entry.appended_ms, number, found))
                break
        while heads:
            _, number, found = heapq.heappop(heads)
            yield found
            async for found in streams[number]:
                heapq.heappush(heads, (found.entry.appended_ms, number, found))
                break

    async def _batches(
        self, topic: Topic, locations: list[BatchLocation], result: Restored
    ) -> AsyncIterator[FoundBatch]:
        last_ms = 0
        for location in locations:
            result.objects += 1
            try:
                found = await self._find(topic, location)
            except (CorruptDataError, UnsupportedFormatError) as error:
                result.findings.append((location.key, str(error)))
            except NotFoundError as error:
                if location.writer is None:
                    raise
                result.findings.append((location.key, f"retention took what was staged: {error}"))
            else:
                if location.writer is not None:  # staged pieces come last, and queue times must not decrease
                    found = at_least(found, last_ms)
                last_ms = max(last_ms, found.entry.appended_ms)
                if found.damaged:
                    result.damaged_blocks += found.damaged
                    result.findings.append((location.key, f"{found.damaged} of {len(found.blocks)} blocks are damaged"))
                yield found
            if location.entry is None:
                self._moved(1)

    async def _find(self, topic: Topic, location: BatchLocation) -> FoundBatch:
        return await self._surely(
            location.key, partial(self._find_once, topic, location), lambda found: not found.damaged
        )

    async def _find_once(self, topic: Topic, location: BatchLocation) -> FoundBatch:
        if location.entry is not None:
            try:
                data = await self._store.get_range(location.key, location.entry.offset, location.entry.length)
                return self._compacted.found(find_shared_batch(location, data, topic))
            except (CorruptDataError, UnsupportedFormatError):
                pass  # the index still has the offsets and sequences of the blocks
        return self._compacted.found(find_batch(location, await self._store.get(location.key, checked=False), topic))

    async def _surely(
        self, key: str, read: Callable[[], Awaitable[T]], is_whole: Callable[[T], bool] = lambda found: True
    ) -> T:
        """Read an apparently damaged batch again: a read error must not count as damage."""
        return await self._reads.read([Way(f"object '{key}'", read)], is_whole)

    async def _take(
        self, partition: ReadPartition, pointer: Pointer | None, held: PresentLog, result: Restored
    ) -> None:
        if pointer is None:
            result.copies += 1
            return
        if held.has_pointer(pointer):
            result.held += 1
            return
        if not self._dry_run:
            await self._publish(partition, pointer)
        result.pointers += 1
        result.records += pointer.records
        result.bytes += pointer.stored_bytes

    async def _publish(self, partition: ReadPartition, pointer: Pointer) -> None:
        """Publish with the batch's own time, so that a seek by time finds it.

        If the queue refuses that time, publish with the present time. Raises: QueueRefusedError.
        """
        for time_ms in (pointer.sealed_ms, self._clock.wall_ms()):
            publication = Publication(partition, pointer.partition, pointer.epoch, time_ms, encode_pointer(pointer))
            try:
                await self._queue.publish(publication)
            except QueueRefusedError:
                continue
            return
        raise _refused(partition)


def _refused(partition: ReadPartition) -> MemqError:
    return QueueRefusedError(
        f"the queue refuses pointers of topic '{partition.topic}' that are dated now",
        hint="set the clocks of this machine and of the queue's",
    )


async def held_in(queue: NotificationQueue, partition: ReadPartition, writers: Iterable[int]) -> PresentLog:
    """Read a log until each of its write partitions was opened, or to its end.

    Raises: as the queue and `PresentLog.note`.
    """
    span = await valid_span(queue, partition)
    held = PresentLog(trimmed=0 < span.begin < span.end)  # retention leaves the last pointers
    unopened = set(writers)
    if held.trimmed or not unopened:
        return held
    async for entries in entries_between(queue, partition, span.begin, span.end):
        for entry in entries:
            held.note(entry)
        unopened -= held.opened.keys()
        if not unopened:
            break
    return held


async def restore_cluster(
    cluster: str,
    parts: PartSettings,
    *,
    dry_run: bool = False,
    moved: Callable[[int], None] = lambda count: None,
    runtime: Runtime | None = None,
) -> list[Restored]:
    """Restore the queue for all topics; return the results of `Restorer.restore_all`.

    Existing pointers stay, and intact partitions are not changed. A call after an interrupted one continues where that
    one ended. `moved` gets the number of finished objects.
    Raises: as `Restorer.restore_all`.
    """
    runtime = runtime or Runtime()
    async with opened_parts(parts, runtime, cluster) as (coordinator, store, queue):
        restorer = Restorer(cluster, STORE_NAME, store, queue, runtime.clock, dry_run=dry_run, moved=moved)
        return await restorer.restore_all(coordinator)


async def _check_stopped(coordinator: Coordinator) -> None:
    running = [broker.id for broker in await coordinator.brokers()]
    if running:
        raise InvalidRequestError(
            f"brokers run: {', '.join(running)}",
            hint="stop them, and run memq restore again; a killed one disappears after its session timeout",
        )


async def restore_folder(
    path: Path,
    *,
    dry_run: bool = False,
    moved: Callable[[int], None] = lambda count: None,
    runtime: Runtime | None = None,
) -> list[Restored]:
    """Restore the queue of the data folder at `path`; return the results of `Restorer.restore_all`.

    The new queue appears complete or not at all: with a partial one, a start would sweep the objects that it does not
    name. An existing queue keeps its pointers, and gets the partitions whose log it lost. `moved` gets the number of
    finished objects.
    Raises: InvalidRequestError when the folder is in use; CorruptDataError of a damaged queue; QueueError when its file
    can't be copied or completed; as `Restorer.restore_all`.
    """
    runtime = runtime or Runtime()
    folder = DataFolder.open(path, runtime.random, queue_gone=True)
    try:
        made = folder.tmp / folder.queue.name
        _remove(made)
        if folder.queue.exists() and folder.queue.stat().st_size:
            write_log_into(folder.queue, "queue", QueueError)
            copy_database(folder.queue, made, "queue", QueueError)  # partitions and positions of groups stay
        result = await _restore(folder, made, runtime, dry_run, moved)
        if not dry_run:
            write_log_into(made, "restored queue", QueueError)
            _remove_logs(folder.queue)  # the file itself stays until the new one replaces it
            made.replace(folder.queue)
            sync_folder(path)
        return result
    finally:
        folder.close()


async def _restore(
    folder: DataFolder, made: Path, runtime: Runtime, dry_run: bool, moved: Callable[[int], None]
) -> list[Restored]:
    store = FilesystemHandler(folder.objects, folder.tmp)
    queue = SqliteQueue(made, runtime.clock)
    coordinator = StandaloneCoordinator(folder.topics, folder.cluster, runtime.clock)
    restorer = Restorer(folder.cluster, STORE_NAME, store, queue, runtime.clock, dry_run=dry_run, moved=moved)
    try:
        return await restorer.restore_all(coordinator)
    finally:
        await coordinator.close()
        await queue.close()
        await store.close()
        if dry_run:
            _remove(made)


def _remove(queue: Path) -> None:
    """Remove a queue's file and the files that SQLite keeps next to it."""
    queue.unlink(missing_ok=True)
    _remove_logs(queue)


def _remove_logs(queue: Path) -> None:
    """Remove the files that SQLite keeps next to a queue's file."""
    for ending in ("-wal", "-shm", "-journal"):
        queue.with_name(queue.name + ending).unlink(missing_ok=True)
