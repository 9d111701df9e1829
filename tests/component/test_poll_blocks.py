"""New pointers come with their blocks in one answer to POLL: to consumers at the end of a log, over real sockets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest

from memq.broker.broker import Broker
from memq.client.consumer.consumer import AsyncConsumer
from memq.client.producer.producer import AsyncProducer
from memq.errors import DeniedError, FencedError, StoreError
from memq.format.blocks.header import tag_bit
from memq.limits import POLL_BLOCKS_BYTES_MAX
from memq.notification.memory import MemoryQueue
from memq.notification.remote import RemoteQueue, ref_of
from memq.protocol.frames import HAS_BLOCKS, Api, encode_frame, split_blocks
from memq.protocol.link import Link, connect_link
from memq.protocol.messages import (
    PartitionRef,
    PollAnswer,
    PollEntries,
    PollFrom,
    PollRequest,
    decode_message,
    encode_message,
)
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.topic import ReadPartition, TopicSettings
from tests.brokers import BareClient, run, running_broker

WAIT_S = 20.0
HotRead = Callable[[str, int, int], bytes | None]


class OldPollEntries(msgspec.Struct, tag_field="op", tag="entries", kw_only=True):
    """The request of an earlier release."""

    partitions: list[PollFrom]
    wait_ms: int = 0
    bytes_max: int = 1 << 20


class OldPollRequest(msgspec.Struct, kw_only=True):
    """The envelope of an earlier release."""

    ask: OldPollEntries


def with_broker(test: Callable[[Broker, AsyncProducer], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        async with running_broker(**settings) as broker:
            await broker.partitions.create("clicks", 1, TopicSettings(), exist_ok=False)
            async with AsyncProducer(broker.address, audit=False, codec="none") as producer:
                await test(broker, producer)

    run(main())


async def send(producer: AsyncProducer, value: bytes) -> None:
    await (await producer.send("clicks", value))


async def tail(
    consumer: AsyncConsumer, producer: AsyncProducer, values: list[bytes], before: Sequence[bytes] = ()
) -> None:
    """Send records one by one; each comes before the next is sent, and those `before` come first."""
    for value in before:
        batch = await consumer.poll(WAIT_S)
        assert batch is not None
        assert batch.values() == [value]
    for value in values:
        await send(producer, value)
        batch = await consumer.poll(WAIT_S)
        assert batch is not None
        assert batch.values() == [value]


def reader(broker: Broker, **settings: Any) -> AsyncConsumer:
    return AsyncConsumer(broker.address, "clicks", audit=False, **settings)


async def partition_of(broker: Broker) -> ReadPartition:
    return (await broker.partitions.current_topic("clicks")).read_partition_of(0)


def values(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def test_a_consumer_at_the_end_needs_no_read_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(broker: Broker, producer: AsyncProducer) -> None:
        async def refuse(*place: object) -> bytes:
            raise StoreError("each GET costs")

        monkeypatch.setattr(broker.services.store, "get_range", refuse)
        async with reader(broker) as consumer:
            await tail(consumer, producer, values(20))
            assert consumer.stats().retries == 0
        counters = broker.services.counters
        assert (counters.poll_batches, counters.read_requests) == (20, 0)

    with_broker(test)


def test_blocks_come_for_all_partitions_of_one_answer() -> None:
    async def main() -> None:
        async with running_broker() as broker:
            await broker.partitions.create("clicks", 3, TopicSettings(), exist_ok=False)
            async with AsyncProducer(broker.address, audit=False) as producer, reader(broker) as consumer:
                for number in range(30):
                    await (await producer.send("clicks", b"%d" % number, partition=number % 3))
                found = list[bytes | None]()
                while len(found) < 30:
                    batch = await consumer.poll(WAIT_S)
                    assert batch is not None
                    found += batch.values()
            assert sorted(found, key=lambda value: int(value or b"")) == values(30)
            assert broker.services.counters.read_requests == 0

    run(main())


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


LIES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "flipped": lambda true, before: flipped(true),
    "header": lambda true, before: flipped(true[:40]) + true[40:],
    "short": lambda true, before: true[:-1],
    "long": lambda true, before: true + true,
    "batch before": lambda true, before: before,
    "zeros": lambda true, before: bytes(len(true)),
}


@pytest.mark.parametrize("lie", LIES)
def test_wrong_bytes_that_come_with_a_pointer_are_found_and_read_again(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(broker: Broker, producer: AsyncProducer) -> None:
        true_read: HotRead = broker.services.recent_batches.read
        lied = list[bytes]()

        def read(key: str, offset: int, length: int) -> bytes | None:
            """Lie once for each object: READ asks the second time."""
            true = true_read(key, offset, length)
            if true is None or true in lied:
                return true
            lied.append(true)
            return LIES[lie](true, lied[-2] if len(lied) > 1 else true[::-1])

        monkeypatch.setattr(broker.services.recent_batches, "read", read)
        async with reader(broker) as consumer:
            await tail(consumer, producer, values(10))
            stats = consumer.stats()
            assert (stats.counts.records, stats.counts.damaged_blocks) == (10, 0)
            assert stats.transit_errors == 10
        assert broker.services.counters.read_requests == 10

    with_broker(test)


def test_wrong_bytes_that_come_with_a_pointer_prove_nothing_while_the_store_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(broker: Broker, producer: AsyncProducer) -> None:
        true_read: HotRead = broker.services.recent_batches.read
        get_range, failures = broker.services.store.get_range, [StoreError("busy"), StoreError("busy")]

        def read(key: str, offset: int, length: int) -> bytes | None:
            """Give wrong bytes to the POLL, and nothing later."""
            true = true_read(key, offset, length)
            broker.services.recent_batches.clear()
            return None if true is None else flipped(true)

        async def failing(key: str, offset: int, length: int) -> bytes:
            if failures:
                raise failures.pop()
            return await get_range(key, offset, length)

        monkeypatch.setattr(broker.services.recent_batches, "read", read)
        monkeypatch.setattr(broker.services.store, "get_range", failing)
        async with reader(broker, on_damaged="skip") as consumer:
            await tail(consumer, producer, [b"v"])
            assert (consumer.stats().counts.damaged_blocks, consumer.stats().transit_errors) == (0, 1)
        assert not failures

    with_broker(test)


@pytest.mark.parametrize(
    ("settings", "found", "sent"),
    [
        ({"tags": "T"}, [b"1", b"2", b"4"], 4),
        ({"tags": "T || x"}, [b"0", b"1", b"2", b"4"], 5),
        ({"where": "n = 1"}, [b"1"], 6),
        ({"tags": "T", "where": "n = 1"}, [b"1"], 4),
        ({}, values(6), 6),
    ],
)
def test_a_consumer_with_tags_gets_only_blocks_of_batches_with_their_bits(
    settings: dict[str, str], found: list[bytes], sent: int
) -> None:
    """Bits decide what is sent, and `other` has the bit of `T`. Tags decide what is delivered."""
    tags = ["x", "T", "T", "other", "T", None]
    assert tag_bit("other") == tag_bit("T") != tag_bit("x")

    async def test(broker: Broker, producer: AsyncProducer) -> None:
        for number, tag in enumerate(tags):
            await (await producer.send("clicks", b"%d" % number, tag=tag, headers={"n": str(number)}))
        async with reader(broker, **settings) as consumer:
            delivered = list[bytes | None]()
            while (batch := await consumer.poll(1)) is not None:
                delivered += batch.values()
            counts = consumer.stats().counts
        assert delivered == found
        assert (counts.records, counts.filtered_records) == (len(found), 6 - len(found))
        counters = broker.services.counters
        assert (counters.poll_batches, counters.read_requests) == (sent, 0)

    with_broker(test)


@pytest.mark.parametrize("also_stored", [False, True])
def test_bytes_that_are_wrong_in_memory_are_damage_only_if_the_store_has_them_too(
    monkeypatch: pytest.MonkeyPatch, also_stored: bool
) -> None:
    """The broker's memory brings the same wrong bytes each time, so two of its answers prove nothing."""

    async def test(broker: Broker, producer: AsyncProducer) -> None:
        true_read: HotRead = broker.services.recent_batches.read
        get_range = broker.services.store.get_range

        def read(key: str, offset: int, length: int) -> bytes | None:
            true = true_read(key, offset, length)
            return true if true is None else flipped(true)

        async def damaged(key: str, offset: int, length: int) -> bytes:
            return flipped(bytes(await get_range(key, offset, length)))

        monkeypatch.setattr(broker.services.recent_batches, "read", read)
        if also_stored:
            monkeypatch.setattr(broker.services.store, "get_range", damaged)
        async with reader(broker, on_damaged="skip") as consumer:
            await send(producer, b"v")
            batch = await consumer.poll(WAIT_S)
            assert batch is not None
            assert [damage.records for damage in batch.damaged] == ([1] if also_stored else [])
            assert [record.value for record in batch] == ([] if also_stored else [b"v"])
            assert consumer.stats().transit_errors == (not also_stored)

    with_broker(test)


