"""The fetch scheduler: fetches within a budget, fair turns, retries, and pointers whose batch moved."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from memq.client.consumer.fetch.fetch_scheduler import FETCHES_MAX, LOOK_BACKS_MAX
from memq.client.consumer.fetch.partition_cursor import PartitionCursor
from memq.client.consumer.record_filter import RecordFilter
from memq.errors import (
    CorruptDataError,
    DeniedError,
    MemqError,
    QueueError,
    StoreError,
)
from memq.format.object import BlockEntry
from memq.format.pointer import Pointer
from memq.limits import POLL_BLOCKS_BYTES_MAX
from memq.notification.remote import Polled
from memq.topic import Position, ReadPartition
from tests.skipping_loop import skip
from tests.unit.consumer_world import (
    TOPIC,
    Reader,
    World,
    expected,
    log_of,
    partition_of,
    reading,
)
from tests.unit.queue_model import WINDOW_MS, Block, Log

# ---- how much at once ----------------------------------------------------------------------------


def test_prefetched_batches_stay_within_the_budget() -> None:
    async def work() -> None:
        world = World(log_of(20))
        size = len(Block(1, 0).data())
        world.fetch_s = 1.0
        reader = Reader(world, budget=3 * size + size // 2)
        assigned = reader.add(0)
        await skip(5)
        assert (world.fetching_most, world.fetched_count) == (3, 3)
        assert 3 * size <= assigned.cursor.held_bytes <= 3 * size + 10
        assert reader.deliver(1) == 1
        await skip(1.5)
        assert world.fetched_count == 4, "what was delivered makes room"
        await reader.until(60)
        assert reader.got == expected(0, 20)
        assert assigned.cursor.held_bytes == 0
        await reader.tasks.stop()
        tiny = Reader(World(log_of(5)), budget=1)
        tiny.add(0)
        await tiny.until(15)
        await tiny.tasks.stop()

    reading(work())


class WithoutIndex(World):
    """The index of the first object can't be read, and a reader learns it late."""

    async def index_of(self, pointer: Pointer) -> list[BlockEntry]:
        await skip(1)
        if pointer.locations[0].key == "o/0":
            raise CorruptDataError("the index is damaged")
        return await super().index_of(pointer)


def test_a_batch_that_must_be_fetched_after_all_gets_the_bytes_of_those_after_it() -> None:
    """A filter wants nothing of it, but its index is damaged. The next batch, which waits for it, had the bytes."""

    async def work() -> None:
        log = Log()
        log.batch(Block(1, 0, tags=("a", "a", "a")))
        log.batch(Block(1, 3, tags=("b", "b", "b")))
        world = WithoutIndex(log)
        reader = Reader(world, budget=len(log.bodies[1]) + 1)
        start = Position(0, 0, 1)  # only the index says which blocks are left out
        reader.reading.add(
            PartitionCursor(partition_of(0), start, window_ms=WINDOW_MS, wanted=RecordFilter("b")), TOPIC
        )
        await reader.until(3)
        assert reader.got == expected(0, 2)[3:]
        await reader.tasks.stop()

    reading(work())


class SendingWorld(World):
    """Each answer to a poll has the blocks of all its batches, however many bytes were asked for.

    `rooms` has those bytes, for each poll.
    """

    def __init__(self, *logs: Log) -> None:
        super().__init__(*logs)
        self.rooms: list[int] = []

    async def poll(
        self,
        offsets: dict[ReadPartition, int],
        wait_ms: int = 0,
        bytes_max: int = 0,
        blocks_bytes_max: int = 0,
        tag_bits: int = 0,
    ) -> list[Polled]:
        self.rooms.append(blocks_bytes_max)
        return await super().poll(offsets, wait_ms, bytes_max, blocks_bytes_max, tag_bits)

    def _polled(self, partition: ReadPartition, offset: int) -> Polled:
        polled = super()._polled(partition, offset)
        bodies = self.logs[partition.partition].bodies
        return replace(polled, blocks={entry.offset: memoryview(bodies[entry.offset]) for entry in polled.entries})


def test_batches_that_come_with_their_pointers_stay_within_the_budget() -> None:
    async def work() -> None:
        world = SendingWorld(log_of(3))
        size = len(Block(1, 0).data())
        reader = Reader(world, budget=2 * size)
        assigned = reader.add(0)
        await skip(1)
        assert (assigned.cursor.held_bytes, world.fetched_count) == (2 * size, 0)
        await reader.until(9)
        assert reader.got == expected(0, 3)
        assert world.fetched_count == 1, "the third one had no room when it came"
        await reader.tasks.stop()

    reading(work())


