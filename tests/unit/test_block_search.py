"""The search for blocks by their sequences: the batches that it reads, and its results."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from memq.errors import CorruptDataError, DeniedError, QueueError, StoreError
from memq.format.blocks.header import StoredBlock, parse_header
from memq.format.object import BlockEntry
from memq.format.pointer import Location, Pointer, ProducerRanges, encode_pointer
from memq.notification import Entries, Publication
from memq.notification import stored_blocks as search
from memq.notification.memory import MemoryQueue
from memq.notification.stored_blocks import STEP_OFFSETS, BlockSearch, Claim, Copies, stored_block
from memq.runtime.logs import EventLog
from memq.topic import ReadPartition
from tests.contract.manual_clock import ManualClock
from tests.unit.blocks import build, seal
from tests.unit.lying_queue import LyingQueue

TOPIC_ID = "0" * 31 + "1"
READ = ReadPartition("clicks", TOPIC_ID, 0)
Block = tuple[int, int, int]  # producer, first sequence, count


def stored(block: Block) -> StoredBlock:
    producer, first, count = block
    return StoredBlock(producer, first, first + count, 1_000 * producer + first, 5)


def index_entry(block: Block) -> BlockEntry:
    producer, first, count = block
    return BlockEntry(0, producer, first, 5, 9, 100, count, 1_000 * producer + first, 0, 0, 0)


def merged(blocks: Sequence[Block], producer: int) -> tuple[tuple[int, int], ...]:
    """Return the sequences of a producer as a pointer has them: ranges that touch are one."""
    found: list[tuple[int, int]] = []
    for first, next_ in sorted((first, first + count) for each, first, count in blocks if each == producer):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(next_, found[-1][1]))
        else:
            found.append((first, next_))
    return tuple(found)


class Log(MemoryQueue):
    """A log of batches of partition 0, and the offsets at which it was read, and the batches whose index was."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        super().__init__(self.clock)
        self.indexes: dict[str, list[BlockEntry] | Exception] = {}
        self.reads: list[int] = []
        self.opened: list[str] = []

    async def start(self) -> Log:
        await self.create([READ], 30_000)
        return self

    async def batch(self, *blocks: Block, skip: tuple[int, ...] = (), complete: bool = True, partition: int = 0) -> str:
        """Add a batch and return the key of its object."""
        key = f"batch-{len(self.indexes)}"
        self.indexes[key] = [index_entry(block) for block in blocks]
        producers = {producer for producer, _, _ in blocks}
        ranges = tuple(ProducerRanges(each, merged(blocks, each)) for each in sorted(producers))
        await self.add(
            encode_pointer(
                Pointer(
                    kind="data",
                    cluster="c",
                    topic="clicks",
                    topic_id=TOPIC_ID,
                    partition=partition,
                    epoch=1,
                    records=1,
                    locations=(Location(store="main", key=key, offset=0, length=1, index=1),),
                    producers=ranges if complete else (),
                    producers_complete=complete,
                    skip=skip,
                )
            )
        )
        return key

    async def add(self, body: bytes) -> None:
        await self.publish(Publication(READ, 0, 1, self.clock.wall_ms(), body))

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        self.reads.append(offset)
        return await super().read(partition, offset, bytes_max)

    async def index_of(self, pointer: Pointer) -> Sequence[BlockEntry]:
        key = pointer.locations[0].key
        self.opened.append(key)
        found = self.indexes[key]
        if isinstance(found, Exception):
            raise found
        return found

    async def find(self, *claims: Claim, begin: int = 0, end: int | None = None) -> dict[Claim, Copies]:
        span = await self.span(READ)
        made = BlockSearch(self, READ, 0, self.index_of, EventLog(self.clock), "clicks/0")
        return await made.find(claims, begin, span.end if end is None else end)


def test_the_blocks_that_share_a_sequence_with_a_claim_are_found() -> None:
    async def work() -> None:
        log = await Log().start()
        await log.batch((7, 0, 10), (7, 10, 5), (8, 10, 5))
        for claim, wanted in [
            ((7, 10, 15), [(7, 10, 5)]),
            ((7, 9, 11), [(7, 0, 10), (7, 10, 5)]),
            ((7, 14, 20), [(7, 10, 5)]),
            ((7, 0, 1), [(7, 0, 10)]),
        ]:
            assert (await log.find(claim))[claim] == Copies(tuple(map(stored, wanted)))
        log.opened.clear()
        for claim in ((7, 15, 20), (8, 0, 10), (8, 15, 16), (9, 10, 15)):
            assert await log.find(claim) == {}
        assert log.opened == [], "no pointer names these"

    asyncio.run(work())