def test_a_batch_that_is_too_large_for_an_answer_is_read_as_before() -> None:
    async def test(broker: Broker, producer: AsyncProducer) -> None:
        async with reader(broker) as consumer:
            await tail(consumer, producer, [b"v" * POLL_BLOCKS_BYTES_MAX, b"small"])
        counters = broker.services.counters
        assert (counters.poll_batches, counters.read_requests) == (1, 1)

    with_broker(test)


def test_without_free_memory_for_answers_pointers_come_alone() -> None:
    """A POLL may use a sixteenth of the broker's memory, of which its pointers take 64 KiB."""

    async def test(broker: Broker, producer: AsyncProducer) -> None:
        assert broker.services.settings.memory_bytes_max // 16 < 600_000
        async with reader(broker) as consumer:
            await tail(consumer, producer, [b"v" * 600_000, b"small"])
        counters = broker.services.counters
        assert (counters.poll_batches, counters.read_requests) == (1, 1)

    with_broker(test, memory_bytes_max=8 << 20)


def test_a_batch_over_the_prefetch_limit_is_read_as_before() -> None:
    async def test(broker: Broker, producer: AsyncProducer) -> None:
        async with reader(broker, prefetch_bytes_max=4_096) as consumer:
            await tail(consumer, producer, [b"v" * 4_096, b"asked for while the first was here", b"small"])
        counters = broker.services.counters
        assert (counters.poll_batches, counters.read_requests) == (1, 2)

    with_broker(test)


