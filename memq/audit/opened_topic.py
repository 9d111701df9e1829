"""Opens a topic for audits and compaction: pointers by a broker, objects from a store that opens here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from memq.audit.checks.object_reads import ReadObject, read_by_ranges, store_reader
from memq.audit.held import AskHeld
from memq.audit.holders import Holders
from memq.audit.released import AskReleased
from memq.audit.verdict import THROUGH_STORE
from memq.client.broker_router import BrokerRouter
from memq.client.link_pool import CONNECT_TIMEOUT_MS, LinkPool, bootstrap_addresses
from memq.client.metadata import ClusterMetadata
from memq.client.owner_requests import SPANS_S_MAX, OwnerRequests
from memq.client.stores import OpenStores
from memq.errors import CorruptDataError, DeniedError, MemqError
from memq.format.blocks.header import Buffer
from memq.format.key import shared_prefix, topic_prefix
from memq.format.pointer import Location
from memq.groups.remote import RemoteGroups
from memq.notification import Span
from memq.notification.remote import Ask, RemoteQueue
from memq.runtime.runtime import Runtime
from memq.storage_handlers import StorageHandler
from memq.topic import ReadPartition, Topic, is_state_topic

METADATA_S_MAX = 10.0
StateOf = Callable[[Topic, int, int], Awaitable[str]]  # of a delayed record: producer and sequence
THROUGH_BROKER = "a broker, whose memory answers for the store"


@dataclass(frozen=True, slots=True)
class OpenedTopic:
    """A topic with what reads its pointers and objects, and asks its brokers.

    `through` says how objects are read. `stores` are those that open here, by name, the one for new objects first.
    """

    topic: Topic
    cluster: str
    queue: RemoteQueue
    groups: RemoteGroups
    read: ReadObject
    through: str
    ask_held: AskHeld
    ask_released: AskReleased
    state_of: StateOf
    stores: Mapping[str, StorageHandler]


class OwnersQueue(RemoteQueue):
    """A queue through any broker, whose ends lie after all that the owners of a topic have published.

    Else an end that a Kafka node without leadership shows would make acked records after it lost ones.
    """

    def __init__(self, ask: Ask, owners: OwnerRequests, topic: Topic) -> None:
        super().__init__(ask)
        self._owners = owners
        self._topic = topic

    async def span(self, partition: ReadPartition) -> Span:
        """See `PointerReader.span`."""
        span = await super().span(partition)
        spans = await self._owners.spans(partition, self._topic.writers_of(partition))
        return Span(span.begin, max(span.end, *(each.end for each in spans), 0))


@asynccontextmanager
async def opened_topic(
    brokers: str,
    name: str,
    runtime: Runtime | None = None,
    *,
    direct: bool = False,
    s3: Mapping[str, object] | None = None,
) -> AsyncIterator[OpenedTopic]:
    """Open a topic of the cluster at `brokers`.

    `direct`: only with a way to its stores, whatever they hold. Requests to them then last as long as those of brokers.
    `s3` has the section `[s3]`; without it that of this process.
    Raises: UnreachableError, NotFoundError; DeniedError without such a way.
    """
    runtime = runtime or Runtime()
    pool = LinkPool(runtime, bootstrap_addresses(brokers))
    metadata = ClusterMetadata(runtime, pool)
    stores = OpenStores(metadata, runtime, s3, patient=direct)
    try:
        await pool.reach(CONNECT_TIMEOUT_MS / 1000)
        topic = (await metadata.topic(name, timeout_s=METADATA_S_MAX)).topic
        any_broker = BrokerRouter(pool)
        found = _all_stores(metadata, stores) if direct else await _stores_with(topic, metadata, stores)
        through = THROUGH_STORE if len(found) == len(metadata.stores) else THROUGH_BROKER
        source = _source(found, None if direct else any_broker)
        owners = OwnerRequests(runtime, pool, metadata, SPANS_S_MAX)
        # The owner of a state log has no partition of records: it would open one there, and publish a pointer.
        queue = RemoteQueue(any_broker) if is_state_topic(topic.name) else OwnersQueue(any_broker, owners, topic)
        holders, groups = Holders(pool, any_broker), RemoteGroups(any_broker)
        asks = (holders.ask, holders.ask_released, holders.state_of)
        yield OpenedTopic(topic, metadata.cluster, queue, groups, source, through, *asks, found)
    finally:
        await metadata.close()
        await stores.close()
        await pool.close()


def _all_stores(metadata: ClusterMetadata, stores: OpenStores) -> dict[str, StorageHandler]:
    """Return all stores of the cluster, by name. Raises: DeniedError when one does not open here."""
    found: dict[str, StorageHandler] = {}
    for store in metadata.stores:
        opened = stores(store.name)
        if opened is None:
            raise DeniedError(f"no connection is possible from here to the store '{store.name}' at '{store.url}'")
        found[store.name] = opened
    return found


async def _stores_with(topic: Topic, metadata: ClusterMetadata, stores: OpenStores) -> dict[str, StorageHandler]:
    """Return the stores that open here and have objects of the topic, by name.

    A folder of the same name on another machine opens too, and holds nothing: then each object would seem missing.
    """
    found: dict[str, StorageHandler] = {}
    for store in metadata.stores:
        opened = stores(store.name)
        if opened is not None and await _holds(opened, metadata.cluster, topic):
            found[store.name] = opened
    return found


def _source(direct: Mapping[str, StorageHandler], any_broker: BrokerRouter | None) -> ReadObject:
    """Return an object reader: from the store if it opens here, else by a broker, if one is given."""
    straight = store_reader(direct.__getitem__)

    async def read(location: Location, *, whole: bool) -> Buffer:
        if location.store in direct:
            return await straight(location, whole=whole)
        if any_broker is None:
            raise CorruptDataError(f"the cluster has no store '{location.store}'")
        if whole:
            return await read_by_ranges(any_broker.read, location)
        return await any_broker.read(location.store, location.key, location.offset, location.length)

    return read


async def _holds(store: StorageHandler, cluster: str, topic: Topic) -> bool:
    try:
        for prefix in (topic_prefix(cluster, topic.name, topic.id), shared_prefix(cluster)):
            async for _ in store.list(prefix):
                return True
    except MemqError:  # no way to it from here, or no right to list: the broker reads
        return False
    return False