def test_an_empty_read_before_the_end_finds_nothing_out() -> None:
    """It was taken for the end of the log: a block that the queue holds counted as absent."""

    async def work() -> None:
        log = await Log().start()
        await log.batch((7, 0, 10))
        await log.batch((7, 10, 5))
        lying = LyingQueue(log)
        search = BlockSearch(lying, READ, 0, log.index_of, EventLog(log.clock), "clicks/0")
        assert (await search.find([(7, 10, 15)], 0, 2))[7, 10, 15] == Copies((stored((7, 10, 5)),))
        lying.over_at = 1
        with pytest.raises(QueueError, match="shows nothing at offset 1, and its end was 2 before"):
            await search.find([(7, 10, 15)], 0, 2)

    asyncio.run(work())


def test_other_blocks_of_the_same_producer_in_the_batch_are_in_the_answer_and_change_nothing_known() -> None:
    async def work() -> None:
        log = await Log().start()
        await log.batch((7, 0, 10), (7, 10, 5), (8, 0, 5))
        await log.batch((7, 8, 7))
        assert await log.find((7, 10, 15), (7, 0, 10)) == {
            (7, 10, 15): Copies((stored((7, 10, 5)), stored((7, 8, 7)))),
            (7, 0, 10): Copies((stored((7, 0, 10)), stored((7, 8, 7)))),
            (7, 8, 15): Copies((stored((7, 8, 7)),)),
        }

    asyncio.run(work())


def test_blocks_that_readers_pass_over_do_not_count() -> None:
    async def work() -> None:
        log = await Log().start()
        await log.batch((7, 0, 5), (7, 0, 10), skip=(0,))
        assert (await log.find((7, 0, 5)))[7, 0, 5] == Copies((stored((7, 0, 10)),))

    asyncio.run(work())


def test_the_search_goes_further_back_where_what_it_found_is_not_enough() -> None:
    async def work() -> None:
        log = await Log().start()
        oldest = await log.batch((7, 0, 10))
        for number in range(STEP_OFFSETS):
            await log.batch((8, number, 1))
        nearest = await log.batch((7, 0, 5))
        span = await log.span(READ)
        search = BlockSearch(log, READ, 0, log.index_of, EventLog(log.clock), "clicks/0")
        claim = (7, 0, 5)
        near, far = stored((7, 0, 5)), stored((7, 0, 10))
        assert await search.find([claim], 0, span.end) == {claim: Copies((near,))}
        assert log.opened == [nearest]
        asked: list[Copies] = []

        def is_enough(_: Claim, copies: Copies) -> bool:
            asked.append(copies)
            return far in copies.blocks

        found = await search.find([claim], 0, span.end, is_enough)
        assert found[claim] == Copies((near, far))
        assert asked == [Copies((near,))]
        assert log.opened == [nearest, nearest, oldest]
        assert await search.find([claim], 1, span.end, lambda claim, copies: False) == {claim: Copies((near,))}

    asyncio.run(work())


def test_a_pointer_that_names_not_all_producers_may_have_each_of_them() -> None:
    async def work() -> None:
        log = await Log().start()
        key = await log.batch((7, 0, 5), complete=False)
        assert await log.find((8, 0, 5)) == {}
        assert (await log.find((7, 0, 5)))[7, 0, 5] == Copies((stored((7, 0, 5)),))
        assert log.opened == [key, key]

    asyncio.run(work())


def test_batches_behind_the_end_are_not_searched() -> None:
    async def work() -> None:
        log = await Log().start()
        for first in (0, 1, 2):
            await log.batch((7, first, 1))
        assert list(await log.find((7, 0, 3), begin=1, end=2)) == [(7, 0, 3), (7, 1, 2)]
        assert log.opened == ["batch-1"]

    asyncio.run(work())


@pytest.mark.parametrize(("end", "beyond"), [(1, True), (2, False)])
def test_a_search_says_whether_the_queue_showed_more(end: int, beyond: bool) -> None:
    async def work() -> None:
        log = await Log().start()
        await log.batch((7, 0, 5))
        await log.batch((7, 5, 5))
        search = BlockSearch(log, READ, 0, log.index_of, EventLog(log.clock), "clicks/0")
        assert (await search.find([(7, 0, 5)], 0, end))[7, 0, 5] == Copies((stored((7, 0, 5)),))
        assert search.shown_beyond is beyond

    asyncio.run(work())


