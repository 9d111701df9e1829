"""A forwarder alone on virtual time, with the blocks of one lost epoch, and the owner that gets them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from awscrt.checksums import crc32c

from memq.broker.ingest.slabs import Slab
from memq.broker.restore.rebuild import BatchLocation, Rebuilder, find_batch
from memq.broker.spool.forwarding import Forwarder
from memq.broker.spool.unpublished_blocks import UnpublishedBlock, UnpublishedBlocks
from memq.errors import (
    MemqError,
)
from memq.format.blocks.header import parse_header
from memq.format.pointer import encode_pointer
from memq.notification import Publication
from memq.protocol.frames import Api, decode_forward
from memq.protocol.link import Link
from memq.protocol.messages import Done
from memq.topic import Topic, read_partitions
from tests.partition_owners import Opening
from tests.skipping_loop import skip
from tests.unit.broker_wire import Wire, no_login
from tests.unit.sealed_batches import TOPIC, batch, block, joined


class Owner(Wire):
    """The new owner at the other end: `take` says what it does with each block; by default it publishes it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[float, int, bytes]] = []  # when, request, block
        self.connects_s: list[float] = []
        self.closed = self.in_flight = self.most = 0
        self.take: Callable[[int, bytes], Coroutine[Any, Any, None]] | None = None

    async def connect_to(self, host: str, port: int, make: Callable[[], Link], *, timeout_s: float) -> None:
        self.connects_s.append(asyncio.get_running_loop().time())
        self.frames, self.aborts = [], 0
        await super().connect_to(host, port, make, timeout_s=timeout_s)

    def abort(self) -> None:
        """See `Wire.abort`."""
        self.closed += not self.aborts
        super().abort()

    def write(self, data: bytes | memoryview) -> None:
        """See `Wire.write`."""
        known = len(self.frames)
        super().write(data)
        for frame in self.frames[known:]:
            if frame.api == Api.FORWARD and self.take is not None:
                _, at = decode_forward(frame.body)
                self.asked.append((asyncio.get_running_loop().time(), frame.argument, bytes(frame.body[at:])))
                self.in_flight += 1
                self.most = max(self.most, self.in_flight)
                asyncio.get_running_loop().create_task(self._answer(self.take, *self.asked[-1][1:]))

    async def _answer(self, take: Callable[[int, bytes], Coroutine[Any, Any, None]], number: int, data: bytes) -> None:
        await skip(0.01)
        self.in_flight -= 1
        try:
            await take(number, data)
        except MemqError as error:
            self.refuse(number, error)
        else:
            self.say(Api.FORWARD, number, Done())


class Bench:
    """A forwarder with the blocks of one lost epoch, and the owner that it brings them to."""

    def __init__(self, count: int = 3, settled_s: float = 0.0, values: bytes = b"v") -> None:
        opening, self.owner = Opening(), Owner()
        self.owner.take = lambda number, data: self.land(data)
        network = SimpleNamespace(connect=self.owner.connect_to, token=str, login=no_login, encrypted=False)
        runtime = replace(opening.runtime, network=cast(Any, network))
        self.services = replace(opening.services, runtime=runtime)
        self.counters = self.services.counters
        self.queue, self.store, self.coordinator = opening.queue, opening.store, opening.coordinator
        self.read = read_partitions(TOPIC)[0]
        self.locate_errors: list[MemqError] = []
        self.located_s: list[float] = []
        self.forwarder = Forwarder(self.services, self._locate)
        self.released: list[Slab] = []
        self.held = UnpublishedBlocks(TOPIC, 0, 0, settled_s, self.released.append)
        self.blocks = [block(number, [values], 5) for number in range(count)]
        for each in self.blocks:
            self.hold(each)
        self._batches = 0

    def hold(self, data: bytes) -> None:
        """Hold one more block."""
        slab = Slab(len(data) + 10)
        slab.view[10:] = data
        self.held.add(UnpublishedBlock(parse_header(data), slab, 10, len(data) + 10))

    async def _locate(self, topic: Topic, partition: int) -> str:
        assert (topic, partition) == (TOPIC, 0)
        self.located_s.append(asyncio.get_running_loop().time())
        if self.locate_errors:
            raise self.locate_errors.pop(0)
        return "host-2:77"

    async def land(self, *blocks: bytes) -> None:
        """Publish blocks as one batch."""
        self._batches += 1
        data, key = joined((batch(self._batches), list(blocks))), f"memq/{self._batches}"
        await self.store.put(key, [data], crc32c(data))
        found = find_batch(BatchLocation(key, 0, 4, self._batches), data, TOPIC)
        pointer = Rebuilder(TOPIC, "memq", "main").pointer(found)
        assert pointer is not None
        now_ms = self.services.runtime.clock.wall_ms()
        await self.queue.publish(Publication(self.read, 0, 4, now_ms, encode_pointer(pointer)))

    async def start(self) -> None:
        """Begin to forward."""
        await self.queue.create([self.read], 30_000)
        self.forwarder.take(self.held)

    async def done(self) -> None:
        """Forward until nothing is held."""
        await self.start()
        await self.forwarder.drain()
