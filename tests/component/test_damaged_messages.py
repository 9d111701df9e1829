"""A bit that flips between client and broker: the message is refused and requested again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

import memq
from memq.client.producer import partition_sender
from memq.client.producer.producer import AsyncProducer
from memq.errors import CorruptDataError
from memq.format.blocks.header import Buffer
from memq.limits import BLOCK_HEADER_BYTES, FRAME_PREFIX_BYTES
from memq.protocol import link
from memq.protocol.frames import WRITE_PREFIX, Api, Frame, FrameReader, add_checksum
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


class ChangedPrefix(FrameReader):
    """Changes a byte in the prefix of the first frame of an api that begins a read."""

    api, byte, bits = Api.POLL, 4, 0x80  # the prefix then has an api that no release knows
    changed = 0
    view = memoryview(b"")

    def get_buffer(self) -> memoryview:
        self.view = super().get_buffer()
        return self.view

    def received(self, count: int) -> list[Frame]:
        if not ChangedPrefix.changed and count >= FRAME_PREFIX_BYTES and self.view[4] == self.api:
            self.view[self.byte] ^= self.bits
            ChangedPrefix.changed += 1
        return super().received(count)


class LongerAck(ChangedPrefix):
    """Changes an ACK into one that has 4,096 bytes more."""

    api, byte, bits = Api.ACK, 1, 0x10


def with_foreign_api(frame: bytes) -> tuple[bytes, ...]:
    """Do the same with the first request: the broker refuses the connection, and names the reason."""
    if frame[4] != Api.POLL or ChangedPrefix.changed:
        return add_checksum(frame)
    ChangedPrefix.changed += 1
    return (frame[:4] + bytes([frame[4] ^ 0x80]) + frame[5:],)


@pytest.mark.parametrize("way", ["answer", "request"])
def test_a_changed_prefix_is_no_error_of_the_program(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The consumer raised ProtocolError, as if the program were wrong."""
    monkeypatch.setattr(ChangedPrefix, "changed", 0)
    with Cluster() as cluster:
        with memq.Producer(cluster.address) as producer:
            producer.send("clicks", b"one").result(timeout=60)
        if way == "answer":
            monkeypatch.setattr(link, "FrameReader", ChangedPrefix)
        else:
            monkeypatch.setattr(link, "add_checksum", with_foreign_api)
        with memq.Consumer(cluster.address, "clicks") as consumer:
            batch = consumer.poll(60)
            assert batch is not None
            assert batch.values() == [b"one"]
        assert ChangedPrefix.changed == 1


def test_an_ack_whose_length_was_changed_delays_acks_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link waited for the rest of the ACK, took each byte for a sign of life, and the records failed."""
    monkeypatch.setattr(ChangedPrefix, "changed", 0)
    with Cluster() as cluster:
        monkeypatch.setattr(link, "FrameReader", LongerAck)
        with memq.Producer(cluster.address, delivery_timeout_ms=12_000) as producer:
            producer.send("clicks", b"one").result(timeout=60)
        assert ChangedPrefix.changed == 1


def stored(cluster: Cluster, records: int) -> list[bytes | None]:
    """Return the values of the first records of the topic."""
    taken: list[bytes | None] = []
    with memq.Consumer(cluster.address, "clicks") as consumer:
        while len(taken) < records:
            batch = consumer.poll(60)
            assert batch is not None
            taken += batch.values()
    return taken


class ChangedWrite:
    """Makes the prefixes of WRITEs, with a bit of one changed: of the third, if no other number is given."""

    def __init__(self, bit: int, number: int = 3) -> None:
        self.bit, self.number, self.made = bit, number, 0

    def pack(self, *fields: int) -> bytes:
        self.made += 1
        prefix = bytearray(WRITE_PREFIX.pack(*fields))
        if self.made == self.number:
            prefix[self.bit // 8] ^= 1 << self.bit % 8
        return bytes(prefix)


@pytest.mark.parametrize("bit", [0, 4, 6, 7, 12, 16, 126, 127], ids=lambda bit: f"bit-{bit}")
def test_a_changed_length_or_time_of_a_write_neither_fails_a_record_nor_delays_it(
    bit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker waited for bytes that did not come, or the block was too old for it, and its record failed."""
    changed = ChangedWrite(bit)
    values = [b"%d" % number * 50 for number in range(6)]
    with Cluster() as cluster:
        monkeypatch.setattr(partition_sender, "WRITE_PREFIX", changed)
        with memq.Producer(cluster.address, codec="none", audit=False, delivery_timeout_ms=6_000) as producer:
            for value in values:
                producer.send("clicks", value, partition=0).result(timeout=60)
        assert changed.made > 3
        assert stored(cluster, len(values)) == values


