"""A bit that flips between client and broker: the message is refused and requested again."""

from __future__ import annotations

import random

import pytest

import memq
from memq.protocol import link
from memq.protocol.frames import Api, Frame, FrameReader
from memq.testing import Cluster

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
