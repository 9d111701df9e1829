"""A consumer on a queue that answers wrongly for a moment: it skips no record and refuses none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import pytest

from memq.client.consumer.fetch.fetch_scheduler import MISSING_S, FetchScheduler
from memq.client.consumer.fetch.fetcher import BatchFetcher
from memq.client.consumer.fetch.partition_cursor import CursorState, PartitionCursor
from memq.client.consumer.offset_resolver import END_TRIES, OffsetResolver
from memq.errors import InvalidRequestError, NotFoundError, PositionExpiredError
from memq.format.blocks.header import Buffer
from memq.format.object import BlockEntry
from memq.format.pointer import Pointer
from memq.format.ranges import Range
from memq.notification import Entries, Span
from memq.runtime.logs import EventLog
from memq.runtime.tasks import TaskOwner
from memq.storage_handlers.confirmed_reads import ConfirmedReads
from memq.topic import Position, ReadPartition, TopicSettings
from tests.skipping_loop import run_skipping, skip, skipping_runtime
from tests.unit.consumer_world import TOPIC, MomentaryWrongAnswers, Tamper
from tests.unit.queue_model import PARTITION, WINDOW_MS, Block, Log

SETTINGS = TopicSettings()
BATCHES = 12
AWAY_S = 20.0


def queue_of(batches: int = BATCHES) -> MomentaryWrongAnswers:
    log = Log()
    for number in range(batches):
        log.batch(Block(1, 3 * number))
    return MomentaryWrongAnswers(log)


def end_that_goes_back(span: Span, entries: Entries) -> tuple[Span, Entries]:
    return Span(span.begin, entries[0].offset), Entries((), entries[0].offset)


def begin_that_runs_ahead(span: Span, entries: Entries) -> tuple[Span, Entries]:
    return Span(span.end, span.end), Entries((), span.end)


def nothing_in_the_middle(span: Span, entries: Entries) -> tuple[Span, Entries]:
    return span, Entries((), span.end)


def entries_left_out(span: Span, entries: Entries) -> tuple[Span, Entries]:
    return span, Entries(entries[1:], entries.next)


def one_left_out_in_the_middle(span: Span, entries: Entries) -> tuple[Span, Entries]:
    return span, Entries(entries[:1] + entries[2:], entries.next)


def last_left_out(span: Span, entries: Entries) -> tuple[Span, Entries]:
    return span, Entries(entries[:-1], entries.next)


LIES = [
    end_that_goes_back,
    begin_that_runs_ahead,
    nothing_in_the_middle,
    entries_left_out,
    one_left_out_in_the_middle,
    last_left_out,
]


def position(offset: int) -> Position:
    return Position(0, offset)


@pytest.mark.parametrize("end", [None, position(BATCHES)])
@pytest.mark.parametrize("lie", LIES)
def test_a_poll_that_lies_once_costs_no_record(lie: Tamper, end: Position | None) -> None:
    async def work() -> list[bytes | None]:
        runtime, queue = skipping_runtime(), queue_of()
        queue.lies = [lambda span, entries: (span, entries), lie, lie]
        tasks = TaskOwner(lambda error: None, EventLog(runtime.clock))

        async def read(store: str, key: str, offset: int, length: int) -> Buffer:
            return queue.log.bodies[int(key.removeprefix("o/"))][offset : offset + length]

        fetcher = BatchFetcher("broker", read, lambda store: None, ConfirmedReads())
        reading = FetchScheduler(runtime, queue, fetcher, tasks, 1 << 20, lambda: None)
        cursor = PartitionCursor(PARTITION, position(0), window_ms=WINDOW_MS, end=end, pass_expired=True)
        reading.start()
        reading.add(cursor, TOPIC)
        values: list[bytes | None] = []
        for _ in range(100):
            await skip(0.5)
            while (found := reading.deliver()) is not None:
                assert found[1].failure is None
                values += [bytes(part.piece.data) for part in found[1].slices]
        assert cursor.position == position(BATCHES)
        assert (cursor.state is CursorState.ENDED) == (end is not None)
        assert (cursor.counts.expired_offsets, cursor.counts.gap_sequences) == (0, 0)
        await tasks.stop()
        return values

    assert run_skipping(work()) == [Block(1, 3 * number).data() for number in range(BATCHES)]


@pytest.mark.parametrize(("away_s", "lost"), [(0.0, 0), (20.0, 0), (1e9, 3)])
def test_an_object_that_is_missing_for_a_while_is_not_passed_over(away_s: float, lost: int) -> None:
    """A 404 on all ways, for longer than a fetch confirms it; a pointer of the queue still names the object."""

    async def work() -> tuple[list[bytes | None], int, float]:
        runtime, queue = skipping_runtime(), queue_of()
        tasks = TaskOwner(lambda error: None, EventLog(runtime.clock))

        async def read(store: str, key: str, offset: int, length: int) -> Buffer:
            if key == "o/5" and runtime.clock.monotonic() < away_s:
                raise NotFoundError(f"no object '{key}'")
            return queue.log.bodies[int(key.removeprefix("o/"))][offset : offset + length]

        fetcher = BatchFetcher("broker", read, lambda store: None, ConfirmedReads())
        reading = FetchScheduler(runtime, queue, fetcher, tasks, 1 << 20, lambda: None)
        end = position(BATCHES)
        cursor = PartitionCursor(PARTITION, position(0), window_ms=WINDOW_MS, end=end, pass_damage=True)
        reading.start()
        reading.add(cursor, TOPIC)
        values: list[bytes | None] = []
        while cursor.state is not CursorState.ENDED:
            await skip(0.5)
            while (found := reading.deliver()) is not None:
                values += [bytes(part.piece.data) for part in found[1].slices]
        await tasks.stop()
        return values, cursor.counts.damaged_records, runtime.clock.monotonic()

    values, damaged, over_s = run_skipping(work())
    expected = [Block(1, 3 * number).data() for number in range(BATCHES) if not (lost and number == 5)]
    assert (values, damaged) == (expected, lost)
    assert over_s < MISSING_S + 5, "a lost object holds nobody up for longer"


def test_a_pointer_that_is_not_shown_for_a_moment_was_not_taken_by_retention() -> None:
    """Its object is missing for that moment, too: the log begins before it, so both are there."""

    class Hiding(MomentaryWrongAnswers):
        async def read(self, partition: ReadPartition, offset: int, bytes_max: int) -> Entries:
            found = await super().read(partition, offset, bytes_max)
            if runtime.clock.monotonic() >= AWAY_S:
                return found
            return Entries([entry for entry in found if entry.offset != 5], found.next)

    runtime = skipping_runtime()

    async def work() -> list[bytes | None]:
        queue = Hiding(queue_of().log)
        tasks = TaskOwner(lambda error: None, EventLog(runtime.clock))

        async def read(store: str, key: str, offset: int, length: int) -> Buffer:
            if key == "o/5" and runtime.clock.monotonic() < AWAY_S:
                raise NotFoundError(f"no object '{key}'")
            return queue.log.bodies[int(key.removeprefix("o/"))][offset : offset + length]

        fetcher = BatchFetcher("broker", read, lambda store: None, ConfirmedReads())
        reading = FetchScheduler(runtime, queue, fetcher, tasks, 1 << 20, lambda: None)
        cursor = PartitionCursor(PARTITION, position(0), window_ms=WINDOW_MS, end=position(BATCHES), pass_expired=True)
        reading.start()
        reading.add(cursor, TOPIC)
        values: list[bytes | None] = []
        for _ in range(100):
            await skip(0.5)
            while (found := reading.deliver()) is not None:
                assert found[1].failure is None
                values += [bytes(part.piece.data) for part in found[1].slices]
        assert cursor.state is CursorState.ENDED
        assert (cursor.counts.expired_offsets, cursor.counts.expired_records) == (0, 0)
        await tasks.stop()
        return values

    assert run_skipping(work()) == [Block(1, 3 * number).data() for number in range(BATCHES)]


def ask(spans: list[Span], question: Callable[[OffsetResolver], Awaitable[Position]], begin: int = 0) -> Position:
    async def work() -> Position:
        queue = queue_of()
        queue.said, queue.begin = spans, begin
        return await question(OffsetResolver(queue))

    return run_skipping(work())


def test_a_position_behind_an_end_that_goes_back_for_a_moment_is_read() -> None:
    back = [Span(0, 3)] * END_TRIES
    assert ask(back, lambda places: places.start_at(position(10), PARTITION, SETTINGS)) == position(10)


def test_a_position_behind_an_end_that_stays_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="after its end"):
        ask([], lambda places: places.start_at(position(BATCHES + 1), PARTITION, SETTINGS))


def test_a_begin_that_runs_ahead_for_a_moment_expires_no_position() -> None:
    ahead = [Span(8, BATCHES)]
    assert ask(ahead, lambda places: places.start_at(position(5), PARTITION, SETTINGS)) == position(5)
    with pytest.raises(PositionExpiredError):
        ask([], lambda places: places.start_at(position(5), PARTITION, SETTINGS), begin=8)


@pytest.mark.parametrize("begin", [10, BATCHES])
def test_a_begin_that_runs_ahead_for_a_moment_leaves_no_block_before_the_start_unseen(begin: int) -> None:
    """A copy of a block before the start would be delivered once more."""

    async def no_index(pointer: Pointer) -> Sequence[BlockEntry]:
        raise AssertionError("the pointers name all blocks")

    async def work() -> list[Range]:
        queue, cursor = queue_of(), PartitionCursor(PARTITION, position(10), window_ms=WINDOW_MS)
        queue.said = [Span(begin, BATCHES)]
        await OffsetResolver(queue).look_back(cursor, SETTINGS, [0], no_index)
        return cursor.dedup_window.seen(0, 1, 0, 30)

    assert run_skipping(work()) == [(0, 30)]


def test_the_wider_of_two_answers_is_where_a_read_begins_and_ends() -> None:
    assert ask([Span(0, 3)], lambda places: places.position_of("end", PARTITION, SETTINGS)) == position(BATCHES)
    assert ask([Span(9, 9)], lambda places: places.position_of("beginning", PARTITION, SETTINGS)) == position(0)


def test_an_expired_position_is_where_a_reader_that_passes_over_begins() -> None:
    found = ask([], lambda places: places.start_at(position(5), PARTITION, SETTINGS, pass_expired=True), begin=8)
    assert found == position(5)
