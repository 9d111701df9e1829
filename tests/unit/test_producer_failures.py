"""The asyncio producer under failures: blocks sent again, sent elsewhere, or given up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import json

from memq.client.link_pool import LinkPool
from memq.client.producer.delivery import Ack
from memq.client.producer.producer import AsyncProducer
from memq.client.producer.settings import ProducerSettings
from memq.errors import (
    ClosedError,
    CorruptDataError,
    MemqError,
    NotFoundError,
    NotReadyError,
    OutcomeUnknownError,
    ThrottledError,
    TimedOutError,
    TooLargeError,
    TooOldError,
    UnreachableError,
)
from memq.format.blocks.header import scope_of
from memq.protocol.admin_messages import AdminAnswer, WireInstance
from memq.protocol.frames import AckLevel, Api, Frame, encode_ack, encode_frame
from memq.protocol.messages import Throttle, encode_message, nack_of
from memq.topic import TopicSettings
from tests.stepped_time import step, stepped_runtime
from tests.unit.toy_broker import ToyBroker, ToyConnection, run, toy_topic, turns, until


def test_a_lost_connection_resends_the_same_bytes_and_the_age_counts_from_the_first_write() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.acking = False
        async with AsyncProducer(broker.address, runtime=stepped_runtime()) as producer:
            deliveries = [await producer.send("clicks", b"%d" % n, partition=0) for n in range(3)]
            await broker.until(lambda: len(broker.blocks) >= 1)
            step(2)
            broker.cut()
            broker.acking = True
            await asyncio.gather(*deliveries)

    broker = run(test)
    assert broker.values() == [b"0", b"1", b"2"]
    assert len(broker.opens) == 2
    assert [message.sequence for message in broker.opens] == [0, 0]
    assert broker.sent_ms[0] >= 0
    assert min(broker.sent_ms) <= -2_000  # sent so long before the second connection's clock began


def test_redirected_blocks_go_to_the_new_owner() -> None:
    async def test(broker: ToyBroker) -> None:
        async with ToyBroker() as other:

            def redirect(connection: ToyConnection, frame: Frame) -> bool:
                if frame.api == Api.WRITE:
                    connection.redirect(frame.stream, other.address)
                return frame.api == Api.WRITE

            broker.script = redirect
            async with AsyncProducer(broker.address) as producer:
                await (await producer.send("clicks", b"v"))
            assert other.values() == [b"v"]
            assert [close.next_sequence for close in other.closes] == [1]

    assert run(test).blocks == {}


def test_after_a_move_the_old_owner_neither_acks_nor_ends_the_stream() -> None:
    streams: list[tuple[ToyConnection, int]] = []

    async def test(broker: ToyBroker) -> None:
        async with ToyBroker() as other:
            other.acking = False

            def redirect(connection: ToyConnection, frame: Frame) -> bool:
                if frame.api == Api.WRITE:
                    connection.redirect(frame.stream, other.address)
                    streams.append((connection, frame.stream))
                return frame.api == Api.WRITE

            broker.script = redirect
            async with AsyncProducer(broker.address, runtime=stepped_runtime()) as producer:
                delivery = await producer.send("clicks", b"v")
                await other.until(lambda: bool(other.blocks))
                ((old, stream),) = streams
                old.transport.write(encode_ack(AckLevel.ALL, stream, 1, 1))
                await turns()
                broker.cut()
                await turns()
                assert not delivery.done()
                (new,) = other.connections
                for each in new.streams:
                    new.ack(each)
                await delivery
            assert len(other.opens) == 1

    run(test)


def test_open_that_is_refused_for_now_is_tried_again() -> None:
    refusals = iter([NotReadyError("opening", retry_after_ms=1), ThrottledError("slow"), UnreachableError("no")])

    def refuse(connection: ToyConnection, frame: Frame) -> bool:
        error = next(refusals, None) if frame.api == Api.OPEN else None
        if error is not None:
            connection.refuse(frame, error)
        return error is not None

    async def test(broker: ToyBroker) -> None:
        broker.script = refuse
        async with AsyncProducer(broker.address) as producer:
            await (await producer.send("clicks", b"v"))

    assert run(test).values() == [b"v"]


def test_a_throttled_stream_starts_again_at_the_oldest_block_that_was_not_taken() -> None:
    throttled: list[int] = []

    def throttle(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api != Api.WRITE or len(throttled) >= 3 or not connection.streams[frame.stream].open:
            return False
        throttled.append(connection.streams[frame.stream].expected)
        connection.throttle(frame.stream, 1)
        return True

    async def test(broker: ToyBroker) -> None:
        broker.script = throttle
        async with AsyncProducer(broker.address, linger_ms=0) as producer:
            for number in range(100):
                await producer.send("clicks", b"%d" % number)
                await asyncio.sleep(0)

    broker = run(test)
    assert broker.values() == [b"%d" % number for number in range(100)]
    assert [message.sequence for message in broker.opens][1:] == throttled


@pytest.mark.parametrize(
    ("error", "times", "expected"),
    [(CorruptDataError("bad"), 2, CorruptDataError), (TooOldError("old"), 1, OutcomeUnknownError)],
)
def test_a_refused_block_fails_alone(error: MemqError, times: int, expected: type[MemqError]) -> None:
    refused: list[int] = []

    def refuse(connection: ToyConnection, frame: Frame) -> bool:
        stream = connection.streams.get(frame.stream)
        if frame.api != Api.WRITE or stream is None or stream.expected != 1 or len(refused) == times:
            return False
        refused.append(stream.expected)
        connection.nack(frame, error)
        return True

    async def test(broker: ToyBroker) -> None:
        broker.script = refuse
        async with AsyncProducer(broker.address) as producer:
            await (await producer.send("clicks", b"0"))
            second = await producer.send("clicks", b"1")
            with pytest.raises(expected):
                await second
            await (await producer.send("clicks", b"2"))

    broker = run(test)
    assert broker.values() == [b"0", b"2"]
    assert [(close.next_sequence, close.burned) for close in broker.closes] == [(3, [(1, 2)])]


def test_a_block_that_was_sent_and_not_acked_in_time_is_unknown() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.acking = False
        async with AsyncProducer(broker.address, delivery_timeout_ms=30_000, runtime=stepped_runtime()) as producer:
            delivery = await producer.send("clicks", b"v")
            await broker.until(lambda: len(broker.blocks) == 1)
            step(30)
            with pytest.raises(OutcomeUnknownError, match="1 record of topic 'clicks' partition 0 from sequence 0"):
                await delivery
            assert isinstance(delivery.exception(), OutcomeUnknownError)

    assert run(test).closes[0].burned == [(0, 1)]


def test_the_topics_own_delivery_timeout_bounds_the_producers() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.acking = False
        async with AsyncProducer(broker.address, runtime=stepped_runtime()) as producer:
            delivery = await producer.send("clicks", b"v")
            await broker.until(lambda: len(broker.blocks) == 1)
            step(30)
            with pytest.raises(OutcomeUnknownError):
                await delivery

    run(test, ToyBroker(toy_topic(settings=TopicSettings(delivery_timeout_ms=30_000))))


def test_a_block_that_never_left_timed_out() -> None:
    def refuse(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api == Api.OPEN:
            connection.refuse(frame, NotReadyError("not yet"))
        return frame.api == Api.OPEN

    async def test(broker: ToyBroker) -> None:
        broker.script = refuse
        producer = AsyncProducer(broker.address, delivery_timeout_ms=30_000, runtime=stepped_runtime())
        delivery = await producer.send("clicks", b"v")
        step(30)
        with pytest.raises(TimedOutError):
            await delivery
        await producer.close()

    assert run(test).blocks == {}


@pytest.mark.parametrize(
    ("api", "said"),
    [
        (Api.THROTTLE, b"no message"),
        (Api.THROTTLE, json.encode(Throttle(retry_after_ms=3_600_000))),
        (Api.NACK, json.encode(nack_of(CorruptDataError("damaged block")))),
    ],
    ids=["garbage", "throttle", "nack"],
)
def test_impossible_answer_ends_the_connection_and_the_block_is_resent(api: Api, said: bytes) -> None:
    """A broker whose HELLO has a checksum says nothing without one."""
    spoken: list[int] = []

    def babble(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api != Api.WRITE or spoken:
            return False
        spoken.append(frame.stream)
        connection.transport.write(encode_frame(api, frame.stream, 0, said))
        return True

    async def test(broker: ToyBroker) -> None:
        broker.script = babble
        async with AsyncProducer(broker.address, runtime=stepped_runtime()) as producer:
            delivery = await producer.send("clicks", b"v")
            while not delivery.done():
                step(1)
                await turns(2)
            assert isinstance(delivery.outcome, Ack)

    broker = run(test)
    assert (broker.values(), len(broker.opens)) == ([b"v"], 2)


@pytest.mark.parametrize(
    ("said", "expected"), [("", "topic 'clicks' partition 0 is throttled"), ("too many", "too many")]
)
def test_a_throttled_block_that_is_given_up_says_why(said: str, expected: str) -> None:
    def throttle(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api != Api.WRITE or not connection.streams[frame.stream].open:
            return frame.api == Api.WRITE
        connection.streams[frame.stream].open = False
        body = encode_message(Throttle(retry_after_ms=3_600_000, text=said))
        connection.transport.write(encode_frame(Api.THROTTLE, frame.stream, 0, body))
        return True

    async def test(broker: ToyBroker) -> None:
        broker.script = throttle
        async with AsyncProducer(broker.address, delivery_timeout_ms=30_000, runtime=stepped_runtime()) as producer:
            delivery = await producer.send("clicks", b"v")
            await broker.until(lambda: any(not each.open for it in broker.connections for each in it.streams.values()))
            await turns()
            step(30)
            with pytest.raises(MemqError, match=expected):
                await delivery

    run(test)


def test_an_owner_that_is_not_known_yet_is_asked_for_at_once() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.owners["clicks", 0] = ""

        def serve(connection: ToyConnection, frame: Frame) -> bool:
            if frame.api == Api.METADATA:
                connection.serve(frame)
                broker.owners.clear()  # known from the next answer on
            return frame.api == Api.METADATA

        broker.script = serve
        async with AsyncProducer(broker.address, runtime=stepped_runtime()) as producer:
            delivery = await producer.send("clicks", b"v")
            await turns()
            await broker.until(lambda: bool(broker.blocks))
            await delivery

    run(test)


def test_records_after_the_first_failure_of_a_named_producer_fail_at_once() -> None:
    writes: list[int] = []

    def serve(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api == Api.ADMIN:
            connection.answer(frame, AdminAnswer(instance=WireInstance(epoch=3, next_sequence=7)))
        elif frame.api == Api.WRITE:
            writes.append(frame.stream)
        return frame.api in (Api.ADMIN, Api.WRITE)

    async def test(broker: ToyBroker) -> None:
        broker.script = serve
        producer = AsyncProducer(broker.address, name="job", linger_ms=0, runtime=stepped_runtime())
        deliveries = []
        for number in range(2):
            deliveries.append(await producer.send("clicks", b"%d" % number))
            await broker.until(lambda: len(writes) == len(deliveries))
        (connection,) = broker.connections
        body = encode_message(nack_of(TooLargeError("bad")))
        connection.transport.write(encode_frame(Api.NACK, writes[0], 7, body))
        await until(lambda: all(delivery.done() for delivery in deliveries))
        assert [type(delivery.exception()) for delivery in deliveries] == [TooLargeError, ClosedError]
        await producer.close()

    run(test)


def test_a_drained_broker_gets_nothing_more() -> None:
    async def test(broker: ToyBroker) -> None:
        async with ToyBroker() as other, AsyncProducer(broker.address) as producer:
            await (await producer.send("clicks", b"0"))
            broker.owners[("clicks", 0)] = other.address
            broker.connections[0].drain()
            await (await producer.send("clicks", b"1"))
            while len(other.blocks) + len(broker.blocks) < 12:  # DRAINING and the second block may cross
                await (await producer.send("clicks", b"x"))
            assert len(other.blocks) >= 10
            assert other.opens[0].sequence == len(broker.blocks)

    run(test)


def test_a_topic_that_was_made_again_is_sent_to_under_its_new_id() -> None:
    """The blocks of the old topic fail; later records ask again."""

    def refuse_old(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api == Api.OPEN and b"ab" * 16 in bytes(frame.body):
            connection.refuse(frame, NotFoundError("no such topic"))
            return True
        return False

    async def test(broker: ToyBroker) -> None:
        async with AsyncProducer(broker.address) as producer:
            await (await producer.send("clicks", b"old"))
            broker.topics = {"clicks": toy_topic(topic_id="cd" * 16)}
            broker.script = refuse_old
            broker.cut()
            outcomes: list[Ack | MemqError] = []
            while not outcomes or isinstance(outcomes[-1], MemqError):
                try:
                    outcomes.append(await (await producer.send("clicks", b"new")))
                except MemqError as error:
                    outcomes.append(error)
            assert {type(outcome) for outcome in outcomes[:-1]} <= {NotFoundError, OutcomeUnknownError}

    broker = run(test)
    scopes = [header.scope for header in broker.headers]
    assert scopes == [scope_of(bytes.fromhex("ab" * 16), 0), scope_of(bytes.fromhex("cd" * 16), 0)]


def test_frames_that_come_before_the_answer_to_open_are_ignored() -> None:
    def confuse(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api == Api.OPEN:
            connection.serve(frame._replace(api=Api.OPEN))
            stream = connection.streams[frame.stream]
            answer = connection.broker.opens[-1]
            assert answer.sequence == stream.expected
        return frame.api == Api.OPEN

    def early(connection: ToyConnection, frame: Frame) -> bool:
        """Say NACK and THROTTLE of the stream's last life before OPEN is answered."""
        if frame.api == Api.OPEN and frame.stream in connection.streams:
            connection.nack(frame, ThrottledError("late"))
            connection.throttle(frame.stream, 10_000)
        return confuse(connection, frame)

    async def test(broker: ToyBroker) -> None:
        broker.script = early
        async with AsyncProducer(broker.address) as producer:
            await (await producer.send("clicks", b"0"))
            (number,) = broker.connections[0].streams
            broker.connections[0].throttle(number, 1)
            await (await producer.send("clicks", b"1"))

    assert run(test).values() == [b"0", b"1"]


