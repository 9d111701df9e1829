"""Parts of a producer: its buffer with the hands that fill it, its window, and producers on a toy broker."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from memq.client.producer.delivery import Delivery, Promise
from memq.client.producer.fields import check_fields, check_many
from memq.client.producer.open_block import PendingBlock, Route, native
from memq.client.producer.producer import AsyncProducer
from memq.client.producer.send_buffer import BLOCK_COST_BYTES, SendBuffer
from memq.client.producer.settings import ProducerSettings
from memq.client.producer.window import ProducerWindow
from memq.client.producer.window_events import (
    Opened,
    Room,
    Sealed,
    UnackedBlock,
)
from memq.errors import (
    MovedError,
    TooLargeError,
    UnreachableError,
)
from memq.format.blocks.columns import BlockReader, open_block
from memq.protocol.frames import Api, Frame
from memq.runtime.clock import Clock, SystemClock
from memq.runtime.runtime import Runtime
from memq.topic import TopicSettings
from tests.stepped_time import stepped_runtime
from tests.unit.blocks import build, seal
from tests.unit.toy_broker import ToyBroker, ToyConnection, toy_topic


def compiled_path(lanes: dict[str, Any], slow: Callable[..., object] | None = None) -> Any:
    """Return a producer's compiled base with these lanes; records that are not plain go to `slow`."""

    class CompiledPath(native.SenderBase):  # type: ignore[misc]
        def put(self, *args: object) -> Promise | None:
            delivery: Promise | None = self._put_plain(*args)
            return delivery

        def use(self, lanes: dict[str, Any]) -> CompiledPath:
            self._use_lanes(lanes)
            return self

        def _send_slowly(self, *args: object) -> object:
            assert slow is not None
            return slow(*args)

    return CompiledPath().use(lanes)


class Hands:
    """A buffer, and what the I/O side would do with it."""

    def __init__(
        self, partitions: int = 1, record_bytes_max: int = 1 << 20, clock: Clock | None = None, **settings: int
    ) -> None:
        self.wakes = 0
        self.rooms = 0
        self.settings = ProducerSettings(codec="none", **settings)  # type: ignore[arg-type]
        runtime = Runtime(clock=clock or SystemClock(), random=random.Random(7))
        self.buffer = SendBuffer(self.settings, runtime, 5, Delivery, self.wake, self.room)
        self._path = None if native is None else compiled_path(self.buffer.lanes)  # keeps the last lane
        topic = toy_topic(partitions=partitions, settings=TopicSettings(record_bytes_max=record_bytes_max))
        self.route: Route = self.buffer.add_route(topic)
        self.sealed: dict[int, list[BlockReader]] = {}
        self.taken: list[PendingBlock] = []

    def wake(self) -> None:
        self.wakes += 1

    def room(self) -> None:
        self.rooms += 1

    def send(self, value: bytes | None, key: bytes | None = None, timestamp_ms: int | None = None) -> None:
        self.buffer.put(self.route, check_fields(value, key, None, timestamp_ms), None)

    def put_fast(
        self, value: bytes, key: bytes | None, timestamp_ms: int | None, topic: str = "clicks"
    ) -> Promise | None:
        """Put a record on the lock-free path, as `send` does; None if it is closed."""
        if self._path is not None:
            found: Promise | None = self._path.put(topic, value, key, timestamp_ms)
            return found
        assert key is not None
        return self.buffer.put_keyed(topic, value, key, timestamp_ms)

    def claim(self, limit: int) -> int:
        """Return what the next block of the first partition claims, if it may have `limit` bytes."""
        return limit + self.buffer.buffers()[0].front_bytes(limit) + BLOCK_COST_BYTES

    def keyless(self) -> bool:
        """Whether records without a key have a lock-free path."""
        return any(lane.keyless is not None for lane in self.buffer.lanes.values())

    def send_many(
        self, values: Sequence[bytes | None], keys: Sequence[bytes | None] | None = None
    ) -> tuple[int, list[Delivery]]:
        delivered: list[Delivery] = []
        rest = self.buffer.put_many(self.route, check_many(values, keys, None, None), delivered)
        return len(values) - (len(rest.values) if rest else 0), delivered

    def collect(self, *, release: bool = True) -> dict[int, list[BlockReader]]:
        """Seal what is open and take everything."""
        for partition in self.buffer.buffers():
            self.buffer.seal_open(partition)
        for partition in self.buffer.take_dirty():
            for pending in self.buffer.take_ready(partition):
                assert pending.error is None
                self.taken.append(pending)
                self.sealed.setdefault(partition.partition, []).append(open_block(pending.data))
                if release:
                    self.buffer.release(pending)
        return self.sealed

    def values(self) -> list[bytes | None]:
        return [
            value for number in sorted(self.collect()) for reader in self.sealed[number] for value in reader.values()
        ]


def producer_on(broker: ToyBroker, **settings: Any) -> AsyncProducer:
    return AsyncProducer(broker.address, runtime=stepped_runtime(), **settings)


def refuse_writes(connection: ToyConnection, frame: Frame) -> bool:
    if frame.api == Api.WRITE and connection.streams[frame.stream].open:
        connection.nack(frame, TooLargeError("no"))
    return frame.api == Api.WRITE


LOST = UnreachableError("connection is lost")
D = 100.0


def new_window(*, wants_acks: bool = True) -> ProducerWindow:
    return ProducerWindow("topic 't' partition 0", random.Random(1), wants_acks=wants_acks)


def block(first: int, records: int = 10, deadline_s: float = D) -> UnackedBlock:
    return UnackedBlock(first, records, deadline_s, b"block %d" % first)


def sound_block(first: int, records: int = 10, deadline_s: float = D) -> UnackedBlock:
    """Return a block whose bytes match their checksum."""
    sealed = seal(build([(b"v", None, (), None, None)] * records), first_sequence=first)
    return UnackedBlock(first, records, deadline_s, sealed.data)


def moved(address: str) -> MovedError:
    error = MovedError("moved")
    error.address = address
    return error


def opened(*blocks: UnackedBlock, wants_acks: bool = True) -> ProducerWindow:
    """Return a window with an open stream on which the blocks were written."""
    window = new_window(wants_acks=wants_acks)
    for each in blocks or (block(0),):
        window.handle(Sealed(each))
    window.handle(Opened())
    while window.handle(Room(1.0)):
        pass
    return window
