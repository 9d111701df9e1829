"""Requests to any broker: asked over one connection, and over another one when it fails."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from memq.client.broker_router import BrokerRouter
from memq.errors import (
    ClosedError,
    DeniedError,
    DrainingError,
    MemqError,
    MovedError,
    NotFoundError,
    TimedOutError,
    UnreachableError,
)
from memq.limits import READ_BYTES_MAX
from memq.protocol.frames import Api, Frame, encode_frame
from memq.protocol.link import CONNECT_TIMEOUT_S
from memq.protocol.messages import Metadata, MetadataRequest, ReadRequest, decode_message
from tests.stepped_time import step
from tests.unit.test_client_metadata import NOBODY, pointer_of
from tests.unit.toy_broker import ToyBroker, ToyConnection, address_of, pool_of, run, silent_at, turns, until

ASK = MetadataRequest(topics=[])


class Counted:
    """Serves METADATA and READ, counts them by broker, and refuses as often as it is asked to."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.reads: list[tuple[int, int]] = []
        self.refusals: list[MemqError] = []
        self.silent = False

    def __call__(self, connection: ToyConnection, frame: Frame) -> bool:
        if frame.api not in (Api.METADATA, Api.READ):
            return False
        self.asked[connection.broker.address] += 1
        if self.refusals:
            connection.refuse(frame, self.refusals.pop(0))
        elif not self.silent:
            if frame.api == Api.METADATA:
                return False
            request = decode_message(frame.body, ReadRequest)
            self.reads.append((request.offset, request.length))
            body = b"%d:%d;" % (request.offset, request.length)
            connection.transport.write(encode_frame(Api.READ, 0, frame.argument, body))
        return True


async def ask_any(broker: BrokerRouter, timeout_s: float = 5.0) -> Metadata:
    return await broker(Api.METADATA, ASK, Metadata, timeout_s=timeout_s)


def test_a_broker_that_leaves_is_replaced_by_another_and_the_question_asked_again() -> None:
    async def test(one: ToyBroker) -> None:
        async with ToyBroker() as other:
            counted = Counted()
            one.script = other.script = counted
            pool = pool_of(one, other)
            anyone = BrokerRouter(pool)
            for _ in range(3):
                await ask_any(anyone)
            assert sorted(counted.asked.values()) == [3], "one connection, as long as it lasts"
            counted.refusals = [DrainingError("leaving")]
            await ask_any(anyone)
            assert sum(counted.asked.values()) == 5
            counted.refusals = [DrainingError("leaving"), UnreachableError("gone")]
            with pytest.raises(UnreachableError, match="no broker answers METADATA: leaving; gone"):
                await ask_any(anyone)
            counted.refusals = [DeniedError("not you")]
            with pytest.raises(DeniedError):
                await ask_any(anyone)
            counted.refusals = [MovedError("elsewhere")]
            with pytest.raises(MovedError):
                await anyone.once(Api.METADATA, ASK, Metadata, timeout_s=5.0)
            before = sum(counted.asked.values())
            counted.refusals = [DrainingError("leaving")]
            with pytest.raises(DrainingError):
                await anyone.once(Api.METADATA, ASK, Metadata, timeout_s=5.0)
            assert sum(counted.asked.values()) == before + 1, "it is asked once"
            counted.silent = True
            waiting = asyncio.create_task(anyone.once(Api.METADATA, ASK, Metadata, timeout_s=5.0))
            await turns()
            step(5)
            with pytest.raises(TimedOutError, match="did not answer METADATA in 5 s"):
                await waiting
            await pool.close()

    run(test)


@pytest.mark.parametrize("refusal", [DrainingError("leaving"), UnreachableError("its coordinator does not answer")])
def test_a_question_that_one_broker_refuses_is_asked_of_another_one(refusal: MemqError) -> None:
    async def test(one: ToyBroker) -> None:
        async with ToyBroker() as other:
            for refusing, serving in ((one, other), (other, one)):
                counted, refusals = Counted(), Counted()
                refusals.refusals = [refusal] * 9
                refusing.script, serving.script = refusals, counted
                pool = pool_of(refusing)
                anyone = BrokerRouter(pool)
                with pytest.raises(UnreachableError, match="no broker answers METADATA: "):
                    await ask_any(anyone)
                assert refusals.asked[refusing.address] == 2, "the only one is asked again"
                pool.learn([address_of(serving)], [])
                assert (await ask_any(anyone)).cluster == "toy"
                assert (refusals.asked[refusing.address], counted.asked[serving.address]) == (2, 1), (
                    "one has just refused"
                )
                assert (await ask_any(anyone)).cluster == "toy"
                assert counted.asked[serving.address] == 2, "it is asked from then on"
                await pool.close()

    run(test)