def test_a_poll_asks_for_as_many_bytes_of_blocks_as_there_is_room_for() -> None:
    async def work() -> None:
        world = SendingWorld(Log())
        log, size = world.logs[0], len(Block(1, 0).data())
        reader = Reader(world, budget=2 * size)
        assigned = reader.add(0)
        await skip(1)
        assert world.rooms == [2 * size]
        for number, room in enumerate((size, 0)):
            log.batch(Block(1, 3 * number))
            world.news.set()
            await skip(1)
            assert world.rooms[-1] == room
        await reader.until(6)
        world.news.set()
        await skip(1)
        assert (world.rooms[-1], assigned.cursor.held_bytes) == (2 * size, 0)
        await reader.tasks.stop()
        large = SendingWorld(Log())
        reader = Reader(large)
        reader.add(0)
        await skip(1)
        assert large.rooms == [POLL_BLOCKS_BYTES_MAX]
        await reader.tasks.stop()

    reading(work())


def test_a_poll_that_confirms_a_doubtful_answer_asks_for_no_blocks() -> None:
    async def work() -> None:
        world = SendingWorld(log_of(2))
        world.skips.add(0)
        reader = Reader(world)
        reader.add(0)
        await reader.until(6)
        await skip(1)
        assert world.rooms == [POLL_BLOCKS_BYTES_MAX, 0, POLL_BLOCKS_BYTES_MAX]
        await reader.tasks.stop()

    reading(work())


def test_fetches_at_a_time_are_bounded() -> None:
    async def work() -> None:
        world = World(log_of(3 * FETCHES_MAX))
        world.fetch_s = 1.0
        reader = Reader(world)
        reader.add(0)
        await skip(0.9)
        assert world.fetching == FETCHES_MAX
        took_s = await reader.until(9 * FETCHES_MAX)
        assert took_s < 3
        assert world.fetching_most == FETCHES_MAX
        await reader.tasks.stop()

    reading(work())


def test_partitions_have_their_turns() -> None:
    async def work() -> None:
        world = World(log_of(6, 1), log_of(6, 2), log_of(6, 3))
        reader = Reader(world)
        for number in range(3):
            reader.add(number)
        await skip(1)
        reader.deliver()
        assert [number for number, _ in reader.got[::3]] == [0, 1, 2] * 6
        await reader.tasks.stop()

    reading(work())


def test_look_backs_at_a_time_are_bounded() -> None:
    async def work() -> None:
        world = World(*(log_of(1, number + 1) for number in range(3 * LOOK_BACKS_MAX)))
        world.span_s = 1.0
        reader = Reader(world)
        for number in range(3 * LOOK_BACKS_MAX):
            reader.add(number)
        await skip(0.5)
        assert world.looking == LOOK_BACKS_MAX
        await reader.until(9 * LOOK_BACKS_MAX)
        await reader.tasks.stop()

    reading(work())


# ---- polls ---------------------------------------------------------------------------------------


def test_a_partition_that_comes_is_polled_at_once() -> None:
    async def work() -> None:
        world = World(Log(), log_of(2, 2))
        reader = Reader(world)
        reader.add(0)
        await skip(0.5)
        assert world.polls[-1] == {partition_of(0): 0}
        assert len(world.polls) == 1, "one long poll"
        reader.add(1)
        assert await reader.until(6) < 0.1
        assert world.polls[-1] == {partition_of(0): 0, partition_of(1): 2}
        assert all(number == 1 for number, _ in reader.got)
        await reader.tasks.stop()

    reading(work())


def test_news_come_by_the_poll_that_waits() -> None:
    async def work() -> None:
        world = World(log_of(1))
        reader = Reader(world)
        assigned = reader.add(0)
        await reader.until(3)
        before = reader.changes
        world.logs[0].batch(Block(1, 3))
        world.news.set()
        assert await reader.until(6) < 0.1
        assert reader.changes > before, "waiters are notified"
        assert assigned.ledger is not None
        await reader.tasks.stop()

    reading(work())


@pytest.mark.parametrize("passes", [True, False])
def test_a_poll_that_fails_is_tried_again_later_and_later(passes: bool) -> None:
    async def work() -> None:
        world = World(log_of(1))
        error: MemqError = QueueError("away") if passes else DeniedError("not you")
        world.poll_errors = [error] * 12
        reader = Reader(world)
        reader.add(0)
        took_s = await reader.until(3)
        assert 4 < took_s < 24, "each waits up to 2 s, half of it on average"
        assert reader.reading.retries == 12
        assert reader.reading.failure is (None if passes else error)
        await reader.tasks.stop()

    reading(work())


