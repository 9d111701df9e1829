"""Retries of reads: failures in a row are counted, one batch is requested at a time, and the log."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pytest

from memq.client.consumer.fetch.cursor_outcomes import Copy
from memq.client.consumer.fetch.fetch_scheduler import FETCHES_MAX, MISSING_S, STALL_FAILURES
from memq.client.consumer.fetch.polling import Retries
from memq.client.observers.audit_recorder import ReadRecorder
from memq.errors import MemqError, QueueError, StoreError
from memq.format.report import BeginReason
from memq.notification import Span
from memq.notification.stored_blocks import STEP_OFFSETS
from memq.topic import Position, ReadPartition
from tests.skipping_loop import skip
from tests.unit.consumer_world import TOPIC, Reader, World, expected, log_of, partition_of, reading
from tests.unit.queue_model import Block, Log


class AskedWorld(World):
    """Notes the times that are looked for; `span_errors` and `seek_errors` are raised first."""

    def __init__(self, *logs: Log) -> None:
        super().__init__(*logs)
        self.span_errors: list[MemqError] = []
        self.seek_errors: list[MemqError] = []
        self.seeks: list[int] = []

    async def span(self, partition: ReadPartition) -> Span:
        if self.span_errors:
            raise self.span_errors.pop(0)
        return await super().span(partition)

    async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
        self.seeks.append(time_ms)
        if self.seek_errors:
            raise self.seek_errors.pop(0)
        return await super().seek_time(partition, time_ms)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note for each pause after how many failures it comes; each takes a second."""
    found: list[int] = []

    async def pause(retries: Retries, failures: int) -> None:
        found.append(failures)
        await skip(1.0)

    monkeypatch.setattr(Retries, "pause", pause)
    return found


def test_failures_to_look_back_are_counted_in_a_row(pauses: list[int]) -> None:
    async def work() -> None:
        world = AskedWorld(log_of(2))
        world.span_errors = [QueueError("away")] * 4
        reader = Reader(world)
        reader.add(0)
        await skip(3.5)
        changes = reader.changes
        await skip(1.0)
        assert (pauses, reader.reading.retries) == ([1, 2, 3, 4], 4)
        assert reader.changes > changes, "waiters are notified"
        await reader.until(6)
        await reader.tasks.stop()

    reading(work())


def test_failures_to_compare_are_counted_in_a_row(pauses: list[int]) -> None:
    async def work() -> None:
        log = Log()
        start_ms = 10 * TOPIC.settings.reader_window_ms
        log.batch(Block(1, 0), time_ms=start_ms)
        log.batch(Block(1, 0), Block(1, 3), time_ms=start_ms + 5)
        world = AskedWorld(log)
        world.seek_errors = [QueueError("away")] * 3
        reader = Reader(world)
        assigned = reader.add(0)
        await reader.until(6)
        assert [value for _, value in reader.got] == [b"1:%d" % number for number in range(6)]
        assert assigned.cursor.counts.duplicate_records == 3
        assert (pauses, reader.reading.retries) == ([1, 2, 3], 3)
        assert world.seeks == [start_ms + 5 - TOPIC.settings.reader_window_ms] * 4, "from where a copy may lie"
        await reader.tasks.stop()

    reading(work())


def test_a_block_is_compared_though_the_queue_says_once_that_nothing_is_so_young() -> None:
    """Then nothing was compared, and a block with other records under known sequences was dropped as a copy."""

    class LateSeeks(AskedWorld):
        async def seek_time(self, partition: ReadPartition, time_ms: int) -> int:
            await super().seek_time(partition, time_ms)
            return 1 if len(self.seeks) == 1 else 0

    async def work() -> None:
        log = Log()
        start_ms = 10 * TOPIC.settings.reader_window_ms
        log.batch(Block(1, 0), time_ms=start_ms)
        log.batch(Block(1, 0, more=b"!"), time_ms=start_ms + 5)
        world = LateSeeks(log)
        reader = Reader(world)
        assigned = reader.add(0)
        await reader.until(6)
        assert reader.got == expected(0, 1) * 2
        assert (len(world.seeks), assigned.cursor.counts.conflicting_blocks) == (2, 1)
        await reader.tasks.stop()

    reading(work())


