"""A broker in this process on memory parts, and a bare client that can send invalid frames."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest

from memq.broker.broker import Broker
from memq.broker.ingest.quotas import NO_CLIENT_LIMITS, ClientLimits
from memq.broker.ingest.slabs import SlabPool
from memq.broker.metrics import Counters
from memq.broker.spool.writer import Spool
from memq.errors import NotReadyError
from memq.format.blocks.builder import BlockBuilder
from memq.format.blocks.header import Buffer, parse_header, scope_of
from memq.format.pointer import Pointer, decode_pointer
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.groups.coordinator import GroupCoordinator
from memq.notification import NotificationQueue
from memq.notification.memory import MemoryQueue
from memq.protocol.frames import HELLO_MAGIC, VERSIONS, WRITE_PREFIX, AckLevel, Api, Frame, FrameReader, encode_frame
from memq.protocol.messages import (
    Hello,
    Metadata,
    MetadataRequest,
    Nack,
    Open,
    OpenAnswer,
    decode_message,
    encode_message,
)
from memq.runtime.clock import SystemClock
from memq.runtime.network import parse_address
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import Topic, read_partitions, secret_producer_id

TIMEOUT_S = 20.0
RUN_S_MAX = 120.0
SECRET = "of a bare client"
PRODUCER = secret_producer_id(SECRET)


@asynccontextmanager
async def running_broker(
    client_limits: ClientLimits = NO_CLIENT_LIMITS, runtime: Runtime | None = None, **settings: Any
) -> AsyncIterator[Broker]:
    """Run a broker on a free port; after the test its memory must be back."""
    runtime = runtime or Runtime()
    broker = Broker(
        dataclasses.replace(BrokerSettings(port=0), **settings),
        runtime,
        {"main": MemoryHandler(runtime.clock)},
        MemoryQueue(runtime.clock),
        MemoryCoordinator(MemoryCluster()),
        client_limits=client_limits,
        slab_bytes=256 * 1024,
    )
    await broker.start()
    try:
        yield broker
    finally:
        await broker.close()
    assert broker.services.pool.leased_bytes == broker.intake.slab.size, "slabs are still leased after the close"


def run(work: Coroutine[Any, Any, None], loop: Callable[[], asyncio.AbstractEventLoop] | None = None) -> None:
    """Run one test's coroutine with a deadline."""

    async def bounded() -> None:
        async with asyncio.timeout(RUN_S_MAX):
            await work

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(bounded())


async def coordinator_of(broker: Broker, group: str) -> GroupCoordinator:
    """Return the coordinator of a group at the only broker, as soon as its log is open."""
    while True:
        with suppress(NotReadyError):
            found = await broker.hosts.service_or_address(broker.hosts.groups, group)
            assert not isinstance(found, str), "another broker has it"
            return found
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until the broker is there; the test's deadline ends it otherwise."""
    while not condition():  # noqa: ASYNC110 - the broker has no event for this: a test may check every turn
        await asyncio.sleep(0)