def test_a_question_is_asked_again_when_another_one_gives_the_connection_up() -> None:
    """It failed at once with the other question's name and time."""

    async def test(broker: ToyBroker) -> None:
        counted = Counted()
        broker.script = counted
        pool = pool_of(broker)
        anyone = BrokerRouter(pool)
        await ask_any(anyone)
        counted.silent = True
        first = asyncio.create_task(ask_any(anyone, 30.0))
        await broker.until(lambda: counted.asked[broker.address] == 2)
        step(27)
        second = asyncio.create_task(ask_any(anyone, 30.0))
        await broker.until(lambda: counted.asked[broker.address] == 3)
        counted.silent = False
        step(4)
        with pytest.raises(TimedOutError, match="did not answer METADATA in 30 s"):
            await first
        assert (await second).cluster == "toy"
        await pool.close()

    run(test)


def test_all_questions_that_a_lost_connection_leaves_open_are_asked_again() -> None:
    async def test(broker: ToyBroker) -> None:
        counted = Counted()
        broker.script = counted
        pool = pool_of(broker)
        anyone = BrokerRouter(pool)
        await ask_any(anyone)
        counted.silent = True
        waiting = asyncio.gather(ask_any(anyone), ask_any(anyone))
        await broker.until(lambda: counted.asked[broker.address] == 3)
        counted.silent = False
        broker.cut()
        assert [answer.cluster for answer in await waiting] == ["toy", "toy"]
        assert (counted.asked[broker.address], len(broker.connections)) == (5, 1)
        await pool.close()

    run(test)


def test_a_silent_connection_is_dropped_and_the_next_question_gets_a_fresh_one() -> None:
    async def test(broker: ToyBroker) -> None:
        counted = Counted()
        broker.script = counted
        pool = pool_of(broker)
        anyone = BrokerRouter(pool)
        await ask_any(anyone)
        (connection,) = broker.connections
        counted.silent = True
        waiting = asyncio.create_task(ask_any(anyone))
        await broker.until(lambda: counted.asked[broker.address] == 2)
        step(5)
        with pytest.raises(TimedOutError):
            await waiting
        assert counted.asked[broker.address] == 2, "it is not asked again: the answer may only be late"
        await until(lambda: connection not in broker.connections)
        counted.silent = False
        await ask_any(anyone)
        assert len(broker.connections) == 1
        await pool.close()

    run(test)


def test_an_error_that_a_broker_names_leads_to_no_other_broker() -> None:
    async def test(one: ToyBroker) -> None:
        async with ToyBroker() as other:
            counted = Counted()
            one.script = other.script = counted
            pool = pool_of(one, other)
            for broker in (one, other):
                await pool.session(address_of(broker))
            anyone = BrokerRouter(pool)
            for _ in range(16):
                counted.refusals = [DeniedError("not you")]
                with pytest.raises(DeniedError):
                    await ask_any(anyone)
            assert list(counted.asked.values()) == [16]
            assert len(pool.sessions()) == 2
            await pool.close()

    run(test)


def test_without_brokers_each_is_named() -> None:
    async def test(broker: ToyBroker) -> None:
        dead = [("127.0.0.1", port) for port in range(1, 8)]
        with pytest.raises(UnreachableError, match="no broker can be reached: ") as caught:
            await ask_any(BrokerRouter(pool_of(*dead)))
        assert str(caught.value).count("can't reach") == 5

    run(test)


def test_a_large_range_is_read_in_pieces() -> None:
    async def test(broker: ToyBroker) -> None:
        counted = Counted()
        broker.script = counted
        pool = pool_of(broker)
        anyone = BrokerRouter(pool)
        assert await anyone.read("main", "k", 7, 10) == b"7:10;"
        most = READ_BYTES_MAX
        assert await anyone.read("main", "k", 0, most) == b"0:%d;" % most
        found = await anyone.read("main", "k", 5, 2 * most + 1)
        assert found == b"5:%d;%d:%d;%d:1;" % (most, 5 + most, most, 5 + 2 * most)
        assert await anyone.read("main", "k", 0, most + 1) == b"0:%d;%d:1;" % (most, most)
        counted.refusals = [UnreachableError("gone")]
        with pytest.raises(UnreachableError):
            await anyone.read("main", "k", 0, 1)
        counted.silent = True
        waiting = asyncio.create_task(anyone.read("main", "k", 0, 1))
        before = sum(counted.asked.values())
        await broker.until(lambda: sum(counted.asked.values()) > before)
        step(30)
        with pytest.raises(TimedOutError, match="READ in 30 s"):
            await waiting
        await until(lambda: not broker.connections)
        await pool.close()

    run(test)


