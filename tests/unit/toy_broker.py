"""A broker for tests of clients: real sockets, the real protocol, blocks kept in memory, and a script to obey."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar, cast

import msgspec

from memq.client.link_pool import LinkPool
from memq.errors import (
    MemqError,
)
from memq.format.blocks.columns import BlockReader, open_block
from memq.format.blocks.header import BlockHeader, check_block
from memq.protocol.frames import AckLevel, Api, Frame, FrameReader, encode_ack, encode_frame
from memq.protocol.messages import (
    Close,
    Done,
    Draining,
    HelloAnswer,
    Metadata,
    MetadataRequest,
    Open,
    OpenAnswer,
    Owner,
    Redirect,
    Throttle,
    TopicMetadata,
    decode_message,
    encode_message,
    nack_of,
)
from memq.runtime.network import Address, BoundPort, SocketNetwork, format_address, parse_address
from memq.topic import Topic, TopicSettings, equal_slots
from tests.stepped_time import SteppedLoop, stepped_runtime

Script = Callable[["ToyConnection", Frame], bool]


def toy_topic(
    name: str = "clicks", partitions: int = 1, topic_id: str = "ab" * 16, settings: TopicSettings | None = None
) -> Topic:
    """Return a topic as a coordinator would have made it."""
    settings = settings or TopicSettings()
    return Topic(name=name, id=topic_id, created_ms=0, settings=settings, partitions=equal_slots(partitions))


class ToyStream:
    """What the broker keeps of one stream."""

    def __init__(self, message: Open) -> None:
        self.message = message
        self.expected = message.sequence
        self.open = True


class ToyConnection(asyncio.BufferedProtocol):
    """One connection: `script` sees each frame first and returns true when it has dealt with it."""

    def __init__(self, broker: ToyBroker) -> None:
        self.broker = broker
        self.streams: dict[int, ToyStream] = {}
        self.transport: asyncio.Transport
        self._reader = FrameReader(1 << 20)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.broker.connections.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self.broker.connections:
            self.broker.connections.remove(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        for frame in self._reader.received(nbytes):
            try:
                if not self.broker.script(self, frame):
                    self.serve(frame)
            except AssertionError as error:
                self.broker.failures.append(error)
                self.transport.abort()
            self.broker.changed()

    def serve(self, frame: Frame) -> None:
        """Do what a healthy broker does."""
        if frame.api == Api.HELLO:
            self.answer(frame, HelloAnswer(version=1, broker="toy", cluster="toy"))
        elif frame.api == Api.METADATA:
            self.answer(frame, self.broker.metadata(decode_message(frame.body, MetadataRequest)))
        elif frame.api == Api.OPEN:
            message = decode_message(frame.body, Open)
            self.broker.opens.append(message)
            self.streams[frame.stream] = ToyStream(message)
            self.answer(frame, OpenAnswer(epoch=1, sequence=message.sequence))
        elif frame.api == Api.CLOSE:
            self.broker.closes.append(decode_message(frame.body, Close))
            self.answer(frame, Done())
        else:
            assert frame.api == Api.WRITE, frame.api
            self.take(frame)

    def take(self, frame: Frame) -> BlockHeader | None:
        """Take a block and ack it, unless its stream is closed."""
        stream = self.streams[frame.stream]
        if not stream.open:
            return None
        header = check_block(frame.body)
        assert header.first_sequence == stream.expected, "the stream is not dense"
        stream.expected = header.next_sequence
        self.broker.keep(stream.message, header, bytes(frame.body), frame.argument)
        level = stream.message.acks
        if self.broker.acking and level != AckLevel.NONE:
            self.transport.write(encode_ack(level, frame.stream, stream.expected, 1))
        return header

    def ack(self, stream: int) -> None:
        """Ack all that the stream took."""
        kept = self.streams[stream]
        self.transport.write(encode_ack(kept.message.acks, stream, kept.expected, 1))

    def ack_nothing(self, stream: int) -> None:
        """Say something that changes nothing."""
        self.transport.write(encode_ack(AckLevel.ALL, stream, 0, 1))

    def answer(self, frame: Frame, message: msgspec.Struct) -> None:
        self.transport.write(encode_frame(frame.api, frame.stream, frame.argument, encode_message(message)))

    def refuse(self, frame: Frame, error: MemqError) -> None:
        """Answer a request with an error."""
        body = encode_message(nack_of(error))
        self.transport.write(encode_frame(Api.ERROR, frame.stream, frame.argument, body))

    def nack(self, frame: Frame, error: MemqError) -> None:
        """Refuse a block, which closes its stream."""
        stream = self.streams[frame.stream]
        stream.open = False
        body = encode_message(nack_of(error))
        self.transport.write(encode_frame(Api.NACK, frame.stream, stream.expected, body))

    def throttle(self, stream: int, retry_after_ms: int) -> None:
        self.streams[stream].open = False
        body = encode_message(Throttle(retry_after_ms=retry_after_ms))
        self.transport.write(encode_frame(Api.THROTTLE, stream, 0, body))

    def redirect(self, stream: int, address: str) -> None:
        self.streams[stream].open = False
        self.transport.write(encode_frame(Api.REDIRECT, stream, 0, encode_message(Redirect(address=address))))

    def drain(self) -> None:
        self.transport.write(encode_frame(Api.DRAINING, 0, 0, encode_message(Draining())))


class ToyBroker:
    """Listens on a port of its own. `script` is the test's: the healthy behaviour is its default."""

    def __init__(self, *topics: Topic) -> None:
        self.topics = {topic.name: topic for topic in topics or (toy_topic(),)}
        self.owners: dict[tuple[str, int], str] = {}  # address by topic and partition; this broker's by default
        self.script: Script = lambda connection, frame: False
        self.acking = True
        self.connections: list[ToyConnection] = []
        self.opens: list[Open] = []
        self.closes: list[Close] = []
        self.blocks: dict[tuple[str, int, int, int, int], bytes] = {}  # topic, partition, scope, producer, sequence
        self.headers: list[BlockHeader] = []  # in the order of their first arrival
        self.sent_ms: list[int] = []  # what each WRITE said
        self.failures: list[AssertionError] = []  # what the client did against the protocol
        self.creates: list[str] = []
        self.address = ""
        self._listener: BoundPort | None = None
        self._waiters: list[tuple[Callable[[], bool], asyncio.Future[None]]] = []

    async def __aenter__(self) -> Self:
        self._listener = await SocketNetwork().listen("127.0.0.1", 0, lambda: ToyConnection(self))
        self.address = format_address(self._listener.address)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        self.cut()
        if self.failures:
            raise self.failures[0]

    def cut(self) -> None:
        """Lose all connections."""
        for connection in list(self.connections):
            connection.transport.abort()

    def keep(self, message: Open, header: BlockHeader, data: bytes, sent_ms: int) -> None:
        assert header.producer_id == int(message.producer, 16)
        place = (message.topic, message.partition, header.scope, header.producer_id, header.first_sequence)
        if place in self.blocks:
            assert self.blocks[place] == data, "a block was sent again with other bytes"
        else:
            self.blocks[place] = data
            self.headers.append(header)
        self.sent_ms.append(sent_ms if sent_ms < 1 << 63 else sent_ms - (1 << 64))

    def metadata(self, request: MetadataRequest) -> Metadata:
        if request.create:
            self.creates += request.topics or []
        names = list(self.topics) if request.topics is None else request.topics
        found = [
            TopicMetadata(
                topic=self.topics[name],
                owners=[self.owner(name, part.partition) for part in self.topics[name].partitions],
            )
            for name in names
            if name in self.topics
        ]
        missing = [name for name in names if name not in self.topics]
        return Metadata(cluster="toy", brokers=[self.address], topics=found, missing=missing)

    def owner(self, topic: str, partition: int) -> Owner:
        return Owner(partition=partition, epoch=1, address=self.owners.get((topic, partition), self.address))

    def readers(self, topic: str = "clicks", partition: int = 0) -> list[BlockReader]:
        """Return the blocks of a partition in the order of their sequences."""
        places = sorted(place for place in self.blocks if place[:2] == (topic, partition))
        return [open_block(self.blocks[place]) for place in places]

    def values(self, topic: str = "clicks", partition: int = 0) -> list[bytes | None]:
        return [value for reader in self.readers(topic, partition) for value in reader.values()]

    def changed(self) -> None:
        for condition, future in list(self._waiters):
            if condition() and not future.done():
                future.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what the broker has seen makes `condition` true."""
        if not condition():
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append((condition, future))
            await future


def run(test: Callable[[ToyBroker], Awaitable[None]], broker: ToyBroker | None = None) -> ToyBroker:
    """Run a test with a broker, on a loop whose time the test may step; the test's own limit ends it."""
    toy = broker or ToyBroker()

    async def main() -> None:
        async with toy:
            await test(toy)

    with asyncio.Runner(loop_factory=SteppedLoop) as runner:
        runner.run(main())
    return toy


