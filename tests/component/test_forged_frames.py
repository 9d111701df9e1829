"""A client can not end a producer, write for it, or commit for a member of a group that it is not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

import memq.aio
from memq.broker.broker import Broker
from memq.broker.ingest.connection import Connection
from memq.format.pointer import decode_pointer
from memq.limits import MIB
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, BeginProducer
from memq.protocol.connection import Principal
from memq.protocol.frames import AckLevel, Api, encode_frame
from memq.protocol.group_messages import CommitRequest, WireCommitted
from memq.protocol.messages import Close, Nack, Open, PartitionRef, decode_message, encode_message
from memq.topic import Topic, read_partitions, secret_producer_id
from tests.brokers import PRODUCER, SECRET, BareClient, block_of, run, running_broker, write_frame

STRANGER = secret_producer_id("of a stranger")


def open_of(topic: Topic, secret: str, *, producer: int = PRODUCER, sequence: int = 0, epoch: int = 0) -> bytes:
    ask = Open(
        topic=topic.name,
        topic_id=topic.id,
        partition=0,
        producer=f"{producer:016x}",
        acks=AckLevel.ALL,
        sequence=sequence,
        producer_epoch=epoch,
        secret=secret,
    )
    return encode_frame(Api.OPEN, 1, 7, encode_message(ask))


async def answer_to(client: BareClient, frame: bytes) -> str:
    """Return the code of the error that answers a request; "" for an answer."""
    client.write(frame)
    found = await client.frame()
    return decode_message(found.body, Nack).code if found.api == Api.ERROR else ""


def close_of(next_sequence: int, burned: list[tuple[int, int]] | None = None) -> bytes:
    return encode_frame(Api.CLOSE, 1, 9, encode_message(Close(next_sequence=next_sequence, burned=burned or [])))


async def ends(broker: Broker, topic: Topic) -> list[tuple[int, int]]:
    """Return the ends of producers that the queue has."""
    found = await broker.services.queue.read(read_partitions(topic)[0], 0, MIB)
    pointers = [decode_pointer(entry.body) for entry in found]
    return [(end.producer, end.next_sequence) for each in pointers for end in each.ended]


@asynccontextmanager
async def written() -> AsyncIterator[tuple[Broker, BareClient, Topic]]:
    """Yield a broker, and a client that has written one record as PRODUCER."""
    async with running_broker() as broker:
        client = await BareClient.connect(broker)
        topic = await client.topic()
        await client.open(topic)
        client.write(write_frame(block_of(topic, 0, [b"a"])))
        assert (await client.frame()).api == Api.ACK
        yield broker, client, topic
        await client.close()


@pytest.mark.parametrize("secret", ["", "guessed"])
def test_a_stranger_opens_no_stream_of_a_producer_with_a_secret(secret: str) -> None:
    async def work() -> None:
        async with written() as (broker, _, topic):
            stranger = await BareClient.connect(broker)
            assert await answer_to(stranger, open_of(topic, secret, sequence=1)) == "denied"
            assert await answer_to(stranger, open_of(topic, "of a stranger", producer=STRANGER)) == ""
            await stranger.close()

    run(work())


@pytest.mark.parametrize(("next_sequence", "burned"), [(9, []), (1, [(0, 1)])])
def test_an_end_without_the_secret_is_noted_only_if_the_queue_has_all_its_records(
    next_sequence: int, burned: list[tuple[int, int]]
) -> None:
    """A forged end made findings of lost records; forged burned ranges hid lost ones."""

    async def work() -> None:
        async with written() as (broker, client, topic):
            processor = broker.partitions.processor(topic, 0)
            processor.owned().producer(PRODUCER).proven = False  # as at a new owner
            stranger = await BareClient.connect(broker)
            for asked, kept in (((next_sequence, burned), []), ((1, []), [(PRODUCER, 1)])):
                assert await answer_to(stranger, open_of(topic, "", sequence=1)) == ""
                assert await answer_to(stranger, close_of(*asked)) == ""
                assert await ends(broker, topic) == kept
            assert await answer_to(client, open_of(topic, SECRET, sequence=1)) == ""
            assert await answer_to(client, close_of(9)) == ""
            assert (await ends(broker, topic))[-1] == (PRODUCER, 9)
            await stranger.close()

    run(work())


def test_an_instance_of_a_named_producer_belongs_to_its_principal() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            clients = [await BareClient.connect(broker) for _ in range(2)]
            topic = await clients[0].topic()
            for number, connection in enumerate(each for each in broker.intake.readers if isinstance(each, Connection)):
                connection.principal = Principal(f"user-{number}")
            begin = BeginProducer(topic=topic.name, topic_id=topic.id, partition=0, producer=f"{9:016x}")
            ask = encode_frame(Api.ADMIN, 0, 3, encode_message(AdminRequest(ask=begin)))
            clients[0].write(ask)
            begun = decode_message((await clients[0].frame()).body, AdminAnswer).instance
            assert begun is not None
            assert await answer_to(clients[1], open_of(topic, "", producer=9, epoch=begun.epoch)) == "denied"
            assert await answer_to(clients[0], open_of(topic, "", producer=9, epoch=begun.epoch)) == ""
            for client in clients:
                await client.close()

    run(work())


def test_the_shown_name_of_a_member_commits_nothing() -> None:
    async def work() -> None:
        async with written() as (broker, client, topic), memq.aio.Admin(broker.address) as admin:
            consumer = memq.aio.Consumer(broker.address, topic.name, group="readers", start="beginning", audit=False)
            async with consumer:
                assert await consumer.poll(20) is not None
                found = await admin.group("readers")
                (shown,) = found.members
                where = PartitionRef(topic=topic.name, topic_id=topic.id, partition=0)
                position = WireCommitted(partition=where, pointer_offset=1, record_index=0)
                ask = CommitRequest(
                    group="readers", member=shown, generation=found.generation, number=9, positions=[position]
                )
                frame = encode_frame(Api.COMMIT, 0, 3, encode_message(ask))
                assert await answer_to(client, frame) == "generation-fenced"

    run(work())