def test_failures_to_fetch_are_counted_in_a_row_also_when_the_partition_stalls(pauses: list[int]) -> None:
    async def work() -> None:
        world = World(log_of(3))
        failures = STALL_FAILURES + 4
        world.errors = [StoreError("away")] * failures
        reader = Reader(world, budget=1)
        assigned = reader.add(0)
        await skip(STALL_FAILURES - 0.5)
        assert (assigned.stalled, reader.reading.retries) == (True, STALL_FAILURES)
        assert assigned.cursor.held_bytes == 0
        await skip(4.0)
        assert assigned.stalled
        changes = reader.changes
        await skip(1.0)
        assert (assigned.stalled, reader.reading.retries) == (False, failures)
        assert reader.changes > changes, "waiters are notified"
        assert pauses == list(range(1, failures + 1))
        await reader.until(9)
        assert reader.got == expected(0, 3)
        await reader.tasks.stop()

    reading(work())


def test_a_partition_that_stalled_fetches_ahead_again(pauses: list[int]) -> None:
    async def work() -> None:
        world = World(log_of(4))
        world.sick_producers = {1}
        reader = Reader(world)
        assigned = reader.add(0)
        await skip(STALL_FAILURES + 0.5)
        world.fetching_most = 0
        await skip(5.0)
        assert (assigned.stalled, world.fetching_most) == (True, 1)
        world.sick_producers.clear()
        await skip(2.0)
        assert world.fetched_count == 4, "without a delivery"
        await reader.until(12)
        assert reader.got == expected(0, 4)
        await reader.tasks.stop()

    reading(work())


def test_a_partition_that_goes_while_it_is_stalled_is_asked_for_nothing(pauses: list[int]) -> None:
    async def work() -> None:
        world = World(log_of(4))
        world.sick_producers = {1}
        reader = Reader(world)
        reader.add(0)
        await skip(STALL_FAILURES + 2.5)
        reader.reading.remove(partition_of(0))
        before = world.sick_fetches
        await skip(10.0)
        assert world.sick_fetches == before
        world.sick_producers.clear()
        assert not reader.add(0).stalled
        await reader.until(12)
        await reader.tasks.stop()

    reading(work())


def test_a_budget_is_used_to_its_last_byte() -> None:
    async def work() -> None:
        world = World(log_of(3))
        world.fetch_s = 1.0
        size = len(Block(1, 0).data())
        reader = Reader(world, budget=2 * size)
        reader.add(0)
        await skip(0.5)
        assert world.fetching == 2
        await reader.tasks.stop()

    reading(work())


def test_each_fetch_that_ends_makes_room_for_the_next() -> None:
    async def work() -> None:
        world = World(log_of(2 * FETCHES_MAX))
        world.fetch_s = 1.0
        reader = Reader(world)
        reader.add(0)
        await skip(2.5)
        assert world.fetched_count == 2 * FETCHES_MAX
        world.logs[0].batch(Block(1, 6 * FETCHES_MAX))
        world.news.set()
        await skip(0.5)
        assert world.fetching == 1
        await reader.tasks.stop()
        await skip(2.0)
        assert world.fetching == 0, "nothing is fetched after the end"

    reading(work())


def test_a_missing_object_is_logged_once_however_often_it_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        world = World(log_of(2))
        world.gone = {"o/0"}
        reader = Reader(world)
        reader.add(0, pass_damage=True)
        await skip(MISSING_S - 5.0)
        reader.deliver()
        assert reader.got == []
        await skip(10.0)
        await reader.until(3)
        assert reader.got == expected(0, 2)[3:]
        await reader.tasks.stop()

    with caplog.at_level(logging.WARNING):
        reading(work())
    (line,) = [record.getMessage() for record in caplog.records if "consumer.object-missing" in record.getMessage()]
    assert "topic 'clicks' at offset 0" in line