@pytest.mark.parametrize("passes", [True, False])
def test_a_fetch_that_fails_is_tried_again_later_and_later(passes: bool) -> None:
    async def work() -> None:
        world = World(log_of(2))
        error: MemqError = StoreError("away") if passes else DeniedError("not you")
        world.errors = [error] * 12
        reader = Reader(world, budget=1)
        reader.add(0)
        took_s = await reader.until(6)
        assert 4 < took_s < 24
        assert reader.reading.retries == 12
        assert reader.reading.failure is (None if passes else error)
        assert reader.got == expected(0, 2), "reading continues at its position"
        await reader.tasks.stop()

    reading(work())


# ---- partitions that come and go -----------------------------------------------------------------


def test_removed_partition_frees_its_room_and_keeps_its_counts() -> None:
    async def work() -> None:
        world = World(log_of(4, 1), log_of(4, 2))
        world.fetch_s = 1.0
        reader = Reader(world, budget=1)
        first = reader.add(0)
        await skip(1.5)
        assert reader.deliver(1) == 1
        await skip(0.5)
        assert world.fetching == 1
        second = reader.add(1)
        await skip(0.2)
        reader.reading.keep({partition_of(1): 0})
        await skip(0.0)
        assert (first.removed, second.removed) == (True, False)
        assert list(reader.reading.assigned) == [partition_of(1)]
        reader.got.clear()
        await reader.until(12)
        assert reader.got == expected(1, 4)
        assert reader.reading.removed_counts.records == 3
        reader.reading.remove(partition_of(0))
        assert reader.reading.removed_counts.records == 3, "it is gone already"
        reader.reading.keep({partition_of(1): 5})
        assert reader.reading.assigned == {}, "a new grant is read from its beginning"
        assert not reader.reading.ended
        await reader.tasks.stop()

    reading(work())


def test_a_partition_that_is_read_again_begins_again() -> None:
    async def work() -> None:
        world = World(log_of(3))
        reader = Reader(world)
        reader.add(0)
        await reader.until(9)
        before = reader.reading.assigned[partition_of(0)]
        reader.got.clear()
        reader.add(0, start=1)
        assert before.removed
        await reader.until(6)
        assert reader.got == expected(0, 3)[3:]
        await reader.tasks.stop()

    reading(work())


def test_a_paused_partition_holds_nothing_and_leaves_the_room_to_others() -> None:
    async def work() -> None:
        world = World(log_of(4, 1), log_of(4, 2))
        reader = Reader(world, budget=1)
        paused = reader.add(0)
        await skip(0.5)
        assert paused.cursor.held_bytes > 0
        reader.add(1)
        await skip(0.5)
        reader.reading.pause(partition_of(0), paused=True)
        assert paused.cursor.held_bytes == 0
        await reader.until(12)
        assert reader.got == expected(1, 4)
        reader.got.clear()
        reader.reading.pause(partition_of(0), paused=False)
        await reader.until(12)
        assert reader.got == expected(0, 4)
        await reader.tasks.stop()

    reading(work())


def test_a_partition_that_is_resumed_is_fetched_at_once() -> None:
    """Not with the next answer of a poll, which may wait for seconds."""

    async def work() -> None:
        world = World(log_of(2))
        reader = Reader(world)
        reader.add(0)
        await skip(0.5)
        reader.reading.pause(partition_of(0), paused=True)
        await skip(0.1)
        before = world.fetched_count
        reader.reading.pause(partition_of(0), paused=False)
        await skip(0.01)
        assert world.fetched_count == before + 2
        await reader.tasks.stop()

    reading(work())


def test_reading_ends_when_each_partition_is_read_to_its_end() -> None:
    async def work() -> None:
        world = World(log_of(2, 1), log_of(3, 2))
        reader = Reader(world)

        def ended() -> bool:
            return reader.reading.ended

        assert ended() is False
        reader.add(0, end=2)
        reader.add(1, end=2)
        await skip(1)
        assert ended() is False
        assert reader.deliver(3) == 3
        assert ended() is False
        reader.deliver()
        assert ended() is True
        assert len(reader.got) == 12
        await reader.tasks.stop()

    reading(work())


def test_pointers_without_records_can_be_committed() -> None:
    async def work() -> None:
        log = Log()
        log.control()
        log.control(epoch=2)
        reader = Reader(World(log))
        assigned = reader.add(0)
        await skip(1)
        assert reader.deliver() == 0
        assert assigned.cursor.position == Position(0, 2)
        prefix = assigned.ledger.prefix
        assert prefix is not None
        assert prefix.position == Position(0, 2)
        await reader.tasks.stop()

    reading(work())
