"""The connections of a client: answers, losses, streams, and which broker is asked first."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import pytest

from memq.client.link_pool import BROKERS_MAX, DEAD_S, LinkPool
from memq.errors import (
    ClosedError,
    DeniedError,
    InvalidRequestError,
    MemqError,
    NotReadyError,
    ProtocolError,
    TimedOutError,
    UnreachableError,
)
from memq.limits import STREAMS_PER_CONNECTION_MAX
from memq.protocol.frames import Api, Frame, encode_frame
from memq.protocol.link import Link, connect_link
from memq.protocol.messages import (
    Metadata,
    MetadataRequest,
    Open,
    encode_message,
    nack_of,
)
from memq.runtime.network import Address, ProtocolFactory, SocketNetwork
from memq.runtime.runtime import Runtime
from tests.brokers import log_lines
from tests.skipping_loop import LoopClock, run_skipping, skip
from tests.stepped_time import step, stepped_runtime
from tests.unit.toy_broker import ToyBroker, ToyConnection, address_of, pool_of, run, silent_at, turns, until

NOBODY = ("127.0.0.1", 1)
ASK = MetadataRequest(topics=[])


class Owns:
    """Owns a link or a stream, and keeps its notifications."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.drains = 0
        self.rooms = 0
        self.losses: list[MemqError] = []
        self.on_room: Callable[[], None] = lambda: None

    def stream_frame(self, frame: Frame) -> None:
        self.frames.append(frame._replace(body=bytes(frame.body)))

    def draining(self) -> None:
        self.drains += 1

    def writable(self) -> None:
        self.rooms += 1
        self.on_room()

    def lost(self, error: MemqError) -> None:
        self.losses.append(error)


async def link_to(broker: ToyBroker, owner: Owns) -> Link:
    return await connect_link(stepped_runtime(), owner, address_of(broker), client_id="me")


async def answer_of(link: Link, timeout_s: float = 30.0) -> Metadata:
    return await link.request(Api.METADATA, ASK, Metadata, timeout_s=timeout_s)


# ---- one connection ------------------------------------------------------------------------------