def test_a_stream_that_is_closed_right_behind_its_answer_is_opened_again() -> None:
    closed: list[int] = []

    def close_at_once(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api != Api.OPEN or closed:
            return False
        closed.append(1)
        connection.serve(frame)
        connection.redirect(frame.stream, "")  # in the same packet, most likely
        return True

    async def test(broker: ToyBroker) -> None:
        broker.script = close_at_once
        async with AsyncProducer(broker.address) as producer:
            await (await producer.send("clicks", b"v"))

    broker = run(test)
    assert broker.values() == [b"v"]
    assert len(broker.opens) == 2


def test_an_answer_that_comes_too_late_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProducerSettings, "open_timeout_s", 0.05)
    opens: list[Frame] = []

    def hold(connection: ToyConnection, frame: Frame) -> bool:
        assert frame.api != Api.WRITE or len(opens) >= 3, "written before its OPEN was answered"
        if frame.api == Api.OPEN:
            opens.append(frame)
            if len(opens) == 1:
                connection.ack_nothing(frame.stream)  # a sign of life: the connection stays
            if len(opens) == 2:
                connection.serve(opens[0])  # an answer to the first one
        return frame.api == Api.OPEN and len(opens) < 3

    async def test(broker: ToyBroker) -> None:
        broker.script = hold
        async with AsyncProducer(broker.address) as producer:
            await (await producer.send("clicks", b"v"))

    assert run(test).values() == [b"v"]


