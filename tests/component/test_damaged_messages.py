"""A bit that flips between client and broker: the message is refused and requested again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

import memq
from memq.client.producer.producer import AsyncProducer
from memq.format.blocks.header import Buffer
from memq.protocol import link
from memq.protocol.frames import Api, Frame, FrameReader
from memq.runtime.clock import SystemClock
from memq.storage_handlers.memory import MemoryHandler
from memq.testing import Cluster
from tests.brokers import run, running_broker, until

RECORDS = 12


class Flipping(FrameReader):
    """Changes one bit in three of four answers to POLL and COMMIT."""

    draw = random.Random(7)
    flipped = 0

    def received(self, count: int) -> list[Frame]:
        return [self._flip(frame) for frame in super().received(count)]

    def _flip(self, frame: Frame) -> Frame:
        if frame.api not in (Api.POLL, Api.COMMIT) or self.draw.random() < 0.25:
            return frame
        body = bytearray(frame.body)
        body[self.draw.randrange(len(body))] ^= 1 << self.draw.randrange(7)
        Flipping.flipped += 1
        return frame._replace(body=bytes(body))


@pytest.mark.thorough
def test_a_consumer_takes_no_damaged_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster() as cluster:
        with memq.Producer(cluster.address) as producer:
            for number in range(RECORDS):
                producer.send("clicks", b"%d" % number).result(timeout=60)
        monkeypatch.setattr(link, "FrameReader", Flipping)
        taken: list[bytes | None] = []
        with memq.Consumer(cluster.address, "clicks", group="readers") as consumer:
            while len(taken) < RECORDS:
                batch = consumer.poll(60)
                assert batch is not None
                taken += batch.values()
                consumer.commit(batch)
            assert consumer.stats().counts.records == RECORDS
        assert taken == [b"%d" % number for number in range(RECORDS)]
        assert Flipping.flipped > RECORDS / 4, "the answers were changed"


class FlippingOnce(FrameReader):
    """Changes one bit of the argument of the first ACK that comes."""

    flipped = 0

    def received(self, count: int) -> list[Frame]:
        return [self._flip(frame) for frame in super().received(count)]

    def _flip(self, frame: Frame) -> Frame:
        if frame.api != Api.ACK or FlippingOnce.flipped:
            return frame
        FlippingOnce.flipped += 1
        return frame._replace(argument=frame.argument ^ 2)


class CountingStore(MemoryHandler):
    """A store that begins a put when it may, one after another."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.allowed = asyncio.Semaphore(0)

    async def put(self, key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        await self.allowed.acquire()
        await super().put(key, buffers, checksum)


def test_a_changed_bit_in_an_ack_acks_no_record_that_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer took two records for stored that only the memory of the broker had."""

    async def test() -> None:
        async with running_broker() as broker:
            store = broker.services.stores["main"] = CountingStore()
            counters = broker.services.counters
            async with AsyncProducer(broker.address, codec="none", linger_ms=0, audit=False) as producer:
                deliveries = []
                for number in range(3):
                    deliveries.append(await producer.send("clicks", b"%d" % number))
                    await until(lambda: counters.received_records == len(deliveries))
                store.allowed.release()
                await until(lambda: FlippingOnce.flipped == 1)
                await deliveries[0]
                assert [each.done() for each in deliveries] == [True, False, False]
                for _ in range(9):
                    store.allowed.release()
                assert [(await each).first_sequence for each in deliveries] == [0, 1, 2]

    monkeypatch.setattr(link, "FrameReader", FlippingOnce)
    run(test())