def test_answers_come_to_their_requests_and_a_late_one_to_nobody() -> None:
    held: list[tuple[ToyConnection, Frame]] = []

    def hold(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api == Api.METADATA:
            held.append((connection, frame._replace(body=bytes(frame.body))))
        return frame.api == Api.METADATA

    async def test(broker: ToyBroker) -> None:
        link = await link_to(broker, Owns())
        assert (link.open, link.broker, link.cluster, link.audit_ms) == (True, "toy", "toy", 0)
        broker.script = hold
        late = asyncio.create_task(answer_of(link, 5.0))
        await broker.until(lambda: len(held) == 1)
        step(5)
        with pytest.raises(TimedOutError, match=r"did not answer METADATA in 5 s"):
            await late
        asked = [asyncio.create_task(answer_of(link)) for _ in range(2)]
        await broker.until(lambda: len(held) == 3)
        for number, name in ((0, "late"), (2, "second"), (1, "first")):
            connection, frame = held[number]
            connection.answer(frame, Metadata(cluster=name))
        assert [(await each).cluster for each in asked] == ["first", "second"]
        refused = asyncio.create_task(answer_of(link))
        await broker.until(lambda: len(held) == 4)
        held[3][0].refuse(held[3][1], DeniedError("not you"))
        with pytest.raises(DeniedError, match="not you"):
            await refused
        held[0][0].refuse(held[0][1], DeniedError("too late"))
        broker.script = lambda connection, frame: False
        assert (await answer_of(link)).cluster == "toy", "an error for a request that is over changes nothing"
        link.close()

    run(test)


def test_an_answer_of_another_kind_is_an_error_of_the_broker() -> None:
    def misunderstand(connection: ToyConnection, frame: Frame) -> bool:
        if frame.api == Api.METADATA:
            connection.transport.write(encode_frame(Api.POLL, 0, frame.argument, b""))
        return frame.api == Api.METADATA

    async def test(broker: ToyBroker) -> None:
        broker.script = misunderstand
        link = await link_to(broker, Owns())
        with pytest.raises(ProtocolError, match="asked METADATA"):
            await answer_of(link)
        link.close()

    run(test)


@pytest.mark.parametrize("how", ["cut", "abort", "refuse", "garbage"])
def test_a_connection_that_ends_fails_what_waits_and_tells_its_owner_once(how: str) -> None:
    async def test(broker: ToyBroker) -> None:
        owner = Owns()
        link = await link_to(broker, owner)
        broker.script = silent_at(Api.METADATA)
        waiting = [asyncio.create_task(answer_of(link)) for _ in range(2)]
        await asyncio.sleep(0)
        (connection,) = broker.connections
        said = "is lost"
        kind: type[MemqError] = UnreachableError
        if how == "cut":
            broker.cut()
        elif how == "abort":
            link.abort(DeniedError("by the client"))
            said, kind = "by the client", DeniedError
        elif how == "refuse":
            body = encode_message(nack_of(DeniedError("not this client")))
            connection.transport.write(encode_frame(Api.ERROR, 0, 0, body))
            said, kind = "not this client", DeniedError
        else:
            connection.transport.write(bytes(64))
            said, kind = "frame", ProtocolError
        for each in waiting:
            with pytest.raises(kind, match=said):
                await each
        assert [type(error) for error in owner.losses] == [kind]
        assert not link.open
        with pytest.raises(kind, match=said):
            await answer_of(link)
        link.write(b"dropped")
        link.close()

    run(test)


def test_frames_of_a_stream_go_to_the_owner_and_so_does_the_answer_to_open() -> None:
    async def test(broker: ToyBroker) -> None:
        owner = Owns()
        link = await link_to(broker, owner)
        refusing = False

        def serve(connection: ToyConnection, frame: Frame) -> bool:
            if frame.api == Api.OPEN and refusing:
                connection.refuse(frame, NotReadyError("opening"))
                return True
            return False

        broker.script = serve
        message = Open(topic="clicks", topic_id="ab" * 16, partition=0, producer="01", acks=2, sequence=0)
        first = link.open_stream(7, message)
        await until(lambda: len(owner.frames) == 1)
        refusing = True
        second = link.open_stream(8, message)
        await until(lambda: len(owner.frames) == 2)
        summaries = [(frame.api, frame.stream, frame.argument) for frame in owner.frames]
        assert summaries == [(Api.OPEN, 7, first), (Api.ERROR, 8, second)]
        assert first != second
        (connection,) = broker.connections
        connection.ack_nothing(7)
        connection.drain()
        await until(lambda: owner.drains == 1)
        assert (owner.frames[2].api, owner.frames[2].stream) == (Api.ACK, 7)
        assert link.open, "a broker that drains still answers"
        link.close()
        await until(lambda: bool(owner.losses))

    run(test)


def test_the_clock_of_a_connection_starts_with_the_answer_to_hello() -> None:
    async def test(broker: ToyBroker) -> None:
        begin_s = stepped_runtime().clock.monotonic()
        link = await link_to(broker, Owns())
        begun_s = link.heard_s
        assert begin_s <= begun_s <= stepped_runtime().clock.monotonic()
        assert (link.clock_ms(begun_s), link.clock_ms(begun_s + 2), link.clock_ms(begun_s - 2)) == (0, 2_000, -2_000)
        step(10)
        await answer_of(link)
        assert link.heard_s >= begun_s + 10
        assert link.clock_ms(begun_s) == 0, "later frames do not move it"
        link.close()

    run(test)


def test_a_connection_without_hello_is_none() -> None:
    async def test(broker: ToyBroker) -> None:
        owner = Owns()
        broker.script = silent_at(Api.HELLO)
        silent = asyncio.create_task(link_to(broker, owner))
        await broker.until(lambda: len(broker.connections) == 1)
        step(10)
        with pytest.raises(TimedOutError, match="did not answer HELLO in 10 s"):
            await silent
        await until(lambda: not broker.connections)

        def babble(connection: ToyConnection, frame: Frame) -> bool:
            connection.answer(frame._replace(api=Api.METADATA), Metadata(cluster="toy"))
            return True

        broker.script = babble
        with pytest.raises(UnreachableError, match="does not speak memq's protocol"):
            await link_to(broker, owner)
        await until(lambda: not broker.connections)
        assert owner.losses == []

    run(test)


# ---- the connections of a client -----------------------------------------------------------------


def test_a_broker_has_one_connection_that_all_share_until_it_is_lost() -> None:
    async def test(broker: ToyBroker) -> None:
        pool, address = pool_of(broker), address_of(broker)
        assert not pool.reached
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


def test_a_client_that_closes_ends_the_connections_that_are_being_made() -> None:
    async def test(broker: ToyBroker) -> None:
        broker.script = silent_at(Api.HELLO)
        pool = pool_of(broker)
        waiting = asyncio.create_task(pool.session(address_of(broker)))
        await broker.until(lambda: len(broker.connections) == 1)
        await pool.close()
        with pytest.raises(ClosedError, match="was closed while it connected"):
            await waiting
        await until(lambda: not broker.connections)

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


def test_frames_of_a_broker_reach_their_streams() -> None:
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
