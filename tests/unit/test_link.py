"""A connection to a broker, without sockets: blocks out, answers in any order, and every way to end."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Coroutine
from typing import Any, cast

import msgspec
import pytest

from memq import __version__
from memq.errors import (
    DamagedMessageError,
    DeniedError,
    MemqError,
    MovedError,
    ProtocolError,
    ThrottledError,
    TimedOutError,
    UnreachableError,
    UnsupportedVersionError,
)
from memq.protocol.frames import (
    HELLO_MAGIC,
    VERSIONS,
    AckLevel,
    Api,
    Frame,
    add_checksum,
    decode_forward,
    encode_ack,
    encode_frame,
)
from memq.protocol.link import CONNECT_TIMEOUT_S, REQUEST_TIMEOUT_S, Link, connect_link
from memq.protocol.messages import (
    Done,
    Draining,
    Forward,
    Hello,
    Metadata,
    MetadataRequest,
    ReadRequest,
    Redirect,
    decode_message,
    encode_message,
    nack_of,
)
from memq.topic import Topic, equal_slots
from tests.skipping_loop import run_skipping, skip
from tests.unit.broker_wire import Wire

TOPIC = Topic(name="clicks", id="0a" * 16, created_ms=0, partitions=equal_slots(3))
BLOCK = b"a block"
CLOSED = UnreachableError("it was closed here")


def forward(link: Link, partition: int = 0, absent_s: float = 0.0) -> asyncio.Task[None]:
    message = Forward(topic=TOPIC.name, topic_id=TOPIC.id, partition=partition, absent_ms=link.clock_ms(absent_s))
    return asyncio.create_task(link.forward(message, memoryview(BLOCK)))


def talking(work: Coroutine[Any, Any, None]) -> None:
    run_skipping(work)


def test_a_broker_that_answers_with_a_version_that_was_not_offered_is_refused() -> None:
    async def work() -> None:
        for version in (0, 2):
            wire = Wire(version=version)
            with pytest.raises(UnsupportedVersionError, match=f"speaks protocol versions {version} to {version}"):
                await wire.link()
            assert wire.aborts

    talking(work())


def test_an_answer_to_hello_that_is_damaged_is_that_of_a_broker_out_of_reach() -> None:
    async def work() -> None:
        wire = Wire()
        wire.flipped = (b"broker-2", b"broker-3")
        with pytest.raises(UnreachableError, match="host-2:77 was not understood: ") as caught:
            await wire.link()
        assert isinstance(caught.value.__cause__, DamagedMessageError)
        assert wire.aborts == 1

    talking(work())


@pytest.mark.parametrize(
    ("answer", "protocol"),
    [(b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP"), (b"\x15\x03\x03\0\2\2\x46", "TLS"), (b"HTTP/", "HTTP")],
)
def test_a_server_of_another_protocol_is_named_by_its_first_bytes(answer: bytes, protocol: str) -> None:
    async def work() -> None:
        wire = Wire(silent=True)
        link = asyncio.create_task(wire.link())
        await skip(0.1)
        wire.say_bytes(answer)
        await skip(0.1)
        with pytest.raises(UnreachableError, match=f"host-2:77 does not .*: its answer is {protocol}") as caught:
            await link
        assert caught.value.foreign
        assert "memq ready" in caught.value.hint

    talking(work())


def test_a_connection_that_ends_directly_after_the_answer_to_hello_is_none() -> None:
    """The owner heard of the loss of a link that it never got."""

    class Owner:
        losses = 0

        def lost(self, _: MemqError) -> None:
            self.losses += 1

    class Hasty(Wire):
        def say(self, api: Api, argument: int, message: msgspec.Struct) -> None:
            if api == Api.HELLO:
                self.after = encode_frame(Api.ERROR, 0, 0, encode_message(nack_of(ThrottledError("no room"))))
            super().say(api, argument, message)

    async def work() -> None:
        wire, owner = Hasty(), Owner()
        with pytest.raises(UnreachableError, match="refuses for now: no room"):
            await connect_link(wire.runtime, cast(Any, owner), ("host-2", 77))
        assert wire.aborts
        assert owner.losses == 0

    talking(work())


def test_a_connection_begins_with_hello() -> None:
    async def work() -> None:
        wire = Wire()
        link = await wire.link()
        assert wire.address == ("host-2", 77, CONNECT_TIMEOUT_S)
        assert (link.address, link.broker, link.cluster) == (("host-2", 77), "broker-2", "c-1")
        (hello,) = wire.frames
        assert (hello.api, hello.stream, hello.argument) == (Api.HELLO, 0, HELLO_MAGIC)
        said = decode_message(hello.body, Hello)
        assert (said.least_version, said.greatest_version) == VERSIONS
        assert said.client == f"memq-broker/{__version__}"

    talking(work())


@pytest.mark.parametrize("checksums", [True, False])
def test_answers_of_a_broker_have_checksums_from_its_hello_on_or_never(checksums: bool) -> None:
    """One of an earlier release sends none."""

    async def work() -> None:
        wire = Wire(checksums=checksums)
        link = await wire.link()
        asked = asyncio.create_task(link.request(Api.METADATA, MetadataRequest(), Metadata))
        await skip(0.1)
        wire.checksums = False
        wire.say(Api.METADATA, 1, Metadata(cluster="c-1"))
        if checksums:
            with pytest.raises(DamagedMessageError, match="Metadata message without its checksum"):
                await asked
        else:
            assert (await asked).cluster == "c-1"
        refused = asyncio.create_task(link.request(Api.METADATA, MetadataRequest(), Metadata))
        await skip(0.1)
        wire.refuse(2, DeniedError("no"))
        with pytest.raises(DamagedMessageError if checksums else DeniedError):
            await refused
        assert wire.aborts == checksums, "an error that may be another one ends the connection"
        link.abort(CLOSED)

    talking(work())


def test_a_block_goes_out_with_its_age_and_waits_for_its_own_answer() -> None:
    async def work() -> None:
        wire = Wire()
        link = await wire.link()
        now_s = asyncio.get_running_loop().time()
        tasks = [forward(link, 1, now_s + 1.5), forward(link, 2, now_s - 0.25)]
        await skip(0.1)
        frames = wire.frames[1:]
        assert [(frame.api, frame.argument) for frame in frames] == [(Api.FORWARD, 1), (Api.FORWARD, 2)]
        said = [decode_forward(frame.body) for frame in frames]
        assert [(message.topic, message.topic_id, message.partition) for message, _ in said] == [
            ("clicks", TOPIC.id, 1),
            ("clicks", TOPIC.id, 2),
        ]
        assert [message.absent_ms for message, _ in said] == [1_500, -250], "since the broker's HELLO"
        assert [bytes(frame.body[at:]) for frame, (_, at) in zip(frames, said, strict=True)] == [BLOCK, BLOCK]
        wire.say(Api.DRAINING, 0, Draining())
        wire.say(Api.FORWARD, 2, Done())
        await skip(0.1)
        assert [task.done() for task in tasks] == [False, True]
        wire.say(Api.FORWARD, 1, Done())
        await asyncio.gather(*tasks)
        assert wire.aborts == 0
        link.abort(CLOSED)

    talking(work())


def test_a_block_that_is_refused_leaves_the_connection_to_others() -> None:
    async def work() -> None:
        wire = Wire()
        link = await wire.link()
        refused, taken = forward(link), forward(link)
        await skip(0.1)
        wire.refuse(1, MovedError("it is elsewhere"))
        wire.say(Api.FORWARD, 2, Done())
        with pytest.raises(MovedError, match="it is elsewhere"):
            await refused
        await taken
        assert wire.aborts == 0
        link.abort(CLOSED)

    talking(work())


@pytest.mark.parametrize("refused", [False, True])
def test_an_answer_that_comes_too_late_is_dropped_for_its_block_alone(refused: bool) -> None:
    async def work() -> None:
        wire = Wire()
        link = await wire.link()
        task = forward(link)
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        with pytest.raises(TimedOutError, match="host-2:77 did not answer FORWARD in 30 s"):
            await task
        assert loop.time() - begin_s == pytest.approx(REQUEST_TIMEOUT_S)
        task = forward(link)
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
        wire.say(Api.FORWARD, 2, Done())
        assert wire.aborts == 0
        link.abort(CLOSED)

    talking(work())


def test_frames_behind_the_end_are_dropped() -> None:
    async def work() -> None:
        wire = Wire()
        link = await wire.link()
        sent = len(wire.frames)
        link.abort(CLOSED)
        link.write(encode_frame(Api.METADATA, 0, 9, b""))
        assert (wire.aborts, len(wire.frames)) == (1, sent)

    talking(work())


def test_a_read_is_a_frame_of_no_stream_and_its_answer_the_bytes_alone() -> None:
    async def work() -> None:
        wire = Wire(checksums=False)
        link = await wire.link()
        task = asyncio.create_task(link.read(ReadRequest(store="main", key="k", offset=3, length=2)))
        await skip(0.1)
        asked = wire.frames[-1]
        assert (asked.api, asked.stream, asked.argument) == (Api.READ, 0, 1)
        wire.say(Api.READ, 1, Done())
        assert await task == msgspec.json.encode(Done())
        link.abort(CLOSED)

    talking(work())


@pytest.mark.parametrize("number", [1, 2])
def test_a_redirect_that_became_an_answer_to_a_read_is_damage(number: int) -> None:
    """Api READ differs from REDIRECT in one bit, and has no checksum: the link passed over it, and its stream hung."""

    async def work() -> None:
        wire = Wire(frame_checksums=True)
        link = await wire.link()
        reads = []
        for _ in range(2):
            reads.append(asyncio.create_task(link.read(ReadRequest(store="main", key="k", offset=3, length=2))))
            await skip(0.1)
        wire.say(Api.READ, 1, Done())
        wire.refuse(2, DeniedError("no"))
        assert await reads[0] == encode_message(Done())
        with pytest.raises(DeniedError):
            await reads[1]
        assert wire.aborts == 0
        (redirect,) = add_checksum(encode_frame(Api.REDIRECT, 5, number, encode_message(Redirect(address="host-3:77"))))
        wire.say_bytes(redirect[:4] + bytes([Api.REDIRECT ^ 2]) + redirect[5:])
        assert wire.aborts == 1
        with pytest.raises(DamagedMessageError):
            await link.read(ReadRequest(store="main", key="k", offset=3, length=2))

    talking(work())


def test_an_ack_leaves_a_read_of_its_number_unanswered() -> None:
    async def work() -> None:
        wire = Wire(frame_checksums=True)
        link = await connect_link(wire.runtime, cast(Any, Silent()), ("host-2", 77))
        read = asyncio.create_task(link.read(ReadRequest(store="main", key="k", offset=3, length=2)))
        await skip(0.1)
        wire.say_bytes(b"".join(add_checksum(encode_ack(AckLevel.ALL, 1, 1, 1))))
        wire.say(Api.READ, 1, Done())
        assert await read == encode_message(Done())
        link.abort(CLOSED)

    talking(work())


class Silent:
    """An owner of streams that takes everything."""

    def stream_frame(self, _: Frame) -> None:
        pass

    def lost(self, _: MemqError) -> None:
        pass


@pytest.mark.parametrize("refused", [False, True])
def test_bytes_that_are_no_protocol_after_the_greeting_are_damage(refused: bool) -> None:
    """The program got a ProtocolError, which says that it is wrong itself. Broker or link may find the changed bit."""

    async def work() -> None:
        wire = Wire(frame_checksums=True)
        link = await wire.link()
        asked = asyncio.create_task(link.request(Api.METADATA, MetadataRequest(), Metadata))
        await skip(0.1)
        if refused:
            wire.refuse(0, ProtocolError("unknown api 138 in a frame prefix"))
        else:
            wire.say_bytes(bytes(4) + bytes([138]) + bytes(11))
        with pytest.raises(DamagedMessageError, match="damaged on its way: unknown api"):
            await asked

    talking(work())


def test_a_link_is_silent_after_a_time_limit_in_which_nothing_was_heard() -> None:
    async def work() -> None:
        wire = Wire()
        link = await wire.link()
        task = forward(link)
        await skip(20)
        other = forward(link)
        await skip(0.1)
        wire.say(Api.FORWARD, 2, Done())
        await other
        with pytest.raises(TimedOutError):
            await task
        assert not link.silent, "it has answered another request meanwhile"
        with pytest.raises(TimedOutError):
            await forward(link)
        found = [(link.silent, link.open)]
        wire.say(Api.FORWARD, 3, Done())  # late
        found.append((link.silent, link.open))
        assert found == [(True, True), (False, True)]
        silent = []
        for _ in range(3):
            with pytest.raises(TimedOutError):
                await link.request(Api.METADATA, MetadataRequest(topics=["clicks"]), Metadata, timeout_s=4)
            silent.append(link.silent)
        assert silent == [False, False, True], "ten seconds, whatever the time limits of the requests are"
        link.abort(CLOSED)

    talking(work())


def test_a_time_limit_says_since_when_the_broker_is_silent_if_it_is() -> None:
    async def work() -> None:
        wire = Wire()
        link = await wire.link()
        task = forward(link)
        await skip(20)
        other = forward(link)
        await skip(0.1)
        wire.say(Api.FORWARD, 2, Done())
        await other
        with pytest.raises(TimedOutError) as caught:
            await task
        assert str(caught.value).endswith("did not answer FORWARD in 30 s")
        with pytest.raises(TimedOutError, match="did not answer FORWARD in 30 s, silent since "):
            await forward(link)
        link.abort(CLOSED)

    talking(work())


@pytest.mark.parametrize(("chunk_bytes", "waited_s", "ends"), [(100, 6, True), (20_000, 6, False), (100, 3, False)])
def test_a_request_that_is_given_up_ends_a_connection_whose_frame_does_not_arrive(
    chunk_bytes: int, waited_s: int, ends: bool
) -> None:
    """After a changed bit in a length, all answers were the rest of that frame, for as long as requests were made."""

    async def work() -> None:
        wire = Wire()
        link = await wire.link()
        frame = encode_frame(Api.FORWARD, 0, 1, bytes(500_000))
        wire.say_bytes(frame[:50])
        task, other = forward(link), forward(link)
        for number in range(waited_s):
            await skip(1)
            wire.say_bytes(frame[50 + number * chunk_bytes :][:chunk_bytes])
        task.cancel()
        await asyncio.wait([task])
        await skip(0.1)
        assert (wire.aborts, other.done()) == (int(ends), ends)
        if ends:
            with pytest.raises(DamagedMessageError, match="sent 600 bytes of a frame in 6 s, and not its end"):
                await other
        link.abort(CLOSED)
        await asyncio.wait([other])

    talking(work())


def test_a_short_frame_that_does_not_arrive_ends_the_connection_too() -> None:
    """It fits into the buffer that all frames share."""

    async def work() -> None:
        wire = Wire()
        link = await wire.link()
        task = forward(link)
        wire.say_bytes(encode_frame(Api.FORWARD, 0, 1, bytes(500))[:50])
        await skip(6)
        task.cancel()
        await asyncio.wait([task])
        assert wire.aborts == 1

    talking(work())


def test_a_frame_that_began_after_a_whole_one_has_as_much_time() -> None:
    async def work() -> None:
        wire = Wire()
        link = await wire.link()
        task, other = forward(link), forward(link)
        await skip(5)
        wire.say(Api.FORWARD, 2, Done())
        wire.say_bytes(encode_frame(Api.FORWARD, 0, 1, bytes(500))[:50])
        await skip(1)
        task.cancel()
        await asyncio.wait([task, other])
        assert (wire.aborts, other.exception()) == (0, None)
        link.abort(CLOSED)

    talking(work())


@pytest.mark.parametrize("number", [2, 9])
@pytest.mark.parametrize("way", ["taken", "refused"])
def test_an_answer_to_what_was_never_sent_ends_the_connection(way: str, number: int) -> None:
    async def work() -> None:
        wire = Wire()
        link = await wire.link()
        task = forward(link)
        await skip(0.1)
        if way == "taken":
            wire.say(Api.FORWARD, number, Done())
        else:
            wire.refuse(number, DeniedError("not yours"))
        with pytest.raises(ProtocolError, match=f"host-2:77 answers request {number}, which was not sent"):
            await task
        assert wire.aborts == 1

    talking(work())


@pytest.mark.parametrize(
    ("api", "number", "text"),
    [
        (Api.METADATA, 1, "asked FORWARD, host-2:77 answered 10"),
        (Api.ACK, 1, "host-2:77 sends 5 of stream 0: this link has none"),
        (Api.FORWARD, 0, "host-2:77 answers request 0, which was not sent"),
    ],
)
def test_only_an_answer_to_the_block_says_that_it_was_taken(api: Api, number: int, text: str) -> None:
    async def work() -> None:
        wire = Wire()
        link = await wire.link()
        tasks = [forward(link), forward(link)]
        await skip(0.1)
        wire.say(api, number, Done())
        for task in tasks:
            with pytest.raises(ProtocolError, match=text):
                await task
        assert wire.aborts == 1

    talking(work())


def test_a_broker_that_does_not_say_hello_is_given_up() -> None:
    async def work() -> None:
        wire = Wire(silent=True)
        with pytest.raises(TimedOutError, match="HELLO in 10 s"):
            await wire.link()
        assert wire.aborts == 1

    talking(work())


@pytest.mark.parametrize("way", ["lost", "closed", "refused", "nonsense"])
def test_all_that_waits_fails_when_the_connection_ends_and_nothing_more_is_sent(way: str) -> None:
    async def work() -> None:
        wire = Wire()
        link = await wire.link()
        tasks = [forward(link), forward(link)]
        await skip(0.1)
        kind: type[MemqError] = UnreachableError
        if way == "lost":
            link.connection_lost(OSError("reset"))
            wire.aborts = 1
        elif way == "closed":
            link.abort(CLOSED)
        elif way == "refused":
            wire.refuse(0, DeniedError("too many connections"))
            kind = DeniedError
        else:
            link.get_buffer(-1)[:20] = b"\xff" * 20
            link.buffer_updated(20)
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
            await forward(link)
        assert len(wire.frames) == sent
        link.connection_lost(None)
        with pytest.raises(kind, match=text):
            await forward(link)

    talking(work())


def test_nothing_is_kept_of_what_was_answered() -> None:
    async def work() -> None:
        wire = Wire()
        link = await wire.link()
        task = forward(link)
        await skip(0.1)
        wire.refuse(1, MovedError("it is elsewhere"))
        await skip(0.1)
        assert isinstance(task.exception(), MovedError)
        seen = weakref.ref(cast(MovedError, task.exception()))
        del task
        gc.collect()
        assert seen() is None, "a connection may live for millions of blocks"
        link.abort(CLOSED)

    talking(work())


def test_no_block_goes_out_before_hello() -> None:
    async def work() -> None:
        wire = Wire()
        link = Link(wire.runtime, ("host-2", 77))
        with pytest.raises(UnreachableError, match="connection to host-2:77 is closed"):
            await forward(link)
        link.connection_made(cast(asyncio.Transport, wire))
        with pytest.raises(UnreachableError, match="connection to host-2:77 is closed"):
            await forward(link)
        assert wire.frames == []

    talking(work())
