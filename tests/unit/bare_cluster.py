"""A cluster in memory without a broker: store, queue and coordinator, filled by the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import cast

from awscrt.checksums import crc32c

from memq.broker.upkeep.lost_logs import LostLogs
from memq.compaction.plan import following
from memq.errors import MemqError, QueueError
from memq.format.blocks.header import parse_header
from memq.format.compaction_manifest import CompactionManifest, PartRef
from memq.format.key import object_key
from memq.format.object import TRAILER, BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.pointer import Pointer, encode_pointer
from memq.governor import Assignment, Coordinator
from memq.limits import TRAILER_BYTES
from memq.notification import Publication, Span
from memq.notification.memory import MemoryQueue
from memq.storage_handlers import ObjectEntry
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import ReadPartition, Topic, TopicSettings, equal_slots, read_partitions
from tests.brokers import block_of
from tests.contract.manual_clock import ManualClock

CLUSTER = "memq"
SHARING = TopicSettings(shared_objects=True)


def topic_of(name: str, partitions: int = 1, settings: TopicSettings | None = None) -> Topic:
    """Return a topic whose id follows from its name."""
    slots = equal_slots(partitions)
    return Topic(
        name=name,
        id=name.encode().hex().zfill(32),
        created_ms=0,
        partitions=slots,
        settings=settings or TopicSettings(),
    )


def indexed(topic: Topic, partition: int, epoch: int = 1, number: int = 0) -> bytes:
    """Return an object with the index of one batch, as memq reads it."""
    meta = ObjectMeta(cluster=CLUSTER, broker="b", topics=(ObjectTopic(topic.name, topic.id),), created_ms=1)
    block = block_of(topic, 0, [b"x"], partition=partition)
    batch = BatchEntry(0, len(block), 1_000, number, 1, 0, 1, partition, epoch)
    return block + encode_index(meta, [batch], [BlockEntry.from_header(parse_header(block), 0)], len(block))


def newer(body: bytes) -> bytes:
    """Return an object as a later version of memq may write it."""
    offset, length, index_length, _, checksum, magic = TRAILER.unpack(body[-TRAILER_BYTES:])
    return body[:-TRAILER_BYTES] + TRAILER.pack(offset, length, index_length, 200, checksum, magic)


def compaction_manifest(topic: Topic, *parts: PartRef) -> CompactionManifest:
    """Return the first manifest of a topic's read partition 0."""
    empty = CompactionManifest(number=0, cluster=CLUSTER, topic=topic.name, topic_id=topic.id, partition=0)
    return following(empty, parts)


def part_of(number: int, greatest_ms: int = 1, entries: int = 1) -> PartRef:
    """Return a part of some entries from an offset on, of 100 bytes each."""
    return PartRef(
        key=f"part-{number}",
        first=number,
        next=number + entries,
        entries=entries,
        bytes=100 * entries,
        greatest_ms=greatest_ms,
        created_ms=1,
        objects=(),
    )


class ListingStore(MemoryHandler):
    """Notes what is listed. `gone` is listed and not there, `failure` ends listings, the next `omits` show nothing."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.listed: list[str] = []
        self.gone = ""
        self.failure: MemqError | None = None
        self.omits = 0

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectEntry]:
        self.listed.append(prefix)
        if self.failure is not None:
            raise self.failure
        if self.omits:
            self.omits -= 1
            return
        if self.gone.startswith(prefix or "-"):
            yield ObjectEntry(self.gone, 100, 0)
        async for entry in super().list(prefix):
            yield entry


class FailingQueue(MemoryQueue):
    """Some logs do not answer."""

    sick: frozenset[ReadPartition] = frozenset()

    async def span(self, partition: ReadPartition) -> Span:
        if partition in self.sick:
            raise QueueError(f"{partition.partition} does not answer")
        return await super().span(partition)


@dataclass
class KnownTopics:
    """A coordinator that knows topics and epochs; `asked` counts the readings of all assignments."""

    known: list[Topic] = field(default_factory=list)
    epochs: dict[tuple[str, int], int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)
    asked: int = 0

    async def topics(self) -> Sequence[Topic]:
        return self.known

    async def assignments(self) -> Sequence[Assignment]:
        self.asked += 1
        return [await self.assignment(topic.id, part.partition) for topic in self.known for part in topic.partitions]

    async def assignment(self, topic_id: str, partition: int) -> Assignment:
        return Assignment(topic_id=topic_id, partition=partition, epoch=self.epochs.get((topic_id, partition), 0))

    async def deleted(self, topic_id: str) -> bool:
        return topic_id in self.gone


class Cluster:
    """Store, queue and coordinator of one cluster."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store, self.queue, self.topics = ListingStore(self.clock), FailingQueue(self.clock), KnownTopics()
        self.logs = LostLogs(CLUSTER, self.store, self.queue, cast("Coordinator", self.topics))

    async def topic(self, topic: Topic, *, epoch: int = 1, entries: int = 0, queue: bool = True) -> Topic:
        """Make a topic whose partitions had owners up to `epoch`; its logs show `entries` each, or are missing."""
        self.topics.known.append(topic)
        self.topics.epochs |= {(topic.id, part.partition): epoch for part in topic.partitions}
        if queue:
            await self.queue.create(read_partitions(topic), 1_000)
        for _ in range(entries):
            for partition in read_partitions(topic):
                await self.show(topic, partition)
        return topic

    async def show(self, topic: Topic, partition: ReadPartition) -> None:
        """Let a log show an entry."""
        opened = Pointer(
            kind="opened", cluster=CLUSTER, topic=topic.name, topic_id=topic.id, partition=partition.partition, epoch=1
        )
        await self.queue.publish(Publication(partition, partition.partition, 1, 0, encode_pointer(opened)))

    async def put(self, key: str, body: bytes = b"x") -> str:
        await self.store.put(key, [body], crc32c(body))
        return key

    async def batch(self, topic: Topic, partition: int = 0) -> str:
        """Store a batch of a partition."""
        return await self.put(object_key(CLUSTER, topic.name, topic.id, partition, 1, 0, 1_000))

    async def lost(self) -> list[str]:
        """Return what the check of a start reports."""
        return [str(error) for error in await self.logs.check()]
