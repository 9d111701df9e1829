"""The prefetch limit counts the blocks that are fetched of large batches, not the batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from memq.client.consumer.fetch.fetch_scheduler import FetchScheduler
from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.client.consumer.fetch.partition_cursor import PART_BYTES_MIN, CursorState, PartitionCursor
from memq.client.consumer.record_filter import RecordFilter
from memq.errors import CorruptDataError, StoreError
from memq.format.blocks.header import Buffer, parse_header
from memq.format.object import BatchEntry, BlockEntry, ObjectMeta, ObjectTopic, encode_index
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.storage_handlers.confirmed_reads import ConfirmedReads
from memq.topic import Position
from tests.skipping_loop import run_skipping, skip, skipping_runtime
from tests.unit.consumer_world import TOPIC, MomentaryWrongAnswers
from tests.unit.cursor_reads import BEGINNING
from tests.unit.queue_model import PARTITION, TOPIC_ID, WINDOW_MS, Block, Log

BATCHES, BLOCKS, WANTED = 6, 20, (3, 13)
VALUE_BYTES = 40_000


def large_batches() -> tuple[Log, list[bytes]]:
    """Return a log of large batches with two wanted blocks each, and their objects."""
    log, objects = Log(), list[bytes]()
    meta = ObjectMeta(cluster="test", broker="b", topics=(ObjectTopic("clicks", TOPIC_ID),), created_ms=1)
    for batch in range(BATCHES):
        blocks = [
            Block(1, batch * BLOCKS + number, 1, b"x" * VALUE_BYTES, tags=("T" if number in WANTED else "x",))
            for number in range(BLOCKS)
        ]
        body = log.bodies[log.batch(*blocks)]
        entries, at = [], 0
        for block in blocks:
            entries.append(BlockEntry.from_header(parse_header(block.data()), at))
            at += entries[-1].length
        entry = BatchEntry(0, at, 1, 0, BLOCKS, 0, BLOCKS, 0, 1)
        objects.append(body + encode_index(meta, [entry], entries, at))
    assert len(log.bodies[0]) > PART_BYTES_MIN
    return log, objects


LOG, OBJECTS = large_batches()
SIZE = max(map(len, LOG.bodies.values()))
FOUND = [batch * BLOCKS + number for batch in range(BATCHES) for number in WANTED]


class Reading:
    """A reader whose reads of blocks take a second, and what was seen of it meanwhile."""

    def __init__(self, budget: int, wanted: RecordFilter | None, objects: Sequence[bytes] = OBJECTS) -> None:
        runtime = skipping_runtime()
        self.objects = objects
        self.errors: list[StoreError] = []
        self.ranges_fail = False  # of blocks; whole batches can be read
        self.under_way: list[int] = []  # objects whose blocks are being read
        self.bytes_under_way = 0
        self.at_once_most = 0  # of them
        self.held_most = 0
        self.tasks = TaskOwner(self._broke, EventLog(runtime.clock))
        fetcher = BatchFetcher("broker", self.get, lambda store: None, ConfirmedReads())
        queue = MomentaryWrongAnswers(LOG)
        self.scheduler = FetchScheduler(runtime, queue, fetcher, self.tasks, budget, lambda: None)
        end = Position(0, BATCHES)
        self.cursor = PartitionCursor(PARTITION, BEGINNING, window_ms=WINDOW_MS, end=end, wanted=wanted)
        self.scheduler.start()
        self.scheduler.add(self.cursor, TOPIC)
        self.found: list[int] = []

    def _broke(self, error: BaseException) -> None:
        raise AssertionError("reading died") from error

    async def get(self, store: str, key: str, offset: int, length: int) -> Buffer:
        number = int(key.removeprefix("o/"))
        data = self.objects[number]
        if offset < len(LOG.bodies[number]):
            self.under_way.append(number)
            self.bytes_under_way += length
            assert self.cursor.held_bytes >= self.bytes_under_way
            self.at_once_most = max(self.at_once_most, len(set(self.under_way)))
            self.held_most = max(self.held_most, self.cursor.held_bytes)
            await skip(1.0)
            self.under_way.remove(number)
            self.bytes_under_way -= length
            if self.errors:
                raise self.errors.pop()
            if self.ranges_fail and length < len(LOG.bodies[number]):
                raise CorruptDataError(f"object '{key}' seems to end")
        if offset + length > len(data):
            raise CorruptDataError(f"object '{key}' has {len(data)} bytes")
        return data[offset : offset + length]

    async def read(self, limit_s: int = 60) -> None:
        """Read to the end."""
        for _ in range(10 * limit_s):
            while (found := self.scheduler.deliver()) is not None:
                assert found[1].failure is None
                for part in found[1].slices:
                    assert part.piece.header is not None
                    self.found.append(part.piece.header.first_sequence)
            if self.cursor.state is CursorState.ENDED:
                break
            await skip(0.1)
        assert self.cursor.held_bytes == 0
        await self.tasks.stop()


@pytest.mark.parametrize(("budget", "at_once"), [(SIZE // 2, 1), (SIZE * 3 // 2, BATCHES), (SIZE + 3 * VALUE_BYTES, 2)])
def test_a_reader_of_few_blocks_fetches_as_many_large_batches_as_their_blocks_have_room(
    budget: int, at_once: int
) -> None:
    """Two blocks have 80,000 bytes, a batch 800,000: until its index is read, all of it counts."""

    async def work() -> None:
        reading = Reading(budget, RecordFilter("T"))
        await skip(0.5)
        assert reading.at_once_most == at_once
        await reading.read()
        assert reading.found == FOUND
        assert reading.held_most <= max(budget, len(WANTED) * (VALUE_BYTES + 200))

    run_skipping(work())


def test_a_reader_of_all_blocks_fetches_within_the_limit() -> None:
    async def work() -> None:
        reading = Reading(SIZE * 3 // 2, None)
        await reading.read()
        assert (reading.found, reading.at_once_most) == ([*range(BATCHES * BLOCKS)], 1)
        assert SIZE <= reading.held_most <= SIZE * 3 // 2

    run_skipping(work())


@pytest.mark.parametrize("cause", ["no index", "ranges fail"])
def test_a_batch_whose_blocks_cannot_be_fetched_alone_counts_whole(cause: str) -> None:
    spoilt = [LOG.bodies[number] + bytes(len(data) - len(LOG.bodies[number])) for number, data in enumerate(OBJECTS)]

    async def work() -> None:
        reading = Reading(SIZE * 3 // 2, RecordFilter("T"), spoilt if cause == "no index" else OBJECTS)
        reading.ranges_fail = cause == "ranges fail"
        await reading.read()
        assert reading.found == FOUND

    run_skipping(work())


def test_blocks_that_are_fetched_again_count_once() -> None:
    """After an error, and after a pause that drops them while they come."""

    async def work() -> None:
        reading = Reading(SIZE * 3 // 2, RecordFilter("T"))
        reading.errors += [StoreError("busy")] * 3
        await skip(0.5)
        reading.scheduler.pause(PARTITION, paused=True)
        assert reading.cursor.held_bytes == 0
        reading.scheduler.pause(PARTITION, paused=False)
        await reading.read()
        assert reading.found == FOUND
        assert reading.held_most <= SIZE * 3 // 2

    run_skipping(work())