def test_a_search_that_goes_far_back_remembers_that_the_queue_showed_more() -> None:
    """The owner would not read the entries after its end, perhaps a higher epoch, before it publishes."""

    class Paged(Log):
        async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
            return await super().read(partition, offset, bytes_max if offset else 1)

    async def work() -> None:
        log = await Paged().start()
        for first in range(STEP_OFFSETS + 2):
            await log.batch((7, first, 1))
        search = BlockSearch(log, READ, 0, log.index_of, EventLog(log.clock), "clicks/0")
        assert (7, 0, 1) in await search.find([(7, 0, 1)], 0, STEP_OFFSETS + 1)
        assert log.reads == [1, 0]
        assert search.shown_beyond

    asyncio.run(work())


def test_entries_without_a_batch_of_the_partition_are_skipped() -> None:
    async def work() -> None:
        log = await Log().start()
        await log.batch((7, 0, 5))
        await log.batch((7, 0, 5), partition=1)
        await log.add(b"damaged")
        await log.add(
            encode_pointer(Pointer(kind="opened", cluster="c", topic="clicks", topic_id=TOPIC_ID, partition=0, epoch=1))
        )
        assert await log.find((7, 0, 5)) == {(7, 0, 5): Copies((stored((7, 0, 5)),))}
        assert log.opened == ["batch-0"]
        assert await log.find((7, 0, 5), begin=1) == {}
        assert await log.find((7, 0, 5), end=0) == {}

    asyncio.run(work())


def test_an_index_that_cant_be_read_is_reported_and_one_that_may_be_read_later_is_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work() -> None:
        log = await Log().start()
        unread = await log.batch((7, 0, 5))
        await log.batch((7, 3, 5))
        log.indexes[unread] = CorruptDataError("bad index")
        assert (await log.find((7, 0, 5), (7, 6, 9)))[7, 0, 5] == Copies((stored((7, 3, 5)),), unread=True)
        assert (await log.find((7, 0, 3)))[7, 0, 3] == Copies((), unread=True)
        for passing in (StoreError("503"), DeniedError("the store's keys rotate")):
            log.indexes[unread] = passing
            with pytest.raises(StoreError):
                await log.find((7, 0, 3))

    asyncio.run(work())
    assert "index-unread: clicks/0 object batch-0: bad index" in [each.getMessage() for each in caplog.records]


def test_copies_differ_when_one_of_them_holds_something_else() -> None:
    block = seal(build([(b"v", None, (), None, None)]), producer_id=7, first_sequence=0, scope=1).data
    header = parse_header(block, 0)
    same = stored_block(header)
    other = same._replace(checksum=same.checksum ^ 1)
    found = [Copies(blocks).differ_from(header) for blocks in ((), (same,), (other,), (same, other))]
    assert found == [False, False, True, True]


def test_the_search_goes_back_in_steps_that_grow_and_ends_where_all_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        log = await Log().start()
        for number in range(100):
            await log.batch((7, number, 1))
        monkeypatch.setattr(search, "STEP_OFFSETS", 4)
        monkeypatch.setattr(search, "STEP_GROWS", 2)
        for sequence, reads in ((99, [96]), (96, [96]), (95, [96, 88]), (60, [96, 88, 72, 40]), (200, None)):
            log.reads.clear()
            found = await log.find((7, sequence, sequence + 1))
            assert ((7, sequence, sequence + 1) in found) == (sequence < 100)
            assert log.reads == (reads or [96, 88, 72, 40, 0])
        log.reads.clear()
        await log.find((7, 99, 100), (7, 90, 91), begin=50, end=98)
        assert log.reads == [94, 86, 70, 50]
        monkeypatch.setattr(search, "READ_BYTES", 1)  # an entry in each page
        log.reads.clear()
        assert (7, 97, 98) in await log.find((7, 97, 98))
        assert log.reads == [96, 97, 98, 99]

    asyncio.run(work())


def test_an_error_of_the_queue_goes_out() -> None:
    class Sick(Log):
        async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
            raise QueueError("not now")

    async def work() -> None:
        log = await Sick().start()
        await log.batch((7, 0, 1))
        with pytest.raises(QueueError):
            await log.find((7, 0, 1))

    asyncio.run(work())
