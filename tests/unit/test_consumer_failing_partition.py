"""A log or a store that fails for one partition of a consumer: the others are read meanwhile."""

from __future__ import annotations

import pytest

from memq.client.consumer.fetch.fetch_scheduler import FETCHES_MAX
from memq.errors import DeniedError, QueueError
from memq.notification.remote import Polled
from memq.topic import ReadPartition
from tests.skipping_loop import skip
from tests.unit.consumer_world import Reader, World, expected, log_of, partition_of, reading
from tests.unit.queue_model import Block


@pytest.mark.parametrize("passes", [True, False])
def test_a_log_that_fails_delays_no_other(passes: bool) -> None:
    async def work() -> None:
        world = World(log_of(2, 1), log_of(2, 2))
        world.sick[0] = QueueError("no leader") if passes else DeniedError("not you")
        reader = Reader(world)
        reader.add(0)
        reader.add(1)
        assert await reader.until(6) < 0.1
        assert [number for number, _ in reader.got] == [1] * 6
        assert reader.reading.failure is (None if passes else world.sick[0])
        await skip(20)
        alone = [offsets for offsets in world.polls if partition_of(0) in offsets][1:]
        assert all(list(offsets) == [partition_of(0)] for offsets in alone), "it is polled apart"
        assert 10 < len(alone) < 40, "and later and later"
        assert reader.reading.retries == len(alone) + 1
        for number in range(2, 5):
            world.logs[1].batch(Block(2, 3 * number))
            world.news.set()
            assert await reader.until(3 * number + 3) < 0.1, "the long poll of the others waits for none"
        del world.sick[0]
        assert await reader.until(21) < 2.5
        world.logs[0].batch(Block(1, 6))
        world.news.set()
        assert await reader.until(24) < 0.1, "it is polled with the others again"
        assert set(world.polls[-1]) == {partition_of(0), partition_of(1)}
        await reader.tasks.stop()

    reading(work())


def test_an_answer_that_passes_over_entries_is_asked_for_again_apart() -> None:
    async def work() -> None:
        world = World(log_of(2, 1), log_of(2, 2))
        reader = Reader(world)
        reader.add(0)
        reader.add(1)
        world.skips = {0}
        assert await reader.until(12) < 0.2
        assert sorted(reader.got) == expected(0, 2) + expected(1, 2)
        assert reader.reading.retries == 0
        await reader.tasks.stop()

    reading(work())


def test_a_partition_that_goes_while_its_log_fails_is_not_polled_any_more() -> None:
    async def work() -> None:
        world = World(log_of(2, 1), log_of(2, 2))
        world.sick[0] = QueueError("no leader")
        reader = Reader(world)
        reader.add(0)
        reader.add(1)
        await reader.until(6)
        reader.reading.remove(partition_of(0))
        await skip(3)
        asked = len(world.polls)
        await skip(20)
        assert all(partition_of(0) not in offsets for offsets in world.polls[asked:])
        world.sick.clear()
        reader.add(0)
        assert await reader.until(12) < 0.1
        await reader.tasks.stop()

    reading(work())


def test_an_answer_without_a_sick_partition_does_not_make_polls_spin() -> None:
    async def work() -> None:
        world = World(log_of(1, 1), log_of(1, 2))
        world.sick[0] = QueueError("no leader")
        reader = Reader(world)
        reader.add(0)
        reader.add(1)
        await reader.until(3)
        answered = world.poll

        async def left_out(
            offsets: dict[ReadPartition, int],
            wait_ms: int = 0,
            bytes_max: int = 0,
            blocks_bytes_max: int = 0,
            tag_bits: int = 0,
        ) -> list[Polled]:
            found = await answered(offsets, wait_ms, bytes_max)
            return [polled for polled in found if polled.partition != partition_of(0)]

        world.poll = left_out  # type: ignore[method-assign]  # an answer that lacks a partition
        asked = len(world.polls)
        await skip(20)
        assert len(world.polls) - asked < 60
        await reader.tasks.stop()

    reading(work())