def test_blocks_take_no_room_from_an_earlier_batch_that_comes_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later batch can't be delivered before the first one, which would wait for its bytes for ever."""

    async def test(broker: Broker, producer: AsyncProducer) -> None:
        true_read: HotRead = broker.services.recent_batches.read
        polled = list[int]()

        def read(key: str, offset: int, length: int) -> bytes | None:
            polled.append(length)
            return b"" if len(polled) == 1 else true_read(key, offset, length)

        await send(producer, b"v" * 3_000)
        await send(producer, b"w" * 2_000)
        monkeypatch.setattr(broker.services.recent_batches, "read", read)
        async with reader(broker, prefetch_bytes_max=4_096) as consumer:
            for size in (3_000, 2_000):
                batch = await consumer.poll(WAIT_S)
                assert batch is not None
                assert [len(value or b"") for value in batch.values()] == [size]
        assert polled[0] > 3_000 > polled[1] > 2_000, "the answer had the later batch alone"

    with_broker(test)


def test_a_consumer_that_reads_the_store_itself_gets_pointers_alone() -> None:
    async def test(broker: Broker, producer: AsyncProducer) -> None:
        async with reader(broker, read="direct") as consumer:
            await send(producer, b"v")
            with pytest.raises(DeniedError, match="can't be opened here"):
                await consumer.poll(WAIT_S)
        assert broker.services.counters.poll_batches == 0

    with_broker(test)


def test_pointers_of_an_epoch_that_ended_are_read_from_the_log() -> None:
    """Another owner may have continued the log meanwhile."""

    async def test(broker: Broker, producer: AsyncProducer) -> None:
        await send(producer, b"before")
        fresh, log = broker.services.recent_pointers, await partition_of(broker)
        assert fresh.find(log, 1) is not None
        broker.partitions.processors[log.topic_id, 0].fence(FencedError("a test"))
        async with reader(broker) as consumer:
            await tail(consumer, producer, [b"after"], before=[b"before"])
        assert fresh.find(log, 1) is None
        assert fresh.find(log, 3) is not None

    with_broker(test)


