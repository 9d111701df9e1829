"""The core of a producer at its end: reports of a close, blocks given up, and keepalive requests."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import msgspec
import pytest

from memq.client.link_pool import LinkPool
from memq.client.producer.core import ACKS_LATE_AFTER_S, Observe, ProducerCore
from memq.client.producer.delivery import Ack, AsyncDelivery
from memq.client.producer.fields import check_fields
from memq.client.producer.settings import ProducerSettings
from memq.errors import (
    ClosedError,
    MovedError,
    NotReadyError,
    OutcomeUnknownError,
    TimedOutError,
)
from memq.format.report import HeldStage, Stage
from memq.protocol.frames import Api, Frame
from memq.protocol.messages import MetadataRequest, Open, decode_message
from memq.topic import Topic
from tests.stepped_time import step, stepped_runtime
from tests.unit.producer_parts import producer_on, refuse_writes
from tests.unit.toy_broker import ToyBroker, ToyConnection, address_of, run, silent_at, toy_topic, turns, until


def core_on(
    broker: ToyBroker, pool: LinkPool | None = None, observe: Observe | None = None, **settings: Any
) -> ProducerCore:
    def wake() -> None:
        asyncio.get_running_loop().call_soon(core.drain)

    core = ProducerCore(
        ProducerSettings(**settings),
        stepped_runtime(),
        [address_of(broker)],
        AsyncDelivery,
        wake,
        lambda: None,
        producer_id=0x77,
        pool=pool,
        observe=observe,
    )
    return core


class Observed:
    """Notes what becomes of blocks."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int, int]] = []
        self.base_ms: set[int] = set()

    def part(self, topic: Topic, partition: int) -> Observed:
        return self

    def pass_stage(
        self, stage: Stage, producer: int, first: int, next_: int, base_ms: int, now_ms: int, level: int = 0
    ) -> None:
        self.stages.append((stage, first, next_))
        self.base_ms.add(base_ms)

    def hold(self, stage: HeldStage, minute: int, records: int) -> None:
        raise AssertionError("no record is held")

    async def close(self, timeout_s: float | None) -> None:
        """Finish at once."""


def test_an_observer_hears_what_was_sent_acked_and_given_up() -> None:
    async def test(broker: ToyBroker) -> None:
        observed = Observed()
        core = core_on(broker, observe=lambda *_: observed)
        route = await core.route("clicks")
        for script, stage in ((broker.script, "acked"), (refuse_writes, "gave-up")):
            broker.script = script
            delivery = core.buffer.put(route, check_fields(b"v", None, None, 1_000), None)
            await until(delivery.done)
            number = ("acked", "gave-up").index(stage)
            assert observed.stages[-2:] == [("sent", number, number + 1), (stage, number, number + 1)]
        assert observed.base_ms == {1_000}, "the least timestamp of a block, not the time of its report"
        await core.close(5)

    run(test)


def test_connections_that_are_lent_stay() -> None:
    async def test(broker: ToyBroker) -> None:
        pool = LinkPool(stepped_runtime(), [address_of(broker)])
        core = core_on(broker, pool)
        route = await core.route("clicks")
        delivery = core.buffer.put(route, check_fields(b"v"), None)
        core.drain()
        await core.flush(5)
        assert isinstance(delivery.outcome, Ack)
        assert delivery.outcome.producer_id == 0x77
        await core.close()
        (session,) = pool.sessions()
        assert session.link.open
        await pool.close()
        own = core_on(broker)
        await own.route("clicks")
        await own.close()
        await until(lambda: not broker.connections)

    run(test)


def test_producer_that_leaves_writes_its_blocks_and_awaits_no_ack() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.acking = False
        core = core_on(broker, linger_s=60.0)
        route = await core.route("clicks")
        delivery = core.buffer.put(route, check_fields(b"v"), None)
        await core.write_and_close(600.0)  # it is written, and that ends the wait
        await broker.until(lambda: len(broker.blocks) == 1)
        assert isinstance(delivery.outcome, OutcomeUnknownError)
        broker.script = silent_at(Api.OPEN)
        stuck = core_on(broker)
        lost = stuck.buffer.put(await stuck.route("clicks"), check_fields(b"v"), None)
        leaving = asyncio.create_task(stuck.write_and_close(5.0))
        await turns()
        assert not leaving.done()
        step(5)
        await leaving
        assert isinstance(lost.outcome, ClosedError), "it was never written"

    run(test)


def test_the_end_is_not_waited_for_longer_than_a_short_while() -> None:
    async def test(broker: ToyBroker) -> None:
        producer = producer_on(broker)
        await (await producer.send("clicks", b"v"))
        broker.script = silent_at(Api.CLOSE)
        closing = asyncio.create_task(producer.close())
        await turns()
        assert not closing.done()
        step(30)
        await closing
        with pytest.raises(ClosedError, match="the producer is closed"):
            await producer.send("clicks", b"v")

    assert run(test).closes == []