def test_a_consumer_that_stops_at_damage_says_not_that_it_asks_again(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        world = World(log_of(2))
        world.gone = {"o/0"}
        reader = Reader(world)
        reader.add(0, pass_damage=False)
        await skip(1.0)
        await reader.tasks.stop()

    with caplog.at_level(logging.WARNING):
        reading(work())
    assert "asking again" not in caplog.text


def test_blocks_that_differ_under_the_same_sequences_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        log = Log()
        log.batch(Block(1, 0))
        log.batch(Block(1, 0, more=b"!"))
        reader = Reader(World(log))
        reader.add(0)
        await reader.until(6)
        await reader.tasks.stop()

    with caplog.at_level(logging.ERROR):
        reading(work())
    (line,) = [record.getMessage() for record in caplog.records if "consumer.identity-conflict" in record.getMessage()]
    assert "topic 'clicks' at 0:1:0" in line


def test_a_copy_is_dropped_whose_like_lies_far_behind_another_block_of_its_sequences() -> None:
    async def work() -> None:
        log = Log()
        log.batch(Block(1, 0))
        for number in range(STEP_OFFSETS):
            log.batch(Block(1, 3 + 3 * number))
        log.batch(Block(1, 0, more=b"!"))
        log.batch(Block(1, 0))
        reader = Reader(World(log))
        reader.add(0)
        wanted = 3 * (STEP_OFFSETS + 2)
        await reader.until(wanted)
        await skip(5.0)
        reader.deliver()
        assert len(reader.got) == wanted
        await reader.tasks.stop()

    reading(work())


def test_a_delivery_of_whole_batches_stops_before_damage() -> None:
    async def work() -> None:
        world = World(log_of(2))
        world.gone = {"o/1"}
        reader = Reader(world)
        reader.add(0)
        await skip(1.0)
        first = reader.reading.deliver(whole=True)
        assert first is not None
        assert first[1].failure is None
        assert reader.reading.deliver(whole=True) is None
        damaged = reader.reading.deliver()
        assert damaged is not None
        assert damaged[1].failure is not None
        await reader.tasks.stop()

    reading(work())


class RecordingReader(ReadRecorder):
    """Notes what the audit gets."""

    def __init__(self) -> None:
        super().__init__(lambda writer: None, [0], commits=False)
        self.told: list[tuple[Any, ...]] = []

    def begin(self, at: Position, reason: BeginReason, before: ReadRecorder | None = None) -> None:
        self.told.append(("begin", at, reason, before is self))

    def drop_copies(self, copies: Iterable[Copy], now_ms: int) -> None:
        self.told.append(("copies", [(writer, header.first_sequence) for writer, header in copies], now_ms))


def test_the_audit_gets_the_copies_that_were_dropped() -> None:
    async def work() -> None:
        log = Log()
        log.batch(Block(1, 0))
        log.batch(Block(1, 0), Block(1, 3))
        reader = Reader(World(log))
        tally = RecordingReader()
        reader.add(0).observer = tally
        await skip(1.0)
        now_ms = reader.runtime.clock.wall_ms()
        assert reader.deliver(1) == 1
        assert tally.told == []
        await reader.until(6)
        assert [each[:2] for each in tally.told] == [("copies", [(0, 0)])]
        assert now_ms <= tally.told[0][2] <= now_ms + 1_100
        await reader.tasks.stop()

    reading(work())


def test_the_audit_learns_where_reading_begins_when_retention_was_faster() -> None:
    async def work() -> None:
        world = World(log_of(4))
        del world.logs[0].entries[:2]
        reader = Reader(world)
        tally = RecordingReader()
        reader.add(0).observer = tally
        await reader.until(6)
        assert reader.got == expected(0, 4)[6:]
        assert tally.told == [("begin", Position(0, 2), "start", True)]
        await reader.tasks.stop()

    reading(work())