def test_a_batch_is_read_from_who_may_hold_it_else_from_any_broker() -> None:
    async def test(writer: ToyBroker) -> None:
        async with ToyBroker() as other:
            counted = Counted()
            writer.script = other.script = counted
            pool = pool_of(other)
            pointer = pointer_of("clicks", 0, "writer")
            holders = [NOBODY, address_of(writer)]
            anyone = BrokerRouter(pool, lambda asked: holders if asked is pointer else [])
            read = anyone.near(pointer)
            assert await read("main", "k", 0, 1) == b"0:1;"
            assert counted.asked == {writer.address: 1}, "the first one can't be reached"
            assert await anyone.read("main", "k", 0, 1) == b"0:1;"
            assert counted.asked == {writer.address: 1, other.address: 1}
            holders.clear()
            await read("main", "k", 0, 1)
            assert counted.asked == {writer.address: 1, other.address: 2}
            await pool.close()
            zoned = pool_of(other, writer, zone="y")
            zoned.learn([address_of(other), address_of(writer)], ["y", "x"])
            far = BrokerRouter(zoned, lambda asked: [address_of(writer)])
            await far.near(pointer)("main", "k", 0, 1)
            assert counted.asked == {writer.address: 1, other.address: 3}, "what is in another zone is not asked"
            both = BrokerRouter(zoned, lambda asked: [address_of(writer), address_of(other)])
            await both.near(pointer)("main", "k", 0, 1)
            assert counted.asked == {writer.address: 1, other.address: 4}, "the next one is, when it is in this zone"
            await zoned.close()

    run(test)


@pytest.mark.parametrize(
    ("refusal", "brokers"), [(UnreachableError("gone"), 2), (DrainingError("leaving"), 2), (NotFoundError("no k"), 1)]
)
def test_a_broker_that_can_not_read_is_left_and_one_that_finds_nothing_is_kept(
    refusal: MemqError, brokers: int
) -> None:
    async def test(one: ToyBroker) -> None:
        async with ToyBroker() as other:
            counted = Counted()
            one.script = other.script = counted
            pool = pool_of(one, other)
            for broker in (one, other):
                await pool.session(address_of(broker))
            anyone = BrokerRouter(pool)
            for _ in range(32):
                counted.refusals = [refusal]
                with pytest.raises(type(refusal)):
                    await anyone.read("main", "k", 0, 1)
            assert len(counted.asked) == brokers, "the next one is drawn from both"
            await pool.close()

    run(test)


def test_a_broker_that_does_not_connect_in_time_is_passed_over() -> None:
    async def test(silent: ToyBroker) -> None:
        async with ToyBroker() as broker:
            silent.script = silent_at(Api.HELLO)
            counted = Counted()
            broker.script = counted
            pool = pool_of(silent, broker, zone="y")
            pool.learn([address_of(silent), address_of(broker)], ["y", "x"])
            asked = asyncio.create_task(ask_any(BrokerRouter(pool)))
            await silent.until(lambda: len(silent.connections) == 1)
            step(CONNECT_TIMEOUT_S)
            assert (await asked).cluster == "toy"
            await pool.close()
            nearer = pool_of(silent, broker)
            await nearer.session(address_of(broker))
            near = BrokerRouter(nearer, lambda pointer: [address_of(silent)]).near(pointer_of("clicks", 0, "silent"))
            read = asyncio.create_task(near("main", "k", 0, 1))
            await silent.until(lambda: len(silent.connections) == 1)
            step(CONNECT_TIMEOUT_S)
            assert await read == b"0:1;"
            await nearer.close()

    run(test)


def test_a_closed_client_asks_nobody() -> None:
    async def test(broker: ToyBroker) -> None:
        pool = pool_of(broker)
        await pool.close()
        with pytest.raises(ClosedError, match="the client is closed"):
            await ask_any(BrokerRouter(pool))

    run(test)


def test_of_the_brokers_that_may_hold_a_batch_the_first_one_in_the_zone_is_asked() -> None:
    async def test(far: ToyBroker) -> None:
        async with ToyBroker() as holder, ToyBroker() as used:
            counted = Counted()
            far.script = holder.script = used.script = counted
            pool = pool_of(far, holder, used, zone="y")
            pool.learn([address_of(each) for each in (far, holder, used)], ["x", "y", "y"])
            await pool.session(address_of(used))
            anyone = BrokerRouter(pool, lambda pointer: [address_of(far), address_of(holder)])
            await ask_any(anyone)
            assert counted.asked == {used.address: 1}
            await anyone.near(pointer_of("clicks", 0, "far"))("main", "k", 0, 1)
            assert counted.asked == {used.address: 1, holder.address: 1}
            await pool.close()

    run(test)
