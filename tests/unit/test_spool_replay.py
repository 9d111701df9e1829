"""The replay of a spool alone: blocks handed to the forwarder, and blocks kept for the operator."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from memq.broker.ingest.slabs import SlabPool
from memq.broker.spool.files import MemorySpool
from memq.broker.spool.forwarding import Forwarder
from memq.broker.spool.replay import READ_TRIES, WORKS_MAX, Replay
from memq.broker.spool.segments import Segment
from memq.broker.spool.unpublished_blocks import UnpublishedBlocks
from memq.errors import NotFoundError, QueueError, SpoolError
from memq.format.blocks.header import parse_header
from memq.format.spool import encode_entry, encode_head
from memq.limits import FORWARD_S_MAX
from memq.notification import Publication, Span
from memq.topic import CLOCK_ERROR_MS, ReadPartition, Topic, read_partitions
from tests.brokers import events_of
from tests.partition_owners import Opening
from tests.skipping_loop import run_skipping, skip
from tests.unit.sealed_batches import TOPIC, block

SLAB_BYTES = 2_000
STALE_S = TOPIC.settings.stale_publish_ms / 1000
TAKEN_MS = 1_760_000_000_000  # when the blocks were acked
SEED = 7


class Disk(MemorySpool):
    """Fails to read so many times; `short` reads that many bytes too few; the next reads zero the bytes in `wrong`."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = self.reads = self.short = 0
        self.wrong: list[slice] = []

    async def read(self, name: str) -> bytes:
        self.reads += 1
        if self.failures:
            self.failures -= 1
            raise SpoolError("the disk can't read")
        data = bytearray(await super().read(name))
        if self.wrong:
            wrong = self.wrong.pop(0)
            data[wrong] = bytes(len(data[wrong]))
        return bytes(data[: len(data) - self.short])


class Taker:
    """A forwarder that only takes: `works` says how much it still does."""

    def __init__(self) -> None:
        self.works = 0
        self.changed = asyncio.Event()
        self.taken: list[UnpublishedBlocks] = []
        self.taken_s: list[float] = []
        self.gone: set[str] = set()
        self.kept: list[tuple[str, int, int, int, int]] = []

    def keep(self, *place_and_range: int | str) -> None:
        self.kept.append(cast(tuple[str, int, int, int, int], place_and_range))

    def take(self, held: UnpublishedBlocks) -> None:
        self.taken.append(held)
        self.taken_s.append(asyncio.get_running_loop().time())

    async def deleted(self, topic_id: str) -> bool:
        return topic_id in self.gone

    def views(self) -> list[tuple[int, list[bytes]]]:
        """Return what was taken: each partition with its blocks."""
        return [(held.partition, [bytes(each.view) for each in held.blocks]) for held in self.taken]

    def settle(self) -> None:
        """End all work: every block is in the queue."""
        self.works = 0
        for held in self.taken:
            for each in list(held.blocks):
                held.release(each)
            held.release_tickets()
        self.changed.set()


class Bench:
    """A replay of one spool, and a queue whose log of each partition has `published` entries."""

    def __init__(self, topics: Sequence[Topic] = (TOPIC,), budget_bytes: int = 10 * SLAB_BYTES) -> None:
        opening = Opening()
        self.pool = SlabPool(budget_bytes, SLAB_BYTES)
        self.services = replace(opening.services, pool=self.pool)
        self.queue, self.counters = opening.queue, self.services.counters
        self.disk, self.forwarder = Disk(), Taker()
        self.replay = Replay(self.services, cast(Forwarder, self.forwarder), lambda: list(topics))
        self.clock = opening.clock

    async def logs(self, entries: int = 10) -> None:
        """Make the logs of the topic."""
        for partition in read_partitions(TOPIC):
            await self.queue.create([partition], 30_000)
            for _ in range(entries):
                await self.queue.publish(Publication(partition, 0, 1, self.clock.wall_ms(), b"x"))

    def write(self, name: str, *entries: tuple[int, int, bytes], topic: Topic = TOPIC, at_ms: int = TAKEN_MS) -> None:
        """Put a segment on the disk: partition, place in the queue, and bytes of each block, taken 1 ms apart."""
        data = self.disk.segments[name] = bytearray(encode_head(SEED, at_ms))
        for number, (partition, offset, block_) in enumerate(entries):
            taken_ms, topic_id = at_ms + number, bytes.fromhex(topic.id)
            data += encode_entry(SEED, topic_id, partition, offset, taken_ms, len(block_)) + block_

    async def run(self) -> None:
        """Find the segments and bring them."""
        await self.replay.find(self.disk)
        await self.replay.run(self.disk)

    def at_work(self) -> bool:
        return self.replay.at_work

    def unwanted(self) -> list[Segment]:
        """Return the segments that nothing keeps."""
        return self.services.spool.segments.unwanted()