def test_a_block_that_arrives_on_the_stream_of_another_partition_delays_no_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block of the other stream failed, and the changed one waited for its ack until the delivery timeout."""
    changed = ChangedWrite(bit=49, number=4)  # stream 1 becomes stream 3
    with Cluster() as cluster:
        cluster.create_topic("clicks", partitions=3)
        monkeypatch.setattr(partition_sender, "WRITE_PREFIX", changed)
        with memq.Producer(cluster.address, codec="none", audit=False, delivery_timeout_ms=6_000) as producer:
            for partition in range(3):
                producer.send("clicks", b"first", partition=partition).result(timeout=60)
            acks = [producer.send("clicks", b"second", partition=partition) for partition in (0, 2)]
            assert [each.result(timeout=60).first_sequence for each in acks] == [1, 1]
        assert changed.made > 5
        assert sorted(stored(cluster, 5)) == [b"first"] * 3 + [b"second"] * 2  # type: ignore[type-var]


@contextmanager
def changed_blocks(monkeypatch: pytest.MonkeyPatch, bit: int, numbers: Sequence[int]) -> Iterator[list[int]]:
    """Change a bit in the blocks of the WRITEs with these numbers, counted from 0; yield the number of each WRITE."""
    writes: list[int] = []
    write = link.Link.write

    def write_changed(self: link.Link, *buffers: Buffer) -> None:
        if buffers[0][4] == Api.WRITE:
            prefix, block = buffers[0], bytearray(buffers[1])
            if len(writes) in numbers:
                block[bit // 8] ^= 1 << bit % 8
            writes.append(len(writes))
            buffers = (prefix, block)
        write(self, *buffers)

    with monkeypatch.context() as patch:
        patch.setattr(link.Link, "write", write_changed)
        yield writes


@pytest.mark.parametrize("byte", [0, 8, 28, BLOCK_HEADER_BYTES + 5], ids=["magic", "version", "scope", "payload"])
def test_a_changed_bit_in_a_block_costs_one_more_try_and_no_record(byte: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record failed with CorruptDataError, and a producer with a name failed all later ones, too."""
    values = [b"%d" % number * 50 for number in range(9)]
    with Cluster() as cluster:
        with (
            changed_blocks(monkeypatch, 8 * byte, [2]) as writes,
            memq.Producer(cluster.address, name="job", codec="none", linger_ms=0, audit=False) as producer,
        ):
            for start in (0, 3, 6):
                acks = [producer.send("clicks", value, partition=0) for value in values[start : start + 3]]
                producer.flush()
                assert not any(each.exception() for each in acks)
        assert len(writes) > 3
        assert stored(cluster, len(values)) == values


def test_a_block_that_arrives_damaged_twice_fails_and_the_next_one_is_acked(monkeypatch: pytest.MonkeyPatch) -> None:
    with Cluster() as cluster:
        bit = 8 * BLOCK_HEADER_BYTES
        with (
            changed_blocks(monkeypatch, bit, [1, 2]) as writes,
            memq.Producer(cluster.address, codec="none", linger_ms=0, audit=False) as producer,
        ):
            producer.send("clicks", b"one", partition=0).result(timeout=60)
            second = producer.send("clicks", b"two", partition=0)
            with pytest.raises(CorruptDataError, match="checksum"):
                second.result(timeout=60)
            assert len(writes) == 3
            producer.send("clicks", b"three", partition=0).result(timeout=60)
        assert stored(cluster, 2) == [b"one", b"three"]
