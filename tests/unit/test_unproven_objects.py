"""Objects after the last batch of their epoch: kept if the log does not have their records, swept if it has them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import pytest

from memq.broker.sweep.sweep import UNNAMED, UNPROVEN, Sweep, Unnamed
from memq.errors import QueueError
from memq.format.blocks.header import parse_header
from memq.format.key import object_key
from memq.format.object import INDEX_MAGIC, BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.format.pointer import Location, Pointer, ProducerEnd, ProducerRanges, encode_pointer
from memq.format.ranges import Range
from memq.notification import Publication, Span
from memq.storage_handlers import confirmed_reads
from memq.topic import ReadPartition, read_partitions
from tests.brokers import block_of, run
from tests.unit.bare_cluster import CLUSTER, Cluster, newer, topic_of

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
ONE, OTHER = 7, 8  # producers


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read damaged objects again at once."""
    monkeypatch.setattr(confirmed_reads, "PAUSE_S", 0.0)


class CutLog(Cluster):
    """The log of a partition that ends epoch 1 with batch 0, and an object of a later batch of epoch 1."""

    def __init__(self) -> None:
        super().__init__()
        self.clicks = topic_of("clicks")
        self.log = read_partitions(self.clicks)[0]
        self.notes: list[str] = []

    async def begin(self) -> None:
        await self.topic(self.clicks, epoch=2)
        await self.publish(kind="opened")
        await self.data(1, 0, {ONE: [(0, 10)]})
        await self.publish(kind="opened", epoch=2)

    async def publish(self, **fields: object) -> None:
        whole = {"epoch": 1, "cluster": CLUSTER, "topic": "clicks", "topic_id": self.clicks.id, "partition": 0} | fields
        pointer = Pointer(**whole)  # type: ignore[arg-type]
        await self.queue.publish(Publication(self.log, 0, pointer.epoch, self.clock.wall_ms(), encode_pointer(pointer)))

    async def data(self, epoch: int, number: int, ranges: dict[int, Sequence[Range]], **fields: object) -> None:
        """Publish a batch with these sequences."""
        place = Location(store="main", key="k", offset=0, length=1)
        whole = {"locations": (place,), "records": 1, "stored_bytes": 1} | fields
        producers = tuple(ProducerRanges(producer, tuple(each)) for producer, each in ranges.items())
        await self.publish(kind="data", epoch=epoch, batch_sequence=number, producers=producers, **whole)

    async def two_blocks(self, ranges: dict[int, Sequence[Range]], **fields: object) -> None:
        """Publish batch 0 of epoch 2 with its object: a block of `OTHER`, and one of `ONE` with 10 to 19."""
        body = self.body_of(0, {OTHER: [(0, 5)], ONE: [(10, 20)]}, epoch=2)
        key = await self.put(object_key(CLUSTER, "clicks", self.clicks.id, 0, 2, 0, 1_000), body)
        blocks = body.rindex(INDEX_MAGIC)
        place = Location(store="main", key=key, offset=0, length=blocks)
        await self.data(2, 0, ranges, locations=(place,), records=15, stored_bytes=blocks, **fields)

    async def orphan(self, number: int, blocks: dict[int, Sequence[Range]], epoch: int = 1) -> str:
        """Store an object with these blocks, which no pointer names."""
        key = object_key(CLUSTER, "clicks", self.clicks.id, 0, epoch, number, 1_000)
        return await self.put(key, self.body_of(number, blocks, epoch))

    def body_of(self, number: int, blocks: dict[int, Sequence[Range]], epoch: int = 1) -> bytes:
        body, entries = b"", list[BlockEntry]()
        for producer, ranges in blocks.items():
            for first, next_ in ranges:
                block = block_of(self.clicks, first, [b"x"] * (next_ - first), producer=producer)
                entries.append(BlockEntry.from_header(parse_header(block), len(body)))
                body += block
        meta = ObjectMeta(cluster=CLUSTER, broker="b", topics=(ObjectTopic("clicks", self.clicks.id),), created_ms=1)
        records = sum(entry.count for entry in entries)
        batch = BatchEntry(0, len(body), 1_000, number, records, 0, len(entries), 0, epoch)
        return body + encode_index(meta, [batch], entries, len(body))

    async def swept(self, *, takes_unproven: bool = False, passes: int = 2) -> list[Unnamed]:
        """Return the findings of the last of some passes, a day apart."""
        found: list[Unnamed] = []
        for _ in range(passes):
            self.clock.advance(DAY_MS)
            sweep = Sweep(CLUSTER, self.store, self.queue, self.topics, self.clock, self.notes.append, DAY_MS)
            sweep.takes_unproven = takes_unproven
            found = [each async for each in sweep.run(HOUR_MS, HOUR_MS)]
        return found