def blocks_of(count: int, value: bytes = b"v", partition: int = 0) -> list[bytes]:
    return [block(number, [value], partition=partition) for number in range(count)]


def test_each_partition_gets_its_blocks_once_and_the_segment_stays_until_they_are_in_the_queue() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.logs()
        zero, one = blocks_of(3), blocks_of(2, partition=1)
        bench.write("a", (0, 4, zero[0]), (1, 2, one[0]), (0, 3, zero[1]), (1, 5, one[1]))
        bench.write("b", (0, 6, zero[2]))
        bench.forwarder.works = 1
        assert not bench.at_work()
        running = asyncio.create_task(bench.run())
        await skip(STALE_S + 1)
        assert bench.forwarder.views() == [(0, zero[:2]), (1, one), (0, zero[2:])]
        assert bench.counters.replayed_blocks == 5
        assert all(held.tickets for held in bench.forwarder.taken)
        assert not bench.unwanted()
        assert bench.at_work()
        assert not running.done()
        bench.forwarder.settle()
        await running
        await bench.replay.wait()
        assert not bench.at_work()
        assert [segment.name for segment in bench.unwanted()] == ["a", "b"]
        assert bench.pool.leased_bytes == 0, "memory was not given back"

    run_skipping(work())


def test_no_block_is_handed_over_before_the_last_publish_of_the_earlier_run_is_too_old() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.logs()
        bench.write("a", (0, 0, blocks_of(1)[0]))
        await bench.run()
        assert bench.forwarder.taken_s == [pytest.approx(STALE_S)]

    run_skipping(work())


@pytest.mark.parametrize(("offsets", "early", "expected"), [((7, 5), False, 5), ((5, 7), False, 5), ((7, 5), True, 4)])
def test_the_queue_is_read_from_the_place_of_the_oldest_block_or_from_its_time(
    offsets: tuple[int, int], early: bool, expected: int
) -> None:
    """Whichever comes first: an earlier publish of the block may lie as far back as it may be late."""

    async def work() -> None:
        bench = Bench()
        now_ms, sought = bench.clock.wall_ms(), list[int]()

        async def seek_time(partition: ReadPartition, time_ms: int) -> int:
            sought.append(time_ms)
            return 4 if early else 9

        bench.queue.seek_time = seek_time  # type: ignore[method-assign]
        await bench.logs()
        first, second = blocks_of(2)
        bench.write("a", (0, offsets[0], first), (0, offsets[1], second), at_ms=now_ms)
        await bench.run()
        assert [held.read_to for held in bench.forwarder.taken] == [expected]
        assert sought == [now_ms - TOPIC.settings.stale_publish_ms - CLOCK_ERROR_MS]

    run_skipping(work())


