"""The bytes of one connection: accepted frames in each state, both code paths of blocks, and its end."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memq.broker.ingest import connection as connection_module
from memq.broker.ingest.connection import JOINED_BYTES_MAX, UNSENT_BYTES_MAX, Connection
from memq.broker.ingest.partial_frames import Region, SlabReader
from memq.broker.ingest.quotas import Limiter, RatePerSecond
from memq.broker.ingest.slabs import Slab
from memq.broker.partition.append import BlockRun, ProducerState, Refused, Stream, Throttled
from memq.broker.partition.ownership import Ownership
from memq.broker.partition.ring import BatchSlot
from memq.errors import ForeignProtocolError, MemqError, MovedError, ProtocolError, SpoolError, ThrottledError
from memq.format.blocks.header import BlockHeader
from memq.limits import KIB, MIB
from memq.protocol.frames import PREFIX, AckLevel, Api, FrameReader, encode_frame
from memq.protocol.messages import Nack, Redirect, Throttle, decode_message
from memq.runtime.runtime import Runtime
from tests.brokers import block_of, events_of, write_frame
from tests.contract.manual_clock import ManualClock
from tests.unit.peers import HELLO, TOPIC, House, Peer, Wire

SLAB = 64 * KIB


class Bench:
    """One client that has said HELLO, its stream, and what the broker writes to it."""

    def __init__(self) -> None:
        self.house, self.clock = House(4 * MIB, SLAB), ManualClock()
        self.clock.advance(7_000)
        self.services = dataclasses.replace(self.house.services, runtime=Runtime(clock=self.clock))
        self.house.services = self.services
        self.partition = self.house.partition
        self.peer = Peer(0, self.house)
        self.wire = self.peer.wire
        assert self.peer.step(len(self.peer.data))
        self.stream = self.connection.streams[1]
        self.written()

    @property
    def connection(self) -> Connection:
        return self.peer.connection

    @property
    def counters(self) -> Any:
        return self.services.counters

    def receive(self, *frames: bytes) -> None:
        """Receive bytes as one read, or as several."""
        for data in frames:
            left = data
            while left:
                buffer = self.connection.get_buffer(-1)
                count = min(len(left), len(buffer))
                buffer[:count] = left[:count]
                self.connection.buffer_updated(count)
                left = left[count:]

    def blocks(self, *numbers: int, age_ms: int = 0) -> bytes:
        """Return WRITE frames with a record each, at these sequences."""
        frames = (write_frame(block_of(TOPIC, number, [b"v"], producer=1), first_sent_ms=age_ms) for number in numbers)
        return b"".join(frames)

    def written(self) -> list[tuple[Api, Any]]:
        """Return the frames that the broker has written since the last look."""
        reader, data = FrameReader(), bytes(self.wire.written)
        self.wire.written.clear()
        reader.get_buffer()[: len(data)] = data
        kinds: dict[int, Any] = {Api.NACK: Nack, Api.THROTTLE: Throttle, Api.REDIRECT: Redirect, Api.ERROR: Nack}
        return [
            (Api(frame.api), decode_message(frame.body, kinds[frame.api]) if frame.api in kinds else frame.argument)
            for frame in reader.received(len(data))
        ]


def with_bench(work: Callable[[Bench], None]) -> None:
    """Run a test in an event loop, which the connections ask for."""

    async def inside() -> None:
        work(Bench())

    asyncio.run(inside())


def limiter(**limits: int) -> Limiter:
    return Limiter("topic 'clicks'", "clicks", RatePerSecond("soft", **limits), 0.0)


# ---- frames --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 3, 4, 10, 15, 16, 17, 40])
def test_a_frame_whose_beginning_comes_alone_is_whole_later_whatever_lay_in_its_memory(cut: int) -> None:
    def work(bench: Bench) -> None:
        bench.house.intake.slab.view[bench.house.intake.cursor :] = b"\xff" * (SLAB - bench.house.intake.cursor)
        asks = [encode_frame(Api.METADATA, 0, number, b"x" * 30) for number in range(3)]
        bench.receive(asks[0] + asks[1][:cut], asks[1][cut:] + asks[2])
        assert bench.house.requests.bodies[bench.connection] == [b"x" * 30] * 3
        assert bench.connection.half_since_s is None

    with_bench(work)


def test_a_frame_that_comes_in_pieces_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each piece would be copied with all before it."""

    def work(bench: Bench) -> None:
        reserve, reserved = bench.house.intake.reserve, list[int]()

        def noted(reader: SlabReader, slab: Slab, start: int, filled: int, need: int) -> Region | None:
            reserved.append(need)
            return reserve(reader, slab, start, filled, need)

        monkeypatch.setattr(bench.house.intake, "reserve", noted)
        bench.receive(encode_frame(Api.METADATA, 0, 1, b"x" * 30))  # the place is not at the start of the slab
        frame = write_frame(block_of(TOPIC, 0, [b"v" * 30_000], producer=1))
        bench.receive(frame[:5_000])
        for at in range(5_000, len(frame), 5_000):
            assert reserved == [len(frame)]
            bench.receive(frame[at : at + 5_000])
        assert reserved == [len(frame)]
        assert bench.connection.half_since_s is None, "it is whole"
        assert bench.partition.ring.open is not None
        assert [bytes(view) for view in bench.partition.ring.open.views()] == [frame[16:]]
        assert bench.counters.received_bytes == len(HELLO) + 46 + len(frame)

    with_bench(work)


