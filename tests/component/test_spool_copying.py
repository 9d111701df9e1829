"""A partition that can't publish keeps only its own blocks in the spool: others are copied to the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from memq.broker.broker import Broker
from memq.broker.spool import SpoolDisk
from memq.broker.spool.files import SpoolFiles, sizes_in
from memq.errors import SpoolError
from memq.format.spool import decode_segment
from memq.limits import MIB
from memq.protocol.frames import AckLevel, Api
from memq.storage_handlers import Buffer
from memq.topic import Topic
from tests.brokers import BareClient, block_of, until, write_frame
from tests.component.cluster_rig import Rig, rig
from tests.component.faulty_brokers import ON_DISK, pointers

ROUNDS = 24  # a MiB each: more than the spool may hold, which is 16 MiB in segments of one
WORD = bytes(250_000)


class ReadableDisk(SpoolFiles):
    """A disk that can't read, or read back what it wrote, as long as `fails` says so."""

    reads = True
    bits_flipped = False
    last_bit_flipped = False  # of a block, whose header stays sound

    async def read(self, name: str) -> bytes:
        if not self.reads:
            raise SpoolError("the disk can't read")
        data = bytearray(await super().read(name))
        if self.bits_flipped:
            data[1::50] = bytes(len(data[1::50]))
        if self.last_bit_flipped:
            data[decode_segment(bytes(data)).entries[0].end - 1] ^= 1
        return bytes(data)


def stuck(cluster: Rig) -> asyncio.Event:
    """Let all puts of the topic "stuck" wait for a gate."""
    gate = asyncio.Event()
    put = cluster.store.put

    async def slow(key: str, buffers: Sequence[Buffer], checksum: int) -> None:
        if "/stuck/" in key:
            await gate.wait()
        await put(key, buffers, checksum)

    cluster.store.put = slow  # type: ignore[method-assign]  # a store that takes its time
    return gate


class Sender:
    """One producer of blocks in one topic, acked with 1."""

    def __init__(self, topic: Topic, client: BareClient) -> None:
        self.topic = topic
        self.client = client
        self.sent = 0

    @classmethod
    async def of(cls, broker: Broker, name: str) -> Sender:
        topic = await broker.partitions.create(name, 1, ON_DISK, exist_ok=False)
        client = await BareClient.connect(broker)
        await client.open(topic, acks=AckLevel.ONE)
        return cls(topic, client)

    async def send(self, *values: bytes) -> None:
        self.client.write(write_frame(block_of(self.topic, self.sent, list(values))))
        self.sent += len(values)
        while True:
            frame = await self.client.frame()
            assert frame.api == Api.ACK, frame
            if frame.argument >= self.sent:
                return


async def through(cluster: Rig, broker: Broker) -> tuple[Sender, Sender]:
    """Send a small block to a partition that can't publish, and a large one next to it, many times."""
    held, passing = await Sender.of(broker, "stuck"), await Sender.of(broker, "passing")
    for number in range(ROUNDS):
        await held.send(b"%d" % number)
        await passing.send(WORD, WORD, WORD, WORD)
        ring = broker.partitions.processors[passing.topic.id, 0].ring
        await until(lambda: not len(ring))  # noqa: B023 - awaited here
        assert broker.services.spool.segments.bytes <= 8 * MIB
    return held, passing


