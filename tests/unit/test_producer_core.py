"""A producer on a scripted broker: when blocks are sent, its counters, and the reports at its end."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from memq.client.producer.core import METADATA_AGE_S_MAX
from memq.client.producer.delivery import Ack, AsyncDelivery
from memq.client.producer.producer import AsyncProducer
from memq.errors import (
    BufferFullError,
    ClosedError,
    DeniedError,
    MemqError,
    NotFoundError,
    OutcomeUnknownError,
    TimedOutError,
    TooLargeError,
)
from memq.limits import KIB
from memq.protocol.admin_messages import AdminAnswer, AdminRequest, BeginProducer, WireInstance
from memq.protocol.frames import AckLevel, Api, Frame
from memq.protocol.messages import decode_message
from memq.topic import TopicSettings, producer_id_of
from tests.producer_cores import RecordingCore, note_cores
from tests.stepped_time import step
from tests.unit.producer_parts import producer_on, refuse_writes
from tests.unit.toy_broker import ToyBroker, ToyConnection, run, toy_topic, turns, until

# ---- when blocks leave ---------------------------------------------------------------------------


def test_while_blocks_are_under_way_the_next_one_waits_for_the_linger_time() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.acking = False
        async with producer_on(broker, linger_ms=10_000) as producer:
            await producer.send("clicks", b"first")
            await broker.until(lambda: len(broker.blocks) == 1)
            for number in range(5):
                await producer.send("clicks", b"%d" % number)
            await turns()
            step(9)
            await turns()
            assert len(broker.blocks) == 1, "it waits for company"
            step(1)
            await broker.until(lambda: len(broker.blocks) == 2)
            assert broker.headers[1].count == 5
            await producer.send("clicks", b"last")
            broker.acking = True
            (connection,) = broker.connections
            for stream in connection.streams:
                connection.ack(stream)
            await broker.until(lambda: len(broker.blocks) == 3)

    run(test)


def test_without_acks_what_left_within_the_linger_time_counts_as_under_way() -> None:
    async def test(broker: ToyBroker) -> None:
        async with producer_on(broker, acks=0, linger_ms=10_000) as producer:
            await producer.send("clicks", b"first")
            await broker.until(lambda: len(broker.blocks) == 1)
            await producer.send("clicks", b"second")
            await turns()
            assert len(broker.blocks) == 1
            step(10)
            await broker.until(lambda: len(broker.blocks) == 2)
            step(10)
            await producer.send("clicks", b"third")
            await broker.until(lambda: len(broker.blocks) == 3)

    run(test)


def test_a_block_grows_while_nobody_owns_its_partition_and_fails_when_its_time_is_up() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.owners["clicks", 0] = ""
        producer = producer_on(broker, linger_ms=0, delivery_timeout_ms=60_000)
        first = await producer.send("clicks", b"first")
        await turns()
        rest = [await producer.send("clicks", b"%d" % number) for number in range(20)]
        await turns()
        assert rest[0] is rest[-1], "one block takes them all"
        assert rest[0] is not first
        step(60)
        with pytest.raises(TimedOutError, match="no owner now"):
            await first
        with pytest.raises(TimedOutError):
            await rest[0]
        broker.owners.clear()
        step(5)
        assert (await (await producer.send("clicks", b"again"))).first_sequence == 21
        await producer.close()
        assert broker.closes[0].burned == [(0, 21)]

    run(test)


def test_an_owner_that_comes_up_later_gets_what_waited() -> None:
    async def test(broker: ToyBroker) -> None:
        async with ToyBroker() as other:
            broker.owners["clicks", 0] = ""
            asked = 0

            def serve(connection: ToyConnection, frame: Frame) -> bool:
                nonlocal asked
                if frame.api == Api.METADATA:
                    asked += 1
                    if asked == 4:
                        broker.owners["clicks", 0] = other.address
                return False

            broker.script = serve
            async with producer_on(broker) as producer:
                delivery = await producer.send("clicks", b"v")
                while not delivery.done():
                    step(1)
                    await turns(2)
                assert isinstance(delivery.outcome, Ack)
            assert other.values() == [b"v"]
            assert broker.opens == []

    run(test)


def test_a_block_that_is_sent_again_is_written_to_the_connections_own_clock() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.acking = False
        async with producer_on(broker) as producer:
            step(5)
            delivery = await producer.send("clicks", b"v")
            await broker.until(lambda: len(broker.blocks) == 1)
            assert 0 <= broker.sent_ms[0] < 5_000
            step(3)
            broker.acking = True
            broker.cut()
            await delivery
            assert -4_000 < broker.sent_ms[1] <= -3_000, "so long before the connection's HELLO"
            assert producer.stats().block_writes == 2

    run(test)


def test_records_leave_before_the_next_one_fills_the_socket() -> None:
    """A loop that only sends lets blocks leave: `send` gives way once for each of them."""

    async def test(broker: ToyBroker) -> None:
        async with producer_on(broker, block_bytes=KIB, codec="none", linger_ms=0) as producer:
            await producer.send("clicks", bytes(500))
            await broker.until(lambda: len(broker.blocks) == 1)
            for _ in range(500):
                await producer.send("clicks", bytes(500))
            assert len(broker.blocks) > 25
            await producer.flush()
        assert sum(header.count for header in broker.headers) == 501

    run(test)


def test_blocks_that_wait_for_a_full_socket_are_sent_when_it_has_room() -> None:
    """Without acks nothing else comes from the broker that could set it going."""

    async def test(broker: ToyBroker) -> None:
        async with producer_on(broker, acks=0, codec="none", block_bytes=64 * KIB) as producer:
            await producer.send("clicks", b"v")
            await broker.until(lambda: len(broker.blocks) == 1)
            (connection,) = (each for each in broker.connections if each.streams)
            connection.transport.pause_reading()
            for _ in range(300):
                await producer.send("clicks", bytes(60_000))
            await turns()
            assert producer.stats().pending_records > 0, "more than a socket holds"
            connection.transport.resume_reading()
            await broker.until(lambda: len(broker.blocks) == 301)

    run(test)


def test_a_send_gives_way_behind_the_record_that_opened_a_block_and_not_again() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.acking = False
        producer = producer_on(broker, linger_ms=60_000)
        await producer.send("clicks", b"under way")
        await broker.until(lambda: len(broker.blocks) == 1)
        given: list[str] = []
        for value in ("opens", "second", "third"):
            asyncio.get_running_loop().call_soon(given.append, value)
            before = list(given)
            await producer.send("clicks", value.encode())
            given.append("gave way" if given != before else "kept on")
            await turns(1)
        assert given == ["opens", "gave way", "second", "gave way", "kept on", "third"]
        with pytest.raises(TimedOutError):
            await producer.close(0)

    run(test)


# ---- what is counted -----------------------------------------------------------------------------


def test_producer_counts_records_blocks_and_bytes() -> None:
    refused: list[int] = []

    def refuse(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api != Api.WRITE or connection.streams[frame.stream].expected != 3 or refused:
            return False
        refused.append(1)
        connection.nack(frame, TooLargeError("no"))
        return True

    async def test(broker: ToyBroker) -> None:
        broker.script = refuse
        seen: list[Ack | MemqError] = []
        async with producer_on(broker, on_ack=seen.append, codec="none") as producer:
            (first,) = await producer.send_many("clicks", [b"v"] * 3)
            before = producer.stats()
            assert (before.pending_records, before.records_acked) == (3, 0)
            assert before.pending_bytes > 0
            ack = await first
            assert ack == Ack("clicks", 0, broker.headers[0].producer_id, 0, 3, AckLevel.ALL)
            (failed,) = await producer.send_many("clicks", [b"x"] * 2)
            with pytest.raises(TooLargeError):
                await failed
            await (await producer.send("clicks", b"last"))
            stats = producer.stats()
            assert (stats.records_acked, stats.blocks_acked) == (4, 2)
            assert (stats.records_failed, stats.blocks_failed) == (2, 1)
            assert (stats.pending_records, stats.pending_bytes) == (0, 0)
            assert stats.bytes_acked == sum(map(len, broker.blocks.values()))
            assert stats.block_writes == 2, "a write that was answered with a refusal did not happen"
        assert [getattr(each, "records", each) for each in seen] == [3, failed.exception(), 1]

    run(test)


def test_flush_timeout_names_the_pending_records() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.acking = False
        producer = producer_on(broker)
        await producer.send("clicks", b"v")
        await broker.until(lambda: len(broker.blocks) == 1)
        with pytest.raises(TimedOutError, match=r"^1 record is still pending after 0\.01 s") as one:
            await producer.flush(0.01)
        assert "flush again" in one.value.hint
        await producer.send("clicks", b"v")
        await producer.send("clicks", b"v")
        with pytest.raises(TimedOutError, match=r"^3 records are still pending after 0 s"):
            await producer.flush(0)
        with pytest.raises(TimedOutError, match=r"^3 records are still pending") as closed:
            await producer.close(0.01)
        assert "may have been stored" in closed.value.hint
        assert producer.stats().records_failed == 3

    run(test)


def test_flush_returns_when_all_is_settled_acked_or_not() -> None:
    async def test(broker: ToyBroker) -> None:
        async with producer_on(broker, linger_ms=60_000) as producer:
            await producer.flush(0)
            deliveries = [await producer.send("clicks", b"v", partition=0) for _ in range(3)]
            await producer.flush(5)
            assert all(delivery.done() for delivery in deliveries)
            await producer.flush()

    run(test)


# ---- failures that nobody checked --------------------------------------------------------------


async def fail(producer: AsyncProducer, broker: ToyBroker) -> AsyncDelivery:
    """Let one record fail, and return its delivery, at which nobody has looked."""
    broker.script = refuse_writes
    delivery = await producer.send("clicks", b"v")
    await until(delivery.done)
    broker.script = lambda connection, frame: False
    return delivery


def test_a_failure_that_nobody_looked_at_is_raised_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async def test(broker: ToyBroker) -> None:
        producer = producer_on(broker)
        await fail(producer, broker)
        assert "producer.block-failed: 1 record failed: too-large: no" in caplog.text
        with pytest.raises(TooLargeError):
            await producer.close()
        await producer.close()
        looked = producer_on(broker)
        assert isinstance((await fail(looked, broker)).exception(), TooLargeError)
        await looked.close()
        calls: list[object] = []
        heard = producer_on(broker, on_ack=calls.append)
        await fail(heard, broker)
        await heard.close()
        assert len(calls) == 1

    run(test)


def test_a_named_producer_ends_with_its_first_failure() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.script = named
        producer = producer_on(broker, name="job", linger_ms=0)
        delivery = await producer.send("clicks", b"0")
        await until(delivery.done)
        assert isinstance(delivery.outcome, Ack)
        assert delivery.outcome.producer_id == producer_id_of("job")
        assert delivery.outcome.first_sequence == 7
        assert await producer.resume_points("clicks") == {0: 7}
        failed = await fail(producer, broker)
        assert isinstance(failed.exception(), TooLargeError)
        with pytest.raises(ClosedError, match="producer 'job' ended with a block that failed: no") as ended:
            await producer.send("clicks", b"1")
        assert "resume_points()" in ended.value.hint
        await producer.close()

    run(test)


def test_unsent_records_of_a_named_producer_fail_with_its_first_failure() -> None:
    async def test(broker: ToyBroker) -> None:
        held: list[tuple[ToyConnection, Frame]] = []

        def hold(connection: ToyConnection, frame: Frame) -> bool:
            if frame.api == Api.WRITE:
                held.append((connection, frame))
                return True
            return named(connection, frame)

        broker.script = hold
        producer = producer_on(broker, name="job", linger_ms=60_000)
        sent = await producer.send("clicks", b"0", partition=0)
        await broker.until(lambda: len(held) == 1)
        await producer.send("clicks", b"1", partition=1)
        await broker.until(lambda: len(held) == 2)
        waiting = await producer.send("clicks", b"2", partition=1)
        connection, frame = held[0]
        connection.nack(frame, TooLargeError("no"))
        await until(waiting.done)
        assert isinstance(sent.exception(), TooLargeError)
        assert isinstance(waiting.exception(), ClosedError)
        with pytest.raises(OutcomeUnknownError):
            await producer.close()

    run(test, ToyBroker(toy_topic(partitions=2)))


def named(connection: ToyConnection, frame: Frame) -> bool:
    """Let every instance begin at sequence 7."""
    if frame.api != Api.ADMIN:
        return False
    connection.answer(frame, AdminAnswer(instance=WireInstance(epoch=3, next_sequence=7)))
    return True


# ---- topics --------------------------------------------------------------------------------------


def test_a_topic_is_asked_for_again_when_it_was_asked_for_long_ago() -> None:
    async def test(broker: ToyBroker) -> None:
        asked: list[Frame] = []

        def note(connection: ToyConnection, frame: Frame) -> bool:
            if frame.api == Api.METADATA:
                asked.append(frame)
            return False

        broker.script = note
        async with producer_on(broker) as producer:
            await (await producer.send("clicks", b"v"))
            assert len(asked) == 1
            step(METADATA_AGE_S_MAX - 1)
            await (await producer.send("clicks", b"v"))
            await turns()
            assert len(asked) == 1
            broker.topics["clicks"] = toy_topic(partitions=2, settings=TopicSettings(record_bytes_max=50))
            step(2)
            await (await producer.send("clicks", b"v"))
            await until(lambda: len(asked) == 2)
            await turns()
            with pytest.raises(TooLargeError):
                await producer.send("clicks", bytes(51))
            await (await producer.send("clicks", b"v", partition=1))
            await turns()
            assert len(asked) == 2, "it is fresh again"

    run(test)


def begun(frame: Frame) -> int:
    """Return in which partition a named producer begins."""
    ask = decode_message(frame.body, AdminRequest).ask
    assert isinstance(ask, BeginProducer)
    return ask.partition


def version() -> int:
    """Return which version of the topic the last producer sends by."""
    route = RecordingCore.last.buffer.route("clicks")
    assert route is not None
    return route.topic.version


@pytest.mark.parametrize("refused", [False, True])
def test_a_named_producer_begins_in_a_new_partition_before_it_sends_there(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, *, refused: bool
) -> None:
    note_cores(monkeypatch)

    async def test(broker: ToyBroker) -> None:
        places: list[int] = []

        def serve(connection: ToyConnection, frame: Frame) -> bool:
            if frame.api == Api.ADMIN:
                places.append(begun(frame))
                if places[-1] == 1 and refused:
                    connection.refuse(frame, DeniedError("not you"))
                    return True
            return named(connection, frame)

        broker.script = serve
        async with producer_on(broker, name="job", linger_ms=0) as producer:
            await (await producer.send("clicks", b"1"))
            assert places == [0]
            broker.topics["clicks"] = msgspec.structs.replace(toy_topic(partitions=2), version=9)
            step(METADATA_AGE_S_MAX + 1)
            await (await producer.send("clicks", b"2"))
            await until(lambda: places == [0, 1])
            if refused:
                await until(lambda: "producer.begin-failed" in caplog.text)
                with pytest.raises(NotFoundError, match="no partition 1"):
                    await producer.send("clicks", b"3", partition=1)
            else:
                await until(lambda: version() == 9)
                delivery = await producer.send("clicks", b"3", partition=1)
                await delivery
                assert isinstance(delivery.outcome, Ack)
                assert delivery.outcome.first_sequence == 7
            await (await producer.send("clicks", b"4", partition=0))
            assert places == [0, 1]

    run(test)


def test_a_named_producer_follows_a_topic_that_was_created_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version may be lower than that of the topic before it."""
    note_cores(monkeypatch)

    async def test(broker: ToyBroker) -> None:
        broker.topics["clicks"] = msgspec.structs.replace(toy_topic(), version=9)
        broker.script = named
        async with producer_on(broker, name="job", linger_ms=0) as producer:
            await (await producer.send("clicks", b"1"))
            broker.topics["clicks"] = toy_topic(topic_id="cd" * 16)
            step(METADATA_AGE_S_MAX + 1)
            await (await producer.send("clicks", b"2"))
            await until(lambda: version() < 9)
            await (await producer.send("clicks", b"3"))
        assert [each.topic_id for each in broker.opens] == ["ab" * 16, "cd" * 16]

    run(test)


