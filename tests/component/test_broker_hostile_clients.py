"""Connections that declare much and send little take nothing from honest clients."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from awscrt.checksums import crc32c

from memq.broker.broker import Broker
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import scope_of
from memq.limits import BLOCK_BYTES_MAX, BLOCK_HEADER_BYTES, KIB, MIB
from memq.protocol.frames import HELLO_MAGIC, PREFIX, Api
from memq.protocol.messages import Nack, decode_message
from memq.topic import Topic
from tests.brokers import PRODUCER, BareClient, block_of, log_lines, run, running_broker, until, write_frame

BUDGET = 64 * MIB
WAIT_S = 30.0


async def stranger(broker: Broker, topic: Topic, producer: int) -> BareClient:
    client = await BareClient.connect(broker)
    await client.open(topic, producer=producer)
    return client


async def honest_ack(broker: Broker, topic: Topic, producer: int = 1) -> None:
    """Send one block of 300 KiB, and wait until it is in the queue."""
    client = await BareClient.connect(broker)
    await client.open(topic, producer=producer)
    async with asyncio.timeout(WAIT_S):
        client.write(write_frame(block_of(topic, 0, [bytes(300 * KIB)], producer=producer)))
        assert (await client.frame()).api == Api.ACK
    await client.close()


def half_write(declared: int, sent: int) -> bytes:
    """Return the beginning of a WRITE: no block yet, so that nothing but its length can be checked."""
    return PREFIX.pack(declared, Api.WRITE, 0, 1, 0) + bytes(sent)


def test_declared_lengths_hold_no_memory() -> None:
    """Four connections that declared 16 MiB each, and sent a few bytes, stopped all producers."""

    async def work() -> None:
        async with running_broker(memory_bytes_max=BUDGET) as broker:
            guest = await BareClient.connect(broker)
            topic = await guest.topic()
            strangers = [await stranger(broker, topic, 100 + number) for number in range(40)]
            for client in strangers:
                client.write(half_write(BLOCK_BYTES_MAX, 20))
            await until(lambda: sum(each.half_since_s is not None for each in connections_of(broker)) == 40)
            assert broker.services.pool.leased_bytes < BUDGET * 7 // 8 + 4 * MIB
            for producer in range(1, 4):
                for client in strangers:
                    client.write(b"x")
                await honest_ack(broker, topic, producer)
            for client in (guest, *strangers):
                await client.close()

    run(work())


def test_slabs_that_strangers_reserved_are_taken_back_at_once() -> None:
    """A frame up to a slab gets its memory at once, and gives it up as soon as others need it."""

    async def work() -> None:
        async with running_broker(memory_bytes_max=BUDGET) as broker:
            guest = await BareClient.connect(broker)
            topic = await guest.topic()
            strangers = [await stranger(broker, topic, 100 + number) for number in range(100)]
            for client in strangers:
                client.write(half_write(1 * MIB - 16, 20))
            await until(lambda: sum(each.half_since_s is not None for each in connections_of(broker)) == 100)
            await honest_ack(broker, topic)
            assert not broker.intake.starved
            for client in (guest, *strangers):
                await client.close()

    run(work())


def test_received_bytes_of_slow_frames_are_bounded_and_the_slow_ones_make_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        async with running_broker(memory_bytes_max=BUDGET) as broker:
            guest = await BareClient.connect(broker)
            topic = await guest.topic()
            strangers = [await stranger(broker, topic, 100 + number) for number in range(12)]
            for client in strangers:
                client.write(half_write(BLOCK_BYTES_MAX, 10 * MIB))
            await until(lambda: bool(broker.intake.partial.growing))
            await honest_ack(broker, topic)
            await until(lambda: broker.services.counters.slow_frames > 0)
            assert broker.services.pool.leased_bytes < BUDGET
            assert any("this frame is slow" in line for line in log_lines(caplog))
            for client in (guest, *strangers):
                await client.close()

    run(work())


def test_a_connection_without_an_accepted_hello_has_few_bytes() -> None:
    async def work() -> None:
        async with running_broker(memory_bytes_max=BUDGET) as broker:
            idle = broker.services.pool.leased_bytes
            strangers = [await BareClient.connect(broker, hello=False) for _ in range(200)]
            for client in strangers:
                client.write(PREFIX.pack(4_000, Api.HELLO, 0, 0, HELLO_MAGIC) + b"{" + bytes(3_000))
            await until(lambda: sum(each.half_since_s is not None for each in connections_of(broker)) == 200)
            assert broker.services.pool.leased_bytes - idle <= 200 * 64 * KIB
            for client in strangers:
                await client.close()

    run(work())


def poisoned(topic: Topic, first: int) -> bytes:
    """Return a block with a right checksum, whose first value is longer than the block."""
    block = bytearray(block_of(topic, first, [b"a", b"b"]))
    block[BLOCK_HEADER_BYTES + 2] ^= 0x40
    block[4:8] = crc32c(bytes(block[8:])).to_bytes(4, "little")
    return bytes(block)


def test_the_first_block_of_a_stream_is_opened_and_refused_when_no_reader_can_read_it() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client = await BareClient.connect(broker)
            topic = await client.topic()
            await client.open(topic)
            client.write(write_frame(poisoned(topic, 0)))
            error = await client.error()
            assert (error.code, "no reader can read" in error.text) == ("corrupt-data", True)
            await client.open(topic)
            client.write(write_frame(block_of(topic, 0, [b"a"])))
            assert (await client.frame()).api == Api.ACK
            await client.close()

    run(work())


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_the_broker_refuses_a_record_over_the_bound_of_its_topic(codec: str) -> None:
    """Only clients checked it. Small blocks in front of a large one are taken."""

    async def work() -> None:
        async with running_broker() as broker:
            client = await BareClient.connect(broker)
            topic = await client.topic()
            await client.open(topic)
            builder = BlockBuilder()
            builder.append(b"small")
            builder.append(bytes(topic.settings.record_bytes_max), key=b"k")
            scope = scope_of(topic.id_bytes, 0)
            large = builder.seal(producer_id=PRODUCER, first_sequence=2, scope=scope, now_ms=1_000, codec=codec).data
            small = [write_frame(block_of(topic, first, [b"a"])) for first in range(2)]
            client.write(b"".join((*small, write_frame(bytes(large)))))
            frame = await client.frame()
            while frame.api == Api.ACK:
                assert frame.argument <= 2
                frame = await client.frame()
            nack = decode_message(frame.body, Nack)
            assert (frame.api, nack.code, "record_bytes_max" in nack.text) == (Api.NACK, "too-large", True)
            assert broker.services.counters.received_records == 2
            await client.close()

    run(work())


def connections_of(broker: Broker) -> list[Any]:
    return list(broker.intake.readers)


def test_an_address_has_its_bound_of_connections() -> None:
    async def work() -> None:
        async with running_broker(connections_per_address_max=3) as broker:
            clients = [await BareClient.connect(broker) for _ in range(3)]
            other = await BareClient.connect(broker, hello=False)
            error = await other.error()
            assert (error.code, "connections_per_address_max" in error.text) == ("throttled", True)
            assert broker.services.counters.turned_away_connections == 1
            await clients.pop().close()
            await until(lambda: len(broker.intake.readers) == 2)
            clients.append(await BareClient.connect(broker))
            for client in (*clients, other):
                await client.close()

    run(work())


def test_silent_connections_make_room_for_a_client_at_the_bound() -> None:
    async def work() -> None:
        async with running_broker(connections_max=5) as broker:
            silent = [await BareClient.connect(broker, hello=False) for _ in range(5)]
            client = await BareClient.connect(broker)
            assert "no HELLO" in (await silent[0].error()).text
            assert (await client.topic()).name == "clicks"
            for each in (*silent, client):
                await each.close()

    run(work())
