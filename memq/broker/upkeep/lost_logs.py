"""Finds losses of the queue: missing topics, and empty logs of partitions with stored batches.

With an empty queue, a sweep would find every object without a pointer, and an owner would begin the log again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from memq.broker.sweep.orphan_objects import batches_of
from memq.compaction.reader import ManifestFiles
from memq.errors import (
    CorruptDataError,
    DeniedError,
    InvalidRequestError,
    LogLostError,
    MemqError,
    NotFoundError,
    QueueError,
    RetryableError,
    UnsupportedFormatError,
)
from memq.format.key import compaction_manifest_prefix, is_large_object, shared_prefix, staged_prefix, topic_prefix
from memq.governor import Coordinator
from memq.notification import PointerReader, Span
from memq.runtime.tasks import PARTITIONS_AT_ONCE_MAX, bunches
from memq.storage_handlers import ObjectEntry, StorageHandler
from memq.topic import CLOCK_ERROR_MS, ReadPartition, Topic, read_partitions

LOOKS_AT_ONCE_MAX = 16
SPAN_S_MAX = 5.0  # time-out for the span of one log
Unanswered = Callable[[ReadPartition, MemqError], None]


@dataclass(frozen=True, slots=True)
class LostLogs:
    """Compares the queue of one cluster with its store."""

    cluster: str
    store: StorageHandler
    queue: PointerReader
    coordinator: Coordinator

    async def check(self, unanswered: Unanswered | None = None) -> list[LogLostError]:
        """Prove that the queue knows each topic that has objects.

        Returns the logs that the queue has lost of the topics that it knows. If at least half of the logs answer, the
        check gives each unanswered or damaged log to `unanswered`: its opening checks it again. Without `unanswered`,
        such a log ends the check.
        A topic without objects that is not in the queue was not fully created. Shared objects may belong to any topic,
        so they prove a loss only if the queue knows no topic that shares objects. Staged objects prove a loss only if
        the queue knows no topic at all. Raises: InvalidRequestError, MemqError of the parts.
        """
        known, sharing, held, lost = False, "", False, ""
        empty: list[tuple[Topic, ReadPartition]] = []
        silent: list[tuple[ReadPartition, MemqError]] = []
        answered = 0
        async for topic, spans in self._shown():
            if isinstance(spans, NotFoundError):
                await self._refuse_objects(topic.name, topic_prefix(self.cluster, topic.name, topic.id))
                sharing, lost = topic.name if topic.settings.shared_objects else sharing, topic.name
                continue
            for partition, span in zip(read_partitions(topic), spans, strict=True):
                if isinstance(span, MemqError):
                    silent.append((partition, span))
                    continue
                held, known, answered = True, known or topic.settings.shared_objects, answered + 1
                if span.begin == span.end:
                    empty.append((topic, partition))
        passing = [error for _, error in silent if isinstance(error, RetryableError)]
        if silent and (unanswered is None or answered < len(passing)):
            raise silent[0][1]
        for partition, error in silent:
            assert unanswered is not None, "raised above"
            unanswered(partition, error)
        if sharing and not known:
            await self._refuse_objects(sharing, shared_prefix(self.cluster))
        if lost and not held:
            await self._refuse_objects(lost, staged_prefix(self.cluster))
        return await self._lost_logs(empty)

    async def _shown(self) -> AsyncIterator[tuple[Topic, list[Span | MemqError] | NotFoundError]]:
        """Yield each topic with the spans of its partitions; NotFoundError when the queue lacks some."""
        for bunch in bunches(await self.coordinator.topics()):
            asked = (self._spans(read_partitions(topic)) for topic in bunch)
            for topic, spans in zip(bunch, await asyncio.gather(*asked, return_exceptions=True), strict=True):
                if isinstance(spans, BaseException) and not isinstance(spans, NotFoundError):
                    raise spans
                yield topic, spans

    async def _spans(self, partitions: Sequence[ReadPartition]) -> list[Span | MemqError]:
        """Return the span of each partition of a topic, or the error of a partition that has none now.

        Raises: NotFoundError when the queue lacks a partition; other MemqErrors that a retry does not solve.
        """
        found: list[Span | MemqError] = []
        for first in range(0, len(partitions), PARTITIONS_AT_ONCE_MAX):
            asked = partitions[first : first + PARTITIONS_AT_ONCE_MAX]
            for span in await asyncio.gather(*map(self._span, asked)):
                if isinstance(span, MemqError) and not isinstance(span, RetryableError | CorruptDataError):
                    raise span
                found.append(span)
        return found

    async def _span(self, partition: ReadPartition) -> Span | MemqError:
        try:
            async with asyncio.timeout(SPAN_S_MAX):
                return await self.queue.span(partition)
        except MemqError as error:
            return error
        except TimeoutError:
            name = f"topic '{partition.topic}' partition {partition.partition}"
            return QueueError(f"the log of {name} did not answer within {SPAN_S_MAX:g} s")

    async def _refuse_objects(self, topic: str, prefix: str) -> None:
        for _ in range(2):  # one listing may omit the objects
            async for entry in self.store.list(prefix):
                raise InvalidRequestError(
                    f"the queue does not have all of topic '{topic}', the store has '{entry.key}'",
                    hint="rebuild the queue with memq restore before any broker starts",
                )

    async def _lost_logs(self, empty: Sequence[tuple[Topic, ReadPartition]]) -> list[LogLostError]:
        """Return the errors of empty logs that once had an owner and have batches in the store."""
        if not empty:
            return []
        claimed = {(each.topic_id, each.partition) for each in await self.coordinator.assignments() if each.epoch}
        had = [
            (topic, partition)
            for topic, partition in empty
            if any((topic.id, writer) in claimed for writer in topic.writers_of(partition))
        ]
        turn = asyncio.Semaphore(LOOKS_AT_ONCE_MAX)

        async def check(topic: Topic, partition: ReadPartition) -> LogLostError | None:
            async with turn:
                return await self._lost_log(topic, partition)

        found = await asyncio.gather(*(check(*each) for each in had))
        return [error for error in found if error is not None]

    async def check_opening(self, topic: Topic, partition: int, *, claimed: bool) -> None:
        """Prove that a write partition without pointers in its log may be opened.

        `claimed`: the partition had an owner before. If not, the other write partitions of its log are checked.
        Raises: LogLostError, MemqError of the parts.
        """
        read = topic.read_partition_of(partition)
        for writer in topic.writers_of(read):
            if not claimed and writer != partition:
                claimed = (await self.coordinator.assignment(topic.id, writer)).epoch > 0
        if not claimed:
            return
        span = await self.queue.span(read)
        if span.begin < span.end:
            return  # entries of other write partitions, whose openings were checked, or of a restore
        error = await self._lost_log(topic, read)
        if error is not None:
            raise error

    async def _lost_log(self, topic: Topic, partition: ReadPartition) -> LogLostError | None:
        """Return the error of an empty log whose batches the store has."""
        try:  # twice: one listing may omit the objects, and a new log in place of a lost one can't be undone
            key = await self._stored(topic, partition) or await self._stored(topic, partition)
        except DeniedError:
            return None  # a broker that may not list does not sweep either
        if not key or await self._shows(partition) or await self.coordinator.deleted(topic.id):
            return None
        return LogLostError(
            f"topic '{topic.name}' partition {partition.partition}: the queue shows nothing of it,"
            f" the store has '{key}'"
        )

    async def _shows(self, partition: ReadPartition) -> bool:
        """Whether a log has entries now: it may have been opened since the first read."""
        try:
            span = await self.queue.span(partition)
        except NotFoundError:
            return False
        return span.begin != span.end

    async def _stored(self, topic: Topic, partition: ReadPartition) -> str:
        """Return the key of an object that a pointer of this log named, "" without one.

        The listing ends at the first such object. For a topic that shares objects, or may have done so earlier, the
        indexes of shared objects are read, too. Shared objects older than the topic are skipped.
        """
        writers = topic.writers_of(partition)
        try:
            manifest = await ManifestFiles(self.cluster, self.store).highest(partition)
        except (CorruptDataError, UnsupportedFormatError):
            return compaction_manifest_prefix(self.cluster, topic.name, topic.id, partition.partition)
        if manifest is not None and manifest.parts:
            return manifest.parts[0].key
        own, shared = topic_prefix(self.cluster, topic.name, topic.id), shared_prefix(self.cluster)
        for prefix in (own, shared) if topic.settings.shared_objects or topic.version > 1 else (own,):
            async for entry in self.store.list(prefix):
                of_others = prefix == shared and entry.modified_ms + CLOCK_ERROR_MS < topic.created_ms
                if not of_others and await self._holds(entry, topic, writers):
                    return entry.key
        return ""

    async def _holds(self, entry: ObjectEntry, topic: Topic, writers: Sequence[int]) -> bool:
        if is_large_object(entry.key):
            return False  # the manifest was checked; thousands of indexes would be read here
        try:
            async for named, partition, _, _ in batches_of(self.store, entry, [topic]):
                if named.id == topic.id and partition in writers:
                    return True
        except (CorruptDataError, NotFoundError, UnsupportedFormatError):
            pass
        return False
