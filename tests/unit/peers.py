"""Clients without sockets for the tests of the broker's intake: real connections and a ring that holds what it took.

Who reads when, in pieces of which size, and when memory comes back, is drawn from one seed.
"""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

from memq.broker.ingest.connection import Connection
from memq.broker.ingest.intake import Intake
from memq.broker.ingest.quota_book import QuotaBook
from memq.broker.ingest.quotas import NO_CLIENT_LIMITS, Quotas
from memq.broker.ingest.slabs import Slab, SlabPool
from memq.broker.metrics import Counters
from memq.broker.partition.append import BlockRun, ProducerState, Stream
from memq.broker.partition.appender import Appender
from memq.broker.partition.ownership import Ownership
from memq.broker.partition.recent_batch_cache import RecentBatchCache
from memq.broker.partition.ring import Ring, RingLimits, RingStream
from memq.broker.services import Services
from memq.format.blocks.header import check_block, scope_of
from memq.governor.memory import MemoryCluster, MemoryCoordinator
from memq.notification.memory import MemoryQueue
from memq.protocol.frames import HELLO_MAGIC, VERSIONS, AckLevel, Api, Frame, encode_frame
from memq.protocol.messages import Hello, HelloAnswer, encode_message
from memq.runtime.clock import SystemClock
from memq.runtime.runtime import Runtime
from memq.runtime.waits import Waits
from memq.settings import BrokerSettings
from memq.storage_handlers.memory import MemoryHandler
from memq.topic import Topic, equal_slots
from tests.brokers import block_of, no_spool, write_frame

TOPIC = Topic(name="clicks", id="00" * 16, created_ms=0, partitions=equal_slots(1))
HELLO = encode_frame(
    Api.HELLO, 0, HELLO_MAGIC, encode_message(Hello(least_version=VERSIONS[0], greatest_version=VERSIONS[1]))
)


def append_to(
    ring: Ring, stream: Stream, first: int, count: int, slab: Slab, start: int, end: int, now_s: float
) -> bool:
    """Append one block to a ring; False when that is full."""
    assert isinstance(stream, RingStream)
    return ring.extend(stream, BlockRun([(slab, start, end)], first, first + count, end - start), now_s)


class HoldingPartition:
    """A partition with a real ring that holds every batch until the test lets it go."""

    def __init__(self) -> None:
        self.topic = TOPIC
        self.partition = 0
        self.scope = scope_of(TOPIC.id_bytes, 0)
        self.delivery_timeout_ms = TOPIC.settings.delivery_timeout_ms
        self.draining = False
        self.moved_to = "near:1"
        self.own: Ownership | None = None
        limits = Quotas(SystemClock(), NO_CLIENT_LIMITS)
        parts = {"limits": limits, "quotas": QuotaBook(SystemClock()), "counters": Counters()}
        self.services = SimpleNamespace(spool=None, waits=Waits(SystemClock()), **parts)
        self.known = SimpleNamespace(holds=lambda producer, header: (False, None), positions_of=lambda *claim: [])
        self.appender = Appender(cast(Any, self))
        self.ring = Ring(RingLimits(1 << 20, 200_000, 7, 1.0, seal_when_idle=True, uploads_in_flight_max=1))

    @property
    def name(self) -> str:
        return f"topic '{TOPIC.name}' partition 0"

    def owned(self) -> Ownership:
        return cast(Ownership, self.own)

    def pump_soon(self) -> None: ...


class Requests:
    """Answers HELLO, and keeps the bodies of what else is asked."""

    def __init__(self) -> None:
        self.bodies: dict[Connection, list[bytes]] = {}

    def request(self, connection: Connection, frame: Frame) -> None:
        if frame.api == Api.HELLO:
            answer = encode_message(HelloAnswer(version=1, broker="b", cluster="c"))
            connection.send(encode_frame(Api.HELLO, 0, HELLO_MAGIC, answer))
        else:
            self.bodies.setdefault(connection, []).append(bytes(frame.body))

    def forward(self, connection: Connection, request: int, slab: Slab, start: int, stop: int) -> None:
        raise AssertionError("nobody forwards here")

    def disconnected(self, connection: Connection) -> None: ...


class Wire:
    """A transport that keeps what is written and whether it reads."""

    def __init__(self) -> None:
        self.reading = True
        self.closing = False
        self.written = bytearray()

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.closing
        self.reading = True

    def write(self, data: bytes) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> str:
        return "peer"

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing, self.reading = True, False

    abort = close


