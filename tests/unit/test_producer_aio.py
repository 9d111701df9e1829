"""The asyncio producer on a scripted broker: sent, refused and bounded blocks, and callbacks."""

from __future__ import annotations

import asyncio
import struct
import zlib

import pytest
from msgspec import structs

from memq.client.producer.delivery import Ack, AsyncDelivery, Delivery
from memq.client.producer.producer import AsyncProducer
from memq.errors import (
    BufferFullError,
    ClosedError,
    CorruptDataError,
    InvalidRequestError,
    InvalidSettingError,
    MemqError,
    NotFoundError,
    NotReadyError,
    TimedOutError,
    TooLargeError,
    UnreachableError,
)
from memq.format.blocks.header import KEY, scope_of
from memq.protocol.frames import AckLevel, Api, Frame
from memq.topic import equal_slots
from tests.producer_cores import RecordingCore, note_cores
from tests.unit.toy_broker import ToyBroker, ToyConnection, run, toy_topic


def test_a_record_arrives_as_it_was_sent() -> None:
    async def test(broker: ToyBroker) -> None:
        async with AsyncProducer(broker.address) as producer:
            delivery = await producer.send(
                "clicks", b"v", key="schlüssel", headers={"trace": b"1", "none": None}, timestamp_ms=77, tag="web"
            )
            ack = await delivery
            assert ack == Ack("clicks", 0, ack.producer_id, 0, 1, AckLevel.ALL)
            assert 0 < ack.producer_id < 1 << 63

    broker = run(test)
    (reader,) = broker.readers()
    (record,) = reader.records()
    assert record == (b"v", "schlüssel".encode(), (("trace", b"1"), ("none", None)), 77, "web")
    assert reader.header.producer_epoch == 0, "it has no name"
    assert reader.header.scope == scope_of(bytes.fromhex("ab" * 16), 0)
    assert (reader.header.slot_first, reader.header.slot_last) == (0, 65535)
    assert [(close.next_sequence, close.burned) for close in broker.closes] == [(1, [])]
    assert broker.creates == ["clicks"]


def test_records_of_a_partition_stay_in_order_over_many_blocks() -> None:
    sent = [b"%06d" % number * 20 for number in range(20_000)]

    async def test(broker: ToyBroker) -> None:
        async with AsyncProducer(broker.address, block_bytes=64 << 10) as producer:
            for value in sent[:10_000]:
                await producer.send("clicks", value)
            deliveries = await producer.send_many("clicks", sent[10_000:])
            await asyncio.gather(*deliveries)
            stats = producer.stats()
            assert (stats.records_acked, stats.pending_records, stats.pending_bytes) == (20_000, 0, 0)

    broker = run(test)
    assert broker.values() == sent
    assert len(broker.blocks) >= 20_000 * 120 // (64 << 10)


def test_a_producer_is_refused_on_another_event_loop_where_nothing_would_ever_be_sent() -> None:
    async def test(broker: ToyBroker) -> None:
        async with AsyncProducer(broker.address) as producer:
            await (await producer.send("clicks", b"first"))
            uses = (
                lambda: producer.send("clicks", b"v"),
                lambda: producer.send_many("clicks", [b"v"]),
                producer.flush,
                producer.close,
            )
            for use in uses:
                with pytest.raises(InvalidRequestError, match="belongs to the event loop of its first use"):
                    await asyncio.to_thread(lambda use=use: asyncio.run(use()))  # type: ignore[misc]
            await (await producer.send("clicks", b"second"))

    assert run(test).values() == [b"first", b"second"]


def test_a_call_that_is_cancelled_has_put_nothing_in() -> None:
    sent = [b"first"]

    async def test(broker: ToyBroker) -> None:
        async with AsyncProducer(broker.address) as producer:
            await (await producer.send("clicks", b"first"))
            for steps in range(6):
                for value, many in ((b"one-%d" % steps, False), (b"many-%d" % steps, True)):
                    call = producer.send_many("clicks", [value]) if many else producer.send("clicks", value)
                    task = asyncio.create_task(call)
                    for _ in range(steps):
                        await asyncio.sleep(0)
                    task.cancel()
                    (outcome,) = await asyncio.gather(task, return_exceptions=True)
                    if not isinstance(outcome, asyncio.CancelledError):
                        sent.append(value)
                    await producer.flush()

    broker = run(test)
    assert broker.values() == sent
    assert 1 < len(sent) < 13  # calls of both kinds


