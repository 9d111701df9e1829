"""A broker's connection to another one, without sockets: requests out, answers in any order, and every way to end."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from memq import __version__
from memq.broker.peer import ANSWER_TIMEOUT_S, CONNECT_TIMEOUT_S, Peer, connect_peer
from memq.errors import DeniedError, MemqError, MovedError, ProtocolError, TimedOutError, UnreachableError
from memq.protocol.forward import decode_forward
from memq.protocol.frames import HELLO_MAGIC, VERSIONS, Api, Frame, FrameReader, encode_frame
from memq.protocol.messages import Done, Draining, Hello, HelloAnswer, decode_message, encode_message, nack_of
from memq.topic import Topic, equal_slots
from tests.skipping_loop import run_skipping, skip, skipping_runtime

TOPIC = Topic(name="clicks", id="0a" * 16, created_ms=0, partitions=equal_slots(3))
BLOCK = b"a block"


class Wire:
    """The other end: frames that came, and answers; what is said after the end is an error of the peer."""

    def __init__(self, *, silent: bool = False) -> None:
        self.frames: list[Frame] = []
        self.aborts = 0
        self.address: tuple[str, int, float] | None = None
        self._reader = FrameReader()
        self._silent = silent
        self._peer: Peer | None = None
        self.runtime = replace(skipping_runtime(), network=cast(Any, SimpleNamespace(connect=self._connect)))

    async def _connect(self, host: str, port: int, make: Callable[[], Peer], *, timeout_s: float) -> None:
        self.address = (host, port, timeout_s)
        self._peer = make()
        self._peer.connection_made(cast(asyncio.Transport, self))

    def write(self, data: bytes | memoryview) -> None:
        """Take what the peer sends."""
        assert not self.aborts, "nothing is sent after the end"
        at = 0
        while at < len(data):
            room = self._reader.get_buffer()
            taken = bytes(data[at : at + len(room)])
            room[: len(taken)] = taken
            at += len(taken)
            for frame in self._reader.received(len(taken)):
                self.frames.append(frame._replace(body=bytes(frame.body)))
                if frame.api == Api.HELLO and not self._silent:
                    answer = HelloAnswer(version=0, broker="broker-2", cluster="c-1")
                    asyncio.get_running_loop().call_soon(self.say, Api.HELLO, 0, answer)

    def abort(self) -> None:
        """End the connection."""
        self.aborts += 1

    def say(self, api: Api, argument: int, message: msgspec.Struct) -> None:
        """Send a frame to the peer."""
        data = encode_frame(api, 0, argument, encode_message(message))
        assert self._peer is not None
        self._peer.get_buffer(-1)[: len(data)] = data
        self._peer.buffer_updated(len(data))

    def refuse(self, argument: int, error: MemqError) -> None:
        """Send an error to the peer."""
        self.say(Api.ERROR, argument, nack_of(error))

    async def peer(self) -> Peer:
        """Connect."""
        return await connect_peer(self.runtime, "host-2:77")


def forward(peer: Peer, partition: int = 0, absent_s: float = 0.0) -> asyncio.Task[None]:
    return asyncio.create_task(peer.forward(TOPIC, partition, memoryview(BLOCK), absent_s))


def talking(work: Coroutine[Any, Any, None]) -> None:
    run_skipping(work)


def test_a_connection_begins_with_hello() -> None:
    async def work() -> None:
        wire = Wire()
        peer = await wire.peer()
        assert wire.address == ("host-2", 77, CONNECT_TIMEOUT_S)
        assert (peer.address, peer.broker, peer.cluster) == ("host-2:77", "broker-2", "c-1")
        (hello,) = wire.frames
        assert (hello.api, hello.stream, hello.argument) == (Api.HELLO, 0, HELLO_MAGIC)
        said = decode_message(hello.body, Hello)
        assert (said.least_version, said.greatest_version) == VERSIONS
        assert said.client == f"memq-broker/{__version__}"

    talking(work())


def test_a_block_goes_out_with_its_age_and_waits_for_its_own_answer() -> None:
    async def work() -> None:
        wire = Wire()
        peer = await wire.peer()
        now_s = asyncio.get_running_loop().time()
        tasks = [forward(peer, 1, now_s + 1.5), forward(peer, 2, now_s - 0.25)]
        await skip(0.1)
        frames = wire.frames[1:]
        assert [(frame.api, frame.argument) for frame in frames] == [(Api.FORWARD, 1), (Api.FORWARD, 2)]
        said = [decode_forward(frame.body) for frame in frames]
        assert [(message.topic, message.topic_id, message.partition) for message, _ in said] == [
            ("clicks", TOPIC.id, 1),
            ("clicks", TOPIC.id, 2),
        ]
        assert [message.absent_ms for message, _ in said] == [1_500, -250], "since the peer's HELLO"
        assert [bytes(frame.body[at:]) for frame, (_, at) in zip(frames, said, strict=True)] == [BLOCK, BLOCK]
        wire.say(Api.DRAINING, 0, Draining())
        wire.say(Api.FORWARD, 2, Done())
        await skip(0.1)
        assert [task.done() for task in tasks] == [False, True]
        wire.say(Api.FORWARD, 1, Done())
        await asyncio.gather(*tasks)
        assert wire.aborts == 0
        peer.close()

    talking(work())


def test_a_block_that_is_refused_leaves_the_connection_to_others() -> None:
    async def work() -> None:
        wire = Wire()
        peer = await wire.peer()
        refused, taken = forward(peer), forward(peer)
        await skip(0.1)
        wire.refuse(1, MovedError("it is elsewhere"))
        wire.say(Api.FORWARD, 2, Done())
        with pytest.raises(MovedError, match="it is elsewhere"):
            await refused
        await taken
        assert wire.aborts == 0
        peer.close()

    talking(work())


@pytest.mark.parametrize("refused", [False, True])
def test_an_answer_that_comes_too_late_is_dropped_for_its_block_alone(refused: bool) -> None:
    async def work() -> None:
        wire = Wire()
        peer = await wire.peer()
        task = forward(peer)
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        with pytest.raises(TimedOutError, match="host-2:77 did not answer FORWARD in 30 s"):
            await task
        assert loop.time() - begin_s == pytest.approx(ANSWER_TIMEOUT_S)
        task = forward(peer)
        await skip(0.1)
        if refused:
            wire.refuse(1, MovedError("it is elsewhere"))
        else:
            wire.say(Api.FORWARD, 1, Done())
        await skip(0.1)
        assert not task.done()
        wire.say(Api.FORWARD, 2, Done())
        wire.refuse(2, MovedError("said twice"))
        await task
        assert wire.aborts == 0
        peer.close()

    talking(work())


@pytest.mark.parametrize("number", [2, 9])
@pytest.mark.parametrize("way", ["taken", "refused"])
def test_an_answer_to_what_was_never_sent_ends_the_connection(way: str, number: int) -> None:
    async def work() -> None:
        wire = Wire()
        peer = await wire.peer()
        task = forward(peer)
        await skip(0.1)
        if way == "taken":
            wire.say(Api.FORWARD, number, Done())
        else:
            wire.refuse(number, DeniedError("not yours"))
        with pytest.raises(ProtocolError, match=f"host-2:77 answers request {number}, which was not sent"):
            await task
        assert wire.aborts == 1

    talking(work())


@pytest.mark.parametrize(("api", "number"), [(Api.METADATA, 1), (Api.ACK, 1), (Api.FORWARD, 0)])
def test_only_an_answer_to_the_block_says_that_it_was_taken(api: Api, number: int) -> None:
    async def work() -> None:
        wire = Wire()
        peer = await wire.peer()
        task = forward(peer)
        await skip(0.1)
        wire.say(api, number, Done())
        with pytest.raises(ProtocolError, match="which was not sent"):
            await task
        assert wire.aborts == 1

    talking(work())


def test_a_broker_that_does_not_say_hello_is_given_up() -> None:
    async def work() -> None:
        wire = Wire(silent=True)
        with pytest.raises(TimedOutError, match="HELLO in 10 s"):
            await wire.peer()
        assert wire.aborts == 1

    talking(work())


@pytest.mark.parametrize("way", ["lost", "closed", "refused", "nonsense"])
def test_all_that_waits_fails_when_the_connection_ends_and_nothing_more_is_sent(way: str) -> None:
    async def work() -> None:
        wire = Wire()
        peer = await wire.peer()
        tasks = [forward(peer), forward(peer)]
        await skip(0.1)
        kind: type[MemqError] = UnreachableError
        if way == "lost":
            peer.connection_lost(OSError("reset"))
        elif way == "closed":
            peer.close()
        elif way == "refused":
            wire.refuse(0, DeniedError("too many connections"))
            kind = DeniedError
        else:
            peer.get_buffer(-1)[:20] = b"\xff" * 20
            peer.buffer_updated(20)
            kind = ProtocolError
        text = {"lost": "is lost: reset", "closed": "was closed here", "refused": "too many"}.get(
            way, "unknown api 255"
        )
        for task in tasks:
            with pytest.raises(kind, match=text):
                await task
        assert wire.aborts == 1
        sent = len(wire.frames)
        with pytest.raises(kind, match=text):
            await peer.forward(TOPIC, 0, memoryview(BLOCK), 0.0)
        assert len(wire.frames) == sent
        peer.connection_lost(None)
        with pytest.raises(kind, match=text):
            await peer.forward(TOPIC, 0, memoryview(BLOCK), 0.0)

    talking(work())


def test_nothing_is_kept_of_what_was_answered() -> None:
    async def work() -> None:
        wire = Wire()
        peer = await wire.peer()
        task = forward(peer)
        await skip(0.1)
        wire.refuse(1, MovedError("it is elsewhere"))
        await skip(0.1)
        assert isinstance(task.exception(), MovedError)
        seen = weakref.ref(cast(MovedError, task.exception()))
        del task
        gc.collect()
        assert seen() is None, "a connection may live for millions of blocks"
        peer.close()

    talking(work())


def test_no_block_goes_out_before_hello() -> None:
    async def work() -> None:
        wire = Wire()
        peer = Peer(wire.runtime, "host-2:77")
        peer.connection_made(cast(asyncio.Transport, wire))
        with pytest.raises(ProtocolError, match="client said FORWARD in state GREETING"):
            await peer.forward(TOPIC, 0, memoryview(BLOCK), 0.0)
        assert wire.frames == []

    talking(work())


def test_a_peer_without_a_connection_says_so() -> None:
    async def work() -> None:
        peer = Peer(skipping_runtime(), "host-2:77")
        with pytest.raises(UnreachableError, match="host-2:77 is not connected"):
            await peer.forward(TOPIC, 0, memoryview(BLOCK), 0.0)

    talking(work())