def test_a_poll_that_does_not_wait_is_answered_by_the_log() -> None:
    """A reader that doubts an answer asks so: memory would repeat what a cut log has lost."""

    async def test(broker: Broker, producer: AsyncProducer) -> None:
        await send(producer, b"v")
        log = await partition_of(broker)
        queue = broker.services.queue
        assert isinstance(queue, MemoryQueue)
        del queue.log(log).entries[-1:]
        link: Link = await connect_link(Runtime(), None, parse_address(broker.address))
        remote = RemoteQueue(link.request, link.request_with_blocks)
        found = [await remote.poll({log: 1}, wait_ms) for wait_ms in (1_000, 0)]
        link.close()
        assert [[entry.offset for entry in polled.entries] for (polled,) in found] == [[1], []]

    with_broker(test)


def test_a_client_of_an_earlier_release_gets_pointers_alone() -> None:
    async def test(broker: Broker, producer: AsyncProducer) -> None:
        await send(producer, b"v")
        client = await BareClient.connect(broker)
        partition = PollFrom(partition=ref_of(await partition_of(broker)), offset=0)
        old = OldPollRequest(ask=OldPollEntries(partitions=[partition], wait_ms=1_000))
        client.write(encode_frame(Api.POLL, 0, 7, encode_message(old)))
        frame = await client.frame()
        assert (frame.api, frame.flags, frame.argument) == (Api.POLL, 0, 7)
        (part,) = decode_message(frame.body, PollAnswer).partitions
        assert [entry.blocks_bytes for entry in part.entries] == [0] * len(part.entries)
        assert len(part.entries) == 2, "opened, and the batch"
        await client.close()

    with_broker(test)


def test_a_broker_of_an_earlier_release_understands_the_request() -> None:
    partition = PollFrom(partition=PartitionRef(topic="clicks", topic_id="0a" * 16, partition=0), offset=5)
    ask = PollEntries(partitions=[partition], wait_ms=9, blocks_bytes_max=1 << 20, tag_bits="0" * 15 + "8")
    asked = encode_message(PollRequest(ask=ask))
    understood = decode_message(asked, OldPollRequest, checksum_wanted=True).ask
    assert (understood.partitions[0].offset, understood.wait_ms) == (5, 9)


def test_an_answer_without_blocks_is_that_of_an_earlier_release() -> None:
    async def test(broker: Broker, producer: AsyncProducer) -> None:
        await send(producer, b"v")
        broker.services.recent_batches.clear()
        link: Link = await connect_link(Runtime(), None, parse_address(broker.address))
        queue = RemoteQueue(link.request, link.request_with_blocks)
        (polled,) = await queue.poll({await partition_of(broker): 0}, 1_000, blocks_bytes_max=1 << 20)
        assert [entry.offset for entry in polled.entries] == [0, 1]
        assert polled.blocks == {}
        link.close()

    with_broker(test)


def test_the_blocks_are_the_bytes_that_read_brings() -> None:
    async def test(broker: Broker, producer: AsyncProducer) -> None:
        await send(producer, b"v")
        client = await BareClient.connect(broker)
        partition = PollFrom(partition=ref_of(await partition_of(broker)), offset=0)
        ask = PollEntries(partitions=[partition], wait_ms=1_000, blocks_bytes_max=1 << 20)
        client.write(encode_frame(Api.POLL, 0, 7, encode_message(PollRequest(ask=ask))))
        frame = await client.frame()
        assert frame.flags == HAS_BLOCKS
        message, blocks = split_blocks(frame)
        entry = decode_message(message, PollAnswer).partitions[0].entries[-1]
        (place,) = msgspec.json.decode(entry.pointer)["locations"]
        stored = await broker.services.store.get_range(place["key"], place["offset"], place["length"])
        assert (bytes(blocks), entry.blocks_bytes) == (stored, place["length"])
        await client.close()

    with_broker(test)