def test_a_topic_that_is_dropped_while_a_named_producer_begins_in_it_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    note_cores(monkeypatch)

    async def test(broker: ToyBroker) -> None:
        held: list[tuple[ToyConnection, Frame]] = []

        def serve(connection: ToyConnection, frame: Frame) -> bool:
            if frame.api == Api.ADMIN and begun(frame) == 1:
                held.append((connection, frame))
                return True
            return named(connection, frame)

        broker.script = serve
        async with producer_on(broker, name="job", linger_ms=0) as producer:
            await (await producer.send("clicks", b"1"))
            broker.topics["clicks"] = msgspec.structs.replace(toy_topic(partitions=2), version=9)
            step(METADATA_AGE_S_MAX + 1)
            await (await producer.send("clicks", b"2"))
            await broker.until(lambda: len(held) == 1)
            RecordingCore.last.buffer.drop_route("clicks")
            named(*held[0])
            await turns()
            await (await producer.send("clicks", b"3", partition=1))
            assert version() == 9

    run(test)


def test_an_unknown_partition_is_refused_before_anything_is_sent() -> None:
    async def test(broker: ToyBroker) -> None:
        async with producer_on(broker) as producer:
            with pytest.raises(NotFoundError, match="no partition 1"):
                await producer.send("clicks", b"v", partition=1)
            with pytest.raises(NotFoundError):
                await producer.send("nothing", b"v")

    assert run(test).opens == []


