"""Owners of partitions in tests: processors of a broker, an owner on a manual clock, gates before its ports."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import msgspec

from memq.broker.broker import Broker
from memq.broker.ingest.quotas import NO_CLIENT_LIMITS, Quotas
from memq.broker.ingest.slabs import SlabPool
from memq.broker.metrics import Counters
from memq.broker.partition.append import Stream
from memq.broker.partition.opening import (
    open_partition,
)
from memq.broker.partition.ownership import Ownership
from memq.broker.partition.publishing import Publisher
from memq.broker.partition.recent_batch_cache import RecentBatchCache
from memq.broker.partition.storing import SharedObjects
from memq.broker.partition.topic_processor import TopicProcessor
from memq.broker.services import Services
from memq.errors import (
    MemqError,
    QueueError,
    StoreError,
)
from memq.format.pointer import (
    Location,
    Pointer,
    ProducerRanges,
    decode_pointer,
    encode_pointer,
)
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.limits import MIB
from memq.notification import Entries, Publication
from memq.notification.memory import MemoryQueue
from memq.protocol.frames import AckPosition
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers import Buffer
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import ReadPartition, Topic, TopicSettings, equal_slots, read_partitions
from tests.brokers import (
    BareClient,
    no_spool,
    running_broker,
)
from tests.contract.manual_clock import ManualClock
from tests.skipping_loop import LongestWait, skipping_runtime

READ = ReadPartition("clicks", "0" * 32, 0)


class Store(MemoryHandler):
    """A store whose puts wait for a gate, and whose first reads fail."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.gate = asyncio.Event()
        self.begun: list[str] = []  # the keys of all puts
        self.read_error: MemqError = StoreError("not now")
        self.failing_ranges = 0

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        self.begun.append(key)
        await self.gate.wait()
        await super().put(key, buffers, checksum)

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        if self.failing_ranges:
            self.failing_ranges -= 1
            raise self.read_error
        return await super().get_range(key, offset, length)


def gated(broker: Broker) -> Store:
    store = broker.services.stores["main"] = Store(ManualClock())
    return store


async def connected(broker: Broker, settings: TopicSettings, partitions: int = 1) -> tuple[BareClient, Topic]:
    topic = await broker.partitions.create("clicks", partitions, settings, exist_ok=False)
    return await BareClient.connect(broker), topic


def control(topic: Topic, kind: str, epoch: int) -> Publication:
    """A pointer of an owner that nobody here knows."""
    pointer = Pointer(kind=kind, cluster="c", topic=topic.name, topic_id=topic.id, partition=0, epoch=epoch)
    return Publication(ReadPartition(topic.name, topic.id, 0), 0, epoch, 1, encode_pointer(pointer))


def processor_of(broker: Broker, topic: Topic, partition: int = 0) -> TopicProcessor:
    return broker.partitions.processors[topic.id, partition]


async def pointers(broker: Broker, topic: Topic, partition: int = 0) -> list[Pointer]:
    entries = await broker.services.queue.read(ReadPartition(topic.name, topic.id, partition), 0, 64 * MIB)
    return [decode_pointer(entry.body) for entry in entries]


async def until_sealed(processor: TopicProcessor) -> None:
    """Let the loop turn until the open batch is on its way to the store."""
    while not any(slot.sealed_ms for slot in processor.ring):  # noqa: ASYNC110 - the processor has no event for this
        await asyncio.sleep(0)


async def until_held(processor: TopicProcessor, records: int) -> None:
    """Let the loop turn until the open batch has so many records."""
    while processor.ring.open is None or processor.ring.open.records < records:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)


class FailingQueue(MemoryQueue):
    """Each publish takes ten seconds, and the first ones fail."""

    def __init__(self, clock: ManualClock, failing: int) -> None:
        super().__init__(clock)
        self.clock = clock
        self.failing = failing
        self.tries = 0
        self.late: list[Publication] = []  # of what failed: it lands before the next one that does not

    async def publish(self, publication: Publication) -> int:
        self.tries += 1
        self.clock.advance(10_000)
        if self.tries <= self.failing:
            self.late.append(publication)
            raise QueueError("not now")
        for each in self.late:
            await super().publish(each)
        return await super().publish(publication)


class Hasty(random.Random):
    """Draws the least time to wait."""

    def uniform(self, a: float, b: float) -> float:
        return a