def test_keys_find_their_partition_and_blocks_say_their_slots() -> None:
    keys = [b"key-%d" % number for number in range(500)]

    async def test(broker: ToyBroker) -> None:
        async with AsyncProducer(broker.address) as producer:
            for key in keys[:250]:
                await producer.send("clicks", b"v" + key, key=key)
            await producer.send_many("clicks", [b"v" + key for key in keys[250:]], keys=keys[250:])

    topic = toy_topic(partitions=5)
    broker = run(test, ToyBroker(topic))
    seen: list[bytes | None] = []
    for part in topic.partitions:
        for reader in broker.readers(partition=part.partition):
            assert reader.header.flags & KEY
            assert (reader.header.slot_first, reader.header.slot_last) == (part.slot_first, part.slot_last)
            for key in list(reader.keys()):
                assert key is not None
                assert part.slot_first <= zlib.crc32(key) >> 16 <= part.slot_last
            seen += reader.keys()
    assert sorted(key or b"" for key in seen) == sorted(keys)


def test_a_chosen_partition_wins_over_the_key_and_widens_the_slots() -> None:
    async def test(broker: ToyBroker) -> None:
        async with AsyncProducer(broker.address) as producer:
            for number in range(10):
                await producer.send("clicks", b"v", key=b"key-%d" % number, partition=2)
            with pytest.raises(InvalidRequestError, match="no partition 7"):
                await producer.send("clicks", b"v", partition=7)

    broker = run(test, ToyBroker(toy_topic(partitions=3)))
    assert len(broker.values(partition=2)) == 10
    assert {(header.slot_first, header.slot_last) for header in broker.headers} == {(0, 65535)}


def test_records_without_a_key_stay_together_in_a_block_and_turn_with_the_blocks() -> None:
    async def test(broker: ToyBroker) -> None:
        async with AsyncProducer(broker.address, block_bytes=4096) as producer:
            for _ in range(1_000):
                await producer.send("clicks", b"x" * 100)

    broker = run(test, ToyBroker(toy_topic(partitions=4)))
    counts = [len(broker.values(partition=number)) for number in range(4)]
    assert sum(counts) == 1_000
    assert min(counts) > 100
    assert max(header.count for header in broker.headers) > 30


def test_acks_1_and_0() -> None:
    async def test(broker: ToyBroker) -> None:
        async with AsyncProducer(broker.address, acks=1) as one:
            assert (await (await one.send("clicks", b"1"))).level is AckLevel.ONE
        async with AsyncProducer(broker.address, acks=0) as none:
            assert (await (await none.send("clicks", b"0"))).level is AckLevel.NONE

    broker = run(test)
    assert [message.acks for message in broker.opens] == [1, 0]
    assert sorted(value or b"" for value in broker.values()) == [b"0", b"1"]


def test_an_ack_of_a_lower_level_is_not_enough() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.acking = False
        async with AsyncProducer(broker.address) as producer:
            delivery = await producer.send("clicks", b"v")
            await broker.until(lambda: bool(broker.blocks))
            connection = broker.connections[0]
            (number,) = connection.streams
            low = struct.pack("<IBBHQII", 8, Api.ACK, AckLevel.ONE, number, 1, 1, 0)
            connection.transport.write(low)
            with pytest.raises(TimedOutError, match="1 record is still pending"):
                await producer.flush(0.05)
            assert not delivery.done()
            connection.ack(number)
            await delivery

    run(test)


