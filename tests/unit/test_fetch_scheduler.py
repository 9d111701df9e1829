"""The fetch scheduler: fetches within a budget, fair turns, retries, and pointers whose batch moved."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import pytest

from memq.client.consumer.assigned import Assigned
from memq.client.consumer.fetch.fetch_scheduler import FETCHES_MAX, LOOK_BACKS_MAX, FetchScheduler
from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.client.consumer.fetch.partition_cursor import PartitionCursor
from memq.errors import (
    DeniedError,
    MemqError,
    NotFoundError,
    QueueError,
    StoreError,
)
from memq.format.batch import BlockPiece
from memq.format.blocks.header import Buffer, parse_header
from memq.format.object import BlockEntry
from memq.format.pointer import Pointer
from memq.notification import Entries, Span
from memq.notification.remote import Polled, RemoteQueue
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.storage_handlers.confirmed_reads import ConfirmedReads
from memq.topic import Position, ReadPartition, Topic, TopicSettings, equal_slots
from tests.skipping_loop import run_skipping, skip, skipping_runtime
from tests.unit.queue_model import TOPIC_ID, WINDOW_MS, Block, Log
from tests.unit.test_consumer_opener import NoBroker

TOPIC = Topic(name="clicks", id=TOPIC_ID, created_ms=1, settings=TopicSettings(), partitions=equal_slots(1))
PLENTY = 1 << 30


async def no_read(store: str, key: str, offset: int, length: int) -> Buffer:
    raise AssertionError("batches come from the script")


class World(RemoteQueue, BatchFetcher):
    """A queue and a store in one, over logs made by hand: one for each read partition, producer N + 1 in the N-th.

    `errors` are raised by the next fetches, `poll_errors` by the next polls; a fetch takes `fetch_s`. The logs of
    `sick` fail until they are removed there, and so does each fetch of `sick_producers`.
    """

    def __init__(self, *logs: Log) -> None:
        RemoteQueue.__init__(self, NoBroker())
        BatchFetcher.__init__(self, "broker", no_read, lambda store: None, ConfirmedReads())
        self.logs = list(logs)
        self.errors: list[MemqError] = []
        self.poll_errors: list[MemqError] = []
        self.fetch_s = 0.0
        self.fetching = self.fetching_most = self.fetched_count = 0
        self.looking = self.looking_most = 0
        self.span_s = 0.0
        self.polls: list[dict[ReadPartition, int]] = []
        self.keys: list[str] = []
        self.gone: set[str] = set()  # keys of objects that are not there
        self.sick: dict[int, MemqError] = {}
        self.sick_producers: set[int] = set()
        self.sick_fetches = 0
        self.hanging_producers: set[int] = set()
        self.healed = asyncio.Event()
        self.skips: set[int] = set()  # partitions whose next answer to a poll leaves out the first entry
        self.news = asyncio.Event()

    def _entries(self, partition: ReadPartition, offset: int) -> Entries:
        log = self.logs[partition.partition]
        found = [entry for entry in log.entries if entry.offset >= offset]
        return Entries(found, found[-1].offset + 1 if found else max(offset, log.next_offset))

    async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
        return self._entries(partition, offset)

    async def span(self, partition: ReadPartition) -> Span:
        self.looking += 1
        self.looking_most = max(self.looking, self.looking_most)
        await skip(self.span_s)
        self.looking -= 1
        return self.logs[partition.partition].span()

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        entries = self.logs[partition.partition].entries
        return next((entry.offset for entry in entries if entry.time_ms >= time_ms), 0)

    async def poll(self, offsets: dict[ReadPartition, int], wait_ms: int = 0, bytes_max: int = 0) -> list[Polled]:
        self.polls.append(dict(offsets))
        if self.poll_errors:
            raise self.poll_errors.pop(0)
        self.news.clear()
        if not any(self._entries(*each) for each in offsets.items()):
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self.news.wait()
            except TimeoutError:
                pass
        return [self._polled(each, offset) for each, offset in offsets.items()]

    def _polled(self, partition: ReadPartition, offset: int) -> Polled:
        number = partition.partition
        if number in self.sick:
            return Polled(partition, Span(0, 0), Entries((), offset), self.sick[number])
        entries = self._entries(partition, offset)
        if number in self.skips:
            self.skips.remove(number)
            entries = Entries(entries[1:], entries.next)
        return Polled(partition, self.logs[number].span(), entries)

    async def fetch(self, pointer: Pointer) -> Sequence[BlockPiece]:
        self.fetching += 1
        self.fetching_most = max(self.fetching, self.fetching_most)
        try:
            await skip(self.fetch_s)
            if self.errors:
                raise self.errors.pop(0)
            key = pointer.locations[0].key
            self.keys.append(key)
            if key in self.gone:
                raise NotFoundError(f"object '{key}' does not exist")
            producer = pointer.producers[0].producer if pointer.producers else 1
            if producer in self.hanging_producers:
                await self.healed.wait()
            if producer in self.sick_producers:
                self.sick_fetches += 1
                raise StoreError("the store of this topic is away")
            log = self.logs[producer - 1]
            self.fetched_count += 1
            return log.pieces(int(key.rpartition("/")[2]), pointer)
        finally:
            self.fetching -= 1

    async def index_of(self, pointer: Pointer) -> list[BlockEntry]:
        body, at = self.logs[0].bodies[int(pointer.locations[0].key.rpartition("/")[2])], 0
        found: list[BlockEntry] = []
        while at < len(body):
            found.append(BlockEntry.from_header(parse_header(body, at), at))
            at += found[-1].length
        return found


def log_of(batches: int, producer: int = 1, **options: Any) -> Log:
    log = Log()
    for number in range(batches):
        log.batch(Block(producer, 3 * number), **options)
    return log


def partition_of(number: int) -> ReadPartition:
    return ReadPartition("clicks", TOPIC_ID, number)


class Reader:
    """A `FetchScheduler` with its world, and what was delivered: partition and value."""

    def __init__(self, world: World, budget: int = PLENTY) -> None:
        self.runtime = skipping_runtime()
        self.tasks = TaskOwner(self._broke, EventLog(self.runtime.clock))
        self.changes = 0
        self.reading = FetchScheduler(self.runtime, world, world, self.tasks, budget, self._changed)
        self.reading.start()
        self.got: list[tuple[int, bytes]] = []
        self.failures: list[MemqError] = []

    def _broke(self, error: BaseException) -> None:
        raise AssertionError("reading died") from error

    def _changed(self) -> None:
        self.changes += 1

    def add(self, number: int, start: int = 0, end: int | None = None, **options: Any) -> Assigned:
        behind = None if end is None else Position(number, end)
        flow = PartitionCursor(
            partition_of(number), Position(number, start), window_ms=WINDOW_MS, end=behind, **options
        )
        return self.reading.add(flow, TOPIC)

    def deliver(self, most: int = 1_000) -> int:
        """Take what is ready; return how many batches that were."""
        for count in range(most):
            found = self.reading.deliver()
            if found is None:
                return count
            assigned, delivery = found
            if delivery.failure is not None:
                self.failures.append(delivery.failure)
                return count
            number = assigned.flow.partition.partition
            for piece, low, high in delivery.slices:
                assert piece.header is not None
                first = piece.header.first_sequence
                self.got += [(number, b"%d:%d" % (piece.header.producer_id, first + at)) for at in range(low, high)]
        return most

    async def until(self, count: int, limit_s: float = 100.0) -> float:
        """Read until so many records came; return how much virtual time that took."""
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        while len(self.got) < count:
            assert loop.time() - begin_s < limit_s, f"{len(self.got)} of {count} records came"
            self.deliver()
            await skip(0.01)
        return loop.time() - begin_s


def expected(number: int, batches: int) -> list[tuple[int, bytes]]:
    return [(number, b"%d:%d" % (number + 1, sequence)) for sequence in range(3 * batches)]


def reading(work: Coroutine[Any, Any, None]) -> None:
    run_skipping(work)


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
        assert 3 * size <= assigned.flow.held_bytes <= 3 * size + 10
        assert reader.deliver(1) == 1
        await skip(1.5)
        assert world.fetched_count == 4, "what was delivered makes room"
        await reader.until(60)
        assert reader.got == expected(0, 20)
        assert assigned.flow.held_bytes == 0
        await reader.tasks.stop()
        tiny = Reader(World(log_of(5)), budget=1)
        tiny.add(0)
        await tiny.until(15)
        await tiny.tasks.stop()

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
        assert paused.flow.held_bytes > 0
        reader.add(1)
        await skip(0.5)
        reader.reading.pause(partition_of(0), paused=True)
        assert paused.flow.held_bytes == 0
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
        assert assigned.flow.position == Position(0, 2)
        prefix = assigned.ledger.prefix
        assert prefix is not None
        assert prefix.position == Position(0, 2)
        await reader.tasks.stop()

    reading(work())