def test_a_connection_that_was_cut_without_notice_is_left() -> None:
    """The broker takes the blocks and says nothing more, neither acks nor an answer: as behind a dead link."""
    deaf: list[ToyConnection] = []

    def dead(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api == Api.WRITE and not deaf:
            deaf.append(connection)
        return connection in deaf

    async def test(broker: ToyBroker) -> None:
        broker.script = dead
        async with AsyncProducer(broker.address, runtime=stepped_runtime()) as producer:
            delivery = await producer.send("clicks", b"v")
            await broker.until(lambda: len(deaf) == 1)
            while deaf[0] in broker.connections:
                step(1)
                await asyncio.sleep(0)
            await delivery

    broker = run(test)
    assert broker.values() == [b"v"]
    assert len(broker.opens) == 2


def test_a_connection_that_does_not_even_answer_open_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProducerSettings, "open_timeout_s", 0.05)
    deaf: list[ToyConnection] = []

    def dead(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api == Api.OPEN and not deaf:
            deaf.append(connection)
        return connection in deaf

    async def test(broker: ToyBroker) -> None:
        broker.script = dead
        async with AsyncProducer(broker.address) as producer:
            await (await producer.send("clicks", b"v"))

    assert run(test).values() == [b"v"]


def test_a_connection_that_is_lost_before_the_end_is_said_breaks_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[LinkPool] = []

    class Noted(LinkPool):
        """Notes that it is made."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            pools.append(self)

    monkeypatch.setattr("memq.client.producer.core.LinkPool", Noted)

    async def test(broker: ToyBroker) -> None:
        producer = AsyncProducer(broker.address)
        await (await producer.send("clicks", b"v"))
        (session,) = pools[-1].sessions()
        session.link.abort(UnreachableError("cut"))  # the loop reports it after the end was decided
        await producer.close()

    broker = run(test)
    assert broker.values() == [b"v"]
    assert broker.closes == []
    assert "AssertionError" not in caplog.text