def test_a_segment_larger_than_a_slab_goes_in_pieces_of_one() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.logs()
        blocks = blocks_of(40)
        bench.write("a", *((0, 5, each) for each in blocks))
        await bench.run()
        assert [each for _, views in bench.forwarder.views() for each in views] == blocks
        total = len(bench.disk.segments["a"])
        assert len(bench.forwarder.taken) == -(-total // SLAB_BYTES), "pieces that are far smaller or larger"
        assert bench.pool.leased_bytes == len(bench.forwarder.taken) * SLAB_BYTES

    run_skipping(work())


def test_while_blocks_are_brought_half_of_the_memory_is_left_and_without_any_all_of_it_is_used() -> None:
    async def work() -> None:
        bench = Bench(budget_bytes=4 * SLAB_BYTES)
        await bench.logs()
        others = [bench.pool.lease(SLAB_BYTES) for _ in range(3)]
        bench.forwarder.works = 1
        bench.write("a", (0, 5, blocks_of(1)[0]))
        running = asyncio.create_task(bench.run())
        await skip(STALE_S + 60)
        assert not bench.forwarder.taken
        bench.forwarder.works = 0
        await skip(1)
        assert len(bench.forwarder.taken) == 1
        assert bench.pool.leased_bytes == 4 * SLAB_BYTES
        await running
        assert all(others)

    run_skipping(work())


def test_at_most_so_many_partitions_are_at_work_at_once() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.logs()
        bench.forwarder.works = WORKS_MAX
        bench.write("a", (0, 5, blocks_of(1)[0]))
        running = asyncio.create_task(bench.run())
        await skip(STALE_S + 60)
        assert not bench.forwarder.taken
        bench.forwarder.works = WORKS_MAX - 1
        await skip(1)
        assert len(bench.forwarder.taken) == 1
        bench.forwarder.settle()
        await running

    run_skipping(work())


def test_blocks_older_than_the_queue_s_begin_are_kept_for_the_operator_and_the_others_are_brought(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.logs()

        async def span(partition: ReadPartition) -> Span:
            return Span(5, 10)

        bench.queue.span = span  # type: ignore[method-assign]
        old, first = blocks_of(2)
        bench.write("a", (0, 4, old), (0, 5, first))
        bench.write("b", (0, 1, old))
        await bench.run()
        assert bench.forwarder.views() == [(0, [first])]
        assert bench.forwarder.taken[0].read_to == 5
        assert bench.counters.spool_undecided_blocks == 2
        bench.forwarder.settle()
        assert [(segment.name, segment.kept) for segment in bench.unwanted()] == [("a", True), ("b", True)]
        assert events_of(caplog) == ["spool-undecided"] * 2
        assert "begins at 5, they were taken at 4" in caplog.text

    run_skipping(work())


@pytest.mark.parametrize("deleted", [True, False])
def test_blocks_of_a_deleted_topic_are_let_go_and_those_of_an_unknown_one_are_kept(
    caplog: pytest.LogCaptureFixture, deleted: bool
) -> None:
    async def work() -> None:
        bench = Bench(topics=())
        if deleted:
            bench.forwarder.gone.add(TOPIC.id)
        bench.write("a", *((0, 1, each) for each in blocks_of(2)))
        await bench.run()
        assert not bench.forwarder.taken
        assert bench.pool.leased_bytes == 0
        assert len(bench.unwanted()) == deleted
        assert (bench.counters.spool_undecided_blocks, bench.counters.spool_kept_blocks) == (
            (0, 0) if deleted else (2, 2)
        )
        assert events_of(caplog) == ["forward-gone" if deleted else "spool-undecided"]
        assert [kept[3:] for kept in bench.forwarder.kept] == ([] if deleted else [(0, 1), (1, 2)])

    run_skipping(work())


def test_a_partition_that_the_topic_does_not_have_is_none_of_it() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.logs()
        bench.write("a", (len(TOPIC.partitions), 1, blocks_of(1, partition=len(TOPIC.partitions))[0]))
        await bench.run()
        assert not bench.forwarder.taken
        assert bench.counters.spool_undecided_blocks == 1

    run_skipping(work())


@pytest.mark.parametrize("call", ["span", "seek_time"])
def test_a_log_that_is_not_found_is_asked_again_until_the_topic_is_deleted(
    caplog: pytest.LogCaptureFixture, call: str
) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.logs()
        asked_s = list[float]()

        async def fail(*arguments: Any) -> Any:
            asked_s.append(bench.clock.monotonic())
            raise NotFoundError("no such log") if len(asked_s) % 2 else QueueError("no answer")

        setattr(bench.queue, call, fail)
        bench.write("a", (0, 1, blocks_of(1)[0]))
        running = asyncio.create_task(bench.run())
        await skip(STALE_S + 7.5)
        assert asked_s == [pytest.approx(STALE_S + at) for at in range(8)]
        assert not bench.unwanted()
        bench.forwarder.gone.add(TOPIC.id)
        await running
        assert not bench.forwarder.taken
        assert [segment.kept for segment in bench.unwanted()] == [False]
        assert set(events_of(caplog)) == {"spool-retry", "forward-gone"}

    run_skipping(work())


def test_a_search_that_ends_by_an_unexpected_error_keeps_its_segment() -> None:
    """Its blocks are nowhere else."""

    async def work() -> None:
        bench = Bench()
        await bench.logs()
        bench.write("a", (0, 4, blocks_of(1)[0]), (1, 2, blocks_of(1, partition=1)[0]))
        span = bench.queue.span

        async def one_fails(partition: ReadPartition) -> Span:
            return {1: await span(partition)}[partition.partition]

        bench.queue.span = one_fails  # type: ignore[method-assign]
        with pytest.raises(KeyError):
            await bench.run()
        bench.forwarder.settle()
        assert bench.unwanted() == []

    run_skipping(work())


@pytest.mark.parametrize("hangs", [False, True])
def test_a_log_that_fails_or_hangs_delays_its_own_blocks_alone_and_they_stay_on_disk(
    hangs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.logs()
        sick, sound = blocks_of(1), blocks_of(1, partition=1)
        bench.write("a", (0, 4, sick[0]), (1, 2, sound[0]))
        span = bench.queue.span

        async def first_fails(partition: ReadPartition) -> Span:
            if partition.partition == 0 and hangs:
                await asyncio.get_running_loop().create_future()
            if partition.partition == 0:
                raise QueueError("this log fails")
            return await span(partition)

        bench.queue.span = first_fails  # type: ignore[method-assign]  # of one partition
        replay = asyncio.create_task(bench.run())
        await skip(STALE_S + 1)
        assert bench.forwarder.views() == [(1, sound)]
        bench.forwarder.settle()
        await skip(FORWARD_S_MAX - 10)
        assert bench.at_work()
        assert not bench.forwarder.kept
        await skip(50)
        await replay
        assert [each[:2] for each in bench.forwarder.kept] == [(TOPIC.id, 0)]
        assert bench.unwanted() == []
        assert bench.pool.leased_bytes == 0

    run_skipping(work())
    assert "spool-undecided" in events_of(caplog)


@pytest.mark.parametrize("failures", [READ_TRIES - 1, READ_TRIES])
def test_a_segment_that_can_not_be_read_is_tried_five_times_and_left_to_the_next_start(
    caplog: pytest.LogCaptureFixture, failures: int
) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.logs()
        bench.disk.failures = failures
        bench.write("a", (0, 1, blocks_of(1)[0]))
        bench.write("b", (0, 1, blocks_of(2)[1]))
        await bench.run()
        read = failures < READ_TRIES
        assert len(bench.forwarder.taken) == 1 + read, "the other segment is read in any case"
        assert bench.counters.spool_damages == (not read)
        bench.forwarder.settle()
        assert [segment.name for segment in bench.unwanted()] == (["a", "b"] if read else ["b"])
        retries = Counter(events_of(caplog))
        assert retries["spool-damaged"] == (not read)

    run_skipping(work())


def test_a_segment_that_is_read_short_is_no_end_that_was_being_written() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.logs()
        bench.disk.short = 1
        bench.write("a", (0, 1, blocks_of(1)[0]))
        await bench.run()
        assert (bench.disk.reads, bench.counters.spool_damages) == (READ_TRIES, 1)
        assert not bench.unwanted()

    run_skipping(work())


@pytest.mark.parametrize(
    "wrong",
    [[slice(0, 4)], [slice(-1, None)], [slice(40, 50), slice(-20, -9)], [slice(-1, None), slice(None)], [slice(None)]],
    ids=["head", "last block", "header, then last block", "last block, then all", "all, as after a crash"],
)
def test_a_segment_that_is_damaged_on_the_way_from_the_disk_is_read_again(
    wrong: list[slice], caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.logs()
        first, second = blocks_of(2)
        bench.write("a", (0, 1, first), (0, 2, second))
        bench.disk.wrong = list(wrong)
        await bench.run()
        assert bench.forwarder.views() == [(0, [first, second])]
        assert (bench.counters.spool_damages, bench.disk.reads) == (0, len(wrong) + 1)
        bench.forwarder.settle()
        assert [(segment.name, segment.kept) for segment in bench.unwanted()] == [("a", False)]
        assert events_of(caplog) == ["spool-retry"] * len(wrong)

    run_skipping(work())


def test_reads_that_never_agree_on_a_segment_leave_it_to_the_next_start(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.logs()
        bench.write("a", (0, 1, blocks_of(1)[0]))
        bench.disk.wrong = [slice(number, number + 1) for number in range(READ_TRIES)]
        await bench.run()
        assert (bench.forwarder.taken, bench.disk.reads, bench.counters.spool_damages) == ([], READ_TRIES, 1)
        assert not bench.unwanted()
        assert "no two reads" in caplog.text

    run_skipping(work())


def test_a_damaged_block_costs_itself_alone_and_its_segment_is_set_aside(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.logs()
        first, second = blocks_of(2)
        bench.write("a", (0, 1, first), (0, 2, second))
        bench.disk.segments["a"][-1] ^= 1
        bench.write("b", (0, 1, first))
        bench.disk.segments["b"][0] ^= 1
        await bench.run()
        assert bench.forwarder.views() == [(0, [first])]
        assert bench.counters.spool_damages == 2
        bench.forwarder.settle()
        assert [(segment.name, segment.kept) for segment in bench.unwanted()] == [("a", True), ("b", True)]
        assert events_of(caplog) == ["spool-retry", "spool-damaged"] * 2

    run_skipping(work())


def test_a_spool_without_segments_is_replayed_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        bench = Bench()
        bench.forwarder.works = 1  # of a lost epoch of this run: the replay does not wait for it
        await bench.run()
        await bench.replay.wait()
        assert not bench.at_work()

    with caplog.at_level("INFO", "memq"):
        run_skipping(work())
    assert events_of(caplog) == [], "nothing was replayed"


def test_the_end_of_a_replay_is_logged_with_what_stays(caplog: pytest.LogCaptureFixture) -> None:
    async def work(failures: int) -> None:
        bench = Bench()
        await bench.logs()
        bench.write("a", (0, 1, blocks_of(1)[0]))
        bench.write("b", (0, 2, blocks_of(2)[1]))
        bench.disk.failures = failures
        bench.forwarder.works = 1
        running = asyncio.create_task(bench.run())
        await skip(STALE_S + 60)
        bench.forwarder.settle()
        await running

    for failures, text in ((0, ""), (READ_TRIES, "; 1 stay, as the log says")):
        caplog.clear()
        with caplog.at_level("INFO", "memq"):
            run_skipping(work(failures))
        ends = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "spool-replayed"]
        assert ends == [f"spool-replayed: 2 segments of an earlier run{text}"]


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (slice(-1, None), "bytes 24 to 169: "),
        (slice(None), "the last 169 bytes are no entry, "),
    ],
)
def test_a_read_that_is_not_sound_is_logged_with_its_first_damage_or_its_end(
    wrong: slice, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        bench = Bench()
        await bench.logs()
        bench.write("a", (0, 1, blocks_of(1)[0]))
        bench.disk.wrong = [wrong]
        await bench.run()

    run_skipping(work())
    (line,) = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "spool-retry"]
    assert line.startswith(f"spool-retry: segment a: {text}")
    assert line.endswith(", and no two reads of it were the same; it is read again")
    assert line.count("bytes") == 1


# ---- what is asked of it -------------------------------------------------------------------------


def test_spooled_blocks_are_held_until_the_forwarder_has_them() -> None:
    async def work() -> None:
        bench = Bench()
        await bench.logs()
        zero, one = blocks_of(3), blocks_of(1, partition=1)
        bench.write("a", (0, 4, zero[0]), (1, 2, one[0]), (0, 3, zero[1]))
        bench.write("b", (0, 6, zero[2]))
        await bench.replay.find(bench.disk)
        bench.services.spool.disk = bench.disk
        assert list(bench.replay.held_records(TOPIC.id)) == [], "not read yet"
        for _ in range(2):
            assert await bench.replay.index_segments() == ()
        assert bench.disk.reads == 2
        producer = parse_header(zero[0]).producer_id
        held = [(0, producer, 0, 2), (1, producer, 0, 1), (0, producer, 2, 3)]
        assert [(*source, *piece) for source, piece in bench.replay.held_records(TOPIC.id)] == held
        assert list(bench.replay.held_records("f" * 32)) == []
        bench.forwarder.works = 1
        running = asyncio.create_task(bench.replay.run(bench.disk))
        await skip(STALE_S + 1)
        assert list(bench.replay.held_records(TOPIC.id)) == [], "the forwarder has all of it"
        bench.forwarder.settle()
        await running

    run_skipping(work())


def test_a_segment_that_can_not_be_read_now_is_named_and_asked_again() -> None:
    async def work() -> None:
        bench = Bench()
        bench.write("a", (0, 4, blocks_of(1)[0]))
        bench.write("b", (0, 5, blocks_of(2)[1]))
        await bench.replay.find(bench.disk)
        bench.services.spool.disk = bench.disk
        bench.disk.failures = 1
        assert await bench.replay.index_segments() == ("segment a of its spool can't be read: the disk can't read",)
        assert [piece for _, piece in bench.replay.held_records(TOPIC.id)] == [(1, 2)]
        assert await bench.replay.index_segments() == ()
        assert [piece for _, piece in bench.replay.held_records(TOPIC.id)] == [(0, 1), (1, 2)]

    run_skipping(work())
