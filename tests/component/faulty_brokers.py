"""Brokers in trouble: partitions seized by another broker, blocks left in a spool, and full memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from memq.broker.broker import Broker
from memq.broker.spool.files import SpoolFiles, sizes_in
from memq.errors import (
    SpoolError,
)
from memq.format.pointer import Pointer, decode_pointer
from memq.limits import MIB
from memq.protocol.frames import AckLevel
from memq.storage_handlers import Buffer
from memq.topic import ReadPartition, Topic, TopicSettings
from tests.brokers import BareClient, GatedStore, block_of, running_broker, until, write_frame
from tests.component.cluster_rig import Rig, rig

QUICK = TopicSettings(stale_publish_ms=1_000)  # how long a lost epoch waits before it is read on


def gate_of(cluster: Rig) -> asyncio.Event:
    """Let all puts wait for a gate."""
    gate = asyncio.Event()
    put = cluster.store.put

    async def slow(key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        await gate.wait()
        await put(key, buffers, checksum)

    cluster.store.put = slow  # type: ignore[method-assign]  # a store that takes its time
    return gate


async def pointers(cluster: Rig, topic: Topic) -> list[Pointer]:
    entries = await cluster.queue.read(ReadPartition(topic.name, topic.id, 0), 0, 1 << 20)
    return [decode_pointer(entry.body) for entry in entries]


async def held_at(broker: Broker, acks: AckLevel) -> tuple[Topic, BareClient]:
    """Send one block of three records to a broker whose store hangs."""
    topic = await broker.partitions.create("clicks", 1, QUICK, exist_ok=False)
    client = await BareClient.connect(broker)
    await client.open(topic, acks=acks)
    client.write(write_frame(block_of(topic, 0, [b"a", b"b", b"c"])))
    if acks == AckLevel.ONE:
        assert (await client.frame()).argument == 3
    return topic, client


async def seize(cluster: Rig, topic: Topic, target: Broker) -> BareClient:
    """Give a partition to another broker without asking the owner, and have it opened there."""
    entry = cluster.owner(topic)
    moved = msgspec.structs.replace(entry, broker=target.services.settings.broker_id, session="")
    cluster.shared.apply(cluster.shared.registry.set_assignment(moved))
    there = await BareClient.connect(target)
    await there.open(topic, stream=9, producer=77)  # who had it before may not know yet that it has it no more
    return there


@dataclass(frozen=True)
class Seized:
    """A partition whose owner, `one`, was not asked: `two` has it, and what `one` took of `client` lies in its ring."""

    cluster: Rig
    topic: Topic
    one: Broker
    two: Broker
    client: BareClient
    there: BareClient
    gate: asyncio.Event

    async def records(self) -> list[tuple[str, int]]:
        """Return who published batches, and how many records are in each."""
        return [(each.broker, each.records) for each in await pointers(self.cluster, self.topic) if each.records]


@asynccontextmanager
async def seized(acks: AckLevel) -> AsyncIterator[Seized]:
    async with rig() as cluster:
        one = await cluster.start("one")
        gate = gate_of(cluster)
        topic, client = await held_at(one, acks)
        two = await cluster.start("two")
        there = await seize(cluster, topic, two)
        yield Seized(cluster, topic, one, two, client, there, gate)
        await client.close()
        await there.close()


ON_DISK = TopicSettings(stale_publish_ms=1_000, ack1="disk")


class GatedDisk(SpoolFiles):
    """A disk that takes its time, and fails when it is asked to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.gate = asyncio.Event()
        self.gate.set()
        self.called = asyncio.Event()
        self.fails = False
        self.names: dict[str, None] = {}

    async def append(self, name: str, buffers: Sequence[Buffer]) -> None:
        self.called.set()
        self.names[name] = None
        await self.gate.wait()
        if self.fails:
            raise SpoolError("the disk is full", hint="free space")
        await super().append(name, buffers)


async def taken(broker: Broker, *, settings: TopicSettings = ON_DISK, blocks: int = 1) -> tuple[Topic, BareClient]:
    """Send blocks of two records with acks=1, and take the ack of the last."""
    topic = await broker.partitions.create("clicks", 1, settings, exist_ok=True)
    client = await BareClient.connect(broker)
    await client.open(topic, acks=AckLevel.ONE)
    for number in range(blocks):
        client.write(write_frame(block_of(topic, 2 * number, [b"a%d" % number, b"b"])))
    while (await client.frame()).argument < 2 * blocks:
        pass
    return topic, client


async def records(cluster: Rig, topic: Topic) -> list[tuple[str, int]]:
    return [(each.broker, each.records) for each in await pointers(cluster, topic) if each.records]


async def left_behind(cluster: Rig, folder: Path, *, blocks: int = 3) -> Topic:
    """Have a broker die with blocks that it acked with 1 and did not publish."""
    one = await cluster.start("one", spool=SpoolFiles(folder))
    put = cluster.store.put
    gate_of(cluster)
    topic, client = await taken(one, blocks=blocks)
    await one.close()
    await client.close()
    cluster.store.put = put  # type: ignore[method-assign]  # it answers again
    return topic


async def replayed(cluster: Rig, broker: Broker, topic: Topic, folder: Path) -> list[tuple[str, int]]:
    """Wait until nothing is left in the spool, and return what the queue holds."""
    await broker.replay.wait()
    await until(lambda: not sizes_in(folder) and not len(broker.services.spool.segments))
    return await records(cluster, topic)


BUDGET = 4 * MIB


@asynccontextmanager
async def gated_broker(**settings: Any) -> AsyncIterator[tuple[Broker, GatedStore]]:
    """Run a small broker whose store hangs until its gate is opened."""
    async with running_broker(memory_bytes_max=BUDGET, **settings) as broker:
        store = broker.services.stores["main"] = GatedStore()
        yield broker, store


async def overload(client: BareClient, topic: Topic, blocks: int, size: int = 60_000) -> asyncio.Task[None]:
    """Send far more than the budget, in the background: the socket takes it as the broker reads."""

    async def send() -> None:
        for number in range(blocks):
            client.write(write_frame(block_of(topic, number, [bytes([number % 251]) * size])))
            await client.writer.drain()

    return asyncio.create_task(send())