def test_a_moved_partition_is_found_by_the_address_of_the_refusal() -> None:
    async def test(broker: ToyBroker) -> None:
        async with ToyBroker() as other:

            def refuse(connection: ToyConnection, frame: Frame) -> bool:
                if frame.api == Api.OPEN:
                    error = MovedError("moved")
                    error.address = other.address
                    connection.refuse(frame, error)
                return frame.api == Api.OPEN

            broker.script = refuse
            async with producer_on(broker) as producer:
                await (await producer.send("clicks", b"1"))
                other.cut()
                await (await producer.send("clicks", b"2"))
            assert other.values() == [b"1", b"2"]

    run(test)


@pytest.mark.parametrize(("delivery_timeout_s", "owed_s"), [(120.0, ACKS_LATE_AFTER_S), (8.0, 1.0)])
def test_a_sign_of_life_is_asked_for_early_and_says_what_the_broker_waits_for(
    delivery_timeout_s: float, owed_s: float
) -> None:
    async def test(broker: ToyBroker) -> None:
        signs: list[Frame] = []

        def note(connection: ToyConnection, frame: Frame) -> bool:
            if frame.api != Api.METADATA:
                return False
            signs.append(frame)
            known = broker.metadata(decode_message(frame.body, MetadataRequest))
            connection.answer(frame, msgspec.structs.replace(known, waits="the store does not answer"))
            return True

        broker.acking = False
        core = core_on(broker, delivery_timeout_s=delivery_timeout_s)
        core.buffer.put(await core.route("clicks"), check_fields(b"v"), None)
        await broker.until(lambda: len(broker.blocks) == 1)
        broker.script = note
        for _ in range(3):  # it looks twice in that time
            step(owed_s / 2)
            await turns(200)
        assert len(signs) == 1
        await until(lambda: core.buffer.why_late() != "")
        with pytest.raises(TimedOutError, match=r"owes acks since .*: the store does not answer"):
            await core.close(0)

    run(test)


def test_a_sign_of_life_is_asked_for_once_and_any_answer_will_do() -> None:
    async def test(broker: ToyBroker) -> None:
        asked: list[Frame] = []

        def serve(connection: ToyConnection, frame: Frame) -> bool:
            if frame.api == Api.METADATA:
                asked.append(frame)
                if len(asked) > 1:
                    connection.refuse(frame, NotReadyError("busy"))
                    return True
            return False

        broker.script = serve
        broker.acking = False
        async with producer_on(broker, audit=False) as producer:
            delivery = await producer.send("clicks", b"v")
            await broker.until(lambda: len(broker.blocks) == 1)
            (connection,) = broker.connections
            step(2)
            await turns()
            assert len(asked) == 1, "it owes an ack for a short while only"
            while len(asked) < 2:
                step(1)
                await turns()
            while len(asked) < 4:
                step(1)
                await turns()
            assert broker.connections == [connection], "it answers: so it lives"
            for stream in connection.streams:
                connection.ack(stream)
            await delivery
            step(20)
            await turns()
            seen = len(asked)
            step(20)
            await turns()
            assert len(asked) == seen, "it owes nothing"

    run(test)


def test_the_time_of_a_close_is_one_for_the_flush_and_the_ends_together() -> None:
    async def test(broker: ToyBroker) -> None:
        def no_owner_of_0(connection: ToyConnection, frame: Frame) -> bool:
            return frame.api == Api.OPEN and decode_message(frame.body, Open).partition == 0

        producer = producer_on(broker)
        await (await producer.send("clicks", b"v", partition=0))
        broker.acking = False
        delivery = await producer.send("clicks", b"v", partition=1)
        await broker.until(lambda: len(broker.blocks) == 2)
        broker.script = no_owner_of_0
        broker.cut()
        await broker.until(lambda: [each.partition for each in broker.opens] == [0, 1, 1])
        closing = asyncio.create_task(producer.close(100.0))
        await turns()
        step(60)
        await turns()
        for connection in broker.connections:
            for stream in connection.streams:
                connection.ack(stream)
        await until(delivery.done)
        await turns()
        step(30)
        await turns()
        assert not closing.done(), "10 s are left to find an owner of partition 0 for its end"
        step(11)
        await closing

    assert [each.next_sequence for each in run(test, ToyBroker(toy_topic(partitions=2))).closes] == [1]


def test_a_closed_core_is_freed_though_its_blocks_had_time_left() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.acking = False
        core = core_on(broker)
        core.buffer.put(await core.route("clicks"), check_fields(b"v"), None)
        await broker.until(lambda: len(broker.blocks) == 1)
        with pytest.raises(TimedOutError):
            await core.close(0)
        held = weakref.ref(core)
        del core
        await turns()
        gc.collect()
        assert held() is None, "no timer holds it until the delivery timeout"

    run(test)
