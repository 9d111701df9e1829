"""A broker at its memory bound, on both event loops: what stops, what continues, what clients may hold."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from memq.broker.broker import Broker
from memq.limits import KIB, MIB
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, CreateTopic
from memq.protocol.frames import PREFIX, AckLevel, Api, encode_frame
from memq.protocol.group_messages import JoinRequest
from memq.protocol.messages import (
    MetadataRequest,
    PartitionRef,
    PollAnswer,
    PollEntries,
    PollFrom,
    PollRequest,
    ReadRequest,
    decode_message,
    encode_message,
)
from memq.topic import Topic
from tests.brokers import PRODUCER, BareClient, block_of, run, running_broker, until, write_frame
from tests.component.faulty_brokers import BUDGET, gated_broker, overload

Loop = Callable[[], asyncio.AbstractEventLoop]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Loop:
    factory: Loop = request.param
    return factory


def test_with_the_store_stalled_producers_wait_and_consumers_are_served(loop: Loop) -> None:
    async def work() -> None:
        async with gated_broker() as (broker, store):
            producer, consumer = await BareClient.connect(broker), await BareClient.connect(broker)
            topic = await producer.topic()
            await producer.open(topic)
            blocks = 4 * BUDGET // 60_000
            sending = await overload(producer, topic, blocks)
            await until(lambda: broker.intake.starved)
            assert broker.services.pool.leased_bytes <= BUDGET
            for number in range(200):
                consumer.write(
                    encode_frame(Api.METADATA, 0, number, encode_message(MetadataRequest(topics=["clicks"])))
                )
                assert (await consumer.frame()).argument == number
            late = await BareClient.connect(broker)
            assert (await late.topic()).name == "clicks"
            await late.open(topic, stream=2)
            assert broker.intake.starved
            assert not sending.done()
            store.gate.set()
            while (await producer.frame()).argument < blocks:
                pass
            assert broker.services.counters.received_blocks == blocks
            await sending
            for client in (producer, consumer, late):
                await client.close()

    run(work(), loop)


def test_batches_larger_than_the_memory_are_sealed_when_it_is_used_up(loop: Loop) -> None:
    """Nothing seals them by size, age or idleness: without a hurry everyone would wait for ten minutes."""

    async def work() -> None:
        async with running_broker(memory_bytes_max=BUDGET) as broker:
            client = await BareClient.connect(broker)
            slow: dict[str, int | bool | str] = {
                "batch_bytes_max": 256 * MIB,
                "batch_age_ms_max": 600_000,
                "seal_when_idle": False,
            }
            ask = CreateTopic(name="clicks", settings=slow)
            client.write(encode_frame(Api.ADMIN, 0, 1, encode_message(AdminRequest(ask=ask))))
            topic = decode_message((await client.frame()).body, AdminAnswer).topic
            assert topic is not None
            await client.open(topic)
            blocks = 2 * BUDGET // 60_000
            sending = await overload(client, topic, blocks)
            acked = 0
            while acked < blocks // 2:
                acked = (await client.frame()).argument
            await sending
            await client.close()

    run(work(), loop)


def test_many_frames_of_nearly_the_whole_budget_all_end(loop: Loop) -> None:
    async def work() -> None:
        async with running_broker(memory_bytes_max=BUDGET) as broker:
            clients = [await BareClient.connect(broker) for _ in range(6)]
            topic = await clients[0].topic()
            for number, client in enumerate(clients):
                await client.open(topic, producer=PRODUCER + number)
            for number, client in enumerate(clients):
                block = block_of(topic, 0, [bytes([number]) * (BUDGET * 5 // 64)] * 8, producer=PRODUCER + number)
                client.write(write_frame(block))
            for client in clients:
                assert (await client.frame()).argument == 8
                await client.close()

    run(work(), loop)


def test_a_stream_that_rests_pins_no_memory(loop: Loop) -> None:
    """Each idle stream once kept the slabs of its last batch from the system, beyond any budget."""

    async def work() -> None:
        async with running_broker(memory_bytes_max=BUDGET) as broker:
            client = await BareClient.connect(broker)
            topic = await client.topic()
            for stream in range(1, 9):
                await client.open(topic, stream=stream, producer=stream)
                block = block_of(topic, 0, [bytes(BUDGET // 16)] * 8, producer=stream)
                client.write(write_frame(block, stream=stream))
                assert (await client.frame()).argument == 8
            broker.services.recent_batches.clear()
            slots = [stream.run_slot for connection in broker.intake.readers for stream in streams_of(connection)]
            assert len(slots) == 8
            assert all(slot is not None and not slot.extents and not slot.slabs for slot in slots)
            gc.collect()
            await client.close()

    run(work(), loop)


def streams_of(connection: Any) -> list[Any]:
    return list(connection.streams.values())


def test_a_flood_of_refused_requests_closes_the_connection(loop: Loop) -> None:
    """Each refusal is ten times as long as its request: the answers to one read must not fill the memory."""

    async def work() -> None:
        async with running_broker(memory_bytes_max=BUDGET) as broker:
            client = await BareClient.connect(broker)
            client.write(PREFIX.pack(0, Api.METADATA, 0, 0, 1) * 200_000)
            largest = 0
            while broker.intake.readers:
                largest = max(largest, *(connection.outbox.unsent_bytes for connection in connections_of(broker)), 0)
                with contextlib.suppress(ConnectionError):
                    if not await client.reader.read(1_000):
                        break
            assert largest < 2 * MIB
            await client.close()

    run(work(), loop)


def connections_of(broker: Broker) -> list[Any]:
    return list(broker.intake.readers)


@pytest.mark.thorough
def test_clients_that_never_read_answers_cost_bounded_memory_and_are_closed(loop: Loop) -> None:
    async def work() -> None:
        async with running_broker(memory_bytes_max=8 * MIB, frame_timeout_ms=3_000) as broker:
            producer = await BareClient.connect(broker)
            topic = await producer.topic()
            await producer.open(topic)
            producer.write(write_frame(block_of(topic, 0, [bytes(MIB // 2)] * 6)))
            assert (await producer.frame()).argument == 6
            (key,) = broker.services.store.objects  # type: ignore[attr-defined]  # the memory store
            ask = encode_message(ReadRequest(store="main", key=key, offset=0, length=1 * MIB))
            deaf = [await BareClient.connect(broker) for _ in range(3)]
            for client in deaf:
                client.writer.transport.pause_reading()  # type: ignore[attr-defined]  # it is a read transport too
                client.write(b"".join(encode_frame(Api.READ, 0, number, ask) for number in range(60)))
            largest = 0
            while len(broker.intake.readers) > 1:
                largest = max(largest, sum(connection.outbox.unsent_bytes for connection in connections_of(broker)))
                await asyncio.sleep(0)
            assert 0 < largest <= 2 * MIB
            assert (await producer.topic()).name == "clicks"
            for client in (*deaf, producer):
                await client.close()

    run(work(), loop)


def poll(topic: Topic, number: int, wait_ms: int = 0) -> bytes:
    ref = PartitionRef(topic=topic.name, topic_id=topic.id, partition=0)
    ask = PollEntries(partitions=[PollFrom(partition=ref, offset=0)], wait_ms=wait_ms)
    return encode_frame(Api.POLL, 0, number, encode_message(PollRequest(ask=ask)))


def test_a_poll_that_waits_keeps_nobody_from_polling(loop: Loop) -> None:
    """Polls that wait hold no budget; only those that are being answered do."""

    async def work() -> None:
        async with running_broker(memory_bytes_max=BUDGET) as broker:
            waiting, client = await BareClient.connect(broker), await BareClient.connect(broker)
            topic = await client.topic()
            waiting.write(b"".join(poll(topic, number, wait_ms=30_000) for number in range(60)))
            assert (await waiting.topic()).name == topic.name
            client.write(poll(topic, 5))
            answer = decode_message((await client.frame()).body, PollAnswer)
            assert [part.end for part in answer.partitions] == [0]
            await client.open(topic)
            client.write(write_frame(block_of(topic, 0, [b"a"])))
            for _ in range(60):
                assert (await waiting.frame()).api == Api.POLL
            await client.close()
            await waiting.close()

    run(work(), loop)


def test_a_session_outlives_an_overload(loop: Loop) -> None:
    """A group's members are heard while producers wait: an overload makes no rebalance."""

    async def work() -> None:
        async with gated_broker() as (broker, store):
            producer, member = await BareClient.connect(broker), await BareClient.connect(broker)
            topic = await producer.topic()
            await producer.open(topic, acks=AckLevel.ONE)
            sending = await overload(producer, topic, 3 * BUDGET // 60_000)
            await until(lambda: broker.intake.starved)
            ref = PartitionRef(topic=topic.name, topic_id=topic.id, partition=0)
            join = JoinRequest(group="g", member="m", partitions=[ref])
            member.write(encode_frame(Api.JOIN, 0, 1, encode_message(join)))
            assert (await member.frame()).api == Api.JOIN
            store.gate.set()
            await sending
            await producer.close()
            await member.close()

    run(work(), loop)


def test_too_many_connections_are_turned_away_on_both_loops(loop: Loop) -> None:
    async def work() -> None:
        async with running_broker(connections_max=2) as broker:
            clients = [await BareClient.connect(broker) for _ in range(2)]
            for _ in range(5):
                other = await BareClient.connect(broker, hello=False)
                with contextlib.suppress(ConnectionError):
                    other.write(bytes(300 * KIB))
                    await other.writer.drain()
                assert b"connections_max" in await other.end()
                await other.close()
            assert (await clients[0].topic()).name == "clicks"
            for client in clients:
                await client.close()

    run(work(), loop)
