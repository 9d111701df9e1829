"""The connections of a client: one for each broker, which is asked first, and the streams that share them."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest

from memq.client.link_pool import BROKERS_MAX, DEAD_S, LinkPool
from memq.errors import (
    ClosedError,
    InvalidRequestError,
    UnreachableError,
)
from memq.limits import STREAMS_PER_CONNECTION_MAX
from memq.protocol.frames import Api, Frame
from memq.protocol.link import CONNECT_TIMEOUT_S
from memq.protocol.messages import Hello, decode_message
from memq.runtime.network import Address, ProtocolFactory, SocketNetwork
from memq.runtime.runtime import Runtime
from tests.brokers import log_lines
from tests.skipping_loop import LoopClock, run_skipping, skip
from tests.stepped_time import step, stepped_runtime
from tests.unit.test_client_links import NOBODY, Owns
from tests.unit.toy_broker import ToyBroker, ToyConnection, address_of, pool_of, run, silent_at, turns, until


def test_a_broker_has_one_connection_that_all_share_until_it_is_lost() -> None:
    async def test(broker: ToyBroker) -> None:
        pool, address = pool_of(broker), address_of(broker)
        assert (pool.reached, pool.audit_ms) == (False, 0)
        one, other = await asyncio.gather(pool.session(address), pool.session(address))
        assert one is other is await pool.session(address)
        assert (pool.sessions(), len(broker.connections), pool.reached) == ([one], 1, True)
        broker.cut()
        await until(lambda: not one.link.open)
        assert pool.sessions() == []
        again = await pool.session(address)
        assert again is not one
        assert pool.sessions() == [again]
        await pool.close()
        assert pool.sessions() == [], "a connection that ends is used no more"
        await until(lambda: not broker.connections)
        with pytest.raises(ClosedError, match="the client is closed"):
            await pool.session(address)

    run(test)


def test_only_the_connection_that_is_forgotten_is_left_out() -> None:
    async def test(broker: ToyBroker) -> None:
        pool, address = pool_of(broker), address_of(broker)
        lost = await pool.session(address)
        broker.cut()
        await until(lambda: not lost.link.open)
        current = await pool.session(address)
        pool.forget(lost)
        assert await pool.session(address) is current
        pool.forget(current)
        assert pool.sessions() == []
        assert await pool.session(address) is not current
        await pool.close()
        current.link.close()

    run(test)


def test_a_broker_whose_connection_is_lost_is_known_only_as_long_as_answers_name_it() -> None:
    async def test(broker: ToyBroker) -> None:
        async with ToyBroker() as other:
            pool = pool_of(broker)
            session = await pool.session(address_of(other))
            pool.learn([], [])
            assert set(pool.candidates()) == {address_of(broker), address_of(other)}
            other.cut()
            await until(lambda: not session.link.open)
            pool.learn([], [])
            assert pool.candidates() == [address_of(broker)]
            await pool.close()

    run(test)


def test_a_client_that_closes_ends_the_connections_that_are_being_made() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.script = silent_at(Api.HELLO)
        pool = pool_of(broker)
        before = asyncio.all_tasks()
        waiting = asyncio.create_task(pool.session(address_of(broker)))
        await broker.until(lambda: len(broker.connections) == 1)
        await pool.close()
        assert asyncio.all_tasks() - before <= {waiting}
        with pytest.raises(ClosedError, match="was closed while it connected"):
            await waiting
        await until(lambda: not broker.connections)

    run(test)


def test_a_client_says_its_name() -> None:
    names: list[str] = []

    def note(connection: ToyConnection, frame: Frame) -> bool:
        names.append(decode_message(frame.body, Hello).client_id)
        return False

    async def test(broker: ToyBroker) -> None:
        broker.script = note
        pool = LinkPool(stepped_runtime(), [address_of(broker)], client_id="loader")
        for each in (pool, pool.separate()):
            await each.session(address_of(broker))
            await each.close()
        assert names == ["loader", "loader"]

    run(test)


def test_a_broker_that_did_not_answer_is_asked_last_for_a_while() -> None:
    async def test(broker: ToyBroker) -> None:
        pool, address = pool_of(NOBODY, broker), address_of(broker)

        def first_ones() -> set[Address]:
            return {pool.candidates()[0] for _ in range(60)}

        assert first_ones() == {NOBODY, address}
        assert pool.is_preferred(NOBODY)
        with pytest.raises(UnreachableError, match="Connection refused"):
            await pool.session(NOBODY)
        assert first_ones() == {address}
        assert not pool.is_preferred(NOBODY)
        step(DEAD_S - 1)
        assert first_ones() == {address}
        step(1)
        assert first_ones() == {NOBODY, address}
        assert pool.is_preferred(NOBODY)
        await pool.session(address)
        assert first_ones() == {address}, "one that is connected comes before one that is not"
        await pool.close()

    run(test)


def test_a_broker_that_answers_again_is_no_longer_asked_last() -> None:
    async def test(broker: ToyBroker) -> None:
        pool, address = pool_of(broker), address_of(broker)
        broker.script = silent_at(Api.HELLO)
        lost = asyncio.create_task(pool.session(address))
        await broker.until(lambda: len(broker.connections) == 1)
        broker.cut()
        with pytest.raises(UnreachableError):
            await lost
        assert not pool.is_preferred(address)
        broker.script = lambda connection, frame: False
        await pool.session(address)
        assert pool.is_preferred(address)
        await pool.close()

    run(test)


def test_brokers_are_remembered_with_their_zones_up_to_a_bound() -> None:
    async def test(broker: ToyBroker) -> None:
        pool = pool_of(broker, zone="y")
        await pool.session(address_of(broker))
        many = [("10.0.0.1", 1 + number) for number in range(BROKERS_MAX + 5)]
        pool.learn(many, ["y"] * len(many))
        assert set(pool.candidates()) == {address_of(broker), *many[:BROKERS_MAX]}
        assert not pool.is_preferred(address_of(broker))
        assert pool.is_preferred(many[BROKERS_MAX - 1])
        pool.learn(many[:3], ["y", "x", "y", "y"])
        assert set(pool.candidates()) == {address_of(broker), *many[:3]}
        assert [pool.is_preferred(address) for address in many[:4]] == [True, False, True, False]
        assert set(pool.candidates()[:2]) == {many[0], many[2]}
        assert pool.candidates()[2] == address_of(broker), "connected, though in another zone"
        pool.learn([address_of(broker)], ["y"])
        pool.learn([], [])
        assert pool.is_preferred(address_of(broker)), "its zone stays known"
        await pool.close()

    run(test)


def test_a_client_comes_back_to_its_zone() -> None:
    async def test(far: ToyBroker) -> None:
        async with ToyBroker() as near:
            pool = pool_of(far, near, zone="y")
            pool.learn([address_of(far), address_of(near)], ["x", "y"])
            session = await pool.session(address_of(far))
            assert pool.nearer(session) is None, "the connection is begun only now"
            await until(lambda: len(pool.sessions()) == 2)
            found = pool.nearer(session)
            assert found is not None
            assert found.link.address == address_of(near)
            assert pool.nearer(found) is None, "it is there already"
            near.script = silent_at(Api.HELLO)
            near.cut()
            await until(lambda: not found.link.open)
            assert pool.nearer(session) is None
            await near.until(lambda: len(near.connections) == 1)
            near.cut()  # it does not answer: so it is left alone for a while
            await until(lambda: not pool.is_preferred(address_of(near)))
            assert pool.nearer(session) is None
            await turns()
            assert near.connections == []
            await pool.close()
            nowhere = pool_of(far)
            assert nowhere.nearer(await nowhere.session(address_of(far))) is None
            await nowhere.close()

    run(test)


def test_the_first_contact_is_tried_again_until_its_time_is_up() -> None:
    async def test(broker: ToyBroker) -> None:
        refusals = iter(range(3))

        def refuse(connection: ToyConnection, frame: Frame) -> bool:
            refused = next(refusals, None) is not None
            if refused:
                connection.transport.abort()
            return refused

        broker.script = refuse
        pool = pool_of(broker)
        await pool.reach(60)
        assert pool.reached
        broker.script = silent_at(Api.HELLO)
        await pool.reach(0)  # it is connected
        await pool.close()
        dead = [("127.0.0.1", port) for port in range(1, 8)]
        with pytest.raises(UnreachableError, match=r"^no broker answers: ") as caught:
            await pool_of(*dead).reach(0.05)
        assert str(caught.value).count("127.0.0.1:") == 5, "it names a few of them"
        assert caught.value.hint == "check the address, and that a broker runs there"
        silent = pool_of(broker)
        reached = asyncio.create_task(silent.reach(60))
        await broker.until(lambda: len(broker.connections) == 1)
        step(60)
        with pytest.raises(UnreachableError, match="does not answer"):
            await reached
        await silent.close()

    run(test)


def test_a_first_contact_that_does_not_connect_in_time_is_tried_again() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.script = silent_at(Api.HELLO)
        pool = pool_of(broker)
        reached = asyncio.create_task(pool.reach(60))
        await broker.until(lambda: len(broker.connections) == 1)
        broker.script = lambda connection, frame: False
        step(CONNECT_TIMEOUT_S)
        await reached
        assert len(pool.sessions()) == 1
        await pool.close()

    run(test)


def test_a_silent_broker_takes_its_share_of_the_first_contact_only() -> None:
    async def test(silent: ToyBroker) -> None:
        silent.script = silent_at(Api.HELLO)
        async with ToyBroker() as broker:
            for seed in range(4):  # whichever comes first
                runtime = stepped_runtime()
                addresses = [address_of(silent), address_of(broker)]
                pool = LinkPool(type(runtime)(clock=runtime.clock, random=random.Random(seed)), addresses)
                reached = asyncio.create_task(pool.reach(60))
                await until(lambda: bool(silent.connections or pool.reached))  # noqa: B023  # within this turn only
                step(30)
                await reached
                assert [session.link.address for session in pool.sessions()] == [address_of(broker)]
                await pool.close()
                await until(lambda: not silent.connections)

    run(test)


def test_the_rounds_of_a_first_contact_have_a_pause_between_and_end_before_their_time() -> None:
    connects: list[tuple[float, int]] = []

    class Nobody(SocketNetwork):
        async def connect(
            self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float = 10.0
        ) -> asyncio.BufferedProtocol:
            connects.append((asyncio.get_running_loop().time(), port))
            raise UnreachableError(f"nobody at {port}")

    async def test() -> None:
        runtime = Runtime(clock=LoopClock(), random=random.Random(1), network=Nobody())
        with pytest.raises(UnreachableError, match="nobody at 1"):
            await LinkPool(runtime, [("h", 1), ("h", 2)]).reach(0.95)

    run_skipping(test())
    rounds = [round(at, 3) for at, _ in connects]
    assert rounds == sorted([round(number / 10, 3) for number in range(10)] * 2)
    assert all({connects[at][1], connects[at + 1][1]} == {1, 2} for at in range(0, 20, 2))


def test_brokers_that_become_silent_lengthen_no_first_contact() -> None:
    """The last round had the whole time once more: it took 1.75 s of 0.95 s."""
    connects: list[float] = []

    class Silent(SocketNetwork):
        async def connect(
            self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float = 10.0
        ) -> asyncio.BufferedProtocol:
            connects.append(asyncio.get_running_loop().time())
            if connects[-1] > 0.75:
                await skip(timeout_s)
            raise UnreachableError(f"nobody at {port}")

    async def test() -> float:
        runtime = Runtime(clock=LoopClock(), random=random.Random(1), network=Silent())
        pool = LinkPool(runtime, [("h", 1), ("h", 2)])
        with pytest.raises(UnreachableError, match="does not answer"):
            await pool.reach(0.95)
        over_s = asyncio.get_running_loop().time()
        await pool.close()
        return over_s

    assert round(run_skipping(test()), 3) == 0.95
    assert len(connects) == 18, "each of both had a part of the last 0.15 s"


@pytest.mark.parametrize(("timeout_s", "said"), [(0.9, []), (3.0, ["127.0.0.1:1 for 3 s"])])
def test_a_client_that_finds_no_broker_says_after_a_second_what_it_tries(
    caplog: pytest.LogCaptureFixture, timeout_s: float, said: list[str]
) -> None:
    """Commands were silent until their error."""

    class Nobody(SocketNetwork):
        async def connect(
            self, host: str, port: int, factory: ProtocolFactory, *, timeout_s: float = 10.0
        ) -> asyncio.BufferedProtocol:
            raise UnreachableError(f"nobody at {port}")

    async def test() -> None:
        pool = LinkPool(Runtime(clock=LoopClock(), random=random.Random(1), network=Nobody()), [NOBODY])
        with pytest.raises(UnreachableError):
            await pool.reach(timeout_s)
        await pool.close()

    run_skipping(test())
    assert log_lines(caplog) == [f"client.no-broker: no broker answers yet; trying {each}" for each in said]


def test_a_client_that_waits_for_any_broker_says_so_once_and_says_when_one_is_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(broker: ToyBroker) -> None:
        pool = pool_of(broker)
        with pytest.raises(UnreachableError):
            await pool.session(NOBODY)
        step(60)
        with pytest.raises(UnreachableError):
            await pool.session(NOBODY)
        assert log_lines(caplog, logging.INFO) == [], "the first contact ends with an error by itself"
        session = await pool.session(address_of(broker))
        with pytest.raises(UnreachableError):
            await pool.session(NOBODY)
        step(60)
        with pytest.raises(UnreachableError):
            await pool.session(NOBODY)
        assert log_lines(caplog, logging.INFO) == [], "another broker answers"
        session.link.close()
        pool.forget(session)
        for _ in range(8):
            with pytest.raises(UnreachableError):
                await pool.session(NOBODY)
            step(1)
        await pool.session(address_of(broker))
        waits, back = log_lines(caplog, logging.INFO)
        assert waits.startswith("client.no-broker: no broker answers: can't reach 127.0.0.1:1: ")
        assert waits.endswith("; trying again (for 3 s, 4 times)")
        assert back == "client.broker-back: it works again after 8 s and 8 failures"
        await pool.close()

    with caplog.at_level(logging.INFO, "memq"):
        run(test)


# ---- streams -------------------------------------------------------------------------------------


def test_streams_of_a_connection_have_numbers_of_their_own_up_to_a_bound() -> None:
    async def test(broker: ToyBroker) -> None:
        pool = pool_of(broker)
        session = await pool.session(address_of(broker))
        owner = Owns()
        taken = [session.bind(owner) for _ in range(STREAMS_PER_CONNECTION_MAX)]
        assert sorted(taken) == list(range(1, STREAMS_PER_CONNECTION_MAX + 1))
        with pytest.raises(InvalidRequestError, match=f"{STREAMS_PER_CONNECTION_MAX} streams"):
            session.bind(owner)
        session.unbind(taken[5])
        assert session.bind(Owns()) == taken[5]
        await pool.close()

    run(test)


def test_answers_of_a_broker_reach_their_streams() -> None:
    async def test(broker: ToyBroker) -> None:
        pool = pool_of(broker)
        session = await pool.session(address_of(broker))
        owners = [Owns() for _ in range(3)]
        streams = [session.bind(owner) for owner in owners]
        session.unbind(streams[2])
        (connection,) = broker.connections
        for stream in streams:
            connection.ack_nothing(stream)
        connection.drain()
        await until(lambda: owners[0].drains == 1)
        assert [[frame.stream for frame in owner.frames] for owner in owners] == [[streams[0]], [streams[1]], []]
        assert [owner.drains for owner in owners] == [1, 1, 0]
        broker.cut()
        await until(lambda: bool(owners[1].losses))
        assert [len(owner.losses) for owner in owners] == [1, 1, 0]
        assert pool.sessions() == []
        await pool.close()

    run(test)


def test_streams_take_turns_when_the_socket_has_room() -> None:
    async def test(broker: ToyBroker) -> None:
        pool = pool_of(broker)
        session = await pool.session(address_of(broker))
        owners = [Owns() for _ in range(3)]
        streams = [session.bind(owner) for owner in owners]

        def rooms() -> list[int]:
            return [owner.rooms for owner in owners]

        for owner in owners:
            owner.on_room = session.link.pause_writing  # each fills the socket at once
        for expected in ([1, 0, 0], [1, 1, 0], [1, 1, 1], [2, 1, 1]):
            session.link.resume_writing()
            assert session.link.congested
            assert rooms() == expected
        owners[1].on_room = lambda: session.unbind(streams[2])  # a stream that ends in between
        owners[2].on_room = lambda: None
        owners[0].on_room = lambda: None
        session.link.resume_writing()
        assert rooms() == [3, 2, 1]
        await pool.close()

    run(test)
