"""One connection of a client: answers, losses, and the frames of its streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from memq.errors import (
    DeniedError,
    MemqError,
    NotReadyError,
    ProtocolError,
    TimedOutError,
    UnreachableError,
)
from memq.protocol.frames import Api, Frame, encode_frame
from memq.protocol.link import Link, connect_link
from memq.protocol.messages import Metadata, MetadataRequest, Open, encode_message, nack_of
from tests.stepped_time import step, stepped_runtime
from tests.unit.toy_broker import ToyBroker, ToyConnection, address_of, run, silent_at, until

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
                connection.refuse(frame._replace(stream=0), NotReadyError("opening"))  # its request says which
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