class Peer:
    """One client: what it still has to send, and its connection at the broker."""

    def __init__(self, number: int, house: House, *, sends_blocks: bool = True) -> None:
        self.number = number
        self.sends_blocks = sends_blocks
        self.wire = Wire()
        self.dead = False
        self.connection = Connection(house.services, house.intake, house.requests)
        self.connection.connection_made(cast(asyncio.Transport, self.wire))
        if sends_blocks:
            producer, partition = ProducerState(number + 1), house.partition.appender
            self.connection.bind(RingStream(1, self.connection, partition, producer, AckLevel.NONE, 0))
        self.data = bytearray(HELLO)
        self.blocks: list[bytes] = []
        self.bodies: list[bytes] = []
        self.sequence = 0
        self.sent = 0

    def add_block(self, size: int) -> None:
        """Send one block of about `size` bytes."""
        value = bytes((self.number * 37 + self.sequence * 11 + n) % 251 for n in range(min(size, 251)))
        block = block_of(TOPIC, self.sequence, [(value * (size // len(value) + 1))[:size]], producer=self.number + 1)
        self.sequence += 1
        self.blocks.append(block)
        self.data += write_frame(block)

    def add_request(self, size: int) -> None:
        """Send one control frame."""
        body = bytes((self.number + n) % 256 for n in range(min(size, 256))) * (size // 256 + 1)
        self.bodies.append(body[:size])
        self.data += encode_frame(Api.METADATA, 0, 9, self.bodies[-1])

    @property
    def done(self) -> bool:
        return self.dead or self.sent == len(self.data)

    def reads(self) -> bool:
        return self.wire.reading

    def may_go_on(self) -> bool:
        return self.wire.reading and not self.done

    def die(self) -> None:
        """Lose the connection."""
        if not self.dead:
            self.dead, self.wire.closing = True, True
            self.connection.connection_lost(None)

    def step(self, size: int) -> bool:
        """Send up to `size` bytes, as an event loop does; False when the broker does not read or nothing is left."""
        if not self.may_go_on():
            return False
        buffer = self.connection.get_buffer(-1)
        assert len(buffer) > 0, "reads with no room"
        count = min(size, len(buffer), len(self.data) - self.sent)
        buffer[:count] = self.data[self.sent : self.sent + count]
        self.sent += count
        self.connection.buffer_updated(count)
        assert not self.wire.closing, bytes(self.wire.written[-200:])
        return True


class House:
    """A pool, an intake, and what a connection needs next to them; `feeds` are the wake-ups that are due."""

    def __init__(self, budget_bytes: int, slab_bytes: int) -> None:
        runtime = Runtime()
        self.pool = SlabPool(budget_bytes, slab_bytes)
        self.recent_batches = RecentBatchCache(budget_bytes // 4, self.pool.release)
        self.intake = Intake(self.pool)
        self.pool.freed = self._freed
        self.feeds = 0
        self.received: dict[int, dict[int, bytes]] = {}  # producer id -> first sequence -> the block as it came
        self.partition = HoldingPartition()
        self.requests = Requests()
        self.services = Services(
            settings=BrokerSettings(port=0),
            session="",
            runtime=runtime,
            stores={"main": MemoryHandler(runtime.clock)},
            store_name="main",
            queue=MemoryQueue(runtime.clock),
            coordinator=MemoryCoordinator(MemoryCluster()),
            pool=self.pool,
            recent_batches=self.recent_batches,
            limits=Quotas(SystemClock(), NO_CLIENT_LIMITS),
            spool=no_spool(runtime, self.pool),
            counters=Counters(),
        )

    def _freed(self) -> None:
        self.feeds += 1

    def release_some(self, dice: random.Random) -> None:
        """Release one batch, after a check of its bytes."""
        ring = self.partition.ring
        if ring.open is not None and (not ring.batches or dice.random() < 0.3):
            ring.seal()
        slot = ring.batches[dice.randrange(len(ring.batches))]
        ring.batches.remove(slot)
        blocks = [bytes(view) for view in slot.views()]
        assert sum(map(len, blocks)) == slot.bytes
        for block in blocks:
            header = check_block(block)
            self.received.setdefault(header.producer_id, {})[header.first_sequence] = block
        for slab in slot.slabs:
            self.pool.release(slab)

    def received_of(self, peer: Peer) -> list[bytes]:
        """Return the blocks that came from a peer, in the order of their sequences."""
        blocks = self.received.get(peer.number + 1, {})
        return [blocks[sequence] for sequence in sorted(blocks)]

    def wake(self) -> None:
        """Do what `call_soon` would have done."""
        while self.feeds:
            self.feeds = 0
            self.intake.feed()

    def check(self) -> None:
        """The bounds that hold at any time."""
        assert self.pool.leased_bytes <= self.pool.budget_bytes
        assert self.pool.held_bytes <= self.pool.budget_bytes