@pytest.mark.parametrize(
    ("start", "refused"),
    [(b"GET", False), (b"GET ", True), (HELLO[:15], False), (HELLO, False), (b"x" * 15, False), (b"x" * 16, True)],
)
def test_another_protocol_is_known_by_its_first_bytes(start: bytes, refused: bool) -> None:
    def work(bench: Bench) -> None:
        peer, count = Peer(5, bench.house, sends_blocks=False), bench.counters.connections
        bench.peer = peer
        bench.house.intake.slab.view[bench.house.intake.cursor :] = b"\xff" * (SLAB - bench.house.intake.cursor)
        bench.receive(start)
        assert peer.connection.closed == refused
        assert bench.counters.connections == count == 2

    with_bench(work)


def test_a_large_block_of_an_unknown_stream_gets_no_memory() -> None:
    def work(bench: Bench) -> None:
        frame = write_frame(block_of(TOPIC, 0, [b"v" * 300_000], producer=1), stream=9)
        leased = bench.house.pool.leased_bytes
        bench.receive(frame[:100])
        assert bench.house.pool.leased_bytes == leased
        assert bench.connection.closed
        ((api, nack),) = bench.written()
        assert (api, "stream 9" in nack.text) == (Api.ERROR, True)

    with_bench(work)


# ---- blocks --------------------------------------------------------------------------------------------


def test_sound_blocks_go_the_short_way_and_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(bench: Bench) -> None:
        bench.stream.checked = True  # no first block, which is opened
        monkeypatch.setattr(connection_module, "BlockRun", None)  # the long way makes one
        bench.stream.limiters = bench.connection.limiters = (limiter(requests_s=1_000, bytes_s=1_000_000),)
        bench.receive(bench.blocks(0, 1, 2), bench.blocks(3, 4))
        counters, slot = bench.counters, bench.partition.ring.open
        assert (counters.received_blocks, counters.received_records) == (5, 5)
        assert (bench.stream.expected, bench.stream.producer.next) == (5, 5)
        assert slot is not None
        assert slot.bytes == 5 * len(block_of(TOPIC, 0, [b"v"], producer=1))
        (limits,) = bench.connection.limiters
        assert limits.room(0.0) == (995, 1_000_000 - slot.bytes)

    with_bench(work)


