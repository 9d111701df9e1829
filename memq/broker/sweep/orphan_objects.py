"""Unnamed objects that must stay: their log lost its past, or the coordinator lost their topic."""

from __future__ import annotations

from collections.abc import AsyncIterator, Container, Iterable, Mapping
from typing import NamedTuple

from memq.broker.sweep.log_coverage import LogCoverage
from memq.errors import CorruptDataError, InvalidRequestError, NotFoundError, UnsupportedFormatError
from memq.format.key import ObjectKey, has_many_batches, is_large_object, is_staged_object, parse_object_key
from memq.format.object import ObjectTopic
from memq.notification import PointerReader
from memq.storage_handlers import ObjectEntry, ObjectReader
from memq.storage_handlers.confirmed_reads import read_index
from memq.topic import PartitionKey, ReadPartition, Topic


class OrphanTopics:
    """Asks the queue once for each topic that the coordinator lacks. A deleted topic is in neither."""

    def __init__(self, store: ObjectReader, queue: PointerReader) -> None:
        self._store = store
        self._queue = queue
        self.held: dict[str, ObjectTopic] = {}  # topics in the queue, by id
        self._found: dict[str, bool] = {}

    async def holds(self, topic: ObjectTopic) -> bool:
        """Whether the queue has a topic. Raises: QueueError."""
        if topic.id not in self._found:
            try:
                await self._queue.span(ReadPartition(topic.name, topic.id, 0))
            except NotFoundError:
                self._found[topic.id] = False
            else:
                self._found[topic.id] = True
                self.held[topic.id] = topic
        return self._found[topic.id]

    async def owner_of(self, entries: Iterable[ObjectEntry]) -> ObjectTopic | None:
        """Return the topic whose objects these are, all of one prefix, when the queue has it.

        A key has only a part of the topic's id, so the whole id comes from the first object with an index. Raises: as
        the store; UnsupportedFormatError for an object of a newer version.
        """
        for entry in entries:
            try:
                if not isinstance(parse_object_key(entry.key), ObjectKey):
                    continue
            except InvalidRequestError:
                continue  # a foreign object
            try:
                index, _ = await read_index(self._store, entry)
            except (CorruptDataError, NotFoundError):
                continue
            for topic in index.meta.topics:
                return topic if await self.holds(topic) else None
        return None


class Claim(NamedTuple):
    """A log that may name an unnamed object: its state, and the action to take."""

    text: str
    cure: str


def lost_log(topic: str, partition: int) -> Claim:
    """Return the claim of a log that has lost pointers."""
    text = f"topic '{topic}' partition {partition}: the queue has lost what may have named"
    return Claim(text, "memq restore makes their pointers again")


def newer_object(topic: str, partition: int) -> Claim:
    """Return the claim of a log whose restore could not read objects of a newer version."""
    text = f"topic '{topic}' partition {partition}: a newer version of memq wrote, and no restore by this one named,"
    return Claim(text, "upgrade memq, remove the log, and restore it")


def forgotten_topic(topic: ObjectTopic) -> Claim:
    """Return the claim of a topic that the coordinator does not know, and the queue does."""
    return Claim(
        f"topic '{topic.name}' with id {topic.id}: the coordinator does not know it, but the queue has its pointers to",
        "restore a backup of the coordinator, or check its setting; of a topic that was deleted, delete its log",
    )


class OrphanObjects:
    """Finds orphans by key, or by the index of an object of many batches, with one GET for each.

    `logs` contains all write partitions of `topics` with pointers; `claimed` those that ever had an owner. `at_end`
    gets the objects that follow on the last batch of an epoch in a log, by write partition; `staged` the staged ones.
    """

    def __init__(
        self,
        store: ObjectReader,
        topics: Mapping[str, Topic],
        logs: Mapping[PartitionKey, LogCoverage],
        claimed: Container[PartitionKey],
        forgotten: OrphanTopics,
    ) -> None:
        self._store = store
        self._topics = topics
        self._logs = logs
        self._claimed = claimed
        self._forgotten = forgotten
        self.at_end: dict[PartitionKey, list[ObjectEntry]] = {}
        self.staged: dict[PartitionKey, list[ObjectEntry]] = {}

    async def claim_on(self, entry: ObjectEntry) -> Claim | None:
        """Return the claim of a log that may have named an object; None if the object may be deleted.

        Raises: as the store and the queue; UnsupportedFormatError for an object of a newer version.
        """
        try:
            async for topic, partition, epoch, batch_sequence in batches_of(self._store, entry, self._topics.values()):
                if topic.id not in self._topics:
                    if await self._forgotten.holds(topic):
                        return forgotten_topic(topic)
                elif not self._accounts((topic.id, partition), epoch, batch_sequence):
                    return lost_log(topic.name, partition)
                elif self._restored((topic.id, partition), epoch, batch_sequence) and await self._is_newer(entry):
                    return newer_object(topic.name, partition)
                elif is_large_object(entry.key):
                    continue  # a compaction copies only what pointers name
                elif not epoch and (topic.id, partition) in self._logs:
                    self.staged.setdefault((topic.id, partition), []).append(entry)
                elif epoch and self._logs[topic.id, partition].is_after_end(epoch, batch_sequence, entry.modified_ms):
                    self.at_end.setdefault((topic.id, partition), []).append(entry)
        except (CorruptDataError, NotFoundError):
            pass  # without an index, no restore can make a pointer to the object either
        return None

    def _accounts(self, key: PartitionKey, epoch: int, batch_sequence: int) -> bool:
        """Whether the log of a partition accounts for a batch.

        A batch of epoch 0 was staged, and any owner may have named it. An owner stores only after its opening, so its
        log has entries. A staged batch may also wait for a partition that never had an owner.
        """
        log = self._logs.get(key)
        if epoch:
            return log is not None and log.accounts_for(epoch, batch_sequence)
        return key not in self._claimed if log is None else not log.lost

    def _restored(self, key: PartitionKey, epoch: int, batch_sequence: int) -> bool:
        log = self._logs.get(key)
        return epoch > 0 and log is not None and log.is_restored(epoch, batch_sequence)

    async def _is_newer(self, entry: ObjectEntry) -> bool:
        """Whether an object is of a newer version. Raises: as the store; CorruptDataError."""
        try:
            await read_index(self._store, entry)
        except UnsupportedFormatError:
            return True
        return False


async def batches_of(
    store: ObjectReader, entry: ObjectEntry, topics: Iterable[Topic]
) -> AsyncIterator[tuple[ObjectTopic, int, int, int]]:
    """Yield topic, write partition, epoch and number of the batches of an object; none of other files.

    The key names the batch of an owner's object, whose topic must be one of `topics`. The index names the batches of
    shared and staged objects; the epoch of staged ones is 0. Raises: as `read_index`.
    """
    staged = is_staged_object(entry.key)
    if staged or has_many_batches(entry.key):
        index, _ = await read_index(store, entry)
        for batch in index.batches:
            epoch = 0 if staged else batch.epoch
            yield index.meta.topics[batch.topic], batch.partition, epoch, batch.batch_sequence
        return
    try:
        named = parse_object_key(entry.key)
    except InvalidRequestError:
        return
    if isinstance(named, ObjectKey):
        for topic in topics:  # of one prefix, there is one
            if (topic.name, topic.id[:8]) == (named.topic, named.topic_id):
                yield ObjectTopic(topic.name, topic.id), named.partition, named.epoch, named.batch_sequence