def test_a_partition_that_cant_publish_keeps_its_own_blocks_alone(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one", spool=SpoolFiles(tmp_path))
            put, _ = cluster.store.put, stuck(cluster)
            held, passing = await through(cluster, one)
            counters = one.services.counters
            assert 0 < counters.spool_copied_bytes < ROUNDS * MIB / 100, "what is small is copied, a few times"
            await one.close()
            await held.client.close()
            await passing.client.close()
            cluster.store.put = put  # type: ignore[method-assign]  # it answers again
            again = await cluster.start("one", spool=SpoolFiles(tmp_path))
            await again.replay.wait()
            await until(lambda: not sizes_in(tmp_path) and not len(again.services.spool.segments))
            assert sum(each.records for each in await pointers(cluster, held.topic)) == ROUNDS
            assert sum(each.records for each in await pointers(cluster, passing.topic)) == 4 * ROUNDS

    asyncio.run(work())


def test_copied_spool_blocks_are_removed_when_published(tmp_path: Path) -> None:
    async def work() -> None:
        async with rig() as cluster:
            one = await cluster.start("one", spool=SpoolFiles(tmp_path))
            gate = stuck(cluster)
            held, passing = await through(cluster, one)
            gate.set()
            await one.drain()
            assert not sizes_in(tmp_path)
            assert sum(each.records for each in await pointers(cluster, held.topic)) == ROUNDS
            await held.client.close()
            await passing.client.close()

    asyncio.run(work())


def test_blocks_that_can_not_be_copied_stay_in_their_segment(tmp_path: Path) -> None:
    """The disk fails under the copy: the first one is the only one, as long as the other is not synced."""

    class FailingDisk(SpoolFiles):
        fails = False
        failed = False

        async def append(self, name: str, buffers: Sequence[Buffer]) -> None:
            if self.fails:
                self.failed = True
                raise SpoolError("the disk is full")
            await super().append(name, buffers)

    async def work() -> None:
        async with rig() as cluster:
            disk = FailingDisk(tmp_path)
            one = await cluster.start("one", spool=disk)
            gate, spool = stuck(cluster), one.services.spool
            copy_forward = spool.copy_forward

            async def failing(disk: SpoolDisk) -> bool:
                assert isinstance(disk, FailingDisk)
                disk.fails = True  # the copy's append, and no other
                try:
                    return await copy_forward(disk)
                finally:
                    disk.fails = False

            spool.copy_forward = failing  # type: ignore[method-assign]
            held, passing = await Sender.of(one, "stuck"), await Sender.of(one, "passing")
            await held.send(b"held")
            segment = next(iter(spool.segments))
            while not disk.failed:  # then blocks are refused, for a while
                passing.client.write(write_frame(block_of(passing.topic, passing.sent, [WORD, WORD])))
                passing.sent += 2
                await passing.client.frame()
            assert segment.tickets, "nothing else has its blocks"
            assert segment.name in sizes_in(tmp_path)
            spool.copy_forward = copy_forward  # type: ignore[method-assign]
            gate.set()
            await one.drain()
            assert sum(each.records for each in await pointers(cluster, held.topic)) == 1
            await held.client.close()
            await passing.client.close()

    asyncio.run(work())


def test_a_full_disk_that_takes_no_copy_does_not_hold_up_a_drain(tmp_path: Path) -> None:
    class FullDisk(SpoolFiles):
        room = True
        refused = 0

        async def append(self, name: str, buffers: Sequence[Buffer]) -> None:
            if not self.room:
                self.refused += 1
                raise SpoolError("the disk is full")
            await super().append(name, buffers)

    async def no_copy(disk: SpoolDisk) -> bool:
        return False

    async def work() -> None:
        async with rig() as cluster:
            disk = FullDisk(tmp_path)
            one = await cluster.start("one", spool=disk)
            gate, spool = stuck(cluster), one.services.spool
            copy_forward = spool.copy_forward
            spool.copy_forward = no_copy  # type: ignore[method-assign]  # until the disk is full
            held, passing = await Sender.of(one, "stuck"), await Sender.of(one, "passing")
            for number in range(8):
                await held.send(b"%d" % number)
                await passing.send(WORD, WORD, WORD, WORD)
            await until(lambda: spool.segments.to_copy() is not None)
            disk.room = False
            spool.copy_forward = copy_forward  # type: ignore[method-assign]
            async with asyncio.timeout(20):
                await spool.settle()
            assert disk.refused, "a copy was tried"
            assert set(sizes_in(tmp_path)) == {segment.name for segment in spool.segments if segment.tickets}
            gate.set()
            await one.drain()
            assert not sizes_in(tmp_path)
            assert sum(each.records for each in await pointers(cluster, held.topic)) == 8
            await held.client.close()
            await passing.client.close()

    asyncio.run(work())


@pytest.mark.parametrize("reads", [False, True], ids=["can't be read", "damaged"])
def test_a_segment_that_cant_be_copied_stays_and_nothing_is_lost(tmp_path: Path, reads: bool) -> None:
    async def work() -> None:
        async with rig() as cluster:
            disk = ReadableDisk(tmp_path)
            disk.reads, disk.bits_flipped = reads, True
            one = await cluster.start("one", spool=disk)
            gate = stuck(cluster)
            held, passing = await Sender.of(one, "stuck"), await Sender.of(one, "passing")
            for number in range(12):
                await held.send(b"%d" % number)
                await passing.send(WORD, WORD, WORD, WORD)
            await until(lambda: one.services.counters.spool_damages > 0)
            assert one.services.counters.spool_copied_bytes == 0
            gate.set()
            await one.drain()
            assert not sizes_in(tmp_path)
            assert sum(each.records for each in await pointers(cluster, held.topic)) == 12
            await held.client.close()
            await passing.client.close()

    asyncio.run(work())


def test_a_bit_that_changes_on_the_way_from_the_disk_costs_no_block(tmp_path: Path) -> None:
    """The stored segment is sound, and would be removed after the copy."""

    async def work() -> None:
        async with rig() as cluster:
            disk = ReadableDisk(tmp_path)
            disk.last_bit_flipped = True
            one = await cluster.start("one", spool=disk)
            put, _ = cluster.store.put, stuck(cluster)
            held, passing = await Sender.of(one, "stuck"), await Sender.of(one, "passing")
            for number in range(12):
                await held.send(b"%d" % number)
                await passing.send(WORD, WORD, WORD, WORD)
            await until(lambda: one.services.counters.spool_damages > 0)
            await one.close()
            await held.client.close()
            await passing.client.close()
            cluster.store.put = put  # type: ignore[method-assign]  # it answers again
            again = await cluster.start("one", spool=SpoolFiles(tmp_path))
            await again.replay.wait()
            assert sum(each.records for each in await pointers(cluster, held.topic)) == 12
            assert again.services.counters.spool_damages == 0

    asyncio.run(work())