# ---- room ----------------------------------------------------------------------------------------


def test_sends_that_wait_for_room_continue_when_blocks_are_acked() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.acking = False
        settings = {"block_bytes": 8 * KIB, "pending_bytes_max": 32 * KIB, "codec": "none"}
        async with producer_on(broker, **settings) as producer:
            sends = [asyncio.create_task(producer.send("clicks", bytes(4_000))) for _ in range(12)]
            many = asyncio.create_task(producer.send_many("clicks", [bytes(3_000)] * 20))
            await until(lambda: sum(task.done() for task in sends) >= 4)
            await turns()
            assert not all(task.done() for task in sends)
            assert producer.stats().pending_bytes <= 32 * KIB
            broker.acking = True
            (connection,) = broker.connections
            for stream in connection.streams:
                connection.ack(stream)
            await asyncio.gather(*sends, many)
            await producer.flush()
            assert producer.stats().records_acked == 32
        async with producer_on(broker, when_full=2, **settings) as patient:
            broker.acking = False
            waiting = asyncio.create_task(patient.send_many("clicks", [bytes(3_000)] * 20))
            await turns()
            assert not waiting.done()
            step(2)
            with pytest.raises(BufferFullError, match="bytes are pending"):
                await waiting
            broker.acking = True
            (connection, *_) = broker.connections
            for each in broker.connections:
                for stream in each.streams:
                    each.ack(stream)

    run(test)