@pytest.mark.parametrize("limits", [{"requests_s": 2}, {"bytes_s": 200}])
def test_of_blocks_that_come_at_once_those_within_the_limit_are_taken(
    limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(bench: Bench) -> None:
        monkeypatch.setattr(bench.partition.services.limits, "of_topic", lambda topic_id: (limiter(**limits),))
        bench.partition.appender.follow(TOPIC)
        bench.receive(bench.blocks(0, 1, 2, 3))
        slot = bench.partition.ring.open
        assert slot is not None
        assert 0 < slot.records < 4
        ((api, throttle),) = bench.written()
        assert (api, throttle.retry_after_ms > 0) == (Api.THROTTLE, True)
        assert not bench.stream.open

    with_bench(work)


def test_a_partition_has_room_for_what_its_batch_and_all_limits_have_room_for() -> None:
    def work(bench: Bench) -> None:
        appender, ring = bench.partition.appender, bench.partition.ring
        now_s = bench.clock.monotonic()
        assert appender.room(bench.stream, now_s) == ring.room() == (7, 200_000)
        bench.stream.limiters = (limiter(requests_s=3, bytes_s=2_000_000),)
        assert appender.room(bench.stream, now_s) == (3, 200_000)
        bench.stream.limiters = (limiter(requests_s=30, bytes_s=4_000), limiter(requests_s=40))
        assert appender.room(bench.stream, now_s) == (7, 4_000)
        bench.stream.limiters = None
        assert appender.room(bench.stream, now_s) == (7, 200_000), "its blocks were counted before"
        bench.partition.draining = True
        assert appender.room(bench.stream, now_s) == (0, 0)

    with_bench(work)


class _Spool:
    """A spool that notes what it was given."""

    def __init__(self) -> None:
        self.refusal: SpoolError | None = None
        self.taken: list[tuple[int, int, int]] = []

    def take(self, stream: Stream, run: BlockRun, topic_id: bytes, own: Ownership, slot: BatchSlot | None) -> None:
        self.taken.append((len(run.extents), run.first, run.next))


@pytest.mark.parametrize("short", [True, False])
def test_both_ways_of_a_block_do_the_same(short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(bench: Bench) -> None:
        if not short:
            monkeypatch.setattr(connection_module, "sound_run", lambda *_, **__: BlockRun([], 0, 0, 0))
        spool = _Spool()
        bench.stream.acks = AckLevel.ONE
        bench.partition.appender.spool = cast(Any, spool)
        bench.stream.limiters = bench.connection.limiters = (limiter(requests_s=9, bytes_s=1_000),)
        bench.receive(bench.blocks(0), bench.blocks(1))
        slot = bench.partition.ring.open
        assert slot is not None
        assert bench.connection.limiters[0].room(0.0) == (7, 1_000 - slot.bytes)
        assert (bench.counters.received_blocks, bench.counters.received_records) == (2, 2)
        assert spool.taken == [(1, 0, 1), (1, 1, 2)]
        assert bench.written() == [], "the spool acks"
        bench.partition.draining = True
        bench.receive(bench.blocks(2))
        assert [api for api, _ in bench.written()] == [Api.REDIRECT]
        assert slot.records == 2

    with_bench(work)


def test_a_spool_that_refuses_takes_no_block() -> None:
    def work(bench: Bench) -> None:
        spool = _Spool()
        spool.refusal = SpoolError("it is full")
        bench.stream.acks = AckLevel.ONE
        bench.partition.appender.spool = cast(Any, spool)
        bench.receive(bench.blocks(0))
        ((api, nack),) = bench.written()
        assert (api, "it is full" in nack.text) == (Api.NACK, True)
        assert (len(bench.partition.ring), spool.taken) == (0, [])

    with_bench(work)


@pytest.mark.parametrize("acks", [AckLevel.ALL, AckLevel.ONE])
def test_a_copy_moves_its_stream_on_and_a_new_block_is_no_copy(acks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(bench: Bench) -> None:
        spool, asked = _Spool(), list[int]()
        bench.stream.acks = acks
        bench.partition.appender.spool = cast(Any, spool)

        def holds(producer: ProducerState, header: BlockHeader) -> tuple[bool, None]:
            asked.append(header.first_sequence)
            return True, None

        monkeypatch.setattr(bench.partition.known, "holds", holds)
        bench.partition.own = cast(Any, SimpleNamespace(epoch=1))
        bench.stream.producer.next = 2
        bench.receive(bench.blocks(0, 1, 2))
        assert asked == [0, 1]
        assert bench.stream.expected == 3
        assert [slot.records for slot in bench.partition.ring] == [1]
        assert len(spool.taken) == (3 if acks == AckLevel.ONE else 0)

    with_bench(work)


def test_a_new_block_below_the_known_end_of_its_producer_does_not_lower_it() -> None:
    """Else the blocks behind it, which are here already, would be taken for new ones."""

    def work(bench: Bench) -> None:
        bench.stream.producer.next = 2
        bench.receive(bench.blocks(0))
        assert (bench.stream.expected, bench.stream.producer.next) == (1, 2)

    with_bench(work)


@pytest.mark.parametrize(("age_ms", "over_ms", "taken"), [(0, 0, True), (0, 1, False), (500, 0, True), (500, 1, False)])
def test_a_block_is_as_old_as_its_connection_says(age_ms: int, over_ms: int, taken: bool) -> None:
    """`age_ms` is on the connection's clock, which began when HELLO was answered."""

    def work(bench: Bench) -> None:
        bench.clock.advance(bench.partition.delivery_timeout_ms + age_ms + over_ms)
        bench.receive(bench.blocks(0, age_ms=age_ms))
        assert len(bench.partition.ring) == taken
        assert [api for api, _ in bench.written()] == [Api.NACK] * (not taken)

    with_bench(work)


def test_blocks_behind_a_throttled_one_are_ignored() -> None:
    def work(bench: Bench) -> None:
        bench.partition.ring.limits = dataclasses.replace(bench.partition.ring.limits, slots=1, batch_blocks_max=2)
        bench.receive(bench.blocks(0, 1, 2, 3))
        assert [api for api, _ in bench.written()] == [Api.THROTTLE]
        assert bench.counters.throttled_blocks == 1
        assert [slot.records for slot in bench.partition.ring] == [2]
        assert not bench.stream.open

    with_bench(work)


def test_errors_of_blocks_are_said_once_by_their_kind(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(bench: Bench) -> None:
        outcomes = [Throttled(ThrottledError("compared")), Refused(ProtocolError("what"))]
        monkeypatch.setattr(bench.partition.appender, "append", lambda *given: outcomes.pop(0))
        for _ in range(2):
            bench.stream.open = True
            bench.receive(bench.blocks(0))
            assert not bench.stream.open
        assert [api for api, _ in bench.written()] == [Api.THROTTLE, Api.NACK]
        assert (bench.counters.throttled_blocks, bench.counters.refused_blocks) == (1, 1)
        assert events_of(caplog) == ["block-refused"]
        bench.connection.refuse(MovedError("gone"))
        assert events_of(caplog) == ["block-refused", "connection-refused"]

    with_bench(work)


def test_an_ack_is_counted_and_a_block_of_another_instance_is_refused() -> None:
    def work(bench: Bench) -> None:
        bench.connection.send_ack(bench.stream, AckLevel.ALL, 5, 1)
        assert (bench.counters.acks, bench.written()) == (1, [(Api.ACK, 5)])
        bench.stream.producer_epoch = 2
        bench.receive(bench.blocks(0))
        ((api, nack),) = bench.written()
        assert (api, "block of instance 0 on a stream of 2" in nack.text) == (Api.NACK, True)

    with_bench(work)


# ---- requests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", [0, 1])
def test_requests_whose_answers_are_not_read_end_the_connection(over: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(bench: Bench) -> None:
        monkeypatch.setattr(bench.wire, "get_write_buffer_size", lambda: UNSENT_BYTES_MAX + over)
        bench.receive(encode_frame(Api.METADATA, 0, 1, b""))
        assert bench.connection.closed == bool(over)

    with_bench(work)


@pytest.mark.parametrize("aside", [False, True])
def test_a_forwarded_block_stays_where_it_lies_and_is_refused_where_that_is_aside(
    aside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(bench: Bench) -> None:
        taken: list[bytes] = []

        def forward(connection: Connection, request: int, slab: Slab, start: int, stop: int) -> None:
            taken.append(bytes(slab.view[start:stop]))

        monkeypatch.setattr(bench.house.requests, "forward", forward)
        bench.connection.streams.clear()
        assert bench.connection.reads_on
        bench.house.intake.starved = aside
        bench.receive(encode_frame(Api.FORWARD, 0, 77, b"block"))
        bench.house.intake.starved = False
        assert taken == [b"block"] * (not aside)
        data = bytes(bench.wire.written)
        assert (PREFIX.unpack_from(data)[1:] if data else None) == ((Api.ERROR, 0, 0, 77) if aside else None)
        assert not bench.connection.reads_on, "from now on it sends blocks"

    with_bench(work)


def test_a_connection_that_was_closed_takes_no_forwarded_block(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(bench: Bench) -> None:
        taken: list[int] = []

        def forward(connection: Connection, request: int, slab: Slab, start: int, stop: int) -> None:
            taken.append(request)
            connection.conversation.close()

        monkeypatch.setattr(bench.house.requests, "forward", forward)
        bench.receive(b"".join(encode_frame(Api.FORWARD, 0, request, b"block") for request in (1, 2)))
        assert taken == [1], "the second one was read with the first"

    with_bench(work)


@pytest.mark.parametrize(
    ("error", "http"),
    [
        (ForeignProtocolError("this looks like HTTP"), True),
        (ForeignProtocolError("this looks like TLS"), False),
        (ThrottledError("too much HTTP"), False),
    ],
)
def test_refused_http_client_is_answered_in_http(error: MemqError, http: bool) -> None:
    def work(bench: Bench) -> None:
        bench.connection.refuse(error)
        data = bytes(bench.wire.written)
        assert data.startswith(b"HTTP/1.1 400 Bad Request") == http
        if not http:
            assert PREFIX.unpack_from(data)[1:] == (Api.ERROR, 0, 0, 0)
        assert (bench.wire.closing, bench.connection.leaving_since_s) == (True, bench.clock.monotonic())

    with_bench(work)


# ---- its end -------------------------------------------------------------------------------------------


def test_a_connection_that_is_lost_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(bench: Bench) -> None:
        gone: list[Connection] = []
        monkeypatch.setattr(bench.house.requests, "disconnected", gone.append)
        bench.receive(bench.blocks(0)[:50])
        leased = bench.house.pool.leased_bytes
        bench.connection.pause_writing()
        bench.connection.connection_lost(None)
        connection = bench.connection
        assert (connection.closed, connection.outbox.congested, gone) == (True, False, [connection])
        assert (connection.streams, bench.stream.open) == ({}, False)
        assert bench.house.intake.readers == {}
        assert bench.house.intake.slab.references == 1
        assert bench.house.pool.leased_bytes <= leased

    with_bench(work)


def test_the_time_of_a_frame_is_not_extended_by_its_bytes() -> None:
    """Its beginning, its whole prefix and each growth of its memory have one deadline."""

    def work(bench: Bench) -> None:
        frame = PREFIX.pack(500_000, Api.METADATA, 0, 0, 1) + bytes(400_000)
        bench.receive(frame[:10])
        began_s = bench.connection.half_since_s
        for start in range(10, 300_010, 60_000):
            bench.clock.advance(1_000)
            bench.receive(frame[start : start + 60_000])
            assert bench.connection.half_since_s == began_s

    with_bench(work)


def test_a_half_frame_has_its_time_from_when_its_connection_is_read_again() -> None:
    def work(bench: Bench) -> None:
        connection = bench.connection
        connection.pause()
        connection.resume()
        assert not connection.half_since_s, "nothing is half there"
        bench.receive(bench.blocks(0)[:50])
        began_s = connection.half_since_s
        connection.pause()
        bench.clock.advance(5_000)
        connection.resume()
        assert (connection.half_since_s or 0.0) - (began_s or 0.0) == 5.0
        connection.pause_writing()
        connection.pause()
        connection.resume()
        assert (connection.paused, bench.wire.reading) == (False, False)

    with_bench(work)


def test_a_connection_without_a_transport_does_nothing() -> None:
    def work(bench: Bench) -> None:
        connection = Connection(bench.services, bench.house.intake, cast(Any, bench.house.requests))
        connection.pause()
        assert not connection.paused
        connection.paused = True
        for call in (connection.resume, connection.pause_writing, connection.resume_writing):
            call()
        for call in (connection.close, connection.abort, lambda: connection.refuse(ThrottledError("too much"))):
            call()
        assert (connection.paused, connection.leaving_since_s) == (True, None)

    with_bench(work)


class Parts(Wire):
    """A transport that keeps each write."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.parts.append(data)


def test_a_large_body_is_not_copied_to_its_prefix_and_hello_starts_the_clock() -> None:
    def work(bench: Bench) -> None:
        wire = Parts()
        bench.connection.outbox.transport = cast(asyncio.Transport, wire)
        ready_s = bench.connection.ready_s
        bench.clock.advance(1_000)
        prefix = encode_frame(Api.METADATA, 0, 1, b"")
        large = bytes(JOINED_BYTES_MAX + 1)
        for body in (large, large[1:], b""):
            bench.connection.send(prefix, body)
        assert wire.parts == [prefix, large, prefix + large[1:], prefix], "a short body takes one call of the socket"
        assert bench.connection.ready_s == ready_s == 1_007.0

    with_bench(work)