def check(work: Callable[[CutLog], Awaitable[None]], *, kept: bool) -> None:
    """Check whether two passes keep the one object that `work` leaves without a pointer."""

    async def trial() -> None:
        cluster = CutLog()
        await cluster.begin()
        await work(cluster)
        [found] = await cluster.swept()
        assert (found.kept, found.why) == ((True, UNPROVEN) if kept else (False, UNNAMED))
        assert (found.key in cluster.store.objects) is kept
        assert cluster.notes == []

    run(trial())


def test_an_object_whose_records_no_batch_has_is_kept() -> None:
    async def lost(cluster: CutLog) -> None:
        await cluster.orphan(1, {ONE: [(10, 20)]})
        await cluster.data(2, 0, {ONE: [(20, 30)], OTHER: [(10, 20)]})

    check(lost, kept=True)


def test_an_object_whose_records_were_sent_again_is_swept() -> None:
    """Its owner died before it published the batch; the next owner cut the batches elsewhere."""

    async def resent(cluster: CutLog) -> None:
        await cluster.orphan(1, {ONE: [(10, 15), (15, 20)], OTHER: [(0, 3)]})
        await cluster.data(2, 0, {OTHER: [(0, 3)]})
        await cluster.data(2, 1, {ONE: [(10, 17)]})
        await cluster.data(2, 2, {ONE: [(17, 40)]})

    check(resent, kept=False)


def test_all_batches_after_the_end_are_compared() -> None:
    async def third(cluster: CutLog) -> None:
        await cluster.orphan(3, {ONE: [(10, 20)]})

    check(third, kept=True)


def test_objects_that_can_not_be_compared_are_kept() -> None:
    async def trial() -> None:
        cluster = CutLog()
        await cluster.begin()
        key = await cluster.orphan(1, {ONE: [(10, 20)]})
        await cluster.data(2, 0, {ONE: [(10, 20)]})
        span, spans = cluster.queue.span, 0

        async def once(partition: ReadPartition) -> Span:
            nonlocal spans
            spans += 1
            if spans % 2 == 0:
                raise QueueError("not now")
            return await span(partition)

        cluster.queue.span = once  # type: ignore[method-assign]  # the log fails after the pass has read its pointers
        [found] = await cluster.swept()
        assert (found.kept, spans, key in cluster.store.objects) == (True, 4, True)
        assert cluster.notes[-1] == "topic 'clicks' partition 0: objects are not compared: not now"
        cluster.queue.span = span  # type: ignore[method-assign]
        assert [each.why for each in await cluster.swept()] == [UNNAMED]

    run(trial())


def test_an_object_without_a_readable_index_does_not_let_a_later_one_go() -> None:
    async def trial() -> None:
        cluster = CutLog()
        await cluster.begin()
        damaged = await cluster.orphan(1, {ONE: [(10, 20)]})
        cluster.store.objects[damaged] = b"x" * len(cluster.store.objects[damaged])
        lost = await cluster.orphan(2, {ONE: [(20, 30)]})
        found = {each.key: each.kept for each in await cluster.swept()}
        assert found == {damaged: False, lost: True}
        assert lost in cluster.store.objects

    run(trial())


def test_one_missing_record_keeps_the_object() -> None:
    async def nearly(cluster: CutLog) -> None:
        await cluster.orphan(1, {ONE: [(10, 15), (15, 20)]})
        await cluster.data(2, 0, {ONE: [(10, 19), (20, 30)]})

    check(nearly, kept=True)


