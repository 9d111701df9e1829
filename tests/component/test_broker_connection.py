"""Frames that the broker accepts and refuses: hostile bytes, damaged blocks, streams that reopen."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from awscrt.checksums import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from memq.format.blocks.header import Buffer
from memq.format.sealed_json import seal
from memq.protocol.frames import PREFIX, AckLevel, Api, encode_frame
from memq.protocol.messages import Close, Nack, Open, decode_message, encode_message
from memq.runtime.clock import SystemClock
from memq.storage_handlers.memory import MemoryHandler
from tests.brokers import BareClient, block_of, log_lines, run, running_broker, until, write_frame
from tests.stepped_time import SteppedLoop, step, stepped_runtime


def test_blocks_are_acked_cumulatively_once_they_are_in_the_queue() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client = await BareClient.connect(broker)
            topic = await client.topic()
            await client.open(topic)
            client.write(b"".join(write_frame(block_of(topic, 2 * n, [b"a", b"b"])) for n in range(50)))
            acked = 0
            while acked < 100:
                frame = await client.frame()
                assert (frame.api, frame.flags, frame.stream) == (Api.ACK, AckLevel.ALL, 1)
                assert frame.argument > acked
                acked = frame.argument
            assert broker.services.counters.received_records == 100
            await client.close()

    run(work())


def test_a_stream_at_level_one_is_acked_when_the_block_is_held() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client = await BareClient.connect(broker)
            topic = await client.topic()
            await client.open(topic, acks=AckLevel.ONE)
            client.write(write_frame(block_of(topic, 0, [b"a"])))
            frame = await client.frame()
            assert (frame.api, frame.flags, frame.argument) == (Api.ACK, AckLevel.ONE, 1)
            await client.close()

    run(work())


@pytest.mark.parametrize("size", [1, 7, 333, 70_000])
def test_frames_may_come_in_pieces_of_any_size(size: int) -> None:
    async def work() -> None:
        draw = random.Random(size)
        async with running_broker() as broker:
            client = await BareClient.connect(broker)
            topic = await client.topic()
            await client.open(topic)
            values = [draw.randbytes(draw.choice((1, 50, 5_000, 150_000))) for _ in range(3 if size < 100 else 40)]
            data = b"".join(write_frame(block_of(topic, n, [value])) for n, value in enumerate(values))
            if size < 100:
                data = data[: 4_000 // size * size]
            for at in range(0, len(data), size):
                client.write(data[at : at + size])
                await client.writer.drain()
            if size >= 100:
                while (await client.frame()).argument < len(values):
                    pass
                stored = b"".join(broker.services.store.objects[key] for key in sorted_keys(broker))  # type: ignore[attr-defined]  # the memory store
                assert all(value in stored for value in values)
            await client.close()

    def sorted_keys(broker: Any) -> list[str]:
        return sorted(broker.services.store.objects, key=lambda key: key.rsplit("-", 1)[1])

    run(work())


@pytest.mark.parametrize(
    ("start", "name"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"TLS"),
        (b"\x00\x00\x00\x23\x00\x12\x00\x03\x00\x00\x00\x01\x00\x07console", b"Kafka"),
        (b"SSH-2.0-OpenSSH_9.2p1\r\n", b"unknown"),
        (PREFIX.pack(10, Api.HELLO, 0, 0, 99) + b"0123456789", b"unknown"),
        (PREFIX.pack(10, Api.WRITE, 0, 1, 0) + b"0123456789", b"unknown"),
    ],
)
def test_other_protocols_get_a_named_error(start: bytes, name: bytes) -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client = await BareClient.connect(broker, hello=False)
            client.write(start)
            answer = await client.end()
            assert name in answer
            if name == b"HTTP":
                assert answer.startswith(b"HTTP/1.1 400 ")
            assert broker.services.counters.rejected_connections == 1
            await client.close()

    run(work())


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (PREFIX.pack(0, 99, 0, 0, 1), "unknown api 99"),
        (PREFIX.pack(0, 0, 0, 0, 1), "unknown api 0"),
        (PREFIX.pack(2 << 30, Api.WRITE, 0, 1, 0), "declares 2147483648 bytes"),
        (PREFIX.pack(2 << 30, Api.METADATA, 0, 0, 1), "declares 2147483648 bytes"),
        (PREFIX.pack(8, Api.ACK, 2, 1, 5) + bytes(8), "client sent ACK"),
        (PREFIX.pack(0, Api.DRAINING, 0, 0, 0), "client sent DRAINING"),
        (PREFIX.pack(4, Api.WRITE, 0, 9, 0) + bytes(4), "stream 9, which was never opened"),
    ],
)
def test_broken_frames_close_the_connection_with_the_reason(frame: bytes, words: str) -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client = await BareClient.connect(broker)
            client.write(frame)
            assert words in (await client.error()).text
            assert await client.end() == b""
            assert broker.services.pool.leased_bytes == broker.intake.slab.size
            await client.close()

    run(work())


def test_garbage_in_a_request_is_an_error_of_the_request_alone() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client = await BareClient.connect(broker)
            for api in (Api.OPEN, Api.METADATA, Api.READ, Api.POLL, Api.COMMIT, Api.JOIN, Api.HEARTBEAT, Api.ADMIN):
                client.write(encode_frame(api, 1, 5, b'{"a": [1, 2'))
                assert (await client.error()).code == "damaged-message", api
                client.write(encode_frame(api, 1, 5, seal(b'{"a": [1, 2}')))
                assert (await client.error()).code == "protocol", api
            assert (await client.topic()).name == "clicks"
            await client.close()

    run(work())


def damaged(block: bytes, at: int, data: bytes, *, mend: bool = False) -> bytes:
    """Put `data` into a block; `mend` makes the checksum right again."""
    changed = bytearray(block)
    changed[at : at + len(data)] = data
    if mend:
        struct.pack_into("<I", changed, 4, crc32c(bytes(changed[8:])))
    return bytes(changed)


@pytest.mark.parametrize(
    ("at", "data", "mend", "code"),
    [
        (0, b"XXXX", False, "corrupt-data"),
        (80, b"\xff", False, "corrupt-data"),
        (4, b"\x00\x00\x00\x00", False, "corrupt-data"),
        (8, b"\x63", True, "unsupported-format"),  # version
        (9, b"\x0f", True, "unsupported-format"),  # codec
        (10, b"\x00\x80", True, "unsupported-format"),  # flags
        (12, b"\x01\x00\x00\x00", True, "corrupt-data"),  # payload length
        (20, b"\x00\x00\x00\x00", True, "corrupt-data"),  # count
        (20, b"\xff\xff\xff\xff", True, "corrupt-data"),
        (40, b"\x05", True, "out-of-sequence"),
        (60, b"\xff\xff\x00\x00", True, "corrupt-data"),  # slots 65535 to 0
    ],
)
def test_a_block_that_is_not_sound_closes_its_stream_and_what_follows_is_ignored(
    at: int, data: bytes, mend: bool, code: str
) -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client = await BareClient.connect(broker)
            topic = await client.topic()
            await client.open(topic)
            good = [block_of(topic, n, [b"v" * 100]) for n in range(3)]
            client.write(write_frame(good[0]) + write_frame(damaged(good[1], at, data, mend=mend)))
            client.write(write_frame(good[2]))
            frames = [await client.frame(), await client.frame()]
            nack = next(frame for frame in frames if frame.api == Api.NACK)
            assert nack.argument == 1  # the first sequence that was not taken
            assert decode_message(nack.body, Nack).code == code
            assert {frame.argument for frame in frames if frame.api == Api.ACK} == {1}
            await client.open(topic, sequence=1)
            client.write(write_frame(good[1]) + write_frame(good[2]))
            while (await client.frame()).argument < 3:
                pass
            assert broker.services.counters.received_blocks == 3
            await client.close()

    run(work())


def test_a_block_that_was_first_sent_too_long_ago_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client = await BareClient.connect(broker)
            topic = await client.topic()
            await client.open(topic)
            old = -topic.settings.delivery_timeout_ms - 1_000
            client.write(write_frame(block_of(topic, 0, [b"a"]), first_sent_ms=old))
            assert (await client.error()).code == "too-old"
            assert broker.services.counters.refused_blocks == 1
            await client.close()

    run(work())
    (line,) = log_lines(caplog)
    assert line.startswith("block-refused: ")
    assert line.endswith("topic 'clicks' partition 0: block 0 was first sent over 120000 ms ago")


@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed-stream"])
@pytest.mark.parametrize("owner", [{"partition": 1}, {"producer": 99}], ids=["partition", "producer"])
def test_a_block_of_another_stream_ends_the_connection_because_its_own_stream_lacks_it(
    owner: dict[str, int], closed: bool
) -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client = await BareClient.connect(broker)
            topic = await client.topic()
            await client.open(topic)
            if closed:
                client.write(write_frame(block_of(topic, 7, [b"v"])))
                assert (await client.error()).code == "out-of-sequence"
            client.write(write_frame(block_of(topic, 0, [b"v"], **owner)))
            assert "WRITE on stream 1" in (await client.error()).text
            assert await client.end() == b""
            assert broker.services.counters.received_blocks == 0
            await client.close()

    run(work())


def test_a_block_that_is_sent_again_is_acked_and_stored_once() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client, other = await BareClient.connect(broker), await BareClient.connect(broker)
            topic = await client.topic()
            await client.open(topic)
            blocks = [write_frame(block_of(topic, n, [b"a"])) for n in range(4)]
            client.write(b"".join(blocks))
            await other.open(topic, sequence=0)
            other.write(b"".join(blocks))
            for each in (client, other):
                while (await each.frame()).argument < 4:
                    pass
            counters = broker.services.counters
            assert (counters.received_blocks, counters.duplicate_blocks) == (4, 4)
            await client.close()
            await other.close()

    run(work())


def test_a_block_with_other_bounds_than_before_is_refused() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client = await BareClient.connect(broker)
            topic = await client.topic()
            await client.open(topic)
            client.write(write_frame(block_of(topic, 0, [b"a", b"b"])))
            assert (await client.frame()).argument == 2
            await client.open(topic, sequence=1)
            client.write(write_frame(block_of(topic, 1, [b"b", b"c"])))
            assert (await client.error()).code == "identity-conflict"
            await client.close()

    run(work())


def test_unknown_topics_and_partitions_and_ids_are_not_found() -> None:
    async def work() -> None:
        async with running_broker() as broker:
            client = await BareClient.connect(broker)
            topic = await client.topic()
            client.send_open(topic, partition=7)
            assert (await client.error()).code == "not-found"
            client.write(encode_frame(Api.CLOSE, 3, 9, encode_message(Close(next_sequence=0))))
            assert (await client.error()).code == "not-found"
            gone = Open(topic=topic.name, topic_id="0" * 32, partition=0, producer="0" * 15 + "1", acks=2, sequence=0)
            client.write(encode_frame(Api.OPEN, 1, 9, encode_message(gone)))
            error = await client.error()
            assert "was deleted" in error.text
            await client.close()

    run(work())


def test_silence_before_hello_and_half_frames_are_closed_in_time() -> None:
    async def work() -> None:
        runtime = stepped_runtime()
        async with running_broker(runtime=runtime, hello_timeout_ms=30_000, frame_timeout_ms=30_000) as broker:
            silent, half = await BareClient.connect(broker, hello=False), await BareClient.connect(broker)
            half.write(PREFIX.pack(1000, Api.METADATA, 0, 0, 1) + b"half")
            await until(lambda: any(getattr(each, "half_since_s", None) for each in broker.intake.readers))
            step(31)
            assert b"no HELLO" in await silent.end()
            assert b"not complete" in await half.end()
            await silent.close()
            await half.close()

    run(work(), SteppedLoop)


def test_connections_over_the_bound_are_turned_away() -> None:
    async def work() -> None:
        async with running_broker(connections_max=1) as broker:
            client = await BareClient.connect(broker)
            other = await BareClient.connect(broker, hello=False)
            assert b"connections_max" in await other.end()
            assert (await client.topic()).name == "clicks"
            await client.close()
            await other.close()

    run(work())


@settings(max_examples=30, deadline=None)
@given(data=st.binary(min_size=1, max_size=300))
def test_any_garbage_is_survived(data: bytes) -> None:
    async def work() -> None:
        async with running_broker() as broker:
            for hello in (False, True):
                client = await BareClient.connect(broker, hello=hello)
                client.write(data)
                client.writer.write_eof()
                await client.end()
                await client.close()
            sound = await BareClient.connect(broker)
            assert (await sound.topic()).name == "clicks"
            await sound.close()

    run(work())


class OneByOneStore(MemoryHandler):
    """A store that takes as many objects as it has `turns` for."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.begun = asyncio.Event()
        self.turns = asyncio.Semaphore(0)

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        """Put when it is the turn of this one."""
        self.begun.set()
        await self.turns.acquire()
        await super().put(key, buffers, checksum)