class GatedStore(MemoryHandler):
    """A store whose puts begin, and end when its gate is open."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        """Put when the gate is open."""
        self.begun.set()
        await self.gate.wait()
        await super().put(key, buffers, checksum)


def no_spool(runtime: Runtime, pool: SlabPool) -> Spool:
    """The spool of a broker that has none."""

    def failed(error: BaseException) -> None:
        raise AssertionError("it does nothing") from error

    return Spool(None, BrokerSettings(), runtime, Counters(), pool.release, failed)


class BareClient:
    """Frames over a socket, without any opinion."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._frames = FrameReader()
        self._ready: list[Frame] = []

    @classmethod
    async def connect(cls, broker: Broker, *, hello: bool = True, client_id: str = "") -> BareClient:
        """Connect; with `hello` say it and take the answer."""
        client = cls(*await asyncio.open_connection(*parse_address(broker.address)))  # noqa: TID251 - a bare peer
        if hello:
            least, greatest = VERSIONS
            greeting = encode_message(Hello(least_version=least, greatest_version=greatest, client_id=client_id))
            client.write(encode_frame(Api.HELLO, 0, HELLO_MAGIC, greeting))
            assert (await client.frame()).api == Api.HELLO
        return client

    def write(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)

    async def frame(self) -> Frame:
        """Return the next frame of the broker."""
        async with asyncio.timeout(TIMEOUT_S):
            while not self._ready:
                room = self._frames.get_buffer()
                data = await self.reader.read(len(room))
                assert data, "the broker closed the connection"
                room[: len(data)] = data
                self._ready += self._frames.received(len(data))
        return self._ready.pop(0)

    async def end(self) -> bytes:
        """Return what comes until the broker closes the connection."""
        async with asyncio.timeout(TIMEOUT_S):
            try:
                return await self.reader.read(-1)
            except ConnectionError:
                return b""

    async def error(self) -> Nack:
        """Return the error that the broker sends before it closes the connection."""
        frame = await self.frame()
        assert frame.api in (Api.ERROR, Api.NACK), f"expected an error, got {Api(frame.api).name}"
        return decode_message(frame.body, Nack)

    async def topic(self, name: str = "clicks") -> Topic:
        """Make a topic, or find it."""
        self.write(encode_frame(Api.METADATA, 0, 1, encode_message(MetadataRequest(topics=[name], create=True))))
        return decode_message((await self.frame()).body, Metadata).topics[0].topic

    async def open(
        self, topic: Topic, *, stream: int = 1, acks: int = AckLevel.ALL, sequence: int = 0, producer: int = PRODUCER
    ) -> OpenAnswer:
        """Open a stream for partition 0 and one producer."""
        self.send_open(topic, stream=stream, acks=acks, sequence=sequence, producer=producer)
        frame = await self.frame()
        assert frame.api == Api.OPEN, bytes(frame.body)
        return decode_message(frame.body, OpenAnswer)

    async def send_again(self, topic: Topic, block: bytes, *, stream: int = 1, producer: int = PRODUCER) -> Frame:
        """Send a block on a stream of its own until its broker has compared it with the stored one."""
        while True:
            await self.open(topic, stream=stream, sequence=parse_header(block).first_sequence, producer=producer)
            self.write(write_frame(block, stream=stream))
            frame = await self.frame()
            if frame.api != Api.THROTTLE:
                return frame

    def send_open(
        self,
        topic: Topic,
        *,
        stream: int = 1,
        acks: int = AckLevel.ALL,
        sequence: int = 0,
        partition: int = 0,
        producer: int = PRODUCER,
    ) -> None:
        """Ask for a stream without taking the answer."""
        ask = Open(
            topic=topic.name,
            topic_id=topic.id,
            partition=partition,
            producer=f"{producer:016x}",
            acks=acks,
            sequence=sequence,
            secret=SECRET if producer == PRODUCER else "",
        )
        self.write(encode_frame(Api.OPEN, stream, 7, encode_message(ask)))

    async def close(self) -> None:
        """Close the socket."""
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def block_of(topic: Topic, first: int, values: list[bytes], *, partition: int = 0, producer: int = PRODUCER) -> bytes:
    """Seal values as one block."""
    builder = BlockBuilder()
    for value in values:
        builder.append(value)
    scope = scope_of(topic.id_bytes, partition)
    sealed = builder.seal(producer_id=producer, first_sequence=first, scope=scope, now_ms=1_000, codec="none")
    return bytes(sealed.data)


def write_frame(block: bytes, *, stream: int = 1, first_sent_ms: int = 0) -> bytes:
    """A WRITE frame with a block."""
    return WRITE_PREFIX.pack(len(block), Api.WRITE, 0, stream, first_sent_ms) + block


def events_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the names of memq's warnings and errors in the log."""
    return [line.partition(":")[0] for line in log_lines(caplog)]


def log_lines(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    """Return memq's events in the log, from a level on.

    Other loggers do not count, `memq.kafka` and `asyncio` among them: a thread of librdkafka or a slow machine writes
    there at any time. Lines below a warning are there or not by the level that the process has.
    """
    return [each.getMessage() for each in caplog.records if each.name == "memq" and each.levelno >= level]


async def batch_pointers(queue: NotificationQueue, topic: Topic) -> list[Pointer]:
    """Return all pointers of batches, without the latency of their records: objects do not have it."""
    entries = await queue.read(read_partitions(topic)[0], 0, 1 << 20)
    found = [msgspec.structs.replace(decode_pointer(entry.body), latency=()) for entry in entries]
    return [pointer for pointer in found if pointer.kind == "data"]