def pool_of(*brokers: ToyBroker | Address, zone: str = "") -> LinkPool:
    """Return the connections of a client that starts from these brokers."""
    addresses = [parse_address(each.address) if isinstance(each, ToyBroker) else each for each in brokers]
    return LinkPool(stepped_runtime(), addresses, zone=zone)


def address_of(broker: ToyBroker) -> Address:
    """Return where a broker listens."""
    return parse_address(broker.address)


def silent_at(api: Api) -> Script:
    """Return the script of a broker that never answers one kind of frame."""
    return lambda connection, frame: frame.api == api


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until a condition holds; the test's own limit ends it."""
    while not condition():  # noqa: ASYNC110 - clients have no event for all that a test waits for
        await asyncio.sleep(0)


async def turns(count: int = 50) -> None:
    """Let what can happen without time happen."""
    for _ in range(count):
        await asyncio.sleep(0)


Result = TypeVar("Result")


class Server:
    """A toy broker on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.broker = ToyBroker()
        self.run(self.broker.__aenter__())

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def until(self, condition: Callable[[], bool]) -> None:
        self.run(self.broker.until(condition))

    def call(self, function: Callable[[], object]) -> None:
        async def on_loop() -> None:
            function()

        self.run(on_loop())

    def ack_all(self) -> None:
        for connection in self.broker.connections:
            for number in connection.streams:
                connection.ack(number)

    def close(self) -> None:
        try:
            self.run(self.broker.__aexit__())
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()