class Owner:
    """One owner of one partition on a manual clock, with what it publishes through."""

    def __init__(self, failing: int = 0) -> None:
        self.clock = ManualClock()
        self.store = Store(self.clock)
        self.store.gate.set()
        self.queue = FailingQueue(self.clock, failing)
        pool, runtime = SlabPool(MIB, MIB // 4), Runtime(self.clock, Hasty(1))
        self.services = Services(
            settings=BrokerSettings(),
            session="s",
            runtime=runtime,
            stores={"main": self.store},
            store_name="main",
            queue=self.queue,
            coordinator=MemoryCoordinator(MemoryCluster()),
            pool=pool,
            recent_batches=RecentBatchCache(MIB, pool.release),
            limits=Quotas(SystemClock(), NO_CLIENT_LIMITS),
            spool=no_spool(runtime, pool),
            counters=Counters(),
        )
        now_s = self.clock.monotonic()
        self.own = Ownership(
            partition=0,
            epoch=1,
            opened_s=now_s,
            opened_wall_ms=self.clock.wall_ms(),
            stale_publish_s=30.0,
            dedup_window_ms=300_000,
            proof_s=now_s,
            stated=True,
        )
        self.publisher = Publisher(self.services, self.own, READ, patient=True)

    def batch(self) -> Pointer:
        return Pointer(
            kind="data",
            cluster="c",
            topic="clicks",
            topic_id=READ.topic_id,
            partition=0,
            epoch=1,
            locations=(Location(store="main", key="k", offset=0, length=100),),
            records=1,
            stored_bytes=100,
            producers=(ProducerRanges(7, ((0, 1),)),),
        )


def publisher_of(processor: TopicProcessor, *, patient: bool = True) -> Publisher:
    """Return what the processor's present epoch reads and publishes through."""
    return Publisher(processor.services, processor.owned(), processor.read_partition, patient=patient)


def foreign(owner: Owner) -> Publication:
    """A pointer of another owner with the same epoch, for another partition of the log."""
    return Publication(READ, 1, 1, owner.clock.wall_ms(), encode_pointer(owner.batch()))


@asynccontextmanager
async def owning() -> AsyncIterator[tuple[Broker, BareClient, Topic]]:
    """Run a broker that has opened the only partition of a topic."""
    async with running_broker() as broker:
        client, topic = await connected(broker, TopicSettings())
        await client.open(topic)
        yield broker, client, topic
        await client.close()


def failing(part: Any, name: str, *errors: Exception) -> list[Exception]:
    """Let the first calls of a method fail; return what is left of the errors."""
    method, left = getattr(part, name), list(errors)

    async def call(*arguments: Any) -> Any:
        if left:
            raise left.pop(0)
        return await method(*arguments)

    setattr(part, name, call)
    return left


class Opening:
    """A topic that broker `one` may open, on parts in memory and the time of a skipping loop."""

    def __init__(self) -> None:
        self.runtime = replace(skipping_runtime(), random=LongestWait())
        self.clock = self.runtime.clock
        self.store = MemoryHandler(self.clock)
        self.queue = MemoryQueue(self.clock)
        self.coordinator = MemoryCoordinator(MemoryCluster())
        self.topic = Topic(name="clicks", id="0a" * 16, created_ms=0, partitions=equal_slots(1))
        self.read = read_partitions(self.topic)[0]
        pool = SlabPool(MIB, MIB // 4)
        self.services = Services(
            settings=BrokerSettings(broker_id="one"),
            session="s1",
            runtime=self.runtime,
            stores={"main": self.store},
            store_name="main",
            queue=self.queue,
            coordinator=self.coordinator,
            pool=pool,
            recent_batches=RecentBatchCache(MIB, pool.release),
            limits=Quotas(self.clock, NO_CLIENT_LIMITS),
            spool=no_spool(self.runtime, pool),
            counters=Counters(),
        )

    async def assign(self, *, epoch: int = 0, session: str = "") -> None:
        """Make the topic and its log, and assign it."""
        await self.queue.create([self.read], 30_000)
        await self.coordinator.create_topic(self.topic)
        current = await self.coordinator.assignment(self.topic.id, 0)
        await self.coordinator.set_assignment(
            msgspec.structs.replace(current, broker="one", epoch=epoch, session=session)
        )

    async def open(self) -> Ownership:
        """Open it."""
        return await open_partition(self.services, self.topic, 0, self.read)

    def noted(self, part: Any, name: str, fail: Callable[[], None] = lambda: None) -> list[tuple[float, Any]]:
        """Return the times of the calls of a method with what they are given; `fail` may raise in each."""
        method, calls = getattr(part, name), list[tuple[float, Any]]()

        async def call(*arguments: Any) -> Any:
            calls.append((self.clock.monotonic(), arguments))
            fail()
            return await method(*arguments)

        setattr(part, name, call)
        return calls


class Sink:
    """A connection that notes which of its streams were redirected."""

    def __init__(self) -> None:
        self.redirected: list[int] = []

    def send_ack(
        self, stream: Stream, level: int, next_sequence: int, epoch: int, positions: Sequence[AckPosition] = ()
    ) -> None:
        """Take it."""

    def send_throttle(self, stream: Stream, first: int, error: MemqError) -> None:
        raise AssertionError("nothing is held back here")

    def send_redirect(self, stream: Stream, address: str) -> None:
        self.redirected.append(stream.number)


class GatedQueue(MemoryQueue):
    """A queue whose publishes begin, and end when its gate is open."""

    begun: asyncio.Event
    gate: asyncio.Event
    reads = 0

    @classmethod
    def close_gate(cls, queue: Any) -> GatedQueue:
        """Turn a broker's queue into one."""
        queue.__class__ = cls
        queue.begun, queue.gate = asyncio.Event(), asyncio.Event()
        return cast(GatedQueue, queue)

    async def publish(self, publication: Publication) -> int:
        self.begun.set()
        await self.gate.wait()
        return await super().publish(publication)

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        self.reads += 1
        return await super().read(partition, offset, bytes_max)


async def turns(count: int = 20) -> None:
    """Let the loop turn."""
    for _ in range(count):
        await asyncio.sleep(0)


def sharing(services: Services) -> SharedObjects:
    """Return what a processor of its own stores shared objects with; nothing fails there."""
    return SharedObjects(services, lambda error: None)


def unopened(broker: Broker, topic: Topic) -> TopicProcessor:
    """Return one more processor of a topic's first partition, before its start."""
    return TopicProcessor(broker.services, sharing(broker.services), lambda held: None, topic, 0)
