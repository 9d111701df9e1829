"""What counts as a proof of an epoch, what a duplicate's ack waits for, and from where a replay reads the queue."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from memq.broker.forwarding import Forwarder
from memq.broker.held import HeldBlocks
from memq.broker.opening import _publish_opened
from memq.broker.ownership import Ownership
from memq.broker.publishing import Publisher
from memq.broker.slabs import Slab
from memq.broker.spool.replay import Replay
from memq.broker.spool.segments import Segment
from memq.errors import QueueError, RetryableError
from memq.format.block import parse_header
from memq.format.pointer import Pointer, encode_pointer
from memq.format.spool import SpoolEntry
from memq.limits import MIB
from memq.notification import Entries, Entry, Publication
from memq.notification.memory import MemoryQueue
from memq.protocol.frames import Api, encode_frame
from memq.protocol.messages import MetadataRequest, encode_message
from memq.topic import PartitionSlots, ReadPartition, Topic, TopicSettings
from tests.brokers import PRODUCER, BareClient, GatedStore, block_of, run, running_broker, until, write_frame
from tests.contract.manual_clock import ManualClock
from tests.unit.test_broker_epochs import READ, Owner, connected, gated, processor_of, until_sealed


def foreign(owner: Owner) -> Publication:
    """A pointer of another owner with the same epoch, for another partition of the log."""
    return Publication(READ, 1, 1, owner.clock.wall_ms(), encode_pointer(owner.batch()))


def test_a_publish_is_no_proof_when_something_came_between() -> None:
    """What came between may be an `opened` of a higher epoch: it is read before the next publish, and dated then."""

    async def work() -> None:
        owner = Owner()
        await owner.queue.create([READ], 30_000)
        assert await owner.publisher.publish(owner.batch, 0)
        proven_s = owner.own.proof_s
        log = owner.queue._log(READ)

        def build() -> Pointer:
            log.entries.append(Entry(log.end, owner.clock.wall_ms(), foreign(owner).body))  # it lands meanwhile
            return owner.batch()

        def unread() -> bool:
            return owner.own.unread

        assert await owner.publisher.publish(build, 1)
        assert unread()
        assert owner.own.proof_s == proven_s
        read_s = owner.clock.monotonic()
        assert await owner.publisher.publish(owner.batch, 2)
        assert not unread()
        assert owner.own.proof_s == read_s

    run(work())


def test_the_queue_is_read_page_by_page_and_proves_as_of_the_last_page_s_request() -> None:
    """The answer took 10 s: a higher epoch that came meanwhile would be dated too late."""

    class Paged(MemoryQueue):
        clock = ManualClock()

        async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
            self.clock.advance(10_000)
            return await super().read(partition, offset, 1)  # one entry: the least that an answer has

    async def work() -> None:
        owner = Owner()
        queue = Paged(owner.clock)
        queue.clock = owner.clock
        await queue.create([READ], 30_000)
        for _ in range(3):
            await queue.publish(foreign(owner))
        owner.own.unread = True
        publisher = Publisher(replace(owner.publisher._services, queue=queue), owner.own, READ, patient=True)
        start_s = owner.clock.monotonic()
        await publisher.read_to_end()
        assert owner.own.read_to == 3
        assert not owner.own.unread
        assert owner.own.proof_s == start_s + 30.0, "three pages, and then the request that showed no more"

    run(work())


def test_a_batch_that_landed_though_its_publish_failed_is_not_published_again() -> None:
    """An error says nothing of the log: what landed is recognised by its batch number, and counted once."""

    class Lossy(MemoryQueue):
        failing = 2

        async def publish(self, publication: Publication) -> int:
            offset = await super().publish(publication)
            self.failing -= 1
            if self.failing >= 0:
                raise QueueError("the answer is lost")
            return offset

    async def work() -> None:
        owner = Owner()
        queue = Lossy(owner.clock)
        await queue.create([READ], 30_000)
        publisher = Publisher(replace(owner.publisher._services, queue=queue), owner.own, READ, patient=True)
        assert await publisher.publish(owner.batch, 0)
        assert queue._log(READ).end == 1
        assert not owner.own.landed
        assert owner.own.totals.records == 1
        assert list(owner.own.producer(7).queued) == [(0, 1)]

    run(work())


def test_a_duplicate_is_not_acked_before_what_its_stream_sent_before_it() -> None:
    """An ack covers all below it: the queue holds the second block, and the first one is still on its way."""

    async def work() -> None:
        async with running_broker() as broker:
            topic = await broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            client = await BareClient.connect(broker)
            second = block_of(topic, 1, [b"b"])
            await client.open(topic, sequence=1)
            client.write(write_frame(second))
            assert (await client.frame()).argument == 2
            store = broker.services.stores["main"] = GatedStore()
            await client.open(topic)
            client.write(write_frame(block_of(topic, 0, [b"a"])) + write_frame(second))
            await until(lambda: broker.services.counters.duplicate_blocks == 1)
            client.write(encode_frame(Api.METADATA, 0, 9, encode_message(MetadataRequest())))
            assert (await client.frame()).api == Api.METADATA, "an ack would have come first"
            store.gate.set()
            assert (await client.frame()).argument == 2
            await client.close()

    run(work())


def test_an_opening_whose_answer_takes_longer_than_a_pointer_may_be_old_does_not_count() -> None:
    """An owner that opened meanwhile has read the queue without it."""

    class Slow(MemoryQueue):
        def __init__(self, clock: ManualClock, taken_ms: int) -> None:
            super().__init__(clock)
            self.clock, self.taken_ms = clock, taken_ms

        async def publish(self, publication: Publication) -> int:
            offset = await super().publish(publication)
            self.clock.advance(self.taken_ms)
            return offset

    async def opened(taken_ms: int) -> Ownership:
        owner = Owner()
        queue = Slow(owner.clock, taken_ms)
        services = replace(owner.publisher._services, queue=queue)
        await queue.create([READ], 30_000)
        owner.own.stated = False
        topic = Topic(name=READ.topic, id=READ.topic_id, created_ms=0)
        await _publish_opened(services, topic, owner.own, owner.publisher)
        return owner.own

    async def work() -> None:
        assert (await opened(30_000)).read_to == 1
        with pytest.raises(RetryableError, match="came after 30 s"):
            await opened(30_001)

    run(work())


def test_an_instance_of_a_named_producer_begins_behind_what_the_one_before_it_has_under_way() -> None:
    """It is told from where to go on: a block that lands later would have the same sequences as its first one."""

    async def work() -> None:
        async with running_broker() as broker:
            store = gated(broker)
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            client.write(write_frame(block_of(topic, 0, [b"a", b"b"])))
            processor = processor_of(broker, topic)
            await until_sealed(processor)
            begun = asyncio.create_task(processor.begin_producer(PRODUCER))
            await asyncio.wait([begun], timeout=0.05)
            assert not begun.done()
            store.gate.set()
            assert ((await begun).epoch, (await begun).last_sequence) == (1, 2)
            await client.close()

    run(work())


class Taker:
    """A forwarder that keeps what it is given."""

    works = 0

    def __init__(self) -> None:
        self.taken: list[HeldBlocks] = []

    def take(self, held: HeldBlocks) -> None:
        self.taken.append(held)


def test_a_replay_reads_the_queue_from_where_the_owner_of_its_oldest_block_had_read_it() -> None:
    async def work() -> None:
        owner, taker, segment = Owner(), Taker(), Segment("s", 1, MIB)
        await owner.queue.create([READ], 30_000)
        for _ in range(6):
            await owner.queue.publish(foreign(owner))
        owner.clock.advance(600_000)
        slots = PartitionSlots(partition=0, slot_first=0, slot_last=0, read_partition=0)
        topic = Topic(name=READ.topic, id=READ.topic_id, created_ms=0, partitions=(slots,))
        slab, entries, at = Slab(MIB), list[SpoolEntry](), 0
        for number, offset in enumerate((4, 2, 5)):
            block = block_of(topic, number, [b"v"])
            slab.view[at : at + len(block)] = block
            header = parse_header(slab.view, at)
            entries.append(SpoolEntry(topic.id, 0, offset, owner.clock.wall_ms(), at, at + len(block), header))
            at += len(block)
        replay = Replay(owner.publisher._services, cast(Forwarder, taker), lambda: [topic])
        await replay._hold(segment, topic, entries, slab, 0)
        (held,) = taker.taken
        assert (len(held), held.read_to) == (3, 2)

    asyncio.run(work())
