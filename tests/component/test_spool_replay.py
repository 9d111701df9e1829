"""The replay of a spool: where it starts to read the queue for blocks that are published."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from memq.broker.spool import SpoolDisk
from memq.broker.spool.forwarding import Forwarder
from memq.broker.spool.replay import Replay
from memq.broker.spool.unpublished_blocks import UnpublishedBlocks
from memq.format.spool import encode_entry, encode_head
from memq.notification import Span
from memq.topic import PartitionSlots, ReadPartition, Topic
from tests.brokers import block_of
from tests.partition_owners import READ, Owner, foreign

SEED = 1


class OneSegment:
    """The disk of a spool with one segment."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    async def sizes(self) -> dict[str, int]:
        """See `SpoolDisk.sizes`."""
        return {"s": len(self.data)}

    async def read(self, name: str) -> bytes:
        """See `SpoolDisk.read`."""
        return self.data


class Taker:
    """A forwarder that keeps what it is given."""

    works = 0

    def __init__(self) -> None:
        self.taken: list[UnpublishedBlocks] = []

    def take(self, held: UnpublishedBlocks) -> None:
        self.taken.append(held)


@pytest.mark.parametrize("said", [[], [Span(5, 6)]], ids=["right", "begin-too-high-once"])
def test_a_replay_reads_the_queue_from_where_the_owner_of_its_oldest_block_had_read_it(said: list[Span]) -> None:
    """Older blocks than the begin of the queue are set aside: one wrong answer would keep acked blocks from it."""

    async def work() -> None:
        owner, taker = Owner(), Taker()
        await owner.queue.create([READ], 30_000)
        for _ in range(6):
            await owner.queue.publish(foreign(owner))
        slots = PartitionSlots(partition=0, slot_first=0, slot_last=0, read_partition=0)
        topic = Topic(name=READ.topic, id=READ.topic_id, created_ms=0, partitions=(slots,))
        answers, span = list(said), owner.queue.span

        async def late(partition: ReadPartition) -> Span:
            return answers.pop() if answers else await span(partition)

        owner.queue.span = late  # type: ignore[method-assign]
        replay = Replay(owner.services, cast(Forwarder, taker), lambda: [topic])
        owner.clock.advance(600_000)
        now_ms = owner.clock.wall_ms()
        segment = encode_head(SEED, now_ms)
        for number, offset in enumerate((4, 2, 5)):
            block = block_of(topic, number, [b"v"])
            segment += encode_entry(SEED, topic.id_bytes, 0, offset, now_ms, len(block)) + block
        disk = cast(SpoolDisk, OneSegment(segment))
        await replay.find(disk)
        await replay.run(disk)
        (held,) = taker.taken
        assert (len(held), held.read_to) == (3, 2)

    asyncio.run(work())