@pytest.mark.parametrize(("burned", "stays"), [(((10, 20),), False), (((10, 19),), True)])
def test_records_that_their_producer_gave_up_keep_nothing(burned: tuple[Range, ...], stays: bool) -> None:
    """They were reported as failed, so no reader misses them."""

    async def given_up(cluster: CutLog) -> None:
        await cluster.orphan(1, {ONE: [(10, 20)]})
        end = ProducerEnd(producer=ONE, next_sequence=20, burned=burned)
        await cluster.publish(kind="ended", epoch=2, ended=(end,))

    check(given_up, kept=stays)


def test_records_of_an_epoch_without_a_batch_are_compared_too() -> None:
    async def empty_epoch(cluster: CutLog) -> None:
        await cluster.orphan(0, {ONE: [(10, 20)]}, epoch=2)

    check(empty_epoch, kept=True)


def test_a_batch_of_another_write_partition_has_not_the_records() -> None:
    """A producer numbers the records of each write partition from 0."""

    async def elsewhere(cluster: CutLog) -> None:
        await cluster.orphan(1, {ONE: [(10, 20)]})
        await cluster.data(2, 0, {ONE: [(10, 20)]}, partition=1)

    check(elsewhere, kept=True)


def test_an_object_of_a_newer_version_is_kept() -> None:
    async def of_newer(cluster: CutLog) -> None:
        key = object_key(CLUSTER, "clicks", cluster.clicks.id, 0, 1, 1, 1_000)
        await cluster.put(key, newer(cluster.body_of(1, {ONE: [(0, 10)]})))

    check(of_newer, kept=True)


@pytest.mark.parametrize(("skip", "stays"), [((), False), ((1,), True)])
def test_sequences_for_which_a_pointer_has_no_room_are_in_the_index(skip: tuple[int, ...], stays: bool) -> None:
    async def crowded(cluster: CutLog) -> None:
        await cluster.orphan(1, {ONE: [(10, 20)]})
        await cluster.two_blocks({OTHER: [(0, 5)]}, producers_complete=False, skip=skip)

    check(crowded, kept=stays)


@pytest.mark.parametrize(("skip", "stays"), [((0,), False), ((1,), True)])
def test_a_batch_has_not_the_records_of_blocks_that_its_owner_left_out(skip: tuple[int, ...], stays: bool) -> None:
    """They were copies, but the log lost the pointer of the originals before it got that of the batch."""

    async def left_out(cluster: CutLog) -> None:
        await cluster.orphan(1, {ONE: [(10, 20)]})
        await cluster.two_blocks({OTHER: [(0, 5)], ONE: [(10, 20)]}, skip=skip)

    check(left_out, kept=stays)


def test_an_operator_lets_passes_take_the_objects() -> None:
    async def trial() -> None:
        cluster = CutLog()
        await cluster.begin()
        key = await cluster.orphan(1, {ONE: [(10, 20)]})
        [found] = await cluster.swept(passes=1)
        assert (found.key, found.kept, found.new, found.goes) == (key, True, False, False)
        [found] = await cluster.swept(takes_unproven=True, passes=1)
        assert (found.new, found.goes) == (True, False), "the day begins with the operator's first pass"
        [found] = await cluster.swept(takes_unproven=True, passes=1)
        assert (found.kept, found.why, found.goes) == (False, UNPROVEN, True)
        assert key not in cluster.store.objects

    run(trial())


def test_retention_that_has_cut_the_log_after_the_epoch_ends_the_keeping() -> None:
    async def trial() -> None:
        cluster = CutLog()
        await cluster.begin()
        await cluster.orphan(1, {ONE: [(10, 20)]})
        await cluster.data(2, 0, {ONE: [(20, 30)]})
        assert (await cluster.swept())[0].kept
        await cluster.queue.trim(cluster.log, 2)
        assert [each.goes for each in await cluster.swept()] == [True]

    run(trial())
