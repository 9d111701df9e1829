"""The driver's requests to a cluster, through a broker or the queue: topics, pointers, stores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from memq.client.broker_router import BrokerRouter
from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.client.consumer.offset_resolver import OffsetResolver
from memq.client.link_pool import CONNECT_TIMEOUT_MS, LinkPool, bootstrap_addresses
from memq.client.metadata import ClusterMetadata
from memq.client.owner_requests import OwnerRequests
from memq.compaction.reader import CompactedLogReader, ManifestFiles
from memq.errors import InvalidRequestError, InvalidSettingError, NotFoundError
from memq.format.pointer import Pointer, read_pointer
from memq.groups import GroupState
from memq.groups.remote import RemoteGroups
from memq.notification import PointerReader, Span, TopicFinder
from memq.notification.kafka import open_from_settings
from memq.notification.log_reader import all_entries
from memq.notification.remote import RemoteQueue
from memq.notification.sqlite.queue import SqliteQueue
from memq.runtime.logs import EventLog
from memq.runtime.runtime import Runtime
from memq.settings import environment_settings
from memq.spark.options import ReadOptions
from memq.spark.stores import ANY, StoreUrls, TaskStores
from memq.storage_handlers.confirmed_reads import ConfirmedReads
from memq.topic import Committed, ReadPartition, TopicSettings, read_partitions

if TYPE_CHECKING:
    from memq.notification.kafka.queue import KafkaQueue


TOPIC_S_MAX = 10.0
OWNERS_S_MAX = 30.0  # a dead owner is replaced sooner, and a batch read does not ask again


def open_queue(options: ReadOptions, runtime: Runtime) -> SqliteQueue | KafkaQueue:
    """Open `options.queue`. Raises: NotFoundError for a missing file, InvalidSettingError."""
    scheme, _, rest = options.queue.partition(":")
    if scheme == "kafka":
        settings = environment_settings({"queue": options.queue}, options.config, options.profile).parts()
        return open_from_settings(settings, runtime)
    if scheme != "sqlite":
        raise InvalidSettingError(
            f"option 'queue' = '{options.queue[:120]}' names no queue", hint="use sqlite:FILE or kafka://HOST:PORT"
        )
    path = Path(rest)
    if not path.is_file():
        raise NotFoundError(f"no queue file '{path}'", hint="it is queue.sqlite in the data folder of `memq dev`")
    return SqliteQueue(path, runtime.clock)


async def find_topic(queue: TopicFinder, name: str) -> list[ReadPartition]:
    """Return the read partitions of a topic.

    Raises: NotFoundError, InvalidSettingError if two topics have its name.
    """
    found = await queue.partitions(name)
    if not found:
        raise NotFoundError(f"topic '{name}' is not in the queue", hint="check the name, and the prefix in [kafka]")
    ids = sorted({partition.topic_id for partition in found})
    if len(ids) > 1:
        raise InvalidSettingError(
            f"the queue has {len(ids)} topics '{name}' with ids {', '.join(ids)}", hint="read it through a broker"
        )
    return sorted(found)


@dataclass(frozen=True, slots=True)
class SparkTopic:
    """A topic of a job: its settings, and its read partitions with the write partitions of each."""

    name: str
    id: str
    settings: TopicSettings
    partitions: Mapping[ReadPartition, list[int]]


@dataclass(frozen=True, slots=True)
class CompactionAccess:
    """The needs of compaction: the cluster's name, its first store, and the queue that pointers leave."""

    cluster: str
    store: str
    queue: RemoteQueue


class GroupPositions(Protocol):
    """Consumer groups as pipelines use them. See `memq.groups.Groups`."""

    async def groups(self) -> Sequence[str]:
        """See `Groups.groups`."""
        ...

    async def describe(self, group: str) -> GroupState:
        """See `Groups.describe`."""
        ...

    async def committed(self, group: str, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, Committed]:
        """See `Groups.committed`."""
        ...

    async def commit(
        self, group: str, member: str, generation: int, positions: dict[ReadPartition, Committed], number: int = 0
    ) -> None:
        """See `Groups.commit`."""
        ...


class UnknownGroups:
    """The groups without a broker: they are on state logs, which brokers have."""

    async def groups(self) -> Sequence[str]:
        """Return none: they are not known."""
        return ()

    async def describe(self, group: str) -> GroupState:
        """Raise InvalidRequestError."""
        raise _unknown(group)

    async def committed(self, group: str, partitions: Sequence[ReadPartition]) -> dict[ReadPartition, Committed]:
        """Raise InvalidRequestError."""
        raise _unknown(group)

    async def commit(
        self, group: str, member: str, generation: int, positions: dict[ReadPartition, Committed], number: int = 0
    ) -> None:
        """Raise InvalidRequestError."""
        raise _unknown(group)