def test_a_batch_that_can_not_be_fetched_leaves_the_room_to_other_partitions() -> None:
    async def work() -> None:
        world = World(log_of(3 * FETCHES_MAX, 1), log_of(40, 2))
        size = len(Block(1, 0).data())
        world.sick_producers = {1}
        reader = Reader(world, budget=4 * size)
        sick = reader.add(0)
        await skip(0.1)
        reader.add(1)
        assert await reader.until(120) < 3.0
        assert [number for number, _ in reader.got] == [1] * 120
        before = world.sick_fetches
        await skip(20)
        assert 10 < world.sick_fetches - before < 40, "one batch is asked for, later and later"
        assert sick.cursor.held_bytes <= size + 10
        world.sick_producers.clear()
        await reader.until(120 + 9 * FETCHES_MAX)
        assert reader.got[120:] == expected(0, 3 * FETCHES_MAX)
        await reader.tasks.stop()

    reading(work())


def test_a_store_that_hangs_for_one_partition_leaves_the_room_to_others() -> None:
    async def work() -> None:
        world = World(log_of(3 * FETCHES_MAX, 1), log_of(40, 2))
        size = len(Block(1, 0).data())
        world.hanging_producers = {1}
        reader = Reader(world, budget=4 * size)
        sick = reader.add(0)
        await skip(0.1)
        reader.add(1)
        assert 4.0 < await reader.until(120) < 8.0
        assert [number for number, _ in reader.got] == [1] * 120
        assert world.fetching == 3, "no more than it had room for"
        assert sick.cursor.held_bytes <= 4 * size + 40
        world.hanging_producers.clear()
        world.healed.set()
        await reader.until(120 + 9 * FETCHES_MAX)
        assert reader.got[120:] == expected(0, 3 * FETCHES_MAX)
        assert sick.fetches == 0
        await reader.tasks.stop()

    reading(work())


def test_a_batch_that_hangs_and_is_larger_than_the_room_leaves_all_of_it_to_others() -> None:
    """What it took beyond the room was counted against the others: they got nothing until it came."""

    async def work() -> None:
        world = World(log_of(2, 1), log_of(10, 2))
        size = len(Block(1, 0).data())
        world.hanging_producers = {1}
        reader = Reader(world, budget=size // 2)
        reader.add(0)
        await skip(0.1)
        reader.add(1)
        assert 4.0 < await reader.until(30) < 8.0
        assert [number for number, _ in reader.got] == [1] * 30
        assert world.fetching == 1
        await reader.tasks.stop()

    reading(work())


def test_partitions_that_hang_with_batches_larger_than_the_room_hold_two_at_most() -> None:
    async def work() -> None:
        world = World(*(log_of(3, producer) for producer in range(1, 5)))
        size = len(Block(1, 0).data())
        world.hanging_producers = set(range(1, 5))
        reader = Reader(world, budget=size // 2)
        for number in range(4):
            reader.add(number)
        await skip(60)
        assert [assigned.fetches for assigned in reader.reading.assigned.values()] == [1, 1, 0, 0]
        assert world.fetching == 2
        await reader.tasks.stop()

    reading(work())


def test_many_partitions_whose_store_hangs_hold_twice_the_room_at_most() -> None:
    async def work() -> None:
        logs = [log_of(20, producer) for producer in range(1, 7)]
        size = len(Block(1, 0).data())
        world = World(*logs)
        world.hanging_producers = set(range(1, 7))
        reader = Reader(world, budget=4 * size)
        for number in range(6):
            reader.add(number)
        await skip(60)
        held = sum(assigned.cursor.held_bytes for assigned in reader.reading.assigned.values())
        assert 4 * size < held <= 9 * size
        assert world.fetching <= 9
        await reader.tasks.stop()

    reading(work())


def test_a_stalled_partition_that_is_paused_asks_for_nothing() -> None:
    async def work() -> None:
        world = World(log_of(4, 1))
        world.sick_producers = {1}
        reader = Reader(world)
        assigned = reader.add(0)
        await skip(10)
        held = [assigned.stalled]
        reader.reading.pause(partition_of(0), paused=True)
        await skip(5)
        before = world.sick_fetches
        await skip(20)
        assert world.sick_fetches == before
        world.sick_producers.clear()
        reader.reading.pause(partition_of(0), paused=False)
        await reader.until(12)
        assert reader.got == expected(0, 4)
        held.append(assigned.stalled)
        assert held == [True, False]
        await reader.tasks.stop()

    reading(work())