@pytest.mark.parametrize("later", ["in the ring", "in the queue"])
def test_the_ack_of_a_copy_waits_for_all_that_came_before_it_on_its_stream(later: str) -> None:
    """A later block can be stored before an earlier one: its pointer is all that a new owner can read, perhaps."""

    async def work() -> None:
        async with running_broker() as broker:
            store = broker.services.stores["main"] = OneByOneStore()
            first, second = await BareClient.connect(broker), await BareClient.connect(broker)
            topic = await first.topic()
            early, late = write_frame(block_of(topic, 0, [b"a", b"b"])), write_frame(block_of(topic, 2, [b"c"]))
            await first.open(topic, sequence=2)
            first.write(late)
            await store.begun.wait()
            if later == "in the queue":
                store.turns.release()
                assert (await first.frame()).argument == 3
                await first.open(topic)
                first.write(early)
                await until(lambda: broker.services.counters.received_records == 3)
            await second.open(topic)
            second.write(early + late)
            await until(lambda: broker.services.counters.duplicate_blocks == 1 + (later == "in the queue"))
            if later == "in the ring":
                store.turns.release()
                assert (await first.frame()).argument == 3
            await second.open(topic, stream=2, sequence=3)  # the answer comes first: nothing was acked
            store.turns.release()
            acks = [await second.frame()]
            while acks[-1].argument < 3:
                acks.append(await second.frame())
            assert {(frame.api, frame.stream) for frame in acks} == {(Api.ACK, 1)}
            await first.close()
            await second.close()

    run(work())