def _unknown(group: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the positions of group '{group}' are not in the queue", hint="use the option brokers in place of queue"
    )


@dataclass(frozen=True, slots=True)
class Access:
    """The open connections to a cluster, for one event loop."""

    queue: PointerReader
    topics: Mapping[str, SparkTopic]
    urls: StoreUrls
    fetcher: BatchFetcher  # reads the indexes of those few batches whose pointers don't name all their producers
    groups: GroupPositions
    runtime: Runtime
    compactor: CompactionAccess | None = None  # brokers alone know the settings that it goes by
    pool: LinkPool | None = None  # the connections to them
    owners: OwnerRequests | None = None  # none when the queue is read without brokers

    @property
    def resolver(self) -> OffsetResolver:
        """Resolves positions and ends of the queue."""
        return OffsetResolver(self.queue, owner_spans=self._owner_spans if self.owners is not None else None)

    async def _owner_spans(self, partition: ReadPartition) -> Sequence[Span]:
        assert self.owners is not None
        return await self.owners.spans(partition, self.topics[partition.topic].partitions[partition])


@asynccontextmanager
async def open_access(options: ReadOptions, runtime: Runtime) -> AsyncIterator[Access]:
    """Open the topics that `options` name.

    Raises: UnreachableError, NotFoundError for a topic, InvalidSettingError, DeniedError.
    """
    async with _through_queue(options, runtime) if options.queue else _through_broker(options, runtime) as access:
        yield access


@asynccontextmanager
async def _through_broker(options: ReadOptions, runtime: Runtime) -> AsyncIterator[Access]:
    pool = LinkPool(runtime, bootstrap_addresses(options.brokers), client_id="spark")
    metadata = ClusterMetadata(runtime, pool)
    ask = BrokerRouter(pool)
    stores: TaskStores | None = None
    try:
        await pool.reach(CONNECT_TIMEOUT_MS / 1000)
        topics: dict[str, SparkTopic] = {}
        for name in options.topics:
            topic = (await metadata.topic(name, timeout_s=TOPIC_S_MAX)).topic
            writers = {partition: topic.writers_of(partition) for partition in read_partitions(topic)}
            topics[name] = SparkTopic(name, topic.id, topic.settings, writers)
        urls = StoreUrls.of(options, {store.name: store.url for store in metadata.stores})
        stores = TaskStores(urls, runtime)
        queue = RemoteQueue(ask)
        compactor = CompactionAccess(metadata.cluster, metadata.stores[0].name, queue)
        confirmed = ConfirmedReads(EventLog(runtime.clock), missing_s=options.missing_s)
        yield Access(
            queue,
            topics,
            urls,
            BatchFetcher("auto", ask.read, stores.open_here, confirmed),
            RemoteGroups(ask),
            runtime,
            compactor,
            pool,
            OwnerRequests(runtime, pool, metadata, OWNERS_S_MAX),
        )
    finally:
        if stores is not None:
            await stores.close()
        await metadata.close()
        await pool.close()


async def _cluster_of(queue: PointerReader, topics: Iterable[SparkTopic]) -> str:
    """Return the cluster's name from the first pointer in the queue.

    "" if the queue has no pointer; then compaction has not removed any from it.
    """
    for topic in topics:
        for partition in topic.partitions:
            async for entries in all_entries(queue, partition):
                for entry in entries:
                    pointer = read_pointer(entry.body, newer="raise")
                    if isinstance(pointer, Pointer):
                        return pointer.cluster
    return ""


@asynccontextmanager
async def _through_queue(options: ReadOptions, runtime: Runtime) -> AsyncIterator[Access]:
    """Read the queue without a broker.

    Topic settings are unknown without one, so defaults apply, and each partition is a writer.
    """
    queue = open_queue(options, runtime)
    urls = StoreUrls.of(options, {})
    stores = TaskStores(urls, runtime)
    try:
        topics: dict[str, SparkTopic] = {}
        for name in options.topics:
            partitions = await find_topic(queue, name)
            writers = {partition: [partition.partition] for partition in partitions}
            topics[name] = SparkTopic(name, partitions[0].topic_id, TopicSettings(), writers)
        cluster = await _cluster_of(queue, topics.values())
        files = ManifestFiles(cluster, stores.open(ANY)) if cluster else None
        pointers = CompactedLogReader(queue, files, runtime.clock) if files is not None else queue
        yield Access(pointers, topics, urls, stores.fetcher(options.missing_s), UnknownGroups(), runtime)
    finally:
        await stores.close()
        await queue.close()
