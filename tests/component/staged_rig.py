"""A broker and a staged writer with its commits, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memq.broker.broker import Broker
from memq.client.bulk.staged_writer import ANSWER_S, StagedCommits, StagedWriter, wire_piece
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.link_pool import LinkPool, bootstrap_addresses
from memq.client.metadata import ClusterMetadata
from memq.client.owner_requests import OwnerRequests
from memq.format.pointer import Pointer, decode_pointer
from memq.format.staged_manifest import Manifest, StagedObject
from memq.protocol.admin_messages import PublishStaged
from memq.runtime.runtime import Runtime
from memq.storage_handlers import StorageHandler
from memq.topic import Topic, TopicSettings, read_partitions
from tests.brokers import running_broker

WRITER = "nightly"


class Rig:
    """One broker with a topic, a writer's commits, and what lies there."""

    def __init__(self, broker: Broker, commits: StagedCommits, topic: Topic) -> None:
        self.broker = broker
        self.commits = commits
        self.topic = topic

    @classmethod
    async def made(cls, broker: Broker, partitions: int = 2) -> Rig:
        topic = await broker.partitions.create("clicks", partitions, TopicSettings(), exist_ok=False)
        commits = StagedCommits(broker.address, WRITER)
        assert await commits.topics(["clicks"]) == {"clicks": topic}
        return cls(broker, commits, topic)

    @property
    def store(self) -> StorageHandler:
        return self.broker.services.store

    async def staged(self, values: Sequence[bytes], **more: Any) -> list[StagedObject]:
        writer = StagedWriter(self.commits.cluster, {"clicks": self.topic}, self.store, WRITER, **more)
        for number, value in enumerate(values):
            await writer.add("clicks", value, partition=number % len(self.topic.partitions))
        return await writer.finish()

    async def pointers(self) -> list[Pointer]:
        return [
            decode_pointer(entry.body)
            for partition in read_partitions(self.topic)
            for entry in await self.broker.services.queue.read(partition, 0, 64 << 20)
        ]

    async def records(self) -> list[bytes]:
        async with AsyncConsumer(self.broker.address, ["clicks"], start="beginning", end="end") as consumer:
            return sorted([value or b"" async for batch in consumer for value in batch.values()])


async def rigged(work: Any, partitions: int = 2) -> None:
    async with running_broker() as broker:
        rig = await Rig.made(broker, partitions)
        try:
            await work(rig)
        finally:
            await rig.commits.close()


async def asked(rig: Rig, manifest: Manifest, checksum: int, count: int) -> int:
    """Ask the owner for the first pieces of the only partition; return how many are there."""
    ((staged, pieces),) = manifest.by_partition().items()
    ask = PublishStaged(
        topic=staged[0],
        topic_id=staged[1],
        partition=staged[2],
        writer=WRITER,
        batch_id=manifest.batch_id,
        store=manifest.store,
        manifest=checksum,
        pieces_total=len(pieces),
        first=0,
        created_ms=manifest.created_ms,
        pieces=[wire_piece(*piece) for piece in pieces[:count]],
    )
    runtime = Runtime()
    pool = LinkPool(runtime, bootstrap_addresses(rig.broker.address))
    metadata = ClusterMetadata(runtime, pool)
    try:
        await metadata.topic(rig.topic.name)
        return (await OwnerRequests(runtime, pool, metadata, ANSWER_S).ask(rig.topic, staged[2], ask)).published
    finally:
        await metadata.close()
        await pool.close()
