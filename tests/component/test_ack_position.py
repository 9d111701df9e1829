"""The position in an ack is where a reader finds its records; there is none if the broker is not sure of it."""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import pytest

import memq
from memq.broker.partition.ownership import Ownership
from memq.client.producer.producer import AsyncProducer
from memq.errors import QueueError
from memq.format.pointer import ProducerRanges
from memq.notification import Publication
from memq.protocol.frames import AckLevel, AckPosition, Api, Frame, decode_positions, encode_frame
from memq.protocol.messages import Open, encode_message
from memq.testing import Cluster
from memq.topic import CLOCK_ERROR_MS, Position, Topic, TopicSettings
from tests.brokers import PRODUCER, BareClient, GatedStore, block_of, run, running_broker, until, write_frame
from tests.component.cluster_rig import read_from
from tests.partition_owners import connected, processor_of

OTHER = PRODUCER + 1


async def open_stream(client: BareClient, topic: Topic, stream: int, producer: int, sequence: int = 0) -> None:
    """Open a stream whose acks have positions."""
    ask = Open(
        topic=topic.name,
        topic_id=topic.id,
        partition=0,
        producer=f"{producer:016x}",
        acks=AckLevel.ALL,
        sequence=sequence,
        positions=True,
    )
    client.write(encode_frame(Api.OPEN, stream, 7, encode_message(ask)))
    assert (await client.frame()).api == Api.OPEN


async def acked(client: BareClient, next_sequence: int) -> Frame:
    """Return the ack of all below a sequence."""
    while True:
        frame = await client.frame()
        assert frame.api == Api.ACK
        if frame.argument == next_sequence:
            return frame


def positions_in(frame: Frame) -> list[AckPosition]:
    return decode_positions(frame.body)


def test_the_position_of_a_sync_ack_reads_back_exactly_its_record() -> None:
    with Cluster() as cluster:
        with memq.Admin(cluster.address) as admin:
            admin.create_topic("clicks", partitions=2)
        with memq.Producer(cluster.address) as one, memq.Producer(cluster.address) as two:
            sent = [
                (b"%d" % number, (one, two)[number % 2].send("clicks", b"%d" % number, partition=number % 3 % 2))
                for number in range(40)
            ]
            acks = [(value, delivery.result(timeout=10)) for value, delivery in sent]
        firsts: dict[tuple[int, int, int], tuple[bytes, memq.Ack]] = {}
        for value, ack in acks:
            assert ack.position is not None
            firsts.setdefault((ack.producer_id, ack.partition, ack.first_sequence), (value, ack))
        for value, ack in firsts.values():
            assert ack.position is not None
            start = {("clicks", ack.partition): ack.position}
            with memq.Consumer(cluster.address, "clicks", start=start, end="end") as consumer:
                found = [record for batch in consumer if batch.partition == ack.partition for record in batch]
            assert found[0].value == value
            assert found[0].position == ack.position


@pytest.mark.parametrize("acks", [0, 1])
def test_records_acked_before_they_are_stored_have_no_position(acks: Literal[0, 1]) -> None:
    async def work() -> None:
        async with running_broker() as broker, AsyncProducer(broker.address, acks=acks) as producer:
            assert (await (await producer.send("clicks", b"v"))).position is None

    run(work())


def test_blocks_of_two_streams_that_lie_between_each_other_have_their_own_positions() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings(seal_when_idle=False, batch_blocks_max=5))
            await open_stream(client, topic, 1, PRODUCER)
            await open_stream(client, topic, 2, OTHER)
            mine, others = b"", [b"x", b"y"]
            mine += write_frame(block_of(topic, 0, [b"a", b"b"])) + write_frame(block_of(topic, 2, [b"c"]))
            mine += write_frame(block_of(topic, 0, others, producer=OTHER), stream=2)
            mine += write_frame(block_of(topic, 3, [b"d"])) + write_frame(block_of(topic, 4, [b"e"]))
            client.write(mine)
            found = {frame.stream: positions_in(frame) for frame in (await client.frame(), await client.frame())}
            offset = found[1][0].pointer_offset
            assert found == {
                1: [AckPosition(0, 3, offset, 0), AckPosition(3, 5, offset, 5)],
                2: [AckPosition(0, 2, offset, 3)],
            }
            assert await read_from(broker, Position(0, offset, 5)) == [b"d", b"e"]
            assert await read_from(broker, Position(0, offset, 3)) == [b"x", b"y", b"d", b"e"]
            await client.close()

    run(work())


