"""The writer of the spool alone: blocks per fsync, ends of segments, and refusals after a failure."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest

from memq.broker.ingest.slabs import Slab
from memq.broker.metrics import Counters
from memq.broker.partition.append import BlockRun, Stream
from memq.broker.partition.ownership import Ownership
from memq.broker.partition.ring import SlotState
from memq.broker.spool import writer
from memq.broker.spool.files import MemorySpool
from memq.broker.spool.writer import Spool
from memq.errors import InvalidSettingError, MemqError, SpoolError
from memq.format.blocks.header import scope_of
from memq.format.spool import ENTRY, HEAD, decode_segment
from memq.protocol.frames import AckLevel
from memq.runtime.runtime import Runtime
from memq.settings import BrokerSettings
from memq.storage_handlers import Buffer
from memq.topic import TopicSettings
from tests.brokers import log_lines
from tests.skipping_loop import LongestWait, LoopClock, run_skipping, skip
from tests.unit.blocks import build, seal

SPOOL_BYTES_MAX = 16_000  # segments of 1,000 bytes; copying begins at 4,000
MEMORY_BYTES_MAX = 8_000  # an eighth may wait


class Disk(MemorySpool):
    """Notes how many bytes each write has; it waits and fails on command."""

    def __init__(self) -> None:
        super().__init__()
        self.tried: list[str] = []
        self.writes: list[tuple[str, int]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails: set[str] = set()

    async def append(self, name: str, buffers: Sequence[Buffer]) -> None:
        self.tried.append(name)
        await self.gate.wait()
        if "append" in self.fails:
            raise SpoolError("the disk is full", hint="free space")
        self.writes.append((name, sum(map(len, buffers))))
        await super().append(name, buffers)

    async def remove(self, name: str) -> None:
        if name in self.fails:
            raise SpoolError("the disk is read-only")
        await super().remove(name)

    async def read(self, name: str) -> bytes:
        if "read" in self.fails:
            raise SpoolError("the disk can't read")
        return await super().read(name)


class Producer:
    """A stream as the spool sees it, with the batch that its blocks are in; it notes what it is answered."""

    def __init__(self, number: int, answers: list[Any]) -> None:
        self.slot: SimpleNamespace | None = SimpleNamespace(state=SlotState.SEALED, tickets=[])
        self.producer_id = number
        self.next = 0
        self.sink = SimpleNamespace(
            send_ack=lambda stream, level, next_, epoch: answers.append(("ack", number, level, next_, epoch)),
            send_throttle=lambda stream, first, error: answers.append(("throttle", number, first, str(error))),
        )


class Rig:
    """A spool on a disk in memory, on virtual time."""

    def __init__(self, chance: random.Random) -> None:
        self.disk = Disk()
        self.answers: list[Any] = []
        self.slab = Slab(4_096)
        self.counters = Counters()
        self.spool = Spool(
            self.disk,
            BrokerSettings(broker_id="one", spool_bytes_max=SPOOL_BYTES_MAX, memory_bytes_max=MEMORY_BYTES_MAX),
            Runtime(LoopClock(), chance),
            self.counters,
            self.release,
            self.died,
        )
        self.spool.start()

    def release(self, slab: Slab) -> None:
        slab.references -= 1

    def died(self, error: BaseException) -> None:
        raise AssertionError("the writer died") from error

    def producer(self, number: int) -> Producer:
        return Producer(number, self.answers)

    def take(self, producer: Producer, *sizes: int) -> None:
        """Give the spool one run of blocks of so many bytes."""
        first, producer.next = producer.next, producer.next + len(sizes)
        run = BlockRun([(self.slab, 8, 8 + size) for size in sizes], first, producer.next, sum(sizes))
        own = cast(Ownership, SimpleNamespace(partition=0, epoch=3, read_to=17))
        self.spool.take(cast(Stream, producer), run, bytes(16), own, cast(Any, producer.slot))

    def published(self, producer: Producer) -> None:
        """Let the queue hold all that the producer has sent."""
        for ticket in producer.slot.tickets if producer.slot is not None else ():
            ticket.release()

    async def written(self) -> None:
        """Return when nothing waits for the disk."""
        while self.slab.references:
            await skip(0.001)


def on_rig(work: Callable[[Rig], Awaitable[None]], chance: random.Random | None = None) -> None:
    async def main() -> None:
        made = Rig(chance or random.Random(1))
        await work(made)
        await made.spool.stop()
        assert made.slab.references == 0

    run_skipping(main())


def entry(*sizes: int) -> int:
    """Return how many bytes entries with blocks of these sizes have."""
    return sum(ENTRY.size + size for size in sizes)


def test_a_broker_without_a_disk_has_nothing_to_settle_and_takes_nothing() -> None:
    async def main() -> None:
        runtime = Runtime(LoopClock(), random.Random(1))
        spool = Spool(None, BrokerSettings(broker_id="one"), runtime, Counters(), lambda slab: None, lambda error: None)
        spool.start()
        await spool.settle()
        assert "broker 'one' has no spool" in str(spool.refusal)
        spool.check(TopicSettings(ack1="memory"))
        with pytest.raises(InvalidSettingError):
            spool.check(TopicSettings(ack1="disk"))
        await spool.stop()

    run_skipping(main())


def test_one_write_takes_what_waits_up_to_its_bound_and_one_run_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(rig: Rig) -> None:
        monkeypatch.setattr(writer, "GROUP_BYTES_MAX", 100)
        one = rig.producer(1)
        for sizes in ((60, 40), (1,), (99,), (101,), (50,), (51,)):
            rig.take(one, *sizes)
        await rig.written()
        lengths = [length for _, length in rig.disk.writes]
        assert lengths == [
            HEAD.size + entry(60, 40),
            entry(1, 99),
            entry(101),
            entry(50),
            entry(51),
        ]
        acks = [("ack", 1, AckLevel.ONE, next_, 3) for next_ in (2, 4, 5, 6, 7)]
        assert rig.answers == acks
        counters = rig.counters
        assert (counters.spool_syncs, counters.spooled_blocks) == (5, 7)
        assert counters.spooled_bytes == sum(lengths) == rig.spool.segments.bytes

    on_rig(work)


def test_one_write_acks_each_stream_once_up_to_its_last_block() -> None:
    async def work(rig: Rig) -> None:
        one, two = rig.producer(1), rig.producer(2)
        for producer in (one, two, one):
            rig.take(producer, 10)
        await rig.written()
        assert sorted(rig.answers) == [("ack", 1, AckLevel.ONE, 2, 3), ("ack", 2, AckLevel.ONE, 1, 3)]

    on_rig(work)


def test_blocks_published_before_their_turn_are_acked_without_a_write() -> None:
    async def work(rig: Rig) -> None:
        published, copy, unknown = rig.producer(1), rig.producer(2), rig.producer(3)
        assert published.slot is not None
        assert copy.slot is not None
        published.slot.state = SlotState.PUBLISHED
        unknown.slot = None
        for producer in (published, copy, unknown):
            rig.take(producer, 10)
        await rig.written()
        assert [length for _, length in rig.disk.writes] == [HEAD.size + entry(10)]
        assert {answer[1] for answer in rig.answers} == {1, 2, 3}
        assert (len(copy.slot.tickets), len(published.slot.tickets)) == (1, 0)

    on_rig(work)


def test_a_segment_ends_when_it_is_full_or_after_a_second_without_a_block() -> None:
    async def work(rig: Rig) -> None:
        one = rig.producer(1)
        for pause_s in (0.9, 0.9, 1.1, 0.0):
            rig.take(one, 10)
            await rig.written()
            await skip(pause_s)
        rig.take(one, 1_000)  # it fills the second segment
        await rig.written()
        rig.take(one, 10)
        await rig.written()
        names = list(dict.fromkeys(name for name, _ in rig.disk.writes))
        assert [[name for name, _ in rig.disk.writes].count(name) for name in names] == [3, 2, 1]
        rig.published(one)
        await skip(2)
        assert (rig.disk.segments, len(rig.spool.segments)) == ({}, 0)

    on_rig(work)


def test_blocks_are_refused_while_too_much_waits_or_lies_on_the_disk() -> None:
    async def work(rig: Rig) -> None:
        one = rig.producer(1)
        rig.disk.gate.clear()
        rig.take(one, 999)
        assert rig.spool.refusal is None
        rig.take(one, 1)
        assert "1000 bytes wait for the disk of broker 'one'" in str(rig.spool.refusal)
        rig.disk.gate.set()
        await rig.written()
        assert rig.spool.refusal is None
        while rig.spool.segments.bytes + 900 < SPOOL_BYTES_MAX:
            rig.take(one, 800)
            await rig.written()
        rest = SPOOL_BYTES_MAX - rig.spool.segments.bytes
        rig.disk.gate.clear()
        rig.take(one, rest - 1)
        assert rig.spool.refusal is None
        rig.take(one, 1)
        assert "16000 are allowed" in str(rig.spool.refusal)
        rig.disk.gate.set()
        rig.published(one)
        await rig.spool.settle()
        assert rig.spool.refusal is None
        assert (rig.disk.segments, rig.spool.segments.bytes) == ({}, 0)

    on_rig(work)


def test_a_failure_holds_back_each_stream_from_its_first_block_on_and_passes() -> None:
    async def work(rig: Rig) -> None:
        one, two = rig.producer(1), rig.producer(2)
        rig.disk.gate.clear()
        rig.disk.fails.add("append")
        rig.take(one, 10, 10)
        await skip(0)
        for producer in (two, one, two):  # behind what is being written
            rig.take(producer, 10)
        rig.disk.gate.set()
        await skip(0)
        assert rig.answers == [("throttle", 1, 0, "the disk is full"), ("throttle", 2, 0, "the disk is full")]
        assert rig.counters.spool_refused_blocks == 5
        assert isinstance(rig.spool.refusal, SpoolError)
        await skip(writer.RETRY_S_BASE * 2)
        assert cast(MemqError | None, rig.spool.refusal) is None, "a first failure passes within a second"
        assert rig.slab.references == 0
        rig.disk.fails.clear()
        rig.take(one, 10)
        await rig.written()
        assert rig.answers[2:] == [("ack", 1, AckLevel.ONE, 4, 3)]
        failed, next_ = rig.disk.tried
        assert failed != next_, "the end of a segment that failed is unknown: it gets no more"
        assert list(rig.disk.segments) == [next_]
        rig.disk.gate.clear()
        rig.take(one, 999)
        assert rig.spool.refusal is None, "what was refused waits no more"

    on_rig(work)


async def sparse(rig: Rig, held: Producer, passing: Producer, segments: int, blocks: int = 1) -> None:
    """Write segments of which a few small blocks are wanted each, and the rest is in the queue."""
    scope = scope_of(bytes(16), 0)
    for number in range(segments):
        block = seal(build([(b"v", None, (), None, None)]), producer_id=1, first_sequence=number, scope=scope).data
        rig.slab.view[8 : 8 + len(block)] = block
        rig.take(held, *[len(block)] * blocks)
        rig.take(passing, 900)
        await rig.written()
        rig.published(passing)
        await skip(2)


def held_blocks(rig: Rig) -> list[int]:
    """Return the sequences of the blocks that can be read on the disk."""
    contents = [decode_segment(bytes(data)).entries for data in rig.disk.segments.values()]
    return [entry.header.first_sequence for entries in contents for entry in entries if entry.header.producer_id == 1]


def test_needed_blocks_of_sparse_segments_are_copied_and_the_segments_removed() -> None:
    async def work(rig: Rig) -> None:
        held, passing = rig.producer(1), rig.producer(2)
        await sparse(rig, held, passing, 30)  # copies are copied again, too
        assert sorted(held_blocks(rig)) == list(range(30))
        assert rig.counters.spool_copied_bytes > 0
        assert rig.counters.spool_damages == 0
        assert rig.spool.segments.bytes == sum(map(len, rig.disk.segments.values()))
        assert rig.spool.segments.bytes < SPOOL_BYTES_MAX // 2
        rig.published(held)
        await rig.spool.settle()
        assert (rig.disk.segments, len(rig.spool.segments)) == ({}, 0)

    on_rig(work)


def test_a_copy_gives_way_to_others_after_every_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "SLICE_ENTRIES", 2)

    async def work(rig: Rig) -> None:
        turns: list[int] = []
        copies: list[int] = []
        read, append = rig.disk.read, rig.disk.append
        following: list[asyncio.Handle] = []

        def turn() -> None:
            turns.append(1)
            following[:] = [asyncio.get_running_loop().call_soon(turn)]

        async def noted_read(name: str) -> bytes:
            turns.clear()
            following[:] = [asyncio.get_running_loop().call_soon(turn)]
            return await read(name)

        async def noted_append(name: str, buffers: Sequence[Buffer]) -> None:
            if following:
                following.pop().cancel()
                copies.append(len(turns))
            await append(name, buffers)

        rig.disk.read, rig.disk.append = noted_read, noted_append  # type: ignore[method-assign]
        await sparse(rig, rig.producer(1), rig.producer(2), 12, blocks=5)
        assert set(copies) == {2}

    on_rig(work)


def test_segment_that_can_not_be_copied_stays_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    async def work(rig: Rig) -> None:
        held, passing = rig.producer(1), rig.producer(2)
        rig.disk.fails.add("read")
        await sparse(rig, held, passing, 6)
        assert held_blocks(rig) == list(range(6))
        assert rig.counters.spool_copied_bytes == 0
        assert rig.counters.spool_damages == 6, "each was tried once"
        rig.published(held)
        await rig.spool.settle()
        assert (rig.disk.segments, len(rig.spool.segments)) == ({}, 0)

    on_rig(work)
    assert all("stays until its blocks are queued: the disk can't read" in line for line in log_lines(caplog))


def test_a_segment_that_cant_be_removed_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    async def work(rig: Rig) -> None:
        one = rig.producer(1)
        rig.take(one, 10)
        await rig.written()
        await skip(3)
        rig.take(one, 10)
        await rig.written()
        first = rig.disk.tried[0]
        rig.disk.fails.add(first)
        rig.published(one)
        await skip(3)
        assert list(rig.disk.segments) == [first], "the other one goes"
        assert len(rig.spool.segments) == 1
        rig.disk.fails.clear()
        rig.spool.freed()
        await rig.spool.settle()
        assert len(rig.disk.segments) == len(rig.spool.segments) == 0

    on_rig(work)
    assert "spool-failed: the disk is read-only" in [record.getMessage() for record in caplog.records]


def test_a_disk_that_fails_again_and_again_is_tried_more_and_more_rarely_until_it_works() -> None:
    async def work(rig: Rig) -> None:
        one, clock = rig.producer(1), LoopClock()
        times: list[float] = []
        rig.disk.fails.add("append")
        for number in range(8):
            if number == 5:
                rig.disk.fails.clear()
            rig.take(one, 10)
            while len(rig.answers) == number:
                await skip(0.01)
            times.append(round(clock.monotonic(), 1))
            if number == 5:
                rig.disk.fails.add("append")
        assert [later - earlier for earlier, later in pairwise(times)] == pytest.approx([1, 2, 4, 5, 5, 0, 1], abs=0.11)
        rig.disk.fails.clear()
        await rig.written()

    on_rig(work, LongestWait())


def test_segment_for_the_operator_is_set_aside_and_not_removed(caplog: pytest.LogCaptureFixture) -> None:
    async def work(rig: Rig) -> None:
        await rig.disk.append("old", [b"damaged"])
        rig.spool.segments.find("old", 0, 7).kept = True
        rig.spool.freed()
        await rig.spool.settle()
        assert (rig.disk.segments, list(rig.disk.aside), len(rig.spool.segments)) == ({}, ["old"], 0)

    on_rig(work)
    assert log_lines(caplog) == ["spool-aside: segment old holds what could not be brought to the queue"]


def test_unwritten_blocks_of_a_stopped_spool_are_released_without_ack() -> None:
    async def work(rig: Rig) -> None:
        one = rig.producer(1)
        rig.disk.gate.clear()
        for _ in range(3):
            rig.take(one, 10)
            await skip(0)
        await rig.spool.stop()
        assert (rig.slab.references, rig.answers) == (0, [])

    on_rig(work)