def test_a_full_buffer_raises_or_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    note_cores(monkeypatch)

    async def test(broker: ToyBroker) -> None:
        broker.acking = False
        small = {"pending_bytes_max": 100_000, "block_bytes": 20_000, "codec": "none"}
        producer = AsyncProducer(broker.address, when_full="raise", **small)  # type: ignore[arg-type]
        with pytest.raises(BufferFullError, match="of 100000 bytes are pending"):
            await producer.send_many("clicks", [b"x" * 1_000] * 200)
        sent = producer.stats().pending_records
        assert 70 < sent < 100
        waiting = AsyncProducer(broker.address, when_full="block", **small)  # type: ignore[arg-type]
        filler = asyncio.create_task(waiting.send_many("clicks", [b"y" * 1_000] * 300))
        await broker.until(lambda: sum(header.count for header in broker.headers) > sent)
        assert not filler.done()
        broker.acking = True
        for connection in broker.connections:
            for number in connection.streams:
                connection.ack(number)
        deliveries = await filler
        await waiting.flush(10)
        assert all(delivery.done() for delivery in deliveries)
        assert waiting.stats().pending_bytes == 0
        assert RecordingCore.last.buffer.waiting == 0, "else each block that is acked looks for waiters"
        await producer.close()
        await waiting.close()

    broker = run(test)
    assert broker.values().count(b"y" * 1_000) == 300


def test_a_buffer_that_stays_full_raises_after_the_seconds_that_were_asked_for() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.acking = False
        producer = AsyncProducer(
            broker.address, when_full=0.05, pending_bytes_max=50_000, block_bytes=10_000, codec="none"
        )
        with pytest.raises(BufferFullError):
            await producer.send_many("clicks", [b"x" * 1_000] * 100)
        with pytest.raises(TimedOutError):
            await producer.close(0.05)

    run(test)


def test_bad_input_is_refused_and_changes_nothing() -> None:
    async def test(broker: ToyBroker) -> None:
        async with AsyncProducer(broker.address) as producer:
            for bad in (1, 1.5, ["x"], object()):
                with pytest.raises(TypeError, match="value must be bytes-like or str"):
                    await producer.send("clicks", bad)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="timestamp_ms"):
                await producer.send("clicks", b"", timestamp_ms=True)
            with pytest.raises(TypeError, match="a header must be a pair"):
                await producer.send("clicks", b"", headers=[b"x"])  # type: ignore[list-item]
            with pytest.raises(TypeError, match="a sequence of bytes"):
                await producer.send_many("clicks", b"abc")  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="values must be a sequence of bytes, not int"):
                await producer.send_many("clicks", 5)  # type: ignore[arg-type]
            with pytest.raises(TypeError, match="timestamps_ms must be a sequence of int, not int"):
                await producer.send_many("clicks", [b"x"], timestamps_ms=5)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequestError, match="2 keys for 1 values"):
                await producer.send_many("clicks", [b"x"], keys=[b"a", b"b"])
            with pytest.raises(InvalidRequestError, match="timestamp"):
                await producer.send("clicks", b"x", timestamp_ms=1 << 60)
            with pytest.raises(TooLargeError, match="record of 1048577 bytes is over record_bytes_max = 1048576"):
                await producer.send("clicks", bytes((1 << 20) + 1))
            with pytest.raises(TooLargeError, match=r"record values\[1\] of 1048577 bytes"):
                await producer.send_many("clicks", [b"x", bytes((1 << 20) + 1)])
            await producer.send("clicks", bytearray(b"good"))
            await producer.send("clicks", None, key=memoryview(b"k"))

    assert run(test).values() == [b"good", None]


def test_an_unknown_topic_and_a_bad_name_are_reported_at_once() -> None:
    async def test(broker: ToyBroker) -> None:
        async with AsyncProducer(broker.address) as producer:
            with pytest.raises(NotFoundError, match="topic 'nothing' does not exist"):
                await producer.send("nothing", b"v")
            with pytest.raises(MemqError, match=r"namespace of topic name '\.\.' is not allowed"):
                await producer.send("../x", b"v")

    run(test)


def test_a_missing_broker_is_reported_after_the_metadata_timeout() -> None:
    async def test(broker: ToyBroker) -> None:
        async with AsyncProducer("127.0.0.1:1", metadata_timeout_ms=1_000) as producer:
            with pytest.raises(UnreachableError, match=r"no broker answers: can't reach 127\.0\.0\.1:1"):
                await producer.send("clicks", b"v")

    run(test)