@pytest.mark.parametrize("where", ["in the ring", "in the queue", "too far back to be remembered"])
def test_a_repeated_block_has_the_position_of_the_copy_that_is_read(where: str) -> None:
    async def work() -> None:
        async with running_broker() as broker:
            store = broker.services.stores["main"] = GatedStore()
            client, topic = await connected(broker, TopicSettings())
            await open_stream(client, topic, 1, PRODUCER)
            for first, values in ((0, [b"a", b"b"]), (2, [b"c"])):
                client.write(write_frame(block_of(topic, first, values)))
                await until(lambda: broker.services.counters.received_records > first)  # noqa: B023
            await store.begun.wait()
            if where != "in the ring":
                store.gate.set()
                await acked(client, 3)
            again = await BareClient.connect(broker)
            await open_stream(again, topic, 1, PRODUCER, sequence=2)
            if where == "too far back to be remembered":
                processor_of(broker, topic).known.forget()
                again.write(write_frame(block_of(topic, 2, [b"c"])))
                assert (await again.frame()).api == Api.THROTTLE, "it is looked up"
                await open_stream(again, topic, 1, PRODUCER, sequence=2)
            again.write(write_frame(block_of(topic, 2, [b"c"])))
            await until(lambda: broker.services.counters.duplicate_blocks == 1)
            store.gate.set()
            positions = positions_in(await acked(again, 3))
            if where == "too far back to be remembered":
                assert positions == []
                await again.close()
                await client.close()
                return
            (position,) = positions
            assert (position.first, position.next) == (2, 3)
            assert await read_from(broker, Position(0, position.pointer_offset, position.record_index)) == [b"c"]
            await client.close()
            await again.close()

    run(work())


def test_a_stream_that_did_not_ask_gets_no_positions() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            await client.open(topic)
            client.write(write_frame(block_of(topic, 0, [b"a"])))
            assert len((await acked(client, 1)).body) == 8, "a client of an older release reads these 8 bytes"
            await client.close()

    run(work())


@pytest.mark.parametrize("landed", ["never", "before its error", "before the next try"])
@pytest.mark.parametrize("alone", [False, True])
def test_after_a_publish_without_an_answer_the_position_is_in_doubt_unless_it_follows(landed: str, alone: bool) -> None:
    """An owner that is alone meets no pointer of another one, but a late one of its own."""

    async def work() -> None:
        async with running_broker() as broker:
            client, topic = await connected(broker, TopicSettings())
            await open_stream(client, topic, 1, PRODUCER)
            if alone:
                processor_of(broker, topic).owned().owned_s = -math.inf
            queue, publish = cast(Any, broker.services.queue), broker.services.queue.publish
            failed: list[Publication] = []

            async def fails_once(publication: Publication) -> int:
                if failed:
                    if landed == "before the next try":
                        await publish(failed[0])
                    return await publish(publication)
                failed.append(publication)
                if landed == "before its error":
                    await publish(publication)
                raise QueueError("the answer is lost")

            queue.publish = fails_once
            client.write(write_frame(block_of(topic, 0, [b"a"])))
            positions = positions_in(await acked(client, 1))
            if landed != "never":
                assert positions == [], "readers take the first one, and this owner does not know where it lies"
            else:
                (position,) = positions
                assert await read_from(broker, Position(0, position.pointer_offset, position.record_index)) == [b"a"]
            await client.close()

    run(work())


@pytest.mark.parametrize("skip", [(0,), ()], ids=["left out", "published again"])
def test_a_batch_that_has_a_copy_before_it_has_no_position(skip: tuple[int, ...]) -> None:
    """The queue shows a block that the ring holds, too: readers take the first copy, and not this one.

    It is published again where that copy could not be compared: its object was not there for a moment, perhaps.
    """

    async def work() -> None:
        async with running_broker() as broker:
            store = broker.services.stores["main"] = GatedStore()
            client, topic = await connected(broker, TopicSettings())
            await open_stream(client, topic, 1, PRODUCER)
            client.write(write_frame(block_of(topic, 0, [b"a"])))
            await store.begun.wait()
            processor = processor_of(broker, topic)
            processor.owned().join([ProducerRanges(producer=PRODUCER, ranges=((0, 1),))], 1)
            known = cast(Any, processor.known)
            known.copies_in = lambda own, sealed: skip
            queue, calls = cast(Any, broker.services.queue), list[int]()
            publish = queue.publish

            async def publish_late(publication: Publication) -> int:
                calls.append(1)
                if len(calls) == 1:
                    raise QueueError("not now")
                return cast(int, await publish(publication))

            queue.publish = publish_late
            store.gate.set()
            assert positions_in(await acked(client, 1)) == []
            assert len(calls) == 2
            assert broker.services.counters.skipped_blocks == len(skip), "once for all tries"
            await client.close()

    run(work())


def test_an_owner_is_alone_once_no_pointer_of_an_earlier_one_is_taken_any_more() -> None:
    own = Ownership(0, 2, 0.0, 0, 30.0, 300_000)
    assert not own.is_alone(1e9), "it is not open yet"
    own.owned_s = 5.0
    end_s = 5.0 + 30.0 + CLOCK_ERROR_MS / 1000
    assert [own.is_alone(now_s) for now_s in (5.0, end_s, end_s + 0.1)] == [False, False, True]


def test_an_asyncio_ack_has_the_position_of_its_first_record() -> None:
    async def work() -> None:
        async with running_broker() as broker, AsyncProducer(broker.address, linger_ms=20) as producer:
            values = [b"%d" % number for number in range(6)]
            sent = [await producer.send("clicks", value) for value in values]
            for ack in dict.fromkeys([await delivery for delivery in sent]):
                assert ack.position is not None
                at = ack.first_sequence
                assert (await read_from(broker, ack.position))[: ack.records] == values[at : at + ack.records]

    run(work())