def test_new_partitions_are_used_once_the_producer_hears_of_them() -> None:
    async def test(broker: ToyBroker) -> None:
        async with AsyncProducer(broker.address) as producer:
            await (await producer.send("clicks", b"v"))
            before = broker.topics["clicks"]
            broker.topics["clicks"] = structs.replace(before, partitions=equal_slots(4), map_version=2)
            broker.cut()
            for number in range(40):
                await (await producer.send("clicks", b"v", key=b"%d" % number))

    broker = run(test, ToyBroker(toy_topic()))
    assert all(broker.values(partition=number) for number in range(4))


def test_close_takes_nothing_more_and_failures_that_nobody_saw_are_raised() -> None:
    def refuse(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api == Api.WRITE and connection.streams[frame.stream].open:
            connection.nack(frame, CorruptDataError("bad"))
        return frame.api == Api.WRITE

    async def test(broker: ToyBroker) -> None:
        broker.script = refuse
        producer = AsyncProducer(broker.address)
        await producer.send("clicks", b"v")
        with pytest.raises(CorruptDataError):
            await producer.close()
        await producer.close()
        with pytest.raises(ClosedError):
            await producer.send("clicks", b"v")
        other = AsyncProducer(broker.address)
        await other.send("clicks", b"v")
        await other.__aexit__(ValueError, ValueError("the caller's own"), None)  # which is the one to see

    run(test)


def test_on_ack_hears_of_every_block_and_what_it_raises_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Ack | MemqError] = []

    def on_ack(outcome: Ack | MemqError) -> None:
        heard.append(outcome)
        raise RuntimeError("the caller's own")

    shown: list[object] = []

    async def test(broker: ToyBroker) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: shown.append(context["exception"]))
        async with AsyncProducer(broker.address, on_ack=on_ack) as producer:
            for number in range(3):
                await (await producer.send("clicks", b"%d" % number))

    run(test)
    assert [str(error) for error in shown] == ["the caller's own"]  # the first; by default it goes to stderr
    assert [outcome.first_sequence for outcome in heard if isinstance(outcome, Ack)] == [0, 1, 2]
    assert [record.event for record in caplog.records] == ["producer.callback-raised"] * 3  # type: ignore[attr-defined]


def test_cancelled_wait_leaves_nothing_in_a_delivery() -> None:
    """A program may ask a thousand times, and for a short while each time."""
    blocking = Delivery()
    for _ in range(3):
        with pytest.raises(TimedOutError):
            blocking.result(0)
    assert blocking.settle(Ack("clicks", 0, 1, 0, 1, AckLevel.ALL)) == []

    async def main() -> None:
        waited = AsyncDelivery()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await waited
        assert waited.settle(Ack("clicks", 0, 1, 0, 1, AckLevel.ALL)) == []

    asyncio.run(main())


def test_deliveries_tell_of_themselves() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.acking = False
        async with AsyncProducer(broker.address) as producer:
            delivery = await producer.send("clicks", b"v")
            called: list[AsyncDelivery] = []
            delivery.add_done_callback(called.append)
            with pytest.raises(NotReadyError):
                delivery.result()
            with pytest.raises(TimedOutError):
                await producer.flush(0.01)
            assert not called
            (number,) = broker.connections[0].streams
            broker.connections[0].ack(number)
            await producer.flush(10)
            assert called == [delivery]
            assert delivery.result().records == 1

    run(test)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("acks", 2),
        ("acks", True),
        ("codec", "gzip"),
        ("linger_ms", -1),
        ("block_bytes", 1 << 30),
        ("pending_bytes_max", 10),
        ("when_full", "explode"),
        ("when_full", -1),
        ("delivery_timeout_ms", 0),
    ],
)
def test_bad_settings_are_named(setting: str, value: object) -> None:
    with pytest.raises(InvalidSettingError, match=setting):
        AsyncProducer("127.0.0.1:1", **{setting: value})  # type: ignore[arg-type]


def test_brokers_come_from_the_environment_or_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMQ_BROKERS", raising=False)
    with pytest.raises(InvalidRequestError, match="no broker is named"):
        AsyncProducer()

    async def test(broker: ToyBroker) -> None:
        monkeypatch.setenv("MEMQ_BROKERS", f"127.0.0.1:1, {broker.address}")
        async with AsyncProducer() as producer:
            await (await producer.send("clicks", b"v"))

    assert run(test).values() == [b"v"]
